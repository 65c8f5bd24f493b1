"""What a σ-operation will do, exactly and at a finite group size.

A prompt of success probability p draws G right-or-wrong answers, so only
G + 1 groups can occur. Everything here evaluates the very rule that trains on
those groups and sums over the binomial: a new operation gets its update, its
objective and its required group size with no new formula.

>>> for op in sigma.grpo(), sigma.dr_grpo():
...   print(expected_update(op, [0.05, 0.5], 8).round(3))
[0.117 0.464]
[0.042 0.219]

Conditions: answers independent and from the current policy, rewards 0 or 1,
the score ∇ log π of the whole answer. An *update* is that of the Bernoulli
policy p = sigmoid θ (Δs = 1, ∇p = p(1 − p)), a prompt's gradient mass;
`objective_weight` holds for any policy. (arXiv:2607.00152.)

Throughout, p is a success probability or an array of them, [...], and
`group_size` is G, a whole number of at least 2; anything else is a ValueError.
Everything is float64 whatever jax's default: concrete results are numpy arrays,
since a float64 jax array would round to float32 at its next use outside
`jax.enable_x64`; what is traced stays traced, differentiable in p and in the
operation's parameters, to the digits of the dtype it is traced in.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import ParamSpec, TypeVar

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from groupstd import sigma

Array = jax.Array | np.ndarray
ArrayLike = Array | Sequence[float] | float

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

# A size for the large-G limit: G − 1 is still exact, and G/(G − 1) is 1.
_LARGE = 2.0**53
# Binomial terms one step of the group-size search may hold: 32 MB.
_SEARCH_TERMS = 2**22
# A fidelity this near the asked one is a tie: more than `binomial`'s error,
# less than one more rollout changes.
_TIE = 1e-9


def in_double(f: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
  """Runs in float64, and hands over what stays float64."""

  @functools.wraps(f)
  def wrapped(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
    with jax.enable_x64(True):
      return jax.tree.map(_settle, f(*args, **kwargs))

  return wrapped


def _settle(x: Array) -> Array:
  """numpy's array, unless traced; numpy's slices also need no compilation."""
  return x if isinstance(x, Tracer) else np.asarray(x)


@in_double
def binomial(p: ArrayLike, group_size: int) -> Array:
  """P(k) = C(G, k) p^k (1 − p)^(G−k) for k = 0, …, G: [..., G + 1].

  The relative error is below 1e-13 at G ≤ 64 and 2e-11 at G ≤ 4096; p = 0 and
  1 are exact, and so are the derivatives there.

  >>> print(binomial(0.5, 4))
  [0.0625 0.25   0.375  0.25   0.0625]
  """
  p, size = _probability(p), check_group_size(group_size)
  return _settle(_pmf(_counts(size), size, p[..., None]))[..., : size + 1]


@in_double
def silent_rate(p: ArrayLike, group_size: int) -> Array:
  """s = p^G + (1 − p)^G: how often all G answers are right, or all wrong.

  >>> print(silent_rate([0.05, 0.5], 8).round(4))
  [0.6634 0.0078]
  """
  p, size = _probability(p), check_group_size(group_size)
  return p**size + (1 - p) ** size


@in_double
def expected_draws(p: ArrayLike, group_size: int, max_draws: float) -> Array:
  """Σ_{i<N} s^i = (1 − s^N)/(1 − s): groups drawn when silence is redrawn.

  `max_draws` is N ≥ 1, the draws a prompt may have in all, and so the mean
  where every group is silent. `math.inf` draws until one is not: at p = 0 and
  1 for ever.

  >>> print(expected_draws([0.0, 0.05, 0.5], 8, max_draws=4).round(3))
  [4.    2.396 1.008]
  """
  if max_draws == math.inf:
    # Summed, not 1 − s: near p = 0 and 1 the difference would have no digits.
    return 1 / jnp.sum(binomial(p, group_size)[..., 1:-1], axis=-1)
  if not (max_draws >= 1 and max_draws % 1 == 0):
    raise ValueError(
      "`max_draws` must be a whole number of at least 1 or inf, got"
      f" {max_draws!r}: the first draw is counted."
    )
  silent = jnp.asarray(silent_rate(p, group_size))
  return jnp.sum(silent[..., None] ** jnp.arange(int(max_draws)), axis=-1)


@in_double
def advantages(rule: sigma.Rule, group_size: int) -> tuple[Array, Array, Array]:
  """(A₊, A₋, keep) of the groups with k = 0, …, G right: [G + 1] each.

  Args:
    rule: any rule that looks at one group at a time and reads `where` as
      counts, as `sigma.rule` does: a group is passed as the rewards 1 and 0,
      occurring k and G − k times.
    group_size: G.

  Returns:
    The advantage of a right answer, that of a wrong one, and whether the group
    is kept. A₊(0) and A₋(G) belong to no answer.

  >>> a_plus, a_minus, _ = advantages(sigma.rule(sigma.grpo()), 5)
  >>> print(a_plus.round(2))  # √((G − k)/k)
  [0.   2.   1.22 0.82 0.5  0.  ]
  >>> print(a_minus.round(2))  # −√(k/(G − k))
  [ 0.   -0.5  -0.82 -1.22 -2.    0.  ]
  """
  size = check_group_size(group_size)
  a_plus, a_minus, keep = _advantages(rule, size, size)
  return a_plus[: size + 1], a_minus[: size + 1], keep[: size + 1]


@in_double
def gain(op: sigma.SigmaOp, group_size: int) -> Array:
  """σ²·w by k = 0, …, G, the update (1/G)ΣA_i s_i per unit of contrast Δs.

  [G + 1]; 0 for a silent group, and for a dropped one, which moves nothing.

  >>> print(gain(sigma.grpo(), 4).round(3))  # √(k(G − k))/G
  [0.    0.433 0.5   0.433 0.   ]
  """
  a_plus, _, keep = advantages(sigma.rule(op), group_size)
  mean = np.arange(group_size + 1) / group_size
  # A₊ = w·(1 − μ), and σ² = μ(1 − μ).
  return jnp.where(keep, mean * a_plus, 0)


@in_double
def expected_update(
  op: sigma.SigmaOp, p: ArrayLike, group_size: int, max_draws: float = 1
) -> Array:
  """E[g] = E[σ²w]·(1 − s^N)/(1 − s), k ~ Binomial(G, p).

  `max_draws` is N, as in `expected_draws`: DAPO's dynamic sampling, when it
  redraws the same prompt. Masking alone is N = 1, as it changes the batch's
  denominator and not a prompt's update. NaN where p is 0 or 1 and N infinite:
  the prompt never gets a group.

  >>> print(expected_update(sigma.dapo(), 0.05, 8, max_draws=4).round(3))
  0.281
  """
  gains = binomial(p, group_size) * gain(op, group_size)
  return jnp.sum(gains, axis=-1) * expected_draws(p, group_size, max_draws)


@in_double
def objective_weight(rule: sigma.Rule, p: ArrayLike, group_size: int) -> Array:
  """c_G(p) = E[A₊(j + 1) − A₋(j)], j ~ Binomial(G − 1, p).

  For any rule and any policy the expected update is c_G(p)·∇p, as
  E[s | R = 1] = ∇p/p and E[s | R = 0] = −∇p/(1 − p). It is what one answer
  gains by being right rather than wrong, given the G − 1 others; nothing is
  divided by p, so the ends are exact.

  `rule` is any rule as in `advantages`; A₊ and A₋ need not balance.

  >>> rule = sigma.rule(sigma.grpo())
  >>> print(objective_weight(rule, [0.0, 0.5], 5).round(3))  # √(G − 1) at 0
  [2.    1.725]
  """
  p, size = _probability(p), check_group_size(group_size)
  return _objective_weight(rule, p, size, size)


@in_double
def difficulty_weight(op: sigma.SigmaOp, p: ArrayLike) -> Array:
  """w(p), the operation at μ = p, σ = √(p(1 − p)) in a group without end.

  The slope of the large-G objective: 1/√(p(1 − p)) for GRPO, whose objective
  is 2 arcsin √p. At p = 0 and 1 it is what the operation's math is at σ = 0.
  An operation that knows one group size only, `sigma.table`, has none: NaN.

  >>> print(difficulty_weight(sigma.grpo(), [0.05, 0.5]).round(2))
  [4.59 2.  ]
  """
  p = _probability(p)
  weight = op(
    sigma.GroupStats(
      mean=p,
      std=jnp.sqrt(p * (1 - p)),
      size=jnp.full_like(p, _LARGE),
      silent=jnp.zeros(p.shape, bool),
    )
  )
  return jnp.broadcast_to(jnp.where(weight.keep, weight.scale, 0), p.shape)


@in_double
def limit_update(op: sigma.SigmaOp, p: ArrayLike) -> Array:
  """p(1 − p)·w(p), what `expected_update` tends to as G grows.

  >>> print(limit_update(sigma.grpo(), 0.5))
  0.5
  """
  p = _probability(p)
  # Any weight will do where p(1 − p) = 0, but for an infinite one.
  weight = difficulty_weight(op, jnp.where((p > 0) & (p < 1), p, 0.5))
  return p * (1 - p) * weight


@in_double
def fidelity(op: sigma.SigmaOp, p: ArrayLike, group_size: int) -> Array:
  """φ = c_G(p)/w(p): the expected update over its large-G limit.

  >>> print(fidelity(sigma.grpo(), [0.05, 0.5], 8).round(4))
  [0.539  0.9278]
  """
  # Their common factor p(1 − p) is left out, so that φ has its limit at 0, 1.
  finite = objective_weight(sigma.rule(op), p, group_size)
  return jnp.divide(finite, difficulty_weight(op, p))


@in_double
def required_group_size(
  op: sigma.SigmaOp, p: ArrayLike, fidelity: float, max_group_size: int = 4096
) -> Array:
  """The smallest G ≥ 2 whose fidelity is at least the one asked for.

  Every size is looked at in turn, so nothing is assumed of how fidelity grows;
  1e-9 below the one asked for counts as reached. Not to be traced. A
  ValueError if no size up to `max_group_size` will do.

  >>> print(required_group_size(sigma.grpo(), [0.05, 0.5], 0.9))
  [42  7]
  """
  _check_fraction("fidelity", fidelity)
  largest = check_group_size(max_group_size, "max_group_size")
  shape, p = np.shape(p), np.ravel(_probability(p))
  limit = np.asarray(difficulty_weight(op, p))[:, None]
  rule, found, low = sigma.rule(op), np.zeros(p.size, int), 2
  while low <= largest and not found.all():
    # Few rounds of many sizes, each of one shape, since each shape compiles.
    high = min(max(64, 16 * (low - 1)), largest)
    todo = np.flatnonzero(found == 0)
    step = min(high - low + 1, max(1, _SEARCH_TERMS // (todo.size * high)))
    while low <= high and not found.all():
      sizes = np.minimum(low + np.arange(step), high)
      weight = _objective_weight(rule, p[todo, None], sizes, high)
      reached = np.asarray(weight / limit[todo]) >= fidelity - _TIE
      first = np.where(reached.any(-1), sizes[reached.argmax(-1)], 0)
      found[todo] = np.where(found[todo] == 0, first, found[todo])
      low += step
    low = high + 1
  if not found.all():
    raise ValueError(
      f"`max_group_size` must be more than {largest}, if any size will do at p"
      f" = {p[found == 0][0]:g}: fidelity stays below {fidelity:g}."
    )
  return found.reshape(shape)


@in_double
def attenuation(p: ArrayLike, group_size: int) -> Array:
  """φ ≈ 1 − 1/(8Gp(1 − p)), GRPO's fidelity to first order in 1/G.

  For GRPO only, and poor near p = 0 and 1, where `fidelity` is to be used.

  >>> print(attenuation(0.05, 8).round(2))  # exactly 0.54
  0.67
  """
  p = _probability(p)
  return 1 - 1 / (8 * check_group_size(group_size) * p * (1 - p))


@in_double
def group_size_law(p: ArrayLike, shortfall: float) -> Array:
  """G* ≈ 1/(8εp(1 − p)) = w(p)²/(8ε), where `attenuation` is 1 − ε.

  For GRPO only, not rounded, and too small near p = 0 and 1, where
  `required_group_size` is to be used.

  >>> print(group_size_law([0.05, 0.5], 0.1).round(1))  # exactly 42 and 7
  [26.3  5. ]
  """
  _check_fraction("shortfall", shortfall)
  p = _probability(p)
  return 1 / (8 * shortfall * p * (1 - p))


@in_double
def mass_share(mass: ArrayLike, weights: ArrayLike, select: ArrayLike) -> Array:
  """Σ_{select} weights·mass / Σ weights·mass, the share of a part.

  Of n kinds of prompt, `mass` [n] is one prompt's (an update at its p, say),
  `weights` [n] how many there are, and `select` [..., n] which are in the part,
  or in each of several parts.

  >>> p = np.array([0.1, 0.5])
  >>> print(mass_share(p * (1 - p), [300, 100], p < 0.2).round(2))
  0.52
  """
  total = jnp.asarray(mass, float) * jnp.asarray(weights, float)
  part = jnp.where(jnp.asarray(select, bool), total, 0)
  return jnp.sum(part, axis=-1) / jnp.sum(total)


@jax.custom_jvp
@jax.jit
def _pmf(k: Array, n: Array | int, p: jax.Array) -> jax.Array:
  """C(n, k) p^k (1 − p)^(n−k), 0 unless 0 ≤ k ≤ n; arguments broadcast."""
  return jax.scipy.stats.binom.pmf(k, n, p)


@_pmf.defjvp
def _pmf_jvp(primals, tangents):
  # n(P_{n−1}(k − 1) − P_{n−1}(k)); through log p it would be NaN at p = 0.
  k, n, p = primals
  slope = n * (_pmf(k - 1, n - 1, p) - _pmf(k, n - 1, p))
  return _pmf(k, n, p), slope * tangents[2]


def _counts(size: int) -> np.ndarray:
  """k = 0, …, size, and on to a power of two, so that few shapes are compiled.

  Where k > G the binomial is 0 and a group counts as all right.
  """
  return np.arange(max(8, 1 << (size - 1).bit_length()) + 1)


def _advantages(
  rule: sigma.Rule, sizes: int | np.ndarray, width: int
) -> tuple[Array, Array, Array]:
  """(A₊, A₋, keep) of groups with k = 0, …, width (or more) right of sizes."""
  right = _counts(max(64, width))
  wrong = np.maximum(np.expand_dims(sizes, -1) - right, 0)  # [..., K]
  where = np.stack([np.broadcast_to(right, wrong.shape), wrong], axis=-1)
  rewards = jnp.broadcast_to(jnp.array([1.0, 0.0]), where.shape)
  both, keep = rule(rewards, jnp.asarray(where, float))
  both = _settle(both)
  return both[..., 0], both[..., 1], _settle(keep)


def _objective_weight(
  rule: sigma.Rule, p: Array, sizes: int | np.ndarray, width: int
) -> jax.Array:
  """c_G(p) for G = sizes, broadcast against p; no size is above `width`."""
  a_plus, a_minus, keep = _advantages(rule, sizes, width)
  a_plus, a_minus = jnp.where(keep, a_plus, 0), jnp.where(keep, a_minus, 0)
  swing = _settle(a_plus[..., 1:] - a_minus[..., :-1])
  others = _counts(width)[:-1]
  pmf = _pmf(others, np.expand_dims(sizes, -1) - 1, jnp.asarray(p)[..., None])
  return jnp.sum(pmf * swing[..., : others.size], axis=-1)


def _probability(p: ArrayLike) -> jax.Array:
  """p in double precision, checked where its value is known."""
  if not isinstance(p, Tracer):
    values = np.asarray(p, float)
    wrong = values[~((values >= 0) & (values <= 1))]
    if wrong.size:
      raise ValueError(f"`p` must be in [0, 1], got {wrong[0]:g}.")
  return jnp.asarray(p, float)


def check_group_size(group_size: int, name: str = "group_size") -> int:
  whole = isinstance(group_size, int | np.integer)
  if not whole or group_size < 2:
    raise ValueError(
      f"`{name}` must be a whole number of at least 2, got {group_size!r}:"
      " one reward has no standard deviation."
    )
  return int(group_size)


def _check_fraction(name: str, value: float):
  if not 0 < value < 1:
    raise ValueError(f"`{name}` is a part of one, in (0, 1), got {value!r}.")
