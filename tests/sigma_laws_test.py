"""How σ-operations compose and transform, and what they refuse."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupstd import sigma

GROUPS = jnp.array(
  [
    [1.0, 0.0, 0.0, 0.0],
    [1.0, 1.0, 0.0, 0.0],
    [0.0, 1.0, 1.0, 1.0],
    [0.2, 0.2, 0.2, 0.2],
    [0.0, 0.0, 0.0, 0.0],
    [0.9, 0.1, 0.4, 0.4],
  ]
)
SILENT = np.array([False, False, False, True, True, False])
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


def tempered(stats):
  return sigma.Weight(stats.std**-0.5)


OPS = {
  "identity": sigma.identity(),
  "mask": sigma.mask(),
  "divide": sigma.divide(),
  "sample σ": sigma.divide(ddof=1, eps=1e-4),
  "half": sigma.divide(power=0.5),
  "rloo": sigma.rloo(),
  "max_rl": sigma.max_rl(),
  "tempered": tempered,
}


def run(op, rewards=GROUPS):
  return sigma.rule(op)(rewards)


def same(one, other, rtol=5e-7):
  """Two operations agree in advantages and keeps, through `rule`."""
  (advantages, keep), (expected, expected_keep) = run(one), run(other)
  close(advantages, expected, rtol=rtol)
  equal(keep, expected_keep)


# --- Composition ---


@pytest.mark.parametrize("name", OPS)
def test_identity_is_the_unit_of_product(name):
  op = OPS[name]
  same(sigma.product(op), op, rtol=0)
  same(sigma.product(op, sigma.identity()), op, rtol=0)
  same(sigma.product(sigma.identity(), op), op, rtol=0)
  same(sigma.product(), sigma.identity(), rtol=0)


def test_product_commutes_and_associates_also_where_groups_are_silent():
  product = sigma.product
  names = list(OPS)
  for one, other in zip(names, names[1:] + names[:1], strict=True):
    a, b = OPS[one], OPS[other]
    same(product(a, b), product(b, a))
    same(product(product(a, b), tempered), product(a, product(b, tempered)))
    same(product(a, b, tempered), product(a, product(b, tempered)))
  same(product(sigma.mask(), sigma.mask()), sigma.mask())


def test_scales_multiply_and_keeps_conjoin():
  half = sigma.divide(power=0.5)
  same(sigma.product(half, half), sigma.divide())
  same(sigma.product(half, sigma.divide(power=-0.5)), sigma.identity())
  same(sigma.product(tempered, half), sigma.grpo())
  first = lambda stats: sigma.Weight(2.0, stats.mean < 0.6)  # noqa: E731
  both = sigma.product(first, sigma.mask(), lambda _: sigma.Weight(3.0))
  advantages, keep = run(both)
  close(advantages, 6 * run(sigma.identity())[0], rtol=1e-6)
  equal(keep, [True, True, False, False, False, True])


@pytest.mark.parametrize(
  ("method", "composition", "keep"),
  [
    (sigma.grpo(), sigma.divide(), True),
    (sigma.dr_grpo(), sigma.identity(), True),
    (sigma.dr_grpo(), sigma.divide(power=0), True),
    (sigma.dapo(), sigma.product(sigma.mask(), sigma.divide()), ~SILENT),
  ],
)
def test_methods_are_their_compositions(method, composition, keep):
  same(method, composition, rtol=0)
  equal(run(method)[1], keep)


def test_scale_zero_counts_and_a_dropped_group_is_not_rescaled():
  advantages, keep = run(lambda _: sigma.Weight(0.0))
  equal(advantages, 0)
  equal(keep, True)
  advantages, keep = run(lambda _: sigma.Weight(1.0, False))
  equal(advantages, run(sigma.identity())[0])
  equal(keep, False)


# --- Symmetries ---


@pytest.mark.parametrize("name", OPS)
def test_permutation_and_zero_sum(name):
  rewards = jax.random.uniform(jax.random.key(0), (6, 8))
  order = np.random.default_rng(0).permutation(8)
  advantages, _ = run(OPS[name], rewards)
  permuted, _ = run(OPS[name], rewards[:, order])
  largest = np.abs(advantages).max()
  # A handful of roundings of numbers no larger than the largest.
  close(permuted, advantages[:, order], rtol=0, atol=1e-6 * largest)
  close(advantages.sum(-1), 0, atol=1e-6 * largest)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_a_baseline_changes_nothing_and_a_unit_only_the_scale(power):
  """A(R + b) = A(R) (arXiv:2607.00152, Theorem 1); A(cR) = c^(1−power)·A(R)."""
  op = sigma.divide(power=power)
  rewards = jax.random.uniform(jax.random.key(1), (6, 8))
  advantages, _ = run(op, rewards)
  close(run(op, rewards + 5)[0], advantages, rtol=0, atol=1e-5)
  expected = 3.7 ** (1 - power) * advantages
  close(run(op, 3.7 * rewards)[0], expected, rtol=0, atol=4e-6)
  binary = GROUPS[:3]
  equal(run(op, binary + 5)[0], run(op, binary)[0])
  expected = 4 ** (1 - power) * run(op, binary)[0]
  close(run(op, 4 * binary)[0], expected, rtol=3e-7)


@pytest.mark.parametrize(
  ("given", "computed"),
  [
    ("bool", "float32"),
    ("int64", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float32", "float32"),
    ("float64", "float64"),
  ],
)
@pytest.mark.usefixtures("x64")
def test_statistics_take_at_least_float32(given, computed):
  rewards = jnp.array([[1, 0, 0, 1]], given)
  where = jnp.ones((1, 4), "float64")
  ops = [*OPS.values(), sigma.table([1.0, 2.0, 3.0])]

  @jax.jit
  def outcomes(rewards, where):
    rules = [sigma.rule(op) for op in ops]
    every = [rule(rewards)[0] for rule in rules]
    return [*every, *sigma.group_stats(rewards, where)[:3]]

  for array in outcomes(rewards, where):
    assert array.dtype == computed


# --- Rule ---


def test_a_transform_comes_before_the_statistics_and_after_silence():
  def ranks(rewards, where):
    del where
    return jnp.argsort(jnp.argsort(rewards))

  ranked, _ = sigma.rule(sigma.grpo(), transform=ranks)(
    jnp.array([0.3, 100.0, -2.0])
  )
  close(ranked, [0, math.sqrt(1.5), -math.sqrt(1.5)], rtol=1e-6)

  def clipped(rewards, where):
    return jnp.where(where, jnp.minimum(rewards, 1), rewards)

  advantages, keep = sigma.rule(sigma.dapo(), transform=clipped)(
    jnp.array([[2.0, 3.0, 1.0], [1.0, 1.0, 9.0], [4.0, 0.0, 2.0]]),
    jnp.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]]),
  )
  equal(keep, [True, False, True])
  equal(advantages[:2], 0)
  root = math.sqrt(0.5)
  close(advantages[2], [root, -2 * root, root], rtol=1e-6)


def test_power_may_be_traced_and_its_gradient_is_finite():
  """dA/dpower = −A·log σ, and 0 for a silent group."""

  def signal(power):
    return run(sigma.divide(power=power))[0]

  powers = jnp.array([0.0, 0.5, 1.0])
  traced = jax.jit(jax.vmap(signal))(powers)
  for power, advantages in zip(powers, traced, strict=True):
    close(advantages, signal(float(power)), rtol=1e-6)
  std = np.where(SILENT, 1, sigma.group_stats(GROUPS).std)
  slope = -np.log(std)[:, None] * signal(0.5)
  close(jax.jit(jax.jacrev(signal))(0.5), slope, rtol=1e-6)


def test_gradients_are_finite_where_groups_are_silent():
  """Of equal rewards, of a lone one and of none."""
  where = jnp.ones_like(GROUPS).at[4].set(0).at[5, 1:].set(0)
  silent = SILENT | (np.arange(6) == 5)

  def signal(rewards, power, eps):
    op = sigma.product(sigma.divide(power=power, ddof=1, eps=eps), sigma.rloo())
    return sigma.rule(op)(rewards, where)[0][:, 0].sum()

  slopes = jax.jit(jax.grad(signal, (0, 1, 2)))(GROUPS, 0.5, 0.0)
  for slope in slopes:
    assert np.isfinite(slope).all()
  equal(slopes[0][silent], 0)


# --- Errors ---


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: sigma.divide(ddof=2), "`ddof` must be 0 or 1, got 2"),
    (lambda: sigma.divide(ddof=0.5), "`ddof` must be 0 or 1, got 0.5"),
    (lambda: sigma.divide(eps=-1e-8), "`eps` .* at least 0, got -1e-08"),
    (lambda: sigma.divide(eps=math.inf), "`eps` .* got inf"),
    (lambda: sigma.divide(power=math.nan), "`power` .* got nan"),
    (lambda: sigma.divide(power="1"), "`power` .* got '1'"),
    (lambda: sigma.divide(power=None), "`power` .* got None"),
    (lambda: sigma.divide(power=True), "`power` .* got True"),
    (lambda: sigma.divide(power=[1.0]), "`power` .* got"),
    (lambda: sigma.table([]), r"`weights` .* shape \(0,\)"),
    (lambda: sigma.table(3.0), r"`weights` .* shape \(\)"),
    (lambda: sigma.table([[1.0]]), r"`weights` .* shape \(1, 1\)"),
    (lambda: sigma.group_stats(1.0), "`rewards` .* got a scalar"),
  ],
)
def test_errors_say_requirement_and_value(call, message):
  with pytest.raises(ValueError, match=message):
    call()


@pytest.mark.parametrize(
  ("rewards", "where"), [((4,), (4, 1)), ((4, 1), (4,)), ((2, 4), (1, 4))]
)
@pytest.mark.parametrize("name", ["where", "scores"])
def test_a_shape_that_would_broadcast_is_refused(rewards, where, name):
  message = f"`{name}` must have the rewards' shape .*, got"
  given = {"where": None, "scores": None} | {name: jnp.ones(where)}
  for call in sigma.group_stats, sigma.rule(sigma.grpo()):
    with pytest.raises(ValueError, match=message):
      call(jnp.ones(rewards), *given.values())
