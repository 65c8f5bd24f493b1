"""Tests run on eight virtual CPU devices, in float32 unless they say x64."""

import os
import pathlib

from absl import flags
import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

_set_flag = flags.FlagValues.__setitem__


def _set_again(values, name, flag):
  flag.allow_override = True
  _set_flag(values, name, flag)


# Each experiment is a program, and they have flags of the same names; here they
# meet in one process.
flags.FlagValues.__setitem__ = _set_again


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


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
  """A module's programs are compiled once a session, whoever builds them."""
  names = {
    "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "xla"),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }
  before = {name: getattr(jax.config, name) for name in names}
  for name, value in names.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def compiled_quickly(compiled_once):
  """The same, and hardly optimized: for runs of few steps."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
