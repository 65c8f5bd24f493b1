"""Groups with nothing to learn are not computed, and change nothing else.

The oracle is the same step with every group computed: one micro-batch. Both are
in double precision, where sums in another order differ by about 10⁻¹⁶.
"""

import by_hand
from by_hand import AGGREGATES, PARAMS, TABLE, B
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

from groupstd import learners, losses, sharding, sigma

pytestmark = pytest.mark.usefixtures("x64")

CLIPPED = losses.clipped(0.1)
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal
RULES = {
  "identity": sigma.rule(sigma.identity()),
  "divide": sigma.rule(sigma.divide()),
  "mask": sigma.rule(sigma.dapo()),
}
# What a step may do beside its policy gradient.
EXTRAS = {
  "nothing": {},
  "kl": {"kl_coef": 0.3},
  "kl of mixed groups": {"kl_coef": 0.3, "regularize_silent": False},
  "entropy": {"entropy_coef": 0.2},
  "entropy of mixed groups": {"entropy_coef": 0.2, "regularize_silent": False},
  "correction": {"correction": losses.truncate(1.1)},
  "several updates": {"epochs": 2, "mini_batches": 2, "kl_coef": 0.3},
  "several of mixed groups": {
    "epochs": 2,
    "mini_batches": 2,
    "kl_coef": 0.3,
    "entropy_coef": 0.1,
    "regularize_silent": False,
    "correction": losses.drop(),
  },
}
# With these a silent group that is kept has something to learn.
REGULARIZING = {"kl", "entropy", "several updates"}


def rollout_of(silent, num_groups=B):
  """A batch of float64 whose groups of these rows are silent."""
  rewards = np.tile([1.0, 0.0, 0.0, 0.5], (num_groups, 1))
  rewards[list(silent)] = np.arange(len(silent))[:, None] % 2
  rollout = by_hand.batch(rewards, stale=0.3, prompts=np.arange(num_groups) % B)
  return jax.tree.map(
    lambda x: x.astype(float) if x.dtype == np.float32 else x, rollout
  )


def make(
  rule,
  *,
  micro_batches,
  policy=TABLE,
  optimizer=None,
  surrogate=CLIPPED,
  **kwargs,
):
  learner = learners.policy_gradient(
    policy,
    optimizer or optax.trace(0.0),  # Its state is the last gradient.
    rule,
    surrogate=surrogate,
    micro_batches=micro_batches,
    **kwargs,
  )
  reference = jnp.asarray(PARAMS[::-1], float)
  return learner, learner.init(jnp.asarray(PARAMS, float), reference)


def steps(learner, state, batches):
  """(states, infos) of a step on each of the batches, in one program."""
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
  return jax.jit(
    lambda state: jax.lax.map(lambda x: learner.step(state, x), stacked)
  )(state)


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_step_is_that_of_the_full_computation(extra):
  """Gradient and Info, of each rule, aggregate and number of silent groups."""
  given = EXTRAS[extra]
  mini_batches = given.get("mini_batches", 1)
  silences = [[], [0, 3, 5], [1, 2, 3, 4, 6, 7], list(range(B))]
  batches = [rollout_of(silent) for silent in silences]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
  cases = np.stack(np.indices((len(RULES), len(AGGREGATES), len(silences))))
  cases = cases.reshape(3, -1).T
  rules = list(RULES.values())

  def step(case, micro_batches):
    rule, aggregate, silent = case
    learner, state = make(
      lambda *rewards: jax.lax.switch(rule, rules, *rewards),
      aggregate=lambda *masks: jax.lax.switch(aggregate, AGGREGATES, *masks),
      micro_batches=micro_batches,
      **given,
    )
    return learner.step(state, jax.tree.map(lambda x: x[silent], stacked))

  whole, packed = (
    jax.jit(
      lambda cases, parts=parts: jax.lax.map(lambda x: step(x, parts), cases)
    )(jnp.asarray(cases))
    for parts in (1, B // mini_batches)
  )
  (full, info), (state, other) = whole, packed
  gradient = full.opt_state.trace
  scale = np.abs(gradient).max(axis=(1, 2, 3), keepdims=True)
  assert np.count_nonzero(scale) > len(cases) / 2
  error = np.abs(state.opt_state.trace - gradient)
  assert np.all(error <= 1e-12 * scale)
  close(state.params, full.params, rtol=0, atol=1e-12)
  for name, value in info._replace(computed=0)._asdict().items():
    close(
      getattr(other._replace(computed=0), name),
      value,
      rtol=1e-12,
      atol=1e-14,
      err_msg=name,
    )
  groups = np.array([B - len(silent) for silent in silences])[cases[:, 2]]
  if extra in REGULARIZING:
    groups = np.where(cases[:, 0] == list(RULES).index("mask"), groups, B)
  equal(info.computed, B * given.get("epochs", 1))
  equal(other.computed, groups * given.get("epochs", 1))


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_groups_are_packed_into_as_few_parts_as_hold_them(micro_batches):
  """Whichever they are: ⌈n/(B/parts)⌉ parts of B/parts groups."""
  size = B // micro_batches
  rng = np.random.default_rng(micro_batches)
  made = make(RULES["divide"], micro_batches=micro_batches)
  silences = [rng.permutation(B)[:n].tolist() for n in range(B + 1)]
  _, info = steps(*made, list(map(rollout_of, silences)))
  equal(info.computed, [-(-(B - n) // size) * size for n in range(B + 1)])


def test_the_policy_is_asked_as_often_as_groups_need():
  """Counted on the host as the program runs, forward and backward."""
  calls = []

  def counting(params, prompts, tokens):
    @jax.custom_vjp
    def count(x):
      return x

    def forward(x):
      jax.debug.callback(lambda: calls.append("forward"))
      return x, None

    def backward(_, slope):
      jax.debug.callback(lambda: calls.append("backward"))
      return (slope,)

    count.defvjp(forward, backward)
    return count(TABLE.log_prob(params, prompts, tokens))

  policy = TABLE._replace(log_prob=counting)
  learner, state = make(RULES["divide"], policy=policy, micro_batches=4)
  step = jax.jit(learner.step)
  for silent, parts in ([], 4), ([0, 7], 3), (range(5), 2), (range(B), 0):
    calls.clear()
    jax.block_until_ready(step(state, rollout_of(list(silent))))
    jax.effects_barrier()
    assert sorted(calls) == ["backward"] * parts + ["forward"] * parts
  assert step._cache_size() == 1  # One program for every share.


def test_a_batch_of_silence_is_what_the_method_says_without_a_pass():
  """GRPO and Dr. GRPO update by zero and count it; DAPO does not update."""

  def refused(params, prompts, tokens):
    def refuse(found):
      raise AssertionError("the policy must not be asked.")

    found = TABLE.log_prob(params, prompts, tokens)
    shape = jax.ShapeDtypeStruct(found.shape, found.dtype)
    return found + jax.lax.stop_gradient(
      jax.pure_callback(refuse, shape, jax.lax.stop_gradient(found))
    )

  never = TABLE._replace(log_prob=refused)
  for name, rule in RULES.items():
    learner, state = make(
      rule, policy=never, optimizer=optax.adam(0.1), micro_batches=4
    )
    after, info = jax.jit(learner.step)(state, rollout_of(list(range(B))))
    equal(after.params, state.params)
    updates = name != "mask"
    assert after.opt_state[0].count == updates
    assert (info.skipped, info.nonfinite) == (not updates, 0)
    assert (info.denominator > 0) == updates
    assert (info.computed, info.grad_norm, info.loss) == (0, 0, 0)
    assert after.step == 1


def test_what_fills_a_part_is_not_read():
  """Infinite log-probs of silent groups, and of answers of advantage 0."""
  silent = [0, 3, 5]
  good = rollout_of(silent)
  rewards = good.rewards.copy()
  rewards[1] = 1.0, 0.5, 0.5, 0.0
  good = good._replace(rewards=rewards, scores=rewards)
  bad = good._replace(log_probs=good.log_probs.copy())
  bad.log_probs[silent] = np.inf
  bad.log_probs[1, 1:3] = np.nan
  for micro_batches in 1, 2, 4:
    made = make(RULES["divide"], micro_batches=micro_batches)
    state, info = steps(*made, [good, bad])
    equal(state.opt_state.trace[1], state.opt_state.trace[0])
    # But for the entropy, which is the sampler's own word.
    for name, (one, other) in info._replace(entropy=(0, 0))._asdict().items():
      assert one == other, name
    equal(info.nonfinite, 0)
    assert info.first_ratio[0] > 0.1


def test_a_term_without_an_advantage_is_none_whatever_the_packing():
  """Of a surrogate that has one everywhere."""

  def shifted(log_probs, behaviour, advantages, mask):
    terms = log_probs - advantages * log_probs
    return terms, jnp.zeros_like(mask)

  batches = [rollout_of(silent) for silent in ([], [0, 3, 5], list(range(B)))]
  expected = None
  for micro_batches in 1, 4:
    state, info = steps(
      *make(RULES["divide"], micro_batches=micro_batches, surrogate=shifted),
      batches,
    )
    equal(info.loss[2], 0)
    equal(state.opt_state.trace[2], 0)
    equal(state.opt_state.trace[1, [0, 3, 5]], 0)
    expected = info.loss if expected is None else expected
    close(info.loss, expected, rtol=1e-12)


# --- On a mesh ---


def test_packing_stays_on_each_device():
  """The same gradient; what crosses is a sum, and the greatest number."""
  silent = [1, 2, 5, 6, 7, 9, 12, 13, 14, 15, 17, 18, 20, 22, 25, 28, 31]
  rollout = rollout_of(silent, 32)
  given = {"kl_coef": 0.3, "regularize_silent": False}
  learner, state = make(RULES["divide"], micro_batches=4, **given)
  full, _ = make(RULES["divide"], micro_batches=1, **given)
  expected, _ = jax.jit(full.step)(state, rollout)
  for size in 2, 8:
    mesh = sharding.make_mesh(size)
    spread = sharding.sharded(learner, mesh)
    groups = NamedSharding(mesh, PartitionSpec("data"))
    placed = jax.device_put(rollout, groups)
    start = sharding.replicate(state, mesh)
    program = jax.jit(spread.step).lower(start, placed).compile()
    text = program.as_text()
    for word in "all-gather", "all-to-all", "collective-permute":
      assert f"{word}(" not in text
      assert f"{word}-start(" not in text
    found, info = program(start, placed)
    close(found.opt_state.trace, expected.opt_state.trace, rtol=0, atol=1e-14)
    # As many parts as the device with the most mixed groups needs.
    mixed = ~np.isin(np.arange(32), silent).reshape(size, -1)
    part = 32 // 4 // size
    assert info.computed == -(-mixed.sum(1).max() // part) * 8
