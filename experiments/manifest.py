"""Whose folder it is: a lock, and what a run writes down of itself.

  config.json  what it was asked to do
  data.json    the checksums of what it learns from, by name
  state.json   the shapes and dtypes of its state

A folder never mixes two runs: whoever comes with other ones is refused by the
fields that differ.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import socket
from typing import Any

import ml_collections

from experiments import checkpoints, cli
from groupstd import questions

CONFIG = "config.json"
DATA = "data.json"
STATE = "state.json"

# On what a run computes, in how many parts, and what of it is kept and told: it
# may go on with others, up to the rounding of sums in another order.
_FREE = (
  "host_seconds",
  "keep_best",
  "keep_checkpoints",
  "mesh",
  "micro_batches",
  "num_devices",
  "report_to",
  "verifier_workers",
)

# How many questions of those that are made by rule go into their checksum.
_SAMPLED = 512


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
  """Makes the folder and holds its lock, which dies with the process.

  Raises:
    cli.UsageError: if it is held, or there can be no such folder.
  """
  try:
    path.mkdir(parents=True, exist_ok=True)
    file = (path / ".lock").open("a+")
  except OSError as error:
    raise cli.UsageError(f"{path} cannot be a run's folder: {error}") from None
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise cli.UsageError(
        f"{path} is in use by {file.read() or 'another process'}: two runs in"
        " one folder would overwrite each other."
      ) from None
    except OSError as error:
      raise cli.UsageError(
        f"{path} must be on a filesystem with locks: {error}"
      ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    yield


def claim(
  path: pathlib.Path,
  config: ml_collections.ConfigDict,
  data: Mapping[str, str],
  others: Sequence[str],
) -> None:
  """Writes down whose a new folder is; refuses one that is another run's.

  Args:
    path: the folder.
    config: of the run.
    data: the checksums of what it learns from, by name.
    others: the names of files that only a run's folder may hold.

  Raises:
    cli.UsageError: naming every field that differs.
  """
  text = config.to_json(indent=2)
  if (path / CONFIG).exists():
    check(path / CONFIG, json.loads(text), free=_FREE)
  else:
    for name in others:
      if (path / name).exists():
        raise cli.UsageError(
          f"{path} holds {name} but no {CONFIG}: it is not a run's folder."
        )
    checkpoints.write(path / CONFIG, text)
  if (path / DATA).exists():
    try:
      check(path / DATA, dict(data))
    except cli.UsageError as error:
      raise cli.UsageError(
        f"{error} Its data has changed since it began: to learn from the new,"
        f" begin in another folder, with --config.init={path} from where this"
        " one is."
      ) from None
  else:
    checkpoints.write(path / DATA, json.dumps(data, indent=2))


def check(
  file: pathlib.Path,
  value: Any,
  *,
  part: bool = False,
  free: Sequence[str] = (),
) -> None:
  """Raises if a file's JSON is not this value, naming every field that differs.

  Args:
    file: of the folder.
    value: what it should hold.
    part: whether it may have further fields.
    free: fields that may differ.

  Raises:
    cli.UsageError: if it differs, or the file cannot be read.
  """
  try:
    content = json.loads(file.read_text())
  except (OSError, ValueError) as error:
    raise cli.UsageError(
      f"{file} cannot be read, so that it is not known whose run this is:"
      f" {error}"
    ) from None
  there, here = (
    _fields({k: x for k, x in fields.items() if k not in free}, file.stem)
    for fields in (content, value)
  )
  differing = [
    f"{name}: the folder has {there.get(name, 'nothing')}, the command has"
    f" {here.get(name, 'nothing')}"
    for name in sorted(here if part else there.keys() | here.keys())
    if there.get(name) != here.get(name)
  ]
  if differing:
    raise cli.UsageError(
      f"{file.parent} holds another run: {'; '.join(differing)}."
    )


def of_file(path: str | os.PathLike[str]) -> str:
  """The checksum of a file's bytes, such as a tokenizer.json's."""
  with pathlib.Path(path).open("rb") as content:
    return hashlib.file_digest(content, "sha256").hexdigest()


def of_questions(asked: questions.Questions) -> str:
  """The checksum of questions: of all that are stored, some of those made.

  A sequence, as a .jsonl file is read into, counts whole. Where question i is
  made when it is asked for, its length does, and questions spaced evenly from
  the first to the last: enough to tell another rule, seed or version.

  >>> sums = questions.arithmetic(digits=2)
  >>> of_questions(sums) == of_questions(questions.arithmetic(digits=2))
  True
  >>> of_questions(sums) == of_questions(questions.arithmetic(digits=3))
  False
  """
  length = len(asked)
  chosen: Any = range(length)
  if not isinstance(asked, Sequence) and length > _SAMPLED:
    chosen = (i * (length - 1) // (_SAMPLED - 1) for i in range(_SAMPLED))
  digest = hashlib.sha256(f"{length}\n".encode())
  for question in map(asked.__getitem__, chosen):
    # What JSON cannot hold, such as a gym's objects, counts by its type.
    text = json.dumps(
      question, sort_keys=True, default=lambda x: type(x).__name__
    )
    digest.update(f"{text}\n".encode())
  return digest.hexdigest()


def _fields(value: Any, name: str) -> dict[str, str]:
  """The JSON text of each field, by its dotted name."""
  if not (isinstance(value, dict) and value):
    return {name: json.dumps(value)}
  return {
    field: text
    for key in value
    for field, text in _fields(value[key], f"{name}.{key}").items()
  }
