"""What a step of a language model drew: its metrics, and lines to read.

Of everything drawn, what dynamic sampling drops included: reward_drawn (mean
score), reward (mean of what is trained on) and reward/<verifier>; tokens,
length, length_max, truncated (the share cut off); unscored, and the verifiers'
exceptions, timeouts and died.

Of first draws of a prompt: all_wrong, all_right and silent_share, shares of
groups without, with nothing but, and without a mix of right answers; std, the
mean σ of the scores.

Of the batch: reward_kept, the mean score of the groups that are kept, and
scale, the mean w = σ(A)/σ(R) of those whose rewards differ.

Every process has the same, but for seconds_verify, which is its own.
"""

from collections.abc import Iterator
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments import building, samples
from groupstd import (
  hosts,
  questions,
  rollouts,
  sigma,
  tasks,
  tokenizers,
  verifiers,
)


class Drawn:
  """Hears of every draw; at the end of a step, says what it came to.

  Attributes:
    task: the task, which is timed, and whose verifiers' failures are counted.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    tokenizer: tokenizers.Tokenizer,
    asked: questions.Questions,
    task: tasks.Task,
    pool: verifiers.Pool,
    rule: sigma.Rule,
  ):
    with building.field("config.rollouts_share"):
      samples.chosen([], 0, share=config.rollouts_share)  # Raises early.
    self.task = task._replace(reward=self._reward)
    self._config = config
    self._tokenizer = tokenizer
    self._asked = asked
    self._pool = pool
    self._verify = task.reward
    self._begin()
    self._lines: list[dict[str, Any]] = []

    @jax.jit
    def batch(rollout):
      advantages, keep = rule(rollout.rewards, rollout.where, rollout.scores)
      rewards = sigma.group_stats(rollout.rewards, rollout.where)
      scores = sigma.group_stats(rollout.scores, rollout.where)
      kept = keep & (scores.size > 0)
      differ = kept & (rewards.std > 0)
      scale = sigma.group_stats(advantages, rollout.where).std / jnp.where(
        differ, rewards.std, 1
      )
      return (
        advantages,
        kept,
        {
          "reward_kept": _mean(scores.mean, kept * scores.size),
          "scale": _mean(scale, differ),
        },
      )

    self._batch = batch

  def observe(self, draw: rollouts.Draw) -> None:
    self._draws.append(draw)

  def summary(
    self, step: int, rollout: rollouts.Rollout, counts: rollouts.Counts
  ) -> dict[str, Any]:
    """Metrics of the step, whose batch this is."""
    config, draws = self._config, self._draws
    advantages, kept, found = rollouts.on_host(
      self._batch(rollout._replace(tokens=None, mask=None, log_probs=None))
    )
    every = _Groups(draws)
    # What replaces a silent group is another prompt's first draw.
    first = _Groups(draws if config.max_rounds > 1 else draws[:1])
    scored = first.where.any(axis=1)
    found |= {
      "reward_drawn": _share(every.scores, every.where),
      "reward": _share(every.rewards, every.where),
      "all_wrong": _share(first.highest <= 0, scored),
      "all_right": _share(first.lowest >= 1, scored),
      "silent_share": counts.first_silent / counts.first_draws,
      "std": _share(first.std, scored),
      "tokens": every.lengths.sum(),
      "length": every.lengths.mean(),
      "length_max": every.lengths.max(),
      "truncated": 1 - every.ended.mean(),
      "unscored": np.sum(~every.where),
    }
    for name in draws[0].parts:
      part = np.concatenate([draw.parts[name] for draw in draws])
      found[f"reward/{name}"] = _share(part, ~np.isnan(part))
    found |= counts._asdict()
    # Each process has verified its share.
    failures = np.sum(
      hosts.gather("counting failures", lambda: self._failures, seconds=300.0),
      axis=0,
    )
    found |= dict(
      zip(
        ("exceptions", "timeouts", "died"), failures[-3:].tolist(), strict=True
      )
    )
    found["seconds_verify"] = self._seconds
    if self.task.epoch is not None:
      asked = config.num_groups * config.max_rounds
      found["epoch"], found["position"] = self.task.epoch(step, asked)
    rows = {i: row for row, i in enumerate(np.asarray(rollout.prompts.index))}
    for draw in draws:
      self._lines += self._texts(step, draw, found, rows, advantages, kept)
    self._begin()
    return found

  def samples(self) -> list[dict[str, Any]]:
    """Lines for rollouts.jsonl, since it was last called."""
    lines, self._lines = self._lines, []
    return lines

  def _begin(self) -> None:
    self._draws: list[rollouts.Draw] = []
    self._seconds = 0.0
    self._failures = np.zeros(len(verifiers.Counts()), int)

  def _reward(self, prompts, tokens, mask):
    begun, before = time.monotonic(), self._pool.counts
    verdict = self._verify(prompts, tokens, mask)
    self._failures += np.subtract(self._pool.counts, before)
    self._seconds += time.monotonic() - begun
    return verdict

  def _texts(
    self,
    step: int,
    draw: rollouts.Draw,
    found: dict[str, Any],
    rows: dict[int, int],
    advantages: np.ndarray,
    kept: np.ndarray,
  ) -> Iterator[dict[str, Any]]:
    """Lines of the share of a draw's groups that is written."""
    config = self._config
    chosen = samples.chosen(
      draw.ids, step, share=config.rollouts_share, seed=config.seed
    )
    if not chosen.any():
      return iter(())
    groups = jax.tree.map(lambda x: np.asarray(x)[chosen], draw.groups)
    ids = draw.ids[chosen].tolist()
    # A silent group is in the batch only where nothing came after it.
    last = draw is self._draws[-1] and config.max_rounds == 1
    present = ~_Groups([draw]).silent[chosen] | last
    row = [rows.get(i, 0) for i in ids]
    trained = present & [i in rows for i in ids] & kept[row]
    return samples.lines(
      step,
      ids,
      prompts=[self._asked[i].prompt for i in ids],
      texts=[
        [
          self._tokenizer.decode(answer[real].tolist())
          for answer, real in zip(group, mask, strict=True)
        ]
        for group, mask in zip(groups.tokens, groups.mask, strict=True)
      ],
      scores=groups.scores,
      where=groups.where,
      rewards=groups.rewards,
      lengths=groups.mask.sum(axis=-1),
      ended=draw.ended[chosen],
      kept=trained,
      advantages=np.where(
        trained[:, None] & groups.where, advantages[row], np.nan
      ),
      parts={k: np.asarray(x)[chosen] for k, x in draw.parts.items()},
      epoch=found.get("epoch", 0),
      draw=draw.number,
    )


class _Groups:
  """Draws' groups, one after another."""

  def __init__(self, draws: list[rollouts.Draw]):
    groups = [draw.groups for draw in draws]
    self.scores = np.concatenate([x.scores for x in groups])  # [N, G]
    self.rewards = np.concatenate([x.rewards for x in groups])
    self.where = np.concatenate([x.where for x in groups])
    self.lengths = np.concatenate([x.mask.sum(axis=-1) for x in groups])
    self.ended = np.concatenate([draw.ended for draw in draws])
    # In numpy, as each number of draws would be another program of jax's.
    scored = self.where.any(axis=1)
    self.lowest = np.where(self.where, self.scores, np.inf).min(axis=1)
    self.highest = np.where(self.where, self.scores, -np.inf).max(axis=1)
    self.silent: np.ndarray = np.equal(self.lowest, self.highest) | ~scored
    size = np.maximum(self.where.sum(axis=1), 1)
    mean = (self.scores * self.where).sum(axis=1) / size
    square = np.square(self.scores - mean[:, None]) * self.where
    self.std = np.where(self.silent, 0, np.sqrt(square.sum(axis=1) / size))


def _mean(values: jax.Array, weights: jax.Array) -> jax.Array:
  """NaN over nothing."""
  total = jnp.sum(weights)
  mean = jnp.sum(values * weights) / jnp.where(total > 0, total, 1)
  return jnp.where(total > 0, mean, jnp.nan)


def _share(values: Any, where: Any) -> float:
  """Mean over what counts; NaN over nothing."""
  return float(values[where].mean()) if where.any() else float("nan")
