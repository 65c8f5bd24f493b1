"""Which checkpoints stay: the newest, and the best by a metric.

How well step s did is known once a line is logged for it, mostly after it was
saved: so what counts is what is known when a later checkpoint is saved. By then
it is at most the newest but one, which stays in any case.
"""

from collections.abc import Iterable, Mapping
import math
from typing import Any

import ml_collections

from experiments import cli


class Kept:
  """The newest `config.keep_checkpoints`, and the best `config.keep_best`.

  Two and none, where the config has no such fields.
  """

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the fields.

    Raises:
      cli.UsageError: if fewer than 2 would stay.
    """
    fields: Any = config
    self._newest = fields.get("keep_checkpoints", 2)
    self._metric = fields.get("keep_best", "")
    self._scores: dict[int, float] = {}
    self._names: set[str] = set()
    if self._newest < 2:
      raise cli.UsageError(
        f"config.keep_checkpoints must be at least 2, got {self._newest}: the"
        " newest may turn out unfinished or damaged."
      )

  def see(self, lines: Iterable[Mapping[str, Any]]) -> None:
    """Takes note of what was logged."""
    if self._metric:
      for line in lines:
        self._names.update(line)
        self._scores |= _scores([line], self._metric)

  def outdated(self, steps: Iterable[int]) -> list[int]:
    """Which of these need not stay, once all of them are whole.

    Raises:
      cli.UsageError: if lines were logged, and none has the metric.
    """
    if self._names and self._metric not in self._names:
      raise cli.UsageError(
        f"config.keep_best must be a metric that is logged, got"
        f" {self._metric!r}{cli.did_you_mean(self._metric, self._names)}"
      )
    steps = sorted(steps)
    best = _largest(self._scores, steps)
    return [x for x in steps[: -self._newest] if x != best]


def best(
  config: ml_collections.ConfigDict,
  lines: Iterable[Mapping[str, Any]],
  steps: Iterable[int],
) -> int:
  """Which of these steps did best, by the metric of `config.keep_best`.

  Raises:
    cli.UsageError: if it names none, or none of the steps has it.
  """
  fields: Any = config
  metric = fields.get("keep_best", "")
  if not metric:
    raise cli.UsageError(
      "the run keeps no best checkpoint: its config.keep_best names no metric."
    )
  found = _largest(_scores(lines, metric), steps := list(steps))
  if found is None:
    raise cli.UsageError(
      f"no line tells the run's {metric!r}, of config.keep_best, at a"
      f" checkpoint ({', '.join(map(str, steps)) or 'there is none'})."
    )
  return found


def _scores(
  lines: Iterable[Mapping[str, Any]], metric: str
) -> dict[int, float]:
  """Each step's value of the metric, where it is a finite number."""
  values = ((x["step"], x[metric]) for x in lines if x.get(metric) is not None)
  return {step: float(x) for step, x in values if math.isfinite(x)}


def _largest(scores: Mapping[int, float], steps: Iterable[int]) -> int | None:
  """The step with the largest score, the last of several."""
  scored = [step for step in steps if step in scores]
  return max(scored, key=lambda step: (scores[step], step), default=None)
