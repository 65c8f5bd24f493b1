"""Rollouts planned from one half of a log and scored on the other.

  python -m experiments.planned --out=runs/planned

draws 64 rollouts for each of 4,000 prompts whose p are Big-Math's solve rates,
plans eight rollouts a prompt from the first half of them, and scores the plans
on the second half and on the true p. `--logs=FILE` adds a log of training: JSON
of {prompt: [share right at each visit, ...]}, with --samples rollouts a visit;
planned from every other visit, and from the earlier half for the later.

Four objectives: GRPO's expected update, the chance of a mixed group, the least
variance (of RLOO), the highest fidelity that all can have (of GRPO). Beside
eight each stand the plan from unbiased estimates (for fidelity from k/n, as it
has none), that from a fitted difficulty, and the oracle's, which knows what it
is scored by: on a half log also its noise, so more than any plan can reach.
Writes planned.json and planned.png, and prints the table.

Hardware: two CPU cores. Time: 30 s.
"""

from collections.abc import Callable
import json
import pathlib
from typing import TYPE_CHECKING, NamedTuple

from absl import flags
import numpy as np

from experiments import cli

if TYPE_CHECKING:
  from groupstd import estimates

_LOGS = flags.DEFINE_string("logs", None, "A training log, as JSON.")
_OUT = flags.DEFINE_string("out", "runs/planned", "Where the results go.")
_SAMPLES = flags.DEFINE_integer(
  "samples", 8, "Rollouts a visit of the log.", lower_bound=1
)

_PROMPTS = 4000
_LOGGED = 64
_MEAN_SIZE = 8
_SIZES = np.arange(33)  # A plan's sizes; no half log is shorter.
_SEED = 0

_PLANS = {
  "planned": "unbiased estimates",
  "fitted": "fitted difficulty",
  "oracle": "oracle",
}
_COLORS = {"planned": "#1f6fb4", "fitted": "#3a8f4d", "oracle": "#888888"}


class Half(NamedTuple):
  """Half a log: k [P] right of n [P]."""

  k: np.ndarray
  n: np.ndarray


class Case(NamedTuple):
  """A log to plan from, and what plans are scored by.

  Attributes:
    name: as shown.
    past: what is planned from.
    future: what is scored by: half a log, or the true p [P].
  """

  name: str
  past: Half
  future: Half | np.ndarray


class View(NamedTuple):
  """What is known of the prompts.

  Attributes:
    expect: means over their groups, as `planning.tabulate` takes them.
    p: [P], their success probabilities.
  """

  expect: Callable[[np.ndarray, int], np.ndarray]
  p: np.ndarray


class Objective(NamedTuple):
  """What is planned for.

  Attributes:
    name: as shown.
    value: what is known → [P, M + 1], what sizes are worth.
    minimum: rollouts that every prompt gets.
    equal: whether the least value counts, and not the sum.
  """

  name: str
  value: Callable[[View], np.ndarray]
  minimum: int
  equal: bool


class Row(NamedTuple):
  """One objective on one case.

  Attributes:
    objective, case: their names.
    uniform: the score of equal sizes.
    gain: by plan, its score less uniform's, as a share of that.
    error: by plan, the standard error of the gain over prompts.
    gap: by plan, how far its total may be from the best, as a share.
    sizes: by plan, [P].
    p: [P], what the sizes are drawn against: the true p or the future's k/n.
  """

  objective: str
  case: str
  uniform: float
  gain: dict[str, float]
  error: dict[str, float]
  gap: dict[str, float]
  sizes: dict[str, np.ndarray]
  p: np.ndarray


def main(argv):
  del argv
  logged = []
  if _LOGS.value is not None:
    with cli.building():
      logged = _read(pathlib.Path(_LOGS.value), _SAMPLES.value)
  cases = _draws() + logged
  folder = pathlib.Path(_OUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  from groupstd import estimates  # After the flags: jax takes a second.

  objectives = _objectives()
  rows, fits = [], {}
  with cli.progress(len(cases) * len(objectives), description="plans") as done:
    for case in cases:
      fits[case.name] = estimates.fit_difficulty(*case.past)
      views = _views(case, fits[case.name])
      for objective in objectives:
        rows.append(_row(case, objective, views))
        done(1)
  _write(rows, fits, folder)
  _draw(rows, folder)
  _print(rows, fits)
  print(f"Figure: {folder / 'planned.png'}; data: {folder / 'planned.json'}")


# -----------------------------------------------------------------------------
# Logs
# -----------------------------------------------------------------------------


def _draws() -> list[Case]:
  """Big-Math's prompts, asked again, p being what was logged of them."""
  from groupstd import data

  correct, problems = data.big_math()
  rng = np.random.default_rng(_SEED)
  p = rng.choice(correct / 64, size=_PROMPTS, p=problems / problems.sum())
  half = _LOGGED // 2
  n = np.full(_PROMPTS, half)
  past, future = (Half(rng.binomial(half, p), n) for _ in range(2))
  return [
    Case("Big-Math draws, other half", past, future),
    Case("Big-Math draws, true p", past, p),
  ]


def _read(path: pathlib.Path, samples: int) -> list[Case]:
  """The log's visits dealt out in turn, and cut in the middle."""
  try:
    content = json.loads(path.read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(f"--logs={path} cannot be read: {error}") from error
  if not (isinstance(content, dict) and len(content) > 1):
    raise ValueError(f"--logs={path} must hold {{prompt: [share right, ...]}}.")
  least = -(-_SIZES[-1] // samples)
  visits = []
  for prompt, shares in content.items():
    try:
      right = np.asarray(shares, float) * samples
    except (TypeError, ValueError):
      right = np.array(np.nan)
    k = np.round(right)
    known = right.ndim == 1 and np.all(np.abs(right - k) < 1e-6)
    if not (known and np.all((k >= 0) & (k <= samples))):
      raise ValueError(
        f"--logs={path}: prompt {prompt!r} must be a list of multiples of"
        f" 1/{samples} in [0, 1], shares of --samples={samples} rollouts."
      )
    if k.size < 2 * least:
      raise ValueError(
        f"--logs={path}: prompt {prompt!r} must have {2 * least} visits, got"
        f" {k.size}: half of them cannot tell of groups of {_SIZES[-1]}."
      )
    visits.append(k.astype(int))

  def halves(select: Callable[[np.ndarray, int], np.ndarray]) -> list[Half]:
    parts = [[select(k, i) for k in visits] for i in range(2)]
    return [
      Half(
        np.array([k.sum() for k in part]),
        np.array([samples * k.size for k in part]),
      )
      for part in parts
    ]

  return [
    Case("log, every other visit", *halves(lambda k, i: k[i::2])),
    Case(
      "log, later from earlier",
      *halves(lambda k, i: np.split(k, [k.size // 2])[i]),
    ),
  ]


# -----------------------------------------------------------------------------
# Plans and scores
# -----------------------------------------------------------------------------


def _objectives() -> list[Objective]:
  from groupstd import planning, sigma

  def mean_of(worth: planning.Worth) -> Callable[[View], np.ndarray]:
    return lambda view: planning.tabulate(worth, view.expect, _SIZES)

  def fidelity(view: View) -> np.ndarray:
    p, where = np.unique(view.p, return_inverse=True)
    return planning.fidelity_value(sigma.grpo(), p, _SIZES)[where]

  update = mean_of(planning.update(sigma.grpo()))
  variance = mean_of(planning.quiet(sigma.rloo()))
  return [
    Objective("expected update", update, minimum=0, equal=False),
    Objective("mixed groups", mean_of(planning.mixed), minimum=0, equal=False),
    Objective("least variance", variance, minimum=2, equal=False),
    Objective("equal fidelity", fidelity, minimum=2, equal=True),
  ]


def _views(case: Case, fit: "estimates.Difficulty") -> dict[str, View]:
  """What each plan knows; the oracle, what is scored by."""
  from groupstd import estimates, planning

  def of_log(half: Half) -> View:
    return View(
      lambda values, g: estimates.unbiased(values, *half, g), half.k / half.n
    )

  k, n = case.past
  future = case.future
  return {
    "planned": of_log(case.past),
    "fitted": View(
      lambda values, g: fit.expect(values, g, k, n),
      (fit.a + k) / (fit.a + fit.b + n),
    ),
    "oracle": of_log(future)
    if isinstance(future, Half)
    else View(planning.given(future), future),
  }


def _row(case: Case, objective: Objective, views: dict[str, View]) -> Row:
  from groupstd import planning

  known = {name: objective.value(view) for name, view in views.items()}
  truth, p = known["oracle"], views["oracle"].p
  solve = planning.equalise if objective.equal else planning.allocate
  plans = {
    name: solve(value, _MEAN_SIZE * len(p), minimum=objective.minimum)
    for name, value in known.items()
  }
  # A prompt without p(1 − p) has no fidelity to speak of.
  scored = (p > 0) & (p < 1) if objective.equal else np.ones(p.shape, bool)
  uniform = truth[scored, _MEAN_SIZE]
  gain, error = {}, {}
  for name, plan in plans.items():
    scores = np.take_along_axis(truth, plan.sizes[:, None], axis=1)[scored, 0]
    gain[name], error[name] = _gain(scores, uniform, objective.equal)
  return Row(
    objective.name,
    case.name,
    float(_low(uniform) if objective.equal else uniform.mean()),
    gain,
    error,
    {
      name: (plan.bound - plan.total) / abs(plan.bound)
      for name, plan in plans.items()
    },
    {name: plan.sizes for name, plan in plans.items()},
    p,
  )


def _low(values: np.ndarray) -> np.ndarray:
  """The tenth percentile: the least is a matter of one prompt's luck."""
  return np.quantile(values, 0.1, axis=-1)


def _gain(
  scores: np.ndarray, uniform: np.ndarray, equal: bool
) -> tuple[float, float]:
  """What is gained on equal sizes, as a share, and its error over prompts."""
  if equal:
    rng = np.random.default_rng(_SEED)
    draws = rng.integers(len(scores), size=(200, len(scores)))
    again = _low(scores[draws]) / _low(uniform[draws]) - 1
    return float(_low(scores) / _low(uniform) - 1), float(again.std(ddof=1))
  gain = (scores.sum() - uniform.sum()) / abs(uniform.sum())
  # A ratio's error is that of its numerator less ratio times denominator.
  residual = scores - uniform - gain * np.abs(uniform)
  return float(gain), float(
    residual.std(ddof=1) * np.sqrt(len(scores)) / abs(uniform.sum())
  )


# -----------------------------------------------------------------------------
# Shown
# -----------------------------------------------------------------------------


def _write(
  rows: list[Row],
  fits: dict[str, "estimates.Difficulty"],
  folder: pathlib.Path,
) -> None:
  """planned.json: all that the table and the figure show."""
  content = {
    "rows": [row._asdict() for row in rows],
    "fits": {
      name: {**fit._asdict(), "held_out": fit.held_out._asdict()}
      for name, fit in fits.items()
    },
  }
  text = json.dumps(content, default=lambda x: x.tolist())
  (folder / "planned.json").write_text(text + "\n")


def _draw(rows: list[Row], folder: pathlib.Path) -> None:
  """planned.png: above what plans gain, below the sizes that they give."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  names = list(dict.fromkeys(row.objective for row in rows))
  cases = list(dict.fromkeys(row.case for row in rows))
  figure, axes = plt.subplots(
    2, len(names), figsize=(15, 7), layout="constrained"
  )
  for name, above, below in zip(names, *axes, strict=True):
    of_name = [row for row in rows if row.objective == name]
    for i, (plan, label) in enumerate(_PLANS.items()):
      y = np.arange(len(cases)) + 0.2 * (i - 1)
      above.errorbar(
        [100 * row.gain[plan] for row in of_name],
        y,
        xerr=[100 * row.error[plan] for row in of_name],
        fmt="o",
        ms=4,
        color=_COLORS[plan],
        label=label,
      )
    above.axvline(0, color="black", lw=0.8)
    above.set(
      title=name, xlabel="gain on eight each, %", yticks=range(len(cases))
    )
    above.set_yticklabels(cases if above is axes[0, 0] else [])
    above.invert_yaxis()
    true = of_name[cases.index("Big-Math draws, true p")]
    for plan, label in _PLANS.items():
      p, where = np.unique(true.p, return_inverse=True)
      mean = np.bincount(where, true.sizes[plan]) / np.bincount(where)
      below.plot(p, mean, color=_COLORS[plan], label=label)
    below.axhline(_MEAN_SIZE, color="black", lw=0.8)
    below.set(xlabel="true p of Big-Math draws", ylabel="mean size given")
  axes[1, 2].legend(frameon=False, loc="lower center")
  for axis in axes.flat:
    axis.spines[["top", "right"]].set_visible(False)
  figure.savefig(folder / "planned.png", dpi=150)
  plt.close(figure)


def _print(rows: list[Row], fits: dict[str, "estimates.Difficulty"]) -> None:
  """The table, and what it rests on."""
  from rich.console import Console
  from rich.table import Table

  table = Table(
    title=f"Gain on {_MEAN_SIZE} rollouts each, of the same budget in all"
  )
  for name in "objective", "scored on":
    table.add_column(name)
  for name in f"{_MEAN_SIZE} each", *_PLANS.values():
    table.add_column(name, justify="right")
  for row in rows:
    table.add_row(
      row.objective,
      row.case,
      f"{row.uniform:.4f}",
      *(
        f"{100 * row.gain[plan]:+.1f} ± {100 * row.error[plan]:.1f} %"
        for plan in _PLANS
      ),
    )
  console = Console()
  console = console if console.is_terminal else Console(width=120)
  console.print(table)
  console.print(
    "Means over prompts; of fidelity, the tenth percentile of those whose p is"
    " not 0 or 1. No plan falls short of the best for what it was given by more"
    f" than {max(max(row.gap.values()) for row in rows):.1e} of it."
  )
  for name, fit in fits.items():
    value, error = fit.held_out
    console.print(
      f"{name}: fitted p ~ Beta({fit.a:.2f}, {fit.b:.2f}), which overstates"
      f" the silent share held out by {value:.4f} ± {error:.4f}."
    )


if __name__ == "__main__":
  cli.run(main)
