"""Reward transforms: what a group's rewards become before its statistics.

A transform is (rewards [..., G], where) → [..., G], and goes into a rule:

>>> rule = sigma.rule(sigma.dr_grpo(), transform=rank())
>>> advantages, _ = rule(jnp.array([0.1, 90.0, 0.3, 0.1, -5.0]))
>>> print(advantages)
[-0.5  2.   1.  -0.5 -2. ]

The update is still σ²·w·β, with σ and β, the least-squares slope of score on
reward, of the transformed rewards: (1/G)Σw(R_i − μ)s_i is w·cov(R, s), and β is
cov(R, s)/σ². It is σβ for GRPO; for rewards 0 and 1, β = s̄₊ − s̄₋, which is
arXiv:2607.00152, Theorem 1.

Right-or-wrong rewards stay two-valued under a transform that treats rollouts
alike. Where k of G are right let the two values lie d(k) apart: the weight is
then d(k)·w at σ = d(k)·√(k(G − k))/G, so the rule is one more w(k). Dividing by
σ undoes any d > 0: GRPO stays GRPO as long as right is above wrong. Dr. GRPO
becomes d itself, here from the rule (A₊ − A₋ = w):

>>> from groupstd import theory
>>> for transform in rank(), normal_scores(), winsorize(0.1), clip(0.0, 0.5):
...   rule = sigma.rule(sigma.dr_grpo(), transform=transform)
...   right, wrong, _ = theory.advantages(rule, 8)
...   print((right - wrong)[1:-1].round(2))
[4. 4. 4. 4. 4. 4. 4.]
[1.36 1.25 1.2  1.18 1.2  1.25 1.36]
[0.3 1.  1.  1.  1.  1.  0.3]
[0.5 0.5 0.5 0.5 0.5 0.5 0.5]

Every transform reads `where` as `sigma.group_stats` does: 0 for a rollout that
has no reward, counts for a multiset. Equal rewards stay exactly equal, in
float32 at least; float64 stays float64. A NaN stays NaN: the step refuses it.
"""

from collections.abc import Callable
import math
import numbers

import chex
import jax
import jax.numpy as jnp

from groupstd import sigma

__all__ = ["Transform", "clip", "normal_scores", "rank", "winsorize"]

# (rewards [..., G], where [..., G] or None) → [..., G].
Transform = Callable[[jax.Array, chex.Array | None], jax.Array]


def rank() -> Transform:
  """R_i → (G + 1)/2 + ½Σ_j sign(R_i − R_j): average ranks, from 1 to G.

  Under `sigma.dr_grpo` the expected update is ((G − 1)/2)·∇E[sign(R − R')],
  exactly: R' is the reward of another answer, of the policy as it is and held
  fixed, so the rule ascends how much oftener one wins than loses against
  oneself. For 0/1 rewards that is p: w(k) = G/2.

  >>> print(rank()(jnp.array([0.5, -3.0, 0.5, 7.0]), None))
  [2.5 1.  2.5 4. ]
  """

  def transform(rewards, where=None):
    rewards, counts, size = _members(rewards, where)
    return (size + 1 + _wins(rewards, counts)) / 2

  return transform


def normal_scores() -> Transform:
  """R_i → Φ⁻¹(rank_i/(G + 1)): the van der Waerden normal scores.

  The normal distribution's quantile at each average rank: rollouts far from
  the others stay apart, by an amount that does not depend on how far.

  >>> scores = normal_scores()(jnp.array([0.0, 1.0, 50.0]), None)
  >>> print(*(f"{score:.3f}" for score in scores))
  -0.674 0.000 0.674
  """

  def transform(rewards, where=None):
    rewards, counts, size = _members(rewards, where)
    # From ½ by whole numbers, so that a group of equals is at Φ⁻¹(½) = 0.
    quantile = 0.5 + _wins(rewards, counts) / (2 * (size + 1))
    return jax.scipy.special.ndtri(quantile)

  return transform


def winsorize(tail: float) -> Transform:
  """R_i → min(max(R_i, q), q'): clipped at the group's own quantiles.

  Of right-or-wrong rewards at most tail·(G − 1) odd ones out are outliers: the
  group becomes one of equals, with advantages 0.

  Args:
    tail: q and q' are the quantiles at `tail` and 1 − `tail`, interpolated
      linearly between the order statistics; 0 ≤ tail < ½.

  Raises:
    ValueError: if `tail` is not in that range.

  >>> print(winsorize(0.25)(jnp.array([0.0, 1.0, 2.0, 3.0, 99.0]), None))
  [1. 1. 2. 3. 3.]
  """
  if not 0 <= _number(tail) < 0.5:
    raise ValueError(
      f"`tail` must be a number in [0, 0.5), got {tail!r}: the quantiles at"
      " tail and 1 - tail must not meet."
    )

  def transform(rewards, where=None):
    rewards, counts, size = _members(rewards, where)
    reached = _pairs(jnp.greater_equal, rewards, counts)  # #{R_j ≤ R_i}

    def order_statistic(index):  # The least R_i that more than `index` reach.
      beyond = (counts > 0) & (reached > index)
      found = jnp.min(jnp.where(beyond, rewards, jnp.inf), -1, keepdims=True)
      return jnp.where(size > 0, found, 0)

    def quantile(level):
      place = level * (size - 1)
      below = order_statistic(jnp.floor(place))
      above = order_statistic(jnp.ceil(place))
      return below + (place - jnp.floor(place)) * (above - below)

    return jnp.clip(rewards, quantile(tail), quantile(1 - tail))

  return transform


def clip(low: float, high: float) -> Transform:
  """R_i → min(max(R_i, low), high); a bound may be infinite.

  A group whose rewards become equal gets advantages of exactly 0. To
  `sigma.mask` it is silent only if its scores were equal before.

  Raises:
    ValueError: unless low < high.

  >>> print(clip(-1.0, 1.0)(jnp.array([-7.0, 0.5, 2.0]), None))
  [-1.   0.5  1. ]
  """
  if not _number(low) < _number(high):
    raise ValueError(
      f"`low` must be a number below `high`, got {low!r} and {high!r}: all"
      " rewards would become equal."
    )

  def transform(rewards, where=None):
    rewards, _, _ = _members(rewards, where)
    return jnp.clip(rewards, low, high)

  return transform


def _members(
  rewards: chex.Array, where: chex.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(rewards [..., G], 0 where there is none, counts [..., G], size [..., 1]).

  The shapes are checked, and the dtype chosen, by `sigma.group_stats`.
  """
  size = sigma.group_stats(rewards, where).size[..., None]
  counts = jnp.ones(jnp.shape(rewards)) if where is None else where
  counts = jnp.asarray(counts).astype(size.dtype)
  rewards = jnp.asarray(rewards).astype(size.dtype)
  return jnp.where(counts > 0, rewards, 0), counts, size


def _pairs(compare, rewards: jax.Array, counts: jax.Array) -> jax.Array:
  """Σ_j counts_j·compare(R_i, R_j), [..., G]; fused, no [G, G] is stored."""
  values = compare(rewards[..., :, None], rewards[..., None, :])
  return jnp.sum(counts[..., None, :] * values, axis=-1)


def _wins(rewards: jax.Array, counts: jax.Array) -> jax.Array:
  """#{R_j < R_i} − #{R_j > R_i}, [..., G]: a whole number, and NaN of a NaN."""
  return _pairs(lambda one, other: jnp.sign(one - other), rewards, counts)


def _number(value: object) -> float:
  """The value, or NaN, which no range holds, if it is no number."""
  if isinstance(value, numbers.Real) and not isinstance(value, bool):
    return float(value)
  return math.nan
