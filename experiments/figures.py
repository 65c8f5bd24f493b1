"""The figures of `experiments.paper`, a function for each section.

Lines are exact, points sampled or trained, crosses what arXiv:2607.00152
prints.
"""

from collections.abc import Callable, Mapping
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter, ScalarFormatter
import numpy as np

from experiments import computed, controlled, sampled
from experiments.published import Row

_NAMES = controlled.ARMS
_COLORS = controlled.COLORS
_PAPER = {"ls": "none", "marker": "x", "color": "black", "ms": 6, "zorder": 3}
_DIFFICULTY = "success probability p"
# Shades of one colour for what is no method: group sizes, fidelities, p.
_SHADES = ("#c3a5d4", "#9a6fb8", "#6f4596", "#4a2470", "#260a45")


def draw(
  section: str, shown: Mapping[Any, Any], rows: list[Row], folder: pathlib.Path
) -> str:
  """Draws a section as PNG and PDF; returns the PNG's name."""
  if section == "controlled":
    controlled.draw(shown["arms"], folder)
    return "dynamics.png"
  printed = {row.quantity: np.array(row.paper, float) for row in rows}
  figure = _FIGURES[section](shown, printed)
  for axis in figure.axes:
    axis.spines[["top", "right"]].set_visible(False)
  for suffix in "png", "pdf":
    figure.savefig(folder / f"{section}.{suffix}", dpi=200)
  plt.close(figure)
  return f"{section}.png"


def _panels(count: int) -> tuple[Any, Any]:
  return plt.subplots(
    1, count, figsize=(4 * max(count, 2), 3.9), layout="constrained"
  )


def _identity(shown, printed):
  del printed
  figure, (size, error) = _panels(2)
  # DAPO's points are GRPO's: rings around them.
  for name, style in (
    ("dapo", {"marker": "o", "ms": 7, "mfc": "none"}),
    ("grpo", {"marker": "o", "ms": 3}),
    ("dr_grpo", {"marker": "s", "ms": 3}),
  ):
    style |= {"ls": "none", "color": _COLORS[name]}
    label = _NAMES[name].partition(" (")[0]
    size.plot(shown["share"], shown["sizes"][name], **style, label=label)
    error.plot(shown["share"], shown["errors"][name], **style, label=label)
  error.plot(
    shown["share"],
    shown["errors"]["float32"],
    "x",
    ms=4,
    color=_COLORS["grpo"],
    label="GRPO, float32",
  )
  x = np.linspace(0, 1, 201)
  size.plot(x, np.sqrt(x * (1 - x)), color=_COLORS["grpo"], lw=1, label="σ")
  size.plot(x, x * (1 - x), color=_COLORS["dr_grpo"], lw=1, label="σ²")
  size.set(
    title="a  Size of the learner's update",
    xlabel="share of right answers μ = k/G",
    ylabel="‖update‖ / ‖Δs‖",
    ylim=(0, 0.65),
  )
  size.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
  error.set(
    title="b  Its distance from σ²w Δs",
    xlabel="share of right answers μ = k/G",
    ylabel="error / (1/G)Σ|A|‖s‖",
    yscale="log",
    ylim=(1e-18, 1e-3),
  )
  error.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
  return figure


def _fidelity(shown, printed):
  figure, (left, needed) = _panels(2)
  for i, p in enumerate(computed.TABLE_P):
    color = _SHADES[3 - i]
    exact, expansion = (
      [row[i] for row in shown[name]] for name in ("exact", "expansion")
    )
    left.plot(shown["G"], exact, color=color, label=f"p = {p:g}")
    left.plot(shown["G"], expansion, "--", color=color, lw=1)
  crosses = printed["GRPO: exact fraction at G = 8, p = 0.05, 0.5"]
  left.plot([computed.SIZE] * 2, crosses, **_PAPER, label="paper")
  left.plot([], [], "--", color="gray", lw=1, label="1 − 1/(8Gp(1−p))")
  left.set(
    title="a  GRPO's fidelity",
    xscale="log",
    xticks=[2, 4, 8, 16, 32, 64],
    xlabel="group size G",
    ylabel="E[g] / √(p(1−p))",
    ylim=(0, 1.02),
  )
  left.minorticks_off()
  for i, fidelity in enumerate(computed.FIDELITIES):
    color = _SHADES[2 * i]
    needed.plot(
      shown["p"], shown["required"][i], color=color, label=f"{fidelity:.0%}"
    )
    needed.plot(shown["p"], shown["law"][i], "--", color=color, lw=1)
  for p in computed.TABLE_P:
    needed.plot(
      [p] * 3, printed[f"GRPO: G for 90, 95, 99% at p = {p}"], **_PAPER
    )
  needed.plot([], [], **_PAPER, label="paper")
  needed.plot([], [], "--", color="gray", lw=1, label="1/(8εp(1−p))")
  needed.set(
    title="b  Group size for a fidelity of 1 − ε",
    xscale="log",
    yscale="log",
    xticks=[0.05, 0.1, 0.2, 0.3, 0.5],
    yticks=[5, 10, 20, 50, 100, 200],
    xlabel=_DIFFICULTY,
    ylabel="smallest G",
  )
  needed.minorticks_off()
  for axis in left.xaxis, needed.xaxis, needed.yaxis:
    axis.set_major_formatter(ScalarFormatter())
  left.legend(frameon=False, fontsize=9, loc="lower right")
  needed.legend(frameon=False, fontsize=9)
  return figure


def _silent(shown, printed):
  del printed
  figure, axis = plt.subplots(figsize=(8, 3.9), layout="constrained")
  for color, size, rates, exact in zip(
    _SHADES,
    computed.SILENT_SIZES,
    shown["sampled"],
    shown["exact"],
    strict=True,
  ):
    axis.plot(shown["grid"], exact, color=color, lw=1, label=f"G = {size}")
    axis.plot(sampled.SAMPLED_P, rates, "o", ms=4, color=color)
  axis.set(
    title="Groups whose update is exactly 0",
    xlabel=_DIFFICULTY,
    ylabel="share (points: sampled; lines: exact)",
  )
  axis.yaxis.set_major_formatter(PercentFormatter(1))
  axis.legend(frameon=False)
  return figure


def _objectives(shown, printed):
  del printed
  figure, axes = _panels(2)
  small, large = computed.SIZE, computed.LARGE
  for axis, letter, name in zip(axes, "ab", computed.OBJECTIVES, strict=True):
    color, limit = _COLORS[name], computed.OBJECTIVES[name][0]
    axis.plot(
      shown["grid"], shown[name, "limit"], color="black", lw=1, label=limit
    )
    for size, marker in (large, "o"), (small, "s"):
      axis.plot(shown["grid"], shown[name, size, "exact"], color=color, lw=1)
      axis.plot(
        shown["p"],
        shown[name, size, "sampled"],
        marker,
        ms=4,
        color=color,
        mfc="white" if size == small else color,
        label=f"learner, G = {size}",
      )
    axis.set(
      title=f"{letter}  What {_NAMES[name]} ascends",
      xlabel=_DIFFICULTY,
      ylabel="objective (points: summed updates)",
    )
    axis.legend(frameon=False, loc="upper left")
  return figure


def _weight(shown, printed):
  figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
  for name in "dapo", "grpo", "dr_grpo":
    color = _COLORS[name]
    axis.plot(shown["grid"], shown[name, "exact"], color=color, lw=1)
    axis.errorbar(
      sampled.SAMPLED_P,
      shown[name, "sampled"],
      2 * shown[name, "error"],
      fmt="o",
      ms=4,
      elinewidth=1,
      color=color,
      label=f"{_NAMES[name]}, G = {computed.SIZE}",
    )
  for name, label in ("grpo", "1/√(p(1−p))"), ("dr_grpo", "1"):
    limit = shown[name, "limit"]
    style = "--" if name == "grpo" else ":"
    axis.plot(
      shown["grid"], limit, style, color="black", lw=1, label=f"limit {label}"
    )
  axis.plot([0.5, 0.05], printed["GRPO: w at p = 0.5, 0.05"], **_PAPER)
  axis.plot([], [], **_PAPER, label="paper")
  axis.set(
    title="Weight on ∇p, by difficulty",
    xlabel=_DIFFICULTY,
    ylabel="weight (points: sampled ± 2 s.e.)",
    yscale="log",
    ylim=(0.7, 16),
    yticks=[1, 2, 4, 8, 16],
  )
  axis.minorticks_off()
  axis.yaxis.set_major_formatter(ScalarFormatter())
  axis.legend(frameon=False, ncols=2, loc="upper center")
  return figure


def _big_math(shown, printed):
  figure, axes = plt.subplot_mosaic(
    "AA;BC", figsize=(8, 7), layout="constrained"
  )
  counts, mass, silent = axes.values()
  k, share = shown["correct"], shown["share"]
  ends = (k == 0) | (k == k[-1])
  for part, color, label in (
    (ends, "#444444", "never or always"),
    (shown["extreme"], "#9a6fb8", "p < 0.1 or > 0.9"),
    (~ends & ~shown["extreme"], "#c8c8c8", "between"),
  ):
    counts.bar(k[part], share[part], 0.9, color=color, label=label)
  counts.set(
    title="a  Big-Math's problems",
    xlabel="right answers of 64",
    ylabel="share of problems",
    xticks=np.arange(0, 65, 16),
  )
  counts.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
  x = np.arange(10)
  for shift, (name, shares) in zip(
    (-0.2, 0.2), shown["mass"].items(), strict=True
  ):
    mass.bar(x + shift, shares, 0.4, color=_COLORS[name], label=_NAMES[name])
  mass.stairs(
    shown["problems"], np.arange(11) - 0.5, color="black", label="problems"
  )
  mass.set(
    title="b  Where the large-G mass lies",
    xlabel=_DIFFICULTY,
    ylabel="share",
    xticks=np.arange(0, 11, 2) - 0.5,
    xticklabels=[f"{edge / 10:g}" for edge in range(0, 11, 2)],
  )
  mass.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
  x = np.arange(len(computed.SILENT_SIZES))
  for marker, name, label in (
    ("o-", "closed", "at p = k/64"),
    ("s--", "drawn", "drawn from the 64"),
  ):
    color = _SHADES[3] if name == "closed" else _SHADES[1]
    silent.plot(x, shown[name], marker, ms=4, lw=1, color=color, label=label)
  for quantity in (
    "% silent at p = k/64, G = 4, 8, 16, 32, 64",
    "% silent of G drawn from the 64, G = 4, 8, 16",
  ):
    percent = printed[quantity]
    silent.plot(x[: len(percent)], percent / 100, **_PAPER)
  silent.plot([], [], **_PAPER, label="paper")
  silent.set(
    title="c  Silent groups",
    xlabel="group size G",
    ylabel="share of problems",
    xticks=x,
    xticklabels=computed.SILENT_SIZES,
    ylim=(0, 0.65),
  )
  silent.yaxis.set_major_formatter(PercentFormatter(1))
  for axis in counts, mass, silent:
    axis.legend(frameon=False, fontsize=9)
  return figure


def _dapo_curve(shown, printed):
  del printed
  figure, axis = plt.subplots(figsize=(8, 3.9), layout="constrained")
  step = shown["step"]
  axis.plot(
    step,
    shown["measured"],
    "o",
    ms=4,
    color=_COLORS["dapo"],
    label="DAPO's log",
  )
  labels = "Big-Math sharpened, one timescale", "a(1 − exp(−(t − t₀)/τ))"
  for style, curve, r2, label in zip(
    ("-", "--"), shown["curves"], shown["r2"], labels, strict=True
  ):
    label = f"{label}: R² = {r2:.3f}"
    axis.plot(step, curve, style, color="black", lw=1, label=label)
  axis.set(
    title="Prompts whose 32 answers are all right",
    xlabel="training step",
    ylabel="share of prompts",
    ylim=(0, 0.65),
  )
  axis.yaxis.set_major_formatter(PercentFormatter(1))
  axis.legend(frameon=False, loc="lower right")
  return figure


_FIGURES: dict[str, Callable[[Mapping, Mapping], Any]] = {
  "identity": _identity,
  "fidelity": _fidelity,
  "silent": _silent,
  "objectives": _objectives,
  "weight": _weight,
  "big_math": _big_math,
  "dapo_curve": _dapo_curve,
}
