"""What arXiv:2607.00152 reports and needs no sampling, computed anew.

A function for each section of the report, as in `experiments.sampled`, which
returns its numbers by the names they have in `experiments.published`, and the
arrays that its figure shows: from theory, the packaged data and trained arms.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from experiments.controlled import Arm
from groupstd import data, sigma, theory


class Result(NamedTuple):
  """A section's numbers by quantity, and its figure's arrays by name."""

  numbers: dict[str, Any]
  shown: dict[Any, Any]


OPS = {"grpo": sigma.grpo(), "dr_grpo": sigma.dr_grpo(), "dapo": sigma.dapo()}
# Limits of the operation's objective as the group grows.
OBJECTIVES = {
  "grpo": ("2 arcsin √p", lambda p: 2 * np.arcsin(np.sqrt(p))),
  "dr_grpo": ("p", lambda p: p),
}
FIDELITIES = (0.9, 0.95, 0.99)
SILENT_SIZES = (4, 8, 16, 32, 64)
TABLE_P = (0.5, 0.3, 0.1, 0.05)
# The group size of the paper's experiments, and one near the limit.
SIZE, LARGE = 8, 64


def fidelity() -> Result:
  """How much of the large-G update is left at G, and the G it takes."""
  op = OPS["grpo"]
  p, k = np.linspace(0.02, 0.98, 97), np.arange(SIZE + 1)
  update = stats.binom.pmf(k, SIZE, p[:, None]) @ np.sqrt(k * (SIZE - k)) / SIZE
  sizes = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
  exact = np.array([theory.fidelity(op, TABLE_P, g) for g in sizes])
  expansion = np.array([theory.attenuation(TABLE_P, g) for g in sizes])
  even, extreme = 0, len(TABLE_P) - 1  # p = 0.5 and 0.05.
  at = sizes.index(SIZE)
  # Doubling G from 32 to 64.
  omitted = (expansion - exact)[[sizes.index(32), sizes.index(64)], even]
  numbers = {
    "GRPO: E[g] − (1/G)ΣP(k)√(k(G−k))": np.abs(
      theory.expected_update(op, p, SIZE) - update
    ).max(),
    "Dr. GRPO: E[g] − p(1−p)(1−1/G)": np.abs(
      theory.expected_update(OPS["dr_grpo"], p, SIZE)
      - p * (1 - p) * (1 - 1 / SIZE)
    ).max(),
    "GRPO: exact fraction at G = 8, p = 0.05, 0.5": exact[at, [extreme, even]],
    "GRPO: expansion at G = 8, p = 0.05": expansion[at, extreme],
    "GRPO: order in G of what the expansion omits": np.log2(
      omitted[1] / omitted[0]
    ),
  }
  p = np.append(TABLE_P, np.geomspace(0.05, 0.5, 25))
  required = [theory.required_group_size(op, p, f) for f in FIDELITIES]
  law = [theory.group_size_law(p, 1 - f) for f in FIDELITIES]
  for i, value in enumerate(TABLE_P):
    quantity = f"for 90, 95, 99% at p = {value}"
    numbers[f"GRPO: G {quantity}"] = [row[i] for row in required]
    numbers[f"GRPO: law {quantity}"] = [row[i] for row in law]
  order = np.argsort(p)
  return Result(
    numbers,
    {
      "G": sizes,
      "exact": exact,
      "expansion": expansion,
      "p": p[order],
      "required": [row[order] for row in required],
      "law": [row[order] for row in law],
    },
  )


def big_math() -> Result:
  """Who is silent, and where the gradient mass lies, over 215,608 problems."""
  correct, problems = data.big_math()
  p, share = correct / 64, problems / problems.sum()
  never, always = share[0], share[-1]
  closed = [share @ theory.silent_rate(p, g) for g in SILENT_SIZES]
  # G of the 64 without replacement: all wrong, or all right.
  drawn = [
    share @ stats.hypergeom.pmf([[0], [g]], 64, correct, g).sum(0)
    for g in SILENT_SIZES
  ]
  inside = (p > 0) & (p < 1)
  extreme = inside & ((p < 0.1) | (p > 0.9))
  middle = (p >= 0.4) & (p <= 0.6)
  bins = np.minimum(correct * 10 // 64, 9) == np.arange(10)[:, None]
  masses = {
    name: theory.limit_update(OPS[name], p) for name in ("dr_grpo", "grpo")
  }
  parts = np.array(
    [
      theory.mass_share(mass, problems, np.array([extreme, middle]))
      for mass in masses.values()
    ]
  )
  return Result(
    {
      "problems": problems.sum(),
      "% never solved, always solved, either": 100
      * np.array([never, always, never + always]),
      "% silent at p = k/64, G = 4, 8, 16, 32, 64": 100 * np.array(closed),
      "% silent of G drawn from the 64, G = 4, 8, 16": 100
      * np.array(drawn[:3]),
      "% of mass at p < 0.1 or > 0.9: Dr. GRPO, GRPO": 100 * parts[:, 0],
      "% of mass at 0.4 ≤ p ≤ 0.6: Dr. GRPO, GRPO": 100 * parts[:, 1],
    },
    {
      "correct": correct,
      "share": share,
      "extreme": extreme,
      "closed": closed,
      "drawn": drawn,
      "problems": theory.mass_share(np.ones(65), problems, bins),
      "mass": {
        name: theory.mass_share(mass, problems, bins)
        for name, mass in masses.items()
      },
    },
  )


def dapo_curve() -> Result:
  """The share of all-correct groups, E[p³²], as p is sharpened to p^(1/T)."""
  correct, problems = data.big_math()
  p, share = correct / 64, problems / problems.sum()
  step, measured = data.dapo()
  elapsed = step - step[0]

  def all_correct(sharpening):
    return p ** (32 / np.expand_dims(sharpening, -1)) @ share

  end: Any = optimize.brentq(
    lambda t: all_correct(t) - measured[-8:].mean(), 1, 1000
  )

  def sharpened(tau):
    progress = np.expm1(-elapsed / tau)
    return all_correct(1 + progress / progress[-1] * (end - 1))

  def saturating(elapsed, height, tau):
    return -height * np.expm1(-elapsed / tau)

  def residual(curve):
    return np.sum((measured - curve) ** 2)

  fit: Any = optimize.minimize_scalar(
    lambda log_tau: residual(sharpened(np.exp(log_tau))),
    bounds=np.log([100, 1e6]),
    method="bounded",
    options={"xatol": 1e-6},
  )
  tau = np.exp(fit.x)
  generic, _ = optimize.curve_fit(
    saturating, elapsed, measured, p0=[measured.max(), elapsed.mean()]
  )
  spread = residual(measured.mean())
  curves = sharpened(tau), saturating(elapsed, *generic)
  r2 = [1 - residual(curve) / spread for curve in curves]
  return Result(
    {
      "T at the end": end,
      "τ, in steps": tau,
      "R², one free timescale": r2[0],
      "R², generic two-parameter curve": r2[1],
    },
    {"step": step, "measured": measured, "curves": curves, "r2": r2},
  )


def controlled(arms: list[Arm]) -> Result:
  """What the trained arms came to."""
  grpo, dr_grpo, dapo = arms
  # The first step at which the mean is there; an arm that never is comes last.
  reached = [np.searchsorted(arm.quarter, 0.8) for arm in arms]
  return Result(
    {
      "R² of the silent share, GRPO": grpo.r2()[0],
      "hardest quarter's p at the end: GRPO": grpo.quarter[-1],
      "hardest quarter's p at the end: Dr. GRPO": dr_grpo.quarter[-1],
      "hardest quarter, steps to p = 0.8: DAPO's place": 1
      + sum(steps <= reached[-1] for steps in reached[:-1]),
      "rollouts drawn per rollout used: DAPO": dapo.oversampling()[0],
      "% of mass at p < 0.1 or > 0.9: GRPO, Dr. GRPO": [
        100 * arm.extreme_mass()[0] for arm in (grpo, dr_grpo)
      ],
    },
    {"arms": arms},
  )
