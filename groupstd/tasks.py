"""Tasks: prompts and a verifier.

A reward function is somebody's code on somebody's data, so what it returns is
checked here, on the host, before anything trains on it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Task", "bernoulli", "check_scores"]


class Task(NamedTuple):
  """What is asked, and what an answer is worth.

  Attributes:
    prompts: (step, num_groups) → (ids [B], prompts [B, ...]): a pure function
      of the step, so that a resumed run asks what it would have asked.
    reward: (prompts, tokens [B, G, T], mask [B, G, T]) → (scores [B, G],
      where [B, G]); where is False for an answer that has no score.
  """

  prompts: Callable[[chex.Numeric, int], tuple[jax.Array, Any]]
  reward: Callable[[Any, jax.Array, jax.Array], tuple[chex.Array, chex.Array]]


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
    if not 1 <= num_groups <= num_prompts:
      raise ValueError(
        f"a step must ask for 1 to {num_prompts} prompts, got {num_groups}:"
        " groups of one batch are of different prompts."
      )
    ids = jnp.arange(num_prompts)
    if num_groups < num_prompts:
      # Apart from the keys of draws, which may have the same seed.
      key = jax.random.fold_in(jax.random.key(seed), len("prompts"))
      key = jax.random.fold_in(key, step)
      ids = jax.random.permutation(key, ids)[:num_groups]
    return ids, ids

  def reward(prompts, tokens, mask):
    del prompts, mask
    scores = tokens[..., 0].astype(jnp.float32)
    return scores, jnp.ones(scores.shape, bool)

  return Task(prompts, reward)


def check_scores(
  scores: Any, where: Any, ids: Any, group_size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (scores, where) on the host, or says what is wrong with them.

  Args:
    scores: what the reward function returned; must be [B, G] numbers.
    where: which of them count; must be [B, G] booleans.
    ids: [B], the prompts' ids, to name a culprit.
    group_size: G.

  Returns:
    [B, G] arrays, float32 at least and bool; 0 where there is no score.

  Raises:
    ValueError: if a shape is not [B, G] (nothing is ever broadcast: one number
      for a batch would be read as every answer's score), or if a score that
      counts is not finite (which must not pass for silence).
  """
  ids = np.asarray(ids)
  expected = (len(ids), group_size)
  try:
    scores = np.asarray(scores)
    where = np.asarray(where)
  except ValueError as error:  # Ragged lists.
    raise ValueError(f"scores must be {expected} numbers: {error}") from error
  for name, value in ("scores", scores), ("where", where):
    if value.shape != expected:
      raise ValueError(
        f"the reward function's {name} must have shape {expected}, one for"
        f" each answer of each group, got {value.shape}."
      )
  if where.dtype != bool:
    raise ValueError(f"`where` must be booleans, got {where.dtype}.")
  kinds = np.bool_, np.integer, np.floating
  if not any(jnp.issubdtype(scores.dtype, kind) for kind in kinds):
    raise ValueError(
      f"scores must be real numbers, got {scores.dtype}: an answer without a"
      " score is marked by where = False."
    )
  scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
  broken = where & ~np.isfinite(scores)
  if broken.any():
    row, column = np.argwhere(broken)[0]
    raise ValueError(
      f"a score must be finite, got {scores[row, column]} for answer {column}"
      f" of prompt {ids[row]} ({broken.sum()} such answers in the batch)."
    )
  return np.where(where, scores, 0), where
