"""Learners: the policy-gradient updates that a batch of groups makes.

The step is a pure function of (state, rollout): jit it, donate the state, shard
it. Advantages, keeps, behaviour and reference log-probs are inputs of what is
differentiated, so that no gradient needs to be stopped.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import optax

from groupstd import losses, policies, rollouts, sigma, updates

__all__ = ["Info", "Learner", "TrainState", "policy_gradient"]


class TrainState(NamedTuple):
  """What training carries along, all of it in a checkpoint.

  Attributes:
    step: iterations made, updates skipped included.
    params: the policy's parameters.
    opt_state: the optimizer's; it counts the updates it made itself.
    reference: parameters that a KL is taken to, never updated; None without.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  reference: Any = None


class Info(NamedTuple):
  """What a step saw and did, each []. What is not read is not computed.

  Where a step makes several updates, sums and shares run over all of them. A
  token learns if it trains and has an advantage that is not 0, KL or entropy:
  of the others, such as a silent group's, the policy is not asked.

  Attributes:
    loss: Σ weights·terms / denominator, KL and entropy included.
    kl: the same sum of the KL estimator's terms, before its coefficient.
    entropy: without an `entropy_coef` its estimate, the mean of −log π as the
      sampler reported it, over the tokens that train; with one the exact
      entropy of what each was drawn from, over those that learn.
    denominator: what the aggregate divided by.
    kept: groups in numerator and denominator.
    silent: groups whose raw scores are all equal (empty ones left out).
    regularized: groups under KL or entropy.
    computed: groups that went forward and backward, over all updates, with
      those that fill a part or a mesh.
    clip_fraction: share of the tokens that learn whose clip binds.
    clamped: tokens whose log-ratio to the reference was held.
    corrected: share of the tokens that learn that the correction held or
      dropped.
    first_ratio: the largest |π/π_sampler − 1| of a token that learns in the
      first update, before anything moved: rounding, where the policy drew them.
    max_advantage: the largest |A| of a kept group.
    grad_norm: before the optimizer, the largest.
    skipped: updates not made, since nothing was kept.
    nonfinite: updates not made, since a reward, an advantage or the gradient's
      norm was not finite.
  """

  loss: jax.Array
  kl: jax.Array
  entropy: jax.Array
  denominator: jax.Array
  kept: jax.Array
  silent: jax.Array
  regularized: jax.Array
  computed: jax.Array
  clip_fraction: jax.Array
  clamped: jax.Array
  corrected: jax.Array
  first_ratio: jax.Array
  max_advantage: jax.Array
  grad_norm: jax.Array
  skipped: jax.Array
  nonfinite: jax.Array


class _Init(Protocol):
  def __call__(self, params: Any, reference: Any = None) -> TrainState: ...


class Learner(NamedTuple):
  """Where training starts, and what a batch does to it.

  Attributes:
    init: (params, reference) → TrainState. With a KL the reference is copied
      into the state, and is the params given where none is; without a KL none
      is kept.
    step: (state, rollout, *, shards=1) → (state, Info). Where the groups lie in
      equal pieces on several devices, `shards` says on how many: none is moved.
    pad: (rollout, shards) → the rollout with groups that weigh nothing at its
      end, so that it can be cut into as many pieces, each into a step's parts.
  """

  init: _Init
  step: Callable[..., tuple[TrainState, Any]]
  pad: Callable[[Any, int], Any]


def policy_gradient(
  policy: policies.Policy,
  optimizer: optax.GradientTransformation,
  rule: sigma.Rule,
  *,
  surrogate: losses.Surrogate | None = None,
  aggregate: losses.Aggregate | None = None,
  kl_coef: float = 0.0,
  kl: losses.KLEstimator = losses.k3,
  entropy_coef: float = 0.0,
  regularize_silent: bool = True,
  correction: losses.Correction | None = None,
  epochs: int = 1,
  mini_batches: int = 1,
  micro_batches: int = 1,
) -> Learner:
  """θ ← optimizer(∇_θ Σ weights·(surrogate + β·KL − η·H) / denominator).

  β is `kl_coef`, η is `entropy_coef`, and the weights are the aggregate's.

  A silent group meets three switches, of which none moves another:
    its policy gradient is 0, as the rule's advantages are where a group's
      rewards are all equal;
    the rule's `keep` says whether it counts in the denominator; a dropped group
      is in no sum at all;
    `regularize_silent` says whether, being kept, it is under KL and entropy.
  Where its advantages are 0 and it is under neither, so are its terms: it is
  counted, and not computed.

  Args:
    policy: what answers.
    optimizer: an optax transformation; it descends the loss.
    rule: rewards to advantages; `sigma.rule(op)` makes one of an operation.
    surrogate: `losses.reinforce()` by default; where the advantage is 0, its
      terms are taken to be 0.
    aggregate: `losses.token_mean()` by default.
    kl_coef: of the KL to the state's reference.
    kl: the estimator.
    entropy_coef: of the exact entropy of what each token was drawn from; the
      policy must offer `log_prob_and_entropy`.
    regularize_silent: whether groups whose raw scores are all equal, but which
      are kept, are under KL and entropy.
    correction: for answers that another program drew, such as
      `losses.truncate()`: its weights multiply whole tokens, the denominator
      stays, and the surrogate's behaviour is the policy at the step's start.
      Without one, a sampler's log-prob that is not finite and that the
      surrogate reads makes the update's gradient NaN, and it is not made.
    epochs: how often the batch is gone through. From the second update on its
      answers are another policy's: take a surrogate with a ratio.
    mini_batches: into how many updates each time; each has a denominator of its
      own, while advantages and keeps are the whole batch's.
    micro_batches: in how many parts, at most, an update's gradient is taken,
      one after another, which changes nothing but memory and time: the groups
      in which a token learns are packed into as few parts as hold them, and the
      others are not computed. With 1 all are. All cuts run between groups.

  Returns:
    A learner. Its step makes epochs·mini_batches updates. It leaves out, and
    counts, one where nothing is kept or something is not finite: params and
    optimizer are then as they were; the iteration counts on.

  Raises:
    ValueError: if a coefficient is negative or a number of parts below 1, or
      the policy offers no entropy that is asked for; from the step, if
      they do not cut B evenly: see the learner's `pad`.
    AssertionError: from `init`, if the reference's shapes are not the params'.
  """
  surrogate = surrogate or losses.reinforce()
  aggregate = aggregate or losses.token_mean()
  for name, coef in ("kl_coef", kl_coef), ("entropy_coef", entropy_coef):
    if not 0 <= coef < math.inf:
      raise ValueError(f"`{name}` must be at least 0 and finite, got {coef}.")
  for name, number in [
    ("epochs", epochs),
    ("mini_batches", mini_batches),
    ("micro_batches", micro_batches),
  ]:
    if not isinstance(number, int) or number < 1:
      raise ValueError(
        f"`{name}` must be an integer of at least 1, got {number}."
      )
  with_entropy = policy.log_prob_and_entropy if entropy_coef else None
  if entropy_coef and with_entropy is None:
    raise ValueError(
      f"`entropy_coef` must be 0, got {entropy_coef}: the policy offers no"
      " `log_prob_and_entropy`."
    )

  def cut(groups, shards):
    """(parts of an update, groups in each on a shard), of that many groups."""
    on_a_shard = max(-(-groups // (shards * mini_batches)), 1)
    size = -(-on_a_shard // micro_batches)
    return -(-on_a_shard // size), size

  loss = updates.loss(
    policy.log_prob, with_entropy, surrogate, kl, kl_coef, entropy_coef
  )

  def init(params, reference=None):
    if not kl_coef:
      reference = None
    else:  # A copy, since a step may take over the buffers of its state.
      reference = params if reference is None else reference
      reference = jax.tree.map(jnp.copy, reference)
      chex.assert_trees_all_equal_shapes(reference, params)
    opt_state = optimizer.init(params)
    return TrainState(jnp.zeros([], jnp.int32), params, opt_state, reference)

  def step(
    state: TrainState, rollout: rollouts.Rollout, *, shards: int = 1
  ) -> tuple[TrainState, Info]:
    number = len(rollout.where)
    parts, size = cut(number, shards)
    if number and number != shards * mini_batches * parts * size:
      raise ValueError(
        f"`mini_batches`·`micro_batches` must cut a batch of {number} groups"
        f" evenly, got {mini_batches}·{micro_batches}: the learner's `pad` adds"
        " groups that weigh nothing."
      )
    advantages, keep = rule(rollout.rewards, rollout.where, rollout.scores)
    # Whatever a rule makes of an answer without a score.
    advantages = jnp.where(rollout.where > 0, advantages, 0)
    mask = rollout.mask & keep[:, None, None]  # [B, G, T]
    mask &= (rollout.where > 0)[..., None]
    rewards = sigma.group_stats(rollout.rewards, rollout.where)
    scores = sigma.group_stats(rollout.scores, rollout.where)
    sound = jnp.all(jnp.isfinite(rewards.mean + scores.mean))
    sound &= jnp.isfinite(jnp.sum(advantages))
    occupied = scores.size > 0
    regularized = keep & occupied & bool(kl_coef or entropy_coef)
    if not regularize_silent:
      regularized &= ~scores.silent

    learns = mask & ((advantages != 0) | regularized[:, None])[..., None]

    def log_probs(params):
      """Outside of what is differentiated, in parts no larger than its own."""
      found = updates.log_probs(
        policy.log_prob,
        params,
        rollout.prompts,
        rollout.tokens,
        learns,
        parts=mini_batches * parts,
        shards=shards,
      )
      return jnp.where(learns, found, 0)

    drawn = behaviour = jnp.where(learns, rollout.log_probs, 0)
    if correction is None:
      corrected = None
      # Infinite, it could pass for a ratio that is merely clipped.
      behaviour = jnp.where(jnp.isfinite(drawn), drawn, jnp.nan)
    else:
      behaviour = log_probs(state.params)
      corrected = correction(behaviour - drawn, learns)
    where = rollout.where.astype(advantages.dtype)
    batch = updates.Batch(
      prompts=rollout.prompts,
      tokens=rollout.tokens,
      mask=mask,
      learns=learns,
      where=where,
      advantages=advantages,
      regularized=regularized,
      drawn=drawn,
      behaviour=behaviour,
      reference=log_probs(state.reference) if kl_coef else None,
      correction=corrected,
    )

    def update(carry, batch: updates.Batch):
      weights, denominator = aggregate(batch.mask, batch.where)
      weights /= jnp.where(denominator > 0, denominator, 1)
      if batch.correction is not None:
        weights *= batch.correction[0]
      weights = jnp.where(batch.learns, weights, 0)
      grads, (sums, off), computed = updates.gradient(
        loss, carry[0], batch, weights, parts=parts, shards=shards
      )
      grad_norm = optax.tree.norm(grads)
      finite = sound & jnp.isfinite(grad_norm)
      empty = denominator == 0

      def move(params, opt_state):
        moves, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, moves), opt_state

      carry = jax.lax.cond(
        finite & ~empty, move, lambda *unchanged: unchanged, *carry
      )
      return carry, (sums, off, denominator, grad_norm, finite, empty, computed)

    carry = state.params, state.opt_state
    if epochs * mini_batches == 1:
      carry, made = update(carry, batch)
    else:
      batches = updates.cut(batch, mini_batches)
      carry, made = jax.lax.scan(
        lambda carry, _: jax.lax.scan(update, carry, batches),
        carry,
        length=epochs,
      )
    sums, off, denominators, grad_norms, finite, empty, computed = made
    denominator = jnp.sum(denominators)
    shares = denominators / jnp.where(denominator > 0, denominator, 1)
    if entropy_coef:
      entropy = _mean(sums.entropy, sums.tokens)
    else:
      counts = jnp.where(mask, where[..., None], 0)
      said = jnp.where(mask, -rollout.log_probs, 0)
      entropy = _mean(counts * said, counts)
    info = Info(
      loss=jnp.sum(shares * sums.loss),
      kl=jnp.sum(shares * sums.kl),
      entropy=entropy,
      denominator=denominator,
      kept=jnp.sum(keep & occupied),
      silent=jnp.sum(scores.silent & occupied),
      regularized=jnp.sum(regularized),
      computed=jnp.sum(computed),
      clip_fraction=_mean(sums.clipped, sums.tokens),
      clamped=jnp.sum(sums.clamped),
      corrected=_mean(sums.corrected, sums.tokens),
      first_ratio=jnp.ravel(off)[0],
      max_advantage=jnp.max(
        jnp.where(keep[:, None], jnp.abs(advantages), 0), initial=0
      ),
      grad_norm=jnp.max(grad_norms),
      skipped=jnp.sum(empty & finite),
      nonfinite=jnp.sum(~finite),
    )
    params, opt_state = carry
    return TrainState(state.step + 1, params, opt_state, state.reference), info

  def pad(rollout, shards):
    parts, size = cut(len(rollout.where), shards)
    return rollouts.pad(rollout, shards * mini_batches * parts * size)

  return Learner(init, step, pad)


def _mean(sums: jax.Array, counts: jax.Array) -> jax.Array:
  """Σ sums / Σ counts, and 0 of nothing."""
  count = jnp.sum(counts)
  return jnp.sum(sums) / jnp.where(count > 0, count, 1)
