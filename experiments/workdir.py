"""A run's folder, and the only code that writes into it.

  config.json     what the run was asked to do
  state.json      the shapes and dtypes of its state
  metrics.jsonl   a line {"step": …} for each call of `log`
  checkpoints/    the newest states, a folder a step, by Orbax

To resume is the default: a run that is killed at any moment and started again
by the same command ends with the same state and metrics, bit for bit, as one
that was not. For this a checkpoint holds the length of metrics.jsonl next to
the state; restoring it cuts the file there, and what followed is logged again.
A checkpoint counts from the moment the checksums of its files are written.
"""

from collections.abc import Iterator
import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import math
import os
import pathlib
import socket
from typing import Any, BinaryIO

from absl import logging
import jax
import ml_collections
import numpy as np
from orbax.checkpoint import v1 as ocp

from experiments import cli

_CONFIG = "config.json"
_STATE = "state.json"
_METRICS = "metrics.jsonl"
_CHECKPOINTS = "checkpoints"
_CHECKSUMS = "sha256.json"


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
    self._metrics: BinaryIO | None = None
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
    for step in self._steps:
      if not self._checksums(step).exists():
        self._remove(step, "the process died before it was whole")
    if self._steps:
      _check_same(self.path / _STATE, _shapes(state))
    else:
      _write(self.path / _STATE, _shapes(state))
    found, causes = None, {}
    for step in self._steps[::-1]:
      try:
        found = self._load(step, state)
        break
      except Exception as error:  # Orbax raises whatever it meets.
        causes[step] = _first_line(error.__cause__ or error)
    if found is None and causes:
      raise cli.UsageError(
        f"every checkpoint in {self.path} is damaged:"
        f" {'; '.join(f'{step}: {why}' for step, why in causes.items())}."
        " Another folder starts afresh."
      )
    for step, why in causes.items():
      self._remove(step, why)
    state, length = found or (state, 0)
    self._metrics = self._resources.enter_context(
      (self.path / _METRICS).open("ab")
    )
    self._metrics.truncate(length)
    self._metrics.seek(length)
    return state

  def log(self, step: int, metrics: dict[str, Any]) -> None:
    """Appends {"step": step, **metrics} to metrics.jsonl.

    Args:
      step: the number of steps done.
      metrics: numbers, strings, and arrays, lists and dicts of them. Floats
        come back exactly; NaN and ±∞, which JSON lacks, come back as None.
    """
    line = json.dumps(_plain({"step": step, **metrics}), allow_nan=False)
    file = self._restored
    file.write(line.encode() + b"\n")
    file.flush()

  def save(self, step: int, state: Any) -> None:
    """Starts to save the state; its buffers may be donated at once.

    A step that is there already is left alone. The metrics logged so far are
    on disk before the checkpoint is.
    """
    file = self._restored
    if step in self._steps:
      return
    self._wait()
    os.fsync(file.fileno())
    saved = {"state": state, "metrics_bytes": file.tell()}
    response = self._checkpointer.save_async(step, saved, force=True)
    self._saving = self._thread.submit(self._seal, step, response)

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
  def _restored(self) -> BinaryIO:
    """The file of metrics, open after its last line that stands."""
    if self._metrics is None:
      raise RuntimeError(
        "`restore` must come before `log` and `save`: it decides which lines"
        f" of {_METRICS} stand."
      )
    return self._metrics

  def _checksums(self, step: int) -> pathlib.Path:
    """The file that makes a checkpoint whole."""
    return self.path / _CHECKPOINTS / str(step) / _CHECKSUMS

  def _load(self, step: int, state: Any) -> tuple[Any, int]:
    """The state and the length of the metrics at a step, if all is well."""
    checksums = self._checksums(step)
    found = _hash(checksums.parent)
    for name, checksum in json.loads(checksums.read_text()).items():
      if found.get(name) != checksum:
        what = "has changed" if name in found else "is gone"
        raise ValueError(f"{checksums.parent / name} {what}")
    like = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding
      ),
      state,
    )
    saved = self._checkpointer.load(step, {"state": like, "metrics_bytes": 0})
    metrics = self.path / _METRICS
    lost = saved["metrics_bytes"]
    if metrics.exists():
      lost -= metrics.stat().st_size
    if lost > 0:
      raise ValueError(f"{metrics} lacks {lost} bytes logged before it")
    return saved["state"], saved["metrics_bytes"]

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
    checksums = self._checksums(step)
    _write(checksums, json.dumps(_hash(checksums.parent), indent=2))

  def _wait(self) -> None:
    """Waits for the save under way; raises what went wrong with it, once."""
    saving, self._saving = self._saving, None
    if saving is not None:
      saving.result()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The lines of a run's metrics.jsonl, but for one that a kill cut short."""
  lines = (pathlib.Path(path) / _METRICS).read_bytes().splitlines(keepends=True)
  return [json.loads(line) for line in lines if line.endswith(b"\n")]


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
    _check_same(path / _CONFIG, text)
    return
  for name in (_METRICS, _CHECKPOINTS):
    if (path / name).exists():
      raise cli.UsageError(
        f"{path} holds {name} but no {_CONFIG}: it is not a run's folder."
      )
  _write(path / _CONFIG, text)


def _check_same(file: pathlib.Path, text: str) -> None:
  """Raises if a file's JSON is not this, naming every field that differs."""
  there = _fields(json.loads(file.read_text()), file.stem)
  here = _fields(json.loads(text), file.stem)
  differing = [
    f"{name}: the folder has {there.get(name, 'nothing')}, the command has"
    f" {here.get(name, 'nothing')}"
    for name in sorted(there.keys() | here.keys())
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


def _shapes(state: Any) -> str:
  """JSON of the dtype and shape of each leaf, by its dotted path."""
  leaves, _ = jax.tree.flatten_with_path(state)
  shapes = {
    jax.tree_util.keystr(path, simple=True, separator="."): (
      f"{leaf.dtype}{list(leaf.shape)}"
    )
    for path, leaf in leaves
  }
  return json.dumps(shapes, indent=2)


def _plain(value: Any) -> Any:
  """What JSON can hold."""
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    value = np.asarray(value).tolist()
  if isinstance(value, dict):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _hash(folder: pathlib.Path) -> dict[str, str]:
  """SHA-256 of each of Orbax's files in a checkpoint."""
  checksums = {}
  for file in sorted(folder.rglob("*")):
    if file.is_file() and not file.name.startswith(_CHECKSUMS):
      with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
      checksums[str(file.relative_to(folder))] = digest
  return checksums


def _write(path: pathlib.Path, text: str) -> None:
  """Writes a file that is whole or not there, whenever the process dies."""
  draft = path.with_name(f"{path.name}.tmp")
  with draft.open("w") as file:
    file.write(text + "\n")
    file.flush()
    os.fsync(file.fileno())
  draft.replace(path)


def _first_line(error: BaseException) -> str:
  """An error's type and the first line of its message, at most 200 letters."""
  return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
