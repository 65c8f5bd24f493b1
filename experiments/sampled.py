"""What the learner's own updates come to, beside arXiv:2607.00152's theory.

A function for each section of the report, as in `experiments.computed`. Groups
are drawn by numpy, apart from the project's own samplers; every update is the
gradient that `learners.policy_gradient` takes of them.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.computed import (
  LARGE,
  OBJECTIVES,
  OPS,
  SILENT_SIZES,
  SIZE,
  Result,
)
from groupstd import losses, policies, rollouts, sigma, testing, theory

# Sizes whose every k is held against the identity.
_SIZES = (4, 8, 16, 32)
# Draws in all of a group that stays silent, where DAPO redraws.
_MAX_DRAWS = 4
# Groups sampled at each p: a standard error of 0.8% at p = 0.05.
_GROUPS = 2**15
# Where they are sampled: p = sin²(φ/2) in the middle of equal steps of φ, as a
# step of GRPO's limit is a step of φ, and no weight is infinite.
_PHI = np.linspace(0, np.pi, 25)
_MIDDLE = (_PHI[1:] + _PHI[:-1]) / 2
SAMPLED_P = np.sin(_MIDDLE / 2) ** 2


def identity() -> Result:
  """The learner's gradient of a 50-answer softmax policy, for every k of G.

  All groups go through one batch, ragged: a size is what `where` says.
  """
  size, k = np.array([(g, k) for g in _SIZES for k in range(g + 1)]).T
  slots, rng = max(_SIZES), np.random.default_rng(0)
  logits = rng.normal(size=50).astype(np.float32).astype(np.float64)
  p = np.exp(logits) / np.exp(logits).sum()
  tokens = rng.choice(50, slots, p=p)
  scores = np.eye(50)[tokens] - p  # [slots, 50]
  where = np.arange(slots) < size[:, None]  # [N, slots]
  order = np.where(where, rng.random(where.shape), np.inf).argsort().argsort()
  right = order < k[:, None]

  def per_side(values):
    """Mean over the right answers, and over the wrong ones."""
    wrong = where & ~right
    return (
      (right @ values).T / np.maximum(k, 1),
      (wrong @ values).T / np.maximum(size - k, 1),
    )

  plus, minus = per_side(scores)
  contrast = np.where((k > 0) & (k < size), plus - minus, 0).T  # [N, 50]
  scale = sum(per_side(np.linalg.norm(scores, axis=1)))
  std = np.sqrt(k * (size - k)) / size
  mixed = std > 0
  sizes, errors, silent = {}, {}, 0.0
  runs: dict[str, tuple[str, Any, float]] = {
    name: (name, np.float64, 0.0) for name in OPS
  }
  runs["float32"] = "grpo", np.float32, 0.0
  runs["baseline"] = "grpo", np.float64, 3.0
  for run, (name, dtype, baseline) in runs.items():
    with jax.enable_x64(dtype == np.float64):
      rewards = right.astype(dtype) + dtype(baseline)
      gradient = _group_gradient(OPS[name])(
        logits.astype(dtype)[None], tokens, rewards, where
      )
      update = -np.asarray(gradient, np.float64)[:, 0]
    gain = std**2 if name == "dr_grpo" else std
    error = np.linalg.norm(update - gain[:, None] * contrast, axis=1)
    errors[run] = error[mixed] / (gain * scale)[mixed]
    sizes[run] = np.linalg.norm(update, axis=1)[mixed]
    sizes[run] /= np.linalg.norm(contrast, axis=1)[mixed]
    silent = max(silent, np.abs(update[~mixed]).max())
  scalar, drawn = _sample("grpo", SIZE)
  return Result(
    {
      "GRPO: update − σΔs, relative": errors["grpo"].max(),
      "GRPO: the same in float32": errors["float32"].max(),
      "GRPO: the same, 3 added to every reward": errors["baseline"].max(),
      "Dr. GRPO: update − σ²Δs, relative": errors["dr_grpo"].max(),
      "DAPO: update − 1{0<k<G}σΔs, relative": errors["dapo"].max(),
      "all three: largest update of a silent group": silent,
      "GRPO, scalar policy: update − σ": np.abs(
        scalar - np.sqrt(drawn * (SIZE - drawn)) / SIZE
      ).max(),
      **_two_valued(),
      **_leave_one_out(),
    },
    {"share": (k / size)[mixed], "size": size[mixed], "k": k[mixed]}
    | {"sizes": sizes, "errors": errors},
  )


@functools.cache
def _group_gradient(op: sigma.SigmaOp) -> Callable:
  """(logits [1, V], tokens [G], rewards [N, G], where) → [N, 1, V].

  The learner's gradient of each of N batches, of one group of those tokens.
  """

  def gradient(logits, tokens, rewards, where):
    rollout = rollouts.Rollout(
      prompts=jnp.zeros([1], int),
      tokens=tokens[None, :, None],
      mask=jnp.ones([1, len(tokens), 1], bool),
      log_probs=jnp.zeros([1, len(tokens), 1]),
      rewards=rewards[None],
      scores=rewards[None],
      where=where[None],
    )
    return testing.gradient(
      policies.softmax(*logits.shape),
      sigma.rule(op),
      logits,
      rollout,
      aggregate=losses.group_sum(),
    )

  return jax.jit(jax.vmap(gradient, (None, None, 0, 0)))


def _two_valued() -> dict[str, Any]:
  """Largest relative errors of GRPO's two advantages at G = 8."""
  k = np.arange(1, SIZE)
  right, wrong, _ = theory.advantages(sigma.rule(OPS["grpo"]), SIZE)
  odds = np.sqrt((SIZE - k) / k)
  return {
    "GRPO: A₊/√((G−k)/k) − 1; A₋/√(k/(G−k)) + 1": [
      np.abs(right[1:-1] / odds - 1).max(),
      np.abs(wrong[1:-1] * odds + 1).max(),
    ]
  }


def _leave_one_out() -> dict[str, Any]:
  """Largest errors of RLOO's advantage, and of centring as a part of it."""
  rewards = np.random.default_rng(1).normal(size=(1000, SIZE))
  others = (rewards.sum(1, keepdims=True) - rewards) / (SIZE - 1)
  left_out = rewards - others
  with jax.enable_x64(True):
    rloo, _ = sigma.rule(sigma.rloo())(jnp.asarray(rewards))
    centred, _ = sigma.rule(OPS["dr_grpo"])(jnp.asarray(rewards))
  return {
    "RLOO: A − (R − b); R − μ − (G−1)/G·(R − b)": [
      np.abs(np.asarray(rloo) - left_out).max(),
      np.abs(np.asarray(centred) - (SIZE - 1) / SIZE * left_out).max(),
    ]
  }


def silent() -> Result:
  """How often the learner's update of a sampled group is exactly 0."""
  rates = np.array(
    [np.mean(_sample("grpo", g)[0] == 0, axis=1) for g in SILENT_SIZES]
  )
  exact = np.array([theory.silent_rate(SAMPLED_P, g) for g in SILENT_SIZES])
  deviation = (rates - exact) / np.sqrt(exact * (1 - exact) / _GROUPS)
  grid = np.linspace(0, 1, 201)
  return Result(
    {
      "share of sampled groups − exact, in s.e.": np.abs(
        # With fewer than ten groups expected, a count is no normal variable.
        deviation[_GROUPS * np.minimum(exact, 1 - exact) >= 10]
      ).max()
    },
    {
      "sampled": rates,
      "grid": grid,
      "exact": [theory.silent_rate(grid, g) for g in SILENT_SIZES],
    },
  )


def objectives() -> Result:
  """What the updates ascend: sampled ones summed up along p, and the limits."""
  grid = np.sin(np.linspace(0, np.pi, 101)[1:] / 2) ** 2
  shown: dict[Any, Any] = {"p": np.sin(_PHI[1:] / 2) ** 2, "grid": grid}
  deviations: dict[str, float] = {}
  for name, (_, limit) in OBJECTIVES.items():
    op = OPS[name]
    deviations[name] = 0.0
    for size in SIZE, LARGE:
      sampled = _sample(name, size)[0].mean(1)
      # c = E[g]/(p(1 − p)), p(1 − p) = sin²(φ)/4 and dp/dφ = sin(φ)/2.
      steps = sampled * 2 / np.sin(_MIDDLE) * np.diff(_PHI)
      shown[name, size, "sampled"] = np.cumsum(steps)
      shown[name, size, "exact"] = _integral(
        functools.partial(
          theory.objective_weight, sigma.rule(op), group_size=size
        ),
        grid,
      )
      deviation = _deviation(op, size, sampled)
      deviations[name] = max(deviations[name], deviation)
    shown[name, "limit"] = _integral(
      functools.partial(theory.difficulty_weight, op), grid
    )
    shown[name, "error"] = np.abs(shown[name, "limit"] - limit(grid)).max()
  return Result(
    {
      "GRPO: ∫w dp − 2 arcsin √p": shown["grpo", "error"],
      "Dr. GRPO: ∫w dp − p": shown["dr_grpo", "error"],
      "GRPO: mean sampled update − E[g], in s.e.": deviations["grpo"],
      "Dr. GRPO: mean sampled update − E[g], in s.e.": deviations["dr_grpo"],
    },
    shown,
  )


def weight() -> Result:
  """The weight on ∇p by difficulty: the limit, G = 8 exactly, and sampled."""
  grid = np.linspace(0.004, 0.996, 249)
  shown: dict[Any, Any] = {"grid": grid}
  for name, op in OPS.items():
    draws = _MAX_DRAWS if name == "dapo" else 1
    updates, _ = _sample(name, SIZE, draws)
    exact = theory.expected_update(op, grid, SIZE, draws)
    slope = SAMPLED_P * (1 - SAMPLED_P)
    shown[name, "sampled"] = updates.mean(1) / slope
    shown[name, "error"] = updates.std(1) / np.sqrt(_GROUPS) / slope
    shown[name, "exact"] = exact / (grid * (1 - grid))
    shown[name, "limit"] = theory.difficulty_weight(op, grid)
  two = theory.difficulty_weight(OPS["grpo"], [0.5, 0.05])
  return Result({"GRPO: w at p = 0.5, 0.05": two}, shown)


@functools.cache
def _sample(
  name: str, size: int, max_draws: int = 1
) -> tuple[np.ndarray, np.ndarray]:
  """(the learner's own updates, k), of sampled groups at each p: [P, groups].

  The groups are drawn by numpy, apart from the project's own sampler, and
  given to the learner as counts of right and wrong.
  """
  p = np.repeat(SAMPLED_P, _GROUPS)
  rng = np.random.default_rng([size, max_draws])
  k = rng.binomial(size, p)
  for _ in range(max_draws - 1):
    k = np.where(k % size == 0, rng.binomial(size, p), k)
  updates = _scalar_gradient(OPS[name])(
    np.log(p) - np.log1p(-p), np.stack([k, size - k], axis=1)
  )
  shape = len(SAMPLED_P), _GROUPS
  return -np.asarray(updates, float).reshape(shape), k.reshape(shape)


@functools.cache
def _scalar_gradient(op: sigma.SigmaOp) -> Callable:
  """(logits [N], counts of right and wrong [N, 2]) → the learner's gradient."""
  policy = policies.bernoulli([0.5])

  @jax.jit
  def gradient(logits, counts):
    right = jnp.broadcast_to(jnp.array([1, 0]), counts.shape)
    rollout = rollouts.Rollout(
      prompts=jnp.arange(len(logits)),
      tokens=right[..., None],
      mask=jnp.ones([*right.shape, 1], bool),
      log_probs=jnp.zeros([*right.shape, 1]),
      rewards=right.astype(float),
      scores=right.astype(float),
      where=counts,
    )
    return testing.gradient(
      policy,
      sigma.rule(op),
      logits,
      rollout,
      aggregate=losses.group_sum(),
    )

  return gradient


def _deviation(op: sigma.SigmaOp, size: int, sampled: np.ndarray) -> float:
  """Largest |sampled mean − exact| over the exact standard error."""
  chance, gain = theory.binomial(SAMPLED_P, size), theory.gain(op, size)
  mean = theory.expected_update(op, SAMPLED_P, size)
  variance = chance @ gain**2 - mean**2
  return np.abs((sampled - mean) / np.sqrt(variance / _GROUPS)).max()


def _integral(weight, p: np.ndarray) -> np.ndarray:
  """∫₀^p weight, by Gauss's rule in φ where p = sin²(φ/2)."""
  nodes, shares = np.polynomial.legendre.leggauss(40)
  end = 2 * np.arcsin(np.sqrt(p))[:, None]
  phi = end * (nodes + 1) / 2
  steps = shares * end / 2 * np.sin(phi) / 2
  return np.sum(weight(np.sin(phi / 2) ** 2) * steps, axis=1)
