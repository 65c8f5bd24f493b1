"""Which prompts a step asks, and what a reward function may return."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from groupstd import tasks

NAN, INF = float("nan"), float("inf")
IDS = [17, 4]
ALL = np.ones((2, 2), bool)
equal = np.testing.assert_array_equal


def check(*verdict, **rest):
  """The checked verdict of two groups of two, by scores, where, rewards."""
  verdict = tasks.Verdict(*verdict, **{"where": ALL, **rest})
  return tasks.check_scores(verdict, IDS, 2)


def given(name, values):
  """A verdict that is right but for one field."""
  if name == "part 'a'":
    return check(np.ones((2, 2)), parts={"a": values})
  return check(**{"scores": np.ones((2, 2)), name: values})


# --- What a reward function returns ---


@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "bfloat16"])
def test_numbers_of_any_kind_become_float32(dtype):
  numbers = jnp.array([[1, 0], [0, 1]], dtype)
  scores, where, rewards, parts = check(
    numbers, rewards=numbers, parts={"a": numbers}
  )
  assert where.dtype == bool
  for found in scores, rewards, parts["a"]:
    assert found.dtype == np.float32
    equal(found, [[1, 0], [0, 1]])
  # Precision that was there is kept.
  assert check(np.ones((2, 2))).scores.dtype == np.float64


def test_scores_and_where_are_a_verdict_whose_rewards_are_the_scores():
  scores = np.array([[0.5, 1], [0, 1]])
  where = np.array([[True, False], [True, True]])
  for verdict in (scores, where), tasks.Verdict(scores, where):
    found = tasks.check_scores(verdict, IDS, 2)
    equal(found.scores, [[0.5, 0], [0, 1]])
    equal(found.rewards, found.scores)
    equal(found.where, where)
    assert not found.parts


@pytest.mark.parametrize("bare", [np.ones((2, 2)), [ALL, ALL], 1.0, (ALL,)])
def test_what_is_no_verdict_is_refused(bare):
  """Two rows of scores are not scores and where."""
  with pytest.raises(ValueError, match=r"must return a Verdict, or \(scores"):
    tasks.check_scores(bare, IDS, 2)


@pytest.mark.parametrize("name", ["scores", "rewards", "part 'a'"])
@pytest.mark.parametrize(
  "values",
  [
    [1.0],  # one number for the batch, which would broadcast
    1.0,
    [1.0, 0.0, 1.0],
    [1.0, 0.0, 1.0, 0.0],
    [1.0, 0.0, 1.0, 0.0, 1.0],
    [[1.0], [0.0], [1.0], [0.0]],
    [[1.0], [0.0]],
    [[1.0, 0.0]],
    [[[1.0], [0.0]], [[1.0], [0.0]]],
    [[1.0, 0.0], [1.0]],
  ],
)
def test_a_shape_that_is_not_the_answers_is_refused(name, values):
  message = rf"{name} must (have|be) .*\(2, 2\)"
  with pytest.raises(ValueError, match=message):
    given(name, values)


@pytest.mark.parametrize("name", ["scores", "rewards", "part 'a'"])
@pytest.mark.parametrize(
  "values",
  [[["1", "0"], ["0", "1"]], [[1.0, None], [0.0, 1.0]], [[1.0, 1j], [0, 1]]],
)
def test_what_is_no_real_number_is_refused(name, values):
  with pytest.raises(ValueError, match=f"{name} must be real numbers, got"):
    given(name, values)


def test_no_scores_at_all_are_refused():
  with pytest.raises(ValueError, match=r"scores must have shape .*got \(\)"):
    check(None)


@pytest.mark.parametrize(
  ("where", "message"),
  [
    (True, r"where must have shape \(2, 2\).* got \(\)"),
    ([True, True], r"where must have shape \(2, 2\).* got \(2,\)"),
    ([[True], [True]], r"where must have shape \(2, 2\).* got \(2, 1\)"),
    ([[1, 1], [1, 1]], "`where` must be booleans, got int"),
    ([[1.0, 0.0], [1.0, 1.0]], "`where` must be booleans, got float"),
    (None, "where must have shape"),
  ],
)
def test_where_says_yes_or_no_for_each_answer(where, message):
  with pytest.raises(ValueError, match=message):
    check(np.ones((2, 2)), where=where)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_counts_is_finite_or_named(bad):
  message = f"got {bad} for answer 1 of prompt 4 .1 such"
  broken = [[1.0, 0.0], [1.0, bad]]
  with pytest.raises(ValueError, match=f"a score must be finite, {message}"):
    check(broken)
  with pytest.raises(ValueError, match=f"a reward must be finite, {message}"):
    check(np.ones((2, 2)), rewards=broken)
  with pytest.raises(ValueError, match=r"of prompt 17 \(4 such"):
    check(jnp.full((2, 2), bad, jnp.bfloat16))


def test_an_abstention_may_hold_anything_and_counts_as_nothing():
  where = [[True, False], [False, False]]
  wild = [[1.0, NAN], [INF, -INF]]
  found = check(wild, where=where, rewards=wild)
  for numbers in found.scores, found.rewards:
    equal(numbers, [[1, 0], [0, 0]])
  equal(found.where, where)


def test_a_part_may_abstain_where_the_score_does_not():
  parts = {"a": [[1.0, NAN], [NAN, NAN]]}
  equal(check(np.ones((2, 2)), parts=parts).parts["a"], parts["a"])


# --- The scalar policy's task ---


def test_asked_for_all_prompts_they_come_in_order():
  ids, prompts = tasks.bernoulli(5).prompts(3, 5)
  equal(ids, range(5))
  equal(prompts, ids)


def test_a_subset_is_without_replacement_and_a_function_of_the_step():
  task, steps = tasks.bernoulli(6, seed=1), jnp.arange(600)
  some = jax.jit(jax.vmap(lambda step: task.prompts(step, 4)[0]))
  ids = np.asarray(some(steps))
  assert (np.diff(np.sort(ids), axis=1) > 0).all()
  assert ids.min() == 0
  assert ids.max() == 5
  for step in 0, 599:
    equal(task.prompts(step, 4)[0], ids[step])
    equal(task.prompts(step, 4)[1], ids[step])
  # Each place is uniform over the prompts: false alarm below 4·10⁻⁶.
  for place in ids.T:
    assert stats.chisquare(np.bincount(place, minlength=6)).pvalue > 1e-6
  # Of 360 ordered subsets a step repeats the last one once in 360.
  repeats = (ids[1:] == ids[:-1]).all(1).sum()
  assert stats.binom.sf(repeats - 1, 599, 1 / 360) > 1e-6
  other = tasks.bernoulli(6, seed=2)
  different = jax.vmap(lambda step: other.prompts(step, 4)[0])(steps)
  assert (different != ids).any(1).mean() > 0.9


@pytest.mark.parametrize("asked", [0, -1, 6])
def test_more_prompts_than_there_are_or_none_are_refused(asked):
  with pytest.raises(ValueError, match=f"1 to 5 prompts, got {asked}"):
    tasks.bernoulli(5).prompts(0, asked)


def test_a_task_has_a_prompt():
  with pytest.raises(ValueError, match=r"`num_prompts` .* at least 1, got 0"):
    tasks.bernoulli(0)


def test_the_answer_1_is_right():
  tokens = jnp.array([[[1], [0], [1]]])
  verdict = tasks.bernoulli(5).reward(None, tokens, None)
  for found in verdict, tasks.check_scores(verdict, [0], 3):
    equal(found.scores, [[1, 0, 1]])
    assert found.where.all()
