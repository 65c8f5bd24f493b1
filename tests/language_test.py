"""Runs of a language model: every number logged is one of what was drawn.

Three runs are made, with all rollouts written, and held against the lines of
rollouts.jsonl: silent groups replaced, redrawn, and gone through several times.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_language

from experiments import building, train, workdir
from groupstd import answers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

RUNS = {
  "replaced": {
    "method": "dapo",
    "num_groups": 8,
    "num_steps": 50,
    "temperature": 1.3,
  },
  "redrawn": {
    "method": "dapo_redraw",
    "num_groups": 8,
    "num_steps": 50,
    "temperature": 0.6,
    "max_draws": 3,
    "micro_batches": 8,
    "weights": {"correct": 0.7, "length": 0.3},
  },
  "often": {
    "method": "grpo",
    "num_steps": 12,
    "epochs": 2,
    "mini_batches": 2,
    "micro_batches": 2,
    "decay": "linear",
    "warmup_updates": 5,
  },
}
COMPILING = "/jax/core/compile/backend_compile_duration"


class Run:
  """A finished run."""

  def __init__(self, name, path):
    self.name, self.path = name, path
    self.config = tiny_language.config(path.parent, **RUNS[name])
    self.compiled = []  # Programs, in each step and between it and the last.
    self._count = 0

  def train(self):
    jax.monitoring.register_event_duration_secs_listener(self._hear)
    experiment, before = train.build(self.config), []

    def step(state):
      before.append(self._count)
      state, found = experiment.step(state)
      self.compiled.append(self._count - before[-1])
      return state, found

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(train, "build", lambda _: experiment._replace(step=step))
      train.run(self.config, self.path)
    self.total = np.diff([*before, self._count])
    *self.metrics, self.last = workdir.read_metrics(self.path)
    self.groups = tiny_language.groups(self.path)

  def _hear(self, event, seconds, **_):
    self._count += event == COMPILING

  def column(self, step, field, draws=None):
    """[N, G] of a step's groups."""
    return np.array(
      [
        [line[field] for line in group]
        for (draw, _), group in self.groups[step].items()
        if draws is None or draw in draws
      ],
      float,
    )


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory, compiled_once):
  made = Run(request.param, tmp_path_factory.mktemp(request.param) / "run")
  made.train()
  return made


def firsts(run):
  """The draws that are a prompt's first in its step."""
  return None if run.name == "replaced" else [0]


def test_lines_are_of_every_step_and_end_with_the_policy_at_the_end(run):
  steps = list(range(run.config.num_steps))
  assert [line["step"] for line in run.metrics] == steps
  assert list(run.groups) == steps
  assert run.last["step"] == run.config.num_steps
  observed = [line["step"] for line in run.metrics if "accuracy" in line]
  assert observed == list(range(0, run.config.num_steps, 20))


def test_what_is_drawn_and_what_is_kept_are_told_apart(run):
  apart = 0
  for line in run.metrics:
    step = line["step"]
    scores, rewards = run.column(step, "score"), run.column(step, "reward")
    kept = run.column(step, "kept").all(axis=1)
    close = {"abs": 1e-6}
    assert line["reward_drawn"] == pytest.approx(scores.mean(), **close)
    assert line["reward"] == pytest.approx(rewards.mean(), **close)
    if kept.any():
      assert line["reward_kept"] == pytest.approx(scores[kept].mean(), **close)
    else:
      assert line["reward_kept"] is None
    apart += line["reward_kept"] != pytest.approx(line["reward_drawn"])
    assert line["kept"] == kept.sum()
    assert line["drawn"] == scores.size
    filled = run.config.num_groups
    if run.name == "replaced":
      filled -= line["left_silent"]
    assert line["drawn"] - line["dropped"] == filled * run.config.group_size
  assert bool(apart) == (run.name != "often")


def test_silence_is_of_first_draws(run):
  for line in run.metrics:
    scores = run.column(line["step"], "score", firsts(run))
    k = scores.sum(axis=1)
    assert line["all_wrong"] == pytest.approx(np.mean(k == 0))
    assert line["all_right"] == pytest.approx(np.mean(k == scores.shape[1]))
    # Of 0/1 scores these are all the silent ones there are.
    silent = line["all_wrong"] + line["all_right"]
    assert line["silent_share"] == pytest.approx(silent)
    assert line["std"] == pytest.approx(scores.std(axis=1).mean())
    assert line["first_draws"] == len(scores)


def test_tokens_are_counted_as_they_were_sampled(run):
  for line in run.metrics:
    length = run.column(line["step"], "length")
    ended = run.column(line["step"], "ended")
    assert line["tokens"] == length.sum()
    assert line["length"] == pytest.approx(length.mean())
    assert line["length_max"] == length.max() <= run.config.answer_length
    assert line["truncated"] == pytest.approx(1 - ended.mean())
    assert line["unscored"] == 0
    assert np.all(length[ended == 0] == run.config.answer_length)


def test_parts_are_logged_by_name_and_add_up_to_the_reward(run):
  weights = run.config.weights.to_dict()
  for step, groups in run.groups.items():
    parts = {name: [] for name in weights}
    for group in groups.values():
      for line in group:
        for name, value in line["parts"].items():
          parts[name].append(value)
        total = sum(weights[name] * x for name, x in line["parts"].items())
        assert line["reward"] == pytest.approx(total, abs=1e-6)
    for name, values in parts.items():
      logged = run.metrics[step][f"reward/{name}"]
      assert logged == pytest.approx(np.mean(values))


def test_advantages_are_those_of_the_rule_on_the_lines_themselves(run):
  """σ (population, no ε) and the mean, by numpy."""
  for step, groups in run.groups.items():
    scales = []
    for group in groups.values():
      rewards = np.array([line["reward"] for line in group])
      scores = {line["score"] for line in group}
      found = [line["advantage"] for line in group]
      if not group[0]["kept"]:
        assert found == [None] * len(group)
        continue
      if run.name != "often":
        assert len(scores) == 2  # DAPO keeps no silent group.
      std = rewards.std()
      expected = (rewards - rewards.mean()) / (std or 1)
      np.testing.assert_allclose(found, expected, atol=1e-5)
      if std:
        scales.append(1 / std)
    scale = run.metrics[step]["scale"]
    if scales:
      assert scale == pytest.approx(np.mean(scales), rel=1e-5)
    else:
      assert scale is None


def test_a_prompts_group_is_trained_on_once(run):
  for groups in run.groups.values():
    kept = [i for (_, i), group in groups.items() if group[0]["kept"]]
    assert len(kept) == len(set(kept)) <= run.config.num_groups


def test_an_epoch_asks_every_question_at_most_once(run):
  asked = run.config.num_groups * run.config.max_rounds
  steps = 32 // asked  # Of an epoch.
  seen = {}
  for line in run.metrics:
    epoch, step = line["epoch"], line["step"]
    assert (epoch, line["position"]) == (step // steps, step % steps * asked)
    assert all(x[0]["epoch"] == epoch for x in run.groups[step].values())
    ids = {i for _, i in run.groups[step]}
    assert not ids & seen.setdefault(epoch, set())
    seen[epoch] |= ids
  assert len(seen) > 1


def test_the_first_ratio_is_one(run):
  """At any temperature, after redraws, and before several updates."""
  assert max(line["first_ratio"] for line in run.metrics) < 1e-4
  if run.name == "often":  # The later updates are of another policy.
    assert any(line["clip_fraction"] > 0 for line in run.metrics)


def test_nothing_is_compiled_but_at_first_and_for_a_first_bucket(run):
  met = set()
  for step, groups in run.groups.items():
    numbers = [draw for draw, _ in groups]
    sizes = {
      tiny_language.bucket(run.config.num_groups, numbers.count(draw))
      for draw in set(numbers) - {0}
    }
    if step and sizes <= met:
      assert run.compiled[step] == 0, (step, sizes)
    met |= sizes
  # Between steps nothing is, once an evaluation and two saves have been made.
  between = run.total - run.compiled
  assert not between[2:-1].any() or run.config.num_steps < 50
  if run.name != "often":
    assert len({len(groups) for groups in run.groups.values()}) > 4


def test_the_rate_ends_with_the_run(run):
  """The optimizer's own count is every update there was."""
  step, state = tiny_language.state(run.path, run.config)
  assert step == run.config.num_steps
  skipped = sum(line["skipped"] for line in run.metrics)
  updates = step * run.config.epochs * run.config.mini_batches - skipped
  counts = {
    jax.tree_util.keystr(path): int(leaf)
    for path, leaf in jax.tree.flatten_with_path(state.opt_state)[0]
    if "count" in jax.tree_util.keystr(path)
  }
  assert counts
  assert set(counts.values()) == {updates}


def test_schedules_rise_from_above_0_and_end_at_the_last_update(tmp_path):
  for decay in "linear", "cosine", "constant":
    config = tiny_language.config(
      tmp_path, optimizer={"sgd": {}}, clip_norm=0.0, decay=decay
    )
    descent = building.optimizer(config, 10, "config")
    state, rates = descent.init(jnp.zeros(1)), []
    for _ in range(11):
      updates, state = descent.update(jnp.ones(1), state)
      rates.append(-float(updates[0]))
    assert 0 < rates[0] < rates[1] < rates[2] == pytest.approx(0.01)
    assert all(rate > 0 for rate in rates[:10])
    end = 0.01 if decay == "constant" else 0  # Of an eleventh, if there were.
    assert rates[10] == pytest.approx(end, abs=1e-9)


def test_weights_multiply_parts(tmp_path, monkeypatch):
  """.7 of a verifier that always says 1, .3 of one that always says 0."""

  def one() -> answers.Verifier:
    return _One()

  def nil() -> answers.Verifier:
    return _Nil()

  monkeypatch.setattr(answers, "one", one, raising=False)
  monkeypatch.setattr(answers, "nil", nil, raising=False)
  names = [*answers.__all__, "one", "nil"]
  monkeypatch.setattr(answers, "__all__", names)
  config = tiny_language.config(
    tmp_path,
    verifiers={"a": {"one": {}}, "b": {"nil": {}}},
    weights={"a": 0.7, "b": 0.3},
    score="b",
    checked_golds=0,
  )
  experiment = train.build(config)
  _, found = experiment.step(experiment.start())
  assert found["reward"] == pytest.approx(0.7)
  assert (found["reward/a"], found["reward/b"]) == (1, 0)
  assert (found["reward_drawn"], found["all_wrong"]) == (0, 1)
  assert [x["reward"] for x in experiment.samples()] == [0.7] * 16


class _One:
  def __call__(self, text, question):
    return 1.0


class _Nil:
  def __call__(self, text, question):
    return 0.0
