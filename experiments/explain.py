"""The card of an operation: what training with it will do, before any run.

  python -m experiments.explain --config=configs/bernoulli.py:dapo
  python -m experiments.explain --op=my_module:my_op --group_size=16

prints, and writes as PNG and JSON into --out, what the operation weighs,
ascends and wastes on prompts of Big-Math's difficulty, beside GRPO and Dr. GRPO
at the same group size. `--difficulty=FILE` takes other prompts: a CSV file with
a line for each, its rate, or k and n (k of n logged answers were right).

Hardware: one CPU core. Time: 5 s.
"""

import importlib
import inspect
import json
import pathlib
import pkgutil
from typing import Any

from absl import flags
from ml_collections.config_flags import config_flags
import numpy as np

from experiments import card, card_view, cli

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "The config file, and its argument after a colon."
)
_OP = flags.DEFINE_string(
  "op",
  None,
  "An operation, module:function, in place of config.sigma: it takes a group's"
  " statistics, or nothing and returns what takes them.",
)
_GROUP_SIZE = flags.DEFINE_integer(
  "group_size", None, "In place of config.group_size."
)
_DIFFICULTY = flags.DEFINE_string(
  "difficulty", None, "A CSV file of rates, or of k and n; Big-Math's if none."
)
_OUT = flags.DEFINE_string("out", "runs/explain", "Where PNG and JSON go.")


def main(argv):
  del argv
  with cli.building():
    path = _DIFFICULTY.value
    difficulty = card.read_difficulty(path) if path else card.big_math()
    method = _method()
    found = card.explain(method, difficulty)
  folder = pathlib.Path(_OUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  stem = f"{method.name.replace(':', '.')}_g{method.group_size}"
  card_view.show(found)
  data, figure = folder / f"{stem}.json", folder / f"{stem}.png"
  data.write_text(json.dumps(_plain(found), indent=1) + "\n")
  card_view.draw(found, figure)
  print(f"Figure: {figure}; data: {data}")


# -----------------------------------------------------------------------------
# What is explained
# -----------------------------------------------------------------------------


def _method() -> card.Method:
  """What the flags name."""
  config = _CONFIG.value
  if _GROUP_SIZE.value is not None:
    config.group_size = _GROUP_SIZE.value
  sampling = config.max_draws, config.max_rounds
  if min(sampling) != 1:
    raise ValueError(
      "config.max_draws and config.max_rounds must be at least 1, and one of"
      f" them 1, got {' and '.join(map(str, sampling))}: a silent group is"
      " redrawn or replaced"
    )
  if _OP.value is not None:
    op = _import_op(_OP.value)
    return card.Method(_OP.value, _OP.value, op, config.group_size, *sampling)
  # After the flags: jax takes a second.
  builder = importlib.import_module(f"experiments.{config.builder}")
  op = builder.build_op(config)
  text = " · ".join(
    f"{name}({', '.join(f'{k}={v}' for k, v in arguments.items())})"
    for name, arguments in config.sigma.items()
  )
  flag = flags.FLAGS["config"]
  name = config_flags.get_config_filename(flag).partition(":")[2]
  changed = config_flags.get_override_values(flag)
  if not name or any(field.startswith("sigma") for field in changed):
    name = text.replace(" · ", "·")
  return card.Method(name, text, op, config.group_size, *sampling)


def _import_op(path: str) -> Any:
  """The operation that `module:function` is, or returns."""
  from groupstd import sigma

  module_name, _, name = path.partition(":")
  if not (module_name and name):
    raise ValueError(
      f"--op must be module:function, as in groupstd.sigma:grpo, got {path!r}"
    )
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    missing = error.name or ""
    if not f"{module_name}.".startswith(f"{missing}."):
      raise  # A module that this one lacks: a fault of its code.
    parent, _, last = missing.rpartition(".")
    beside = ["."]
    if parent:
      beside = getattr(importlib.import_module(parent), "__path__", [])
    names = [found.name for found in pkgutil.iter_modules(beside)]
    raise ValueError(
      f"--op={path}: there is no module {missing!r}"
      f"{cli.did_you_mean(last, names)}"
    ) from error
  functions: dict[str, Any] = {
    other: value
    for other, value in vars(module).items()
    if callable(value) and not inspect.isclass(value) and other[0] != "_"
  }
  if name not in functions:
    raise ValueError(
      f"--op={path}: {module_name} has no function {name!r}"
      f"{cli.did_you_mean(name, functions)}"
    )
  op = functions[name]
  needed = [
    parameter.name
    for parameter in inspect.signature(op).parameters.values()
    if parameter.default is parameter.empty
    and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
  ]
  if len(needed) > 1:
    raise ValueError(
      f"--op={path} must need one argument, a group's statistics, or none, it"
      f" needs {', '.join(needed)}"
    )
  op = op if needed else op()
  weight = op(sigma.group_stats(np.array([1.0, 0.0])))
  if not isinstance(weight, sigma.Weight):
    raise ValueError(
      f"--op={path} must make a sigma.Weight of a group's statistics, got"
      f" {weight!r}"
    )
  return op


def _plain(x: Any) -> Any:
  """What json can hold: lists, and null for what is not finite."""
  if isinstance(x, dict):
    return {key: _plain(value) for key, value in x.items()}
  if isinstance(x, list | tuple | np.ndarray):
    return [_plain(value) for value in x]
  if isinstance(x, np.generic):
    x = x.item()
  return None if isinstance(x, float) and not np.isfinite(x) else x


if __name__ == "__main__":
  root = pathlib.Path(__file__).parents[1]
  cli.run(main, config=str(root / "configs" / "bernoulli.py:grpo"))
