"""Methods against each other: the same warm starts, seeds and evaluations.

  python -m experiments.study --config=configs/arithmetic.py \
      --methods=grpo,dr_grpo,dapo --seeds=0,1 --workdir=runs/study

trains every method from the warm start of every seed, each in a folder of its
own, and draws held-out accuracy by step and by rollouts drawn: study.png and
.pdf; study.json has the table. `--config.num_steps=100` and the like are of all
runs. Started again, it goes on from where it was left.

Hardware and time: those of the config, times methods times seeds.
"""

from collections.abc import Iterator
import itertools
import json
import pathlib
import runpy
from typing import Any

from absl import flags
import ml_collections
from ml_collections.config_flags import config_flags

from experiments import cli

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "The config file; its argument is each method's."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where the runs' folders and the results go."
)
_METHODS = flags.DEFINE_list(
  "methods", ["grpo", "dr_grpo", "dapo"], "Arguments of the config file."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1"], "Seeds of the runs.")

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")


def main(argv):
  del argv
  folder = pathlib.Path(cli.require(_WORKDIR))
  from experiments import train  # After the flags: jax takes a second.

  with cli.building():
    runs = _runs(folder)
  rows = {}
  for (method, seed), config in runs.items():
    path, stopped = folder / f"{method}_{seed}", None
    try:
      train.warm_up(config, config.init)
      train.run(config, path, f"{method}, seed {seed}")
    except cli.Stopped as reason:  # Of one run, and the others go on.
      stopped = str(reason)
    rows[method, seed] = _row(path) | {"stopped": stopped}
  (folder / "study.json").write_text(
    json.dumps([{"method": m, "seed": s, **r} for (m, s), r in rows.items()])
    + "\n"
  )
  _draw(rows, folder)
  _print(rows)
  print(f"Figure: {folder / 'study.png'}; data: {folder / 'study.json'}")


def _runs(
  folder: pathlib.Path,
) -> dict[tuple[str, int], ml_collections.ConfigDict]:
  """(method, seed) → its config, with what the command overrides."""
  flag = flags.FLAGS["config"]
  path = config_flags.get_config_filename(flag).partition(":")[0]
  get_config = runpy.run_path(path)["get_config"]
  overrides = config_flags.get_override_values(flag)
  runs = {}
  for method in _METHODS.value:
    for seed in _SEEDS.value:
      if not seed.isdecimal():
        raise ValueError(f"--seeds must be whole numbers, got {seed!r}")
      config = get_config(method)
      config.update_from_flattened_dict(overrides)
      if config.builder != "language":
        raise ValueError(
          f"--config must be of a language model, {path} is of the builder"
          f" {config.builder!r}"
        )
      config.seed = int(seed)
      # Every method of a seed starts from the same parameters.
      config.init = str(folder / f"warmup_{seed}")
      runs[method, int(seed)] = config
  return runs


def _row(path: pathlib.Path) -> dict[str, Any]:
  """A run's curve and what it came to, as far as it came."""
  from experiments import workdir

  lines = workdir.read_metrics(path) if path.exists() else []
  drawn, curve = 0, []
  for line in lines:
    if "accuracy" in line:
      curve.append((line["step"], drawn, line["accuracy"]))
    drawn += line.get("drawn", 0)
  return {
    "start": curve[0][2] if curve else None,
    "end": curve[-1][2] if curve else None,
    "steps": max((line["step"] for line in lines), default=0),
    "drawn": drawn,
    "minutes": sum(_seconds(lines)) / 60,
    "silent": [x["silent_share"] for x in lines if "silent_share" in x],
    "curve": curve,
  }


def _seconds(lines: list[dict[str, Any]]) -> Iterator[float]:
  """How long each process that wrote some of the lines has run."""
  for line, after in itertools.pairwise([*lines, {"seconds": 0.0}]):
    if after["seconds"] < line["seconds"]:
      yield line["seconds"]


def _draw(rows: dict[tuple[str, int], Any], folder: pathlib.Path) -> None:
  """study.png and .pdf."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt
  from matplotlib.ticker import PercentFormatter

  figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
  by_step, by_rollouts, silent = axes
  methods = list(dict.fromkeys(method for method, _ in rows))
  seen = set()
  for (method, _), row in rows.items():
    if not row["curve"]:
      continue
    color = _COLORS[methods.index(method) % len(_COLORS)]
    style = {"color": color, "label": None if method in seen else method}
    seen.add(method)
    steps, drawn, accuracy = zip(*row["curve"], strict=True)
    by_step.plot(steps, accuracy, **style)
    by_rollouts.plot([x / 1000 for x in drawn], accuracy, **style)
    width = max(1, len(row["silent"]) // 20)
    means = [
      sum(row["silent"][i : i + width]) / width
      for i in range(0, len(row["silent"]) - width + 1, width)
    ]
    silent.plot([width * (i + 0.5) for i in range(len(means))], means, **style)
  by_step.set(
    title="a  Held-out accuracy by step",
    xlabel="step",
    ylabel="greedy accuracy",
  )
  by_rollouts.set(
    title="b  The same by rollouts", xlabel="thousand rollouts drawn"
  )
  silent.set(title="c  Silent groups among first draws", xlabel="step")
  for axis in axes:
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.spines[["top", "right"]].set_visible(False)
  by_step.legend(frameon=False)
  for suffix in "png", "pdf":
    figure.savefig(folder / f"study.{suffix}", dpi=150)
  plt.close(figure)


def _print(rows: dict[tuple[str, int], Any]) -> None:
  from rich.console import Console
  from rich.table import Table

  table = Table(title="Held-out greedy accuracy")
  for name in "method", "seed", "warm start", "end", "steps", "rollouts", "min":
    table.add_column(name, justify="left" if name == "method" else "right")
  for (method, seed), row in rows.items():
    shares = (row["start"], row["end"])
    table.add_row(
      method,
      str(seed),
      *("-" if share is None else f"{share:.1%}" for share in shares),
      f"{row['steps']}{', stopped' if row['stopped'] else ''}",
      f"{row['drawn']:,}",
      f"{row['minutes']:.1f}",
    )
  Console().print(table)
  for (method, seed), row in rows.items():
    if row["stopped"]:
      print(f"{method}, seed {seed}, stopped itself: {row['stopped']}")


if __name__ == "__main__":
  cli.run(main)
