"""Two processes share a run's folder: one writes, all decide alike.

What is saved from any mesh of any number of processes comes back onto any other
bit for bit, and whatever the first process refuses or any process cannot read,
is refused or passed over by all.
"""

import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from experiments import checkpoints, cli, workdir

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ml_collections.ConfigDict({"keep_best": "accuracy", "rate": 0.5})
SPECS = {
  "matrix": ("data", "tensor"),
  "rows": ("data",),
  "columns": (None, ("data", "tensor")),
  "half": (("tensor", "data"),),
  "keys": ("tensor",),
  "whole": (),
  "step": (),
}


def mesh(data: int, tensor: int) -> jax.sharding.Mesh:
  return jax.make_mesh(
    (data, tensor),
    ("data", "tensor"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
    devices=jax.devices()[: data * tensor],
  )


def state(on: jax.sharding.Mesh, number: int) -> dict[str, jax.Array]:
  """Leaves of all kinds on a mesh, that tell their number."""

  def make():
    key = jax.random.fold_in(jax.random.key(0), number)
    return {
      "matrix": jax.random.normal(key, (16, 24)),
      "rows": jnp.arange(16) + number,
      "columns": jax.random.normal(key, (3, 32)).at[0, 0].set(jnp.nan),
      "half": jax.random.normal(key, (8,), jnp.bfloat16),
      "keys": jax.random.split(key, 8),
      "whole": jax.random.normal(key, (5, 7)),
      "step": jnp.int32(number),
    }

  shardings = {
    name: jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec(*spec))
    for name, spec in SPECS.items()
  }
  return jax.jit(make, out_shardings=shardings)()


def digests(tree: dict[str, jax.Array]) -> dict[str, str]:
  """SHA-256 of each leaf's bytes, wherever its parts lie."""

  def digest(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    if not leaf.is_fully_addressable:
      leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()

  return {name: digest(leaf) for name, leaf in tree.items()}


def train(path: pathlib.Path, on: jax.sharding.Mesh, steps: int = 4) -> None:
  """Saves steps 1, 2, … of which the second does best."""
  with workdir.Workdir(path, CONFIG) as folder:
    at = int(folder.restore(state(on, 0))["step"])
    for step in range(at, steps):
      folder.log(step, {"accuracy": [0.1, 0.2, 0.9, 0.3, 0.4][step]})
      folder.log_rollouts([{"step": step}])
      folder.save(step + 1, state(on, step + 1))


def restored(path: pathlib.Path, on: jax.sharding.Mesh) -> dict[str, Any]:
  """What a run starts from, and what it is."""
  with workdir.Workdir(path, CONFIG) as folder:
    like = state(on, 0)
    found = folder.restore(like)
  for name in SPECS:
    wanted = like[name].sharding
    assert found[name].sharding.is_equivalent_to(wanted, like[name].ndim)
  return {"step": int(found["step"]), "digests": digests(found)}


def flip(checkpoint: pathlib.Path) -> None:
  """Changes a bit of the largest file."""
  files = checkpoint.glob("state/**/d/*")
  file = max(files, key=lambda file: file.stat().st_size)
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


def refusal(path: pathlib.Path, config=CONFIG, **data) -> str:
  def begin():
    with workdir.Workdir(path, config, data) as folder:
      folder.restore(state(mesh(2, 4), 0))

  with pytest.raises(cli.UsageError) as error:
    begin()
  return str(error.value)


def worker(folder: pathlib.Path) -> dict[str, Any]:
  """What one of two processes sees; both must see the same."""
  here, seen = jax.process_index(), {}

  def first(act, *args):
    """The folder is theirs together: one changes it, at a time of rest."""
    multihost_utils.sync_global_devices("before")
    if here == 0:
      act(*args)
    multihost_utils.sync_global_devices("after")

  train(folder / "two", mesh(2, 4))
  seen["same mesh"] = restored(folder / "two", mesh(2, 4))
  seen["another mesh"] = restored(folder / "two", mesh(1, 8))
  seen["from one"] = restored(folder / "one", mesh(4, 2))
  best, found = workdir.load(
    folder / "two", {"whole": state(mesh(2, 4), 0)["whole"]}, "best"
  )
  seen["best"] = [best, digests(found)]

  other = CONFIG.copy_and_resolve_references()
  other.rate = 0.25
  seen["another config"] = refusal(folder / "two", other)
  seen["other data"] = refusal(folder / "two", questions="1f")
  with workdir.Workdir(folder / "two", CONFIG):
    seen["in use"] = refusal(folder / "two")

  first(shutil.copytree, folder / "two", folder / "flipped")
  first(flip, folder / "flipped" / "checkpoints" / "4")
  seen["flipped"] = restored(folder / "flipped", mesh(2, 4))
  first(shutil.copytree, folder / "two", folder / "alone")
  for name in "metadata", "load":
    ocp = getattr(checkpoints.ocp, name)

    def failing(path, *args, ocp=ocp):
      found = ocp(path, *args)
      if here == 1 and path.endswith("alone/checkpoints/4"):
        raise OSError("only here")
      return found

    setattr(checkpoints.ocp, name, failing)
    with pytest.raises(cli.UsageError) as error:
      workdir.load(folder / "alone", {"step": state(mesh(2, 4), 0)["step"]}, 4)
    seen[f"asked for, {name} fails"] = str(error.value)
    if name == "load":
      seen["read by one alone"] = restored(folder / "alone", mesh(2, 4))
    setattr(checkpoints.ocp, name, ocp)
  seen["of leftovers"] = restored(folder / "leftovers", mesh(2, 4))
  train(folder / "leftovers", mesh(2, 4), 5)
  for step in (2, 3, 4):
    first(flip, folder / "two" / "checkpoints" / str(step))
  seen["all damaged"] = refusal(folder / "two")
  return seen


def start(folder: pathlib.Path) -> list[subprocess.Popen]:
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  script = (
    "import json, pathlib, sys, jax\n"
    "jax.config.update('jax_platforms', 'cpu')\n"
    "jax.config.update('jax_num_cpu_devices', 4)\n"
    f"jax.distributed.initialize('localhost:{port}', 2, int(sys.argv[1]))\n"
    "import checkpoints_hosts_test as test\n"
    "folder = pathlib.Path(sys.argv[2])\n"
    "seen = test.worker(folder)\n"
    "(folder / f'{sys.argv[1]}.json').write_text(json.dumps(seen))\n"
  )
  paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  return [
    subprocess.Popen(
      [sys.executable, "-c", script, str(process), str(folder)],
      env={**os.environ, "PYTHONPATH": paths},
      stdout=subprocess.DEVNULL,
      stderr=(folder / f"{process}.err").open("w"),
    )
    for process in range(2)
  ]


@pytest.mark.slow
def test_two_processes_decide_alike(tmp_path):
  train(tmp_path / "one", mesh(2, 4))
  left = tmp_path / "leftovers"
  shutil.copytree(tmp_path / "one", left)
  saved = left / "checkpoints"
  shutil.copytree(saved / "4", saved / "5.orbax-checkpoint-tmp")
  (saved / "4" / "sha256.json").unlink()

  processes = start(tmp_path)
  try:
    for process in processes:
      process.wait(240)
  finally:
    for process in processes:
      process.kill()
  errors = [(tmp_path / f"{i}.err").read_text() for i in range(2)]
  assert [x.returncode for x in processes] == [0, 0], "\n".join(errors)
  seen, other = (
    json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)
  )
  assert seen == other

  expected = {
    step: {"step": step, "digests": digests(state(mesh(1, 1), step))}
    for step in range(6)
  }
  assert len({str(x) for x in expected.values()}) == 6
  for name in "same mesh", "another mesh", "from one":
    assert seen[name] == expected[4], name
  for name in "flipped", "read by one alone", "of leftovers":
    assert seen[name] == expected[3], name
  assert seen["best"] == [2, {"whole": expected[2]["digests"]["whole"]}]
  for name in "metadata", "load":
    why = seen[f"asked for, {name} fails"]
    assert "4: OSError: only here (process 1 of 2)" in why
  assert (
    "config.rate: the folder has 0.5, the command" in seen["another config"]
  )
  assert "data.questions: the folder has nothing, the" in seen["other data"]
  assert "is in use by process" in seen["in use"]
  assert "every checkpoint in" in seen["all damaged"]

  # The lines are those that one process writes, each once.
  for name in "metrics.jsonl", "rollouts.jsonl":
    one, two = (tmp_path / x / name for x in ("one", "two"))
    assert two.read_bytes() == one.read_bytes()
  # What was left is gone; of what was made, the best and the newest two stay.
  assert {x.name for x in saved.iterdir()} == {"2", "4", "5"}
  # What two saved, one restores: on eight devices, and on a single one.
  for on in mesh(8, 1), mesh(2, 4), mesh(1, 1):
    assert restored(left, on) == expected[5]
