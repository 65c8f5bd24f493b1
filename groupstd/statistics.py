"""Statistics of groups of rewards: mean, σ, and whether a group is silent.

Equality decides what is silent, never a small σ, and differences are taken
before anything rounds: so no ε is needed anywhere.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

__all__ = ["Centred", "GroupStats", "centre", "group_stats", "silence"]


class GroupStats(NamedTuple):
  """What an operation may know of a group. Every field is [...].

  Attributes:
    mean: μ, the mean reward.
    std: σ, the population (ddof = 0) standard deviation of the rewards; for
      0/1 rewards √(k(G − k))/G.
    size: the number of rollouts with a score, G unless the group is ragged.
    silent: whether the raw scores are all equal, or fewer than two.
  """

  mean: jax.Array
  std: jax.Array
  size: jax.Array
  silent: jax.Array


class Centred(NamedTuple):
  """Moments of the valid members, with differences taken before they round."""

  mean: jax.Array  # [...]
  std: jax.Array  # [...]
  size: jax.Array  # [...]
  constant: jax.Array  # [...] all equal, or fewer than two
  deviations: jax.Array  # [..., G] R − μ, and 0 where there is no reward


def centre(rewards: chex.Array, where: chex.Array | None) -> Centred:
  """Mean, σ and deviations of [..., G], exact where equality decides.

  Dividing by the range before squaring makes σ > 0 for any two rewards that
  differ, however little (by a normal number: 1e-37 in float32), and keeps 1e30
  from overflowing; subtracting the minimum first makes all of it blind to a
  baseline.
  """
  rewards = jnp.asarray(rewards)
  if rewards.ndim < 1:
    raise ValueError(
      "`rewards` must be [..., G], got a scalar: the last axis is the group."
    )
  dtype = jnp.promote_types(rewards.dtype, jnp.float32)
  rewards = rewards.astype(dtype)
  if where is None:
    where = jnp.ones(rewards.shape, dtype)
  where = jnp.asarray(where).astype(dtype)
  if where.shape != rewards.shape:
    raise ValueError(
      f"`where` must have the rewards' shape {rewards.shape}, got"
      f" {where.shape}: broadcasting would count rollouts twice."
    )
  valid = where > 0
  low = _over_group(jnp.minimum, jnp.where(valid, rewards, jnp.inf), jnp.inf)
  high = _over_group(jnp.maximum, jnp.where(valid, rewards, -jnp.inf), -jnp.inf)
  size = _over_group(jnp.add, where, 0)
  spread = high - low
  # NaN − NaN and inf − inf are not 0: a broken reward is never called silent,
  # not even a lone one.
  constant = (spread == 0) | (size == 0)
  low = jnp.where(size > 0, low, 0)
  spread = jnp.where(constant, 1, spread)
  # Select before computing: a NaN in an empty slot would reach the gradient.
  rewards = jnp.where(valid, rewards, low[..., None])
  unit = (rewards - low[..., None]) / spread[..., None]
  size_or_one = jnp.where(size > 0, size, 1)
  unit_mean = _over_group(jnp.add, where * unit, 0) / size_or_one
  unit_deviations = jnp.where(valid, unit - unit_mean[..., None], 0)
  squares = where * jnp.square(unit_deviations)
  variance = _over_group(jnp.add, squares, 0) / size_or_one
  # √ has an infinite slope at 0, which `where` alone would turn into NaN.
  std = jnp.where(
    constant, 0, spread * jnp.sqrt(jnp.where(constant, 1, variance))
  )
  return Centred(
    mean=low + spread * unit_mean,
    std=std,
    size=size,
    constant=constant,
    deviations=spread[..., None] * unit_deviations,
  )


def silence(
  scores: chex.Array, where: chex.Array | None, shape: tuple[int, ...]
) -> jax.Array:
  """Whether the raw scores [..., G] are all equal, or fewer than two."""
  if jnp.shape(scores) != shape:
    raise ValueError(
      f"`scores` must have the rewards' shape {shape}, got"
      f" {jnp.shape(scores)}: each rollout has one of both."
    )
  return centre(scores, where).constant


def group_stats(
  rewards: chex.Array,
  where: chex.Array | None = None,
  scores: chex.Array | None = None,
) -> GroupStats:
  """μ = ΣR/G, σ = √(Σ(R − μ)²/G) and silence of groups [..., G].

  Computed in float32 at least; float64 stays float64. σ is 0 exactly where
  all rewards are equal, and nowhere else.

  Args:
    rewards: [..., G], any real numbers.
    where: [..., G], which rollouts have a score; counts make the group a
      multiset, in which reward i occurs where[i] times. All by default.
    scores: [..., G], what decides silence: the verifier's raw scores, when
      `rewards` were shaped (by a length penalty, say). The rewards by default.

  Returns:
    The statistics, each [...]. A group of fewer than two rollouts is silent.

  Raises:
    ValueError: if a shape is not the rewards'.

  >>> print(group_stats(jnp.array([1., 1., 1., 1., 0., 0., 0., 0.])).std)
  0.5
  """
  centred = centre(rewards, where)
  silent = centred.constant
  if scores is not None:
    silent = silence(scores, where, jnp.shape(rewards))
  return GroupStats(centred.mean, centred.std, centred.size, silent)


def _over_group(op, values: jax.Array, initial: float) -> jax.Array:
  """Reduces [..., G] over the group.

  Written out slot by slot while G is short, it fuses with what is around it;
  as a reduction over a short last axis XLA:CPU takes eight times as long.
  """
  if values.shape[-1] > 32:
    return op.reduce(values, axis=-1)
  start = jnp.full(values.shape[:-1], initial, values.dtype)
  return functools.reduce(op, jnp.unstack(values, axis=-1), start)
