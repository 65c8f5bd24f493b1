"""A killed run ends as an uninterrupted one, and nothing is lost silently.

What broke other trainers on resume, and is a law here: state, optimizer, keys
and logs all come back, bit for bit; what is damaged is found, said and passed
over; a folder never mixes two runs.
"""

import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from experiments import checkpoints, workdir

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = ml_collections.ConfigDict(
  {
    "group_size": 8,
    "rate": 0.5,
    "name": "dapo",
    "betas": (0.9, 0.99),
    "sigma": {"mask": {}, "divide": {"power": 1.0}},
  }
)
OPTIMIZER = optax.adam(0.1)
NUM_STEPS, EVERY = 17, 5


class TrainState(NamedTuple):
  step: jax.Array
  params: Any
  opt_state: optax.OptState


def init() -> TrainState:
  params = {"a": jnp.linspace(-1, 1, 40), "b": jnp.ones((3, 2))}
  return TrainState(jnp.int32(0), params, OPTIMIZER.init(params))


@jax.jit
def update(state: TrainState) -> tuple[TrainState, jax.Array]:
  key = jax.random.fold_in(jax.random.key(0), state.step)
  noise = jax.tree.map(lambda p: jax.random.normal(key, p.shape), state.params)
  updates, opt_state = OPTIMIZER.update(noise, state.opt_state)
  params = optax.apply_updates(state.params, updates)
  loss = optax.tree_utils.tree_norm(params)
  return TrainState(state.step + 1, params, opt_state), loss


def train(path: pathlib.Path, die_at: int | None = None) -> TrainState:
  """NUM_STEPS steps, saved every EVERY and at the end; raises at `die_at`."""
  with workdir.Workdir(path, CONFIG) as folder:
    state = folder.restore(init())
    for step in range(int(state.step), NUM_STEPS):
      state, loss = update(state)
      folder.log(step + 1, {"loss": loss, "rate": 0.1 * step})
      folder.log_rollouts({"step": step + 1, "id": i} for i in range(step % 3))
      if (step + 1) % EVERY == 0:
        folder.save(step + 1, state)
      if step + 1 == die_at:
        raise ZeroDivisionError
    folder.save(NUM_STEPS, state)
  return state


def assert_same(state, other) -> None:
  """Equal trees, leaf for leaf and bit for bit."""
  assert jax.tree.structure(state) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
    assert a.dtype == b.dtype
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def lines(path: pathlib.Path) -> dict[str, bytes]:
  """What was logged, by file."""
  return {file.name: file.read_bytes() for file in path.glob("*.jsonl")}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[pathlib.Path, TrainState]:
  """An uninterrupted run: its folder and its last state."""
  path = tmp_path_factory.mktemp("straight") / "run"
  return path, train(path)


def test_a_run_that_dies_anywhere_ends_as_one_that_does_not(straight, tmp_path):
  folder, expected = straight
  for die_at in (1, 4, 5, 6, 14, 15, 17):
    path = tmp_path / str(die_at)
    with pytest.raises(ZeroDivisionError):
      train(path, die_at)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
      with (path / name).open("ab") as file:
        file.write(b'{"step": 99, "lo')  # A line that a kill cut short.
    assert len(workdir.read_metrics(path)) == die_at
    logged = sum(step % 3 for step in range(die_at))
    assert len(list(workdir.read_rollouts(path))) == logged
    assert_same(train(path), expected)
    assert lines(path) == lines(folder)


def test_a_finished_run_started_again_does_nothing(straight):
  folder, expected = straight
  before = {f: f.stat().st_mtime_ns for f in folder.rglob("*") if f.is_file()}
  assert_same(train(folder), expected)
  after = {f: f.stat().st_mtime_ns for f in folder.rglob("*") if f.is_file()}
  changed = {f.name for f in before.keys() | after if before.get(f) != after[f]}
  # Cut where they already ended.
  assert changed <= {".lock", "metrics.jsonl", "rollouts.jsonl"}
  assert [line["step"] for line in workdir.read_metrics(folder)] == list(
    range(1, NUM_STEPS + 1)
  )


# Run as a process of its own; each run is a fork of it, so that imports are
# paid once. It has no threads: XLA starts in the forks.
KILLED = """
import hashlib, json, os, random, signal, sys, time
import workdir_test as toy
from experiments import workdir
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")

def run(path, pipe):
  os.write(pipe, b"o")
  with workdir.Workdir(path, toy.CONFIG) as folder:
    state = folder.restore(toy.init())
    os.write(pipe, b"%d " % int(state.step))
    for step in range(int(state.step), 36):
      state, loss = toy.update(state)
      folder.log(step + 1, {"loss": loss})
      folder.log_rollouts({"text": "σ" * i} for i in range(step % 4))
      os.write(pipe, b".")
      if (step + 1) % 4 == 0:
        folder.save(step + 1, state)
        os.write(pipe, b"s")
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(state):
    digest.update(np.asarray(leaf).tobytes())
  os.write(pipe, b"|" + digest.hexdigest().encode())

def start(path, events=None, delay=0.0):
  # Kills the run `delay` after it wrote so many bytes; returns all it wrote.
  read, write = os.pipe()
  pid = os.fork()
  if not pid:
    os.close(read)
    code = 1
    try:
      run(path, write)
      code = 0
    finally:
      os._exit(code)
  os.close(write)
  said = b""
  while events is None or len(said) < events:
    piece = os.read(read, 1)
    if not piece:
      break
    said += piece
  else:
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    while piece := os.read(read, 4096):
      said += piece
  os.close(read)
  os.waitpid(pid, 0)
  return said.decode()

rng = random.Random(0)
straight = start(sys.argv[1])
killed = []
while not killed or "|" not in killed[-1]:
  early = len(killed) % 4 == 3
  events = 1 if early else rng.randrange(6, 22)
  killed.append(start(sys.argv[2], events, rng.uniform(0, 0.04)))
print(json.dumps([straight, killed]))
"""


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path):
  (tmp_path / "killed.py").write_text(KILLED)
  paths = [str(ROOT), str(ROOT / "tests")]
  out = subprocess.run(
    [sys.executable, "killed.py", "straight", "killed"],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  straight, killed = json.loads(out.stdout)
  assert straight.startswith("o0 ")
  resumed = [int(said[1:].split()[0]) for said in killed if " " in said]
  assert len(killed) >= 5
  assert len(set(resumed) - {0}) >= 2, "no kill left a checkpoint behind"
  assert resumed == sorted(resumed), "a checkpoint was lost"
  assert killed[-1].partition("|")[2] == straight.partition("|")[2]
  assert lines(tmp_path / "killed") == lines(tmp_path / "straight")


def test_every_kind_of_leaf_comes_back_onto_its_sharding(tmp_path):
  mesh = jax.make_mesh(
    (4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  spec = jax.sharding.PartitionSpec("data", "fsdp")
  state = {
    "sharded": jax.device_put(
      jnp.arange(64.0).reshape(8, 8), jax.sharding.NamedSharding(mesh, spec)
    ),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(4), 5),
    "half": jnp.array([1 / 3, jnp.nan, -0.0], jnp.bfloat16),
    "nothing": None,
    "optax": optax.chain(
      optax.clip(1.0), optax.adamw(optax.linear_schedule(1.0, 0.0, 9))
    ).init({"w": jnp.ones(3)}),
    "flags": jnp.array([True, False]),
  }
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    folder.restore(state)
    folder.save(1, state)
  zeros = jax.tree.map(
    lambda x: jax.device_put(jnp.zeros_like(x), x.sharding), state
  )
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    restored = folder.restore(zeros)
  assert_same(restored, state)
  assert restored["sharded"].sharding == state["sharded"].sharding


def test_a_buffer_may_be_donated_as_soon_as_save_returns(tmp_path):
  add = jax.jit(lambda x: x + 1, donate_argnums=0)
  state = jnp.zeros(2_000_000)
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    folder.restore(state)
    folder.save(1, state)
    for _ in range(20):
      donated, state = state, add(state)
    assert donated.is_deleted()
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    assert not np.any(folder.restore(state))


def test_lines_are_on_disk_before_the_save_starts(tmp_path, monkeypatch):
  events: list[Any] = []
  fsync = os.fsync
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    state = folder.restore(init())
    save_async = checkpoints.ocp.save_async

    def spy_fsync(file):
      events.append(os.fstat(file).st_ino)
      fsync(file)

    def spy_save(*args, **kwargs):
      events.append(lines(tmp_path))
      return save_async(*args, **kwargs)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(checkpoints.ocp, "save_async", spy_save)
    folder.log(1, {"loss": 0.0})
    folder.log_rollouts([{"id": 7}])
    folder.save(1, state)
  logged = {
    "metrics": b'{"step": 1, "loss": 0.0}\n',
    "rollouts": b'{"id": 7}\n',
  }
  files = {tmp_path / f"{name}.jsonl": text for name, text in logged.items()}
  assert set(events[:2]) == {file.stat().st_ino for file in files}
  assert events[2] == {file.name: text for file, text in files.items()}


def test_saving_a_step_twice_keeps_the_first(tmp_path):
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    state = folder.restore(init())
    folder.save(3, state)
    folder.save(3, state._replace(step=jnp.int32(7)))
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    assert int(folder.restore(state).step) == 0
    folder.save(3, state._replace(step=jnp.int32(7)))
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    assert int(folder.restore(state).step) == 0


def test_only_the_newest_stay_and_leftovers_go(straight, tmp_path):
  path = tmp_path / "run"
  shutil.copytree(straight[0], path)
  saved = path / "checkpoints"
  assert {p.name for p in saved.iterdir()} == {"15", "17"}
  shutil.copytree(saved / "17", saved / "16.orbax-checkpoint-tmp")
  config: Any = CONFIG.copy_and_resolve_references()
  config.keep_checkpoints = 3
  (path / "config.json").write_text(config.to_json())
  with workdir.Workdir(path, config) as folder:
    state = folder.restore(init())
    for step in (18, 19, 20):
      folder.save(step, state)
  assert {p.name for p in saved.iterdir()} == {"18", "19", "20"}


def test_restore_comes_first(tmp_path):
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    for call in (
      lambda: folder.log(1, {}),
      lambda: folder.log_rollouts([]),
      lambda: folder.save(1, init()),
    ):
      with pytest.raises(RuntimeError, match="`restore` must come before"):
        call()


def test_steps_may_be_counted_from_0_and_logged_often(tmp_path):
  """The cut is where the save was, whatever the steps are called."""
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    state = folder.restore(init())
    for step, part in itertools.product(range(3), ("train", "test")):
      folder.log(step, {"part": part})
      if (step, part) == (1, "train"):
        folder.save(step, state)
  with workdir.Workdir(tmp_path, CONFIG) as folder:
    folder.restore(state)
    assert [(m["step"], m["part"]) for m in folder.metrics()] == [
      (0, "train"),
      (0, "test"),
      (1, "train"),
    ]


def test_a_run_and_its_resumption_print_nothing(tmp_path):
  """Orbax logs some forty lines a save at the level absl's `run` would set."""
  (tmp_path / "quiet.py").write_text(
    """
from experiments import cli

def main(argv):
  import workdir_test
  for path in ("run", "run"):
    workdir_test.train(path)

cli.run(main)
"""
  )
  paths = [str(ROOT), str(ROOT / "tests")]
  out = subprocess.run(
    [sys.executable, "quiet.py"],
    cwd=tmp_path,
    env={
      **os.environ,
      "PYTHONPATH": os.pathsep.join(paths),
      "JAX_PLATFORMS": "cpu",
    },
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  assert (out.stdout, out.stderr) == ("", "")
  assert len(workdir.read_metrics(tmp_path / "run")) == NUM_STEPS
