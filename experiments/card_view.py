"""The card of an operation, shown: in words and a table, and as a picture.

Colours are the controlled run's. Importing this does not import jax.
"""

import pathlib
import textwrap
from typing import Any

import numpy as np

from experiments import card, controlled

_OTHER_COLOR = "#7b4fa3"  # Of a method that has none in the controlled run.
_GREY = "#707070"
_REFERENCES = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO"}


def _names(found: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
  """(label, colour) of what is compared, this method first.

  A method that ascends what GRPO or Dr. GRPO does is that one, by its colour.
  """
  name = found["method"]["name"]
  color = controlled.COLORS.get(name, _OTHER_COLOR)
  labels, weight = dict(_REFERENCES), found["objective_weight"]
  for reference, known in _REFERENCES.items():
    if np.allclose(weight["op"], weight[reference], rtol=1e-6):
      del labels[reference]
      color = controlled.COLORS[reference]
      name = known if name == reference else f"{name} (as {known})"
  colors = {key: controlled.COLORS[key] for key in labels}
  return {"op": name} | labels, {"op": color} | colors


def _sampling(found: dict[str, Any]) -> str:
  """What is done about silent groups."""
  draws, rounds = (found["method"][f"max_{n}"] for n in ("draws", "rounds"))
  if rounds > 1:
    return f"silent groups replaced by other prompts', up to {rounds} rounds"
  left = "dropped" if found["drops_silent"] else "kept"
  if draws > 1:
    return f"silent groups redrawn, up to {draws} draws, then {left}"
  return f"silent groups {left}"


def _headline(found: dict[str, Any]) -> list[tuple[str, str]]:
  """(number, what it is): what the card comes to."""
  summary, difficulty = found["summary"], found["difficulty"]
  always = difficulty["never"] + difficulty["always"]
  mass = found["by_difficulty"]["mass"]["op"][[0, -1]].sum()
  lines = [
    (
      f"{summary['silent']:.1%}",
      f"of groups are silent; {always:.1%} are at any G (p = 0 or 1)",
    ),
    (
      f"{summary['fidelity']:.2f}",
      "of the update that groups without end would make",
    ),
    (f"{mass:.1%}", "of the update is made by prompts with p < 0.1 or ≥ 0.9"),
    (
      f"{summary['extreme_over_middle'].max():.2f} ×",
      "as steep at p = 0 or 1 as at ½",
    ),
  ]
  if summary["rollouts_per_rollout_used"] > 1 + 1e-9:
    lines.append(
      (
        f"{summary['rollouts_per_rollout_used']:.2f} ×",
        f"as many rollouts drawn as used; {summary['left_silent']:.1%} of"
        " groups stay silent",
      )
    )
  if found["plan"]:
    lines.append(
      (
        f"{found['plan']['gain']:+.1%}",
        "update from the same rollouts, were their number planned by p",
      )
    )
  return [
    (n.replace("nan%", "–").replace("nan", "–"), text) for n, text in lines
  ]


def show(found: dict[str, Any]) -> None:
  """The card in words and a table; in colour on a terminal."""
  from rich.console import Console
  from rich.table import Table
  from rich.text import Text

  method, difficulty = found["method"], found["difficulty"]
  labels, colors = _names(found)
  console = Console()
  if not console.is_terminal:
    console = Console(width=120)
  title = Text(f"{labels['op']}", style=f"bold {colors['op']}")
  title.append(f" at G = {method['group_size']}", style="bold")
  title.append(
    f" on {difficulty['source']}: {difficulty['prompts']:,} prompts,"
    f" mean p {difficulty['mean']:.2f}"
  )
  console.print(title)
  console.print(Text(f"{method['text']}; {_sampling(found)}", style="dim"))
  weights = found["weight"]["op"]
  ks = np.unique(np.linspace(0, len(weights) - 1, 9).astype(int))
  shown = "  ".join(f"{k + 1}: {weights[k]:.3g}" for k in ks)
  console.print(Text(f"weight w by k right   {shown}"))
  for number, text in _headline(found):
    line = Text(f"{number:>8} ", style=f"bold {colors['op']}")
    console.print(line.append(text, style="not bold default"))
  gap = 2 if console.width > 100 else 1  # So narrow, 80 columns are enough.
  table = Table(
    box=None, padding=(0, 0, 0, gap), pad_edge=False, header_style="dim"
  )
  table.add_column("p", no_wrap=True)
  by = found["by_difficulty"]
  columns = [
    ("prompts\n%", 100 * by["prompts"], ".1f", ""),
    ("silent\n%", 100 * by["silent"], ".1f", ""),
    ("\nc(p)", by["objective_weight"], ".2f", colors["op"]),
  ]
  columns += [
    (f"% by\n{labels[n]}", 100 * by["mass"][n], ".1f", colors[n])
    for n in labels
  ]
  columns += [("fide-\nlity", by["fidelity"], ".2f", colors["op"])]
  columns += [
    (f"G\n{float(f):.0%}", sizes, ".0f", "")
    for f, sizes in by["group_size"].items()
  ]
  if method["max_draws"] > 1:
    columns.append(("\ndraws", by["draws"], ".2f", ""))
  if found["plan"]:
    columns.append(("G\nplan", found["plan"]["by_difficulty"], ".1f", ""))
  for name, _, _, style in columns:
    table.add_column(name, justify="right", style=style)
  edges = by["edges"]
  for i in range(10):
    cells = [f"{values[i]:{form}}" for _, values, form, _ in columns]
    cells = [cell.replace("nan", "–") for cell in cells]
    table.add_row(f"{edges[i]:.1f}–{edges[i + 1]:.1f}", *cells)
  console.print(table)


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
  """The card as one picture: what it does above, what it takes below."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  labels, colors = _names(found)
  figure, axes = plt.subplots(2, 4, figsize=(16, 9.6))
  figure.subplots_adjust(
    left=0.04, right=0.98, bottom=0.06, top=0.745, wspace=0.2, hspace=0.5
  )
  _draw_head(figure, found, labels, colors)
  _draw_effect(axes[0], found, colors)
  _draw_cost(axes[1], found, colors)
  for axis in axes.flat:
    axis.spines[["top", "right"]].set_visible(False)
  figure.savefig(path, dpi=110)
  plt.close(figure)


def _draw_head(
  figure: Any,
  found: dict[str, Any],
  labels: dict[str, str],
  colors: dict[str, str],
) -> None:
  """The title, the legend of all panels, and what the card comes to."""
  method, difficulty = found["method"], found["difficulty"]

  def beside(x, right, y, text, **style):
    """Writes at x and returns where the text ends, for the next."""
    text = figure.text(x, y, text, ha="right" if right else "left", **style)
    box = text.get_window_extent(figure.canvas.get_renderer())
    return (box.x0 if right else box.x1) / figure.bbox.width

  bold = {"weight": "bold", "color": colors["op"]}
  x = beside(0.04, False, 0.945, labels["op"], size=26, **bold)
  beside(
    x + 0.008,
    False,
    0.945,
    f"at G = {method['group_size']} on {difficulty['source']}:"
    f" {difficulty['prompts']:,} prompts, mean p {difficulty['mean']:.2f}",
    size=17,
  )
  text = f"{method['text']}; {_sampling(found)}"
  beside(0.04, False, 0.913, text, size=11.5, color=_GREY)
  x = 0.98
  for name in reversed(labels):
    style = bold | {"color": colors[name]}
    x = beside(x, True, 0.945, labels[name], size=13, **style) - 0.014
  headline = _headline(found)
  for i, (number, text) in enumerate(headline):
    x = 0.04 + i * 0.96 / len(headline)
    beside(x, False, 0.858, number, size=21, **bold)
    text = "\n".join(textwrap.wrap(text, 31))
    beside(x, False, 0.846, text, size=10, va="top")


def _draw_effect(
  axes: Any, found: dict[str, Any], colors: dict[str, str]
) -> None:
  """What it weighs, what that ascends, and whose update it is."""
  weigh, slope, climb, mass = axes
  size, by, p = (
    found["method"]["group_size"],
    found["by_difficulty"],
    found["p"],
  )
  _title(
    weigh, "Weight of a group", "w by how many are right: A = w · (R − mean)"
  )
  _title(
    slope, "Weight of a prompt", "c(p), the update over ∇p; dotted: at G → ∞"
  )
  _title(
    climb, "Objective it ascends", "∫c, scaled to 1: a factor is a step size"
  )
  _title(
    mass, "Where the update goes", "bars: of the update; outline: of prompts"
  )
  width = 0.84 / len(colors)
  for i, name in enumerate(colors):
    mine = name == "op"
    style = {"color": colors[name], "lw": 3 if mine else 1.5}
    style |= {"zorder": 3 if mine else 2}
    dots = {"marker": "o", "ms": 6 if mine else 3} if size <= 32 else {}
    climbed = found["objective"][name]
    weigh.plot(np.arange(1, size), found["weight"][name], **style, **dots)
    slope.plot(p, found["objective_weight"][name], **style)
    climb.plot(p, climbed / (climbed[-1] or 1), **style)
    at = np.arange(10) + width * (i - (len(colors) - 1) / 2)
    mass.bar(at, by["mass"][name], width * 0.92, color=colors[name])
  top = slope.get_ylim()[1]
  limit = found["large_group_weight"]
  slope.plot(p, np.where(limit < top, limit, np.nan), "k:", lw=1.2)
  mass.stairs(by["prompts"], np.arange(11) - 0.5, color="black", lw=1)
  for axis in weigh, slope:
    axis.set_ylim(min(0, axis.get_ylim()[0]))
  weigh.set(xlabel=f"k of {size} right")
  weigh.xaxis.get_major_locator().set_params(integer=True)
  for axis in slope, climb:
    axis.set(xlabel="success probability p", xlim=(0, 1))
  _by_difficulty(mass, by)
  mass.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")


def _draw_cost(
  axes: Any, found: dict[str, Any], colors: dict[str, str]
) -> None:
  """What is silent, what falls short, and how many rollouts would help."""
  silence, truth, sizes, spent = axes
  method, by, plan = found["method"], found["by_difficulty"], found["plan"]
  size, color = method["group_size"], colors["op"]
  _title(silence, "Silent groups", "all right or all wrong; dotted: at any G")
  _title(truth, "Fidelity", "expected update of a draw, over that at G → ∞")
  _title(sizes, "Group size needed", f"for that fidelity; dashed: G = {size}")
  redrawn = "; ◆: as redrawn" if method["max_draws"] > 1 else " for all"
  text = f"bars: planned by p; dashed: alike{redrawn}"
  _title(spent, "Rollouts of a prompt", text)

  curve, summary = found["silent"], found["summary"]
  silence.plot(curve["group_size"], curve["share"], color=_GREY, lw=1.5)
  floor = found["difficulty"]["never"] + found["difficulty"]["always"]
  silence.axhline(floor, color=_GREY, ls=":")
  here, left = summary["silent"], summary["left_silent"]
  silence.plot([size], [here], "o", color=color, ms=9)
  silence.annotate(
    f"{here:.0%}", (size, here), (8, 5), textcoords="offset points", color=color
  )
  if left < here:
    arrow = {"arrowstyle": "->", "color": color, "lw": 2}
    silence.annotate("", (size, left), (size, here), arrowprops=arrow)
  ticks = 2 ** np.arange(1, 11, 3)
  silence.set(xscale="log", xlabel="group size G", ylim=(0, 1))
  silence.set_xticks(ticks, ticks)
  silence.minorticks_off()
  silence.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")

  for name in colors:
    lw = 3 if name == "op" else 1.5
    truth.plot(
      found["p"], found["fidelity"][name], color=colors[name], lw=lw, zorder=lw
    )
  truth.set(xlabel="success probability p", xlim=(0, 1))
  truth.set_ylim(min(0, truth.get_ylim()[0]), max(1, truth.get_ylim()[1]))

  needed = by["group_size"]
  for alpha, fidelity in zip((0.4, 0.65, 1), needed, strict=True):
    style = {"color": color, "alpha": alpha}
    sizes.plot(by["centres"], needed[fidelity], "o-", lw=2, ms=5, **style)
    if np.isfinite(needed[fidelity]).any():
      # At the hardest end, where the lines are apart.
      i = np.nanargmax(needed[fidelity])
      sizes.annotate(
        f"{float(fidelity):.0%}",
        (by["centres"][i], needed[fidelity][i]),
        (4 if i < 5 else -4, 3),
        textcoords="offset points",
        ha="left" if i < 5 else "right",
      )
  sizes.set(xlabel="success probability p", xlim=(0, 1), yscale="log")
  ticks = 2 ** np.arange(1, 11)
  sizes.set_yticks(ticks, ticks)
  sizes.minorticks_off()
  sizes.set_ylim(1.8, 2 * np.nanmax([*needed.values(), np.full(10, size)]))
  if plan:
    spent.bar(np.arange(10), plan["by_difficulty"], 0.84, color=color)
  for axis in sizes, spent:
    axis.axhline(size, color="black", lw=1, ls="--", zorder=3)
  if method["max_draws"] > 1:
    spent.plot(size * by["draws"], "D-", color="black", ms=4, lw=1)
  _by_difficulty(spent, by)
  spent.set_ylim(0, spent.get_ylim()[1])
  alone = f"defined at G = {size} only"
  if not plan:
    large = 4 * size > card.LARGEST
    _note(spent, f"planned up to G = {card.LARGEST // 4}" if large else alone)
  if np.isnan(found["fidelity"]["op"][1:-1]).all():
    _note(truth, alone)
    _note(sizes, alone)


def _title(axis: Any, title: str, caption: str) -> None:
  axis.set_title(title, loc="left", pad=21, weight="bold", size=13)
  axis.text(0, 1.035, caption, transform=axis.transAxes, size=9.5, color=_GREY)


def _by_difficulty(axis: Any, by: dict[str, Any]) -> None:
  ticks = [f"{edge:.1f}".lstrip("0") for edge in by["edges"]]
  axis.set_xticks(np.arange(11) - 0.5, ticks)
  axis.set(xlabel="success probability p", xlim=(-0.7, 9.7))


def _note(axis: Any, text: str) -> None:
  axis.text(0.5, 0.3, text, transform=axis.transAxes, ha="center", color=_GREY)
