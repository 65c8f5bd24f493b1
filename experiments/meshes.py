"""On which devices a language model's run computes, and how it lies there."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

from absl import logging
import jax
from jax.sharding import Mesh
import ml_collections

from experiments import building
from groupstd import (
  learners,
  partitions,
  policies,
  sharding,
  transformer,
)

_RULES = partitions.TRANSFORMER
# What is on every device, and is larger than this, is worth a word.
_LARGE = 1 << 20


class Meshes(NamedTuple):
  """The same devices in two shapes.

  Attributes:
    training: cuts parameters and groups for the update.
    sampling: cuts them for drawing answers: parameters over `tensor` alone, as
      what `fsdp` cuts would have to be gathered for every token.
  """

  training: Mesh
  sampling: Mesh

  def policy(
    self, config: transformer.Config, **options: Any
  ) -> policies.Policy:
    """The policy of a decoder, on both; options of `transformer.policy`."""
    lay = sharding.lay_groups(self.training)
    return sharding.spread(
      transformer.policy(config, lay=lay, **options),
      self.training,
      self.sampling,
      rules=_RULES,
      in_use=partitions.TRANSFORMER_IN_USE,
    )

  def shapes(self, policy: policies.Policy) -> Any:
    """Those of parameters, each with where it lies for sampling."""
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    return _laid(shapes, partitions.shardings(shapes, self.sampling, _RULES))

  def init(self, policy: policies.Policy, key: jax.Array) -> Any:
    """Parameters for training, of which no device makes more than its part."""
    return sharding.place(policy.init, self.training, _RULES)(key)

  def learner(self, learner: learners.Learner) -> learners.Learner:
    """The learner, on the mesh for training."""
    return sharding.sharded(learner, self.training, _RULES)

  @property
  def differ(self) -> bool:
    """Whether parameters lie elsewhere to sample than to train."""
    here, there = self.training.shape, self.sampling.shape
    return here["fsdp"] > 1 or here["tensor"] != there["tensor"]

  def move(self, params: Any) -> Any:
    """Parameters as sampling needs them."""
    return _mover(self.sampling)(params) if self.differ else params

  def state(
    self, learner: learners.Learner, policy: policies.Policy
  ) -> learners.TrainState:
    """The shapes of its state, each with where it lies for training.

    Warns of what is large, whole on every device, and no parameter: moments of
    other shapes than the parameters', such as Adafactor's.
    """
    params = jax.eval_shape(policy.init, jax.random.key(0))
    state = jax.eval_shape(learner.init, params)
    mesh = self.training
    where = partitions.shardings(state, mesh, _RULES, params=params)
    if mesh.shape["fsdp"] * mesh.shape["tensor"] > 1:
      for name, size in partitions.replicated(state, where).items():
        if size > _LARGE:
          logging.warning(
            f"{name}, {size / 2**20:.0f} MiB, is whole on every device."
          )
    return _laid(state, where)


def _laid(shapes: Any, where: Any) -> Any:
  return jax.tree.map(
    lambda x, there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there),
    shapes,
    where,
  )


def meshes(
  config: ml_collections.ConfigDict,
  model: transformer.Config,
  devices: Sequence[Any] | None = None,
) -> Meshes:
  """What config.mesh says of these devices, by default those that are here.

  Raises:
    ValueError: naming the field, its value and what it must be.
  """
  asked = config.mesh
  with building.field("config.mesh"):
    training = sharding.make_mesh(
      asked.data, asked.fsdp, asked.tensor, devices=devices
    )
  tensor = asked.sampling_tensor or asked.tensor
  with building.field("config.mesh.sampling_tensor"):
    sampling = sharding.reshape(training, tensor=tensor)
  for name, mesh in ("tensor", training), ("sampling_tensor", sampling):
    if model.kv_heads % mesh.shape["tensor"]:
      raise ValueError(
        f"config.mesh.{name} must divide the model's {model.kv_heads} key and"
        f" value heads, got {mesh.shape['tensor']}: a head is on one device"
      )
  return Meshes(training, sampling)


@functools.cache
def _mover(mesh: Mesh) -> Callable[[Any], Any]:
  return sharding.place(lambda params: params, mesh, _RULES)
