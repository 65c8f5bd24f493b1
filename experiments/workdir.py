"""A run's folder, and the only code that writes into it.

  config.json     what the run was asked to do
  state.json      the shapes and dtypes of its state
  metrics.jsonl   a line {"step": …} for each call of `log`
  rollouts.jsonl  the lines given to `log_rollouts`
  checkpoints/    the newest states, a folder a step

To resume is the default: a run that is killed at any moment and started again
by the same command ends with the same state and the same lines, bit for bit, as
one that was not. For this a checkpoint holds the lengths of the .jsonl files
next to the state; restoring it cuts them there, and what followed is logged
again.
"""

from collections.abc import Iterable, Iterator
import concurrent.futures
import contextlib
import fcntl
import json
import os
import pathlib
import socket
from typing import Any

from absl import logging
import ml_collections
from orbax.checkpoint import v1 as ocp

from experiments import checkpoints, cli, streams

_CONFIG = "config.json"
_STATE = "state.json"
_METRICS = "metrics.jsonl"
_ROLLOUTS = "rollouts.jsonl"
_CHECKPOINTS = "checkpoints"


class Workdir(contextlib.AbstractContextManager):
  """A run's folder, locked until it is closed or the process dies.

    with workdir.Workdir(path, config) as folder:
      state = folder.restore(learner.init(params))
      for step in range(int(state.step), config.num_steps):
        ...
        folder.log(step + 1, {"loss": loss})
        folder.save(step + 1, state)

  Attributes:
    path: the folder, absolute.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    config: ml_collections.ConfigDict,
    *,
    keep: int = 2,
  ):
    """Opens the folder, made where there is none.

    Args:
      path: the folder.
      config: what the run is asked to do, of numbers, strings, lists, dicts.
      keep: how many checkpoints stay, at least 2.

    Raises:
      cli.UsageError: if another process is at work in the folder, if it holds
        a run with another config (every field that differs is named), or if it
        cannot be a run's folder.
    """
    if keep < 2:
      raise ValueError(
        f"`keep` must be at least 2, got {keep}: the newest checkpoint may turn"
        " out unfinished or damaged."
      )
    self.path = pathlib.Path(path).absolute()
    self._streams: streams.Streams | None = None
    self._saving: concurrent.futures.Future[None] | None = None
    with contextlib.ExitStack() as stack:
      stack.enter_context(_locked(self.path))
      _check_config(self.path, config)
      self._checkpointer = stack.enter_context(
        ocp.training.Checkpointer(
          str(self.path / _CHECKPOINTS),
          preservation_policy=ocp.training.preservation_policies.LatestN(keep),  # pyright: ignore[reportArgumentType]
          cleanup_tmp_directories=True,
        )
      )
      self._thread = stack.enter_context(
        concurrent.futures.ThreadPoolExecutor(max_workers=1)
      )
      stack.callback(self._wait)
      self._resources = stack.pop_all()

  def restore(self, state: Any) -> Any:
    """Returns the newest whole checkpoint, or `state` where there is none.

    Comes before `log` and `save`. A checkpoint that is unfinished or damaged
    is passed over for the one before it, with a warning, and removed.

    Args:
      state: a pytree of jax arrays; what is restored has its structure,
        shapes, dtypes and shardings.

    Raises:
      cli.UsageError: if the checkpoints are of states with other shapes or
        dtypes (every leaf that differs is named), or all of them are damaged.
    """
    whole = checkpoints.steps(self.path / _CHECKPOINTS)
    for step in set(self._steps).difference(whole):
      self._remove(step, "the process died before it was whole")
    here = checkpoints.shapes(state)
    if whole:
      _check_same(self.path / _STATE, here)
    else:
      checkpoints.write(self.path / _STATE, json.dumps(here, indent=2))
    found, causes = None, {}
    for step in whole[::-1]:
      try:
        found = self._load(step, state)
        break
      except Exception as error:  # Orbax raises whatever it meets.
        causes[step] = _first_line(error.__cause__ or error)
    if found is None and causes:
      raise cli.UsageError(
        f"every checkpoint in {self.path} is damaged: {_listed(causes)}."
        " Another folder starts afresh."
      )
    for step, why in causes.items():
      self._remove(step, why)
    state, lengths = found or (state, {_METRICS: 0, _ROLLOUTS: 0})
    self._streams = self._resources.enter_context(
      streams.Streams(self.path, lengths)
    )
    return state

  def log(self, step: int, metrics: dict[str, Any]) -> None:
    """Appends {"step": step, **metrics} to metrics.jsonl.

    Args:
      step: the number of steps done.
      metrics: what a line can hold, as `streams.Streams.append` says.
    """
    self._restored.append(_METRICS, [{"step": step, **metrics}])

  def log_rollouts(self, lines: Iterable[dict[str, Any]]) -> None:
    """Appends lines to rollouts.jsonl."""
    self._restored.append(_ROLLOUTS, lines)

  def save(self, step: int, state: Any) -> None:
    """Starts to save the state; its buffers may be donated at once.

    A step that is there already is left alone. What was logged so far is on
    disk before the checkpoint is; `close` waits until that is whole.
    """
    logs = self._restored
    if step in self._steps:
      return
    self._wait()
    saved = {"state": state, "lengths": logs.sync()}
    response = self._checkpointer.save_async(step, saved, force=True)
    self._saving = self._thread.submit(self._seal, step, response)

  @property
  def resumes(self) -> bool:
    """Whether there is a checkpoint to go on from."""
    return bool(checkpoints.steps(self.path / _CHECKPOINTS))

  def metrics(self) -> list[dict[str, Any]]:
    """The lines logged so far."""
    return read_metrics(self.path)

  def close(self) -> None:
    """Waits for the save under way and unlocks the folder."""
    self._resources.close()

  def __exit__(self, *_) -> None:
    self.close()

  @property
  def _steps(self) -> list[int]:
    """The steps that have a checkpoint, oldest first."""
    return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

  @property
  def _restored(self) -> streams.Streams:
    """The files of lines, each open after its last line that stands."""
    if self._streams is None:
      raise RuntimeError(
        "`restore` must come before `log` and `save`: it decides which lines"
        f" of {_METRICS} and {_ROLLOUTS} stand."
      )
    return self._streams

  def _checkpoint(self, step: int) -> pathlib.Path:
    return self.path / _CHECKPOINTS / str(step)

  def _load(self, step: int, state: Any) -> tuple[Any, dict[str, int]]:
    """The state and the lengths of the logs at a step, if all is well."""
    like = {"state": state, "lengths": {_METRICS: 0, _ROLLOUTS: 0}}
    saved = checkpoints.read(self._checkpoint(step), like)
    streams.check(self.path, saved["lengths"])
    return saved["state"], saved["lengths"]

  def _remove(self, step: int, why: str) -> None:
    """Removes a checkpoint that does not count, and says so."""
    logging.warning(
      f"checkpoint {step} in {self.path} is removed: {why}. The run resumes"
      " from the one before it, or from the beginning."
    )
    self._checkpointer.delete(step)

  def _seal(self, step: int, response: Any) -> None:
    """Makes a checkpoint whole once its save is done."""
    response.result()
    checkpoints.seal(self._checkpoint(step))

  def _wait(self) -> None:
    """Waits for the save under way; raises what went wrong with it, once."""
    saving, self._saving = self._saving, None
    if saving is not None:
      saving.result()


def load(
  path: str | os.PathLike[str], like: Any, step: int | None = None
) -> tuple[int, Any]:
  """(step, state) of a run's newest whole checkpoint, or of a given step.

  For evaluating a run, or starting another from it: takes no lock, changes
  nothing in the folder, and may be called while the run trains.

    like = jax.eval_shape(policy.init, jax.random.key(0))
    step, state = workdir.load(path, {"params": like})

  Args:
    path: the run's folder.
    like: a pytree of arrays or ShapeDtypeStructs, the state that was saved or
      any part of it: {"params": …} of a TrainState, or a TrainState with `...`
      for what is not wanted. What is loaded has its structure, shapes, dtypes
      and shardings (one device where it names none).
    step: of the checkpoint; the newest by default, where a damaged one is
      passed over, with a warning, for the one before it.

  Raises:
    cli.UsageError: if there is no such checkpoint, it is damaged (the file is
      named), or holds other shapes or dtypes (every leaf that differs is
      named).
  """
  path = pathlib.Path(path).absolute()
  if not (path / _STATE).exists():
    raise cli.UsageError(
      f"{path} holds no run that can be loaded: it has no {_STATE}."
    )
  _check_same(path / _STATE, checkpoints.shapes(like), part=True)
  causes: dict[int, str] = {}
  while True:
    # Anew each time: the run may have saved another, and removed this one.
    there = checkpoints.steps(path / _CHECKPOINTS)
    if step is not None and step not in there:
      raise cli.UsageError(
        f"{path} holds no whole checkpoint of step {step}; it holds"
        f" {', '.join(map(str, there)) or 'none'}."
      )
    untried = {step} if step is not None else set(there)
    if not (untried := untried.difference(causes)):
      break
    newest = max(untried)
    checkpoint = path / _CHECKPOINTS / str(newest)
    try:
      state = checkpoints.read(checkpoint, {"state": like})["state"]
    except Exception as error:  # Orbax raises whatever it meets.
      causes[newest] = _first_line(error.__cause__ or error)
      continue
    damaged = {s: why for s, why in causes.items() if s in there}
    if damaged:
      logging.warning(
        f"checkpoint {newest} in {path} is loaded, as later ones are damaged:"
        f" {_listed(damaged)}."
      )
    return newest, state
  raise cli.UsageError(
    f"{path} holds no whole checkpoint: {_listed(causes) or 'none was saved'}."
  )


def read_config(path: str | os.PathLike[str]) -> ml_collections.ConfigDict:
  """What a run was asked to do; its lists come back as tuples.

  Raises:
    cli.UsageError: if the folder holds no run.
  """
  file = pathlib.Path(path) / _CONFIG
  try:
    fields = json.loads(file.read_text())
  except OSError as error:
    raise cli.UsageError(f"{path} holds no run: {error}") from None
  return ml_collections.ConfigDict(_tuples(fields)).lock()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The lines of a run's metrics.jsonl, but for one that a kill cut short."""
  return list(streams.read(pathlib.Path(path) / _METRICS))


def read_rollouts(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """The lines of a run's rollouts.jsonl, one by one."""
  return streams.read(pathlib.Path(path) / _ROLLOUTS)


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
  """Makes the folder and holds its lock, which dies with the process."""
  try:
    path.mkdir(parents=True, exist_ok=True)
    file = (path / ".lock").open("a+")
  except OSError as error:
    raise cli.UsageError(f"{path} cannot be a run's folder: {error}") from None
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise cli.UsageError(
        f"{path} is in use by {file.read() or 'another process'}: two runs in"
        " one folder would overwrite each other."
      ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    yield


def _check_config(
  path: pathlib.Path, config: ml_collections.ConfigDict
) -> None:
  """Writes the config into a new folder; refuses one that holds another."""
  text = config.to_json(indent=2)
  if (path / _CONFIG).exists():
    _check_same(path / _CONFIG, json.loads(text))
    return
  for name in (_METRICS, _ROLLOUTS, _CHECKPOINTS):
    if (path / name).exists():
      raise cli.UsageError(
        f"{path} holds {name} but no {_CONFIG}: it is not a run's folder."
      )
  checkpoints.write(path / _CONFIG, text)


def _check_same(file: pathlib.Path, value: Any, part: bool = False) -> None:
  """Raises if a file's JSON is not this value, naming every field that differs.

  If `part`, the file may have further fields.
  """
  there = _fields(json.loads(file.read_text()), file.stem)
  here = _fields(value, file.stem)
  differing = [
    f"{name}: the folder has {there.get(name, 'nothing')}, the command has"
    f" {here.get(name, 'nothing')}"
    for name in sorted(here if part else there.keys() | here.keys())
    if there.get(name) != here.get(name)
  ]
  if differing:
    raise cli.UsageError(
      f"{file.parent} holds another run: {'; '.join(differing)}."
    )


def _fields(value: Any, name: str) -> dict[str, str]:
  """The JSON text of each field, by its dotted name."""
  if not (isinstance(value, dict) and value):
    return {name: json.dumps(value)}
  return {
    field: text
    for key in value
    for field, text in _fields(value[key], f"{name}.{key}").items()
  }


def _tuples(value: Any) -> Any:
  """JSON's lists as the tuples that configs are made of."""
  if isinstance(value, dict):
    return {key: _tuples(item) for key, item in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _listed(causes: dict[int, str]) -> str:
  return "; ".join(f"{step}: {why}" for step, why in causes.items())


def _first_line(error: BaseException) -> str:
  """An error's type and the first line of its message, at most 200 letters."""
  return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
