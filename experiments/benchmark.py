"""The controlled run's training step against a plain numpy loop.

  python -m experiments.benchmark

times `--steps` steps of each arm on as many prompts as Big-Math has, ours and
numpy's alternating in one process, and prints medians, spread and ratios. The
numpy loop is the straightforward one: it draws G uniforms for each prompt and
step, again for those still silent, and moves each logit by rate·σ²·w. Ours is
the run's own program, from drawing to optimizer, with groups as multisets and
as plain [B, G, 1] rollouts. Compilation is timed apart. numpy uses one core,
ours one device a core: CPU seconds stand beside wall seconds.
"""

from collections.abc import Callable
import functools
import os
import pathlib
import runpy
import time

from absl import flags
import numpy as np

from experiments import cli

_PROMPTS = flags.DEFINE_integer("prompts", 215_608, "Prompts.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 150, "Steps.", lower_bound=1)
_DEVICES = flags.DEFINE_integer(
  "devices", os.cpu_count(), "Devices, of a CPU's cores.", lower_bound=1
)
_RUNS = flags.DEFINE_integer("runs", 3, "Runs of each.", lower_bound=1)


def main(argv):
  del argv
  import jax

  from experiments import train

  jax.config.update("jax_num_cpu_devices", _DEVICES.value)
  root = pathlib.Path(__file__).parents[1]
  get_config = runpy.run_path(str(root / "configs" / "bernoulli.py"))[
    "get_config"
  ]
  prompts, steps = _PROMPTS.value, _STEPS.value
  print(
    f"{prompts} prompts, {steps} steps, {_DEVICES.value} devices on"
    f" {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; jax"
    f" {jax.__version__}, numpy {np.__version__}"
  )
  print(
    f"{'arm':8} {'program':9} {'wall s (min-max)':22} {'CPU s':>6}"
    f" {'updates/s':>10} {'compile s':>9} {'numpy/ours':>10}"
  )
  for arm in "grpo", "dr_grpo", "dapo":
    config = get_config(arm)
    config.num_prompts = prompts
    config.num_devices = _DEVICES.value
    programs: dict[str, Callable[[], object]] = {
      "numpy": functools.partial(_numpy_loop, config, steps)
    }
    compiled = {"numpy": 0.0}
    for name, multiset in ("multiset", True), ("plain", False):
      config = config.copy_and_resolve_references()
      config.multiset = multiset
      experiment = train.build(config)
      begun = time.perf_counter()
      _our_loop(experiment, 1)
      compiled[name] = time.perf_counter() - begun
      programs[name] = functools.partial(_our_loop, experiment, steps)
    times = {name: [] for name in programs}
    for _ in range(_RUNS.value):
      for name, program in programs.items():
        wall, cpu = time.perf_counter(), time.process_time()
        program()
        times[name].append(
          (time.perf_counter() - wall, time.process_time() - cpu)
        )
    walls = {name: np.array(pairs)[:, 0] for name, pairs in times.items()}
    for name, pairs in times.items():
      wall = walls[name]
      ratio = np.median(walls["numpy"] / wall)
      spread = f"{np.median(wall):.2f} ({wall.min():.2f}-{wall.max():.2f})"
      print(
        f"{arm:8} {name:9} {spread:22} {np.median(np.array(pairs)[:, 1]):6.2f}"
        f" {prompts * steps / np.median(wall):10.2e} {compiled[name]:9.2f}"
        f" {ratio:10.2f}"
      )
  print(f"load {os.getloadavg()[0]:.1f}")


def _our_loop(experiment, steps: int) -> None:
  """The run's program, without what it logs."""
  import jax

  state, metrics = experiment.start(), None
  for _ in range(steps):
    state, metrics = experiment.step(state)
  jax.block_until_ready((state, metrics))


def _numpy_loop(config, steps: int) -> np.ndarray:
  """The three arms as one would write them first; returns p at the end."""
  from experiments import scalar

  p = scalar.population(config)
  theta = np.log(p) - np.log1p(-p)
  size, rng = config.group_size, np.random.default_rng(config.seed)
  divides = "divide" in config.sigma
  for _ in range(steps):
    p = 1 / (1 + np.exp(-theta))
    k = (rng.random((len(p), size)) < p[:, None]).sum(axis=1)
    for _ in range(config.max_draws - 1):
      silent = np.flatnonzero((k == 0) | (k == size))
      draws = rng.random((len(silent), size)) < p[silent, None]
      k[silent] = draws.sum(axis=1)
    std = np.sqrt(k * (size - k)) / size
    theta += config.optimizer.sgd.learning_rate * (std if divides else std**2)
  return 1 / (1 + np.exp(-theta))


if __name__ == "__main__":
  cli.run(main)
