"""Transforms against scipy and numpy, and as entries of the table of w."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from groupstd import (
  losses,
  policies,
  rollouts,
  sigma,
  testing,
  theory,
  transforms,
)

GRPO, DR_GRPO = sigma.grpo(), sigma.dr_grpo()
TRANSFORMS = {
  "rank": transforms.rank(),
  "normal_scores": transforms.normal_scores(),
  "winsorize": transforms.winsorize(0.1),
  "clip": transforms.clip(0.25, 2.0),
}
ORACLES = {
  "rank": stats.rankdata,
  "normal_scores": lambda r: stats.norm.ppf(stats.rankdata(r) / (len(r) + 1)),
  "winsorize": lambda r: np.clip(r, *np.quantile(r, [0.1, 0.9])),
  "clip": lambda r: np.clip(r, 0.25, 2.0),
}
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal
every = pytest.mark.parametrize("name", TRANSFORMS)


def graded(seed=0, shape=(40, 9)):
  """Groups with ties, of both signs, and from 0 to 3 copies of each reward."""
  rng = np.random.default_rng(seed)
  return rng.integers(-4, 8, shape) / 4, rng.integers(0, 4, shape)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """What runs once is compiled for longer than it runs."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


# --- What they are ---


@every
@pytest.mark.usefixtures("x64")
def test_a_group_becomes_what_scipy_and_numpy_say(name):
  """With where = None, as flags and as counts of a multiset written out."""
  rewards, counts = graded()
  f = jax.jit(TRANSFORMS[name])
  for where in None, counts > 0, counts:
    found = f(rewards, where)
    copies = np.ones(rewards.shape, int) if where is None else where.astype(int)
    for row, copy, values in zip(rewards, copies, found, strict=True):
      if copy.sum():
        expected = ORACLES[name](np.repeat(row, copy))
        close(np.repeat(values, copy), expected, rtol=1e-13, atol=1e-14)


@every
def test_equal_rewards_stay_exactly_equal(name):
  """And then advantages are exactly 0, in any dtype, jitted or not."""
  values = [0.1, 0.2, 0.3, 1 / 3, 0.35, 0.7, 0.95, 1.1, 2.3, -7e8]
  rule = sigma.rule(GRPO, transform=TRANSFORMS[name])
  both = jax.jit(
    lambda rewards: (TRANSFORMS[name](rewards, None), rule(rewards))
  )
  for dtype, size in (
    (jnp.float32, 7),
    (jnp.float32, 33),
    (jnp.bfloat16, 8),
    (jnp.int32, 2),
  ):
    rewards = jnp.asarray(np.repeat(values, size).reshape(-1, size), dtype)
    found, (advantages, keep) = both(rewards)
    assert found.dtype == jnp.float32
    equal(found, np.broadcast_to(found[:, :1], rewards.shape))
    equal(advantages, 0)
    assert keep.all()
  rewards = jnp.asarray(np.repeat(values, 7).reshape(-1, 7), jnp.float32)
  equal(rule(rewards)[0], 0)


@every
def test_jit_and_vmap_change_nothing(name):
  rewards, counts = graded(1)
  rewards = jnp.asarray(rewards, jnp.float32)
  f = TRANSFORMS[name]
  expected = f(rewards, counts)
  close(jax.jit(f)(rewards, counts), expected, rtol=1e-6)
  close(jax.vmap(f)(rewards, counts), expected, rtol=1e-6)


@every
def test_an_empty_slot_changes_no_bit(name):
  """Whatever it holds; and a group with no reward at all is finite."""
  rewards, counts = graded(2)
  where = (counts > 0).astype(bool)
  where[0] = False
  f = jax.jit(TRANSFORMS[name])
  good = f(np.where(where, rewards, 0), where)
  assert np.isfinite(good).all()
  for bad in np.nan, np.inf, -np.inf:
    equal(f(np.where(where, rewards, bad), where), good)


@every
def test_a_nan_is_refused_by_the_step(name):
  rewards = jnp.array([[1.0, 0.0, jnp.nan, 0.5], [1.0, 0.0, 0.0, 0.5]])
  rule = sigma.rule(GRPO, transform=TRANSFORMS[name])
  advantages, _ = jax.jit(rule)(rewards)
  assert np.isnan(advantages[0]).any()
  assert np.isfinite(advantages[1]).all()


@pytest.mark.parametrize("name", ["rank", "normal_scores"])
def test_only_the_order_of_rewards_counts(name):
  """An increasing function of all rewards changes no bit."""
  rewards = graded(3)[0].astype(np.float32)
  f = jax.jit(lambda rewards: TRANSFORMS[name](rewards, None))
  expected = f(rewards)
  for increasing in np.exp, lambda r: 3 * r - 100, np.cbrt:
    equal(f(increasing(rewards)), expected)


def test_silence_is_of_the_scores_before():
  """Clipped to equality: advantage 0, and kept; silent before: dropped."""
  rule = sigma.rule(sigma.dapo(), transform=transforms.clip(0.0, 1.0))
  advantages, keep = rule(jnp.array([[2.0, 3.0], [3.0, 3.0], [0.2, 0.9]]))
  equal(advantages[:2], 0)
  equal(keep, [True, False, True])


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: transforms.winsorize(0.5), "`tail` must be a number in"),
    (lambda: transforms.winsorize(-0.1), "`tail` must be a number in"),
    (lambda: transforms.winsorize("0.1"), "got '0.1'"),
    (lambda: transforms.clip(1.0, 1.0), "all rewards would become equal"),
    (lambda: transforms.clip(float("nan"), 1.0), "`low` must be a number"),
    (
      lambda: transforms.rank()(jnp.zeros(3), jnp.ones((2, 3))),
      "`where` must have the rewards' shape",
    ),
    (lambda: transforms.rank()(jnp.zeros([]), None), "got a scalar"),
  ],
)
def test_mistakes_say_what_is_right(make, message):
  with pytest.raises(ValueError, match=message):
    make()


# --- Right-or-wrong rewards: one more w (arXiv:2607.00152, Theorem 1) ---


@every
@pytest.mark.parametrize("size", [2, 5, 16])
def test_on_binary_rewards_a_transform_is_a_weight_of_k(name, size):
  """w'(k) = d·w(dσ), d how far apart right and wrong are, 0 where d = 0.

  At G = 16 winsorizing takes a single odd one out, 1 ≤ 0.1·15, for an outlier.
  """
  k = np.arange(1, size)
  mean = k / size
  groups = [np.repeat([1.0, 0.0], [n, size - n]) for n in k]
  apart = np.array([np.ptp(ORACLES[name](group)) for group in groups])
  std = np.sqrt(mean * (1 - mean))
  for op, expected in (
    (DR_GRPO, apart),
    (GRPO, (apart > 0) / std),  # d·1/(dσ): whatever d > 0.
    (sigma.divide(power=0.5), np.sqrt(apart / std)),
  ):
    rule = sigma.rule(op, transform=TRANSFORMS[name])
    a_plus, a_minus, _ = (x[1:-1] for x in theory.advantages(rule, size))
    weight = a_plus - a_minus
    close(weight, expected, rtol=1e-12)
    assert (expected[[0, -1]] == 0).all() == (name == "winsorize" and size > 8)
    close(a_plus, weight * (1 - mean), rtol=1e-12)
  p = np.linspace(0, 1, 11)
  close(
    theory.objective_weight(rule, p, size),
    theory.objective_weight(sigma.rule(sigma.table(expected)), p, size),
    rtol=1e-12,
  )


def test_ranks_of_binary_rewards_are_dr_grpo_and_normal_scores_are_not():
  """w = G/2; Φ⁻¹ makes the odd one out count more, up to no bound in G."""
  for size in 3, 8, 40:
    for name, constant in ("rank", True), ("normal_scores", size <= 3):
      rule = sigma.rule(DR_GRPO, transform=TRANSFORMS[name])
      a_plus, a_minus, _ = theory.advantages(rule, size)
      weight = (a_plus - a_minus)[1:-1]
      if name == "rank":
        close(weight, size / 2, rtol=1e-12)
      close(weight, weight[::-1], rtol=1e-12)
      assert (np.ptp(weight) < 1e-12) == constant
      assert weight[0] >= weight[len(weight) // 2] - 1e-12


# --- Graded rewards ---


@pytest.mark.usefixtures("x64")
def test_ranks_ascend_the_wins_over_oneself():
  """E[g] = ((G − 1)/2)·∇E[sign(R − R')], over all V^G groups, two rewards tied.

  Through the learner's own gradient, exactly.
  """
  size, policy = 3, policies.softmax(1, 4)
  params = policy.init(jax.random.key(0)).astype(float)
  reward = jnp.array([0.3, -2.0, 50.0, 0.3])
  groups = jnp.array(list(itertools.product(range(4), repeat=size)))
  rule = sigma.rule(DR_GRPO, transform=transforms.rank())

  def update(tokens):
    rollout = rollouts.Rollout(
      prompts=jnp.array([0]),
      tokens=tokens[None, :, None],
      mask=jnp.ones((1, size, 1), bool),
      log_probs=jnp.zeros((1, size, 1)),
      rewards=reward[tokens][None],
      scores=reward[tokens][None],
      where=jnp.ones((1, size), bool),
    )
    return -testing.gradient(
      policy, rule, params, rollout, aggregate=losses.group_sum()
    )

  pi = jax.nn.softmax(params[0])
  chance = jnp.prod(pi[groups], axis=1)
  found = jnp.tensordot(chance, jax.jit(jax.vmap(update))(groups), 1)
  beats = jnp.sign(reward[:, None] - reward)
  slope = jax.grad(lambda theta: jax.nn.softmax(theta[0]) @ beats @ pi)(params)
  assert np.abs(slope).max() > 0.1
  close(found, (size - 1) / 2 * slope, rtol=0, atol=1e-14)
