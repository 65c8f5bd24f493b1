"""Configs become runs; a run that is stopped ends as one that was not."""

import json
import os
import pathlib
import shutil
import signal
import socket
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
    shutil.rmtree(parts / "checkpoints" / "12")
    train.run(config, parts)
    assert without_clock(parts) == without_clock(whole)
    a, b = final_state(parts, config), final_state(whole, config)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def terminated(experiment, at):
  """The same, but for a SIGTERM in the midst of a step."""

  def step(state):
    if int(state.step) == at:
      os.kill(os.getpid(), signal.SIGTERM)
    return experiment.step(state)

  return experiment._replace(step=step)


def test_sigterm_saves_after_the_step_and_the_run_resumes(
  tmp_path, monkeypatch
):
  config, build = small("dapo"), train.build
  before = signal.getsignal(signal.SIGTERM)
  train.run(config, tmp_path / "whole")
  monkeypatch.setattr(train, "build", lambda c: terminated(build(c), 6))
  with pytest.raises(cli.Interrupted, match="by SIGTERM at step 7"):
    train.run(config, tmp_path / "parts")
  assert signal.getsignal(signal.SIGTERM) is before
  # Between the checkpoints of every fifth step.
  assert (tmp_path / "parts" / "checkpoints" / "7").is_dir()
  lines = workdir.read_metrics(tmp_path / "parts")
  assert [x["step"] for x in lines] == list(range(7))
  train.run(config, tmp_path / "parts")
  assert without_clock(tmp_path / "parts") == without_clock(tmp_path / "whole")


def test_sigterm_in_a_warm_start_saves_that(tmp_path, monkeypatch):
  build = train.build

  def warmed(config):
    experiment = build(config)
    warm_start = train.WarmStart(
      terminated(experiment, 3), small("dapo"), lambda _: experiment.start()
    )
    return experiment._replace(warm_start=warm_start)

  monkeypatch.setattr(train, "build", warmed)
  with pytest.raises(cli.Interrupted, match="by SIGTERM at step 4"):
    train.run(small("grpo"), tmp_path)
  assert (tmp_path / "warmup" / "checkpoints" / "4").is_dir()
  train.run(small("grpo"), tmp_path)
  for folder in tmp_path / "warmup", tmp_path:
    steps = [x["step"] for x in workdir.read_metrics(folder)]
    assert steps == list(range(13))


def test_sigterm_after_a_warm_start_is_not_lost(tmp_path, monkeypatch):
  """Told while the warm start is observed once more, at its end."""
  build = train.build

  def warmed(config):
    experiment = build(config)
    calls = iter(range(13))

    def observe(params):
      if next(calls) == 12:
        os.kill(os.getpid(), signal.SIGTERM)
      return experiment.observe(params)

    warm_start = train.WarmStart(
      experiment._replace(observe=observe),
      small("dapo"),
      lambda _: experiment.start(),
    )
    return experiment._replace(warm_start=warm_start)

  monkeypatch.setattr(train, "build", warmed)
  with pytest.raises(cli.Interrupted, match="by SIGTERM at step 1"):
    train.run(small("grpo"), tmp_path)
  assert len(workdir.read_metrics(tmp_path / "warmup")) == 13


def test_processes_that_were_given_different_runs_start_none(
  tmp_path, monkeypatch
):
  def same(what, value):
    assert value["config"]["num_prompts"] == 64
    raise ValueError(f"{what} must be the same, {value['workdir']} differs")

  monkeypatch.setattr(train.hosts, "same", same)
  with pytest.raises(cli.UsageError, match=f"{tmp_path / 'run'} differs"):
    train.run(small("grpo"), tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_saves_the_same_step(tmp_path):
  """Both exit with 75, and say at which step; the first alone reports."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  flags = ["--config=configs/bernoulli.py:dapo", "--config.num_prompts=64"]
  flags += ["--config.num_steps=100000", "--config.num_devices=2"]
  flags += [f"--workdir={tmp_path / 'run'}", "--num_processes=2"]
  flags += [f"--coordinator=localhost:{port}"]
  one = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
  outputs = [tmp_path / f"out{i}" for i in range(2)]
  with outputs[0].open("w") as out0, outputs[1].open("w") as out1:
    pair = [
      subprocess.Popen(
        [sys.executable, "-m", "experiments.main", *flags, f"--process_id={i}"],
        cwd=ROOT,
        env={**os.environ, **one, "PYTHONUNBUFFERED": "1"},
        stdout=out,
        stderr=subprocess.STDOUT,
      )
      for i, out in enumerate((out0, out1))
    ]
    try:
      limit = time.monotonic() + 60
      while "first step" not in outputs[0].read_text():
        assert pair[0].poll() is None, outputs[0].read_text()
        assert time.monotonic() < limit
        time.sleep(0.2)
      pair[1].send_signal(signal.SIGTERM)
      codes = [process.wait(timeout=60) for process in pair]
    finally:
      for process in pair:
        process.kill()
  texts = [output.read_text() for output in outputs]
  assert codes == [75, 75], "\n".join(texts)
  saved = max(int(x.name) for x in (tmp_path / "run/checkpoints").iterdir())
  for i, text in enumerate(texts):
    told = f"process {i} of 2: interrupted by SIGTERM at step {saved}:"
    assert told in text
  assert "first step" not in texts[1]


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
