"""Configs of language models: what is wrong is named, what is right runs."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny_language

from configs import arithmetic
from configs import language as methods
from experiments import cli, parts, train, workdir

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ROOT = pathlib.Path(__file__).parents[1]
METHODS = list(methods._methods(4))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"temperature": 0.0}, "config.temperature must be above 0 .* got 0.0"),
    ({"temperature": float("nan")}, "config.temperature must be above 0"),
    (
      {"verifiers": {"correct": {"nmber": {}}}},
      "config.verifiers.correct has no 'nmber'; did you mean number",
    ),
    (
      {"verifiers": {"correct": {"number": {"which": "best"}}}},
      "config.verifiers.correct.number: `which`",
    ),
    (
      {"tokenizer": {"character": {}}},
      "config.tokenizer has no 'character'; did",
    ),
    ({"tokenizer": {}}, "config.tokenizer must have one entry"),
    pytest.param(
      {"tokenizer": {"characters": {"alphabet": "x"}}},
      "a prompt of 1 to 6 tokens, got none among 32",
      marks=pytest.mark.filterwarnings("ignore:32 of 32 questions"),
    ),
    ({"model": {"widht": 16}}, "config.model: .*'widht'"),
    (
      {"model": {"width": 0}},
      "config.model: `width` must be at least 1, got 0",
    ),
    (
      {"questions": {"jsonl": {"path": "nowhere.jsonl"}}},
      "config.questions.jsonl: .*nowhere.jsonl",
    ),
    (
      {"held_out": {"jsonl": {"path": "nowhere.jsonl"}}},
      "config.held_out.jsonl: .*nowhere.jsonl",
    ),
    (
      {"questions": {"arithmetic": {"digits": 0}}},
      "config.questions.arithmetic: `digits`",
    ),
    (
      {"surrogate": {"cliped": {}}},
      "config.surrogate has no 'cliped'; did you mean clipped",
    ),
    ({"aggregate": {}}, "config.aggregate must have one entry"),
    (
      {"correction": {"truncat": {}}},
      "config.correction has no 'truncat'; did you mean truncate",
    ),
    ({"kl": "k4"}, "config.kl has no 'k4'"),
    ({"kl_coef": -1.0}, "`kl_coef` must be at least 0"),
    (
      {"weights": {"corect": 1.0}},
      "config.*weights.* for correct, got {'corect'",
    ),
    (
      {"weights": {"correct": float("inf")}},
      "config.*weights.* must be finite",
    ),
    ({"score": "right"}, "`score` must be one of correct, got 'right'"),
    (
      {"length_buffer": 5, "weights": {"correct": 1.0, "length": 1.0}},
      "config.length_buffer: `buffer` must be",
    ),
    ({"learning_rate": -1.0}, "config.learning_rate must be at least 0"),
    ({"clip_norm": -1.0}, "config.clip_norm must be at least 0"),
    ({"surrogate": {"token_mean": {}}}, "config.surrogate has no 'token_mean'"),
    ({"kl": "clipped"}, "config.kl has no 'clipped'; there are k1, k2, k3"),
    (
      {"num_groups": 6, "mini_batches": 4, "micro_batches": 1},
      r"config.num_groups must be a multiple of"
      " mini_batches, got 6 and 4",
    ),
    ({"num_groups": 33}, "config.num_groups: .* 1 to 32 prompts, got 33"),
    ({"num_groups": 0}, "`num_groups` must be .* at least 1, got 0"),
    ({"max_rounds": 9}, "config.num_groups: .* 1 to 32 prompts, got 36"),
    (
      {"max_rounds": 2, "max_draws": 2},
      "`max_draws` and `max_rounds` must not",
    ),
    ({"group_size": 1}, "`group_size` must be .* at least 2, got 1"),
    ({"prompt_width": 1}, "config.prompt_width.* 1 to 1 tokens, got none"),
    ({"prompt_width": 0}, "config.prompt_width must be at least 1, got 0"),
    ({"answer_length": 0}, "config.answer_length must be at least 1, got 0"),
    (
      {"rule": {"batch_scaled": {}}},
      "config.sigma must be empty where config.rule",
    ),
    (
      {"sigma": {"divde": {}}},
      "config.sigma has no 'divde'; did you mean divide",
    ),
    (
      {"sigma": {}, "rule": {"batch_scald": {}}},
      "config.rule has no 'batch_scald'; did",
    ),
    ({"decay": "cosin"}, "config.decay must be one of .* got 'cosin'; did you"),
    (
      {"warmup_updates": -1},
      "config.warmup_updates must be at least 0 and finite, got -1",
    ),
    ({"optimizer": {"adamq": {}}}, "config.optimizer has no 'adamq'"),
    ({"epochs": 0}, "config.epochs must be at least 1, got 0"),
    ({"mini_batches": 0}, "config.mini_batches must be at least 1, got 0"),
    (
      {"eval_questions": 33},
      "config.eval_questions: .* 1 to 32 prompts, got 33",
    ),
    ({"eval_questions": 0}, "config.eval_questions must be at least 1, got 0"),
    ({"max_skipped": 0}, "config.max_skipped must be at least 1, got 0"),
    ({"rollouts_share": 1.5}, "config.rollouts_share: `share` must be in"),
    (
      {"report_to": ("wandbb",)},
      "config.report_to has no 'wandbb'; did you mean",
    ),
    (
      {"builder": "langage"},
      "config.builder must be one of .* did you mean language",
    ),
    ({"verifier_workers": -1}, "`num_workers` must be .* got -1"),
  ],
)
def test_a_wrong_field_is_named_before_any_work(fields, message, tmp_path):
  made = tiny_language.config(tmp_path, **fields)
  with pytest.raises(cli.UsageError, match=message):
    train.run(made, tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      {"batch_size": 33},
      "config.warmup.batch_size: .* 1 to 32 prompts, got 33",
    ),
    ({"batch_size": 0}, "config.warmup.batch_size must be at least 1, got 0"),
    ({"decay": "linea"}, "config.warmup.decay must be one of .* did you mean"),
    (
      {"warmup_updates": -1},
      "config.warmup.warmup_updates must be at least 0 and finite, got -1",
    ),
    ({"optimizer": {"adamz": {}}}, "config.warmup.optimizer has no 'adamz'"),
  ],
)
def test_a_wrong_field_of_the_warm_start_is_named(fields, message, tmp_path):
  made = tiny_language.config(tmp_path)
  made.warmup.num_steps = 5
  tiny_language.replace(made.warmup, **fields)
  with pytest.raises(cli.UsageError, match=message):
    train.run(made, tmp_path / "run")


def test_answers_that_no_step_could_hold_are_refused(tmp_path):
  made = tiny_language.config(tmp_path, answer_length=1)
  made.warmup.num_steps = 5
  message = r"config.answer_length: `length` must hold .* got 1: 8 of the 8"
  with pytest.raises(cli.UsageError, match=message):
    train.run(made, tmp_path / "run")
  # Without a warm start nobody needs them.
  made.warmup.num_steps = 0
  train.build(made)


@pytest.mark.slow
def test_a_longer_answer_met_late_is_a_mistake_of_the_config_too(tmp_path):
  made = tiny_language.config(tmp_path)
  made.warmup.num_steps, made.warmup.batch_size = 8, 4
  file = pathlib.Path(made.questions.jsonl.path)
  lines = file.read_text().splitlines()
  found = parts.parts(made)
  with found.pool:  # In the epoch's last batch.
    last = int(found.task(made, found.asked).prompts(7, 4)[0][0])
  record = json.loads(lines[last]) | {"answer": "00000"}
  lines[last] = json.dumps(record)
  file.write_text("\n".join(lines) + "\n")
  with pytest.raises(cli.UsageError, match=r"answer_length: .*step 7"):
    train.run(made, tmp_path / "run")


def test_an_unknown_method_is_refused_with_all_there_are():
  with pytest.raises(ValueError, match=f"{', '.join(METHODS)}, got 'ppo'"):
    arithmetic.get_config("ppo")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_what_it_trains(method, tmp_path):
  # pass@m weighs a group of few right answers, which chance has made.
  made = tiny_language.config(tmp_path, method, group_size=8)
  experiment = train.build(made)
  before = jax.tree.map(np.array, experiment.start().params)
  state, found = experiment.step(experiment.start())
  assert found["nonfinite"] == 0
  assert found["first_ratio"] < 1e-4
  assert found["max_advantage"] > 0
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, state.params)
  moved = max(jax.tree.leaves(moved))
  if made.mini_batches == 1:
    assert found["skipped"] == 0
    # The optimizer's least step: its rate of a third of 0.01, of Adam's 1.
    assert moved == pytest.approx(0.01 / 3, rel=0.01)
    assert found["clip_fraction"] == 0  # No ratio has left 1.
  else:
    assert moved > 0.01 / 3
    # From the second update on GSPO's bounds of 3e-4 bind.
    assert found["clip_fraction"] > 0 or method != "gspo"
  dapo = method.startswith("dapo")
  groups = made.num_groups - (found["left_silent"] if dapo else 0)
  assert found["kept"] == groups
  assert bool(found["kl"]) is False  # Nothing has moved from the reference.


def command(module, *options):
  return subprocess.run(
    [sys.executable, "-m", f"experiments.{module}", *options],
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


SMALL = [
  "--config.model.width=16",
  "--config.model.num_layers=1",
  "--config.model.num_heads=1",
  "--config.model.hidden=32",
  "--config.num_groups=4",
  "--config.micro_batches=4",
  "--config.group_size=4",
  "--config.eval_questions=8",
  "--config.num_steps=3",
  "--config.warmup_updates=1",
  "--config.warmup.num_steps=3",
  "--config.warmup.warmup_updates=1",
  "--config.warmup.batch_size=8",
]


@pytest.mark.slow
def test_the_command_for_one_s_own_file_trains(tmp_path):
  """Two files, and nothing else of the config but its size."""
  for name, start in ("train", 0), ("test", 50):
    rows = [
      {"prompt": f"What is {i} + 1?", "answer": i + 1}
      for i in range(start, start + 40)
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / f"{name}.jsonl").write_text(text)
  done = command(
    "main",
    "--config=configs/jsonl.py:grpo",
    f"--workdir={tmp_path / 'own'}",
    f"--config.questions.jsonl.path={tmp_path / 'train.jsonl'}",
    f"--config.held_out.jsonl.path={tmp_path / 'test.jsonl'}",
    *SMALL,
  )
  assert done.returncode == 0, done.stderr
  assert "accuracy" in done.stdout
  lines = workdir.read_metrics(tmp_path / "own")
  assert [line["step"] for line in lines] == [0, 1, 2, 3]
  warm = workdir.read_metrics(tmp_path / "own" / "warmup")
  assert warm[2]["loss"] < warm[0]["loss"]
  # The same words, but for another file: another run.
  done = command(
    "main",
    "--config=configs/jsonl.py:grpo",
    f"--workdir={tmp_path / 'own'}",
    "--config.questions.jsonl.path=no.jsonl",
  )
  assert done.returncode == 2
  assert done.stderr.startswith("error: config.questions.jsonl: ")
  assert "no.jsonl" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("reasoning_gym") is None,
  reason="reasoning-gym is not installed: pip install 'groupstd[lm]'",
)
def test_the_command_for_reasoning_gym_trains(tmp_path):
  done = command(
    "main",
    "--config=configs/reasoning_gym.py:dapo",
    f"--workdir={tmp_path / 'gym'}",
    "--config.questions.reasoning_gym.name=gcd",
    "--config.questions.reasoning_gym.size=200",
    *SMALL,
    "--config.warmup.num_steps=0",
  )
  assert done.returncode == 0, done.stderr
  config = workdir.read_config(tmp_path / "gym")
  # What is said of the questions holds for those held out.
  assert config.held_out.reasoning_gym.name == "gcd"
  assert config.held_out.reasoning_gym.size == 1_000  # Its own.
  *lines, last = workdir.read_metrics(tmp_path / "gym")
  assert len(lines) == 3
  assert 0 <= last["accuracy"] <= 1


def test_golds_that_their_own_verifier_calls_wrong_are_found(tmp_path):
  made = tiny_language.config(tmp_path)
  file = pathlib.Path(made.questions.jsonl.path)
  lines = [json.loads(line) for line in file.read_text().splitlines()]
  lines[3]["answer"] = "one"
  file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  message = "config.questions: the right answer must score 1 .* 1 of 32 .* 3"
  with pytest.raises(cli.UsageError, match=message):
    train.run(made, tmp_path / "run")
  made.checked_golds = 0
  train.build(made).close()
