"""Verifiers that raise, hang or die cost their own answers and no others'.

The verifiers stand in this module, which workers import: it must not need jax.
"""

import ctypes
from fractions import Fraction
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from groupstd.questions import Question
from groupstd.verifiers import Counts, Pool, TooManyFailures

NAN = float("nan")
QUESTION = Question("1 + 1 =", "2")
equal = np.testing.assert_array_equal


def length(text, question):
  return len(text)


def number(text, question):
  return float(text) if text.isdigit() else None


def process(text, question):
  return os.getpid()


def alarmed(text, question):
  """As some libraries bound their own time: in a main thread only."""
  before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
  signal.alarm(1)
  signal.alarm(0)
  signal.signal(signal.SIGALRM, before)
  return 1.0


def unruly(text, question):
  """Does what the text says."""
  if text == "raise":
    raise ZeroDivisionError("of a verifier")
  if text == "spin":
    while True:
      pass
  if text == "sleep":
    time.sleep(1000)
  if text == "nap":
    time.sleep(0.3)
    return 1.0
  if text == "regex":  # A C call that returns in the next ice age.
    re.match(r"(a+)+$", "a" * 64 + "b")
  if text == "exit":
    os._exit(0)
  if text == "crash":
    ctypes.string_at(0)
  return number(text, question)


def returning(value, text, question):
  return value


def answers(*texts):
  return [(text, QUESTION) for text in texts]


# --- What a pool returns ---


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_every_verifier_scores_every_answer_in_order(num_workers):
  both = {"length": length, "number": number}
  with Pool(both, num_workers=num_workers) as pool:
    calls = abstained = 0
    for size in 0, 1, 2, 7, 8, 9, 300:
      texts = [str(i) if i % 3 else "·" * i for i in range(size)]
      found = pool(answers(*texts))
      equal(found["length"], [len(text) for text in texts])
      equal(found["number"], [i if i % 3 else NAN for i in range(size)])
      assert list(found) == ["length", "number"]
      calls += 2 * size
      abstained += (size + 2) // 3
      assert pool.counts == Counts(calls, abstained)
    assert pool.messages == []


def test_failures_are_neither_wrong_answers_nor_abstentions():
  """And those who came before or after in the same process keep their score."""
  texts = ["1", "x", "spin", "0", "sleep", "2", "regex", "exit", "3"]
  texts += ["crash", "raise", "4"]
  with Pool(
    {"unruly": unruly, "length": length}, time_limit=1.0, max_failures=1.0
  ) as pool:
    start = time.monotonic()
    for _ in range(2):
      found = pool(answers(*texts))
      scores = [1, NAN, NAN, 0, NAN, 2, NAN, NAN, 3, NAN, NAN, 4]
      equal(found["unruly"], scores)
      equal(found["length"], [len(text) for text in texts])
    assert pool.counts == Counts(
      calls=48, abstained=2, exceptions=2, timeouts=6, died=4
    )
    assert time.monotonic() - start > 3  # Two at a time, each its whole second.
  assert len(pool.messages) == 5
  said = "\n".join(pool.messages)
  assert "unruly: the process ran past the limit, on 'spin'" in said
  assert "length" not in said


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exception_is_named_with_its_text_cut_short(num_workers):
  bad = {"unruly": unruly}
  with Pool(bad, num_workers=num_workers, max_failures=1.0) as pool:
    found = pool([("raise", QUESTION)] * 9)
  assert np.isnan(found["unruly"]).all()
  assert pool.counts == Counts(calls=9, exceptions=9)
  assert (
    pool.messages
    == ["unruly: ZeroDivisionError: of a verifier, on 'raise'"] * 5
  )
  with Pool({"f": functools.partial(returning, NAN)}, num_workers=0) as pool:
    with pytest.raises(TooManyFailures, match="f: returned nan"):
      pool(answers("begin" + "·" * 10_000 + "end"))
    assert "'begin·" in pool.messages[0]
    assert "·end'" in pool.messages[0]
    assert len(pool.messages[0]) < 200


@pytest.mark.parametrize(
  "value", [NAN, float("inf"), "1", 1j, [1.0], np.ones(1), object()]
)
def test_what_is_no_finite_number_is_a_failure_that_names_the_verifier(value):
  verifiers = {"good": length, "bad": functools.partial(returning, value)}
  with Pool(verifiers, num_workers=0, max_failures=1.0) as pool:
    found = pool(answers("four"))
  equal(found["good"], [4])
  equal(found["bad"], [NAN])
  assert pool.counts == Counts(calls=2, exceptions=1)
  assert re.match("bad: returned .*, where a finite number", pool.messages[0])


@pytest.mark.parametrize(
  "value", [1, True, 1.0, np.float32(1), np.int8(1), np.True_, Fraction(1)]
)
def test_numbers_of_any_kind_are_scores(value):
  verifiers = {"f": functools.partial(returning, value)}
  with Pool(verifiers, num_workers=0) as pool:
    equal(pool(answers("", ""))["f"], [1, 1])


# --- Too many failures ---


def test_too_many_failures_stop_the_call_and_not_the_pool():
  """A fifth of the answers may fail, whichever verifier it was."""
  both = {"length": length, "unruly": unruly}
  with Pool(both, num_workers=2, time_limit=0.5) as pool:
    pool(answers("raise", "1", "2", "3", "4"))
    with pytest.raises(
      TooManyFailures,
      match=r"at most 1 of 5 .* got 2 .*2 exceptions, 0 time-outs, 0 dead"
      r"(.|\n)*unruly: ZeroDivisionError: of a verifier, on 'raise'",
    ):
      pool(answers("raise", "1", "raise", "3", "4"))
    with pytest.raises(TooManyFailures, match=r"got 4 .* 4 dead"):
      pool(answers(*["exit"] * 16))
    with pytest.raises(TooManyFailures, match="1 time-outs"):
      pool(answers("spin"))
    equal(pool(answers("5", "66"))["unruly"], [5, 66])


def test_what_a_failed_call_left_under_way_is_no_answer_of_the_next():
  with Pool({"unruly": unruly}, num_workers=2) as pool:
    pool(answers(*["nap"] * 4))  # Both workers are there by now.
    with pytest.raises(TooManyFailures, match="1 exceptions"):
      pool(answers("raise", "nap"))
    equal(pool(answers("5", "66"))["unruly"], [5, 66])


def test_a_share_of_0_lets_none_fail():
  with Pool({"f": unruly}, num_workers=0, max_failures=0.0) as pool:
    pool(answers("1", "x"))
    with pytest.raises(TooManyFailures):
      pool(answers("raise", *["1"] * 99))


# --- Processes ---


def waiting(text, question):
  """Waits for a program of its own, as code that runs answers does."""
  program = [sys.executable, "-c", "import time; time.sleep(600)"]
  with subprocess.Popen(program) as child:
    pathlib.Path(text).write_text(str(child.pid))
    return float(child.wait())


def test_what_a_verifier_started_ends_with_it(tmp_path):
  place = tmp_path / "pid"
  bad = {"waiting": waiting}
  with Pool(bad, num_workers=1, time_limit=1.0, max_failures=1.0) as pool:
    pool(answers(str(place)))
    assert pool.counts.timeouts == 1
  status = pathlib.Path(f"/proc/{place.read_text()}/status")
  for _ in range(100):  # Its new parent may take a moment to bury it.
    if not status.exists() or "State:\tZ" in status.read_text():
      break
    time.sleep(0.05)
  else:
    pytest.fail("the verifier's program outlived it")


def test_a_pause_of_the_whole_machine_is_not_a_verifiers_time():
  """As a laptop's sleep, or a scheduler that stops and continues a job."""
  with Pool({"slow": slow}, num_workers=1, time_limit=1.0) as pool:
    pool(answers("0"))
    worker = pool._workers[0]._process.pid
    code = f"""
import os, signal, time
time.sleep(0.3)
for number in signal.SIGSTOP, signal.SIGCONT:
  os.kill({os.getpid()}, number)
  os.kill({worker}, number)
  time.sleep(2)
"""
    stopper = subprocess.Popen([sys.executable, "-c", code])
    found = pool(answers("0.6", "0.6"))
    stopper.wait()
  equal(found["slow"], [0.6, 0.6])


def slow(text, question):
  time.sleep(float(text))
  return float(text)


def test_an_idle_worker_that_was_killed_is_replaced():
  with Pool({"process": process}, num_workers=1) as pool:
    (first,) = pool(answers(""))["process"]
    assert first != os.getpid()
    os.kill(int(first), signal.SIGKILL)
    time.sleep(0.2)
    assert pool(answers(""))["process"] != first
    assert pool.counts == Counts(calls=2)


def test_verifiers_that_use_signals_run_where_they_may():
  """In a worker's main thread; elsewhere they fail aloud, and score no 0."""
  with Pool({"alarmed": alarmed}, num_workers=1) as pool:
    equal(pool(answers("1/2"))["alarmed"], [1])
  with Pool({"alarmed": alarmed}, num_workers=0, max_failures=1.0) as pool:
    found = []
    thread = threading.Thread(target=lambda: found.append(pool(answers("1/2"))))
    thread.start()
    thread.join()
  equal(found[0]["alarmed"], [NAN])
  assert pool.counts.exceptions == 1


class Unloadable:
  def __call__(self, text, question):
    return 1.0

  def __reduce__(self):
    return int, ("no number",)


def test_verifiers_that_a_worker_cannot_import_are_an_error():
  with (
    Pool({"f": Unloadable()}, num_workers=1) as pool,
    pytest.raises(RuntimeError, match=r"import its verifiers(.|\n)*no number"),
  ):
    pool(answers("1"))


def test_a_closed_pool_is_closed():
  pool = Pool({"process": process}, num_workers=1)
  (worker,) = pool(answers(""))["process"]
  pool.close()
  with pytest.raises(ProcessLookupError):
    os.kill(int(worker), 0)
  with pytest.raises(RuntimeError, match="closed"):
    pool(answers(""))
  pool.close()


MAIN = """
import sys

from absl import app, flags
import jax

from groupstd.questions import Question
from groupstd.verifiers import Pool
import verifiers_test

flags.DEFINE_string("text", "", "")
flags.DEFINE_bool("mine", False, "")


def mine(text, question):
  return float("jax" in sys.modules)



def main(argv):
  verifier = mine if flags.FLAGS.mine else verifiers_test.unruly
  loaded = verifiers_test.jax_is_there
  with Pool(
    {"f": verifier, "jax": loaded}, time_limit=0.2 if "regex" in argv else 60.0
  ) as pool:
    question = Question("1 + 1 =", "2")
    print(pool([("1", question)] * 20)["jax"].max(), flush=True)
    try:
      if flags.FLAGS.text:
        pool([(flags.FLAGS.text, question)] * 2)
    except KeyboardInterrupt:
      print("interrupted", flush=True)
      print(pool([("1", question)])["f"], flush=True)


if __name__ == "__main__":
  app.run(main)
"""


def jax_is_there(text, question):
  return float("jax" in sys.modules)


@pytest.fixture
def run(tmp_path):
  """Starts a training script with flags, as `python -m`."""
  (tmp_path / "script.py").write_text(MAIN)
  here = pathlib.Path(__file__).parent
  path = os.pathsep.join(map(str, [tmp_path, here, here.parent]))
  started = []

  def start(*flags):
    started.append(
      subprocess.Popen(
        [sys.executable, "-m", "script", *flags],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
      )
    )
    return started[-1]

  yield start
  for process in started:
    process.kill()
    process.communicate()


def test_workers_do_not_import_a_training_script_nor_jax(run):
  out, errors = run().communicate(timeout=60)
  assert (out, errors) == ("0.0\n", "")
  # Unless a verifier is in the script.
  out, errors = run("--mine").communicate(timeout=60)
  assert (out, errors) == ("1.0\n", "")


def test_ctrl_c_is_the_parents_alone(run):
  script = run("--text=sleep")
  assert script.stdout.readline() == "0.0\n"
  time.sleep(0.3)  # It is in the next call by then, or just before.
  os.killpg(script.pid, signal.SIGINT)  # As a terminal does.
  out, errors = script.communicate(timeout=60)
  assert (out, errors) == ("interrupted\n[1.]\n", "")


@pytest.mark.parametrize("text", ["spin", "regex"])
def test_workers_end_with_a_parent_that_is_killed(run, text):
  """However busy: what they write to is closed when all have ended."""
  script = run(f"--text={text}", text)
  assert script.stdout.readline() == "0.0\n"
  time.sleep(0.1)
  script.kill()
  script.communicate(timeout=20)


# --- What is refused ---


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"verifiers": {}}, "must be at least one, by name"),
    ({"verifiers": {"": length}}, "must be at least one, by name"),
    (
      {"verifiers": {"f": lambda text, question: 1.0}},
      "'f' must be a function",
    ),
    ({"num_workers": -1}, "`num_workers` must be .* at least 0, got -1"),
    ({"num_workers": 1.5}, "`num_workers` must be .* at least 0, got 1.5"),
    ({"time_limit": 0.0}, "`time_limit` must be positive"),
    ({"time_limit": NAN}, "`time_limit` must be positive"),
    ({"max_failures": 1.1}, "`max_failures` must be a share"),
  ],
)
def test_what_makes_no_pool_is_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    Pool(**{"verifiers": {"length": length}, **arguments})


# --- Calls taken together ---


def test_a_small_call_after_a_large_one_is_held_to_the_share_of_both():
  """2 of 8 are a fifth of no call of 8, and little of a step's 40 answers."""
  small, large = answers(*["raise"] * 2, *["1"] * 6), answers(*["1"] * 32)
  with Pool({"f": unruly}, num_workers=0, max_failures=0.2) as pool:
    with pytest.raises(TooManyFailures, match=r"at most 1.6 of 8 .* got 2"):
      pool(small)
    with pool.together():
      pool(large)
      for _ in range(4):  # 8 of 64 by then.
        pool(small)
      with pytest.raises(TooManyFailures, match=r"at most 16 of 80 .* got 17"):
        pool(answers(*["raise"] * 16))
    # What was tolerated then is not held against what follows, nor for it.
    with pool.together():
      pool(large)
    with pytest.raises(TooManyFailures, match="of 8 answers"):
      pool(small)
