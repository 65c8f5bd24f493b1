"""Graded rewards and length-normalised losses: what becomes of the identity.

All through the learner's own loss, in double precision.
"""

import itertools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import lengths
from groupstd import (
  losses,
  policies,
  rollouts,
  sigma,
  testing,
  theory,
  transforms,
)

G = 6
close = np.testing.assert_allclose


class Network(nnx.Module):
  def __init__(self):
    kwargs = {
      "rngs": nnx.Rngs(0),
      "dtype": jnp.float64,
      "param_dtype": jnp.float64,
    }
    self.embed = nnx.Embed(6, 8, **kwargs)
    self.head = nnx.Linear(8, 6, **kwargs)

  def __call__(self, tokens):  # [N, L] → [N, L, V]
    return 3 * self.head(jnp.tanh(jnp.cumsum(self.embed(tokens), axis=1)))


def tempered(stats):
  """σ^(−½): between Dr. GRPO and GRPO."""
  return sigma.Weight(stats.std**-0.5)


RULES = {
  "dr_grpo": (sigma.dr_grpo(), None),
  "grpo": (sigma.grpo(), None),
  "tempered": (tempered, None),
  "max_rl": (sigma.max_rl(), None),
  "ranks": (sigma.grpo(), transforms.rank()),
  "winsorized": (sigma.divide(power=0.5), transforms.winsorize(0.2)),
}


@pytest.fixture(autouse=True)
def double_and_quick():
  """What runs once is compiled for longer than it runs."""
  jax.config.update("jax_disable_most_optimizations", True)
  with jax.enable_x64(True):
    yield
  jax.config.update("jax_disable_most_optimizations", False)


def flat(tree, batch_dims):
  """[..., D] of a tree of [..., *]."""
  return jnp.concatenate(
    [x.reshape(*x.shape[:batch_dims], -1) for x in jax.tree.leaves(tree)],
    axis=-1,
  )


def scores_of(policy, params, prompts, answers):
  """[G, D]: ∇log π of each whole answer, from nothing but the policy."""

  def log_prob(params):
    tokens = policy.log_prob(params, prompts, answers.tokens)[0]
    return jnp.sum(jnp.where(answers.mask[0], tokens, 0), axis=-1)

  return np.asarray(flat(jax.jit(jax.jacrev(log_prob))(params), 1))


def updates(policy, rule, params, prompts, answers, rewards, where=None, **kw):
  """[N, D]: the ascent of N groups of the same answers, rewards [N, G]."""
  where = np.ones(rewards.shape, bool) if where is None else where

  def update(rewards, where):
    rollout = rollouts.Rollout(
      prompts=prompts,
      tokens=answers.tokens,
      mask=answers.mask,
      log_probs=answers.log_probs,
      rewards=rewards[None],
      scores=rewards[None],
      where=where[None],
    )
    return flat(testing.gradient(policy, rule, params, rollout, **kw), 0)

  return -np.asarray(jax.jit(jax.vmap(update))(rewards, where))


def problem(name):
  """A policy, its parameters, one prompt and a group of its answers."""
  if name == "network":
    policy = policies.from_nnx(Network(), length=2, stop=(0,))
    prompts = jnp.array([[1, 2]])
  elif name == "softmax":
    policy, prompts = policies.softmax(1, 50), jnp.array([0])
  else:
    policy, prompts = lengths.one_or_three(1), jnp.array([0])
  params = policy.init(jax.random.key(0))
  params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
  sample = jax.jit(policy.sample, static_argnums=3)
  answers = sample(params, jax.random.split(jax.random.key(1), 1), prompts, G)
  return policy, params, prompts, answers


def slopes(rewards, scores):
  """[D]: the least-squares line of every score component on the reward."""
  design = np.stack([np.ones(len(rewards)), rewards], axis=1)
  return np.linalg.lstsq(design, scores, rcond=None)[0][1]


def graded(seed=0, count=12):
  """Positive real rewards (1/μ is among the weights) of several sizes, tied."""
  rng = np.random.default_rng(seed)
  rewards = rng.gamma(1.0, size=(count, G)) * 10.0 ** rng.integers(
    -3, 4, (count, 1)
  )
  rewards[: count // 2, 1] = rewards[: count // 2, 0]
  return rewards


# --- Graded rewards ---


@pytest.mark.parametrize(
  ("name", "policy"),
  [(name, ["softmax", "network"][i % 2]) for i, name in enumerate(RULES)]
  + [("grpo", "softmax"), ("dr_grpo", "network")],
)
def test_the_update_is_sigma_times_the_slope(name, policy):
  """(1/G)ΣA_i s_i = σ²·w·β, which is σβ for GRPO, to 1e-12 of (1/G)Σ|A|‖s‖.

  β by numpy's least squares. Of binary rewards it is Theorem 1 of
  arXiv:2607.00152; here they are any real numbers, some not scored.
  """
  op, transform = RULES[name]
  rule = sigma.rule(op, transform=transform)
  policy, params, prompts, answers = problem(policy)
  scores = scores_of(policy, params, prompts, answers)
  rewards = graded()
  where = np.random.default_rng(1).uniform(size=rewards.shape) < 0.8
  where[::3], where[:, :3] = True, True
  found = updates(
    policy,
    rule,
    params,
    prompts,
    answers,
    rewards,
    where,
    aggregate=losses.group_sum(),
  )
  seen = rewards if transform is None else transform(rewards, where)
  weight = np.asarray(op(sigma.group_stats(jnp.asarray(seen), where)).scale)
  for i, valid in enumerate(where):
    r, s = np.asarray(seen)[i, valid], scores[valid]
    expected = np.var(r) * weight[i] * slopes(r, s)
    if name in ("grpo", "ranks"):
      close(expected, np.std(r) * slopes(r, s), rtol=1e-12)
    scale = weight[i] * np.mean(
      np.abs(r - r.mean()) * np.linalg.norm(s, axis=1)
    )
    assert np.linalg.norm(expected) > 1e-3 * scale
    assert np.linalg.norm(found[i] - expected) <= 1e-12 * scale


def test_of_binary_rewards_the_slope_is_the_contrast():
  """β = s̄₊ − s̄₋ (arXiv:2607.00152, Theorem 1)."""
  scores = np.random.default_rng(0).normal(size=(G, 5))
  for bits in itertools.product([0.0, 1.0], repeat=G):
    right = np.array(bits) > 0
    if 0 < right.sum() < G:
      contrast = scores[right].mean(0) - scores[~right].mean(0)
      close(slopes(np.array(bits), scores), contrast, rtol=0, atol=1e-14)


def test_grpo_is_blind_to_the_rewards_origin_and_unit():
  """R → aR + b: σ takes a, β gives it back, and neither sees b."""
  policy, params, prompts, answers = problem("softmax")
  rewards = graded(2)
  rewards /= rewards.max(1, keepdims=True)
  rule, aggregate = sigma.rule(sigma.grpo()), losses.group_sum()
  one, other = (
    updates(policy, rule, params, prompts, answers, r, aggregate=aggregate)
    for r in (rewards, 300 * rewards - 70)
  )
  close(other, one, rtol=0, atol=1e-11)


def test_dr_grpo_ascends_the_mean_of_graded_rewards():
  """E[g] = (1 − 1/G)·∇E[R], over all 4³ groups: no limit, no binary rewards."""
  policy, size = policies.softmax(1, 4), 3
  params = jax.random.normal(jax.random.key(0), (1, 4))
  reward = jnp.array([0.3, -2.0, 50.0, 0.3])
  found = enumerated(policy, sigma.dr_grpo(), params, reward, 4, size)
  slope = jax.grad(lambda theta: jax.nn.softmax(theta[0]) @ reward)(params)
  close(found, (1 - 1 / size) * slope.ravel(), rtol=0, atol=1e-12)


# --- Length normalisation ---


def enumerated(policy, op, params, reward, answers, size, **kwargs):
  """[D]: E[g] over all groups of the answers, an index or [N, 3] tokens."""
  if isinstance(answers, int):
    tokens = jnp.arange(answers)[:, None]
    mask = jnp.ones(tokens.shape, bool)
  else:
    tokens, mask = answers, lengths.token_mask(answers)
  log_probs = policy.log_prob(params, jnp.array([0]), tokens[None])[0]
  chance = jnp.exp(jnp.sum(jnp.where(mask, log_probs, 0), axis=-1))
  close(chance.sum(), 1.0, rtol=1e-14)
  groups = jnp.array(list(itertools.product(range(len(tokens)), repeat=size)))

  def update(group):
    rollout = rollouts.Rollout(
      prompts=jnp.array([0]),
      tokens=tokens[group][None],
      mask=mask[group][None],
      log_probs=log_probs[group][None],
      rewards=reward[group][None],
      scores=reward[group][None],
      where=jnp.ones((1, size), bool),
    )
    return flat(
      testing.gradient(policy, sigma.rule(op), params, rollout, **kwargs), 0
    )

  found = jax.jit(jax.vmap(update))(groups)
  return -jnp.tensordot(jnp.prod(chance[groups], axis=1), found, 1)


def test_normalised_by_length_the_identity_is_of_scores_over_length():
  """(1/G)ΣA_i s_i/|y_i| = σ²·w·Δ(s/|y|) exactly, and is not σ²·w·Δs."""
  policy, params, prompts, answers = problem("lengths")
  length = np.asarray(answers.mask[0].sum(-1))
  assert {1, 3} == set(length)
  scores = scores_of(policy, params, prompts, answers)
  rewards = np.array(list(itertools.product([0.0, 1.0], repeat=G)))[1:-1]
  for op in sigma.grpo(), sigma.dr_grpo():
    found = updates(
      policy,
      sigma.rule(op),
      params,
      prompts,
      answers,
      rewards,
      aggregate=losses.sequence_mean(),
    )
    k = rewards.sum(1, keepdims=True)
    gain = np.asarray(theory.gain(op, G))[k.astype(int)]
    signs = rewards / k - (1 - rewards) / (G - k)
    scale = gain * np.abs(signs) @ np.linalg.norm(scores, axis=1)[:, None]
    weighted = gain * (signs @ (scores / length[:, None]))
    error = np.linalg.norm(found - weighted, axis=1)
    assert (error <= 1e-12 * scale[:, 0]).all()
    plain = gain * (signs @ scores) * (1 / length).mean()
    error = np.linalg.norm(found - plain, axis=1)
    assert (error > 0.01 * scale[:, 0]).mean() > 0.9


@pytest.mark.parametrize(
  ("op", "size"),
  [
    (sigma.grpo(), 3),
    (sigma.dr_grpo(), 2),
    (sigma.max_rl(), 3),
  ],
)
def test_length_adds_the_slope_of_its_covariance_with_correctness(op, size):
  """E[g] = c_G(p)·(E[1/|y|]∇p + ∇Cov(R, 1/|y|)), over all 11^G groups.

  Through the learner's sequence mean, to 1e-12 of c_G(p)·‖∇p‖; without the
  covariance it misses by a twentieth of that.
  """
  policy, answers = lengths.one_or_three(1), lengths.all_answers()
  params = jax.random.normal(jax.random.key(3), (1, 3, 3))
  reward = lengths.last_is_one(answers) * 1.0
  found = enumerated(
    policy,
    op,
    params,
    reward,
    answers,
    size,
    aggregate=losses.sequence_mean(),
  )
  p = chance_of_right(params)
  inverse, slope, cross = lengths.terms(params)
  weight = theory.objective_weight(sigma.rule(op), p, size)
  scale = weight * jnp.linalg.norm(slope)
  error = jnp.linalg.norm(found - weight * (inverse * slope + cross).ravel())
  assert error <= 1e-12 * scale
  bare = jnp.linalg.norm(found - weight * inverse * slope.ravel())
  assert bare > 0.05 * scale


def chance_of_right(params):
  """p of `lengths.one_or_three` at a table, by its two ways to be right."""
  first, last = jax.nn.softmax(params[0, 0]), jax.nn.softmax(params[0, 2])
  return first[1] + first[2] * last[1]


def test_answers_summed_ascend_an_objective_and_averaged_ones_do_not():
  """c_G(p)∇p has a symmetric Jacobian, so is a gradient; with lengths not.

  The field's Jacobian, by how far it is from symmetric over its own norm.
  """
  params = jax.random.normal(jax.random.key(3), (1, 3, 3))
  rule = sigma.rule(sigma.grpo())

  def asymmetry(field):
    jacobian = jax.jacfwd(field)(params.ravel())
    return jnp.linalg.norm(jacobian - jacobian.T) / jnp.linalg.norm(jacobian)

  def weight(params):
    return theory.objective_weight(rule, chance_of_right(params), 8)

  def summed(flat):
    _, slope, _ = lengths.terms(flat.reshape(1, 3, 3))
    return weight(flat.reshape(1, 3, 3)) * slope.ravel()

  def averaged(flat):
    inverse, slope, cross = lengths.terms(flat.reshape(1, 3, 3))
    return weight(flat.reshape(1, 3, 3)) * (inverse * slope + cross).ravel()

  one, other = jax.jit(lambda: (asymmetry(summed), asymmetry(averaged)))()
  assert one < 1e-12
  assert other > 0.01


def test_what_length_breaks_depends_on_which_answers_are_right():
  """Right answers that are short speed p up, and slow it down if long.

  At ∇Cov's component along ∇p over E[1/|y|]‖∇p‖; the whole term is at least a
  quarter of the rest throughout, also where Cov(R, 1/|y|) = 0.
  """
  sweep = {name: np.array(x) for name, x in lengths.sweep().items()}
  assert (sweep["along"][sweep["coupling"] > 0.1] > 0.1).all()
  assert (sweep["along"][sweep["coupling"] < -0.2] < -0.1).all()
  assert (sweep["size"] > 0.25).all()
  assert (np.abs(sweep["along"]) <= sweep["size"]).all()
