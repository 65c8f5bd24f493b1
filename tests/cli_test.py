"""A user's mistake ends with exit code 2 and one line that says what is right.

Every script runs beside a jax.py that cannot be imported: none of this needs
jax, so --help and mistakes are answered at once.
"""

import os
import pathlib
import pty
import re
import signal
import subprocess
import sys

import pytest

from experiments import cli
from groupstd import hosts

ROOT = pathlib.Path(__file__).parent.parent

MAIN = '''
"""Trains a toy.

  python main.py --config=toy.py:dapo
"""
import time
from absl import flags, logging
from ml_collections import config_flags
from experiments import cli

_CONFIG = config_flags.DEFINE_config_file("config", help_string="what to run")
_WORKDIR = flags.DEFINE_string("workdir", None, "where to write")
_DO = flags.DEFINE_string("do", None, "what to do")

def main(argv):
  config = _CONFIG.value
  do = _DO.value
  if do == "raise":
    raise ValueError("a bug")
  if do == "build":
    with cli.building():
      raise ValueError("`group_size` must be at least 2,\\n got 1.")
  if do == "refuse":
    raise cli.UsageError("another run.")
  if do == "interrupt":
    error = cli.Interrupted("by SIGTERM at step 7")
    error.add_note("process 1 of 2")
    raise error
  if do == "sleep":
    print("asleep", flush=True)
    time.sleep(60)
  if do == "log":
    logging.info("by the way")
    logging.warning("beware")
  if do == "require":
    cli.require(_WORKDIR)
  if do == "progress":
    with cli.progress(10, start=3, description="toy") as advance:
      for _ in range(7):
        advance(1)
        time.sleep(0.05)
  if do == "override":
    import toy
    other = toy.get_config("grpo")
    overrides = config_flags.get_override_values(flags.FLAGS["config"])
    other.update_from_flattened_dict(overrides)
    print(overrides, other.num_prompts, other.method, config.method)
  print("done", config.num_prompts, config.sigma.divide.power)

if __name__ == "__main__":
  import os
  cli.run(main, config=os.environ.get("DEFAULT"))
'''

TOY = """
from ml_collections import config_dict

def get_config(method="dapo"):
  if method not in ("dapo", "grpo"):
    raise ValueError(f"there is no method {method!r}; did you mean dapo?")
  return config_dict.ConfigDict({
    "method": method,
    "num_prompts": 10,
    "rate": 0.5,
    "fast": True,
    "betas": (0.9, 0.99),
    "sigma": {"mask": {}, "divide": {"power": 1.0}},
  })
"""

BROKEN = """
def get_config(how):
  if how == "KeyError":
    return {}["bug"]
  if how == "TypeError":
    return 1 + "bug"
  return how.bug
"""

PLAIN = """
from ml_collections import config_dict

def get_config():
  return config_dict.ConfigDict({"num_prompts": 1})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("cli")
  files = {"main": MAIN.lstrip(), "toy": TOY, "broken": BROKEN, "plain": PLAIN}
  files["jax"] = "raise ImportError('jax is slow to import')"
  for name, text in files.items():
    (folder / f"{name}.py").write_text(text)
  return folder


def _start(folder, *args, default=None, **kwargs) -> subprocess.Popen:
  env = {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
  if default is not None:
    env["DEFAULT"] = default
  return subprocess.Popen(
    [sys.executable, "main.py", *args],
    cwd=folder,
    env={**os.environ, **env},
    text=True,
    **kwargs,
  )


def _run(folder, *args, **kwargs) -> tuple[int, str, str]:
  """Exit code, stdout, stderr."""
  process = _start(
    folder, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs
  )
  out, err = process.communicate(timeout=60)
  return process.returncode, out, err


MISTAKES = {
  "": "--config is missing: it names a config file",
  "--config.num_prompts=3": "--config is missing: it names a config file",
  "--config=toi.py": "--config=toi.py: no such file; did you mean toy.py?",
  "--config=nowhere/toy.py": "--config=nowhere/toy.py: no such file",
  "--config=toy.py:dpao": "no method 'dpao'; did you mean dapo?",
  "--config=plain.py:dapo": "plain.py:dapo: get_config() takes 0 positional",
  "--config=broken.py": "broken.py: get_config() missing 1 required",
  "--config=toy.py --config.num_promts=3": (
    "--config.num_promts=3: config has no field 'num_promts'; did you mean"
    " num_prompts?"
  ),
  "--config=toy.py --config.num_promts 3": "; did you mean num_prompts?",
  "--config=toy.py --noconfig.fats": "no field 'fats'; did you mean fast?",
  "--config=toy.py --config.sigma.devide.power=2": (
    "config.sigma has no field 'devide'; did you mean divide?"
  ),
  "--config=toy.py --config.sigma.divide.pow=2": "did you mean power?",
  "--config=toy.py --config.zzz=1": "'zzz'; there are betas, fast, method,",
  "--config=toy.py --config.rate.x=1": "config.rate has no field 'x'",
  "--config=toy.py --config.num_prompts=abc": "num_prompts=abc: invalid lit",
  "--config=toy.py --config.num_prompts=1e3": "num_prompts=1e3: invalid lit",
  "--config=toy.py --config.fast=maybe": "fast=maybe: ",
  "--config=toy.py --config.sigma=3": "`3` is not a dict",
  "--config.rate=1 --config=toy.py": "before a value for --config",
  "--config=toy.py --workdri=x": "'workdri'. Did you mean: workdir ?",
  "--config=toy.py --cofig.rate=1": "Unknown command line flag 'cofig.rate'",
  "--config=toy.py --do=require": "--workdir is missing: where to write",
  "--config=toy.py config.rate=1": "'config.rate=1' is not an option",
  "--config=toy.py --workdir": "Missing value for flag --workdir",
  "--config=toy.py --do=build": "`group_size` must be at least 2, got 1.",
  "--config=toy.py --do=refuse": "another run.",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(folder, command):
  code, out, err = _run(folder, *command.split())
  assert (code, out) == (2, "")
  assert err.startswith("error: ")
  assert MISTAKES[command] in err
  assert err.endswith("\n")
  assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["--help", "--config=toy.py --help"])
def test_help_shows_the_docstring_and_the_flags(folder, command):
  code, out, err = _run(folder, *command.split())
  assert (code, err) == (0, "")
  for text in ("Trains a toy.", "main.py --config=toy.py:dapo", "what to run"):
    assert text in out
  assert "where to write" in out


BUGS = {
  "--config=toy.py --do=raise": ("ValueError: a bug", "main.py"),
  "--config=broken.py:KeyError": ("KeyError: 'bug'", "broken.py"),
  "--config=broken.py:TypeError": ("TypeError: unsupported", "broken.py"),
  "--config=broken.py:other": ("AttributeError: 'str'", "broken.py"),
}


@pytest.mark.parametrize("command", BUGS)
def test_a_bug_shows_its_traceback(folder, command):
  code, _, err = _run(folder, *command.split())
  assert code == 1
  assert "Traceback" in err
  for text in BUGS[command]:
    assert text in err


def test_overrides_apply_to_other_configs_too(folder):
  code, out, err = _run(
    folder,
    "--config=toy.py:dapo",
    "--config.num_prompts=100",
    "--config.sigma.divide.power=2",
    "--do=override",
  )
  assert (code, err) == (0, "")
  assert out.splitlines() == [
    "{'num_prompts': 100, 'sigma.divide.power': 2.0} 100 grpo dapo",
    "done 100 2.0",
  ]


def test_a_default_config_takes_overrides_and_mistakes(folder):
  args = ("--config.num_prompts=7",)
  assert _run(folder, *args, default="toy.py") == (0, "done 7 1.0\n", "")
  assert _run(folder, *args, "--config=toy.py:grpo", default="nowhere")[0] == 2
  args = ("--config=toy.py:grpo", "--config.num_prompts=7")
  assert _run(folder, *args, default="nowhere") == (0, "done 7 1.0\n", "")
  code, _, err = _run(folder, "--config.num_promts=7", default="toy.py")
  assert code == 2
  assert err == (
    "error: --config.num_promts=7: config has no field 'num_promts'; did you"
    " mean num_prompts?\n"
  )


def test_what_libraries_log_is_shown_from_warnings_up(folder):
  args = ("--config=toy.py", "--do=log")
  code, out, err = _run(folder, *args)
  assert (code, out) == (0, "done 10 1.0\n")
  assert "beware" in err
  assert "by the way" not in err
  _, _, err = _run(folder, *args, "--verbosity=0")
  assert "by the way" in err
  # A builder's ValueError has its traceback with --verbosity=1 only.
  code, _, err = _run(folder, "--config=toy.py", "--do=build", "--verbosity=1")
  assert code == 2
  assert "Traceback" in err
  assert err.splitlines()[-1].startswith("error: `group_size`")


def test_an_interrupt_says_how_to_go_on(folder):
  process = _start(
    folder,
    "--config=toy.py",
    "--do=sleep",
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  assert process.stdout is not None
  assert process.stdout.readline() == "asleep\n"
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 130
  assert err == "interrupted: the same command resumes the run\n"


def test_a_run_that_was_told_to_end_asks_for_another_try(folder):
  code, out, err = _run(folder, "--config=toy.py", "--do=interrupt")
  assert (code, out) == (75, "")
  assert err == (
    "process 1 of 2: interrupted by SIGTERM at step 7: the same command"
    " resumes the run\n"
  )


@pytest.mark.parametrize(
  ("cluster", "others", "message"),
  [
    ("auto", ("a:1", 2, 0), "--cluster=auto finds by itself"),
    ("auto", (None, None, 0), "--cluster=auto finds by itself"),
    ("alone", (None, 2, 0), "--coordinator is missing"),
    ("alone", ("a:1", None, None), "--num_processes is missing"),
    ("alone", ("a:1", 2, None), "--process_id is missing"),
    ("alone", ("a:1", 2, 2), "below --num_processes, got 2 of 2"),
    ("alone", ("a", 2, 1), "host:port of process 0, got 'a'"),
    ("alone", ("a:b", 2, 1), "host:port of process 0, got 'a:b'"),
  ],
)
def test_processes_that_do_not_fit_together_are_refused(
  cluster, others, message
):
  with pytest.raises(cli.UsageError, match=message):
    cli.joined(cluster, *others).__enter__()


def test_a_process_is_alone_by_default():
  with cli.joined("alone", None, None, None):
    assert hosts.count() == 1


def test_progress_is_live_on_a_terminal_and_silent_elsewhere(folder):
  args = ("--config=toy.py", "--do=progress")
  assert _run(folder, *args) == (0, "done 10 1.0\n", "")
  terminal, end = pty.openpty()
  process = _start(folder, *args, stdout=subprocess.PIPE, stderr=end)
  os.close(end)
  shown = b""
  try:
    while piece := os.read(terminal, 4096):
      shown += piece
  except OSError:  # Linux says so when the other end is closed.
    pass
  os.close(terminal)
  out, _ = process.communicate(timeout=60)
  assert (process.returncode, out) == (0, "done 10 1.0\n")
  assert b"toy" in shown
  counts = [int(n) for n in re.findall(rb"(\d+)/10", shown)]
  assert counts == sorted(counts)
  assert counts[0] >= 3
  assert counts[-1] == 10


def test_the_nearest_name_is_suggested_or_all_are_listed():
  names = ["grpo", "dr_grpo", "dapo"]
  assert cli.did_you_mean("dpao", names) == "; did you mean dapo?"
  assert cli.did_you_mean("zzz", names) == "; there are dapo, dr_grpo, grpo"
  assert cli.did_you_mean("zzz", []) == ""
