"""Which checkpoints stay, and that a folder keeps to the data it began with."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import pytest

from experiments import checkpoints, cli, manifest, workdir
from groupstd import questions

LIKE = {"step": jax.ShapeDtypeStruct((), jnp.int32)}


def config(**fields: Any) -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({"rate": 0.5, **fields})


def train(
  path: pathlib.Path,
  config: ml_collections.ConfigDict,
  accuracies: list[Any],
  die_at: int | None = None,
) -> None:
  """Logs a line for each step, 0 too, and saves step s before that of s."""
  with workdir.Workdir(path, config) as folder:
    start = int(folder.restore({"step": jnp.int32(0)})["step"])
    for step in range(start, len(accuracies)):
      if step and step != start:
        folder.save(step, {"step": jnp.int32(step)})
      if step == die_at:
        return
      accuracy = accuracies[step]
      measured = {} if accuracy is None else {"accuracy": accuracy}
      folder.log(step, {"loss": 1.0, **measured})


def kept(path: pathlib.Path) -> set[int]:
  return set(checkpoints.steps(path / "checkpoints"))


# Of the steps 0, 1, …; None where it was not measured.
RUNS = {
  "in the middle": ([0, 0.1, 0.9, 0.3, 0.4, 0.5, 0.6], 2),
  "the last": ([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 6),
  "the first": ([0, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6], 1),
  "of two alike the later": ([0, 0.9, 0.9, 0.3, 0.1], 2),
  "measured now and then": ([0, None, None, 0.3, None, None], 3),
  "not at one that is not a number": (
    [0, float("nan"), 0.2, float("inf"), 0.1, 0.1],
    2,
  ),
  "below 0": ([0, -0.9, -0.2, -0.3, -0.5, -0.5], 2),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_best_stays_beside_the_newest(tmp_path, name):
  """Known once it is logged, which may be after it is saved."""
  accuracies, best = RUNS[name]
  train(tmp_path, config(keep_best="accuracy"), accuracies)
  last = len(accuracies) - 1
  there = kept(tmp_path)
  assert {last - 1, last, best} <= there
  assert len(there) <= 3
  step, state = workdir.load(tmp_path, LIKE, "best")
  assert step == int(state["step"]) == best


def test_a_run_that_dies_keeps_the_same(tmp_path):
  accuracies, best = RUNS["in the middle"]
  wanted = config(keep_best="accuracy")
  train(tmp_path / "whole", wanted, accuracies)
  for die_at in range(1, 6):
    train(tmp_path / str(die_at), wanted, accuracies, die_at)
    train(tmp_path / str(die_at), wanted, accuracies)
    assert kept(tmp_path / str(die_at)) == kept(tmp_path / "whole")
    assert workdir.load(tmp_path / str(die_at), LIKE, "best")[0] == best


def test_the_config_says_how_many_stay(tmp_path):
  accuracies, _ = RUNS["in the middle"]
  runs: dict[str, tuple[dict[str, Any], set[int]]] = {
    "default": ({}, {5, 6}),
    "none is best": ({"keep_best": ""}, {5, 6}),
    "three": ({"keep_checkpoints": 3}, {4, 5, 6}),
    "all": ({"keep_checkpoints": 9, "keep_best": "accuracy"}, {*range(1, 7)}),
  }
  for name, (fields, stay) in runs.items():
    train(tmp_path / name, config(**fields), accuracies)
    assert kept(tmp_path / name) == stay


def test_a_best_that_there_is_not_is_an_error(tmp_path):
  wanted = config(keep_best="acuracy")
  with pytest.raises(cli.UsageError, match="'acuracy'; did you mean accuracy"):
    train(tmp_path / "misspelt", wanted, [0, 0.1])
  train(tmp_path / "plain", config(), [0, 0.1, 0.2])
  with pytest.raises(
    cli.UsageError, match=r"config\.keep_best names no metric"
  ):
    workdir.load(tmp_path / "plain", LIKE, "best")
  train(tmp_path / "unknown", config(keep_best="accuracy"), [0, None, None])
  with pytest.raises(cli.UsageError, match=r"checkpoint \(1, 2\)"):
    workdir.load(tmp_path / "unknown", LIKE, "best")


def test_a_damaged_best_is_refused(tmp_path):
  """Another would not be what was asked for."""
  train(tmp_path, config(keep_best="accuracy"), RUNS["in the middle"][0])
  file = tmp_path / "checkpoints" / "2" / "_CHECKPOINT_METADATA"
  file.write_text(file.read_text() + " ")
  with pytest.raises(
    cli.UsageError, match=f"2: ValueError: {file} has changed"
  ):
    workdir.load(tmp_path, LIKE, "best")
  assert workdir.load(tmp_path, LIKE)[0] == 6


def test_a_checkpoint_goes_only_once_a_later_one_is_whole(
  tmp_path, monkeypatch
):
  """Killed before it is sealed, a run has what it had before."""
  train(tmp_path, config(), [0, 1, 2, 3])
  before = kept(tmp_path)

  def killed(_):
    raise ZeroDivisionError

  monkeypatch.setattr(checkpoints, "seal", killed)
  with pytest.raises(ZeroDivisionError):
    train(tmp_path, config(), [0, 1, 2, 3, 4])
  assert kept(tmp_path) == before


def test_other_data_is_refused_by_what_changed(tmp_path):
  data = {"questions": "1f", "tokenizer": "2e"}
  workdir.Workdir(tmp_path, config(), data).close()
  workdir.Workdir(tmp_path, config(), data).close()
  with pytest.raises(cli.UsageError) as error:
    workdir.Workdir(tmp_path, config(), data | {"questions": "3d"})
  message = str(error.value)
  assert 'data.questions: the folder has "1f", the command has "3d"' in message
  assert "tokenizer" not in message
  assert f"--config.init={tmp_path}" in message
  assert json.loads((tmp_path / "data.json").read_text()) == data


def test_a_folder_of_before_takes_the_data_it_is_given(tmp_path):
  workdir.Workdir(tmp_path, config()).close()
  (tmp_path / "data.json").unlink()
  workdir.Workdir(tmp_path, config(), {"questions": "1f"}).close()
  with pytest.raises(cli.UsageError, match=r"data\.questions"):
    workdir.Workdir(tmp_path, config(), {"questions": "3d"})


@pytest.mark.parametrize("name", ["config.json", "state.json", "data.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
  train(tmp_path, config(), [0, 1, 2])
  (tmp_path / name).write_text("{")
  with pytest.raises(cli.UsageError, match=rf"{name} cannot be read"):
    train(tmp_path, config(), [0, 1, 2])


def test_every_stored_question_counts(tmp_path):
  file = tmp_path / "questions.jsonl"
  lines = [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(2000)]

  def checksum():
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return manifest.of_questions(questions.jsonl(file))

  seen = [checksum()]
  assert checksum() == seen[0]
  lines[1001]["answer"] = "7"
  seen.append(checksum())
  lines[3], lines[4] = lines[4], lines[3]
  seen.append(checksum())
  lines.pop()
  seen.append(checksum())
  assert len(set(seen)) == 4


def test_questions_made_by_rule_are_told_by_some():
  """The rule, its arguments and both ends, in well under a second."""

  class Made:
    def __init__(self, length, other=()):
      self._length, self._other, self.asked = length, other, []

    def __len__(self):
      return self._length

    def __getitem__(self, i):
      self.asked.append(i)
      return questions.Question(f"{i}", f"{i in self._other}", entry={i: set()})

  made = Made(10**9)
  whole = manifest.of_questions(made)
  assert len(made.asked) < 1000
  assert {0, 10**9 - 1} <= set(made.asked)
  assert manifest.of_questions(Made(10**9)) == whole
  for other in Made(10**9 - 1), Made(10**9, {0}), Made(10**9, {10**9 - 1}):
    assert manifest.of_questions(other) != whole
  few = Made(300)
  assert manifest.of_questions(few) != manifest.of_questions(Made(300, {171}))
  assert few.asked == list(range(300))
  plain, minus = (
    questions.arithmetic(digits=2, operations=x) for x in ("+", "-")
  )
  assert manifest.of_questions(plain) != manifest.of_questions(minus)


def test_a_files_bytes_count(tmp_path):
  file = tmp_path / "tokenizer.json"
  file.write_bytes(b"{}")
  before = manifest.of_file(file)
  assert manifest.of_file(str(file)) == before
  file.write_bytes(b"{} ")
  assert manifest.of_file(file) != before
