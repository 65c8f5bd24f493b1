"""A few real runs are killed and damaged; `kill_runs.py` does it at length."""

import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("kill_runs.py")


@pytest.mark.slow
def test_nothing_is_lost_when_runs_are_killed(tmp_path):
  folder = tmp_path / "runs"
  ended = subprocess.run(
    [sys.executable, PROGRAM, "--kills=3", "--seed=0", f"--folder={folder}"],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert ended.returncode == 0, ended.stdout + ended.stderr
  # As asked: as many kills, and each kind of damage.
  assert ended.stdout.count("resumes at") == 3
  assert "SIGTERM" in ended.stdout
  for damage in "truncate", "flip", "unlink":
    assert f"{damage} each file" in ended.stdout
  assert ended.stdout.endswith("Nothing was lost.\n")
