"""The scalar policy's groups, drawn exactly and inside a compiled program.

What `rollouts.collector` draws answer by answer has a law that can be written
down when an answer is one coin: how many draws until a group speaks, and how
many of its answers are right.
"""

from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp

from groupstd import policies, tasks
from groupstd.rollouts import Counts, Rollout, check_sizes

__all__ = ["CollectSizes", "collect_bernoulli"]


class CollectSizes(Protocol):
  """A `rollouts.Collect` whose groups may have sizes of their own, [B]."""

  def __call__(
    self, params: Any, step: chex.Numeric, sizes: chex.Array | int = ..., /
  ) -> tuple[Rollout, Counts]: ...


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
  """The same as `rollouts.collector` for the scalar policy, exactly, under jit.

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
  check_sizes(num_groups, group_size, max_draws, max_rounds=1)
  if group_size > 100:
    raise ValueError(
      f"`group_size` must be at most 100 for exact draws, got {group_size}: a"
      " power of float32 would underflow. `rollouts.collector` takes any size."
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
