"""Know before you rent: whether a run fits a pod, found out on a laptop.

  python -m experiments.aot --config=configs/pod.py:qwen3_8b \
      --topology=v5p:4x4x4 --table=qwen3_8b.json

XLA compiles for TPUs where there are none; it takes pip install 'groupstd[tpu]'
and minutes. Of each program of a step this says what a device needs, what it
computes and sends, and how long that takes at the least: a run is slower. The
exit code is 1 where something does not fit.

--sweep compiles for all meshes, and ranks those that fit by their bound.

Answers end when they end: here each has config.answer_length tokens, the worst
case. Each prompt is drawn once. Verifiers, checkpoints and the host are free.
"""

from collections.abc import Iterator
import importlib.util
import json
import os
import pathlib
from typing import Any

from absl import flags
from ml_collections.config_flags import config_flags

from experiments import cli

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "The config file, and its argument after a colon."
)
_TOPOLOGY = flags.DEFINE_string(
  "topology", None, "The chip, and how many in each direction: v5p:4x4x4."
)
_TABLE = flags.DEFINE_string("table", None, "A JSON file to write.")
_SWEEP = flags.DEFINE_bool("sweep", False, "Whether to try other meshes.")

_GIB = 1 << 30
# XLA counts all operations, and not products alone.
_EXCESS = 1.5


def main(argv):
  del argv
  with cli.building():
    chip, devices = target(cli.require(_TOPOLOGY))
    config = _CONFIG.value
    told = _sweep if _SWEEP.value else _one
    found = told(config.copy_and_resolve_references(), chip, devices)
  if _TABLE.value:
    found |= {
      "topology": _TOPOLOGY.value,
      "chip": chip._asdict(),
      "config": json.loads(config.to_json_best_effort()),
    }
    text = json.dumps(found, indent=1)
    pathlib.Path(_TABLE.value).write_text(f"{text}\n")
  return 0 if found["fits"] else 1


def target(topology: str) -> tuple[Any, list[Any]]:
  """The chip and the devices of a topology's name.

  Raises:
    ValueError: if there is no such chip or topology, or no compiler for it.
  """
  name, _, shape = topology.partition(":")
  if name in ("h100", "h200"):
    raise ValueError(
      f"--topology={topology}: programs are compiled for TPUs alone; GPUs need"
      " jax 0.12 with jax[cuda13] and a target configuration of the card."
    )
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError("compiling for TPUs needs libtpu: install 'groupstd[tpu]'")
  # What runs here runs on the CPU; several such processes may run at once; the
  # names only keep libtpu from looking for a TPU.
  for variable, value in {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  }.items():
    os.environ.setdefault(variable, value)
  import jax
  from jax.experimental import topologies

  from experiments import roofline

  if name not in roofline.CHIPS:
    raise ValueError(
      f"--topology has no chip {name!r}{cli.did_you_mean(name, roofline.CHIPS)}"
    )
  try:
    found = topologies.get_topology_desc(f"{name}:{shape}", "tpu")
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(f"--topology={topology}: {error}") from error
  return roofline.CHIPS[name], list(found.devices)


def cost(
  config: Any, chip: Any, devices: list[Any], known: dict[Any, Any]
) -> dict[str, Any]:
  """Program → its cost; of those that are the same, compiled once."""
  from experiments import compiled, programs

  found = {}
  for name, program in programs.programs(config, devices).items():
    # What waits is of the training mesh, and no part of the program.
    key = name, str(program.arguments)
    if key not in known:
      known[key] = compiled.compile(program, chip)
    waited, waiting = known[key].waiting, program.waiting
    found[name] = known[key]._replace(
      total=known[key].total - waited + waiting, waiting=waiting
    )
  return found


def step(config: Any, costs: dict[str, Any], chips: int) -> dict[str, float]:
  """The least seconds of a step, and the most tokens of answers a second."""
  seconds = sum(
    found.time.bound for name, found in costs.items() if name != "warm start"
  )
  tokens = config.num_groups * config.group_size * config.answer_length
  return {
    "seconds_at_least": seconds,
    "tokens": tokens,
    "tokens_per_second_at_most": tokens / seconds,
    "tokens_per_second_and_chip_at_most": tokens / seconds / chips,
  }


def _one(config: Any, chip: Any, devices: list[Any]) -> dict[str, Any]:
  print(
    f"{len(devices)} chips as {_mesh(config)}; {config.num_groups} groups of"
    f" {config.group_size} answers of {config.answer_length} tokens (the worst"
    f" case) to prompts of {config.prompt_width}\n"
  )
  costs = cost(config, chip, devices, {})
  print(_memory_table(costs, chip), _time_table(costs), sep="\n\n")
  fits = not any(found.over for found in costs.values())
  made = step(config, costs, len(devices))
  print(
    f"\na step takes at least {made['seconds_at_least']:.3g} s: at most"
    f" {made['tokens_per_second_at_most']:,.0f} tokens of answers a second,"
    f" {made['tokens_per_second_and_chip_at_most']:,.0f} a chip"
    f"\nrates of the data sheet: {chip.source}"
  )
  for name, found in costs.items():
    if found.flops and (found.excess or 0) > _EXCESS:
      print(
        f"{name}: XLA counts {found.excess:.1f} times a device's share of the"
        " operations: devices compute the same"
      )
    for array in found.whole:
      print(f"{name}: whole on a device: {array}")
    if found.over:
      print(
        f"{name} does not fit: {found.over / _GIB:.2f} GiB too many."
        f" What may help: {'; '.join(_advice(config, name, found))}."
      )
  print("it fits" if fits else "it does not fit")
  return {
    "fits": fits,
    "mesh": config.mesh.to_dict(),
    "programs": {name: _json(found) for name, found in costs.items()},
    "step": made,
  }


def _sweep(config: Any, chip: Any, devices: list[Any]) -> dict[str, Any]:
  rows, known = [], {}
  for mesh in shapes(config, len(devices)):
    config.mesh.update(mesh)
    row: dict[str, Any] = {"mesh": mesh}
    try:
      costs = cost(config, chip, devices, known)
    except ValueError as error:
      row["why"] = str(error)
    else:
      row |= step(config, costs, len(devices))
      row["limits"] = {name: x.time.limit for name, x in costs.items()}
      row["total"] = max(x.total for x in costs.values())
      over = {name: x.over for name, x in costs.items() if x.over}
      if over:
        row["why"] = ", ".join(
          f"{name} is {size / _GIB:.2f} GiB too large"
          for name, size in over.items()
        )
    rows.append(row)
    print(_sweep_line(row, config), flush=True)
  fitting = sorted(
    (row for row in rows if "why" not in row),
    key=lambda row: row["seconds_at_least"],
  )
  print(f"\n{len(fitting)} of {len(rows)} meshes fit, best first:")
  for row in fitting:
    config.mesh.update(row["mesh"])
    print(_sweep_line(row, config))
  return {"fits": bool(fitting), "meshes": rows}


def shapes(config: Any, chips: int) -> Iterator[dict[str, int]]:
  """Meshes whose devices all have groups, and heads that `tensor` divides."""
  heads = config.model.get("num_kv_heads") or config.model.num_heads

  def divisors(number):
    return [i for i in range(1, number + 1) if number % i == 0]

  for tensor in divisors(heads):
    if chips % tensor or chips // tensor > config.num_groups:
      continue
    for fsdp in divisors(chips // tensor):
      for sampling in divisors(heads):
        if chips % sampling == 0 and chips // sampling <= config.num_groups:
          yield {
            "data": chips // tensor // fsdp,
            "fsdp": fsdp,
            "tensor": tensor,
            "sampling_tensor": sampling,
          }


def _advice(config: Any, name: str, found: Any) -> list[str]:
  """What may help where a program does not fit."""
  model, mesh = config.model, config.mesh
  heads = model.get("num_kv_heads") or model.num_heads
  advice = []
  if found.arguments + found.waiting > found.available / 4:
    advice.append("more chips in config.mesh.fsdp, which cuts the state")
  if name in ("sample", "move"):
    if (mesh.sampling_tensor or mesh.tensor) < heads:
      advice.append("a larger config.mesh.sampling_tensor")
    if name == "sample":
      advice.append(
        "fewer config.num_groups or a shorter config.answer_length: the keys"
        " and values of all answers are held at once"
      )
    return advice
  if not model.get("remat"):
    advice.append("config.model.remat=True")
  if (model.get("chunk") or config.answer_length) > 64:
    advice.append("a smaller config.model.chunk")
  groups = config.num_groups // config.mini_batches
  parts = config.micro_batches
  if name == "update" and 0 < parts * mesh.data * mesh.fsdp < groups:
    advice.append(
      f"more config.micro_batches: each has {groups // parts} groups, and one"
      " for each of data·fsdp will do"
    )
  if mesh.tensor < heads:
    advice.append("a larger config.mesh.tensor, which cuts a group's attention")
  advice.append(
    "a smaller config.group_size or a shorter config.answer_length: a group is"
    " on one of data·fsdp"
  )
  return advice


def _memory_table(costs: dict[str, Any], chip: Any) -> str:
  rows = [
    [
      name,
      _gib(x.waiting),
      _gib(x.arguments),
      "?" if x.temporaries is None else _gib(x.temporaries),
      _gib(x.total),
      f"{x.total / chip.memory:.0%}",
      "no" if x.over else "yes",
      f"{x.seconds:.0f} s",
    ]
    for name, x in costs.items()
  ]
  head = ["GiB a device", "waiting", "arguments", "temporaries", "total"]
  head += [f"of {_gib(chip.memory)}", "fits", "compiled in"]
  return _table([head, *rows])


def _time_table(costs: dict[str, Any]) -> str:
  rows = []
  for name, x in costs.items():
    sent = ", ".join(
      f"{traffic.number} {kind} {_gib(traffic.bytes)}"
      for kind, traffic in sorted(x.collectives.items())
    )
    sent = "not compiled" if x.temporaries is None else sent or "nothing"
    seconds = [f"{value:.3g}" for value in x.time]
    rows.append(
      [name, f"{x.flops / 1e12:.4g}", *seconds, x.time.limit, sent],
    )
  head = ["seconds at least", "TFLOP in all", "compute", "memory", "network"]
  head += ["limit", "a device sends, GiB"]
  return _table([head, *rows])


def _table(rows: list[list[str]]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i == 0 or i == len(row) - 1 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  )


def _sweep_line(row: dict[str, Any], config: Any) -> str:
  line = _mesh(config)
  if "total" in row:
    line += (
      f": at least {row['seconds_at_least']:.3g} s, limits"
      f" {row['limits']}, {_gib(row['total'])} GiB"
    )
  return f"{line}: {row['why']}" if "why" in row else line


def _mesh(config: Any) -> str:
  mesh = config.mesh
  return (
    f"data {mesh.data}, fsdp {mesh.fsdp}, tensor {mesh.tensor}, to sample"
    f" tensor {mesh.sampling_tensor or mesh.tensor}"
  )


def _json(found: Any) -> dict[str, Any]:
  return found._asdict() | {
    "over": found.over,
    "collectives": {k: x._asdict() for k, x in found.collectives.items()},
    "time": found.time._asdict() | {"limit": found.time.limit},
    "largest": [array._asdict() for array in found.largest],
  }


def _gib(size: float) -> str:
  return f"{size / _GIB:.3g}"


if __name__ == "__main__":
  cli.run(main)
