"""The programs that the language model's benchmarks time.

ours: what a config trains with: collector, a process that verifies, learner,
  metrics; from `experiments.language`, on a task of random prompts.
floor: sampling and update alone, as fast as could be (experiments/floor.py).
plain: what one writes first.
"""

from collections.abc import Callable, Sequence
import functools
import pathlib
import runpy
import time
from typing import Any, NamedTuple

import numpy as np

from experiments import benchmark_work


class Step(NamedTuple):
  """What a step was worth, and where its seconds went.

  Attributes:
    reward: mean of the answers', before the update.
    sampling: seconds.
    verification: seconds.
    update: seconds, in which ours also sums up what it drew.
  """

  reward: float
  sampling: float
  verification: float
  update: float


class Program(NamedTuple):
  """A loop.

  Attributes:
    start: run's number → state.
    step: state → (state, Step).
    close: ends what it has begun.
  """

  start: Callable[[int], Any]
  step: Callable[[Any], tuple[Any, Step]]
  close: Callable[[], None] = lambda: None


def config(size: benchmark_work.Size, devices: int = 1):
  """The run's config, but for questions, tokenizer, verifiers and model."""
  root = pathlib.Path(__file__).parents[1]
  made = runpy.run_path(str(root / "configs" / "language.py"))["base"](
    "grpo", size.length
  )
  changed = {
    "prompt_width": size.prompt,
    "num_groups": size.groups,
    "group_size": size.group_size,
    "aggregate": {"token_mean": {}},
    "kl_coef": 0.0,
    "score": "share",
    "micro_batches": max(size.groups // (size.chunk * devices), 1),
    "learning_rate": size.learning_rate,
    "warmup_updates": 0,
    "clip_norm": 0.0,
    "eval_questions": 1,
  }
  for name, value in {**changed, "weights": {"share": 1.0}}.items():
    with made.unlocked():
      del made[name]
      made[name] = value
  made.mesh.data = devices
  return made


def model(
  size: benchmark_work.Size, *, dtype: str | None = None, unroll: bool = True
):
  """The shape of ours."""
  from groupstd import transformer

  return transformer.Config(
    size.vocabulary,
    width=size.width,
    num_layers=size.layers,
    num_heads=size.heads,
    hidden=size.hidden,
    qkv_bias=True,
    dtype=dtype,
    unroll=unroll,
  )


def policy(
  size: benchmark_work.Size,
  *,
  temperature: float = 1.0,
  stop: Sequence[int] = (),
  packing: int | None = None,
  dtype: str | None = None,
  unroll: bool = True,
):
  """Ours, whose answers by default never end before their last token."""
  from groupstd import transformer

  return transformer.policy(
    model(size, dtype=dtype, unroll=unroll),
    length=size.length,
    stop=stop,
    temperature=temperature,
    packing=packing,
  )


def ours(
  size: benchmark_work.Size, *, steps: int, workers: int = 1, devices: int = 1
) -> Program:
  """The loop of a config.

  Args:
    size: of the work.
    steps: of a run; the next begins at the next prompts.
    workers: processes that verify.
    devices: over which groups are cut.
  """
  from experiments import building, language, meshes, parts
  from groupstd import verifiers

  made = config(size, devices)
  on = meshes.meshes(made, model(size))
  asked = benchmark_work.asked(size, 1024)
  share = functools.partial(benchmark_work.share, length=size.length)
  experiment = language.assemble(
    made,
    parts.Parts(
      benchmark_work.tokenizer(),
      asked,
      asked,
      verifiers.Pool({"share": share}, num_workers=workers),
      lambda temperature: on.policy(
        model(size), length=size.length, temperature=temperature
      ),
      on,
    ),
    language.build_rule(made),
    building.optimizer(made, made.num_steps, "config"),
  )

  def start(run):
    state = experiment.start()
    return state._replace(step=state.step + run * steps)

  def step(state):
    state, metrics = experiment.step(state)
    experiment.samples()
    names = "reward", "seconds_sample", "seconds_verify", "seconds_update"
    return state, Step(*(float(metrics[name]) for name in names))

  return Program(start, step, experiment.close)


def by_hand(size: benchmark_work.Size, name: str, *, steps: int) -> Program:
  """One of the two loops of experiments/floor.py."""
  import jax
  import jax.numpy as jnp
  import optax

  from experiments import floor

  loop = {"floor": floor.floor, "plain": floor.plain}[name](size)
  optimizer = optax.adamw(size.learning_rate, b2=0.99, weight_decay=0.0)
  sample = jax.jit(loop.sample)
  update = jax.jit(floor.update(loop, optimizer), donate_argnums=(0, 1))
  encode = benchmark_work.tokenizer().encode
  asked = np.array(
    [encode(question.prompt) for question in benchmark_work.asked(size, 1024)]
  )
  decode = benchmark_work.tokenizer().decode
  counted = np.array(
    [decode([i]) in benchmark_work.COUNTED for i in range(size.vocabulary)]
  )
  rng = np.random.default_rng(1)

  def start(run):
    params = jax.tree.map(
      jnp.copy, loop.convert(policy(size).init(jax.random.key(0)))
    )
    return run * steps, params, optimizer.init(params)

  def step(state):
    number, params, opt_state = state
    prompts = asked[rng.choice(len(asked), size.groups, replace=False)]
    begun = time.monotonic()
    key = jax.random.fold_in(jax.random.key(1), number)
    drawn = sample(params, key, prompts)
    tokens = np.asarray(drawn)
    sampled = time.monotonic()
    rewards = counted[tokens].mean(axis=2, dtype=np.float32)
    advantages = floor.advantages(rewards)
    verified = time.monotonic()
    state = number + 1, *update(params, opt_state, prompts, drawn, advantages)
    jax.block_until_ready(state)
    done = time.monotonic()
    return state, Step(
      float(rewards.mean()),
      sampled - begun,
      verified - sampled,
      done - verified,
    )

  return Program(start, step)


def build(size: benchmark_work.Size, name: str, steps: int) -> Program:
  """Any of the three, by its name."""
  if name == "ours":
    return ours(size, steps=steps)
  return by_hand(size, name, steps=steps)


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
  """What it returns, seconds of the clock, and of this process's CPU."""
  wall, cpu = time.monotonic(), time.process_time()
  result = call()
  return result, time.monotonic() - wall, time.process_time() - cpu


def spread(values: np.ndarray) -> dict[str, float]:
  """Median, least and most."""
  return {
    "median": float(np.median(values)),
    "min": float(np.min(values)),
    "max": float(np.max(values)),
  }


def show_spread(row: dict[str, float], digits: int) -> str:
  """Of what `spread` made.

  >>> show_spread({"median": 0.126, "min": 0.1031, "max": 0.1613}, 3)
  '0.126 (0.103-0.161)'
  """
  median, least, most = (
    f"{row[x]:.{digits}f}" for x in ("median", "min", "max")
  )
  return f"{median} ({least}-{most})"


def show(*tables: Any) -> None:
  """Prints rich tables, none cut to a terminal's or a pipe's 80 columns."""
  from rich.console import Console

  console = Console()
  console.width = max(console.width, 160)
  for table in tables:
    console.print(table)
