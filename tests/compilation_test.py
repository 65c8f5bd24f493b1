"""Programs are kept beside the runs, and change nothing that a run writes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments import workdir

ROOT = pathlib.Path(__file__).parents[1]

# A program of the usual flags that says what jax, imported now, would read.
TOLD = """
import os
from absl import flags
from experiments import cli

flags.DEFINE_string({flag!r}, None, "A folder.")

def main(argv):
  names = "COMPILATION_CACHE_DIR", "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
  print([os.environ.get("JAX_" + name) for name in names])

cli.run(main)
"""

# The real one, and how often a program was read or had to be compiled.
COUNTED = """
import collections, json, sys
from experiments import cli, main

def counted(argv):
  import jax
  events = collections.Counter()
  jax.monitoring.register_event_listener(
    lambda event, **_: events.update([event.rpartition("/")[2]])
  )
  main.main(argv)
  print(json.dumps([events["cache_hits"], events["cache_misses"]]))

cli.run(counted)
"""


def start(script, *args, **environment):
  names = {"COMPILATION_CACHE_DIR", "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"}
  inherited = {k: v for k, v in os.environ.items() if k[4:] not in names}
  return subprocess.Popen(
    [sys.executable, "-c", script, *args],
    cwd=ROOT,
    env=inherited | {"JAX_PLATFORMS": "cpu"} | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def lines(process):
  out, err = process.communicate(timeout=120)
  assert process.returncode == 0, err
  return out.splitlines(), err


@pytest.mark.parametrize("flag", ["workdir", "run"])
def test_programs_are_kept_beside_the_run(flag):
  process = start(TOLD.format(flag=flag), f"--{flag}=some/where/run")
  told = [str(ROOT / "some" / "where" / ".jax_cache"), "0.5"]
  assert lines(process)[0] == [str(told)]


def test_what_the_environment_says_comes_first():
  given = {
    "JAX_COMPILATION_CACHE_DIR": "/elsewhere",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "2",
  }
  script = TOLD.format(flag="workdir")
  process = start(script, "--workdir=run", **given)
  assert lines(process)[0] == [str([*given.values()])]
  # And a program without a run keeps none.
  assert lines(start(script))[0] == [str([None, None])]


@pytest.mark.slow
def test_the_next_start_compiles_less_and_runs_to_the_same_bits(tmp_path):
  """Two at once, one after them, one after damage, and one without."""
  options = ["--config=configs/bernoulli.py:dapo", "--config.num_steps=3"]
  options += ["--config.num_prompts=64"]

  def run(name, **environment):
    environment = {
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      **environment,
    }
    return start(
      COUNTED, *options, f"--workdir={tmp_path / name}", **environment
    )

  def ended(process):
    out, err = lines(process)
    first = out[0].split()
    assert first[:3] == ["first", "step", "after"]
    assert float(first[3]) > float(first[5]) >= 0
    return json.loads(out[-1]), err

  both = run("a"), run("b")
  (_, missed), _ = ended(both[0])
  ended(both[1])
  assert missed > 5
  kept = tmp_path / ".jax_cache"
  assert len(list(kept.iterdir())) >= missed
  (hits, none), _ = ended(run("c"))
  assert none == 0
  assert hits >= missed
  # As if a run had been killed while it wrote them.
  for file in kept.iterdir():
    file.write_bytes(file.read_bytes()[:100])
  _, err = ended(run("d"))
  assert "cache" in err
  (hits, _), _ = ended(run("e", JAX_COMPILATION_CACHE_DIR=""))
  assert hits == 0

  def written(name):
    assert sorted(x.name for x in (tmp_path / name).iterdir()) == sorted(
      x.name for x in (tmp_path / "a").iterdir()
    )
    return [
      {k: v for k, v in line.items() if k != "seconds"}
      for line in workdir.read_metrics(tmp_path / name)
    ]

  for name in "bcde":
    assert written(name) == written("a")
