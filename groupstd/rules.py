"""Rules that are no operation on the group's own σ.

A rule is what a learner takes: (rewards, where, scores) → (advantages, keep).
`sigma.rule` makes one of an operation; these look at the whole batch, at each
answer's siblings, or at nothing but a constant. All of them keep every group.
"""

import math
import numbers

import jax
import jax.numpy as jnp

from groupstd import sigma, statistics

__all__ = ["against", "batch_scaled", "left_out"]


def batch_scaled(*, ddof: int = 1, eps: float = 1e-4) -> sigma.Rule:
  """A = (R − μ)/(σ_batch + ε): μ of the group, σ of all the batch's rewards.

  TRL's `scale_rewards="batch"`, with its ddof and ε. No operation on the
  group's σ: all groups share one scale, so within a batch it is Dr. GRPO, whose
  step is divided by a σ that also counts how prompts differ from one another.
  It needs one number of the whole batch, on a mesh a sum over the devices; a
  batch cut in parts before the rule would have as many.

  Args:
    ddof: 0 for the population σ, 1 for the sample σ.
    eps: added to σ. Nothing is divided where all of the batch is equal.

  Returns:
    A rule; the batch is [..., G] in full, and answers without a score are in
    neither mean nor σ. A group of equal rewards gets exact zeros.

  Raises:
    ValueError: if `ddof` is not 0 or 1, or `eps` not finite or negative.

  >>> advantages, keep = batch_scaled(eps=0.0)(
  ...     jnp.array([[9., 7.], [1., 1.]]))
  >>> print(advantages.round(2), keep)
  [[ 0.24 -0.24]
   [ 0.    0.  ]] [ True  True]
  """
  op = sigma.divide(ddof=ddof, eps=eps)

  def rule(rewards, where=None, scores=None, /):
    del scores
    groups = statistics.centre(rewards, where)
    batch = sigma.group_stats(
      jnp.ravel(rewards), None if where is None else jnp.ravel(where)
    )
    advantages = _scale(op, batch) * groups.deviations
    return advantages, jnp.ones(groups.constant.shape, bool)

  return rule


def left_out(*, eps: float = 1e-6) -> sigma.Rule:
  """A_i = (R_i − b_i)/(σ_i + ε), b_i and σ_i of the other rewards only.

  NeMo-RL's default: `sigma.rloo`, divided by the sample σ (ddof 1) of an
  answer's siblings; not divided where these are all equal, or one. A does not
  sum to 0 over a group, so no weight of the group's statistics gives it.

  Args:
    eps: added to σ_i.

  Returns:
    A rule; answers without a score are nobody's siblings, and a lone answer
    gets advantage 0.

  Raises:
    ValueError: if `eps` is not finite or negative.

  >>> advantages, _ = left_out(eps=0.0)(jnp.array([4., 2., 0.]))
  >>> print(advantages.round(2))
  [ 2.12  0.   -2.12]
  """
  op, leave_one_out = sigma.divide(ddof=1, eps=eps), sigma.rule(sigma.rloo())

  def rule(rewards, where=None, scores=None, /):
    del scores
    advantages, keep = leave_one_out(rewards, where)
    counts = jnp.ones(advantages.shape) if where is None else jnp.asarray(where)
    # [..., G, G]: in row i all answers but one copy of i.
    others = counts[..., None, :] - jnp.eye(counts.shape[-1])
    others = jnp.maximum(others, 0)
    rows = jnp.broadcast_to(jnp.expand_dims(rewards, -2), others.shape)
    return advantages * _scale(op, sigma.group_stats(rows, others)), keep

  return rule


def against(reference: float) -> sigma.Rule:
  """A = R − reference: a constant for a baseline.

  Not zero-sum: a group in which nobody is right pushes its answers away, and
  one in which all are right pulls them closer. So no group is silent to it.

  Raises:
    ValueError: if `reference` is not a finite number.

  >>> advantages, _ = against(0.5)(jnp.array([[1., 0.], [0., 0.]]))
  >>> print(advantages)
  [[ 0.5 -0.5]
   [-0.5 -0.5]]
  """
  number = isinstance(reference, numbers.Real)
  if not number or isinstance(reference, bool) or not math.isfinite(reference):
    raise ValueError(
      f"`reference` must be a finite number, got {reference!r}: it is what a"
      " reward is held against."
    )

  def rule(rewards, where=None, scores=None, /):
    del scores
    rewards = jnp.asarray(rewards)
    dtype = jnp.promote_types(rewards.dtype, jnp.float32)
    advantages = rewards.astype(dtype) - reference
    if where is not None:
      advantages = jnp.where(where > 0, advantages, 0)
    return advantages, jnp.ones(rewards.shape[:-1], bool)

  return rule


def _scale(op: sigma.SigmaOp, stats: sigma.GroupStats) -> jax.Array:
  """The operation's scale, and 1 where all rewards are equal."""
  constant = stats.silent
  scale = op(
    stats._replace(
      std=jnp.where(constant, 1, stats.std),
      size=jnp.where(constant, jnp.maximum(stats.size, 2), stats.size),
    )
  ).scale
  return jnp.where(constant, 1, scale)
