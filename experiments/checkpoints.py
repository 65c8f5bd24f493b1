"""Checkpoints: states on disk that are whole, or do not count.

A checkpoint is a folder by Orbax, named by its step, and sha256.json in it, the
checksums of Orbax's files, written last: without them it does not count, and
where they do not agree it is damaged. Reading takes no lock and writes nothing,
so a run's checkpoints may be read while it trains.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

_CHECKSUMS = "sha256.json"


def steps(folder: pathlib.Path) -> list[int]:
  """The steps that have a whole checkpoint in a folder of them, in order."""
  whole = folder.glob(f"*/{_CHECKSUMS}")
  names = [file.parent.name for file in whole]
  return sorted(int(name) for name in names if name.isdecimal())


def seal(checkpoint: pathlib.Path) -> None:
  """Makes a checkpoint whole, once all else in it is on disk."""
  write(checkpoint / _CHECKSUMS, json.dumps(_hash(checkpoint), indent=2))


def read(checkpoint: pathlib.Path, like: Any) -> Any:
  """What was saved at the places of `like`; nothing else is read.

  Args:
    checkpoint: its folder.
    like: any part of what was saved, each leaf under the path that it had. An
      array or ShapeDtypeStruct, whose shape and dtype must be those saved,
      comes back onto its sharding (one device where it names none), a number
      as it was saved, and `...` as it is.

  Raises:
    ValueError: if a file has changed or is gone, by its name. Orbax raises
      whatever else it meets.
  """
  _verify(checkpoint)
  wanted, structure = jax.tree.flatten_with_path(like)
  leaves = {name(path): leaf for path, leaf in wanted}
  saved: Any = ocp.metadata(str(checkpoint)).metadata
  found, _ = jax.tree.flatten_with_path(
    ocp.load(
      str(checkpoint),
      jax.tree.map_with_path(
        lambda path, _: _abstract(leaves.get(name(path), ...)), saved
      ),
    )
  )
  restored = {name(path): leaf for path, leaf in found}
  return structure.unflatten(
    [... if leaf is ... else restored[name(path)] for path, leaf in wanted]
  )


def shapes(state: Any) -> dict[str, str]:
  """The dtype and shape of each leaf but `...`, by its dotted path."""
  leaves, _ = jax.tree.flatten_with_path(state)
  return {
    name(path): f"{leaf.dtype}{list(leaf.shape)}"
    for path, leaf in leaves
    if leaf is not ...
  }


def name(path: tuple[Any, ...]) -> str:
  """A leaf's dotted path, the same in a NamedTuple as in a dict."""
  return jax.tree_util.keystr(path, simple=True, separator=".")


def write(path: pathlib.Path, text: str) -> None:
  """Writes a file that is whole or not there, whenever the process dies."""
  draft = path.with_name(f"{path.name}.tmp")
  with draft.open("w") as file:
    file.write(text + "\n")
    file.flush()
    os.fsync(file.fileno())
  draft.replace(path)


def _abstract(leaf: Any) -> Any:
  """What Orbax asks for: a number and `...` as they are."""
  if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
    return leaf
  sharding = leaf.sharding
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
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
  checksums = {}
  for file in sorted(checkpoint.rglob("*")):
    if file.is_file() and not file.name.startswith(_CHECKSUMS):
      with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
      checksums[str(file.relative_to(checkpoint))] = digest
  return checksums
