"""From a config to a run: the loop that every experiment goes through."""

from collections.abc import Callable, Iterable, Mapping
import contextlib
import functools
import importlib
import json
import os
import pathlib
import time
from typing import Any, NamedTuple

import jax
import ml_collections

from experiments import cli, sinks, workdir
from groupstd import hosts, learners


class WarmStart(NamedTuple):
  """A run before the run, in its folder `warmup`.

  Attributes:
    experiment: what is run.
    config: of that run, with `num_steps` and the like.
    begin: params at its end → where the run itself starts.
  """

  experiment: "Experiment"
  config: ml_collections.ConfigDict
  begin: Callable[[Any], learners.TrainState]


class Experiment(NamedTuple):
  """What the loop runs.

  Attributes:
    start: → where training starts. Not a state, which would stay in memory as
      long as the run.
    shapes: → the state's shapes, and where they lie, which a checkpoint is
      restored to; `start` by default.
    step: state → (state, what the step drew and did, by name); takes over the
      state's buffers, unless it raises `cli.Stopped`.
    observe: params → what is measured of the policy as a whole, by name; may
      raise `cli.Stopped` too.
    warm_start: what comes first, if anything does.
    data: the checksums of what is learnt from, by name.
    samples: → lines for rollouts.jsonl since it was last called.
    close: ends what it has begun.
  """

  start: Callable[[], learners.TrainState]
  step: Callable[
    [learners.TrainState], tuple[learners.TrainState, dict[str, Any]]
  ]
  observe: Callable[[Any], dict[str, Any]]
  warm_start: WarmStart | None = None
  data: Mapping[str, str] = {}
  shapes: Callable[[], learners.TrainState] | None = None
  samples: Callable[[], Iterable[dict[str, Any]]] = tuple
  close: Callable[[], None] = lambda: None


def build(config: ml_collections.ConfigDict) -> Experiment:
  """The experiment that the module experiments/<config.builder>.py makes.

  Raises:
    ValueError: naming the field, its value and what it must be.
  """
  builders = ("language", "scalar")
  if config.builder not in builders:
    raise ValueError(
      f"config.builder must be one of {', '.join(builders)}, got"
      f" {config.builder!r}{cli.did_you_mean(config.builder, builders)}"
    )
  sinks.check(config.report_to)
  return importlib.import_module(f"experiments.{config.builder}").build(config)


def run(
  config: ml_collections.ConfigDict,
  path: str | os.PathLike[str],
  description: str = "training",
) -> None:
  """Trains in the folder `path`, from where it was left.

  metrics.jsonl gets a line for each step s: the policy that s updates made,
  what it drew, and `seconds` since this process began; and a last line for the
  policy at the end. SIGTERM ends it after the step that is being done, which is
  saved.

  Where several processes train, all run this, and the first of them reports.

  Raises:
    cli.UsageError: if the config is wrong, or the folder holds another run, or
      processes were given different ones.
    cli.Stopped: if the run ended itself, after saving what it had.
    cli.Interrupted: after SIGTERM, to any of the processes, and saving.
    FloatingPointError: if a reward, an advantage or a gradient was not finite.
  """
  path = pathlib.Path(path)
  experiment = _build(config, path)
  try:
    with hosts.preemption() as reached:
      _run(experiment, config, path, description, reached)
  finally:
    experiment.close()


def warm_up(
  config: ml_collections.ConfigDict, path: str | os.PathLike[str]
) -> None:
  """Runs the warm start alone, for runs whose `init` is this folder."""
  alone = config.copy_and_resolve_references()
  alone.init = ""
  path = pathlib.Path(path)
  experiment = _build(alone, path)
  try:
    if (warm := experiment.warm_start) is None:
      raise cli.UsageError("config.warmup.num_steps must be at least 1, got 0.")
    with hosts.preemption() as reached:
      _run(warm.experiment, warm.config, path, "warm start", reached)
  finally:
    experiment.close()


def _build(config: ml_collections.ConfigDict, path: pathlib.Path) -> Experiment:
  """The experiment, if all processes were given the same."""
  given = {"config": json.loads(config.to_json()), "workdir": str(path)}
  with cli.building():
    hosts.same("the command", given)
    return build(config)


def _run(
  experiment: Experiment,
  config: ml_collections.ConfigDict,
  path: pathlib.Path,
  description: str,
  reached: Callable[[], bool],
) -> learners.TrainState:
  """Runs the loop in a folder of its own; returns the state at the end."""
  begun = time.monotonic()
  first = hosts.index() == 0
  with workdir.Workdir(path, config, experiment.data) as folder:
    warm_start = experiment.warm_start
    if folder.resumes:
      # No state of its own, which would lie in memory beside the one restored.
      state = (experiment.shapes or experiment.start)()
    elif warm_start is None:
      state = experiment.start()
    else:
      state = warm_start.begin(
        _run(
          warm_start.experiment,
          warm_start.config,
          path / "warmup",
          f"{description}: warm start",
          reached,
        ).params
      )
    state = folder.restore(state)
    start, end = int(state.step), config.num_steps
    waiting: list[tuple[int, dict[str, Any]]] = []

    with contextlib.ExitStack() as stack:
      report = None
      if first:
        made = sinks.Sinks(config.report_to, path, config, start)
        report = stack.enter_context(made)

      def flush():
        for step, metrics in jax.device_get(waiting):
          if metrics.get("nonfinite"):
            raise FloatingPointError(
              f"step {step}: a reward, an advantage or a gradient was not"
              f" finite; it updated nothing. The run is in {path}."
            )
          metrics["seconds"] = time.monotonic() - begun
          folder.log(step, metrics)
          if report is not None:
            report.log(step, metrics)
        waiting.clear()
        folder.log_rollouts(experiment.samples())

      with cli.progress(end, start, description, shown=first) as advance:
        for step in range(start, end):
          metrics = {}
          try:
            if step % config.observe_every == 0:
              metrics = experiment.observe(state.params)
            state, stepped = experiment.step(state)
          except cli.Stopped:
            flush()
            folder.save(step, state)
            raise
          if step == start:
            jax.block_until_ready(state)
            if first:
              _tell_first_step()
          waiting.append((step, metrics | stepped))
          if len(waiting) == 10:
            flush()
          told = reached()
          due = (step + 1) % config.checkpoint_every == 0 or step + 1 == end
          if due or told:
            flush()
            folder.save(step + 1, state)
          if told:
            raise cli.Interrupted(f"by SIGTERM at step {step + 1}")
          advance(1)
      waiting.append((end, experiment.observe(state.params)))
      flush()
  return state


@functools.cache  # Of several runs in a process, the first.
def _tell_first_step() -> None:
  print(
    f"first step after {time.monotonic() - cli.BEGUN:.1f} s,"
    f" {sum(_compiling):.1f} s of it compiling"
  )


# Seconds of each program that was compiled or, if it was kept, read.
_compiling: list[float] = []


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
  if event == "/jax/core/compile/backend_compile_duration":
    _compiling.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_listen)
