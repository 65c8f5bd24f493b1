"""The processes of one run, and what they tell each other.

On several hosts each runs the same program, and takes the same decisions where
it is told the same. What one finds out alone, a verdict or a failure, goes to
all through the key-value store of `jax.distributed`, which does not need the
devices: so a failure arrives where a collective would wait for ever.

Nothing here waits without a limit. Who waits in vain raises, and its process
then ends, clean-ups that need the lost ones or not.
"""

import atexit
from collections.abc import Callable, Iterator, Mapping
import contextlib
import faulthandler
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple, TypeVar

import jax
from jax._src import distributed
from jax.experimental import multihost_utils
import numpy as np

from groupstd import policies, tasks

__all__ = [
  "HostError",
  "barrier",
  "count",
  "gather",
  "index",
  "leave",
  "preemption",
  "same",
  "share",
]

T = TypeVar("T")

# Seconds: others are waited for a little longer than they may take, so that who
# hangs is the first to say so.
_GRACE = 3.0
_CLEAN_UP = 10.0  # Seconds to end in, once others are lost.


class HostError(RuntimeError):
  """Another process raised, hangs, is gone, or is at something else.

  Attributes:
    cause: what it raised, if that can be pickled; else None.
  """

  def __init__(self, message: str, cause: BaseException | None = None):
    super().__init__(message)
    self.cause = cause


class _Answer(NamedTuple):
  what: str
  result: Any = None
  failure: str = ""  # In words.
  raised: bytes = b""  # The exception, pickled.


# All processes number their exchanges alike.
_numbers = itertools.count()
_preemption_points = itertools.count()
# Why this process has given up the others.
_lost: list[str] = []


def index() -> int:
  """Which of the processes this is; 0 where it is alone."""
  return _distributed().process_id if count() > 1 else 0


def count() -> int:
  """How many there are: 1 where `jax.distributed` is not initialized."""
  state = _distributed()
  return state.num_processes if state.client is not None else 1


def gather(what: str, function: Callable[[], T], *, seconds: float) -> list[T]:
  """function() of every process, in the order of their indices.

  Every process makes the same calls in the same order, from one thread. One
  whose function does not return in time prints where it is, and ends. Where
  this process gives the others up it ends too, within seconds: an exception is
  on its way, but jax and Orbax would hold it for minutes, waiting for them.

  Args:
    what: what this is, the same on every process, for messages.
    function: its result can be pickled.
    seconds: how long it may take, waits for other processes included.

  Raises:
    HostError: if another process raised, or did not answer in time; it is
      named. What this one raises it raises here, after telling the others.

  >>> gather("counting", lambda: 3, seconds=1.0)
  [3]
  """
  if count() == 1:
    return [function()]
  if _lost:
    raise HostError(f"{what}: {_lost[0]}")
  begun = time.monotonic()
  _introduce()
  failed = None
  try:
    with _watched(seconds if index() else seconds + 2 * _GRACE):
      answer = pickle.dumps(_Answer(what, function()))
  except BaseException as error:
    failed, answer = error, _failure(what, f"raised at {what}", error)
  spent = time.monotonic() - begun
  answers, met = _exchange(answer, max(seconds - spent, 0) + _GRACE)
  error = _wrong(what, answers, met, seconds)
  if not met:
    _give_up(str(error))
  if failed is not None:
    raise failed
  if error is not None:
    raise error
  return [answer.result for answer in answers if answer is not None]


def barrier(what: str, seconds: float) -> None:
  """Waits until all processes are here."""
  gather(what, lambda: None, seconds=seconds)


def same(
  what: str, value: Mapping[str, Any], *, seconds: float = 300.0
) -> None:
  """Checks that all processes were given the same.

  Args:
    what: what it is, for the message.
    value: of what JSON can hold.
    seconds: how long others are waited for.

  Raises:
    ValueError: on every process, naming each field that differs.
  """
  found = gather(what, lambda: _fields(value), seconds=seconds)
  differing = []
  for name in sorted(set().union(*found)):
    values = [fields.get(name, "nothing") for fields in found]
    other = next((i for i, x in enumerate(values) if x != values[0]), None)
    if other is not None:
      differing.append(
        f"{name}: process 0 has {values[0]}, process {other} has"
        f" {values[other]}"
      )
  if differing:
    raise ValueError(
      f"{what} must be the same for every process, got {'; '.join(differing)}."
    )


def share(task: tasks.Task, *, seconds: float) -> tasks.Task:
  """The task, of which every process verifies its share of the groups.

  All give it the same answers, as equal and contiguous parts as there are, and
  get the same verdict, whole.

  Args:
    task: what its reward function says of a group depends on that group alone.
    seconds: how long verifying one share may take.
  """
  if count() == 1:
    return task

  def reward(prompts, tokens, mask):
    rows = np.array_split(np.arange(len(tokens)), count())[index()]

    def verify():
      if not len(rows):
        return None
      mine = jax.tree.map(
        lambda x: np.asarray(x)[rows], (prompts, tokens, mask)
      )
      here = isinstance(prompts, policies.Prompts)
      ids = np.asarray(prompts.index)[rows] if here else rows
      return tasks.check_scores(task.reward(*mine), ids, tokens.shape[1])

    found = gather("verifying", verify, seconds=seconds)
    verdicts = [verdict for verdict in found if verdict is not None]
    return jax.tree.map(lambda *x: np.concatenate(x), *verdicts)

  return task._replace(reward=reward)


@contextlib.contextmanager
def preemption() -> Iterator[Callable[[], bool]]:
  """Yields `reached()`: whether to stop, after SIGTERM to any process.

  All processes call it after every step, and it is true at the same call on
  all, so that they save the same step.
  """
  if _distributed().client is not None:
    # It counts steps of its own, as one run may be several loops.
    yield lambda: multihost_utils.reached_preemption_sync_point(
      next(_preemption_points)
    )
    return
  told = threading.Event()
  if threading.current_thread() is not threading.main_thread():
    yield told.is_set  # Only the main thread may hear of signals.
    return
  before = signal.signal(signal.SIGTERM, lambda *_: told.set())
  try:
    yield told.is_set
  finally:
    # None where something else than Python had set it.
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def leave(error: BaseException, code: int) -> None:
  """Tells the others why this process ends, which it does without them.

  For `atexit`, once a program has failed: jax's own barrier at exit would wait
  for minutes for those that do not end. If all end with an error at the same
  point, nothing is lost and this returns. Else it does not.
  """
  if count() == 1:
    return
  if not _lost:
    answer = _failure("the end", "ended", error)
    answers, met = _exchange(answer, _GRACE)
    if met and all(answer and answer.failure for answer in answers):
      return
  _exit(code)


def _distributed() -> Any:
  """The state of `jax.distributed`.

  jax has no public name for its key-value store, which Orbax takes from here
  too; `jax.process_index` would start the devices.
  """
  return distributed.global_state


def _introduce() -> None:
  """Leaves this host's name for those who will miss it."""
  state = _distributed()
  state.client.key_value_set(
    f"groupstd/hosts/{state.process_id}", socket.gethostname(), True
  )


def _named(i: int) -> str:
  names = dict(_distributed().client.key_value_dir_get("groupstd/hosts/"))
  name = names.get(f"groupstd/hosts/{i}", "a host that has not said its name")
  return f"process {i} on {name}"


@contextlib.contextmanager
def _watched(seconds: float) -> Iterator[None]:
  """Ends the process, and shows where it is, if this takes longer."""
  # By a thread of C's: what hangs may hold the lock that Python's need.
  faulthandler.dump_traceback_later(seconds, exit=True, file=2)
  try:
    yield
  finally:
    faulthandler.cancel_dump_traceback_later()


def _failure(what: str, how: str, error: BaseException) -> bytes:
  words = "".join(traceback.format_exception_only(error)).strip()
  try:
    raised = pickle.dumps(error)
  except Exception:  # Pickle raises several kinds.
    raised = b""
  return pickle.dumps(_Answer(what, None, f"{how}: {words}", raised))


def _exchange(
  answer: bytes, seconds: float
) -> tuple[list[_Answer | None], bool]:
  """Everyone's answers, None where there is none; whether all met in time."""
  state = _distributed()
  client, number = state.client, next(_numbers)
  folder = f"groupstd/{number}"
  client.key_value_set_bytes(f"{folder}/{state.process_id}", answer)
  try:
    client.wait_at_barrier(folder, int(seconds * 1000))
    met = True
  except RuntimeError:  # In time or not, what is missing says who is.
    met = False
  found = dict(client.key_value_dir_get_bytes(f"{folder}/"))
  if met and number:  # All have read those before, or they were not here.
    client.key_value_delete(f"groupstd/{number - 1}/{state.process_id}")
  answers = [found.get(f"{folder}/{i}") for i in range(count())]
  return [pickle.loads(x) if x else None for x in answers], met


def _wrong(
  what: str, answers: list[_Answer | None], met: bool, seconds: float
) -> HostError | None:
  """What is wrong with the others, if anything is."""
  for i, answer in enumerate(answers):
    if answer and answer.failure and i != index():
      cause = None
      with contextlib.suppress(
        Exception
      ):  # Any class may be unpickled wrongly.
        cause = pickle.loads(answer.raised)
      return HostError(f"{_named(i)} {answer.failure}", cause)
  missing = [_named(i) for i, answer in enumerate(answers) if answer is None]
  if missing:
    return HostError(
      f"{what}: {', '.join(missing)} did not answer within {seconds:g} s: it"
      " hangs, as its own output then says, or is dead."
    )
  if not met:
    return HostError(
      f"{what}: {_named(index())} answered too late, the others had waited"
      f" for {seconds:g} s."
    )
  there = [answer.what for answer in answers if answer is not None]
  other = next((i for i, x in enumerate(there) if x != there[0]), None)
  if other is not None:
    return HostError(
      "every process must make the same calls in the same order, got"
      f" {there[0]!r} by {_named(0)} and {there[other]!r} by {_named(other)}."
    )
  return None


def _give_up(why: str) -> None:
  """The others are lost: this process ends, whatever waits for them."""
  _lost.append(why)
  logging.getLogger(__name__).error(why)  # A clean-up may never end.
  atexit.register(_exit, 1)
  faulthandler.dump_traceback_later(_CLEAN_UP, exit=True, file=2)


def _exit(code: int) -> None:
  for stream in sys.stdout, sys.stderr:
    stream.flush()
  if index() == 0:
    # With the first process the store ends, and at once all who use it: first
    # they shall say what they have to.
    time.sleep(_GRACE)
  os._exit(code)


def _fields(value: Any) -> dict[str, str]:
  """The JSON text of each field, by its dotted name."""
  leaves = jax.tree.leaves_with_path(
    value, is_leaf=lambda x: not (isinstance(x, Mapping) and x)
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): json.dumps(leaf)
    for path, leaf in leaves
  }
