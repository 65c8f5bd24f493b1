"""Published numbers the theory is held against; each file says its source."""

from importlib import resources
from typing import NamedTuple

import numpy as np

__all__ = ["BigMath", "DapoCurve", "big_math", "dapo"]


class BigMath(NamedTuple):
  """Big-Math's problems by how many of 64 rollouts solved them (2502.17387).

  Attributes:
    correct: [65], k = 0, …, 64 rollouts right.
    problems: [65], how many problems have that k.
  """

  correct: np.ndarray
  problems: np.ndarray


class DapoCurve(NamedTuple):
  """Share of prompts whose 32 answers are all right (2503.14476, Figure 3b).

  Attributes:
    step: [60], training steps.
    all_correct_share: [60], in [0, 1].
  """

  step: np.ndarray
  all_correct_share: np.ndarray


def big_math() -> BigMath:
  """Difficulty of 215,608 problems, from Llama-3.1-8B's 64 rollouts each.

  >>> correct, problems = big_math()
  >>> print(f"{problems[0] / problems.sum():.1%} never solved")
  4.0% never solved
  """
  return BigMath(*_columns("big_math.csv").astype(int))


def dapo() -> DapoCurve:
  """DAPO's measured all-correct share against training step.

  >>> print(f"{dapo().all_correct_share[-8:].mean():.3f}")
  0.572
  """
  step, share = _columns("dapo.csv")
  return DapoCurve(step.astype(int), share)


def _columns(name: str) -> np.ndarray:
  """[columns, rows] of a packaged table whose head is comments and names."""
  text = (resources.files(__name__) / name).read_text("utf-8")
  lines = [line for line in text.splitlines() if not line.startswith("#")]
  return np.loadtxt(lines[1:], delimiter=",", unpack=True)
