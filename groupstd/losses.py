"""Per-token surrogates, KL estimators and aggregates: three separate axes.

A surrogate or a KL estimator turns log-probs into one number per token; an
aggregate says what each token's number weighs and what the sum is divided by.
None of them knows of groups' σ: that part of a method is `groupstd.sigma`.
"""

from collections.abc import Callable
import math
import numbers

import chex
import jax
import jax.numpy as jnp

__all__ = [
  "Aggregate",
  "KLEstimator",
  "Surrogate",
  "clipped",
  "group_sum",
  "k1",
  "k2",
  "k3",
  "reinforce",
  "sequence_mean",
  "sequence_sum",
  "token_mean",
]

# (log_probs, behaviour_log_probs, advantages) → (terms to minimise, clipped).
Surrogate = Callable[
  [jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]
]
# (log_probs, reference_log_probs) → (terms to minimise, clamped).
KLEstimator = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
# (mask [B, G, T], where [B, G]) → (weights [B, G, T], denominator []).
Aggregate = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

# exp of this is far above any clip bound, and its square is still finite.
_MAX_LOG_RATIO = 20.0
_MAX_KL_LOG_RATIO = 10.0


def reinforce() -> Surrogate:
  """−A·log π: its gradient is the policy gradient −A·∇log π, always.

  The behaviour log-probs play no part, so it is on-policy by declaration.
  """

  def surrogate(log_probs, behaviour_log_probs, advantages):
    del behaviour_log_probs
    terms = -advantages * log_probs
    return terms, jnp.zeros(terms.shape, bool)

  return surrogate


def clipped(
  low: float = 0.2, high: float | None = None, *, dual: float | None = None
) -> Surrogate:
  """−min(rA, clip(r, 1 − low, 1 + high)·A), r = π/π_behaviour.

  PPO's surrogate (arXiv:1707.06347) with DAPO's asymmetric bounds
  (arXiv:2503.14476) and, for A < 0, the dual bound r ≤ dual (arXiv:1912.09729).
  A token is called clipped where a bound binds, which is where its gradient is
  exactly 0. No stale log-prob can overflow, as log r is held within ±20: one
  more bound, with gradient 0 beyond.

  Args:
    low: how far below 1 the ratio may push; 0 ≤ low < 1.
    high: how far above 1; ≥ 0, and `low` by default.
    dual: the largest ratio that counts for negative advantages; > 1.

  Raises:
    ValueError: if a bound lies outside its range.

  >>> terms, bound = clipped(0.2, 0.28)(
  ...     jnp.log(jnp.array([1.3, 0.7])), jnp.zeros(2), jnp.ones(2))
  >>> print(terms, bound)
  [-1.28 -0.7 ] [ True False]
  """
  high = low if high is None else high
  _check_bound("low", low, 0.0 <= _number(low) < 1.0, "in [0, 1)")
  _check_bound("high", high, 0.0 <= _number(high) < math.inf, "at least 0")
  if dual is not None:
    _check_bound("dual", dual, 1.0 < _number(dual) < math.inf, "above 1")

  def surrogate(log_probs, behaviour_log_probs, advantages):
    log_ratio, held = _log_ratio(log_probs, behaviour_log_probs, _MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    rises = advantages > 0
    bound = jnp.where(rises, 1.0 + high, 1.0 - low)
    binds = jnp.where(rises, ratio > bound, (ratio < bound) & (advantages < 0))
    if dual is not None:
      over = (ratio > dual) & (advantages < 0)
      bound, binds = jnp.where(over, dual, bound), binds | over
    terms = -advantages * jnp.where(binds, bound, ratio)
    return terms, binds | (held & (advantages != 0))

  return surrogate


def k1(log_probs: chex.Array, reference_log_probs: chex.Array):
  """k₁ = log π − log π_ref: unbiased for KL(π‖π_ref), may be negative.

  As a loss on answers drawn from π its expected gradient is E[∇log π] = 0: it
  regularises nothing. Offered to measure with.
  """
  return _log_ratio(log_probs, reference_log_probs, _MAX_KL_LOG_RATIO)


def k2(log_probs: chex.Array, reference_log_probs: chex.Array):
  """k₂ = ½(log π − log π_ref)²: its expected gradient is ∇KL(π‖π_ref).

  On answers drawn from π. As a number it is a biased estimate of that KL.
  """
  log_ratio, clamped = k1(log_probs, reference_log_probs)
  return 0.5 * jnp.square(log_ratio), clamped


def k3(log_probs: chex.Array, reference_log_probs: chex.Array):
  """k₃ = π_ref/π − 1 − log(π_ref/π) ≥ 0: unbiased for KL(π‖π_ref).

  GRPO's choice (arXiv:2402.03300). As a loss on answers drawn from π its
  expected gradient is that of the other direction, ∇KL(π_ref‖π). The log-ratio
  is held within ±10, with gradient 0 beyond, and such tokens are reported.
  """
  log_ratio, clamped = k1(log_probs, reference_log_probs)
  return jnp.expm1(-log_ratio) + log_ratio, clamped


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


def _log_ratio(
  log_probs: chex.Array, others: chex.Array, bound: float
) -> tuple[jax.Array, jax.Array]:
  """Held within ±bound with gradient 0 beyond, and where it was beyond."""
  dtype = jnp.promote_types(jnp.result_type(log_probs, others), jnp.float32)
  log_ratio = jnp.asarray(log_probs, dtype) - jnp.asarray(others, dtype)
  beyond = jnp.abs(log_ratio) > bound
  return jnp.where(beyond, jnp.sign(log_ratio) * bound, log_ratio), beyond


def _number(value: object) -> float:
  """The value, or NaN, which lies within no range, if it is no number."""
  if isinstance(value, numbers.Real) and not isinstance(value, bool):
    return float(value)
  return math.nan


def _check_bound(name: str, value: object, valid: bool, requirement: str):
  if not valid:
    raise ValueError(
      f"`{name}` must be a number {requirement}, got {value!r}: the ratio is"
      " held between 1 - low and 1 + high, and below `dual`."
    )


def _check_denominator(value: object):
  if not 0.0 < _number(value) < math.inf:
    raise ValueError(
      f"`denominator` must be a positive finite number, got {value!r}."
    )
