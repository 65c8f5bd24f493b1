"""What passes through the collector: to be scored, observed and trained on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from groupstd import learners, policies, rollouts, sigma, tasks

close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


def asking(*ids, reward):
  prompts = jnp.array(ids)
  return tasks.Task(lambda step, n: (prompts, prompts), reward)


def scripted():
  """Not drawn at all: params [N] say how many answers of each are right."""

  def sample(params, keys, prompts, group_size):
    right = jnp.arange(group_size) < params[prompts][:, None]
    tokens = right[..., None].astype(jnp.int32)
    return policies.Sample(tokens, tokens >= 0, jnp.zeros(tokens.shape))

  return policies.bernoulli([0.5])._replace(sample=sample)


# --- What the reward function and the observer see ---


@pytest.mark.parametrize("limit", [{"max_draws": 3}, {"max_rounds": 3}])
def test_what_is_drawn_is_scored_and_observed_once_and_no_filling_is(limit):
  """13 groups of which 5 are silent: a bucket of 7 for the next 5."""
  scored, seen = [], []

  def reward(prompts, tokens, mask):
    scored.append((prompts, tokens))
    shape = tokens.shape[:2]
    parts = {"a": np.asarray(tokens[..., 0], float)}
    return tasks.Verdict(parts["a"], np.ones(shape, bool), None, parts)

  asked = 13 * limit.get("max_rounds", 1)
  collect = rollouts.collector(
    scripted(),
    tasks.bernoulli(asked)._replace(reward=reward),
    num_groups=13,
    group_size=3,
    observe=seen.append,
    **limit,
  )
  params = (np.arange(asked) % 3 > 0) * (np.arange(asked) < 15) + 0
  rollout, counts = collect(jnp.array(params), 0)
  assert [len(draw.ids) for draw in seen] == [13, 5, {13: 5, 39: 3}[asked]]
  assert [draw.number for draw in seen] == [0, 1, 2]
  assert counts.drawn == sum(draw.groups.where.size for draw in seen)
  for draw, (prompts, tokens) in zip(seen, scored, strict=True):
    equal(draw.ids, prompts)
    equal(draw.groups.prompts, prompts)
    equal(draw.groups.tokens, tokens)
    equal(draw.groups.rewards, tokens[..., 0])
    equal(draw.parts["a"], tokens[..., 0])
    equal(tokens[..., 0].sum(1), params[prompts])
    assert draw.ended.all()
    assert draw.ended.shape == draw.groups.where.shape
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(draw.groups))
  # Prompt 0 is silent: drawn to the last, or replaced by one that is not.
  last = seen[-1 if asked == 13 else 1]
  equal(rollout.tokens[0], last.groups.tokens[0])
  equal(rollout.tokens[1], seen[0].groups.tokens[1])


@pytest.mark.parametrize(
  ("scores", "silent"),
  [
    ([0.5] * 4, True),  # Within (0, 1) on average, and of no contrast.
    ([0, 0.5, 1, 0.5], False),
    ([1, 0, 0, 0], False),
    ([1, 1, 1, 0], False),
    ([0.1] * 4, True),
  ],
)
def test_raw_scores_decide_whether_a_group_is_drawn_again(scores, silent):
  """Whole: no answer leaves its group. And whatever the rewards add to them."""
  bonus = np.array([[0.1, 0.2, 0.3, 0.4]])

  def reward(prompts, tokens, mask):
    score = np.array([scores])
    return tasks.Verdict(score, np.ones((1, 4), bool), score - bonus)

  collect = rollouts.collector(
    scripted(),
    asking(0, reward=reward),
    num_groups=1,
    group_size=4,
    max_draws=5,
  )
  rollout, counts = collect(jnp.zeros(1), 0)
  assert counts == rollouts.Counts(
    1, silent, silent, drawn=20 if silent else 4, dropped=16 if silent else 0
  )
  close(rollout.scores, [scores], rtol=1e-7)
  close(rollout.rewards, np.array([scores]) - bonus, rtol=1e-6)
  assert rollout.where.all()


# --- Answers without tokens, or cut off ---


def answering(lengths, width, ended=None):
  """Answers of these many tokens, [B][G], all of them right."""

  def sample(params, keys, prompts, group_size):
    mask = jnp.arange(width) < jnp.array(lengths)[..., None]
    tokens = jnp.ones(mask.shape, jnp.int32)
    end = None if ended is None else jnp.array(ended)
    return policies.Sample(tokens, mask, jnp.zeros(mask.shape), end)

  return policies.softmax(2, 3)._replace(sample=sample)


def collected(policy, scores, **kwargs):
  scores = np.array(scores, np.float32)

  def reward(prompts, tokens, mask):
    return scores, np.ones(scores.shape, bool)

  num_groups, group_size = scores.shape
  collect = rollouts.collector(
    policy,
    asking(*range(num_groups), reward=reward),
    num_groups=num_groups,
    group_size=group_size,
    **kwargs,
  )
  return collect(policy.init(jax.random.key(0)), 0)


@pytest.mark.parametrize("kind", ["no token", "cut off"])
@pytest.mark.parametrize(
  ("scores", "idle", "op", "expected"),
  [
    ([100, 1], 0, sigma.dr_grpo(), [49.5, -49.5]),
    ([1, 1, 0, 0], 1, sigma.dr_grpo(), [0.5, 0.5, -0.5, -0.5]),
    ([1, 1, 0, 0], 1, sigma.dapo(), [1, 1, -1, -1]),
    ([1, 1, 0, 0], 1, sigma.rloo(), [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
    # Only the answer that trains nothing differs: the group is not silent.
    ([1, 0, 0, 0], 0, sigma.dr_grpo(), [0.75, -0.25, -0.25, -0.25]),
  ],
)
def test_an_answer_that_trains_no_token_counts_in_its_group(
  scores, idle, op, expected, kind
):
  """In baseline, σ and dynamic sampling: stacks differ, and here it does."""
  lengths, ended = np.full((1, len(scores)), 2), np.ones((1, len(scores)), bool)
  if kind == "no token":
    lengths[0, idle] = 0
  else:
    ended[0, idle] = False
  rollout, counts = collected(
    answering(lengths, 2, ended), [scores], max_draws=3, mask_truncated=True
  )
  assert counts == rollouts.Counts(1, 0, 0, drawn=len(scores), dropped=0)
  trains = np.arange(len(scores)) != idle
  equal(rollout.mask, np.repeat(trains[None, :, None], 2, axis=2))
  assert rollout.where.all()
  advantages, keep = sigma.rule(op)(
    rollout.rewards, rollout.where, rollout.scores
  )
  close(advantages, [expected], rtol=1e-6)
  assert keep.all()


@pytest.mark.parametrize("ended", [None, [[True, False, True]]])
@pytest.mark.parametrize("mask_truncated", [True, False])
def test_what_is_cut_off_trains_unless_it_is_masked(ended, mask_truncated):
  """And the reward function and the observer see it as it was sampled."""
  seen, masks = [], []
  policy = answering([[1, 2, 0]], 2, ended)

  def reward(prompts, tokens, mask):
    masks.append(mask)
    return np.array([[1.0, 0.0, 0.0]]), np.ones((1, 3), bool)

  rollout, _ = rollouts.collector(
    policy,
    asking(0, reward=reward),
    num_groups=1,
    group_size=3,
    mask_truncated=mask_truncated,
    observe=seen.append,
  )(policy.init(jax.random.key(0)), 0)
  whole = [[[True, False], [True, True], [False, False]]]
  equal(masks[0], whole)
  equal(seen[0].groups.mask, whole)
  equal(seen[0].ended, ended or np.ones((1, 3), bool))
  if ended and mask_truncated:
    whole[0][1] = [False, False]
  equal(rollout.mask, whole)


@pytest.mark.parametrize("width", [0, 2])
def test_answers_of_no_token_at_all_are_no_accident(width):
  """Of width 0 as well: advantages are there, and nothing to train."""
  policy = answering(np.zeros((2, 4), int), width)
  rollout, _ = collected(policy, [[1, 0, 0, 0], [1, 1, 1, 1]])
  assert rollout.tokens.shape == (2, 4, width)
  rule = sigma.rule(sigma.dr_grpo())
  advantages, _ = rule(rollout.rewards, rollout.where)
  close(advantages, [[0.75, -0.25, -0.25, -0.25], [0] * 4])
  learner = learners.policy_gradient(policy, optax.adam(0.1), rule)
  before = learner.init(policy.init(jax.random.key(0)))
  after, info = jax.jit(learner.step)(before, rollout)
  assert info.skipped
  assert not info.nonfinite
  equal(after.params, before.params)
