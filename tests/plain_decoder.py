"""A decoder in numpy, float64: one sequence, nothing shared, cached or fused.

Beside it, what the tests of the real one have in common.
"""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from groupstd import policies, transformer

# Every option on: heads wider than width / num_heads, two queries to a key.
FULL = transformer.Config(
  vocab_size=7,
  width=12,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  hidden=10,
  rope_theta=100.0,
  norm_eps=1e-3,
  qk_norm=True,
  qkv_bias=True,
  tied=False,
)
# Every option off.
PLAIN = transformer.Config(7, width=12, num_layers=2, num_heads=3)


def logits(config, params, tokens, interleaved=False):
  """[S] → [S, V]. Rotary pairs are (i, i + D/2), or (2i, 2i + 1)."""
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  x = params["embed"]["embedding"][np.asarray(tokens)]
  for number in range(config.num_layers):
    layer = jax.tree.map(lambda leaf, n=number: leaf[n], params["blocks"])
    x = x + _attention(config, layer, x, interleaved)
    h = _norm(config, layer["mlp_norm"], x)
    gate, up = h @ layer["gate"]["kernel"], h @ layer["up"]["kernel"]
    x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"]["kernel"]
  h = _norm(config, params["norm"], x)
  if config.tied:
    return h @ params["embed"]["embedding"].T
  return h @ params["head"]["kernel"]


def _attention(config, layer, x, interleaved):
  h = _norm(config, layer["attention_norm"], x)
  size = config.head_size
  heads = {}
  for name in "query", "key", "value":
    y = h @ layer[name]["kernel"]
    if config.qkv_bias:
      y = y + layer[name]["bias"]
    heads[name] = y.reshape(len(x), -1, size)
    if config.qk_norm and name != "value":
      heads[name] = _norm(config, layer[f"{name}_norm"], heads[name])
  first = np.arange(size // 2) * (2 if interleaved else 1)
  second = first + (1 if interleaved else size // 2)
  wavelengths = config.rope_theta ** (np.arange(0, size, 2) / size)
  out = np.zeros((len(x), config.num_heads, size))
  for head in range(config.num_heads):
    served_by = head * config.kv_heads // config.num_heads
    for i in range(len(x)):
      query = heads["query"][i, head]
      scores = []
      for j in range(i + 1):
        key = heads["key"][j, served_by]
        # A pair is a complex number, and turns by the distance alone.
        turn = np.exp(1j * (i - j) / wavelengths)
        pairs = (query[first] + 1j * query[second]) * turn
        pairs = pairs * (key[first] - 1j * key[second])
        scores.append(pairs.real.sum() / np.sqrt(size))
      weights = special.softmax(scores)
      for j in range(i + 1):
        out[i, head] += weights[j] * heads["value"][j, served_by]
  return out.reshape(len(x), -1) @ layer["out"]["kernel"]


def _norm(config, layer, x):
  square = np.mean(x**2, axis=-1, keepdims=True)
  return x / np.sqrt(square + config.norm_eps) * layer["scale"]


def log_softmaxes(config, params, row, answer, temperature=1.0):
  """log π(· | row, answer before it), [T, V]."""
  found = logits(config, params, [*row, *answer])[len(row) - 1 : -1]
  return special.log_softmax(found / temperature, axis=-1)


def greedy(config, params, row, length, stop=()):
  """The likeliest token, again and again, up to a stop."""
  answer = []
  while len(answer) < length and not {*answer} & {*stop}:
    answer.append(int(logits(config, params, [*row, *answer])[-1].argmax()))
  return answer


def module(config):
  """Without parameters of its own."""
  return nnx.eval_shape(
    lambda: transformer.Transformer(config, rngs=nnx.Rngs(0))
  )


@functools.cache
def parameters(config, seed=0):
  """Norms and biases at random as well, attention sharp, answers varied."""
  rng = np.random.default_rng(seed)
  shapes, _ = policies.split(module(config))

  def fill(path, leaf):
    noise, name = rng.standard_normal(leaf.shape), path[-1].key
    if name == "scale":
      return 1 + 0.3 * noise
    if name == "kernel":
      return noise * 1.5 / np.sqrt(leaf.shape[-2])
    return noise / 2

  return jax.tree_util.tree_map_with_path(fill, shapes)


def cast(params, dtype=np.float32):
  return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)


ROWS = ((1, 2, 3), (4,), (0, 2), (3, 0, 0))


def padded(rows=ROWS, side="left", width=4, fill=0):
  """Prompts with `fill` on the left, on the right, or in between."""
  tokens = np.full((len(rows), width), fill, np.int32)
  mask = np.zeros(tokens.shape, bool)
  rng = np.random.default_rng(0)
  for i, row in enumerate(rows):
    where = {
      "left": np.arange(width - len(row), width),
      "right": np.arange(len(row)),
      "holes": np.sort(rng.permutation(width)[: len(row)]),
    }[side]
    tokens[i, where], mask[i, where] = row, True
  return policies.Prompts(
    jnp.asarray(tokens), jnp.asarray(mask), jnp.arange(len(rows))
  )


def keys(seed, number):
  return jax.random.split(jax.random.key(seed), number)
