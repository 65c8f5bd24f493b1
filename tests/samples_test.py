"""What was drawn can be read back, whole groups of it, chosen by no outcome."""

import pathlib
from typing import Any

import ml_collections
import numpy as np
import pytest

from experiments import samples, workdir
from groupstd import estimates, theory

CONFIG = ml_collections.ConfigDict({"share": 1.0})
# What breaks lines, quotes, encodings and columns.
ALPHABET = ["a", "σ", '"', "\\", "\n", "\r", "\x00", "\x85", "\u2028", "\ud800"]


def drawn(ids, scores, where=None, seed: int = 0) -> dict[str, Any]:
  """Groups of these scores; all else of them is random."""
  rng = np.random.default_rng(seed)
  scores = np.asarray(scores, np.float32)
  shape = scores.shape
  lengths = rng.integers(0, 7, shape)  # An answer may be empty.
  return {
    "ids": np.asarray(ids),
    "prompts": [f"what is {i}?" for i in ids],
    "texts": [
      ["".join(ALPHABET[i] for i in rng.integers(10, size=n)) for n in row]
      for row in lengths
    ],
    "scores": scores,
    "where": np.ones(shape, bool) if where is None else np.asarray(where),
    "rewards": scores + 0.25,
    "lengths": lengths,
    "ended": rng.random(shape) < 0.5,
    "kept": rng.random(len(scores)) < 0.5,
    "parts": {
      "correct": scores,
      "format": np.where(rng.random(shape) < 0.5, np.nan, 0.1),
    },
  }


def lines(groups: dict[str, Any], step: int = 0, **options) -> list[dict]:
  return list(samples.lines(step, **{**groups, **options}))


def write(path: pathlib.Path, *parts: list[dict]) -> None:
  with workdir.Workdir(path, CONFIG) as folder:
    folder.restore({"w": np.zeros(1, np.float32)})
    for part in parts:
      folder.log_rollouts(part)


def test_a_line_holds_what_was_drawn():
  where = [[True, False], [True, True]]
  draw = drawn([7, 3], [[1, 0], [0.1, 0]], where)
  advantages = np.array([[0.5, -0.5], [np.nan, 0]])
  written = lines(draw, 4, epoch=1, draw=2, advantages=advantages)
  order = [(7, 0), (7, 1), (3, 0), (3, 1)]
  assert [(x["id"], x["rollout"]) for x in written] == order
  for row, i in np.ndindex(2, 2):
    line = written[2 * row + i]
    assert (line["step"], line["epoch"], line["draw"]) == (4, 1, 2)
    assert line["prompt"] == f"what is {draw['ids'][row]}?"
    assert line["text"] == draw["texts"][row][i]
    assert line["length"] == len(line["text"])
    assert line["ended"] == draw["ended"][row, i]
    assert line["kept"] == draw["kept"][row]
    score = draw["scores"][row, i]
    scored = where[row][i]
    assert line["score"] == (score if scored else None)
    assert line["reward"] == (score + np.float32(0.25) if scored else None)
    part = draw["parts"]["format"][row, i]
    expected = {"correct": score, "format": None if np.isnan(part) else part}
    assert line["parts"] == expected
  assert [x["advantage"] for x in written] == [0.5, -0.5, None, 0]
  assert [x["advantage"] for x in lines(draw)] == [None] * 4


def test_the_documented_fields_are_those_that_are_written():
  table = [x for x in (samples.__doc__ or "").splitlines() if x[:1] == "|"]
  fields = [row.split("|")[1].strip() for row in table[2:]]
  (line, *_) = lines(drawn([0], [[0, 1]]))
  assert list(line) == fields


def test_what_is_written_is_read_back(tmp_path):
  """Floats to the bit, and texts with all that breaks lines and encodings."""
  scores = np.random.default_rng(1).random((40, 4))
  first = lines(drawn(range(40), scores), 1)
  second = lines(drawn(range(40), 1 / (1 + scores), seed=2), 2)
  assert set("".join(x["text"] for x in first)) == set(ALPHABET)
  write(tmp_path, first, second)
  assert list(samples.read(tmp_path)) == first + second


def test_a_line_that_is_being_written_is_left_out(tmp_path):
  written = lines(drawn(range(3), np.eye(3)))
  write(tmp_path, written)
  with (tmp_path / "rollouts.jsonl").open("ab") as file:
    file.write(b'{"step": 1, "te')
  assert list(samples.read(tmp_path)) == written


def test_the_share_decides_how_many_groups_are_written():
  ids = range(100)
  assert not samples.chosen(ids, 0, share=0).any()
  assert samples.chosen(ids, 0, share=1).all()
  for share in (0.01, 0.3, 0.9):
    found = np.array(
      [samples.chosen(ids, step, share=share) for step in range(200)]
    )
    error = np.sqrt(share * (1 - share) / found.size)
    assert abs(found.mean() - share) < 4 * error
    # Neither a step nor a prompt is favoured: its mean varies as it should.
    for axis in (0, 1):
      spread = found.mean(axis).var() * found.shape[axis]
      assert spread == pytest.approx(share * (1 - share), rel=0.6)
    # More of them hold those of fewer.
    more = samples.chosen(ids, 5, share=share + 0.05)
    assert not np.any(found[5] & ~more)


def test_groups_are_chosen_by_seed_step_and_id_alone():
  """However often they are drawn, in whatever order and batch, on any run."""
  ids = np.random.default_rng(0).permutation(100)

  def written(ids, step=3, seed=1):
    chosen = samples.chosen(ids, step, share=0.5, seed=seed)
    return set(np.asarray(ids)[chosen].tolist())

  half = written(ids)
  assert written(ids[::-1]) == half
  assert set().union(*(written([i]) for i in ids.tolist())) == half
  assert written(ids.astype(np.int32)) == written(ids.tolist()) == half
  assert written(ids, seed=2) != half
  assert written(ids, step=4) != half
  assert {i + 1 for i in written(ids, step=4)} != half - {0}


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_share(share):
  with pytest.raises(ValueError, match=r"`share` must be in \[0, 1\], got"):
    samples.chosen([0], 0, share=share)


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("kept", np.ones((2, 1), bool)),
    ("kept", True),
    ("prompts", ["one"]),
    ("advantages", np.zeros((2, 1))),
    ("advantages", np.zeros(3)),
    ("scores", np.zeros((1, 3))),
    ("where", True),
    ("texts", [["a"] * 3]),
    ("texts", [["a"] * 3, ["a"] * 2]),
    ("parts", {"format": np.zeros((2, 1))}),
  ],
)
def test_nothing_is_broadcast(name, value):
  groups = drawn([0, 1], np.zeros((2, 3)))
  with pytest.raises(ValueError, match=rf"`{name}.*` must be \[B"):
    lines(groups, **{name: value})


def test_right_ones_are_counted_by_group(tmp_path):
  rng = np.random.default_rng(0)
  scores = rng.integers(0, 2, (2, 30, 5))
  where = rng.random((2, 30, 5)) < 0.8
  where[0, 3] = False  # None has a score: nothing to count.
  ids = rng.permutation(30)
  write(
    tmp_path,
    *(lines(drawn(ids, scores[s], where[s]), step=s + 8) for s in range(2)),
  )
  found = samples.groups(tmp_path)
  expected = {
    (s + 8, ids[row]): (
      (scores[s, row] * where[s, row]).sum(),
      where[s, row].sum(),
    )
    for s, row in np.ndindex(2, 30)
    if where[s, row].any()
  }
  rows = zip(*found, strict=True)
  assert {(step, i): (k, n) for step, i, k, n in rows} == expected
  assert (8, ids[3]) not in expected


def test_a_group_that_is_drawn_again_counts_once(tmp_path):
  """Else what was silent first would have more rollouts: a biased log.

  The estimate is within 4 standard errors of p² + (1 − p)² over prompts.
  """
  p, num_prompts = 0.2, 3000
  rng = np.random.default_rng(0)
  first = rng.random((num_prompts, 2)) < p
  silent = np.flatnonzero(first[:, 0] == first[:, 1])
  second = rng.random((len(silent), 2)) < p
  other = rng.random((20, 2)) < p  # Of prompts that others made way for.
  write(
    tmp_path,
    lines(drawn(range(num_prompts), first)),
    lines(drawn(silent, second), draw=1),
    lines(drawn(num_prompts + np.arange(20), other), draw=2),
  )
  found = samples.groups(tmp_path)
  assert len(found.id) == num_prompts + 20
  np.testing.assert_array_equal(found.k[:num_prompts], first.sum(1))
  np.testing.assert_array_equal(found.k[num_prompts:], other.sum(1))
  assert set(found.n) == {2}
  value, error = estimates.mean_and_error(
    estimates.silent_rate(found.k, found.n, 2)
  )
  assert abs(value - theory.silent_rate(p, 2)) < 4 * error


def test_right_and_wrong_must_be_decided(tmp_path):
  write(tmp_path, lines(drawn([4], [[1, 0.5]]), 3))
  with pytest.raises(ValueError, match=r"0 or 1, got 0\.5 at step 3 for .* 4:"):
    samples.groups(tmp_path)


def test_a_run_that_wrote_none_has_none(tmp_path):
  write(tmp_path)
  assert [len(column) for column in samples.groups(tmp_path)] == [0, 0, 0, 0]
  assert list(samples.read(tmp_path)) == []
