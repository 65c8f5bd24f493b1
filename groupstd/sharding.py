"""Meshes and where arrays lie on them: the only place that knows of devices.

Rollouts are cut along axis 0, between groups and never inside one, so that a
group's statistics need no communication; the gradient is then one sum over the
mesh, which XLA inserts. `jax.jit` with shardings does what `pmap` was for.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from groupstd import learners, rollouts

__all__ = [
  "data_parallel",
  "fuse",
  "make_mesh",
  "replicate",
  "shard_groups",
]


def make_mesh(num_devices: int | None = None) -> Mesh:
  """A mesh of one axis, `data`, over the first devices (all by default).

  Raises:
    ValueError: if there are fewer devices than asked for, or none is.
  """
  devices = jax.devices()
  num_devices = len(devices) if num_devices is None else num_devices
  if not 1 <= num_devices <= len(devices):
    raise ValueError(
      f"`num_devices` must be from 1 to the {len(devices)} there are, got"
      f" {num_devices}."
    )
  return jax.make_mesh(
    (num_devices,),
    ("data",),
    axis_types=(AxisType.Auto,),
    devices=devices[:num_devices],
  )


def replicate(tree, mesh: Mesh):
  """A copy of the tree with every array whole on every device.

  A copy, so that a step may take it over and leave the caller's as it is.
  """
  whole = NamedSharding(mesh, PartitionSpec())
  return jax.device_put(jax.tree.map(jnp.copy, tree), whole)


def shard_groups(rollout: rollouts.Rollout, mesh: Mesh) -> rollouts.Rollout:
  """The rollout cut between groups over the mesh, inside or outside of jit.

  Groups that weigh nothing are appended if the mesh does not divide B.
  """
  rollout = rollouts.pad(rollout, mesh.size)
  sharding = NamedSharding(mesh, PartitionSpec("data"))
  return jax.lax.with_sharding_constraint(rollout, sharding)


def data_parallel(learner: learners.Learner, mesh: Mesh) -> learners.Learner:
  """The learner with its state on every device and its batch cut over them.

  The step is jitted and takes over the buffers of the state it is given. It
  takes any number of groups and equals the plain step up to rounding.

    mesh = make_mesh()
    learner = data_parallel(learner, mesh)
    state, info = learner.step(state, rollout)
  """

  def step(state, rollout):
    rollout = shard_groups(rollout, mesh)
    return learner.step(state, rollout, shards=mesh.size)

  def init(params, reference=None):
    return replicate(learner.init(params, reference), mesh)

  return learners.Learner(init, _jit(step, mesh))


def fuse(
  collect: rollouts.Collect, learner: learners.Learner, mesh: Mesh
) -> Callable[
  [learners.TrainState],
  tuple[learners.TrainState, rollouts.Counts, learners.Info],
]:
  """state → (state, Counts, Info): drawing and learning as one program.

  For a `collect` that is jax through and through. Otherwise as
  `data_parallel`.
  """

  def step(state):
    rollout, counts = collect(state.params, state.step)
    rollout = shard_groups(rollout, mesh)
    state, info = learner.step(state, rollout, shards=mesh.size)
    return state, counts, info

  return _jit(step, mesh)


def _jit(step, mesh: Mesh):
  """Jits a step that takes over its state and leaves its results everywhere."""
  whole = NamedSharding(mesh, PartitionSpec())
  jitted = jax.jit(step, donate_argnums=0, out_shardings=whole)
  if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
    return jitted

  def one_at_a_time(state, *args):
    # Virtual devices share a pool of threads: a sum over them can wait for
    # ever for threads that the next step, dispatched ahead, already holds.
    return jitted(jax.block_until_ready(state), *args)

  return one_at_a_time
