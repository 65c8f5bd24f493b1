"""Parts of a config, turned into what they name or into what is wrong.

A config has no registry of strings: {"clipped": {"high": 0.28}} is the call
`clipped(high=0.28)` of the module that its field belongs to.
"""

from collections.abc import Iterator
import contextlib
from types import ModuleType
from typing import Any

import jax
import ml_collections
import numpy as np

from experiments import cli
from groupstd import sigma, theory


@contextlib.contextmanager
def field(name: str) -> Iterator[None]:
  """Puts a field's name before what is raised about its value."""
  try:
    yield
  except (ImportError, OSError, TypeError, ValueError) as error:
    raise ValueError(f"{name}: {error}") from error


def at_least(
  config: ml_collections.ConfigDict,
  low: int,
  *fields: str,
  name: str = "config",
) -> None:
  """Raises a ValueError if one of these fields is below `low`."""
  for field in fields:
    value: Any = config[field]
    if value < low:
      raise ValueError(f"{name}.{field} must be at least {low}, got {value}")


def operation(
  parts: ml_collections.ConfigDict, group_size: int
) -> sigma.SigmaOp:
  """The product of config.sigma's operations, checked at the group size."""
  return check(sigma.product(*make(sigma, parts, "config.sigma")), group_size)


def check(op: sigma.SigmaOp, group_size: int) -> sigma.SigmaOp:
  """The operation, if it weighs every binary group with a finite number."""
  with jax.enable_x64(True):  # One program, where theory would compile forty.
    gain = jax.jit(lambda: theory.gain(op, group_size))()
  broken = ~np.isfinite(np.asarray(gain))
  if broken.any():
    raise ValueError(
      "config.sigma must weigh every group with a finite number, it does not"
      f" at k = {np.flatnonzero(broken).tolist()} of {group_size} right"
    )
  return op


def make(
  module: ModuleType,
  parts: ml_collections.ConfigDict,
  name: str,
  **extra: Any,
) -> list[Any]:
  """What the module's functions of these names make of these arguments.

  Args:
    module: where the functions are.
    parts: name of a function → its arguments.
    name: of the config's field.
    **extra: arguments that do not come from the config.
  """
  made = []
  arguments: Any
  for function, arguments in parts.items():
    call = named(module, function, name)
    with field(f"{name}.{function}"):
      made.append(call(**extra, **arguments.to_dict()))
  return made


def make_one(
  module: ModuleType, parts: ml_collections.ConfigDict, name: str, **extra: Any
) -> Any:
  """The same where there must be one function."""
  if len(parts) != 1:
    raise ValueError(f"{name} must have one entry, got {sorted(parts)}")
  return make(module, parts, name, **extra)[0]


def named(module: ModuleType, function: str, name: str) -> Any:
  """The module's public function of this name."""
  names = getattr(module, "__all__", None) or dir(module)
  if function not in names:
    raise ValueError(
      f"{name} has no {function!r}{cli.did_you_mean(function, names)}"
    )
  return getattr(module, function)
