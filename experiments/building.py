"""Parts of a config, turned into what they name or into what is wrong.

A config has no registry of strings: {"clipped": {"high": 0.28}} is the call
`clipped(high=0.28)` of the module that its field belongs to.
"""

from collections.abc import Iterator, Sequence
import contextlib
import inspect
import math
from types import ModuleType
from typing import Any

import jax
import ml_collections
import numpy as np
import optax

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
  kind: Any = None,
  **extra: Any,
) -> list[Any]:
  """What the module's functions of these names make of these arguments.

  Args:
    module: where the functions are.
    parts: name of a function → its arguments.
    name: of the config's field.
    kind: what a function must be annotated to return, if the module has others
      as well.
    **extra: arguments that do not come from the config.
  """
  made = []
  arguments: Any
  for function, arguments in parts.items():
    call = named(module, function, name, kind)
    with field(f"{name}.{function}"):
      made.append(call(**extra, **arguments.to_dict()))
  return made


def make_one(
  module: ModuleType,
  parts: ml_collections.ConfigDict,
  name: str,
  kind: Any = None,
  **extra: Any,
) -> Any:
  """The same where there must be one function."""
  if len(parts) != 1:
    raise ValueError(f"{name} must have one entry, got {sorted(parts)}")
  return make(module, parts, name, kind, **extra)[0]


def named(
  module: ModuleType, function: str, name: str, kind: Any = None
) -> Any:
  """The module's public function of this name, and of this kind."""
  names = getattr(module, "__all__", None) or dir(module)
  if kind is not None:
    names = [x for x in names if _returns(getattr(module, x)) == kind]
  one_of(name, function, names)
  return getattr(module, function)


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
  """Raises a ValueError if a field's value is none of the choices."""
  if value not in choices:
    raise ValueError(
      f"{name} has no {value!r}{cli.did_you_mean(value, choices)}"
    )


def _returns(function: Any) -> Any:
  if not inspect.isfunction(function):
    return None
  return inspect.signature(function).return_annotation


def optimizer(
  config: ml_collections.ConfigDict, updates: int, name_of: str
) -> optax.GradientTransformation:
  """Clipping by the global norm, then config.optimizer on its schedule.

  The rate rises over `warmup_updates` to `learning_rate` and then follows
  `decay` until the last of the updates. A clip_norm of 0 clips nothing.
  """
  decays = {
    "constant": lambda rate, _: optax.constant_schedule(rate),
    "linear": lambda rate, rest: optax.linear_schedule(rate, 0.0, rest),
    "cosine": optax.cosine_decay_schedule,
  }
  rise, rate = config.warmup_updates, config.learning_rate
  if config.decay not in decays:
    raise ValueError(
      f"{name_of}.decay must be one of {', '.join(decays)}, got"
      f" {config.decay!r}{cli.did_you_mean(config.decay, decays)}"
    )
  for name in "learning_rate", "warmup_updates", "clip_norm":
    value: Any = config[name]
    if not 0 <= value < math.inf:
      raise ValueError(
        f"{name_of}.{name} must be at least 0 and finite, got {value}"
      )
  schedule = optax.join_schedules(
    [
      # From the first update on: a rate of 0 would waste one.
      optax.linear_schedule(rate / (rise + 1), rate, rise),
      decays[config.decay](rate, max(updates - rise, 1)),
    ],
    [rise],
  )
  descent = make_one(
    optax, config.optimizer, f"{name_of}.optimizer", learning_rate=schedule
  )
  if not config.clip_norm:
    return descent
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), descent)
