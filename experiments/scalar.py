"""The scalar policy on Big-Math's difficulty: from a config to a run."""

from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import numpy as np
import optax

from experiments import building, cli, train
from groupstd import (
  data,
  draws,
  learners,
  losses,
  objectives,
  planning,
  policies,
  rollouts,
  sharding,
  sigma,
  tasks,
  theory,
)


def build(config: ml_collections.ConfigDict) -> train.Experiment:
  """Turns the config into an experiment, or says what is wrong with it.

  Raises:
    ValueError: naming the field, its value and what it must be.
  """
  building.at_least(
    config,
    1,
    "num_prompts",
    "num_steps",
    "checkpoint_every",
    "observe_every",
    "plan_every",
  )
  probabilities = population(config)
  policy = policies.bernoulli(probabilities)
  task = tasks.bernoulli(config.num_prompts, seed=config.seed)
  # The last round's prompts must exist before the first is asked.
  task.prompts(0, config.num_groups * config.max_rounds)
  op = build_op(config)
  learner = learners.policy_gradient(
    policy,
    building.make_one(optax, config.optimizer, "config.optimizer"),
    sigma.rule(op),
    surrogate=building.make_one(losses, config.surrogate, "config.surrogate"),
    aggregate=building.make_one(losses, config.aggregate, "config.aggregate"),
  )
  with building.field("config.num_devices"):
    mesh = sharding.make_mesh(config.num_devices)
  sizes = {
    "num_groups": config.num_groups,
    "group_size": config.group_size,
    "seed": config.seed,
    "max_draws": config.max_draws,
  }
  learner = _reporting(learner, config)
  if config.max_rounds == 1 and not config.plan:
    # Drawn by jax, exactly, in the program of the step.
    collect = draws.collect_bernoulli(
      policy, task, multiset=config.multiset, **sizes
    )
    draw_and_learn = sharding.fuse(collect, learner, mesh)
  else:
    if config.plan:
      collect = _planned(config, op, policy, task, sizes)
    else:
      collect = rollouts.collector(
        policy, task, max_rounds=config.max_rounds, **sizes
      )
    learn = sharding.sharded(learner, mesh).step

    def draw_and_learn(state, /):
      rollout, counts = collect(state.params, state.step)
      state, info = learn(state, rollout)
      return state, counts, info

  def step(state):
    state, counts, info = draw_and_learn(state)
    metrics = {**counts._asdict(), **info._asdict()}
    return state, {k: v for k, v in metrics.items() if v is not None}

  def start():
    params = policy.init(jax.random.key(config.seed))
    return sharding.replicate(learner.init(params), mesh)

  return train.Experiment(start, step, _observer(config, probabilities))


def build_op(config: ml_collections.ConfigDict) -> sigma.SigmaOp:
  """The product of config.sigma's operations, checked at config.group_size."""
  if config.wanted_power and config.sigma:
    raise ValueError(
      "config.sigma must be empty where config.wanted_power is not 0, got"
      f" {sorted(config.sigma)}: the wanted objective decides the weights"
    )
  if config.wanted_power:
    fit = objectives.weights_for(
      lambda p: (p * (1 - p)) ** -config.wanted_power,
      config.group_size,
      interval=config.clip,
      nonnegative=config.wanted_nonnegative,
    )
    return building.check(sigma.table(fit.weights), config.group_size)
  return building.operation(config.sigma, config.group_size)


def population(config: ml_collections.ConfigDict) -> np.ndarray:
  """[num_prompts]: success probabilities drawn from Big-Math's solve rates."""
  low, high = config.clip if len(config.clip) == 2 else (0, 1)
  if not 0 < low <= high < 1:
    raise ValueError(
      f"config.clip must be two numbers inside (0, 1), got {config.clip}: a"
      " logit is infinite at either end"
    )
  correct, problems = data.big_math()
  rates, weights = correct / 64, problems.astype(float)
  if config.interior:
    weights[(correct == 0) | (correct == 64)] = 0
  rng = np.random.default_rng(config.seed)
  drawn = rng.choice(rates, config.num_prompts, p=weights / weights.sum())
  return np.clip(drawn, low, high)


def _planned(
  config: ml_collections.ConfigDict,
  op: sigma.SigmaOp,
  policy: policies.Policy,
  task: tasks.Task,
  sizes: dict[str, int],
) -> rollouts.Collect:
  """Draws groups of planned sizes, as many rollouts as with the same for all.

  What a group of each size is worth is tabulated once over the logit; a plan is
  made from the policy as it is, every config.plan_every steps.
  """
  values = {
    "update": lambda p, g: planning.update_value(op, p, g),
    "mixed": planning.mixed_value,
  }
  if config.plan not in values:
    raise ValueError(
      f"config.plan must be one of {', '.join(values)}, or empty, got"
      f" {config.plan!r}{cli.did_you_mean(config.plan, values)}"
    )
  if config.num_groups != config.num_prompts:
    raise ValueError(
      "config.num_groups must be all prompts under a plan, got"
      f" {config.num_groups} of {config.num_prompts}"
    )
  if config.max_draws > 1 or config.max_rounds > 1:
    raise ValueError(
      "config.plan must be empty where silent groups are drawn again, got"
      f" {config.plan!r}: the plan does not count those rollouts"
    )
  if config.max_group_size < config.group_size:
    raise ValueError(
      "config.max_group_size must be at least config.group_size, got"
      f" {config.max_group_size} and {config.group_size}: the budget could not"
      " be spent"
    )
  if config.checkpoint_every % config.plan_every:
    raise ValueError(
      "config.plan_every must divide config.checkpoint_every, got"
      f" {config.plan_every} and {config.checkpoint_every}: a resumed run makes"
      " its plans where the first one made them"
    )
  draw = jax.jit(
    draws.collect_bernoulli(
      policy,
      task,
      multiset=config.multiset,
      **{**sizes, "group_size": config.max_group_size},
    )
  )
  theta, spacing = np.linspace(-8, 16, 481, retstep=True)
  value = values[config.plan](
    1 / (1 + np.exp(-theta)), np.arange(config.max_group_size + 1)
  )
  plan = None

  def collect(params, step):
    nonlocal plan
    if plan is None or step % config.plan_every == 0:
      nearest = np.rint((np.asarray(params) - theta[0]) / spacing)
      rows = np.clip(nearest, 0, len(theta) - 1).astype(int)
      budget = config.num_groups * config.group_size
      plan = planning.allocate(value[rows], budget).sizes
    return draw(params, step, plan)

  return collect


def _observer(
  config: ml_collections.ConfigDict, probabilities: np.ndarray
) -> Callable[[Any], dict[str, Any]]:
  """What the scalar policies come to, and what theory expects of the draws."""
  quarter = -(-config.num_prompts // 4)
  hardest = np.argsort(probabilities, kind="stable")[:quarter]

  def observe(params):
    p = 1 / (1 + np.exp(-np.asarray(params, np.float64)))
    observed = {"mean_p": p.mean(), "hardest_quarter_p": p[hardest].mean()}
    if config.plan:  # Groups are of many sizes.
      return observed
    silent = theory.silent_rate(p, config.group_size)
    draws = theory.expected_draws(p, config.group_size, config.max_draws)
    return {
      **observed,
      "predicted_silent": silent.mean(),
      # Of the share measured in one step, when every prompt is drawn once.
      "predicted_silent_variance": (silent * (1 - silent)).mean() / len(p),
      "predicted_draws": draws.mean(),
    }

  return observe


def _reporting(
  learner: learners.Learner, config: ml_collections.ConfigDict
) -> learners.Learner:
  """The learner with None in Info for what is not logged, nor then computed.

  REINFORCE's loss says nothing as a number, and costs as much as a step.
  """
  logged = {"kept", "grad_norm", "skipped", "nonfinite"}
  if "reinforce" not in config.surrogate:
    logged |= {"loss", "clip_fraction"}

  def step(state, rollout, **where):
    state, info = learner.step(state, rollout, **where)
    return state, info._replace(**dict.fromkeys(set(info._fields) - logged))

  return learner._replace(step=step)
