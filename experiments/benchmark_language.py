"""A language model's training loop against two loops written out by hand.

  python -m experiments.benchmark_language --size=S --runs=5

takes the same steps with the three programs of benchmark_programs.py, which
alternate step by step, and prints medians with their least and most, and the
load beside them. Host is what a step takes beside sampling, verification and
update. GFLOP/s are of the products that the step cannot do without, against a
large product alone.

All three learn the same: their rewards are printed. Seconds are of the clock,
CPU seconds of this process; where other work runs on the cores the latter and
the ratios, each of one step's neighbours, are what to read. Compile time and
peak memory are each program's in a process of its own. Sizes are `SIZES` of
experiments/benchmark_work.py. --profile adds what the threads of one step spend
their time on.
"""

import collections
import concurrent.futures
import functools
import glob
import json
import multiprocessing
import os
import pathlib
import re
import resource
import tempfile
import time
from typing import Any

from absl import flags
import numpy as np

from experiments import benchmark_work, cli
from experiments.benchmark_programs import (
  Program,
  Step,
  build,
  show,
  show_spread,
  spread,
  timed,
)

_SIZE = flags.DEFINE_enum("size", "S", list(benchmark_work.SIZES), "What size.")
_RUNS = flags.DEFINE_integer("runs", 5, "Runs of each.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 15, "Steps of a run.", lower_bound=2)
_TABLE = flags.DEFINE_string("table", "", "File that gets it all as JSON.")
_PROFILE = flags.DEFINE_bool(
  "profile", False, "Show what one step of each spends its time on."
)

# A floor that is no further below what one writes first is none.
_FLOOR = {"S": 2.4, "M": 1.4}
# The parts of a step that are products of matrices.
_PRODUCTS = "sampling", "update"


def alone(name: str, size: benchmark_work.Size) -> dict[str, float]:
  """In a process of its own: seconds to compile, and peak memory."""
  begun = time.monotonic()
  program = build(size, name, steps=2)
  state = program.start(0)
  state, _ = program.step(state)
  first = time.monotonic()
  program.step(state)
  second = time.monotonic()
  program.close()
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # In KiB, on Linux.
  # All that comes before a second step would be in its place.
  return {"compile_s": 2 * first - begun - second, "peak_mib": peak / 1024}


def measure(
  programs: dict[str, Program], *, runs: int, steps: int
) -> dict[str, dict[str, np.ndarray]]:
  """Program → what is measured → [runs, steps], step by step in turn.

  Beside `Step`: `wall` and `cpu` seconds, and `host`, what of the former is
  none of its parts. What compiles comes before. Who is first changes with every
  step: memory that one leaves is another's to clear.
  """
  for program in programs.values():
    program.step(program.start(runs))
  rows: dict[str, list[list[tuple[float, ...]]]] = {x: [] for x in programs}
  for run in range(runs):
    states = {name: program.start(run) for name, program in programs.items()}
    for name in programs:
      rows[name].append([])
    for step_number in range(steps):
      first = step_number % len(programs)
      for name in [*programs, *programs][first : first + len(programs)]:
        (states[name], step), wall, cpu = timed(
          functools.partial(programs[name].step, states[name])
        )
        host = wall - sum(step[1:])
        rows[name][-1].append((*step, host, wall, cpu))
  fields = *Step._fields, "host", "wall", "cpu"
  return {
    name: dict(zip(fields, np.moveaxis(np.array(found), 2, 0), strict=True))
    for name, found in rows.items()
  }


def matmul_peak(width: int = 1536) -> float:
  """FLOP/s of a large product of matrices, the best of a few."""
  import jax
  import jax.numpy as jnp

  x = jnp.ones((width, width))
  product = jax.jit(jnp.matmul)
  product(x, x).block_until_ready()
  best = float("inf")
  for _ in range(10):
    begun = time.monotonic()
    product(x, x).block_until_ready()
    best = min(best, time.monotonic() - begun)
  return 2 * width**3 / best


def profile(program: Program) -> dict[str, float]:
  """ "Jitted function: kind of operation" → seconds of one step's threads."""
  import jax

  state, _ = program.step(program.start(0))
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      program.step(state)
    (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    data = jax.profiler.ProfileData.from_file(file)
    found: dict[str, float] = collections.defaultdict(float)
    for plane in data.planes:
      for line in plane.lines:
        for event in line.events:
          stats = dict(event.stats)
          if "hlo_op" in stats:
            kind = re.sub(r"[.\d]+$", "", event.name)
            if kind not in ("call", "cond", "while"):  # They hold the others.
              name = f"{stats['hlo_module']}: {kind}"
              found[name] += event.duration_ns / 1e9
  return dict(found)


def summary(
  size: benchmark_work.Size, times: dict[str, dict[str, np.ndarray]]
) -> dict[str, Any]:
  """What a table shows of the times."""
  floor = times["floor"]
  flops = {x: getattr(size, f"{x}_flops")(shared=True) for x in _PRODUCTS}
  flops["wall"] = sum(flops.values())
  found = {}
  for name, columns in times.items():
    found[name] = {
      field: spread(columns[field]) for field in columns if field != "reward"
    }
    for field, number in flops.items():
      rate = number / found[name][field]["median"] / 1e9
      found[name][f"{field}_gflop_per_s"] = rate
    found[name] |= {
      "wall_over_floor": float(np.median(columns["wall"] / floor["wall"])),
      "cpu_over_floor": float(np.median(columns["cpu"] / floor["cpu"])),
      "rewards": columns["reward"].mean(axis=0).tolist(),
    }
  return found


def main(argv):
  del argv
  import jax

  name, size = _SIZE.value, benchmark_work.SIZES[_SIZE.value]
  before, peak = os.getloadavg()[0], matmul_peak()
  names = "floor", "ours", "plain"
  found: dict[str, Any] = {"size": name} | size._asdict()
  context = multiprocessing.get_context("spawn")
  fresh = {}
  for program in names:
    with concurrent.futures.ProcessPoolExecutor(1, context) as process:
      fresh[program] = process.submit(alone, program, size).result()
  programs = {x: build(size, x, _STEPS.value) for x in names}
  try:
    times = measure(programs, runs=_RUNS.value, steps=_STEPS.value)
    operations = {}
    if _PROFILE.value:
      operations = {x: profile(programs[x]) for x in names}
  finally:
    for program in programs.values():
      program.close()
  programs_found = summary(size, times)
  for program in names:
    programs_found[program] |= fresh[program]
  peak = max(peak, matmul_peak())
  ratio = programs_found["plain"]["cpu_over_floor"]
  found |= {
    "jax": jax.__version__,
    "cores": os.cpu_count(),
    "load": [before, os.getloadavg()[0]],
    "matmul_flop_per_s": peak,
    "sampling_flop": size.sampling_flops(shared=True),
    "update_flop": size.update_flops(shared=True),
    "programs": programs_found,
    "profile": operations,
  }
  _show(found)
  if ratio < (needed := _FLOOR.get(name, 0)):
    print(
      f"The floor is no floor: plain takes {ratio:.2f} times its CPU seconds,"
      f" and should take {needed} times."
    )
  if _TABLE.value:
    pathlib.Path(_TABLE.value).write_text(json.dumps(found, indent=2) + "\n")


def _show(found: dict[str, Any]) -> None:
  from rich.table import Table

  before, after = found["load"]
  times = Table(
    title=(
      f"size {found['size']}: seconds of a step, median (min-max); jax"
      f" {found['jax']}, {found['cores']} cores, load {before:.1f} to"
      f" {after:.1f}"
    )
  )
  programs = found["programs"]
  for column in ("", *programs, "products alone"):
    times.add_column(column, justify="right" if column else "left")
  peak = found["matmul_flop_per_s"]
  flops = {x: found[f"{x}_flop"] for x in _PRODUCTS}
  flops["wall"] = sum(flops.values())
  for field in "wall", "sampling", "verification", "update", "host", "cpu":
    spreads = [show_spread(row[field], 3) for row in programs.values()]
    least = f"{flops[field] / peak:.3f}" if field in flops else ""
    times.add_row(field, *spreads, least)
  for field in "wall", "cpu":
    row = [f"{x[f'{field}_over_floor']:.2f}" for x in programs.values()]
    times.add_row(f"{field} / floor's", *row)
  for field in flops:
    rates = [x[f"{field}_gflop_per_s"] for x in programs.values()]
    row = [f"{x:.0f} ({1e9 * x / peak:.0%})" for x in rates]
    times.add_row(f"GFLOP/s, {field}", *row, f"{peak / 1e9:.0f}")
  row = [f"{x['compile_s']:.1f}" for x in programs.values()]
  times.add_row("compile s", *row)
  row = [f"{x['peak_mib']:.0f}" for x in programs.values()]
  times.add_row("peak MiB", *row)
  rewards = Table(title="mean reward by step, over the runs")
  steps = len(programs["floor"]["rewards"])
  shown = sorted({*range(0, steps, 2), steps - 1})
  rewards.add_column("")
  for step in shown:
    rewards.add_column(str(step), justify="right")
  for name, row in programs.items():
    rewards.add_row(name, *(f"{row['rewards'][i]:.3f}" for i in shown))
  show(times, rewards)
  for name, operations in found["profile"].items():
    table = Table(title=f"{name}: thread-seconds of a step, by operation")
    table.add_column("function: kind")
    table.add_column("seconds", justify="right")
    order = sorted(operations, key=lambda x: -operations[x])
    for key in order[:20]:
      table.add_row(key, f"{operations[key]:.4f}")
    show(table)


if __name__ == "__main__":
  cli.run(main)
