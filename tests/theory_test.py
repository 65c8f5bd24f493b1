"""Predictions against fractions, decimals, enumeration and the paper's tables.

Double precision throughout: tolerances are those of `binomial`, 1e-13 up to
G = 64 and 2e-11 up to G = 4096, unless a test says otherwise.
"""

from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from groupstd import sigma, theory

SMALL, LARGE = 1e-13, 2e-11
PS = np.array([0.02, 0.05, 0.3, 0.5, 0.81])
K = np.arange(9)
WEIGHTS_OF_8 = np.random.default_rng(0).uniform(0.5, 2.0, size=7)


def half_masked(stats):
  """Drops the groups with more than half right, and weighs by σ^(−½)."""
  return sigma.Weight(stats.std**-0.5, stats.mean <= 0.5)


OPS = {
  "grpo": sigma.grpo(),
  "dr_grpo": sigma.dr_grpo(),
  "dapo": sigma.dapo(),
  "rloo": sigma.rloo(),
  "max_rl": sigma.max_rl(),
  "power": sigma.divide(power=0.3, ddof=1, eps=1e-3),
  "table": sigma.table(WEIGHTS_OF_8),
  "custom": half_masked,
}


@functools.cache
def exact_pmf(p: float, size: int) -> list[Decimal]:
  """Binomial probabilities in 80 digits, of p as it is stored, 0 < p < 1."""
  with localcontext(prec=80, Emin=-(10**6)):
    right, wrong = Decimal(p), 1 - Decimal(p)
    terms = [wrong**size]
    for k in range(size):
      terms.append(terms[-1] * (size - k) * right / ((k + 1) * wrong))
    return terms


def exact_mean(p: float, size: int, value: Callable[[int], Decimal]) -> float:
  """E[value(k)], k ~ Binomial(size, p)."""
  with localcontext(prec=80, Emin=-(10**6)):
    terms = exact_pmf(p, size)
    return float(sum(term * value(k) for k, term in enumerate(terms)))


def exact_std(size: int):
  return lambda k: Decimal(k * (size - k)).sqrt() / size


def constant_reference(rewards, where=None, scores=None):
  """A = R − 0.3: outside the zero-sum family, so silent groups speak."""
  del scores
  valid = True if where is None else where > 0
  keep = jnp.ones(rewards.shape[:-1], bool)
  return jnp.where(valid, rewards - 0.3, 0), keep


# The binomial.


@pytest.mark.parametrize(
  ("size", "rtol"), [(8, SMALL), (64, SMALL), (4096, LARGE)]
)
def test_binomial_has_the_stated_error(size, rtol):
  inner = [1e-5, 0.01, 0.3, 0.5, 0.999]
  exact = [np.array(exact_pmf(p, size), float) for p in inner]
  got = theory.binomial([0.0, *inner, 1.0], size)
  # Beyond 1e-100 nothing that is summed can tell.
  np.testing.assert_allclose(got[1:-1], exact, rtol=rtol, atol=1e-100)
  np.testing.assert_array_equal(got[[0, -1]], np.eye(size + 1)[[0, -1]])


def test_binomial_derivatives_are_exact_at_the_ends_too(x64):
  """Against the power rule on C(G, k) p^k (1 − p)^(G−k), in fractions."""
  size = 5

  def slope(p, order):
    total = []
    for k in range(size + 1):
      terms = [(Fraction(math.comb(size, k)), k, size - k)]
      for _ in range(order):
        terms = [(c * a, a - 1, b) for c, a, b in terms if a] + [
          (-c * b, a, b - 1) for c, a, b in terms if b
        ]
      total.append(sum(c * p**a * (1 - p) ** b for c, a, b in terms))
    return np.array(total, float)

  first = jax.jacfwd(lambda p: theory.binomial(p, size))
  second = jax.jacrev(first)
  for p in (0.0, 0.25, 1.0):
    for order, derivative in ((1, first), (2, second)):
      np.testing.assert_allclose(
        derivative(p), slope(Fraction(p), order), rtol=SMALL, atol=1e-14
      )


# What one group does.


def test_std_is_that_of_the_theorem_and_not_of_its_misprint():
  """σ = √(k(G − k))/G, 0.5 at G = 8, k = 4 (arXiv:2607.00152, Theorem 1)."""
  gain = theory.gain(sigma.grpo(), 8)
  np.testing.assert_allclose(gain, np.sqrt(K * (8 - K)) / 8, rtol=1e-15)
  assert gain[4] == 0.5
  np.testing.assert_allclose(gain, [np.std([1] * k + [0] * (8 - k)) for k in K])


def test_two_valued_advantages():
  """A₊ = √((G − k)/k), A₋ = −√(k/(G − k)); RLOO is R − the others' mean."""
  k = K[1:-1]
  plus, minus, keep = theory.advantages(sigma.rule(sigma.dapo()), 8)
  np.testing.assert_allclose(plus[1:-1], np.sqrt((8 - k) / k), rtol=1e-15)
  np.testing.assert_allclose(minus[1:-1], -np.sqrt(k / (8 - k)), rtol=1e-15)
  np.testing.assert_array_equal(keep, (K > 0) & (K < 8))
  plus, minus, keep = theory.advantages(sigma.rule(sigma.rloo()), 8)
  np.testing.assert_allclose(plus[1:-1], 1 - (k - 1) / 7, rtol=1e-15)
  np.testing.assert_allclose(minus[1:-1], -k / 7, rtol=1e-15)
  assert keep.all()


def test_gain_is_variance_times_weight_and_0_where_dropped():
  variance = K * (8 - K) / 64
  gain = theory.gain(sigma.table(WEIGHTS_OF_8), 8)
  np.testing.assert_allclose(gain, variance * np.pad(WEIGHTS_OF_8, 1))
  gain = theory.gain(half_masked, 8)
  np.testing.assert_allclose(gain, np.where(K <= 4, variance**0.75, 0))


# What a prompt's groups do on average.


@pytest.mark.parametrize("name", OPS)
def test_expected_update_by_enumeration(name, x64):
  """Σ over all 2^G reward vectors of (1/G)ΣA_i (y_i − p), p = sigmoid θ."""
  op, size = OPS[name], 8
  rewards = np.array(list(itertools.product([0.0, 1.0], repeat=size)))
  advantages, keep = sigma.rule(op)(rewards)
  advantages = np.where(np.asarray(keep)[:, None], advantages, 0)
  k = rewards.sum(-1)
  expected = [
    (p**k * (1 - p) ** (size - k)) @ (advantages * (rewards - p)).mean(axis=-1)
    for p in PS
  ]
  np.testing.assert_allclose(
    theory.expected_update(op, PS, size), expected, rtol=SMALL
  )
  weight = theory.objective_weight(sigma.rule(op), PS, size)
  np.testing.assert_allclose(PS * (1 - PS) * weight, expected, rtol=SMALL)


@pytest.mark.parametrize(
  "rule",
  [sigma.rule(sigma.dapo()), sigma.rule(half_masked), constant_reference],
)
def test_objective_weight_holds_for_any_policy_and_rule(rule, x64):
  """E[g] = c_G(p)∇p, over all groups of a softmax policy on four answers."""
  logits = np.random.default_rng(1).normal(size=4)
  right = np.array([1.0, 0.0, 1.0, 0.0])
  probs = np.exp(logits) / np.exp(logits).sum()
  size = 4
  groups = np.array(list(itertools.product(range(4), repeat=size)))
  advantages, keep = rule(right[groups])
  advantages = np.where(np.asarray(keep)[:, None], advantages, 0)
  scores = np.eye(4)[groups] - probs  # ∇ log π of each answer
  updates = (advantages[..., None] * scores).mean(axis=1)
  expected = probs[groups].prod(axis=-1) @ updates
  p = probs @ right
  slope = probs * (right - p)  # ∇p
  weight = theory.objective_weight(rule, p, size)
  np.testing.assert_allclose(weight * slope, expected, rtol=SMALL, atol=1e-16)


def test_objective_weight_is_the_bernstein_polynomial_of_the_weights():
  """c_G(p) = ((G − 1)/G) E[w(j + 1)], j ~ Binomial(G − 2, p), ends included."""
  weights = [Fraction(w) for w in WEIGHTS_OF_8]
  for p in (Fraction(0), Fraction(1, 8), Fraction(1, 2), Fraction(1)):
    exact = Fraction(7, 8) * sum(
      math.comb(6, j) * p**j * (1 - p) ** (6 - j) * weights[j] for j in range(7)
    )
    got = theory.objective_weight(
      sigma.rule(sigma.table(WEIGHTS_OF_8)), float(p), 8
    )
    np.testing.assert_allclose(got, float(exact), rtol=SMALL)


def test_the_bias_of_dividing_is_capped():
  """c_G → √(G − 1) at the ends; G = 2 and 3 are Dr. GRPO up to a constant."""
  rule, ps = sigma.rule(sigma.grpo()), [0.0, 0.2, 0.5, 1.0]
  for size, ratio in ((4, 1.07), (8, 1.43), (16, 2.0), (64, 4.0)):
    weight = theory.objective_weight(rule, ps, size)
    np.testing.assert_allclose(weight[[0, 3]], math.sqrt(size - 1), rtol=SMALL)
    assert weight[0] / weight[2] == pytest.approx(ratio, abs=5e-3)
  for size in (2, 3):
    weight = theory.objective_weight(rule, ps, size)
    np.testing.assert_allclose(weight, weight[0], rtol=SMALL)


@pytest.mark.parametrize(("size", "rtol"), [(8, SMALL), (4096, LARGE)])
def test_expected_update_closed_forms(size, rtol):
  """GRPO: (1/G)ΣC(G,k)p^k(1−p)^(G−k)√(k(G−k)); Dr. GRPO: p(1−p)(1−1/G)."""
  ps = np.array([1e-5, 0.3, 0.5, 0.999])
  weights = np.random.default_rng(2).uniform(0.5, 2.0, size=size - 1)
  padded = np.pad(weights, 1)

  def weighted_variance(k):
    return Decimal(padded[k]) * k * (size - k) / size**2

  for op, exact in (
    (sigma.grpo(), [exact_mean(p, size, exact_std(size)) for p in ps]),
    (sigma.dr_grpo(), ps * (1 - ps) * (1 - 1 / size)),
    (
      sigma.table(weights),
      [exact_mean(p, size, weighted_variance) for p in ps],
    ),
  ):
    update = theory.expected_update(op, ps, size)
    np.testing.assert_allclose(update, exact, rtol=rtol)


# Silence and redrawing.


@pytest.mark.parametrize("max_draws", [1, 4, 50, math.inf])
def test_expected_draws_near_certain_silence(max_draws):
  ps = [1e-12, 1e-9, 0.05, 0.5, 1 - 1e-9]
  silent = [p**8 + (1 - p) ** 8 for p in map(Fraction, ps)]
  np.testing.assert_allclose(theory.silent_rate(ps, 8), [*map(float, silent)])
  unspent = [0 if max_draws == math.inf else s**max_draws for s in silent]
  exact = [(1 - u) / (1 - s) for u, s in zip(unspent, silent, strict=True)]
  draws = theory.expected_draws([0.0, *ps, 1.0], 8, max_draws)
  np.testing.assert_allclose(draws[1:-1], [*map(float, exact)], rtol=SMALL)
  np.testing.assert_array_equal(draws[[0, -1]], max_draws)


def test_redrawing_by_recursion():
  """A silent first draw hands over to the update with one draw fewer."""
  gain, pmf = theory.gain(sigma.dapo(), 8), theory.binomial(PS, 8)
  expected = np.zeros(PS.shape)
  for draws in (1, 2, 3, 4):
    expected = pmf @ gain + (pmf[:, 0] + pmf[:, 8]) * expected
    got = theory.expected_update(sigma.dapo(), PS, 8, max_draws=draws)
    np.testing.assert_allclose(got, expected, rtol=SMALL)


def test_redrawing_reaches_for_the_logit_objective():
  """Capped at N√(G − 1), 10.58 at N = 4; within 1.42 of 1/(p(1 − p)) at ∞."""
  p = 1e-9
  cap = theory.expected_update(sigma.dapo(), p, 8, max_draws=4) / p
  assert cap == pytest.approx(4 * math.sqrt(7), rel=1e-6)
  ps = np.linspace(1e-6, 1 - 1e-6, 501)
  update = theory.expected_update(sigma.dapo(), ps, 8, max_draws=math.inf)
  assert 1.40 < update.max() / update.min() < 1.42
  assert update.min() == pytest.approx(math.sqrt(7) / 8, rel=1e-5)


# The large-G limit and the way to it.


def test_limit_of_each_operation():
  """Ops at μ = p, σ = √(p(1 − p)); ddof and G/(G − 1) are gone in the limit."""
  std = np.sqrt(PS * (1 - PS))
  for op, weight in (
    (sigma.grpo(), 1 / std),
    (sigma.divide(ddof=1), 1 / std),
    (sigma.divide(power=0.5), std**-0.5),
    (sigma.dr_grpo(), np.ones(5)),
    (sigma.rloo(), np.ones(5)),
    (sigma.max_rl(), 1 / PS),
    (half_masked, np.where(PS <= 0.5, std**-0.5, 0)),
  ):
    np.testing.assert_allclose(
      theory.difficulty_weight(op, PS), weight, rtol=1e-15
    )
    limit = theory.limit_update(op, [0.0, *PS, 1.0])
    np.testing.assert_allclose(limit[1:-1], std**2 * weight, rtol=1e-14)
    assert limit[0] == limit[-1] == 0


@pytest.mark.parametrize(
  "name", [n for n in OPS if n not in ("table", "custom")]
)
def test_expected_update_tends_to_its_limit(name):
  """At G = 4096 within 1/(Gp(1 − p)), eight times GRPO's own shortfall."""
  fidelity = theory.fidelity(OPS[name], PS, 4096)
  assert np.all(np.abs(fidelity - 1) < 1 / (4096 * PS * (1 - PS)))


def test_difficulty_weight_is_the_slope_of_the_arcsine():
  """2 at p = .5, 4.59 at p = .05; its integral is 2 arcsin √p."""
  weight = theory.difficulty_weight(sigma.grpo(), [0.5, 0.05])
  np.testing.assert_allclose(weight, [2, 4.59], atol=5e-3)
  area, error = integrate.quad(
    lambda p: theory.difficulty_weight(sigma.grpo(), p), 0.05, 0.5
  )
  exact = 2 * (math.asin(math.sqrt(0.5)) - math.asin(math.sqrt(0.05)))
  assert area == pytest.approx(exact, abs=max(error, 1e-12))


def test_fidelity_is_the_ratio_of_updates():
  finite = theory.expected_update(sigma.grpo(), PS, 8)
  limit = theory.limit_update(sigma.grpo(), PS)
  fidelity = theory.fidelity(sigma.grpo(), [0.0, *PS, 1.0], 8)
  np.testing.assert_allclose(fidelity[1:-1], finite / limit, rtol=SMALL)
  np.testing.assert_array_equal(fidelity[[0, -1]], 0)


def test_attenuation_is_right_to_first_order():
  """The expansion's error falls as G^(−2), from G = 64 to 4096."""
  ps = np.array([0.2, 0.5])

  def scaled_error(size):
    fidelity = theory.fidelity(sigma.grpo(), ps, size)
    return size**2 * (fidelity - theory.attenuation(ps, size))

  # The next order is 1/(Gp(1 − p)) ≈ 0.1 of it; a G^(−1) error would be 64 off.
  np.testing.assert_allclose(scaled_error(64), scaled_error(4096), rtol=0.15)


# The group size it takes.


def test_law_is_where_the_expansion_has_the_shortfall():
  law = theory.group_size_law(PS, 0.03)
  weight = theory.difficulty_weight(sigma.grpo(), PS)
  np.testing.assert_allclose(law, weight**2 / (8 * 0.03), rtol=1e-14)
  shortfall = 1 - float(theory.attenuation(0.3, 4000))
  assert theory.group_size_law(0.3, shortfall) == pytest.approx(4000, rel=1e-9)


def test_required_group_size_searches_every_size(monkeypatch):
  """Also where steps and rounds meet, and where fidelity has a single peak."""

  def peak_at(size):
    return lambda stats: sigma.Weight(
      jnp.where(stats.size == size, 3.0, 1.0 * (stats.size > 2**20))
    )

  def ask(op, asked, answer):
    found = theory.required_group_size(op, [[0.3, 0.05]], asked)
    np.testing.assert_array_equal(found, np.broadcast_to(answer, (1, 2)))

  ask(sigma.dr_grpo(), 0.9, 10)  # φ = 1 − 1/G: a tie
  ask(sigma.dr_grpo(), 1 - 1 / 64, 64)
  monkeypatch.setattr(theory, "_SEARCH_TERMS", 2**12)  # 32 sizes a step, then 2
  ask(sigma.grpo(), 0.9, [9, 42])
  for size in (2, 33, 34, 64, 65, 67):
    ask(peak_at(size), 0.9, size)


def test_required_group_size_that_does_not_exist():
  def ask(op, p, asked):
    return theory.required_group_size(op, [0.5, p], asked, max_group_size=64)

  np.testing.assert_array_equal(ask(sigma.dr_grpo(), 0.1, 1 - 1 / 64), 64)
  for op, p, asked in (
    (sigma.dr_grpo(), 0.1, 1 - 1 / 65),
    (sigma.grpo(), 0.05, 0.95),
    (sigma.grpo(), 0.0, 0.1),
    (OPS["table"], 0.1, 0.5),  # knows one size, and so has no limit
  ):
    with pytest.raises(ValueError, match="more than 64, if any size will do"):
      ask(op, p, asked)


# Precision, derivatives and refusals.


def test_results_stay_double_outside_x64():
  for result in (
    theory.binomial(0.3, 8),
    theory.expected_update(sigma.grpo(), 0.3, 8, 4),
    theory.limit_update(sigma.grpo(), [0.3]),
    theory.attenuation(0.3, 8),
    theory.mass_share([0.3, 0.1], [1, 2], [True, False]),
  ):
    assert (result * 2 + 1).dtype == np.float64
  exact = exact_mean(0.3, 8, exact_std(8))
  update = theory.expected_update(sigma.grpo(), 0.3, 8)
  assert float(update + 1) == pytest.approx(exact + 1, rel=1e-15)
  traced = jax.jit(lambda p: theory.expected_update(sigma.grpo(), p, 8))(0.3)
  assert traced == pytest.approx(exact, rel=1e-6)


def test_derivatives_in_p_and_in_the_operation(x64):
  """d/dp E[σ] and d/d(power) E[σ^(2−power)] = −E[σ^(2−power) ln σ]."""
  slope_at = jax.grad(lambda p: theory.expected_update(sigma.grpo(), p, 8, 4))
  slope = np.asarray(jax.jit(jax.vmap(slope_at))(jnp.array([0.0, 0.3, 1.0])))
  # N draws of G answers, one of them right: N·G·σ(1) at p = 0.
  np.testing.assert_allclose(
    slope[[0, 2]], [4 * 7**0.5, -4 * 7**0.5], rtol=1e-12
  )
  step = 1e-5
  up, down = theory.expected_update(
    sigma.grpo(), [0.3 + step, 0.3 - step], 8, 4
  )
  # Central differences: step² f'''/6 and 1e-16/step are both below 1e-8.
  assert slope[1] == pytest.approx((up - down) / (2 * step), rel=1e-8)
  by_power = jax.grad(
    lambda power: theory.expected_update(sigma.divide(power=power), 0.3, 8)
  )(0.5)
  k = np.arange(1, 8)
  std = np.sqrt(k * (8 - k)) / 8
  exact = -(stats.binom.pmf(k, 8, 0.3) * std**1.5 * np.log(std)).sum()
  assert by_power == pytest.approx(exact, rel=1e-12)
  slope = jax.grad(lambda p: theory.limit_update(sigma.grpo(), p))(0.3)
  assert slope == pytest.approx(0.2 / math.sqrt(0.21), rel=1e-12)


@pytest.mark.parametrize("group_size", [0, 1, -1, 1.5, 8.0, True, "8"])
def test_a_group_size_that_is_none(group_size):
  for call in (
    lambda: theory.silent_rate(0.5, group_size),
    lambda: theory.gain(sigma.grpo(), group_size),
    lambda: theory.required_group_size(sigma.grpo(), 0.5, 0.9, group_size),
  ):
    with pytest.raises(ValueError, match=r"group_size` must be .* at least 2"):
      call()


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf])
def test_a_probability_that_is_none(p):
  for call in (
    lambda: theory.binomial([0.5, p], 8),
    lambda: theory.fidelity(sigma.grpo(), p, 8),
    lambda: theory.limit_update(sigma.grpo(), p),
    lambda: theory.required_group_size(sigma.grpo(), p, 0.9),
    lambda: theory.group_size_law(p, 0.1),
  ):
    with pytest.raises(ValueError, match=r"`p` must be in \[0, 1\], got"):
      call()


def test_other_refusals():
  for max_draws in (0, 1.5, -math.inf, math.nan):
    with pytest.raises(ValueError, match="`max_draws` must be"):
      theory.expected_draws(0.5, 8, max_draws)
  for fraction in (0, 1, math.nan):
    with pytest.raises(ValueError, match=r"`fidelity` .* \(0, 1\)"):
      theory.required_group_size(sigma.grpo(), 0.5, fraction)
    with pytest.raises(ValueError, match=r"`shortfall` .* \(0, 1\)"):
      theory.group_size_law(0.5, fraction)
