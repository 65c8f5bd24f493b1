"""Runs that end themselves, raise alarms, and take no more memory."""

import gc
import os
import pathlib
import subprocess
import sys
import textwrap

from absl import logging
import jax
import numpy as np
import pytest
import tiny_language

from experiments import cli, train, workdir
from groupstd import answers, transformer

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ROOT = pathlib.Path(__file__).parents[1]


class Switch:
  """A verifier that is told what to say: 0, "mixed" or "raise"."""

  def __init__(self):
    self.word, self.calls = 0.0, 0

  def __call__(self, text, question):
    self.calls += 1
    if self.word == "raise":
      raise RuntimeError("out of order")
    return self.calls % 2.0 if self.word == "mixed" else self.word


@pytest.fixture
def switch(monkeypatch):
  """One verifier, as if `answers` had a function `switch` for it."""
  made = Switch()

  def function() -> answers.Verifier:
    return made

  monkeypatch.setattr(answers, "switch", function, raising=False)
  monkeypatch.setattr(answers, "__all__", [*answers.__all__, "switch"])
  return made


def config(path, **fields):
  return tiny_language.config(
    path,
    "dapo",
    verifiers={"correct": {"switch": {}}},
    max_rounds=2,
    checked_golds=0,
    **fields,
  )


def copy(state):
  return jax.tree.map(np.array, (state.params, state.opt_state))


def equal(a, b):
  return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def test_a_verifier_that_always_raises_stops_the_run(tmp_path, switch):
  """Before the first step already, where the policy is observed."""
  made = config(tmp_path)
  switch.word = "raise"
  with pytest.raises(cli.Stopped) as stop:
    train.run(made, tmp_path / "run")
  assert "verifiers fail at an evaluation: at most 3.2 of 16" in str(stop.value)
  assert "got 4 after 4 calls (4 exceptions, 0 time-outs" in str(stop.value)
  assert "correct: RuntimeError: out of order, on" in str(stop.value)
  assert switch.calls == 4  # No call more than it takes to know.
  step, state = tiny_language.state(tmp_path / "run", made)
  assert step == 0
  assert equal(copy(state), copy(train.build(made).start()))
  assert workdir.read_metrics(tmp_path / "run") == []


@pytest.mark.slow
def test_a_verifier_that_breaks_in_a_step_stops_it_there(
  tmp_path, switch, monkeypatch
):
  made = config(tmp_path)
  experiment, states = train.build(made), []

  def step(state):
    states.append(copy(state))
    switch.word = "raise" if state.step == 3 else "mixed"
    return experiment.step(state)

  monkeypatch.setattr(train, "build", lambda _: experiment._replace(step=step))
  with pytest.raises(
    cli.Stopped, match=r"verifiers fail at step 3: (.|\n)*correct"
  ):
    train.run(made, tmp_path / "run")
  monkeypatch.undo()
  assert len(states) == 4
  # What was done until then is there, and the step that failed is not.
  saved, state = workdir.load(tmp_path / "run", experiment.start())
  assert saved == 3
  assert equal(copy(state), states[3])
  lines = workdir.read_metrics(tmp_path / "run")
  assert [line["step"] for line in lines] == [0, 1, 2]
  assert set(tiny_language.groups(tmp_path / "run")) == {0, 1, 2}


@pytest.mark.slow
def test_a_run_that_finds_nothing_to_train_on_stops(tmp_path, switch):
  made = config(tmp_path, max_skipped=3, num_steps=50)
  # The length penalty makes rewards differ in groups that nobody gets right:
  # to DAPO they are silent all the same.
  with pytest.raises(cli.Stopped, match="none of the last 3 steps"):
    train.run(made, tmp_path / "run")
  lines = workdir.read_metrics(tmp_path / "run")
  assert [line["step"] for line in lines] == [0, 1, 2]
  for line in lines:
    assert (line["skipped"], line["kept"], line["reward_kept"]) == (1, 0, None)
    assert line["drawn"] == 4 * 4 * 2  # Groups, answers, rounds: no more.
    assert line["scale"] is None
  step, state = tiny_language.state(tmp_path / "run", made)
  fresh = train.build(made).start()
  # Not an update, and not a count of one either; the data moved on.
  assert step == state.step == 3
  assert equal(copy(state), copy(fresh))
  assert [line["position"] for line in lines] == [0, 8, 16]


@pytest.mark.slow
def test_one_good_step_makes_the_run_patient_again(tmp_path, switch):
  made = config(tmp_path, max_skipped=2, num_steps=50)
  experiment = train.build(made)
  state = experiment.start()
  for word, skipped in [(0.0, 1), ("mixed", 0), (1.0, 1), (0.0, 1)]:
    switch.word = word
    state, found = experiment.step(state)
    assert found["skipped"] == skipped
  with pytest.raises(cli.Stopped, match="none of the last 2 steps"):
    experiment.step(state)
  assert state.step == 4  # Its buffers are not taken over.


@pytest.mark.slow
@pytest.mark.parametrize("word", ["raise", 0.0])
def test_the_program_says_why_in_a_line_and_exits_with_3(tmp_path, word):
  """By processes, too: nothing of a worker's is left in the message."""
  (tmp_path / "broken.py").write_text(
    textwrap.dedent(f"""
      def say(text, question):
        if {word!r} == "raise":
          raise RuntimeError("out of order")
        return {word!r}
    """)
  )
  (tmp_path / "config.py").write_text(
    textwrap.dedent(f"""
      import pathlib, sys
      sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / "tests")!r}]
      import broken, tiny_language
      from groupstd import answers, transformer

      def say() -> answers.Verifier:
        return broken.say

      answers.broken = say
      answers.__all__ += ["broken"]

      def get_config(_=""):
        return tiny_language.config(
          pathlib.Path({str(tmp_path)!r}),
          "dapo",
          verifiers={{"correct": {{"broken": {{}}}}}},
          verifier_workers=1,
          checked_golds=0,
          max_skipped=2,
        )
    """)
  )
  done = subprocess.run(
    [
      *(sys.executable, "-m", "experiments.main"),
      f"--config={tmp_path / 'config.py'}",
      f"--workdir={tmp_path / 'run'}",
    ],
    cwd=ROOT,
    env={
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    },
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 3, done.stderr
  (line,) = done.stderr.splitlines()
  if word == "raise":
    assert line.startswith("stopped: verifiers fail at an evaluation:")
    assert "correct: RuntimeError: out of order" in line
  else:
    assert line.startswith("stopped: none of the last 2 steps")
  assert (tmp_path / "run" / "checkpoints" / ("0" if word else "2")).is_dir()


@pytest.mark.slow
def test_a_sampler_that_reports_other_log_probs_raises_an_alarm(
  tmp_path, monkeypatch, caplog
):
  make = transformer.policy

  def shifted(*args, **kwargs):
    policy = make(*args, **kwargs)

    def sample(*args):
      drawn = policy.sample(*args)
      return drawn._replace(log_probs=drawn.log_probs + 0.01)

    return policy._replace(sample=sample)

  monkeypatch.setattr(transformer, "policy", shifted)
  experiment = train.build(tiny_language.config(tmp_path))
  logging.set_verbosity(logging.WARNING)
  _, found = experiment.step(experiment.start())
  # exp(−0.01) − 1, to rounding of the log-probs.
  assert found["first_ratio"] == pytest.approx(1 - np.exp(-0.01), abs=1e-5)
  assert "first ratio is off 1 by 0.01" in caplog.text


@pytest.mark.slow
def test_answers_that_are_all_cut_off_raise_an_alarm(tmp_path, caplog):
  config = tiny_language.config(tmp_path, answer_length=1)
  config.tokenizer.characters.alphabet += "abcdefghijklmnopqrstuvwxyz"
  experiment = train.build(config)
  _, found = experiment.step(experiment.start())
  assert found["truncated"] > 0.9
  share = f"{found['truncated']:.0%} of the answers were cut off"
  assert f"{share} at config.answer_length" in caplog.text


def resident():
  """Bytes of this process in memory."""
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc")
def test_memory_stays_level(tmp_path, switch):
  """Over 300 steps with redraws, all of whose rollouts are written."""
  made = config(tmp_path, num_steps=300, observe_every=10, checkpoint_every=50)
  switch.word = "mixed"
  experiment = train.build(made)
  bytes_, arrays = [], []

  def step(state):
    state, found = experiment.step(state)
    if state.step % 10 == 0:
      gc.collect()
      bytes_.append(resident())
      arrays.append(len(jax.live_arrays()))
    return state, found

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train, "build", lambda _: experiment._replace(step=step))
    train.run(made, tmp_path / "run")
  assert len(bytes_) == 30
  # More for a moment, while a checkpoint is written.
  assert np.median(arrays[5:15]) == np.median(arrays[20:])
  assert max(arrays[20:]) <= max(arrays[:20])
  # By the median over ten measurements, as allocators hold on to what they
  # had: below 20 kB a step, of which a step's texts alone are 5.
  early, late = np.median(bytes_[5:15]), np.median(bytes_[20:])
  assert late - early < 150 * 20_000
