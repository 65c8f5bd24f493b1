"""What logged rollouts say of groups: unbiased, with an error, up to n.

Of n logged rollouts of a prompt k were right. A group of G ≤ n of them, drawn
without replacement, is as good as a fresh one, so the mean over all such groups
is unbiased for any mean over groups of G, whatever p is. To put k/n into a
closed form is not, as the closed form bends: 44.3 % silent for 43.1.

>>> from groupstd import data
>>> k, problems = data.big_math()
>>> silent = mean_and_error(silent_rate(k, 64, 8), problems)
>>> print(f"{silent.value:.2%} ± {silent.error:.2%}")
43.07% ± 0.08%

Ratios of such means (fidelity, required group sizes, shares) are only
consistent, whatever they are made of: `bootstrap` gives those their error. More
than n rollouts say nothing without a model of p: `fit_difficulty`.

Throughout, k and n are whole numbers or arrays of them, [P], a prompt each; an
estimate is float64 [P]; rollouts of a prompt are independent and of one policy,
and anything else is a ValueError. (arXiv:2607.00152.)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple
import warnings

import numpy as np
from scipy import optimize, stats

from groupstd import sigma, theory

ArrayLike = np.ndarray | Sequence[float] | float

# Bounds of log(a + b) and of logit(a/(a + b)) of a fitted Beta.
_CONCENTRATION, _LOGIT = (-6.0, 12.0), (-20.0, 20.0)


class Estimate(NamedTuple):
  """A number and its standard error, were other prompts logged instead."""

  value: float | np.ndarray
  error: float | np.ndarray


def unbiased(
  values: ArrayLike, k: ArrayLike, n: ArrayLike, group_size: int
) -> np.ndarray:
  """Σ_j values[j]·C(k, j)C(n − k, G − j)/C(n, G), unbiased for E[values[K]].

  K ~ Binomial(G, p) is how many of a fresh group are right.

  Args:
    values: [G + 1], any statistic of a group with j = 0, …, G right.
    k: [P], rollouts that were right.
    n: [P], rollouts logged, at least G each.
    group_size: G ≥ 1.

  Returns:
    [P], one estimate a prompt.

  >>> print(unbiased([0, 0, 1], k=[1, 2, 3], n=3, group_size=2).round(3))
  [0.    0.333 1.   ]
  """
  values, k, n = _checked(values, k, n, group_size)
  if n.size and n.min() < group_size:
    raise ValueError(
      f"`group_size` must be at most n = {n.min()}, got {group_size}: no such"
      " group can be drawn from the log. `fit_difficulty` goes beyond it."
    )
  return _mean_over(
    values, lambda j, k, n: stats.hypergeom.pmf(j, n, k, group_size), k, n
  )


def silent_rate(k: ArrayLike, n: ArrayLike, group_size: int) -> np.ndarray:
  """Unbiased for s = p^G + (1 − p)^G: how often a group is silent, [P].

  >>> print(silent_rate([0, 2], 4, 2).round(3))
  [1.    0.333]
  """
  right = np.arange(group_size + 1)
  return unbiased((right == 0) | (right == group_size), k, n, group_size)


def expected_std(k: ArrayLike, n: ArrayLike, group_size: int) -> np.ndarray:
  """Unbiased for E[σ], GRPO's expected update: [P].

  >>> print(expected_std([1, 2], 4, 2).round(3))
  [0.25  0.333]
  """
  return expected_gain(sigma.grpo(), k, n, group_size)


def expected_gain(
  op: sigma.SigmaOp, k: ArrayLike, n: ArrayLike, group_size: int
) -> np.ndarray:
  """Unbiased for E[σ²w], the expected update of an operation: [P].

  >>> print(expected_gain(sigma.dr_grpo(), [1, 2], 4, 2).round(3))
  [0.125 0.167]
  """
  return unbiased(np.asarray(theory.gain(op, group_size)), k, n, group_size)


def pass_at(k: ArrayLike, n: ArrayLike, m: int) -> np.ndarray:
  """1 − C(n − k, m)/C(n, m), unbiased for 1 − (1 − p)^m: [P].

  The estimator of arXiv:2107.03374.

  >>> print(pass_at([0, 1, 2], 4, 2).round(3))
  [0.    0.5   0.833]
  """
  return unbiased(np.arange(m + 1) > 0, k, n, m)


def plug_in(
  function: Callable[[np.ndarray], np.ndarray], k: ArrayLike, n: ArrayLike
) -> np.ndarray:
  """function(k/n): BIASED unless the function is linear in p, for comparison.

  >>> print(plug_in(lambda p: p**2, 1, 2), unbiased([0, 0, 1], 1, 2, 2))
  0.25 0.0
  """
  k, n = _logged(k, n)
  return np.asarray(function(k / n))


def mean_and_error(
  per_prompt: ArrayLike, weights: ArrayLike | None = None
) -> Estimate:
  """x̄ and s/√P over prompts; unbiased if each of x is.

  The error holds both the rollouts' noise and the prompts' differences: it is
  what other prompts of the same kind would have changed.

  Args:
    per_prompt: x [P], P ≥ 2.
    weights: [P], how many prompts each entry stands for; one by default.

  >>> mean, error = mean_and_error([1.0, 2.0, 3.0])
  >>> print(f"{mean:.2f} {error:.2f}")
  2.00 0.58
  """
  x = np.asarray(per_prompt, float)
  weights = _weights(weights, x.shape)
  prompts = weights.sum()
  mean = weights @ x / prompts
  variance = weights @ (x - mean) ** 2 / (prompts - 1)
  return Estimate(float(mean), float(np.sqrt(variance / prompts)))


def bootstrap(
  statistic: Callable[[np.ndarray, np.ndarray, np.ndarray], ArrayLike],
  k: ArrayLike,
  n: ArrayLike,
  *,
  weights: ArrayLike | None = None,
  replicates: int = 200,
  seed: int = 0,
) -> Estimate:
  """A statistic of the whole log and its bootstrap error over prompts.

  For ratios: CONSISTENT, not unbiased, which the error does not show.

  Args:
    statistic: (k [P], n [P], weights [P]) → a number or an array, where
      weights says how often each entry counts, 0 included.
    k: [P], rollouts that were right.
    n: [P], rollouts logged.
    weights: [P], how many prompts each entry stands for; one by default.
    replicates: how many logs are drawn; 200 give the error to about 5 %.
    seed: of the draws.

  >>> def fidelity(k, n, weights):  # of GRPO over all prompts, at G = 2
  ...   limit = np.sqrt(k / n * (1 - k / n))
  ...   return weights @ expected_std(k, n, 2) / (weights @ limit)
  >>> value, error = bootstrap(fidelity, [1, 2, 3, 4], 8, weights=[9, 9, 9, 9])
  >>> print(f"{value:.3f} ± {error:.3f}")
  0.511 ± 0.011
  """
  if replicates < 2:
    raise ValueError(
      f"`replicates` must be at least 2, got {replicates}: the error is their"
      " spread."
    )
  k, n = _logged(k, n)
  weights = _weights(weights, k.shape)
  if np.any(weights % 1):
    raise ValueError("`weights` must be whole numbers: they count prompts.")
  prompts = int(weights.sum())
  draws = np.random.default_rng(seed).multinomial(
    prompts, weights / prompts, size=replicates
  )
  again = [np.asarray(statistic(k, n, drawn), float) for drawn in draws]
  value = np.asarray(statistic(k, n, weights), float)
  return Estimate(value, np.std(again, axis=0, ddof=1))


class Difficulty(NamedTuple):
  """p ~ Beta(a, b) over prompts, as fitted to a log.

  Attributes:
    a, b: the distribution's parameters.
    most: the most rollouts that any prompt of the log had.
    held_out: by how much the share of silent groups was overstated where it
      could be checked. Fitted again to a quarter of each prompt's rollouts, it
      was asked how often the other three quarters would all be right or all
      wrong, and this is predicted less logged, a mean over prompts and over
      all ways to divide. Several errors from 0, the distribution does not fit.
  """

  a: float
  b: float
  most: int
  held_out: Estimate

  def expect(
    self,
    values: ArrayLike,
    group_size: int,
    k: ArrayLike = 0,
    n: ArrayLike = 0,
  ) -> np.ndarray:
    """E[values[K]] for prompts with k of n right, K ~ BetaBinomial: [P].

    p | k, n ~ Beta(a + k, b + n − k); with k = n = 0, a prompt unseen. It is
    a posterior mean: unbiased for no one prompt, of least squared error over
    prompts if p is distributed so. Warns where G is beyond `most`, as then
    nothing but the fit speaks.
    """
    values, k, n = _checked(values, k, n, group_size, least=0)
    if group_size > self.most:
      value, error = self.held_out
      warnings.warn(
        f"Groups of {group_size} are beyond the {self.most} rollouts logged:"
        f" this rests on p being Beta({self.a:.3g}, {self.b:.3g}). Held out,"
        f" the silent share was overstated by {value:.4f} ± {error:.4f}.",
        stacklevel=2,
      )
    return _mean_over(
      values,
      lambda j, k, n: stats.betabinom.pmf(
        j, group_size, self.a + k, self.b + n - k
      ),
      k,
      n,
    )


def fit_difficulty(
  k: ArrayLike, n: ArrayLike, weights: ArrayLike | None = None
) -> Difficulty:
  """The Beta distribution of p under which the log is likeliest.

  Args:
    k: [P], rollouts that were right.
    n: [P], rollouts logged, at least 4 each, or nothing could be held out.
    weights: [P], how many prompts each entry stands for; one by default.

  >>> fit = fit_difficulty([0, 1, 3, 6, 8], 8)
  >>> print(f"Beta({fit.a:.2f}, {fit.b:.2f})")
  Beta(0.46, 0.53)
  >>> with warnings.catch_warnings(action="ignore"):  # 16 are beyond 8
  ...   print(fit.expect(np.arange(17) / 16, 16, k=[0, 4], n=8).round(2))
  [0.05 0.5 ]
  """
  k, n = _logged(k, n)
  weights = _weights(weights, k.shape)
  if n.min() < 4:
    raise ValueError(
      f"`n` must be at least 4, got {n.min()}: two rollouts to fit p's spread"
      " and two to check it by."
    )
  (right, tried), where, _ = _distinct(k, n)
  counts = np.bincount(where, weights)
  a, b = _fit_beta(right, tried, counts)
  # Every way to divide the rollouts, as likely as it is: nothing is drawn.
  first = np.maximum(2, tried // 4)[:, None]  # [D, 1]
  others = tried[:, None] - first
  seen = np.arange(first.max() + 1)  # [S]
  chance = stats.hypergeom.pmf(seen, tried[:, None], right[:, None], first)
  weight = counts[:, None] * chance  # [D, S]
  part, at = np.nonzero(weight)
  first_a, first_b = _fit_beta(seen[at], first[part, 0], weight[part, at])
  after = first_a + seen, first_b + np.maximum(first - seen, 0)
  predicted = stats.betabinom.pmf(0, others, *after) + stats.betabinom.pmf(
    others, others, *after
  )
  unseen = right[:, None] - seen
  logged = (unseen == 0) | (unseen == others)
  overstated = np.sum(chance * (predicted - logged), axis=1)
  return Difficulty(a, b, int(tried.max()), mean_and_error(overstated, counts))


def _fit_beta(
  k: np.ndarray, n: np.ndarray, counts: np.ndarray
) -> tuple[float, float]:
  """(a, b) of greatest beta-binomial likelihood."""

  def parameters(x: np.ndarray) -> tuple[float, float]:
    total, mean = np.exp(x[0]), 1 / (1 + np.exp(-x[1]))
    return total * mean, total * (1 - mean)

  def loss(x: np.ndarray) -> float:
    return -counts @ stats.betabinom.logpmf(k, n, *parameters(x)) / counts.sum()

  mean = np.clip(counts @ (k / n) / counts.sum(), 1e-6, 1 - 1e-6)
  found = optimize.minimize(
    loss,
    [0.0, np.log(mean / (1 - mean))],
    method="Nelder-Mead",
    bounds=[_CONCENTRATION, _LOGIT],
    options={"xatol": 1e-6, "fatol": 1e-10},
  )
  a, b = parameters(found.x)
  return float(a), float(b)


def _mean_over(
  values: np.ndarray,
  pmf: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
  k: np.ndarray,
  n: np.ndarray,
) -> np.ndarray:
  """Σ_j values[j]·pmf(j, k, n), in the shape of k; each (k, n) done once."""
  (k, n), where, shape = _distinct(k, n)
  chance = pmf(np.arange(values.size), k[:, None], n[:, None])
  # What cannot happen may have no value.
  mean = np.sum(chance * np.where(chance > 0, values, 0), axis=-1)
  return mean[where].reshape(shape)


def _distinct(
  k: np.ndarray, n: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
  """The distinct (k, n) [2, D], which of them each prompt is, and k's shape."""
  codes, where = np.unique(n * (n.max(initial=0) + 1) + k, return_inverse=True)
  n_of, k_of = np.divmod(codes, n.max(initial=0) + 1)
  return np.stack([k_of, n_of]), where.ravel(), k.shape


def _checked(
  values: ArrayLike, k: ArrayLike, n: ArrayLike, group_size: int, least: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  if not isinstance(group_size, int | np.integer) or group_size < 1:
    raise ValueError(
      f"`group_size` must be a whole number of at least 1, got {group_size!r}."
    )
  values = np.asarray(values, float)
  if values.shape != (group_size + 1,):
    raise ValueError(
      f"`values` must be [G + 1] = [{group_size + 1}], got shape"
      f" {values.shape}: one for each number right."
    )
  return values, *_logged(k, n, least)


def _logged(
  k: ArrayLike, n: ArrayLike, least: int = 1
) -> tuple[np.ndarray, np.ndarray]:
  """k and n as whole numbers of one shape."""
  k, n = np.broadcast_arrays(np.asarray(k, float), np.asarray(n, float))
  if np.any(k % 1 != 0) or np.any(n % 1 != 0) or np.any(n < least):
    raise ValueError(
      f"`k` and `n` must be whole numbers, and n at least {least}: they count"
      " rollouts."
    )
  wrong = (k < 0) | (k > n)
  if wrong.any():
    raise ValueError(
      f"`k` must be in [0, n], got {k[wrong][0]:g} of n = {n[wrong][0]:g}."
    )
  return k.astype(int), n.astype(int)


def _weights(weights: ArrayLike | None, shape: tuple[int, ...]) -> np.ndarray:
  """How many prompts each of [P] stands for, two at least in all."""
  counts = np.ones(shape) if weights is None else np.asarray(weights, float)
  if len(shape) != 1 or counts.shape != shape:
    raise ValueError(
      f"`weights` must have the prompts' shape [P], got {counts.shape} for"
      f" {shape}."
    )
  if np.any(counts < 0) or not counts.sum() >= 2:
    raise ValueError(
      "`weights` must not be negative and must sum to at least 2, got"
      f" {counts.sum():g}: one prompt has no error over prompts."
    )
  return counts
