"""Where parameters lie on a mesh: rules, matched by a parameter's path.

A rule is a pattern of paths and the layouts that it allows, the first of which
divides a parameter is taken. What no rule speaks of, and what no layout of its
rule divides, is an error: nothing is on every device by accident.
"""

from collections.abc import Mapping, Sequence
import math
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

__all__ = [
  "TRANSFORMER",
  "TRANSFORMER_IN_USE",
  "WHOLE",
  "Rules",
  "bytes_on_a_device",
  "constrain",
  "path_of",
  "replicated",
  "shardings",
]

# A pattern that matches the end of a path, such as "blocks.query.kernel" → the
# layouts allowed, best first.
Rules = Mapping[str, Sequence[P]]

WHOLE: Rules = {".*": (P(),)}

# Of `groupstd.transformer`: a layer's products are cut over `tensor` between
# heads or hidden units, so that it sums twice a layer; `fsdp` cuts the other
# axis, and is gathered where a layer is used.
TRANSFORMER: Rules = {
  r"embed\.embedding": (  # [V, W]
    P("tensor", "fsdp"),
    P(None, ("fsdp", "tensor")),
  ),
  r"head\.kernel": (P("fsdp", "tensor"), P(("fsdp", "tensor"), None)),
  r"blocks\.(query|key|value|gate|up)\.kernel": (P(None, "fsdp", "tensor"),),
  r"blocks\.(query|key|value)\.bias": (
    P(None, ("tensor", "fsdp")),
    P(None, "tensor"),
  ),
  r"blocks\.(out|down)\.kernel": (P(None, "tensor", "fsdp"),),
  # A few numbers.
  r"\w*norm\.scale": (P(),),
}

# The same where an update uses them, and in its gradient: a table that is cut
# along its width would have all activations cut so. Others stay as they are.
TRANSFORMER_IN_USE: Rules = {r"embed\.embedding": (P("tensor"), P())}


def shardings(
  tree: Any, mesh: Mesh, rules: Rules, *, params: Any = None
) -> Any:
  """Where each leaf of a tree lies; works on arrays and on their shapes.

  Args:
    tree: parameters, or with `params` a state that has them in it: copies of
      their shape under their path, such as an optimizer's moments and a
      reference, lie as they do. Other leaves, such as counts, are whole.
    mesh: whose axes the rules name.
    rules: for the parameters.
    params: the parameters, if the tree is not them.

  Raises:
    ValueError: naming a parameter that no rule matches, or whose axes a rule's
      layouts do not divide.
  """
  leaves, _ = jax.tree.flatten_with_path(tree if params is None else params)
  chosen = {
    path_of(path): (leaf.shape, _layout(path_of(path), leaf, mesh, rules))
    for path, leaf in leaves
  }

  def lay(path, leaf):
    name = path_of(path)
    while name:
      if name in chosen and chosen[name][0] == leaf.shape:
        return NamedSharding(mesh, chosen[name][1])
      name = name.partition(".")[2]
    return NamedSharding(mesh, P())

  return jax.tree.map_with_path(lay, tree)


def constrain(tree: Any, mesh: Mesh, rules: Rules) -> Any:
  """Under jit: the parameters that rules match lie as they say."""

  def lay(path, leaf):
    name = path_of(path)
    if not any(_matches(pattern, name) for pattern in rules):
      return leaf
    where = NamedSharding(mesh, _layout(name, leaf, mesh, rules))
    return jax.lax.with_sharding_constraint(leaf, where)

  return jax.tree.map_with_path(lay, tree)


def replicated(tree: Any, where: Any) -> dict[str, int]:
  """Path → bytes of leaves that are whole on each of several devices."""
  leaves, _ = jax.tree.flatten_with_path(tree)
  return {
    path_of(path): leaf.size * leaf.dtype.itemsize
    for (path, leaf), sharding in zip(
      leaves, jax.tree.leaves(where), strict=True
    )
    if sharding.is_fully_replicated and sharding.num_devices > 1
  }


def bytes_on_a_device(tree: Any, where: Any) -> int:
  """What a device holds of a tree that is laid out so."""
  return sum(
    math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf, sharding in zip(
      jax.tree.leaves(tree), jax.tree.leaves(where), strict=True
    )
  )


def path_of(path: tuple[Any, ...]) -> str:
  """A leaf's dotted path, the same in a NamedTuple as in a dict."""
  return jax.tree_util.keystr(path, simple=True, separator=".")


def _layout(name: str, leaf: Any, mesh: Mesh, rules: Rules) -> P:
  for pattern, layouts in rules.items():
    if not _matches(pattern, name):
      continue
    for layout in layouts:
      if _divides(layout, leaf.shape, mesh):
        return layout
    raise ValueError(
      f"the mesh's axes must divide {name} {list(leaf.shape)} in one of"
      f" {', '.join(map(str, layouts))}, got {dict(mesh.shape)}."
    )
  raise ValueError(
    f"a rule must say where {name} {list(leaf.shape)} lies, none of"
    f" {', '.join(rules)} matches."
  )


def _matches(pattern: str, name: str) -> bool:
  return re.search(rf"(^|\.)(?:{pattern})$", name) is not None


def _divides(layout: P, shape: tuple[int, ...], mesh: Mesh) -> bool:
  if len(layout) > len(shape):
    return False
  for size, names in zip(shape, layout, strict=False):
    names = names if isinstance(names, tuple) else (names,)
    if size % math.prod(mesh.shape[name] for name in names if name):
      return False
  return True
