"""Rules beside the group's own σ, against loops over copies in numpy.

In double precision, to 1e-12 of advantages of order 1, unless bits are held
equal.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupstd import rules, sigma

NAN, INF = float("nan"), float("inf")
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal

CENTRED = [
  jax.jit(rule)
  for rule in (
    rules.batch_scaled(),
    rules.batch_scaled(eps=0.0),
    rules.left_out(),
  )
]
RULES = [*CENTRED, jax.jit(rules.against(0.5))]


def ragged(seed=0, shape=(30, 5)):
  """(rewards, counts): equal groups, lone and missing answers among them."""
  rng = np.random.default_rng(seed)
  rewards = rng.integers(0, 4, shape).astype(float)
  counts = rng.integers(0, 4, shape)
  rewards[:5] = rewards[:5, :1]
  counts[5:10] = 1
  counts[10:12] = 0
  counts[12:14] = [0, 1, 0, 0, 0]
  return rewards, counts


def copies(rewards, counts):
  return [x for x, n in zip(rewards, counts, strict=True) for _ in range(n)]


# --- σ of the batch ---


@pytest.mark.parametrize(("ddof", "eps"), [(1, 1e-4), (0, 0.0), (1, 0.3)])
@pytest.mark.usefixtures("x64")
def test_one_deviation_of_all_rewards_divides_them_all(ddof, eps):
  rewards, counts = ragged()
  groups = [copies(*row) for row in zip(rewards, counts, strict=True)]
  std = np.std([x for group in groups for x in group], ddof=ddof)
  means = [np.mean(group) if group else 0 for group in groups]
  expected = (rewards - np.array(means)[:, None]) / (std + eps)
  rule = jax.jit(rules.batch_scaled(ddof=ddof, eps=eps))
  advantages, keep = rule(rewards, counts)
  close(advantages, np.where(counts > 0, expected, 0), rtol=0, atol=1e-12)
  assert keep.shape == (30,)
  assert keep.all()


def test_the_batch_in_trl_s_numbers():
  """σ of {1, 0, 1, 1} is ½ with ddof 1: ±½ over ½ + 10⁻⁴."""
  rewards = jnp.array([[1.0, 0], [1, 1]])
  advantages, _ = CENTRED[0](rewards)
  close(advantages, [[0.5 / 0.5001, -0.5 / 0.5001], [0, 0]], rtol=2e-7)


@pytest.mark.parametrize("ddof", [0, 1])
def test_a_batch_of_one_group_is_the_group_s_own_sigma(ddof):
  rewards, counts = ragged()
  own = jax.jit(sigma.rule(sigma.divide(ddof=ddof, eps=1e-4)))
  alone = jax.jit(jax.vmap(rules.batch_scaled(ddof=ddof, eps=1e-4)))
  close(alone(rewards, counts)[0], own(rewards, counts)[0], rtol=3e-7)


def test_a_prompt_s_neighbours_change_its_scale_and_nothing_else():
  """Even a silent one's; a group without scores is no neighbour."""
  rewards = np.array([[1.0, 0, 0, 0], [1, 1, 0, 0]])
  rule = CENTRED[0]
  alone, _ = rule(rewards)
  beside, _ = rule(np.vstack([rewards, np.full((1, 4), 9.0)]))
  ratio = np.asarray(beside[:2] / alone)
  close(ratio, ratio[0, 0], rtol=3e-7)
  assert ratio[0, 0] < 0.2
  padded = np.vstack([rewards, np.full((1, 4), NAN)])
  where = np.arange(3)[:, None] < [[2] * 4]
  equal(rule(padded, where)[0][:2], alone)


def test_over_a_mesh_it_is_still_one_number():
  rewards, counts = ragged(shape=(32, 5))
  rule = CENTRED[0]
  mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
  cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  spread = jax.device_put((rewards, counts), cut)
  close(rule(*spread)[0], rule(rewards, counts)[0], rtol=0, atol=1e-6)


# --- Leaving one out ---


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
@pytest.mark.usefixtures("x64")
def test_each_answer_is_held_against_its_siblings(eps):
  rewards, counts = ragged()
  expected = np.zeros(rewards.shape)
  for i, j in np.argwhere(counts > 0):
    fewer = counts[i] - (np.arange(5) == j)
    others = copies(rewards[i], fewer)
    if others:
      std = np.std(others, ddof=1) if len(set(others)) > 1 else 1 - eps
      expected[i, j] = (rewards[i, j] - np.mean(others)) / (std + eps)
  advantages, keep = jax.jit(rules.left_out(eps=eps))(rewards, counts)
  close(advantages, expected, rtol=0, atol=1e-12)
  assert keep.all()


def test_siblings_that_differ_by_little_still_divide():
  """Equality decides, not a small σ: √2·10⁻¹⁰/2 is one."""
  advantages, _ = rules.left_out(eps=0.0)(jnp.array([0.0, 1e-10, 1.0]))
  close(advantages[2], 1e10 * np.sqrt(2), rtol=1e-6)


# --- A constant ---


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float16, np.float32])
def test_against_a_constant(dtype):
  rewards = np.array([[1, 0, 0], [0, 0, 0]], dtype)
  advantages, keep = jax.jit(rules.against(0.25))(rewards)
  equal(advantages, [[0.75, -0.25, -0.25], [-0.25] * 3])
  assert advantages.dtype == np.float32
  assert keep.all()
  counted, _ = rules.against(0.25)(rewards, np.array([[2, 1, 0]] * 2))
  equal(counted, [[0.75, -0.25, 0], [-0.25, -0.25, 0]])


@pytest.mark.parametrize("bad", [NAN, INF, "0.5", None, True])
def test_a_reference_is_a_finite_number(bad):
  with pytest.raises(ValueError, match="`reference` must be a finite number"):
    rules.against(bad)


# --- Of all ---


@pytest.mark.usefixtures("x64")
def test_only_the_batch_s_rule_sums_to_zero_in_each_group():
  rewards, counts = ragged()
  for rule in RULES:
    advantages = np.asarray(rule(rewards, counts)[0])
    sums = np.sum(counts * advantages, axis=1)
    zero_sum = rule in CENTRED[:2]
    assert (np.abs(sums).max() < 1e-13) == zero_sum


@pytest.mark.parametrize("rule", CENTRED)
def test_a_baseline_for_all_changes_no_bit(rule):
  """Whole numbers, so that the shifted rewards are the same ones."""
  rewards, counts = ragged()
  for shift in -3, 1024, 2**20:
    equal(rule(rewards + shift, counts)[0], rule(rewards, counts)[0])


@pytest.mark.parametrize("rule", CENTRED)
def test_equal_rewards_are_exactly_zero_and_kept(rule):
  """Beside others, alone, where the whole batch is equal; compiled or not."""
  values = [0.1, 0.2, 0.3, 1 / 3, 0.35, 0.7, 0.95, 1.1, 2.3]
  batch = np.repeat(np.array(values, np.float32)[:, None], 7, axis=1)
  mixed = np.vstack([batch, np.arange(7, dtype=np.float32)])
  alone = jax.vmap(rule)
  for rewards, apply in (mixed, rule), (batch, alone), (batch[:, :1], rule):
    advantages, keep = apply(rewards)
    equal(advantages[:9], 0)
    assert keep.all()
  with jax.disable_jit():
    equal(rule(mixed)[0][:9], 0)


@pytest.mark.parametrize("rule", RULES)
def test_an_answer_without_a_score_has_no_say(rule):
  rewards, _ = ragged()
  where = np.arange(5) < [[3]] * 30
  whole = rule(rewards[:, :3])[0]
  expected = rule(rewards, where)[0]
  equal(expected[:, 3:], 0)
  for bad in NAN, INF, 1e30:
    dirty = np.where(where, rewards, bad)
    equal(rule(dirty, where)[0], expected)
    equal(rule(dirty, where.astype(np.float32))[0], expected)
  close(expected[:, :3], whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_broken_reward_never_passes_for_silence(rule, bad):
  rewards = jnp.ones((3, 4)).at[1, 2].set(bad)
  assert not jnp.isfinite(jnp.sum(rule(rewards)[0]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.usefixtures("x64")
def test_siblings_may_come_in_any_order(rule):
  rewards, counts = ragged()
  order = [3, 0, 4, 1, 2]
  one, other = rule(rewards, counts), rule(rewards[:, order], counts[:, order])
  close(other[0], one[0][:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [rules.batch_scaled, rules.left_out])
@pytest.mark.parametrize("eps", [-1e-4, NAN, INF, "1e-4"])
def test_an_eps_out_of_range_is_refused(make, eps):
  with pytest.raises(ValueError, match="`eps` must be a finite number"):
    make(eps=eps)


def test_a_ddof_is_0_or_1():
  with pytest.raises(ValueError, match="`ddof` must be 0 or 1, got 2"):
    rules.batch_scaled(ddof=2)
