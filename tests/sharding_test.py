"""One step on one device and on eight: the same numbers.

Float32 sums of a few terms in another order differ by about 10⁻⁷, float64 ones
by 10⁻¹⁶.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

from configs import bernoulli
from experiments import train
from groupstd import (
  draws,
  learners,
  losses,
  policies,
  rollouts,
  sharding,
  sigma,
  tasks,
)

COLLECTIVES = re.compile(
  r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
  r"|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


def softmax_rollout(num_groups, dtype=np.float32):
  """Half silent groups of four answers, off-policy."""
  rng = np.random.default_rng(num_groups)
  shape = num_groups, 4
  rewards = rng.integers(0, 2, shape) * rng.integers(0, 2, (num_groups, 1))
  rewards[0, :2] = 0, 1
  rewards = rewards.astype(dtype)
  return rollouts.Rollout(
    prompts=np.arange(num_groups),
    tokens=rng.integers(0, 3, (*shape, 1)),
    mask=rng.uniform(size=(*shape, 1)) < 0.9,
    log_probs=rng.normal(-1.1, 0.2, (*shape, 1)).astype(dtype),
    rewards=rewards,
    scores=rewards,
    where=rng.uniform(size=shape) < 0.9,
  )


def same_steps(
  batches,
  size,
  atol,
  said=lambda info: info._replace(computed=0),
  reference=None,
  **kwargs,
):
  """Gradients and what the steps say, on a mesh and without one."""
  start = np.random.default_rng(0).normal(size=(19, 3))
  start = jnp.asarray(start, batches[0].rewards.dtype)
  learner = learners.policy_gradient(
    policies.softmax(19, 3),
    optax.trace(0.0),  # Its state is the last gradient.
    sigma.rule(sigma.dapo()),
    surrogate=losses.clipped(),
    **kwargs,
  )
  spread = sharding.sharded(learner, sharding.make_mesh(size))

  @functools.partial(jax.jit, static_argnums=0)
  def run(learner, batches):  # In one program: a program costs a second.
    state = learner.init(start, reference)
    steps = [learner.step(state, batch) for batch in batches]
    return [(state.opt_state.trace, said(info)) for state, info in steps]

  plain, sharded = run(learner, batches), run(spread, batches)
  for (gradient, info), (other, other_info) in zip(plain, sharded, strict=True):
    assert np.abs(gradient).max() > 0.01
    close(other, gradient, rtol=0, atol=atol)
    close(other_info, info, rtol=10 * atol, atol=10 * atol)


def test_one_to_nine_groups_on_four_devices():
  batches = [softmax_rollout(num_groups) for num_groups in range(1, 10)]
  same_steps(batches, 4, 1e-6, lambda info: info.denominator)


@pytest.mark.usefixtures("x64")
def test_to_rounding_of_float64_on_eight_devices():
  even, uneven = (softmax_rollout(n, np.float64) for n in (16, 19))
  under_kl = {"kl_coef": 0.1, "reference": jnp.zeros((19, 3))}
  same_steps([uneven], 8, 1e-14, **under_kl)
  parts = {"mini_batches": 2, "micro_batches": 2}
  loss = lambda info: info.loss  # noqa: E731
  same_steps([even], 8, 1e-14, loss, **parts, **under_kl)


def scalar(num_prompts, **kwargs):
  """The scalar policy and its learner."""
  policy = policies.bernoulli(np.linspace(0.05, 0.9, num_prompts))
  learner = learners.policy_gradient(
    policy,
    optax.sgd(0.5),
    sigma.rule(sigma.dapo()),
    aggregate=losses.group_sum(),
    **kwargs,
  )
  return policy, learner


def test_drawing_and_learning_as_one_program_anywhere():
  """The same draws bit for bit, and the plain step's parameters to 10⁻⁶."""
  policy, learner = scalar(19)
  collect = draws.collect_bernoulli(
    policy,
    tasks.bernoulli(19),
    num_groups=19,
    group_size=8,
    max_draws=4,
  )

  def show(
    state, rollout, *, shards=1
  ):  # What was drawn, in the place of what was learnt.
    traced.append(1)
    state, _ = learner.step(state, rollout, shards=shards)
    return state, (rollout.tokens[:19], rollout.where[:19])

  def start():
    return learner.init(policy.init(jax.random.key(0)))

  @jax.jit
  def plain(state):
    rollout, counts = collect(state.params, state.step)
    return *learner.step(state, rollout)[:1], counts, rollout

  expected, traced = [], []
  state = start()
  for _ in range(4):
    state, counts, rollout = plain(state)
    expected.append((counts, (rollout.tokens, rollout.where)))
  for size in 1, 2, 8:
    mesh = sharding.make_mesh(size)
    step = sharding.fuse(collect, learner._replace(step=show), mesh)
    found = sharding.replicate(start(), mesh)
    for drawn in expected:
      given = found
      found, *shown = step(found)
      jax.tree.map(equal, tuple(shown), drawn)
      assert given.params.is_deleted()  # Its buffers were taken over.
    close(found.params, state.params, rtol=0, atol=1e-6)
    assert len(found.params.addressable_shards) == size
    assert found.params.is_fully_replicated
  assert len(traced) == 3  # Once a mesh.


def test_any_policy_draws_the_same_tokens_anywhere():
  policy = policies.softmax(6, 3)

  def reward(prompts, tokens, mask):
    return tokens[..., 0] == 0, np.ones(tokens.shape[:2], bool)

  task = tasks.bernoulli(6)._replace(reward=reward)
  collect = rollouts.collector(policy, task, num_groups=6, group_size=4)
  params = policy.init(jax.random.key(0))
  spread = sharding.replicate(params, sharding.make_mesh(8))
  jax.tree.map(equal, collect(spread, 2), collect(params, 2))


# --- What crosses devices ---


def collectives(compiled):
  return set(COLLECTIVES.findall(compiled.as_text()))


def test_statistics_need_no_communication_and_a_step_only_sums():
  mesh = sharding.make_mesh(8)
  groups = NamedSharding(mesh, PartitionSpec("data"))
  rewards = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=groups)
  for op in sigma.dapo(), sigma.rloo():
    rule = jax.jit(sigma.rule(op), out_shardings=groups)
    assert not collectives(rule.lower(rewards).compile())


@pytest.mark.parametrize(
  ("num_groups", "micro_batches"), [(16, 1), (19, 1), (16, 2)]
)
def test_a_step_does_nothing_but_sum_over_the_mesh(num_groups, micro_batches):
  mesh = sharding.make_mesh(8)
  policy, learner = scalar(num_groups, micro_batches=micro_batches)
  collect = draws.collect_bernoulli(
    policy,
    tasks.bernoulli(num_groups),
    num_groups=num_groups,
    group_size=8,
  )
  state = learner.init(policy.init(jax.random.key(0)))
  rollout, _ = collect(state.params, 0)
  state = sharding.replicate(state, mesh)
  for step, *arguments in [
    (sharding.sharded(learner, mesh).step, state, rollout),
    (sharding.fuse(collect, learner, mesh), state),
  ]:
    program = jax.jit(step).lower(*arguments).compile()
    assert collectives(program) == {"all-reduce"}


def test_the_cut_runs_between_groups():
  _, learner = scalar(5)
  pieces = []

  def see(state, rollout, *, shards):
    assert shards == 4
    for leaf in jax.tree.leaves(rollout):

      def found(cut, shape=leaf.shape):
        pieces.append((cut.shard_shape(shape), (2, *shape[1:])))

      jax.debug.inspect_array_sharding(leaf, callback=found)
    return learner.step(state, rollout, shards=shards)

  policy, _ = scalar(5)
  spread = sharding.sharded(
    learner._replace(step=see), sharding.make_mesh(2, 2, devices=jax.devices())
  )
  rollout = softmax_rollout(5)
  spread.step(spread.init(policy.init(jax.random.key(0))), rollout)
  assert len(pieces) == len(jax.tree.leaves(rollout))
  for found, expected in pieces:
    assert found == expected
  assert len(sharding.make_mesh().devices) == 8
  with pytest.raises(ValueError, match=r"`data` must be at least 1, .* got 0"):
    sharding.make_mesh(0)
  with pytest.raises(ValueError, match=r"at most the 8 devices .* 9·1·1 = 9"):
    sharding.make_mesh(9)


@pytest.mark.parametrize("size", [1, 8])
def test_the_parameters_given_to_init_stay_the_callers(size):
  """They are often the KL's reference as well."""
  policy, learner = scalar(8)
  params = policy.init(jax.random.key(0))
  rollout, _ = draws.collect_bernoulli(
    policy, tasks.bernoulli(8), num_groups=8, group_size=4
  )(params, 0)
  spread = sharding.sharded(learner, sharding.make_mesh(size))
  state = spread.init(params)
  spread.step(state, rollout)
  assert state.params.is_deleted()
  assert not params.is_deleted()


# --- The controlled run ---


def test_the_controlled_run_is_the_same_on_eight_devices():
  """Bit for bit, as each prompt is on one device; but for a sum over all."""
  runs = []
  for num_devices in 1, 8:
    config = bernoulli.get_config("dapo")
    config.update(num_prompts=200, num_steps=20, num_devices=num_devices)
    experiment = train.build(config)
    state, drawn = experiment.start(), []
    for _ in range(config.num_steps):
      state, metrics = experiment.step(state)
      drawn.append(metrics)
    runs.append(jax.device_get((state, drawn)))
  (one, drawn), (eight, others) = runs
  jax.tree.map(equal, eight, one)
  for metrics, other in zip(drawn, others, strict=True):
    for name, value in metrics.items():
      if name == "grad_norm":
        close(other[name], value, rtol=1e-6)
      else:
        equal(other[name], value, err_msg=name)
  assert one.step == 20
