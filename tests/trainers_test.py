"""What other trainers compute, as rules, against numbers worked out by hand.

Read in the releases and commits named below; the words and code are ours. In
all of them a constant group's advantages are 0 up to rounding, which the small
constant then magnifies; here they are exactly 0.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupstd import rules, sigma

# Three groups: right answers, wrong answers. Every right one has the advantage
# listed first below, every wrong one the second.
GROUPS = [(3, 5), (1, 1), (1, 3)]
CENTRED = [(5 / 8, -3 / 8), (1 / 2, -1 / 2), (3 / 4, -1 / 4)]
LEFT_OUT = [(5 / 7, -3 / 7), (1, -1), (1, -1 / 3)]
SAMPLE_STD = [math.sqrt(15 / 56), math.sqrt(1 / 2), 1 / 2]
POPULATION_STD = [math.sqrt(15) / 8, 1 / 2, math.sqrt(3) / 4]


def over(divisors, eps=0.0):
  return [
    (right / (divisor + eps), wrong / (divisor + eps))
    for (right, wrong), divisor in zip(CENTRED, divisors, strict=True)
  ]


def floored(stats):
  """w = 1/max(σ, 10⁻⁵)."""
  return sigma.Weight(1 / jnp.maximum(stats.std, 1e-5))


TRAINERS = {
  # TRL 1.16.0, trl/trainer/grpo_trainer.py and utils.py: scale_rewards "group"
  # (the default), "none"; "batch" takes σ over the whole batch, here one group.
  "TRL": (
    sigma.rule(sigma.divide(ddof=1, eps=1e-4)),
    over(SAMPLE_STD, 1e-4),
  ),
  "TRL, none": (sigma.rule(sigma.dr_grpo()), CENTRED),
  "TRL, batch": (rules.batch_scaled(), over(SAMPLE_STD, 1e-4)),
  # Tunix 0.1.7, tunix/rl/algo_core.py: estimators grpo, drgrpo, rloo.
  "Tunix": (
    sigma.rule(sigma.divide(ddof=1, eps=1e-6)),
    over(SAMPLE_STD, 1e-6),
  ),
  "Tunix, drgrpo": (sigma.rule(sigma.dr_grpo()), CENTRED),
  "Tunix, rloo": (sigma.rule(sigma.rloo()), LEFT_OUT),
  # verl 0.9.1, verl/trainer/ppo/core_algos.py: grpo, with
  # norm_adv_by_std_in_grpo (the default) and without; rloo.
  "verl": (
    sigma.rule(sigma.divide(ddof=1, eps=1e-6)),
    over(SAMPLE_STD, 1e-6),
  ),
  "verl, not normalised": (sigma.rule(sigma.dr_grpo()), CENTRED),
  "verl, rloo": (sigma.rule(sigma.rloo()), LEFT_OUT),
  # NeMo-RL, nemo_rl/algorithms/advantage_estimator.py at commit 00925dd1 and
  # utils.py at 00439539: the defaults; normalize_rewards off;
  # use_leave_one_out_baseline off.
  "NeMo-RL": (
    rules.left_out(),
    [
      (
        5 / 7 / (math.sqrt(5 / 21) + 1e-6),
        -3 / 7 / (math.sqrt(2 / 7) + 1e-6),
      ),
      (1, -1),  # one other: no σ, not divided
      (1, -1 / 3 / (math.sqrt(1 / 3) + 1e-6)),  # the 1's others are equal
    ],
  ),
  "NeMo-RL, not normalised": (sigma.rule(sigma.rloo()), LEFT_OUT),
  "NeMo-RL, group mean": (
    sigma.rule(sigma.divide(ddof=1, eps=1e-6)),
    over(SAMPLE_STD, 1e-6),
  ),
  # OpenRLHF 0.11.2, openrlhf/trainer/ppo_utils/experience_maker.py: estimators
  # group_norm, dr_grpo, rloo.
  "OpenRLHF": (
    sigma.rule(sigma.divide(ddof=1, eps=1e-9)),
    over(SAMPLE_STD, 1e-9),
  ),
  "OpenRLHF, dr_grpo": (sigma.rule(sigma.dr_grpo()), CENTRED),
  "OpenRLHF, rloo": (sigma.rule(sigma.rloo()), LEFT_OUT),
  # Simply, simply/rl_lib.py at commit d66ca050: ByGroup.
  "Simply": (sigma.rule(floored), over(POPULATION_STD)),
  # This project.
  "groupstd": (sigma.rule(sigma.grpo()), over(POPULATION_STD)),
}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.usefixtures("x64")
def test_advantages_of_each_trainer(trainer):
  """To 10⁻¹²: tight enough to see the smallest ε, 10⁻⁹."""
  rule, expected = TRAINERS[trainer]
  for (right, wrong), (plus, minus) in zip(GROUPS, expected, strict=True):
    rewards = jnp.array([1.0] * right + [0.0] * wrong)
    advantages, keep = rule(rewards, None, None)
    np.testing.assert_allclose(
      advantages, [plus] * right + [minus] * wrong, rtol=1e-12
    )
    assert keep


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_constant_group_is_exactly_zero_and_kept_in_each(trainer):
  rule, _ = TRAINERS[trainer]
  rewards = jnp.array([0.0, 0.1, 0.2, 0.7, 1.0])[:, None] * jnp.ones(7)
  advantages, keep = jax.jit(rule)(rewards, None, None)
  np.testing.assert_array_equal(advantages, 0)
  assert keep.all()


def test_leaving_out_of_the_deviation_too_is_no_weight():
  """A weight's advantages sum to 0; these do not (1 − √3 for [1, 0, 0, 0])."""
  advantages, _ = rules.left_out()(jnp.array([1.0, 0.0, 0.0, 0.0]))
  np.testing.assert_allclose(advantages.sum(), 1 - math.sqrt(3), rtol=1e-5)


def test_a_floor_and_a_sum_differ_where_the_deviation_is_small():
  """σ = (√3/4)·10⁻⁶: below the floor, and of the size of an ε."""
  rewards = jnp.array([1e-6, 0.0, 0.0, 0.0])
  cases = [
    (floored, 0.75e-6 / 1e-5),
    (sigma.divide(ddof=1, eps=1e-4), 0.75e-6 / (0.5e-6 + 1e-4)),
    (sigma.divide(ddof=1, eps=1e-6), 0.75e-6 / (0.5e-6 + 1e-6)),
    (sigma.divide(ddof=1, eps=1e-9), 0.75e-6 / (0.5e-6 + 1e-9)),
    (sigma.grpo(), math.sqrt(3)),
  ]
  for op, expected in cases:
    advantages, _ = sigma.rule(op)(rewards)
    np.testing.assert_allclose(
      advantages, np.array([1, *[-1 / 3] * 3]) * expected, rtol=1e-6
    )
