"""Surrogates by table, by published formula and at their edges."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupstd import losses

NAN, INF = float("nan"), float("inf")
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


def evaluate(surrogate, log_probs, behaviour, advantages, mask: Any = True):
  """(terms, slopes in log π, flags)."""

  def total(log_probs):
    mask_ = jnp.broadcast_to(mask, log_probs.shape)
    terms, flags = surrogate(
      log_probs, jnp.asarray(behaviour), jnp.asarray(advantages), mask_
    )
    return terms.sum(), (terms, flags)

  found = jax.jit(jax.grad(total, has_aux=True))(jnp.asarray(log_probs))
  slopes, (terms, flags) = found
  return np.asarray(terms), np.asarray(slopes), np.asarray(flags)


def at_ratio(surrogate, ratio, advantages):
  return evaluate(surrogate, np.log(ratio), np.zeros(len(ratio)), advantages)


# --- By token ---


def test_reinforce_is_the_policy_gradient_and_blind_to_behaviour():
  advantages, log_probs = np.array([1.5, -2, 0]), np.array([-0.1, -3, -9])
  terms, slopes, clipped = evaluate(
    losses.reinforce(), log_probs, [NAN, -INF, 0.0], advantages
  )
  close(terms, -advantages * log_probs, rtol=1e-7)
  equal(slopes, -advantages)
  assert not clipped.any()


TABLE = [1.3, 0.7, 0.7, 1.4, 1.25], [1.0, 1.0, -1.0, -1.0, 1.0]


def test_a_token_counts_as_clipped_where_the_clip_binds():
  """Below 1 − ε for A > 0 and above 1 + ε for A < 0 nothing is cut."""
  terms, slopes, clipped = at_ratio(losses.clipped(0.2, 0.28), *TABLE)
  close(terms, [-1.28, -0.7, 0.8, 1.4, -1.25], rtol=3e-7)
  close(slopes, [0, -0.7, 0, 1.4, -1.25], rtol=3e-7)
  equal(slopes[[0, 2]], 0)
  equal(clipped, [True, False, True, False, False])


def test_dual_clip_bounds_what_a_bad_answer_can_cost():
  ratio, advantages = [2.0, 5, 0.5, 5, 5], [-1.0, -2, -1, 1, 0]
  terms, slopes, clipped = at_ratio(losses.clipped(dual=3.0), ratio, advantages)
  close(terms, [2, 6, 0.8, -1.2, 0], rtol=3e-7)
  close(slopes, [2, 0, 0, 0, 0], rtol=3e-7)
  equal(clipped, [False, True, True, True, False])


@pytest.mark.parametrize("dual", [None, 2.0])
def test_clipped_is_the_published_minimum(dual):
  """−min(rA, clip(r)A) (arXiv:1707.06347); at least cA (arXiv:1912.09729)."""
  rng = np.random.default_rng(0)
  ratio = np.exp(rng.uniform(-2, 2, 1000)).astype(np.float32)
  advantages = rng.normal(size=1000).astype(np.float32)
  terms, slopes, clipped = at_ratio(
    losses.clipped(0.1, dual=dual), ratio, advantages
  )
  unclipped = ratio * advantages
  kept = np.minimum(unclipped, np.clip(ratio, 0.9, 1.1) * advantages)
  if dual is not None:
    kept = np.where(advantages < 0, np.maximum(kept, dual * advantages), kept)
  # log and exp each round once, at log-ratios of at most 2.
  close(terms, -kept, rtol=1e-6)
  bound = ~np.isclose(kept, unclipped, rtol=1e-5)
  equal(clipped, bound)
  equal(slopes == 0, bound)
  close(slopes[~bound], -unclipped[~bound], rtol=1e-6)


@pytest.mark.parametrize(
  ("surrogate", "weights", "binds"),
  [
    (losses.cispo(0.28), [1.28, 0.7, 0.7, 1.28, 1.25], [0, 3]),
    (losses.cispo(0.28, 0.2), [1.28, 0.8, 0.8, 1.28, 1.25], [0, 1, 2, 3]),
  ],
)
def test_cispo_clips_the_weight_and_no_gradient_is_lost(
  surrogate, weights, binds
):
  """−sg(clip(r))·A·log π on either side of 1, whatever A's sign."""
  (ratio, advantages), weights = np.array(TABLE), np.array(weights)
  terms, slopes, clipped = at_ratio(surrogate, ratio, advantages)
  close(terms, -weights * advantages * np.log(ratio), rtol=1e-6)
  close(slopes, -weights * advantages, rtol=3e-7)
  equal(np.flatnonzero(clipped), binds)
  silent = at_ratio(surrogate, ratio, np.zeros(5))
  equal(silent[1], 0)
  assert not silent[2].any()


@pytest.mark.parametrize(
  "surrogate",
  [
    losses.clipped(0.0),
    losses.clipped(0.2, dual=3.0),
    losses.sequence_clipped(),
    losses.cispo(0.0, 0.0),
    losses.cispo(4.0),
  ],
)
def test_at_ratio_one_the_gradient_is_reinforce(surrogate):
  """Of answers of one token."""
  log_probs = np.array([[-0.1], [-3.0], [-20.0], [-0.5]])
  args = log_probs, log_probs, np.array([[1.3], [-0.7], [2.0], [-1.0]])
  _, slopes, clipped = evaluate(surrogate, *args)
  equal(slopes, evaluate(losses.reinforce(), *args)[1])
  assert not clipped.any()


STALE = np.repeat([-91.0, -INF, -1e4, 1e4, INF], 3)
SIGNS = np.tile([1.0, -1.0, 0.0], 5)


@pytest.mark.parametrize(
  ("surrogate", "ceiling"),
  [
    (losses.clipped(), math.exp(20)),
    (losses.clipped(dual=3.0), 3),
    (losses.sequence_clipped(0.2, 0.2), math.exp(20)),
  ],
)
def test_a_stale_log_prob_cannot_overflow(surrogate, ceiling):
  terms, slopes, clipped = evaluate(
    surrogate, np.full((15, 1), -2.0), STALE[:, None], SIGNS[:, None]
  )
  assert ((terms > -1.3) & (terms < 1.001 * ceiling)).all()
  equal(slopes, 0)  # some bound binds for every one of them
  equal(clipped[:, 0], SIGNS != 0)


def test_a_stale_log_prob_weighs_what_cispo_lets_it():
  for low, floor in (None, 0), (0.2, 0.8):
    terms, slopes, clipped = evaluate(
      losses.cispo(0.28, low), np.full(15, -2.0), STALE, SIGNS
    )
    weights = np.where(STALE < 0, 1.28, floor)
    close(slopes, -weights * SIGNS, rtol=3e-7, atol=3e-9)
    close(terms, 2 * weights * SIGNS, rtol=3e-7, atol=6e-9)
    bound = (SIGNS != 0) & ((STALE < 0) | (low is not None))
    equal(clipped, bound)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.usefixtures("x64")
def test_ratios_are_taken_in_float32_at_least(dtype):
  """Between 8 and 16 bfloat16 has steps of 1/16."""
  computed = "float64" if dtype == "float64" else "float32"
  log_probs = jnp.array([[-0.01], [-8]], dtype)
  other = jnp.array([[-9.5], [-8]], dtype)
  difference = np.asarray(log_probs, float) - np.asarray(other, float)
  args = log_probs, other, jnp.ones([2, 1], dtype), jnp.ones([2, 1], bool)
  rtol = 2e-5 if computed == "float32" else 1e-12
  for surrogate, factor in [
    (losses.clipped(0.0, 1e6), 1),
    (losses.sequence_clipped(0.0, 1e6), 1),
    (losses.cispo(1e6), np.asarray(log_probs, float)),
  ]:
    terms, _ = surrogate(*args)
    assert terms.dtype == computed
    close(terms, -np.exp(difference) * factor, rtol=rtol)


# --- By sequence ---


def ragged(seed=0, shape=(4, 6, 5)):
  """Log-probs, behaviour, advantages, mask: empty answers, holes; 0 outside."""
  rng = np.random.default_rng(seed)
  mask = (
    np.arange(shape[-1]) < rng.integers(0, 1 + shape[-1], shape[:2])[..., None]
  )
  mask[1] &= rng.uniform(size=shape[1:]) < 0.6
  log_probs = np.where(mask, -rng.exponential(size=shape), 0)
  behaviour = np.where(mask, log_probs + 0.1 * rng.normal(size=shape), 0)
  advantages = rng.normal(size=(*shape[:2], 1))
  advantages[2] = 0
  return log_probs, behaviour, advantages, mask


@pytest.mark.usefixtures("x64")
def test_a_sequence_mean_is_the_published_objective():
  """(1/N)Σ_i min(s_i A_i, clip(s_i)A_i), s_i = (π/π_b)^(1/|y|), as a loop.

  arXiv:2507.18071, over the sequences that have a token.
  """
  log_probs, behaviour, advantages, mask = ragged()
  low, high = 0.01, 0.02
  values, bound = [], np.zeros(mask.shape, bool)
  for i, j in np.ndindex(mask.shape[:2]):
    trains = mask[i, j]
    if trains.any():
      s = np.exp((log_probs - behaviour)[i, j, trains].mean())
      a = advantages[i, j, 0]
      values.append(min(s * a, np.clip(s, 1 - low, 1 + high) * a))
      bound[i, j] = trains & (values[-1] != s * a)
  terms, slopes, clipped = evaluate(
    losses.sequence_clipped(low, high), log_probs, behaviour, advantages, mask
  )
  weights, denominator = losses.sequence_mean()(
    jnp.asarray(mask), jnp.ones(mask.shape[:2])
  )
  assert denominator == len(values) < mask[..., 0].size
  close(np.sum(weights * terms) / denominator, -np.mean(values), rtol=1e-12)
  equal(clipped, bound)
  assert 0.1 < bound.sum() / mask.sum() < 0.9
  equal(terms[~mask], 0)
  equal(slopes[bound | ~mask], 0)


def test_of_one_token_a_sequence_is_a_token():
  log_probs, behaviour, advantages, mask = ragged(shape=(8, 9, 1))
  args = log_probs, behaviour, advantages, mask
  by_token = evaluate(losses.clipped(0.05, 0.1), *args)
  by_sequence = evaluate(losses.sequence_clipped(0.05, 0.1), *args)
  assert by_token[2].any()
  close(by_sequence[0], np.where(mask, by_token[0], 0), rtol=1e-7)
  close(by_sequence[1], np.where(mask, by_token[1], 0), rtol=1e-7)
  equal(by_sequence[2], by_token[2])


@pytest.mark.parametrize("width", [0, 3])
def test_sequences_without_tokens_are_zero(width):
  zeros, mask = np.zeros((2, 4, width)), np.zeros((2, 4, width), bool)
  for surrogate in losses.sequence_clipped(), losses.sequence_clipped(0.0, 0.0):
    found = evaluate(surrogate, zeros, zeros, np.ones((2, 4, 1)), mask)
    for x in found:
      equal(x, zeros)


def test_a_stale_token_holds_its_sequence_and_no_other():
  log_probs = np.full((1, 2, 3), -2.0)
  behaviour = log_probs.copy()
  behaviour[0, 0, 1] = -INF
  terms, slopes, clipped = evaluate(
    losses.sequence_clipped(0.1, 0.1), log_probs, behaviour, np.ones((1, 2, 1))
  )
  close(terms, [[[-1.1] * 3, [-1] * 3]], rtol=1e-7)
  close(slopes, [[[0] * 3, [-1] * 3]], rtol=3e-7)
  equal(clipped, [[[True] * 3, [False] * 3]])


# --- Refused ---


@pytest.mark.parametrize(
  ("make", "kwargs", "message"),
  [
    ("clipped", {"low": 3.0}, r"`low` must be a number in \[0, 1\), got 3.0"),
    ("clipped", {"low": 1.0}, "`low` .* got 1.0"),
    ("clipped", {"low": -0.1}, "`low` .* got -0.1"),
    ("clipped", {"low": NAN}, "`low` .* got nan"),
    ("clipped", {"low": "0.2"}, "`low` .* got '0.2'"),
    ("clipped", {"low": True}, "`low` .* got True"),
    ("clipped", {"high": -0.1}, "`high` must be a number at least 0, got -0.1"),
    ("clipped", {"high": NAN}, "`high` .* got nan"),
    ("clipped", {"high": INF}, "`high` .* got inf"),
    ("clipped", {"dual": 1.0}, "`dual` must be a number above 1, got 1.0"),
    ("clipped", {"dual": NAN}, "`dual` .* got nan"),
    ("sequence_clipped", {"low": 3.0}, "`low` .* got 3.0"),
    ("sequence_clipped", {"high": -0.1}, "`high` .* got -0.1"),
    ("cispo", {"high": NAN}, "`high` .* got nan"),
    ("cispo", {"high": 0.2, "low": 3.0}, "`low` .* got 3.0"),
  ],
)
def test_bounds_out_of_range_are_refused(make, kwargs, message):
  with pytest.raises(ValueError, match=message):
    getattr(losses, make)(**kwargs)


def test_bounds_may_be_numpy_s():
  sizes: list[Any] = [np.int64(6), np.float32(6)]
  for high in sizes:
    losses.clipped(high=high)
    losses.cispo(high)
