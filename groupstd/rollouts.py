"""Rollouts: groups of answers, drawn, scored, and drawn again when silent.

A group is a position: axis 0 counts groups, axis 1 the answers of one prompt,
from sampling to the loss. Dynamic sampling comes as two rules that differ in
what they ascend (arXiv:2607.00152 against arXiv:2503.14476): a silent group is
*redrawn* from the same prompt, or *replaced* by another prompt's.

Keys are folded, never stored: fold(seed, step, prompt id, draw). The same
parameters draw the same answers on any number of devices and after a resume.

Where several processes train, each runs this with the same arguments and takes
the same decisions: answers are small, so that all have them all on the host.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from groupstd import policies, sigma, tasks

__all__ = [
  "Collect",
  "Counts",
  "Draw",
  "Rollout",
  "check_sizes",
  "collector",
  "on_host",
  "pad",
]


class Rollout(NamedTuple):
  """A batch of B groups of G answers of up to T tokens.

  Attributes:
    prompts: [B, ...].
    tokens: [B, G, T].
    mask: [B, G, T], which tokens train.
    log_probs: [B, G, T], under the behaviour policy.
    rewards: [B, G], what the statistics are of.
    scores: [B, G], what decides silence: the verifier's word before shaping.
    where: [B, G], which answers have a score; counts make a group a multiset.
  """

  prompts: Any
  tokens: jax.Array
  mask: jax.Array
  log_probs: jax.Array
  rewards: jax.Array
  scores: jax.Array
  where: jax.Array


class Counts(NamedTuple):
  """What a batch cost: of groups, and of rollouts (a group's G answers).

  Attributes:
    first_draws: groups drawn for a prompt that had none yet.
    first_silent: how many of these were silent.
    left_silent: groups of the batch still silent (or not filled) at the end.
    drawn: rollouts drawn in all.
    dropped: rollouts drawn that are not in the batch.
  """

  first_draws: chex.Numeric
  first_silent: chex.Numeric
  left_silent: chex.Numeric
  drawn: chex.Numeric
  dropped: chex.Numeric


class Draw(NamedTuple):
  """Groups as they were drawn, on the host; some may not stay in the batch.

  Attributes:
    ids: [B], the prompts'.
    number: 0 for a step's first draw of B groups, 1, 2, … for what is drawn
      for the places of silent ones.
    groups: their mask is of the tokens that were sampled, whatever trains.
    ended: [B, G], which answers came to their end, and were not cut off.
    parts: name → [B, G], what the rewards are made of; see `tasks.Verdict`.
  """

  ids: np.ndarray
  number: int
  groups: Rollout
  ended: np.ndarray
  parts: Mapping[str, chex.Array]


Collect = Callable[[Any, chex.Numeric], tuple[Rollout, Counts]]


def collector(
  policy: policies.Policy,
  task: tasks.Task,
  *,
  num_groups: int,
  group_size: int,
  seed: int = 0,
  max_draws: int = 1,
  max_rounds: int = 1,
  mask_truncated: bool = False,
  observe: Callable[[Draw], None] | None = None,
) -> Collect:
  """(params, step) → a batch of groups, for any policy and task.

  With `max_draws` N a silent group is redrawn from the same prompt up to N
  draws in all; with `max_rounds` N silent groups are replaced by the task's
  next prompts up to N rounds. What is silent after that stays as it is
  (redrawing) or becomes an empty group that weighs nothing (replacing): the
  step trains on what was kept. Further draws run in buckets of halving size,
  so that no more than ⌈log₂B⌉ + 1 shapes are ever compiled; what only fills a
  bucket is neither scored nor observed.

  An answer with a score counts in its group's baseline, σ and silence whatever
  its tokens: if it has none, or none that trains.

  Args:
    policy: what answers.
    task: what asks and scores, on the host: checked by `tasks.check_scores`.
    num_groups: B, at least 1.
    group_size: G, at least 2.
    seed: of all draws.
    max_draws: draws of one prompt, at least 1.
    max_rounds: rounds of prompts, at least 1; not both above 1.
    mask_truncated: whether an answer that was cut off trains no token, the
      overlong filtering of arXiv:2503.14476.
    observe: called with every draw, in order, what is dropped included.

  Raises:
    ValueError: if a number is out of its range; from the collector, if the
      task asks what it must not, or its reward function returns it.
  """
  check_sizes(num_groups, group_size, max_draws, max_rounds)
  statistics = jax.jit(sigma.group_stats)
  put = jax.jit(_put)

  @jax.jit
  def sample(params, step, ids, number, prompts):
    keys = _keys(seed, step, ids, number)
    answers = policy.sample(params, keys, prompts, group_size)
    ended = answers.ended
    if ended is None:
      ended = jnp.ones(answers.mask.shape[:2], bool)
    mask = answers.mask
    if mask_truncated:
      mask &= ended[..., None]
    return answers._replace(ended=ended), mask

  def draw(params, step, ids, prompts, rows, number, size):
    """Draws groups for some rows of the prompts, filled up to `size`."""
    fill = np.minimum(np.arange(size), len(rows) - 1)
    padded = jax.tree.map(lambda x: x[rows[fill]], prompts)
    # One prompt drawn a second time has another key; another prompt's first
    # draw is a first draw.
    answers, mask = sample(
      params, step, ids[rows[fill]], number if max_draws > 1 else 0, padded
    )
    ids, prompts = ids[rows], jax.tree.map(lambda x: x[rows], prompts)
    drawn = jax.tree.map(lambda x: x[: len(rows)], on_host(answers))
    verdict = tasks.check_scores(
      task.reward(prompts, drawn.tokens, drawn.mask), ids, group_size
    )
    groups = Rollout(
      prompts=prompts,
      tokens=drawn.tokens,
      mask=drawn.mask,
      log_probs=drawn.log_probs,
      rewards=verdict.rewards,
      scores=verdict.scores,
      where=verdict.where,
    )
    if observe:
      observe(Draw(ids, number, groups, drawn.ended, verdict.parts))
    groups = groups._replace(
      prompts=padded,
      tokens=answers.tokens,
      mask=mask,
      log_probs=answers.log_probs,
      rewards=verdict.rewards[fill],
      scores=verdict.scores[fill],
      where=verdict.where[fill],
    )
    silent = statistics(groups.scores, groups.where).silent
    return groups, np.array(silent)[: len(rows)]

  def collect(params, step):
    ids, prompts = task.prompts(step, num_groups * max_rounds)
    ids = _check_ids(ids, num_groups * max_rounds)
    prompts = jax.device_get(prompts)
    rows = np.arange(num_groups)
    batch, silent = draw(params, step, ids, prompts, rows, 0, num_groups)
    if max(max_draws, max_rounds) > 1:
      # Where a step draws once it then lies on the devices as where it draws
      # again, or a learner would be compiled for either.
      batch = put(batch, rows, batch)
    groups = first_draws = num_groups
    first_silent = int(silent.sum())
    for extra in range(1, max(max_draws, max_rounds)):
      missing = np.flatnonzero(silent)
      if not len(missing):
        break
      rows = missing
      if max_rounds > 1:
        rows = np.arange(first_draws, first_draws + len(missing))
      size = _bucket(len(missing), num_groups)
      more, still = draw(params, step, ids, prompts, rows, extra, size)
      groups += len(missing)
      if max_rounds > 1:
        first_draws += len(missing)
        first_silent += int(still.sum())
      # Slots that only fill the bucket go nowhere, past the last row.
      slots = np.full(size, num_groups)
      slots[: len(missing)] = missing
      batch = put(batch, slots, more)
      silent[missing] = still
    used = num_groups
    if max_rounds > 1:
      used -= int(silent.sum())
      batch = batch._replace(where=batch.where & ~silent[:, None])
    return batch, Counts(
      first_draws=first_draws,
      first_silent=first_silent,
      left_silent=int(silent.sum()),
      drawn=groups * group_size,
      dropped=(groups - used) * group_size,
    )

  return collect


def on_host(tree: Any) -> Any:
  """Arrays as numpy has them, on every process whole, wherever they lie."""
  if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)


def pad(rollout: Rollout, multiple: int) -> Rollout:
  """Appends groups that weigh nothing, up to a multiple of groups."""
  num_groups = len(rollout.where)
  missing = -num_groups % multiple
  if not missing:
    return rollout
  # By index and not by concatenation, which on a mesh would move the batch.
  rows = jnp.arange(num_groups + missing)
  padded = jax.tree.map(
    lambda x: jnp.take(x, rows, axis=0, mode="clip"), rollout
  )
  inert = rows[:, None] >= num_groups
  nothing = jnp.zeros_like(padded.where)
  return padded._replace(where=jnp.where(inert, nothing, padded.where))


def _keys(
  seed: int, step: chex.Numeric, ids: jax.Array, number: chex.Numeric
) -> jax.Array:
  """One key for each prompt's draw, [B]."""
  key = jax.random.fold_in(jax.random.key(seed), step)

  def fold(i):
    return jax.random.fold_in(jax.random.fold_in(key, i), number)

  return jax.vmap(fold)(ids)


def _put(batch: Rollout, rows: chex.Array, groups: Rollout) -> Rollout:
  """The batch with the given groups at those rows."""
  return jax.tree.map(
    lambda old, new: old.at[rows].set(new, mode="drop"), batch, groups
  )


def _bucket(needed: int, num_groups: int) -> int:
  """The least of B, ⌈B/2⌉, ⌈B/4⌉, … that holds `needed` groups."""
  size = num_groups
  while (half := -(-size // 2)) >= needed and half < size:
    size = half
  return size


def _check_ids(ids: chex.Array, expected: int) -> np.ndarray:
  ids = np.asarray(ids)
  different = len(np.unique(ids))
  if ids.shape != (expected,) or different < expected:
    raise ValueError(
      f"a task must give the {expected} prompts it is asked for, of different"
      f" ids, got ids of shape {ids.shape}, {different} of them different: an"
      " id that comes twice would draw the same answers twice."
    )
  return ids


def check_sizes(
  num_groups: int, group_size: int, max_draws: int, max_rounds: int
):
  if not _is_int(group_size) or group_size < 2:
    raise ValueError(
      f"`group_size` must be an integer of at least 2, got {group_size!r}: one"
      " reward has no standard deviation."
    )
  for name, value in [
    ("num_groups", num_groups),
    ("max_draws", max_draws),
    ("max_rounds", max_rounds),
  ]:
    if not _is_int(value) or value < 1:
      raise ValueError(
        f"`{name}` must be an integer of at least 1, got {value!r}."
      )
  if max_draws > 1 and max_rounds > 1:
    raise ValueError(
      f"`max_draws` and `max_rounds` must not both exceed 1, got {max_draws}"
      f" and {max_rounds}: redrawing a prompt and replacing it are two rules"
      " that ascend different objectives."
    )


def _is_int(value: object) -> bool:
  return isinstance(value, int | np.integer) and not isinstance(value, bool)
