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


def check(scores, where=ALL, ids=IDS, group_size=2):
  return tasks.check_scores(scores, where, ids, group_size)


# --- What a reward function returns ---


@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "bfloat16"])
def test_numbers_of_any_kind_become_float32(dtype):
  scores, where = check(jnp.array([[1, 0], [0, 1]], dtype))
  assert scores.dtype == np.float32
  assert where.dtype == bool
  equal(scores, [[1, 0], [0, 1]])
  scores, _ = check([[0.5, 1], [0, 1]], [[True, False], [True, True]])
  equal(scores, [[0.5, 0], [0, 1]])
  assert check(np.ones((2, 2)))[0].dtype == np.float64


@pytest.mark.parametrize(
  "scores",
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
    None,
  ],
)
def test_a_shape_that_is_not_the_answers_is_refused(scores):
  with pytest.raises(ValueError, match=r"scores must (have|be) .*\(2, 2\)"):
    check(scores)


@pytest.mark.parametrize(
  "scores",
  [[["1", "0"], ["0", "1"]], [[1.0, None], [0.0, 1.0]], [[1.0, 1j], [0, 1]]],
)
def test_what_is_no_real_number_is_refused(scores):
  with pytest.raises(ValueError, match="scores must be real numbers, got"):
    check(scores)


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
    check(np.ones((2, 2)), where)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_score_that_counts_is_finite_or_named(bad):
  message = f"got {bad} for answer 1 of prompt 4 .1 such"
  with pytest.raises(ValueError, match=message):
    check([[1.0, 0.0], [1.0, bad]])
  with pytest.raises(ValueError, match=r"of prompt 17 \(4 such"):
    check(jnp.full((2, 2), bad, jnp.bfloat16))


def test_an_abstention_may_hold_anything_and_counts_as_nothing():
  where = [[True, False], [False, False]]
  scores, kept = check([[1.0, NAN], [INF, -INF]], where)
  equal(scores, [[1, 0], [0, 0]])
  equal(kept, where)


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
  scores, where = tasks.bernoulli(5).reward(None, tokens, None)
  equal(scores, [[1, 0, 1]])
  assert where.all()
  equal(tasks.check_scores(scores, where, [0], 3)[0], [[1, 0, 1]])
