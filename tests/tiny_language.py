"""A language model of a few thousand parameters on questions of four bits."""

import json
import math
import pathlib

import ml_collections

from configs import jsonl
from experiments import train, workdir

ALPHABET = "01="
CLOCK = ("seconds", "tokens_per_second")


def write_questions(folder: pathlib.Path, number: int = 32) -> pathlib.Path:
  """A .jsonl file: 1 to 5 bits and =, whose answer is the last bit.

  Any answer that begins with this bit, and does not go on with another, is
  right: an untrained policy is right now and then.
  """
  texts = [f"{i:b}"[1:] for i in range(2, 2 + number)]
  lines = [
    {"prompt": f"{text}=", "answer": text[-1], "bits": f"{len(text)} bits"}
    for text in texts
  ]
  file = folder / f"questions_{number}.jsonl"
  file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  return file


def config(
  folder: pathlib.Path, method: str = "grpo", *, number: int = 32, **fields
) -> ml_collections.ConfigDict:
  """A run of seconds, all of whose rollouts are written."""
  made = jsonl.get_config(method)
  for source, size in (made.questions, number), (made.held_out, 32):
    with source.jsonl.unlocked():
      source.jsonl.path = str(write_questions(folder, size))
      source.jsonl.difficulty = "bits"
  made.tokenizer.characters.alphabet = ALPHABET
  made.model = {"width": 16, "num_layers": 1, "num_heads": 1, "hidden": 32}
  if made.length_buffer:
    made.length_buffer = 2
  tiny = {
    "answer_length": 4,
    "eval_questions": 16,
    "group_size": 4,
    "micro_batches": 1,
    "num_groups": 4,
    "num_steps": 8,
    "prompt_width": 6,
    "rollouts_share": 1.0,
    "verifier_workers": 0,
    "warmup_updates": 2,
    "learning_rate": 0.01,
  }
  made.update(tiny)
  made.mesh.data = 1  # Of the tests' eight.
  made.warmup.update(
    {
      "num_steps": 0,
      "batch_size": 8,
      "checkpoint_every": 2,
      "observe_every": 3,
      "warmup_updates": 2,
    }
  )
  replace(made, **fields)
  return made


def replace(made: ml_collections.ConfigDict, **fields) -> None:
  """Sets fields, of any type, whole."""
  for name, value in fields.items():
    with made.unlocked():
      del made[name]
      made[name] = value


def metrics(path: pathlib.Path) -> list[dict]:
  """The lines of metrics.jsonl without what a clock says."""
  return [
    {k: v for k, v in line.items() if not k.startswith(CLOCK)}
    for line in workdir.read_metrics(path)
  ]


def state(path: pathlib.Path, config: ml_collections.ConfigDict):
  """(step, state) of the newest checkpoint."""
  experiment = train.build(config)
  experiment.close()
  return workdir.load(path, experiment.start())


def groups(path: pathlib.Path) -> dict[int, dict[tuple[int, int], list[dict]]]:
  """step → (draw, id) → the lines of its rollouts, in order."""
  found: dict[int, dict[tuple[int, int], list[dict]]] = {}
  for line in workdir.read_rollouts(path):
    step = found.setdefault(line["step"], {})
    step.setdefault((line["draw"], line["id"]), []).append(line)
  return found


def bucket(groups: int, number: int) -> int:
  """The least of B, ⌈B/2⌉, ⌈B/4⌉, … that is at least `number`."""
  halves = [math.ceil(groups / 2**i) for i in range(groups)]
  return min(size for size in halves if size >= number)
