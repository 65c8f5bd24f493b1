"""A language model's run that is stopped anywhere ends as one that was not."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny_language

from experiments import cli, train, workdir

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_quickly")]

ROOT = pathlib.Path(__file__).parents[1]

# Three steps are an epoch of the 12 questions, and a warm start of 6 is a dozen
# batches of 4.
RUNS = {
  "often": {
    "method": "grpo",
    "number": 12,
    "kl_coef": 0.1,
    "epochs": 2,
    "mini_batches": 2,
    "entropy_coef": 0.01,
  },
  "replaced": {"method": "dapo", "number": 12, "max_rounds": 2},
}


class PowerCut(BaseException):
  """Nothing may catch it."""


def configured(folder, name):
  config = tiny_language.config(
    folder, checkpoint_every=2, observe_every=3, **RUNS[name]
  )
  config.warmup.num_steps, config.warmup.batch_size = 6, 4
  return config


def interrupted(config, path, *, warm=None, step=None):
  """Trains until the power is cut in a step of the warm start, or after it."""

  def cut(experiment, at):
    def failing(state):
      state_and_metrics = experiment.step(state)
      if int(state_and_metrics[0].step) == at + 1:
        raise PowerCut
      return state_and_metrics

    return experiment if at is None else experiment._replace(step=failing)

  build = train.build
  with pytest.MonkeyPatch.context() as patch:

    def broken(config):
      experiment = build(config)
      start = experiment.warm_start
      start = start._replace(experiment=cut(start.experiment, warm))
      return cut(experiment._replace(warm_start=start), step)

    patch.setattr(train, "build", broken)
    with pytest.raises(PowerCut):
      train.run(config, path)


def assert_same(path, other, config):
  for folder in path, path / "warmup":
    there = other / folder.relative_to(path)
    assert tiny_language.metrics(folder) == tiny_language.metrics(there)
    for name in "rollouts.jsonl", "config.json", "state.json":
      assert (folder / name).read_bytes() == (there / name).read_bytes()
  (step, a), (same, b) = (tiny_language.state(x, config) for x in (path, other))
  assert step == same == config.num_steps
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module", params=RUNS)
def whole(request, tmp_path_factory, compiled_quickly):
  """(config, folder) of a run that nothing stopped."""
  folder = tmp_path_factory.mktemp(request.param)
  config = configured(folder, request.param)
  train.run(config, folder / "whole")
  return config, folder / "whole"


def test_a_run_that_is_cut_off_resumes_to_the_same_bits(whole):
  """In the warm start, before the first checkpoint, at one, within an epoch."""
  config, path = whole
  parts = path.parent / "parts"
  interrupted(config, parts, warm=3)
  interrupted(config, parts, step=1)
  interrupted(config, parts, step=4)
  interrupted(config, parts, step=7)
  train.run(config, parts)
  assert_same(parts, path, config)


def test_every_epoch_asks_all_questions_across_the_cuts(whole):
  config, path = whole
  asked = config.num_groups * config.max_rounds
  epochs = {}
  for line in workdir.read_rollouts(path):
    epochs.setdefault(line["epoch"], set()).add(line["id"])
  assert len(epochs) > 2
  if config.max_rounds == 1:
    *before, last = epochs.values()
    assert all(ids == set(range(12)) for ids in before)
    assert len(last) == config.num_steps * asked % 12


def test_the_reference_is_the_end_of_the_warm_start(whole):
  config, path = whole
  _, state = tiny_language.state(path, config)
  if not config.kl_coef:
    assert state.reference is None
    return
  like = {"params": jax.tree.map(jax.numpy.copy, state.reference)}
  _, warm = workdir.load(path / "warmup", like)
  jax.tree.map(np.testing.assert_array_equal, warm["params"], state.reference)
  *lines, _ = tiny_language.metrics(path)
  # Of the first step, whose later updates are of another policy, it is small.
  assert lines[0]["kl"] < lines[-1]["kl"]
  assert all(line["regularized"] == config.num_groups for line in lines)


def test_a_changed_config_is_refused_by_the_fields_that_changed(whole):
  config, path = whole
  changed = config.copy_and_resolve_references()
  changed.learning_rate, changed.warmup.num_steps = 0.5, 7
  before = (path / "metrics.jsonl").read_bytes()
  with pytest.raises(cli.UsageError, match="another run") as refusal:
    train.run(changed, path)
  assert "config.learning_rate: the folder has 0.01, the" in str(refusal.value)
  assert "config.warmup.num_steps: the folder has 6" in str(refusal.value)
  assert "group_size" not in str(refusal.value)
  assert (path / "metrics.jsonl").read_bytes() == before


def test_a_run_may_start_from_another_ones_parameters(whole):
  config, path = whole
  other = config.copy_and_resolve_references()
  other.init, other.kl_coef = str(path), 0.1
  experiment = train.build(other)
  assert experiment.warm_start is None
  _, state = tiny_language.state(path, config)
  for params in experiment.start().params, experiment.start().reference:
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
  assert experiment.start().step == 0
  # The warm start alone is a run's folder too.
  other.init = str(path / "warmup")
  warm = train.build(other).start()
  with pytest.raises(AssertionError):
    jax.tree.map(np.testing.assert_array_equal, warm.params, state.params)
  other.model.width = 32
  with pytest.raises(cli.UsageError, match=r"params.embed.embedding: .*5, 16"):
    train.build(other).start()
  other.init = str(path / "nowhere")
  with pytest.raises(cli.UsageError, match="holds no run"):
    train.build(other).start()


def test_a_warm_start_of_its_own_is_the_run_s(whole):
  config, path = whole
  alone = path.parent / "alone"
  train.warm_up(config, alone)
  assert tiny_language.metrics(alone) == tiny_language.metrics(path / "warmup")
  config = config.copy_and_resolve_references()
  config.warmup.num_steps = 0
  with pytest.raises(cli.UsageError, match=r"config.warmup.num_steps .* got 0"):
    train.warm_up(config, path.parent / "none")


@pytest.mark.parametrize("whole", ["replaced"], indirect=True)
def test_the_program_killed_at_any_moment_resumes_to_the_same_bits(whole):
  """kill -9 of the real command: in its warm start, and after it.

  What is made in one process is held against what several made.
  """
  config, path = whole
  file, killed = path.parent / "config.py", path.parent / "killed"
  file.write_text(
    "from experiments import workdir\n"
    'def get_config(_=""):\n'
    f"  return workdir.read_config({str(path)!r}).unlock()\n"
  )
  command = [sys.executable, "-m", "experiments.main", f"--config={file}"]
  environment = {
    **os.environ,
    # As in this process, so that what it compiled serves here too.
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }

  def start():
    return subprocess.Popen(
      [*command, f"--workdir={killed}"],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.DEVNULL,
    )

  kills = 0
  for log in killed / "warmup" / "metrics.jsonl", killed / "metrics.jsonl":
    process = start()
    while process.poll() is None and not (log.exists() and log.stat().st_size):
      time.sleep(0.005)
    if process.poll() is None:
      process.send_signal(signal.SIGKILL)
      kills += 1
    process.wait()
  assert start().wait() == 0
  assert kills >= 1
  assert_same(killed, path, config)
