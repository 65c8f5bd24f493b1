"""Tests run on eight virtual CPU devices, in float32 unless they say x64."""

import os
import pathlib

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def x64():
  """Double precision for one test."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def external_data() -> pathlib.Path:
  """Others' files, which this repository does not hold."""
  root = os.environ.get("GROUPSTD_TEST_DATA")
  if not root:
    pytest.skip("GROUPSTD_TEST_DATA names no folder with others' data")
  return pathlib.Path(root)
