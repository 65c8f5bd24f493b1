"""Where each leaf of a state lies on a mesh."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from groupstd import (
  learners,
  partitions,
  policies,
  sharding,
  sigma,
  transformer,
)

CONFIG = transformer.Config(
  24,
  width=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  qkv_bias=True,
  qk_norm=True,
  tied=False,
)


def policy(**kwargs):
  return transformer.policy(CONFIG, length=4, **kwargs)


def shapes():
  return jax.eval_shape(policy().init, jax.random.key(0))


def named(tree):
  leaves, _ = jax.tree.flatten_with_path(tree)
  return {partitions.path_of(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 4, 2), (1, 8, 1)])
def test_a_state_is_cut_as_its_parameters_are(shape):
  """Optimizer, reference and all: a device holds 1/(fsdp·tensor), but norms."""
  mesh = sharding.make_mesh(*shape)
  learner = learners.policy_gradient(
    policy(), optax.adamw(1e-3), sigma.rule(sigma.grpo()), kl_coef=0.1
  )
  state = jax.eval_shape(learner.init, shapes())
  where = partitions.shardings(
    state, mesh, partitions.TRANSFORMER, params=state.params
  )
  leaves, placed = named(state), named(where)
  for prefix in "opt_state.0.mu", "opt_state.0.nu", "reference":
    for name, sharding_of in named(where.params).items():
      assert placed[f"{prefix}.{name}"] == sharding_of
  pieces = shape[1] * shape[2]
  small, held = 0, 0
  for name, leaf in leaves.items():
    size = leaf.size * leaf.dtype.itemsize
    share = math.prod(placed[name].shard_shape(leaf.shape)) / leaf.size
    held += share * size
    if placed[name].is_fully_replicated:
      small += size
      assert pieces == 1 or "norm" in name or leaf.ndim == 0
    else:
      assert share == 1 / pieces
  assert partitions.bytes_on_a_device(state, where) == held
  total = sum(x.size * x.dtype.itemsize for x in leaves.values())
  assert held == small + (total - small) / pieces
  whole = partitions.replicated(state, where)
  assert sum(whole.values()) == small


def test_a_state_is_made_where_it_lies():
  mesh = sharding.make_mesh(2, 2, 2)
  rules = partitions.TRANSFORMER
  params = sharding.place(policy().init, mesh, rules)(jax.random.key(3))
  where = partitions.shardings(params, mesh, rules)
  for leaf, expected in zip(
    *map(jax.tree.leaves, (params, where)), strict=True
  ):
    assert leaf.sharding.is_equivalent_to(expected, leaf.ndim)
    held = {shard.data.nbytes for shard in leaf.addressable_shards}
    assert held == {math.prod(expected.shard_shape(leaf.shape)) * 4}
  # Of the same random bits as on one device, but for the last of a rounding.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=5e-7),
    params,
    policy().init(jax.random.key(3)),
  )


def test_layouts_are_tried_in_order():
  """A vocabulary that `tensor` does not divide leaves its axis whole."""
  rules = partitions.TRANSFORMER
  leaf = {"embed": {"embedding": jnp.zeros((24, 16))}}
  odd = {"embed": {"embedding": jnp.zeros((23, 16))}}
  mesh = sharding.make_mesh(1, 4, 2)

  def lay(tree):
    return partitions.shardings(tree, mesh, rules)["embed"]["embedding"].spec

  assert lay(leaf) == P("tensor", "fsdp")
  assert lay(odd) == P(None, ("fsdp", "tensor"))


def test_what_no_rule_speaks_of_is_named():
  mesh = sharding.make_mesh(1, 4, 2)
  lay = partitions.shardings
  with pytest.raises(ValueError, match=r"where adapter\.a \[3, 4\] lies"):
    lay({"adapter": {"a": jnp.zeros((3, 4))}}, mesh, partitions.TRANSFORMER)
  with pytest.raises(
    ValueError, match=r"must divide .*query\.kernel \[2, 6, 8\]"
  ):
    lay(
      {"blocks": {"query": {"kernel": jnp.zeros((2, 6, 8))}}},
      mesh,
      partitions.TRANSFORMER,
    )
  # A name is matched from its end and whole: none is another's by accident.
  with pytest.raises(ValueError, match=r"where myblocks\.query\.kernel"):
    lay(
      {"myblocks": {"query": {"kernel": jnp.zeros((2, 8, 8))}}},
      mesh,
      partitions.TRANSFORMER,
    )


def test_an_optimizers_other_shapes_are_whole_and_named():
  """Adafactor's moments are sums over an axis: of no parameter's shape."""
  mesh = sharding.make_mesh(1, 4, 2)
  params = {"query": {"kernel": jnp.zeros((128, 256))}}
  rules = {r"query\.kernel": (P("fsdp", "tensor"),)}
  state = {
    "params": params,
    "opt": optax.adafactor(1e-3).init(params),
  }
  where = partitions.shardings(state, mesh, rules, params=params)
  whole = partitions.replicated(state, where)
  assert any("v_row" in name for name in whole)
  assert not any(name.startswith("params") for name in whole)


@pytest.mark.parametrize(
  ("axes", "message"),
  [
    ((0, 1, 1), "`data` must be at least 1, or -1 .* got 0"),
    ((-1, -1, 1), "one axis .* got data and fsdp"),
    ((-1, 3, 1), "must divide the 8 devices, got 3"),
    ((4, 2, 2), r"at most the 8 devices .* 4·2·2 = 16"),
  ],
)
def test_a_mesh_that_cannot_be_is_refused(axes, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(*axes)


def test_a_mesh_keeps_its_devices_in_another_shape():
  mesh = sharding.make_mesh(1, 4, 2)
  other = sharding.reshape(mesh, tensor=4)
  assert dict(other.shape) == {"data": 2, "fsdp": 1, "tensor": 4}
  assert other.devices.ravel().tolist() == mesh.devices.ravel().tolist()
  with pytest.raises(ValueError, match=r"8 devices .* 3·1·1 = 3"):
    sharding.reshape(mesh, 3)


def test_a_table_policy_needs_no_rules():
  """By default all is whole, and groups alone are cut."""
  params = policies.softmax(4, 3).init(jax.random.key(0))
  mesh = sharding.make_mesh()
  where = partitions.shardings(params, mesh, partitions.WHOLE)
  assert all(x.is_fully_replicated for x in jax.tree.leaves(where))
