"""Per-token surrogates, KL estimators and aggregates: three separate axes.

A surrogate or a KL estimator turns log-probs into one number per token; an
aggregate says what each token's number weighs and what the sum is divided by.
None of them knows of groups' σ: that part of a method is `groupstd.sigma`.
Surrogates, and corrections for answers that another program drew, are written
in `groupstd.surrogates`.
"""

from collections.abc import Callable
import math
import numbers

import chex
import jax
import jax.numpy as jnp

from groupstd.surrogates import (
  Correction,
  Surrogate,
  cispo,
  clipped,
  drop,
  hold,
  log_ratio,
  reinforce,
  sequence_clipped,
  truncate,
)

__all__ = [
  "Aggregate",
  "Correction",
  "KLEstimator",
  "Surrogate",
  "cispo",
  "clipped",
  "drop",
  "group_sum",
  "k1",
  "k2",
  "k3",
  "reinforce",
  "sequence_clipped",
  "sequence_mean",
  "sequence_sum",
  "token_mean",
  "truncate",
]

# (log_probs, reference_log_probs) → (terms to minimise, clamped).
KLEstimator = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
# (mask [B, G, T], where [B, G]) → (weights [B, G, T], denominator []).
Aggregate = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

# k₃ and its gradient are then at most e¹⁰.
_MAX_LOG_RATIO = 10.0


def k1(log_probs: chex.Array, reference_log_probs: chex.Array):
  """k₁ = log π − log π_ref: unbiased for KL(π‖π_ref), may be negative.

  As a loss on answers drawn from π its expected gradient is E[∇log π] = 0: it
  regularises nothing. Offered to measure with.
  """
  return hold(log_ratio(log_probs, reference_log_probs), _MAX_LOG_RATIO)


def k2(log_probs: chex.Array, reference_log_probs: chex.Array):
  """k₂ = ½(log π − log π_ref)²: its expected gradient is ∇KL(π‖π_ref).

  On answers drawn from π. As a number it is a biased estimate of that KL.
  """
  log_r, clamped = k1(log_probs, reference_log_probs)
  return 0.5 * jnp.square(log_r), clamped


def k3(log_probs: chex.Array, reference_log_probs: chex.Array):
  """k₃ = π_ref/π − 1 − log(π_ref/π) ≥ 0: unbiased for KL(π‖π_ref).

  GRPO's choice (arXiv:2402.03300). As a loss on answers drawn from π its
  expected gradient is that of the other direction, ∇KL(π_ref‖π). The log-ratio
  is held within ±10, with gradient 0 beyond, and such tokens are reported.
  """
  log_r, clamped = k1(log_probs, reference_log_probs)
  return jnp.expm1(-log_r) + log_r, clamped


def token_mean() -> Aggregate:
  """Σ terms / Σ tokens, over all tokens that train (DAPO)."""

  def aggregate(mask, where):
    weights = _token_weights(mask, where)
    return weights, jnp.sum(weights)

  return aggregate


def sequence_mean() -> Aggregate:
  """Mean over a sequence's tokens, then over sequences that have any (GRPO)."""

  def aggregate(mask, where):
    weights = _token_weights(mask, where)
    length = jnp.sum(mask, axis=-1, dtype=weights.dtype)
    weights = weights / jnp.where(length > 0, length, 1)[..., None]
    return weights, jnp.sum(where * (length > 0))

  return aggregate


def sequence_sum(denominator: float) -> Aggregate:
  """Sum over a sequence's tokens / denominator, mean over sequences (Dr. GRPO).

  Args:
    denominator: a declared constant, such as the largest answer length; what
      is averaged over are the sequences that have a token to train.

  Raises:
    ValueError: if `denominator` is not positive and finite.
  """
  _check_denominator(denominator)

  def aggregate(mask, where):
    weights = _token_weights(mask, where)
    return weights, denominator * jnp.sum(where * jnp.any(mask, axis=-1))

  return aggregate


def group_sum(denominator: float = 1.0) -> Aggregate:
  """Σ_groups (1/G)Σ_i Σ_tokens terms / denominator, G the rollouts scored.

  At denominator 1 each prompt contributes its own update (1/G)ΣA_i s_i in
  full, whatever the number of prompts (arXiv:2607.00152, Theorem 1).

  Args:
    denominator: a declared constant, such as the number of prompts.

  Raises:
    ValueError: if `denominator` is not positive and finite.
  """
  _check_denominator(denominator)

  def aggregate(mask, where):
    # Slot by slot, as the group's statistics are summed, and as fast.
    size = sum(jnp.unstack(where, axis=-1), start=jnp.zeros(where.shape[:-1]))
    size = jnp.where(size > 0, size, 1)
    weights = _token_weights(mask, where) / size[..., None, None]
    # With every group dropped there is nothing to step on, as elsewhere.
    return weights, jnp.where(jnp.sum(weights) > 0, denominator, 0.0)

  return aggregate


def _token_weights(mask: jax.Array, where: jax.Array) -> jax.Array:
  """[B, G, T]: how many rollouts a token that trains stands for."""
  return jnp.where(mask, where[..., None], 0)


def _check_denominator(value: float):
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not number or not (math.isfinite(value) and value > 0):
    raise ValueError(
      f"`denominator` must be a positive finite number, got {value!r}."
    )
