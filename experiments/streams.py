"""Files of JSON lines that only grow, and are cut where a checkpoint stood.

A checkpoint holds the length that each file had. Whatever was written after it,
by a process that died, is cut when the run resumes, and written again.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import json
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np


class Streams(contextlib.AbstractContextManager):
  """The files of a folder, open for appending; one process at a time."""

  def __init__(self, folder: pathlib.Path, lengths: Mapping[str, int]):
    """Opens the files of these names, cut to these lengths in bytes.

    With none of them, nothing is written: another process does.
    """
    with contextlib.ExitStack() as stack:
      self._files = {
        name: stack.enter_context((folder / name).open("ab"))
        for name in lengths
      }
      for name, file in self._files.items():
        file.truncate(lengths[name])
        file.seek(lengths[name])
      self._opened = stack.pop_all()

  def append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
    """Appends a line a mapping, for `read` to see at once.

    Args:
      name: of the file.
      lines: of numbers, strings, None, and arrays, lists and dicts of them.
        Floats come back exactly; NaN and ±∞, which JSON lacks, as None.
    """
    texts = [json.dumps(_plain(line), allow_nan=False) for line in lines]
    if self._files:
      file = self._files[name]
      file.write("".join(f"{text}\n" for text in texts).encode())
      file.flush()

  def sync(self) -> dict[str, int]:
    """The length of each file, all of which is on disk."""
    for file in self._files.values():
      os.fsync(file.fileno())
    return {name: file.tell() for name, file in self._files.items()}

  def close(self) -> None:
    self._opened.close()

  def __exit__(self, *_) -> None:
    self.close()


def check(folder: pathlib.Path, lengths: Mapping[str, int]) -> None:
  """Raises a ValueError if a file is shorter than it was."""
  for name, length in lengths.items():
    file = folder / name
    lost = length - (file.stat().st_size if file.exists() else 0)
    if lost > 0:
      raise ValueError(f"{file} lacks {lost} bytes logged before it")


def read(file: pathlib.Path) -> Iterator[dict[str, Any]]:
  """The lines one by one, but for the last if it is not whole yet."""
  with file.open("rb") as lines:
    for line in lines:
      if line.endswith(b"\n"):
        yield json.loads(line)


def _plain(value: Any) -> Any:
  """What JSON can hold."""
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    value = np.asarray(value).tolist()
  if isinstance(value, Mapping):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
