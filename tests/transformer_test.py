"""The decoder, in training, against one in plain numpy and against itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from plain_decoder import (
  FULL,
  PLAIN,
  ROWS,
  cast,
  log_softmaxes,
  logits,
  module,
  padded,
  parameters,
)
import pytest
from scipy import special

from groupstd import policies, sigma, testing, transformer

LENGTH = 3
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """What runs once is compiled for longer than it runs."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def answers(config, group_size=2, length=LENGTH, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(config.vocab_size, size=(len(ROWS), group_size, length))


def near(found, expected, rtol):
  """Leaf by leaf, in norm."""
  jax.tree.map(
    lambda x, y: close(
      np.linalg.norm(np.asarray(x) - y), 0, atol=rtol * np.linalg.norm(y)
    ),
    found,
    expected,
  )


def value_and_gradients(policy, params, prompts, tokens):
  """Log-probs and entropies, and the gradient of a weighted sum of both."""
  rng = np.random.default_rng(1)
  weights = rng.standard_normal((2, *np.shape(tokens)))

  def total(params):
    found = policy.log_prob_and_entropy(params, prompts, tokens)
    return sum(jnp.sum(w * x) for w, x in zip(weights, found, strict=True)), (
      found
    )

  (_, found), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
  return found, slope


# --- The function itself ---


@pytest.mark.parametrize(
  "config",
  [
    PLAIN,
    FULL,
    dataclasses.replace(FULL, qk_norm=False, tied=True, head_dim=2),
    dataclasses.replace(PLAIN, qk_norm=True, num_kv_heads=1, remat=True),
  ],
  ids=["llama", "all", "qwen2", "qwen3"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_it_is_the_decoder_written_out_in_numpy(config, dtype):
  rtol = 1e-5 if dtype == np.float32 else 1e-10
  with jax.enable_x64(dtype == np.float64):
    params = cast(parameters(config), dtype)
    _, merge = policies.split(module(config))
    policy = transformer.policy(config, length=LENGTH, temperature=0.7)
    prompts, tokens = padded(side="holes"), answers(config)
    text = [3, 1, 4, 1, 5]
    found, (log_probs, entropies), alone = jax.jit(
      lambda params: (
        merge(params)(jnp.array([text]))[0],
        policy.log_prob_and_entropy(params, prompts, tokens),
        policy.log_prob(params, prompts, tokens),
      )
    )(params)
  assert found.dtype == log_probs.dtype == dtype
  close(found, logits(config, params, text), rtol=rtol, atol=rtol)
  equal(alone, log_probs)
  for i, row in enumerate(ROWS):
    for g, answer in enumerate(tokens[i]):
      expected = log_softmaxes(config, params, row, answer, 0.7)
      picked = expected[np.arange(LENGTH), answer]
      close(log_probs[i, g], picked, rtol=rtol, atol=rtol)
      entropy = special.entr(np.exp(expected)).sum(axis=-1)
      close(entropies[i, g], entropy, rtol=rtol, atol=rtol)


def test_bfloat16_has_log_probs_in_float32():
  """They sum to 1, to float32's rounding and not to bfloat16's, 2⁻⁸."""
  config = dataclasses.replace(FULL, dtype="bfloat16")
  policy = transformer.policy(config, length=2, stop=(1,))
  params, prompts = cast(parameters(config)), padded()
  vocabulary = np.arange(config.vocab_size)
  tokens = np.stack([vocabulary, vocabulary], axis=-1)
  tokens = np.tile(tokens, (len(ROWS), 1, 1))
  log_probs = jax.jit(policy.log_prob)(params, prompts, tokens)
  assert log_probs.dtype == np.float32
  close(np.exp(log_probs[..., 0]).sum(axis=1), 1, rtol=0, atol=1e-6)
  exact = [log_softmaxes(config, params, row, [0])[0] for row in ROWS]
  close(log_probs[..., 0], exact, rtol=0, atol=0.1)
  assert (
    np.abs(np.subtract(log_probs[..., 0], exact)).max() > 1e-4
  )  # It is bfloat16.
  sample = jax.jit(policy.sample, static_argnums=3)
  drawn = sample(params, jax.random.split(jax.random.key(0), 4), prompts, 2)
  assert drawn.log_probs.dtype == np.float32


# --- What is computed once, or in parts ---


@functools.cache
def in_parts(**options):
  config = dataclasses.replace(FULL, **options)
  policy = transformer.policy(config, length=4, temperature=0.7)
  params = cast(parameters(FULL), np.float64)
  tokens = answers(FULL, length=4)
  return value_and_gradients(policy, params, padded(side="holes"), tokens)


def test_a_shared_prompt_is_a_prompt_to_each_answer(x64):
  """Against all of prompt and answer anew for each, and groups of one."""
  prompts, tokens = padded(side="holes"), answers(FULL, length=4)
  params = cast(parameters(FULL), np.float64)
  alone = policies.from_nnx(module(FULL), length=4, temperature=0.7)
  anew = value_and_gradients(alone, params, prompts, tokens)
  near(in_parts(), anew, 1e-11)
  policy = transformer.policy(FULL, length=4, temperature=0.7)
  prompts = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), prompts)
  found, slope = value_and_gradients(
    policy, params, prompts, tokens.reshape(-1, 1, 4)
  )
  found = tuple(x.reshape(tokens.shape) for x in found)
  near((found, slope), anew, 1e-11)


def test_chunks_and_rematerialisation_change_no_number(x64):
  """Chunks that divide T and that do not."""
  near(in_parts(chunk=2), in_parts(), 1e-12)
  near(in_parts(chunk=3, remat=True), in_parts(), 1e-12)


def test_chunks_and_rematerialisation_keep_less_for_the_gradient():
  prompts = padded()

  def kept(**options):
    """Numbers held from the forward pass to the backward."""
    config = transformer.Config(1000, width=8, num_heads=2, **options)
    policy = transformer.policy(config, length=16)
    params, _ = policies.split(module(config))
    tokens = answers(config, length=16)
    backward = jax.eval_shape(
      lambda params: jax.vjp(
        lambda params: policy.log_prob(params, prompts, tokens), params
      )[1],
      params,
    )
    return sum(x.size for x in jax.tree.leaves(backward))

  logits, whole = len(ROWS) * 2 * 16 * 1000, kept()
  assert whole > logits
  assert kept(chunk=17) == whole  # Longer than an answer, one is all of it.
  assert kept(chunk=4) < whole - 0.9 * logits
  assert kept(chunk=4, remat=True) < kept(chunk=4) / 2


# --- What must not matter ---


def test_what_stands_in_masked_slots_matters_to_nothing():
  """Bit for bit, any padding and any token behind an answer's end."""
  rng = np.random.default_rng(0)
  tokens = answers(FULL, length=4)
  mask = np.arange(4) < rng.integers(1, 5, tokens.shape[:2])[..., None]
  assert not mask.all()
  params = cast(parameters(FULL))
  policy = transformer.policy(FULL, length=4, stop=(1,))

  @jax.jit
  @jax.value_and_grad
  def scored(params, prompts, tokens):
    found = policy.log_prob_and_entropy(params, prompts, tokens)
    return sum(jnp.sum(jnp.where(mask, x, 0)) for x in found)

  clean = scored(params, padded(side="holes"), tokens)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean))
  for anything in [1, 6, 7, -1, -100, 2**31 - 1, -(2**31)]:
    prompts = padded(side="holes", fill=anything)
    dirty = scored(params, prompts, np.where(mask, tokens, anything))
    jax.tree.map(equal, dirty, clean)


def test_an_answer_outside_the_vocabulary_has_no_log_prob():
  """NaN, which the learner counts and does not train on; its own alone."""
  policy = transformer.policy(FULL, length=LENGTH)
  params, tokens = cast(parameters(FULL)), answers(FULL)
  tokens[1, 1, 2] = FULL.vocab_size
  log_probs = jax.jit(policy.log_prob)(params, padded(), tokens)
  equal(np.argwhere(np.isnan(log_probs)), [[1, 1, 2]])


def test_answers_of_no_slots_have_no_log_probs():
  policy = transformer.policy(FULL, length=1)
  tokens = answers(FULL, length=0)
  params = cast(parameters(FULL))
  for x in jax.jit(policy.log_prob_and_entropy)(params, padded(), tokens):
    assert x.shape == tokens.shape


# --- In the learner ---


@functools.cache
def stopped():
  policy = transformer.policy(FULL, length=LENGTH, stop=(1, 2), temperature=1.3)
  return policy._replace(sample=jax.jit(policy.sample, static_argnums=3))


@pytest.mark.parametrize(
  "op",
  [sigma.divide(), sigma.identity(), sigma.dapo()],
  ids=["divide", "identity", "dapo"],
)
def test_the_update_is_its_gain_times_the_contrast(op):
  """arXiv:2607.00152, Theorem 1, on a network."""
  prompts = jax.tree.map(lambda x: x[:1], padded())
  params = cast(parameters(FULL))
  testing.assert_identity(
    stopped(), op, prompts=prompts, params=params, group_size=4, rtol=1e-5
  )


# --- What is refused ---


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"vocab_size": 0}, "`vocab_size` must be at least 1, got 0"),
    ({"num_layers": 0}, "`num_layers` must be at least 1, got 0"),
    ({"num_heads": -1}, "`num_heads` must be at least 1, got -1"),
    ({"num_kv_heads": 0}, "`num_kv_heads` must be at least 1, got 0"),
    ({"hidden": 0}, "`hidden` must be at least 1, got 0"),
    ({"chunk": 0}, "`chunk` must be at least 1, got 0"),
    ({"rope_theta": 0.0}, "`rope_theta` must be positive and finite, got 0.0"),
    ({"norm_eps": np.nan}, "`norm_eps` must be positive and finite, got nan"),
    (
      {"num_kv_heads": 3},
      "`num_kv_heads` must divide `num_heads`, got 3 and 4",
    ),
    (
      {"num_kv_heads": 8},
      "`num_kv_heads` must divide `num_heads`, got 8 and 4",
    ),
    ({"width": 6}, "`num_heads` must divide `width` .* got 4 and 6"),
    ({"head_dim": 3}, "`head_dim` must be even, got 3"),
    ({"width": 12}, "`head_dim` must be even, got 3"),
  ],
)
def test_a_shape_that_no_decoder_has(options, message):
  with pytest.raises(ValueError, match=message):
    transformer.Config(**{"vocab_size": 5, **options})


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"length": 0}, "`length` must be at least 1, got 0"),
    ({"temperature": -0.1}, "`temperature` must be at least 0 .* got -0.1"),
    ({"temperature": np.nan}, "`temperature` must be at least 0 .* got nan"),
    ({"temperature": np.inf}, "`temperature` must be at least 0 .* got inf"),
    ({"stop": (1, 7)}, r"`stop` must hold tokens below the 7 .* got \[7\]"),
    ({"stop": (-1, 0)}, r"`stop` must hold tokens below the 7 .* got \[-1\]"),
  ],
)
def test_a_policy_that_cannot_be(options, message):
  with pytest.raises(ValueError, match=message):
    transformer.policy(FULL, **{"length": LENGTH, **options})


def test_the_likeliest_answer_does_not_train():
  policy = transformer.policy(FULL, length=LENGTH, temperature=0)
  for function in policy.log_prob, policy.log_prob_and_entropy:
    with pytest.raises(ValueError, match="`temperature` must be above 0"):
      function(cast(parameters(FULL)), padded(), answers(FULL))


def test_parameters_are_its_own():
  policy = transformer.policy(FULL, length=LENGTH)
  params = policy.init(jax.random.key(0))
  found = jax.tree.map(lambda x: (x.shape, x.dtype), params)
  expected, _ = policies.split(module(FULL))
  assert found == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
  jax.tree.map(equal, params, policy.init(jax.random.key(0)))
  other = cast(parameters(PLAIN))
  with pytest.raises(ValueError, match="the parameters' paths and shapes"):
    policy.log_prob(other, padded(), answers(FULL))
  with pytest.raises(ValueError, match="the parameters' paths and shapes"):
    policy.sample(other, jax.random.split(jax.random.key(0), 4), padded(), 2)
