"""A small Llama that others trained, read into the decoder, tells its stories.

karpathy/tinyllamas' stories260K, in llama2.c's float32 format.
"""

import functools
import struct

import jax
import jax.numpy as jnp
import numpy as np
from plain_decoder import cast, keys, logits, module
import pytest
from scipy import special

from groupstd import policies, transformer

BEGIN, END = 1, 2  # llama2.c stops at either.
close = np.testing.assert_allclose


# What llama2.c itself writes at temperature 0, as its documentation prints it.
PUBLISHED = (
  "Once upon a time, there was a little girl named Lily. She loved to play"
  " outside in the park. One day, she saw a big, red ball. She wanted to play"
  " with it, but it was too high."
)


def read_model(path):
  """(config, parameters as they are stored, rotary pairs interleaved)."""
  header = np.fromfile(path, np.int32, 7)
  width, hidden, layers, heads, kv_heads, vocab_size, _ = map(int, header)
  config = transformer.Config(
    vocab_size=vocab_size,
    width=width,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    hidden=hidden,
    norm_eps=1e-5,
  )
  values = np.fromfile(path, np.float32, offset=7 * 4)

  def take(*shape):
    nonlocal values
    taken, values = np.split(values, [np.prod(shape)])
    return taken.reshape(shape)

  def kernels(outputs, inputs):
    return {"kernel": take(layers, outputs, inputs).swapaxes(1, 2)}

  kv = kv_heads * config.head_size
  params = {
    "embed": {"embedding": take(vocab_size, width)},
    "blocks": {
      "attention_norm": {"scale": take(layers, width)},
      "query": kernels(width, width),
      "key": kernels(kv, width),
      "value": kernels(kv, width),
      "out": kernels(width, width),
      "mlp_norm": {"scale": take(layers, width)},
      "gate": kernels(hidden, width),
      "down": kernels(width, hidden),
      "up": kernels(hidden, width),
    },
    "norm": {"scale": take(width)},
  }
  return config, params


def half_split(config, params):
  """Heads' dimensions 0, 2, 4, …, 1, 3, 5, …: pairs are then (i, i + D/2)."""

  def order(kernel):
    heads = kernel.reshape(*kernel.shape[:2], -1, config.head_size // 2, 2)
    return heads.swapaxes(-1, -2).reshape(kernel.shape)

  blocks = params["blocks"]
  moved = {n: {"kernel": order(blocks[n]["kernel"])} for n in ("query", "key")}
  return params | {"blocks": blocks | moved}


def read_pieces(path, number):
  """The text of each token: a score, a length and its bytes, one by one."""
  data, start, pieces = path.read_bytes(), 4, []
  for _ in range(number):
    _, length = struct.unpack_from("<fi", data, start)
    start += 8 + length
    piece = data[start - length : start].decode()
    if piece.startswith("<0x"):
      piece = chr(int(piece[3:-1], 16))
    pieces.append(piece)
  assert start == len(data)
  return pieces


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """What runs once is compiled for longer than it runs."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def folder(external_data):
  return external_data / "models" / "stories260k"


@functools.cache
def read(folder):
  config, stored = read_model(folder / "stories260K.bin")
  return config, stored, cast(half_split(config, stored))


START = policies.Prompts(
  np.array([[BEGIN]]), np.ones((1, 1), bool), np.zeros(1, np.int32)
)


@functools.cache
def starts(folder):
  """Of 256 stories: the sample, its log-probs and entropies in training."""
  config, _, params = read(folder)
  policy = transformer.policy(config, length=32, stop=(BEGIN, END))
  drawn = jax.jit(policy.sample, static_argnums=3)(
    params, keys(0, 1), START, 256
  )
  scored = jax.jit(policy.log_prob_and_entropy)(params, START, drawn.tokens)
  return drawn, *scored


def test_it_tells_the_published_story(folder):
  config, _, params = read(folder)
  pieces = read_pieces(folder / "tok512.bin", config.vocab_size)
  policy = transformer.policy(
    config, length=70, stop=(BEGIN, END), temperature=0
  )
  drawn = jax.jit(policy.sample, static_argnums=3)(params, keys(0, 1), START, 1)
  text = "".join(pieces[token] for token in drawn.tokens[0, 0])
  assert drawn.mask.all()
  assert text.lstrip().startswith(PUBLISHED)


def test_it_is_the_model_that_was_stored(folder):
  """The weights as they lie in the file, in float64, pairs interleaved."""
  config, stored, params = read(folder)
  drawn, log_probs, _ = starts(folder)
  text = [BEGIN, *map(int, drawn.tokens[0, 0])]
  assert drawn.mask[0, 0].all()
  expected = logits(config, stored, text, interleaved=True)
  _, merge = policies.split(module(config))
  found = jax.jit(lambda params, text: merge(params)(text))(
    params, jnp.array([text])
  )
  close(found[0], expected, rtol=1e-4, atol=1e-4)
  scored = special.log_softmax(expected[:-1], axis=-1)[range(32), text[1:]]
  close(drawn.log_probs[0, 0], scored, rtol=1e-4, atol=1e-4)
  close(log_probs[0, 0], scored, rtol=1e-4, atol=1e-4)


def test_it_is_as_sure_as_it_is_right(folder):
  """E[−log π] = E[H] of what it draws; 0.9 nats at the start of a story."""
  drawn, *scored = starts(folder)
  log_probs, entropies = (np.asarray(x)[drawn.mask] for x in scored)
  close(drawn.log_probs[drawn.mask], log_probs, rtol=0, atol=1e-4)
  surprise = -log_probs - entropies  # A martingale's steps.
  error = np.sqrt(np.mean(surprise**2) / surprise.size)
  # Passed by all but one of a million seeds.
  assert abs(surprise.mean()) < 5 * error
  assert abs(entropies.mean() - 0.9) < 0.05
