"""How a language model's seconds change with what a run is made of.

  python -m experiments.benchmark_sweeps --what=silent --size=S

prints a table of one of these, measured now and here:

  silent: the update, by the share of silent groups; allowed is what is left of
    the update without any, one part of it and a tenth.
  prompts: sampling and the update of an eighth of the prompts, by their length
    and the group's size; shared, a group's prompt is computed once; apart, each
    answer is a group of its own, with its own copy of the prompt. Layers are
    scanned here, since two dozen programs have to be compiled.
  lengths: sampling where an answer ends at any token with probability 1/16, by
    how often the answers that go on are packed; held against answers that all
    run to 64 tokens.
  devices: a config's whole step, by how many virtual devices share the cores,
    and how many cores; each in a process of its own.
  dtypes: sampling and the update, by the type that is computed in.

What is compared alternates, and each ratio is of one round's two times. Seconds
are of the clock, CPU seconds of all the process's threads: medians, with the
least and the most. Where other work runs on the cores, shown as the load, the
latter are what to read.
"""

from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pathlib
from typing import Any, NamedTuple

from absl import flags
import numpy as np

from experiments import benchmark_programs, benchmark_work, cli

_SWEEP = flags.DEFINE_enum(
  "what", None, ["silent", "prompts", "lengths", "devices", "dtypes"], "Which."
)
_SIZE = flags.DEFINE_enum("size", "S", list(benchmark_work.SIZES), "What size.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each.", lower_bound=1)
_TABLE = flags.DEFINE_string("table", "", "File that gets it as JSON.")


class Case(NamedTuple):
  """A row of a table.

  Attributes:
    cells: column → what tells this row from the others.
    run: round → seconds of the clock and of the CPU.
    against: the number of the row that it is held against.
  """

  cells: dict[str, Any]
  run: Callable[[int], tuple[float, float]]
  against: int


Sweep = Callable[
  [benchmark_work.Size], contextlib.AbstractContextManager[list[Case]]
]


@contextlib.contextmanager
def silent(size: benchmark_work.Size) -> Iterator[list[Case]]:
  """The update at shares of silent groups."""
  import jax

  policy = benchmark_programs.policy(size)
  params = policy.init(jax.random.key(0))
  parts = size.groups // size.chunk
  state, step = _learner(size, policy, params)
  cases = []
  for share in 0.0, 0.25, 0.5, 0.75, 1.0:
    number = round(share * size.groups)
    call = _call(step, state, _rollout(size, silent=number))
    cells = {
      "silent": f"{share:.0%}",
      "allowed": f"{1 - share + 1 / parts + 0.1:.2f}",
    }
    cases.append(Case(cells, call, 0))
  yield cases


@contextlib.contextmanager
def prompts(size: benchmark_work.Size) -> Iterator[list[Case]]:
  """A prompt computed once a group, and once an answer."""
  import jax

  cases = []
  for width in 16, 64, 256:
    for group_size in 8, 16:
      groups = max(size.groups // 8, 2)
      now = size._replace(prompt=width, group_size=group_size, groups=groups)
      shared = benchmark_programs.policy(now, unroll=False)
      params = shared.init(jax.random.key(0))
      rows = {"shared": shared, "apart": apart(shared)}
      for what in "sampling", "update":
        first = len(cases)
        for name, policy in rows.items():
          cells = {"P": width, "G": group_size, "what": what, "prompt": name}
          call = _both(now, policy, params)[what]
          cases.append(Case(cells, call, first + 1))
  yield cases


@contextlib.contextmanager
def lengths(size: benchmark_work.Size) -> Iterator[list[Case]]:
  """Sampling to the answers' ends, and to the cap."""
  import jax

  stop = range(size.vocabulary // 16)
  cases = []
  for groups in 16, 128:
    now = size._replace(groups=groups, group_size=8, length=64)
    policy = benchmark_programs.policy(now)
    params = flat(policy.init(jax.random.key(0)))
    asked = _prompts(now)
    first = len(cases)
    for name, made in {
      "all to the cap": policy,
      "packing 0": benchmark_programs.policy(now, stop=stop, packing=0),
      "packing 1": benchmark_programs.policy(now, stop=stop, packing=1),
    }.items():
      sample = jax.jit(made.sample, static_argnums=3)

      def run(number, sample=sample, params=params, asked=asked):
        # The same draws for each, others in every round.
        keys = jax.random.split(jax.random.key(number), len(asked))
        jax.block_until_ready(keys)
        return _call(sample, params, keys, asked, 8)(number)

      drawn = sample(
        params, jax.random.split(jax.random.key(0), groups), asked, 8
      )
      tokens = np.asarray(drawn.mask).sum(axis=-1).mean()
      cells = {
        "answers": f"{groups}x8",
        "drawn": name,
        "mean tokens": f"{tokens:.1f}",
      }
      cases.append(Case(cells, run, first))
  yield cases


@contextlib.contextmanager
def devices(size: benchmark_work.Size) -> Iterator[list[Case]]:
  """A config's step on virtual devices."""
  context = multiprocessing.get_context("spawn")
  cores = len(os.sched_getaffinity(0))
  with contextlib.ExitStack() as stack:
    cases = []
    for used in (1, 2)[:cores]:
      for number in 1, 2, 4:
        process = stack.enter_context(
          concurrent.futures.ProcessPoolExecutor(
            1, context, _begin, (size, number, used)
          )
        )

        def run(_, process=process):
          return process.submit(_step).result()

        cells = {"cores": used, "devices": number}
        cases.append(Case(cells, run, 0))
    yield cases


@contextlib.contextmanager
def dtypes(size: benchmark_work.Size) -> Iterator[list[Case]]:
  """Sampling and the update, computed in float32 and in bfloat16."""
  import jax

  policies = {
    dtype: benchmark_programs.policy(size, dtype=dtype)
    for dtype in ("float32", "bfloat16")
  }
  params = policies["float32"].init(jax.random.key(0))
  cases = []
  for what in "sampling", "update":
    first = len(cases)
    for dtype, policy in policies.items():
      call = _both(size, policy, params)[what]
      cases.append(Case({"what": what, "dtype": dtype}, call, first))
  yield cases


SWEEPS: dict[str, Sweep] = {
  sweep.__name__: sweep for sweep in (silent, prompts, lengths, devices, dtypes)
}


def apart(policy):
  """The policy, computed with every answer a group of its own."""
  import jax
  import jax.numpy as jnp

  def repeated(tree, group_size):
    return jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), tree)

  def sample(params, keys, prompts, group_size):
    keys = jax.vmap(lambda key: jax.random.split(key, group_size))(keys)
    prompts = repeated(prompts, group_size)
    drawn = policy.sample(params, keys.reshape(-1), prompts, 1)
    return jax.tree.map(
      lambda x: x.reshape(-1, group_size, *x.shape[2:]), drawn
    )

  def log_prob(params, prompts, tokens):
    prompts = repeated(prompts, tokens.shape[1])
    alone = tokens.reshape(-1, 1, tokens.shape[2])
    return policy.log_prob(params, prompts, alone).reshape(tokens.shape)

  return policy._replace(
    sample=sample, log_prob=log_prob, log_prob_and_entropy=None
  )


def flat(params):
  """Parameters that make all tokens as likely."""
  return params | {"norm": {"scale": 0 * params["norm"]["scale"]}}


def measure(cases: list[Case], rounds: int) -> np.ndarray:
  """Seconds [cases, rounds, 2] of the clock and of the CPU, in turn.

  What compiles comes before. Who is first changes with every round: memory
  that one leaves is another's to clear.
  """
  for case in cases:
    case.run(0)
  found = np.zeros((len(cases), rounds, 2))
  order = np.arange(len(cases))
  for number in range(rounds):
    for i in np.roll(order, -number):
      found[i, number] = cases[i].run(number + 1)
  return found


def summary(cases: list[Case], found: np.ndarray) -> list[dict[str, Any]]:
  """What a table shows: cells, seconds and ratios of each case."""
  spread = benchmark_programs.spread
  rows = []
  for case, times in zip(cases, found, strict=True):
    ratios = times / found[case.against]
    rows.append(
      case.cells
      | {"wall": spread(times[:, 0]), "cpu": spread(times[:, 1])}
      | {"wall_ratio": spread(ratios[:, 0]), "cpu_ratio": spread(ratios[:, 1])}
      | {"against": case.against}
    )
  return rows


def main(argv):
  del argv
  sweep, size = SWEEPS[cli.require(_SWEEP)], _SIZE.value
  before = os.getloadavg()[0]
  with sweep(benchmark_work.SIZES[size]) as cases:
    rows = summary(cases, measure(cases, _ROUNDS.value))
  import jax

  found = {
    "what": _SWEEP.value,
    "size": size,
    "jax": jax.__version__,
    "cores": os.cpu_count(),
    "load": [before, os.getloadavg()[0]],
    "rounds": _ROUNDS.value,
    "rows": rows,
  }
  _show(found)
  if _TABLE.value:
    pathlib.Path(_TABLE.value).write_text(json.dumps(found, indent=2) + "\n")


def _show(found: dict[str, Any]) -> None:
  from rich.table import Table

  before, after = found["load"]
  table = Table(
    title=(
      f"{found['what']}, size {found['size']}: median (min-max) of"
      f" {found['rounds']}; jax {found['jax']}, {found['cores']} cores, load"
      f" {before:.1f} to {after:.1f}"
    )
  )
  rows = found["rows"]
  measured = {"wall": 3, "cpu": 3, "wall_ratio": 2, "cpu_ratio": 2}
  cells = [x for x in rows[0] if x not in (*measured, "against")]
  for column in ("row", *cells, "wall s", "cpu s", "wall ratio", "cpu ratio"):
    table.add_column(column, justify="right")
  table.add_column("to row", justify="right")
  for number, row in enumerate(rows):
    spreads = [
      benchmark_programs.show_spread(row[x], digits)
      for x, digits in measured.items()
    ]
    shown = [str(row[x]) for x in cells]
    table.add_row(str(number), *shown, *spreads, str(row["against"]))
  benchmark_programs.show(table)


def _prompts(size: benchmark_work.Size) -> np.ndarray:
  shape = size.groups, size.prompt
  return np.random.default_rng(0).integers(0, size.vocabulary, shape)


def _rollout(size: benchmark_work.Size, silent: int = 0):
  """Random answers, one of each group right, of as many groups none."""
  import jax.numpy as jnp

  from groupstd import rollouts

  rng = np.random.default_rng(1)
  shape = size.groups, size.group_size, size.length
  rewards = np.zeros(shape[:2], np.float32)
  rewards[rng.permutation(size.groups)[silent:], 0] = 1
  return rollouts.Rollout(
    prompts=jnp.asarray(_prompts(size)),
    tokens=jnp.asarray(rng.integers(0, size.vocabulary, shape)),
    mask=jnp.ones(shape, bool),
    log_probs=jnp.full(shape, -np.log(size.vocabulary)),
    rewards=jnp.asarray(rewards),
    scores=jnp.asarray(rewards),
    where=jnp.ones(shape[:2], bool),
  )


def _learner(size: benchmark_work.Size, policy, params):
  """Where training starts, and its jitted step."""
  import jax
  import optax

  from groupstd import learners, losses, sigma

  learner = learners.policy_gradient(
    policy,
    optax.adamw(size.learning_rate, b2=0.99, weight_decay=0.0),
    sigma.rule(sigma.divide()),
    surrogate=losses.clipped(low=0.2, high=0.2),
    micro_batches=max(size.groups // size.chunk, 1),
  )
  return learner.init(params), jax.jit(learner.step)


def _both(size: benchmark_work.Size, policy, params):
  """ "sampling" and "update" → a run of it."""
  import jax

  keys = jax.random.split(jax.random.key(0), size.groups)
  sample = jax.jit(policy.sample, static_argnums=3)
  state, step = _learner(size, policy, params)
  return {
    "sampling": _call(sample, params, keys, _prompts(size), size.group_size),
    "update": _call(step, state, _rollout(size)),
  }


def _call(function, *args) -> Callable[[int], tuple[float, float]]:
  import jax

  def run(_):
    timed = benchmark_programs.timed(
      lambda: jax.block_until_ready(function(*args))
    )
    return timed[1:]

  return run


# What a process of the sweep over devices steps, and where it is.
_stepping: list[Any] = []


def _begin(size: benchmark_work.Size, number: int, cores: int) -> None:
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
  import jax

  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", number)
  program = benchmark_programs.ours(size, steps=2, workers=0, devices=number)
  _stepping[:] = [program.step, program.start(0)]


def _step() -> tuple[float, float]:
  step, state = _stepping
  (_stepping[1], _), wall, cpu = benchmark_programs.timed(lambda: step(state))
  return wall, cpu


if __name__ == "__main__":
  cli.run(main)
