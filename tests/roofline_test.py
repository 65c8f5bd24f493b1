"""What programs are counted to cost: by hand, and as devices are known to."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from experiments import roofline
from groupstd import (
  learners,
  losses,
  policies,
  rollouts,
  sharding,
  sigma,
  transformer,
)

B, G, T, WIDTH = 4, 3, 6, 5  # Groups, answers, their tokens, a prompt's.


def once(within):
  del within
  return 1


def square(x):
  return x @ x  # 2·4³ = 128


def counted(function, *args, trips=once):
  return roofline.flops(jax.make_jaxpr(function)(*args), trips)


X = jnp.ones((4, 4))


@pytest.mark.parametrize(
  ("function", "expected"),
  [
    (square, 128),
    (jax.jit(square), 128),
    (jax.checkpoint(square), 128),
    (lambda x: jnp.einsum("bij,bjk->bik", x[None], x[None]), 128),
    (lambda x: jnp.einsum("ij,ij->", x, x), 32),
    (lambda x: jax.lax.fori_loop(0, 5, lambda _, y: square(y), x), 5 * 128),
    (
      lambda x: jax.lax.map(
        lambda y: jax.lax.scan(lambda z, _: (square(z), 0), y, length=3)[0],
        jnp.stack([x] * 2),
      ),
      6 * 128,
    ),
    (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, square, x), 128),
    (
      lambda x: jax.lax.cond(
        x[0, 0] > 0, square, lambda y: square(square(y)), x
      ),
      256,
    ),
    (jax.grad(lambda x: square(x).sum()), 128 * 3),
    (jax.vmap(square, in_axes=0), None),
  ],
)
def test_a_product_counts_as_often_as_it_runs(function, expected):
  if expected is None:
    assert counted(function, jnp.stack([X] * 7)) == 7 * 128
  else:
    assert counted(function, X) == expected


def test_the_caller_says_how_often_a_loop_runs():
  """By what encloses it: 7 times here, 2·3 times there, never in a branch."""

  def grow(x):
    return jax.lax.while_loop(lambda y: y.sum() < 9, square, x)

  def program(x):
    x, _ = jax.lax.scan(lambda y, _: (grow(y), 0), grow(x), length=2)
    return jax.lax.cond(x.sum() > 0, grow, lambda y: y, x)

  runs = {(): 7, ("loop",): 3, ("branch",): 0}
  found = counted(program, X, trips=runs.__getitem__)
  assert found == 128 * (7 + 2 * 3)


def test_a_device_s_shapes_count_once_for_each_device():
  mesh = sharding.make_mesh(2, 2, 2)
  cut = jax.shard_map(
    lambda x: x @ x.T,
    mesh=mesh,
    in_specs=P(sharding.AXES[:2]),
    out_specs=P(sharding.AXES[:2]),
    axis_names=set(sharding.AXES[:2]),
    check_vma=False,
  )
  assert counted(cut, jnp.ones((8, 4))) == 4 * 2 * (2 * 4 * 2)


# --- a decoder's products, by hand ---


def decoder(**fields):
  return transformer.Config(
    **{
      "vocab_size": 11,
      "width": 8,
      "num_layers": 2,
      "num_heads": 4,
      "num_kv_heads": 2,
      "head_dim": 6,
      "hidden": 10,
    }
    | fields
  )


def of_a_token(config):
  """A layer's products with parameters."""
  heads = config.num_heads + config.kv_heads  # q and out, k and v.
  attention = 2 * heads * config.head_size * config.width
  return 2 * (attention + 3 * config.width * config.hidden)


def of_a_pair(config):
  """A query with a key, and what it finds there with its value."""
  return 2 * 2 * config.num_heads * config.head_size


def head(config):
  return 2 * config.width * config.vocab_size


def forward(config):
  """All log-probs of B groups: no answer's last token is read."""
  answered = T - 1
  tokens = WIDTH + G * answered
  pairs = WIDTH**2 + G * answered * (WIDTH + answered)
  layer = tokens * of_a_token(config) + pairs * of_a_pair(config)
  return B * config.num_layers * layer, B * G * T * head(config)


def sampled(config, length=T):
  """A prompt once for its group, then all tokens but the first one by one."""
  asked = WIDTH * of_a_token(config) + WIDTH**2 * of_a_pair(config)
  token = of_a_token(config) + (WIDTH + length) * of_a_pair(config)
  layer = asked + G * (length - 1) * token
  return B * (config.num_layers * layer + G * length * head(config))


def shapes(length=T):
  def array(*shape, of=jnp.int32):
    return jax.ShapeDtypeStruct(shape, of)

  prompts = policies.Prompts(
    array(B, WIDTH), array(B, WIDTH, of=bool), array(B)
  )
  tokens = B, G, length
  return rollouts.Rollout(
    prompts,
    array(*tokens),
    array(*tokens, of=bool),
    array(*tokens, of=jnp.float32),
    array(B, G, of=jnp.float32),
    array(B, G, of=jnp.float32),
    array(B, G, of=bool),
  )


def params_of(policy):
  return jax.eval_shape(policy.init, jax.random.key(0))


@pytest.mark.parametrize("fields", [{}, {"tied": False, "num_layers": 4}])
def test_log_probs_are_counted_as_by_hand(fields):
  config = decoder(**fields)
  policy = transformer.policy(config, length=T)
  rollout = shapes()
  found = counted(
    policy.log_prob, params_of(policy), rollout.prompts, rollout.tokens
  )
  assert found == sum(forward(config))


def step(config, **parts):
  """Operations of an update's step."""
  policy = transformer.policy(config, length=T)
  learner = learners.policy_gradient(
    policy,
    optax.adam(1e-3),
    sigma.rule(sigma.dapo()),
    surrogate=losses.clipped(),
    **parts,
  )
  state = jax.eval_shape(learner.init, params_of(policy))
  number = parts.get("micro_batches", 1)
  return counted(learner.step, state, shapes(), trips=lambda within: number)


def test_a_gradient_is_three_times_its_loss():
  """Each product has the gradients of its two factors, in parts as in one."""
  config = decoder()
  assert step(config) == 3 * sum(forward(config))
  assert step(config, micro_batches=2) == step(config)


def test_a_reference_is_asked_once():
  config = decoder()
  assert step(config, kl_coef=0.1) == 4 * sum(forward(config))


def test_rematerialising_adds_at_most_a_forward_pass():
  layers, _ = forward(decoder())
  extra = step(decoder(remat=True)) - step(decoder())
  assert 0.5 * layers < extra <= layers


@pytest.mark.parametrize("mesh", [None, (2, 2, 2)])
@pytest.mark.parametrize("stop", [(), (1,)])
def test_sampling_is_counted_as_by_hand(mesh, stop):
  """Also cut between devices, and where answers may be moved together."""
  config, length = decoder(), 40
  policy = transformer.policy(config, length=length, stop=stop)
  if mesh:
    policy = sharding.spread(policy, sharding.make_mesh(*mesh))

  def sample(params, prompts):
    keys = jax.random.split(jax.random.key(0), B)
    return policy.sample(params, keys, prompts, G)

  found = counted(
    sample,
    params_of(policy),
    shapes().prompts,
    trips=lambda within: 0 if "branch" in within else length - 1,
  )
  assert found == sampled(config, length)


def test_twice_the_layers_are_twice_the_work():
  one, two = (
    step(decoder(num_layers=n)) - 3 * forward(decoder())[1] for n in (2, 4)
  )
  assert two == 2 * one


# --- what devices send each other ---


def sent(function, trips=once):
  """What each of four devices sends, given f32[8, 4] each."""
  mesh = sharding.make_mesh(4, 1, 2)
  cut = jax.shard_map(
    function,
    mesh=mesh,
    in_specs=P("data"),
    out_specs=P("data"),
    check_vma=False,
  )
  array = jax.ShapeDtypeStruct((32, 4), jnp.float32)
  text = jax.jit(cut).lower(array).compile().as_text()
  return roofline.collectives(text, trips)


SIZE = 8 * 4 * 4


@pytest.mark.parametrize(
  ("kind", "function", "expected"),
  [
    ("all-gather", lambda x: jax.lax.all_gather(x, "data"), 3 * SIZE),
    ("all-reduce", lambda x: jax.lax.psum(x, "data"), 2 * SIZE * 3 / 4),
    (
      "reduce-scatter",
      lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
      SIZE * 3 / 4,
    ),
    (
      "all-to-all",
      lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True),
      SIZE * 3 / 4,
    ),
    (
      "collective-permute",
      lambda x: jax.lax.ppermute(
        x, "data", [(i, (i + 1) % 4) for i in range(4)]
      ),
      SIZE,
    ),
  ],
)
def test_devices_send_what_a_ring_does(kind, function, expected):
  assert sent(function) == {kind: (1, expected)}


def test_what_is_sent_in_a_loop_is_sent_each_time():
  def loop(x):
    return jax.lax.fori_loop(
      0, 6, lambda i, y: jnp.sin(jax.lax.psum(y * i, "data")), x
    )

  assert sent(loop) == {"all-reduce": (6, 6 * 2 * SIZE * 3 / 4)}


def test_the_caller_says_how_often_a_program_s_loop_runs():
  def until(x, function):
    return jax.lax.while_loop(lambda y: y[0, 0] < 9, function, x)

  def summed(x):
    return jax.lax.psum(jnp.sin(x), "data")

  runs = {(): 3, ("loop",): 2, ("branch",): 0}
  found = sent(
    lambda x: jax.lax.cond(
      x[0, 1] > 0,
      lambda y: until(y, summed),
      lambda y: y,
      until(x, lambda y: until(y, summed)),
    ),
    trips=runs.__getitem__,
  )
  assert found["all-reduce"].number == 3 * 2


HLO = """HloModule jit_step, is_scheduled=true

%condition (p: (s32[], bf16[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %p = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%all-reduce-scatter.1 (given: bf16[4,8]) -> bf16[1,8] {
  %given = bf16[4,8]{1,0} parameter(0)
  %sum = bf16[4,8]{1,0} all-reduce(%given), replica_groups=GROUPS, to_apply=%add
  ROOT %slice = bf16[1,8]{1,0} dynamic-slice(%sum), dynamic_slice_sizes={1,8}
}

%chain.1 (one: bf16[1,8]) -> (bf16[1,8], bf16[4,8]) {
  %one = bf16[1,8]{1,0} parameter(0)
  %g = bf16[4,8]{1,0} all-gather(%one), replica_groups=GROUPS, chain_id="0"
  ROOT %c = bf16[1] custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%chain.2 (two: bf16[1,8]) -> (bf16[1,8], bf16[4,8]) {
  %two = bf16[1,8]{1,0} parameter(0)
  %h = bf16[4,8]{1,0} all-gather(%two), replica_groups=GROUPS, chain_id="0"
  ROOT %n = bf16[1] custom-call(%h), custom_call_target="AsyncCollectiveDone"
}

%body (q: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %q = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%q), index=1
  %fused = bf16[1,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %start = (bf16[1,8], bf16[4]) all-gather-start(%fused), replica_groups=GROUPS
  %done = bf16[4,8]{1,0} all-gather-done(%start)
  %first = (bf16[1,8], bf16[4]) fusion(%fused), kind=kCustom, calls=%chain.1
  %meanwhile = bf16[4,8] fusion(%x, %first), kind=kOutput, calls=%chain.2
  ROOT %next = (s32[], /*index=1*/bf16[4,8]{1,0}) tuple(%i, %done)
}

ENTRY %main (a: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %a = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %w = (s32[], bf16[4,8]{1,0}) while(%a), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
  "groups",
  [
    "{{0,1,2,3},{4,5,6,7}}",
    "[2,4]<=[8]",
    "[2,4]<=[2,2,2]T(0,2,1)",
    "mesh['axis_0'=2,'axis_1'=4] {'axis_1'}",
    "mesh['axis_0'=2,'axis_1'=2,'axis_2'=2], device_ids=([8]) "
    "{'axis_0','axis_2'}",
  ],
)
def test_programs_for_tpus_are_read(groups):
  """Groups in any notation, a known loop, async, fused and chained ones."""
  found = roofline.collectives(HLO.replace("GROUPS", groups), once)
  assert found == {
    "reduce-scatter": (5, 5 * 64 * 3 / 4),
    "all-gather": (10, 10 * 16 * 3),
  }


def test_large_arrays_are_found_wherever_they_are_made():
  def program(x):
    return jax.lax.fori_loop(0, 3, lambda i, y: jnp.sort(y * i), x).sum()

  text = jax.jit(program).lower(jnp.ones((50, 100))).compile().as_text()
  largest = roofline.arrays(text)[0]
  assert (largest.bytes, largest.shape) == (50 * 100 * 4, (50, 100))


# --- time ---


def test_a_program_takes_as_long_as_its_slowest_part():
  chip = roofline.Chip(100.0, 1, 10.0, 1.0, "")
  cost = functools.partial(roofline.time, chip)
  assert cost(flops=200, memory=10, network=0.5) == (2.0, 1.0, 0.5)
  assert cost(flops=200, memory=10, network=0.5).bound == 2.0
  for limit in "compute", "memory", "network":
    flops = {"flops": 100, "memory": 10, "network": 1}
    name = "flops" if limit == "compute" else limit
    assert cost(**flops | {name: 3 * flops[name]}).limit == limit


def test_the_sheets_agree_with_themselves():
  """A chip's operations a byte, as published: 240 on v5e, 166, 560."""
  balance = {n: c.flops / c.memory_rate for n, c in roofline.CHIPS.items()}
  np.testing.assert_allclose(
    [balance["v5e"], balance["v5p"], balance["v6e"]], [240, 166, 560], rtol=0.01
  )
  for chip in roofline.CHIPS.values():
    assert chip.network_rate < chip.memory_rate < chip.flops
