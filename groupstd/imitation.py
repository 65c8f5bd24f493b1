"""Imitation: maximum likelihood on answers that are given, for a warm start."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from groupstd import learners, policies

__all__ = ["Info", "learner"]


class Info(NamedTuple):
  """What an update saw, each [].

  Attributes:
    loss: −Σ log π / number of tokens, in nats.
    grad_norm: before the optimizer.
    nonfinite: whether no update was made, since the gradient was not finite.
  """

  loss: jax.Array
  grad_norm: jax.Array
  nonfinite: jax.Array


def learner(
  policy: policies.Policy, optimizer: optax.GradientTransformation
) -> learners.Learner:
  """θ ← optimizer(−∇_θ Σ mask·log π(tokens | prompts) / Σ mask).

  Its step takes (prompts, tokens [B, G, T], mask [B, G, T]), as a task's
  `examples` are, in place of a rollout.

  Args:
    policy: what imitates.
    optimizer: an optax transformation; it descends the loss.

  Raises:
    AssertionError: from the step, if tokens and mask differ in shape.
  """

  def init(params, reference=None):
    del reference
    zero = jnp.zeros([], jnp.int32)
    return learners.TrainState(zero, params, optimizer.init(params))

  def step(state, examples, *, shards=1):
    del shards
    prompts, tokens, mask = examples
    chex.assert_equal_shape([tokens, mask])

    def loss(params):
      log_probs = policy.log_prob(params, prompts, tokens)
      total = jnp.maximum(jnp.sum(mask), 1)
      return -jnp.sum(jnp.where(mask, log_probs, 0)) / total

    value, grads = jax.value_and_grad(loss)(state.params)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm)

    def move(params, opt_state):
      updates, opt_state = optimizer.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    params, opt_state = jax.lax.cond(
      finite, move, lambda *unchanged: unchanged, state.params, state.opt_state
    )
    state = state._replace(
      step=state.step + 1, params=params, opt_state=opt_state
    )
    return state, Info(value, grad_norm, ~finite)

  def pad(examples, shards):
    number = len(examples[2])
    rows = jnp.arange(number + -number % shards)
    prompts, tokens, mask = jax.tree.map(
      lambda x: jnp.take(x, rows, axis=0, mode="clip"), examples
    )
    return prompts, tokens, mask & (rows < number)[:, None, None]

  return learners.Learner(init, step, pad)
