"""Weights for a wanted objective: `pass_at` in closed form, and the inverse."""

from fractions import Fraction
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupstd import objectives, sigma, testing, theory

PS = np.array([0.02, 0.05, 0.3, 0.5, 0.81])


# --- pass_at ---


def test_pass_at_is_its_formula_at_every_size():
  """w = (G/(G − 1)) m C(G − 1 − k, m − 1)/C(G − 2, m − 1), in fractions."""
  for m in (1, 2, 4, 7):
    for size in (m + 1, m + 2, 12):
      exact = [
        Fraction(size * m, size - 1)
        * Fraction(math.comb(size - 1 - k, m - 1), math.comb(size - 2, m - 1))
        for k in range(1, size)
      ]
      plus, _, keep = theory.advantages(sigma.rule(sigma.pass_at(m)), size)
      a_plus = [
        float(w * (1 - Fraction(k, size))) for k, w in enumerate(exact, 1)
      ]
      np.testing.assert_allclose(plus[1:-1], a_plus, rtol=1e-14)
      assert keep.all()


def test_pass_at_takes_ragged_groups_and_refuses_what_it_cannot_reach():
  """A group in a wider slot is the group itself; m or fewer give NaN."""
  rewards = jnp.array([[1.0, 0, 0, 0, 0], [0.0, 1, 1, 1, 0], [1.0, 1, 1, 1, 1]])
  where = jnp.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
  rule = sigma.rule(sigma.pass_at(3))
  advantages, keep = jax.jit(rule)(rewards, where)
  np.testing.assert_allclose(
    advantages[0, :4], rule(rewards[0, :4])[0], rtol=1e-6
  )
  # Four of four tries of which one is right: w = (4/3)·3·C(2, 2)/C(2, 2).
  np.testing.assert_allclose(advantages[0], [3, -1, -1, -1, 0], rtol=1e-6)
  assert np.isnan(advantages[1, :3]).all()
  np.testing.assert_array_equal(advantages[2], 0)
  assert keep.all()
  graded, _ = rule(jnp.array([0.5, 0.25, 0.0, 0.0, 0.0]))
  assert np.isnan(graded).all()


def test_pass_at_keeps_the_laws_of_an_operation():
  testing.assert_op_laws(sigma.pass_at(3))


def test_pass_at_one_is_leave_one_out():
  """RLOO (arXiv:2402.14740), and in the limit pass@m is m(1 − p)^(m − 1)."""
  np.testing.assert_allclose(
    theory.gain(sigma.pass_at(1), 8), theory.gain(sigma.rloo(), 8), rtol=1e-15
  )
  np.testing.assert_allclose(
    theory.difficulty_weight(sigma.pass_at(4), PS),
    4 * (1 - PS) ** 3,
    rtol=1e-14,
  )


@pytest.mark.parametrize("m", [0, -1, 2.0, True, None, "2"])
def test_pass_at_needs_a_whole_number_of_tries(m):
  with pytest.raises(
    ValueError, match="`m` must be a whole number of at least"
  ):
    sigma.pass_at(m)


# --- Weights for an objective ---


@pytest.mark.parametrize("size", [2, 3, 4, 8, 12])
def test_weights_for_inverts_the_dictionary(size):
  """A random w comes back from its own c_G, whatever its signs."""
  weights = np.random.default_rng(size).normal(size=size - 1)
  rule = sigma.rule(sigma.table(weights))
  fit = objectives.weights_for(
    lambda p: theory.objective_weight(rule, p, size), size
  )
  assert fit.error < 1e-10  # 1e-13 of what counts as a thousandth
  np.testing.assert_allclose(fit.weights, weights, rtol=0, atol=1e-15 * 4**size)


@pytest.mark.parametrize("degree", range(7))
def test_every_polynomial_up_to_degree_g_minus_2_is_ascended(degree):
  c = np.polynomial.Polynomial(
    np.random.default_rng(degree).normal(size=degree + 1)
  )
  fit = objectives.weights_for(c, 8)
  rule = sigma.rule(sigma.table(fit.weights))
  p = np.linspace(0, 1, 51)
  np.testing.assert_allclose(
    theory.objective_weight(rule, p, 8), c(p), atol=1e-12
  )
  np.testing.assert_allclose(
    objectives.objective(rule, p, 8), c.integ()(p), atol=1e-12
  )
  assert fit.error < 1e-10


def test_a_degree_more_is_out_of_reach():
  """Chebyshev: a sextic misses p⁷ by 2·4^(−7) at best."""
  fit = objectives.weights_for(lambda p: 1000 + p**7, 8)
  # 1000 ≤ c ≤ 1001: what is relative is absolute, to a thousandth.
  assert fit.error * 1000 == pytest.approx(2 * 4.0**-7, rel=2e-3)


@pytest.mark.parametrize("nonnegative", [False, True])
def test_pass_at_comes_out_of_weights_for(nonnegative):
  for m, size in ((1, 8), (4, 8), (7, 8), (4, 24)):
    fit = objectives.weights_for(
      lambda p, m=m: m * (1 - p) ** (m - 1), size, nonnegative=nonnegative
    )
    given = theory.gain(sigma.pass_at(m), size)
    np.testing.assert_allclose(
      theory.gain(sigma.table(fit.weights), size), given, atol=1e-15 * 2**size
    )
    assert not nonnegative or fit.weights.min() >= 0


def undo_attenuation(p):
  return 1 / np.sqrt(p * (1 - p))


@pytest.mark.parametrize(
  ("nonnegative", "error"), [(False, 0.0625), (True, 0.146)]
)
def test_the_best_arcsine_at_eight_is_better_than_grpos(nonnegative, error):
  """1/√(p(1 − p)) on [.02, .98]; GRPO is off by 0.64, rescaled by 0.44."""
  fit = objectives.weights_for(
    undo_attenuation, 8, interval=(0.02, 0.98), nonnegative=nonnegative
  )
  p = np.linspace(0.02, 0.98, 4001)
  rule = sigma.rule(sigma.table(fit.weights))
  ratio = theory.objective_weight(rule, p, 8) / undo_attenuation(p)
  assert np.abs(ratio - 1).max() == pytest.approx(fit.error, rel=1e-3)
  assert fit.error == pytest.approx(error, abs=5e-4)
  assert not nonnegative or fit.weights.min() >= 0
  grpo = theory.objective_weight(
    sigma.rule(sigma.grpo()), p, 8
  ) / undo_attenuation(p)
  rescaled = np.ptp(grpo) / (grpo.max() + grpo.min())
  assert fit.error < 0.35 * rescaled < rescaled < np.abs(grpo - 1).max()


@pytest.mark.parametrize(
  ("c", "interval"),
  [(undo_attenuation, (0.02, 0.98)), (lambda p: 1 / (p + 0.05), (0.0, 1.0))],
)
def test_a_fit_is_the_least_error_by_equioscillation(c, interval):
  """Seven free weights: the extreme error is taken, in turn, eight times."""
  fit = objectives.weights_for(c, 8, interval=interval)
  p = np.linspace(*interval, 20001)
  rule = sigma.rule(sigma.table(fit.weights))
  off = theory.objective_weight(rule, p, 8) / c(p) - 1
  signs = np.sign(off[np.abs(off) > 0.98 * fit.error])
  assert np.sum(signs[1:] != signs[:-1]) >= 7


def test_what_a_free_fit_gains_in_bias_it_loses_in_noise():
  """Weights that alternate: at p = ½ a seventieth of GRPO's signal to noise."""
  free, positive = (
    objectives.weights_for(
      undo_attenuation, 8, interval=(0.02, 0.98), nonnegative=nonnegative
    )
    for nonnegative in (False, True)
  )
  noise = {
    name: objectives.signal_to_noise(op, PS, 8)
    for name, op in (
      ("grpo", sigma.grpo()),
      ("free", sigma.table(free.weights)),
      ("positive", sigma.table(positive.weights)),
    )
  }
  assert np.all(noise["free"] < noise["positive"])
  assert np.all(noise["positive"] < noise["grpo"])
