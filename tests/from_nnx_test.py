"""Networks as policies: prompts of mixed length, temperature, and stops."""

import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from groupstd import policies

VOCABULARY, LENGTH = 5, 3
POSITIONS = ["none", "learned", "rotary"]
TEMPERATURES = [0.6, 1.0, 1.3]
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


class Attention(nnx.Module):
  """One causal head that tells positions apart in one of three ways."""

  def __init__(self, positions):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCABULARY, 8, rngs=rngs)
    self.places = nnx.Embed(16, 8, rngs=rngs)
    self.mix = nnx.Linear(8, 24, rngs=rngs)
    self.head = nnx.Linear(8, VOCABULARY, rngs=rngs)
    self.learned = positions == "learned"
    self.frequency = 0.7 if positions == "rotary" else 0.0

  def __call__(self, tokens):  # [N, L] → [N, L, V]
    place = jnp.arange(tokens.shape[1])
    x = 2 * self.embed(tokens) + 2 * self.learned * self.places(place)
    query, key, value = jnp.split(4 * self.mix(x), 3, axis=-1)
    turn = jnp.exp(1j * self.frequency * place)[:, None]
    query, key = (
      turn * jax.lax.complex(y[..., :4], y[..., 4:]) for y in (query, key)
    )
    scores = jnp.einsum("nid,njd->nij", query, key.conj()).real
    scores = jnp.where(place[:, None] >= place, scores, -jnp.inf)
    return 2 * self.head(x + jax.nn.softmax(scores) @ value)


class Successor(nnx.Module):
  """After each token, all but certainly, the one that the list names."""

  def __init__(self, successors):
    size = len(successors)
    self.logits = nnx.Param(100 * jnp.eye(size)[jnp.array(successors)])
    self.runs = []

  def __call__(self, tokens):
    jax.debug.callback(lambda: self.runs.append(1))
    return self.logits[...][tokens]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """What runs once is compiled for longer than it runs."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def double(params):
  return jax.tree.map(lambda x: x.astype(jnp.float64), params)


def keys(seed, number):
  return jax.random.split(jax.random.key(seed), number)


def layouts(rows):
  """The rows padded on the right, the left, both and inside, with anything."""
  rng = np.random.default_rng(0)
  widths = [("right", 3), ("left", 3), ("right", 6), ("left", 6), ("holes", 6)]
  for side, width in widths:
    mask = np.zeros((len(rows), width), bool)
    tokens = rng.choice([-7, 0, 1, 4, 99], mask.shape)
    for i, row in enumerate(rows):
      where = {
        "right": np.arange(len(row)),
        "left": np.arange(width - len(row), width),
        "holes": np.sort(rng.permutation(width)[: len(row)]),
      }[side]
      tokens[i, where], mask[i, where] = row, True
    index = jnp.arange(len(rows))
    yield policies.Prompts(jnp.asarray(tokens), jnp.asarray(mask), index)


# --- Prompts of mixed length ---

ROWS = [[1, 2, 3], [4], [0, 2], [3, 0, 0]]


@pytest.mark.parametrize(
  ("positions", "temperature"),
  [("none", 0.6), ("learned", 1.0), ("rotary", 1.3)],
)
@pytest.mark.usefixtures("x64")
def test_a_padded_prompt_is_scored_as_if_it_stood_alone(positions, temperature):
  """By the module itself on the very tokens, without any padding."""
  network = Attention(positions)
  nnx.update(network, double(nnx.state(network)))
  module = nnx.jit(network)
  policy = policies.from_nnx(
    Attention(positions), length=LENGTH, temperature=temperature
  )
  params = double(policy.init(jax.random.key(0)))
  answers = np.random.default_rng(1).integers(0, VOCABULARY, (4, 2, LENGTH))
  expected = np.zeros(answers.shape)
  for i, row in enumerate(ROWS):
    text = np.concatenate([np.tile(row, (2, 1)), answers[i]], axis=1)
    logits = np.asarray(module(text), float)[:, -LENGTH - 1 : -1]
    scores = special.log_softmax(logits / temperature, axis=-1)
    picked = np.take_along_axis(scores, answers[i][..., None], axis=-1)
    expected[i] = picked[..., 0]
  log_prob = jax.jit(policy.log_prob)
  for prompts in layouts(ROWS):
    log_probs = log_prob(params, prompts, answers)
    close(log_probs, expected, rtol=0, atol=1e-12)
  alone = log_prob(params, jnp.array(ROWS[:1]), answers[:1])
  close(alone, expected[:1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_changes_neither_tokens_nor_log_probs(positions):
  policy = policies.from_nnx(Attention(positions), length=LENGTH, stop=(1, 3))
  params = policy.init(jax.random.key(0))
  sample = jax.jit(policy.sample, static_argnums=3)
  first, *others = (
    sample(params, keys(0, 4), prompts, 16) for prompts in layouts(ROWS)
  )
  assert 0 < first.ended.mean() < 1
  for other in others:
    equal(other.tokens, first.tokens)
    equal(other.mask, first.mask)
    equal(other.ended, first.ended)
    close(other.log_probs, first.log_probs, rtol=0, atol=1e-6)
  alone = sample(params, keys(0, 4)[:1], jnp.array(ROWS[:1]), 16)
  equal(alone.tokens, first.tokens[:1])


def test_a_prompt_of_padding_alone_is_refused_where_it_can_be_seen():
  policy = policies.from_nnx(Attention("learned"), length=LENGTH, stop=(1,))
  params = policy.init(jax.random.key(0))
  tokens, answers = jnp.full((3, 2), 4), jnp.ones((3, 2, LENGTH), int)
  mask = jnp.array([[True, True], [False, False], [False, True]])
  prompts = policies.Prompts(tokens, mask, jnp.arange(3))
  message = r"must have a real token, got none in rows \[1\]"
  with pytest.raises(ValueError, match=message):
    policy.sample(params, keys(0, 3), prompts, 2)
  with pytest.raises(ValueError, match=message):
    policy.log_prob(params, prompts, answers)
  # Inside jit it cannot: finite, its gradient too, and no matter of others.
  drawn = jax.jit(policy.sample, static_argnums=3)(
    params, keys(0, 3), prompts, 2
  )
  assert np.isfinite(drawn.log_probs).all()
  value, slope = jax.jit(
    jax.value_and_grad(lambda *args: policy.log_prob(*args).sum())
  )(params, prompts, answers)
  assert np.isfinite([value, *map(jnp.sum, jax.tree.leaves(slope))]).all()
  log_prob, others = jax.jit(policy.log_prob), jnp.array([0, 2])
  kept = jax.tree.map(lambda x: x[others], prompts)
  scored = log_prob(params, prompts, answers)
  close(
    scored[others],
    log_prob(params, kept, answers[others]),
    rtol=0,
    atol=1e-6,
  )
  zero = log_prob(params, jnp.array([[0]]), answers[1:2])
  close(scored[1:2], zero, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 2), (2,), (2, 3, 1)])
def test_a_mask_is_of_its_prompts(shape):
  policy = policies.from_nnx(Attention("none"), length=LENGTH)
  prompts = policies.Prompts(
    jnp.ones((2, 3), int), jnp.ones(shape, bool), jnp.arange(2)
  )
  message = re.escape(f"so must their mask, got (2, 3) and {shape}")
  with pytest.raises(ValueError, match=message):
    policy.sample(policy.init(keys(0, 1)[0]), keys(0, 2), prompts, 2)


# --- Temperature ---


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_first_ratio_is_one_at_any_temperature(temperature):
  """What was drawn is scored at the temperature that it was drawn at."""
  policy = policies.from_nnx(
    Attention("learned"), length=LENGTH, stop=(2,), temperature=temperature
  )
  params = policy.init(jax.random.key(0))
  *_, prompts = layouts(ROWS)
  drawn = jax.jit(policy.sample, static_argnums=3)(
    params, keys(0, 4), prompts, 8
  )
  scored, _ = jax.jit(policy.log_prob_and_entropy)(
    params, prompts, drawn.tokens
  )
  ratio = np.exp(np.where(drawn.mask, scored - drawn.log_probs, 0))
  close(ratio, 1, rtol=0, atol=5e-6)
  assert not drawn.mask.all()
  equal(drawn.log_probs[~drawn.mask], 0)


def test_three_logits_at_a_temperature():
  """softmax([2, 1, 0] / T), drawn, scored, and of that entropy.

  Behaviour at T = 0.6 beside a trainer at 1 would begin at ratios of about
  0.8, 1.6 and 3.1.
  """
  module = Successor([0, 1, 2])
  module.logits[...] = jnp.tile(jnp.array([2.0, 1, 0]), (3, 1))
  every, prompts = jnp.arange(3)[None, :, None], jnp.array([[0]])
  log_probs = {}
  for t in TEMPERATURES:
    policy = policies.from_nnx(module, length=1, temperature=t)
    params = policy.init(jax.random.key(0))
    log_probs[t], entropies = policy.log_prob_and_entropy(
      params, prompts, every
    )
    pi = special.softmax(np.array([2, 1, 0]) / t)
    close(np.exp(log_probs[t])[0, :, 0], pi, rtol=2e-6)
    close(entropies[0, :, 0], special.entr(pi).sum(), rtol=2e-6)
    draws = 20_000
    drawn = policy.sample(params, keys(0, 1), prompts, draws)
    assert drawn.ended is None  # One token each, as was asked for.
    counts = np.bincount(drawn.tokens.ravel(), minlength=3)
    # Five standard errors: passed by all but one of a million seeds.
    error = 5 * np.sqrt(draws * pi * (1 - pi))
    assert (np.abs(counts - draws * pi) <= error).all()
    picked = np.asarray(log_probs[t])[0, drawn.tokens[0, :, 0], 0]
    close(drawn.log_probs[0, :, 0], picked, rtol=0, atol=1e-6)
  welded = np.exp(log_probs[1.0] - log_probs[0.6])[0, :, 0]
  close(welded, [0.815, 1.587, 3.090], rtol=0, atol=1e-3)


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, np.inf, np.nan])
def test_a_temperature_is_positive_and_finite(bad):
  message = f"`temperature` must be positive and finite, got {bad}"
  with pytest.raises(ValueError, match=message):
    policies.from_nnx(Attention("none"), length=1, temperature=bad)


# --- Where answers end ---

# 7 → 4 → 5 → 1, 3 → 6, 8 → 0, 2 → 2: chains to each of three stops, 0 among
# them, which also pads what has ended, and one that goes round for ever.
SUCCESSORS = [2, 2, 2, 6, 5, 1, 2, 4, 0]
STOPS = (0, 1, 6)
ENDS = {  # prompt: (answer, whether it ended by itself)
  7: ([4, 5, 1], True),  # at the last slot there is
  4: ([5, 1], True),
  3: ([6], True),  # nothing but its end
  8: ([0], True),
  2: ([2, 2, 2], False),
}


def test_an_answer_ends_with_whichever_stop_comes_first():
  policy = policies.from_nnx(Successor(SUCCESSORS), length=3, stop=STOPS)
  prompts = jnp.array([*ENDS])[:, None]
  drawn = policy.sample(policy.init(keys(0, 1)[0]), keys(0, 5), prompts, 2)
  for i, (answer, ended) in enumerate(ENDS.values()):
    padding = [0] * (3 - len(answer))
    for g in range(2):
      equal(drawn.tokens[i, g], answer + padding)
      equal(drawn.mask[i, g], [True] * len(answer) + [False] * len(padding))
      equal(drawn.ended[i, g], ended)
  close(drawn.log_probs, 0, rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2])
def test_a_cut_off_answer_has_not_ended(length):
  policy = policies.from_nnx(Successor(SUCCESSORS), length=length, stop=STOPS)
  prompts = jnp.array([*ENDS])[:, None]
  drawn = policy.sample(policy.init(keys(0, 1)[0]), keys(0, 5), prompts, 2)
  expected = [
    ended and len(answer) <= length for answer, ended in ENDS.values()
  ]
  equal(drawn.ended, np.repeat(np.array(expected)[:, None], 2, axis=1))
  assert drawn.mask.shape == (5, 2, length)


def test_without_stops_every_answer_is_whole():
  policy = policies.from_nnx(Successor(SUCCESSORS), length=3)
  params = policy.init(keys(0, 1)[0])
  drawn = policy.sample(params, keys(0, 2), jnp.array([[4], [8]]), 2)
  assert drawn.ended is None
  assert drawn.mask.all()
  equal(drawn.tokens[:, 0], [[5, 1, 2], [0, 2, 2]])


def test_drawing_stops_when_all_have_ended():
  module = Successor(SUCCESSORS)
  policy = policies.from_nnx(module, length=500, stop=STOPS)
  params = policy.init(keys(0, 1)[0])
  sample = jax.jit(policy.sample, static_argnums=3)
  for prompts, runs in [([3, 8], 1), ([3, 4], 2), ([7, 8], 3)]:
    module.runs.clear()
    drawn = sample(params, keys(0, 2), jnp.array(prompts)[:, None], 2)
    jax.block_until_ready(drawn)
    jax.effects_barrier()
    assert len(module.runs) == runs
    assert drawn.tokens.shape == (2, 2, 500)
    assert drawn.ended.all()


def test_what_stands_behind_an_answer_moves_nothing():
  """Neither log-probs nor gradient, where masked slots are selected away."""
  policy = policies.from_nnx(Attention("learned"), length=LENGTH, stop=(2,))
  params = policy.init(jax.random.key(0))
  *_, prompts = layouts(ROWS)
  drawn = policy.sample(params, keys(0, 4), prompts, 8)
  assert not drawn.mask.all()
  anything = np.random.default_rng(0).integers(0, VOCABULARY, (4, 8, LENGTH))
  slope = jax.jit(
    jax.value_and_grad(
      lambda params, tokens: jnp.sum(
        jnp.where(drawn.mask, policy.log_prob(params, prompts, tokens), 0)
      )
    )
  )
  jax.tree.map(
    lambda x, y: close(x, y, rtol=0, atol=1e-5),
    slope(params, drawn.tokens),
    slope(params, jnp.where(drawn.mask, drawn.tokens, anything)),
  )


def test_answers_of_no_slots_have_no_log_probs():
  policy = policies.from_nnx(Attention("none"), length=LENGTH)
  params = policy.init(jax.random.key(0))
  answers = jnp.zeros((2, 3, 0), int)
  scored = policy.log_prob_and_entropy(params, jnp.array([[1], [2]]), answers)
  for x in scored:
    assert x.shape == answers.shape


# --- Parameters ---


def test_a_module_split_and_merged_is_itself():
  module = Attention("learned")
  params, merge = policies.split(module)
  tokens = jnp.array([[1, 2, 3]])
  equal(merge(params)(tokens), module(tokens))
  backwards = {
    name: dict(reversed(layer.items()))
    for name, layer in reversed(params.items())
  }
  equal(merge(backwards)(tokens), module(tokens))
  halved = merge(jax.tree.map(lambda x: x / 2, params))
  assert (halved(tokens) != module(tokens)).any()


def test_parameters_go_by_name_and_shape_and_never_by_order():
  module = Attention("none")
  policy = policies.from_nnx(module, length=1)
  params, merge = policies.split(module)
  prompts, tokens = jnp.array([[1]]), jnp.ones((1, 2, 1), int)
  head, mix = params["head"], params["mix"]
  others = {name: layer for name, layer in params.items() if name != "mix"}
  for wrong, named in [
    (others, "got ['mix']['bias'] missing for (24,);"),
    (others | {"mixer": mix}, "; ['mixer']['bias'] (24,) for nothing;"),
    (
      params | {"more": {"bias": jnp.zeros(1)}},
      "got ['more']['bias'] (1,) for nothing:",
    ),
    (params | {"mix": head}, "; ['mix']['kernel'] (8, 5) for (8, 24):"),
    (
      params | {"mix": {"bias": mix["bias"]}},
      "got ['mix']['kernel'] missing for (8, 24):",
    ),
    (
      params | {"mix": mix | {"bias": mix["bias"][:, None]}},
      "got ['mix']['bias'] (24, 1) for (24,):",
    ),
    (
      params | {"head": head | {"kernel": head["kernel"].T}},
      "got ['head']['kernel'] (5, 8) for (8, 5):",
    ),
    (list(params.values()), "got ['embed']['embedding'] missing for (5, 8);"),
  ]:
    for call in (
      merge,
      lambda wrong: policy.sample(wrong, keys(0, 1), prompts, 2),
      lambda wrong: policy.log_prob(wrong, prompts, tokens),
      lambda wrong: policy.log_prob_and_entropy(wrong, prompts, tokens),
    ):
      with pytest.raises(ValueError, match=re.escape(named)):
        call(wrong)
