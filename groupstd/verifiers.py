"""A pool of verifiers: what answers' texts are worth, found by other processes.

A verifier is somebody's code on a model's text: it may raise, hang or take its
process down. None of these is a wrong answer. Each is counted apart and leaves
the answer without a score; where they are many the call is refused.

Nothing here imports jax.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import math
from typing import NamedTuple

import numpy as np

from groupstd.workers import (
  Items,
  Job,
  Outcome,
  Verifier,
  Worker,
  dump,
  outcome,
  wait,
)

__all__ = ["Counts", "Pool", "TooManyFailures", "Verifier"]

_JOBS_PER_WORKER = 4  # Of one verifier: more balance better and cost messages.
_NUM_MESSAGES = 5


class TooManyFailures(RuntimeError):
  """Too many answers of one call were left without a score by failures."""


class Counts(NamedTuple):
  """What became of calls that gave no score, and of all.

  Attributes:
    calls: of a verifier on an answer.
    abstained: how many returned None.
    exceptions: how many raised, or returned what is not a finite number.
    timeouts: how many ran past the time limit.
    died: how many took their process down.
  """

  calls: int = 0
  abstained: int = 0
  exceptions: int = 0
  timeouts: int = 0
  died: int = 0


class Pool:
  """Scores answers with every verifier, in processes that can be lost.

  A worker that runs past the limit on one answer is killed and replaced, even
  within a C call that never returns. Workers ignore Ctrl-C and end with their
  parent, however that ends. They unpickle a verifier, so it is a function of a
  module, or a `functools.partial` of one; they do not import the main module,
  unless a verifier is in it, and then that must be guarded by
  `if __name__ == "__main__"`. Verifiers run in the main thread of a daemonic
  process; one may be called again on an answer if the result was lost.

  Attributes:
    verifiers: by name.
    counts: since the pool began.
    messages: the first few failures: verifier, error, text.

  >>> def exact(text, question):
  ...   return float(text.strip() == question.answer)
  >>> from groupstd.questions import Question
  >>> with Pool({"exact": exact}, num_workers=0) as pool:
  ...   pool([(" 4", Question("2 + 2 =", "4"))])
  {'exact': array([1.])}
  """

  def __init__(
    self,
    verifiers: Mapping[str, Verifier],
    *,
    num_workers: int = 2,
    time_limit: float = 5.0,
    max_failures: float = 0.2,
  ):
    """Starts the workers, and does not wait for them.

    Args:
      verifiers: by name, at least one.
      num_workers: processes. With 0 verifiers run in this one, without a time
        limit: for tests, and for verifiers that cannot hang.
      time_limit: wall-clock seconds for one call, kept to within a fifth.
      max_failures: the share of a call's answers that may fail; see
        `together`.

    Raises:
      ValueError: if a number is out of its range, or a verifier has no name or
        cannot be pickled.
    """
    if not verifiers or not all(
      isinstance(name, str) and name for name in verifiers
    ):
      raise ValueError(
        "`verifiers` must be at least one, by name, got the names"
        f" {list(verifiers)}."
      )
    if not isinstance(num_workers, int) or num_workers < 0:
      raise ValueError(
        f"`num_workers` must be an integer of at least 0, got {num_workers!r}."
      )
    if not 0 < time_limit < math.inf:
      raise ValueError(
        f"`time_limit` must be positive and finite, got {time_limit}."
      )
    if not 0 <= max_failures <= 1:
      raise ValueError(
        f"`max_failures` must be a share from 0 to 1, got {max_failures}."
      )
    self.verifiers = dict(verifiers)
    self.counts = Counts()
    self.messages: list[str] = []
    self._num_workers = num_workers
    self._time_limit = time_limit
    self._max_failures = max_failures
    self._pickled = dump(verifiers) if num_workers else b""
    self._workers: list[Worker] = []
    self._closed = False
    self._together: tuple[int, int] | None = None  # Answers, and failed ones.
    self._fill()

  def __enter__(self) -> "Pool":
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def close(self) -> None:
    """Ends the workers; the pool is of no use after."""
    self._closed = True
    self._drop(self._workers)

  @contextlib.contextmanager
  def together(self) -> Iterator[None]:
    """Takes the calls within as one: `max_failures` is of all their answers.

    Of a small call after a large one a share alone would be a matter of chance.
    """
    self._together = 0, 0
    try:
      yield
    finally:
      self._together = None

  def __call__(self, items: Items) -> dict[str, np.ndarray]:
    """Name → [N] scores, NaN where a verifier abstained or failed.

    Args:
      items: N pairs (the answer's text, its question).

    Raises:
      TooManyFailures: if more than `max_failures` of the N answers failed, or
        of those since `together` began, as soon as that is certain.
      RuntimeError: if the pool is closed, or a worker cannot start.
    """
    if self._closed:
      raise RuntimeError("the pool must be open, it has been closed.")
    before = self._together or (0, 0)
    call = _Call(self.verifiers, items, self._max_failures, *before)
    try:
      if self._num_workers:
        self._run(call)
      else:
        for name, indices in call.jobs(1):
          for i in indices:
            call.record(name, i, outcome(self.verifiers[name], *items[i]))
    except BaseException:
      # What busy workers would still report is of no call that follows.
      self._drop([worker for worker in self._workers if not worker.idle])
      raise
    finally:
      self.counts = Counts(*np.add(self.counts, call.counts).tolist())
      room = _NUM_MESSAGES - len(self.messages)
      self.messages += call.messages[:room]
    if self._together:
      self._together = call.asked, call.failed
    return call.parts

  def _run(self, call: "_Call") -> None:
    """Keeps every worker at a job until all are done."""
    waiting = call.jobs(_JOBS_PER_WORKER * self._num_workers)[::-1]
    while True:
      self._fill()
      for worker in self._workers:
        if waiting and worker.idle:
          worker.give(waiting.pop(), call.items)
      busy = [x for x in self._workers if x.job or (waiting and not x.ready)]
      if not busy:
        return
      wait(busy, self._time_limit / 10)
      for worker in busy:
        for result in worker.receive():
          call.record(*result)
        if kind := worker.failure():
          self._drop([worker])
          name, index, rest = worker.lost()
          waiting += rest
          words = "ran past the limit" if kind == "timeouts" else "ended"
          call.record(name, index, f"the process {words}", kind)

  def _fill(self) -> None:
    """Brings the workers to their number, whatever became of idle ones."""
    self._drop([x for x in self._workers if x.idle and not x.alive])
    while len(self._workers) < self._num_workers:
      self._workers.append(Worker(self._pickled, self._time_limit))

  def _drop(self, workers: Sequence[Worker]) -> None:
    self._workers = [x for x in self._workers if x not in workers]
    for worker in workers:
      worker.kill()


class _Call:
  """What is known of one call's answers so far."""

  def __init__(
    self,
    names: Iterable[str],
    items: Items,
    share: float,
    asked: int,
    failed: int,
  ):
    self.items = items
    self.asked = asked + len(items)  # With those of the calls before.
    self.parts = {name: np.full(len(items), np.nan) for name in names}
    self.counts = Counts()
    self.messages: list[str] = []
    self._failed: set[int] = set()
    self._failed_before = failed
    self._allowed = share * self.asked

  @property
  def failed(self) -> int:
    return self._failed_before + len(self._failed)

  def jobs(self, number: int) -> list[Job]:
    """Every verifier on every answer, in at most `number` jobs for each."""
    everything = range(len(self.items))
    length = max(1, -(-len(everything) // number))
    return [
      Job(name, everything[start : start + length])
      for start in everything[::length]
      for name in self.parts
    ]

  def record(
    self, name: str, index: int, result: Outcome, kind: str = "exceptions"
  ) -> None:
    """Notes a score, an abstention, or a failure of some kind."""
    self._count("calls")
    if result is None:
      self._count("abstained")
    elif not isinstance(result, str):
      self.parts[name][index] = result
    else:
      self._count(kind)
      self._failed.add(index)
      text = self.items[index][0]
      cut = text if len(text) <= 80 else f"{text[:40]} … {text[-40:]}"
      self.messages.append(f"{name}: {result}, on {cut!r}")
      if self.failed > self._allowed:
        raise TooManyFailures(
          f"at most {self._allowed:g} of {self.asked} answers may be left"
          f" without a score by failures, got {self.failed} after"
          f" {self.counts.calls} calls ({self.counts.exceptions} exceptions,"
          f" {self.counts.timeouts} time-outs, {self.counts.died} dead"
          " processes):"
          + "".join(f"\n  {x}" for x in self.messages[:_NUM_MESSAGES])
        )

  def _count(self, kind: str) -> None:
    self.counts = self.counts._replace(**{kind: getattr(self.counts, kind) + 1})
