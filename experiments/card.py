"""The card of an operation on prompts of given difficulty: its numbers.

`explain` evaluates the very operation that trains, at one group size and at the
sizes beside it. Importing this does not import jax.
"""

import csv
import pathlib
from typing import Any, NamedTuple

import numpy as np

from experiments import cli

FIDELITIES = (0.9, 0.95, 0.99)
LARGEST = 512  # No larger group is looked for.
EDGES = np.linspace(0, 1, 11)
CENTRES = (EDGES[1:] + EDGES[:-1]) / 2
# p = sin²: as close together at the ends as binomials there are narrow.
GRID = np.sin(np.linspace(0, np.pi / 2, 201)) ** 2
# Of the prompts in order of difficulty, as many as a plan is made for.
PLANNED = 100
# The sizes of silent groups' share, beside the method's own.
_SIZES = 2 ** np.arange(1, 11)


class Method(NamedTuple):
  """What is explained.

  Attributes:
    name: for the title, and the files.
    text: the operation written out.
    op: the operation.
    group_size: G.
    max_draws: draws of one prompt until its group is mixed.
    max_rounds: rounds of other prompts that take a silent group's place.
  """

  name: str
  text: str
  op: Any
  group_size: int
  max_draws: int = 1
  max_rounds: int = 1


class Difficulty(NamedTuple):
  """How many prompts there are of each success probability.

  Attributes:
    source: where this is from.
    p: [P], distinct and ascending.
    prompts: [P], how many have it.
    counts: (k [Q], n [Q], prompts [Q]) if p is k/n, of logged answers.
  """

  source: str
  p: np.ndarray
  prompts: np.ndarray
  counts: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


# -----------------------------------------------------------------------------
# Difficulty
# -----------------------------------------------------------------------------


def big_math() -> Difficulty:
  """Big-Math's 215,608 problems, by the rate that 64 answers had."""
  from groupstd import data

  k, prompts = data.big_math()
  return Difficulty("Big-Math", k / 64, prompts, (k, 0 * k + 64, prompts))


def read_difficulty(path: str) -> Difficulty:
  """A CSV file's prompts, one a line: rates, or k and n.

  The first line may name its columns: rate, or k and n, are then found among
  others. Lines that begin with # are comments.

  Raises:
    ValueError: naming the file, and the line that is wrong.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    names = [str(other) for other in file.parent.glob("*.csv")]
    raise ValueError(f"{path}: no such file{cli.did_you_mean(path, names)}")
  columns, rows = None, []
  for number, line in enumerate(file.read_text("utf-8-sig").splitlines(), 1):
    if not line.strip() or line.startswith("#"):
      continue
    cells = [cell.strip() for cell in next(csv.reader([line]))]
    if columns is None:
      columns, named = _columns(cells, path)
      if named:
        continue
    try:
      rows.append(_row([cells[column] for column in columns]))
    except (ValueError, IndexError):
      form = "a rate in [0, 1]", "whole numbers k and n, 0 ≤ k ≤ n and n ≥ 1"
      raise ValueError(
        f"{path}: line {number} must hold {form[len(columns) - 1]}, got"
        f" {line!r}"
      ) from None
  if not rows:
    raise ValueError(f"{path} must have a line for each prompt, it has none")
  table = np.array(rows)
  if table.shape[1] == 1:
    p, prompts = np.unique(table[:, 0], return_counts=True)
    return Difficulty(file.name, p, prompts)
  pairs, prompts = np.unique(table.astype(int), axis=0, return_counts=True)
  k, n = pairs.T
  p, place = np.unique(k / n, return_inverse=True)
  together = np.bincount(place, prompts).astype(int)
  return Difficulty(file.name, p, together, (k, n, prompts))


def _columns(cells: list[str], path: str) -> tuple[list[int], bool]:
  """Which columns to read, and whether these cells are their names."""
  names = [cell.lower() for cell in cells]
  for wanted in ["k", "n"], ["rate"]:
    if set(wanted) <= set(names):
      return [names.index(name) for name in wanted], True
  try:
    float(cells[0])
  except ValueError:
    raise ValueError(
      f"{path}: columns must be named k and n, or rate, got"
      f" {', '.join(cells)!r}"
    ) from None
  if len(cells) > 2:
    raise ValueError(
      f"{path}: columns without names must be one, of rates, or two, k and n;"
      f" there are {len(cells)}"
    )
  return list(range(len(cells))), False


def _row(cells: list[str]) -> list[float]:
  """[rate] or [k, n], or a ValueError."""
  row = [float(cell) for cell in cells]
  whole = len(row) == 1 or (row[0] % 1 == row[1] % 1 == 0 and row[1] >= 1)
  if not (whole and 0 <= row[0] <= (1 if len(row) == 1 else row[1])):
    raise ValueError
  return row


# -----------------------------------------------------------------------------
# What training will do
# -----------------------------------------------------------------------------


def explain(method: Method, difficulty: Difficulty) -> dict[str, Any]:
  """All that the card shows, by name; NaN where something is undefined.

  Where three methods are compared they are "op", this one, redrawing included,
  and "grpo" and "dr_grpo" at the same group size, without it.

  Raises:
    ValueError: if the operation weighs a group with no finite number, or a
      size is none.
  """
  size, draws = method.group_size, method.max_draws
  if size < 2:
    raise ValueError(
      f"the group size must be at least 2, got {size}: one reward has no"
      " standard deviation"
    )
  found, nodes = _evaluate(method, difficulty)
  broken = ~np.isfinite(found["gain"]["op"])
  if broken.any():
    raise ValueError(
      f"{method.name} must weigh every group with a finite number, it does not"
      f" at k = {np.flatnonzero(broken).tolist()} of {size} right"
    )
  # Through as many values as make them exact.
  curves = {
    name: np.polynomial.Chebyshev.interpolate(
      lambda _, values=values: values, len(nodes) - 1, domain=[0, 1]
    )
    for name, values in found["weight"].items()
  }
  first = curves.pop("first_draw")
  p, prompts = difficulty.p, difficulty.prompts / difficulty.prompts.sum()
  # A boundary is in the upper bin, also where it was rounded down, as 0.3 is.
  bins = np.digitize(p, EDGES[1:-1] - 1e-12)

  def by_bin(values):
    return np.bincount(bins, prompts * values, 10)

  silent, expected_draws = found["silent"], found["draws"]
  mine = silent[_sizes(size) == size][0]
  share = by_bin(1.0)
  updates = {name: p * (1 - p) * curve(p) for name, curve in curves.items()}
  moments = np.arange(1, size) * np.arange(size - 1, 0, -1) / size**2
  by_size = _objective_weights(method.op, CENTRES, LARGEST)
  with np.errstate(divide="ignore", invalid="ignore"):
    reached = by_size / found["centre_limit"][:, None]
    draw = {name: c(GRID) for name, c in curves.items()} | {"op": first(GRID)}
    fidelity = {
      # Where c vanishes it is rounding, over another.
      name: np.where(
        abs(c) > 1e-9 * abs(c).max(), c / found["limit"][name], np.nan
      )
      for name, c in draw.items()
    }
    total = prompts @ found["limit_update"]
    ends = curves["op"](np.array([0.0, 1.0]))
    card = {
      "method": method._replace(op=None)._asdict(),
      "difficulty": {
        "source": difficulty.source,
        "prompts": difficulty.prompts.sum(),
        "mean": prompts @ p,
        "never": prompts @ (p == 0),
        "always": prompts @ (p == 1),
      },
      "summary": {
        "silent": prompts @ mine,
        "left_silent": prompts @ mine**draws,
        "rollouts_per_rollout_used": prompts @ expected_draws,
        "fidelity": prompts @ (p * (1 - p) * first(p)) / total,
        "extreme_over_middle": ends / curves["op"](0.5),
      },
      # By k = 1, …, G − 1 right.
      "weight": {
        name: gain[1:-1] / moments + 0.0 for name, gain in found["gain"].items()
      },
      "drops_silent": not found["keep"][[0, -1]].any(),
      "p": GRID,
      "objective_weight": {name: c(GRID) for name, c in curves.items()},
      "objective": {name: c.integ(lbnd=0)(GRID) for name, c in curves.items()},
      "fidelity": fidelity,
      "large_group_weight": found["limit"]["op"],
      "silent": {"group_size": _sizes(size), "share": silent @ prompts},
      "by_difficulty": {
        "edges": EDGES,
        "centres": CENTRES,
        "prompts": share,
        "silent": by_bin(mine) / share,
        "draws": by_bin(expected_draws) / share,
        "mass": {
          name: by_bin(update) / (prompts @ update)
          for name, update in updates.items()
        },
        "objective_weight": curves["op"](CENTRES),
        "fidelity": first(CENTRES) / found["centre_limit"],
        "group_size": {str(f): _first_size(reached, f) for f in FIDELITIES},
      },
    }
    if method.max_rounds > 1:
      left = card["summary"]["silent"]
      card["summary"]["left_silent"] = left**method.max_rounds
      card["summary"]["rollouts_per_rollout_used"] = 1 / (1 - left)
  card["summary"]["silent_unbiased"] = _unbiased(difficulty, size)
  card["plan"] = _plan(method, difficulty)
  return card


def _evaluate(
  method: Method, difficulty: Difficulty
) -> tuple[dict[str, Any], np.ndarray]:
  """What `groupstd.theory` says, and at which p it weighed the objectives.

  One program, since one that compiles operation by operation takes seconds.
  """
  import jax

  from groupstd import sigma, theory

  size, draws = method.group_size, method.max_draws
  ops = {"op": method.op, "grpo": sigma.grpo(), "dr_grpo": sigma.dr_grpo()}
  # An objective's weight is a polynomial in p of degree size·draws − 2; from
  # the second bound on, more Chebyshev points change it by rounding only.
  degree = min(size * draws - 2, int(16 * np.sqrt(size * draws)))
  nodes = (np.polynomial.chebyshev.chebpts1(degree + 1) + 1) / 2

  @jax.jit
  def evaluate(p, nodes, grid, centres):
    weight = {
      name: theory.objective_weight(sigma.rule(op), nodes, size)
      for name, op in ops.items()
    }
    weight["first_draw"] = weight["op"]
    weight["op"] *= theory.expected_draws(nodes, size, draws)
    return {
      "gain": {name: theory.gain(op, size) for name, op in ops.items()},
      "keep": theory.advantages(sigma.rule(method.op), size)[2],
      "weight": weight,
      "limit": {n: theory.difficulty_weight(ops[n], grid) for n in ops},
      "centre_limit": theory.difficulty_weight(method.op, centres),
      "limit_update": theory.limit_update(method.op, p),
      "silent": [theory.silent_rate(p, int(g)) for g in _sizes(size)],
      "draws": theory.expected_draws(p, size, draws),
    }

  with jax.enable_x64(True):
    found = jax.device_get(evaluate(difficulty.p, nodes, GRID, CENTRES))
  found["silent"] = np.array(found["silent"])
  return found, nodes


def _sizes(group_size: int) -> np.ndarray:
  return np.unique(np.append(_SIZES, group_size))


def _objective_weights(op: Any, p: np.ndarray, largest: int) -> np.ndarray:
  """c_g(p) for g = 2, …, largest: [P, largest − 1], by the dictionary.

  As `theory.objective_weight` at each g, which would compile for many.
  """
  import jax
  from scipy import stats

  from groupstd import sigma

  g, k = np.tril_indices(largest + 1, -1)
  g, k = g[(g > 1) & (k > 0)], k[(g > 1) & (k > 0)]  # k = 1, …, g − 1 of each

  @jax.jit
  def weigh(mean, size):
    std = jax.numpy.sqrt(mean * (1 - mean))
    weight = op(sigma.GroupStats(mean, std, size, mean < 0))
    return jax.numpy.where(weight.keep, weight.scale, 0) + 0 * mean

  with jax.enable_x64(True):
    weights = np.asarray(weigh(k / g, g.astype(float)))
  starts = np.flatnonzero(k == 1)
  return np.array(
    [
      np.add.reduceat(
        (g - 1) / g * weights * stats.binom.pmf(k - 1, g - 2, one), starts
      )
      for one in p
    ]
  )


def _first_size(reached: np.ndarray, fidelity: float) -> np.ndarray:
  """[P] smallest size of at least that fidelity; NaN if it is above LARGEST.

  Less by 1e-9 is reached, as in `theory.required_group_size`.
  """
  enough = reached >= fidelity - 1e-9
  return np.where(enough.any(1), 2.0 + enough.argmax(1), np.nan)


def _unbiased(difficulty: Difficulty, size: int) -> dict[str, float] | None:
  """The silent share of groups drawn from the log itself, if it is as long."""
  from groupstd import estimates

  if difficulty.counts is None or difficulty.prompts.sum() < 2:
    return None
  k, n, prompts = difficulty.counts
  if n.min() < size:
    return None
  rates = estimates.silent_rate(k, n, size)
  return estimates.mean_and_error(rates, prompts)._asdict()


def _plan(method: Method, difficulty: Difficulty) -> dict[str, Any] | None:
  """The same rollouts, given where the expected update grows most.

  For `PLANNED` prompts, one for each such part of all in order of difficulty.
  None where the plan would have no room above G, or the operation has no
  weight at other sizes.
  """
  from groupstd import planning

  size = method.group_size
  largest = min(8 * size, LARGEST)
  if largest < 4 * size:
    return None
  order = np.cumsum(difficulty.prompts) / difficulty.prompts.sum()
  ranks = (np.arange(PLANNED) + 0.5) / PLANNED
  distinct, place = np.unique(
    difficulty.p[np.searchsorted(order, ranks)], return_inverse=True
  )
  weights = _objective_weights(method.op, distinct, largest)
  value = (distinct * (1 - distinct))[:, None] * weights
  # Rounded, since the plan would follow even a gain that is rounding.
  value = np.pad(value, ((0, 0), (2, 0)))[place].round(10)
  defined = np.isfinite(value.sum(axis=0))
  if defined[2:].sum() < 2:
    return None
  value[:, ~defined] = 0  # As pass_at's, at no more than m rollouts.
  plan = planning.allocate(value, PLANNED * size)
  uniform = value[:, size].sum()
  bins = np.digitize(distinct[place], EDGES[1:-1] - 1e-12)
  with np.errstate(divide="ignore", invalid="ignore"):
    return {
      "p": distinct[place],
      "group_size": plan.sizes,
      "by_difficulty": np.bincount(bins, plan.sizes, 10)
      / np.bincount(bins, minlength=10),
      "largest": largest,
      "gain": plan.total / uniform - 1,
      "gain_at_most": plan.bound / uniform - 1,
    }
