"""What a language model's config names, but for the learner."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import inspect
from typing import Any

import jax
import ml_collections
import numpy as np

from experiments import building, cli, meshes
from groupstd import (
  answers,
  hosts,
  policies,
  questions,
  rollouts,
  tasks,
  text,
  tokenizers,
  transformer,
  verifiers,
)


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a config names, but for the learner.

  Attributes:
    tokenizer: of prompts and answers.
    asked: the questions trained on.
    held_out: the questions evaluated on.
    pool: the verifiers, at work until it is closed.
    policy: temperature → the policy, which samples on the meshes.
    meshes: on which devices.
  """

  tokenizer: tokenizers.Tokenizer
  asked: questions.Questions
  held_out: questions.Questions
  pool: verifiers.Pool
  policy: Callable[[float], policies.Policy]
  meshes: meshes.Meshes

  def task(
    self,
    config: ml_collections.ConfigDict,
    asked: questions.Questions,
    *,
    shuffle: bool = True,
  ) -> tasks.Task:
    """Some questions as the config has them asked and rewarded."""
    penalty = None
    if config.length_buffer:
      with building.field("config.length_buffer"):
        penalty = text.soft_overlong(config.answer_length, config.length_buffer)
    with building.field("config.prompt_width, weights or score"):
      task = text.task(
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
    # Of several processes each verifies its share.
    return hosts.share(task, seconds=config.host_seconds)


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
  model = decoder(config, tokenizer.vocab_size)
  devices = meshes.meshes(config, model)

  def policy(temperature):
    return devices.policy(
      model,
      length=config.answer_length,
      stop=tokenizer.stop,
      temperature=temperature,
    )

  judges = {name: _verifier(config, name, asked) for name in config.verifiers}
  with building.field("config.verifier_workers, _seconds or max_failures"):
    pool = verifiers.Pool(
      judges,
      num_workers=config.verifier_workers,
      time_limit=config.verifier_seconds,
      max_failures=config.max_failures,
    )
  return Parts(
    tokenizer,
    asked,
    held_out,
    pool,
    policy,
    devices,
  )


def decoder(
  config: ml_collections.ConfigDict, vocab_size: int
) -> transformer.Config:
  """The decoder's shape, for a tokenizer of that many tokens.

  Its table may have more rows, as published ones do: config.model.vocab_size.
  """
  fields = {"vocab_size": vocab_size} | config.model.to_dict()
  if fields["vocab_size"] < vocab_size:
    raise ValueError(
      f"config.model.vocab_size must be at least the tokenizer's {vocab_size},"
      f" got {fields['vocab_size']}"
    )
  with building.field("config.model"):
    return transformer.Config(**fields)


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
    drawn = rollouts.on_host(sample(made.meshes.move(params)))
    with verifying("at an evaluation"):
      verdict = tasks.check_scores(
        task.reward(prompts, drawn.tokens, drawn.mask), ids, 1
      )
    # An answer without a score is not a right one.
    right = verdict.where[:, 0] & (verdict.scores[:, 0] >= 1)
    found = {"accuracy": right.mean()}
    if drawn.ended is not None:
      found["greedy_truncated"] = 1 - drawn.ended.mean()
    if len(set(labels)) > 1:
      for label in sorted(set(labels)):
        chosen = [x == label for x in labels]
        found[f"accuracy/{label}"] = right[chosen].mean()
    return found

  return observe


@contextlib.contextmanager
def verifying(when: str) -> Iterator[None]:
  """Stops the run, and says when, where too many verifiers fail."""
  try:
    yield
  except verifiers.TooManyFailures as error:
    raise cli.Stopped(f"verifiers fail {when}: {error}") from error
  except hosts.HostError as error:
    if not isinstance(error.cause, verifiers.TooManyFailures):
      raise
    raise cli.Stopped(f"verifiers fail {when}: {error}") from error


def _verifier(
  config: ml_collections.ConfigDict, name: str, asked: questions.Questions
) -> verifiers.Verifier:
  """A function of groupstd.answers; its scorer may be the questions' own."""
  part, field = config.verifiers[name], f"config.verifiers.{name}"
  extra = {}
  for function in part:
    call = building.named(answers, function, field, answers.Verifier)
    if "questions" in inspect.signature(call).parameters:
      extra = {"questions": asked}
      _check_scorer(config)
  return building.make_one(answers, part, field, answers.Verifier, **extra)


def _check_scorer(config: ml_collections.ConfigDict) -> None:
  """Raises if the trained questions' scorer may not judge the held-out ones."""
  free = {"size", "seed"}
  for name, arguments in config.questions.items():
    held_out = config.held_out.get(name, {})
    differing = sorted(
      x
      for x in {*arguments, *held_out} - free
      if arguments.get(x) != held_out.get(x)
    )
    if differing or name not in config.held_out:
      raise ValueError(
        f"config.held_out must be as config.questions but for {sorted(free)},"
        f" they differ in {', '.join(differing) or 'their source'}: the scorer"
        " of one judges both"
      )
