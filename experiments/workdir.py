"""A run's folder, and the only code that writes into it.

  config.json     what the run was asked to do
  data.json       the checksums of what it learns from
  state.json      the shapes and dtypes of its state
  metrics.jsonl   a line {"step": …} for each call of `log`
  rollouts.jsonl  the lines given to `log_rollouts`
  checkpoints/    the newest states and the best, a folder a step

To resume is the default: a run that is killed at any moment and started again
by the same command ends with the same state and the same lines, bit for bit, as
one that was not. For this a checkpoint holds the lengths of the .jsonl files
next to the state; restoring it cuts them there, and what followed is logged
again.

The processes of a run share the folder and make the same calls. The first alone
holds the lock, writes, and looks at what is there; what it finds and refuses,
all of them do. A checkpoint is written and read by all, each its part, and one
that any of them cannot read is damaged for all.
"""

from collections.abc import Iterable, Iterator, Mapping
import concurrent.futures
import contextlib
import json
import os
import pathlib
from typing import Any, Literal

from absl import logging
import ml_collections

from experiments import checkpoints, cli, kept, manifest, streams
from groupstd import hosts

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

  The newest `config.keep_checkpoints` checkpoints stay (2 if there is no such
  field), and the one of the step for which the largest value of the metric
  `config.keep_best` was logged, if it names one.

  Attributes:
    path: the folder, absolute.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    config: ml_collections.ConfigDict,
    data: Mapping[str, str] | None = None,
  ):
    """Opens the folder, made where there is none.

    Args:
      path: the folder.
      config: what the run is asked to do, of numbers, strings, lists, dicts.
      data: the checksums of what it learns from, by name, for what a path in
        the config leads to may change; `manifest` makes them.

    Raises:
      cli.UsageError: if another run is at work in the folder, if it holds one
        with another config or of other data (every field that differs is
        named), if it cannot be a run's folder, or if the processes of this run
        do not have the same data.
    """
    self._kept = kept.Kept(config)
    self.path = pathlib.Path(path).absolute()
    self._streams: streams.Streams | None = None
    self._saving: concurrent.futures.Future[None] | None = None
    self._steps: list[int] = []
    data = dict(data or {})
    with cli.building():
      hosts.same("The data", data)
    with contextlib.ExitStack() as stack:

      def opened():
        stack.enter_context(manifest.locked(self.path))
        others = _METRICS, _ROLLOUTS, _CHECKPOINTS
        manifest.claim(self.path, config, data, others)
        self._folder.mkdir(exist_ok=True)

      checkpoints.decide(f"opening {self.path}", opened)
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
        shapes, dtypes and shardings, whatever devices and processes the
        checkpoint was saved from.

    Raises:
      cli.UsageError: if the checkpoints are of states with other shapes or
        dtypes (every leaf that differs is named), or all of them are damaged.
    """
    whole = checkpoints.decide(
      f"looking for checkpoints in {self.path}",
      lambda: self._found(checkpoints.shapes(state)),
    )
    found, causes = None, {}
    for step in whole[::-1]:
      try:
        found = self._load(step, state)
        break
      except checkpoints.DamagedError as error:
        causes[step] = str(error)
    if found is None and causes:
      raise cli.UsageError(
        f"every checkpoint in {self.path} is damaged: {_listed(causes)}."
        " Another folder starts afresh."
      )
    state, lengths = found or (state, {_METRICS: 0, _ROLLOUTS: 0})

    def cut():
      for step, why in causes.items():
        checkpoints.remove(self._folder / str(step))
        self._tell_removed(step, why)
      self._streams = self._resources.enter_context(
        streams.Streams(self.path, lengths)
      )
      self._kept.see(self.metrics())

    checkpoints.decide(f"cutting the lines in {self.path}", cut)
    if hosts.index():  # What it logs, the first process writes.
      self._streams = streams.Streams(self.path, {})
    self._steps = [step for step in whole if step not in causes]
    return state

  def log(self, step: int, metrics: dict[str, Any]) -> None:
    """Appends {"step": step, **metrics} to metrics.jsonl.

    Args:
      step: the number of steps done.
      metrics: what a line can hold, as `streams.Streams.append` says.
    """
    line = {"step": step, **metrics}
    self._restored.append(_METRICS, [line])
    self._kept.see([line])

  def log_rollouts(self, lines: Iterable[dict[str, Any]]) -> None:
    """Appends lines to rollouts.jsonl."""
    self._restored.append(_ROLLOUTS, lines)

  def save(self, step: int, state: Any) -> None:
    """Starts to save the state; its buffers may be donated at once.

    A step that is there already is left alone. What was logged so far is on
    disk before the checkpoint is; `close` waits until that is whole.

    Raises:
      cli.UsageError: if what was logged has no `config.keep_best`.
    """
    logs = self._restored
    if step in self._steps:
      return
    steps = [*self._steps, step]

    def ready():
      self._wait()
      return logs.sync()

    lengths = hosts.gather(
      f"the save before that of step {step}",
      ready,
      seconds=checkpoints.PATIENCE,
    )[0]
    outdated = checkpoints.decide(
      f"the save of step {step}", lambda: self._kept.outdated(steps)
    )
    saved = checkpoints.save(
      self._folder / str(step), {"state": state, "lengths": lengths}
    )
    self._steps = [x for x in steps if x not in outdated]

    def seal():
      saved()
      if hosts.index() == 0:
        checkpoints.seal(self._folder / str(step))
        for old in outdated:
          checkpoints.remove(self._folder / str(old))

    self._saving = self._thread.submit(seal)

  @property
  def resumes(self) -> bool:
    """Whether there is a checkpoint to go on from."""
    return checkpoints.decide(
      f"looking into {self.path}", lambda: bool(checkpoints.steps(self._folder))
    )

  def metrics(self) -> list[dict[str, Any]]:
    """The lines logged so far."""
    return read_metrics(self.path)

  def close(self) -> None:
    """Waits for the save under way and unlocks the folder."""
    self._resources.close()

  def __exit__(self, kind, *_) -> None:
    try:
      # What ends on all at the same step: none leaves before the last save is
      # whole, or the first, which seals it, would be ended as left alone.
      if kind is None or issubclass(kind, cli.Stopped | cli.Interrupted):
        hosts.gather("the last save", self._wait, seconds=checkpoints.PATIENCE)
    finally:
      self.close()

  @property
  def _folder(self) -> pathlib.Path:
    return self.path / _CHECKPOINTS

  @property
  def _restored(self) -> streams.Streams:
    """The files of lines, each open after its last line that stands."""
    if self._streams is None:
      raise RuntimeError(
        "`restore` must come before `log` and `save`: it decides which lines"
        f" of {_METRICS} and {_ROLLOUTS} stand."
      )
    return self._streams

  def _found(self, shapes: dict[str, str]) -> list[int]:
    """The whole checkpoints of states with these shapes; nothing else stays."""
    whole = checkpoints.steps(self._folder)
    if whole:
      manifest.check(self.path / manifest.STATE, shapes)
    else:
      text = json.dumps(shapes, indent=2)
      checkpoints.write(self.path / manifest.STATE, text)
    for step in checkpoints.clean(self._folder):
      self._tell_removed(step, "the process died before it was whole")
    return whole

  def _load(self, step: int, state: Any) -> tuple[Any, dict[str, int]]:
    """The state and the lengths of the logs at a step, if all is well."""
    like = {"state": state, "lengths": {_METRICS: 0, _ROLLOUTS: 0}}
    saved = checkpoints.read(self._folder / str(step), like)
    checkpoints.agree(
      f"looking at the lines in {self.path}",
      lambda: streams.check(self.path, saved["lengths"]),
      first=True,
    )
    return saved["state"], saved["lengths"]

  def _tell_removed(self, step: int, why: str) -> None:
    logging.warning(
      f"checkpoint {step} in {self.path} is removed: {why}. The run resumes"
      " from the one before it, or from the beginning."
    )

  def _wait(self) -> None:
    """Waits for the save under way; raises what went wrong with it, once."""
    saving, self._saving = self._saving, None
    if saving is not None:
      saving.result()


def load(
  path: str | os.PathLike[str],
  like: Any,
  step: int | Literal["best"] | None = None,
) -> tuple[int, Any]:
  """(step, state) of a run's newest whole checkpoint, of a given or best step.

  For evaluating a run, or starting another from it: takes no lock, changes
  nothing in the folder, and may be called while the run trains. Where there
  are several processes, all of them call it.

    like = jax.eval_shape(policy.init, jax.random.key(0))
    step, state = workdir.load(path, {"params": like})

  Args:
    path: the run's folder.
    like: a pytree of arrays or ShapeDtypeStructs, the state that was saved or
      any part of it: {"params": …} of a TrainState, or a TrainState with `...`
      for what is not wanted. What is loaded has its structure, shapes, dtypes
      and shardings (one device where it names none).
    step: of the checkpoint; "best" is the one with the largest value of the
      metric that the run's `config.keep_best` names; by default the newest,
      where a damaged one is passed over, with a warning, for the one before
      it.

  Raises:
    cli.UsageError: if there is no such checkpoint, it is damaged (the file is
      named), or holds other shapes or dtypes (every leaf that differs is
      named).
  """
  path = pathlib.Path(path).absolute()

  def known():
    if not (path / manifest.STATE).exists():
      raise cli.UsageError(
        f"{path} holds no run that can be loaded: it has no {manifest.STATE}."
      )
    manifest.check(path / manifest.STATE, checkpoints.shapes(like), part=True)

  checkpoints.decide(f"looking into {path}", known)
  causes: dict[int, str] = {}
  while True:
    # Anew each time: the run may have saved another, and removed this one.
    chosen, damaged = checkpoints.decide(
      f"choosing a checkpoint in {path}", lambda: _choose(path, step, causes)
    )
    try:
      checkpoint = path / _CHECKPOINTS / str(chosen)
      state = checkpoints.read(checkpoint, {"state": like})["state"]
    except checkpoints.DamagedError as error:
      causes[chosen] = str(error)
      continue
    if damaged:
      logging.warning(
        f"checkpoint {chosen} in {path} is loaded, as later ones are damaged:"
        f" {_listed(damaged)}."
      )
    return chosen, state


def read_config(path: str | os.PathLike[str]) -> ml_collections.ConfigDict:
  """What a run was asked to do; its lists come back as tuples.

  Raises:
    cli.UsageError: if the folder holds no run.
  """
  file = pathlib.Path(path) / manifest.CONFIG
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


def _choose(
  path: pathlib.Path,
  step: int | Literal["best"] | None,
  causes: dict[int, str],
) -> tuple[int, dict[int, str]]:
  """The checkpoint to read next, and which of those passed over are there."""
  there = checkpoints.steps(path / _CHECKPOINTS)
  if step == "best":
    step = kept.best(read_config(path), read_metrics(path), there)
  if step is not None and step not in there:
    raise cli.UsageError(
      f"{path} holds no whole checkpoint of step {step}; it holds"
      f" {', '.join(map(str, there)) or 'none'}."
    )
  untried = {step} if step is not None else set(there)
  if not (untried := untried.difference(causes)):
    raise cli.UsageError(
      f"{path} holds no whole checkpoint:"
      f" {_listed(causes) or 'none was saved'}."
    )
  return max(untried), {s: why for s, why in causes.items() if s in there}


def _tuples(value: Any) -> Any:
  """JSON's lists as the tuples that configs are made of."""
  if isinstance(value, dict):
    return {key: _tuples(item) for key, item in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _listed(causes: dict[int, str]) -> str:
  return "; ".join(f"{step}: {why}" for step, why in causes.items())
