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

from experiments import cli, controlled

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "The arms' config file; its argument is each arm's."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where the arms' folders and the results go."
)

# Fields that may differ from the paper's without making it another experiment.
_FREE = (
  "num_prompts",
  "num_groups",
  "seed",
  "multiset",
  "num_devices",
  "checkpoint_every",
)


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
    train.run(config, folder / name, description=controlled.ARMS[name])
  arms = [
    controlled.measure(name, config, folder) for name, config in configs.items()
  ]
  rows = _rows(arms)
  _write(arms, rows, folder)
  controlled.draw(arms, folder)
  _print(rows, faithful)
  print(f"Figure: {folder / 'dynamics.png'}; data: {folder / 'dynamics.json'}")
  if faithful and not all(row.holds for row in rows):
    sys.exit(1)


# -----------------------------------------------------------------------------
# The protocol, and what must come of it
# -----------------------------------------------------------------------------


def _configs() -> tuple[dict[str, ml_collections.ConfigDict], bool]:
  """Each arm's config, overrides applied, and whether it is the paper's."""
  flag = flags.FLAGS["config"]
  overrides = config_flags.get_override_values(flag)
  path = config_flags.get_config_filename(flag)
  get_config = runpy.run_path(path)["get_config"]
  configs, faithful = {}, True
  for name in controlled.ARMS:
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
    if (
      given["num_groups"] != given["num_prompts"]
      or given["plan"]
      or given["max_rounds"] > 1
      or given["observe_every"] > 1
    ):
      raise cli.UsageError(
        f"arm {name} must ask every prompt in every step, observe every step,"
        " make no plan and replace no group: what is predicted here is of that"
      )
  return configs, faithful


def _rows(arms: list[controlled.Arm]) -> list[Row]:
  """Every quantity that arXiv:2607.00152 reports of this run."""
  grpo, dr_grpo, dapo = arms
  rows = []
  for arm, paper, low in (
    (grpo, "0.999", 0.999),
    (dr_grpo, "–", 0.998),
    (dapo, "–", 0.999),
  ):
    name = f"R² of silent share, {controlled.ARMS[arm.name]}"
    rows.append(Row(name, paper, *arm.r2(), low, 1.0))
  for arm, paper, low, high in (
    (grpo, "0.99", 0.985, 0.995),
    (dr_grpo, "0.88", 0.88, 0.91),
    (dapo, "fastest", 0.995, 1.0),
  ):
    name = f"hardest quarter's p at the end, {controlled.ARMS[arm.name]}"
    measured, predicted = arm.quarter[-1], arm.predicted_quarter[-1]
    rows.append(Row(name, paper, measured, predicted, low, high))
  name = f"rollouts drawn per rollout used, {controlled.ARMS[dapo.name]}"
  rows.append(Row(name, "3.5", *dapo.oversampling(), 3.4, 3.6))
  for arm, paper in (grpo, "17.0"), (dr_grpo, "14.3"), (dapo, "–"):
    measured, _, predicted = (100 * x for x in arm.extreme_mass())
    name = f"% of mass at p < 0.1 or > 0.9, {controlled.ARMS[arm.name]}"
    bounds = predicted - 0.3, predicted + 0.3
    rows.append(Row(name, paper, measured, predicted, *bounds))
  return rows


# -----------------------------------------------------------------------------
# Shown
# -----------------------------------------------------------------------------


def _write(
  arms: list[controlled.Arm], rows: list[Row], folder: pathlib.Path
) -> None:
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
