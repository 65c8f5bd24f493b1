"""What every experiment's main shares: flags, mistakes, progress.

  def main(argv):
    with cli.building():
      experiment = build(_CONFIG.value)
    ...

  if __name__ == "__main__":
    cli.run(main)

Importing this does not import jax, so an experiment that imports it inside
main answers --help and a misspelt option at once.

What is compiled for a run is kept in .jax_cache beside its folder, --workdir or
--run, and is not compiled again by the next command. Any number of runs may
share it, and it may be deleted. JAX_COMPILATION_CACHE_DIR names another place;
where it is empty, nothing is kept.
"""

import atexit
from collections.abc import Callable, Iterable, Iterator
import contextlib
import difflib
import os
import pathlib
import re
import sys
import time
import traceback
from typing import Any, TypeVar

from absl import app, flags, logging
from ml_collections import config_dict
from ml_collections.config_flags import config_flags

# When the process began, but for the start of Python itself.
BEGUN = time.monotonic()

_T = TypeVar("_T")


class UsageError(ValueError):
  """A mistake in the command: `run` prints its message, and no traceback."""


class Stopped(RuntimeError):
  """A run ended itself, in order: `run` prints why, and no traceback."""


class Interrupted(RuntimeError):
  """A run was asked to end, and has saved where it is; `run` says so."""


@contextlib.contextmanager
def building() -> Iterator[None]:
  """Makes a ValueError a UsageError: a config is turned into an experiment.

  With --verbosity=1 its traceback is logged too.
  """
  try:
    yield
  except ValueError as error:
    logging.debug("Raised while building:", exc_info=True)
    raise UsageError(str(error)) from error


def did_you_mean(name: str, names: Iterable[str]) -> str:
  """The end of an error message: the nearest of `names`, or all of them.

  >>> did_you_mean("dpao", ["grpo", "dr_grpo", "dapo"])
  '; did you mean dapo?'
  >>> did_you_mean("ppo2", ["grpo", "dr_grpo"])
  '; there are dr_grpo, grpo'
  """
  names = sorted(names)
  close = difflib.get_close_matches(name, names, n=1)
  if close:
    return f"; did you mean {close[0]}?"
  return f"; there are {', '.join(names)}" if names else ""


def require(flag: flags.FlagHolder[_T | None]) -> _T:
  """The value of a flag that the command must give."""
  if flag.value is None:
    text = flags.FLAGS[flag.name].help
    raise UsageError(f"--{flag.name} is missing: {text}")
  return flag.value


def run(main: Callable[[list[str]], Any], *, config: str | None = None) -> None:
  """Parses the flags, calls `main(argv)` and exits.

  A mistake in the command ends with one line on stderr and exit code 2, a run
  that stopped itself with one line and 3, one that was told to end and has
  saved with one line and 75 (sysexits' EX_TEMPFAIL: try again), Ctrl-C with one
  line and 130; any other error shows its traceback. What libraries log below
  the level of a warning is shown with --verbosity=0.

  Args:
    main: the experiment; what it returns is passed to `sys.exit`.
    config: what --config is where the command does not give it. (As a default
      of the flag it would be loaded, and a misspelt field of it met, when the
      flag is defined, too early to be caught here.)
  """

  def begin(argv):
    _keep_compiled()
    return main(argv)

  try:
    app.run(begin, flags_parser=lambda argv: _parse(argv, config))
  except (UsageError, Stopped, Interrupted, KeyboardInterrupt) as error:
    # Of several processes, each says which it is.
    which = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
    code, message = _ending(error)
    print(" ".join(f"{which}{message}".split()), file=sys.stderr)
    sys.exit(code)


@contextlib.contextmanager
def joined(
  cluster: str,
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
) -> Iterator[None]:
  """One of several processes of a run, or, by default, the only one.

  If one fails, it tells the others, and all end. Only the first logs warnings.

  Args:
    cluster: "auto" where jax finds the others: on TPU pods, under SLURM, on
      GKE; else "alone".
    coordinator: host:port of the first process, to be given with the others.
    num_processes: how many there are.
    process_id: which one this is.

  Raises:
    UsageError: if these do not fit together, or jax finds no cluster.
  """
  options = {
    "coordinator": coordinator,
    "num_processes": num_processes,
    "process_id": process_id,
  }
  missing = [name for name, value in options.items() if value is None]
  if cluster == "auto" and len(missing) < 3:
    raise UsageError(
      "--cluster=auto finds by itself what --coordinator, --num_processes and"
      " --process_id say: the command must give it or them, not both."
    )
  if cluster == "alone":
    if len(missing) == 3:
      yield
      return
    if missing:
      raise UsageError(
        f"--{missing[0]} is missing: --coordinator, --num_processes and"
        " --process_id must be given together."
      )
    if not re.fullmatch(r".+:\d+", str(coordinator)):
      raise UsageError(
        f"--coordinator must be host:port of process 0, got {coordinator!r}."
      )
    if not 0 <= int(process_id or 0) < int(num_processes or 0):
      raise UsageError(
        "--process_id must be at least 0 and below --num_processes, got"
        f" {process_id} of {num_processes}."
      )
  import jax

  from groupstd import hosts

  try:
    jax.distributed.initialize(coordinator, num_processes, process_id)
  except ValueError as error:
    tried = "--cluster=auto found no cluster"
    if cluster == "alone":
      tried = f"--coordinator={coordinator} cannot be joined"
    raise UsageError(f"{tried}: {error}") from error
  if hosts.index() and logging.get_verbosity() == logging.WARNING:
    logging.set_verbosity(logging.ERROR)
  try:
    yield
  except (Exception, KeyboardInterrupt) as error:
    error.add_note(f"process {hosts.index()} of {hosts.count()}")
    # At exit: what it is must have been said before the others know, and end.
    atexit.register(hosts.leave, error, _ending(error)[0])
    raise


@contextlib.contextmanager
def progress(
  total: int, start: int = 0, description: str = "", *, shown: bool = True
) -> Iterator[Callable[[int], None]]:
  """A live line on a terminal, nothing elsewhere; yields `advance(n)`."""
  if not (shown and sys.stderr.isatty()):
    yield lambda n: None
    return
  from rich.console import Console
  from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
  )

  columns = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
  )
  with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
    task = bar.add_task(description, total=total, completed=start)
    yield lambda n: bar.advance(task, n)


class _ConfigFile(flags.ArgumentParser):
  """Tells a mistake in the command from a fault of the config file's code."""

  def __init__(self, parser: flags.ArgumentParser):
    self.parser = parser
    self.config: config_dict.ConfigDict | None = None

  def parse(self, path: str) -> Any:
    file = pathlib.Path(path.partition(":")[0])
    if not file.is_file():
      names = [str(other) for other in file.parent.glob("*.py")]
      raise ValueError(f"no such file{did_you_mean(str(file), names)}")
    try:
      self.config = self.parser.parse(path)
    except Exception as error:
      # These two arrive as the text of the traceback of what was raised.
      wrapped = isinstance(error, TypeError | ValueError)
      cause = (wrapped and error.__context__) or error
      # Nothing below the call: `get_config` does not take such an argument.
      frames = traceback.extract_tb(cause.__traceback__)
      misfit = isinstance(cause, TypeError) and len(frames) == 1
      if misfit or isinstance(cause, ValueError):
        raise ValueError(str(cause)) from cause
      raise RuntimeError(f"{path} raised {cause!r}") from cause
    return self.config


def _parse(argv: list[str], config: str | None) -> list[str]:
  """Parses the flags; any mistake in them is a UsageError."""
  if config is not None and not _gives(argv, "config"):
    argv = [argv[0], f"--config={config}", *argv[1:]]
  parsers = {}
  for name in flags.FLAGS:
    flag = flags.FLAGS[name]
    if config_flags.is_config_flag(flag):
      flag.parser = parsers[name] = _ConfigFile(flag.parser)
  try:
    rest = flags.FLAGS(argv)
  except SystemExit:
    sys.exit(0)  # --help: for absl that is a failure.
  except (
    flags.Error,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
  ) as error:
    for name, parser in parsers.items():
      _check_given(argv, name)
      _check_fields(argv, name, parser.config)
    raise UsageError(str(error)) from error
  for name in parsers:
    _check_given(argv, name)
  if len(rest) > 1:
    raise UsageError(f"{rest[1]!r} is not an option: those begin with --.")
  if flags.FLAGS["verbosity"].using_default_value:
    flags.FLAGS.verbosity = logging.WARNING
  return rest


def _keep_compiled() -> None:
  """Tells jax, before its import, where programs are kept."""
  for name in "workdir", "run":
    if name in flags.FLAGS and (folder := flags.FLAGS[name].value):
      kept = pathlib.Path(folder).absolute().parent / ".jax_cache"
      os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(kept))
      # Of what takes less, there is much, and little is gained.
      os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


def _gives(argv: list[str], name: str) -> bool:
  return any(re.match(rf"--?{name}(=|$)", arg) for arg in argv)


def _check_given(argv: list[str], name: str) -> None:
  """Raises if there is no config."""
  if flags.FLAGS[name].default is None and not _gives(argv, name):
    raise UsageError(
      f"--{name} is missing: it names a config file and, after a colon, its"
      f" argument, as in --{name}=configs/bernoulli.py:dapo."
    )


def _check_fields(
  argv: list[str], name: str, config: config_dict.ConfigDict | None
) -> None:
  """Raises if the command sets a field that the config does not have."""
  for arg in argv:
    override = re.match(rf"--?(?:no)?{name}\.([^=\[]+)", arg)
    if override is None or config is None:
      continue
    node: Any = config
    path = name
    for field in override[1].split("."):
      fields = list(node) if isinstance(node, config_dict.ConfigDict) else []
      if field not in fields:
        raise UsageError(
          f"{arg}: {path} has no field {field!r}{did_you_mean(field, fields)}"
        )
      node, path = node[field], f"{path}.{field}"


def _ending(error: BaseException) -> tuple[int, str]:
  """The exit code, and what is printed in place of a traceback."""
  resumes = "the same command resumes the run"
  match error:
    case UsageError():
      return 2, f"error: {error}"
    case Stopped():
      return 3, f"stopped: {error}"
    case Interrupted():
      return os.EX_TEMPFAIL, f"interrupted {error}: {resumes}"
    case KeyboardInterrupt():
      return 130, f"interrupted: {resumes}"
  return 1, ""
