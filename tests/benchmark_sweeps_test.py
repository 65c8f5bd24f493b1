"""What the sweeps compare is the same work; nothing here is timed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import benchmark_programs, benchmark_sweeps, benchmark_work

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SIZE = benchmark_work.SIZES["tiny"]


def case(cells, times, against=0):
  """A row that takes these seconds in each round, the first to compile."""
  return benchmark_sweeps.Case(
    cells, lambda i: (times[i], 2 * times[i]), against
  )


def test_cases_take_turns_and_each_round_has_another_first():
  told = []

  def make(name):
    def run(number):
      told.append((name, number))
      return number, 10 * number

    return benchmark_sweeps.Case({}, run, 0)

  found = benchmark_sweeps.measure([make("a"), make("b")], 3)
  assert told[:2] == [("a", 0), ("b", 0)]
  assert [x for x, _ in told[2:]] == ["a", "b", "b", "a", "a", "b"]
  np.testing.assert_array_equal(found[..., 0], [[1, 2, 3]] * 2)
  np.testing.assert_array_equal(found[..., 1], 10 * found[..., 0])


def test_ratios_are_of_one_rounds_times():
  """Whatever else the cores do in a round, they do to both."""
  times = np.array([9.0, 1, 5, 2])
  cases = [case({"x": "a"}, times), case({"x": "b"}, 3 * times)]
  first, second = benchmark_sweeps.summary(
    cases, benchmark_sweeps.measure(cases, 3)
  )
  assert second["x"] == "b"
  assert second["wall"] == {"median": 6, "min": 3, "max": 15}
  assert second["cpu"] == {"median": 12, "min": 6, "max": 30}
  for name in "wall_ratio", "cpu_ratio":
    assert first[name] == {"median": 1, "min": 1, "max": 1}
    assert second[name] == {"median": 3, "min": 3, "max": 3}


def test_apart_is_the_same_policy():
  """In log-probs, and in draws: likeliest ones, which no key decides."""
  policy = benchmark_programs.policy(SIZE)
  params = policy.init(jax.random.key(0))
  prompts = benchmark_sweeps._prompts(SIZE)
  rollout = benchmark_sweeps._rollout(SIZE)
  given = params, prompts, rollout.tokens
  np.testing.assert_allclose(
    jax.jit(benchmark_sweeps.apart(policy).log_prob)(*given),
    jax.jit(policy.log_prob)(*given),
    rtol=1e-5,
    atol=1e-5,
  )
  greedy = benchmark_programs.policy(SIZE, temperature=0.0)
  keys = jax.random.split(jax.random.key(0), SIZE.groups)
  shared, apart = (
    jax.jit(made.sample, static_argnums=3)(
      params, keys, prompts, SIZE.group_size
    )
    for made in (greedy, benchmark_sweeps.apart(greedy))
  )
  np.testing.assert_array_equal(apart.tokens, shared.tokens)
  assert len(np.unique(apart.tokens)) > 3


def test_as_many_groups_are_silent_as_are_asked_for():
  for silent in range(SIZE.groups + 1):
    rollout = benchmark_sweeps._rollout(SIZE, silent)
    spread = jnp.max(rollout.scores, axis=1) - jnp.min(rollout.scores, axis=1)
    assert jnp.sum(spread == 0) == silent


def test_answers_end_at_any_token_with_one_chance_in_sixteen():
  """Drawn as the sweep draws: 512 answers' lengths, min(geometric, 64)."""
  size = SIZE._replace(groups=64, group_size=8, length=64)
  stop = range(size.vocabulary // 16)
  policy = benchmark_programs.policy(size, stop=stop, packing=0)
  params = benchmark_sweeps.flat(policy.init(jax.random.key(0)))
  keys = jax.random.split(jax.random.key(1), size.groups)
  drawn = jax.jit(policy.sample, static_argnums=3)(
    params, keys, benchmark_sweeps._prompts(size), size.group_size
  )
  found = np.asarray(drawn.mask).sum(axis=-1)
  keep = 15 / 16
  mean = (1 - keep**64) * 16
  survives = keep ** np.arange(64)
  second = np.sum((2 * np.arange(64) + 1) * survives)
  error = np.sqrt((second - mean**2) / found.size)
  assert abs(found.mean() - mean) < 4 * error
  assert error < 1


def test_a_sweep_runs():
  size = SIZE._replace(layers=1)
  with benchmark_sweeps.SWEEPS["silent"](size) as cases:
    rows = benchmark_sweeps.summary(cases, benchmark_sweeps.measure(cases, 1))
  assert [row["silent"] for row in rows] == ["0%", "25%", "50%", "75%", "100%"]
  # Two parts: one of them, and a tenth, is allowed on top.
  assert [row["allowed"] for row in rows] == [
    "1.60",
    "1.35",
    "1.10",
    "0.85",
    "0.60",
  ]
  for row in rows:
    assert row["wall"]["min"] > 0
    assert row["cpu"]["min"] > 0
