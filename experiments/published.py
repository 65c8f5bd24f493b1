"""What arXiv:2607.00152 publishes, number by number, and the comparison.

The one place where a result is written down; everything beside it in the table
is computed by `experiments.computed` and `experiments.sampled`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# What the paper prints, by section, source and quantity; a list of numbers has
# one quantity that varies. Ours must be within ±: half a unit of the last digit
# printed, unless it says. What is proven there is 0 ± rounding, and what is
# sampled here against an exact value is in standard errors.
PUBLISHED = {
  "identity": {
    "Theorem 1": {
      "GRPO: update − σΔs, relative": "0 ± 1e-12",
      "GRPO: the same in float32": "0 ± 1e-6",
      "GRPO: the same, 3 added to every reward": "0 ± 1e-12",
      "Dr. GRPO: update − σ²Δs, relative": "0 ± 1e-12",
      "DAPO: update − 1{0<k<G}σΔs, relative": "0 ± 1e-12",
      "all three: largest update of a silent group": "0 ± 0",
      "GRPO, scalar policy: update − σ": "0 ± 1e-6",
    },
    "two-valued advantages": {
      "GRPO: A₊/√((G−k)/k) − 1; A₋/√(k/(G−k)) + 1": "0, 0 ± 1e-12",
    },
    "leave-one-out baseline": {
      "RLOO: A − (R − b); R − μ − (G−1)/G·(R − b)": "0, 0 ± 1e-12",
    },
  },
  "fidelity": {
    "exact expected update": {
      "GRPO: E[g] − (1/G)ΣP(k)√(k(G−k))": "0 ± 1e-12",
      "Dr. GRPO: E[g] − p(1−p)(1−1/G)": "0 ± 1e-12",
    },
    "attenuation": {
      "GRPO: exact fraction at G = 8, p = 0.05, 0.5": "0.5390, 0.9278",
      "GRPO: expansion at G = 8, p = 0.05": "0.67",
      "GRPO: order in G of what the expansion omits": "-2 ± 0.05",
    },
    "table of group sizes": {
      "GRPO: G for 90, 95, 99% at p = 0.5": "7, 11, 51 ± 0",
      "GRPO: G for 90, 95, 99% at p = 0.3": "9, 14, 61 ± 0",
      "GRPO: G for 90, 95, 99% at p = 0.1": "22, 36, 144 ± 0",
      "GRPO: G for 90, 95, 99% at p = 0.05": "42, 69, 273 ± 0",
    },
    "group-size law, 1/(8εp(1−p))": {
      "GRPO: law for 90, 95, 99% at p = 0.5": "5, 10, 50",
      "GRPO: law for 90, 95, 99% at p = 0.3": "6, 12, 60",
      "GRPO: law for 90, 95, 99% at p = 0.1": "14, 28, 139",
      "GRPO: law for 90, 95, 99% at p = 0.05": "26, 53, 263",
    },
  },
  "silent": {
    "silent rate, p^G + (1−p)^G": {
      "share of sampled groups − exact, in s.e.": "0 ± 4",
    },
  },
  "objectives": {
    "table of the three operations": {
      "GRPO: ∫w dp − 2 arcsin √p": "0 ± 1e-12",
      "Dr. GRPO: ∫w dp − p": "0 ± 1e-12",
    },
    "exact expected update": {
      "GRPO: mean sampled update − E[g], in s.e.": "0 ± 4",
      "Dr. GRPO: mean sampled update − E[g], in s.e.": "0 ± 4",
    },
  },
  "weight": {
    "difficulty weight, 1/√(p(1−p))": {
      "GRPO: w at p = 0.5, 0.05": "2, 4.59 ± 0.005",
    },
  },
  "big_math": {
    "histogram (Figure 9)": {
      "problems": "215608",
      "% never solved, always solved, either": "4.0, 7.2, 11.2",
    },
    "silent share, closed form at k/64": {
      "% silent at p = k/64, G = 4, 8, 16, 32, 64": "59, 44, 32, 23, 17",
    },
    "silent share, drawn from the 64": {
      "% silent of G drawn from the 64, G = 4, 8, 16": "59, 43, 30",
    },
    "gradient mass at large G": {
      "% of mass at p < 0.1 or > 0.9: Dr. GRPO, GRPO": "13.9, 24.7",
      "% of mass at 0.4 ≤ p ≤ 0.6: Dr. GRPO, GRPO": "22.8, 17.5",
    },
  },
  "dapo_curve": {
    "DAPO's all-correct share": {
      "T at the end": "51.1",
      "τ, in steps": "17000 ± 100",
      "R², one free timescale": "0.92",
      "R², generic two-parameter curve": "0.98",
    },
  },
  "controlled": {
    "silent share in training": {"R² of the silent share, GRPO": "0.999"},
    "hardest quarter": {
      "hardest quarter's p at the end: GRPO": "0.99",
      "hardest quarter's p at the end: Dr. GRPO": "0.88 ± 0.03",
      "hardest quarter, steps to p = 0.8: DAPO's place": "1 ± 0",
    },
    "cost of dynamic sampling": {
      "rollouts drawn per rollout used: DAPO": "3.5",
    },
    "gradient mass at G = 8, sampled": {
      "% of mass at p < 0.1 or > 0.9: GRPO, Dr. GRPO": "17.0, 14.3 ± 0.3",
    },
  },
}


class Row(NamedTuple):
  """A line of the table, of one or several numbers of one quantity."""

  source: str
  quantity: str
  published: str
  ours: np.ndarray

  @property
  def paper(self) -> list[str]:
    """The numbers as printed."""
    return self.published.partition(" ± ")[0].split(", ")

  @property
  def tolerance(self) -> np.ndarray:
    """What ours may differ by."""
    if "±" in self.published:
      given = float(self.published.partition(" ± ")[2])
      return np.full(len(self.paper), given)
    decimals = [len(text.partition(".")[2]) for text in self.paper]
    # A hair more: a number in the middle may have been rounded either way.
    return np.array([0.5 * 10.0**-d for d in decimals]) * (1 + 1e-9)

  @property
  def agrees(self) -> bool:
    error = np.abs(self.ours - np.array(self.paper, float))
    return bool(np.all(error <= self.tolerance))

  def cells(self) -> list[str]:
    """As shown: ours with one digit more than the paper's."""
    digits = [len(text.lstrip("-0.").replace(".", "")) for text in self.paper]
    ours = (
      f"{x:.{max(2, d + 1)}g}" for x, d in zip(self.ours, digits, strict=True)
    )
    allowed = dict.fromkeys(f"{x:.3g}" for x in self.tolerance)
    return [
      self.quantity,
      ", ".join(self.paper),
      ", ".join(ours),
      "± " + ", ".join(allowed),
      "agrees" if self.agrees else "DIFFERS",
    ]


def rows(section: str, ours: Mapping[str, ArrayLike]) -> list[Row]:
  """Holds what a section computed against everything published of it.

  Raises:
    KeyError: if a published quantity is not computed, or one is not published.
    ValueError: if a quantity does not have as many numbers as are published.
  """
  table = PUBLISHED[section]
  names = [name for quantities in table.values() for name in quantities]
  if sorted(names) != sorted(ours):
    raise KeyError(
      f"section {section} must compute what is published, they differ in"
      f" {sorted(set(names) ^ set(ours))}."
    )
  compared = [
    Row(source, name, text, np.ravel(ours[name]))
    for source, quantities in table.items()
    for name, text in quantities.items()
  ]
  for row in compared:
    if len(row.ours) != len(row.paper):
      raise ValueError(
        f"{row.quantity!r} must be {len(row.paper)} numbers, got"
        f" {len(row.ours)}: they are compared one by one."
      )
  return compared
