"""The card says what the theory does, of any operation and difficulty.

`experiments.card` takes shorter ways than `groupstd.theory` (polynomials, every
size at once); here each number is held against the theory's own. The command
is run as users run it.
"""

import functools
import json
import math
import os
import pathlib
import pty
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import card
from groupstd import objectives, sigma, theory

ROOT = pathlib.Path(__file__).parent.parent
PS = np.array([0.0, 0.02, 0.3, 0.35, 0.9, 1.0])
PROMPTS = np.array([3, 1, 4, 1, 5, 9])
DIFFICULTY = card.Difficulty("toy", PS, PROMPTS)

METHODS = {
  "grpo": card.Method("grpo", "", sigma.grpo(), 8),
  "dr_grpo": card.Method("dr_grpo", "", sigma.dr_grpo(), 5),
  "dapo": card.Method("dapo", "", sigma.dapo(), 8, max_draws=4),
  "max_rl": card.Method("max_rl", "", sigma.max_rl(), 6),
  "pass_at": card.Method("pass_at", "", sigma.pass_at(3), 8),
  "table": card.Method("table", "", sigma.table([3.0, -1.0, 0.5, 2.0]), 5),
  "pair": card.Method("pair", "", sigma.divide(power=0.5), 2, max_draws=3),
}


@functools.cache
def _explained(name: str) -> dict[str, Any]:
  return card.explain(METHODS[name], DIFFICULTY)


@pytest.fixture(params=METHODS)
def explained(request):
  return METHODS[request.param], _explained(request.param)


def test_curves_are_the_theorys(explained):
  method, found = explained
  size, draws = method.group_size, method.max_draws
  for name, op, n in (
    ("op", method.op, draws),
    ("grpo", sigma.grpo(), 1),
    ("dr_grpo", sigma.dr_grpo(), 1),
  ):
    weight = objectives.redrawn_weight(op, found["p"], size, n)
    scale = float(abs(weight).max())
    np.testing.assert_allclose(
      found["objective_weight"][name], weight, rtol=0, atol=1e-12 * scale
    )
    if n == 1:
      objective = objectives.objective(sigma.rule(op), found["p"], size)
      np.testing.assert_allclose(
        found["objective"][name], objective, rtol=0, atol=1e-12 * scale
      )
      with np.errstate(divide="ignore", invalid="ignore"):
        fidelity = theory.fidelity(op, found["p"][1:-1], size)
      shown = found["fidelity"][name][1:-1]
      known = np.isfinite(shown)
      # Left out: where c is 0, or the operation knows no other size.
      vanishes = abs(weight[1:-1]) < 1e-8 * scale
      assert (known | vanishes | np.isnan(fidelity)).all()
      np.testing.assert_allclose(shown[known], fidelity[known], rtol=1e-6)
  moments = np.arange(1, size) / size * np.arange(size - 1, 0, -1) / size
  np.testing.assert_allclose(
    found["weight"]["op"] * moments,
    theory.gain(method.op, size)[1:-1],
    atol=1e-12,
  )


@pytest.mark.parametrize("draws", [2, 4])
def test_a_redrawn_objective_is_the_integral_of_its_weight(draws):
  """F(p) = ∫₀^p c_G·(1 − s^N)/(1 − s), which no Bernstein form gives."""
  method = card.Method("dapo", "", sigma.dapo(), 8, max_draws=draws)
  found = card.explain(method, DIFFICULTY)
  x, w = np.polynomial.legendre.leggauss(20)  # Exact up to degree 39 ≥ 30.
  for i in 20, 77, 200:
    p = found["p"][i]
    at = p * (x + 1) / 2
    weight = objectives.redrawn_weight(method.op, at, 8, draws)
    assert found["objective"]["op"][i] == pytest.approx(
      p / 2 * (w @ weight), rel=1e-12
    )


def test_a_cut_polynomial_is_exact_too():
  """G·N = 1200, of which 554 Chebyshev points are taken."""
  method = card.Method("dapo", "", sigma.dapo(), 300, max_draws=4)
  found = card.explain(method, DIFFICULTY)
  weight = objectives.redrawn_weight(method.op, found["p"], 300, 4)
  np.testing.assert_allclose(
    found["objective_weight"]["op"],
    weight,
    rtol=0,
    atol=1e-11 * float(weight.max()),
  )


def test_every_share_is_the_theorys(explained):
  method, found = explained
  size, draws = method.group_size, method.max_draws
  by, summary = found["by_difficulty"], found["summary"]
  if method.name != "table":
    fidelity = theory.fidelity(method.op, by["centres"], size)
    np.testing.assert_allclose(by["fidelity"], fidelity, rtol=1e-9)
  bins = np.array([0, 0, 3, 3, 9, 9])  # 0.3 and 0.9 begin theirs.
  select = np.arange(10)[:, None] == bins
  update = theory.expected_update(method.op, PS, size, draws)
  np.testing.assert_allclose(
    by["mass"]["op"], theory.mass_share(update, PROMPTS, select), atol=1e-12
  )
  shares = PROMPTS / PROMPTS.sum()
  np.testing.assert_allclose(by["prompts"], select @ shares)
  silent = theory.silent_rate(PS, size)
  drawn = theory.expected_draws(PS, size, draws)
  assert summary["silent"] == pytest.approx(shares @ silent)
  assert summary["left_silent"] == pytest.approx(shares @ silent**draws)
  assert summary["rollouts_per_rollout_used"] == pytest.approx(shares @ drawn)
  for name, values in ("silent", silent), ("draws", drawn):
    for i in 0, 3, 9:
      mean = np.average(values[bins == i], weights=PROMPTS[bins == i])
      assert by[name][i] == pytest.approx(mean)
    assert np.isnan(by[name][5])  # A bin without a prompt.
  for g, share in zip(*found["silent"].values(), strict=True):
    assert share == pytest.approx(shares @ theory.silent_rate(PS, int(g)))
  assert size in found["silent"]["group_size"]
  assert found["difficulty"]["never"] == shares[0]
  assert found["difficulty"]["always"] == shares[-1]


def test_group_sizes_are_the_smallest_that_do():
  """And at p = 0.05 GRPO's are the table's of arXiv:2607.00152."""
  by = _explained("max_rl")["by_difficulty"]
  for fidelity, sizes in by["group_size"].items():
    expected = theory.required_group_size(
      sigma.max_rl(), by["centres"][[0, 3, 9]], float(fidelity), 128
    )
    np.testing.assert_array_equal(sizes[[0, 3, 9]], expected)
  # 1 at once, but not before there is a weight.
  by = _explained("pass_at")["by_difficulty"]
  assert by["group_size"]["0.99"].tolist() == [4] * 10
  sizes = _explained("grpo")["by_difficulty"]["group_size"]
  for fidelity, published in ("0.9", 42), ("0.95", 69), ("0.99", 273):
    assert sizes[fidelity][[0, 9]].tolist() == [published] * 2


def test_a_size_out_of_reach_is_none():
  """φ = (1 − 1/G)(1 − 30/G) reaches 0.9 at G = 310, 0.99 beyond 3000."""

  def late(stats):
    return sigma.Weight(1 - 30 / stats.size)

  found = card.explain(card.Method("late", "", late, 8), DIFFICULTY)
  sizes = found["by_difficulty"]["group_size"]
  assert sizes["0.9"].tolist() == [310] * 10
  assert np.isnan(sizes["0.99"]).all()


def test_big_math_at_8():
  """44.3 % silent by the closed form, 43.1 % by the log (arXiv:2607.00152)."""
  found = card.explain(METHODS["grpo"], card.big_math())
  summary = found["summary"]
  assert round(summary["silent"], 3) == 0.443
  assert round(summary["silent_unbiased"]["value"], 3) == 0.431
  assert found["difficulty"]["prompts"] == 215_608
  # √(G − 1) over the middle's: 1.43 at G = 8.
  assert summary["extreme_over_middle"] == pytest.approx([1.43] * 2, abs=5e-3)
  plan = found["plan"]
  assert plan["group_size"].sum() <= 8 * card.PLANNED
  update = [
    float(theory.expected_update(sigma.grpo(), p, int(g))) if g > 1 else 0.0
    for p, g in zip(plan["p"], plan["group_size"], strict=True)
  ]
  alike = theory.expected_update(sigma.grpo(), plan["p"], 8)
  gain = np.sum(update) / alike.sum() - 1
  assert plan["gain"] == pytest.approx(gain, abs=1e-8)
  assert 0 < plan["gain"] <= plan["gain_at_most"] + 1e-12
  # A silent prompt gets nothing, and the plan one p for each hundredth.
  assert not plan["group_size"][(plan["p"] == 0) | (plan["p"] == 1)].any()
  assert np.mean(plan["p"]) == pytest.approx(
    found["difficulty"]["mean"], abs=5e-3
  )


def test_replacing_costs_one_over_the_kept_share():
  method = card.Method("dapo", "", sigma.dapo(), 8, max_rounds=3)
  found = card.explain(method, DIFFICULTY)
  silent = found["summary"]["silent"]
  assert found["summary"]["left_silent"] == pytest.approx(silent**3)
  kept = (1 - silent**3) / sum(silent**i for i in range(3))
  used = found["summary"]["rollouts_per_rollout_used"]
  assert used == pytest.approx(1 / kept)
  assert found["drops_silent"]


def test_a_weight_that_is_none_is_an_error_that_names_k():
  def broken(stats):
    return sigma.Weight(jnp.where(stats.mean == 0.25, jnp.nan, 1.0))

  with pytest.raises(ValueError, match=r"finite .* k = \[2\] of 8 right"):
    card.explain(card.Method("broken", "", broken, 8), DIFFICULTY)
  with pytest.raises(ValueError, match=r"k = \[1, 2\] of 3 right"):
    card.explain(card.Method("pass", "", sigma.pass_at(3), 3), DIFFICULTY)
  with pytest.raises(ValueError, match="at least 2, got 1"):
    card.explain(card.Method("lone", "", sigma.grpo(), 1), DIFFICULTY)


# -----------------------------------------------------------------------------
# Files
# -----------------------------------------------------------------------------

FILES = {
  "k,n\n1,4\n0,3\n2,8\n": "pairs",
  "1,4\n0,3\n2,8\n": "pairs",
  "# a log\n\ufeffn,prompt,k\n4,a,1\n\n3,b,0\n8,c,2\n": "pairs",
  "K , N\r\n1, 4\r\n0,3\r\n2,8\r\n": "pairs",
  "0.25\n0\n.25\n": "rates",
  "rate\n0.25\n0\n2.5e-1\n": "rates",
  "prompt,rate\na,0.25\nb,0\nc,0.25\n": "rates",
}


@pytest.mark.parametrize("text", FILES)
def test_forms_of_a_file(tmp_path, text):
  (tmp_path / "log.csv").write_text(text.replace("# a log\n\ufeff", "\ufeff"))
  found = card.read_difficulty(str(tmp_path / "log.csv"))
  assert (found.p.tolist(), found.prompts.tolist()) == ([0, 0.25], [1, 2])
  assert found.source == "log.csv"
  if FILES[text] == "rates":
    assert found.counts is None
  else:
    assert found.counts is not None
    assert np.transpose(found.counts).tolist() == [
      [0, 3, 1],
      [1, 4, 1],
      [2, 8, 1],
    ]


WRONG_FILES = {
  "": "must have a line for each prompt",
  "k,n\n": "must have a line for each prompt",
  "45\n60\n": r"line 1 must hold a rate in \[0, 1\], got '45'",
  "0.5\nnan\n": "line 2 must hold a rate",
  "0.5\n\nhalf\n": "line 3 must hold a rate .* got 'half'",
  "k,n\n1,4\n5,4\n": "line 3 must hold whole numbers k and n, .* got '5,4'",
  "1,4\n-1,4\n": "line 2 must hold whole numbers",
  "1,4\n0,0\n": "line 2 must hold whole numbers",
  "1,4\n0.5,4\n": "line 2 must hold whole numbers",
  "1,4\n1,inf\n": "line 2 must hold whole numbers",
  "1,4\n1\n": "line 2 must hold whole numbers",
  "1,2,3\n": "there are 3",
  "correct,total\n1,4\n": "named k and n, or rate, got 'correct, total'",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_what_is_wrong_with_a_file_is_said(tmp_path, text):
  (tmp_path / "log.csv").write_text(text)
  with pytest.raises(ValueError, match=WRONG_FILES[text]):
    card.read_difficulty(str(tmp_path / "log.csv"))


def test_a_misspelt_file_is_suggested(tmp_path):
  (tmp_path / "log.csv").write_text("0.5\n")
  with pytest.raises(ValueError, match=r"no such file; did you mean .*log.csv"):
    card.read_difficulty(str(tmp_path / "lgo.csv"))


# -----------------------------------------------------------------------------
# The command
# -----------------------------------------------------------------------------

TOY = """
from groupstd import sigma

def tempered(stats):
  return sigma.Weight(stats.std ** -0.5)

def three():
  return sigma.table([3.0, 2.0, 1.0])

def bare(stats):
  return stats.std

def two(a, b):
  return a
"""

WRONG_OPS = {
  "toy": "must be module:function, as in groupstd.sigma:grpo, got 'toy'",
  ":three": "must be module:function",
  "tyo:three": "there is no module 'tyo'; did you mean toy?",
  "groupstd.sgima:grpo": "'groupstd.sgima'; did you mean sigma?",
  "groupstd.sigma.x:grpo": "there is no module 'groupstd.sigma.x'",
  "toy:tree": "toy has no function 'tree'; did you mean three?",
  "toy:two": "must need one argument, a group's statistics, or none",
  "toy:bare": "must make a sigma.Weight of a group's statistics, got Array(",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("explain")
  (folder / "toy.py").write_text(TOY)
  (folder / "log.csv").write_text("k,n\n1,4\n0,3\n2,8\n")
  return folder


def _run(folder, *args, code=0, **kwargs) -> subprocess.CompletedProcess:
  env = {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "TERM": "xterm-256color",
  }
  done = subprocess.run(
    [sys.executable, *args],
    cwd=folder,
    env={**os.environ, **env},
    text=True,
    check=False,
    timeout=120,
    **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs},
  )
  assert done.returncode == code, done.stderr
  return done


def test_mistakes_in_an_operation_name_what_is_right(folder):
  script = """
import json, sys
sys.path.insert(0, ".")
from experiments import explain
for path in json.loads(sys.argv[1]):
  try:
    explain._import_op(path)
    print("nothing")
  except ValueError as error:
    print(" ".join(str(error).split()))
"""
  done = _run(folder, "-c", script, json.dumps(list(WRONG_OPS)))
  for path, said in zip(WRONG_OPS, done.stdout.splitlines(), strict=True):
    assert WRONG_OPS[path] in said


@pytest.mark.parametrize(
  ("args", "said"),
  [
    (["--op=toy:tree"], "no function 'tree'; did you mean three?"),
    (["--difficulty=lgo.csv"], "no such file; did you mean log.csv?"),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, args, said):
  done = _run(folder, "-m", "experiments.explain", *args, code=2)
  assert said in done.stderr
  assert done.stderr.startswith("error: ")
  assert (done.stdout, done.stderr.count("\n")) == ("", 1)
  assert not (folder / "runs").exists()


def _strictly(path: pathlib.Path):
  def refuse(constant):
    raise AssertionError(f"{path} holds {constant}, which is no JSON")

  return json.loads(path.read_text(), parse_constant=refuse)


def test_a_card_is_plain_text_png_and_json(folder):
  config = f"--config={ROOT}/configs/bernoulli.py:dapo"
  args = "-m", "experiments.explain", config, "--out=cards"
  done = _run(folder, *args)
  assert "\x1b" not in done.stdout
  for text in ("dapo at G = 8 on Big-Math", "44.3%", "Dr. GRPO", "redrawn"):
    assert text in done.stdout
  assert max(map(len, done.stdout.splitlines())) <= 120
  found = _strictly(folder / "cards" / "dapo_g8.json")
  # The cap N√(G − 1) of a redrawn weight, at p = 0.
  assert math.isclose(found["objective_weight"]["op"][0], 4 * 7**0.5)
  assert found["plan"]["gain"] > 0
  image = (folder / "cards" / "dapo_g8.png").read_bytes()
  assert image.startswith(b"\x89PNG")


def test_an_operation_of_one_size_in_colour_on_a_terminal(folder):
  terminal, end = pty.openpty()
  args = ["-m", "experiments.explain", "--op=toy:three", "--group_size=4"]
  args += ["--difficulty=log.csv", "--out=cards"]
  # Less than a terminal's buffer, so it may be read afterwards.
  _run(folder, *args, stdout=end)
  os.close(end)
  shown = os.read(terminal, 1 << 16)
  os.close(terminal)
  assert b"\x1b[" in shown
  assert b"toy:three" in shown
  found = _strictly(folder / "cards" / "toy.three_g4.json")
  assert found["weight"]["op"] == pytest.approx([3, 2, 1])
  assert found["plan"] is None  # No other size has a weight.
  assert found["summary"]["fidelity"] is None
  assert found["by_difficulty"]["group_size"]["0.9"] == [None] * 10
  assert found["difficulty"] == {
    "source": "log.csv",
    "prompts": 3,
    "mean": pytest.approx(1 / 6),
    "never": pytest.approx(1 / 3),
    "always": 0,
  }
  # One log is of 3 answers, and no group of 4 can be drawn from it.
  assert found["summary"]["silent_unbiased"] is None
