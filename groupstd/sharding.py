"""Meshes, and how programs run on them: the only place that knows of devices.

A mesh has three axes. Groups are cut over `data` and `fsdp`, whole, so that a
group's statistics need no communication and the gradient is one sum that XLA
inserts. Parameters lie as the rules of `groupstd.partitions` say: cut over
`fsdp` and `tensor`, and the same over `data`.

`jax.jit` with shardings does all of it, on one device or a pod: it is what pjit
became, and what pmap is underneath.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from groupstd import learners, partitions, policies, rollouts

__all__ = [
  "AXES",
  "fuse",
  "groups_cut",
  "lay_groups",
  "make_mesh",
  "place",
  "replicate",
  "reshape",
  "sharded",
  "spread",
]

AXES = ("data", "fsdp", "tensor")
_GROUPS = PartitionSpec(AXES[:2])


def make_mesh(
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  *,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """A mesh of data·fsdp·tensor devices; one axis of -1 takes what is left.

  Over several slices of TPUs, joined by a slower network, `data` is the axis
  that runs between them.

  Args:
    data: copies of the parameters, each at groups of its own.
    fsdp: over how many devices each of them is cut, which have groups of their
      own too.
    tensor: over how many each product within a layer is cut.
    devices: all by default, of which the first are taken. Several processes
      take all of theirs.

  Raises:
    ValueError: if there are not that many devices, or some of a process's
      would be left out; or if `data` is not a multiple of the slices.
  """
  devices = jax.devices() if devices is None else devices
  asked = {"data": data, "fsdp": fsdp, "tensor": tensor}
  shape, total = _filled(asked, len(devices)), len(devices)
  number = math.prod(shape)
  several = len({device.process_index for device in devices}) > 1
  if number > total or (several and number < total):
    raise ValueError(
      f"a mesh must have {'' if several else 'at most '}the {total} devices"
      f" that there are, got {_product(shape)}."
    )
  devices = devices[:number]
  # GPUs have one as well, their host's; XLA finds its way over these.
  slices = {
    device.slice_index if device.platform == "tpu" else 0 for device in devices
  }
  if shape[0] % len(slices):
    raise ValueError(
      f"`data` must be a multiple of the {len(slices)} slices, got {shape[0]}."
    )
  if len(slices) > 1:
    grid = mesh_utils.create_hybrid_device_mesh(
      (shape[0] // len(slices), *shape[1:]),
      (len(slices), 1, 1),
      devices,
      allow_split_physical_axes=True,
    )
  else:
    grid = mesh_utils.create_device_mesh(
      shape, devices, allow_split_physical_axes=True
    )
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def reshape(mesh: Mesh, data: int = -1, fsdp: int = 1, tensor: int = 1) -> Mesh:
  """The same devices in the same order as a mesh of another shape.

  What lies on the one moves to the other within one program.

  Raises:
    ValueError: if data·fsdp·tensor is not the number of devices.
  """
  shape = _filled({"data": data, "fsdp": fsdp, "tensor": tensor}, mesh.size)
  if math.prod(shape) != mesh.size:
    raise ValueError(
      f"a mesh of {mesh.size} devices must be reshaped to as many, got"
      f" {_product(shape)}."
    )
  grid = mesh.devices.reshape(shape)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def groups_cut(mesh: Mesh) -> int:
  """Over how many devices groups are cut."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def replicate(tree: Any, mesh: Mesh) -> Any:
  """A copy of the tree with every array whole on every device.

  A copy, so that a step may take it over and leave the caller's as it is.
  """
  whole = NamedSharding(mesh, PartitionSpec())
  return jax.device_put(jax.tree.map(jnp.copy, tree), whole)


def sharded(
  learner: learners.Learner,
  mesh: Mesh,
  rules: partitions.Rules = partitions.WHOLE,
) -> learners.Learner:
  """The learner with its state laid out by the rules, its batch cut over all.

  The step is jitted and takes over the buffers of the state it is given. It
  takes any number of groups and equals the plain step up to rounding. By
  default every device has the whole state: data parallelism.

    mesh = make_mesh()
    learner = sharded(learner, mesh)
    state, info = learner.step(state, rollout)
  """

  def lay(state):
    where = partitions.shardings(state, mesh, rules, params=state.params)
    return jax.lax.with_sharding_constraint(state, where)

  def step(state, batch):
    state, info = _step(learner, state, batch, mesh)
    return lay(state), _everywhere(info, mesh)

  @jax.jit
  def init(params, reference=None):
    # Copies, so that a step may take over the state and leave the caller's.
    state = jax.tree.map(jnp.copy, learner.init(params, reference))
    return lay(state)

  return learners.Learner(init, _one_at_a_time(step, mesh), lambda x, _: x)


def place(
  function: Callable[..., Any],
  mesh: Mesh,
  rules: partitions.Rules = partitions.WHOLE,
) -> Callable[..., Any]:
  """Jits a function of arrays so that what it returns lies as the rules say.

    params = place(policy.init, mesh, rules)(key)

  makes parameters that no device could hold, and of the identity it makes what
  moves parameters to another mesh of the same devices.
  """

  @jax.jit
  def placed(*args):
    made = function(*args)
    where = partitions.shardings(made, mesh, rules)
    return jax.lax.with_sharding_constraint(made, where)

  return placed


def spread(
  policy: policies.Policy,
  training: Mesh,
  sampling: Mesh | None = None,
  *,
  rules: partitions.Rules = partitions.WHOLE,
  in_use: partitions.Rules | None = None,
) -> policies.Policy:
  """The policy, its samples and log-probs of groups that are cut over a mesh.

  Each shard draws its own groups to their ends, with no word from the others;
  parameters are gathered over `data` and `fsdp`, but not over `tensor`. Any
  number of groups is drawn: what is missing is drawn twice, and dropped.

  Args:
    policy: on one device.
    training: the mesh of its log-probs.
    sampling: of its samples, by default the same.
    rules: how parameters lie for the log-probs, and their gradient, which is
      then summed no further than to there.
    in_use: how some of them lie instead where they are used.
  """
  mesh = training if sampling is None else sampling

  def using(function):
    if function is None:
      return None

    def apply(params, *args):
      params = partitions.constrain(params, training, rules)
      params = partitions.constrain(params, training, in_use or {})
      return function(params, *args)

    return apply

  def sample(params, keys, prompts, group_size):
    number = len(keys)
    missing = -number % groups_cut(mesh)
    if missing:
      rows = np.arange(number + missing) % number
      keys, prompts = jax.tree.map(lambda x: x[rows], (keys, prompts))
    drawn = jax.shard_map(
      lambda params, keys, prompts: policy.sample(
        params, keys, prompts, group_size
      ),
      mesh=mesh,
      in_specs=(PartitionSpec(), _GROUPS, _GROUPS),
      out_specs=_GROUPS,
      axis_names=set(AXES[:2]),
      check_vma=False,
    )(params, keys, prompts)
    if not missing:
      return drawn
    # What does not divide lies nowhere but everywhere.
    return jax.tree.map(lambda x: x[:number], _everywhere(drawn, mesh))

  return policy._replace(
    sample=sample,
    log_prob=using(policy.log_prob),
    log_prob_and_entropy=using(policy.log_prob_and_entropy),
  )


def lay_groups(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
  """Under jit: an array cut between groups along its axis 0, and nowhere else.

  What a policy says of its layers' activations, or XLA may cut them as the
  parameters are, and sum everything it computes.
  """
  cut = NamedSharding(mesh, _GROUPS)
  return lambda x: jax.lax.with_sharding_constraint(x, cut)


def fuse(
  collect: rollouts.Collect, learner: learners.Learner, mesh: Mesh
) -> Callable[
  [learners.TrainState],
  tuple[learners.TrainState, rollouts.Counts, learners.Info],
]:
  """state → (state, Counts, Info): drawing and learning as one program.

  For a `collect` that is jax through and through. Otherwise as `sharded`, with
  the whole state on every device.
  """

  def step(state):
    rollout, counts = collect(state.params, state.step)
    state, info = _step(learner, state, rollout, mesh)
    return _everywhere((state, counts, info), mesh)

  return _one_at_a_time(step, mesh)


def _one_at_a_time(step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
  """Jits a step that takes over its state; (state, …) → (state, …)."""
  jitted = jax.jit(step, donate_argnums=0)
  if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
    return jitted

  def waiting(state, *args):
    # Virtual devices share a pool of threads: a sum over them can wait for
    # ever for threads that the next step, dispatched ahead, already holds.
    return jitted(jax.block_until_ready(state), *args)

  return waiting


def _step(learner: learners.Learner, state: Any, batch: Any, mesh: Mesh):
  """A step whose batch is cut between groups; what pads it weighs nothing."""
  shards = groups_cut(mesh)
  batch = jax.lax.with_sharding_constraint(
    learner.pad(batch, shards), NamedSharding(mesh, _GROUPS)
  )
  return learner.step(state, batch, shards=shards)


def _everywhere(tree: Any, mesh: Mesh) -> Any:
  whole = NamedSharding(mesh, PartitionSpec())
  return jax.lax.with_sharding_constraint(tree, whole)


def _filled(asked: dict[str, int], number: int) -> tuple[int, ...]:
  """The axes' sizes, where one may be -1."""
  for name, size in asked.items():
    if size < 1 and size != -1:
      raise ValueError(
        f"`{name}` must be at least 1, or -1 for what is left, got {size}."
      )
  open_axes = [name for name, size in asked.items() if size == -1]
  if len(open_axes) > 1:
    raise ValueError(
      f"one axis of a mesh may be -1, got {' and '.join(open_axes)}."
    )
  known = math.prod(size for size in asked.values() if size != -1)
  if open_axes and (known > number or number % known):
    raise ValueError(
      f"the axes but `{open_axes[0]}` must divide the {number} devices, got"
      f" {known}."
    )
  rest = number // known
  return tuple(rest if size == -1 else size for size in asked.values())


def _product(shape: Sequence[int]) -> str:
  return f"{'·'.join(map(str, shape))} = {math.prod(shape)}"
