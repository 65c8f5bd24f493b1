"""What is made of a token's ratio: surrogates, and corrections for a sampler.

A surrogate turns the ratio of the policy to the one that drew an answer into
the term to minimise; a correction turns the ratio of the trainer's numbers to
another program's, which drew it, into a weight. `groupstd.losses` offers both.
"""

from collections.abc import Callable
import math
import numbers

import chex
import jax
import jax.numpy as jnp

__all__ = [
  "Correction",
  "Surrogate",
  "cispo",
  "clipped",
  "drop",
  "hold",
  "log_ratio",
  "reinforce",
  "sequence_clipped",
  "truncate",
]

# (log_probs, behaviour_log_probs, advantages, mask) → (terms to minimise,
# clipped); advantages [B, G, 1], all else [B, G, T]. Masked slots arrive as 0.
Surrogate = Callable[
  [jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]
]
# (log π − log π_sampler, mask) → (weights, affected); [B, G, T] each.
Correction = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

# exp of this is far above any clip bound, and its square is still finite.
_MAX_LOG_RATIO = 20.0

_CLIP = "the ratio is held between 1 - low and 1 + high"


def reinforce() -> Surrogate:
  """−A·log π: its gradient is the policy gradient −A·∇log π, always.

  The behaviour log-probs play no part, so it is on-policy by declaration.
  """

  def surrogate(log_probs, behaviour_log_probs, advantages, mask):
    del behaviour_log_probs, mask
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
  ...     jnp.log(jnp.array([1.3, 0.7])), jnp.zeros(2), jnp.ones(2), True)
  >>> print(terms, bound)
  [-1.28 -0.7 ] [ True False]
  """
  high = low if high is None else high
  _check_clip(low, high)
  if dual is not None:
    why = "a ratio of 1 must count in full"
    _check("dual", dual, 1.0 < _number(dual) < math.inf, "above 1", why)

  def surrogate(log_probs, behaviour_log_probs, advantages, mask):
    del mask
    log_r = log_ratio(log_probs, behaviour_log_probs)
    return _lower(log_r, advantages, low, high, dual)

  return surrogate


def sequence_clipped(low: float = 3e-4, high: float = 4e-4) -> Surrogate:
  """−min(sA, clip(s, 1 − low, 1 + high)·A), s = (π(y)/π_behaviour(y))^(1/|y|).

  GSPO (arXiv:2507.18071), with its published bounds as defaults: s, the
  geometric mean of the ratios of the tokens that train, moves far less than
  each of them. Every token gets the term of its sequence, so that
  `sequence_mean` is (1/N)Σ_i −min(s_i A_i, clip(s_i)·A_i) over the N sequences
  that have a token; `token_mean` would weigh them by their length. Clipped and
  held as in `clipped`, but whole sequences at a time.

  Args:
    low: how far below 1 a sequence's ratio may push; 0 ≤ low < 1.
    high: how far above 1; ≥ 0.

  Raises:
    ValueError: if a bound lies outside its range.

  >>> mask = jnp.array([[True, True, False]])
  >>> terms, bound = sequence_clipped(0.1, 0.1)(
  ...     jnp.log(jnp.array([[1.44, 1, 1]])), jnp.zeros(3), jnp.ones(1), mask)
  >>> print(terms, bound)  # s = √1.44
  [[-1.1 -1.1  0. ]] [[ True  True False]]
  """
  _check_clip(low, high)

  def surrogate(log_probs, behaviour_log_probs, advantages, mask):
    log_r = log_ratio(log_probs, behaviour_log_probs)
    length = jnp.sum(mask, axis=-1, keepdims=True, dtype=log_r.dtype)
    log_s = jnp.sum(log_r, axis=-1, keepdims=True, where=mask)
    log_s = log_s / jnp.maximum(length, 1)
    terms, binds = _lower(log_s, advantages, low, high)
    return jnp.where(mask, terms, 0), mask & binds

  return surrogate


def cispo(high: float, low: float | None = None) -> Surrogate:
  """−sg(clip(r, 1 − low, 1 + high))·A·log π, r = π/π_behaviour.

  CISPO (MiniMax-M1, arXiv:2506.13585): the weight is clipped and not the token,
  which keeps a gradient, −clip(r)·A·∇log π, whatever its ratio. sg stops the
  gradient, so this is not the gradient of the reported loss. A token is called
  clipped where the weight's clip binds and A ≠ 0. A weight is at most 1 + high,
  however stale the log-prob.

  Args:
    high: how far above 1 the weight may be; ≥ 0.
    low: how far below 1; 0 ≤ low < 1. No lower bound by default, as published.

  Raises:
    ValueError: if a bound lies outside its range.

  >>> def loss(log_probs):
  ...   return cispo(0.2)(log_probs, jnp.zeros(2), jnp.ones(2), True)[0].sum()
  >>> print(jax.grad(loss)(jnp.log(jnp.array([1.3, 0.7]))))
  [-1.2 -0.7]
  """
  _check_clip(0.0 if low is None else low, high)
  floor = 0.0 if low is None else 1.0 - low

  def surrogate(log_probs, behaviour_log_probs, advantages, mask):
    del mask
    log_r = log_ratio(log_probs, behaviour_log_probs)
    ratio = jnp.exp(hold(log_r, _MAX_LOG_RATIO)[0])
    weight = jax.lax.stop_gradient(jnp.clip(ratio, floor, 1.0 + high))
    terms = -weight * advantages * log_probs
    return terms, (ratio != weight) & (advantages != 0)

  return surrogate


def truncate(high: float = 2.0) -> Correction:
  """min(r, high), r = π/π_sampler of a token: truncated importance sampling.

  For answers drawn by another program than the one that trains, whose numbers
  differ (TIS). Of one-token answers the expectation of r·f under the sampler is
  that of f under π; of min(r, high)·f it is that of min(1, high/r)·f, which is
  biased against what the sampler draws too rarely. With longer answers it is
  biased even untruncated: r corrects a token, not what it came after.

  Args:
    high: the largest weight; at least 1.

  Returns:
    (log r, mask) → (weights, affected). A log-prob of −∞ from the sampler
    weighs `high`, one of NaN or +∞ weighs 0, and each counts as affected; a
    masked slot weighs 0 and does not.

  Raises:
    ValueError: if `high` is not such a number.

  >>> log_r = jnp.log(jnp.array([0.25, 1.5, 30.]))
  >>> weights, affected = truncate(2.0)(log_r, jnp.ones(3, bool))
  >>> print(weights, affected)
  [0.25 1.5  2.  ] [False False  True]
  """
  why = "a token on which both agree weighs 1"
  _check("high", high, 1.0 <= _number(high) < math.inf, "at least 1", why)

  def correction(log_r, mask):
    weights, affected = _within(log_r, mask, -math.inf, math.log(high))
    return jnp.where(mask & (log_r > math.log(high)), high, weights), affected

  return correction


def drop(low: float = 0.5, high: float = 2.0) -> Correction:
  """r where low ≤ r ≤ high, else 0; r = π/π_sampler of a token.

  Masked importance sampling (MIS; IcePop, arXiv:2510.18855): where the two
  programs disagree too much, the token does not train. Of one-token answers the
  expectation of f under π remains, of the tokens within: biased, and a baseline
  no longer cancels, as E[∇log π] of these tokens alone is not 0. A dropped
  token stays in the aggregate's denominator.

  Args:
    low: the smallest ratio that trains; 0 ≤ low < 1.
    high: the largest; above 1.

  Returns:
    (log r, mask) → (weights, affected). A token whose log-prob from the sampler
    is not finite weighs 0 and counts as affected; a masked slot weighs 0 and
    does not.

  Raises:
    ValueError: if a bound lies outside its range.

  >>> log_r = jnp.log(jnp.array([0.25, 1.5, 30.]))
  >>> weights, affected = drop()(log_r, jnp.ones(3, bool))
  >>> print(weights, affected)
  [0.  1.5 0. ] [ True False  True]
  """
  why = "a token on which both agree must train"
  _check("low", low, 0.0 <= _number(low) < 1.0, "in [0, 1)", why)
  _check("high", high, 1.0 < _number(high) < math.inf, "above 1", why)
  log_low = math.log(low) if low > 0 else -math.inf

  return lambda log_r, mask: _within(log_r, mask, log_low, math.log(high))


def log_ratio(log_probs: chex.Array, others: chex.Array) -> jax.Array:
  """log π − log π_other, in float32 at least."""
  dtype = jnp.promote_types(jnp.result_type(log_probs, others), jnp.float32)
  return jnp.asarray(log_probs, dtype) - jnp.asarray(others, dtype)


def hold(x: jax.Array, bound: float) -> tuple[jax.Array, jax.Array]:
  """x within ±bound with gradient 0 beyond, and where it was beyond."""
  beyond = jnp.abs(x) > bound
  return jnp.where(beyond, jnp.sign(x) * bound, x), beyond


def _lower(
  log_r: jax.Array,
  advantages: jax.Array,
  low: float,
  high: float,
  dual: float | None = None,
) -> tuple[jax.Array, jax.Array]:
  """−min(rA, clip(r)·A), and where a bound binds."""
  log_r, held = hold(log_r, _MAX_LOG_RATIO)
  ratio = jnp.exp(log_r)
  rises = advantages > 0
  bound = jnp.where(rises, 1.0 + high, 1.0 - low)
  binds = jnp.where(rises, ratio > bound, (ratio < bound) & (advantages < 0))
  if dual is not None:
    over = (ratio > dual) & (advantages < 0)
    bound, binds = jnp.where(over, dual, bound), binds | over
  terms = -advantages * jnp.where(binds, bound, ratio)
  return terms, binds | (held & (advantages != 0))


def _within(
  log_r: jax.Array, mask: jax.Array, low: float, high: float
) -> tuple[jax.Array, jax.Array]:
  """r where low ≤ log r ≤ high, else 0, and which tokens were outside."""
  log_r = jnp.asarray(log_r, jnp.promote_types(log_r.dtype, jnp.float32))
  within = mask & jnp.isfinite(log_r) & (log_r >= low) & (log_r <= high)
  # Selected before the exponential: 0·∞ would reach the gradient.
  ratio = jnp.exp(jnp.where(within, log_r, 0))
  return jnp.where(within, ratio, 0), mask & ~within


def _number(value: object) -> float:
  """The value, or NaN, which lies within no range, if it is no number."""
  if isinstance(value, numbers.Real) and not isinstance(value, bool):
    return float(value)
  return math.nan


def _check(name: str, value: object, valid: bool, requirement: str, why: str):
  if not valid:
    raise ValueError(
      f"`{name}` must be a number {requirement}, got {value!r}: {why}."
    )


def _check_clip(low: object, high: object):
  _check("low", low, 0.0 <= _number(low) < 1.0, "in [0, 1)", _CLIP)
  _check("high", high, 0.0 <= _number(high) < math.inf, "at least 0", _CLIP)
