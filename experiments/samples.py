"""What was drawn, in words: the lines of a run's rollouts.jsonl.

A line is one rollout:

| field     | type          | what                                             |
|-----------|---------------|--------------------------------------------------|
| step      | int           | the updates that had made the policy it is of    |
| epoch     | int           | passes over the questions before this one        |
| id        | int           | its group's prompt                               |
| draw      | int           | 0 of a step's first draw, 1, 2, … of further     |
| rollout   | int           | its place in the group, from 0                   |
| prompt    | str           | what was asked                                   |
| text      | str           | what was answered                                |
| score     | float or null | the verifier's word; null where it abstained     |
| reward    | float or null | what the statistics are of                       |
| parts     | object        | name → float or null: what the reward is made of |
| advantage | float or null | null where none was given                        |
| length    | int           | tokens sampled                                   |
| ended     | bool          | it came to its end and was not cut off           |
| kept      | bool          | its group was trained on                         |

Groups are written whole or not at all. Which are is decided by (seed, step, id)
and never by what was drawn: what `groups` counts is as if all were written.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import hashlib
import math
import os
from typing import Any, NamedTuple

import chex
import numpy as np

from experiments import workdir


def chosen(
  ids: Iterable[int] | np.ndarray, step: int, *, share: float, seed: int = 0
) -> np.ndarray:
  """Which groups of a step are written, [B] booleans, each with chance `share`.

  All draws of a group share its fate, and share it again after a resume. What
  a smaller share chooses a larger one does too.

  Args:
    ids: [B], the prompts'.
    step: of the run.
    share: from 0, none, to 1, all.
    seed: of the run.

  >>> chosen([3, 1, 4, 5], step=10, share=0.5)
  array([False,  True, False, False])
  """
  if not 0 <= share <= 1:
    raise ValueError(
      f"`share` must be in [0, 1], got {share}: it is the share of groups that"
      " are written."
    )

  def uniform(i: int) -> int:
    text = f"{seed} {step} {i}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")

  # Exact, as Python compares an integer with a float: 1 is all and 0 is none.
  return np.array([uniform(int(i)) < share * 2**64 for i in ids], bool)


def lines(
  step: int,
  ids: Sequence[int] | np.ndarray,
  *,
  prompts: Sequence[str],
  texts: Sequence[Sequence[str]],
  scores: chex.Array,
  where: chex.Array,
  rewards: chex.Array,
  lengths: chex.Array,
  ended: chex.Array,
  kept: chex.Array,
  advantages: chex.Array | None = None,
  parts: Mapping[str, chex.Array] | None = None,
  epoch: int = 0,
  draw: int = 0,
) -> Iterator[dict[str, Any]]:
  """The lines of B groups of G rollouts, in order.

  Args:
    step: of the run.
    ids: [B], the prompts'; `chosen` says which groups to give.
    prompts: [B] texts.
    texts: [B, G].
    scores: [B, G].
    where: [B, G], which rollouts have a score.
    rewards: [B, G].
    lengths: [B, G], sampled tokens.
    ended: [B, G].
    kept: [B], which groups are trained on.
    advantages: [B, G], NaN where there is none.
    parts: name → [B, G], NaN where a function abstained.
    epoch: of the run.
    draw: which draw of these groups.

  Raises:
    ValueError: if a shape is another: nothing is broadcast.
  """
  shape = len(ids), *np.shape(scores)[1:2]
  none = np.full(shape, np.nan)
  rollout = {
    "scores": np.asarray(scores),
    "where": np.asarray(where),
    "rewards": np.asarray(rewards),
    "lengths": np.asarray(lengths),
    "ended": np.asarray(ended),
    "advantages": none if advantages is None else np.asarray(advantages),
  }
  part = {name: np.asarray(values) for name, values in (parts or {}).items()}
  found = {name: x.shape for name, x in rollout.items()}
  found |= {f"parts[{name!r}]": x.shape for name, x in part.items()}
  found["texts"] = (len(texts), *({len(row) for row in texts} or shape[1:]))
  for name, there in found.items():
    if there != shape:
      raise ValueError(f"`{name}` must be [B, G] = {shape}, got {there}.")
  for name, there in ("prompts", (len(prompts),)), ("kept", np.shape(kept)):
    if there != shape[:1]:
      raise ValueError(f"`{name}` must be [B] = {shape[:1]}, got {there}.")
  trained = np.asarray(kept)
  for row, i in np.ndindex(shape):
    scored = rollout["where"][row, i]
    yield {
      "step": int(step),
      "epoch": int(epoch),
      "id": int(ids[row]),
      "draw": int(draw),
      "rollout": i,
      "prompt": prompts[row],
      "text": texts[row][i],
      "score": _number(rollout["scores"][row, i]) if scored else None,
      "reward": _number(rollout["rewards"][row, i]) if scored else None,
      "parts": {name: _number(x[row, i]) for name, x in part.items()},
      "advantage": _number(rollout["advantages"][row, i]),
      "length": int(rollout["lengths"][row, i]),
      "ended": bool(rollout["ended"][row, i]),
      "kept": bool(trained[row]),
    }


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """The lines of a run's folder, also while it trains."""
  return workdir.read_rollouts(path)


class Groups(NamedTuple):
  """Groups by what was right, k of n scored rollouts each; [P] integers."""

  step: np.ndarray
  id: np.ndarray
  k: np.ndarray
  n: np.ndarray


def groups(path: str | os.PathLike[str]) -> Groups:
  """How many were right in each group of a run, for `groupstd.estimates`.

  Of a group that was drawn again because it was silent only the first draw
  counts: the others exist because of what came before, and would bias every
  estimate. A group is of one policy, and groups of different steps of
  different ones: to estimate what a policy does, select its step.

    found = samples.groups(path)
    last = found.step == found.step.max()
    estimates.silent_rate(found.k[last], found.n[last], group_size)

  Raises:
    ValueError: if a score is neither 0 nor 1, and right or wrong not decided.
  """
  first: dict[tuple[int, int], int] = {}
  counts: dict[tuple[int, int], tuple[int, int]] = {}
  for line in read(path):
    group, score = (line["step"], line["id"]), line["score"]
    if line["draw"] > first.setdefault(group, line["draw"]) or score is None:
      continue
    if score not in (0, 1):
      raise ValueError(
        f"scores must be 0 or 1, got {score} at step {group[0]} for prompt"
        f" {group[1]}: k counts what is right."
      )
    k, n = counts.get(group, (0, 0))
    counts[group] = k + int(score), n + 1
  rows = [(*group, k, n) for group, (k, n) in counts.items()]
  return Groups(*np.array(rows, int).reshape(-1, 4).T)


def _number(value: Any) -> float | None:
  """The float, or None for NaN."""
  return None if math.isnan(value := float(value)) else value
