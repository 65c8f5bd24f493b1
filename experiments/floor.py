"""Two loops to hold a language model's training against, written out by hand.

`plain` is what one writes first: a prompt is repeated for each of its answers,
the gradient is the whole batch's, sampling has a cache of keys and values.

`floor` is as fast as this could be made on a CPU's cores, and does nothing
else. A group's prompt is computed once, in sampling and in the update alike.
The gradient is summed over chunks of prompts, so that activations stay in
cache. Products are of matrices with all tokens as rows, q, k, v in one and the
feed-forward layer's two in one; layers are written out, not scanned; the cache
is carried in place, keys with their positions last.

Neither has a mask, padding, an end of an answer, a check or a metric, and
neither imports groupstd. Both ascend Σ A·log π / tokens with A = (R − μ)/σ:
the gradient of a clipped surrogate at a ratio of 1.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmark_work import Size

_ABSENT = -1e30  # A score that weighs nothing.


class Loop(NamedTuple):
  """A program's parts.

  Attributes:
    convert: a `transformer.policy`'s parameters → this one's. It only moves
      numbers, so gradients are converted by it too.
    sample: (params, key, prompts [B, P]) → tokens [B, G, T].
    log_prob: (params, prompts, tokens) → [B, G, T].
    gradient: (params, prompts, tokens, advantages [B, G]) → like params.
  """

  convert: Callable[[Any], Any]
  sample: Callable[[Any, jax.Array, jax.Array], jax.Array]
  log_prob: Callable[[Any, jax.Array, jax.Array], jax.Array]
  gradient: Callable[[Any, jax.Array, jax.Array, jax.Array], Any]


def update(loop: Loop, optimizer: optax.GradientTransformation) -> Callable:
  """(params, opt_state, prompts, tokens, advantages) → (params, opt_state)."""

  def step(params, opt_state, *batch):
    gradient = loop.gradient(params, *batch)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return step


def advantages(rewards: np.ndarray) -> np.ndarray:
  """(R − μ)/σ in each row, 0 where all of it is equal."""
  centred = rewards - rewards.mean(axis=1, keepdims=True)
  std = rewards.std(axis=1, keepdims=True)
  return centred / np.where(std > 0, std, 1)


def plain(size: Size) -> Loop:
  """What one writes first."""
  heads, depth = size.heads, size.width // size.heads

  def convert(params):
    blocks = params["blocks"]
    names = "query", "key", "value", "out", "gate", "up", "down"
    return {
      "embed": params["embed"]["embedding"],
      "norm": params["norm"]["scale"],
      "layers": [
        {name: blocks[name]["kernel"][i] for name in names}
        | {f"{name}_bias": blocks[name]["bias"][i] for name in names[:3]}
        | {
          name: blocks[name]["scale"][i]
          for name in ("attention_norm", "mlp_norm")
        }
        for i in range(size.layers)
      ],
    }

  def attention(layer, x, cache, start):
    """x [N, S, D] from position `start` on; the cache is [N, M, H, D] twice."""
    n, s, _ = x.shape
    angles = _angles(depth, start + jnp.arange(s))

    def project(name):
      return (x @ layer[name] + layer[f"{name}_bias"]).reshape(n, s, heads, -1)

    query, key = _rotate(project("query"), angles), project("key")
    keys, values = (
      jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
      for old, new in zip(
        cache, (_rotate(key, angles), project("value")), strict=True
      )
    )
    scores = jnp.einsum("nshd,nmhd->nhsm", query, keys) / math.sqrt(depth)
    seen = jnp.arange(keys.shape[1]) <= start + jnp.arange(s)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, _ABSENT))
    out = jnp.einsum("nhsm,nmhd->nshd", weights, values)
    return out.reshape(n, s, -1) @ layer["out"], (keys, values)

  def model(params, tokens, caches, start):
    """Logits [N, S, V], and the caches."""
    x, written = params["embed"][tokens], []
    for layer, cache in zip(params["layers"], caches, strict=True):
      h = _norm(x, layer["attention_norm"])
      out, cache = attention(layer, h, cache, start)
      x = x + out
      h = _norm(x, layer["mlp_norm"])
      h = jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])
      x = x + h @ layer["down"]
      written.append(cache)
    return _norm(x, params["norm"]) @ params["embed"].T, written

  def empty(n, length):
    blank = jnp.zeros((n, length, heads, depth))
    return [(blank, blank)] * size.layers

  def sample(params, key, prompts):
    prompts = jnp.repeat(prompts, size.group_size, axis=0)
    n, width = prompts.shape
    caches = empty(n, width + size.length - 1)
    logits, caches = model(params, prompts, caches, 0)
    first = jax.random.categorical(jax.random.fold_in(key, 0), logits[:, -1])

    def step(carry, t):
      token, caches = carry
      logits, caches = model(params, token[:, None], caches, width + t - 1)
      key_t = jax.random.fold_in(key, t)
      token = jax.random.categorical(key_t, logits[:, 0])
      return (token, caches), token

    _, rest = jax.lax.scan(step, (first, caches), jnp.arange(1, size.length))
    tokens = jnp.concatenate([first[None], rest])
    return tokens.T.reshape(-1, size.group_size, size.length)

  def log_prob(params, prompts, tokens):
    width = prompts.shape[1]
    flat = tokens.reshape(-1, size.length)
    prompts = jnp.repeat(prompts, size.group_size, axis=0)
    whole = jnp.concatenate([prompts, flat], axis=1)[:, :-1]
    logits, _ = model(params, whole, empty(*whole.shape), 0)
    found = jax.nn.log_softmax(logits[:, width - 1 :])
    found = jnp.take_along_axis(found, flat[..., None], axis=-1)
    return found.reshape(tokens.shape)

  def gradient(params, prompts, tokens, advantages):
    def loss(params):
      found = log_prob(params, prompts, tokens)
      return -jnp.mean(advantages[..., None] * found)

    return jax.grad(loss)(params)

  return Loop(convert, sample, log_prob, gradient)


def floor(size: Size) -> Loop:
  """As fast as could be."""
  heads, depth = size.heads, size.width // size.heads
  group_size, width, more = size.group_size, size.prompt, size.length - 1

  def convert(params):
    blocks = params["blocks"]
    columns = {
      "qkv": ("query", "key", "value"),
      "out": ("out",),
      "gate_up": ("gate", "up"),
      "down": ("down",),
    }

    def layer(i):
      made = {
        name: jnp.concatenate([blocks[x]["kernel"][i] for x in parts], axis=1)
        for name, parts in columns.items()
      }
      made["bias"] = jnp.concatenate(
        [blocks[x]["bias"][i] for x in columns["qkv"]]
      )
      made["before"] = blocks["attention_norm"]["scale"][i]
      made["between"] = blocks["mlp_norm"]["scale"][i]
      return made

    return {
      "embed": params["embed"]["embedding"],
      "norm": params["norm"]["scale"],
      "layers": [layer(i) for i in range(size.layers)],
    }

  def project(layer, x, shape, angles):
    """x [N, D] → q, already divided by √D, k and v, each [*shape, H, D]."""
    qkv = _norm(x, layer["before"]) @ layer["qkv"] + layer["bias"]
    query, key, value = jnp.unstack(
      qkv.reshape(*shape, 3, heads, depth), axis=len(shape)
    )
    return (
      _rotate(query, angles) / math.sqrt(depth),
      _rotate(key, angles),
      value,
    )

  def rest(layer, x, attended):
    """What comes after attention."""
    x = x + attended.reshape(x.shape) @ layer["out"]
    gate, up = jnp.split(_norm(x, layer["between"]) @ layer["gate_up"], 2, 1)
    return x + (jax.nn.silu(gate) * up) @ layer["down"]

  def sample(params, key, prompts):
    batch = len(prompts)
    n = batch * group_size
    x, asked = params["embed"][prompts.reshape(-1)], []
    angles, causal = _angles(depth, jnp.arange(width)), _causal(width)
    for layer in params["layers"]:
      parts = project(layer, x, (batch, width), angles)
      q, k, v = (jnp.swapaxes(y, 1, 2) for y in parts)  # [B, H, P, D]
      asked.append((k, v))
      weights = jax.nn.softmax(
        jnp.where(causal, q @ jnp.swapaxes(k, 2, 3), _ABSENT)
      )
      x = rest(layer, x, jnp.swapaxes(weights @ v, 1, 2))

    def draw(t, x):
      logits = _norm(x, params["norm"]) @ params["embed"].T
      key_t = jax.random.fold_in(key, t)
      # All of a group's first tokens are drawn from one row.
      drawn = jax.random.categorical(key_t, logits, shape=(n // len(x), len(x)))
      return drawn.T.reshape(-1).astype(jnp.int32)

    def step(t, carry):
      tokens, caches = carry
      x, written = params["embed"][tokens[t]], []
      angles = _angles(depth, (width + t)[None])
      past = jnp.arange(more) <= t
      for layer, prompt, cache in zip(
        params["layers"], asked, caches, strict=True
      ):
        q, k, v = project(layer, x, (n,), angles)  # [N, H, D]
        keys = _put(cache[0], k[..., None], t, axis=3)
        values = _put(cache[1], v[:, :, None], t, axis=2)
        written.append((keys, values))
        # A group's queries meet its prompt in one product.
        grouped = jnp.swapaxes(q.reshape(batch, group_size, heads, -1), 1, 2)
        common = grouped @ jnp.swapaxes(prompt[0], 2, 3)  # [B, H, G, P]
        common = jnp.swapaxes(common, 1, 2).reshape(n, heads, width)
        own = jnp.einsum("nhd,nhdt->nht", q, keys)
        scores = jnp.concatenate(
          [common, jnp.where(past, own, _ABSENT)], axis=2
        )
        weights = jax.nn.softmax(scores)
        common = weights[..., :width].reshape(batch, group_size, heads, -1)
        common = jnp.swapaxes(jnp.swapaxes(common, 1, 2) @ prompt[1], 1, 2)
        own = jnp.einsum("nht,nhtd->nhd", weights[..., width:], values)
        x = rest(layer, x, common.reshape(own.shape) + own)
      return tokens.at[t + 1].set(draw(t + 1, x)), written

    x = x.reshape(batch, width, -1)[:, -1]
    tokens = jnp.zeros((size.length, n), jnp.int32)
    tokens = tokens.at[0].set(draw(0, x))
    blank = (
      jnp.zeros((n, heads, depth, more)),
      jnp.zeros((n, heads, more, depth)),
    )
    tokens, _ = jax.lax.fori_loop(
      0, more, step, (tokens, [blank] * size.layers)
    )
    return tokens.T.reshape(batch, group_size, size.length)

  def log_prob(params, prompts, tokens):
    """A group is one row: its prompt, then its answers' tokens but the last."""
    batch = len(prompts)
    row = jnp.concatenate(
      [prompts, tokens[..., :-1].reshape(batch, -1)], axis=1
    )
    place = jnp.tile(width + jnp.arange(more), group_size)
    angles = _angles(depth, jnp.concatenate([jnp.arange(width), place]))
    first, causal = _causal(width), _causal(more)
    x = params["embed"][row.reshape(-1)]
    for layer in params["layers"]:
      parts = project(layer, x, row.shape, angles)
      q, k, v = (jnp.swapaxes(y, 1, 2) for y in parts)  # [B, H, R, D]
      key, value = k[:, :, :width], v[:, :, :width]
      query, keys, values = (
        y[:, :, width:].reshape(batch, heads, group_size, more, depth)
        for y in (q, k, v)
      )
      common = q @ jnp.swapaxes(key, 2, 3)  # [B, H, R, P]
      weights = jax.nn.softmax(jnp.where(first, common[:, :, :width], _ABSENT))
      asked = weights @ value
      common = common[:, :, width:].reshape(*query.shape[:4], width)
      own = jnp.where(causal, query @ jnp.swapaxes(keys, 3, 4), _ABSENT)
      weights = jax.nn.softmax(jnp.concatenate([common, own], axis=4))
      common = weights[..., :width].reshape(batch, heads, -1, width) @ value
      own = weights[..., width:] @ values
      attended = jnp.concatenate(
        [asked, common + own.reshape(common.shape)], axis=2
      )
      x = rest(layer, x, jnp.swapaxes(attended, 1, 2))
    x = _norm(x, params["norm"]).reshape(*row.shape, -1)
    shape = batch, group_size, 1, size.width
    last = jnp.broadcast_to(x[:, None, width - 1 : width], shape)
    answered = x[:, width:].reshape(batch, group_size, more, -1)
    hidden = jnp.concatenate([last, answered], axis=2).reshape(-1, size.width)
    found = jax.nn.log_softmax(hidden @ params["embed"].T)
    # A gather's transpose would be a scatter.
    chosen = tokens.reshape(-1, 1) == jnp.arange(size.vocabulary)
    return jnp.sum(jnp.where(chosen, found, 0), axis=1).reshape(tokens.shape)

  def gradient(params, prompts, tokens, advantages):
    def loss(params, prompts, tokens, advantages):
      found = log_prob(params, prompts, tokens)
      return -jnp.sum(advantages[..., None] * found)

    def add(total, chunk):
      found = jax.grad(loss)(params, *chunk)
      return jax.tree.map(jnp.add, total, found), None

    chunks = jax.tree.map(
      lambda x: x.reshape(-1, size.chunk, *x.shape[1:]),
      (prompts, tokens, advantages / tokens.size),
    )
    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), chunks)[0]

  return Loop(convert, sample, log_prob, gradient)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  square = jnp.mean(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(square + 1e-6) * scale


def _angles(depth: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """cos and sin, each [S, 1, D/2]: the same for every head."""
  rates = 10_000.0 ** (-jnp.arange(depth // 2) / (depth // 2))
  angles = positions[:, None, None] * rates
  return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Rotary positions of x [..., S, H, D]."""
  cos, sin = angles
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _causal(length: int) -> jax.Array:
  return jnp.tril(jnp.ones((length, length), bool))


def _put(cache: jax.Array, new: jax.Array, t: jax.Array, *, axis: int):
  return jax.lax.dynamic_update_slice_in_dim(cache, new, t, axis=axis)
