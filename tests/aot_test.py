"""What is said of a run on a pod, before one is rented.

Where libtpu is not installed, programs are compiled for the tests' CPU devices:
everything but XLA's word that a TPU's memory does not do.
"""

import importlib.util
import json
import subprocess
import sys
import types

import jax
from jax.sharding import AbstractMesh
import numpy as np
import pytest
import tiny_language

from configs import pod
from experiments import aot, cli, compiled, programs, roofline
from groupstd import partitions, sharding, transformer

CHIP = roofline.CHIPS["v5e"]
MODEL = {
  "vocab_size": 128,
  "width": 64,
  "num_layers": 2,
  "num_heads": 4,
  "num_kv_heads": 2,
  "hidden": 128,
  "dtype": "bfloat16",
  "remat": True,
  "chunk": 16,
  "tied": False,
}
MESH = {"data": 1, "fsdp": 2, "tensor": 2, "sampling_tensor": 1}


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(compiled_quickly):
  return compiled_quickly


def config(folder, model=None, mesh=None, **fields):
  made = tiny_language.config(folder)
  fields = {"num_groups": 8, "micro_batches": 2, "answer_length": 32} | fields
  tiny_language.replace(made, model=model or MODEL, **fields)
  made.mesh.update(mesh or MESH)
  made.warmup.num_steps = 1
  return made


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  folder = tmp_path_factory.mktemp("questions")
  return programs.programs(config(folder), jax.devices()[:4])


@pytest.fixture(scope="module")
def costs(made):
  return {name: compiled.compile(made[name], CHIP) for name in made}


def test_all_programs_of_a_step_are_compiled(made, costs):
  assert list(made) == ["warm start", "move", "sample", "update"]
  for name, found in costs.items():
    assert found.total < CHIP.memory
    assert found.over == 0
    assert (found.flops > 0) == (name != "move")


@pytest.mark.parametrize("name", ["warm start", "move", "update"])
def test_nothing_is_on_a_device_that_is_cut(name, made, costs):
  """XLA's arguments are the state's bytes by its layout, to 2 %."""
  state = made[name].arguments[0]
  where = jax.tree.map(lambda x: x.sharding, state)
  expected = partitions.bytes_on_a_device(state, where)
  rest = sum(
    x.size * x.dtype.itemsize for x in jax.tree.leaves(made[name].arguments[1:])
  )
  assert expected <= costs[name].arguments <= 1.02 * expected + rest
  whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  assert expected < 0.3 * whole


def test_what_waits_is_counted(made):
  """A state, but for the parameters that a program is given."""
  state = made["update"].arguments[0]

  def size(tree):
    where = jax.tree.map(lambda x: x.sharding, tree)
    return partitions.bytes_on_a_device(tree, where)

  assert made["update"].waiting == 0
  assert made["move"].waiting == size(state) - size(state.params)
  assert made["sample"].waiting == size(state)


def test_parameters_that_do_not_move_wait_once(tmp_path):
  mesh = {"data": 2, "fsdp": 1, "tensor": 2, "sampling_tensor": 2}
  made = programs.programs(config(tmp_path, mesh=mesh), jax.devices()[:4])
  assert "move" not in made
  state = made["update"].arguments[0]
  assert made["sample"].arguments[0] is state.params
  rest = state.opt_state, state.reference
  waiting = partitions.bytes_on_a_device(
    rest, jax.tree.map(lambda x: x.sharding, rest)
  )
  assert made["sample"].waiting == pytest.approx(waiting, abs=64)


def test_flops_do_not_depend_on_the_mesh(tmp_path, costs):
  other = {"data": 2, "fsdp": 2, "tensor": 2, "sampling_tensor": 2}
  made = programs.programs(config(tmp_path, mesh=other), jax.devices())
  traced = made["update"].jitted.trace(*made["update"].arguments)
  found = roofline.flops(traced.jaxpr, made["update"].trips)
  assert found == costs["update"].flops


def test_bytes_read_are_those_of_every_token(tmp_path):
  """Weights for each token, and the keys and values that are before it."""

  def moved(**fields):
    made = config(tmp_path, **fields)
    return programs.programs(made, jax.devices()[:4])["sample"].moved

  layer, heads = 64 * 3 * 128 + 2 * 64 * (64 + 32), 2 * 2 * 2 * 16
  weights = 2 * (2 * layer + 2 * 128 * 64 + 64 * (2 * 2 + 1))
  before = 6 + 4 * 32 / 2  # Of a prompt, and of four answers on average.
  expected = 32 * weights + 31 * 2 * before * heads * 2
  assert moved() == pytest.approx(expected, rel=1e-6)
  # Cut over `tensor`, half of either, but for the norms; of twice the groups.
  halved = moved(mesh=MESH | {"sampling_tensor": 2})
  assert halved == pytest.approx(
    16 * (weights + 2 * 64 * 5) + 31 * 4 * before * heads, rel=1e-6
  )


def tell(monkeypatch, folder, chip, *, sweep=False, **fields):
  """Runs the command; the chip's devices are the tests'."""
  devices = jax.devices()[:4]
  monkeypatch.setattr(aot, "target", lambda topology: (chip, devices))
  for name, value in {
    "_CONFIG": config(folder, **fields),
    "_TOPOLOGY": "v5e:2x2",
    "_TABLE": str(folder / "table.json"),
    "_SWEEP": sweep,
  }.items():
    monkeypatch.setattr(aot, name, types.SimpleNamespace(value=value))
  code = aot.main([])
  return code, json.loads((folder / "table.json").read_text())


def test_a_run_that_fits_ends_well(monkeypatch, tmp_path, capsys):
  code, table = tell(monkeypatch, tmp_path, CHIP)
  assert code == 0
  assert table["fits"]
  assert capsys.readouterr().out.endswith("it fits\n")
  found = table["programs"]
  bounds = [
    max(found[x]["time"][part] for part in ("compute", "memory", "network"))
    for x in ("move", "sample", "update")
  ]
  assert table["step"]["seconds_at_least"] == pytest.approx(sum(bounds))
  assert table["step"]["tokens"] == 8 * 4 * 32
  assert table["config"]["num_groups"] == 8


def test_a_run_that_does_not_fit_says_by_how_much(
  monkeypatch, tmp_path, capsys
):
  small = CHIP._replace(memory=1_000_000)
  code, table = tell(monkeypatch, tmp_path, small)
  assert code == 1
  assert not table["fits"]
  found = table["programs"]["update"]
  assert found["over"] == found["total"] - 1_000_000 > 0
  said = capsys.readouterr().out
  assert "update does not fit: 0.0" in said
  assert "more config.micro_batches" in said
  assert said.endswith("it does not fit\n")


@pytest.mark.slow
def test_a_sweep_ranks_what_fits(monkeypatch, tmp_path):
  meshes = [
    MESH,
    {"data": 2, "fsdp": 2, "tensor": 1, "sampling_tensor": 1},
    {"data": 1, "fsdp": 1, "tensor": 4, "sampling_tensor": 1},
  ]
  monkeypatch.setattr(aot, "shapes", lambda *_: meshes)
  _, table = tell(monkeypatch, tmp_path, CHIP, sweep=True)
  fine, other, wrong = table["meshes"]
  assert fine["seconds_at_least"] != other["seconds_at_least"]
  assert "must divide the model's 2 key and value heads" in wrong["why"]
  assert table["fits"]


def test_meshes_of_a_sweep_are_all_that_make_sense(tmp_path):
  found = list(aot.shapes(config(tmp_path), 8))
  for mesh in found:
    assert mesh["data"] * mesh["fsdp"] * mesh["tensor"] == 8
  # tensor 1 and 2, 4 and 3 divisors left to fsdp, and 2 ways to sample.
  assert len({tuple(mesh.values()) for mesh in found}) == (4 + 3) * 2


def test_xla_s_refusal_is_understood(made, monkeypatch):
  """As libtpu says it; what it says of anything else is raised."""

  def refuse(message):
    def compile(self):
      raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    return compiled.compile(made["sample"], CHIP)

  found = refuse(
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required"
    " for HLO temporaries (46.83G) exceeds available HBM (15.75G)."
  )
  waiting = made["sample"].waiting
  assert found.over == pytest.approx((46.83 - 15.75) * 2**30 + waiting)
  assert found.temporaries is None
  assert found.flops > 0
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
    refuse("INTERNAL: (46.83G)")


@pytest.mark.parametrize(
  ("topology", "message"),
  [
    ("h100:8", "compiled for TPUs alone"),
    ("v5e:2x2", "install 'groupstd\\[tpu\\]'"),
  ],
)
def test_what_is_missing_is_named(topology, message, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=message):
    aot.target(topology)


PRESETS = [f"{m}@{t}" for m, slices in pod._SLICES.items() for t in slices]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_divide(name):
  """Their parameters lie as the rules say, and each device has its groups."""
  made = pod.get_config(name)
  chips = np.prod([int(x) for x in name.partition(":")[2].split("x")])
  mesh = made.mesh
  assert mesh.data * mesh.fsdp * mesh.tensor == chips
  assert made.num_groups == made.micro_batches * mesh.data * mesh.fsdp
  assert made.num_groups % (chips // mesh.sampling_tensor) == 0
  model = transformer.Config(**made.model)
  policy = transformer.policy(model, length=2)
  params = jax.eval_shape(policy.init, jax.random.key(0))
  billions = sum(x.size for x in jax.tree.leaves(params)) / 1e9
  published = {"qwen3_0_6b": 0.596, "qwen3_8b": 8.19, "llama3_8b": 8.03}
  assert billions == pytest.approx(published[name.partition("@")[0]], rel=2e-3)
  shape = (mesh.data, mesh.fsdp, mesh.tensor)
  there = AbstractMesh(shape, sharding.AXES)
  where = partitions.shardings(params, there, partitions.TRANSFORMER)
  cut = 4e9 * billions / (mesh.fsdp * mesh.tensor)
  held = partitions.bytes_on_a_device(params, where)
  assert held == pytest.approx(cut, rel=0.06)  # Norms are whole.


def test_an_unknown_preset_is_named():
  with pytest.raises(ValueError, match=r"of qwen3_0_6b.*got 'qwen3'"):
    pod.get_config("qwen3")
  with pytest.raises(ValueError, match=r"of v5p:4x4x4.*got 'qwen3_8b@v5e:4x4'"):
    pod.get_config("qwen3_8b@v5e:4x4")


# --- with libtpu ---

tpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: pip install 'groupstd[tpu]'",
)


@tpu
@pytest.mark.slow
def test_a_tiny_run_is_compiled_for_tpus(tmp_path):
  chip, devices = aot.target("v5e:2x2")
  # Of a width that a TPU's tiles of 8 by 128 do not pad.
  model = MODEL | {"width": 512, "head_dim": 128, "hidden": 512}
  made = programs.programs(config(tmp_path, model=model), devices)
  state = made["update"].arguments[0]
  where = jax.tree.map(lambda x: x.sharding, state)
  held = partitions.bytes_on_a_device(state, where)
  found = compiled.compile(made["update"], chip)
  assert held <= found.arguments <= 1.02 * held
  assert found.whole == []
  assert found.collectives["all-gather"].bytes > 0
  # Answers are drawn without a word between devices.
  assert compiled.compile(made["sample"], chip).collectives == {}


@tpu
def test_an_unknown_topology_is_named():
  with pytest.raises(
    ValueError, match=r"--topology has no chip 'v5q'; did you"
  ):
    aot.target("v5q:2x2")
  with pytest.raises(ValueError, match=r"--topology=v5e:5x5: .*not divisible"):
    aot.target("v5e:5x5")


@tpu
@pytest.mark.slow
def test_the_command_ends_with_1_where_it_does_not_fit(tmp_path):
  command = [
    sys.executable,
    "-m",
    "experiments.aot",
    "--config=configs/pod.py:qwen3_0_6b",
    "--topology=v5e:2x2",
    "--config.model.num_layers=1",
    "--config.model.vocab_size=8388608",
    "--config.answer_length=8",
    "--config.mesh.fsdp=4",
  ]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 1, done.stderr
  assert "update does not fit: " in done.stdout
  assert "more chips in config.mesh.fsdp" in done.stdout


def test_a_mistake_is_a_usage_error(monkeypatch, tmp_path):
  with pytest.raises(cli.UsageError, match=r"config\.mesh"):
    tell(monkeypatch, tmp_path, CHIP, mesh=MESH | {"fsdp": 3})
