"""A language model's run as two processes: what one process would have done."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import tiny_language

from experiments import train, workdir

ROOT = pathlib.Path(__file__).parents[1]

# Silent groups are replaced by other prompts', on a mesh that cuts parameters,
# and of six groups four shards have two or one.
CONFIG = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import tiny_language

def get_config():
  made = tiny_language.config(
    pathlib.Path({folder!r}), "dapo", num_groups=6, max_rounds=2, num_steps=3
  )
  made.model = dict(width=16, num_layers=1, num_heads=2, hidden=32)
  made.mesh.update(data=1, fsdp=4, tensor=2)
  return made
"""


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_quickly")
def test_two_processes_draw_and_learn_as_one(tmp_path):
  """The same texts and counts; numbers to float32's rounding; in 4 minutes."""
  file = tmp_path / "config.py"
  file.write_text(
    CONFIG.format(tests=str(ROOT / "tests"), folder=str(tmp_path))
  )
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
  }
  running = [
    subprocess.Popen(
      [
        *(sys.executable, "-m", "experiments.main", f"--config={file}"),
        f"--workdir={tmp_path / 'two'}",
        f"--coordinator=localhost:{port}",
        *("--num_processes=2", f"--process_id={i}"),
      ],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  names: dict = {}
  exec(file.read_text(), names)
  train.run(names["get_config"](), tmp_path / "one")
  try:
    for process in running:
      _, errors = process.communicate(timeout=240)
      assert process.returncode == 0, errors[-2000:]
  finally:
    for process in running:
      process.kill()
  one, two = (
    list(workdir.read_rollouts(tmp_path / name)) for name in ("one", "two")
  )
  assert len(one) > 0
  for line, other in zip(one, two, strict=True):
    for name in "step", "draw", "id", "text", "score", "kept":
      assert other[name] == line[name]
  lines = [workdir.read_metrics(tmp_path / name) for name in ("one", "two")]
  for line, other in zip(*lines, strict=True):
    assert other.keys() == line.keys()
    for name, value in line.items():
      if not name.startswith(tiny_language.CLOCK):
        np.testing.assert_allclose(
          other[name], value, rtol=1e-4, atol=1e-5, err_msg=name
        )
