"""Estimates from logs: unbiased exactly, and seen to be on simulated logs."""

from fractions import Fraction
import json
import math
import warnings

import numpy as np
import pytest
from scipy import integrate, stats

from groupstd import data, estimates, sigma, theory

OPS = {
  "grpo": sigma.grpo(),
  "dr_grpo": sigma.dr_grpo(),
  "max_rl": sigma.max_rl(),
  "power": sigma.divide(power=1.7),
}


def statistics(size):
  """By name: (k, n) → estimate, and what is estimated, at each j right."""
  j = np.arange(size + 1)
  std = np.sqrt(j * (size - j)) / size
  table = {
    "silent": (estimates.silent_rate, (j == 0) | (j == size)),
    "std": (estimates.expected_std, std),
    "pass": (estimates.pass_at, j > 0),
    "any": (
      lambda k, n, size: estimates.unbiased(np.cos(j), k, n, size),
      np.cos(j),
    ),
  }
  for name, op in OPS.items():
    mean = np.where(j == 0, 1, j / size)
    w = {"grpo": 1, "power": 1.7}.get(name, 0)
    weight = np.where(std > 0, std, 1) ** -w / (mean if name == "max_rl" else 1)
    table[name] = (
      lambda k, n, size, op=op: estimates.expected_gain(op, k, n, size),
      std**2 * weight,
    )
  return table


def draws(population, drawn):
  """C(·, ·) as a Fraction's numerator would have it, 0 outside."""
  return math.comb(population, drawn) if 0 <= drawn <= population else 0


# -----------------------------------------------------------------------------
# Unbiased
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_every_estimate_is_unbiased_by_enumeration(size):
  """E over k ~ Binomial(n, p) is the mean over fresh groups, in fractions.

  Also where G = n. All is double precision: they agree to rounding.
  """
  n = 7
  for p in Fraction(1, 10), Fraction(1, 2), Fraction(6, 7), Fraction(1):
    logged, fresh = (
      [float(math.comb(m, k) * p**k * (1 - p) ** (m - k)) for k in range(m + 1)]
      for m in (n, size)
    )
    for name, (estimate, values) in statistics(size).items():
      mean = logged @ estimate(np.arange(n + 1), n, size)
      np.testing.assert_allclose(
        mean, fresh @ values.astype(float), rtol=1e-13, atol=1e-15, err_msg=name
      )


@pytest.mark.parametrize(
  ("k", "n", "size"), [(3, 64, 8), (200, 400, 128), (2000, 4096, 1024)]
)
def test_estimate_is_the_mean_over_groups_without_replacement(k, n, size):
  """ΣC(k, j)C(n − k, G − j)·j²/C(n, G) in whole numbers, up to large n."""
  exact = sum(
    j * j * draws(k, j) * draws(n - k, size - j) for j in range(size + 1)
  )
  found = estimates.unbiased(np.arange(size + 1) ** 2, k, n, size)
  expected = float(Fraction(exact, math.comb(n, size)))
  np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_pass_at_is_the_known_estimator():
  """1 − C(n − k, m)/C(n, m) (arXiv:2107.03374), for every k, n and m ≤ 12."""
  for m in range(1, 13):
    n, k = np.tril_indices(13)
    n, k = n[n >= m], k[n >= m]
    known = [
      1 - Fraction(draws(b - a, m), math.comb(b, m))
      for a, b in zip(k.tolist(), n.tolist(), strict=True)
    ]
    found = estimates.pass_at(k, n, m)
    np.testing.assert_allclose(found, np.array(known, float), atol=1e-14)


def test_simulated_logs_reveal_the_bias_of_plugging_in():
  """40,000 prompts of known p, n = 12, G = 8, against the true means.

  The unbiased estimates lie within 3 standard errors (of the paired
  difference), the plug-in of each more than 4 away.
  """
  rng = np.random.default_rng(7)
  p = rng.beta(0.6, 0.8, 40_000).round(2)
  n, size = 12, 8
  k = rng.binomial(n, p)
  for name, (estimate, values) in statistics(size).items():

    def closed(p, values=values):
      return theory.binomial(p, size) @ values

    truth = closed(np.arange(101) / 100)[np.round(100 * p).astype(int)]
    mean, error = estimates.mean_and_error(estimate(k, n, size) - truth)
    assert abs(mean) < 3 * error, name
    biased = estimates.plug_in(closed, np.arange(n + 1), n)[k]
    mean, error = estimates.mean_and_error(biased - truth)
    assert abs(mean) > 4 * error, name


def test_big_math_silent_share():
  """43.1 % unbiased and 44.3 % plugged in at G = 8; 59, 43, 30 at 4, 8, 16.

  (arXiv:2607.00152, its section on Big-Math.)
  """
  k, problems = data.big_math()
  shares = [
    estimates.mean_and_error(estimates.silent_rate(k, 64, size), problems)
    for size in (4, 8, 16)
  ]
  assert [round(100 * share.value) for share in shares] == [59, 43, 30]
  np.testing.assert_allclose(shares[1].value, 0.431, atol=5e-4)
  biased = estimates.plug_in(lambda p: theory.silent_rate(p, 8), k, 64)
  biased = estimates.mean_and_error(biased, problems)
  np.testing.assert_allclose(biased.value, 0.443, atol=5e-4)
  assert biased.value - shares[1].value > 4 * biased.error


def test_a_real_log(external_data):
  """A GRPO run's 64,000 groups of 8: its silent share .490, its mean σ .211."""
  folder = external_data / "data" / "logs" / "one_shot_rlvr"
  visits = json.loads((folder / "acc_step_500.json").read_text())
  k = np.round(8 * np.concatenate(list(visits.values())))
  silent = estimates.mean_and_error(estimates.silent_rate(k, 8, 8))
  std = estimates.mean_and_error(estimates.expected_std(k, 8, 8))
  np.testing.assert_allclose(
    [silent.value, std.value], [0.490, 0.211], atol=5e-4
  )


def test_prompts_do_not_touch_each_other():
  """Ragged n: each prompt as if alone, in the order and shape given."""
  rng = np.random.default_rng(0)
  n = rng.integers(4, 30, size=(5, 6))
  k = rng.binomial(n, 0.4)
  values = rng.normal(size=5)
  found = estimates.unbiased(values, k, n, 4)
  alone = [
    estimates.unbiased(values, a, b, 4)
    for a, b in zip(k.flat, n.flat, strict=True)
  ]
  np.testing.assert_array_equal(found, np.reshape(alone, n.shape))


def test_what_cannot_happen_needs_no_value():
  values = [np.nan, 1.0, 2.0, np.inf]
  np.testing.assert_allclose(estimates.unbiased(values, 2, 4, 3), 1.5)


# -----------------------------------------------------------------------------
# Errors
# -----------------------------------------------------------------------------


def test_mean_and_error_over_prompts():
  """scipy's standard error; an entry that stands for 3 prompts is 3 entries."""
  rng = np.random.default_rng(1)
  x, weights = rng.normal(size=50), rng.integers(0, 4, 50)
  for given, all_of_them in ((None, x), (weights, np.repeat(x, weights))):
    mean, error = estimates.mean_and_error(x, given)
    np.testing.assert_allclose(mean, all_of_them.mean(), rtol=1e-12)
    np.testing.assert_allclose(error, stats.sem(all_of_them), rtol=1e-12)


def test_error_is_what_other_prompts_would_change():
  """Over 400 logs the estimates spread by the error; 5 σ of such a ratio."""
  rng = np.random.default_rng(2)
  k = rng.binomial(16, rng.beta(0.5, 0.5, (400, 300)))
  silent = estimates.silent_rate(k, 16, 8)
  found = [estimates.mean_and_error(row) for row in silent]
  spread = np.std([mean for mean, _ in found], ddof=1)
  error = np.mean([error for _, error in found])
  assert abs(spread / error - 1) < 5 / math.sqrt(2 * 400)


def test_bootstrap_agrees_with_what_is_known_of_a_mean_and_a_ratio():
  """The mean's own error, and the ratio's by linearisation.

  400 replicates give an error to 1/√800; four times that is allowed.
  """
  rng = np.random.default_rng(3)
  weights = rng.integers(0, 5, 200)
  k, n = rng.binomial(16, rng.beta(1, 1, 200)), 16
  silent = estimates.silent_rate(k, n, 8)
  std = estimates.expected_std(k, n, 8)

  def both(k_again, n_again, weights):
    np.testing.assert_array_equal(k_again, k)
    np.testing.assert_array_equal(n_again, np.full(200, n))
    return [
      weights @ silent / weights.sum(),
      weights @ silent / (weights @ std),
    ]

  value, error = estimates.bootstrap(
    both, k, n, weights=weights, replicates=400
  )
  mean = estimates.mean_and_error(silent, weights)
  ratio = weights @ silent / (weights @ std)
  residual = estimates.mean_and_error(silent - ratio * std, weights)
  scale = weights @ std / weights.sum()
  np.testing.assert_allclose(value, [mean.value, ratio], rtol=1e-12)
  np.testing.assert_allclose(
    error, [mean.error, residual.error / scale], rtol=4 / math.sqrt(800)
  )


# -----------------------------------------------------------------------------
# Beyond the log
# -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted():
  rng = np.random.default_rng(4)
  k = rng.binomial(16, rng.beta(0.7, 1.3, 10_000))
  return k, estimates.fit_difficulty(k, 16)


def test_fit_is_the_likeliest(fitted):
  """Twice the log of its likelihood over the truth's is χ²₂: below 11.8 with
  the chance of 3 σ; and no neighbour is likelier."""
  k, fit = fitted

  def likelihood(a, b):
    return stats.betabinom.logpmf(k, 16, a, b).sum()

  best = likelihood(fit.a, fit.b)
  assert 0 < 2 * (best - likelihood(0.7, 1.3)) < 11.8
  for a, b in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
    assert best > likelihood(a * fit.a, b * fit.b)


def test_fit_of_counts_is_that_of_the_prompts(fitted):
  k, fit = fitted
  right, counts = np.unique(k, return_counts=True)
  again = estimates.fit_difficulty(right, 16, counts)
  np.testing.assert_allclose(again.held_out, fit.held_out, rtol=1e-9)
  np.testing.assert_allclose(again[:2], fit[:2], rtol=1e-9)


def test_beyond_the_log_a_good_fit_is_right():
  """Silent groups of 128 from 16 rollouts a prompt, 30 logs of 4,000 prompts:
  their mean is within 3 standard errors of the truth, and 5 % tell."""
  rng = np.random.default_rng(6)
  silent = np.zeros(129)
  silent[[0, -1]] = 1
  found = []
  for p in rng.beta(0.7, 1.3, (30, 4000)):
    fit = estimates.fit_difficulty(rng.binomial(16, p), 16)
    with pytest.warns(UserWarning, match="128 are beyond the 16 rollouts"):
      found.append(fit.expect(silent, 128))
  truth = stats.betabinom.pmf([0, 128], 128, 0.7, 1.3).sum()
  error = stats.sem(found)
  assert abs(np.mean(found) - truth) < 3 * error < 0.05 * truth


def test_within_the_log_nothing_warns_and_held_out_agrees(fitted):
  _, fit = fitted
  assert abs(fit.held_out.value) < 3 * fit.held_out.error
  with warnings.catch_warnings(action="error"):
    fit.expect(np.ones(17), 16)


def test_what_does_not_fit_is_found_out():
  """Prompts of two kinds are no Beta: the held-out rollouts say so."""
  rng = np.random.default_rng(5)
  k = rng.binomial(32, rng.choice([0.3, 0.97], 10_000))
  value, error = estimates.fit_difficulty(k, 32).held_out
  assert abs(value) > 4 * error


def test_held_out_check_never_sees_what_it_predicts():
  """It is the mean over all divisions of predicted less logged, by hand."""
  k, n = np.array([0, 1, 4, 5, 8, 8]), np.array([8, 8, 8, 8, 8, 9])
  divisions = []  # prompt, seen right, of first, unseen silent, chance
  for i in range(6):
    for seen in range(3):
      ways = draws(k[i], seen) * draws(n[i] - k[i], 2 - seen)
      silent = k[i] - seen in (0, n[i] - 2)
      divisions.append((i, seen, silent, ways / math.comb(n[i], 2)))
  prompt, seen, silent, chance = np.transpose(divisions)
  quarter = estimates._fit_beta(seen, np.full(seen.shape, 2), chance)
  others = n[prompt.astype(int)] - 2
  after = quarter[0] + seen, quarter[1] + 2 - seen
  predicted = sum(
    stats.betabinom.pmf(right, others, *after) for right in (0 * others, others)
  )
  by_prompt = np.bincount(prompt.astype(int), chance * (predicted - silent))
  expected = estimates.mean_and_error(by_prompt)
  found = estimates.fit_difficulty(k, n).held_out
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_expect_is_the_posterior_mean(fitted):
  """∫ Σ_j values[j] Bin(j; G, p) Beta(p; a + k, b + n − k) dp by quadrature;
  and over all k its mean is that of a prompt unseen."""
  _, fit = fitted
  values, n = np.cos(np.arange(9)), 16
  found = fit.expect(values, 8, np.arange(n + 1), n)
  for k in (3, 8):
    posterior = stats.beta(fit.a + k, fit.b + n - k)

    def integrand(p, posterior=posterior):
      return posterior.pdf(p) * (stats.binom.pmf(np.arange(9), 8, p) @ values)

    expected = integrate.quad(integrand, 0, 1, epsabs=1e-12)[0]
    np.testing.assert_allclose(found[k], expected, rtol=1e-9)
  chance = stats.betabinom.pmf(np.arange(n + 1), n, fit.a, fit.b)
  np.testing.assert_allclose(chance @ found, fit.expect(values, 8), rtol=1e-12)


@pytest.mark.parametrize("k", [0, 4, 8])
def test_prompts_that_are_all_alike_are_fitted_too(k):
  """A likelihood with no maximum: p is k/n, as nearly as the bounds allow."""
  fit = estimates.fit_difficulty([k] * 5, 8)
  np.testing.assert_allclose(fit.a / (fit.a + fit.b), k / 8, atol=0.01)
  assert np.isfinite([fit.a, fit.b, *fit.held_out]).all()


# -----------------------------------------------------------------------------
# Refused
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (
      lambda: estimates.silent_rate([1, 2], [64, 32], 33),
      r"`group_size` must be at most n = 32, got 33.*fit_difficulty",
    ),
    (lambda: estimates.unbiased([1, 2], 1, 4, 2), r"`values` must be \[G \+ 1"),
    (lambda: estimates.unbiased([1, 2.5], 1, 4, 1.0), "whole number of at"),
    (lambda: estimates.pass_at(5, 4, 2), r"`k` must be in \[0, n\], got 5 of"),
    (lambda: estimates.pass_at(0.5, 4, 2), "must be whole numbers"),
    (lambda: estimates.pass_at(np.nan, 4, 2), "must be whole numbers"),
    (lambda: estimates.plug_in(np.sqrt, 0, 0), "n at least 1"),
    (lambda: estimates.mean_and_error([1.0]), "at least 2, got 1"),
    (lambda: estimates.mean_and_error([1.0, 2], [1, 2, 3]), "prompts' shape"),
    (lambda: estimates.mean_and_error([1.0, 2], [3, -1]), "not be negative"),
    (
      lambda: estimates.bootstrap(max, [1, 2], 4, weights=[1.5, 1]),
      "whole numbers: they count",
    ),
    (
      lambda: estimates.bootstrap(max, [1, 2], 4, replicates=1),
      "`replicates` must be at least 2",
    ),
    (lambda: estimates.fit_difficulty([1, 2], 3), "`n` must be at least 4"),
  ],
)
def test_mistakes_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
