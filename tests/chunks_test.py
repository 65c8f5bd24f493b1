"""The trial that chooses how many parts a gradient is taken in."""

import itertools
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import chunks
from groupstd import learners, policies, sigma

TABLE = policies.softmax(12, 3)
PROMPTS = np.arange(12)


def learner_of(number, **kwargs):
  learner = learners.policy_gradient(
    TABLE,
    optax.adam(0.1),
    sigma.rule(sigma.divide()),
    micro_batches=number,
    **kwargs,
  )
  return learner._replace(step=jax.jit(learner.step, donate_argnums=0))


class Stepped:
  """Learners whose steps take as long as they are told to, by the clock."""

  def __init__(self, monkeypatch, seconds, error=None):
    self.seconds, self.error = seconds, error
    self.now, self.calls = 0.0, []
    monkeypatch.setattr(time, "monotonic", lambda: self.now)

  def make(self, number):
    def init(params):
      return learners.TrainState(jnp.zeros([], int), params, ())

    def step(state, batch):
      self.calls.append(number)
      if number not in self.seconds:
        raise self.error
      # The first of each compiles.
      first = self.calls.count(number) == 1
      self.now += 100 if first else self.seconds[number]
      return state, None

    return learner_of(1)._replace(init=init, step=step)


def choose(make, *, file=None, prompts=PROMPTS, **kwargs):
  given = {"group_size": 4, "length": 3, "depends_on": {}} | kwargs
  params = TABLE.init(jax.random.key(0))
  return chunks.micro_batches(make, params, prompts, file=file, **given)


@pytest.mark.parametrize("groups", [*range(1, 40), 512])
def test_candidates_cut_a_batch_evenly_and_thin_out(groups):
  found = chunks.candidates(groups)
  assert found[0] == groups
  assert found[-1] == 1
  assert all(groups % number == 0 for number in found)
  assert all(a >= 3 * b for a, b in itertools.pairwise(found) if b > 1)


def test_the_fastest_is_taken_and_worse_ones_are_not_tried(monkeypatch, capsys):
  told = Stepped(monkeypatch, {12: 3.0, 4: 1.0, 1: 2.0})
  assert choose(told.make) == 4
  assert capsys.readouterr().out == (
    "micro_batches 4, of 1, 4, 12: 1 s against 2-3\n"
  )
  worse = Stepped(monkeypatch, {12: 1.0, 4: 1.5})
  assert choose(worse.make) == 12
  assert 1 not in worse.calls
  slow = Stepped(monkeypatch, {12: 1.0, 4: 1.15, 1: 0.5})
  assert choose(slow.make) == 1


def test_of_those_as_fast_the_most_parts_are_taken(monkeypatch):
  """For silent groups, which a part of their own costs nothing."""
  told = Stepped(monkeypatch, {12: 1.04, 4: 1.0, 1: 1.03})
  assert choose(told.make) == 12


def test_each_is_timed_in_turn_with_the_best_so_far(monkeypatch):
  told = Stepped(monkeypatch, {12: 3.0, 4: 1.0, 1: 1.1})
  choose(told.make)
  last = told.calls[told.calls.index(1) + 2 :]
  assert last.count(4) == last.count(1) >= 2
  assert 12 not in last
  assert all({*last[i : i + 2]} == {1, 4} for i in range(0, len(last), 2))


def test_what_does_not_fit_memory_is_not_taken(monkeypatch):
  full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
  told = Stepped(monkeypatch, {12: 3.0}, full)
  assert choose(told.make) == 12
  broken = jax.errors.JaxRuntimeError("INTERNAL: broken")
  for seconds, error in ({12: 3.0}, broken), ({}, full):
    told = Stepped(monkeypatch, seconds, error)
    with pytest.raises(jax.errors.JaxRuntimeError, match=str(error)[:8]):
      choose(told.make)


def test_in_the_trial_every_group_learns(compiled_quickly):
  """Of real learners, whatever the batch is cut into."""
  infos = []

  def make(number):
    learner = learner_of(number, mini_batches=2)

    def step(state, batch):
      state, info = learner.step(state, batch)
      infos.append(info)
      return state, info

    return learner._replace(step=step)

  number = choose(make, prompts=PROMPTS[:4], mini_batches=2)
  assert number in (2, 1)  # Of the two groups of an update.
  for info in infos:
    assert (info.computed, info.silent, info.nonfinite) == (4, 0, 0)


def test_a_choice_is_kept_for_all_that_it_depends_on(monkeypatch, tmp_path):
  file = tmp_path / "runs" / ".chunks.json"
  asked = []

  def ask(**kwargs):
    told = Stepped(monkeypatch, {12: 3.0, 4: 1.0, 1: 2.0, 6: 1.0, 2: 2.0})
    chosen = choose(told.make, file=file, **kwargs)
    asked.append(bool(told.calls))
    return chosen

  ask()
  assert (ask(), asked) == (4, [True, False])
  for changed in (
    {"length": 4},
    {"group_size": 2},
    {"mini_batches": 2},
    {"prompts": PROMPTS[:6]},
    {"depends_on": {"model": {"width": 1}}},
    {"depends_on": {"model": {"width": 2}}},
  ):
    asked.clear()
    first = ask(**changed)
    assert (ask(**changed), asked) == (first, [True, False])
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_thunk_runtime")
  asked.clear()
  ask()
  assert asked == [True]
  kept = json.loads(file.read_text())
  assert len(kept) == 8
  assert all(x["micro_batches"] in (12, 6, 4, 2, 1) for x in kept.values())


def test_a_damaged_file_is_written_anew(monkeypatch, tmp_path):
  file = tmp_path / ".chunks.json"
  file.write_text('{"half": ')
  told = Stepped(monkeypatch, {12: 3.0, 4: 1.0, 1: 2.0})
  assert choose(told.make, file=file) == 4
  assert len(json.loads(file.read_text())) == 1
  assert {x.name for x in tmp_path.iterdir()} == {
    ".chunks.json",
    ".chunks.json.lock",
  }


def test_it_is_kept_beside_what_is_compiled(tmp_path):
  before = jax.config.values["jax_compilation_cache_dir"]
  try:
    for folder, expected in [
      (str(tmp_path / ".jax_cache"), tmp_path / ".chunks.json"),
      ("gs://bucket/cache", None),
      (None, None),
    ]:
      jax.config.update("jax_compilation_cache_dir", folder)
      assert chunks.beside_compiled() == expected
  finally:
    jax.config.update("jax_compilation_cache_dir", before)


def test_one_trial_at_a_time(tmp_path):
  """Another run waits, and then reads what this one has found."""
  file = tmp_path / ".chunks.json"
  found = []

  def other():
    with chunks._kept(file) as kept:
      found.append(kept)

  thread = threading.Thread(target=other)
  with chunks._kept(file) as kept:
    thread.start()
    thread.join(0.2)
    assert not found
    kept["key"] = {"micro_batches": 3}
  thread.join(30)
  assert found == [{"key": {"micro_batches": 3}}]


def test_several_processes_have_several_clocks(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 4)
  with pytest.raises(ValueError, match="must run in one process, got 4"):
    choose(learner_of)
