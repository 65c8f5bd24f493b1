"""Rollouts: groups of answers, drawn, scored, and drawn again when silent.

A group is a position: axis 0 counts groups, axis 1 the answers of one prompt,
from sampling to the loss. Dynamic sampling comes as two rules that differ in
what they ascend (arXiv:2607.00152 against arXiv:2503.14476): a silent group is
*redrawn* from the same prompt, or *replaced* by another prompt's.

Keys are folded, never stored: fold(seed, step, prompt id, draw). The same
parameters draw the same answers on any number of devices and after a resume.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np

from groupstd import policies, sigma, tasks

__all__ = [
  "Collect",
  "CollectSizes",
  "Counts",
  "Rollout",
  "collect_bernoulli",
  "collector",
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


Collect = Callable[[Any, chex.Numeric], tuple[Rollout, Counts]]


class CollectSizes(Protocol):
  """A `Collect` whose groups may each have a size of their own, [B]."""

  def __call__(
    self, params: Any, step: chex.Numeric, sizes: chex.Array | int = ..., /
  ) -> tuple[Rollout, Counts]: ...


def collector(
  policy: policies.Policy,
  task: tasks.Task,
  *,
  num_groups: int,
  group_size: int,
  seed: int = 0,
  max_draws: int = 1,
  max_rounds: int = 1,
) -> Collect:
  """(params, step) → a batch of groups, for any policy and task.

  With `max_draws` N a silent group is redrawn from the same prompt up to N
  draws in all; with `max_rounds` N silent groups are replaced by the task's
  next prompts up to N rounds. What is silent after that stays as it is
  (redrawing) or becomes an empty group that weighs nothing (replacing): the
  step trains on what was kept. Further draws run in buckets of halving size,
  so that no more than ⌈log₂B⌉ + 1 shapes are ever compiled.

  Args:
    policy: what answers.
    task: what asks and scores, on the host: checked by `tasks.check_scores`.
    num_groups: B, at least 1.
    group_size: G, at least 2.
    seed: of all draws.
    max_draws: draws of one prompt, at least 1.
    max_rounds: rounds of prompts, at least 1; not both above 1.

  Raises:
    ValueError: if a number is out of its range; from the collector, if the
      task asks what it must not, or its reward function returns it.
  """
  _check_sizes(num_groups, group_size, max_draws, max_rounds)
  statistics = jax.jit(sigma.group_stats)
  put = jax.jit(_put)

  @jax.jit
  def sample(params, step, ids, number, prompts):
    keys = _keys(seed, step, ids, number)
    return policy.sample(params, keys, prompts, group_size)

  def draw(params, step, ids, prompts, rows, number, size):
    """Draws groups for some rows of the prompts, padded up to `size`."""
    chosen = rows[np.minimum(np.arange(size), len(rows) - 1)]
    ids = ids[chosen]
    prompts = jax.tree.map(lambda x: jnp.asarray(x[chosen]), prompts)
    answers = sample(params, step, ids, number, prompts)
    scores, where = task.reward(prompts, answers.tokens, answers.mask)
    scores, where = tasks.check_scores(scores, where, ids, group_size)
    scores, where = jnp.asarray(scores), jnp.asarray(where)
    silent = np.array(statistics(scores, where).silent)[: len(rows)]
    groups = Rollout(
      prompts=prompts,
      **answers._asdict(),
      rewards=scores,
      scores=scores,
      where=where,
    )
    return groups, silent

  def collect(params, step):
    ids, prompts = task.prompts(step, num_groups * max_rounds)
    ids = _check_ids(ids, num_groups * max_rounds)
    rows = np.arange(num_groups)
    batch, silent = draw(params, step, ids, prompts, rows, 0, num_groups)
    groups = first_draws = num_groups
    first_silent = int(silent.sum())
    for extra in range(1, max(max_draws, max_rounds)):
      missing = np.flatnonzero(silent)
      if not len(missing):
        break
      rows = missing
      if max_rounds > 1:
        rows = np.arange(first_draws, first_draws + len(missing))
      more, still = draw(
        params,
        step,
        ids,
        prompts,
        rows,
        extra if max_draws > 1 else 0,
        _bucket(len(missing), num_groups),
      )
      groups += len(missing)
      if max_rounds > 1:
        first_draws += len(missing)
        first_silent += int(still.sum())
      # Slots that only fill the bucket go nowhere, past the last row.
      slots = np.full(len(more.where), num_groups)
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


def collect_bernoulli(
  policy: policies.Policy,
  task: tasks.Task,
  *,
  num_groups: int,
  group_size: int,
  seed: int = 0,
  max_draws: int = 1,
  multiset: bool = True,
) -> CollectSizes:
  """The same as `collector` for the scalar policy, drawn exactly under jit.

  The number of draws until a group speaks is geometric, and what it then says
  is a truncated binomial: two uniforms per prompt and step decide both, by
  inversion, whatever G and N. With `multiset` a group is its two distinct
  answers and how often each occurred, k and G − k; otherwise its G answers,
  the right ones first (their order carries nothing).

  What it returns takes a third argument, `sizes` [B], which gives each prompt
  a group of its own size, from 0 to G; one of fewer than 2 is silent.

  Args:
    policy: `policies.bernoulli(...)`; its params are logits [N].
    task: `tasks.bernoulli(...)`.
    num_groups: B, at least 1.
    group_size: G, from 2 to 100 (the binomial is built from powers).
    seed: of all draws.
    max_draws: draws of one prompt, at least 1.
    multiset: whether a group is a multiset.

  Raises:
    ValueError: if a number is out of its range.
  """
  _check_sizes(num_groups, group_size, max_draws, max_rounds=1)
  if group_size > 100:
    raise ValueError(
      f"`group_size` must be at most 100 for exact draws, got {group_size}: a"
      " power of float32 would underflow. `collector` takes any size."
    )

  def collect(params, step, sizes: chex.Array | int = group_size, /):
    ids, prompts = task.prompts(step, num_groups)
    theta = params[prompts]
    if not isinstance(sizes, int):
      sizes = jnp.asarray(sizes, theta.dtype)
    # Under a condition that XLA cannot decide it is computed once; otherwise
    # XLA:CPU draws anew in each fusion that reads k.
    k, failures = jax.lax.cond(
      step >= 0,
      lambda: _draw_groups(
        theta, _uniforms(seed, step, ids), sizes, group_size, max_draws
      ),
      lambda: (jnp.zeros_like(theta), jnp.zeros(theta.shape, int)),
    )
    if multiset:
      right = jnp.broadcast_to(jnp.array([True, False]), (num_groups, 2))
      where = jnp.stack([k, sizes - k], axis=1)
    else:
      answer = jnp.arange(group_size)
      right = answer < k[:, None]
      where = jnp.ones(right.shape, theta.dtype)
      if not isinstance(sizes, int):
        where = where * (answer < sizes[:, None])
    tokens = right[..., None].astype(jnp.int32)
    scores = right.astype(theta.dtype)
    rollout = Rollout(
      prompts=prompts,
      tokens=tokens,
      mask=jnp.ones(tokens.shape, bool),
      log_probs=policy.log_prob(params, prompts, tokens),
      rewards=scores,
      scores=scores,
      where=where,
    )
    redraws = jnp.minimum(failures, max_draws - 1) * sizes
    redrawn = jnp.sum(redraws).astype(jnp.int32)
    used = jnp.sum(jnp.broadcast_to(sizes, failures.shape)).astype(jnp.int32)
    return rollout, Counts(
      first_draws=num_groups,
      first_silent=jnp.sum(failures >= 1),
      left_silent=jnp.sum(failures >= max_draws),
      drawn=used + redrawn,
      dropped=redrawn,
    )

  return collect


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


def _draw_groups(
  theta: jax.Array,
  uniforms: jax.Array,
  sizes: jax.Array | int,
  largest: int,
  max_draws: int,
) -> tuple[jax.Array, jax.Array]:
  """(k of the group that is used, silent draws before it or max_draws; [B]).

  Built around the rarer answer, whose odds are at most 1, so that neither end
  of p loses digits.
  """
  odds = jnp.exp(-jnp.abs(theta))
  none_rare = term = (1 / (1 + odds)) ** sizes
  all_rare = (odds / (1 + odds)) ** sizes
  pmf = []  # Of 1, …, G − 1 rarer answers; 0 beyond a smaller group's.
  for j in range(1, largest):
    term = term * odds * ((sizes - j + 1) / j)
    pmf.append(jnp.where(j < sizes, term, 0))
  silent = none_rare + all_rare
  failures, all_silent = jnp.zeros(theta.shape, int), silent
  for _ in range(max_draws):
    failures = failures + (uniforms[:, 0] < all_silent)
    all_silent = all_silent * silent
  target = uniforms[:, 1] * sum(pmf, start=jnp.zeros_like(odds))
  rare, total = jnp.ones_like(odds), jnp.zeros_like(odds)
  for term in pmf[:-1]:
    total = total + term
    rare = rare + (target > total)
  all_or_none = jnp.where(uniforms[:, 1] * silent > none_rare, sizes, 0)
  rare = jnp.where(failures < max_draws, rare, all_or_none)
  return jnp.where(theta > 0, sizes - rare, rare), failures


def _uniforms(seed: int, step: chex.Numeric, ids: jax.Array) -> jax.Array:
  """Two uniforms inside (0, 1) for each id, [B, 2].

  Threefry hashes (key, id) into 64 random bits when it folds: they are taken as
  they are, where drawing from the folded key would hash twice more.
  """
  key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
  folded = jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)
  bits = jax.random.key_data(folded) >> 9
  return (bits.astype(jnp.float32) + 0.5) * 2.0**-23


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


def _check_sizes(
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
