"""A language model's training loop against two loops written out by hand.

  python -m experiments.benchmark_language --size=S --runs=5

takes the same steps with three programs, which alternate step by step, and
prints medians with their least and most, and the load beside them:

  ours: what a config trains with: collector, a process that verifies, learner,
    metrics; from `experiments.language`, on a task of random prompts.
  floor: sampling and update alone, as fast as could be (experiments/floor.py).
  plain: what one writes first.

All three learn the same: their rewards are printed. Seconds are of the clock,
CPU seconds of this process; where other work runs on the cores the latter and
the ratios, each of one step's neighbours, are what to read. Compile time and
peak memory are each program's in a process of its own. Sizes are `SIZES` of
experiments/benchmark_work.py.
"""

import collections
from collections.abc import Callable
import concurrent.futures
import functools
import glob
import json
import multiprocessing
import os
import pathlib
import re
import resource
import runpy
import tempfile
import time
from typing import Any, NamedTuple

from absl import flags
import numpy as np

from experiments import benchmark_work, cli

_SIZE = flags.DEFINE_enum("size", "S", list(benchmark_work.SIZES), "What size.")
_RUNS = flags.DEFINE_integer("runs", 5, "Runs of each.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 15, "Steps of a run.", lower_bound=2)
_TABLE = flags.DEFINE_string("table", "", "File that gets it all as JSON.")
_PROFILE = flags.DEFINE_bool(
  "profile", False, "Show what one step of each spends its time on."
)

# A floor that is no further below what one writes first is none.
_FLOOR = {"S": 2.4, "M": 1.4}


class Step(NamedTuple):
  """What a step was worth, and where its seconds went.

  Attributes:
    reward: mean of the answers', before the update.
    sampling: seconds.
    host: seconds, of which verifying is most.
    update: seconds, in which ours also sums up what it drew.
  """

  reward: float
  sampling: float
  host: float
  update: float


class Program(NamedTuple):
  """A loop.

  Attributes:
    start: run's number → state.
    step: state → (state, Step).
    close: ends what it has begun.
  """

  start: Callable[[int], Any]
  step: Callable[[Any], tuple[Any, Step]]
  close: Callable[[], None] = lambda: None


def config(size: benchmark_work.Size):
  """The run's config, but for questions, tokenizer, verifiers and model."""
  root = pathlib.Path(__file__).parents[1]
  made = runpy.run_path(str(root / "configs" / "language.py"))["base"](
    "grpo", size.length
  )
  changed = {
    "prompt_width": size.prompt,
    "num_groups": size.groups,
    "group_size": size.group_size,
    "aggregate": {"token_mean": {}},
    "kl_coef": 0.0,
    "score": "share",
    "micro_batches": size.groups // size.chunk,
    "learning_rate": size.learning_rate,
    "warmup_updates": 0,
    "clip_norm": 0.0,
    "eval_questions": 1,
  }
  for name, value in {**changed, "weights": {"share": 1.0}}.items():
    with made.unlocked():
      del made[name]
      made[name] = value
  return made


def policy(size: benchmark_work.Size, temperature: float = 1.0):
  """Ours."""
  from groupstd import transformer

  shape = transformer.Config(
    size.vocabulary,
    width=size.width,
    num_layers=size.layers,
    num_heads=size.heads,
    hidden=size.hidden,
    qkv_bias=True,
    unroll=True,
  )
  return transformer.policy(shape, length=size.length, temperature=temperature)


def ours(size: benchmark_work.Size, *, steps: int, workers: int = 1) -> Program:
  """The loop of a config.

  Args:
    size: of the work.
    steps: of a run; the next begins at the next prompts.
    workers: processes that verify.
  """

  from experiments import building, language, parts
  from groupstd import verifiers

  made = config(size)
  asked = benchmark_work.asked(size, 1024)
  share = functools.partial(benchmark_work.share, length=size.length)
  pool = verifiers.Pool({"share": share}, num_workers=workers)
  found = parts.Parts(
    benchmark_work.tokenizer(),
    asked,
    asked,
    pool,
    functools.partial(policy, size),
  )
  experiment = language._build(
    made,
    found,
    language.build_rule(made),
    building.optimizer(made, made.num_steps, "config"),
  )

  def start(run):
    state = experiment.start()
    return state._replace(step=state.step + run * steps)

  def step(state):
    state, metrics = experiment.step(state)
    experiment.samples()
    names = "reward", "seconds_sample", "seconds_verify", "seconds_update"
    return state, Step(*(float(metrics[name]) for name in names))

  return Program(start, step, experiment.close)


def by_hand(size: benchmark_work.Size, name: str, *, steps: int) -> Program:
  """One of the two loops of experiments/floor.py."""
  import jax
  import jax.numpy as jnp
  import optax

  from experiments import floor

  loop = {"floor": floor.floor, "plain": floor.plain}[name](size)
  optimizer = optax.adamw(size.learning_rate, b2=0.99, weight_decay=0.0)
  sample = jax.jit(loop.sample)
  update = jax.jit(floor.update(loop, optimizer), donate_argnums=(0, 1))
  encode = benchmark_work.tokenizer().encode
  asked = np.array(
    [encode(question.prompt) for question in benchmark_work.asked(size, 1024)]
  )
  decode = benchmark_work.tokenizer().decode
  counted = np.array(
    [decode([i]) in benchmark_work.COUNTED for i in range(size.vocabulary)]
  )
  rng = np.random.default_rng(1)

  def start(run):
    params = jax.tree.map(
      jnp.copy, loop.convert(policy(size).init(jax.random.key(0)))
    )
    return run * steps, params, optimizer.init(params)

  def step(state):
    number, params, opt_state = state
    prompts = asked[rng.choice(len(asked), size.groups, replace=False)]
    begun = time.monotonic()
    key = jax.random.fold_in(jax.random.key(1), number)
    drawn = sample(params, key, prompts)
    tokens = np.asarray(drawn)
    sampled = time.monotonic()
    rewards = counted[tokens].mean(axis=2, dtype=np.float32)
    advantages = floor.advantages(rewards)
    verified = time.monotonic()
    state = number + 1, *update(params, opt_state, prompts, drawn, advantages)
    jax.block_until_ready(state)
    done = time.monotonic()
    return state, Step(
      float(rewards.mean()),
      sampled - begun,
      verified - sampled,
      done - verified,
    )

  return Program(start, step)


def build(size: benchmark_work.Size, name: str, steps: int) -> Program:
  if name == "ours":
    return ours(size, steps=steps)
  return by_hand(size, name, steps=steps)


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

  Beside `Step`: `wall` and `cpu` seconds. What compiles comes before. Who is
  first changes with every step: memory that one leaves is another's to clear.
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
        wall, cpu = time.monotonic(), time.process_time()
        states[name], step = programs[name].step(states[name])
        times = time.monotonic() - wall, time.process_time() - cpu
        rows[name][-1].append((*step, *times))
  fields = *Step._fields, "wall", "cpu"
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
  found = {}
  least = size.sampling_flops(shared=True) + size.update_flops(shared=True)
  for name, columns in times.items():
    found[name] = {
      field: {
        "median": float(np.median(columns[field])),
        "min": float(np.min(columns[field])),
        "max": float(np.max(columns[field])),
      }
      for field in columns
      if field != "reward"
    }
    found[name] |= {
      "gflop_per_s": least / found[name]["wall"]["median"] / 1e9,
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
  from rich.console import Console
  from rich.table import Table

  console = Console()
  before, after = found["load"]
  table = Table(
    title=(
      f"size {found['size']}: seconds of a step, median (min-max); jax"
      f" {found['jax']}, {found['cores']} cores, load {before:.1f} to"
      f" {after:.1f}"
    )
  )
  programs = found["programs"]
  for column in ("", *programs, "products alone"):
    table.add_column(column, justify="right" if column else "left")
  peak = found["matmul_flop_per_s"]
  sampling, update = (found[f"{x}_flop"] for x in ("sampling", "update"))
  least = {
    "wall": f"{(sampling + update) / peak:.3g}",
    "sampling": f"{sampling / peak:.3g}",
    "update": f"{update / peak:.3g}",
  }
  for field in "wall", "sampling", "host", "update", "cpu":
    spreads = [
      f"{x['median']:.3g} ({x['min']:.3g}-{x['max']:.3g})"
      for x in (row[field] for row in programs.values())
    ]
    table.add_row(field, *spreads, least.get(field, ""))
  for label, field, form in [
    ("wall / floor's", "wall_over_floor", ".2f"),
    ("cpu / floor's", "cpu_over_floor", ".2f"),
    ("GFLOP/s", "gflop_per_s", ".0f"),
    ("compile s", "compile_s", ".1f"),
    ("peak MiB", "peak_mib", ".0f"),
  ]:
    row = [f"{x[field]:{form}}" for x in programs.values()]
    table.add_row(label, *row, f"{peak / 1e9:.0f}" if "FLOP" in label else "")
  console.print(table)
  rewards = Table(title="mean reward by step, over the runs")
  steps = len(found["programs"]["floor"]["rewards"])
  shown = sorted({*range(0, steps, 2), steps - 1})
  rewards.add_column("")
  for step in shown:
    rewards.add_column(str(step), justify="right")
  for name, row in found["programs"].items():
    rewards.add_row(name, *(f"{row['rewards'][i]:.3f}" for i in shown))
  console.print(rewards)
  for name, operations in found["profile"].items():
    table = Table(title=f"{name}: thread-seconds of a step, by operation")
    table.add_column("function: kind")
    table.add_column("seconds", justify="right")
    order = sorted(operations, key=lambda x: -operations[x])
    for key in order[:20]:
      table.add_row(key, f"{operations[key]:.4f}")
    console.print(table)


if __name__ == "__main__":
  cli.run(main)
