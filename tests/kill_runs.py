"""Kills real runs at random, damages what they saved, and counts what is lost.

  python tests/kill_runs.py --kills=20 --processes=2

A run that nothing disturbs is held against others of the same command, by as
many processes, that are killed at random moments (SIGKILL of one process or of
all) or told to end (SIGTERM to one), and started again until they are done:
parameters, optimizer and lines must be the same bits, but for clocks. Then each
file of the newest checkpoint is truncated, deleted and changed by a bit, in
turn: whoever resumes must fall back to the checkpoint before it and say so, and
whoever asks for this one be refused. Ends with 1 if anything was lost.

Hardware: CPU. Time: about 8 seconds a kill, 20 with two processes.
"""

import argparse
import atexit
import collections
from collections.abc import Callable, Iterator
import hashlib
import json
import logging
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from experiments import cli, workdir  # noqa: E402

RESUME = 75  # What a run that was told to end exits with.
CLOCKS = ("seconds", "tokens_per_second")
DEVICES = 8
CONFIGS = {
  "bernoulli": """
from configs import bernoulli

def get_config(_=""):
  config = bernoulli.get_config("dapo")
  config.num_steps, config.checkpoint_every = 120, 5
  config.num_devices = 8
  return config
""",
  "language": f"""
import pathlib, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import tiny_language

def get_config(_=""):
  folder = pathlib.Path(__file__).parent
  config = tiny_language.config(
    folder, "grpo", number=12, num_steps=30, checkpoint_every=3, kl_coef=0.1,
    num_groups=8,
  )
  config.mesh.data, config.warmup.num_steps = -1, 6
  return config
""",
}

Start = Callable[[pathlib.Path], list[subprocess.Popen]]


class Lost(Exception):
  """What must not be."""


def starter(config: pathlib.Path, processes: int) -> Start:
  """→ the processes of one run in a folder, begun; they end with this one."""
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(DEVICES // processes),
    "JAX_COMPILATION_CACHE_DIR": str(config.parent / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  command = [sys.executable, "-m", "experiments.main", f"--config={config}"]

  def start(folder: pathlib.Path) -> list[subprocess.Popen]:
    with socket.socket() as free:
      free.bind(("localhost", 0))
      port = free.getsockname()[1]
    began: list[subprocess.Popen] = []
    atexit.register(end, began, 0)
    for process in range(processes):
      cluster = [
        f"--coordinator=localhost:{port}",
        f"--num_processes={processes}",
        f"--process_id={process}",
      ]
      log = folder.parent / f"{folder.name}.{process}.log"
      with log.open("a") as out:
        began.append(
          subprocess.Popen(
            [
              *command,
              f"--workdir={folder}",
              *(cluster if processes > 1 else []),
            ],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
          )
        )
    return began

  return start


def end(run: list[subprocess.Popen], patience: float = 300) -> list[int]:
  """Their exit codes; who has not ended by then is killed, and gives −9."""
  until = time.monotonic() + patience
  for process in run:
    try:
      process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
      process.kill()
  return [process.wait() for process in run]


def finish(start: Start, folder: pathlib.Path) -> None:
  """Runs to the end."""
  codes = end(start(folder))
  if any(codes):
    logs = sorted(folder.parent.glob(f"{folder.name}.*.log"))
    last = "".join(log.read_text()[-3000:] for log in logs)
    raise Lost(f"{folder} ended with exit codes {codes}:\n{last}")


def like(folder: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
  """All leaves of a run's state, each under its dotted path."""
  shapes = json.loads((folder / "state.json").read_text())
  leaves = {}
  for name, text in shapes.items():
    dtype, _, shape = text.partition("[")
    leaves[name] = jax.ShapeDtypeStruct(json.loads(f"[{shape}"), dtype)
  return leaves


def digest(state: dict[str, Any]) -> str:
  """SHA-256 of a state, bit for bit."""
  found = hashlib.sha256()
  for name, leaf in sorted(state.items()):
    found.update(name.encode() + np.asarray(leaf).tobytes())
  return found.hexdigest()


def outcome(folder: pathlib.Path) -> dict[str, Any]:
  """What a run came to, that no kill may change."""
  came: dict[str, Any] = {}
  for part in folder, folder / "warmup":
    if part.exists():
      step, state = workdir.load(part, like(part))
      came[f"{part.name} state"] = step, digest(state)
      came[f"{part.name} metrics"] = [
        {k: v for k, v in line.items() if not k.startswith(CLOCKS)}
        for line in workdir.read_metrics(part)
      ]
      for name in "rollouts.jsonl", "config.json", "state.json", "data.json":
        came[f"{part.name} {name}"] = (part / name).read_bytes()
  return {k.replace(folder.name, "run"): v for k, v in came.items()}


def moment(folder: pathlib.Path) -> str:
  """What a run is at, as far as its folder tells."""
  saved = folder / "checkpoints"
  unsealed = [x for x in saved.glob("*") if not (x / "sha256.json").exists()]
  if any("tmp" in x.name for x in unsealed):
    return "save"
  return "seal" if unsealed else "step"


def logged(folder: pathlib.Path) -> int:
  """When a line was last logged; a run that starts has logged none yet."""
  lines = folder / "metrics.jsonl"
  return lines.stat().st_mtime_ns if lines.exists() else 0


def newest(folder: pathlib.Path) -> int:
  """The step of the newest whole checkpoint, 0 if none."""
  whole = folder.glob("checkpoints/*/sha256.json")
  return max((int(x.parent.name) for x in whole), default=0)


def disturb(
  start: Start,
  folder: pathlib.Path,
  draw: random.Random,
  how: signal.Signals,
  seconds: float,
) -> tuple[str, list[int]] | None:
  """Starts, and strikes at a random moment; None if it was done before that.

  The moments are of three kinds: anywhere in the time that a run takes, soon
  after a checkpoint, and within a save, which is too short to be hit else.
  """
  stamp = logged(folder)
  run = start(folder)
  since, at = time.monotonic(), newest(folder)

  def wait(until: Callable[[], bool]) -> None:
    while not until() and all(x.poll() is None for x in run):
      time.sleep(0.0005)

  kind = draw.choice(["anywhere", "after a checkpoint", "within a save"])
  if how is signal.SIGTERM or kind == "after a checkpoint":
    wait(lambda: newest(folder) > at)
    until = time.monotonic() + draw.uniform(0, 0.5)
  elif kind == "within a save":
    for _ in range(draw.randrange(1, 4)):
      wait(lambda: moment(folder) == "step")
      wait(lambda: moment(folder) in ("save", "seal"))
    until = time.monotonic() + draw.uniform(0, 0.02)
  else:
    until = since + draw.uniform(0, 1.2 * seconds)
  wait(lambda: time.monotonic() >= until)
  if any(x.poll() is not None for x in run):
    codes = end(run, 20)
    if any(codes):
      raise Lost(f"{folder} ended by itself with {codes}")
    return None
  one = how is signal.SIGTERM or draw.random() < 0.5
  struck = [draw.choice(run)] if one else run
  was = moment(folder) if logged(folder) != stamp else "start"
  for process in struck:
    process.send_signal(how)
  codes = end(run, 20 if how is signal.SIGKILL else 120)
  whom = "all" if len(struck) == len(run) else f"{run.index(struck[0])}"
  return f"{how.name} to {whom} at {was}", codes


def kill(
  start: Start, where: pathlib.Path, expected: dict[str, Any], args
) -> Iterator[tuple[str, str]]:
  """(what was done, what came of it) of each kill and each run's end."""
  draw = random.Random(args.seed)
  begun = time.monotonic()
  finish(start, where / "timed")
  seconds = time.monotonic() - begun
  left, name, how = args.kills, "", signal.SIGKILL
  while left or name:
    name = name or f"killed{args.kills - left}"
    folder = where / name
    before = newest(folder)
    if left:
      how = signal.SIGTERM if left % 5 == 1 else signal.SIGKILL
      struck = disturb(start, folder, draw, how, seconds)
    else:
      finish(start, folder)
      struck = None
    if newest(folder) < before:
      raise Lost(f"{folder}: checkpoint {before} is gone")
    if struck:
      left -= 1
      what, codes = struck
      if how is signal.SIGTERM and set(codes) != {RESUME}:
        raise Lost(f"{what}: exit codes {codes}, not {RESUME}")
      yield f"{name}: {what}", f"codes {codes}, resumes at {newest(folder)}"
      continue
    same(outcome(folder), expected, name)
    yield f"{name}: ended", "the same state and lines"
    shutil.rmtree(folder)
    name = ""


def same(found: dict[str, Any], expected: dict[str, Any], name: str) -> None:
  if found.keys() != expected.keys():
    raise Lost(f"{name}: {sorted(found.keys() ^ expected.keys())}")
  differing = [key for key in expected if found[key] != expected[key]]
  if differing:
    raise Lost(f"{name} differs in {', '.join(differing)}")


def truncate(file: pathlib.Path) -> None:
  os.truncate(file, file.stat().st_size // 2)


def flip(file: pathlib.Path) -> None:
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


def damage(
  whole: pathlib.Path, where: pathlib.Path
) -> Iterator[tuple[str, str]]:
  """(what was done, what came of it) of damages to the newest checkpoint."""
  wanted = like(whole)
  last = newest(whole)
  before, state = max(
    (
      workdir.load(whole, wanted, int(x.name))
      for x in (whole / "checkpoints").iterdir()
      if int(x.name) < last
    ),
    key=lambda x: x[0],
  )
  expected = digest(state)
  said: list[str] = []
  handler = logging.Handler()
  handler.emit = lambda record: said.append(record.getMessage())
  logger = logging.getLogger("absl")
  logger.addHandler(handler)
  logger.propagate = False
  config = workdir.read_config(whole)
  data = json.loads((whole / "data.json").read_text())
  newest_files = whole / "checkpoints" / str(last)
  files = [x for x in sorted(newest_files.rglob("*")) if x.is_file()]
  done = collections.Counter()
  for file in files:
    for act in truncate, flip, pathlib.Path.unlink:
      # Of nothing there is nothing to cut or to change.
      if act is not pathlib.Path.unlink and not file.stat().st_size:
        continue
      name = file.relative_to(newest_files)
      what = f"{act.__name__} {name}"
      folder = where / "damaged"
      shutil.copytree(whole, folder)
      act(folder / "checkpoints" / str(last) / name)
      try:
        workdir.load(folder, wanted, last)
        raise Lost(f"{what}: checkpoint {last} was loaded all the same")
      except cli.UsageError as refusal:
        # Without its checksums it is none; with others any file may be wrong.
        sums = file.name == "sha256.json"
        if (str(last) if sums else str(name)) not in str(refusal):
          raise Lost(f"{what} is not named: {refusal}") from None
      step, loaded = workdir.load(folder, wanted)
      if (step, digest(loaded)) != (before, expected):
        raise Lost(f"{what}: {step} was loaded, of other values")
      zeros = {k: jax.numpy.zeros(x.shape, x.dtype) for k, x in wanted.items()}
      said.clear()
      with workdir.Workdir(folder, config, data) as resumed:
        if digest(resumed.restore(zeros)) != expected:
          raise Lost(f"{what}: resumed from other values than {before}'s")
      if not any(f"checkpoint {last}" in text for text in said):
        raise Lost(f"{what}: passed over without a word")
      done[act.__name__] += 1
      shutil.rmtree(folder)
  for act, number in done.items():
    yield (
      f"{act} each file in turn",
      (f"{number} files: refused by name, {before} loaded and resumed aloud"),
    )


def main() -> int:
  parser = argparse.ArgumentParser(
    description=(__doc__ or "").partition("\n")[0]
  )
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--processes", type=int, default=1)
  parser.add_argument("--run", choices=CONFIGS, default="bernoulli")
  parser.add_argument("--seed", type=int, default=random.randrange(10**6))
  parser.add_argument("--folder", type=pathlib.Path, help="kept; must be new")
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  where = args.folder or pathlib.Path(tempfile.mkdtemp(prefix="kills"))
  where.mkdir(parents=True, exist_ok=bool(not args.folder))
  config = where / "config.py"
  config.write_text(CONFIGS[args.run])
  print(f"seed {args.seed}, {args.processes} × {args.run} in {where}")
  start = starter(config, args.processes)
  try:
    finish(start, where / "whole")
    expected = outcome(where / "whole")
    print(f"{'undisturbed':46} step {expected['run state'][0]}")
    for table in (
      kill(start, where, expected, args),
      damage(where / "whole", where),
    ):
      for what, came in table:
        print(f"{what:46} {came}", flush=True)
  except Lost as loss:
    print(f"LOST: {loss}\nEverything is in {where}.")
    return 1
  print("Nothing was lost.")
  if not args.folder:
    shutil.rmtree(where)
  return 0


if __name__ == "__main__":
  sys.exit(main())
