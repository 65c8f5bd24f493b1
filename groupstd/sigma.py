"""Operations on σ, the standard deviation of a prompt's group of rewards.

A method is one pure function of one number. A σ-operation maps a group's
statistics to a *scale* on its centred rewards and a *keep* flag, so that the
advantage is A = w·(R − μ); for right-or-wrong rewards the training update is
then exactly σ²·w·(s̄₊ − s̄₋) (arXiv:2607.00152, Theorem 1):

  Dr. GRPO   identity()                   w = 1
  GRPO       divide()                     w = 1/σ
  DAPO       product(mask(), divide())    w = 1/σ, and σ = 0 is dropped

Operations compose by `product`: scales multiply, keeps conjoin. `rule` turns
an operation into what a learner takes. A new operation is a plain function:

>>> def tempered(stats):
...   return Weight(stats.std ** -0.5)
>>> advantages, keep = rule(product(mask(), tempered))(
...     jnp.array([[1., 0., 0., 0.], [1., 1., 1., 1.]]))
>>> print(np.round(advantages, 2), keep)
[[ 1.14 -0.38 -0.38 -0.38]
 [ 0.    0.    0.    0.  ]] [ True False]
"""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple, Protocol

import chex
import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from groupstd.statistics import GroupStats, centre, group_stats, silence

__all__ = [
  "GroupStats",
  "Rule",
  "SigmaOp",
  "Weight",
  "dapo",
  "divide",
  "dr_grpo",
  "group_stats",
  "grpo",
  "identity",
  "mask",
  "max_rl",
  "pass_at",
  "product",
  "rloo",
  "rule",
  "table",
]


class Weight(NamedTuple):
  """What an operation says of a group.

  Attributes:
    scale: w in A = w·(R − μ); broadcastable to the statistics' shape.
    keep: whether the group stays in the loss's numerator and denominator. A
      group of scale 0 still counts in the denominator, a dropped one does not.
  """

  scale: jax.Array | float
  keep: jax.Array | bool = True


SigmaOp = Callable[[GroupStats], Weight]


class Rule(Protocol):
  """(rewards [..., G], where, scores) → (advantages [..., G], keep [...])."""

  def __call__(
    self,
    rewards: chex.Array,
    where: chex.Array | None = None,
    scores: chex.Array | None = None,
    /,
  ) -> tuple[jax.Array, jax.Array]: ...


def identity() -> SigmaOp:
  """w = 1: Dr. GRPO (arXiv:2503.20783). The unit of `product`."""
  return lambda stats: Weight(jnp.ones_like(stats.std))


def divide(
  *, power: chex.Numeric = 1.0, ddof: int = 0, eps: chex.Numeric = 0.0
) -> SigmaOp:
  """w = (σ_ddof + ε)^(−power): GRPO (arXiv:2402.03300) at power 1.

  Args:
    power: how far to divide; 0 is Dr. GRPO, ½ lies between. May be traced.
    ddof: 0 for the population σ, 1 for the sample σ·√(G/(G − 1)).
    eps: added to σ. Not needed for safety here: constant groups are decided by
      equality, so it only serves to compare with trainers that add one.

  Raises:
    ValueError: if `ddof` is not 0 or 1, or a number is not finite or negative.

  >>> op = divide(ddof=1, eps=1e-4)
  >>> print(f"{op(group_stats(jnp.array([1., 0.]))).scale:.3f}")
  1.414
  """
  if ddof not in (0, 1):
    raise ValueError(f"`ddof` must be 0 or 1, got {ddof!r}.")
  _check_number("power", power)
  _check_number("eps", eps, low=0.0)

  def op(stats: GroupStats) -> Weight:
    std = stats.std
    if ddof:
      std = std * jnp.sqrt(stats.size / (stats.size - ddof))
    return Weight(1 / (std + eps) ** power)

  return op


def mask() -> SigmaOp:
  """w = 1, keep = (σ > 0 of the raw scores): DAPO's filter (arXiv:2503.14476).

  A dropped group leaves every numerator and denominator; whether it is redrawn
  or replaced is the business of dynamic sampling (`groupstd.rollouts`).
  """
  return lambda stats: Weight(jnp.ones_like(stats.std), ~stats.silent)


def rloo() -> SigmaOp:
  """w = G/(G − 1): centring becomes leave-one-out, A_i = R_i − b_i.

  b_i is the mean of the other rewards (arXiv:2402.14740).

  >>> advantages, _ = rule(rloo())(jnp.array([4., 2., 0.]))
  >>> print(advantages)
  [ 3.  0. -3.]
  """
  return lambda stats: Weight(stats.size / (stats.size - 1))


def max_rl() -> SigmaOp:
  """w = 1/μ, for 0/1 rewards: ascends log p cut at order G − 1.

  MaxRL (arXiv:2602.02710). For rewards that are not negative it is still
  defined; where μ ≤ 0 it is not, and the step refuses the batch.
  """
  return lambda stats: Weight(
    jnp.where(stats.mean > 0, 1 / stats.mean, jnp.nan)
  )


def table(weights: chex.Array | Sequence[float]) -> SigmaOp:
  """w = weights[k − 1] for k right of G, for 0/1 rewards.

  Args:
    weights: [G − 1], the weight of a group with k = 1, …, G − 1 right.

  Returns:
    An operation that is NaN, so that the step refuses the batch and says so,
    where a mixed group's size is not G or its rewards, in [0, 1], are not 0/1.

  Raises:
    ValueError: if `weights` is not a vector with an entry.

  >>> advantages, _ = rule(table([3., 2., 1.]))(jnp.array([1., 0., 0., 0.]))
  >>> print(advantages)
  [ 2.25 -0.75 -0.75 -0.75]
  """
  if np.ndim(weights) != 1 or not np.size(weights):
    raise ValueError(
      "`weights` must be [G - 1] with G at least 2, got shape"
      f" {np.shape(weights)}: one weight for each k = 1, ..., G - 1."
    )
  group_size = np.size(weights) + 1

  def op(stats: GroupStats) -> Weight:
    k, binary = _right(stats)
    entries = jnp.asarray(weights, stats.std.dtype)
    index = jnp.clip(k.astype(int) - 1, 0, group_size - 2)
    known = binary & (stats.size == group_size)
    # As `rule` shows a constant group, and no mixed one of 0/1 rewards is.
    known |= (stats.mean == 1) & (stats.std == 1)
    return Weight(jnp.where(known, entries[index], jnp.nan))

  return op


def pass_at(m: int) -> SigmaOp:
  """w = G/(G − 1)·m·C(G − 1 − k, m − 1)/C(G − 2, m − 1), for 0/1 rewards.

  Ascends pass@m = 1 − (1 − p)^m exactly, at any G > m: what PKPO
  (arXiv:2505.15201) does in expectation, by one centred weight. A group with
  more than G − m right weighs 0 and still counts; m = 1 is `rloo`.

  Args:
    m: how many tries pass@m has, a whole number of at least 1.

  Returns:
    An operation that is NaN, so that the step refuses the batch and says so,
    where a mixed group has no more than m rollouts (no weight of its k would
    ascend pass@m) or its rewards, in [0, 1], are not 0/1.

  Raises:
    ValueError: if `m` is not such a number.

  >>> advantages, _ = rule(pass_at(2))(jnp.array([1., 0., 0.]))
  >>> print(advantages.round(2))
  [ 2. -1. -1.]
  """
  whole = isinstance(m, int | np.integer) and not isinstance(m, bool)
  if not whole or m < 1:
    raise ValueError(
      f"`m` must be a whole number of at least 1, got {m!r}: it is how many"
      " tries pass@m has."
    )

  def op(stats: GroupStats) -> Weight:
    k, binary = _right(stats)
    known = binary & (stats.size > m)
    # The ratio factor by factor, one of which is 0 where too few are wrong.
    wrong = jnp.where(known, stats.size - 1 - k, m)[..., None]
    others = jnp.where(known, stats.size - 2, m)[..., None]
    taken = jnp.arange(m - 1)
    ratio = jnp.prod((wrong - taken) / (others - taken), axis=-1)
    scale = stats.size / (stats.size - 1) * m * ratio
    # As `rule` shows a constant group, and no mixed one of 0/1 rewards is.
    known |= (stats.mean == 1) & (stats.std == 1)
    return Weight(jnp.where(known, scale, jnp.nan))

  return op


def product(*ops: SigmaOp) -> SigmaOp:
  """w = Πw_i, keep = ⋀keep_i; `product()` is `identity()`.

  Through `rule` it is commutative and associative with unit `identity()`, up
  to rounding of the product.
  """

  def op(stats: GroupStats) -> Weight:
    scale, keep = identity()(stats)
    for factor in ops:
      weight = factor(stats)
      scale, keep = scale * weight.scale, keep & jnp.asarray(weight.keep)
    return Weight(scale, keep)

  return op


def grpo() -> SigmaOp:
  """GRPO's operation, `divide()`: w = 1/σ."""
  return divide()


def dr_grpo() -> SigmaOp:
  """Dr. GRPO's operation, `identity()`: w = 1."""
  return identity()


def dapo() -> SigmaOp:
  """DAPO's operation, `product(mask(), divide())`: w = 1/σ where σ > 0."""
  return product(mask(), divide())


def rule(
  op: SigmaOp,
  *,
  transform: Callable[[jax.Array, chex.Array | None], jax.Array] | None = None,
) -> Rule:
  """A = w(stats)·(R − μ), and exactly 0 for a group of equal rewards.

  Where rewards are all equal, the operation sees μ = σ = 1 instead, so that it
  may be literal math (`std ** -0.5`) with finite gradients in its parameters.

  Args:
    op: the operation.
    transform: (rewards [..., G], where) → [..., G], applied before the
      statistics: ranks, clipping and the like. Silence is still decided by the
      scores before it.

  Returns:
    (rewards [..., G], where, scores) → (advantages [..., G], keep [...]). The
    baseline counts every rollout that has a score, whatever its tokens; one
    that has none (where = 0) gets advantage 0. Under a multiset of counts each
    distinct reward gets the advantage of one of its copies.

  >>> advantages, keep = rule(grpo())(jnp.array([[1., 0.], [.2, .2]]))
  >>> print(advantages, keep)
  [[ 1. -1.]
   [ 0.  0.]] [ True  True]
  """

  def apply(
    rewards: chex.Array,
    where: chex.Array | None = None,
    scores: chex.Array | None = None,
    /,
  ) -> tuple[jax.Array, jax.Array]:
    raw = rewards if scores is None else scores
    if transform is not None:
      rewards = transform(jnp.asarray(rewards), where)
    centred = centre(rewards, where)
    constant = centred.constant
    silent = constant
    if raw is not rewards:
      silent = silence(raw, where, jnp.shape(rewards))
    weight = op(
      GroupStats(
        mean=jnp.where(constant, 1, centred.mean),
        std=jnp.where(constant, 1, centred.std),
        size=jnp.where(constant, jnp.maximum(centred.size, 2), centred.size),
        silent=silent,
      )
    )
    scale = jnp.broadcast_to(jnp.asarray(weight.scale), constant.shape)
    # Its deviations are exactly 0 where a group is constant, whatever the op.
    scale = jnp.where(constant, 0, scale)
    advantages = scale[..., None] * centred.deviations
    return advantages, jnp.broadcast_to(jnp.asarray(weight.keep), silent.shape)

  return apply


def _right(stats: GroupStats) -> tuple[jax.Array, jax.Array]:
  """k of rewards within [0, 1], and whether they are 0/1 and not all equal."""
  k = jnp.round(stats.mean * stats.size)
  # Of rewards within [0, 1], only 0/1 ones have σ² = μ(1 − μ).
  binary = jnp.isclose(stats.mean * stats.size, k, atol=1e-3) & jnp.isclose(
    jnp.square(stats.std), stats.mean * (1 - stats.mean), rtol=1e-3
  )
  return k, binary


def _check_number(name: str, value: chex.Numeric, low: float = -math.inf):
  """Raises unless a concrete value is a finite number of at least `low`."""
  if isinstance(value, Tracer):
    return
  number = not isinstance(value, bool | str | None) and np.ndim(value) == 0
  if not (number and math.isfinite(value) and value >= low):
    bound = "" if low == -math.inf else f" of at least {low:g}"
    raise ValueError(f"`{name}` must be a finite number{bound}, got {value!r}.")
