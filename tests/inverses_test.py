"""An objective is wanted, its weights are found, and the learner ascends it."""

import jax
import numpy as np
import optax
import pytest

from configs import bernoulli
from experiments import scalar, train, workdir
from groupstd import (
  draws,
  learners,
  losses,
  objectives,
  policies,
  sigma,
  tasks,
  theory,
)

PS = np.array([0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98])
COPIES = 20_000


def realised(op, group_size=8, num_batches=8):
  """(c_G(p), its standard error) as the learner's own updates show it."""
  p = np.repeat(PS, COPIES)
  policy, task = policies.bernoulli(p), tasks.bernoulli(len(p))
  collect = draws.collect_bernoulli(
    policy, task, num_groups=len(p), group_size=group_size
  )
  learner = learners.policy_gradient(
    policy, optax.sgd(1.0), sigma.rule(op), aggregate=losses.group_sum()
  )
  start = learner.init(policy.init(jax.random.key(0)))

  @jax.jit
  def update(step):
    after, _ = learner.step(start, collect(start.params, step)[0])
    return after.params - start.params

  moved = (
    sum(np.asarray(update(i), np.float64) for i in range(num_batches))
    / num_batches
  )
  moved = moved.reshape(len(PS), COPIES)
  slope = PS * (1 - PS)  # ∂p/∂θ
  error = moved.std(axis=1) / np.sqrt(COPIES)
  return moved.mean(axis=1) / slope, error / slope


@pytest.mark.parametrize("method", ["grpo", "inverse", "pass_at_4"])
def test_the_realised_objective_is_the_predicted_one(method):
  """Within 5 standard errors at 7 points: a false alarm in 2·10⁵ runs."""
  op = scalar.build_op(bernoulli.get_config(method))
  measured, error = realised(op)
  predicted = theory.objective_weight(sigma.rule(op), PS, 8)
  assert np.all(np.abs(measured - predicted) < 5 * error)
  # A fault of 5 % of the largest weight would be seen in the middle. (The
  # inverse's weights alternate in size: its updates vary most.)
  assert np.all(5 * error[2:5] < 0.05 * np.abs(predicted).max())


def test_the_inverse_undoes_attenuation():
  """Nearer to 1/√(p(1 − p)) than GRPO everywhere on [0.02, 0.98]; G = 8."""
  p = np.linspace(0.02, 0.98, 193)
  wanted = 1 / np.sqrt(p * (1 - p))
  errors = {
    method: np.abs(
      theory.objective_weight(
        sigma.rule(scalar.build_op(bernoulli.get_config(method))), p, 8
      )
      / wanted
      - 1
    ).max()
    for method in ("grpo", "inverse")
  }
  fit = objectives.weights_for(
    lambda p: 1 / np.sqrt(p * (1 - p)), 8, interval=(0.02, 0.98)
  )
  # A degree-6 polynomial cannot follow the ends: the error is not 0, and told.
  assert errors["inverse"] == pytest.approx(fit.error, rel=0.02)
  assert 0.01 < errors["inverse"] < errors["grpo"] / 2


@pytest.mark.parametrize("plan", ["update", "mixed"])
def test_a_planned_run_spends_what_a_uniform_one_would(plan, tmp_path):
  config = bernoulli.get_config("planned")
  config.num_prompts, config.num_steps, config.checkpoint_every = 50, 20, 10
  config.plan = plan
  train.run(config, tmp_path)
  *lines, last = workdir.read_metrics(tmp_path)
  # Never more than the budget; less only where no rollout would gain.
  assert all(0 < x["drawn"] <= 400 for x in lines)
  assert lines[0]["drawn"] == 400
  assert last["mean_p"] > lines[0]["mean_p"]
