"""The published numbers: packaged as they are, and reproduced by the theory."""

from importlib import resources
import math

import numpy as np
import pytest
from scipy import stats

from groupstd import data, sigma, theory


def test_big_math_counts_every_problem_once():
  correct, problems = data.big_math()
  np.testing.assert_array_equal(correct, np.arange(65))
  assert problems.sum() == 215_608
  # arXiv:2607.00152, section on Big-Math: never 4.0 %, always 7.2 %, 11.2 %.
  shares = problems[[0, 64]] / problems.sum()
  np.testing.assert_allclose(
    [*shares, shares.sum()], [0.04, 0.072, 0.112], atol=5e-4
  )


def test_dapo_curve_rises_to_its_plateau():
  step, share = data.dapo()
  assert step.shape == share.shape == (60,)
  assert np.all(np.diff(step) > 0)
  assert np.all((share >= 0) & (share <= 1))
  assert share[0] == 0


def test_the_two_meet_at_the_published_temperature():
  """E[p^(32/T)] over Big-Math is DAPO's last eight points at T = 51.1."""
  correct, problems = data.big_math()

  def all_correct_share(temperature):
    return np.average((correct / 64) ** (32 / temperature), weights=problems)

  plateau = data.dapo().all_correct_share[-8:].mean()
  assert all_correct_share(51.05) < plateau < all_correct_share(51.15)


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("big_math.csv", ["Big-Math", "arXiv:2607.00152", "CC BY 4.0", "215608"]),
    ("dapo.csv", ["arXiv:2503.14476", "Figure 3b", "MIT", "n = 32"]),
  ],
)
def test_each_file_states_its_source(name, words):
  text = (resources.files("groupstd.data") / name).read_text("utf-8")
  head = [line for line in text.splitlines() if line.startswith("#")]
  for word in words:
    assert any(word in line for line in head), word


@pytest.mark.parametrize(
  ("table", "name"),
  [
    (data.big_math, "big_math_solve_rates.csv"),
    (data.dapo, "dapo_fig3b.csv"),
  ],
)
def test_numbers_are_the_originals(table, name, external_data):
  original = np.genfromtxt(
    external_data / "data" / name, delimiter=",", comments="#", names=None
  )[1:]  # [rows, columns], after the row of names
  np.testing.assert_array_equal(np.stack(table(), axis=1), original)


# Big-Math (arXiv:2607.00152, its section on the data).


def test_big_math_silent_share():
  """59, 44, 32, 23, 17 % in closed form; 59, 43, 30 % from the logged 64."""
  correct, problems = data.big_math()
  for size, percent in ((4, 59), (8, 44), (16, 32), (32, 23), (64, 17)):
    share = np.average(theory.silent_rate(correct / 64, size), weights=problems)
    assert round(100 * share) == percent
  for size, percent in ((4, 59), (8, 43), (16, 30)):
    drawn = [
      (math.comb(k, size) + math.comb(64 - k, size)) / math.comb(64, size)
      for k in correct
    ]
    assert round(100 * np.average(drawn, weights=problems)) == percent


def test_big_math_large_group_mass():
  """Extreme prompts: Dr. GRPO 13.9 %, GRPO 24.7 %; the middle 22.8 and 17.5."""
  correct, problems = data.big_math()
  p = correct / 64
  extreme = ((p > 0) & (p < 0.1)) | ((p > 0.9) & (p < 1))
  parts = np.stack([extreme, (p >= 0.4) & (p <= 0.6)])
  for op, percent in (
    (sigma.dr_grpo(), [13.9, 22.8]),
    (sigma.grpo(), [24.7, 17.5]),
  ):
    share = theory.mass_share(theory.limit_update(op, p), problems, parts)
    np.testing.assert_allclose(100 * share, percent, atol=0.05)


def test_big_math_mass_of_the_controlled_run():
  """G = 8, the outer two of ten equal bins of [0, 1]: 16.9 and 14.2 %.

  The population is the interior 0 < k < 64 with p clipped to [.02, .98]; no
  k/64 lies on an inner edge of the bins. The paper's 17.0 and 14.3 are from a
  sample of 6,000.
  """
  correct, problems = (x[1:-1] for x in data.big_math())
  p = np.clip(correct / 64, 0.02, 0.98)
  bins = np.digitize(p, np.linspace(0, 1, 11)) - 1
  parts = bins == np.arange(10)[:, None]
  for op, percent in ((sigma.grpo(), 16.9), (sigma.dr_grpo(), 14.2)):
    mass = theory.expected_update(op, p, 8)
    share = theory.mass_share(mass, problems, parts)
    np.testing.assert_allclose(100 * (share[0] + share[-1]), percent, atol=0.05)
    np.testing.assert_allclose(share.sum(), 1, rtol=1e-14)
    scaled = theory.mass_share(3 * mass, 2 * problems, parts)
    np.testing.assert_allclose(scaled, share, rtol=1e-14)


# The paper's tables (arXiv:2607.00152).

TABLE_PS = [0.5, 0.3, 0.7, 0.1, 0.9, 0.05, 0.95]
TABLE = {
  0.90: [(7, 5), (9, 6), (22, 14), (42, 26)],
  0.95: [(11, 10), (14, 12), (36, 28), (69, 53)],
  0.99: [(51, 50), (61, 60), (144, 139), (273, 263)],
}


@pytest.mark.parametrize("asked", TABLE)
def test_required_group_size_of_the_paper(asked):
  """The exact sizes and the law beside them; minimal by scipy's binomial."""
  rows = [TABLE[asked][i] for i in (0, 1, 1, 2, 2, 3, 3)]
  exact, law = np.transpose(rows)
  found = theory.required_group_size(sigma.grpo(), TABLE_PS, asked)
  np.testing.assert_array_equal(found, exact)
  np.testing.assert_array_equal(
    np.round(theory.group_size_law(TABLE_PS, 1 - asked)), law
  )
  for p, size in zip(TABLE_PS, exact, strict=True):
    sizes = np.arange(2, size + 1)[:, None]
    k = np.arange(size + 1)
    std = np.sqrt(np.maximum(k * (sizes - k), 0)) / sizes
    update = (stats.binom.pmf(k, sizes, p) * std).sum(-1)
    reached = update / math.sqrt(p * (1 - p)) >= asked
    assert reached[-1]
    assert not reached[:-1].any()


def test_fidelity_of_the_paper():
  """φ(8, .5) = 0.9278, φ(8, .05) = 0.5390, where the expansion says 0.67."""
  fidelity = theory.fidelity(sigma.grpo(), [0.5, 0.05], 8)
  np.testing.assert_allclose(fidelity, [0.9278, 0.5390], atol=5e-5)
  np.testing.assert_allclose(theory.attenuation(0.05, 8), 0.67, atol=5e-3)
