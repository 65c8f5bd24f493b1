"""In how many parts a gradient is taken fastest: a short trial, and its result.

Parts that fit a CPU's cache are faster than the whole; on an accelerator the
whole is, if it fits its memory. Which is not known before it is tried. What was
found is kept in .chunks.json beside jax's compilation cache, and is taken from
there as long as nothing has changed that it depends on: a run that resumes here
takes the parts that it began with. The file may be deleted; another number of
parts only rounds otherwise.
"""

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import json
import os
import pathlib
import platform
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import checkpoints
from groupstd import learners, rollouts

# No two times within it are told apart.
_MARGIN = 1.05
# So much slower, fewer parts are not tried.
_SLOWER = 1.2
_RUNS = 5


def micro_batches(
  make: Callable[[int], learners.Learner],
  params: Any,
  prompts: Any,
  *,
  group_size: int,
  length: int,
  mini_batches: int = 1,
  depends_on: dict[str, Any],
  file: pathlib.Path | None = None,
) -> int:
  """The number of parts with which the learner steps fastest here.

  Candidates are divisors of B / mini_batches, each at most a third of the one
  before, as each has to be compiled, and the whole: from single groups on,
  which take the least memory, until one is clearly slower than the best or does
  not fit. Each is timed in turn with the best so far. Of those that are as fast
  the most parts are taken, since silent groups cost nothing but for those that
  fill a part.

  Where the choice falls by a hair another machine's may differ, and sums then
  round differently.

  Args:
    make: number of parts → the learner, its step jitted. What it has made is
      stepped here, and dropped: one that keeps them saves compiling it again.
    params: of the policy.
    prompts: of a step, B of them.
    group_size: answers to each. In the trial every group learns.
    length: tokens of an answer. In the trial all have as many.
    mini_batches: updates that the learner makes of a batch.
    depends_on: whatever else tells one learner from another, as JSON.
    file: where results are kept; `beside_compiled()` by default, and nowhere
      where nothing compiled is kept.

  Raises:
    ValueError: if there are several processes, whose clocks would disagree.
  """
  if jax.process_count() > 1:
    raise ValueError(
      "a trial must run in one process, got"
      f" {jax.process_count()}: their clocks would choose differently."
    )
  batch = _batch(prompts, group_size, length)
  key = json.dumps(
    {
      **depends_on,
      **_machine(),
      "mini_batches": mini_batches,
      "params": checkpoints.shapes(params),
      "batch": checkpoints.shapes(batch),
    },
    sort_keys=True,
  )
  with _kept(file or beside_compiled()) as kept:
    if key not in kept:
      times = _trial(make, params, batch, mini_batches)
      chosen = _choose(times)
      _tell(chosen, times)
      kept[key] = {"micro_batches": chosen, "seconds": times}
    return kept[key]["micro_batches"]


def beside_compiled() -> pathlib.Path | None:
  """.chunks.json in the folder of jax's compilation cache's folder."""
  folder = jax.config.values["jax_compilation_cache_dir"]
  if not folder or "://" in folder:
    return None
  return pathlib.Path(folder).absolute().with_name(".chunks.json")


def candidates(groups: int) -> list[int]:
  """Divisors, each at most a third of the one before, and 1 at the end.

  >>> candidates(64), candidates(12), candidates(1)
  ([64, 16, 4, 1], [12, 4, 1], [1])
  """
  found = [groups]
  for number in range(groups - 1, 0, -1):
    thinned = 3 * number <= found[-1] or number == 1
    if groups % number == 0 and thinned:
      found.append(number)
  return found


def _trial(
  make: Callable[[int], learners.Learner],
  params: Any,
  batch: rollouts.Rollout,
  mini_batches: int,
) -> dict[int, float]:
  """Number of parts → seconds of a step, the least of a few."""
  numbers = candidates(len(batch.where) // mini_batches)
  state = make(numbers[0]).init(params)

  def step(number):
    nonlocal state
    begun = time.monotonic()
    state, _ = jax.block_until_ready(make(number).step(state, batch))
    return time.monotonic() - begun

  times: dict[int, float] = {}
  for number in numbers:
    try:
      step(number)  # Which compiles.
    except jax.errors.JaxRuntimeError as error:
      if times and "RESOURCE_EXHAUSTED" in str(error):
        break
      raise
    best = min(times, key=lambda x: times[x], default=number)
    times[number] = step(number)
    for _ in range(_RUNS - 1):
      for other in {best, number}:
        times[other] = min(times[other], step(other))
    if times[number] > _SLOWER * min(times.values()):
      break
  return times


def _choose(times: dict[int, float]) -> int:
  """The most parts that are within the margin of the fastest.

  >>> _choose({8: 1.5, 4: 1.04, 2: 1.0, 1: 1.3})
  4
  """
  fastest = min(times.values())
  return max(x for x, seconds in times.items() if seconds <= _MARGIN * fastest)


def _tell(chosen: int, times: dict[int, float]) -> None:
  numbers = ", ".join(map(str, sorted(times)))
  others = [seconds for x, seconds in times.items() if x != chosen]
  against = f" against {min(others):.2g}-{max(others):.2g}" if others else ""
  print(
    f"micro_batches {chosen}, of {numbers}: {times[chosen]:.2g} s{against}",
    flush=True,
  )


def _batch(prompts: Any, group_size: int, length: int) -> rollouts.Rollout:
  """Every token of every group learns: one answer in each is right."""
  shape = len(jax.tree.leaves(prompts)[0]), group_size
  right = np.broadcast_to(np.arange(group_size) == 0, shape)
  return rollouts.Rollout(
    prompts=prompts,
    tokens=jnp.zeros((*shape, length), jnp.int32),
    mask=jnp.ones((*shape, length), bool),
    log_probs=jnp.zeros((*shape, length)),
    # Two arrays: one twice would be another program than a run's.
    rewards=jnp.asarray(right, jnp.float32),
    scores=jnp.array(right, jnp.float32),
    where=jnp.ones(shape, bool),
  )


@contextlib.contextmanager
def _kept(file: pathlib.Path | None) -> Iterator[dict[str, Any]]:
  """What a file holds, written back; nobody else's trial runs meanwhile."""
  if file is None:
    yield {}
    return
  file.parent.mkdir(parents=True, exist_ok=True)
  with file.with_name(f"{file.name}.lock").open("a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
      kept = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
      kept = {}
    before = len(kept)
    yield kept
    if len(kept) > before:
      checkpoints.write(file, json.dumps(kept, indent=1))


def _machine() -> dict[str, Any]:
  device = jax.devices()[0]
  return {
    "jax": jax.__version__,
    "device": device.device_kind,
    "devices": jax.device_count(),
    "processor": _processor(),
    "cores": _cores(),
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def _cores() -> int:
  """That this process may run on."""
  if sys.platform == "linux":
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _processor() -> str:
  """What a CPU calls itself; platform.processor() is silent on Linux."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor()
  names = [x.partition(":")[2].strip() for x in lines if "model name" in x]
  return names[0] if names else platform.machine()
