"""Workers: processes that run verifiers and can be lost.

A worker takes a job, one verifier on some answers, and reports outcomes in
their order, so that a call that never returns costs the process and no more
than a moment of others' work. It ignores Ctrl-C and ends with its parent,
however that ends.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import ctypes
import faulthandler
import math
import multiprocessing
from multiprocessing import connection as connections
from multiprocessing import resource_tracker
import numbers
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from typing import Any, Literal, NamedTuple

import numpy as np

from groupstd.answers import Verifier
from groupstd.questions import Question

__all__ = [
  "Items",
  "Job",
  "Outcome",
  "Verifier",
  "Worker",
  "dump",
  "outcome",
  "wait",
]

# Answers' texts and their questions.
Items = Sequence[tuple[str, Question]]
# A score, None for an abstention, or in words what went wrong.
Outcome = float | str | None

_RUNS = (signal.SIGINT, signal.SIGTERM)  # A run's own, and not its workers'.
_REPORT_EVERY = 0.01  # Seconds of work that a worker keeps to itself.
_START_LIMIT = 120.0  # Seconds for a worker to import its verifiers.


class Job(NamedTuple):
  """One verifier on some of a call's answers."""

  name: str
  indices: Sequence[int]


def dump(verifiers: Mapping[str, Verifier]) -> bytes:
  """What a worker is made of.

  Raises:
    ValueError: if a verifier cannot be pickled; it is named.
  """
  for name, verifier in verifiers.items():
    try:
      pickle.dumps(verifier)
    except Exception as error:  # Pickle raises several kinds.
      raise ValueError(
        f"verifier {name!r} must be a function of a module, or a partial of"
        f" one, to be sent to a worker, got {verifier!r}: {error}"
      ) from error
  return pickle.dumps(dict(verifiers))


def outcome(verifier: Verifier, text: str, question: Question) -> Outcome:
  """What a verifier says."""
  try:
    score = verifier(text, question)
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # A panic of Rust's is no Exception.
    return "".join(traceback.format_exception_only(error)).strip()[:300]
  if score is None:
    return None
  if not isinstance(score, numbers.Real | np.bool_) or not math.isfinite(score):
    return f"returned {score!r:.100}, where a finite number or None is due"
  return float(score)


class Worker:
  """A process, what it is at, and since when.

  Attributes:
    job: what it is at, or None.
    ready: whether it has imported its verifiers.
  """

  def __init__(self, pickled: bytes, time_limit: float):
    """Starts the process, and does not wait for it.

    Args:
      pickled: by `dump`.
      time_limit: wall-clock seconds for one call of a verifier.
    """
    context = multiprocessing.get_context("spawn")
    self.job: Job | None = None
    self.ready = False
    self._limit = time_limit
    self._connection, theirs = context.Pipe()
    self._place = context.RawValue(ctypes.c_longlong)  # Within its job.
    self._process = context.Process(
      target=_work,
      args=(theirs, self._place, pickled, time_limit),
      daemon=True,
    )
    resource_tracker.ensure_running()  # Its start would unblock signals.
    with _signals_blocked(), _main_hidden(unless=b"__main__" in pickled):
      self._process.start()
    theirs.close()
    self._ended = False
    self._received = 0
    self._seen = 0
    self._since = self._watched = time.monotonic()

  @property
  def idle(self) -> bool:
    return self.ready and self.job is None

  @property
  def alive(self) -> bool:
    return self._process.is_alive()

  def give(self, job: Job, items: Items) -> None:
    """Hands a job to an idle worker; `items` are all the call's."""
    self._place.value = self._seen = self._received = 0
    self._since = self._watched = time.monotonic()
    self.job = job
    with contextlib.suppress(ConnectionError):  # Noticed as its end.
      self._connection.send((job.name, [items[i] for i in job.indices]))

  def receive(self) -> list[tuple[str, int, Outcome]]:
    """(verifier, answer, outcome) of what has been reported since.

    Raises:
      RuntimeError: if the verifiers cannot be imported.
    """
    found = []
    while not self.idle and not self._ended and self._connection.poll():
      try:
        report = self._connection.recv()
      except (EOFError, OSError):  # The latter in the midst of a message.
        self._ended = True
        break
      if self.job is None:
        if report is not None:
          raise RuntimeError(f"a worker must import its verifiers:\n{report}")
        self.ready = True
        continue
      name, indices = self.job
      for result in report:
        found.append((name, indices[self._received], result))
        self._received += 1
      if self._received == len(indices):
        self.job = None
    return found

  def failure(self) -> Literal["timeouts", "died"] | None:
    """Whether its call has been watched for too long, or ended the process.

    Raises:
      RuntimeError: if it did not get as far as a call.
    """
    now = time.monotonic()
    late = now > self._since + _START_LIMIT
    if not self.ready and (late or self._ended):
      how = f"in {_START_LIMIT:g} s" if late else "before its process ended"
      raise RuntimeError(
        f"a worker must import its verifiers, it did not {how}: see stderr."
      )
    if self._place.value != self._seen:
      self._seen, self._since = self._place.value, now
    if now > self._watched + self._limit / 2:  # Stopped, and with it perhaps
      self._since += now - self._watched  # the worker: that is not its time.
    self._watched = now
    if self._ended:
      return "died"
    return "timeouts" if self.job and now > self._since + self._limit else None

  def lost(self) -> tuple[str, int, list[Job]]:
    """(verifier, answer) of the call that failed, and what remains to do."""
    assert self.job is not None
    name, indices = self.job
    place = self._place.value
    rest = [*indices[self._received : place], *indices[place + 1 :]]
    return name, indices[place], [Job(name, rest)] if rest else []

  def kill(self) -> None:
    """Ends the process, and those that its verifiers have started."""
    assert self._process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # Not a group's head yet.
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.kill()
    self._process.join()
    self._connection.close()


def wait(workers: Sequence[Worker], seconds: float) -> None:
  """Until one of them reports or ends, or the time is over."""
  connections.wait([worker._connection for worker in workers], seconds)


def _work(
  connection: connections.Connection,
  place: Any,
  pickled: bytes,
  time_limit: float,
) -> None:
  """A worker's life: jobs in, lists of outcomes out."""
  os.setsid()  # The head of a group, so that all of it can be ended.
  # Ctrl-C and a scheduler's SIGTERM go to all processes, and are the run's. Not
  # blocked nor ignored, as what a verifier starts would inherit that.
  for number in _RUNS:
    signal.signal(number, lambda *_: None)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, _RUNS)
  parent = multiprocessing.parent_process()
  assert parent is not None

  def end_with_parent():
    connections.wait([parent.sentinel])
    os._exit(1)

  # However long the main thread takes, if it lets other threads run at all.
  threading.Thread(target=end_with_parent, daemon=True).start()
  try:
    verifiers = pickle.loads(pickled)
  except BaseException:
    connection.send(traceback.format_exc())
    return
  connection.send(None)
  with open(os.devnull, "w") as nowhere, contextlib.suppress(EOFError):
    while True:
      name, items = connection.recv()
      verifier, outcomes, reported = verifiers[name], [], time.monotonic()
      # If it does not, and nobody is left to kill it, a thread of C's ends the
      # process once the job must have been over.
      faulthandler.dump_traceback_later(
        2 * time_limit * len(items) + 1, exit=True, file=nowhere
      )
      for i, (text, question) in enumerate(items):
        place.value = i
        outcomes.append(outcome(verifier, text, question))
        if time.monotonic() > reported + _REPORT_EVERY:
          connection.send(outcomes)
          outcomes, reported = [], time.monotonic()
      faulthandler.cancel_dump_traceback_later()
      connection.send(outcomes)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
  """For the process that is started within, until it has its handlers."""
  before = signal.pthread_sigmask(signal.SIG_BLOCK, _RUNS)
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _main_hidden(unless: bool) -> Iterator[None]:
  """A spawned process imports the main module that it sees: an empty one.

  A training script's would bring jax, its flags and seconds to every worker.
  """
  main = sys.modules["__main__"]
  if not unless:
    sys.modules["__main__"] = types.ModuleType("__main__")
  try:
    yield
  finally:
    sys.modules["__main__"] = main
