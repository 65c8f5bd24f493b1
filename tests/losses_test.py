"""KL estimators by enumeration, aggregates by loops, steps by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from groupstd import learners, losses, policies, rollouts

NAN, INF = float("nan"), float("inf")
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


def learn(log_probs, behaviour, mask, advantages, **kwargs):
  """One step of plain descent, of a policy whose log-probs [B, G, T] are θ."""
  policy: Any = policies.Policy(
    init=lambda key: log_probs,
    sample=lambda *_: None,  # pyright: ignore (nothing is drawn)
    log_prob=lambda params, prompts, tokens: params,
  )

  def rule(rewards, where=None, scores=None):
    del where, scores
    return rewards, jnp.ones(len(rewards), bool)

  rollout = rollouts.Rollout(
    prompts=jnp.arange(len(log_probs)),
    tokens=jnp.zeros(log_probs.shape, int),
    mask=mask,
    log_probs=behaviour,
    rewards=advantages,
    scores=advantages,
    where=jnp.ones(advantages.shape, bool),
  )
  learner = learners.policy_gradient(policy, optax.sgd(1.0), rule, **kwargs)
  return jax.jit(learner.step)(learner.init(log_probs), rollout)


# --- KL estimators ---


@pytest.mark.usefixtures("x64")
def test_expected_values_and_gradients_of_the_estimators():
  """By summing over all answers of a softmax policy.

  ∇KL(π‖ref) = π·(d − KL) and ∇KL(ref‖π) = π − ref in the logits.
  """
  theta, reference = np.random.default_rng(1).normal(size=(2, 9))
  pi, ref = (np.exp(x) / np.exp(x).sum() for x in (theta, reference))
  log_ratio = np.log(pi / ref)
  divergence = pi @ log_ratio

  def terms(theta, estimator):
    return estimator(jax.nn.log_softmax(theta), np.log(ref))[0]

  def expected(estimator):
    """E of the value, and of the gradient with the answers held fixed."""
    slope = jax.grad(lambda theta: pi @ terms(theta, estimator))(theta)
    return pi @ terms(theta, estimator), slope

  for estimator, value, slope in [
    (losses.k1, divergence, 0),
    (losses.k2, pi @ log_ratio**2 / 2, pi * (log_ratio - divergence)),
    (losses.k3, divergence, pi - ref),
  ]:
    found_value, found_slope = expected(estimator)
    close(found_value, value, rtol=1e-12)
    close(found_slope, slope, rtol=1e-11, atol=1e-14)


def test_estimators_far_from_the_reference_are_held_and_say_so():
  """d = log π_ref − log π; held within ±10, and gradient 0 beyond."""
  difference = np.array([-100.0, -5, 0, 5, 20, 100])
  held, beyond = np.clip(difference, -10, 10), abs(difference) > 10
  for estimator, terms, slopes in [
    (losses.k1, -held, np.ones(6)),
    (losses.k2, held**2 / 2, -held),
    (losses.k3, np.exp(held) - 1 - held, 1 - np.exp(held)),
  ]:
    found, pull, clamped = jax.vjp(
      lambda x, estimator=estimator: estimator(x, difference),
      jnp.zeros(6),
      has_aux=True,
    )
    close(found, terms, rtol=3e-7)
    close(pull(jnp.ones(6))[0], np.where(beyond, 0, slopes), rtol=3e-7)
    equal(clamped, beyond)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_k3_is_never_negative(dtype):
  """Rounding included, down to differences that it swallows."""
  with jax.enable_x64(dtype == "float64"):
    size = jnp.logspace(-18, 1, 100_001, dtype=dtype)
    terms, _ = losses.k3(jnp.concatenate([size, -size]), jnp.zeros(200_002))
    assert (terms >= 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.usefixtures("x64")
def test_ratios_are_taken_in_float32_at_least(dtype):
  """e¹⁵ overflows float16; between 8 and 16 bfloat16 has steps of 1/16."""
  computed = "float64" if dtype == "float64" else "float32"
  log_probs, other = jnp.array([-0.01, -8], dtype), jnp.array([-9.5, -8], dtype)
  difference = np.asarray(log_probs, float) - np.asarray(other, float)
  rtol = 2e-5 if computed == "float32" else 1e-12
  for estimator, expected in [
    (losses.k1, difference),
    (losses.k2, difference**2 / 2),
    (losses.k3, np.exp(-difference) - 1 + difference),
  ]:
    terms, _ = estimator(log_probs, other)
    assert terms.dtype == computed
    close(terms, expected, rtol=rtol)


# --- Aggregates ---

AGGREGATES = {
  "token_mean": losses.token_mean(),
  "sequence_mean": losses.sequence_mean(),
  "sequence_sum": losses.sequence_sum(7.0),
  "group_sum": losses.group_sum(3.0),
}


def written_out(name, terms, mask, where):
  """(numerator, denominator), answer by answer and copy by copy."""
  tokens, sums, means, groups = [], [], [], []
  for group, trains, counts in zip(terms, mask, where, strict=True):
    answers = [
      [float(x) for x, trained in zip(answer, row, strict=True) if trained]
      for answer, row, count in zip(group, trains, counts, strict=True)
      for _ in range(int(count))
    ]
    tokens += [x for answer in answers for x in answer]
    sums += [sum(answer) for answer in answers if answer]
    means += [sum(answer) / len(answer) for answer in answers if answer]
    groups += [sum(map(sum, answers)) / len(answers)] if answers else []
  return {
    "token_mean": (sum(tokens), len(tokens)),
    "sequence_mean": (sum(means), len(means)),
    "sequence_sum": (sum(sums), 7.0 * len(sums)),
    "group_sum": (sum(groups), 3.0 * bool(tokens)),
  }[name]


@pytest.mark.parametrize("name", AGGREGATES)
def test_aggregates_against_loops(name):
  """Ragged answers, unscored ones and multisets: a count is so many copies."""
  rng = np.random.default_rng(2)
  terms = rng.normal(size=(50, 3, 4, 5)).astype(np.float32)
  mask = np.arange(5) < rng.integers(0, 6, size=(50, 3, 4, 1))
  mask[:, :, :, 2:3] &= rng.uniform(size=(50, 3, 4, 1)) < 0.7  # a hole
  mask[:10, 0] = False  # a dropped group
  mask[10:20, 1, 2] = False  # a fully masked sibling
  counts = rng.integers(0, 4, size=(50, 3, 4))
  counts[20:30, 2] = 0  # an empty group
  aggregate = jax.jit(jax.vmap(AGGREGATES[name]))
  for where in counts, counts > 0, np.ones_like(counts):
    weights, denominators = aggregate(mask, where.astype(np.float32))
    numerators = np.sum(weights * terms, axis=(1, 2, 3))
    expected = [
      written_out(name, *batch)
      for batch in zip(terms, mask, where, strict=True)
    ]
    close(np.stack([numerators, denominators], 1), expected, rtol=0, atol=3e-5)
    equal(weights != 0, mask & (where > 0)[..., None])
    # Counts may also come as integers or booleans.
    same = aggregate(mask, where)
    close(same[0], weights, rtol=1e-7)
    equal(same[1], denominators)


@pytest.mark.parametrize("name", AGGREGATES)
@pytest.mark.parametrize("width", [0, 3])
def test_nothing_to_train_weighs_nothing_over_nothing(name, width):
  """Everything masked, every group dropped, completions of width 0."""
  mask = jnp.zeros((2, 4, width), bool)
  weights, denominator = AGGREGATES[name](mask, jnp.ones((2, 4)))
  assert weights.shape == mask.shape
  equal(weights, 0)
  equal(denominator, 0)
  unscored = AGGREGATES[name](~mask, jnp.zeros((2, 4)))
  equal(unscored[0], 0)
  equal(unscored[1], 0)


def test_what_a_masked_slot_holds_trains_nothing():
  """And an unmasked one is refused, with parameters as they were."""
  stale = jnp.array([-91.0, -INF, INF, NAN])
  log_probs = jnp.full((4, 2, 2), -2.0).at[:, 1, 1].set(stale)
  mask = jnp.ones((4, 2, 2), bool).at[:, 1, 1].set(False)
  (state, info), (refused, refusal) = (
    learn(
      log_probs,
      log_probs,
      trains,
      jnp.array([[1.0, -1.0]] * 4),
      surrogate=losses.clipped(),
      kl_coef=0.1,
    )
    for trains in (mask, ~mask)
  )
  assert not info.nonfinite
  move = 1 / 12  # ∓A over the tokens that train
  close(state.params[:, 0], -2 + move, rtol=1e-7)
  close(state.params[:, 1, 0], -2 - move, rtol=1e-7)
  equal(state.params[:, 1, 1], stale)
  assert refusal.nonfinite
  equal(refused.params, log_probs)


@pytest.mark.parametrize("width", [0, 3])
def test_a_step_with_nothing_to_train_moves_nothing(width):
  params = jnp.full((2, 4, width), -1.0)
  mask = jnp.zeros(params.shape, bool)
  state, info = learn(params, params, mask, jnp.ones((2, 4)))
  assert info.skipped
  assert not info.nonfinite
  equal(info.loss, 0)
  equal(state.params, params)


def test_masked_tokens_leave_the_denominator_too():
  """30 tokens of which 5 are masked: over 25, not 30."""
  mask = jnp.ones((1, 3, 10), bool).at[0, 1, 5:].set(False)
  weights, denominator = losses.token_mean()(mask, jnp.ones((1, 3)))
  equal(denominator, 25)
  equal(np.sum(weights) / denominator, 1)


def test_an_empty_answer_among_four():
  """It counts where the group is what is averaged over, and only there."""
  mask = jnp.array([[[1, 1], [1, 0], [0, 0], [1, 1]]], bool)
  terms = np.array([[[1, 2], [3, NAN], [NAN, NAN], [4, 5]]])
  for name, expected in [
    ("token_mean", (1 + 2 + 3 + 4 + 5) / 5),
    ("sequence_mean", (1.5 + 3 + 4.5) / 3),
    ("sequence_sum", (3 + 3 + 9) / (7 * 3)),
    ("group_sum", (3 + 3 + 9) / (4 * 3)),
  ]:
    weights, denominator = AGGREGATES[name](mask, jnp.ones((1, 4)))
    value = np.sum(weights * np.where(mask, terms, 0)) / denominator
    close(value, expected, rtol=3e-7)


@pytest.mark.parametrize("aggregate", [losses.sequence_sum, losses.group_sum])
@pytest.mark.parametrize("bad", [0, -1.0, NAN, INF, "8", None, True])
def test_a_denominator_is_positive_and_finite(aggregate, bad):
  message = f"`denominator` must be a positive finite number, got {bad!r}"
  with pytest.raises(ValueError, match=message):
    aggregate(bad)


def test_numbers_may_be_numpy_s():
  mask, where = jnp.ones((1, 2, 3), bool), jnp.ones((1, 2))
  sizes: list[Any] = [6, np.int64(6), np.float32(6)]
  for size in sizes:
    equal(losses.sequence_sum(size)(mask, where)[1], 12)
    equal(losses.group_sum(size)(mask, where)[1], 6)
  equal(losses.group_sum()(mask, where)[1], 1)
