"""A language model on questions with a verifier: from a config to a run."""

import collections
from collections.abc import Callable
import functools
import json
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import optax

from experiments import (
  building,
  chunks,
  cli,
  drawn,
  manifest,
  parts,
  train,
  workdir,
)
from groupstd import (
  answers,
  hosts,
  imitation,
  learners,
  losses,
  policies,
  rollouts,
  rules,
  sigma,
  tasks,
)

# Above these a run goes on, and says that something is wrong with it.
_MAX_TRUNCATED = 0.9
_MAX_ADVANTAGE = 100.0


def build(config: ml_collections.ConfigDict) -> train.Experiment:
  """Turns the config into an experiment, or says what is wrong with it.

  Raises:
    ValueError: naming the field, its value and what it must be.
  """
  building.at_least(
    config,
    1,
    "num_steps",
    "checkpoint_every",
    "observe_every",
    "eval_questions",
    "max_skipped",
    "prompt_width",
    "answer_length",
    "epochs",
    "mini_batches",
  )
  building.at_least(config, 0, "micro_batches")
  if not config.micro_batches and hosts.count() > 1:
    raise ValueError(
      f"config.micro_batches must be at least 1 for {hosts.count()} processes,"
      " got 0: by their clocks each would choose its own"
    )
  if not 0 < config.temperature < float("inf"):
    raise ValueError(
      "config.temperature must be above 0 and finite, got"
      f" {config.temperature}: the likeliest answer has no log-prob to train on"
    )
  building.one_of("config.kl", config.kl, ("k1", "k2", "k3"))
  rule = build_rule(config)
  updates = config.num_steps * config.epochs * config.mini_batches
  made = parts.parts(config)
  try:
    return assemble(
      config, made, rule, building.optimizer(config, updates, "config")
    )
  except BaseException:
    made.pool.close()
    raise


def assemble(
  config: ml_collections.ConfigDict,
  made: parts.Parts,
  rule: sigma.Rule,
  descent: optax.GradientTransformation,
) -> train.Experiment:
  """The experiment that a config says of parts that are made already."""
  task = made.task(config, made.asked)
  policy = made.policy(config.temperature)
  record = drawn.Drawn(
    config, made.tokenizer, made.asked, task, made.pool, rule
  )
  collect = rollouts.collector(
    policy,
    record.task,
    num_groups=config.num_groups,
    group_size=config.group_size,
    seed=config.seed,
    max_draws=config.max_draws,
    max_rounds=config.max_rounds,
    mask_truncated=config.mask_truncated,
    observe=record.observe,
  )
  asked = config.num_groups * config.max_rounds
  with building.field("config.num_groups"):
    task.prompts(0, asked)
  if config.num_groups % config.mini_batches:
    raise ValueError(
      "config.num_groups must be a multiple of mini_batches, got"
      f" {config.num_groups} and {config.mini_batches}: updates of one step are"
      " of as many groups"
    )
  if config.checked_golds:
    judge = made.pool.verifiers[config.score or next(iter(config.verifiers))]
    with building.field("config.questions"):
      answers.check_gold(made.asked, judge, samples=config.checked_golds)

  @functools.cache
  def make(micro_batches):
    return made.meshes.learner(
      policy_gradient(config, policy, rule, descent, micro_batches)
    )

  def fresh():
    return made.meshes.init(policy, jax.random.key(config.seed))

  number = config.micro_batches or _tried(config, make, fresh(), task)
  learner = make(number)
  make.cache_clear()  # Of what a trial made.

  def start():
    params = fresh()
    if config.init:
      _check_init(config)
      params = workdir.load(config.init, {"params": params})[1]["params"]
    return learner.init(params)

  observe = parts.evaluator(config, made)
  data = {
    "questions": manifest.of_questions(made.asked),
    "held_out": manifest.of_questions(made.held_out),
  }
  for part in config.tokenizer.values():
    if "path" in part:
      data["tokenizer"] = manifest.of_file(part.path)
  warm_start = None
  if config.warmup.num_steps and not config.init:
    warm_start = train.WarmStart(
      _warm_start(config, made, task, observe)._replace(data=data),
      warmup_config(config),
      learner.init,
    )
  alarms = _Alarms(config.model.get("dtype"))
  skipped_in_a_row = 0  # Of this process: a run that resumes may try again.

  def step(state):
    nonlocal skipped_in_a_row
    if skipped_in_a_row >= config.max_skipped:
      raise cli.Stopped(
        f"none of the last {skipped_in_a_row} steps had a group to train on,"
        " which config.max_skipped allows: are all answers right, all wrong, or"
        " all cut off?"
      )
    begun = time.monotonic()
    number = int(state.step)
    params = jax.block_until_ready(made.meshes.move(state.params))
    moved = time.monotonic()
    with parts.verifying(f"at step {number}"), made.pool.together():
      rollout, counts = collect(params, state.step)
    del params  # Or it would be in memory beside the update's.
    collected = time.monotonic()
    state, info = learner.step(state, rollout)
    # The host's part, while the device is at its own.
    metrics = record.summary(number, rollout, counts)
    info = jax.device_get(info)
    done = time.monotonic()
    nothing = info.skipped == config.epochs * config.mini_batches
    skipped_in_a_row = skipped_in_a_row + 1 if nothing else 0
    metrics |= info._asdict()
    metrics |= {
      "seconds_move": moved - begun,
      "seconds_sample": collected - moved - metrics["seconds_verify"],
      "seconds_update": done - collected,
      "tokens_per_second": metrics["tokens"] / (done - begun),
    }
    alarms.check(metrics)
    return state, metrics

  return train.Experiment(
    start,
    step,
    observe,
    warm_start,
    data=data,
    samples=record.samples,
    close=made.pool.close,
    shapes=lambda: made.meshes.state(learner, policy),
  )


def _check_init(config: ml_collections.ConfigDict) -> None:
  """Raises if the parameters to start from read other tokens."""
  there: Any = workdir.read_config(config.init).get("tokenizer", {})
  if there and there.to_dict() != config.tokenizer.to_dict():
    raise cli.UsageError(
      "config.tokenizer must be that of config.init, got"
      f" {config.tokenizer.to_dict()} and {there.to_dict()}: its parameters"
      " know tokens by number."
    )


def policy_gradient(
  config: ml_collections.ConfigDict,
  policy: policies.Policy,
  rule: sigma.Rule,
  descent: optax.GradientTransformation,
  micro_batches: int,
) -> learners.Learner:
  """The learner that a config says, its gradients taken in that many parts."""
  correction = None
  if config.correction:
    correction = building.make_one(
      losses, config.correction, "config.correction", losses.Correction
    )
  return learners.policy_gradient(
    policy,
    descent,
    rule,
    surrogate=building.make_one(
      losses, config.surrogate, "config.surrogate", losses.Surrogate
    ),
    aggregate=building.make_one(
      losses, config.aggregate, "config.aggregate", losses.Aggregate
    ),
    kl_coef=config.kl_coef,
    kl=getattr(losses, config.kl),
    entropy_coef=config.entropy_coef,
    regularize_silent=config.regularize_silent,
    correction=correction,
    epochs=config.epochs,
    mini_batches=config.mini_batches,
    micro_batches=micro_batches,
  )


def _tried(
  config: ml_collections.ConfigDict,
  make: Callable[[int], learners.Learner],
  params: Any,
  task: tasks.Task,
) -> int:
  """The number of parts that a trial finds fastest."""
  fields = (
    "aggregate",
    "correction",
    "entropy_coef",
    "epochs",
    "kl",
    "kl_coef",
    "mesh",
    "model",
    "optimizer",
    "regularize_silent",
    "rule",
    "sigma",
    "surrogate",
  )
  depends_on = json.loads(
    ml_collections.ConfigDict({x: config[x] for x in fields}).to_json()
  )
  with building.field("config.micro_batches"):
    return chunks.micro_batches(
      make,
      params,
      task.prompts(0, config.num_groups)[1],
      group_size=config.group_size,
      length=config.answer_length,
      mini_batches=config.mini_batches,
      depends_on=depends_on,
    )


def build_op(config: ml_collections.ConfigDict) -> sigma.SigmaOp:
  """The product of config.sigma's operations."""
  if config.rule:
    raise ValueError(
      f"config.rule must be empty, got {sorted(config.rule)}: a rule is no"
      " operation on the σ of a group"
    )
  return building.operation(config.sigma, config.group_size)


def build_rule(config: ml_collections.ConfigDict) -> sigma.Rule:
  """config.rule, or the rule of the operation that config.sigma is."""
  if not config.rule:
    return sigma.rule(build_op(config))
  if config.sigma:
    raise ValueError(
      "config.sigma must be empty where config.rule is given, got"
      f" {sorted(config.sigma)} and {sorted(config.rule)}: the rule makes the"
      " advantages"
    )
  return building.make_one(rules, config.rule, "config.rule")


def warmup_config(
  config: ml_collections.ConfigDict,
) -> ml_collections.ConfigDict:
  """What a warm start depends on: the same for every method."""
  fields = (
    "answer_length",
    "builder",
    "eval_questions",
    "held_out",
    "model",
    "prompt_width",
    "questions",
    "report_to",
    "seed",
    "tokenizer",
    "verifiers",
  )
  chosen = {field: config[field] for field in fields}
  return ml_collections.ConfigDict(chosen | dict(config.warmup.items()))


def _warm_start(
  config: ml_collections.ConfigDict,
  made: parts.Parts,
  task: tasks.Task,
  observe: Callable[[Any], dict[str, Any]],
) -> train.Experiment:
  """Supervised training on the answers to the questions themselves."""
  warmup = config.warmup
  building.at_least(
    warmup,
    1,
    "checkpoint_every",
    "observe_every",
    "batch_size",
    name="config.warmup",
  )
  policy = made.policy(1.0)
  descent = building.optimizer(warmup, warmup.num_steps, "config.warmup")
  learner = made.meshes.learner(imitation.learner(policy, descent))
  examples = task.examples
  assert examples is not None
  with building.field("config.warmup.batch_size"):
    task.prompts(0, warmup.batch_size)

  def batch(number):
    with cli.building(), building.field("config.answer_length"):
      return examples(number, warmup.batch_size)

  batch(0)

  def step(state):
    state, info = learner.step(state, batch(int(state.step)))
    return state, info._asdict()

  def start():
    params = made.meshes.init(policy, jax.random.key(config.seed))
    return learner.init(params)

  return train.Experiment(
    start,
    step,
    observe,
    shapes=lambda: made.meshes.state(learner, policy),
  )


class _Alarms:
  """Warnings of a run that looks well and is not, each three times."""

  def __init__(self, dtype: str | None):
    # Sampling and training round apart, by more where they compute in less.
    self._ratio = max(1e-3, 16 * float(jnp.finfo(dtype or "float32").eps))
    self._left: dict[str, int] = collections.defaultdict(lambda: 3)

  def check(self, metrics: dict[str, Any]) -> None:
    if not metrics["first_ratio"] <= self._ratio:  # Or it is no number.
      self._warn(
        "ratio",
        f"the first ratio is off 1 by {metrics['first_ratio']:.2g}: what is"
        " sampled is not what is trained.",
      )
    if metrics["truncated"] > _MAX_TRUNCATED:
      self._warn(
        "truncated",
        f"{metrics['truncated']:.0%} of the answers were cut off at"
        " config.answer_length: they cannot be right.",
      )
    if metrics["max_advantage"] > _MAX_ADVANTAGE:
      self._warn(
        "advantage", f"an advantage is {metrics['max_advantage']:.3g} in size."
      )

  def _warn(self, kind: str, message: str) -> None:
    if self._left[kind]:
      self._left[kind] -= 1
      logging.warning(message)
