"""Which updates a learner makes, and that it makes one update of a batch."""

import itertools

from by_hand import (
  AGGREGATES,
  DAPO,
  GRPO,
  PARAMS,
  TABLE,
  B,
  G,
  T,
  ascent,
  batch,
  make,
  step_each,
)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from groupstd import losses, sigma

NAN, INF = float("nan"), float("inf")
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


def unchanged(before, after):
  """All but the iteration count, bit for bit."""
  jax.tree.map(equal, after._replace(step=before.step), before)
  assert after.step == before.step + 1


# --- Updates made and not made ---


def test_a_dropped_batch_is_no_update_and_no_step_of_the_schedule():
  """The rate ends at the fifth update, however many iterations that takes."""
  schedule = optax.linear_schedule(0.1, 0.0, 4)
  learner = make(optimizer=optax.adam(schedule))
  step = jax.jit(learner.step)
  mixed, silent = batch(), batch(np.full((B, G), 0.7))
  state = learner.init(jnp.asarray(PARAMS))
  updates = 0
  for rollout in [mixed, silent, mixed, mixed, silent, silent, mixed, mixed]:
    before = state
    state, info = step(state, rollout)
    assert info.skipped == (rollout is silent)
    assert not info.nonfinite
    if rollout is silent:
      unchanged(before, state)
      assert (info.denominator, info.kept, info.silent) == (0, 0, B)
    else:
      updates += 1
      moved = np.abs(state.params - before.params).max()
      assert (moved > 0) == (updates < 5)
    assert state.opt_state[0].count == updates
  assert (state.step, updates) == (8, 5)


def test_a_silent_batch_that_is_kept_is_an_update_of_zero():
  """Whatever value repeats: the mean of seven 0.7 need not be 0.7 in floats."""
  values = [0.1, 0.2, 0.3, 1 / 3, 0.35, 0.7, 0.95, 1.1, 2.3]
  made = [
    make(sigma.rule(op), optax.adam(0.1))
    for op in (sigma.grpo(), sigma.dr_grpo(), sigma.rloo())
  ]
  silent = batch(np.repeat(values, 7).reshape(9, 7), prompts=np.arange(9) % B)
  for state, info in step_each(made, silent):
    equal(state.params, PARAMS)
    assert (info.grad_norm, info.max_advantage, info.skipped) == (0, 0, False)
    assert state.opt_state[0].count == 1
    assert (info.kept, info.silent) == (9, 9)


def broken_batches():
  """Something that is not finite, in mixed and in otherwise silent groups."""
  good = batch()
  for bad in NAN, INF, -INF:
    for group, answer in (3, 1), (0, 2), (1, slice(None)):
      for field in "rewards", "scores":
        values = getattr(good, field).copy()
        values[group, answer] = bad
        yield good._replace(**{field: values})
  lone = good.rewards.copy()
  lone[4, 0] = NAN
  where = np.ones((B, G), bool)
  where[4, 1:] = False
  yield good._replace(rewards=lone, scores=lone, where=where)
  yield good._replace(log_probs=np.where(good.mask, NAN, good.log_probs))


def test_what_is_not_finite_leaves_the_state_as_it_was():
  learner = make(optimizer=optax.adam(0.1), surrogate=losses.clipped())
  step = jax.jit(learner.step)
  state, info = step(learner.init(jnp.asarray(PARAMS)), batch())
  assert not info.nonfinite
  for rollout in broken_batches():
    after, info = step(state, rollout)
    unchanged(state, after)
    assert info.nonfinite
    assert not info.skipped
  rewards = batch().rewards.copy()
  rewards[3, 1] = NAN  # Where it does not count, it is nothing.
  where = ~np.isnan(rewards)
  assert not step(state, batch(rewards, where=where))[1].nonfinite
  # Also eagerly: weights for groups of 3, given groups of 4.
  learner = make(sigma.rule(sigma.table([1.0, 2.0])), optax.adam(0.1))
  state = learner.init(jnp.asarray(PARAMS))
  for step in learner.step, jax.jit(learner.step):
    after, info = step(state, batch())
    unchanged(state, after)
    assert info.nonfinite


@pytest.mark.parametrize(
  "empty",
  [
    jax.tree.map(lambda x: x[:0], batch()),  # no group
    batch(where=np.zeros((B, G), bool)),  # groups of no answer
    batch()._replace(mask=np.zeros((B, G, T), bool)),  # of no token
    batch()._replace(  # of no slot for a token
      tokens=np.zeros((B, G, 0), int),
      mask=np.zeros((B, G, 0), bool),
      log_probs=np.zeros((B, G, 0), np.float32),
    ),
    batch(np.arange(B)[:, None]),  # groups of one
    batch(np.zeros((B, 0))),  # and of none
  ],
)
def test_an_empty_batch_is_skipped(empty):
  params = jnp.asarray(PARAMS)[:, : empty.tokens.shape[-1]]
  for state, info in step_each([make()], empty, params=params):
    unchanged(make().init(params), state)
    assert (info.skipped, info.denominator, info.loss) == (True, 0, 0)
    assert np.isfinite(jax.tree.leaves(info)).all()


def test_a_dropped_group_sounds_no_alarm():
  """Whatever advantages a rule leaves with it."""

  def dropping(rewards, where=None, scores=None):
    return rewards, jnp.arange(len(rewards)) > 0

  rewards = np.arange(B, 0, -1)[:, None] * np.array([1, 0, 0, -1])
  ((_, info),) = step_each([make(dropping)], batch(rewards))
  assert (info.max_advantage, info.kept) == (B - 1, B - 1)


# --- One denominator ---


def test_micro_batches_change_nothing_but_memory():
  """Dividing by accumulation steps once more would give g/M."""
  parts = [(1, 2, 8), (1, 4), (1, 4), (1, 2)]  # For each aggregate.
  corrections = [None, None, losses.truncate(1.2), None]
  made = [
    [
      make(
        surrogate=losses.clipped(0.1),
        aggregate=aggregate,
        kl_coef=0.3,
        reference=jnp.asarray(PARAMS[::-1]),
        entropy_coef=0.2,
        correction=correction,
        micro_batches=micro_batches,
      )
      for micro_batches in numbers
    ]
    for aggregate, correction, numbers in zip(
      AGGREGATES, corrections, parts, strict=True
    )
  ]
  made = itertools.chain.from_iterable(made)
  results = iter(step_each(list(made), batch(stale=0.3)))
  for numbers, correction in zip(parts, corrections, strict=True):
    whole, info = next(results)
    gradient = whole.opt_state.trace
    scale = np.abs(gradient).max()
    bound = info.clip_fraction if correction is None else info.corrected
    assert 0.1 < bound < 0.9
    assert info.kl > 0.01
    for _ in numbers[1:]:
      part, part_info = next(results)
      close(part.opt_state.trace, gradient, rtol=0, atol=1e-6 * scale)
      part_info = part_info._replace(computed=info.computed)
      close(part_info, info, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("number", range(4))
def test_a_dropped_group_leaves_numerator_and_denominator(number):
  """A silent group that is kept leaves neither; nor does one of scale 0."""
  everything = batch()
  mixed = jax.tree.map(lambda x: x[2:], everything)
  zero = sigma.rule(lambda stats: sigma.Weight(0.0))
  aggregate = {"aggregate": AGGREGATES[number]}
  made = [make(rule, **aggregate) for rule in (DAPO, GRPO, zero)]
  masked, kept, scale_0 = step_each(made, everything)
  (small,) = step_each([make(GRPO, **aggregate)], mixed)
  slopes = [state.opt_state.trace for state, _ in (masked, kept, small)]
  close(slopes[0], slopes[2], rtol=0, atol=1e-7)
  assert masked[1].denominator == small[1].denominator
  assert kept[1].denominator == scale_0[1].denominator
  ratio = masked[1].denominator / kept[1].denominator
  assert (ratio < 1) == (number < 3)  # The last one's is a constant.
  close(slopes[1], ratio * slopes[0], rtol=0, atol=1e-7)
  equal(scale_0[0].opt_state.trace, 0)
  assert not scale_0[1].skipped
  for (_, info), groups in (masked, 6), (kept, B), (small, 6), (scale_0, B):
    assert info.kept == groups
    assert info.silent == (0 if info is small[1] else 2)


def test_truncated_tokens_leave_the_denominator_too():
  """30 tokens, 5 of them masked: a sum over 25, not over 30."""
  rollout = batch([[1, 0], [0, 1], [1, 0]], [[6, 6], [6, 3], [6, 3]])
  mask = rollout.mask.copy()
  mask[0, 1, 1:] = False
  rollout = rollout._replace(mask=mask)
  ((state, info),) = step_each([make()], rollout)
  assert info.denominator == mask.sum() == 25
  advantages = np.array([[1, -1], [-1, 1], [1, -1]])
  expected = ascent(rollout, advantages[..., None] / 25)
  close(state.opt_state.trace, -expected, rtol=0, atol=1e-7)


def test_the_filter_takes_whole_groups_and_looks_at_the_scores():
  """One odd score among equal ones is kept with its group, and so on."""
  scores = np.array(
    [
      [1, 0, 0, 0],
      [1, 1, 1, 0],
      [1, 1, 0, 0],
      [0, 0.5, 1, 0.5],
      [0.5, 0.5, 0.5, 0.5],
      [0, 0, 0, 0],
      [0, 1, 0, 1],
    ],
    np.float32,
  )
  where = np.arange(7)[:, None] < np.full(4, 6)  # And an empty group.
  rollout = batch(scores - 0.1 * np.arange(4), np.full((7, 4), 2), where=where)
  rollout = rollout._replace(scores=scores)
  (state, info), (_, unmasked) = step_each([make(), make(GRPO)], rollout)
  assert (info.kept, info.silent, info.denominator) == (4, 2, 4 * 4 * 2)
  assert (unmasked.kept, unmasked.silent) == (6, 2)
  assert unmasked.denominator == 6 * 4 * 2
  assert np.any(state.opt_state.trace[:4], axis=(1, 2)).all()
  equal(state.opt_state.trace[4:], 0)


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"kl_coef": -0.1}, "`kl_coef` must be at least 0 and finite, got -0.1"),
    ({"kl_coef": NAN}, "`kl_coef` must be at least 0 .* got nan"),
    ({"kl_coef": INF}, "`kl_coef` must be at least 0 .* got inf"),
    ({"entropy_coef": -1}, "`entropy_coef` must be at least 0 .* got -1"),
    (
      {
        "entropy_coef": 0.1,
        "policy": TABLE._replace(log_prob_and_entropy=None),
      },
      "must be 0, got 0.1: the policy offers no `log_prob_and_entropy`",
    ),
    ({"epochs": 0}, "`epochs` must be an integer of at least 1, got 0"),
    ({"mini_batches": 1.0}, "`mini_batches` must be an integer .* got 1.0"),
    (
      {"micro_batches": 0},
      "`micro_batches` must be an integer of at least 1, got 0",
    ),
  ],
)
def test_arguments_out_of_range_are_refused(kwargs, message):
  with pytest.raises(ValueError, match=message):
    make(**kwargs)


@pytest.mark.parametrize(("mini_batches", "micro_batches"), [(1, 3), (3, 1)])
def test_parts_that_do_not_cut_the_groups_are_refused(
  mini_batches, micro_batches
):
  message = f"a batch of 8 groups .* got {mini_batches}·{micro_batches}"
  learner = make(mini_batches=mini_batches, micro_batches=micro_batches)
  with pytest.raises(ValueError, match=message):
    step_each([learner], batch())
  step_each([learner], learner.pad(batch(), 1))


@pytest.mark.parametrize("mini_batches", [1, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("number", [1, 16, 33, 64])
@pytest.mark.parametrize("shards", [1, 8, 16])
def test_no_shard_has_a_part_more_than_its_share(
  shards, number, micro_batches, mini_batches
):
  """Groups are cut in order, so what is appended is the last shards' rest."""
  learner = make(mini_batches=mini_batches, micro_batches=micro_batches)
  groups = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype), batch()
  )
  padded = jax.eval_shape(lambda x: learner.pad(x, shards), groups)
  each, left = divmod(len(padded.where), shards)
  assert left == 0
  share = -(-number // (shards * mini_batches))
  part = -(-share // micro_batches)
  assert share <= each / mini_batches < share + part


# --- Programs ---


def test_twenty_donated_steps_are_one_program():
  learner = make(optimizer=optax.adam(0.1))
  plain = jax.jit(learner.step)
  donated = jax.jit(learner.step, donate_argnums=0)
  states = [learner.init(jnp.array(PARAMS)) for _ in range(2)]
  for seed in range(20):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 2, (B, G)) * rng.integers(0, 2, (B, 1))
    rollout = batch(rewards, rng.integers(0, T + 1, (B, G)))
    states = [
      step(state, rollout)[0]
      for step, state in zip((plain, donated), states, strict=True)
    ]
  jax.tree.map(equal, *states)
  assert plain._cache_size() == donated._cache_size() == 1
