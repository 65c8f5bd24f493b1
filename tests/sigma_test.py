"""What σ-operations make of a group, against exact fractions."""

from decimal import Decimal, localcontext
from fractions import Fraction
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupstd import sigma

NAN = float("nan")
INF = float("inf")
REPEATED = [0.1, 0.2, 0.3, 1 / 3, 0.7, 0.95, 1.1, 2.3, -0.4, 1e-8, 1e6]
OPS = [
  sigma.divide(),
  sigma.divide(eps=1e-8),
  sigma.divide(ddof=1),
  sigma.divide(ddof=1, eps=1e-8),
  sigma.rloo(),
  sigma.max_rl(),
  sigma.product(sigma.mask(), sigma.divide(power=0.5)),
]
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal
group_stats = jax.jit(sigma.group_stats)  # one compilation a shape


def run_each(ops, *rollouts):
  """[(advantages, keep), ...] of each operation, in one compilation."""

  def each(*rollouts):
    return [sigma.rule(op)(*rollouts) for op in ops]

  arrays = [None if x is None else jnp.asarray(x) for x in rollouts]
  return jax.tree.map(np.asarray, jax.jit(each)(*arrays))


def run(op, *rollouts):
  return run_each([op], *rollouts)[0]


def first_of(sizes, width):
  """[len(sizes), width] masks, of the first `size` slots each."""
  return np.arange(width) < np.array(sizes)[:, None]


def exact(group, ddof=0):
  """R − μ of a list of floats and its σ, in fractions; σ to 40 digits."""
  rewards = [Fraction(float(reward)) for reward in group]
  mean = Fraction(sum(rewards), len(rewards))
  deviations = [reward - mean for reward in rewards]
  variance = Fraction(sum(d * d for d in deviations), len(group) - ddof)
  with localcontext(prec=40):
    quotient = Decimal(variance.numerator) / Decimal(variance.denominator)
    return deviations, Fraction(quotient.sqrt())


# --- Silence is decided by equality ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_equal_rewards_get_exactly_zero_and_are_dropped(dtype):
  """Jitted in groups of 2 to 64, padded; eagerly in one of 7, written out."""
  with jax.enable_x64(dtype == "float64"):
    values = jnp.array(REPEATED, dtype)[:, None, None]
    padded = jnp.broadcast_to(values, (len(REPEATED), 63, 64))
    where = jnp.broadcast_to(first_of(range(2, 65), 64), padded.shape)
    ops = [sigma.product(op, sigma.mask()) for op in OPS]
    outcomes = run_each(ops, padded, where)
    outcomes += [sigma.rule(op)(padded[:, 0, :7]) for op in ops]
    for advantages, keep in outcomes:
      equal(advantages, 0)
      assert not keep.any()
    stats = group_stats(padded, where)
    equal(stats.std, 0)
    equal(stats.mean, padded[..., 0])


def test_the_least_difference_speaks_as_loudly_as_the_greatest():
  base = np.array([1, 1, -3e6 / 7, 0, 0, 0], np.float32)
  gap = np.array([1e-5, 2**-23, 0.1, 1e-25, 1e-36, 1e30], np.float32)
  rewards = np.stack([base, base, base + gap, base], -1)
  assert (rewards[:, 2] != base).all()
  (advantages, keep), (plain, _) = run_each(
    [sigma.dapo(), sigma.identity()], rewards
  )
  low = -1 / math.sqrt(3)
  close(advantages, [[low, low, math.sqrt(3), low]] * 6, rtol=1e-6)
  rounded = rewards[:, 2:3].astype(float) - base[:, None]
  close(plain, rounded * [-0.25, -0.25, 0.75, -0.25], rtol=3e-7)
  assert keep.all()
  assert (group_stats(rewards).std > 0).all()


def test_groups_without_two_scores_are_silent():
  for shape in [(0,), (3, 0)]:
    advantages, keep = run(sigma.dapo(), jnp.zeros(shape))
    assert advantages.shape == shape
    assert keep.shape == shape[:-1]
    assert not keep.any()
  where = jnp.array([[0, 0, 0], [0, 1, 0], [1, 0, 1]])
  advantages, keep = run(sigma.dapo(), [[1.0, 0.0, 0.0]] * 3, where)
  equal(keep, [False, False, True])
  equal(advantages, [[0, 0, 0], [0, 0, 0], [1, 0, -1]])
  stats = group_stats(jnp.ones((3, 3)), where)
  equal(stats.size, [0, 1, 2])
  equal(stats.mean, [0, 1, 1])


def test_a_broken_reward_is_never_silence():
  rewards = jnp.array(
    [
      [[1, 0, bad, 0], [1, 1, bad, 1], [bad, bad, bad, bad], [bad, 1, 1, 1]]
      for bad in (NAN, INF, -INF)
    ]
  )
  where = jnp.ones_like(rewards).at[:, 3, 1:].set(0)  # a lone broken one
  ops = sigma.dapo(), sigma.product(sigma.mask(), sigma.rloo())
  for copies in 1, 10:  # in groups of 4 and of 40
    wide, counted = jnp.tile(rewards, copies), np.tile(where, copies)
    eager = sigma.rule(sigma.dapo())(wide, counted)
    for advantages, keep in [*run_each(ops, wide, counted), eager]:
      assert keep.all()
      assert not np.isfinite(np.asarray(advantages)[counted > 0]).any()
  finite = jnp.zeros_like(rewards)
  assert run(sigma.mask(), finite, where, rewards)[1].all()
  assert not group_stats(rewards, where).silent.any()


def test_what_stands_in_an_empty_slot_does_not_leak():
  """Neither into a number nor into a gradient."""
  bad = jnp.array([0.5, NAN, INF, -INF, 3e38])[:, None, None]
  mixed, silent, empty = [1.0, 0, 0, 0.25], [0.2] * 4, [1.0, 0, 0, 1]
  rewards = jnp.tile(jnp.array([mixed, silent, empty]), (5, 1, 1))
  rewards = rewards.at[:, :, 1:2].set(bad)
  where = jnp.ones_like(rewards).at[:, :, 1].set(0).at[:, 2].set(0)

  def signal(rewards):
    outcomes = [sigma.rule(op)(rewards, where) for op in OPS]
    return sum(jnp.vdot(a, weights) for a, _ in outcomes), outcomes

  weights = jnp.resize(jnp.arange(12.0), rewards.shape)
  found = jax.jit(jax.grad(signal, has_aux=True))(rewards)
  for array in jax.tree.leaves(found):  # a slope, and [bad, group, ...] each
    assert np.isfinite(array).all()
    equal(array, np.broadcast_to(array[:1], array.shape))
    if array.shape == rewards.shape:
      equal(array[..., 1], 0)


def test_scores_decide_silence_and_rewards_the_zeros():
  """An all-wrong group is silent even if a penalty makes its rewards differ."""
  scores = jnp.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
  rewards = jnp.array([[-0.1, -0.2, 0.0], [0.5, 0.5, 0.5], [0.9, 0.8, 0.0]])
  advantages, keep = run(sigma.dapo(), rewards, None, scores)
  equal(keep, [False, True, True])
  equal(np.any(advantages, -1), [True, False, True])
  close(advantages, run(sigma.grpo(), rewards)[0], rtol=3e-7)
  equal(group_stats(rewards, None, scores).silent, ~keep)


def test_the_filter_keeps_or_drops_whole_groups():
  groups = {
    (0, 0.5, 1, 0.5): True,
    (0.5, 0.5, 0.5, 0.5): False,  # a filter on the mean's range would keep it
    (1, 0, 0, 0): True,  # whole, though the others of the 1 are all equal
    (1, 1, 1, 0): True,
    (1, 1, 0, 0): True,
  }
  ops = sigma.dapo(), sigma.product(sigma.mask(), sigma.rloo())
  for advantages, keep in run_each(ops, list(groups)):
    equal(keep, list(groups.values()))
    equal(np.any(advantages, -1), keep)


# --- The numbers ---


def test_every_binary_group_up_to_64():
  """σ = √(k(G−k))/G; A₊ = √((G−k)/k), A₋ = −√(k/(G−k)).

  arXiv:2607.00152, section 2; summaries that print √(k(G−k)/G) are wrong.
  """
  k, size = np.array([(k, g) for g in range(2, 65) for k in range(g + 1)]).T
  counts = np.stack([k, size - k], -1)
  with np.errstate(divide="ignore"):
    right, wrong = np.sqrt((size - k) / k), -np.sqrt(k / (size - k))
  mixed = (k > 0) & (k < size)
  for rewards, where in [
    (np.broadcast_to(np.array([1.0, 0.0]), counts.shape), counts),
    (first_of(k, 64).astype(float), first_of(size, 64)),
  ]:
    stats = group_stats(rewards, where)
    close(stats.std, np.sqrt(k * (size - k)) / size, rtol=4e-7)
    close(stats.mean, k / size, rtol=4e-7)
    equal(stats.size, size)
    equal(stats.silent, ~mixed)
    advantages, keep = run(sigma.dapo(), rewards, where)
    equal(keep, mixed)
    expected = np.where(rewards > 0, right[:, None], wrong[:, None])
    expected = np.where(mixed[:, None] & (where > 0), expected, 0)
    # R − μ rounds at the size of the range, and σ is at least ⅛ of it.
    close(advantages, expected, rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_random_groups_against_exact_fractions(dtype):
  """Within a few roundings of the group's largest advantage."""
  rng = np.random.default_rng(0)
  width, groups = 12, 60
  sizes = rng.integers(2, width + 1, groups)
  rewards = rng.normal(size=(groups, width)) + rng.normal(size=(groups, 1))
  rewards[::3] = rng.integers(0, 3, rewards[::3].shape) * 0.1 + 0.2
  rewards *= 10.0 ** rng.integers(-6, 7, (groups, 1))
  rewards = rewards.astype(dtype)
  where = first_of(sizes, width)
  with jax.enable_x64(dtype == "float64"):
    ops = sigma.identity(), sigma.divide(), sigma.divide(ddof=1), sigma.rloo()
    plain, grpo, grpo_1, loo = (a for a, _ in run_each(ops, rewards, where))
    std = np.asarray(group_stats(rewards, where).std)
    assert plain.dtype == std.dtype == dtype
  tolerance = 8 * np.finfo(dtype).eps
  for row, size in enumerate(sizes):
    deviations, std_0 = exact(rewards[row, :size])
    _, std_1 = exact(rewards[row, :size], ddof=1)
    close(std[row], float(std_0), rtol=tolerance)
    if not std_0:
      continue
    leave_one_out = [
      d - (sum(deviations) - d) / Fraction(int(size) - 1) for d in deviations
    ]
    for got, expected in [
      (plain, deviations),
      (grpo, [d / std_0 for d in deviations]),
      (grpo_1, [d / std_1 for d in deviations]),
      (loo, leave_one_out),
    ]:
      expected = np.array(expected, float)
      largest = np.abs(expected).max()
      close(got[row, :size], expected, rtol=0, atol=tolerance * largest)


def test_one_zero_among_seven_equal_values_stays_of_its_size():
  values = np.array([0.35, 0.4, 0.3, 0.95], np.float32)
  rewards = np.where(np.arange(8) > 0, values[:, None], 0)
  (grpo, _), (loo, _) = run_each([sigma.grpo(), sigma.rloo()], rewards)
  deviations, std = exact(rewards[0])
  expected = np.array([d / std for d in deviations], float)
  assert expected[0] == pytest.approx(-math.sqrt(7))
  close(grpo, [expected] * 4, rtol=3e-7)
  close(loo[:, 0], -values, rtol=3e-7)
  close(loo[:, 1:], np.repeat(values[:, None], 7, -1) / 7, rtol=3e-7)


def test_max_rl_divides_by_the_mean_where_there_is_one():
  """w = 1/μ (arXiv:2602.02710)."""
  binary = [[1.0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]
  advantages, keep = run(sigma.max_rl(), binary)
  close(advantages[0], [3, -1, -1, -1])
  close(advantages[1], [-1, 1 / 3, 1 / 3, 1 / 3], rtol=3e-7)
  equal(advantages[2:], 0)
  assert keep.all()
  assert np.isnan(
    run(sigma.max_rl(), [[-1.0, 0, 0, 0], [-1, 1, 0, 0]])[0]
  ).all()


def test_a_table_is_a_weight_of_k():
  table = sigma.table([5.0, 7.0, 11.0])
  binary = [[1.0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 1, 1], [0] * 4, [1] * 4]
  advantages, keep = run(table, binary)
  close(advantages[0], np.array([3, -1, -1, -1]) * 5 / 4)
  close(advantages[1], np.array([-1, 1, -1, 1]) * 7 / 2)
  close(advantages[2], np.array([-3, 1, 1, 1]) * 11 / 4)
  equal(advantages[3:], 0)
  assert keep.all()
  ragged, _ = run(table, [1.0, 0, 0, 1, 0], [1, 1, 1, 0, 1])
  close(ragged, np.array([3, -1, -1, 0, -1]) * 5 / 4)


def test_a_table_refuses_what_it_has_no_weight_for():
  groups = [
    [0.5, 0.5, 0, 0],  # an integer sum of other rewards
    [2, 0, 0, 0],
    [0.9, 0.1, 0.4, 0.4],
    [1, 0.5, 0, 0],
  ]
  assert np.isnan(run(sigma.table([1.0, 2.0, 3.0]), groups)[0]).all()
  for size in 2, 4:  # weights for groups of 3 and of 5
    assert np.isnan(run(sigma.table([1.0] * size), [1.0, 0, 0, 1])[0]).all()


# --- Groups ---


def test_a_missing_member_is_as_if_it_had_never_been():
  rewards = np.random.default_rng(2).uniform(size=(6, 12)).astype(np.float32)
  members = np.array([1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1], bool)
  dirty = np.where(members, rewards, 1e30)
  raggeds = run_each(OPS, dirty, np.broadcast_to(members, dirty.shape))
  smalls = run_each(OPS, rewards[:, members])
  for (ragged, _), (small, _) in zip(raggeds, smalls, strict=True):
    close(ragged[:, members], small, rtol=0, atol=2e-6)
    equal(ragged[:, ~members], 0)
  advantages, _ = run(sigma.grpo(), [1, NAN, 0, 0], [1, 0, 1, 1])
  half = -math.sqrt(0.5)
  close(advantages, [math.sqrt(2), 0, half, half], rtol=1e-6)


def test_counts_are_the_group_written_out():
  rng = np.random.default_rng(3)
  values = rng.uniform(size=(6, 3)).astype(np.float32)
  counts = rng.integers(0, 5, values.shape)
  counts[:3] = [[4, 0, 0], [0, 0, 0], [0, 0, 1]]
  copies = [np.repeat(np.arange(3), count) for count in counts]
  index = np.array([np.resize(np.append(c, 0), 12) for c in copies])
  written_out = np.take_along_axis(values, index, -1)
  where = first_of([len(c) for c in copies], 12)
  shorts = run_each(OPS, values, counts)
  longs = run_each(OPS, written_out, where)
  for (short, keep), (long, long_keep) in zip(shorts, longs, strict=True):
    equal(keep, long_keep)
    expected = np.take_along_axis(short, index, -1) * where
    close(long, expected, rtol=0, atol=2e-6)


def test_every_scored_rollout_counts_in_the_baseline():
  """Whether its tokens train is not asked; to leave it out is `where`'s."""
  close(run(sigma.dr_grpo(), [100.0, 1.0])[0], [49.5, -49.5])
  group, unscored = [1.0, 1.0, 0.0, 0.0], [1, 0, 1, 1]
  close(run(sigma.dr_grpo(), group)[0], [0.5, 0.5, -0.5, -0.5])
  for op, right, wrong in [
    (sigma.dr_grpo(), 2 / 3, -1 / 3),
    (sigma.divide(ddof=1), 2 / math.sqrt(3), -1 / math.sqrt(3)),
    (sigma.rloo(), 1, -1 / 2),
  ]:
    advantages, _ = run(op, group, unscored)
    close(advantages, [right, 0, wrong, wrong], rtol=1e-6)


def test_a_group_is_a_position():
  """A short group has its own μ and σ; tiled and shuffled batches follow."""
  rewards = np.array([[1.0, 2, 3, 7], [5, 5, 5, 0], [0, 0, 9, 1]])
  full = np.ones((3, 4), int)
  short = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
  before, _ = run(sigma.dapo(), rewards, full)
  after, keep = run(sigma.dapo(), rewards, short)
  equal(after[[0, 2]], before[[0, 2]])
  equal(after[1], 0)
  equal(keep, [True, False, True])
  order = np.array([2, 0, 1])
  equal(run(sigma.dapo(), rewards[order], full)[0], before[order])
  equal(run(sigma.divide(ddof=1), [[1.0, 1.0], [0.0, 0.0]])[0], 0)
  root = math.sqrt(0.5)
  apart, _ = run(sigma.divide(ddof=1), [[1.0, 0.0], [1.0, 0.0]])
  close(apart, [[root, -root]] * 2, rtol=1e-6)
