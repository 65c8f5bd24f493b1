"""The dictionary between operations and objectives, exact at a finite G.

The expected update of a rule is c_G(p)·∇p whatever the policy, so that what it
ascends is F_G(p) = ∫₀^p c_G. For an operation that weighs a group with k of G
right by w(k), both are Bernstein polynomials of its own weights:

  c_G(p) = (G − 1)/G · E[w(j + 1)],       j ~ Binomial(G − 2, p)
  F_G(p) = 1/G · E[w(1) + … + w(j)],      j ~ Binomial(G − 1, p)

each pair of a right and a wrong answer pulls with the weight that w has at what
the other G − 2 answers say. So every objective that is a polynomial in p of
degree G − 1 or less is ascended, without bias, by exactly one w:

  Dr. GRPO            F = (G − 1)/G · p; GRPO at G = 2, 3 up to a constant
  pass_at(m)          F = 1 − (1 − p)^m, for m < G         (arXiv:2505.15201)
  max_rl()            F = Σ_{m<G} (1 − (1 − p)^m)/m = E[H_j]
                          → log p + H_{G−1}                (arXiv:2602.02710)
  divide()            F → 2 arcsin √p, but c_G ≤ √(G − 1)  (arXiv:2607.00152)
  divide(power=2)     F → log(p/(1 − p)) + constant

>>> ps = np.array([0.1, 0.5])
>>> print(objective(sigma.rule(sigma.pass_at(4)), ps, 8), 1 - (1 - ps)**4)
[0.3439 0.9375] [0.3439 0.9375]

`weights_for` reads the dictionary the other way. Conditions and conventions are
those of `groupstd.theory`: independent answers from the current policy, rewards
0 or 1, the score of the whole answer; float64 whatever jax's default.
"""

from collections.abc import Callable
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats

from groupstd import sigma, theory
from groupstd.theory import Array, ArrayLike

__all__ = [
  "Fit",
  "Scores",
  "kept_share",
  "objective",
  "redrawn_weight",
  "replaced_weight",
  "signal_to_noise",
  "update_variance",
  "weights_for",
]

# An error that is rounding: no fit is better.
_EXACT = 1e-10
# Where the wanted weight is a smaller part of its largest value, its relative
# error is of that part: it may be 0.
_FLOOR = 1e-3
# How many times denser are the points at which a fit is judged.
_FINER = 8


class Fit(NamedTuple):
  """Weights that realise an objective weight, and how well.

  Attributes:
    weights: [G − 1], w(k) for k = 1, …, G − 1: what `sigma.table` takes.
    error: the largest relative error of their c_G on the interval.
  """

  weights: np.ndarray
  error: float


class Scores(NamedTuple):
  """What an update's size and spread need of the scores ∇log π; each [...].

  The Bernoulli policy's by default, where every right answer is the same.

  Attributes:
    contrast: ‖E[s | right] − E[s | wrong]‖ = ‖∇p‖/(p(1 − p)).
    right: tr Cov[s | right], the spread of a right answer's score.
    wrong: tr Cov[s | wrong].
  """

  contrast: ArrayLike = 1.0
  right: ArrayLike = 0.0
  wrong: ArrayLike = 0.0


_BERNOULLI = Scores()


@theory.in_double
def objective(rule: sigma.Rule, p: ArrayLike, group_size: int) -> Array:
  """F_G(p) = ∫₀^p c_G = 1/G · E[Σ_{j<k} A₊(j + 1) − A₋(j)], k ~ Bin(G, p).

  `rule` is any rule as in `theory.advantages`; A₊ and A₋ need not balance.

  >>> rule = sigma.rule(sigma.dr_grpo())
  >>> print(objective(rule, [0.0, 0.5, 1.0], 4))  # (1 − 1/G)p
  [0.    0.375 0.75 ]
  """
  a_plus, a_minus, keep = theory.advantages(rule, group_size)
  a_plus, a_minus = jnp.where(keep, a_plus, 0), jnp.where(keep, a_minus, 0)
  swings = jnp.pad(a_plus[1:] - a_minus[:-1], (1, 0))
  pmf = theory.binomial(p, group_size)
  return jnp.sum(pmf * jnp.cumsum(swings), axis=-1) / group_size


def weights_for(
  weight: Callable[[np.ndarray], ArrayLike],
  group_size: int,
  *,
  interval: tuple[float, float] = (0.0, 1.0),
  nonnegative: bool = False,
) -> Fit:
  """The w whose c_G is the wanted one, or the nearest to it.

  Exact, up to rounding, for a polynomial in p of degree G − 2 or less; for any
  other weight, of the least largest relative error |c_G − c|/|c| on the
  interval; where |c| is less than a thousandth of its maximum, that thousandth
  stands for it, so that c may have zeros. The larger G or the shorter the
  interval, the less the rounding of c leaves certain of single weights; their
  c_G does not feel it. A fit free in sign may buy its last digits with weights
  that alternate, and so with noise: see `signal_to_noise`.

  Args:
    weight: c, from p [n], in float64, to [n] or a constant: the slope of the
      objective that is wanted.
    group_size: G.
    interval: the p that matter; c must be finite on it, ends included.
    nonnegative: whether no group may be weighed below 0.

  Raises:
    ValueError: if a number is out of its range, or c not finite or all 0.

  >>> fit = weights_for(lambda p: 4 * (1 - p)**3, 8)  # pass@4
  >>> print(fit.weights.round(3) + 0.0)
  [4.571 2.286 0.914 0.229 0.    0.    0.   ]
  """
  low, high = interval
  if not 0 <= low < high <= 1:
    raise ValueError(
      f"`interval` must be (low, high) with 0 ≤ low < high ≤ 1, got {interval}."
    )
  size = theory.check_group_size(group_size)
  angles = np.linspace(0, np.pi, _FINER * 16 * size + 1)
  p = low + (high - low) * np.sin(angles / 2) ** 2  # Chebyshev points
  with jax.enable_x64(True):
    wanted = np.broadcast_to(np.asarray(weight(p), float), p.shape)
  largest = np.max(np.abs(wanted))
  if not 0 < largest < np.inf:
    raise ValueError(
      "`weight` must be finite on the interval and somewhere not 0, got"
      f" {largest} for the largest: no relative error can be taken of it."
    )
  pmf = stats.binom.pmf(np.arange(size - 1), size - 2, p[:, None])
  scale = np.maximum(np.abs(wanted), _FLOOR * largest)
  basis, wanted = (size - 1) / size * pmf / scale[:, None], wanted / scale

  def fit(weights: np.ndarray) -> Fit:
    if nonnegative:
      weights = np.maximum(weights, 0)
    return Fit(weights, float(np.max(np.abs(basis @ weights - wanted))))

  some, some_wanted = basis[::_FINER], wanted[::_FINER]
  nothing = fit(np.zeros(size - 1))
  squares = min(
    nothing, fit(np.linalg.lstsq(some, some_wanted)[0]), key=lambda x: x.error
  )
  if squares.error < _EXACT:
    return squares
  # Least t with |basis·(w + e·x) − wanted| ≤ e·t, a linear program in (x, t):
  # about the squares' w and in units of their error e, which keeps its digits.
  start, unit = squares
  residual = (some_wanted - some @ start) / unit
  slack = np.ones((residual.size, 1))
  lowest = -start / unit if nonnegative else np.full(size - 1, -np.inf)
  result = optimize.linprog(
    [0.0] * (size - 1) + [1.0],
    A_ub=np.block([[some, -slack], [-some, -slack]]),
    b_ub=np.concatenate([residual, -residual]),
    bounds=[*((bound, None) for bound in lowest), (0, None)],
  )
  if result.x is None:  # Beyond the solver's digits, at a large G.
    return squares
  best = fit(start + unit * result.x[:-1])
  return min(squares, best, key=lambda x: x.error)


@theory.in_double
def kept_share(p: ArrayLike, group_size: int) -> Array:
  """1 − s: how often a group is mixed, which is what dynamic sampling keeps.

  >>> print(kept_share([0.0, 0.05, 0.5], 8).round(4))
  [0.     0.3366 0.9922]
  """
  # Summed: 1 − s would have no digits near p = 0 and 1.
  return jnp.sum(theory.binomial(p, group_size)[..., 1:-1], axis=-1)


@theory.in_double
def redrawn_weight(
  op: sigma.SigmaOp, p: ArrayLike, group_size: int, max_draws: float
) -> Array:
  """c_G(p)·(1 − s^N)/(1 − s): a silent group is drawn again from its prompt.

  Up to N = `max_draws` draws in all, `math.inf` until one is mixed.
  Another objective than `op`'s own, at most N times as steep, and most so at
  the ends; with N = ∞ DAPO's is within a factor 1.42 of the logit
  objective's at G = 8. One step of a prompt costs G·`expected_draws` rollouts.

  >>> print(redrawn_weight(sigma.dapo(), [0.0, 0.5], 8, max_draws=4).round(2))
  [10.58  1.87]
  """
  weight = theory.objective_weight(sigma.rule(op), p, group_size)
  return weight * theory.expected_draws(p, group_size, max_draws)


@theory.in_double
def replaced_weight(
  op: sigma.SigmaOp,
  p: ArrayLike,
  group_size: int,
  weights: ArrayLike | None = None,
) -> Array:
  """c_G(p)/E_p[1 − s]: a silent group gives way to another prompt's.

  Of a batch filled with mixed groups, as DAPO publishes it (arXiv:2503.14476):
  the objective is `op`'s own, at one common factor for all prompts, which is
  also what a kept group costs: G/E_p[1 − s] rollouts.

  Args:
    op: the operation.
    p: [n], the prompts that are drawn from.
    group_size: G.
    weights: [n], how many prompts each p stands for; one by default.

  >>> ps = [0.05, 0.5]
  >>> own = theory.objective_weight(sigma.rule(sigma.dapo()), ps, 8)
  >>> print((replaced_weight(sigma.dapo(), ps, 8) / own).round(3))
  [1.505 1.505]
  """
  weight = theory.objective_weight(sigma.rule(op), p, group_size)
  share = jnp.asarray(kept_share(p, group_size))
  counts = jnp.ones_like(share) if weights is None else jnp.asarray(weights)
  return weight * jnp.sum(counts) / jnp.sum(counts * share)


@theory.in_double
def update_variance(
  op: sigma.SigmaOp,
  p: ArrayLike,
  group_size: int,
  max_draws: float = 1,
  *,
  scores: Scores = _BERNOULLI,
) -> Array:
  """tr Cov[g] = d²·Var[σ²w] + E[(σ²w)²(v₊/k + v₋/(G − k))], of one update.

  d, v₊ and v₋ are the scores' contrast and spreads; the Bernoulli policy has
  the first term only. `max_draws` as in `theory.expected_update`: k is that of
  the last group drawn. NaN where p is 0 or 1 and N infinite.

  Args:
    op: the operation.
    p: success probabilities, [...].
    group_size: G.
    max_draws: N, the draws a prompt may have.
    scores: of the policy, against p.

  >>> print(update_variance(sigma.grpo(), [0.05, 0.5], 8).round(4))
  [0.0278 0.0035]
  """
  gains = jnp.asarray(theory.gain(op, group_size))
  draws = jnp.asarray(theory.expected_draws(p, group_size, max_draws))
  # Of the last group: every mixed k as often as it is drawn, or else silent.
  mixed = theory.binomial(p, group_size)[..., 1:-1] * draws[..., None]
  silent = 0.0
  if max_draws != math.inf:
    silent = theory.silent_rate(p, group_size) ** max_draws
  mean = jnp.sum(mixed * gains[1:-1], axis=-1)
  between = jnp.sum(mixed * (gains[1:-1] - mean[..., None]) ** 2, axis=-1)
  k = jnp.arange(1, group_size)
  right = jnp.sum(mixed * gains[1:-1] ** 2 / k, axis=-1)
  wrong = jnp.sum(mixed * gains[1:-1] ** 2 / (group_size - k), axis=-1)
  within = right * jnp.asarray(scores.right) + wrong * jnp.asarray(scores.wrong)
  between = between + silent * mean**2
  return jnp.asarray(scores.contrast) ** 2 * between + within


@theory.in_double
def signal_to_noise(
  op: sigma.SigmaOp,
  p: ArrayLike,
  group_size: int,
  max_draws: float = 1,
  *,
  scores: Scores = _BERNOULLI,
) -> Array:
  """‖E[g]‖/√(tr Cov[g] · rollouts drawn): signal to noise per √rollout.

  The fair way to compare operations: neither a factor on w, which is a step
  size, nor how many groups are averaged changes it. Rollouts are G times
  `theory.expected_draws`; that this cost varies is not counted as noise. 0
  where the update is always 0, infinite where it never varies. Arguments of
  `update_variance`.

  >>> print(signal_to_noise(sigma.grpo(), 0.05, 8).round(3))
  0.249
  >>> print(signal_to_noise(sigma.dapo(), 0.05, 8, max_draws=4).round(3))
  0.45
  """
  mean = theory.expected_update(op, p, group_size, max_draws)
  mean = jnp.abs(mean) * jnp.asarray(scores.contrast)
  variance = update_variance(op, p, group_size, max_draws, scores=scores)
  rollouts = group_size * theory.expected_draws(p, group_size, max_draws)
  # Selected first: √ has an infinite slope at 0.
  still = mean == 0
  noise = jnp.sqrt(jnp.where(still, 1, variance * rollouts))
  return mean / noise
