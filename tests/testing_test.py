"""The assertions hold for what is right and fail for what is wrong."""

import itertools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special, stats

from groupstd import (
  draws,
  learners,
  losses,
  policies,
  rollouts,
  sigma,
  tasks,
  testing,
  theory,
)

KEY = jax.random.key(0)
CALLS = itertools.count(1)
SOFTMAX = policies.softmax(1, 50)
LOG_PROB = SOFTMAX.log_prob
GRPO, DAPO = sigma.rule(sigma.grpo()), sigma.rule(sigma.dapo())
REFERENCE = {"kl_coef": 0.1, "reference": jnp.ones((1, 50))}
POLICIES = ["bernoulli", "softmax", "network"]
OPS: dict[str, Any] = {
  "grpo": lambda size: sigma.grpo(),
  "dr_grpo": lambda size: sigma.dr_grpo(),
  "dapo": lambda size: sigma.dapo(),
  "rloo": lambda size: sigma.rloo(),
  "power": lambda size: sigma.divide(power=0.5),
  "table": lambda size: sigma.table(np.arange(size - 1) % 3 + 0.5),
}
close = np.testing.assert_allclose


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """What runs once is compiled for longer than it runs."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


class Network(nnx.Module):
  def __init__(self, dtype):
    kwargs = {"rngs": nnx.Rngs(0), "dtype": dtype, "param_dtype": dtype}
    self.embed = nnx.Embed(6, 8, **kwargs)
    self.head = nnx.Linear(8, 6, **kwargs)

  def __call__(self, tokens):  # [N, L] → [N, L, V]
    x = jnp.cumsum(self.embed(tokens), axis=1)
    return 3 * self.head(jnp.tanh(3 * x))


def make(name, dtype=jnp.float32):
  """A policy and a prompt for it."""
  if name == "network":
    policy = policies.from_nnx(Network(dtype), length=2, stop=(0,))
    return policy, jnp.array([[1, 2]])
  policy = policies.bernoulli([0.3]) if name == "bernoulli" else SOFTMAX
  return policy, jnp.array([0])


def tempered(stats):
  """σ^(−½): between Dr. GRPO and GRPO."""
  return sigma.Weight(stats.std**-0.5)


def constant_reference(rewards, where=None, scores=None):
  """A = R − ½: no group is silent, and none is centred."""
  del where, scores
  return rewards - 0.5, jnp.ones(rewards.shape[:-1], bool)


def fails(message, assertion, *args, **kwargs):
  with pytest.raises(AssertionError, match=message):
    assertion(*args, **kwargs)


# --- The identity (arXiv:2607.00152, Theorem 1) ---


@pytest.mark.parametrize(
  ("case", "policy", "size", "op"),
  [
    (i, POLICIES[i % 3], [2, 3, 8, 16][i % 4], [*OPS][i // 2])
    for i in range(12)
  ],
)
def test_the_update_is_the_gain_times_the_contrast(case, policy, size, op):
  """For every k, to 1e-6 of (1/G)Σ|A_i|‖s_i‖.

  Surrogates, which agree on the first step, and baselines alternate; a table
  takes none, as it reads k off the mean.
  """
  policy, prompts = make(policy)
  testing.assert_identity(
    policy,
    OPS[op](size),
    prompts=prompts,
    group_size=size,
    seed=case,
    shift=5.0 * (case % 2) * (op != "table"),
    surrogate=[losses.reinforce(), losses.clipped()][(case + case // 4) % 2],
  )


@pytest.mark.parametrize(
  ("policy", "op"),
  [("bernoulli", "power"), ("softmax", "dapo"), ("network", "rloo")],
)
@pytest.mark.usefixtures("x64")
def test_the_identity_is_exact(policy, op):
  """In double precision, to 1e-12."""
  policy, prompts = make(policy, jnp.float64)
  testing.assert_identity(policy, OPS[op](8), prompts=prompts, rtol=1e-12)


def groups_of(k, size):
  """A group for each k: k right of `size`, as a multiset of the two answers."""
  right = jnp.broadcast_to(jnp.array([1, 0]), (len(k), 2))
  scores = right.astype(float)
  return rollouts.Rollout(
    prompts=jnp.arange(len(k)),
    tokens=right[..., None],
    mask=jnp.ones((len(k), 2, 1), bool),
    log_probs=jnp.zeros((len(k), 2, 1)),
    rewards=scores,
    scores=scores,
    where=jnp.stack([k, size - k], axis=1),
  )


def updates(p, rules, rollout):
  """Each prompt's update of its own θ, by rule, in one compilation."""
  policy = policies.bernoulli(p)

  def each(params, rollout):
    return [
      testing.gradient(
        policy, rule, params, rollout, aggregate=losses.group_sum()
      )
      for rule in rules
    ]

  return np.negative(jax.jit(each)(policy.init(KEY), rollout))


@pytest.mark.parametrize("size", [2, 8, 15])
def test_a_bernoulli_prompt_moves_by_sigma_itself(size):
  """g = σ²·w in each prompt's own θ, whatever p (Δs = 1): GRPO's is σ."""
  k, p = np.arange(size + 1), np.linspace(0.03, 0.97, size + 1)
  std = np.sqrt(k * (size - k)) / size
  weights = np.concatenate([[0], np.arange(size - 1) % 3 + 0.5, [0]])
  expected = [std, std**2, std, std**2 * size / (size - 1)]
  expected += [std**1.5, std**2 * weights]
  rules = [sigma.rule(op(size)) for op in OPS.values()]
  close(updates(p, rules, groups_of(k, size)), expected, rtol=1e-6)


# --- Masking is a denominator ---


def test_dapo_is_grpo_on_the_groups_that_speak():
  """For every aggregate; and it is GRPO over another denominator."""
  rng = np.random.default_rng(0)
  mixed = np.array([True, False, True, True, False, True])
  params, shape = SOFTMAX.init(KEY), (6, 4, 3)
  prompts = jnp.zeros(6, int)
  tokens = jnp.asarray(rng.integers(0, 50, shape))
  mask = jnp.asarray(np.arange(3) < rng.integers(0, 4, (6, 4, 1)))
  log_probs = LOG_PROB(params, prompts, tokens)
  rewards = rng.permuted([[0.0, 1, 1, 0]] * 6, axis=1)
  rewards = jnp.where(mixed[:, None], rewards, 1.0)
  where = jnp.asarray(rng.integers(1, 3, shape[:2]))
  batch = rollouts.Rollout(
    prompts, tokens, mask, log_probs, rewards, rewards, where
  )
  kept, silent = (
    jax.tree.map(lambda x, rows=rows: x[rows], batch)
    for rows in (mixed, ~mixed)
  )
  cases = [(DAPO, batch), (GRPO, kept), (GRPO, batch), (DAPO, silent)]
  aggregates = [losses.token_mean(), losses.sequence_mean()]
  aggregates += [losses.sequence_sum(3.0), losses.group_sum()]

  @jax.jit
  def gradients(params):
    return [
      [
        testing.gradient(SOFTMAX, rule, params, rollout, aggregate=aggregate)
        for rule, rollout in cases
      ]
      for aggregate in aggregates
    ]

  def same(one, other):
    assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(one)

  for aggregate, (masked, on_kept, on_all, nothing) in zip(
    aggregates, gradients(params), strict=True
  ):
    assert np.any(masked)
    same(masked, on_kept)
    few, every = (aggregate(x.mask, x.where)[1] for x in (kept, batch))
    assert (few < every) == (aggregate is not aggregates[-1])
    same(masked * few, on_all * every)
    assert not np.any(nothing)


# --- A user's own ---


@pytest.mark.parametrize(
  "rule",
  [sigma.rule(sigma.product(sigma.mask(), tempered)), constant_reference],
  ids=["tempered", "constant_reference"],
)
def test_a_user_s_method_trains(rule):
  """60 of Adam's steps of 0.05 could move every logit by 3; half will do."""
  start = np.linspace(0.1, 0.9, 64)
  policy = policies.bernoulli(start)
  learner = learners.policy_gradient(policy, optax.adam(0.05), rule)
  collect = draws.collect_bernoulli(
    policy, tasks.bernoulli(64), num_groups=64, group_size=8
  )

  def iteration(state, _):
    rollout, _ = collect(state.params, state.step)
    return learner.step(state, rollout)

  state, infos = jax.jit(
    lambda state: jax.lax.scan(iteration, state, length=60)
  )(learner.init(policy.init(KEY)))
  assert not (infos.nonfinite | infos.skipped).any()
  enough = special.expit(special.logit(start) + 1.5)
  assert special.expit(state.params).mean() > enough.mean() > 0.7


def test_a_rule_outside_the_family_ascends_what_theory_says():
  """E[g] = c_G(p)·p(1 − p), by summing over k ~ Binomial(G, p), to 1e-6."""
  size, p = 5, np.array([0.05, 0.4, 0.9])
  k = np.arange(size + 1)
  groups = groups_of(np.tile(k, 3), size)
  (each,) = updates(np.repeat(p, size + 1), [constant_reference], groups)
  each = each.reshape(3, size + 1)
  assert each[:, 0].all()  # an all-wrong group speaks
  expected = np.sum(stats.binom.pmf(k, size, p[:, None]) * each, axis=1)
  weight = theory.objective_weight(constant_reference, p, size)
  close(weight, 1, rtol=1e-12)  # E[A₊ − A₋]
  close(expected, weight * p * (1 - p), rtol=1e-6)


# --- assert_op_laws ---


@pytest.mark.parametrize(
  "op",
  [
    *[op(8) for op in OPS.values()],
    sigma.max_rl(),
    tempered,
    lambda stats: sigma.Weight(0.0, stats.std > 0.4),
  ],
  ids=[*OPS, "max_rl", "tempered", "zero"],
)
def test_good_operations_keep_the_laws(op):
  testing.assert_op_laws(op)


def nan_at_one_right(stats):
  return sigma.Weight(jnp.where(stats.mean < 0.2, jnp.nan, 1.0))


def infinite_at_a_silent_group_s_stand_in(stats):
  """0 forwards and NaN backwards."""
  return sigma.Weight(1 / (1 - stats.std))


def place_in_the_batch(stats):
  return sigma.Weight(jnp.arange(stats.std.size).reshape(stats.std.shape))


@pytest.mark.parametrize(
  ("op", "message"),
  [
    (nan_at_one_right, "advantages of mixed 0/1 groups are finite"),
    (lambda s: sigma.Weight(1 / (s.mean - 0.5)), "groups are finite"),
    (lambda s: sigma.Weight(s.std[..., None]), r"shape, got \(7, 1\) for 7"),
    (lambda s: sigma.Weight(jnp.ones(3)), "`scale` must broadcast"),
    (lambda s: sigma.Weight(1, s.std[1:] > 0), "`keep` must broadcast"),
    (lambda s: sigma.Weight(1.0, s.std), "`keep` must be boolean"),
    (infinite_at_a_silent_group_s_stand_in, "finite where a group is silent"),
    (place_in_the_batch, "vmap changes nothing"),
    (lambda s: sigma.Weight(next(CALLS)), "law broken"),
  ],
)
def test_bad_operations_break_a_law(op, message):
  fails(message, testing.assert_op_laws, op)


# --- assert_identity ---


def right_answers_only(log_probs, behaviour, advantages, mask):
  terms = -jnp.maximum(advantages, 0) * log_probs
  return terms, jnp.zeros(terms.shape, bool)


def hot(params, keys, prompts, group_size):
  return SOFTMAX.sample(params / 0.6, keys, prompts, group_size)


def stopped(params, prompts, tokens):
  return jax.lax.stop_gradient(LOG_PROB(params, prompts, tokens))


@pytest.mark.parametrize(
  ("op", "changes", "kwargs", "message"),
  [
    # Of what looks at the mean no identity under a shift is claimed.
    (sigma.max_rl(), {}, {"shift": 5.0, "rtol": 1e-5}, "off by .* than 1e-05"),
    (nan_at_one_right, {}, {}, "at k = 1 of 8 it is off by nan"),
    (sigma.grpo(), {}, {"surrogate": right_answers_only}, "must be σ²·w"),
    (sigma.grpo(), {}, REFERENCE, "group of equal rewards must be exactly 0"),
    # Who drew the answers REINFORCE never asks; a ratio does.
    (sigma.grpo(), {"sample": hot}, {"surrogate": losses.clipped()}, "σ²·w"),
    (sigma.grpo(), {"log_prob": stopped}, {}, "must not all be 0"),
  ],
)
def test_what_is_not_the_identity_fails(op, changes, kwargs, message):
  policy = SOFTMAX._replace(**changes)
  fails(message, testing.assert_identity, policy, op, **kwargs)


def test_the_identity_asks_neither_about_the_mean_nor_who_sampled():
  testing.assert_identity(SOFTMAX._replace(sample=hot), sigma.max_rl())


# --- assert_gradients ---


@pytest.mark.parametrize(
  ("policy", "rule", "kwargs"),
  [
    ("bernoulli", constant_reference, {"aggregate": losses.sequence_mean()}),
    ("softmax", DAPO, REFERENCE | {"surrogate": losses.clipped()}),
    ("network", sigma.rule(sigma.table(np.arange(1.0, 8))), {}),
  ],
)
def test_learners_descend_what_they_report(policy, rule, kwargs):
  with jax.enable_x64(True):
    policy, prompts = make(policy, jnp.float64)
  testing.assert_gradients(policy, rule, prompts=prompts, **kwargs)


def unnormalised(params, prompts, tokens):
  """The slope of log Σe^θ is lost; in a whole group it cancels, ΣA being 0."""
  log_z = jax.nn.logsumexp(params[prompts], axis=-1)[:, None, None]
  kept = jax.lax.stop_gradient(log_z)
  return LOG_PROB(params, prompts, tokens) + log_z - kept


def single(params, prompts, tokens):
  return LOG_PROB(params.astype(jnp.float32), prompts, tokens)


def stopped_ratio(log_probs, behaviour, advantages, mask):
  """CISPO's kind, which by declaration is not the gradient of its value."""
  ratio = jax.lax.stop_gradient(jnp.exp(log_probs - behaviour))
  terms = -advantages * ratio * log_probs
  return terms, jnp.zeros(terms.shape, bool)


@pytest.mark.parametrize(
  ("log_prob", "op", "kwargs", "message"),
  [
    (stopped, sigma.grpo(), {}, "it says 0, the central difference"),
    (unnormalised, sigma.grpo(), {}, "reported loss"),
    (single, sigma.grpo(), {}, "reported loss"),
    (LOG_PROB, sigma.grpo(), {"surrogate": stopped_ratio}, "reported loss"),
    # A refused batch, here by weights for groups of 3, is no success.
    (LOG_PROB, sigma.table([1.0, 2.0]), {}, "central difference nan"),
  ],
)
def test_a_gradient_that_is_not_the_loss_s_fails(log_prob, op, kwargs, message):
  policy, rule = SOFTMAX._replace(log_prob=log_prob), sigma.rule(op)
  fails(message, testing.assert_gradients, policy, rule, **kwargs)


def test_single_precision_passes_with_a_longer_step():
  policy = SOFTMAX._replace(log_prob=single)
  testing.assert_gradients(policy, GRPO, step=1e-2, rtol=1e-2)
