"""Policies against scipy and enumeration: what is drawn is what is scored."""

import itertools
import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from groupstd import policies

VOCABULARY = 5
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


class Causal(nnx.Module):
  """Logits from the running mean of what came before, and some luggage."""

  def __init__(self, dtype=jnp.float32):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCABULARY, 8, rngs=rngs, dtype=dtype)
    self.dropout = nnx.Dropout(0.5, rngs=rngs, deterministic=True)
    self.mix = nnx.Linear(8, 8, rngs=rngs, dtype=dtype)
    self.head = nnx.Linear(8, VOCABULARY, rngs=rngs, dtype=dtype)

  def __call__(self, tokens):  # [N, L] → [N, L, V]
    x = jnp.cumsum(self.embed(tokens), axis=1)
    x = x / jnp.arange(1, tokens.shape[1] + 1)[:, None].astype(x.dtype)
    return 4 * self.head(jnp.tanh(4 * self.mix(self.dropout(x))))


STOPS = [(), (2, 4), (0,)]  # 0 also pads what has ended
TEXTS = {
  stop: policies.from_nnx(Causal(), length=3, stop=stop) for stop in STOPS
}
# A policy and four prompts for it.
POLICIES = {
  "bernoulli": (policies.bernoulli([0.1, 0.5, 0.7, 0.9]), jnp.arange(4)),
  "softmax": (policies.softmax(4, 6), jnp.arange(4)),
  "text": (TEXTS[2, 4], jnp.array([[1, 2], [3, 0], [1, 2], [4, 4]])),
}
KEY = jax.random.key(0)
SAMPLE = {
  name: jax.jit(policy.sample, static_argnums=3)
  for name, (policy, _) in POLICIES.items()
}
LOG_PROB = {
  name: jax.jit(policy.log_prob) for name, (policy, _) in POLICIES.items()
}


def keys(seed, number):
  return jax.random.split(jax.random.key(seed), number)


def moved(params):
  """Parameters that are not where the policy starts."""
  return jax.tree.map(lambda x: 1.25 * x + 0.1, params)


def within_five_sigma(counts, probabilities, draws):
  """Within five standard errors, and two counts where few are expected.

  A right policy leaves them at about one of a million seeds for each count.
  """
  error = np.abs(counts - draws * probabilities)
  sigma = np.sqrt(draws * probabilities * (1 - probabilities))
  assert (error <= 5 * sigma + 2).all()


# --- Any policy ---


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_drawn_is_what_is_scored(name):
  policy, prompts = POLICIES[name]
  params = moved(policy.init(KEY))
  drawn = SAMPLE[name](params, keys(1, 4), prompts, 16)
  assert jnp.issubdtype(drawn.tokens.dtype, jnp.integer)
  assert drawn.mask.dtype == bool
  length = 3 if name == "text" else 1
  for x in drawn[:3]:
    assert x.shape == (4, 16, length)
  log_probs = LOG_PROB[name](params, prompts, drawn.tokens)
  log_probs = np.where(drawn.mask, log_probs, 0)
  close(drawn.log_probs, log_probs, rtol=0, atol=1e-6)
  assert np.isfinite(log_probs).all()


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_is_answered_by_its_own_key_alone(name):
  """Whatever its neighbours in the batch, their keys and their number."""
  policy, prompts = POLICIES[name]
  params, four = policy.init(KEY), keys(1, 4)
  drawn = SAMPLE[name](params, four, prompts, 16)
  again = SAMPLE[name](params, four, prompts, 16)
  order = jnp.array([2, 0, 3, 1])
  shuffled = SAMPLE[name](params, four[order], prompts[order], 16)
  alone = SAMPLE[name](params, four[1:2], prompts[1:2], 16)
  new_neighbours = jnp.where(jnp.arange(4) == 1, four, keys(2, 4))
  beside = SAMPLE[name](
    params, new_neighbours, prompts[jnp.array([3, 1, 1, 0])], 16
  )
  for one, other in [
    (drawn, again),
    (jax.tree.map(lambda x: x[order], drawn), shuffled),
    (jax.tree.map(lambda x: x[1:2], drawn), alone),
    (jax.tree.map(lambda x: x[1], drawn), jax.tree.map(lambda x: x[1], beside)),
  ]:
    equal(one.tokens, other.tokens)
    equal(one.mask, other.mask)
    close(one.log_probs, other.log_probs, rtol=0, atol=1e-6)
  assert (drawn.tokens[0] != beside.tokens[0]).any()
  assert (drawn.tokens[1, 1:] != drawn.tokens[1, :1]).any()


@pytest.mark.parametrize("name", POLICIES)
def test_entropy_is_that_of_what_each_token_is_drawn_from(name):
  """Σ −π log π over all tokens there are at a slot, and its gradient."""
  policy, prompts = POLICIES[name]
  params = moved(policy.init(KEY))
  tokens = SAMPLE[name](params, keys(1, 4), prompts, 3).tokens
  vocabulary = {"bernoulli": 2, "softmax": 6, "text": VOCABULARY}[name]
  slots = jnp.arange(tokens.shape[2])
  # A token changes the distribution of what follows it, never its own.
  every = jnp.where(
    slots == slots[:, None, None, None, None],
    jnp.arange(vocabulary)[:, None, None, None],
    tokens,
  )  # [S, V, B, G, T]

  def enumerated(params):
    score = jax.vmap(
      jax.vmap(lambda tokens: policy.log_prob(params, prompts, tokens))
    )
    log_probs = jnp.diagonal(score(every), axis1=0, axis2=4)  # [V, B, G, T]
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=0)

  def offered(params):
    return policy.log_prob_and_entropy(params, prompts, tokens)

  log_probs, entropies = jax.jit(offered)(params)
  assert log_probs.shape == entropies.shape == tokens.shape
  close(log_probs, LOG_PROB[name](params, prompts, tokens), rtol=0, atol=1e-6)
  close(entropies, jax.jit(enumerated)(params), rtol=0, atol=2e-6)
  signs = jnp.asarray(np.random.default_rng(0).normal(size=tokens.shape))
  slopes = [
    jax.jit(jax.grad(lambda params, f=f: jnp.sum(signs * f(params))))(params)
    for f in (enumerated, lambda params: offered(params)[1])
  ]
  jax.tree.map(lambda x, y: close(x, y, rtol=0, atol=1e-4), *slopes)


# --- Bernoulli ---


@pytest.mark.usefixtures("x64")
def test_bernoulli_scores_as_scipy_does():
  p = np.array([1e-6, 0.05, 0.5, 0.7, 1 - 1e-6])
  policy = policies.bernoulli(p)
  theta, prompts = policy.init(KEY), jnp.arange(5)
  close(theta, special.logit(p), rtol=1e-12)
  answers = jnp.broadcast_to(jnp.array([[0], [1]]), (5, 2, 1))
  log_probs = policy.log_prob(theta, prompts, answers)
  expected = stats.bernoulli.logpmf(answers[..., 0], p[:, None])
  close(log_probs[..., 0], expected, rtol=1e-9)
  close(jnp.exp(log_probs).sum(axis=1), 1, rtol=1e-12)
  _, entropies = policy.log_prob_and_entropy(theta, prompts, answers)
  expected = np.broadcast_to(stats.bernoulli.entropy(p)[:, None], (5, 2))
  close(entropies[..., 0], expected, rtol=1e-9)
  shuffled = policy.log_prob(theta, prompts[::-1], answers)
  equal(shuffled, log_probs[::-1])


def test_bernoulli_s_score_is_y_minus_p_and_its_contrast_one():
  """So that a group's update is σ²·w itself (arXiv:2607.00152, section 2)."""
  p = np.array([0.02, 0.3, 0.5, 0.98], np.float32)
  policy = policies.bernoulli(p)
  answers = jnp.broadcast_to(jnp.array([[0], [1]]), (4, 2, 1))
  scores = jax.jacrev(policy.log_prob)(
    policy.init(KEY), jnp.arange(4), answers
  )[:, :, 0]  # [prompt, answer, parameter]
  eye = np.eye(4)
  expected = (np.array([0, 1])[:, None] - p[:, None, None]) * eye[:, None]
  close(scores, expected, rtol=0, atol=2e-7)
  close(scores[:, 1] - scores[:, 0], eye, rtol=0, atol=2**-23)  # one rounding


def test_bernoulli_draws_binomial_groups():
  """Answers of a group are independent, and so are the groups."""
  p, groups, size = np.array([0.05, 0.3, 0.5, 0.9]), 20_000, 4
  policy = policies.bernoulli(p)
  prompts = jnp.repeat(jnp.arange(4), groups)
  drawn = jax.jit(policy.sample, static_argnums=3)(
    policy.init(KEY), keys(3, 4 * groups), prompts, size
  )
  k = drawn.tokens.sum(axis=(1, 2)).reshape(4, groups)
  counts = np.stack(
    [np.sum(k == right, axis=1) for right in range(size + 1)], 1
  )
  probabilities = stats.binom.pmf(np.arange(size + 1), size, p[:, None])
  within_five_sigma(counts, probabilities, groups)
  both = np.sum(k[:, ::2] * k[:, 1::2], axis=1)  # neighbouring groups
  mean, spread = size * p, size * p * (1 - p)
  sigma = np.sqrt(groups / 2 * ((spread + mean**2) ** 2 - mean**4))
  assert (np.abs(both - groups / 2 * mean**2) <= 5 * sigma).all()


def test_bernoulli_is_finite_at_extreme_logits():
  policy, prompts = policies.bernoulli([0.5] * 4), jnp.arange(4)
  answers = jnp.broadcast_to(jnp.array([[0], [1]]), (4, 2, 1))

  def log_prob(theta):
    return policy.log_prob(theta, prompts, answers)[..., 0]

  theta = jnp.array([-80.0, 80.0, -1e30, 1e30])
  expected = np.stack([-np.maximum(theta, 0), -np.maximum(-theta, 0)], axis=1)
  close(log_prob(theta), expected, rtol=1e-6, atol=1e-6)
  right = theta > 0
  scores = np.stack([-1.0 * right, 1.0 * ~right], axis=1)
  slopes = jax.jacrev(log_prob)(theta)
  close(slopes, scores[..., None] * np.eye(4)[:, None], rtol=0, atol=1e-6)
  drawn = policy.sample(theta, keys(0, 4), prompts, 8)
  equal(drawn.tokens[..., 0], np.repeat(right[:, None], 8, axis=1))

  def entropy(theta):
    return policy.log_prob_and_entropy(theta, prompts, answers)[1][:, 0, 0]

  close(entropy(theta), 0, rtol=0, atol=1e-6)
  close(jax.jacrev(entropy)(theta), 0, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, np.nan, np.inf])
def test_bernoulli_refuses_a_certain_start(bad):
  with pytest.raises(ValueError, match=rf"inside \(0, 1\), .*\[{bad:g}\.?\]"):
    policies.bernoulli([0.5, bad])


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_bernoulli_refuses_what_is_no_vector(shape):
  message = re.escape(f"must be [N] inside (0, 1), got shape {shape}")
  with pytest.raises(ValueError, match=message):
    policies.bernoulli(np.full(shape, 0.5))


# --- Softmax ---


def test_softmax_is_a_table():
  policy = policies.softmax(3, 6)
  params = policy.init(KEY)
  assert params.shape == (3, 6)
  assert (params != policy.init(jax.random.key(1))).all()
  prompts = jnp.array([2, 0])
  answers = jnp.broadcast_to(jnp.arange(6)[:, None], (2, 6, 1))
  log_probs, scores = (
    f(policy.log_prob)(params, prompts, answers)[:, :, 0]
    for f in (lambda f: f, jax.jacrev)
  )
  expected = special.log_softmax(np.asarray(params, float)[prompts], axis=-1)
  close(log_probs, expected, rtol=1e-6)
  close(np.exp(log_probs).sum(axis=1), 1, rtol=1e-6)
  pi = np.exp(expected)
  zero = np.zeros((6, 6))
  close(
    scores,
    np.stack(
      [[zero, zero, np.eye(6) - pi[0]], [np.eye(6) - pi[1], zero, zero]]
    ).swapaxes(1, 2),
    rtol=0,
    atol=3e-7,
  )
  draws = 20_000
  drawn = policy.sample(params, keys(4, 2), prompts, draws)
  counts = [np.bincount(row, minlength=6) for row in drawn.tokens[..., 0]]
  within_five_sigma(np.stack(counts), pi, draws)


def test_what_is_impossible_adds_nothing_to_an_entropy():
  """0·log 0 is 0, and so is its gradient: two fair answers of five, log 2."""
  policy, answers = policies.softmax(1, 5), jnp.zeros((1, 1, 1), int)
  params = jnp.array([[0, -jnp.inf, 0, -jnp.inf, -jnp.inf]])

  def entropy(params):
    scored = policy.log_prob_and_entropy(params, jnp.array([0]), answers)
    return scored[1].sum()

  value, slope = jax.value_and_grad(entropy)(params)
  close(value, np.log(2), rtol=1e-6)
  close(slope, 0, rtol=0, atol=1e-6)


# --- flax.nnx ---


def test_text_is_scored_by_its_prefixes():
  """Each token by a forward pass over what is before it, and no more."""
  policy, prompts = POLICIES["text"]
  params = moved(policy.init(KEY))
  module = Causal()
  nnx.update(module, params)
  tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4, 6, 3))
  log_probs = LOG_PROB["text"](params, prompts, tokens)
  sequences = np.concatenate([np.repeat(prompts[:, None], 6, 1), tokens], -1)
  for t in range(3):
    prefixes = sequences[..., : 2 + t].reshape(24, -1)
    logits = np.asarray(jax.jit(module)(jnp.asarray(prefixes)), float)[:, -1]
    expected = special.log_softmax(logits, axis=-1).reshape(4, 6, VOCABULARY)
    picked = np.take_along_axis(expected, tokens[:, :, t : t + 1], -1)[..., 0]
    close(log_probs[..., t], picked, rtol=0, atol=2e-6)


@pytest.mark.parametrize("stop", STOPS)
def test_answers_end_with_their_stop_and_probabilities_sum_to_one(stop):
  """All answers there are, against the frequencies of those drawn."""
  policy = TEXTS[stop]
  params, prompts = policy.init(KEY), jnp.array([[1, 2]])
  answers = set()
  for text in itertools.product(range(VOCABULARY), repeat=3):
    ends = [t for t, token in enumerate(text) if token in stop]
    answers.add(text[: ends[0] + 1] if ends else text)
  answers = sorted(answers)
  padded = np.array([[*text, 0, 0][:3] for text in answers])
  mask = np.arange(3) < np.array([[len(text)] for text in answers])
  log_probs = LOG_PROB["text"](params, prompts, padded[None])[0]
  probabilities = np.exp(np.sum(log_probs * mask, axis=1, dtype=float))
  close(probabilities.sum(), 1, rtol=1e-6)

  draws = 200 * 100
  drawn = jax.jit(policy.sample, static_argnums=3)(
    params, keys(5, 200), jnp.tile(prompts, (200, 1)), 100
  )
  tokens, masks = (np.reshape(x, (draws, 3)) for x in drawn[:2])
  equal(masks, np.arange(3) < masks.sum(axis=1, keepdims=True))
  equal(tokens[~masks], 0)
  counts = dict.fromkeys(answers, 0)
  for row, length in zip(tokens.tolist(), masks.sum(axis=1), strict=True):
    counts[tuple(row[:length])] += 1  # a KeyError if it ends elsewhere
  within_five_sigma(np.array([*counts.values()]), probabilities, draws)


def test_parameters_are_a_plain_dict_of_one_s_own():
  policy, prompts = POLICIES["text"]
  params = policy.init(KEY)
  assert type(params) is dict
  assert set(params) == {"embed", "mix", "head"}  # and not dropout's keys
  for layer in params.values():
    assert type(layer) is dict
    for leaf in layer.values():
      assert isinstance(leaf, jax.Array)
      leaf.delete()  # as donating it would
  drawn = SAMPLE["text"](policy.init(KEY), keys(0, 4), prompts, 16)
  assert np.isfinite(drawn.log_probs).all()


def test_log_softmax_is_in_float32_at_least():
  policy = policies.from_nnx(Causal(jnp.bfloat16), length=1)
  every = jnp.arange(VOCABULARY)[None, :, None]
  prompts = jnp.array([[1, 2]])
  log_probs = jax.jit(policy.log_prob)(policy.init(KEY), prompts, every)
  assert log_probs.dtype == jnp.float32
  close(np.exp(log_probs).sum(), 1, rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 0), (2,), (2, 1, 3)])
def test_prompts_are_rows_of_tokens(shape):
  policy = TEXTS[()]
  params, prompts = policy.init(KEY), jnp.ones(shape, int)
  message = re.escape("[B, P] with P at least 1") + ".*" + re.escape(f"{shape}")
  with pytest.raises(ValueError, match=message):
    policy.sample(params, keys(0, 2), prompts, 2)
  with pytest.raises(ValueError, match=message):
    policy.log_prob(params, prompts, jnp.ones((2, 2, 3), int))


@pytest.mark.parametrize("length", [0, -1])
def test_an_answer_has_room_for_a_token(length):
  with pytest.raises(ValueError, match=f"`length` .* at least 1, got {length}"):
    policies.from_nnx(Causal(), length=length)
