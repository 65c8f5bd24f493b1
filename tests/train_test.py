"""Configs become runs; a run that is stopped ends as one that was not."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from configs import bernoulli
from experiments import cli, scalar, train, workdir
from groupstd import theory

ROOT = pathlib.Path(__file__).parents[1]


def small(method, **fields):
  config = bernoulli.get_config(method)
  config.num_prompts, config.num_steps, config.checkpoint_every = 64, 12, 5
  config.update(fields)
  return config


def final_state(path, config):
  """The checkpoint's state, by leaf."""
  with workdir.Workdir(path, config) as folder:
    return jax.device_get(folder.restore(train.build(config).start()))


def without_clock(path):
  lines = workdir.read_metrics(path)
  return [{k: v for k, v in x.items() if k != "seconds"} for x in lines]


@pytest.mark.parametrize(
  "method", ["dr_grpo", "dapo", "dapo_replace", "half", "rloo", "max_rl"]
)
def test_every_method_runs_and_counts_what_it_draws(method, tmp_path):
  config = small(method)
  train.run(config, tmp_path)
  *lines, last = workdir.read_metrics(tmp_path)
  assert [line["step"] for line in lines] == list(range(12))
  assert last["step"] == 12
  assert last["mean_p"] > lines[0]["mean_p"]
  for line in lines:
    in_batch = line["drawn"] - line["dropped"]
    filled = config.num_groups
    if method == "dapo_replace":
      filled -= line["left_silent"]
    assert in_batch == filled * config.group_size
    dropped = line["left_silent"] if method.startswith("dapo") else 0
    assert line["kept"] == config.num_groups - dropped
    assert not line["nonfinite"]


def test_what_is_observed_is_what_theory_says(tmp_path):
  config = small("dapo")
  train.run(config, tmp_path)
  first = workdir.read_metrics(tmp_path)[0]
  p = scalar.population(config)
  close = {"rel": 1e-6}  # The logits are float32.
  assert first["mean_p"] == pytest.approx(p.mean(), **close)
  silent = theory.silent_rate(p, 8)
  assert first["predicted_silent"] == pytest.approx(silent.mean(), **close)
  draws = theory.expected_draws(p, 8, 4).mean()
  assert first["predicted_draws"] == pytest.approx(draws, **close)
  quarter = np.sort(p)[:16].mean()
  assert first["hardest_quarter_p"] == pytest.approx(quarter, **close)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"group_size": 1}, "group_size.*at least 2.*got 1"),
    ({"num_groups": 65}, "1 to 64 prompts, got 65"),
    ({"num_steps": 0}, "config.num_steps must be at least 1, got 0"),
    ({"clip": (0.0, 0.9)}, r"config.clip .* inside \(0, 1\)"),
    ({"max_draws": 0}, "max_draws"),
    ({"max_draws": 2, "max_rounds": 2, "num_groups": 32}, "two rules"),
    ({"num_devices": 99}, "num_devices"),
    ({"sigma": {"divde": {}}}, "no 'divde'; did you mean divide"),
    ({"sigma": {"divide": {"ddof": 3}}}, "config.sigma.divide: .*ddof"),
    ({"sigma": {"table": {"weights": (1.0, 2.0)}}}, "finite number.* k = "),
    ({"surrogate": {"clipped": {"low": 3.0}}}, "config.surrogate.clipped: .*3"),
    ({"aggregate": {}}, "config.aggregate must have one entry"),
    ({"optimizer": {"sgdd": {}}}, "no 'sgdd'; did you mean sgd"),
    ({"wanted_power": 0.5}, "config.sigma must be empty"),
    ({"plan": "updat"}, "config.plan must be .* did you mean update"),
    ({"plan": "update", "max_group_size": 4}, "budget could not"),
    ({"plan": "update", "plan_every": 0}, "config.plan_every .* got 0"),
    ({"plan": "update", "plan_every": 3}, "must divide config.checkpoint"),
    ({"clip": (0.1,)}, "config.clip must be two numbers"),
  ],
)
def test_a_wrong_config_is_refused_before_any_work(fields, message, tmp_path):
  config = small("grpo")
  for field, value in fields.items():
    with config.unlocked():
      del config[field]
      config[field] = value
  with pytest.raises(cli.UsageError, match=message):
    train.run(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_step_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
  """Told by the step, raised on the host, with the step's number."""
  config = small("grpo")
  experiment = train.build(config)

  def step(state):
    broken = int(state.step) == 7
    state, metrics = experiment.step(state)
    return state, {**metrics, "nonfinite": broken}

  monkeypatch.setattr(train, "build", lambda _: experiment._replace(step=step))
  with pytest.raises(FloatingPointError, match=r"step 7: .* not finite"):
    train.run(config, tmp_path)
  assert [x["step"] for x in workdir.read_metrics(tmp_path)] == list(range(7))


def test_a_run_resumed_from_a_checkpoint_is_the_uninterrupted_one(tmp_path):
  for method in "dapo", "dapo_replace":
    config = small(method)
    whole, parts = tmp_path / method / "whole", tmp_path / method / "parts"
    train.run(config, whole)
    train.run(config, parts)
    # Back to the checkpoint of step 10, as if it had been killed after it.
    with workdir.Workdir(parts, config) as folder:
      folder.restore(train.build(config).start())
      folder._remove(12, "the test wants it")
    train.run(config, parts)
    assert without_clock(parts) == without_clock(whole)
    a, b = final_state(parts, config), final_state(whole, config)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_the_program_killed_at_any_moment_resumes_to_the_same_bits(tmp_path):
  """kill -9 of the real command, from start-up to the end."""
  flags = ["--config=configs/bernoulli.py:dapo", "--config.num_prompts=300"]
  flags += ["--config.num_steps=400", "--config.checkpoint_every=20"]
  command = [sys.executable, "-m", "experiments.main", *flags]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  begun = time.monotonic()

  def start(name):
    return subprocess.Popen(
      [*command, f"--workdir={tmp_path / name}"],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.DEVNULL,
    )

  assert start("whole").wait() == 0
  lasts = time.monotonic() - begun
  rng, kills = np.random.default_rng(0), 0
  for delay in rng.uniform(0.4, 1.0, 4) * lasts:
    process = start("killed")
    time.sleep(delay)
    if process.poll() is None:
      process.send_signal(signal.SIGKILL)
      kills += 1
    process.wait()
  assert start("killed").wait() == 0
  assert kills >= 1
  assert without_clock(tmp_path / "killed") == without_clock(tmp_path / "whole")
  text = (tmp_path / "whole" / "config.json").read_text()
  config = bernoulli.get_config("dapo")
  config.update(
    {k: v for k, v in json.loads(text).items() if k.startswith(("num_", "ch"))}
  )
  a, b = (final_state(tmp_path / x, config) for x in ("killed", "whole"))
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_the_controlled_run_agrees_with_its_prediction(tmp_path):
  """The whole command with fewer prompts: what it prints and writes."""
  command = [sys.executable, "-m", "experiments.dynamics"]
  options = ["--config.num_prompts=2000", "--config.num_steps=60"]
  done = subprocess.run(
    [*command, f"--workdir={tmp_path}", *options],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert "no verdict" in done.stdout
  assert (tmp_path / "dynamics.png").stat().st_size > 10_000
  assert (tmp_path / "dynamics.pdf").exists()
  arms = json.loads((tmp_path / "dynamics.json").read_text())["arms"]
  for arm in arms.values():
    silent, predicted = (
      np.array(arm["silent"]),
      np.array(arm["predicted_silent"]),
    )
    # Five standard errors of a share among 2,000, at most √¼/2000 wide.
    assert np.abs(silent - predicted).max() < 5 * 0.5 / np.sqrt(2000)
    quarter = np.array(arm["quarter"]) - arm["predicted_quarter"]
    assert np.abs(quarter).max() < 0.03
    mass = np.array(arm["mass"]) - arm["predicted_mass"]
    assert np.all(np.abs(mass) < 5 * np.array(arm["mass_error"]))
