"""Attention over several parts of keys, and rotary positions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Keys", "attend", "rotary", "rotate"]


class Keys(NamedTuple):
  """Keys and values that a query may attend to.

  Attributes:
    key: [B, K, S, D] of a prompt, or [B, K, G, S, D] of each answer.
    value: the same shape.
    mask: which of them count, broadcastable to scores [B, K, G, N, S].
  """

  key: jax.Array
  value: jax.Array
  mask: jax.Array


def attend(query: jax.Array, *parts: Keys) -> jax.Array:
  """softmax(qkᵀ)v over the parts together: [B, K, G, N, D] → the same.

  K counts key heads, and N all the queries that meet them: the tokens, and for
  each the R query heads that a key head serves.
  """
  specs = ["bkgnd,bksd->bkgns", "bkgnd,bkgsd->bkgns"]
  dtype = jnp.promote_types(query.dtype, jnp.float32)
  scores = []
  for part in parts:
    score = jnp.einsum(specs[part.key.ndim - 4], query, part.key)
    score = score.astype(dtype)
    # Finite, so that a row that may see nothing is finite too.
    scores.append(jnp.where(part.mask, score, jnp.finfo(dtype).min))
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
  weights = weights.astype(query.dtype)
  specs = ["bkgns,bksd->bkgnd", "bkgns,bkgsd->bkgnd"]
  out, start = jnp.zeros_like(query), 0
  for part in parts:
    stop = start + part.key.shape[-2]
    weight = weights[..., start:stop]
    out = out + jnp.einsum(specs[part.key.ndim - 4], weight, part.value)
    start = stop
  return out


def rotary(
  positions: jax.Array, *, length: int, width: int, theta: float
) -> tuple[jax.Array, jax.Array]:
  """cos and sin of position·θ^(−2i/D), each [B, N, 1, D/2]; position < length.

  From a table, or XLA would find them anew in every layer.
  """
  half = width // 2
  rates = theta ** (-np.arange(half) / half)
  angles = np.arange(length)[:, None] * rates
  cos, sin = (jnp.asarray(f(angles))[positions] for f in (np.cos, np.sin))
  return cos[:, :, None], sin[:, :, None]


def rotate(
  x: jax.Array, rotary: tuple[jax.Array, jax.Array], scale: float = 1.0
) -> jax.Array:
  """Turns the pairs (x_i, x_{i + D/2}) by their position's angle; scales."""
  cos, sin = (scale * y for y in rotary)
  a, b = jnp.split(x, 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)
