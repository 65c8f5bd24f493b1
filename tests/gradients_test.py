"""The gradient of a step, against ones written out by hand."""

import math

from by_hand import (
  AGGREGATES,
  DAPO,
  GRPO,
  KEEP_GRADIENT,
  PARAMS,
  B,
  G,
  V,
  ascent,
  batch,
  log_prob,
  make,
  step_each,
)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from groupstd import draws, losses, policies, rollouts, sigma, tasks, theory

close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


# --- What each token weighs ---


def test_each_aggregate_weighs_a_token_as_it_says():
  """Answers of no token are no sequences; all rollouts are the group's size."""
  rollout = batch()
  length = rollout.mask.sum(-1)
  k = rollout.rewards.sum(1, keepdims=True)
  with np.errstate(divide="ignore"):
    signs = np.where(rollout.rewards > 0, 1, -1)
    advantages = signs * np.sqrt(np.where(signs > 0, G / k, G / (G - k)) - 1)
  advantages = np.where((k > 0) & (k < G), advantages, 0)
  sequences = (length > 0).sum()
  weights = [
    np.full((B, G), 1 / length.sum()),
    1 / np.maximum(length, 1) / sequences,
    np.full((B, G), 1 / 10 / sequences),
    np.full((B, G), 1 / G / 2),
  ]
  made = [make(GRPO, aggregate=aggregate) for aggregate in AGGREGATES]
  for (state, _), weight in zip(step_each(made, rollout), weights, strict=True):
    expected = ascent(rollout, (advantages * weight)[..., None])
    close(state.opt_state.trace, -expected, rtol=0, atol=3e-7)


def test_a_multiset_weighs_as_the_group_written_out():
  """Answers 0, 0, 1, 2 of each group, or 0, 1, 2 with counts 2, 1, 1, 0."""

  def gather(order):
    return rollout._replace(
      **{
        name: getattr(rollout, name)[:, order]
        for name in ("tokens", "mask", "log_probs", "rewards", "scores")
      }
    )

  rollout = batch(stale=0.3)
  plain, counted = gather([0, 0, 1, 2]), gather([0, 1, 2, 3])
  counted = counted._replace(where=np.tile([2, 1, 1, 0], (B, 1)))
  made = [
    make(
      aggregate=aggregate,
      surrogate=losses.clipped(0.1),
      kl_coef=0.1,
      reference=jnp.asarray(PARAMS[::-1]),
    )
    for aggregate in AGGREGATES
  ]
  results = step_each(made, plain, counted)
  for (one, info), (other, other_info) in zip(
    results[::2], results[1::2], strict=True
  ):
    assert 0 < info.clip_fraction < 1
    close(other.opt_state.trace, one.opt_state.trace, rtol=0, atol=1e-6)
    close(other_info, info, rtol=1e-6, atol=1e-6)


# --- Groups ---


def test_a_sibling_without_tokens_still_moves_the_baseline():
  """And one without a score does not; neither has a gradient of its own."""
  cases = [
    ([[100, 1]], [[0, 2]], None, [[0, -49.5]]),
    ([[1, 1, 0, 0]], [[2, 0, 3, 4]], None, [[0.5, 0, -0.5, -0.5]]),
    (
      [[1, 1, 0, 0]],
      [[2, 5, 3, 4]],
      [[True, False, True, True]],
      [[2 / 3, 0, -1 / 3, -1 / 3]],
    ),
  ]
  rule = sigma.rule(sigma.dr_grpo())
  for rewards, lengths, where, advantages in cases:
    rollout = batch(rewards, lengths, where=where)
    ((state, info),) = step_each([make(rule)], rollout)
    tokens = (rollout.mask & rollout.where[..., None]).sum()
    assert info.denominator == tokens
    expected = ascent(rollout, np.array(advantages)[..., None] / tokens)
    close(state.opt_state.trace, -expected, rtol=0, atol=3e-7 * 50 / tokens)


def test_a_group_is_a_position_not_a_text():
  """[1, 1], [0, 0] of one prompt are two silent groups; order is nothing."""
  rewards = [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]
  silent, mixed = (batch(r, prompts=[2, 2]) for r in rewards)
  shuffled = jax.tree.map(lambda x: x[[1, 0]], mixed)
  shuffled = shuffled._replace(
    **{
      name: getattr(shuffled, name)[:, [1, 0]]
      for name in ("tokens", "mask", "log_probs", "rewards", "scores", "where")
    }
  )
  (nothing, _), (update, info), (same, same_info) = step_each(
    [make(GRPO)], silent, mixed, shuffled
  )
  equal(nothing.opt_state.trace, 0)
  assert np.abs(update.opt_state.trace[2]).max() > 0.05
  close(same.opt_state.trace, update.opt_state.trace, rtol=0, atol=1e-7)
  close(same_info, info, rtol=1e-6, atol=1e-6)


def test_the_alarm_shows_the_largest_advantage():
  """One 0 among seven equal: −√7, not the thousands that rounding can give."""
  rewards = np.full((3, 8), [[0.35], [0.4], [0.3]])
  rewards[:, 0] = 0
  ((_, info),) = step_each([make(GRPO)], batch(rewards))
  assert info.max_advantage == pytest.approx(math.sqrt(7), rel=1e-6)


# --- Masked slots ---


def test_what_a_masked_slot_holds_changes_no_bit():
  """Also 89, whose exponential is infinite in float32."""
  rng = np.random.default_rng(2)
  where = rng.uniform(size=(B, G)) < 0.8
  good = batch(stale=0.1, where=where)
  learner = make(
    surrogate=losses.clipped(),
    kl_coef=0.1,
    reference=jnp.asarray(PARAMS[::-1]),
  )
  step = jax.jit(learner.step)
  start = learner.init(jnp.asarray(PARAMS))
  expected = step(start, good)
  assert np.isfinite(expected[0].opt_state.trace).all()
  assert not expected[1].skipped
  empty = ~(good.mask & where[..., None])
  for bad in math.nan, math.inf, -math.inf, 89.0, -89.0:
    dirty = good._replace(
      tokens=np.where(empty, rng.integers(0, V, empty.shape), good.tokens),
      log_probs=np.where(empty, np.float32(bad), good.log_probs),
      rewards=np.where(where, good.rewards, np.float32(bad)),
      scores=np.where(where, good.scores, np.float32(bad)),
    )
    jax.tree.map(equal, step(start, dirty), expected)


# --- The surrogate and the KL ---


def test_clip_fraction_counts_the_tokens_whose_clip_binds():
  """2 of 5, and their gradient is exactly 0."""
  advantages, ratios = [1, 1, -1, -1, 1], [1.3, 0.7, 0.7, 1.4, 1.25]
  rollout = batch(np.array(advantages)[:, None], np.ones((5, 1)))
  drawn = rollout.log_probs - np.log(ratios)[:, None, None]
  rollout = rollout._replace(log_probs=drawn.astype(np.float32))
  given = lambda r, where, scores: (r, jnp.ones(len(r), bool))  # noqa: E731
  learner = make(given, surrogate=losses.clipped(0.2, 0.28))
  ((state, info),) = step_each([learner], rollout)
  assert info.clip_fraction == pytest.approx(2 / 5)
  assert info.loss == pytest.approx((-1.28 - 0.7 + 0.8 + 1.4 - 1.25) / 5)
  moved = np.any(state.opt_state.trace, axis=(1, 2))
  equal(moved, [False, True, False, True, True, False, False, False])


def test_a_second_update_takes_its_ratio_to_the_log_probs_as_drawn():
  rollout = batch(np.tile([1, 0, 0, 1], (B, 1)))
  learner = make(
    optimizer=optax.chain(KEEP_GRADIENT, optax.sgd(2.0)),
    surrogate=losses.clipped(0.99, 10.0),
  )
  step = jax.jit(learner.step)
  first, _ = step(learner.init(jnp.asarray(PARAMS)), rollout)
  second, info = step(first, rollout)
  now = log_prob(first.params, rollout.prompts, rollout.tokens)
  ratio = np.exp(np.asarray(now, np.float64) - rollout.log_probs)
  assert np.abs(ratio - 1)[rollout.mask].max() > 0.02
  advantages = np.array([1, -1, -1, 1])[:, None]
  weights = ratio * advantages / rollout.mask.sum()
  expected = ascent(rollout, weights, np.asarray(first.params))
  close(second.opt_state[0].trace, -expected, rtol=0, atol=3e-7)
  assert info.clip_fraction == 0


def test_kl_is_of_kept_tokens_and_zero_at_the_reference():
  """An unmasked silent group is under KL, a dropped one is not."""
  rollout = batch()
  elsewhere = jnp.asarray(PARAMS[::-1])
  at_start, grpo, dapo, twice = (
    result
    for kwargs in (
      {"reference": jnp.asarray(PARAMS), "kl_coef": 0.5},
      {"reference": elsewhere, "kl_coef": 0.5},
      {"reference": elsewhere, "kl_coef": 0.5, "rule": DAPO},
      {"reference": elsewhere, "kl_coef": 1.0},
    )
    for result in step_each([make(**{"rule": GRPO} | kwargs)], rollout)
  )
  assert at_start[1].kl == 0
  assert at_start[1].clamped == 0
  assert grpo[1].kl > 0
  start, once, double = (x[0].opt_state.trace for x in (at_start, grpo, twice))
  close(double - start, 2 * (once - start), rtol=0, atol=3e-7)
  moved = np.any(once, axis=(1, 2))
  assert moved[:2].all()
  equal(dapo[0].opt_state.trace[:2], 0)
  close(twice[1].loss - grpo[1].loss, 0.5 * grpo[1].kl, rtol=1e-5)
  far = PARAMS.copy()
  far[3, :, 0] += 40  # Where it has lost all of the other answers' mass.
  ((_, info),) = step_each(
    [make(reference=jnp.asarray(far), kl_coef=0.1)], rollout
  )
  assert info.clamped == (rollout.mask & (rollout.tokens > 0))[3].sum()


# --- The scalar policy ---


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("multiset", [True, False])
def test_each_logit_moves_by_its_own_update(multiset):
  """θ + ½·σ²w, σ = √(k(G − k))/G (arXiv:2607.00152, Theorem 1)."""
  k = np.arange(9)
  theta = np.linspace(-3, 3, 9)
  rewards = np.tile([1.0, 0.0], (9, 1))
  where = np.stack([k, 8 - k], axis=1)
  if not multiset:
    rewards = (np.arange(8) < k[:, None]) * 1.0
    where = np.ones((9, 8), bool)
  rollout = rollouts.Rollout(
    prompts=k,
    tokens=rewards[..., None].astype(int),
    mask=np.ones((*rewards.shape, 1), bool),
    log_probs=np.zeros((*rewards.shape, 1)),
    rewards=rewards,
    scores=rewards,
    where=where,
  )
  policy = policies.bernoulli(np.full(9, 0.5))
  made = [
    make(
      sigma.rule(op),
      optax.sgd(0.5),
      policy,
      aggregate=losses.group_sum(),
    )
    for op in (sigma.grpo(), sigma.dr_grpo(), sigma.dapo())
  ]
  std = np.sqrt(k * (8 - k)) / 8
  results = step_each(made, rollout, params=theta)
  for (state, _), update in zip(results, (std, std**2, std), strict=True):
    close(state.params, theta + 0.5 * update, rtol=0, atol=1e-15)


def test_the_mean_update_is_what_theory_expects():
  """Within four standard errors, 15 times: 10⁻³ for one false alarm."""
  copies = 40_000
  p = np.array([0.02, 0.2, 0.5, 0.7, 0.95])
  policy = policies.bernoulli(np.repeat(p, copies))
  params = policy.init(jax.random.key(0))
  for op, max_draws in (
    (sigma.grpo(), 1),
    (sigma.dr_grpo(), 1),
    (sigma.dapo(), 4),
  ):
    collect = draws.collect_bernoulli(
      policy,
      tasks.bernoulli(5 * copies),
      num_groups=5 * copies,
      group_size=8,
      max_draws=max_draws,
    )
    learner = make(
      sigma.rule(op), optax.sgd(1.0), policy, aggregate=losses.group_sum()
    )

    @jax.jit
    def move(state, collect=collect, learner=learner):
      rollout, _ = collect(state.params, state.step)
      return learner.step(state, rollout)[0].params - params

    moved = np.asarray(move(learner.init(params)), np.float64)
    expected = theory.expected_update(op, p, 8, max_draws)
    for sample, mean in zip(np.split(moved, 5), expected, strict=True):
      error = sample.std() / math.sqrt(copies)
      assert abs(sample.mean() - mean) < 4 * error
