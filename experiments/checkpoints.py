"""Checkpoints: states on disk that are whole, or do not count.

A checkpoint is a folder by Orbax, named by its step, and sha256.json in it, the
checksums of Orbax's files, written last: without them it does not count, and
where they do not agree it is damaged. Reading takes no lock and writes nothing,
so a run's checkpoints may be read while it trains.

The processes of a run share the folder. All of them call `save` and `read`;
the first alone calls the rest.
"""

from collections.abc import Callable
import concurrent.futures
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from experiments import cli
from groupstd import hosts, partitions

_T = TypeVar("_T")

# Seconds within which every process has written or read its part.
PATIENCE = 1800

_CHECKSUMS = "sha256.json"
_UNFINISHED = "*.orbax-checkpoint-tmp*"


class DamagedError(ValueError):
  """A checkpoint that cannot be read, on any one of the processes."""


def steps(folder: pathlib.Path) -> list[int]:
  """The steps that have a whole checkpoint in a folder of them, in order."""
  whole = folder.glob(f"*/{_CHECKSUMS}")
  names = [file.parent.name for file in whole]
  return sorted(int(name) for name in names if name.isdecimal())


def clean(folder: pathlib.Path) -> list[int]:
  """Removes what is not whole; returns the steps of what looked as if it was.

  No save may be under way.
  """
  for unfinished in folder.glob(_UNFINISHED):
    shutil.rmtree(unfinished)
  names = [x.name for x in folder.glob("*") if x.name.isdecimal()]
  broken = sorted({int(name) for name in names}.difference(steps(folder)))
  for step in broken:
    remove(folder / str(step))
  return broken


def remove(checkpoint: pathlib.Path) -> None:
  """Removes a checkpoint; one that is removed in part does not count."""
  (checkpoint / _CHECKSUMS).unlink(missing_ok=True)
  shutil.rmtree(checkpoint)


def save(checkpoint: pathlib.Path, value: Any) -> Callable[[], object]:
  """Starts to save a pytree, and returns what waits until it is on disk.

  Its buffers may be donated at once. It does not count until it is sealed.
  """
  return ocp.save_async(str(checkpoint), value).result


def seal(checkpoint: pathlib.Path) -> None:
  """Makes a checkpoint whole, once all else in it is on disk."""
  write(checkpoint / _CHECKSUMS, json.dumps(_hash(checkpoint), indent=2))


def read(checkpoint: pathlib.Path, like: Any) -> Any:
  """What was saved at the places of `like`; nothing else is read.

  Args:
    checkpoint: its folder.
    like: any part of what was saved, each leaf under the path that it had. An
      array or ShapeDtypeStruct, whose shape and dtype must be those saved,
      comes back onto its sharding, be it of other devices and processes than
      it was saved from (one device where it names none), a number as it was
      saved, and `...` as it is.

  Raises:
    DamagedError: on all processes, if a file has changed or is gone, by its
      name, or any of them could not load.
  """
  saved, loaded = [], []
  agree(f"verifying {checkpoint}", lambda: _verify(checkpoint), first=True)
  agree(f"opening {checkpoint}", lambda: saved.append(_saved(checkpoint)))
  # Apart from it, so that all processes begin to load or none does: Orbax
  # numbers its barriers by how often each process did, and a later save would
  # wait at them for ever.
  agree(
    f"reading {checkpoint}",
    lambda: loaded.append(_load(checkpoint, saved.pop(), like)),
  )
  return loaded.pop()


def agree(what: str, act: Callable[[], object], *, first: bool = False) -> None:
  """Does it on all processes, or the first alone; fails on all or on none.

  Raises:
    DamagedError: with the reason of the first process where it failed.
  """
  errors: list[Exception] = []

  def attempt() -> str | None:
    if first and hosts.index():
      return None
    try:
      act()
    except Exception as error:  # Orbax raises whatever it meets.
      errors.append(error)
      return _first_line(error.__cause__ or error)
    return None

  causes = hosts.gather(what, attempt, seconds=PATIENCE)
  for process, cause in enumerate(causes):
    if cause is not None:
      where = f" (process {process} of {len(causes)})" if process else ""
      raise DamagedError(cause + where) from next(iter(errors), None)


def decide(what: str, act: Callable[[], _T]) -> _T:
  """What the first process does comes to, on all; what it refuses, all do.

  Raises:
    cli.UsageError: on all processes, if it raises one.
  """

  def attempt() -> tuple[Any, str | None]:
    if hosts.index():
      return None, None
    try:
      return act(), None
    except cli.UsageError as refusal:
      return None, str(refusal)

  answers = hosts.gather(what, attempt, seconds=PATIENCE)
  value, refusal = answers[0]
  if refusal is not None:
    raise cli.UsageError(refusal)
  return value


def shapes(state: Any) -> dict[str, str]:
  """The dtype and shape of each leaf but `...`, by its dotted path."""
  leaves, _ = jax.tree.flatten_with_path(state)
  return {
    partitions.path_of(path): f"{leaf.dtype}{list(leaf.shape)}"
    for path, leaf in leaves
    if leaf is not ...
  }


def write(path: pathlib.Path, text: str) -> None:
  """Writes a file that is whole or not there, whenever the process dies."""
  draft = path.with_name(f"{path.name}.tmp")
  with draft.open("w") as file:
    file.write(text + "\n")
    file.flush()
    os.fsync(file.fileno())
  draft.replace(path)


def _saved(checkpoint: pathlib.Path) -> Any:
  """What was saved, of shapes and dtypes only."""
  return ocp.metadata(str(checkpoint)).metadata


def _load(checkpoint: pathlib.Path, saved: Any, like: Any) -> Any:
  """This process's part of what was saved at the places of `like`."""
  wanted, structure = jax.tree.flatten_with_path(like)
  leaves = {partitions.path_of(path): leaf for path, leaf in wanted}
  asked = jax.tree.map_with_path(
    lambda path, _: _abstract(leaves.get(partitions.path_of(path), ...)), saved
  )
  context = ocp.Context()
  # Without barriers, at which the others would wait for a process that failed.
  alone = context.multiprocessing_options
  alone.primary_host, alone.active_processes = hosts.index(), {hosts.index()}
  with context:
    found, _ = jax.tree.flatten_with_path(ocp.load(str(checkpoint), asked))
  path_of = partitions.path_of
  restored = {path_of(path): leaf for path, leaf in found}
  return structure.unflatten(
    [
      ... if leaf is ... else restored[partitions.path_of(path)]
      for path, leaf in wanted
    ]
  )


def _abstract(leaf: Any) -> Any:
  """What Orbax asks for: a number and `...` as they are."""
  if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
    return leaf
  sharding = leaf.sharding
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _verify(checkpoint: pathlib.Path) -> None:
  """Raises if the files are not those whose checksums were written."""
  checksums = checkpoint / _CHECKSUMS
  try:
    expected = json.loads(checksums.read_text())
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{checksums} cannot be read: {type(error).__name__}"
    ) from None
  found = _hash(checkpoint)
  for file, checksum in expected.items():
    if found.get(file) != checksum:
      what = "has changed" if file in found else "is gone"
      raise ValueError(f"{checkpoint / file} {what}")


def _hash(checkpoint: pathlib.Path) -> dict[str, str]:
  """SHA-256 of each of Orbax's files."""
  files = [
    file
    for file in sorted(checkpoint.rglob("*"))
    if file.is_file() and not file.name.startswith(_CHECKSUMS)
  ]

  def digest(file):
    with file.open("rb") as content:
      return hashlib.file_digest(content, "sha256").hexdigest()

  with concurrent.futures.ThreadPoolExecutor() as threads:
    digests = threads.map(digest, files)  # Hashing lets other threads run.
    return {
      str(file.relative_to(checkpoint)): found
      for file, found in zip(files, digests, strict=True)
    }


def _first_line(error: BaseException) -> str:
  """An error's type and the first line of its message, at most 200 letters."""
  return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
