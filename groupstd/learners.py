"""Learners: one policy-gradient step from a batch of groups.

The step is a pure function of (state, rollout): jit it, donate the state, shard
it. Advantages, keeps and behaviour log-probs are inputs of what is
differentiated, so that no gradient needs to be stopped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from groupstd import losses, policies, rollouts, sigma

__all__ = ["Info", "Learner", "TrainState", "policy_gradient"]


class TrainState(NamedTuple):
  """What training carries along, all of it in a checkpoint.

  Attributes:
    step: iterations made, updates skipped included.
    params: the policy's parameters.
    opt_state: the optimizer's; it counts the updates it made itself.
  """

  step: jax.Array
  params: Any
  opt_state: Any


class Info(NamedTuple):
  """What a step saw and did, each []. What is not read is not computed.

  Attributes:
    loss: Σ weights·terms / denominator, KL included.
    kl: the same sum of the KL estimator's terms, before its coefficient.
    denominator: what the aggregate divided by.
    kept: groups in numerator and denominator.
    silent: groups whose raw scores are all equal (empty ones left out).
    clip_fraction: share of the training tokens whose clip binds.
    clamped: training tokens whose log-ratio to the reference was held.
    max_advantage: the largest |A|.
    grad_norm: before the optimizer.
    skipped: whether no update was made, since nothing was kept.
    nonfinite: whether no update was made, since a reward, an advantage or the
      gradient's norm was not finite.
  """

  loss: jax.Array
  kl: jax.Array
  denominator: jax.Array
  kept: jax.Array
  silent: jax.Array
  clip_fraction: jax.Array
  clamped: jax.Array
  max_advantage: jax.Array
  grad_norm: jax.Array
  skipped: jax.Array
  nonfinite: jax.Array


class Learner(NamedTuple):
  """init: params → TrainState. step: (state, rollout) → (state, Info)."""

  init: Callable[[Any], TrainState]
  step: Callable[[TrainState, rollouts.Rollout], tuple[TrainState, Info]]


class _Batch(NamedTuple):
  """What the differentiated function takes of a rollout."""

  prompts: Any
  tokens: jax.Array  # [B, G, T]
  mask: jax.Array  # [B, G, T]
  log_probs: jax.Array  # [B, G, T]
  advantages: jax.Array  # [B, G]
  weights: jax.Array  # [B, G, T], divided by the denominator
  counts: jax.Array  # [B, G, T], rollouts a training token stands for


class _Sums(NamedTuple):
  """What adds up over micro-batches beside the gradient."""

  loss: jax.Array
  kl: jax.Array
  clipped: jax.Array
  clamped: jax.Array


def policy_gradient(
  policy: policies.Policy,
  optimizer: optax.GradientTransformation,
  rule: sigma.Rule,
  *,
  surrogate: losses.Surrogate | None = None,
  aggregate: losses.Aggregate | None = None,
  kl_coef: float = 0.0,
  kl: losses.KLEstimator = losses.k3,
  reference: Any = None,
  micro_batches: int = 1,
) -> Learner:
  """θ ← optimizer(∇_θ Σ weights·(surrogate + kl_coef·KL) / denominator).

  Args:
    policy: what answers.
    optimizer: an optax transformation; it descends the loss.
    rule: rewards to advantages; `sigma.rule(op)` makes one of an operation.
    surrogate: `losses.reinforce()` by default.
    aggregate: `losses.token_mean()` by default.
    kl_coef: of the KL to the reference, over the same tokens with the same
      weights: a silent group that is kept is under KL, a dropped one is not.
    kl: the estimator.
    reference: parameters of the reference policy; needed with `kl_coef`.
    micro_batches: in how many parts the gradient is taken, one after another.
      Cuts run between groups and change nothing but memory.

  Returns:
    A learner. Its step leaves params and optimizer as they were, and says so,
    where nothing was kept or something was not finite; the iteration counts on.

  Raises:
    ValueError: if `kl_coef` is negative, or positive without a reference, or
      `micro_batches` is below 1; from the step, if it does not divide B.
  """
  surrogate = surrogate or losses.reinforce()
  aggregate = aggregate or losses.token_mean()
  if not 0 <= kl_coef < float("inf"):
    raise ValueError(f"`kl_coef` must be at least 0, got {kl_coef}.")
  if kl_coef and reference is None:
    raise ValueError(
      f"`reference` parameters must be given with `kl_coef` {kl_coef}: there"
      " is nothing to stay close to."
    )
  if not isinstance(micro_batches, int) or micro_batches < 1:
    raise ValueError(
      f"`micro_batches` must be an integer of at least 1, got {micro_batches}."
    )
  reference = jax.tree.map(jnp.asarray, reference)

  def loss(params, batch: _Batch):
    log_probs = policy.log_prob(params, batch.prompts, batch.tokens)
    # Selected before anything is computed of it: what a masked slot holds
    # reaches neither the loss nor, through 0·∞, the gradient.
    log_probs = jnp.where(batch.mask, log_probs, 0)
    behaviour = jnp.where(batch.mask, batch.log_probs, 0)
    terms, clipped = surrogate(
      log_probs, behaviour, batch.advantages[..., None]
    )
    divergence, clamped = jnp.zeros_like(terms), jnp.zeros(terms.shape, bool)
    if kl_coef:
      fixed = policy.log_prob(reference, batch.prompts, batch.tokens)
      divergence, clamped = kl(log_probs, jnp.where(batch.mask, fixed, 0))
    value = jnp.sum(batch.weights * (terms + kl_coef * divergence))
    return value, _Sums(
      loss=value,
      kl=jnp.sum(batch.weights * divergence),
      clipped=jnp.sum(batch.counts * clipped),
      clamped=jnp.sum(batch.counts * clamped),
    )

  def gradient(params, batch: _Batch):
    if micro_batches == 1:
      return jax.grad(loss, has_aux=True)(params, batch)
    num_groups = len(batch.advantages)
    if num_groups % micro_batches:
      raise ValueError(
        f"`micro_batches` must divide the {num_groups} groups of a batch, got"
        f" {micro_batches}: `rollouts.pad` adds groups that weigh nothing."
      )

    def cut(x):  # Every M-th group, so that no part crosses shards.
      return jnp.swapaxes(x.reshape(-1, micro_batches, *x.shape[1:]), 0, 1)

    def add(total, part):
      return jax.tree.map(
        jnp.add, total, jax.grad(loss, has_aux=True)(params, part)
      ), None

    shapes = jax.eval_shape(jax.grad(loss, has_aux=True), params, batch)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, jax.tree.map(cut, batch))[0]

  def init(params):
    return TrainState(jnp.zeros([], jnp.int32), params, optimizer.init(params))

  def step(state, rollout):
    advantages, keep = rule(rollout.rewards, rollout.where, rollout.scores)
    # Whatever a rule makes of an answer without a score.
    advantages = jnp.where(rollout.where > 0, advantages, 0)
    mask = rollout.mask & keep[:, None, None]  # [B, G, T]
    where = rollout.where.astype(advantages.dtype)
    weights, denominator = aggregate(mask, where)
    divisor = jnp.where(denominator > 0, denominator, 1)
    counts = jnp.where(mask, where[..., None], 0)
    batch = _Batch(
      rollout.prompts,
      rollout.tokens,
      mask & (where > 0)[..., None],
      rollout.log_probs,
      advantages,
      weights / divisor,
      counts,
    )
    grads, sums = gradient(state.params, batch)
    rewards = sigma.group_stats(rollout.rewards, rollout.where)
    scores = sigma.group_stats(rollout.scores, rollout.where)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.all(jnp.isfinite(rewards.mean + scores.mean))
    finite &= jnp.isfinite(jnp.sum(advantages)) & jnp.isfinite(grad_norm)
    skipped = denominator == 0

    def update(params, opt_state):
      updates, opt_state = optimizer.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    params, opt_state = jax.lax.cond(
      finite & ~skipped,
      update,
      lambda *unchanged: unchanged,
      state.params,
      state.opt_state,
    )
    tokens = jnp.sum(counts)
    occupied = scores.size > 0
    info = Info(
      loss=sums.loss,
      kl=sums.kl,
      denominator=denominator,
      kept=jnp.sum(keep & occupied),
      silent=jnp.sum(scores.silent & occupied),
      clip_fraction=sums.clipped / jnp.where(tokens > 0, tokens, 1),
      clamped=sums.clamped,
      max_advantage=jnp.max(jnp.abs(advantages), initial=0),
      grad_norm=grad_norm,
      skipped=skipped & finite,
      nonfinite=~finite,
    )
    return TrainState(state.step + 1, params, opt_state), info

  return Learner(init, step)
