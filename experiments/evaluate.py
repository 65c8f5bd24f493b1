"""How good a run's policy is: greedy accuracy, mean@n and pass@k by difficulty.

  python -m experiments.evaluate --run=runs/arithmetic --samples=16

Reads a checkpoint of a language model's run, the newest if --step does not name
another or is "best", and asks it the run's held-out questions. mean@n is the
mean share of right answers among n that are drawn as in training; pass@k, the
chance that one of k is right, is estimated from them without bias
(arXiv:2107.03374). Errors are standard errors over questions.

Hardware and time: those of as many steps of training as the rollouts make.
"""

import json
import pathlib
from typing import Any, Literal

from absl import flags

from experiments import cli

_RUN = flags.DEFINE_string("run", None, "The run's folder.")
_STEP = flags.DEFINE_string(
  "step",
  None,
  "The checkpoint's step, or best by the run's config.keep_best; the newest if"
  " none.",
)
_SAMPLES = flags.DEFINE_integer(
  "samples", 16, "Answers drawn to a question, n.", lower_bound=1
)
_QUESTIONS = flags.DEFINE_integer(
  "questions", 512, "How many held-out questions.", lower_bound=2
)
_TEMPERATURE = flags.DEFINE_float(
  "temperature", None, "Of the draws; the run's if none.", lower_bound=1e-3
)
_BATCH = flags.DEFINE_integer(
  "batch", 64, "Questions answered at once.", lower_bound=1
)
_TENSOR = flags.DEFINE_integer(
  "tensor",
  1,
  "Over how many devices a layer's products are cut, if they do not fit one.",
  lower_bound=1,
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")
_OUT = flags.DEFINE_string("out", None, "A JSON file for the table as well.")


def main(argv):
  del argv
  path = cli.require(_RUN)
  from experiments import workdir  # After the flags: jax takes a second.

  config = workdir.read_config(path)
  if config.builder != "language":
    raise cli.UsageError(
      f"--run must be a language model's, {path} is of the builder"
      f" {config.builder!r}."
    )
  step, rows = evaluate(path, config)
  show(step, rows)
  if _OUT.value:
    out = pathlib.Path(_OUT.value)
    out.parent.mkdir(parents=True, exist_ok=True)
    found = {"run": str(path), "step": step, "rows": rows}
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"Table: {out}")


def evaluate(path: str, config) -> tuple[int, dict[str, dict[str, Any]]]:
  """(step, difficulty → name → number), of all questions under "all"."""
  import jax
  import numpy as np

  from experiments import building, parts, workdir
  from groupstd import estimates, rollouts, tasks

  # On what there is here, whatever it was trained on.
  config = config.copy_and_resolve_references()
  config.mesh.update(data=-1, fsdp=1, tensor=_TENSOR.value, sampling_tensor=0)
  temperature = _TEMPERATURE.value or config.temperature
  n, total = _SAMPLES.value, _QUESTIONS.value
  with cli.building():
    made = parts.parts(config)
  with made.pool:
    drawing, greedy = made.policy(temperature), made.policy(0.0)
    step, loaded = workdir.load(
      path,
      {"params": made.meshes.shapes(drawing)},
      _step(),
    )
    task = made.task(config, made.held_out, shuffle=False)
    with cli.building(), building.field("--questions"):
      task.prompts(0, total)  # Raises where there are fewer.
    sample = jax.jit(drawing.sample, static_argnums=3)
    answer = jax.jit(greedy.sample, static_argnums=3)

    def right(policy_sample, prompts, keys, size):
      """[B, G] right, scored and ended."""
      drawn = rollouts.on_host(
        policy_sample(loaded["params"], keys, prompts, size)
      )
      with parts.verifying("at an evaluation"):
        verdict = tasks.check_scores(
          task.reward(prompts, drawn.tokens, drawn.mask), prompts.index, size
        )
      ended = drawn.ended
      if ended is None:  # Without a stop all answers end where they should.
        ended = np.ones(verdict.where.shape, bool)
      return verdict.where & (verdict.scores >= 1), verdict.where, ended

    # All batches are of one size, so that one program draws them.
    _, everything = task.prompts(0, total)
    everything = jax.device_get(everything)
    found = []
    for start in range(0, total, _BATCH.value):
      rows = np.arange(start, start + _BATCH.value) % total
      prompts = jax.tree.map(lambda x, rows=rows: x[rows], everything)
      key = jax.random.fold_in(jax.random.key(_SEED.value), start)
      keys = jax.random.split(key, len(rows))
      likeliest, _, _ = right(answer, prompts, keys, 1)
      drawn, scored, ended = right(sample, prompts, keys, n)
      found.append(
        (likeliest[:, 0], drawn.sum(1), scored.sum(1), ended.mean(1))
      )
  greedy_right, k, scored, ended = (
    np.concatenate(column)[:total] for column in zip(*found, strict=True)
  )
  labels = np.array(
    [made.held_out[int(i)].difficulty for i in everything.index]
  )

  def row(chosen) -> dict[str, Any]:
    columns = {"greedy": greedy_right, f"mean@{n}": k / n}
    m = 2
    while m <= n:
      columns[f"pass@{m}"] = estimates.pass_at(k, np.full(len(k), n), m)
      m *= 2
    numbers: dict[str, Any] = {"questions": int(chosen.sum())}
    for name, column in columns.items():
      values = column[chosen].astype(float)
      numbers[name] = values.mean()
      if len(values) > 1:
        numbers[f"{name}_error"] = values.std(ddof=1) / len(values) ** 0.5
    numbers["truncated"] = 1 - ended[chosen].mean()
    numbers["unscored"] = int((n - scored[chosen]).sum())
    return numbers

  rows = {"all": row(np.ones(total, bool))}
  if len(set(labels)) > 1:
    rows |= {str(x): row(labels == x) for x in sorted(set(labels))}
  return step, rows


def _step() -> int | Literal["best"] | None:
  """What --step asks for."""
  match _STEP.value:
    case None | "best":
      return _STEP.value
    case number if number.isdecimal():
      return int(number)
  raise cli.UsageError(
    f"--step must be a checkpoint's or best, got {_STEP.value!r}."
  )


def show(step: int, rows: dict[str, dict[str, Any]]) -> None:
  """Prints the rows as a table."""
  from rich.console import Console
  from rich.table import Table

  names = [x for x in rows["all"] if not x.endswith("_error")]
  table = Table(title=f"Checkpoint {step}: held-out questions, %")
  table.add_column("difficulty", no_wrap=True)
  for name in names:
    table.add_column(name, justify="right")
  for label, numbers in rows.items():
    cells = []
    for name in names:
      value = numbers[name]
      if isinstance(value, int):
        cells.append(str(value))
        continue
      error = numbers.get(f"{name}_error")
      cells.append(
        f"{100 * value:.1f}" + (f" ± {100 * error:.1f}" if error else "")
      )
    table.add_row(label, *cells)
  # Not cut to the 80 columns that rich takes a file or a pipe to have.
  console = Console()
  if not console.is_terminal:
    console.width = 120
  console.print(table)


if __name__ == "__main__":
  cli.run(main)
