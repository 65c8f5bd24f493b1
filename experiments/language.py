"""A language model on questions with a verifier: from a config to its parts."""

import collections
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import inspect
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from experiments import building, cli, drawn, train, workdir
from groupstd import (
  answers,
  imitation,
  learners,
  losses,
  policies,
  questions,
  rollouts,
  rules,
  sharding,
  sigma,
  tasks,
  text,
  tokenizers,
  transformer,
  verifiers,
)

# Above these a run goes on, and says that something is wrong with it.
_MAX_FIRST_RATIO = 1e-3
_MAX_TRUNCATED = 0.9
_MAX_ADVANTAGE = 100.0


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a config names, but for the learner.

  Attributes:
    tokenizer: of prompts and answers.
    asked: the questions trained on.
    held_out: the questions evaluated on.
    pool: the verifiers, at work until it is closed.
    policy: temperature → the policy.
  """

  tokenizer: tokenizers.Tokenizer
  asked: questions.Questions
  held_out: questions.Questions
  pool: verifiers.Pool
  policy: Callable[[float], policies.Policy]

  def task(
    self,
    config: ml_collections.ConfigDict,
    asked: questions.Questions,
    *,
    shuffle: bool = True,
  ) -> tasks.Task:
    """Some questions as the config has them asked and rewarded."""
    penalty = None
    if config.length_penalty:
      with building.field("config.length_penalty"):
        penalty = text.soft_overlong(*config.length_penalty)
    with building.field("config.prompt_width, weights or score"):
      return text.task(
        asked,
        self.tokenizer,
        self.pool,
        width=config.prompt_width,
        length=config.answer_length,
        weights=config.weights.to_dict() or None,
        score=config.score or None,
        length_penalty=penalty,
        shuffle=shuffle,
        seed=config.seed,
      )


def parts(config: ml_collections.ConfigDict) -> Parts:
  """Makes them, and starts the verifiers' processes.

  Raises:
    ValueError: naming the field, its value and what it must be.
  """
  tokenizer = building.make_one(
    tokenizers, config.tokenizer, "config.tokenizer"
  )
  asked = building.make_one(questions, config.questions, "config.questions")
  held_out = building.make_one(questions, config.held_out, "config.held_out")
  try:
    model = transformer.Config(tokenizer.vocab_size, **config.model.to_dict())
  except (TypeError, ValueError) as error:
    raise ValueError(f"config.model: {error}") from error
  policy = functools.partial(
    transformer.policy,
    model,
    length=config.answer_length,
    stop=tokenizer.stop,
  )
  pool = verifiers.Pool(
    {
      name: _verifier(part, f"config.verifiers.{name}", asked)
      for name, part in config.verifiers.items()
    },
    num_workers=config.verifier_workers,
    time_limit=config.verifier_seconds,
    max_failures=config.max_failures,
  )
  return Parts(
    tokenizer,
    asked,
    held_out,
    pool,
    lambda temperature: policy(temperature=temperature),
  )


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
    "micro_batches",
  )
  if not 0 < config.temperature < float("inf"):
    raise ValueError(
      "config.temperature must be above 0 and finite, got"
      f" {config.temperature}: the likeliest answer has no log-prob to train on"
    )
  rule = build_rule(config)
  updates = config.num_steps * config.epochs * config.mini_batches
  made = parts(config)
  try:
    return _build(config, made, rule, optimizer(config, updates, "config"))
  except BaseException:
    made.pool.close()
    raise


def _build(
  config: ml_collections.ConfigDict,
  made: Parts,
  rule: sigma.Rule,
  descent: optax.GradientTransformation,
) -> train.Experiment:
  task = made.task(config, made.asked)
  policy = made.policy(config.temperature)
  correction = None
  if config.correction:
    correction = building.make_one(
      losses, config.correction, "config.correction"
    )
  learner = learners.policy_gradient(
    policy,
    descent,
    rule,
    surrogate=building.make_one(losses, config.surrogate, "config.surrogate"),
    aggregate=building.make_one(losses, config.aggregate, "config.aggregate"),
    kl_coef=config.kl_coef,
    kl=building.named(losses, config.kl, "config.kl"),
    entropy_coef=config.entropy_coef,
    regularize_silent=config.regularize_silent,
    correction=correction,
    epochs=config.epochs,
    mini_batches=config.mini_batches,
    micro_batches=config.micro_batches,
  )
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
  if config.num_groups % (config.mini_batches * config.micro_batches):
    raise ValueError(
      "config.num_groups must be a multiple of mini_batches·micro_batches, got"
      f" {config.num_groups} and {config.mini_batches}·{config.micro_batches}"
    )
  learner = sharding.data_parallel(learner, sharding.make_mesh(1))
  initial = policy.init(jax.random.key(config.seed))
  observe = evaluator(config, made)
  warm_start = None
  if config.init:
    _, loaded = workdir.load(config.init, {"params": initial})
    initial = loaded["params"]
  elif config.warmup.num_steps:
    warm_start = train.WarmStart(
      _warm_start(config, made, task, initial, observe),
      warmup_config(config),
      learner.init,
    )
  alarms = _Alarms()
  skipped_in_a_row = 0

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
    with verifying(f"at step {number}"):
      rollout, counts = collect(state.params, state.step)
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
      "seconds_sample": collected - begun - metrics["seconds_verify"],
      "seconds_update": done - collected,
      "tokens_per_second": metrics["tokens"] / (done - begun),
    }
    alarms.check(metrics)
    return state, metrics

  return train.Experiment(
    learner.init(initial),
    step,
    observe,
    warm_start,
    record.samples,
    made.pool.close,
  )


@contextlib.contextmanager
def verifying(when: str) -> Iterator[None]:
  """Stops the run, and says when, where too many verifiers fail."""
  try:
    yield
  except verifiers.TooManyFailures as error:
    raise cli.Stopped(f"verifiers fail {when}: {error}") from error


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


def optimizer(
  config: ml_collections.ConfigDict, updates: int, field: str
) -> optax.GradientTransformation:
  """Clipping by the global norm, then config.optimizer on its schedule.

  The rate rises over `warmup_updates` to `learning_rate` and then follows
  `decay` until the last of the updates.
  """
  decays = {
    "constant": lambda rate, _: optax.constant_schedule(rate),
    "linear": lambda rate, rest: optax.linear_schedule(rate, 0.0, rest),
    "cosine": optax.cosine_decay_schedule,
  }
  rise, rate = config.warmup_updates, config.learning_rate
  if config.decay not in decays:
    raise ValueError(
      f"{field}.decay must be one of {', '.join(decays)}, got"
      f" {config.decay!r}{cli.did_you_mean(config.decay, decays)}"
    )
  if not 0 <= rise < updates:
    raise ValueError(
      f"{field}.warmup_updates must be at least 0 and below the {updates}"
      f" updates of the run, got {rise}"
    )
  schedule = optax.join_schedules(
    [
      # From the first update on: a rate of 0 would waste one.
      optax.linear_schedule(rate / (rise + 1), rate, rise),
      decays[config.decay](rate, updates - rise),
    ],
    [rise],
  )
  descent = building.make_one(
    optax, config.optimizer, f"{field}.optimizer", learning_rate=schedule
  )
  if not config.clip_norm:
    return descent
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), descent)


def evaluator(
  config: ml_collections.ConfigDict, made: Parts
) -> Callable[[Any], dict[str, Any]]:
  """params → accuracy of the likeliest answers to the held-out questions."""
  task = made.task(config, made.held_out, shuffle=False)
  number = config.eval_questions
  with building.field("config.eval_questions"):
    ids, prompts = task.prompts(0, number)
  policy = made.policy(0.0)
  labels = [made.held_out[i].difficulty for i in np.asarray(ids).tolist()]
  unused = jax.random.split(jax.random.key(0), number)
  sample = jax.jit(lambda params: policy.sample(params, unused, prompts, 1))

  def observe(params):
    drawn = jax.device_get(sample(params))
    with verifying("at an evaluation"):
      verdict = tasks.check_scores(
        task.reward(prompts, drawn.tokens, drawn.mask), ids, 1
      )
    # An answer without a score is not a right one.
    right = verdict.where[:, 0] & (verdict.scores[:, 0] >= 1)
    found = {
      "accuracy": right.mean(),
      "greedy_truncated": 1 - drawn.ended.mean(),
    }
    for label in sorted(set(labels)):
      chosen = [x == label for x in labels]
      found[f"accuracy/{label or 'all'}"] = right[chosen].mean()
    return found

  return observe


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
  made: Parts,
  task: tasks.Task,
  initial: Any,
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
  learner = imitation.learner(
    made.policy(1.0), optimizer(warmup, warmup.num_steps, "config.warmup")
  )
  examples = task.examples
  assert examples is not None
  with building.field("config.warmup.batch_size"):
    task.prompts(0, warmup.batch_size)

  def batch(number):
    with cli.building(), building.field("config.answer_length"):
      return examples(number, warmup.batch_size)

  batch(0)
  update = jax.jit(learner.step, donate_argnums=0)

  def step(state):
    state, info = update(state, batch(int(state.step)))
    return state, info._asdict()

  # A copy, as the update takes over its buffers.
  return train.Experiment(
    learner.init(jax.tree.map(jnp.copy, initial)), step, observe
  )


def _verifier(
  part: Any, field: str, asked: questions.Questions
) -> verifiers.Verifier:
  """A function of groupstd.answers; its scorer may be the questions' own."""
  extra = {}
  for name in part:
    function = building.named(answers, name, field)
    if "questions" in inspect.signature(function).parameters:
      extra = {"questions": asked}
  return building.make_one(answers, part, field, **extra)


class _Alarms:
  """Warnings of a run that looks well and is not, each three times."""

  def __init__(self):
    self._left: dict[str, int] = collections.defaultdict(lambda: 3)

  def check(self, metrics: dict[str, Any]) -> None:
    if metrics["first_ratio"] > _MAX_FIRST_RATIO:
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
