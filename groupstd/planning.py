"""How many rollouts each prompt should get: a budget, an objective, a plan.

A plan maximises Σ_i value[i, G_i] subject to Σ_i G_i ≤ budget, with value[i, g]
what g rollouts of prompt i are worth: an expected update, say, by `tabulate`,
from p, from a log (`groupstd.estimates`) or from a fitted difficulty.

>>> p, sizes = np.array([0.02, 0.1, 0.5]), np.arange(65)
>>> value = update_value(sigma.grpo(), p, sizes)
>>> plan = allocate(value, budget=24)
>>> print(plan.sizes, f"{plan.total:.3f} of at most {plan.bound:.3f}")
[ 4 12  8] 0.737 of at most 0.737
>>> print(f"{value[:, 8].sum():.3f} with 8 each")
0.724 with 8 each
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from groupstd import sigma, theory

ArrayLike = np.ndarray | Sequence[float] | float

# G → [G + 1], what a group of G is worth with j = 0, …, G right.
Worth = Callable[[int], np.ndarray]
# ([G + 1], G) → [...], its mean over groups of G, of each prompt.
Expect = Callable[[np.ndarray, int], np.ndarray]

# Prompts that are planned exactly together, and numbers held for it: 128 MB.
_CORE, _CORE_TERMS = 64, 2**24


class Allocation(NamedTuple):
  """A plan.

  Attributes:
    sizes: [P], rollouts of each prompt.
    total: what was maximised, at these sizes.
    bound: what no plan of this budget can exceed.
  """

  sizes: np.ndarray
  total: float
  bound: float


def allocate(value: np.ndarray, budget: int, *, minimum: int = 0) -> Allocation:
  """max Σ_i value[i, G_i] with Σ_i G_i ≤ budget and minimum ≤ G_i ≤ M.

  Each rollout goes where it gains most along the prompt's concave hull, among
  equals to the prompt with fewest. Where values are concave that is optimal.
  Else (one rollout is worth nothing, two are) one prompt may be caught within a
  chord of its hull: then the 64 prompts nearest to a change, it among them, are
  planned anew, exactly. So the plan is optimal for that many prompts (fewer
  where M is above 511) and otherwise within one chord's gain of `bound`, the
  hull's own total.

  Args:
    value: [P, M + 1], of g = 0, …, M rollouts; below the minimum it is not
      looked at.
    budget: rollouts in all, at least P·minimum.
    minimum: rollouts that every prompt gets.

  >>> plan = allocate(np.array([[0, 0, 5, 6], [0, 2, 3, 3]]), budget=3)
  >>> print(plan.sizes, plan.total, plan.bound)
  [2 1] 7.0 7.0
  """
  value, spare = _checked(value, budget, minimum)
  slopes, corner = _hull(value)
  prompts, steps = slopes.shape
  extra = _first(-slopes, corner[:, :-1], spare, slopes > 0)
  taken = np.arange(steps) < extra[:, None]
  bound = value[:, 0].sum() + slopes[taken].sum()
  caught = corner[np.arange(prompts), extra] < extra
  if caught.any():
    # Of the prompts nearest to giving or taking a rollout, the best plan.
    price = slopes[caught, extra[caught]].max()
    away = np.abs(slopes - price).min(axis=1)
    count = np.clip(_CORE_TERMS // (steps + 1) ** 2, 1, _CORE)
    core = np.argsort(np.where(caught, -1, away), kind="stable")[:count]
    extra = corner[np.arange(prompts), extra]
    left = spare - extra.sum() + extra[core].sum()
    extra[core] = _exact(value[core], left)
  total = value[np.arange(prompts), extra].sum()
  return Allocation(minimum + extra, float(total), float(max(bound, total)))


def equalise(value: np.ndarray, budget: int, *, minimum: int = 0) -> Allocation:
  """max min_i value[i, G_i], the least value, with Σ_i G_i ≤ budget: exact.

  The prompt worst off gets the next rollout, until none is left. One that no
  rollouts would lift keeps the minimum and does not count for the least.

  Arguments as in `allocate`; `total` and `bound` are the least value.

  >>> p, sizes = np.array([0.05, 0.5]), np.arange(65)
  >>> plan = equalise(fidelity_value(sigma.grpo(), p, sizes), budget=49)
  >>> print(plan.sizes, f"{plan.total:.1f}")
  [42  7] 0.9
  """
  value, spare = _checked(value, budget, minimum)
  reach = np.maximum.accumulate(value, axis=1)
  lifts = reach[:, :-1] < reach[:, -1:]
  sizes = np.broadcast_to(np.arange(lifts.shape[1]), lifts.shape)
  extra = _first(reach[:, :-1], sizes, spare, lifts)
  reached = reach[np.arange(len(value)), extra]
  # Rollouts that have not lifted a value yet, nor will, are not spent.
  extra = np.argmax(reach >= reached[:, None], axis=1)
  counted = reached[lifts.any(axis=1)] if lifts.any() else reached
  return Allocation(minimum + extra, *2 * (float(counted.min()),))


def tabulate(worth: Worth, expect: Expect, sizes: ArrayLike) -> np.ndarray:
  """E[worth(g)] for each size g and prompt, 0 below two rollouts: [..., S].

  Args:
    worth: G → [G + 1], what a group is worth by how many are right.
    expect: ([G + 1], G) → [...], the mean over groups of one size, as
      `given(p)`, or from a log `lambda values, size: estimates.unbiased(values,
      k, n, size)`.
    sizes: [S], group sizes; `np.arange(M + 1)` for `allocate`.

  >>> print(tabulate(mixed, given([0.1, 0.5]), [0, 1, 2, 4]).round(2))
  [[0.   0.   0.18 0.34]
   [0.   0.   0.5  0.88]]
  """
  nothing = np.zeros_like(expect(worth(2), 2))
  columns = [
    expect(worth(int(g)), int(g)) if g > 1 else nothing for g in np.ravel(sizes)
  ]
  return np.stack(columns, axis=-1)


def given(p: ArrayLike) -> Expect:
  """The mean over groups of prompts of success probability p [...]."""
  return lambda values, size: np.asarray(theory.binomial(p, size)) @ values


def update(op: sigma.SigmaOp) -> Worth:
  """σ²w: the update of the scalar policy, `theory.gain`."""
  return lambda size: np.asarray(theory.gain(op, size))


def mixed(size: int) -> np.ndarray:
  """1 of a group that is neither all right nor all wrong, 0 of another."""
  right = np.arange(size + 1)
  return np.where((right > 0) & (right < size), 1.0, 0.0)


def quiet(op: sigma.SigmaOp) -> Worth:
  """−σ²w²/G = −ΣA²/G²: less the variance of (1/G)Σ A_i z_i.

  Where z is a score along one direction, of variance 1 and independent of the
  reward, as arXiv:2602.01601 supposes.
  """

  def worth(size: int) -> np.ndarray:
    right, wrong, keep = theory.advantages(sigma.rule(op), size)
    mean = np.arange(size + 1) / size
    squares = mean * right**2 + (1 - mean) * wrong**2
    return -np.where(keep, squares, 0) / size

  return worth


def update_value(
  op: sigma.SigmaOp, p: ArrayLike, sizes: ArrayLike
) -> np.ndarray:
  """E[σ²w], the expected update: [..., S].

  >>> print(update_value(sigma.grpo(), 0.5, [0, 1, 2, 3]).round(3))
  [0.    0.    0.25  0.354]
  """
  return tabulate(update(op), given(p), sizes)


def mixed_value(p: ArrayLike, sizes: ArrayLike) -> np.ndarray:
  """1 − p^g − (1 − p)^g, the chance of a mixed group: [..., S].

  Times p(1 − p)² it is the value of Knapsack RL (arXiv:2509.25849).
  """
  return tabulate(mixed, given(p), sizes)


def variance_value(
  op: sigma.SigmaOp, p: ArrayLike, sizes: ArrayLike
) -> np.ndarray:
  """−E[σ²w²]/g, less the update's variance, as in `quiet`: [..., S].

  −p(1 − p)/(g − 1) for RLOO and −p(1 − p)(g − 1)/g² for Dr. GRPO, which VIP
  (arXiv:2602.01601) plans by. No rollouts have no variance: plan with
  `minimum=2`. For GRPO it may grow with g where p is near 0 or 1, as a silent
  group has none either.

  >>> print(variance_value(sigma.rloo(), 0.5, [2, 3, 5]).round(4))
  [-0.25   -0.125  -0.0625]
  """
  return tabulate(quiet(op), given(p), sizes)


def fidelity_value(
  op: sigma.SigmaOp, p: ArrayLike, sizes: ArrayLike
) -> np.ndarray:
  """φ(g, p), 0 below two rollouts: [..., S]. For `equalise`.

  The plan gives each prompt `theory.required_group_size` of one fidelity, the
  highest that the budget buys, and what is left over to the worst off.
  """
  nothing = np.zeros(np.shape(p))
  columns = [
    theory.fidelity(op, p, int(g)) if g > 1 else nothing
    for g in np.ravel(sizes)
  ]
  return np.stack(columns, axis=-1)


def _hull(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Of the least concave majorant of each of [P, M + 1], its slope from each g
  to g + 1, [P, M], and its last corner up to each g, [P, M + 1]."""
  width = value.shape[1]
  slopes = np.zeros(value.shape)
  corner = np.zeros(value.shape, int)
  for g in range(width - 1):
    rows = np.flatnonzero(corner[:, g] == g)  # From a corner, the steepest way.
    ahead = value[rows, g + 1 :] - value[rows, g, None]
    chords = ahead / np.arange(1, width - g)
    steepest = chords.max(axis=1)
    # The next corner, where the hull is straight the nearest up to rounding;
    # those between keep this one.
    rounding = 1e-12 * np.abs(chords).max(axis=1)
    to = g + 1 + np.argmax(chords >= (steepest - rounding)[:, None], axis=1)
    slopes[rows, g] = steepest
    corner[rows[:, None], np.arange(g, width)] = g
    corner[rows, to] = to
  rows = np.arange(len(value))[:, None]
  slopes = slopes[rows, corner][:, :-1]
  # Of a straight hull, rounding must not make a later slope the steeper.
  return np.minimum.accumulate(slopes, axis=1), corner


def _first(
  keys: np.ndarray, sizes: np.ndarray, budget: int, usable: np.ndarray
) -> np.ndarray:
  """How many of the `budget` least keys [P, M] are in each row, [P].

  Neither keys nor sizes fall along a row. Ties, to 12 digits, go to the smaller
  size, so that equals share, then to the earlier row.
  """
  largest = np.abs(keys).max(initial=0, where=usable)
  keys = np.round(keys / (largest or 1), 12)
  order = np.lexsort((sizes.ravel(), np.where(usable, keys, np.inf).ravel()))
  taken = np.zeros(keys.size, bool)
  taken[order[:budget]] = True
  return np.sum(taken.reshape(keys.shape) & usable, axis=1)


def _exact(value: np.ndarray, budget: int) -> np.ndarray:
  """The best sizes [P] for [P, M + 1], by dynamic programming."""
  last = value.shape[1] - 1
  best, choices = np.zeros(budget + 1), []
  for row in value:
    padded = np.concatenate([np.full(last, -np.inf), best])
    # [B + 1, M + 1]: with b rollouts left, g of them for this prompt.
    totals = sliding_window_view(padded, last + 1)[:, ::-1] + row
    choices.append(totals.argmax(axis=1))
    best = totals.max(axis=1)
  sizes = []
  for choice in reversed(choices):
    sizes.append(choice[budget])
    budget -= choice[budget]
  return np.array(sizes[::-1])


def _checked(
  value: np.ndarray, budget: int, minimum: int
) -> tuple[np.ndarray, int]:
  """The values from the minimum on, and the budget beyond it."""
  value = np.asarray(value, float)
  if value.ndim != 2 or not value.size:
    raise ValueError(
      f"`value` must be [P, M + 1], got shape {value.shape}: of each prompt,"
      " what 0, ..., M rollouts are worth."
    )
  prompts, width = value.shape
  if not 0 <= minimum < width:
    raise ValueError(
      f"`minimum` must be in [0, M] = [0, {width - 1}], got {minimum}."
    )
  value = value[:, minimum:]
  if not np.isfinite(value).all():
    raise ValueError(
      "`value` must be finite from the minimum on: nothing weighs against an"
      " infinite one."
    )
  if budget < prompts * minimum:
    raise ValueError(
      f"`budget` must be at least {prompts * minimum}, got {budget}: {prompts}"
      f" prompts get {minimum} each."
    )
  return value, int(budget) - prompts * minimum
