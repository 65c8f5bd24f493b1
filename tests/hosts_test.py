"""Processes that answer, raise, hang, die or leave: what the others get.

  python tests/hosts_test.py CASE COORDINATOR PROCESS

is one of two processes of a case.
"""

import ctypes
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupstd import hosts, policies, tasks, verifiers

LIMIT = 2.0  # Seconds that a call may take, where one does not return.
# What ends a process after the limit: graces, clean-ups and its own start.
MORE = 30.0
HOST = socket.gethostname()


class Unpicklable(Exception):
  """It cannot be made again of its arguments."""

  def __init__(self, one, two):
    super().__init__(one + two)


def judge(prompts, tokens, mask):
  """Of each group alone; with every part that a verdict has."""
  if not len(tokens):
    raise ValueError("there is nothing to judge")
  text = np.asarray(tokens).sum(axis=2) + np.asarray(prompts.index)[:, None]
  length = np.asarray(mask).sum(axis=2)
  where = text % 5 > 0
  parts = {"length": length, "abstains": np.where(text % 3, np.nan, 1)}
  return tasks.Verdict(text % 2, where, text % 2 - 0.1 * length, parts)


def asked(num_groups):
  """Prompts, tokens and masks of groups that all differ."""
  rng = np.random.default_rng(num_groups)
  tokens = rng.integers(0, 9, (num_groups, 3, 4))
  mask = rng.random(tokens.shape) < 0.7
  ids = 7 * np.arange(num_groups)
  # Some of what a reward function gets is numpy's and some is jax's.
  prompt = jnp.ones((num_groups, 2), int)
  return policies.Prompts(prompt, prompt > 0, ids), tokens, mask


TASK = tasks.Task(lambda step, number: (None, None), judge)


def raised(kind, function):
  """The error that it raises."""
  with pytest.raises(kind) as info:
    function()
  return info.value


def test_alone_a_process_has_no_others_to_ask():
  assert (hosts.index(), hosts.count()) == (0, 1)
  assert hosts.gather("asking", lambda: "me", seconds=1) == ["me"]
  hosts.barrier("nothing", 1)
  hosts.same("the config", {"a": 1})
  assert hosts.share(TASK, seconds=1) is TASK
  hosts.leave(ValueError("a bug"), 1)
  with pytest.raises(ZeroDivisionError):
    hosts.gather("dividing", lambda: 1 // 0, seconds=1)


def test_sigterm_is_told_at_the_next_step_and_handled_as_before_after():
  before = signal.getsignal(signal.SIGTERM)
  with hosts.preemption() as reached:
    assert not reached()
    os.kill(os.getpid(), signal.SIGTERM)
    assert reached()
    assert reached()
  assert signal.getsignal(signal.SIGTERM) is before
  with hosts.preemption() as reached:
    assert not reached()


def together(index):
  """All that two processes survive, one after another."""
  found = {}
  found["order"] = hosts.gather("order", lambda: 10 * index, seconds=30)
  big = hosts.gather("8 MB", lambda: bytes([index]) * 2**23, seconds=30)
  found["big"] = [(len(x), x[:1], x[-1:]) for x in big]
  begun = time.monotonic()
  for i in range(200):
    assert hosts.gather("many", lambda i=i: (index, i), seconds=30) == [
      (0, i),
      (1, i),
    ]
  found["ms"] = (time.monotonic() - begun) * 5
  left = hosts._distributed().client.key_value_dir_get_bytes("groupstd/")
  found["keys"] = len(left)

  name = "ab"[index]
  found["mismatch"] = str(
    raised(hosts.HostError, lambda: hosts.gather(name, lambda: 0, seconds=30))
  )

  def fail(error, at):
    def function():
      if index == at:
        raise error
      return index

    kind = type(error) if index == at else hosts.HostError
    told = raised(kind, lambda: hosts.gather("failing", function, seconds=30))
    return repr(told), repr(getattr(told, "cause", None))

  found["raises"] = fail(verifiers.TooManyFailures("seven"), at=1)
  found["unpicklable"] = fail(Unpicklable("a", "b"), at=0)
  found["result"] = repr(
    raised(
      (hosts.HostError, AttributeError, pickle.PicklingError),
      lambda: hosts.gather(
        "a lambda", lambda: (lambda: 0) if index else 0, seconds=30
      ),
    )
  )

  shared = hosts.share(TASK, seconds=30)
  found["verdicts"] = [shared.reward(*asked(n)) for n in (5, 2, 1)]
  wrong = tasks.Task(TASK.prompts, lambda *args: (np.zeros(2), np.ones(2)))
  found["shape"] = str(
    raised(
      (ValueError, hosts.HostError),
      lambda: hosts.share(wrong, seconds=30).reward(*asked(4)),
    )
  )

  hosts.same("the config", {"a": {"b": 1, "c": {}}, "d": (1, 2)})
  config = {"a": {"b": index, "c": [{}, {"x": 1}][index]}, "same": None}
  if index:
    config["more"] = "text"
  found["same"] = str(raised(ValueError, lambda: hosts.same("the X", config)))

  # Longer than the limit in all, and nobody late.
  for _ in range(2):
    hosts.gather("slow", lambda: time.sleep(0.6), seconds=1)
  return found


def hang(index):
  """Process 1 sleeps, where Python could be told to go on."""
  hosts.gather("ready", lambda: 0, seconds=30)
  hosts.gather("work", lambda: index and time.sleep(600), seconds=LIMIT)


def hang_holding_the_lock(index):
  """Process 0 sleeps in C, and no thread of Python's runs meanwhile."""
  hosts.gather("ready", lambda: 0, seconds=30)
  sleep = ctypes.PyDLL(None).sleep
  hosts.gather("work", lambda: index or sleep(600), seconds=LIMIT)


def die(index):
  hosts.gather("ready", lambda: 0, seconds=30)
  try:
    hosts.gather(
      "work",
      lambda: index and os.kill(os.getpid(), signal.SIGKILL),
      seconds=LIMIT,
    )
  finally:
    # A clean-up that waits for who is dead.
    time.sleep(600)


def leave(index):
  """Process 1 raises between two calls; 0 would wait for it for minutes."""
  import atexit

  hosts.gather("ready", lambda: 0, seconds=30)
  try:
    if index:
      raise OSError("the disk is full")
    hosts.gather("work", lambda: 0, seconds=600)
  except Exception as error:
    atexit.register(hosts.leave, error, 7)
    raise


def run_pair(case, folder):
  """Exit codes, what each said, and how long the pair took."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  begun = time.monotonic()
  outputs = [folder / f"{case}{i}" for i in range(2)]
  with outputs[0].open("w") as out0, outputs[1].open("w") as out1:
    pair = [
      subprocess.Popen(
        [sys.executable, __file__, case, f"localhost:{port}", str(i)],
        cwd=folder,
        env={
          **os.environ,
          "JAX_PLATFORMS": "cpu",
          "PYTHONPATH": str(pathlib.Path(__file__).parents[1]),
        },
        stdout=out,
        stderr=subprocess.STDOUT,
      )
      for i, out in enumerate((out0, out1))
    ]
    try:
      codes = [process.wait(timeout=60) for process in pair]
    finally:
      for process in pair:
        process.kill()
  texts = [output.read_text() for output in outputs]
  return codes, texts, time.monotonic() - begun


@pytest.mark.slow
def test_two_processes_get_the_same_answers_and_errors(tmp_path):
  codes, texts, _ = run_pair("together", tmp_path)
  assert codes == [0, 0], "\n".join(texts)
  both = [pickle.loads((tmp_path / f"found{i}").read_bytes()) for i in range(2)]
  zero, one = both
  for found in both:
    assert found["order"] == [0, 10]
    assert found["big"] == [
      (2**23, b"\0", b"\0"),
      (2**23, b"\1", b"\1"),
    ]
    assert found["ms"] < 100  # 2 where nothing else runs.
    # Both names, and what only the next call shows to have been read.
    assert found["keys"] <= 2 + 4
    for text in ("'a' by process 0", "'b' by process 1", "same order", HOST):
      assert text in found["mismatch"]
    assert "must have shape (2, 3)" in found["shape"]
    for text in (
      "the X must be the same",
      "a.b: process 0 has 0, process 1 has 1",
      "a.c: process 0 has {}, process 1 has nothing",
      "a.c.x: process 0 has nothing, process 1 has 1",
      'more: process 0 has nothing, process 1 has "text"',
    ):
      assert text in found["same"]
    assert "same: " not in found["same"]
    # The whole verdict, from rows that do not divide, or are too few.
    for number, verdict in zip((5, 2, 1), found["verdicts"], strict=True):
      ids = np.arange(number)
      whole = tasks.check_scores(judge(*asked(number)), ids, 3)
      jax.tree.map(np.testing.assert_array_equal, verdict, whole)
  cause = "TooManyFailures('seven')"
  assert one["raises"] == (cause, "None")
  assert zero["raises"][1] == cause
  for text in (f"process 1 on {HOST}", "raised at failing", "seven"):
    assert text in zero["raises"][0]
  assert zero["unpicklable"][0] == "Unpicklable('ab')"
  assert one["unpicklable"][1] == "None"
  assert "Unpicklable: ab" in one["unpicklable"][0]
  assert "HostError" in zero["result"]
  assert "HostError" not in one["result"]


CASES = {
  # Case: (which hangs or is gone, a line that only it can print).
  "hang": (1, ["Timeout", "in hang"]),
  "hang_holding_the_lock": (0, ["Timeout", "in hang_holding_the_lock"]),
  "die": (1, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_who_does_not_answer_is_named_and_all_end(case, tmp_path):
  culprit, lines = CASES[case]
  codes, texts, seconds = run_pair(case, tmp_path)
  assert all(code != 0 for code in codes), codes
  assert seconds < LIMIT + MORE
  for text in (
    f"work: process {culprit} on {HOST} did not answer within {LIMIT:g} s",
    *(["in die"] if case == "die" else []),
  ):
    assert text in texts[1 - culprit]
  for line in lines:
    assert line in texts[culprit]


@pytest.mark.slow
def test_who_leaves_with_an_error_takes_the_others_along(tmp_path):
  codes, texts, seconds = run_pair("leave", tmp_path)
  assert codes == [7, 7]
  assert seconds < MORE
  assert "OSError: the disk is full" in texts[1]
  assert f"process 1 on {HOST} ended: OSError: the disk is full" in texts[0]


def main(case, coordinator, index):
  jax.distributed.initialize(coordinator, 2, int(index))
  found = globals()[case](int(index))
  pathlib.Path(f"found{index}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
  main(*sys.argv[1:])
