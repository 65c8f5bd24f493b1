"""The identity's residual beyond the first step, its bound, and the command.

In double precision; bounds hold group by group and step by step, to 1e-12 of
(1/G)Σ|A_i|‖s_i‖.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import residual

ROOT = pathlib.Path(__file__).parent.parent
STEPS, ROUNDING = 12, 1e-12
close = np.testing.assert_allclose


@pytest.fixture(scope="module")
def problems():
  """By policy: (policy, parameters, a batch of 24 groups of 8, arms)."""
  with jax.enable_x64(True):
    return residual.problems(num_prompts=24, seed=1)


@pytest.fixture(scope="module")
def curves(problems):
  """What the command measures, of less and on fewer prompts."""
  jax.config.update("jax_disable_most_optimizations", True)
  with jax.enable_x64(True):
    found = {
      name: {
        arm.name: residual.measure(policy, params, rollout, arm, STEPS, 0.5)
        for arm in arms
      }
      for name, (policy, params, rollout, arms) in problems.items()
    }
  jax.config.update("jax_disable_most_optimizations", False)
  return found


def arms_of(curves):
  """(arm, its curve) on every policy."""
  for measured in curves.values():
    for arm in residual.ARMS:
      if arm.name in measured:
        yield arm, measured[arm.name]


def test_the_first_step_has_no_residual(curves):
  """arXiv:2607.00152, Theorem 1, in the loss's own scores, silent or not."""
  for arm, curve in arms_of(curves):
    zero = curve.residual[0] <= ROUNDING * np.maximum(curve.scale[0], 1)
    if arm.in_own_scores:
      assert zero.all(), arm
    else:  # Lengths differ, and a rate is all that is made up for.
      assert curve.relative()[0][0] > 0.1
      assert zero.sum() < len(zero) / 2


def test_the_bound_holds_at_every_point(curves):
  for arm, curve in arms_of(curves):
    slack = ROUNDING * np.maximum(curve.scale, 1)
    assert (curve.residual <= curve.bound + slack).all(), arm


def test_only_reinforce_stays_on_the_identity(curves):
  """And the other bounds are no mere numbers: half is reached at some step."""
  for arm, curve in arms_of(curves):
    relative, bound = curve.relative()
    if arm.clip is None:
      assert (relative <= ROUNDING).all()
      assert (bound <= ROUNDING).all()
    else:
      assert (relative[1:] > 0.01).all()
      assert (relative[1:] > 0.3 * bound[1:]).any()


def test_a_clip_that_binds_takes_a_token_away_altogether(curves):
  """On answers of one token: never more than the ratio bound, or 1."""
  curve = curves["Bernoulli"]["clipped ratio"]
  relative, bound = curve.relative()
  assert (bound <= 1 + ROUNDING).all()
  assert relative.max() > 0.9
  free = curves["Bernoulli"]["ratio"].relative()[1]
  assert free.max() > 1


@pytest.mark.parametrize("clip", [None, (0.2, 0.2)])
@pytest.mark.usefixtures("x64")
def test_on_bernoulli_a_plain_loop_measures_the_same(problems, curves, clip):
  """(1/G)|ΣA_i(ρ_i − 1)(y_i − p)| and max|ρ − 1|·(1/G)Σ|A_i||y_i − p|.

  In numpy, from the counts alone: A₊ = √((G − k)/k), A₋ = −√(k/(G − k)), and
  the ratios are p/p₀ and (1 − p)/(1 − p₀).
  """
  _, params, rollout, _ = problems["Bernoulli"]
  curve = curves["Bernoulli"]["ratio" if clip is None else "clipped ratio"]
  low, high = clip or (1.0, np.inf)
  right = np.asarray(rollout.rewards)
  size = right.shape[1]
  k = right.sum(1)
  silent = (k == 0) | (k == size)
  assert 0 < silent.sum() < len(k) / 2
  k = np.where(silent, 1, k)
  share = np.stack([k, size - k]) / size * ~silent  # [2, B]: right, wrong.
  advantage = np.sqrt([(size - k) / k, k / (size - k)]) * [[1], [-1]]
  theta = np.asarray(params, float)
  p = start = 1 / (1 + np.exp(-theta))
  for step in range(STEPS):
    score = np.stack([1 - p, -p])
    ratio = np.stack([p / start, (1 - p) / (1 - start)])
    held = [ratio[0] > 1 + high, ratio[1] < 1 - low]
    rho = np.where(held, 0, ratio)
    parts = share * advantage * score
    scale = np.abs(parts).sum(0)
    exact = {"rtol": 1e-9, "atol": 1e-14}
    close(curve.residual[step], np.abs((parts * (rho - 1)).sum(0)), **exact)
    close(curve.scale[step], scale, **exact)
    close(curve.bound[step], np.abs(rho - 1).max(0) * scale, **exact)
    theta = theta + 0.5 * (parts * rho).sum(0)
    p = 1 / (1 + np.exp(-theta))


def test_what_is_shown_says_what_holds(curves, tmp_path, capsys):
  """Table, data and picture; a bound that fails, or a first step, fails it."""
  sweep = {name: [0.0, 0.1] for name in ("coupling", "size", "along")}
  assert residual.show(curves, sweep, tmp_path)
  table = capsys.readouterr().out
  assert table.count("holds") == 10
  assert "fails" not in table
  data = json.loads((tmp_path / "residual.json").read_text(encoding="utf-8"))
  assert data["length"] == sweep
  for name, arms in curves.items():
    for arm, curve in arms.items():
      shown = data["curves"][name][arm]
      close(shown["residual"], curve.relative()[0])
      close(shown["bound"], curve.relative()[1])
  assert (tmp_path / "residual.png").read_bytes().startswith(b"\x89PNG")
  good = curves["Bernoulli"]["ratio"]
  for spoiled in (
    good._replace(bound=0.3 * good.bound),
    good._replace(residual=good.residual + 1e-6, bound=good.bound + 1),
  ):
    faulty = {"one": {"ratio": good}, "other": {"ratio": spoiled}}
    assert not residual.show(faulty, sweep, tmp_path)
    assert capsys.readouterr().out.count("fails") == 1


@pytest.mark.slow
def test_the_command_runs(tmp_path):
  folder = tmp_path / "run"
  done = subprocess.run(
    [
      sys.executable,
      "-m",
      "experiments.residual",
      f"--workdir={folder}",
      "--steps=3",
    ],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("holds") == 10
  data = json.loads((folder / "residual.json").read_text(encoding="utf-8"))
  assert len(data["curves"]["Bernoulli"]["ratio"]["bound"]) == 3
  assert (folder / "residual.png").exists()


def test_a_mistake_is_one_line():
  done = subprocess.run(
    [sys.executable, "-m", "experiments.residual"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert done.stderr.startswith("error: --workdir is missing")
  assert done.stderr.count("\n") == 1
