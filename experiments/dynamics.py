"""The controlled run of arXiv:2607.00152, three arms held against prediction.

  python -m experiments.dynamics --workdir=runs/dynamics

draws 6,000 prompts from Big-Math's solve rates and trains their scalar policies
by GRPO, Dr. GRPO and DAPO (which redraws silent groups), each through the one
learner, in a folder of its own. It writes dynamics.png, .pdf and .json, prints
how paper, measurement and prediction agree, and exits with 1 if they do not.
`--config.num_prompts=215608` runs as many prompts as Big-Math has. Started
again, it goes on from where it was left.

Hardware: two CPU cores. Time: 10 s.
"""

import json
import pathlib
import runpy
import sys
from typing import NamedTuple

from absl import flags
import ml_collections
from ml_collections.config_flags import config_flags
import numpy as np

from experiments import cli

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "The arms' config file; its argument is each arm's."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where the arms' folders and the results go."
)

_ARMS = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO", "dapo": "DAPO (redraw)"}
_COLORS = {"grpo": "#1f6fb4", "dr_grpo": "#d9822b", "dapo": "#3a8f4d"}
# Fields that may differ from the paper's without making it another experiment.
_FREE = (
  "num_prompts",
  "num_groups",
  "seed",
  "multiset",
  "num_devices",
  "checkpoint_every",
)
# Groups drawn of every prompt to measure the mass of the first update.
_MASS_DRAWS = 64
_BINS = np.linspace(0, 1, 11)


class Arm(NamedTuple):
  """What one arm measured, and what theory says of it.

  Attributes:
    name: the method's.
    steps: by name, [S + 1] of what metrics.jsonl holds, NaN where nothing.
    mass: [10] share of the first update by bin of p, measured.
    mass_error: [10] its standard error.
    predicted_mass: [10] of the same population.
    predicted_quarter: [S + 1] the hardest quarter's expected mean p.
  """

  name: str
  steps: dict[str, np.ndarray]
  mass: np.ndarray
  mass_error: np.ndarray
  predicted_mass: np.ndarray
  predicted_quarter: np.ndarray

  @property
  def silent(self) -> np.ndarray:
    """[S] measured share of first draws that are silent."""
    return (self.steps["first_silent"] / self.steps["first_draws"])[:-1]

  @property
  def predicted_silent(self) -> np.ndarray:
    """[S] E[p^G + (1 − p)^G] over the prompts as they are at that step."""
    return self.steps["predicted_silent"][:-1]

  @property
  def quarter(self) -> np.ndarray:
    """[S + 1] mean p of the prompts that were hardest at the start."""
    return self.steps["hardest_quarter_p"]

  @property
  def drawn(self) -> np.ndarray:
    """[S + 1] rollouts drawn so far."""
    return np.append(0, np.cumsum(self.steps["drawn"][:-1]))

  def r2(self) -> tuple[float, float]:
    """R² of the silent share against its prediction, and its noise ceiling."""
    measured = self.silent
    spread = np.sum((measured - measured.mean()) ** 2)
    residual = np.sum((measured - self.predicted_silent) ** 2)
    noise = np.sum(self.steps["predicted_silent_variance"][:-1])
    return 1 - residual / spread, 1 - noise / spread

  def oversampling(self) -> tuple[float, float]:
    """Groups drawn per prompt and step, measured and predicted."""
    in_batch = self.steps["drawn"][:-1] - self.steps["dropped"][:-1]
    drawn = self.steps["drawn"][:-1].sum() / in_batch.sum()
    return drawn, self.steps["predicted_draws"][:-1].mean()

  def extreme_mass(self) -> tuple[float, float, float]:
    """Share of the outer two bins: measured, its error, predicted."""
    outer = [0, -1]
    error = float(np.hypot(*self.mass_error[outer]))
    return self.mass[outer].sum(), error, self.predicted_mass[outer].sum()


class Row(NamedTuple):
  """A line of the table: the measured value must lie within the bounds."""

  quantity: str
  paper: str
  measured: float
  predicted: float
  low: float
  high: float

  @property
  def holds(self) -> bool:
    return self.low <= self.measured <= self.high


def main(argv):
  del argv
  folder = pathlib.Path(cli.require(_WORKDIR))
  from experiments import train  # After the flags: jax takes a second.

  configs, faithful = _configs()
  for name, config in configs.items():
    train.run(config, folder / name, description=_ARMS[name])
  arms = [_arm(name, config, folder) for name, config in configs.items()]
  rows = _rows(arms)
  _write(arms, rows, folder)
  _draw(arms, folder)
  _print(rows, faithful)
  print(f"Figure: {folder / 'dynamics.png'}; data: {folder / 'dynamics.json'}")
  if faithful and not all(row.holds for row in rows):
    sys.exit(1)


# -----------------------------------------------------------------------------
# Measured and predicted
# -----------------------------------------------------------------------------


def _configs() -> tuple[dict[str, ml_collections.ConfigDict], bool]:
  """Each arm's config, overrides applied, and whether it is the paper's."""
  flag = flags.FLAGS["config"]
  overrides = config_flags.get_override_values(flag)
  path = config_flags.get_config_filename(flag)
  get_config = runpy.run_path(path)["get_config"]
  configs, faithful = {}, True
  for name in _ARMS:
    config = get_config(name)
    try:
      config.update_from_flattened_dict(overrides)
    except (AttributeError, KeyError) as error:
      raise cli.UsageError(f"arm {name} has no such field: {error}") from error
    configs[name] = config
    given, default = config.to_dict(), get_config(name).to_dict()
    faithful &= all(given[k] == default[k] for k in given if k not in _FREE)
    # Below the paper's number of prompts, noise is larger than the bounds.
    faithful &= given["num_prompts"] >= default["num_prompts"]
  return configs, faithful


def _arm(
  name: str, config: ml_collections.ConfigDict, folder: pathlib.Path
) -> Arm:
  from experiments import train, workdir
  from groupstd import theory

  lines = workdir.read_metrics(folder / name)
  steps = {
    key: np.array([line.get(key, np.nan) for line in lines], float)
    for key in lines[0]
  }
  op = train.build_op(config)
  p, counts = np.unique(train.population(config), return_counts=True)
  # np.digitize puts a boundary into the upper bin; 1 belongs to the last.
  bins = np.arange(10)[:, None] == np.digitize(p, _BINS[1:-1])
  expected = theory.expected_update(op, p, config.group_size, config.max_draws)
  mass, error = _measure_mass(config)
  return Arm(
    name,
    steps,
    mass,
    error,
    np.asarray(theory.mass_share(expected, counts, bins)),
    _markov_chain(config, op, p, counts),
  )


def _measure_mass(
  config: ml_collections.ConfigDict,
) -> tuple[np.ndarray, np.ndarray]:
  """Share of the training step's own first update by bin, and its error."""
  import jax
  import jax.numpy as jnp

  from experiments import train

  experiment = train.build(config)
  start = np.asarray(experiment.state.params, np.float64)
  bins = np.digitize(train.population(config), _BINS[1:-1])
  sums = []
  for draw in range(_MASS_DRAWS):
    state = jax.tree.map(jnp.copy, experiment.state)
    state, _ = experiment.step(state._replace(step=config.num_steps + draw))
    moved = np.asarray(state.params, np.float64) - start
    sums.append(np.bincount(bins, moved, minlength=10))
  sums = np.array(sums)  # [draws, 10]
  total = sums.sum()
  share = sums.sum(0) / total
  # The share is a ratio: its error is that of the numerator less share times
  # the denominator.
  residual = sums - share * sums.sum(1, keepdims=True)
  return share, np.sqrt(np.sum(residual**2, 0)) / total


def _markov_chain(
  config: ml_collections.ConfigDict, op, p: np.ndarray, counts: np.ndarray
) -> np.ndarray:
  """[S + 1]: the expected mean p of the hardest quarter, exactly.

  A prompt's θ is a Markov chain: it moves by rate·gain(k), k of the last group
  drawn. Its distribution is carried along on a grid, where a point between two
  nodes is shared so that its mean is kept.
  """
  from groupstd import theory

  grid, spacing = np.linspace(-6, 20, 2601, retstep=True)
  grid_p = 1 / (1 + np.exp(-grid))
  size, draws = config.group_size, config.max_draws
  # Until a group speaks: each mixed k is as much likelier as groups are drawn.
  chance = theory.binomial(grid_p, size)[:, 1:-1]
  chance = chance * theory.expected_draws(grid_p, size, draws)[:, None]
  chance = np.c_[chance, 1 - chance.sum(1)]
  rate = config.optimizer.sgd.learning_rate
  moves = rate * np.append(theory.gain(op, size)[1:-1], 0)

  def place(points, mass):
    at = np.clip((points - grid[0]) / spacing, 0, len(grid) - 1.001)
    left = at.astype(int)
    above = (at - left) * mass
    return np.bincount(left, mass - above, len(grid)) + np.bincount(
      left + 1, above, len(grid)
    )

  # p ascends, so the hardest quarter is the first of the counts.
  quarter = -(-config.num_prompts // 4)
  weights = np.diff(np.minimum(np.append(0, np.cumsum(counts)), quarter))
  density = place(np.log(p) - np.log1p(-p), weights / quarter)
  landing = grid[:, None] + moves
  path = [density @ grid_p]
  for _ in range(config.num_steps):
    density = place(landing.ravel(), (density[:, None] * chance).ravel())
    path.append(density @ grid_p)
  return np.array(path)


def _rows(arms: list[Arm]) -> list[Row]:
  """Every quantity that arXiv:2607.00152 reports of this run."""
  grpo, dr_grpo, dapo = arms
  rows = []
  for arm, paper, low in (
    (grpo, "0.999", 0.999),
    (dr_grpo, "–", 0.998),
    (dapo, "–", 0.999),
  ):
    name = f"R² of silent share, {_ARMS[arm.name]}"
    rows.append(Row(name, paper, *arm.r2(), low, 1.0))
  for arm, paper, low, high in (
    (grpo, "0.99", 0.985, 0.995),
    (dr_grpo, "0.88", 0.88, 0.91),
    (dapo, "fastest", 0.995, 1.0),
  ):
    name = f"hardest quarter's p at the end, {_ARMS[arm.name]}"
    measured, predicted = arm.quarter[-1], arm.predicted_quarter[-1]
    rows.append(Row(name, paper, measured, predicted, low, high))
  name = f"rollouts drawn per rollout used, {_ARMS[dapo.name]}"
  rows.append(Row(name, "3.5", *dapo.oversampling(), 3.4, 3.6))
  for arm, paper in (grpo, "17.0"), (dr_grpo, "14.3"), (dapo, "–"):
    measured, _, predicted = (100 * x for x in arm.extreme_mass())
    name = f"% of mass at p < 0.1 or > 0.9, {_ARMS[arm.name]}"
    bounds = predicted - 0.3, predicted + 0.3
    rows.append(Row(name, paper, measured, predicted, *bounds))
  return rows


# -----------------------------------------------------------------------------
# Shown
# -----------------------------------------------------------------------------


def _write(arms: list[Arm], rows: list[Row], folder: pathlib.Path) -> None:
  """dynamics.json: all that the table and the figure show."""
  content = {
    "table": [{**row._asdict(), "holds": row.holds} for row in rows],
    "arms": {
      arm.name: {
        "silent": arm.silent,
        "predicted_silent": arm.predicted_silent,
        "quarter": arm.quarter,
        "predicted_quarter": arm.predicted_quarter,
        "drawn": arm.drawn,
        "mass": arm.mass,
        "mass_error": arm.mass_error,
        "predicted_mass": arm.predicted_mass,
      }
      for arm in arms
    },
  }
  text = json.dumps(content, indent=1, default=lambda x: x.tolist())
  (folder / "dynamics.json").write_text(text + "\n")


def _draw(arms: list[Arm], folder: pathlib.Path) -> None:
  """dynamics.png and .pdf: four panels, measured against predicted."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
  silent, mass, by_step, by_rollouts = axes.flat
  for i, arm in enumerate(arms):
    color, label = _COLORS[arm.name], _ARMS[arm.name]
    silent.plot(arm.silent, ".", ms=4, color=color, alpha=0.6, label=label)
    silent.plot(arm.predicted_silent, color=color, lw=1)
    x = np.arange(10) + 0.27 * (i - 1)
    mass.bar(x, arm.mass, 0.25, color=color, alpha=0.75, label=label)
    mass.errorbar(
      x, arm.predicted_mass, xerr=0.12, fmt="none", ecolor="black", elinewidth=1
    )
    per_prompt = arm.drawn / arm.steps["first_draws"][0]
    for axis, spent in (
      (by_step, np.arange(len(arm.quarter))),
      (
        by_rollouts,
        per_prompt,
      ),
    ):
      axis.plot(spent, arm.quarter, color=color, label=label)
      axis.plot(spent, arm.predicted_quarter, ":", color="black", lw=1)
  silent.set(
    title="a  Silent groups among first draws",
    xlabel="step",
    ylabel="share (points: measured; lines: predicted)",
  )
  mass.set(
    title="b  Where the first update's mass lies",
    xlabel="success probability p at the start",
    ylabel="share of mass (bars: measured; ticks: predicted)",
    xticks=np.arange(11) - 0.5,
    xticklabels=[f"{edge:.1f}" for edge in _BINS],
  )
  by_step.set(
    title="c  The initially hardest quarter, by step",
    xlabel="step",
    ylabel="mean p (dotted: predicted)",
  )
  by_rollouts.set(
    title="d  The same by rollouts: what redrawing costs",
    xlabel="rollouts drawn per prompt",
    ylabel="mean p",
  )
  for axis in axes.flat:
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
  for suffix in "png", "pdf":
    figure.savefig(folder / f"dynamics.{suffix}", dpi=150)
  plt.close(figure)


def _print(rows: list[Row], faithful: bool) -> None:
  """The table; with another protocol than the paper's there is no verdict."""
  from rich.console import Console
  from rich.table import Table

  table = Table(title="The controlled run of arXiv:2607.00152")
  table.add_column("quantity")
  for name in "paper", "measured", "predicted":
    table.add_column(name, justify="right")
  table.add_column("must lie in")
  table.add_column("verdict")
  for row in rows:
    digits = 4 if row.quantity.startswith("R²") else 3
    digits = 1 if row.quantity.startswith("%") else digits
    verdict = "[green]agrees[/]" if row.holds else "[red]differs[/]"
    table.add_row(
      row.quantity,
      row.paper if faithful else "–",
      f"{row.measured:.{digits}f}",
      f"{row.predicted:.{digits}f}",
      f"{row.low:.4g} – {row.high:.4g}" if faithful else "–",
      verdict if faithful else "–",
    )
  console = Console()
  console = console if console.is_terminal else Console(width=120)
  console.print(table)
  if not faithful:
    console.print(
      "Another protocol than the paper's, or fewer prompts: no verdict."
    )


if __name__ == "__main__":
  root = pathlib.Path(__file__).parents[1]
  cli.run(main, config=str(root / "configs" / "bernoulli.py"))
