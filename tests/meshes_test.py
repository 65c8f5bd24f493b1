"""One program on every mesh: one device, eight, or eight of two processes.

Sums of another order differ by about 10⁻¹⁶ in float64, which three of Adam's
steps magnify.
"""

import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import mesh_program
import numpy as np
import optax
import pytest

from groupstd import (
  learners,
  partitions,
  rollouts,
  sharding,
  sigma,
  transformer,
)

close = np.testing.assert_allclose
equal = np.testing.assert_array_equal
ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def compile_quickly(compiled_quickly):
  return compiled_quickly


@pytest.fixture(scope="module")
def alone():
  """(groups, of which are able) → what one device saw."""
  with jax.enable_x64(True):
    mesh = sharding.make_mesh(1)
    sizes = {case[1:] for case in mesh_program.CASES}
    return {size: mesh_program.steps(mesh, *size) for size in sizes}


def same(found, expected):
  for step, other in zip(found, expected, strict=True):
    for name in "tokens", "rewards", "drawn", "kept":
      equal(step[name], other[name])
    close(step["loss"], other["loss"], rtol=1e-9)
    for name, atol in ("gradient", 1e-9), ("params", 1e-8):
      jax.tree.map(lambda x, y: close(x, y, 0, atol), step[name], other[name])  # noqa: B023
    largest = max(np.abs(x).max() for x in jax.tree.leaves(other["gradient"]))
    assert largest > 1e-3


@pytest.mark.parametrize(("shape", "num_groups", "able"), mesh_program.CASES)
@pytest.mark.usefixtures("x64")
def test_eight_devices_are_one(shape, num_groups, able, alone):
  """Tokens, rewards and redraws are equal; gradients to 10⁻⁹."""
  mesh = sharding.make_mesh(*shape)
  same(mesh_program.steps(mesh, num_groups, able), alone[num_groups, able])


@pytest.mark.slow
def test_two_processes_are_one(alone, tmp_path):
  """Four devices each; within three minutes."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  environment = os.environ | {
    "PYTHONPATH": str(ROOT),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  }
  out = tmp_path / "found.pickle"
  program = str(ROOT / "tests" / "mesh_program.py")
  running = [
    subprocess.Popen(
      [sys.executable, program, str(out), f"localhost:{port}", "2", str(i)],
      env=environment,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  try:
    for process in running:
      _, errors = process.communicate(timeout=180)
      assert process.returncode == 0, errors[-2000:]
  finally:
    for process in running:
      process.kill()
  found = pickle.loads(out.read_bytes())
  assert set(found) == set(mesh_program.CASES[1:])
  for case, steps in found.items():
    same(steps, alone[case[1:]])
  kept = [step["kept"] for step in found[(1, 4, 2), 8, 3]]
  assert 0 < max(kept) <= 3  # And none of the second process's.


@pytest.mark.usefixtures("x64")
def test_sampling_may_lie_otherwise_than_training(alone):
  """Parameters cut four times for the update, and whole for sampling."""
  training = sharding.make_mesh(1, 4, 2)
  sampling = sharding.reshape(training, 8)
  found = mesh_program.steps(training, 5, 5, sampling=sampling)
  same(found, alone[5, 5])


def test_float32_gradients_agree_to_rounding():
  one, eight = (
    mesh_program.steps(mesh, 8, 8, dtype=jnp.float32, number=1)[0]
    for mesh in (sharding.make_mesh(1), sharding.make_mesh(2, 2, 2))
  )
  equal(eight["tokens"], one["tokens"])
  norm = np.sqrt(
    sum(np.square(x).sum() for x in jax.tree.leaves(one["gradient"]))
  )
  off = jax.tree.map(np.subtract, eight["gradient"], one["gradient"])
  size = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(off)))
  assert size < 1e-5 * norm


COLLECTIVES = re.compile(
  r" = (.*?) (all-reduce|all-gather|all-to-all|collective-permute"
  r"|reduce-scatter|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)


def test_an_update_gathers_weights_and_sums_the_rest():
  """Nothing is sent but parameters, where they are used, and sums.

  Over `fsdp` and `data` gradients and counts are summed; over `tensor` a
  layer's activations [.., W], which are cut between groups all the while, and
  what the vocabulary's log-softmax adds up.
  """
  mesh = sharding.make_mesh(1, 4, 2)
  config = transformer.Config(64, width=32, num_layers=2, num_heads=4)
  policy = sharding.spread(
    transformer.policy(config, length=6, lay=sharding.lay_groups(mesh)),
    mesh,
    rules=partitions.TRANSFORMER,
    in_use=partitions.TRANSFORMER_IN_USE,
  )
  learner = sharding.sharded(
    learners.policy_gradient(
      policy, optax.sgd(0.1), sigma.rule(sigma.dapo()), micro_batches=2
    ),
    mesh,
    partitions.TRANSFORMER,
  )
  state = learner.init(policy.init(jax.random.key(0)))
  shape = 16, 4, 6
  rollout = rollouts.Rollout(
    prompts=np.zeros((16, 5), np.int32),
    tokens=np.zeros(shape, np.int32),
    mask=np.ones(shape, bool),
    log_probs=np.zeros(shape, np.float32),
    rewards=np.zeros(shape[:2], np.float32),
    scores=np.zeros(shape[:2], np.float32),
    where=np.ones(shape[:2], bool),
  )
  text = jax.jit(learner.step).lower(state, rollout).compile().as_text()
  sent = COLLECTIVES.findall(text)
  assert {kind for _, kind in sent} <= {
    "all-gather",
    "all-reduce",
    "reduce-scatter",
  }
  gathered = {
    tuple(map(int, dims.split(",")))
    for shape, kind in sent
    for dims in re.findall(r"\[([\d,]+)\]", shape)
    if kind == "all-gather"
  }
  # A layer's kernels and the table, whole over fsdp and cut over tensor.
  layer = {(32, 16), (16, 32), (32, 64), (64, 32), (32, 32)}
  assert gathered <= layer
  assert gathered
