"""Lines come back as they went in, and a file is cut where it is told to be."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import streams


def test_what_goes_in_comes_back_exactly_and_is_json(tmp_path):
  def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")

  floats = [0.1, 1 / 3, 5e-324, -0.0, 1.7976931348623157e308, 2.0**60]
  line = {
    "floats": floats,
    "array": np.array([0.1, 0.2], np.float32),
    "jax": jnp.float32(0.1),
    "half": jnp.bfloat16(0.1),
    "int": np.int64(2**62),
    "nested": {"text": "σ\u2028\n", "flag": np.bool_(True), "none": None},
    "broken": [float("nan"), jnp.inf, 1.0],
  }
  with streams.Streams(tmp_path, {"a.jsonl": 0}) as files:
    files.append("a.jsonl", [line])
  json.loads((tmp_path / "a.jsonl").read_bytes(), parse_constant=refuse)
  (read,) = streams.read(tmp_path / "a.jsonl")
  assert read == {
    "floats": floats,
    "array": np.array([0.1, 0.2], np.float32).tolist(),
    "jax": float(np.float32(0.1)),
    "half": float(jnp.bfloat16(0.1)),
    "int": 2**62,
    "nested": {"text": "σ\u2028\n", "flag": True, "none": None},
    "broken": [None, None, 1.0],
  }
  assert np.signbit(read["floats"][3])


def test_each_file_is_cut_at_its_own_length(tmp_path):
  with streams.Streams(tmp_path, {"a": 0, "b": 0}) as files:
    files.append("a", [{"i": 0}])
    files.append("b", ({"i": i} for i in range(3)))
    lengths = files.sync()
    for name in ("a", "b"):
      files.append(name, [{"i": 9}])
  assert lengths == {"a": 9, "b": 27}
  with streams.Streams(tmp_path, lengths) as files:
    assert files.sync() == lengths
    files.append("b", [{"i": 3}])
  assert list(streams.read(tmp_path / "a")) == [{"i": 0}]
  assert [line["i"] for line in streams.read(tmp_path / "b")] == [0, 1, 2, 3]


def test_a_line_can_be_read_at_once_and_whole_lines_only(tmp_path):
  with streams.Streams(tmp_path, {"a": 0}) as files:
    files.append("a", [{"i": 0}])
    assert list(streams.read(tmp_path / "a")) == [{"i": 0}]
    (tmp_path / "a").write_bytes(b'{"i": 0}\n{"i": 1')
    assert list(streams.read(tmp_path / "a")) == [{"i": 0}]


def test_a_line_that_is_none_writes_nothing_of_its_batch(tmp_path):
  with streams.Streams(tmp_path, {"a": 0}) as files:
    with pytest.raises(TypeError, match="not JSON serializable"):
      files.append("a", [{"i": 0}, {"i": {1, 2}}])
    assert files.sync() == {"a": 0}


def test_what_is_lost_is_said(tmp_path):
  with streams.Streams(tmp_path, {"a": 0}) as files:
    files.append("a", [{"i": 0}])
  for lengths in ({"a": 9}, {"a": 0, "b": 0}):
    streams.check(tmp_path, lengths)
  for name, length, lost in (("a", 11, 2), ("b", 5, 5)):
    with pytest.raises(ValueError, match=f"{name} lacks {lost} bytes"):
      streams.check(tmp_path, {name: length})
