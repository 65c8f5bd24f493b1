"""What a step's metrics say of draws whose every score is written by hand."""

import itertools

import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from experiments import drawn
from groupstd import (
  policies,
  questions,
  rollouts,
  sigma,
  text,
  tokenizers,
  verifiers,
)

B, G, T = 4, 4, 3
ASKED = [questions.Question(f"{i:02d}", "") for i in range(12)]
TOKENIZER = tokenizers.characters("0123456789")


class Script:
  """A verifier that says what is written for a question, draw after draw."""

  def __init__(self, scores):
    self.scores = {k: itertools.chain(*v) for k, v in scores.items()}

  def __call__(self, text, question):
    score = next(self.scores[int(question.prompt)])
    if score == "raise":
      raise RuntimeError("broken")
    return score


def sample(params, keys, prompts, group_size):
  """Answer g of question i has 1 + (i + g) mod 3 tokens, of 3 is cut off."""
  del params, keys
  length = 1 + (prompts.index[:, None] + jnp.arange(group_size)) % T
  mask = jnp.arange(T) < length[..., None]
  tokens = jnp.where(mask, 2, 0)
  return policies.Sample(tokens, mask, jnp.zeros(mask.shape), length < T)


def step(scores, op, *, extra=0.0, share=1.0, **sizes):
  """(metrics, lines) of step 0, whose first four questions are 0, 1, 2, 3."""
  config = ml_collections.ConfigDict(
    {
      "rollouts_share": share,
      "seed": 0,
      "num_groups": B,
      "max_rounds": 1,
      **sizes,
    }
  )
  pool = verifiers.Pool(
    {"right": Script(scores)}, num_workers=0, max_failures=1.0
  )
  task = text.task(
    ASKED,
    TOKENIZER,
    pool,
    width=2,
    length=T,
    weights={"right": 1.0, "length": extra},
    length_penalty=lambda lengths: np.asarray(lengths, float),
    shuffle=False,
  )
  rule = sigma.rule(op)
  record = drawn.Drawn(config, TOKENIZER, ASKED, task, pool, rule)
  collect = rollouts.collector(
    policies.Policy(None, sample, None),
    record.task,
    num_groups=B,
    group_size=G,
    observe=record.observe,
    **sizes,
  )
  rollout, counts = collect({}, 0)
  metrics = record.summary(0, rollout, counts)
  return metrics, record.samples(), rollout, rule


def kept(lines):
  """(id, draw) → whether its group is trained on, and its advantages."""
  found = {}
  for line in lines:
    key = line["id"], line["draw"]
    found.setdefault(key, (line["kept"], []))[1].append(line["advantage"])
  return found


REDRAWN = {
  0: [[1, 0, 0, 0]],
  1: [[0, 0, 0, 0], [1, 1, 0, 0]],
  2: [[1, 1, 1, 1]] * 3,
  3: [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]],
}
REPLACED = {
  0: [[1, 0, 0, 0]],
  1: [[0, 0, 0, 0]],
  2: [[1, 1, 1, 1]],
  3: [[1, 1, 1, 0]],
  4: [[1, 1, 0, 0]],  # In the place of 1.
  5: [[1, 1, 1, 1]],  # In that of 2.
  6: [[0, 0, 0, 0]],  # In that of 5; there is no fourth round.
}
QUARTER = np.sqrt(3) / 4  # σ of one right out of four.


def test_redrawn_groups_are_counted_as_they_were_drawn():
  found, lines, *_ = step(REDRAWN, sigma.dapo(), max_draws=3)
  assert (found["drawn"], found["dropped"]) == (36, 20)
  assert len(lines) == 36
  assert found["reward_drawn"] == pytest.approx(
    (1 + 0 + 12 + 0 + 2 + 0 + 1) / 36
  )
  assert found["reward_kept"] == pytest.approx((1 / 4 + 2 / 4 + 1 / 4) / 3)
  # First draws: 1 and 3 are all wrong, 2 is all right.
  assert (found["all_wrong"], found["all_right"]) == (0.5, 0.25)
  assert found["silent_share"] == 0.75
  assert found["std"] == pytest.approx(QUARTER / 4)
  assert found["left_silent"] == 1
  # w = 1/σ of the three mixed groups.
  assert found["scale"] == pytest.approx((2 / QUARTER + 2) / 3)
  groups = kept(lines)
  trained = {key for key, (yes, _) in groups.items() if yes}
  assert trained == {(0, 0), (1, 1), (3, 2)}
  for key, (yes, advantages) in groups.items():
    if not yes:
      assert advantages == [None] * G, key
  np.testing.assert_allclose(groups[1, 1][1], [1, 1, -1, -1], rtol=1e-6)
  expected = np.array([-1, -1, -1, 3]) / 4 / QUARTER
  np.testing.assert_allclose(groups[3, 2][1], expected, rtol=1e-6)


def test_a_silent_group_that_no_mask_drops_is_trained_on_as_last_drawn():
  found, lines, *_ = step(REDRAWN, sigma.grpo(), max_draws=3)
  groups = kept(lines)
  trained = {key for key, (yes, _) in groups.items() if yes}
  assert trained == {(0, 0), (1, 1), (2, 2), (3, 2)}
  assert groups[2, 2][1] == [0] * G
  assert found["reward_kept"] == pytest.approx((1 / 4 + 2 / 4 + 1 / 4 + 1) / 4)


def test_replaced_groups_are_counted_as_they_were_drawn():
  found, lines, *_ = step(REPLACED, sigma.dapo(), max_rounds=3)
  assert (found["drawn"], found["dropped"]) == (28, 16)
  assert found["reward_drawn"] == pytest.approx((1 + 4 + 3 + 2 + 4) / 28)
  assert found["reward_kept"] == pytest.approx((1 / 4 + 3 / 4 + 2 / 4) / 3)
  # Each of the seven groups is its prompt's first draw.
  assert found["all_wrong"] == pytest.approx(2 / 7)
  assert found["all_right"] == pytest.approx(2 / 7)
  assert found["silent_share"] == pytest.approx(4 / 7)
  assert found["std"] == pytest.approx((2 * QUARTER + 1 / 2) / 7)
  trained = {key for key, (yes, _) in kept(lines).items() if yes}
  assert trained == {(0, 0), (3, 0), (4, 1)}
  asked = (found["epoch"], found["position"])
  assert asked == (0, 0)


@pytest.mark.parametrize(
  ("scores", "sizes"),
  [(REDRAWN, {"max_draws": 3}), (REPLACED, {"max_rounds": 3})],
)
def test_lines_have_the_advantages_of_the_batch_that_trains(scores, sizes):
  """Shaped rewards too, by the batch's own rows."""
  _, lines, rollout, rule = step(scores, sigma.dapo(), extra=0.1, **sizes)
  advantages, keep = rule(rollout.rewards, rollout.where, rollout.scores)
  groups = kept(lines)
  trained = {i: found for (i, _), (yes, found) in groups.items() if yes}
  rows = np.flatnonzero(keep & rollout.where.any(axis=1))
  ids = np.asarray(rollout.prompts.index)[rows]
  assert set(trained) == set(ids.tolist())
  for row, i in zip(rows, ids.tolist(), strict=True):
    np.testing.assert_allclose(trained[i], advantages[row], rtol=1e-6)


def test_shares_of_tokens_are_of_all_that_was_sampled():
  found, *_ = step(REDRAWN, sigma.dapo(), max_draws=3)
  # Ids, as often as they were drawn.
  drawn_ids = [0, 1, 2, 3, 1, 2, 3, 2, 3]
  lengths = np.array([[1 + (i + g) % T for g in range(G)] for i in drawn_ids])
  assert found["tokens"] == lengths.sum()
  assert found["length"] == pytest.approx(lengths.mean())
  assert found["length_max"] == T
  assert found["truncated"] == pytest.approx(np.mean(lengths == T))
  assert found["reward/length"] == pytest.approx(lengths.mean())
  assert found["reward/right"] == found["reward_drawn"]


def test_failures_and_abstentions_are_no_wrong_answers():
  scores = {
    0: [[1, None, 0, 0]],
    1: [["raise", 1, 1, None]],  # All that has a score is right.
    2: [[None] * 4],
    3: [[1, 0, 0, 0]],
  }
  found, lines, *_ = step(scores, sigma.dapo())
  assert found["exceptions"] == 1
  assert (found["timeouts"], found["died"]) == (0, 0)
  assert found["unscored"] == 7
  assert found["reward_drawn"] == pytest.approx(4 / 9)
  assert found["reward/right"] == pytest.approx(4 / 9)
  # Of groups with a score, the second is all right.
  assert (found["all_wrong"], found["all_right"]) == (0, pytest.approx(1 / 3))
  # One without any is silent, and so is in this share, of all groups.
  assert found["silent_share"] == 0.5
  third = np.sqrt(2) / 3
  assert found["std"] == pytest.approx((third + QUARTER) / 3)
  # Every rollout with a score counts once.
  assert found["reward_kept"] == pytest.approx(2 / 7)
  first = [x for x in lines if x["id"] == 0]
  assert [x["score"] for x in first] == [1, None, 0, 0]
  assert [x["advantage"] is None for x in first] == [False, True, False, False]


def test_failures_are_those_of_all_processes(monkeypatch):
  def both(what, function, *, seconds):
    assert seconds > 0
    return [function(), function()]

  monkeypatch.setattr(drawn.hosts, "gather", both)
  scores = {i: [["raise", 1, 0, "raise"]] for i in range(4)}
  found, *_ = step(scores, sigma.dapo())
  assert found["exceptions"] == 2 * 8
  assert (found["timeouts"], found["died"]) == (0, 0)


def test_where_nothing_is_kept_there_is_no_mean():
  found, lines, *_ = step({i: [[0] * 4] for i in range(4)}, sigma.dapo())
  assert np.isnan(found["reward_kept"])
  assert found["reward_drawn"] == 0
  assert not any(line["kept"] for line in lines)


def test_a_share_of_groups_is_written_whole():
  _, every, *_ = step(REDRAWN, sigma.dapo(), max_draws=3)
  _, some, *_ = step(REDRAWN, sigma.dapo(), max_draws=3, share=0.5)
  ids = {line["id"] for line in some}
  assert 0 < len(ids) < 4
  assert some == [line for line in every if line["id"] in ids]
