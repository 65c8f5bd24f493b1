"""The gradient of a batch of groups, part by part; what is 0 is not computed.

A group whose advantages are 0, and which is under no KL or entropy, adds
nothing to a gradient. The other groups are packed to the front, and the parts
behind them take no forward pass and no backward pass. How many there are is
found as the program runs: one program serves every share of silent groups.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from groupstd import losses

__all__ = ["Batch", "Sums", "cut", "gradient", "log_probs", "loss"]

# (params, prompts, tokens) → [B, G, T].
_LogProb = Callable[[Any, Any, jax.Array], jax.Array]


class Batch(NamedTuple):
  """What an update takes of a rollout; 0 at slots that do not learn."""

  prompts: Any
  tokens: jax.Array  # [B, G, T]
  mask: jax.Array  # [B, G, T], tokens that count in the denominator
  learns: jax.Array  # [B, G, T], those with an advantage, KL or entropy
  where: jax.Array  # [B, G]
  advantages: jax.Array  # [B, G]
  regularized: jax.Array  # [B]
  drawn: jax.Array  # [B, G, T], log-probs that the sampler reported
  behaviour: jax.Array  # [B, G, T], log-probs that a ratio is taken to
  reference: jax.Array | None  # [B, G, T], log-probs
  correction: tuple[jax.Array, jax.Array] | None  # [B, G, T], weights, affected


class Sums(NamedTuple):
  """What adds up over parts beside the gradient, of the tokens that learn."""

  loss: jax.Array
  kl: jax.Array
  tokens: jax.Array
  entropy: jax.Array
  clipped: jax.Array
  clamped: jax.Array
  corrected: jax.Array


# (params, (batch, weights [B, G, T])) → (value, (Sums, max |π/π_drawn − 1|)).
Loss = Callable[
  [Any, tuple[Batch, jax.Array]],
  tuple[jax.Array, tuple[Sums, jax.Array]],
]


def loss(
  log_prob: _LogProb,
  log_prob_and_entropy: Callable[..., tuple[jax.Array, jax.Array]] | None,
  surrogate: losses.Surrogate,
  kl: losses.KLEstimator,
  kl_coef: float,
  entropy_coef: float,
) -> Loss:
  """Σ weights·(surrogate + β·KL − η·H) over the tokens that learn.

  Advantages, and the log-probs that others are held against, are inputs.
  """

  def value_of(params, given):
    batch, weights = given
    asked = params, batch.prompts, batch.tokens
    entropies = jnp.zeros([])
    if entropy_coef and log_prob_and_entropy is not None:
      found, entropies = log_prob_and_entropy(*asked)
      entropies = jnp.where(batch.learns, entropies, 0)
    else:
      found = log_prob(*asked)
    # Selected before anything is computed of it: what a masked slot holds
    # reaches neither the loss nor, through 0·∞, the gradient.
    found = jnp.where(batch.learns, found, 0)
    terms, clipped = surrogate(
      found, batch.behaviour, batch.advantages[..., None], batch.learns
    )
    value = jnp.sum(weights * terms)
    counts = jnp.where(batch.learns, batch.where[..., None], 0)
    regularized = batch.regularized[:, None, None]
    divergence = clamped = corrected = jnp.zeros([])
    if batch.reference is not None:
      divergence, clamped = kl(found, batch.reference)
      divergence = jnp.sum(jnp.where(regularized, weights * divergence, 0))
      clamped = jnp.sum(counts * (regularized & clamped))
      value += kl_coef * divergence
    if entropy_coef:
      bonus = jnp.sum(jnp.where(regularized, weights * entropies, 0))
      value -= entropy_coef * bonus
    if batch.correction is not None:
      corrected = jnp.sum(counts * batch.correction[1])
    sums = Sums(
      loss=value,
      kl=divergence,
      tokens=jnp.sum(counts),
      entropy=jnp.sum(counts * entropies),
      clipped=jnp.sum(counts * clipped),
      clamped=clamped,
      corrected=corrected,
    )
    off = jnp.abs(jnp.expm1(found - batch.drawn))
    return value, (sums, jnp.max(off, initial=0))

  return value_of


def gradient(
  loss: Loss,
  params: Any,
  batch: Batch,
  weights: jax.Array,
  *,
  parts: int,
  shards: int = 1,
) -> tuple[Any, tuple[Sums, jax.Array], jax.Array]:
  """(∇Σ weights·terms, (Sums, largest ratio), groups computed).

  Args:
    loss: differentiated in its parameters, one part after another.
    params: where.
    batch: B groups.
    weights: [B, G, T], 0 where nothing learns.
    parts: divides B. One part is the whole batch, and always computed; of
      several, those are that hold a group with a token that learns.
    shards: in how many equal pieces axis 0 lies on devices. Groups are packed
      within each, so that none moves to another device.
  """
  slope = jax.grad(loss, has_aux=True)
  given = batch, weights
  if parts == 1:
    return *slope(params, given), jnp.asarray(len(batch.where))
  rows, number = _packed(batch.learns, parts, shards)

  def add(i, total):
    grads, (sums, off) = slope(params, _take(given, rows[i]))
    grads, sums = jax.tree.map(jnp.add, total[:2], (grads, sums))
    return grads, sums, jnp.maximum(total[2], off)

  grads, (sums, off) = jax.eval_shape(slope, params, _take(given, rows[0]))
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), (grads, sums, off)
  )
  grads, sums, off = jax.lax.fori_loop(0, number, add, zeros)
  return grads, (sums, off), number * rows[0].size


def log_probs(
  log_prob: _LogProb,
  params: Any,
  prompts: Any,
  tokens: jax.Array,
  learns: jax.Array,
  *,
  parts: int,
  shards: int = 1,
) -> jax.Array:
  """log π(tokens | prompts), [B, G, T], and 0 in parts of which none learns."""
  if parts == 1:
    return log_prob(params, prompts, tokens)
  rows, number = _packed(learns, parts, shards)

  def evaluate(i):
    return log_prob(params, *_take((prompts, tokens), rows[i]))

  def put(i, found):
    part = evaluate(i).reshape(*rows[i].shape, *found.shape[2:])
    return jax.vmap(lambda x, row, new: x.at[row].set(new))(
      found, rows[i], part
    )

  pieces = rows.shape[1], len(tokens) // rows.shape[1], *tokens.shape[1:]
  zeros = jnp.zeros(pieces, jax.eval_shape(evaluate, 0).dtype)
  return jax.lax.fori_loop(0, number, put, zeros).reshape(tokens.shape)


def cut(tree: Any, parts: int) -> Any:
  """[B, ...] → [parts, B/parts, ...]; part i has groups i, i + parts, ….

  No part is then more on one shard than another.
  """
  return jax.tree.map(
    lambda x: jnp.swapaxes(
      x.reshape(len(x) // parts, parts, *x.shape[1:]), 0, 1
    ),
    tree,
  )


def _packed(
  learns: jax.Array, parts: int, shards: int
) -> tuple[jax.Array, jax.Array]:
  """Rows of each part, those that learn first, and how many parts have any.

  Rows are [parts, shards, n], counted from each shard's first.
  """
  size = len(learns) // parts
  shards = math.gcd(shards, size)
  active = jnp.any(learns, axis=(1, 2)).reshape(shards, len(learns) // shards)
  order = jnp.argsort(~active, axis=1, stable=True)
  rows = order.reshape(shards, parts, size // shards)
  most = jnp.max(jnp.sum(active, axis=1))
  return jnp.swapaxes(rows, 0, 1), -(-most // max(size // shards, 1))


def _take(tree: Any, rows: jax.Array) -> Any:
  """Leaves [B, ...] at rows [shards, n], as [shards·n, ...]."""

  def take(x):
    pieces = jnp.reshape(x, (len(rows), len(x) // len(rows), *x.shape[1:]))
    taken = jax.vmap(lambda piece, row: piece[row])(pieces, rows)
    return taken.reshape(rows.size, *x.shape[1:])

  return jax.tree.map(take, tree)
