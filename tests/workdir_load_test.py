"""A run is read by others, whole or in part, finished or while it trains."""

import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from workdir_test import (
  CONFIG,
  NUM_STEPS,
  ROOT,
  TrainState,
  assert_same,
  init,
  train,
  update,
)

from experiments import checkpoints, cli, workdir

LIKE = jax.eval_shape(init)


def state_after(steps: int) -> TrainState:
  state = init()
  for _ in range(steps):
    state, _ = update(state)
  return state


def _flip(checkpoint: pathlib.Path) -> pathlib.Path:
  """Flips a bit of the largest file, and returns it."""
  files = checkpoint.glob("state/**/d/*")
  file = max(files, key=lambda file: file.stat().st_size)
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)
  return file


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
  """The folder of a run whose checkpoints are those of steps 15 and 17."""
  path = tmp_path_factory.mktemp("finished") / "run"
  train(path)
  return path


@pytest.fixture
def copied(finished, tmp_path) -> pathlib.Path:
  shutil.copytree(finished, tmp_path / "run")
  return tmp_path / "run"


def test_the_newest_state_or_that_of_a_step_is_loaded(finished):
  step, state = workdir.load(finished, LIKE)
  assert step == NUM_STEPS
  assert_same(state, state_after(NUM_STEPS))
  step, state = workdir.load(str(finished), init(), 15)
  assert step == 15
  assert_same(state, state_after(15))


def test_any_part_is_what_it_is_in_the_whole(finished, monkeypatch):
  whole = state_after(NUM_STEPS)
  for field in TrainState._fields:
    _, state = workdir.load(finished, {field: getattr(LIKE, field)})
    assert_same(state, {field: getattr(whole, field)})
  _, state = workdir.load(finished, {"params": {"b": LIKE.params["b"]}})
  assert_same(state, {"params": {"b": whole.params["b"]}})
  load, asked = checkpoints.ocp.load, []

  def spy(path, like):
    asked.extend(leaf for leaf in jax.tree.leaves(like) if leaf is not ...)
    return load(path, like)

  monkeypatch.setattr(checkpoints.ocp, "load", spy)
  _, state = workdir.load(finished, TrainState(..., LIKE.params, ...))
  assert len(asked) == 2, "what is not wanted costs no memory"
  assert state.step is ...
  assert state.opt_state is ...
  assert_same(state.params, whole.params)


def test_a_run_begins_where_another_ended(finished, tmp_path):
  _, loaded = workdir.load(finished, {"params": LIKE.params})
  begun = init()._replace(params=loaded["params"])
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    state, _ = update(folder.restore(begun))
    folder.save(1, state)
  expected, _ = update(init()._replace(params=state_after(NUM_STEPS).params))
  assert_same(workdir.load(tmp_path, LIKE)[1], expected)


def test_it_comes_onto_the_devices_that_are_asked_for(tmp_path):
  mesh = jax.make_mesh((8,), ("data",))
  spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  state = {
    "w": jax.device_put(jnp.arange(16.0), spread),
    "key": jax.random.split(jax.random.key(4), 5),
    "half": jnp.array([1 / 3, jnp.nan, -0.0], jnp.bfloat16),
    "layers": [optax.EmptyState(), {"w": jnp.ones(2)}, None],
  }
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    folder.restore(state)
    folder.save(1, state)
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
  _, loaded = workdir.load(tmp_path, like)
  assert_same(loaded, state)
  for leaf in jax.tree.leaves(loaded):
    assert leaf.devices() == {jax.devices()[0]}
  last = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
  for sharding in (spread, last):
    w = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding)
    _, loaded = workdir.load(tmp_path, {"w": w})
    assert loaded["w"].sharding == sharding
    assert_same(loaded["w"], state["w"])


def test_every_leaf_that_differs_is_named(finished):
  other = {
    "step": jax.ShapeDtypeStruct((), jnp.float32),
    "params": {
      "a": jax.ShapeDtypeStruct((41,), jnp.float32),
      "b": jax.ShapeDtypeStruct((3, 2), jnp.float32),
      "c": jax.ShapeDtypeStruct((1,), jnp.float32),
    },
  }
  with pytest.raises(cli.UsageError) as error:
    workdir.load(finished, other)
  message = str(error.value)
  for difference in (
    'state.step: the folder has "int32[]", the command has "float32[]"',
    'state.params.a: the folder has "float32[40]", the command has',
    'state.params.c: the folder has nothing, the command has "float32[1]"',
  ):
    assert difference in message
  assert message.count("the folder has") == 3


def test_a_damaged_checkpoint_is_passed_over_aloud(copied, caplog):
  file = _flip(copied / "checkpoints" / "17")
  step, state = workdir.load(copied, LIKE)
  assert step == 15
  assert_same(state, state_after(15))
  (warning,) = [record.getMessage() for record in caplog.records]
  assert f"{file} has changed" in warning
  with pytest.raises(cli.UsageError) as error:
    workdir.load(copied, LIKE, 17)
  assert f"17: ValueError: {file} has changed" in str(error.value)
  other = _flip(copied / "checkpoints" / "15")
  with pytest.raises(cli.UsageError) as error:
    workdir.load(copied, LIKE)
  assert f"{file} has changed" in str(error.value)
  assert f"{other} has changed" in str(error.value)


def test_what_is_not_there_is_an_error(copied, tmp_path):
  with pytest.raises(cli.UsageError, match=r"of step 16; it holds 15, 17\."):
    workdir.load(copied, LIKE, 16)
  (copied / "checkpoints" / "17" / "sha256.json").unlink()
  with pytest.raises(cli.UsageError, match=r"no whole .* 17; it holds 15\."):
    workdir.load(copied, LIKE, 17)
  assert workdir.load(copied, LIKE)[0] == 15
  (copied / "checkpoints" / "15" / "sha256.json").write_text("")
  with pytest.raises(cli.UsageError, match=r"sha256.json cannot be read"):
    workdir.load(copied, LIKE)
  with pytest.raises(cli.UsageError, match=r"no run .* no state\.json"):
    workdir.load(tmp_path, LIKE)
  with pytest.raises(cli.UsageError, match="holds no run"):
    workdir.read_config(tmp_path)
  with workdir.Workdir(tmp_path / "new", CONFIG) as folder:
    folder.restore(init())
    with pytest.raises(cli.UsageError, match="none was saved"):
      workdir.load(tmp_path / "new", LIKE)
  assert not list((tmp_path / "new").glob("checkpoints/*"))


def test_reading_takes_no_lock_and_changes_nothing(copied):
  def files():
    return {f: f.stat().st_mtime_ns for f in copied.rglob("*")}

  with workdir.Workdir(copied, CONFIG) as folder:
    folder.restore(init())
    before = files()
    workdir.load(copied, LIKE)
    workdir.read_config(copied)
    assert files() == before
    folder.log(18, {})
    folder.save(18, init())
  assert workdir.load(copied, LIKE)[0] == 18


def test_one_removed_while_it_is_read_is_no_damage(copied, monkeypatch, caplog):
  """The next is read, be it older or one that was saved meanwhile."""
  folder = copied / "checkpoints"
  load = checkpoints.ocp.load

  def meanwhile(act):
    def once(*args):
      monkeypatch.setattr(checkpoints.ocp, "load", load)
      act()
      return load(*args)

    monkeypatch.setattr(checkpoints.ocp, "load", once)

  meanwhile(lambda: (folder / "17").rename(folder / "20"))
  step, state = workdir.load(copied, LIKE)
  assert step == 20
  assert_same(state, state_after(17))
  meanwhile(lambda: shutil.rmtree(folder / "20"))
  step, state = workdir.load(copied, LIKE)
  assert step == 15
  assert_same(state, state_after(15))
  assert not caplog.records
  meanwhile(lambda: shutil.rmtree(folder / "15"))
  with pytest.raises(cli.UsageError, match="no whole checkpoint"):
    workdir.load(copied, LIKE)


TRAINING = """
import jax
jax.config.update("jax_platforms", "cpu")
import workdir_test as toy
from experiments import workdir

with workdir.Workdir("run", toy.CONFIG) as folder:
  state = folder.restore(toy.init())
  for step in range(15):
    state, loss = toy.update(state)
    folder.save(step + 1, state)
"""


@pytest.mark.slow
def test_a_run_is_read_while_it_trains(tmp_path):
  """Whatever is removed and saved meanwhile, a step's state is its own."""
  paths = [str(ROOT), str(ROOT / "tests")]
  process = subprocess.Popen(
    [sys.executable, "-c", TRAINING],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
  )
  seen = {}
  while process.poll() is None:
    if list((tmp_path / "run").glob("checkpoints/*/sha256.json")):
      step, state = workdir.load(tmp_path / "run", LIKE)
      seen[step] = state
    time.sleep(0.02)
  assert process.returncode == 0
  assert workdir.load(tmp_path / "run", LIKE)[0] == 15
  assert len(seen) >= 3
  state = init()
  for step in range(1, 16):
    state, _ = update(state)
    if step in seen:
      # Another process's program may round otherwise.
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
        seen[step],
        state,
      )


def test_a_config_comes_back(tmp_path):
  config: Any = ml_collections.ConfigDict(
    {
      "clip": (0.02, float("inf")),
      "report_to": (),
      "none": None,
      "sigma": {"mask": {}, "divide": {"power": 1.0}},
      "nested": ((1, 2), (3,)),
      "flag": True,
      "name": "σ",
    }
  )
  with workdir.Workdir(tmp_path, config):
    read = workdir.read_config(tmp_path)
  assert read.to_dict() == config.to_dict()
  assert read.is_locked
  workdir.Workdir(tmp_path, read).close()  # The same run, then.
