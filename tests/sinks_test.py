"""Trackers get each step once, and nothing that they do reaches the run.

The trackers are stand-ins with the interface of the packages; where the real
tensorboardX is installed its files are read back too.
"""

import logging
import pathlib
import sys
import types

import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from experiments import cli, sinks

CONFIG = ml_collections.ConfigDict({"rate": 0.5, "sigma": {"mask": {}}})


class Fake(types.ModuleType):
  """A package whose runs write into `rows`: (step, name) → values, in order."""

  def __init__(self, name: str):
    super().__init__(name)
    self.rows: dict[tuple[int, str], list[float]] = {}
    self.opened: list[dict] = []
    self.closed: list[dict] = []
    self.broken: set[str] = set()

  def _act(self, what: str) -> None:
    if what in self.broken:
      raise ConnectionError("no network")

  # tensorboardX
  def SummaryWriter(self, logdir, purge_step, **options):
    self._act("open")
    self.opened.append({"logdir": logdir, **options})
    for step, name in list(self.rows):
      if step >= purge_step:
        del self.rows[step, name]
    return self

  def add_scalar(self, tag, scalar_value, global_step):
    self._act("log")
    self.rows.setdefault((global_step, tag), []).append(scalar_value)

  def close(self):
    self._act("close")
    self.closed.append({})

  # wandb and trackio
  def init(self, **arguments):
    self._act("open")
    self.opened.append(arguments)
    return self

  def log(self, data, step):
    for name, value in data.items():
      self.add_scalar(name, value, step)

  def finish(self, **arguments):
    self._act("close")
    self.closed.append(arguments)


@pytest.fixture
def fakes(monkeypatch) -> dict[str, Fake]:
  fakes = {
    "tensorboard": Fake("tensorboardX"),
    "wandb": Fake("wandb"),
    "trackio": Fake("trackio"),
  }
  for fake in fakes.values():
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
  return fakes


def run(path: pathlib.Path, names, start: int, end: int, offset=0.0) -> None:
  with sinks.Sinks(names, path, CONFIG, start) as report:
    for step in range(start, end):
      report.log(step, {"loss": offset + step})


ALL = ("tensorboard", "wandb", "trackio")


def test_each_gets_every_number_and_nothing_else(fakes, tmp_path):
  metrics = {
    "float": 0.1,
    "int": 3,
    "flag": True,
    "numpy": np.float32(0.5),
    "jax": jnp.float32(0.25),
    "half": jnp.bfloat16(2.0),
    "truth": np.bool_(False),
    "nan": float("nan"),
    "text": "0.5",
    "nothing": None,
    "array": np.ones(1),
    "list": [1.0],
    "dict": {"a": 1.0},
    "complex": 1j,
    "string": np.str_("1"),
  }
  with sinks.Sinks(ALL, tmp_path, CONFIG) as report:
    report.log(7, metrics)
  for fake in fakes.values():
    assert len(fake.opened) == len(fake.closed) == 1
    assert {step for step, _ in fake.rows} == {7}
    rows = {name: values for (_, name), values in fake.rows.items()}
    assert np.isnan(rows.pop("nan"))
    assert rows == {
      "float": [0.1],
      "int": [3.0],
      "flag": [1.0],
      "numpy": [0.5],
      "jax": [0.25],
      "half": [2.0],
      "truth": [0.0],
    }
    assert all(type(value) is float for (value,) in rows.values())


def test_a_resumed_run_goes_on_without_a_step_twice(fakes, tmp_path):
  """It had got to 20 when it died, and resumes at 15; then again at its end."""
  run(tmp_path, ALL, 0, 20)
  run(tmp_path, ALL, 15, 30, offset=100)
  run(tmp_path, ALL, 29, 30, offset=100)
  for name, fake in fakes.items():
    rows = {step: values for (step, _), values in fake.rows.items()}
    assert sorted(rows) == list(range(30))
    assert {len(values) for values in rows.values()} == {1}
    # TensorBoard can take steps back, a tracker keeps what it got.
    kept = 15 if name == "tensorboard" else 20
    assert [rows[step][0] for step in range(30)] == [
      *range(kept),
      *range(100 + kept, 130),
    ]


def test_a_folder_is_one_run_of_the_tracker_and_two_are_two(fakes, tmp_path):
  for folder in ("a", "a", "b"):
    (tmp_path / folder).mkdir(exist_ok=True)
    run(tmp_path / folder, ALL, 0, 1)
  for name, key in ("wandb", "id"), ("trackio", "name"):
    first, again, other = fakes[name].opened
    assert first == again
    assert first[key] != other[key]
    assert first[key].startswith("a-")
    assert first["config"] == CONFIG.to_dict()
    assert first["resume"] == "allow"
  # A new run in the place of one that was removed is another.
  (tmp_path / "a" / "wandb.json").unlink()
  run(tmp_path / "a", ["wandb"], 0, 1)
  assert fakes["wandb"].opened[-1]["id"] != fakes["wandb"].opened[0]["id"]
  assert len(fakes["wandb"].rows[0, "loss"]) == 3


def test_a_project_may_be_named(fakes, tmp_path, monkeypatch):
  monkeypatch.delenv("WANDB_PROJECT", raising=False)
  monkeypatch.setenv("TRACKIO_PROJECT", "mine")
  run(tmp_path, ALL, 0, 1)
  assert fakes["wandb"].opened[0]["project"] == "groupstd"
  assert fakes["trackio"].opened[0]["project"] == "mine"


def test_a_tracker_that_fails_is_warned_of_once_and_counted(
  fakes, tmp_path, caplog
):
  with sinks.Sinks(ALL, tmp_path, CONFIG) as report:
    for step in range(10):
      for name in ("wandb", "tensorboard"):
        fakes[name].broken = {"log"} if 3 <= step < 7 else set()
      report.log(step, {"loss": step})
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2
    for name in ("wandb", "tensorboard"):
      assert f"{name} failed, the run goes on: ConnectionError" in str(said)
    assert report.failures == {"wandb": 4, "tensorboard": 4}
    fakes["trackio"].broken = {"close"}
  assert report.failures == {"wandb": 4, "tensorboard": 4, "trackio": 1}
  said = [r.getMessage() for r in caplog.records[2:]]
  assert len([text for text in said if "metrics.jsonl has them all" in text])
  assert [step for step, _ in fakes["trackio"].rows] == list(range(10))
  for name in ("wandb", "tensorboard"):
    assert [step for step, _ in fakes[name].rows] == [0, 1, 2, 7, 8, 9]


def test_the_tracker_learns_that_a_run_failed(fakes, tmp_path):
  with (
    pytest.raises(ZeroDivisionError),
    sinks.Sinks(ALL, tmp_path, CONFIG),
  ):
    raise ZeroDivisionError
  assert fakes["wandb"].closed == [{"exit_code": 1}]
  run(tmp_path, ALL, 0, 1)
  assert fakes["wandb"].closed[1:] == [{}]
  assert [len(fake.closed) for fake in fakes.values()] == [2, 2, 2]


def test_tensorboard_is_off_without_a_word_above_info(
  monkeypatch, tmp_path, caplog
):
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  with caplog.at_level(logging.INFO, logger="absl"):
    sinks.check(())
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "tensorboard is off: tensorboardX cannot" in caplog.text
  run(tmp_path, (), 0, 3)
  assert not list(tmp_path.iterdir())


def test_tensorboard_is_on_where_it_is_installed(fakes, tmp_path):
  run(tmp_path, (), 0, 3)
  assert [step for step, _ in fakes["tensorboard"].rows] == [0, 1, 2]
  assert fakes["tensorboard"].opened[0]["logdir"] == str(
    tmp_path / "tensorboard"
  )
  assert not fakes["wandb"].opened
  assert not fakes["trackio"].opened


@pytest.mark.parametrize("name", ALL)
def test_what_is_asked_for_must_be_installed(fakes, monkeypatch, name):
  package = fakes[name].__name__
  sinks.check([name])
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(cli.UsageError, match=f"'{name}'.*pip install {package}"):
    sinks.check([name])


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("wanbd", "no 'wanbd'; did you mean wandb?"),
    ("mlflow", "no 'mlflow'; there are tensorboard, trackio, wandb"),
  ],
)
def test_an_unknown_name_is_refused(name, message):
  with pytest.raises(cli.UsageError) as error:
    sinks.check(["tensorboard", name])
  assert message in str(error.value)


def test_what_does_not_start_is_refused_and_closes_the_others(fakes, tmp_path):
  fakes["trackio"].broken = {"open"}
  with pytest.raises(
    cli.UsageError, match=r"trackio does not start: .*network"
  ):
    sinks.Sinks(ALL, tmp_path, CONFIG)
  assert len(fakes["tensorboard"].closed) == len(fakes["wandb"].closed) == 1
  assert not (tmp_path / "trackio.json").exists()


def test_real_files_are_whole_and_purged(tmp_path):
  """TFRecords of the events, read back by the package's own schema."""
  pytest.importorskip("tensorboardX")
  from tensorboardX.proto import event_pb2

  run(tmp_path, ["tensorboard"], 0, 20)
  run(tmp_path, ["tensorboard"], 15, 30, offset=100)
  shown = {}
  for file in sorted((tmp_path / "tensorboard").iterdir()):
    content = file.read_bytes()
    while content:
      size = int.from_bytes(content[:8], "little")
      event = event_pb2.Event.FromString(content[12 : 12 + size])
      content = content[16 + size :]
      if event.session_log.status == event_pb2.SessionLog.START:
        shown = {s: v for s, v in shown.items() if s < event.step}
      for value in event.summary.value:
        assert event.step not in shown
        shown[event.step] = value.simple_value
  assert list(shown) == list(range(30))
  assert list(shown.values()) == [*range(15), *range(115, 130)]
