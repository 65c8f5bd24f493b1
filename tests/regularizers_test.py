"""What a token's term is made of beside the surrogate: KL, entropy, correction.

Expectations are taken by enumeration: a group of all V answers in which each is
counted π times is the mean over π, exactly.
"""

from by_hand import (
  AGGREGATES,
  DAPO,
  GRPO,
  PARAMS,
  TABLE,
  B,
  G,
  T,
  V,
  ascent,
  batch,
  make,
  softmax,
  step_each,
)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from groupstd import losses, policies, rollouts, sigma, testing

NAN, INF = float("nan"), float("inf")
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal
ELSEWHERE = jnp.asarray(PARAMS[::-1])
KEPT = slice(2, None)  # The first two groups are silent.


def entropy(params=PARAMS):
  """H of each of the table's rows, and ∂H/∂θ_v = −π_v(log π_v + H)."""
  pi = softmax(np.float64(params))
  h = -np.sum(pi * np.log(pi), axis=-1)
  return h, -pi * (np.log(pi) + h[..., None])


# --- Entropy ---


def test_the_bonus_descends_minus_the_entropy_of_every_token():
  """With the aggregate's weights; silent groups that are kept are under it."""
  rollout = batch()
  length = rollout.mask.sum(-1)
  weights = [
    np.full((B, G), 1 / length.sum()),
    1 / np.maximum(length, 1) / (length > 0).sum(),
    np.full((B, G), 1 / 10 / (length > 0).sum()),
    np.full((B, G), 1 / G / 2),
  ]
  h, slope = entropy()
  made = [
    make(GRPO, aggregate=aggregate, entropy_coef=coef)
    for aggregate in AGGREGATES
    for coef in (0.0, 0.5)
  ]
  results = step_each(made, rollout)
  for number, weight in enumerate(weights):
    (plain, without), (state, info) = results[2 * number : 2 * number + 2]
    bonus = state.opt_state.trace - plain.opt_state.trace
    share = (weight[..., None] * rollout.mask).sum(1)  # [B, T]
    close(bonus, -0.5 * share[..., None] * slope, rtol=0, atol=3e-7)
    close(info.loss - without.loss, -0.5 * np.sum(share * h), rtol=3e-6)
    mean = np.mean(np.broadcast_to(h[:, None], (B, G, T))[rollout.mask])
    close(info.entropy, mean, rtol=1e-6)
    close(without.entropy, -rollout.log_probs[rollout.mask].mean(), rtol=1e-6)
    assert (info.regularized, without.regularized) == (B, 0)


@pytest.mark.usefixtures("x64")
def test_the_estimate_without_a_coefficient_is_unbiased():
  """Σ_v π_v·(−log π_v) = H: of the enumerated group it is exact."""
  policy = policies.softmax(3, V)
  params = jnp.asarray(PARAMS[:3, 0], float)
  rollout = enumerated(params)
  made = [make(policy=policy, entropy_coef=coef) for coef in (0.0, 0.1)]
  for _, info in step_each(made, rollout, params=params):
    close(info.entropy, np.mean(entropy(params)[0]), rtol=1e-12)


def enumerated(log_weights):
  """[N, V] → groups of all V answers, counted as the softmax says."""
  pi = softmax(np.asarray(log_weights))
  num_groups = len(pi)
  tokens = np.tile(np.arange(V)[:, None], (num_groups, 1, 1))
  rewards = np.tile([1.0, 0.0, 0.5], (num_groups, 1))
  return rollouts.Rollout(
    prompts=np.arange(num_groups),
    tokens=tokens,
    mask=np.ones(tokens.shape, bool),
    log_probs=np.log(pi)[..., None],
    rewards=rewards,
    scores=rewards,
    where=pi,
  )


def test_the_learner_descends_what_it_reports():
  testing.assert_gradients(
    policies.softmax(1, 5),
    DAPO,
    surrogate=losses.clipped(0.1),
    kl_coef=0.3,
    reference=jnp.linspace(-1, 1, 5)[None],
    entropy_coef=0.2,
  )


# --- Three switches ---


@pytest.mark.parametrize("regularizer", ["kl_coef", "entropy_coef"])
def test_policy_gradient_denominator_and_regularizer_are_three_switches(
  regularizer,
):
  """Of silent groups: the rule's zeros, its keep, and `regularize_silent`.

  Rows: which op, whether regularized; whether silent groups move at all, and
  whether they count.
  """
  rollout = batch()
  tokens = rollout.mask.sum((1, 2))
  zero = sigma.rule(lambda stats: sigma.Weight(0.0))
  table = [
    (GRPO, True, True, True),
    (GRPO, False, False, True),
    (DAPO, True, False, False),
    (DAPO, False, False, False),
    (zero, False, False, True),
  ]
  given = {"reference": ELSEWHERE, regularizer: 0.5}
  made = [
    make(rule, regularize_silent=regularized, **given)
    for rule, regularized, *_ in table
  ]
  *results, (grpo, _) = step_each([*made, make(GRPO)], rollout)
  equal(grpo.opt_state.trace[:2], 0)  # No policy gradient, whatever else.
  for (state, info), (*_, moves, counts) in zip(results, table, strict=True):
    assert np.any(state.opt_state.trace[:2]) == moves
    assert info.denominator == tokens.sum() - (not counts) * tokens[:2].sum()
    assert info.kept == (B if counts else B - 2)
    assert info.silent == 2
    assert info.regularized == (B if moves else B - 2)
  both, unregularized, dropped, same, scale_0 = (
    state.opt_state.trace for state, _ in results
  )
  # What one switch does to the others' groups: nothing, but to the denominator.
  equal(unregularized[KEPT], both[KEPT])
  ratio = tokens[KEPT].sum() / tokens.sum()
  close(dropped * ratio, unregularized, rtol=0, atol=1e-7)
  equal(same, dropped)
  penalty = unregularized - grpo.opt_state.trace
  close(scale_0, penalty, rtol=0, atol=1e-7)
  assert np.abs(penalty[KEPT]).max(axis=(1, 2)).all()
  if regularizer == "kl_coef":
    infos = [info for _, info in results]
    assert infos[0].kl > infos[1].kl > 0
    close(infos[2].kl * ratio, infos[1].kl, rtol=1e-6)


def test_silent_is_what_the_scores_say():
  """A length penalty gives a policy gradient, and no mixed group."""
  rewards = batch().rewards - 0.1 * np.arange(G, dtype=np.float32)
  rollout = batch()._replace(rewards=rewards)
  made = [
    make(GRPO, kl_coef=0.5, reference=ELSEWHERE, regularize_silent=silent)
    for silent in (True, False)
  ]
  ((on, _), (off, info), (plain, _)) = step_each([*made, make(GRPO)], rollout)
  assert np.abs(plain.opt_state.trace[:2]).max() > 0.01
  equal(off.opt_state.trace[:2], plain.opt_state.trace[:2])
  assert np.any(on.opt_state.trace[:2] != plain.opt_state.trace[:2])
  assert (info.silent, info.regularized) == (2, B - 2)


# --- A sampler that is not the trainer ---


def test_a_correction_weighs_tokens_by_the_ratio_to_the_sampler():
  """As numpy does: min(r, 2)·A·s / tokens, and the surrogate's own ratio is 1.

  The denominator keeps what is dropped.
  """
  rollout = batch(stale=0.7)
  r = np.exp(np.float64(batch().log_probs) - rollout.log_probs)
  mixed = rollout.mask & (np.ptp(rollout.rewards, axis=1) > 0)[:, None, None]
  mean = rollout.rewards.mean(1, keepdims=True)
  std = np.where(np.ptp(rollout.rewards, axis=1) > 0, rollout.rewards.std(1), 1)
  advantages = ((rollout.rewards - mean) / std[:, None])[..., None]
  within = (r >= 0.5) & (r <= 2)
  expected = {
    losses.truncate(2.0): (np.minimum(r, 2), r > 2),
    losses.drop(0.5, 2.0): (np.where(within, r, 0), ~within),
  }
  made = [
    make(surrogate=surrogate, correction=correction)
    for correction in expected
    for surrogate in (losses.reinforce(), losses.clipped(0.1))
  ]
  results = step_each(made, rollout)
  for number, (weights, affected) in enumerate(expected.values()):
    update = ascent(rollout, weights * advantages / mixed.sum())
    for state, info in results[2 * number : 2 * number + 2]:
      close(state.opt_state.trace, -update, rtol=0, atol=3e-7)
      assert info.denominator == mixed.sum()
      assert info.clip_fraction == 0
      close(info.corrected, affected[mixed].mean(), rtol=1e-6)
      close(info.first_ratio, np.abs(r - 1)[mixed].max(), rtol=1e-5)
    assert 0.02 < affected[mixed].mean() < 0.6


@pytest.mark.usefixtures("x64")
def test_untruncated_it_is_the_on_policy_gradient_in_expectation():
  """Σ_y q(y)·(π/q)·f = Σ_y π(y)·f, with KL and entropy, exactly."""
  params, sampler, far = np.random.default_rng(3).normal(size=(3, 4, V))

  def given(rewards, where=None, scores=None):
    return rewards - 0.3, jnp.ones(len(rewards), bool)

  def expected(rollout, **kwargs):
    return testing.gradient(
      policies.softmax(4, V),
      given,
      jnp.asarray(params),
      rollout,
      reference=jnp.asarray(far),
      aggregate=losses.group_sum(),
      kl_coef=0.3,
      entropy_coef=0.2,
      **kwargs,
    )

  weights = softmax(params) / softmax(sampler)
  share = np.minimum(1.5 / weights, 1)  # min(w, C)·q = π·min(1, C/w).

  @jax.jit
  def gradients():
    on_policy, drawn = enumerated(params), enumerated(sampler)
    return (
      expected(on_policy),
      expected(drawn, correction=losses.truncate(1e6)),
      expected(drawn, correction=losses.truncate(1.5)),
      expected(on_policy._replace(where=softmax(params) * share)),
      expected(drawn),
    )

  on_policy, corrected, truncated, biased, ignored = gradients()
  close(corrected, on_policy, rtol=0, atol=1e-14)
  scale = (softmax(params) * share).sum(1, keepdims=True)  # A group's size.
  close(truncated, biased * scale, rtol=0, atol=1e-14)
  for other in truncated, ignored:
    assert np.abs(other - on_policy).max() > 0.01


def test_the_correction_is_of_the_policy_at_the_start_of_the_step():
  """Also in the fourth update, when the policy has moved.

  By hand: a surrogate that weighs the terms of a half, on what PARAMS say.
  """
  optimizer, surrogate = optax.sgd(0.5), losses.clipped(0.3)
  rollout, own = batch(stale=0.7), batch()
  weights = np.minimum(np.exp(own.log_probs - rollout.log_probs), 2)

  def weighing(half):
    def weighed(*args):
      terms, clipped = surrogate(*args)
      return weights[half::2] * terms, clipped

    return make(optimizer=optimizer, surrogate=weighed)

  learner = make(
    optimizer=optimizer,
    surrogate=surrogate,
    epochs=2,
    mini_batches=2,
    correction=losses.truncate(2.0),
  )
  ((state, _),) = step_each([learner], rollout)
  steps = [jax.jit(weighing(half).step) for half in range(2)]
  expected = make(optimizer=optimizer).init(jnp.asarray(PARAMS))
  for half in 0, 1, 0, 1:
    part = jax.tree.map(lambda x, half=half: x[half::2], own)
    expected, _ = steps[half](expected, part)
  moved = np.abs(expected.params - PARAMS).max()
  assert moved > 0.1
  close(state.params, expected.params, rtol=0, atol=1e-6 * (1 + moved))


# --- Slots that do not train ---


@pytest.mark.parametrize("number", [0, 1])
def test_what_a_masked_slot_holds_changes_no_bit_of_anything(number):
  """With all that a step can do; 1e30 squares to ∞ in float32."""
  rng = np.random.default_rng(2)
  where = rng.uniform(size=(B, G)) < 0.8
  good = batch(stale=0.1, where=where)
  learner = make(
    aggregate=AGGREGATES[number],
    surrogate=losses.clipped(),
    kl_coef=0.1,
    reference=ELSEWHERE,
    entropy_coef=0.1,
    regularize_silent=False,
    correction=losses.truncate(),
    epochs=2,
    mini_batches=2,
    micro_batches=2,
    optimizer=optax.adam(0.1),
  )
  step = jax.jit(learner.step)
  start = learner.init(jnp.asarray(PARAMS))
  expected = step(start, good)
  assert np.isfinite(expected[0].params).all()
  assert np.isfinite(expected[1]).all()
  assert (expected[1].skipped, expected[1].nonfinite) == (0, 0)
  empty = ~(good.mask & where[..., None])
  for bad in NAN, INF, -INF, 1e30, -1e30:
    dirty = good._replace(
      tokens=np.where(empty, rng.integers(0, V, empty.shape), good.tokens),
      log_probs=np.where(empty, np.float32(bad), good.log_probs),
      rewards=np.where(where, good.rewards, np.float32(bad)),
      scores=np.where(where, good.scores, np.float32(bad)),
    )
    jax.tree.map(equal, step(start, dirty), expected)


def test_what_the_policy_says_of_a_masked_slot_moves_nothing():
  """Log-probs and entropies are their own parameters, and keep them finite."""

  def said(params, prompts, tokens):
    return params[0], params[1]

  policy = TABLE._replace(
    log_prob=lambda *args: said(*args)[0], log_prob_and_entropy=said
  )
  rollout = batch(np.tile([1, 0, 0, 1], (B, 1)))
  masked = np.broadcast_to(~rollout.mask, (2, B, G, T))
  bad = np.resize([NAN, INF, -INF, 1e30, -1e30], masked.sum())
  params = np.full((2, B, G, T), -0.5, np.float32)
  params[masked] = bad
  made = [
    make(
      policy=policy,
      kl_coef=0.1,
      entropy_coef=0.1,
      reference=jnp.asarray(params - 0.3),
      surrogate=losses.clipped(),
      **kwargs,
    )
    for kwargs in ({}, {"correction": losses.drop()})
  ]
  for state, info in step_each(made, rollout, params=params):
    slope = np.asarray(state.opt_state.trace)
    assert (info.nonfinite, info.skipped) == (0, 0)
    assert np.isfinite(info).all()
    equal(slope[masked], 0)
    assert np.any(slope[0][rollout.mask])


def test_a_sampler_s_log_prob_that_is_no_number():
  """One that trains: bounded by a correction, refused without one.

  −91 is a ratio of about e⁹⁰, ∞ in float32, and held; −∞ is not to pass for one
  that is held. REINFORCE does not read it.
  """
  rollout = batch(np.tile([1, 0, 0, 1], (B, 1)), np.full((B, G), T))
  clip = {"optimizer": optax.adam(0.1), "surrogate": losses.clipped()}
  plain, truncated, dropped, blind = (
    (jax.jit(learner.step), learner.init(jnp.asarray(PARAMS)))
    for learner in (
      make(**clip),
      make(correction=losses.truncate(2.0), **clip),
      make(correction=losses.drop(), **clip),
      make(),
    )
  )
  for value in NAN, INF, -INF, -91.0:
    spoilt = rollout._replace(log_probs=rollout.log_probs.copy())
    spoilt.log_probs[3, 2, 1] = value
    finite = np.isfinite(value)
    (state, info), *corrected, (_, other) = (
      step(start, spoilt) for step, start in (plain, truncated, dropped, blind)
    )
    assert info.nonfinite == (not finite)
    assert np.any(state.params != PARAMS) == finite
    assert state.opt_state[0].count == finite
    for _, info in corrected:
      assert (info.nonfinite, info.skipped) == (0, 0)
      close(info.corrected, 1 / (B * G * T), rtol=1e-6)
      assert info.grad_norm < 1
    assert other.nonfinite == 0
