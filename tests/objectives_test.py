"""Objectives, their inverse, dynamic sampling's two rules, and the noise.

Tolerances are those of `theory.binomial`, 1e-13 at these group sizes, unless a
test says otherwise.
"""

from fractions import Fraction
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from groupstd import objectives, sigma, theory

PS = np.array([0.02, 0.05, 0.3, 0.5, 0.81])
GRPO = sigma.rule(sigma.grpo())
WEIGHTS_OF_8 = np.random.default_rng(0).normal(size=7)


def half_masked(stats):
  """Drops the groups with more than half right, and weighs by σ^(−½)."""
  return sigma.Weight(stats.std**-0.5, stats.mean <= 0.5)


def constant_reference(rewards, where=None, scores=None):
  """A = R − 0.3: outside the zero-sum family, so silent groups speak."""
  del where, scores
  return rewards - 0.3, jnp.ones(rewards.shape[:-1], bool)


# --- The objective ---


@pytest.mark.parametrize(
  "rule",
  [
    GRPO,
    sigma.rule(sigma.table(WEIGHTS_OF_8)),
    sigma.rule(half_masked),
    constant_reference,
  ],
)
def test_the_objective_is_the_integral_of_its_weight(rule):
  """By Gauss–Legendre, exact for c_G's degree 7, from 0 and at both ends."""
  nodes, node_weights = np.polynomial.legendre.leggauss(8)
  p = np.array([0.0, *PS, 1.0])
  inside = p[:, None] * (1 + nodes) / 2
  area = p / 2 * (theory.objective_weight(rule, inside, 8) @ node_weights)
  np.testing.assert_allclose(
    objectives.objective(rule, p, 8), area, rtol=1e-12, atol=1e-15
  )


def test_the_objective_is_the_bernstein_polynomial_of_summed_weights():
  """F_G(p) = (1/G) E[w(1) + … + w(j)], j ~ Binomial(G − 1, p), in fractions."""
  weights = [Fraction(w) for w in WEIGHTS_OF_8]
  rule = sigma.rule(sigma.table(WEIGHTS_OF_8))
  p = Fraction(1, 8)
  exact = Fraction(1, 8) * sum(
    math.comb(7, j) * p**j * (1 - p) ** (7 - j) * sum(weights[:j])
    for j in range(8)
  )
  got = objectives.objective(rule, float(p), 8)
  # Weights of both signs: rounding is relative to their sum without it.
  assert got == pytest.approx(float(exact), rel=1e-12)


# --- Refusals ---


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: objectives.weights_for(lambda p: 1 / p, 8), "finite .* got inf"),
    (lambda: objectives.weights_for(lambda p: 0.0, 8), "somewhere not 0"),
    (lambda: objectives.weights_for(lambda p: p * np.nan, 8), "got nan"),
    (lambda: objectives.weights_for(np.ones_like, 1), "`group_size` .* got 1"),
    (
      lambda: objectives.weights_for(np.ones_like, 8, interval=(0.5, 0.5)),
      "`interval` must be",
    ),
    (
      lambda: objectives.weights_for(np.ones_like, 8, interval=(0.5, 1.5)),
      "`interval` must be",
    ),
    (lambda: objectives.objective(GRPO, 1.5, 8), "`p` must be in"),
    (lambda: objectives.kept_share(0.5, 1), "`group_size` .* got 1"),
    (
      lambda: objectives.redrawn_weight(sigma.dapo(), 0.5, 8, 0),
      "`max_draws` .* got 0",
    ),
  ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_errors_say_requirement_and_value(call, message):
  with pytest.raises(ValueError, match=message):
    call()


# --- Dynamic sampling, two rules ---


def test_redrawing_by_recursion_is_another_objective():
  """c_N = c_G + s·c_{N−1}; at most N times c_G, and N times it at the ends."""
  p = np.array([0.0, *PS, 1.0])
  once = theory.objective_weight(GRPO, p, 8)
  silent, expected = theory.silent_rate(p, 8), 0
  for draws in (1, 2, 3, 4):
    expected = once + silent * expected
    weight = objectives.redrawn_weight(sigma.dapo(), p, 8, draws)
    np.testing.assert_allclose(weight, expected, rtol=1e-13)
    ends = weight[[0, -1]]
    np.testing.assert_allclose(ends, draws * math.sqrt(7), rtol=1e-13)
  assert ends[0] == pytest.approx(10.58, abs=5e-3)  # the controlled run


def test_redrawing_without_end_is_nearly_the_logit_objective():
  """Within a factor 1.42 of 1/(p(1 − p)) at G = 8; at power 2 exactly it."""
  p = np.linspace(1e-6, 1 - 1e-6, 501)
  logit = p * (1 - p)
  ratio = objectives.redrawn_weight(sigma.dapo(), p, 8, math.inf) * logit
  assert 1.40 < ratio.max() / ratio.min() < 1.42
  op = sigma.product(sigma.mask(), sigma.divide(power=2))
  ratio = objectives.redrawn_weight(op, p, 8, math.inf) * logit
  np.testing.assert_allclose(ratio, 1, rtol=1e-12)


def test_replacing_keeps_the_objective_and_redrawing_does_not():
  """A slot's expected update, draw by draw, over prompts of two kinds."""
  p, counts, size = np.array([0.02, 0.4]), np.array([300.0, 100.0]), 8
  share = counts / counts.sum()
  gain, pmf = theory.gain(sigma.dapo(), size), theory.binomial(p, size)
  kept = objectives.kept_share(p, size)
  np.testing.assert_allclose(kept, pmf[:, 1:-1].sum(-1), rtol=1e-15)
  np.testing.assert_allclose(kept, 1 - theory.silent_rate(p, size), rtol=1e-13)
  # Whatever the prompt before it was, the next is any: Σ_t P(t dropped).
  tries = sum((1 - share @ kept) ** t for t in range(500))
  slot = share * (pmf @ gain) * tries  # by kind
  weight = objectives.replaced_weight(sigma.dapo(), p, size, counts)
  np.testing.assert_allclose(share * p * (1 - p) * weight, slot, rtol=1e-12)
  own = theory.objective_weight(GRPO, p, size)
  np.testing.assert_allclose(weight / own, 1 / (share @ kept), rtol=1e-13)
  redrawn = objectives.redrawn_weight(sigma.dapo(), p, size, math.inf) / own
  np.testing.assert_allclose(redrawn, 1 / kept, rtol=1e-13)
  assert redrawn[0] > 6 * redrawn[1]
  # Prompts of weight 1 by default.
  np.testing.assert_allclose(
    objectives.replaced_weight(sigma.dapo(), np.repeat(p, [3, 1]), size)[2:],
    weight,
    rtol=1e-13,
  )


# --- Noise ---


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize(
  "op",
  [sigma.grpo(), sigma.dr_grpo(), half_masked, sigma.table(WEIGHTS_OF_8[:3])],
)
def test_variance_of_the_scalar_policy_by_enumeration(op, draws):
  """Of every sequence of groups, the first mixed or else the last one moves.

  E[gain²] − E[gain]² with the gain of that group, in plain sums.
  """
  size, p = 4, 0.2
  gain, pmf = theory.gain(op, size), theory.binomial(p, size)
  first = second = 0.0
  for ks in itertools.product(range(size + 1), repeat=draws):
    used = next((k for k in ks if 0 < k < size), ks[-1])
    first += pmf[list(ks)].prod() * gain[used]
    second += pmf[list(ks)].prod() * gain[used] ** 2
  variance = objectives.update_variance(op, p, size, draws)
  assert variance == pytest.approx(second - first**2, rel=1e-12)
  noise = objectives.signal_to_noise(op, p, size, draws)
  rollouts = size * theory.expected_draws(p, size, draws)
  assert noise == pytest.approx(
    abs(first) / math.sqrt((second - first**2) * rollouts), rel=1e-11
  )


@pytest.mark.parametrize("op", [sigma.grpo(), sigma.max_rl(), half_masked])
def test_variance_of_any_policy_by_enumeration(op, x64):
  """tr Cov[g] over all groups of a softmax policy on four answers, redrawn."""
  probs = np.array([0.1, 0.5, 0.15, 0.25])
  right = np.array([1.0, 0.0, 1.0, 0.0])
  size, draws = 4, 2
  groups = np.array(list(itertools.product(range(4), repeat=size)))
  advantages, keep = sigma.rule(op)(right[groups])
  advantages = np.where(np.asarray(keep)[:, None], advantages, 0)
  table = np.eye(4) - probs  # ∇ log π of each answer
  updates = (advantages[..., None] * table[groups]).mean(axis=1)
  chance = probs[groups].prod(axis=-1)
  silent = np.ptp(right[groups], axis=1) == 0
  # A silent group is followed by any; nothing moves where that is silent too.
  chance = np.where(silent, 0, chance) * (1 + chance[silent].sum())
  mean = chance @ updates
  variance = chance @ (updates**2).sum(axis=-1) - mean @ mean

  def moments(mask):
    of = probs * mask / (probs @ mask)
    centre = of @ table
    return centre, of @ (table**2).sum(axis=-1) - centre @ centre

  (plus, spread_plus), (minus, spread_minus) = (
    moments(right),
    moments(1 - right),
  )
  scores = objectives.Scores(
    np.linalg.norm(plus - minus), spread_plus, spread_minus
  )
  p = probs @ right
  slope = np.linalg.norm(probs * (right - p))
  assert scores.contrast == pytest.approx(slope / (p * (1 - p)), rel=1e-12)
  got = objectives.update_variance(op, p, size, draws, scores=scores)
  assert got == pytest.approx(variance, rel=1e-12)
  noise = objectives.signal_to_noise(op, p, size, draws, scores=scores)
  rollouts = size * theory.expected_draws(p, size, draws)
  assert noise == pytest.approx(
    np.linalg.norm(mean) / math.sqrt(variance * rollouts), rel=1e-12
  )


def test_signal_to_noise_is_blind_to_what_is_no_merit():
  """A factor on w, and DAPO's mask, which only changes a denominator."""
  plain = objectives.signal_to_noise(sigma.grpo(), PS, 8)
  tripled = sigma.product(sigma.grpo(), lambda _: sigma.Weight(-3.0))
  for op in (tripled, sigma.dapo()):
    np.testing.assert_allclose(
      objectives.signal_to_noise(op, PS, 8), plain, rtol=1e-12
    )


def test_redrawing_never_costs_signal_per_rollout():
  """(signal to noise)² = m²/(G(q − m²(1 − s^N)/(1 − s))), m and q first draws'.

  Mean, mean square and rollouts all grow by the draws; the mean's square by
  theirs.
  """
  gain, pmf = theory.gain(sigma.dapo(), 8), theory.binomial(PS, 8)
  mean, square = pmf @ gain, pmf @ gain**2
  for draws in (1, 4, math.inf):
    rest = square - mean**2 * theory.expected_draws(PS, 8, draws)
    np.testing.assert_allclose(
      objectives.signal_to_noise(sigma.dapo(), PS, 8, draws) ** 2,
      mean**2 / (8 * rest),
      rtol=1e-11,
    )


def test_noise_at_the_ends():
  """No update at p = 0: no signal; redrawn for ever at G = 2: no noise."""
  p = [0.0, 1.0]
  for draws in (1, 4):
    variance = objectives.update_variance(sigma.grpo(), p, 8, draws)
    np.testing.assert_array_equal(variance, 0)
    noise = objectives.signal_to_noise(sigma.grpo(), p, 8, draws)
    np.testing.assert_array_equal(noise, 0)
  sure = objectives.signal_to_noise(sigma.grpo(), 0.3, 2, math.inf)
  assert sure == math.inf or sure > 1e6
  never = objectives.update_variance(sigma.grpo(), p, 8, math.inf)
  assert np.isnan(never).all()


# --- Derivatives and precision ---


def test_derivatives_in_p_are_the_weight(x64):
  p = jnp.array([0.0, *PS, 1.0])
  slope = jax.jit(
    jax.vmap(jax.grad(lambda p: objectives.objective(GRPO, p, 8)))
  )(p)
  np.testing.assert_allclose(
    slope, theory.objective_weight(GRPO, p, 8), rtol=1e-12
  )


@pytest.mark.parametrize("draws", [1, 4, math.inf])
def test_derivatives_in_the_operations_power(draws, x64):
  """A group with k = 0 or 8 right, where σ = 0, is among those summed over.

  d/d(power) of F, c_G and Var[g], from σ^(−power)'s own −σ^(−power) log σ.
  """
  p, power, k = 0.05, 0.5, np.arange(1, 8)
  std = np.sqrt(k * (8 - k)) / 8

  def of(power):
    op = sigma.product(sigma.mask(), sigma.divide(power=power))
    return (
      objectives.objective(sigma.rule(op), p, 8),
      objectives.redrawn_weight(op, p, 8, draws),
      objectives.update_variance(op, p, 8, draws),
      objectives.signal_to_noise(op, p, 8, draws),
    )

  slopes = jax.jit(jax.jacfwd(of))(power)
  log_weights = -(std**-power) * np.log(std)
  table = sigma.rule(sigma.table(log_weights))
  exact = objectives.objective(table, p, 8)
  assert slopes[0] == pytest.approx(exact, rel=1e-12)
  exact = objectives.redrawn_weight(sigma.table(log_weights), p, 8, draws)
  assert slopes[1] == pytest.approx(exact, rel=1e-12)
  mixed = stats.binom.pmf(k, 8, p) * theory.expected_draws(p, 8, draws)
  gains, rates = std ** (2 - power), std**2 * log_weights
  exact = 2 * (mixed @ (gains * rates) - (mixed @ gains) * (mixed @ rates))
  assert slopes[2] == pytest.approx(exact, rel=1e-10)
  mean, variance = mixed @ gains, mixed @ gains**2 - (mixed @ gains) ** 2
  relative = mixed @ rates / mean - exact / (2 * variance)
  assert slopes[3] == pytest.approx(of(power)[3] * relative, rel=1e-10)
  by_p = jax.jit(
    jax.grad(lambda p: objectives.update_variance(sigma.dapo(), p, 8, draws))
  )(p)
  step = 1e-5
  up, down = objectives.update_variance(
    sigma.dapo(), [p + step, p - step], 8, draws
  )
  # The central difference's own error, step²f'''/6, is some 1e-7 of it.
  assert by_p == pytest.approx((up - down) / (2 * step), rel=1e-6)


def test_results_stay_double_outside_x64():
  exact, _ = integrate.quad(
    lambda p: float(theory.objective_weight(GRPO, p, 5)), 0, 0.3, epsabs=1e-14
  )
  value = objectives.objective(GRPO, 0.3, 5)
  assert float(value + 1) == pytest.approx(exact + 1, rel=1e-14)
  for result in (
    value,
    objectives.kept_share(0.3, 5),
    objectives.redrawn_weight(sigma.dapo(), 0.3, 5, 4),
    objectives.replaced_weight(sigma.dapo(), [0.3], 5),
    objectives.update_variance(sigma.dapo(), 0.3, 5, 4),
    objectives.signal_to_noise(sigma.dapo(), 0.3, 5, 4),
  ):
    assert isinstance(result, np.ndarray)
    assert (result * 2 + 1).dtype == np.float64
