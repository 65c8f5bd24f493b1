"""The programs of a step as a config has them, for devices that are elsewhere.

Nothing runs: parameters and batches are shapes, and say where they lie.
"""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import ml_collections

from experiments import building, language, meshes, parts, roofline
from groupstd import (
  imitation,
  learners,
  partitions,
  policies,
  rollouts,
  sharding,
  tokenizers,
  transformer,
)

_RULES = partitions.TRANSFORMER


class Program(NamedTuple):
  """One of a step's programs, before it is compiled.

  Attributes:
    jitted: the program.
    arguments: their shapes, and where they lie.
    trips: see `roofline.flops`.
    moved: bytes that a device reads and writes of its HBM at the least:
      parameters each time they are used, a cache of keys and values.
    waiting: bytes on a device of what lies there meanwhile, and is not used.
    cut: parameters that the program should have whole on no device.
  """

  jitted: Any
  arguments: tuple[Any, ...]
  trips: roofline.Trips
  moved: float
  waiting: int = 0
  cut: Any = None


def programs(
  config: ml_collections.ConfigDict, devices: Sequence[Any]
) -> dict[str, Program]:
  """Name → program: a warm start if there is one, a move, sample and update.

  Raises:
    ValueError: naming the field, its value and what it must be.
  """
  run = _Run(config, *_model(config), devices)
  found = {}
  if config.warmup.num_steps and not config.init:
    found["warm start"] = run.warm_start()
  if run.meshes.differ:
    found["move"] = run.move()
  return found | {"sample": run.sample(), "update": run.update()}


class _Run:
  """What the programs of a config have in common."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    model: transformer.Config,
    stop: tuple[int, ...],
    devices: Sequence[Any],
  ):
    self.config, self.model, self.stop = config, model, stop
    self.meshes = meshes.meshes(config, model, devices)
    self.policy = self.policy_at(config.temperature)
    self.params = jax.eval_shape(self.policy.init, jax.random.key(0))
    updates = config.num_steps * config.epochs * config.mini_batches
    # Where a trial on the devices is to choose, one group on each at a time.
    self.micro_batches = config.micro_batches or max(
      config.num_groups
      // config.mini_batches
      // sharding.groups_cut(self.meshes.training),
      1,
    )
    self.learner = self.meshes.learner(
      language.policy_gradient(
        config,
        self.policy,
        language.build_rule(config),
        building.optimizer(config, updates, "config"),
        self.micro_batches,
      )
    )
    self.state = self.meshes.state(self.learner, self.policy)

  def policy_at(self, temperature: float) -> policies.Policy:
    return self.meshes.policy(
      self.model,
      length=self.config.answer_length,
      stop=self.stop,
      temperature=temperature,
    )

  def lay(self, tree: Any, mesh: Mesh) -> Any:
    """The parameters' shapes, and where they lie on a mesh."""
    where = partitions.shardings(tree, mesh, _RULES)
    return jax.tree.map(
      lambda x, there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there),
      tree,
      where,
    )

  def read(self, mesh: Mesh) -> float:
    """Bytes of the parameters that a device's products read, each once.

    They are as they are computed with, and whole but for what `tensor` cuts.
    """
    gathered = sharding.reshape(mesh, tensor=mesh.shape["tensor"])
    share = self.dtype.itemsize / self.params_dtype.itemsize
    return share * held(self.lay(self.params, gathered))

  @property
  def params_dtype(self) -> Any:
    return jax.tree.leaves(self.params)[0].dtype

  @property
  def dtype(self) -> Any:
    return jnp.dtype(self.model.dtype or self.params_dtype)

  def prompts(self, number: int) -> policies.Prompts:
    shape = number, self.config.prompt_width
    return policies.Prompts(
      _array(*shape), _array(*shape, of=bool), _array(number)
    )

  def updated(self, state: learners.TrainState, parts: int) -> float:
    """Bytes moved by an update: of the state, and of products' parameters."""
    # Forward, backward, and forward again where activations are not kept.
    passes = 3 if self.model.remat else 2
    reads = passes * parts * self.read(self.meshes.training)
    reference = held(state.reference)
    if state.reference is not None:
      reads += parts / self.config.epochs * self.read(self.meshes.training)
    return 2 * (held(state) - reference) + reads

  def warm_start(self) -> Program:
    config = self.config
    warmup = config.warmup
    descent = building.optimizer(warmup, warmup.num_steps, "config.warmup")
    policy = self.policy_at(1.0)
    learner = self.meshes.learner(imitation.learner(policy, descent))
    state = self.meshes.state(learner, policy)
    shape = warmup.batch_size, 1, config.answer_length
    examples = (
      self.prompts(warmup.batch_size),
      _array(*shape),
      _array(*shape, of=bool),
    )
    return Program(
      jax.jit(learner.step, donate_argnums=0),
      (state, examples),
      lambda within: 1,
      self.updated(state, 1),
      cut=state.params,
    )

  def move(self) -> Program:
    """Parameters from where they are trained to where answers are drawn."""
    params, sampling = self.state.params, self.meshes.sampling
    return Program(
      sharding.place(lambda params: params, sampling, _RULES),
      (params,),
      lambda within: 1,
      held(params) + held(self.lay(self.params, sampling)),
      held(self.state) - held(params),
    )

  def sample(self) -> Program:
    config, model, mesh = self.config, self.model, self.meshes.sampling
    number, size, length = (
      config.num_groups,
      config.group_size,
      config.answer_length,
    )

    def sample(params, prompts):
      keys = jax.random.split(jax.random.key(0), number)
      return self.policy.sample(params, keys, prompts, size)

    params, waiting = self.state.params, held(self.state)
    if self.meshes.differ:
      params = self.lay(self.params, mesh)
    else:
      waiting -= held(params)
    # Each token reads the keys and values of what is before it: of a group's
    # prompt once, and of each of its answers.
    groups = math.ceil(number / sharding.groups_cut(mesh))
    before = config.prompt_width + size * length / 2
    token = 2 * model.num_layers * model.kv_heads * model.head_size
    token *= self.dtype.itemsize / mesh.shape["tensor"]
    return Program(
      jax.jit(sample),
      (params, self.prompts(number)),
      # Those that are moved together go on for less than they would.
      lambda within: 0 if "branch" in within else length - 1,
      length * self.read(mesh) + (length - 1) * groups * before * token,
      waiting,
    )

  def update(self) -> Program:
    config = self.config
    micro, mini = self.micro_batches, config.mini_batches
    batch = config.num_groups, config.group_size
    tokens = *batch, config.answer_length
    rollout = rollouts.Rollout(
      prompts=self.prompts(config.num_groups),
      tokens=_array(*tokens),
      mask=_array(*tokens, of=bool),
      log_probs=_array(*tokens, of=jnp.float32),
      rewards=_array(*batch, of=jnp.float32),
      scores=_array(*batch, of=jnp.float32),
      where=_array(*batch, of=bool),
    )
    return Program(
      jax.jit(self.learner.step, donate_argnums=0),
      (self.state, rollout),
      # An update's parts, or without a loop over updates all of a step's.
      lambda within: micro if "loop" in within else mini * micro,
      self.updated(self.state, config.epochs * mini * micro),
      cut=self.state.params,
    )


def _array(*shape: int, of: Any = jnp.int32) -> Any:
  return jax.ShapeDtypeStruct(shape, of)


def held(tree: Any) -> int:
  """Bytes on a device."""
  return partitions.bytes_on_a_device(
    tree, jax.tree.map(lambda x: x.sharding, tree)
  )


def _model(
  config: ml_collections.ConfigDict,
) -> tuple[transformer.Config, tuple[int, ...]]:
  """The decoder's shape and its end tokens, with the tokenizer or without.

  A program depends on how many tokens there are, and how many end an answer.
  """
  source: Any = next(iter(config.tokenizer.values()), {})
  try:
    tokenizer = building.make_one(
      tokenizers, config.tokenizer, "config.tokenizer"
    )
    return parts.decoder(config, tokenizer.vocab_size), tokenizer.stop
  except ValueError:
    if "vocab_size" not in config.model:
      raise
    stop = tuple(range(len(source.get("stop", ()))))
    return parts.decoder(config, len(stop)), stop
