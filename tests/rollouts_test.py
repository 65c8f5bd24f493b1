"""How a batch is filled, kept in shape, padded and refused.

What is drawn, and by which law, is in draws_test; what passes through, in
collector_test.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from groupstd import (
  draws,
  learners,
  losses,
  policies,
  rollouts,
  sigma,
  tasks,
  testing,
)

BOTH = pytest.mark.parametrize(
  "make", [rollouts.collector, draws.collect_bernoulli]
)
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


def scripted(sampled=lambda: None):
  """Not drawn at all: params [N] say how many answers of each are right."""

  def sample(params, keys, prompts, group_size):
    sampled()
    right = jnp.arange(group_size) < params[prompts][:, None]
    tokens = right[..., None].astype(jnp.int32)
    return policies.Sample(tokens, tokens >= 0, jnp.zeros(tokens.shape))

  return policies.bernoulli([0.5])._replace(sample=sample)


# --- Silent groups are replaced by other prompts' ---


def replaced(params, num_groups, max_rounds):
  """Which prompt ends in which place, and how many were asked."""
  batch, asked = list(range(num_groups)), num_groups
  for _ in range(max_rounds - 1):
    for row, prompt in enumerate(batch):
      if params[prompt] == 0:
        batch[row], asked = asked, asked + 1
  return np.array(batch), asked


def test_the_next_prompts_take_the_silent_places_in_order():
  collect = rollouts.collector(
    scripted(), tasks.bernoulli(12), num_groups=4, group_size=3, max_rounds=3
  )
  rng = np.random.default_rng(0)
  left = []
  for _ in range(20):
    params = rng.integers(0, 3, 12) * rng.integers(0, 2, 12)
    rollout, counts = collect(jnp.array(params), 0)
    batch, asked = replaced(params, 4, 3)
    equal(rollout.prompts, batch)
    equal(rollout.tokens[..., 0].sum(1), params[batch])
    equal(rollout.rewards, rollout.tokens[..., 0])
    # Not filled in the last round: empty, so that it weighs nothing.
    equal(rollout.where, np.repeat(params[batch, None] > 0, 3, axis=1))
    left.append((params[batch] == 0).sum())
    assert counts == rollouts.Counts(
      first_draws=asked,
      first_silent=(params[:asked] == 0).sum(),
      left_silent=left[-1],
      drawn=asked * 3,
      dropped=(asked - (4 - left[-1])) * 3,
    )
  assert min(left) == 0 < max(left)


@pytest.mark.parametrize("limit", [{"max_draws": 5}, {"max_rounds": 5}])
@pytest.mark.parametrize("right", [0, 3])
def test_a_constant_reward_ends_after_the_last_draw(limit, right):
  scored = []

  def reward(prompts, tokens, mask):
    scored.append(len(tokens))
    return tasks.bernoulli(1).reward(prompts, tokens, mask)

  task = tasks.bernoulli(20)._replace(reward=reward)
  collect = rollouts.collector(
    scripted(), task, num_groups=4, group_size=3, **limit
  )
  rollout, counts = collect(jnp.full(20, right), 0)
  assert scored == [4] * 5
  if "max_rounds" in limit:
    assert not rollout.where.any()
    assert counts == rollouts.Counts(20, 20, 4, drawn=60, dropped=60)
  else:  # Redrawn in vain, it stays what it is: a silent group.
    assert rollout.where.all()
    assert counts == rollouts.Counts(4, 4, 4, drawn=60, dropped=48)


def test_redrawing_and_replacing_are_one_or_the_other():
  with pytest.raises(ValueError, match="must not both exceed 1, got 2 and 3"):
    rollouts.collector(
      scripted(),
      tasks.bernoulli(12),
      num_groups=4,
      group_size=2,
      max_draws=2,
      max_rounds=3,
    )


# --- Shapes ---


@pytest.mark.parametrize(
  ("limit", "asked"), [("max_draws", 13), ("max_rounds", 26)]
)
def test_nothing_recompiles_however_many_groups_are_silent(
  limit, asked, caplog
):
  traced = []
  collect = rollouts.collector(
    scripted(lambda: traced.append(1)),
    tasks.bernoulli(asked),
    num_groups=13,
    group_size=2,
    **{limit: 2},
  )

  def draw(silent):
    params = (np.arange(26) >= silent).astype(np.int32)
    _, counts = collect(jnp.array(params), jnp.array(silent))
    groups = 13 + silent
    assert (counts.drawn, counts.first_silent >= silent) == (2 * groups, True)

  for silent in 0, 1, 2, 4, 7, 13:  # Each bucket of 13.
    draw(silent)
  with jax.log_compiles():
    for step in range(20):
      draw(step * 5 % 14)
  assert not [x for x in caplog.records if "Compiling" in x.getMessage()]
  assert len(traced) <= math.ceil(math.log2(13)) + 1


# --- Resuming ---


@pytest.mark.parametrize("limit", [{"max_draws": 3}, {"max_rounds": 2}])
def test_a_resumed_run_is_the_uninterrupted_one(limit):
  policy = policies.bernoulli(np.full(8, 0.2))
  learner = learners.policy_gradient(
    policy,
    optax.adam(0.1),
    sigma.rule(sigma.dapo()),
    aggregate=losses.group_sum(),
  )
  step = jax.jit(learner.step)

  def run(state, steps):
    """The states that follow, from a collector that has drawn nothing yet."""
    collect = rollouts.collector(
      policy, tasks.bernoulli(8), num_groups=4, group_size=4, **limit
    )
    for _ in range(steps):
      state, _ = step(state, collect(state.params, state.step)[0])
      yield state

  straight = list(run(learner.init(policy.init(jax.random.key(0))), 4))
  restored = jax.tree.map(jnp.asarray, jax.device_get(straight[1]))
  jax.tree.map(equal, list(run(restored, 2)), straight[2:])
  assert straight[-1].step == 4


# --- Padding ---


@pytest.mark.parametrize("num_groups", range(1, 10))
def test_padding_weighs_nothing(num_groups):
  rng = np.random.default_rng(num_groups)
  policy = policies.softmax(9, 3)
  shape = num_groups, 3
  rewards = rng.integers(0, 2, shape).astype(np.float32)
  rewards[-1] = [0, 1, 1]  # What the padding copies is not silent.
  rollout = rollouts.Rollout(
    prompts=np.arange(num_groups),
    tokens=rng.integers(0, 3, (*shape, 1)),
    mask=np.ones((*shape, 1), bool),
    log_probs=np.full((*shape, 1), -1.1, np.float32),
    rewards=rewards,
    scores=rewards,
    where=np.ones(shape, bool),
  )
  every = [
    losses.token_mean(),
    losses.sequence_mean(),
    losses.sequence_sum(3.0),
    losses.group_sum(),
  ]

  @jax.jit
  def both(params, rollout):
    padded = rollouts.pad(rollout, 4)
    plain, slope = (
      testing.gradient(policy, rule, params, x, aggregate=every[num_groups % 4])
      for x in (rollout, padded)
    )
    return padded, plain, slope

  rule = sigma.rule(sigma.dapo())
  params = rng.normal(size=(9, 3)).astype(np.float32)
  padded, plain, slope = both(params, rollout)
  assert len(padded.where) == -(-num_groups // 4) * 4
  for x, y in zip(padded, jax.tree.map(jnp.asarray, rollout), strict=True):
    assert x.dtype == y.dtype
    equal(x[:num_groups], y)
  assert not padded.where[num_groups:].any()
  # A sum over more terms may be taken in another order.
  assert np.abs(plain).max() > 0.01
  close(slope, plain, rtol=0, atol=1e-7)


# --- What a task returns ---


def asking(*ids, reward):
  prompts = jnp.array(ids)
  return tasks.Task(lambda step, n: (prompts, prompts), reward)


def test_an_abstaining_answer_carries_no_gradient():
  """[1, –, 0, 0] is a group of three (a None must not pass for a 0)."""

  def reward(prompts, tokens, mask):
    scores = np.array([[1, np.nan, 0, 0], [np.nan] * 4])
    return scores, np.isfinite(scores)

  policy = policies.bernoulli([0.3, 0.6])
  collect = rollouts.collector(
    policy, asking(0, 1, reward=reward), num_groups=2, group_size=4
  )
  params = policy.init(jax.random.key(0))
  rollout, counts = collect(params, 0)
  assert counts.left_silent == 1
  equal(rollout.scores, [[1, 0, 0, 0], [0] * 4])
  root = math.sqrt(2)
  advantages, keep = sigma.rule(sigma.dapo())(rollout.rewards, rollout.where)
  close(advantages, [[root, 0, -root / 2, -root / 2], [0] * 4], rtol=1e-6)
  equal(keep, [True, False])

  @jax.jit
  def descend(params, rollout):
    return testing.gradient(
      policy,
      sigma.rule(sigma.dapo()),
      params,
      rollout,
      surrogate=losses.clipped(),
      kl_coef=0.1,
      reference=jnp.zeros(2),
    )

  slope = descend(params, rollout)
  assert slope[0] != 0
  assert slope[1] == 0
  for token in 0, 1:  # Whatever it said.
    tokens = rollout.tokens.at[0, 1].set(token).at[1].set(token)
    log_probs = rollout.log_probs.at[0, 1].set(-80.0 * token)
    said = rollout._replace(tokens=tokens, log_probs=log_probs)
    equal(descend(params, said), slope)


@pytest.mark.parametrize(
  ("scores", "message"),
  [
    (np.ones(4), r"scores must have shape \(2, 4\).* got \(4,\)"),
    (np.ones((8, 1)), r"scores must have shape \(2, 4\).* got \(8, 1\)"),
    (np.ones(()), r"scores must have shape \(2, 4\).* got \(\)"),
    (np.full((2, 4), np.nan), "got nan for answer 0 of prompt 3"),
  ],
)
def test_a_broken_reward_function_stops_before_training(scores, message):
  task = asking(3, 5, reward=lambda *_: (scores, np.ones((2, 4), bool)))
  collect = rollouts.collector(scripted(), task, num_groups=2, group_size=4)
  with pytest.raises(ValueError, match=message):
    collect(jnp.zeros(6), 0)


@pytest.mark.parametrize("ids", [(1, 2, 1), (1, 2), (1, 2, 3, 4)])
def test_prompts_are_as_many_as_asked_for_and_differ(ids):
  """A short last batch, or an id given twice, would be answered twice alike."""
  task = asking(*ids, reward=tasks.bernoulli(1).reward)
  collect = rollouts.collector(scripted(), task, num_groups=3, group_size=4)
  with pytest.raises(ValueError, match="must give the 3 prompts"):
    collect(jnp.zeros(6), 0)


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("rewards", np.ones((2, 1)), r"rewards must have shape \(2, 4\)"),
    ("rewards", np.full((2, 4), np.inf), "a reward must be finite, got inf"),
    ("parts", {"style": np.ones(4)}, r"part 'style' must have shape \(2, 4\)"),
  ],
)
def test_rewards_and_their_parts_are_checked_as_scores_are(
  field, value, message
):
  verdict = tasks.Verdict(np.ones((2, 4)), np.ones((2, 4), bool))
  task = asking(3, 5, reward=lambda *_: verdict._replace(**{field: value}))
  collect = rollouts.collector(scripted(), task, num_groups=2, group_size=4)
  with pytest.raises(ValueError, match=message):
    collect(jnp.zeros(6), 0)


# --- Sizes ---


@BOTH
@pytest.mark.parametrize("value", [0, 1, -1, 1.5, True, "8"])
def test_a_size_out_of_range_is_refused_with_the_reason(make, value):
  sizes = {"num_groups": 4, "group_size": value}
  message = rf"at least 2, got {value!r}: one reward has no standard deviation"
  with pytest.raises(ValueError, match=message):
    make(scripted(), tasks.bernoulli(4), **sizes)
  for name in "num_groups", "max_draws":
    if value != 1:
      sizes = {"num_groups": 4, "group_size": 2, name: value}
      with pytest.raises(ValueError, match=rf"`{name}` .* at least 1, got"):
        make(scripted(), tasks.bernoulli(4), **sizes)
