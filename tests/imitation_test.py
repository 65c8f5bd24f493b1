"""Imitation is maximum likelihood: its gradient, its masks, its end."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from groupstd import imitation, policies, transformer

pytestmark = pytest.mark.usefixtures("compiled_quickly")

CONFIG = transformer.Config(7, width=16, num_layers=1, num_heads=1, hidden=32)


def test_the_gradient_is_that_of_the_mean_log_prob():
  """−Σ mask·s / Σ mask with a softmax table's score s by hand."""
  rollout = by_hand.batch()
  learner = imitation.learner(by_hand.TABLE, by_hand.KEEP_GRADIENT)
  examples = rollout.prompts, rollout.tokens, rollout.mask
  state, info = learner.step(
    learner.init(jnp.asarray(by_hand.PARAMS)), examples
  )
  total = rollout.mask.sum()
  expected = -by_hand.ascent(rollout, np.ones(rollout.mask.shape)) / total
  gradient = state.opt_state.trace
  np.testing.assert_allclose(gradient, expected, atol=1e-6)
  log_probs = by_hand.TABLE.log_prob(by_hand.PARAMS, *examples[:2])
  loss = -np.mean(np.asarray(log_probs)[rollout.mask])
  assert info.loss == pytest.approx(loss, rel=1e-6)
  assert info.grad_norm == pytest.approx(np.linalg.norm(expected), rel=1e-5)
  assert not info.nonfinite
  assert state.step == 1


def examples(length=4, pad=0):
  """Four prompts with an answer each, of 1 to 4 tokens."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, 7, (4, 1, 4))
  mask = np.arange(length) < np.arange(1, 5)[:, None, None]
  tokens = np.pad(tokens, [(0, 0), (0, 0), (0, length - 4)])
  tokens = np.where(mask, tokens, pad)
  asked = rng.integers(1, 7, (4, 3))
  prompts = policies.Prompts(asked, np.ones((4, 3), bool), np.arange(4))
  return prompts, tokens, mask


def test_what_padding_holds_and_how_much_there_is_changes_nothing():
  found = []
  for length, pad in (4, 0), (6, 3):
    policy = transformer.policy(CONFIG, length=length, stop=(1,))
    learner = imitation.learner(policy, optax.sgd(0.1))
    state = learner.init(policy.init(jax.random.key(0)))
    found.append(jax.jit(learner.step)(state, examples(length, pad)))
  for other in found[1:]:
    # Rounding of sums of another length, in float32.
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found[0], other
    )


def test_the_loss_falls_to_0_and_the_likeliest_answers_are_the_examples():
  policy = transformer.policy(CONFIG, length=4, stop=())
  learner = imitation.learner(policy, optax.adam(0.01))
  given = examples()
  state, losses = learner.init(policy.init(jax.random.key(0))), []
  step = jax.jit(learner.step)
  for _ in range(120):
    state, info = step(state, given)
    losses.append(float(info.loss))
  # Nearly uniform over the seven tokens, to begin with.
  assert losses[0] == pytest.approx(np.log(7), abs=0.3)
  assert losses[-1] < 0.01
  greedy = transformer.policy(CONFIG, length=4, temperature=0.0)
  keys = jax.random.split(jax.random.key(0), 4)
  prompts, tokens, mask = given
  drawn = greedy.sample(state.params, keys, prompts, 1)
  np.testing.assert_array_equal(np.asarray(drawn.tokens)[mask], tokens[mask])


def test_a_gradient_that_is_not_finite_moves_nothing():
  def log_prob(params, prompts, tokens):
    return jnp.log(params[prompts])[:, None, None] * jnp.ones(tokens.shape)

  policy = policies.Policy(lambda key: None, None, log_prob)
  learner = imitation.learner(policy, optax.adam(0.1))
  params = jnp.array([0.5, 0.0])
  ones = np.ones((2, 1, 1), bool)
  before = learner.init(params)
  state, info = learner.step(before, (np.arange(2), ones * 1, ones))
  assert info.nonfinite
  assert state.step == 1
  jax.tree.map(
    np.testing.assert_array_equal,
    (state.params, state.opt_state),
    (before.params, before.opt_state),
  )
  # The other prompt alone is sound, and moves up.
  state, info = learner.step(before, (np.arange(1), ones[:1] * 1, ones[:1]))
  assert not info.nonfinite
  assert state.params[0] > 0.5
  assert state.params[1] == 0


def test_tokens_and_mask_must_agree_in_shape():
  learner = imitation.learner(by_hand.TABLE, optax.sgd(1.0))
  rollout = by_hand.batch()
  state = learner.init(jnp.asarray(by_hand.PARAMS))
  with pytest.raises(AssertionError):
    learner.step(state, (rollout.prompts, rollout.tokens, rollout.mask[:, :1]))
