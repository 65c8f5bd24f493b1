"""What a run's folder refuses, and what damage to it comes to."""

import json
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import pytest
from workdir_test import CONFIG, NUM_STEPS, assert_same, init, lines, train

from experiments import cli, workdir


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[pathlib.Path, Any]:
  """An uninterrupted run: its folder and its last state."""
  path = tmp_path_factory.mktemp("straight") / "run"
  return path, train(path)


def _largest(folder: pathlib.Path) -> pathlib.Path:
  return max(folder.glob("state/**/d/*"), key=lambda file: file.stat().st_size)


def _truncate(folder):
  os.truncate(_largest(folder), _largest(folder).stat().st_size // 2)


def _flip(folder):
  file = _largest(folder)
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


def _cut(folder, name):
  file = folder.parent.parent / name
  os.truncate(file, file.stat().st_size - 1)


def _empty(folder):
  shutil.rmtree(folder)
  folder.mkdir()


DAMAGE = {
  "truncated": (_truncate, "has changed"),
  "a flipped bit": (_flip, "has changed"),
  "a file gone": (lambda folder: _largest(folder).unlink(), "is gone"),
  "all of it gone": (lambda f: shutil.rmtree(f / "state"), "is gone"),
  "an empty folder": (_empty, "before it was whole"),
  "killed before the checksums": (
    lambda folder: (folder / "sha256.json").unlink(),
    "before it was whole",
  ),
  "empty checksums": (
    lambda folder: (folder / "sha256.json").write_text(""),
    "JSONDecodeError",
  ),
  "metrics cut": (lambda f: _cut(f, "metrics.jsonl"), "lacks 1 bytes"),
  "rollouts cut": (lambda f: _cut(f, "rollouts.jsonl"), "lacks 1 bytes"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_aloud(
  straight, tmp_path, caplog, kind
):
  folder, expected = straight
  path = tmp_path / "run"
  shutil.copytree(folder, path)
  damage, why = DAMAGE[kind]
  damage(path / "checkpoints" / "17")
  assert_same(train(path), expected)
  assert lines(path) == lines(folder)
  warnings = [r.getMessage() for r in caplog.records if "removed" in r.message]
  assert len(warnings) == 1
  assert "checkpoint 17" in warnings[0]
  assert why in warnings[0]


def test_nothing_is_removed_when_all_checkpoints_are_damaged(
  straight, tmp_path
):
  path = tmp_path / "run"
  shutil.copytree(straight[0], path)
  for step in (15, 17):
    _flip(path / "checkpoints" / str(step))
  before = sorted(path.rglob("*"))
  with pytest.raises(cli.UsageError, match=r"17: .*changed; 15: .*changed"):
    train(path)
  assert sorted(path.rglob("*")) == before


def test_a_state_of_another_shape_is_refused_by_name(straight, tmp_path):
  path = tmp_path / "run"
  shutil.copytree(straight[0], path)
  state = init()
  other = state._replace(params={"a": jnp.ones(3), "b": state.params["b"]})
  with (
    workdir.Workdir(path, CONFIG) as folder,
    pytest.raises(cli.UsageError) as error,
  ):
    folder.restore(other)
  assert str(error.value).endswith(
    'state.params.a: the folder has "float32[40]", the command has'
    ' "float32[3]".'
  )
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
  with (
    workdir.Workdir(path, CONFIG) as folder,
    pytest.raises(cli.UsageError, match=r'"bfloat16\[40\]".*"bfloat16\[3, 2'),
  ):
    folder.restore(state._replace(params=half))


def test_another_config_is_refused_naming_every_field(straight):
  folder, _ = straight
  before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
  config: Any = CONFIG.copy_and_resolve_references()
  config.group_size = 16
  config.sigma.divide.power = 0.5
  del config.name
  config.extra = None
  with pytest.raises(cli.UsageError) as error:
    workdir.Workdir(folder, config)
  message = str(error.value)
  for difference in (
    "config.group_size: the folder has 8, the command has 16;",
    "config.sigma.divide.power: the folder has 1.0, the command has 0.5",
    'config.name: the folder has "dapo", the command has nothing;',
    "config.extra: the folder has nothing, the command has null;",
  ):
    assert difference in message
  assert message.count("the folder has") == 4
  after = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
  assert {f.name for f in after if after[f] != before[f]} <= {".lock"}


def test_a_config_agrees_with_itself(tmp_path):
  config = ml_collections.ConfigDict(
    {"clip": float("inf"), "none": None, "third": 1 / 3, "nan": float("nan")}
  )
  for _ in range(2):
    workdir.Workdir(tmp_path, config).close()
  with pytest.raises(cli.UsageError, match="the folder has Infinity"):
    workdir.Workdir(tmp_path, ml_collections.ConfigDict({**config, "clip": 1}))


@pytest.mark.parametrize("config", [None, "", '{"group_si'])
def test_a_kill_before_the_config_was_whole_does_not_wedge(tmp_path, config):
  if config is not None:
    (tmp_path / "config.json.tmp").write_text(config)
  state = train(tmp_path)
  assert int(state.step) == NUM_STEPS
  assert json.loads((tmp_path / "config.json").read_text())["name"] == "dapo"


def test_a_kill_within_the_write_leaves_no_half(tmp_path, monkeypatch):
  def die(_):
    raise ZeroDivisionError

  with monkeypatch.context() as patch:
    patch.setattr(os, "fsync", die)
    with pytest.raises(ZeroDivisionError):
      workdir.Workdir(tmp_path, CONFIG)
  assert not (tmp_path / "config.json").exists()
  workdir.Workdir(tmp_path, CONFIG).close()


def test_metrics_without_a_checkpoint_are_begun_again(tmp_path):
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    folder.restore(init())
    folder.log(1, {"loss": 1.0})
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    state = init()
    assert folder.restore(state) is state
    assert folder.metrics() == []


def test_two_runs_in_one_folder_are_refused(tmp_path):
  with workdir.Workdir(tmp_path, CONFIG):
    message = rf"in use by process {os.getpid()} on .*: two runs"
    with pytest.raises(cli.UsageError, match=message):
      workdir.Workdir(tmp_path, CONFIG)
  workdir.Workdir(tmp_path, CONFIG).close()


def test_a_folder_that_is_not_a_runs_is_left_alone(tmp_path):
  (tmp_path / "metrics.jsonl").write_text("mine\n")
  with pytest.raises(cli.UsageError, match=r"metrics\.jsonl but no config"):
    workdir.Workdir(tmp_path, CONFIG)
  assert lines(tmp_path) == {"metrics.jsonl": b"mine\n"}
  with pytest.raises(cli.UsageError, match="cannot be a run's folder"):
    workdir.Workdir(tmp_path / "metrics.jsonl", CONFIG)
  one = ml_collections.ConfigDict({"keep_checkpoints": 1})
  with pytest.raises(cli.UsageError, match="must be at least 2, got 1: the"):
    workdir.Workdir(tmp_path / "new", one)
