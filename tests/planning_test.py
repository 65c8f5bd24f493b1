"""Plans against brute force, a linear program and the laws of allocation."""

import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import optimize

from groupstd import estimates, planning, sigma, theory

# [P, M + 1] of small problems; brute force looks at every plan.
PROMPTS, LARGEST = 4, 5
PLANS = np.array(
  list(itertools.product(range(LARGEST + 1), repeat=PROMPTS))
)  # [(M + 1)^P, P]


def problems(kind, count=40):
  """[count, P, M + 1] values, seeded."""
  rng = np.random.default_rng(len(kind))
  shape = (count, PROMPTS, LARGEST + 1)
  if kind == "concave":
    gains = -np.sort(-rng.exponential(size=shape), axis=-1)
    return np.cumsum(gains, axis=-1)
  if kind == "one is nothing":
    value = np.sort(rng.exponential(size=shape), axis=-1)
    value[..., :2] = 0
    return value
  if kind == "ties":
    return rng.integers(-2, 3, size=shape).astype(float)
  return rng.normal(size=shape)


KINDS = ["concave", "one is nothing", "ties", "any"]


def every_total(value, reduce=np.sum):
  """[plans] of each plan's value, and of its rollouts."""
  return reduce(value[np.arange(PROMPTS), PLANS], axis=-1), PLANS.sum(-1)


# -----------------------------------------------------------------------------
# allocate
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("minimum", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_plan_against_brute_force(kind, minimum):
  """total = best ≤ bound, with equality where values are concave."""
  for value in problems(kind):
    totals, rollouts = every_total(value)
    allowed = (minimum <= PLANS).all(axis=-1)
    for budget in range(PROMPTS * minimum, PROMPTS * LARGEST + 3):
      plan = planning.allocate(value, budget, minimum=minimum)
      best = totals[allowed & (rollouts <= budget)].max()
      assert plan.sizes.sum() <= budget
      assert plan.sizes.min() >= minimum
      total = value[np.arange(PROMPTS), plan.sizes].sum()
      np.testing.assert_allclose(plan.total, total, rtol=1e-14)
      np.testing.assert_allclose(total, best, rtol=1e-13, atol=1e-14)
      assert plan.bound >= best - 1e-12
      if kind == "concave":
        np.testing.assert_allclose(plan.total, plan.bound, rtol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_bound_is_that_of_the_linear_program(kind):
  """max Σ x·value over shares x of plans, by scipy; and total is short of it
  by less than one prompt could gain in all."""
  for value in problems(kind, 4):
    for budget in range(0, PROMPTS * LARGEST, 3):
      plan = planning.allocate(value, budget)
      relaxed = optimize.linprog(
        -value.ravel(),
        A_ub=np.tile(np.arange(LARGEST + 1), PROMPTS)[None],
        b_ub=[budget],
        A_eq=np.kron(np.eye(PROMPTS), np.ones(LARGEST + 1)),
        b_eq=np.ones(PROMPTS),
      )
      np.testing.assert_allclose(plan.bound, -relaxed.fun, atol=1e-9)
      assert plan.bound - plan.total < np.ptp(value, axis=1).max() + 1e-12


def test_a_chord_that_cannot_be_paid_is_reported():
  """Two rollouts of the first would give 10; the budget of 1 buys 3 elsewhere,
  and half of the chord, 5, is what no plan can exceed."""
  plan = planning.allocate(np.array([[0, 0, 10], [0, 3, 3]]), 1)
  assert (plan.sizes.tolist(), plan.total, plan.bound) == ([0, 1], 3.0, 5.0)


@pytest.mark.parametrize("kind", ["one is nothing", "any"])
def test_where_only_some_prompts_are_planned_anew(kind, monkeypatch):
  """Two of them: total ≤ best ≤ bound, by at most one prompt's range."""
  monkeypatch.setattr(planning, "_CORE", 2)
  best_too = []
  for value in problems(kind):
    totals, rollouts = every_total(value)
    for budget in range(PROMPTS * LARGEST):
      plan = planning.allocate(value, budget)
      best = totals[rollouts <= budget].max()
      assert plan.sizes.sum() <= budget
      assert plan.total <= best + 1e-12
      assert best <= plan.bound + 1e-12
      assert plan.bound - plan.total < np.ptp(value, axis=1).max() + 1e-12
      best_too.append(plan.total > best - 1e-12)
  assert 0.8 < np.mean(best_too) < 1


def test_straight_values_are_no_chords_to_be_caught_in(monkeypatch):
  """Each rollout of a prompt is worth the same, up to rounding: concave."""
  monkeypatch.setattr(planning, "_CORE", 1)
  gains = np.random.default_rng(3).integers(1, 9, (50, 1)) / 7
  value = np.cumsum(np.tile(gains, 33), axis=1) + np.arange(50)[:, None] / 3
  for budget in range(0, 1600, 37):
    plan = planning.allocate(value, budget)
    assert plan.sizes.sum() == budget
    np.testing.assert_allclose(plan.total, plan.bound, rtol=1e-12)
    for gain in range(1, 9):  # Equals share.
      assert np.ptp(plan.sizes[gains[:, 0] == gain / 7]) <= 1


def test_budget_is_spent_while_it_gains():
  """All of it where values rise; nothing where they never do."""
  rising = np.cumsum(np.random.default_rng(0).exponential(size=(9, 7)), axis=1)
  flat = np.vstack([rising, np.zeros((3, 7))])
  for budget in range(70):
    spent = planning.allocate(rising, budget).sizes.sum()
    assert spent == min(budget, 9 * 6)
    sizes = planning.allocate(flat, budget).sizes
    assert sizes[:9].sum() == spent
    assert not sizes[9:].any()


@pytest.mark.parametrize("kind", ["concave", "one is nothing"])
def test_more_budget_is_no_worse(kind):
  """bound is concave in the budget; total never falls where it is exact, and
  then no prompt gets less."""
  for value in problems(kind, 10):
    plans = [planning.allocate(value, budget) for budget in range(21)]
    bounds = np.array([plan.bound for plan in plans])
    assert np.all(np.diff(bounds) >= -1e-12)
    assert np.all(np.diff(bounds, n=2) <= 1e-12)
    if kind == "concave":
      assert np.all(np.diff([plan.sizes for plan in plans], axis=0) >= 0)


def test_units_constants_and_order_do_not_matter():
  rng = np.random.default_rng(1)
  value = problems("one is nothing", 1)[0]
  order = rng.permutation(PROMPTS)
  for budget in range(20):
    plan = planning.allocate(value, budget)
    moved = planning.allocate(4 * value + np.arange(PROMPTS)[:, None], budget)
    np.testing.assert_array_equal(moved.sizes, plan.sizes)
    swapped = planning.allocate(value[order], budget)
    np.testing.assert_array_equal(swapped.sizes, plan.sizes[order])


# -----------------------------------------------------------------------------
# equalise
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("minimum", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_least_value_against_brute_force(kind, minimum):
  for value in problems(kind):
    least, rollouts = every_total(value, np.min)
    allowed = (minimum <= PLANS).all(axis=-1)
    if np.any(value[:, minimum:].argmax(axis=1) == 0):
      continue  # A prompt that nothing lifts does not count.
    for budget in range(PROMPTS * minimum, PROMPTS * LARGEST + 3):
      plan = planning.equalise(value, budget, minimum=minimum)
      assert plan.sizes.sum() <= budget
      assert plan.sizes.min() >= minimum
      best = least[allowed & (rollouts <= budget)].max()
      assert plan.total == plan.bound == best
      assert value[np.arange(PROMPTS), plan.sizes].min() == best


def test_equal_fidelity_is_the_required_group_size():
  """Each prompt has `theory.required_group_size` of the level, or one more;
  a level above would cost more than the budget. p = 0 gets the minimum."""
  op, p = sigma.grpo(), np.array([0.0, 0.04, 0.2, 0.3, 0.5, 0.9])
  value = planning.fidelity_value(op, p, np.arange(33))
  for budget in (30, 48):
    plan = planning.equalise(value, budget, minimum=2)
    required = theory.required_group_size(op, p[1:], plan.total)
    assert plan.sizes[0] == 2
    assert plan.sizes.sum() == budget
    assert np.all((plan.sizes[1:] - required) * (plan.sizes[1:] > 2) >= 0)
    # What is left goes to the worst off: whoever is above the level is so by
    # its last rollout, or by the minimum.
    before = value[np.arange(1, 6), plan.sizes[1:] - 1]
    assert np.all((before <= plan.total) | (plan.sizes[1:] == 2))
    above = theory.required_group_size(op, p[1:], plan.total + 1e-6)
    assert 2 + above.sum() > budget


# -----------------------------------------------------------------------------
# Values
# -----------------------------------------------------------------------------

P = np.array([0.0, 0.02, 0.3, 0.5, 0.99])


@pytest.mark.parametrize("op", [sigma.grpo(), sigma.max_rl()])
def test_values_are_the_theory_s(op):
  sizes = [0, 1, 2, 5, 16]
  found = planning.update_value(op, P, sizes)
  assert not found[:, :2].any()
  for column, size in zip(found.T[2:], sizes[2:], strict=True):
    np.testing.assert_allclose(
      column, theory.expected_update(op, P, size), rtol=1e-13
    )
  found = planning.mixed_value(P, sizes)
  np.testing.assert_allclose(
    found[:, 2:],
    1 - np.stack([theory.silent_rate(P, g) for g in sizes[2:]], axis=1),
    atol=1e-14,
  )
  assert not found[:, :2].any()


def test_variance_is_vip_s():
  """p(1 − p)/(g − 1) for RLOO, p(1 − p)(g − 1)/g² for Dr. GRPO
  (arXiv:2602.01601), and for GRPO the chance of a mixed group over g."""
  g = np.array([2, 3, 8, 33])
  spread = (P * (1 - P))[:, None]
  for op, expected in (
    (sigma.rloo(), spread / (g - 1)),
    (sigma.dr_grpo(), spread * (g - 1) / g**2),
    (sigma.grpo(), planning.mixed_value(P, g) / g),
  ):
    found = planning.variance_value(op, P, g)
    np.testing.assert_allclose(-found, expected, rtol=1e-12, atol=1e-16)


def test_variance_of_every_group():
  """E[ΣA²]/g² over all 2^g groups, A by the rule itself."""
  g, p = 5, 0.3
  rewards = np.array(list(itertools.product([0.0, 1.0], repeat=g)))
  for op in (sigma.grpo(), sigma.max_rl(), sigma.dapo()):
    advantages, _ = sigma.rule(op)(rewards)
    chance = np.prod(np.where(rewards == 1, p, 1 - p), axis=1)
    expected = chance @ np.sum(np.asarray(advantages) ** 2, axis=1) / g**2
    # The rule is asked in float32 here.
    found = planning.variance_value(op, p, [g])
    np.testing.assert_allclose(-found, [expected], rtol=1e-5)


def test_values_from_a_log_are_unbiased():
  """Over k ~ Binomial(n, p) the table of a log has the mean of that of p."""
  n, sizes = 9, np.arange(8)
  k = np.arange(n + 1)
  for worth in (
    planning.update(sigma.grpo()),
    planning.mixed,
    planning.quiet(sigma.rloo()),
  ):
    of_log = planning.tabulate(
      worth, lambda values, g: estimates.unbiased(values, k, n, g), sizes
    )
    of_p = planning.tabulate(worth, planning.given(P), sizes)
    np.testing.assert_allclose(
      theory.binomial(P, n) @ of_log, of_p, rtol=1e-12, atol=1e-15
    )


def test_plans_of_known_form():
  """RLOO's least variance has g − 1 ∝ √(p(1 − p)), rounded; equal prompts
  share; a plan is no worse than equal sizes."""
  p, sizes = np.array([0.5, 0.2, 0.1, 0.02]), np.arange(41)
  value = planning.variance_value(sigma.rloo(), p, sizes)
  plan = planning.allocate(value, 84, minimum=2)
  ideal = np.sqrt(p * (1 - p))
  ideal = 1 + 80 * ideal / ideal.sum()
  np.testing.assert_allclose(plan.sizes, ideal, atol=1)
  np.testing.assert_allclose(plan.total, plan.bound, rtol=1e-12)
  alike = np.tile(planning.mixed_value([0.3, 0.7], sizes), (4, 1))
  assert set(planning.allocate(alike, 64).sizes) == {8}
  for value in (
    planning.update_value(sigma.grpo(), p, sizes),
    planning.mixed_value(p, sizes),
  ):
    for each in (2, 8, 20):
      plan = planning.allocate(value, 4 * each)
      assert plan.total >= value[:, each].sum()


# -----------------------------------------------------------------------------
# Refused, and run
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("solve", [planning.allocate, planning.equalise])
@pytest.mark.parametrize(
  ("value", "budget", "minimum", "message"),
  [
    ([1.0, 2.0], 1, 0, r"must be \[P, M \+ 1\], got shape \(2,\)"),
    ([[0.0, 1.0]], 5, 2, r"`minimum` must be in \[0, M\] = \[0, 1\], got 2"),
    ([[0.0, math.nan]], 5, 0, "must be finite from the minimum on"),
    ([[0.0, 1, 2]] * 3, 5, 2, "`budget` must be at least 6, got 5"),
  ],
)
def test_mistakes_are_refused(solve, value, budget, minimum, message):
  with pytest.raises(ValueError, match=message):
    solve(np.array(value), budget, minimum=minimum)


@pytest.mark.parametrize("solve", [planning.allocate, planning.equalise])
def test_nothing_to_choose(solve):
  """Values below the minimum are not looked at; M may be the minimum."""
  value = np.array([[-math.inf, 1.0], [math.nan, 2.0]])
  assert solve(value, 7, minimum=1).sizes.tolist() == [1, 1]


def planned(*flags):
  return subprocess.run(
    [sys.executable, "-m", "experiments.planned", *flags],
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("[1, 2", "cannot be read"),
    ("[1, 2]", "must hold {prompt: [share right, ...]}"),
    ('{"7": [0.5], "8": [0.3]}', "prompt '7' must have 8 visits, got 1"),
    ('{"7": [0.3], "8": [0.3]}', "prompt '7' must be a list of multiples"),
    ('{"7": ["a"], "8": [0.5]}', "of 1/8 in [0, 1]"),
    ('{"7": [1.5], "8": [0.5]}', "of 1/8 in [0, 1]"),
  ],
)
def test_a_log_of_another_form_is_refused(text, message, tmp_path):
  (tmp_path / "log.json").write_text(text)
  ended = planned(f"--logs={tmp_path / 'log.json'}", f"--out={tmp_path}")
  assert ended.returncode == 2
  assert len(ended.stderr.splitlines()) == 1
  assert message in ended.stderr


@pytest.mark.slow
def test_planned_on_a_real_log(external_data, tmp_path):
  """Planned from half of a GRPO run's visits and scored on the others, the
  update, the mixed groups and the variance are better than at equal sizes by
  3 standard errors, and not better than the oracle's; so on Big-Math."""
  log = external_data / "data" / "logs" / "one_shot_rlvr" / "acc_step_500.json"
  ended = planned(f"--logs={log}", f"--out={tmp_path}")
  assert ended.returncode == 0, ended.stderr
  assert (tmp_path / "planned.png").stat().st_size > 10_000
  rows = json.loads((tmp_path / "planned.json").read_text())["rows"]
  assert len(rows) == 16
  for row in rows:
    assert max(row["gap"].values()) < 1e-3
    if row["objective"] == "equal fidelity":
      continue
    gain = row["gain"]
    for plan in "planned", "fitted":
      assert 3 * row["error"][plan] < gain[plan] <= gain["oracle"] + 1e-12, row
