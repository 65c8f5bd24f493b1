"""Tasks: prompts, and what an answer is worth.

A reward function is somebody's code on somebody's data, so what it returns is
checked here, on the host, before anything trains on it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Task", "Verdict", "bernoulli", "check_asked", "check_scores"]


class Verdict(NamedTuple):
  """What B groups of G answers are worth.

  Attributes:
    scores: [B, G], what decides silence: the verifier's word before shaping.
    where: [B, G], which answers have a score.
    rewards: [B, G], what the statistics are of; None: the scores.
    parts: name → [B, G], what the rewards are made of, to be logged; NaN where
      a part has nothing to say.
  """

  scores: Any
  where: Any
  rewards: Any = None
  parts: Mapping[str, Any] = {}


class Task(NamedTuple):
  """What is asked, what an answer is worth, and what a right one looks like.

  Attributes:
    prompts: (step, num_groups) → (ids [B], prompts [B, ...]): a pure function
      of the step, so that a resumed run asks what it would have asked.
    reward: (prompts, tokens [B, G, T], mask [B, G, T]) → a Verdict, or its
      (scores, where) alone.
    examples: (step, num_groups) → (prompts, tokens [B, 1, T], mask [B, 1, T]),
      right answers to the step's prompts, for a start by imitation; None: the
      task knows none.
    epoch: (step, num_groups) → (how many times all prompts have been asked
      before this step, how many since); None: prompts have no such order.
  """

  prompts: Callable[[chex.Numeric, int], tuple[jax.Array, Any]]
  reward: Callable[[Any, chex.Array, chex.Array], Verdict | tuple[Any, Any]]
  examples: (
    Callable[[chex.Numeric, int], tuple[Any, chex.Array, chex.Array]] | None
  ) = None
  epoch: Callable[[chex.Numeric, int], tuple[int, int]] | None = None


def bernoulli(num_prompts: int, *, seed: int = 0) -> Task:
  """The answer 1 is right: the task of the scalar policy.

  Prompts are indices. Asked for all of them, a step gets them in order; asked
  for fewer, a random subset without replacement that depends on the step.

  Raises:
    ValueError: if `num_prompts` is below 1, or a step asks for more than that.
  """
  if num_prompts < 1:
    raise ValueError(f"`num_prompts` must be at least 1, got {num_prompts}.")

  def prompts(step, num_groups):
    check_asked(num_groups, num_prompts)
    ids = jnp.arange(num_prompts)
    if num_groups < num_prompts:
      # Apart from the keys of draws, which may have the same seed.
      key = jax.random.fold_in(jax.random.key(seed), len("prompts"))
      key = jax.random.fold_in(key, step)
      ids = jax.random.permutation(key, ids)[:num_groups]
    return ids, ids

  def reward(prompts, tokens, mask):
    del prompts, mask
    scores = np.asarray(tokens)[..., 0].astype(np.float32)
    return Verdict(scores, np.ones(scores.shape, bool))

  return Task(prompts, reward)


def check_scores(verdict: Any, ids: Any, group_size: int) -> Verdict:
  """Returns a verdict on the host, or says what is wrong with it.

  Args:
    verdict: what the reward function returned, of [B, G] real numbers and
      booleans.
    ids: [B], the prompts' ids, to name a culprit.
    group_size: G.

  Returns:
    A Verdict of [B, G] arrays, float32 at least and bool, rewards filled in; 0
    where there is no score.

  Raises:
    ValueError: if a shape is not [B, G] (nothing is ever broadcast: one number
      for a batch would be read as every answer's score), or if a score or a
      reward that counts is not finite (which must not pass for silence).
  """
  if not isinstance(verdict, tuple) or not 2 <= len(verdict) <= 4:
    raise ValueError(
      "a reward function must return a Verdict, or (scores, where), got"
      f" {type(verdict).__name__}."
    )
  verdict = Verdict(*verdict)
  ids = np.asarray(ids)
  expected = (len(ids), group_size)
  scores = _real("scores", verdict.scores, expected)
  where = _shaped("where", verdict.where, expected)
  if where.dtype != bool:
    raise ValueError(f"`where` must be booleans, got {where.dtype}.")
  rewards = scores
  if verdict.rewards is not None:
    rewards = _real("rewards", verdict.rewards, expected)
  for name, value in ("score", scores), ("reward", rewards):
    broken = where & ~np.isfinite(value)
    if broken.any():
      row, column = np.argwhere(broken)[0]
      raise ValueError(
        f"a {name} must be finite, got {value[row, column]} for answer {column}"
        f" of prompt {ids[row]} ({broken.sum()} such answers in the batch)."
      )
  parts = {
    name: _real(f"part {name!r}", part, expected)
    for name, part in verdict.parts.items()
  }
  scores, rewards = np.where(where, scores, 0), np.where(where, rewards, 0)
  return Verdict(scores, where, rewards, parts)


def _shaped(name: str, value: Any, expected: tuple[int, int]) -> np.ndarray:
  try:
    value = np.asarray(value)
  except ValueError as error:  # Ragged lists.
    raise ValueError(f"{name} must be {expected} numbers: {error}") from error
  if value.shape != expected:
    raise ValueError(
      f"the reward function's {name} must have shape {expected}, one for each"
      f" answer of each group, got {value.shape}."
    )
  return value


def _real(name: str, value: Any, expected: tuple[int, int]) -> np.ndarray:
  value = _shaped(name, value, expected)
  kinds = np.bool_, np.integer, np.floating
  if not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
    raise ValueError(
      f"{name} must be real numbers, got {value.dtype}: an answer without a"
      " score is marked by where = False."
    )
  return value.astype(jnp.promote_types(value.dtype, jnp.float32))


def check_asked(num_groups: int, there_are: int) -> None:
  if not 1 <= num_groups <= there_are:
    raise ValueError(
      f"a step must ask for 1 to {there_are} prompts, got {num_groups}: groups"
      " of one batch are of different prompts."
    )
