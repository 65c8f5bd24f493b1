"""What a program costs at least: counted operations, and a chip's data sheet.

XLA's own cost_analysis counts a loop's body once, however often it runs. Here
floating-point operations are counted over the jaxpr, and what devices send each
other over the compiled program's text, each times the loops around it. How
often a loop runs that ends by what it computes is the caller's to say.
"""

from collections.abc import Callable, Iterator, Sequence
import math
import re
from typing import Any, NamedTuple

from jax.extend import core

__all__ = [
  "CHIPS",
  "Array",
  "Chip",
  "Time",
  "Traffic",
  "arrays",
  "collectives",
  "flops",
  "time",
]

# Runs of a loop whose number is not in the program, by what encloses it:
# "loop" and "branch", outermost first.
Trips = Callable[[tuple[str, ...]], int]


class Chip(NamedTuple):
  """A chip by its data sheet, whose rates no program ever reaches.

  Attributes:
    flops: bfloat16 operations a second.
    memory: bytes of HBM that XLA leaves a program; the sheet's are 16, 95 and
      32 GB.
    memory_rate: bytes a second, from and to HBM.
    network_rate: bytes a second that it sends over all its links to other chips
      together: half of what a sheet calls bidirectional.
    source: the sheet.
  """

  flops: float
  memory: int
  memory_rate: float
  network_rate: float
  source: str


_GIB = 1 << 30
_SHEETS = "https://docs.cloud.google.com/tpu/docs/"
CHIPS = {
  "v5e": Chip(197e12, int(15.75 * _GIB), 819e9, 200e9, f"{_SHEETS}v5e"),
  "v5p": Chip(459e12, int(95.74 * _GIB), 2765e9, 600e9, f"{_SHEETS}v5p"),
  "v6e": Chip(918e12, int(31.25 * _GIB), 1638e9, 400e9, f"{_SHEETS}v6e"),
}


class Time(NamedTuple):
  """Seconds that each part of a chip is at work, if it is at its fastest."""

  compute: float
  memory: float
  network: float

  @property
  def bound(self) -> float:
    """What the program takes at least: the parts may work side by side."""
    return max(self)

  @property
  def limit(self) -> str:
    """The part that is at work the longest."""
    return max(self._fields, key=lambda name: getattr(self, name))


def time(chip: Chip, *, flops: float, memory: float, network: float) -> Time:
  """Of a device's operations, bytes from and to HBM, and bytes sent.

  >>> time(CHIPS["v5e"], flops=197e12, memory=819e9 / 2, network=20e9)
  Time(compute=1.0, memory=0.5, network=0.1)
  """
  return Time(
    flops / chip.flops,
    memory / chip.memory_rate,
    network / chip.network_rate,
  )


def flops(jaxpr: Any, trips: Trips | None) -> int:
  """Operations of a program's products of matrices, on all devices together.

  A product [B, M, K]·[B, K, N] is 2·B·M·K·N; nothing else is counted, and of a
  branch the most expensive way.

  >>> import jax, jax.numpy as jnp
  >>> def f(x):
  ...   return jax.lax.fori_loop(0, 5, lambda i, x: x @ x, x)
  >>> flops(jax.make_jaxpr(f)(jnp.ones((3, 3))), lambda within: 1)
  270

  Args:
    jaxpr: of the whole program, before it is cut for devices.
    trips: of a `while`, such as the decoding of answers until all have ended.
      None counts the body of every loop once, as XLA's cost_analysis does.
  """
  return _flops(getattr(jaxpr, "jaxpr", jaxpr), trips, ())


def _flops(
  jaxpr: core.Jaxpr, trips: Trips | None, within: tuple[str, ...]
) -> int:
  return sum(_of_equation(eqn, trips, within) for eqn in jaxpr.eqns)


def _of_equation(eqn: Any, trips: Trips | None, within: tuple[str, ...]) -> int:
  name, params = eqn.primitive.name, eqn.params
  if name == "dot_general":
    (contracted, _), _ = params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    summed = math.prod(shape[axis] for axis in contracted)
    return 2 * summed * math.prod(eqn.outvars[0].aval.shape)
  inner = {"scan": "loop", "while": "loop", "cond": "branch"}.get(name)
  there = (*within, inner) if inner else within
  parts = [_flops(part, trips, there) for part in _jaxprs(params.values())]
  if name == "cond":
    return max(parts)
  times = 1
  if name == "scan" and trips:
    times = params["length"]
  elif name == "while" and trips:
    times = trips(within)
  elif name == "shard_map":  # Its shapes are a device's along these axes.
    shape = params["mesh"].shape
    times = math.prod(shape[axis] for axis in params["newly_manual_axes"])
  return times * sum(parts)


def _jaxprs(values: Any) -> Iterator[core.Jaxpr]:
  for value in values:
    if isinstance(value, core.ClosedJaxpr):
      yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
      yield value
    elif isinstance(value, tuple | list):
      yield from _jaxprs(value)


class Traffic(NamedTuple):
  """What a device sends to others: how many times, and bytes in all."""

  number: int
  bytes: float


# What a device sends of the operand's bytes in a ring of n.
_SENT: dict[str, Callable[[int], float]] = {
  "all-gather": lambda n: n - 1,
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "all-to-all": lambda n: (n - 1) / n,
  "collective-permute": lambda n: 1,
  "reduce-scatter": lambda n: (n - 1) / n,
}


class _Instruction(NamedTuple):
  """A line of a program's text: %name = type opcode(operands), attributes."""

  name: str
  type: str
  opcode: str
  operands: str
  attributes: str
  root: bool


def collectives(text: str, trips: Trips) -> dict[str, Traffic]:
  """Kind → what a device sends in the compiled program, loops included.

  Args:
    text: `compiled.as_text()`, whose shapes are a device's.
    trips: of a loop whose number XLA does not know.
  """
  computations, entry = _parse(text)
  found: dict[str, Traffic] = {}

  def walk(name: str, times: int, within: tuple[str, ...]):
    body = computations.get(name, {})
    # One that goes on beside several fusions is in each of them, and in a chain
    # of which one starts it.
    starts = any(
      "AsyncCollectiveStart" in step.attributes for step in body.values()
    )
    for step in body.values():
      kind = step.opcode.removesuffix("-start")
      if kind in _SENT:
        if "chain_id=" in step.attributes and not starts:
          continue
        if kind == "all-reduce" and "reduce-scatter" in name:
          kind = "reduce-scatter"  # One, and a slice, fused.
        size = sum(
          _bytes(body[x].type) for x in _names(step.operands) if x in body
        )
        sent = size * _SENT[kind](_group(step.attributes))
        number, total = found.get(kind, (0, 0.0))
        found[kind] = Traffic(number + times, total + times * sent)
      elif step.opcode == "while":
        again = _known_trips(step, computations)
        again = trips(within) if again is None else again
        for called in _called(step.attributes):
          walk(called, times * again, (*within, "loop"))
      elif step.opcode == "conditional":
        for called in _called(step.attributes):
          walk(called, times, (*within, "branch"))
      elif step.opcode in ("call", "fusion", "async-start"):
        for called in _called(step.attributes):
          walk(called, times, within)

  walk(entry, 1, ())
  return found


class Array(NamedTuple):
  """An array that a compiled program makes on a device.

  Attributes:
    bytes: without what its tiles are padded by.
    type: as the program has it, such as f32[28,1024,3072].
    made_by: the operation it comes from.
  """

  bytes: int
  type: str
  made_by: str

  @property
  def shape(self) -> tuple[int, ...]:
    numbers = self.type.partition("[")[2].rstrip("]")
    return tuple(int(x) for x in numbers.split(",") if x)


def arrays(text: str) -> list[Array]:
  """Arrays that the compiled program makes in HBM, the largest first."""
  computations, entry = _parse(text)
  found: dict[tuple[str, str], Array] = {}

  def walk(name: str):
    for step in computations.get(name, {}).values():
      if step.opcode in ("while", "conditional", "call"):
        for inner in _called(step.attributes):
          walk(inner)
      elif step.opcode not in _MAKES_NOTHING:
        made_by = re.search(r'op_name="([^"]*)"', step.attributes)
        made_by = made_by[1] if made_by else step.name
        for array in re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", step.type):
          if "S(" not in array:  # Another memory's.
            kind = array.partition("{")[0]
            found[kind, made_by] = Array(_bytes(kind), kind, made_by)

  walk(entry)
  return sorted(found.values(), reverse=True)


_MAKES_NOTHING = (
  "parameter",
  "tuple",
  "get-tuple-element",
  "bitcast",
  "copy-start",
  "copy-done",
  "slice-start",
  "slice-done",
)


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
  """Computation → its instructions by name, and which one is the entry."""
  computations: dict[str, dict[str, _Instruction]] = {}
  entry, body = "", {}
  for line in text.splitlines():
    header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if header:
      body = computations.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
    elif step := _instruction(line):
      body[step.name] = step
  return computations, entry


def _instruction(line: str) -> _Instruction | None:
  named = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
  if not named:
    return None
  rest = line[named.end() :]
  # A tuple's type has spaces, an array's has none.
  end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ") - 1
  opcode = re.match(r" ([\w\-]+)\(", rest[end + 1 :])
  if not opcode:
    return None
  start = end + opcode.end()
  stop = _closing(rest, start)
  return _Instruction(
    named[2],
    rest[: end + 1],
    opcode[1],
    rest[start : stop + 1],
    rest[stop + 1 :],
    bool(named[1]),
  )


def _closing(text: str, start: int) -> int:
  """Where the bracket that opens at `start` closes."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if not depth:
      return i
  return len(text) - 1


def _names(operands: str) -> list[str]:
  return re.findall(r"%([\w.\-]+)", operands)


def _called(attributes: str) -> list[str]:
  single = r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)"
  found = re.findall(single, attributes)
  for several in re.findall(
    r"(?:branch|called)_computations=\{([^}]*)\}", attributes
  ):
    found += re.findall(r"%?([\w.\-]+)", several)
  return found


def _known_trips(
  loop: _Instruction, computations: dict[str, dict[str, _Instruction]]
) -> int | None:
  """As XLA wrote it down, or as its condition is a constant's."""
  known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
  if known:
    return int(known[1])
  condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
  body = computations.get(condition[1], {}) if condition else {}
  last = next((step for step in body.values() if step.root), None)
  if last is None or last.opcode != "compare" or "=LT" not in last.attributes:
    return None
  limit = body.get(_names(last.operands)[-1])
  if limit is None or limit.opcode != "constant":
    return None
  return int(limit.operands.strip("()"))


def _group(attributes: str) -> int:
  """How many devices take part in one of a collective's groups."""
  iota = re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)
  if iota:
    return int(iota[1])
  named = re.search(r"replica_groups=mesh\[(.*?)\].*? \{('.*?)\}", attributes)
  if named:  # Axes of a mesh, or of an axis the part behind a colon.
    sizes = dict(re.findall(r"('\w+')=(\d+)", named[1]))
    axes = re.findall(r"('\w+')(?::\(\d+\)(\d+))?", named[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  first = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
  return first[1].count(",") + 1 if first else 1


def _bytes(type: str) -> int:
  """Of an array, or of a tuple's together."""
  return sum(
    math.ceil(math.prod(map(int, filter(None, shape.split(",")))) * bits / 8)
    for bits, shape in _arrays(type)
  )


def _arrays(type: str) -> Sequence[tuple[int, str]]:
  found = re.findall(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]", type)
  return [
    (8 if kind == "pred" else int(re.sub(r"\D", "", kind)), shape)
    for kind, shape in found
  ]
