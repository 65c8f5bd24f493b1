"""The decoder of the Llama and Qwen family, as a flax.nnx module.

RMSNorm, rotary positions, grouped-query attention, SwiGLU; optionally biases on
q, k, v, RMSNorm on q and k, a tied head, rematerialised layers.

A group's answers share their prompt: a group is one row, the prompt's tokens
and then G answers', where an answer attends to the prompt and to itself.
`groupstd.transformer` makes a policy of it.
"""

import dataclasses
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from groupstd import attention

__all__ = ["Config", "Transformer"]


@dataclasses.dataclass(frozen=True)
class Config:
  """The shape of a decoder.

  Attributes:
    vocab_size: V, how many tokens there are.
    width: D, of the residual stream.
    num_layers: L.
    num_heads: query heads.
    num_kv_heads: key and value heads, a divisor of `num_heads`; as many by
      default.
    head_dim: width of a head, even; width / num_heads by default.
    hidden: width of the feed-forward layer; 4·width by default.
    rope_theta: base of the rotary positions' wavelengths.
    norm_eps: what RMSNorm adds to the mean square.
    qk_norm: whether queries and keys are normed (Qwen3).
    qkv_bias: whether queries, keys and values have a bias (Qwen2).
    tied: whether the head is the embedding.
    dtype: of computation; the parameters' own by default. Norms, softmax and
      log-probs are in float32 at least whatever it is.
    remat: whether training recomputes a layer's activations.
    unroll: whether training goes through the layers one by one rather than by
      a scan: faster where they are few and small, and slower to compile.
    chunk: answer positions whose logits are held at once in training, which
      bounds memory at a large vocabulary; all by default.

  Raises:
    ValueError: if a number is out of its range, or heads do not divide.
  """

  vocab_size: int
  width: int = 128
  num_layers: int = 4
  num_heads: int = 4
  num_kv_heads: int | None = None
  head_dim: int | None = None
  hidden: int | None = None
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  qk_norm: bool = False
  qkv_bias: bool = False
  tied: bool = True
  dtype: str | None = None
  remat: bool = False
  unroll: bool = False
  chunk: int | None = None

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type in (int, int | None) and value is not None and value < 1:
        raise ValueError(f"`{field.name}` must be at least 1, got {value}.")
    for name in "rope_theta", "norm_eps":
      value = getattr(self, name)
      if not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, got {value}.")
    if self.num_heads % self.kv_heads:
      raise ValueError(
        f"`num_kv_heads` must divide `num_heads`, got {self.kv_heads} and"
        f" {self.num_heads}: each serves as many queries."
      )
    if self.head_dim is None and self.width % self.num_heads:
      raise ValueError(
        f"`num_heads` must divide `width` where `head_dim` is not given, got"
        f" {self.num_heads} and {self.width}."
      )
    if self.head_size % 2:
      raise ValueError(
        f"`head_dim` must be even, got {self.head_size}: rotary positions turn"
        " pairs."
      )

  @property
  def kv_heads(self) -> int:
    return self.num_kv_heads or self.num_heads

  @property
  def head_size(self) -> int:
    return self.head_dim or self.width // self.num_heads


class RMSNorm(nnx.Module):
  """x/√(mean(x²) + ε)·scale, in float32 at least.

  Plainer than flax's, whose mean costs a fifth of a small decoder's step.
  """

  def __init__(self, config: Config, width: int):
    self.scale = nnx.Param(jnp.ones(width))
    self.config = config

  def __call__(self, x):
    dtype = self.config.dtype or jnp.result_type(x, self.scale[...])
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(square + self.config.norm_eps)
    return (x * self.scale[...]).astype(dtype)


class Block(nnx.Module):
  """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    width, head = config.width, config.head_size
    hidden = config.hidden or 4 * width

    def linear(inputs, outputs, *, bias=False, scale=1.0):
      return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        dtype=config.dtype,
        kernel_init=nnx.initializers.normal(scale / math.sqrt(inputs)),
        rngs=rngs,
      )

    # The sum of the residual branches keeps its size, however many layers.
    small = 1 / math.sqrt(2 * config.num_layers)
    heads, kv_heads = config.num_heads * head, config.kv_heads * head
    self.attention_norm = RMSNorm(config, width)
    self.query = linear(width, heads, bias=config.qkv_bias)
    self.key = linear(width, kv_heads, bias=config.qkv_bias)
    self.value = linear(width, kv_heads, bias=config.qkv_bias)
    self.out = linear(heads, width, scale=small)
    if config.qk_norm:
      self.query_norm = RMSNorm(config, head)
      self.key_norm = RMSNorm(config, head)
    self.mlp_norm = RMSNorm(config, width)
    self.gate = linear(width, hidden)
    self.up = linear(width, hidden)
    self.down = linear(hidden, width, scale=small)
    self.config = config

  def __call__(self, x, rotary, attend):
    """x [B, N, W]; attend: (q [B, K, N·R, D], k, v [B, K, N, D]) → like q.

    Queries come divided by √D.
    """
    config = self.config
    batch, length, width = x.shape
    shape = batch, length, -1, config.head_size
    # Flat, as the gradient of a kernel over two axes is a transposed copy away.
    x = x.reshape(-1, width)
    h = self.attention_norm(x)
    query = self.query(h).reshape(shape)
    key = self.key(h).reshape(shape)
    value = self.value(h).reshape(shape)
    if config.qk_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    query = attention.rotate(query, rotary, 1 / math.sqrt(config.head_size))
    key = attention.rotate(key, rotary)
    heads = batch, length, config.kv_heads, -1, config.head_size
    query = jnp.swapaxes(query.reshape(heads), 1, 2)
    out, kept = attend(
      query.reshape(batch, config.kv_heads, -1, config.head_size),
      jnp.swapaxes(key, 1, 2),
      jnp.swapaxes(value, 1, 2),
    )
    out = jnp.swapaxes(out.reshape(query.shape), 1, 2)
    x = x + self.out(out.reshape(len(x), -1))
    h = self.mlp_norm(x)
    x = x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))
    return x.reshape(batch, length, width), kept


def _anywhere(x: jax.Array) -> jax.Array:
  return x


class Transformer(nnx.Module):
  """Embedding, L blocks stacked along a first axis, norm, head.

  Called with tokens [N, S] it gives logits [N, S, V], as `policies.from_nnx`
  takes it; `transformer.policy` is the faster way.
  """

  def __init__(self, config: Config, *, rngs: nnx.Rngs, lay=_anywhere):
    """Args: the shape; its random numbers; what lays activations on a mesh."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap
    def blocks(rngs):
      return Block(config, rngs)

    init = nnx.initializers.normal(0.02)  # Small, so that a tied head is flat.
    self.embed = nnx.Embed(
      config.vocab_size,
      config.width,
      dtype=config.dtype,
      embedding_init=init,
      rngs=rngs,
    )
    self.embed.dtype = config.dtype  # Not that of its first parameters.
    self.blocks = blocks(rngs)
    self.norm = RMSNorm(config, config.width)
    if not config.tied:
      self.head = nnx.Linear(
        config.width,
        config.vocab_size,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=init,
        rngs=rngs,
      )
    self.config = config
    self.lay = lay

  def __call__(self, tokens):
    mask = jnp.ones(tokens.shape, bool)
    hidden, _ = self.prefill(tokens, mask)
    return self.logits(hidden)

  def prefill(self, tokens, mask):
    """Hidden states [B, P, W] and every layer's keys and values [L, B, ...]."""
    own = self._causal(tokens.shape[1]) & mask[:, None, None, None]

    def attend(query, key, value):
      keys = attention.Keys(key[:, :, None], value[:, :, None], own)
      return attention.attend(query[:, :, None], keys)[:, :, 0], (key, value)

    return self._scan(tokens, _positions(mask), attend)

  def answers(self, prompts, mask, tokens):
    """Hidden states of prompts [B, P, W] and of answers [B, G, T, W]."""
    batch, group_size, length = tokens.shape
    width = prompts.shape[1]
    positions = _positions(mask)
    after = jnp.sum(mask, axis=1)[:, None] + jnp.arange(length)
    after = jnp.broadcast_to(after[:, None], tokens.shape).reshape(batch, -1)
    prompt = mask[:, None, None, None]
    first, causal = self._causal(width) & prompt, self._causal(length)

    def attend(query, key, value):
      def split(x):
        start = x.shape[2] * width // row.shape[1]
        shape = (*x.shape[:2], group_size, -1, x.shape[3])
        return x[:, :, :start], x[:, :, start:].reshape(shape)

      (asked, query), (key, keys), (value, values) = map(
        split, (query, key, value)
      )
      own = attention.Keys(key[:, :, None], value[:, :, None], first)
      out = attention.attend(asked[:, :, None], own)[:, :, 0]
      answered = attention.attend(
        query,
        attention.Keys(key, value, prompt),
        attention.Keys(keys, values, causal),
      )
      flat = answered.reshape(*out.shape[:2], -1, out.shape[3])
      return jnp.concatenate([out, flat], axis=2), None

    # One outside the vocabulary, such as another program's padding, would be
    # NaN, and through 0·NaN so would all that may not see it.
    inside = jnp.clip(tokens, 0, self.config.vocab_size - 1).reshape(batch, -1)
    row = jnp.concatenate([prompts, inside], axis=1)
    where = jnp.concatenate([positions, after], axis=1)
    hidden, _ = self._scan(row, where, attend, self.lay)
    answered = hidden[:, width:].reshape(*tokens.shape, hidden.shape[-1])
    return hidden[:, :width], answered

  def layers(self) -> list[Any]:
    """Every layer's parameters, cut once: in a loop, at every token."""
    _, stacked = nnx.split(self.blocks)
    leaves, structure = jax.tree.flatten(stacked)
    rows = zip(*map(jnp.unstack, leaves), strict=True)
    return [jax.tree.unflatten(structure, row) for row in rows]

  def decode(self, layers, tokens, positions, prompt, mask, cache, t):
    """One more token [B, G] of each answer: hidden states, and the cache.

    Prompts are of a group, [B, K, P, D], or of each answer, [B, K, G, P, D].
    """
    (key, _), (keys, _) = prompt[0], cache[0]
    longest = key.shape[-2] + keys.shape[-2]
    rotary = self._rotary(positions, longest)
    x = self.embed(tokens)  # [B, G, W]
    graph, _ = nnx.split(self.blocks)
    written = []
    # Unrolled, with a cache for each layer: a scan over layers would copy its
    # slice of one cache at every token.
    for params, given, (keys, values) in zip(
      layers, prompt, cache, strict=True
    ):
      shared = attention.Keys(given[0], given[1], mask)

      def attend(query, key, value, keys=keys, values=values, shared=shared):
        def put(cache, new):  # [B, K, G, T, D] ← [B, K, G, D]
          return jax.lax.dynamic_update_slice_in_dim(
            cache, new[:, :, :, None].astype(cache.dtype), t, axis=3
          )

        keys, values = put(keys, key), put(values, value)
        past = jnp.arange(keys.shape[3]) <= t
        shape = (*key.shape[:3], -1, key.shape[3])
        out = attention.attend(
          query.reshape(shape), shared, attention.Keys(keys, values, past)
        )
        return out.reshape(query.shape), (keys, values)

      x, kept = nnx.merge(graph, params)(x, rotary, attend)
      written.append(kept)
    return self.norm(x), tuple(written)

  def logits(self, hidden):
    """[..., W] → [..., V], in float32 at least."""
    if self.config.tied:
      logits = self.embed.attend(hidden)
    else:
      logits = self.head(hidden)
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

  def _rotary(self, positions, length):
    config = self.config
    return attention.rotary(
      positions,
      length=length,
      width=config.head_size,
      theta=config.rope_theta,
    )

  def _causal(self, length: int) -> jax.Array:
    """[T·R, S]: a token may see itself and what is before it."""
    shared = self.config.num_heads // self.config.kv_heads
    return jnp.repeat(jnp.tril(jnp.ones((length, length), bool)), shared, 0)

  def _scan(self, tokens, positions, attend, lay=_anywhere):
    """The normed hidden states of all layers' end, and what `attend` keeps."""
    rotary = self._rotary(positions, tokens.shape[1])
    graph, stacked = nnx.split(self.blocks)

    def layer(x, params):
      x, kept = nnx.merge(graph, params)(x, rotary, attend)
      return lay(x), kept

    if self.config.remat:
      layer = jax.checkpoint(layer)
    x = lay(self.embed(tokens))
    if not self.config.unroll:
      x, kept = jax.lax.scan(layer, x, stacked)
      return self.norm(x), kept
    # Cut once, since the transpose of that is one concatenation.
    leaves, structure = jax.tree.flatten(stacked)
    kept = []
    for params in zip(*map(jnp.unstack, leaves), strict=True):
      x, keep = layer(x, jax.tree.unflatten(structure, params))
      kept.append(keep)
    return self.norm(x), jax.tree.map(lambda *x: jnp.stack(x), *kept)


def _positions(mask: jax.Array) -> jax.Array:
  """Of real tokens alone, so that padding moves nothing."""
  return jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
