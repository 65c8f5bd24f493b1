"""Corrections for answers that another program drew, and what they cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupstd import losses

NAN, INF = float("nan"), float("inf")
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


@pytest.mark.parametrize("high", [1.0, 2.0, 5.0])
def test_corrections_are_the_minimum_and_the_range(high):
  rng = np.random.default_rng(6)
  ratio = np.exp(rng.uniform(-3, 3, (4, 5, 6)))
  mask = rng.uniform(size=ratio.shape) < 0.8
  weights, affected = losses.truncate(high)(jnp.log(ratio), jnp.asarray(mask))
  close(weights, np.where(mask, np.minimum(ratio, high), 0), rtol=1e-6)
  equal(affected, mask & (ratio > high))
  for low in 0.0, 0.5:
    drop = losses.drop(low, high + 0.1)
    weights, affected = drop(jnp.log(ratio), jnp.asarray(mask))
    kept = (ratio >= low) & (ratio <= high + 0.1)
    close(weights, np.where(mask & kept, ratio, 0), rtol=1e-6)
    equal(affected, mask & ~kept)


def test_where_both_agree_nothing_is_corrected():
  log_ratio = jnp.array([0.0, 1e-7, -1e-7])
  for correction in losses.truncate(), losses.truncate(1.0), losses.drop():
    weights, affected = correction(log_ratio, jnp.ones(3, bool))
    close(weights, 1, rtol=2e-7)
    assert not affected[0]


@pytest.mark.parametrize(
  ("correction", "weights"),
  [(losses.truncate(2.0), [2, 2, 2, 0, 0]), (losses.drop(0.5, 2.0), [0] * 5)],
)
def test_what_a_sampler_reports_cannot_break_a_weight(correction, weights):
  """Trainer −2, sampler −91, −10⁴, −∞, NaN, ∞: bounded, counted, gradient 0."""
  sampler = jnp.array([-91, -1e4, -INF, NAN, INF])
  for mask in jnp.ones(5, bool), jnp.zeros(5, bool):
    found, pull, affected = jax.vjp(
      lambda log_probs, mask=mask: correction(log_probs - sampler, mask),
      jnp.full(5, -2.0),
      has_aux=True,
    )
    equal(found, np.where(mask, weights, 0))
    equal(pull(jnp.ones(5))[0], 0)
    equal(affected, mask)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ratios_are_taken_in_float32_at_least(dtype):
  """e¹² overflows float16, and bfloat16 has steps of 1/128 at √2."""
  log_r = jnp.array([12.0, 0.34375], dtype)
  for correction in losses.truncate(1e6), losses.drop(0.5, 1e6):
    weights, _ = correction(log_r, jnp.ones(2, bool))
    assert weights.dtype == jnp.float32
    close(weights, np.exp([12.0, 0.34375]), rtol=2e-6)


@pytest.mark.usefixtures("x64")
def test_what_a_correction_costs_in_bias():
  """Over all answers of one token: E_b[w·f] = E_π[min(1, high/r)·f], and …"""
  rng = np.random.default_rng(7)
  logits = rng.normal(size=(2, 9))
  target, sampler = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  f, r = rng.normal(size=9), target / sampler
  assert r.max() > 3
  assert r.min() < 0.4
  log_r, mask = jnp.log(r), jnp.ones(9, bool)

  def expected(correction):
    return sampler @ (correction(log_r, mask)[0] * f)

  loose = losses.truncate(100.0), losses.drop(0.0, 100.0)
  for correction in loose:
    close(expected(correction), target @ f, rtol=1e-12)
  held = target * np.minimum(1, 2 / r)
  close(expected(losses.truncate(2.0)), held @ f, rtol=1e-12)
  within = (r >= 0.5) & (r <= 2)
  close(expected(losses.drop(0.5, 2.0)), (target * within) @ f, rtol=1e-12)
  # A baseline cancels, E[∇log π] being 0, of all tokens and not of some.
  scores = np.eye(9) - target
  close(target @ scores, 0, atol=1e-15)
  assert np.abs((target * within) @ scores).max() > 0.03


def test_a_token_s_ratio_does_not_correct_what_came_before_it():
  """E_b[r₂·f(y₁)] of answers of two tokens is E_b[f(y₁)], and not E_π's."""
  rng = np.random.default_rng(8)
  sampler, target = rng.dirichlet(np.ones(3), size=(2, 2))  # by token
  drawn = np.outer(*sampler)
  log_r = jnp.broadcast_to(jnp.log(target[1] / sampler[1]), (3, 3))
  weights, _ = losses.truncate(1e6)(log_r, jnp.ones((3, 3), bool))
  f = np.array([[0.0], [2.0], [-1.0]])
  found = np.sum(drawn * np.asarray(weights) * f)
  close(found, sampler[0] @ f[:, 0], rtol=1e-6)
  assert abs(found - target[0] @ f[:, 0]) > 0.1


@pytest.mark.parametrize(
  ("make", "kwargs", "message"),
  [
    (
      losses.truncate,
      {"high": 0.9},
      "`high` must be a number at least 1, got 0.9",
    ),
    (losses.truncate, {"high": INF}, "`high` .* got inf"),
    (losses.truncate, {"high": "2"}, "`high` .* got '2'"),
    (losses.drop, {"low": 1.0}, r"`low` must be a number in \[0, 1\), got 1.0"),
    (losses.drop, {"low": NAN}, "`low` .* got nan"),
    (losses.drop, {"high": 1.0}, "`high` must be a number above 1, got 1.0"),
  ],
)
def test_bounds_out_of_range_are_refused(make, kwargs, message):
  with pytest.raises(ValueError, match=message):
    make(**kwargs)
