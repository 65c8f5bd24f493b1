"""What a program takes of a device, as XLA compiles it."""

from collections.abc import Sequence
import functools
import re
import time
from typing import Any, NamedTuple

import jax

from experiments import programs, roofline


class Cost(NamedTuple):
  """What a program takes, of one device unless it says otherwise.

  Attributes:
    total: bytes of HBM: arguments, results that do not take an argument's
      place, temporaries and what waits. Where XLA refuses to compile, what it
      says that it needs, and what waits.
    available: bytes of HBM.
    arguments: bytes.
    temporaries: bytes, None where XLA refuses.
    waiting: bytes.
    flops: operations of all devices.
    excess: what XLA counts for a device, by its share of them, loops' bodies
      once: far above 1 where devices compute the same. None where XLA refuses.
    collectives: kind → what it sends; none where XLA refuses.
    time: that its parts take at the least, without a network where XLA refuses.
    whole: arrays that have a parameter's shape whole on a device, though it is
      cut between devices: where it is gathered, or its gradient not cut.
    largest: the largest arrays that it makes.
    seconds: that compiling took here.
  """

  total: float
  available: float
  arguments: int
  temporaries: int | None
  waiting: int
  flops: int
  excess: float | None
  collectives: dict[str, roofline.Traffic]
  time: roofline.Time
  whole: list[str]
  largest: list[roofline.Array]
  seconds: float

  @property
  def over(self) -> float:
    """Bytes that are too many, 0 where it fits."""
    return max(self.total - self.available, 0)


def compile(program: programs.Program, chip: roofline.Chip) -> Cost:
  """Compiles a program for where its arguments lie, which must be such chips.

  Raises:
    jax.errors.JaxRuntimeError: of XLA, if it is not for lack of memory.
  """
  begun = time.monotonic()
  traced = program.jitted.trace(*program.arguments)
  laid = [x for x in jax.tree.leaves(program.arguments) if x.sharding]
  devices = max(x.sharding.num_devices for x in laid)
  flops = roofline.flops(traced.jaxpr, program.trips)
  needs = functools.partial(
    roofline.time, chip, flops=flops / devices, memory=program.moved
  )
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if (needed := _needed(str(error))) is None:
      raise
    return Cost(
      needed + program.waiting,
      chip.memory,
      programs.held(laid),
      None,
      program.waiting,
      flops,
      None,
      {},
      needs(network=0),
      [],
      [],
      time.monotonic() - begun,
    )
  text, memory = compiled.as_text(), compiled.memory_analysis()
  assert text is not None
  assert memory is not None
  sent = roofline.collectives(text, program.trips)
  made = roofline.arrays(text)
  return Cost(
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
    + program.waiting,
    chip.memory,
    memory.argument_size_in_bytes,
    memory.temp_size_in_bytes,
    program.waiting,
    flops,
    _flops(compiled) / max(roofline.flops(traced.jaxpr, None) / devices, 1),
    sent,
    needs(network=sum(traffic.bytes for traffic in sent.values())),
    _whole(program.cut, made),
    made[:8],
    time.monotonic() - begun,
  )


def _flops(compiled: Any) -> float:
  found = compiled.cost_analysis()
  return (found[0] if isinstance(found, list) else found).get("flops", 0.0)


def _whole(cut: Any, made: Sequence[roofline.Array]) -> list[str]:
  """Arrays whose shape is that of a whole parameter that is cut.

  Or of its transpose; but not of a part that another lies in.
  """
  laid = jax.tree.leaves(cut)
  whole = {tuple(sorted(x.shape)) for x in laid}
  parts = {tuple(sorted(x.sharding.shard_shape(x.shape))) for x in laid}
  found = {}
  for array in made:
    if tuple(sorted(array.shape)) in whole - parts:
      size = f"{array.bytes / 2**20:.0f} MiB"
      found.setdefault(array.type, f"{array.type}, {size}: {array.made_by}")
  return list(found.values())


def _needed(message: str) -> float | None:
  """Bytes that XLA says it needs, if that is why it does not compile.

  >>> _needed("RESOURCE_EXHAUSTED: ... (31.50G) exceeds available HBM (15.75G)")
  33822867456.0
  """
  found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM", message)
  if not found:
    return None
  return float(found[1]) * 1024 ** (1 + "KMGT".index(found[2]))
