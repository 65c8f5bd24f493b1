"""A run's evaluation agrees with what the run said, and with exact counts."""

from fractions import Fraction
import json
import math
import os
import pathlib
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest
import tiny_language

from experiments import cli, evaluate, train, workdir
from groupstd import tasks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_quickly")]

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory, compiled_quickly):
  path = tmp_path_factory.mktemp("evaluated")
  config = tiny_language.config(path, num_steps=10, checkpoint_every=5)
  config.warmup.num_steps = 40
  train.run(config, path / "run")
  return path / "run"


@pytest.fixture
def flag():
  """Sets flags for one test, and gives `evaluate` those of a command."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["pytest"])
  with flagsaver.flagsaver(run=None):
    yield flagsaver.flagsaver


def found(path):
  config = workdir.read_config(path)
  config.mesh.fsdp = 64  # A pod that is not here now.
  return evaluate.evaluate(str(path), config)


def test_every_number_is_that_of_what_was_drawn(run, flag, monkeypatch):
  """pass@m = 1 − C(n−k, m)/C(n, m), by fractions, for each difficulty."""
  verdicts, check = [], tasks.check_scores

  def recording(*args):
    verdicts.append((args[1], check(*args)))
    return verdicts[-1][1]

  monkeypatch.setattr(tasks, "check_scores", recording)
  with flag(samples=6, questions=16, batch=5, seed=3):
    step, rows = found(run)
  assert step == 10
  greedy, drawn = {}, {}
  for ids, verdict in verdicts:
    rows_of = drawn if verdict.scores.shape[1] == 6 else greedy
    for i, scores in zip(np.asarray(ids).tolist(), verdict.scores, strict=True):
      rows_of.setdefault(
        i, scores
      )  # The last batch is filled up with the first.
  assert set(greedy) == set(drawn) == set(range(16))
  bits = [len(f"{i + 2:b}") - 1 for i in range(16)]
  labels = {
    f"{n} bits": [i for i in range(16) if bits[i] == n] for n in set(bits)
  }
  assert set(rows) == {"all", *labels}
  for label, chosen in {"all": range(16), **labels}.items():
    row, k = rows[label], [int(drawn[i].sum()) for i in chosen]
    assert row["questions"] == len(k)
    assert row["greedy"] == pytest.approx(np.mean([greedy[i] for i in chosen]))
    columns = {"mean@6": [Fraction(x, 6) for x in k]}
    for m in 2, 4:
      columns[f"pass@{m}"] = [
        1 - Fraction(math.comb(6 - x, m), math.comb(6, m)) for x in k
      ]
    for name, values in columns.items():
      mean = sum(values) / len(values)
      assert row[name] == pytest.approx(float(mean), rel=1e-12)
      if len(values) > 1:
        squares = sum((x - mean) ** 2 for x in values) / (len(values) - 1)
        error = math.sqrt(squares / len(values))
        assert row[f"{name}_error"] == pytest.approx(error, rel=1e-9)
    assert row["unscored"] == 0
    assert 0 <= row["truncated"] <= 1
  assert rows["all"]["mean@6"] < rows["all"]["pass@2"] < rows["all"]["pass@4"]
  assert not set(rows["all"]) & {"pass@8", "pass@6"}


def test_the_greedy_accuracy_is_the_run_s_own(run, flag):
  last = workdir.read_metrics(run)[-1]
  with flag(samples=2, questions=16, batch=16):
    _, rows = found(run)
  assert rows["all"]["greedy"] == last["accuracy"]
  for label, row in rows.items():
    if label != "all":
      assert row["greedy"] == pytest.approx(last[f"accuracy/{label}"])


def test_a_step_names_its_checkpoint_and_a_seed_its_draws(run, flag):
  with flag(samples=4, questions=16, batch=16, step="5"):
    step, first = found(run)
    assert step == 5
    assert found(run)[1] == first
    with flag(seed=1):
      assert found(run)[1] != first
    with flag(temperature=1e-3):
      # So cold a draw is the likeliest.
      cold = found(run)[1]["all"]
      assert cold["mean@4"] == pytest.approx(cold["greedy"])
  with (
    flag(questions=16, step="7"),
    pytest.raises(cli.UsageError, match="no whole checkpoint of step 7"),
  ):
    found(run)
  with flag(questions=33), pytest.raises(cli.UsageError, match="1 to 32"):
    found(run)


def test_the_program_prints_a_table_and_writes_it(run, tmp_path):
  out = tmp_path / "new" / "table.json"
  options = ["--samples=4", "--questions=16", "--batch=16", f"--out={out}"]
  done = subprocess.run(
    [sys.executable, "-m", "experiments.evaluate", f"--run={run}", *options],
    cwd=ROOT,
    env={
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
      "COLUMNS": "200",
    },
    capture_output=True,
    text=True,
    check=True,
  )
  table = json.loads(out.read_text())
  assert (table["run"], table["step"]) == (str(run), 10)
  assert table["rows"]["all"]["questions"] == 16
  for name in "greedy", "mean@4", "pass@2", "pass@4", "2 bits", "all":
    assert name in done.stdout
  shown = f"{100 * table['rows']['all']['pass@4']:.1f}"
  assert shown in done.stdout


def test_a_scalar_run_is_refused(tmp_path):
  (tmp_path / "config.json").write_text('{"builder": "scalar"}')
  done = subprocess.run(
    [sys.executable, "-m", "experiments.evaluate", f"--run={tmp_path}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert done.stderr.startswith("error: --run must be a language model's")
  assert len(done.stderr.splitlines()) == 1
