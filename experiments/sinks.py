"""Trackers that get a copy of a run's metrics: none may stop or slow the run.

metrics.jsonl holds everything, to the bit; these hold its numbers for the eye.

| name        | package      | where                                          |
|-------------|--------------|------------------------------------------------|
| tensorboard | tensorboardX | tensorboard/ in the run's folder               |
| wandb       | wandb        | its server; offline with WANDB_MODE=offline    |
| trackio     | trackio      | this machine, or the Space TRACKIO_SPACE_ID    |

TensorBoard's is written wherever its package is installed, the others where the
config asks. Their project is WANDB_PROJECT or TRACKIO_PROJECT, or groupstd.
"""

import collections
from collections.abc import Callable, Sequence
import contextlib
import importlib
import json
import os
import pathlib
from types import ModuleType
from typing import Any, NamedTuple
import uuid

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments import cli

_PACKAGES = {
  "tensorboard": "tensorboardX",
  "wandb": "wandb",
  "trackio": "trackio",
}


class _Sink(NamedTuple):
  log: Callable[[int, dict[str, float]], Any]
  close: Callable[[bool], Any]  # Of whether the run failed.


class Sinks(contextlib.AbstractContextManager):
  """The trackers of one run, open.

    with sinks.Sinks(config.report_to, folder.path, config, start) as report:
      ...
      folder.log(step, metrics)
      report.log(step, metrics)

  Attributes:
    failures: how many calls of each tracker raised.
  """

  def __init__(
    self,
    report_to: Sequence[str],
    path: str | os.PathLike[str],
    config: ml_collections.ConfigDict,
    start: int = 0,
  ):
    """Opens the trackers, to go on where they were left.

    Args:
      report_to: names of the table.
      path: the run's folder.
      config: what the run is asked to do.
      start: the first step that will be logged. What a process that died had
        logged from there on is replaced (TensorBoard) or kept as it is, and
        not logged again.

    Raises:
      cli.UsageError: if a name is unknown, or what was asked for is not
        installed or does not start.
    """
    self.failures: collections.Counter[str] = collections.Counter()
    self._sinks: dict[str, _Sink] = {}
    path = pathlib.Path(path).absolute()
    for name, module in _modules(report_to).items():
      try:
        if name == "tensorboard":
          self._sinks[name] = _tensorboard(module, path, start)
        else:
          self._sinks[name] = _tracker(name, module, path, config)
      except Exception as error:
        self.close(failed=True)
        raise cli.UsageError(
          f"{name} does not start: {type(error).__name__}: {error}"
        ) from error

  def log(self, step: int, metrics: dict[str, Any]) -> None:
    """Passes on what are single numbers; never raises."""
    numbers = {k: float(v) for k, v in metrics.items() if _is_number(v)}
    for name, sink in self._sinks.items():
      self._try(name, sink.log, step, numbers)

  def close(self, failed: bool = False) -> None:
    """Waits until all is delivered; never raises."""
    for name, sink in self._sinks.items():
      self._try(name, sink.close, failed)
      if self.failures[name]:
        logging.warning(
          f"{name} failed {self.failures[name]} times: it lacks steps of the"
          " run; metrics.jsonl has them all."
        )
    self._sinks.clear()

  def __exit__(self, kind: type[BaseException] | None, *_) -> None:
    self.close(failed=kind is not None)

  def _try(self, name: str, call: Callable[..., Any], *args: Any) -> None:
    try:
      call(*args)
    except Exception as error:  # A tracker's fault is not the run's.
      if not self.failures[name]:
        logging.warning(
          f"{name} failed, the run goes on: {type(error).__name__}: {error}"
        )
      self.failures[name] += 1


def check(report_to: Sequence[str]) -> None:
  """Raises a cli.UsageError if these trackers cannot be reported to."""
  _modules(report_to)


def _modules(report_to: Sequence[str]) -> dict[str, ModuleType]:
  """The packages of the trackers, imported."""
  for name in report_to:
    if name not in _PACKAGES:
      raise cli.UsageError(
        f"config.report_to has no {name!r}{cli.did_you_mean(name, _PACKAGES)}"
      )
  modules = {}
  for name in dict.fromkeys(("tensorboard", *report_to)):
    package = _PACKAGES[name]
    try:
      modules[name] = importlib.import_module(package)
    except Exception as error:  # Broken installations raise whatever they do.
      why = f"{package} cannot be imported ({type(error).__name__}: {error})"
      if name in report_to:
        raise cli.UsageError(
          f"config.report_to must name what is installed, got {name!r}: {why};"
          f" pip install {package} installs it"
        ) from error
      logging.info(f"{name} is off: {why}.")
  return modules


def _tensorboard(module: ModuleType, path: pathlib.Path, start: int) -> _Sink:
  writer = module.SummaryWriter(
    str(path / "tensorboard"),
    purge_step=start,
    flush_secs=5,
    # Its files are named by the second, and read in the order of their names.
    filename_suffix=f".{start:09d}",
  )

  def log(step, numbers):
    for name, number in numbers.items():
      writer.add_scalar(name, number, step)

  return _Sink(log, lambda failed: writer.close())


def _tracker(
  name: str,
  module: ModuleType,
  path: pathlib.Path,
  config: ml_collections.ConfigDict,
) -> _Sink:
  """A run of wandb's, or of trackio, which has its interface.

  Neither takes a step back: the last step that was passed on is kept in the
  run's folder, with the identity that the run has there.
  """
  file = path / f"{name}.json"
  mark = {"id": uuid.uuid4().hex[:8], "step": -1}
  if file.exists():
    mark = json.loads(file.read_text())
  last = mark["step"]
  identity = f"{path.name}-{mark['id']}"
  arguments = {"name": identity}
  if name == "wandb":
    arguments = {"name": path.name, "id": identity, "dir": str(path)}
  run = module.init(
    project=os.environ.get(f"{name.upper()}_PROJECT", "groupstd"),
    config=config.to_dict(),
    resume="allow",
    **arguments,
  )

  def log(step, numbers):
    if step > last:
      run.log(numbers, step=step)
      _write(file, {**mark, "step": step})

  def close(failed):
    run.finish(**{"exit_code": 1} if failed and name == "wandb" else {})

  _write(file, mark)
  return _Sink(log, close)


def _write(file: pathlib.Path, mark: dict[str, Any]) -> None:
  """Replaces the file, without a wait for the disk: this is once a step."""
  draft = file.with_name(f"{file.name}.tmp")
  draft.write_text(json.dumps(mark))
  draft.replace(file)


def _is_number(value: Any) -> bool:
  """Whether it is one real number."""
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    kinds = jnp.bool_, jnp.integer, jnp.floating
    return value.ndim == 0 and any(
      jnp.issubdtype(value.dtype, kind) for kind in kinds
    )
  return isinstance(value, int | float)
