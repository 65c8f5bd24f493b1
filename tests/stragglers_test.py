"""Answers that go on are moved together, and nothing drawn is changed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_decoder
from plain_decoder import cast, keys, padded, parameters
import pytest

from groupstd import transformer

close = np.testing.assert_allclose
equal = np.testing.assert_array_equal

# One layer, as they compile for longer than they run.
FULL = dataclasses.replace(plain_decoder.FULL, num_layers=1)
PLAIN = dataclasses.replace(plain_decoder.PLAIN, num_layers=1)
# Sixteen groups of four, or 64 rows: down to 16 they are moved together; of
# 256, down to 64 and again to 16.
SMALL, LARGE = (16, 4), (32, 8)
LONG = 24


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """What runs once is compiled for longer than it runs."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def prompts_of(number, side="holes"):
  rng = np.random.default_rng(0)
  rows = [rng.integers(0, 7, rng.integers(1, 5)) for _ in range(number)]
  return padded(rows, side=side)


@functools.cache
def sampler(config, packing, length, stop, temperature):
  """Compiled once, with a list of how many rows each pass was of."""
  passes = []
  policy = transformer.policy(
    config, length=length, stop=stop, temperature=temperature, packing=packing
  )
  decode = transformer.Transformer.decode

  def counted(self, layers, tokens, *rest):
    jax.debug.callback(lambda: passes.append(tokens.size))
    return decode(self, layers, tokens, *rest)

  def sample(*args):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(transformer.Transformer, "decode", counted)
      return policy.sample(*args)

  return jax.jit(sample, static_argnums=3), passes


def draw(
  config,
  shape,
  packing,
  params=None,
  prompts=None,
  length=LONG,
  stop=(1, 3),
  temperature=1.0,
):
  """What is drawn, and how many rows each pass was of."""
  sample, passes = sampler(config, packing, length, stop, temperature)
  batch, group_size = shape
  drawn = jax.device_get(
    sample(
      cast(parameters(config)) if params is None else params,
      keys(0, batch),
      prompts_of(batch) if prompts is None else prompts,
      group_size,
    )
  )
  jax.effects_barrier()
  assert drawn.tokens.shape == (*shape, length)
  rows = [*passes]
  passes.clear()
  return drawn, rows


def same(packed, unpacked):
  equal(packed.tokens, unpacked.tokens)
  equal(packed.mask, unpacked.mask)
  equal(packed.ended, unpacked.ended)
  close(packed.log_probs, unpacked.log_probs, rtol=0, atol=3e-6)


def rows_expected(mask, packing):
  """How many rows each token after the first takes, from the answers' ends."""
  total, rows = mask[..., 0].size, []
  quarters = [total // 4**i for i in range(packing + 1)]
  for t in range(1, mask.shape[2]):
    going = mask[..., t].sum()
    if not going:
      break
    # The last stage entered is never left, and each may be skipped at once.
    while len(quarters) > 1 and going <= quarters[1]:
      quarters.pop(0)
    rows.append(quarters[0])
  return rows


@pytest.mark.parametrize(
  ("config", "shape", "packing"),
  [(PLAIN, SMALL, 1), (FULL, LARGE, 2), (FULL, (64, 1), 1)],
  ids=["once", "twice", "groups of one"],
)
def test_packing_changes_nothing_that_is_drawn(config, shape, packing):
  """Tokens, mask and ends are equal; log-probs to rounding; rows are fewer."""
  unpacked, whole = draw(config, shape, 0)
  packed, fewer = draw(config, shape, packing)
  same(packed, unpacked)
  assert set(whole) == {shape[0] * shape[1]}
  assert fewer == rows_expected(unpacked.mask, packing)
  assert len(set(fewer)) == packing + 1
  # Scored by the training pass as by the packed rows, each with its prompt.
  scored = jax.jit(transformer.policy(config, length=LONG).log_prob)(
    cast(parameters(config)), prompts_of(shape[0]), packed.tokens
  )
  close(np.where(packed.mask, scored, 0), packed.log_probs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_at_any_temperature(temperature):
  unpacked, _ = draw(FULL, SMALL, 0, temperature=temperature)
  packed, _ = draw(FULL, SMALL, 1, temperature=temperature)
  same(packed, unpacked)


# --- When answers end ---

LIST = transformer.Config(9, width=10, num_layers=1, num_heads=1, tied=False)


def listed(successors):
  """Parameters under which a token all but certainly has the one successor."""
  params = jax.tree.map(
    lambda leaf: np.zeros(leaf.shape, np.float32), parameters(LIST)
  )
  params["embed"]["embedding"] = np.eye(9, 10)
  params["norm"]["scale"] = np.ones(10)
  params["head"]["kernel"] = 100 * np.eye(9)[[*successors, 0]]
  return cast(params)


# 7 → 6 → 5 → 4 → 3 → 2 → 1, the stop; 8 goes round for ever; 0 stops at once.
CHAIN = listed([1, 1, 1, 2, 3, 4, 5, 6, 8])


@pytest.mark.parametrize(
  ("first", "length", "passes"),
  [
    ([4] * 16, 12, [64] * 2),  # all at once: no row is moved
    ([8] * 16, 12, [64] * 11),  # none
    ([1] * 16, 12, []),  # all with their first token
    ([2] * 15 + [7], 12, [16] * 5),  # few from the first on
    ([3] * 12 + [7] * 4, 12, [64] + [16] * 4),  # as many as there is room for
    ([3] * 11 + [7] * 5, 12, [64] * 5),  # a group more
    ([4] * 12 + [8] * 4, 3, [64] * 2),  # down to that at the last slot
    ([3] * 12 + [7] * 4, 1, []),  # one token is all
  ],
)
def test_when_answers_end_together_at_once_or_never(first, length, passes):
  prompts = padded([(token,) for token in first])
  options = {"params": CHAIN, "prompts": prompts, "length": length}
  options |= {"stop": (1,), "temperature": 0.0}
  packed, rows = draw(LIST, SMALL, 1, **options)
  assert rows == passes
  for b, token in enumerate(first):
    answer = [8] * length if token == 8 else list(range(token - 1, 0, -1))
    answer = (answer or [1])[:length]
    padding = [0] * (length - len(answer))
    equal(packed.tokens[b], [answer + padding] * 4)
    equal(packed.mask[b].sum(axis=1), len(answer))
    equal(packed.ended[b], answer[-1] == 1)
  unpacked, _ = draw(LIST, SMALL, 0, **options)
  same(packed, unpacked)


def test_without_stops_or_with_few_rows_nothing_is_moved():
  """Nothing ends, or a token of fewer rows takes as long."""
  drawn, passes = draw(FULL, SMALL, 1, stop=(), length=3)
  assert drawn.ended is None
  assert passes == [64] * 2
  _, passes = draw(FULL, (15, 4), 1)
  assert set(passes) == {60}


def test_what_is_drawn_hangs_on_neither_group_size_nor_neighbours():
  """One key for each answer and position."""
  large, _ = draw(FULL, LARGE, 2)
  small, _ = draw(FULL, (32, 4), 0)
  same(small, jax.tree.map(lambda x: x[:, :4], large))
  single, _ = draw(FULL, (32, 1), 0)
  same(single, jax.tree.map(lambda x: x[:, :1], large))
  odd = jax.tree.map(lambda x: x[:31], prompts_of(32))
  sample, _ = sampler(FULL, 0, LONG, (1, 3), 1.0)
  alone = sample(cast(parameters(FULL)), keys(0, 32)[:31], odd, 1)
  same(alone, jax.tree.map(lambda x: x[:31], single))


def test_a_narrow_cache_is_moved_as_it_is():
  """bfloat16: moved and unmoved rows differ by its rounding alone."""
  config = dataclasses.replace(FULL, dtype="bfloat16")
  unpacked, _ = draw(config, SMALL, 0)
  packed, passes = draw(config, SMALL, 1)
  assert packed.log_probs.dtype == jnp.float32
  assert 16 in passes
  equal(packed.tokens, unpacked.tokens)
  close(packed.log_probs, unpacked.log_probs, rtol=0, atol=0.05)


def test_a_wrong_number_of_times_is_refused():
  with pytest.raises(ValueError, match="`packing` must be at least 0, got -1"):
    transformer.policy(FULL, length=2, packing=-1)
