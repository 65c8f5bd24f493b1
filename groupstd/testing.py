"""Assertions, in chex's manner, for a new operation, rule or policy.

>>> def tempered(stats):
...   return sigma.Weight(stats.std ** -0.5)
>>> assert_op_laws(tempered)
>>> assert_identity(policies.softmax(1, 50), tempered)
>>> assert_gradients(policies.softmax(1, 50), sigma.rule(tempered))
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from groupstd import learners, losses, policies, rollouts, sigma, theory

__all__ = [
  "assert_gradients",
  "assert_identity",
  "assert_op_laws",
  "gradient",
]


def gradient(
  policy: policies.Policy,
  rule: sigma.Rule,
  params: Any,
  rollout: rollouts.Rollout,
  *,
  reference: Any = None,
  **kwargs: Any,
) -> Any:
  """What `learners.policy_gradient(policy, ..., rule, **kwargs)` descends.

  Taken from the learner's own step, by an optimizer that only keeps what it is
  handed; 0 where the step makes no update. Jit, vmap or shard it at will.

  Args:
    policy: the policy.
    rule: the rule.
    params: where the gradient is taken.
    rollout: the batch.
    reference: of a KL; the params by default.
    **kwargs: the learner's other arguments.

  Returns:
    A pytree like `params`.
  """
  learner = learners.policy_gradient(policy, _keep_gradient(), rule, **kwargs)
  state, _ = learner.step(learner.init(params, reference), rollout)
  return state.opt_state


def assert_identity(
  policy: policies.Policy,
  op: sigma.SigmaOp,
  *,
  prompts: Any = None,
  params: Any = None,
  group_size: int = 8,
  seed: int = 0,
  shift: float = 0.0,
  rtol: float | None = None,
  **kwargs: Any,
) -> None:
  """Asserts that the update is σ²·w·(s̄₊ − s̄₋), for every k (Theorem 1).

  G answers are drawn and k = 0, …, G of them called right, all k in one batch;
  each group's gradient, through the real loss, is held against the contrast of
  the answers' own scores. Source: arXiv:2607.00152.

  Args:
    policy: the policy, in the dtype of its parameters.
    op: the operation.
    prompts: [1, ...], one prompt; index 0 by default.
    params: the policy's parameters; `policy.init` by default.
    group_size: G.
    seed: of parameters, answers and which of them are right.
    shift: a baseline added to the 0/1 rewards, which must change nothing as
      long as `op` depends on σ alone.
    rtol: largest error in norm, relative to (1/G)Σ|A_i|‖s_i‖; 1e-6 in float32
      and 1e-12 in float64 by default.
    **kwargs: the learner's arguments, such as a surrogate.

  Raises:
    AssertionError: naming k, the error and the bound.
  """
  key = jax.random.key(seed)
  params = policy.init(key) if params is None else params
  prompts = jnp.zeros([1], jnp.int32) if prompts is None else prompts
  answers = policy.sample(params, key[None], prompts, group_size)
  mask = answers.mask[0]  # [G, T]

  def log_prob(params):  # [G], of whole answers.
    tokens = policy.log_prob(params, prompts, answers.tokens)[0]
    return jnp.sum(jnp.where(mask, tokens, 0), axis=-1)

  scores = _flatten(jax.jit(jax.jacrev(log_prob))(params), 1)  # [G, D]
  if not np.any(scores):
    raise AssertionError(
      "the scores ∇log π of the answers must not all be 0: there is nothing to"
      " hold an update against."
    )
  rng = np.random.default_rng(seed)
  right = np.arange(group_size) < np.arange(group_size + 1)[:, None]
  right = rng.permuted(right, axis=1)  # [G + 1, G]

  def group(rewards):  # [G] → the gradient of a batch of that one group.
    rewards = (rewards + shift).astype(scores.dtype)[None]
    rollout = rollouts.Rollout(
      prompts=prompts,
      tokens=answers.tokens,
      mask=answers.mask,
      log_probs=answers.log_probs,
      rewards=rewards,
      scores=rewards,
      where=jnp.ones(rewards.shape, bool),
    )
    update = gradient(
      policy,
      sigma.rule(op),
      params,
      rollout,
      aggregate=losses.group_sum(),
      **kwargs,
    )
    return jax.tree.map(jnp.negative, update)

  updates = _flatten(jax.jit(jax.vmap(group))(right), 1)  # [G + 1, D]
  scores = scores.astype(np.float64)
  k = np.arange(group_size + 1)
  gain = np.asarray(theory.gain(op, group_size))
  mean_right = right @ scores / np.maximum(k, 1)[:, None]
  mean_wrong = ~right @ scores / np.maximum(group_size - k, 1)[:, None]
  expected = gain[:, None] * (mean_right - mean_wrong)
  if np.any(updates[[0, -1]]):
    raise AssertionError(
      "the update of a group of equal rewards must be exactly 0, got norm"
      f" {np.linalg.norm(updates[[0, -1]]):.3g}."
    )
  # |A₊| = gain·G/k and |A₋| = gain·G/(G − k), from the gain's definition.
  norms = np.linalg.norm(scores, axis=1)
  sizes = np.where(right, k[:, None], group_size - k[:, None])
  scale = np.abs(gain) * np.sum(norms / sizes, axis=1)
  error = np.linalg.norm(updates - expected, axis=1)
  if rtol is None:
    rtol = 1e-12 if updates.dtype == np.float64 else 1e-6
  worst = int(np.argmax(error - rtol * scale))
  if not np.all(error <= rtol * scale):
    raise AssertionError(
      f"the update must be σ²·w·(s̄₊ − s̄₋); at k = {worst} of {group_size} it"
      f" is off by {error[worst] / scale[worst]:.3g} of (1/G)Σ|A|‖s‖, more"
      f" than {rtol:g}."
    )


def assert_op_laws(op: sigma.SigmaOp, *, group_size: int = 8) -> None:
  """Asserts what the rest relies on of an operation, on 0/1 groups.

  Shapes broadcast; advantages are finite, sum to 0 over the group and treat
  equal rewards alike; a group of equal rewards gets exactly 0; jit, vmap and
  multisets agree with plain groups; `identity()` is the unit of `product`,
  which commutes; gradients through a silent group are finite.

  Raises:
    AssertionError: naming the law.
  """
  k = np.arange(group_size + 1)
  rewards = jnp.asarray(np.arange(group_size) < k[:, None], jnp.float32)
  rule = sigma.rule(op)
  weight = op(sigma.group_stats(rewards[1:-1]))
  for name, value in weight._asdict().items():
    try:
      shape = jnp.broadcast_shapes(jnp.shape(value), (group_size - 1,))
    except ValueError as error:
      raise AssertionError(
        f"`{name}` must broadcast to [...]: {error}"
      ) from error
    if shape != (group_size - 1,):
      raise AssertionError(
        f"`{name}` must broadcast to the statistics' shape, got"
        f" {jnp.shape(value)} for {group_size - 1} groups."
      )
  if jnp.asarray(weight.keep).dtype != bool:
    raise AssertionError("`keep` must be boolean.")

  advantages, keep = rule(rewards)
  same = {"rtol": 1e-5, "atol": 1e-6}
  _law("advantages of mixed 0/1 groups are finite", np.isfinite(advantages))
  _law("equal rewards get exactly 0", advantages[jnp.array([0, -1])] == 0)
  _close(
    "advantages sum to 0 over the group",
    jnp.sum(advantages, axis=-1),
    jnp.zeros(group_size + 1),
    rtol=0,
    atol=1e-5 * max(1.0, float(jnp.max(jnp.abs(advantages)))),
  )
  order = np.random.default_rng(0).permutation(group_size)
  _close(
    "the order of a group's rewards carries nothing",
    rule(rewards[:, order])[0],
    advantages[:, order],
    **same,
  )
  jitted = jax.jit(rule)(rewards)
  _close("jit changes nothing", jitted[0], advantages, **same)
  _law("jit changes nothing", jitted[1] == keep)
  _close("vmap changes nothing", jax.vmap(rule)(rewards)[0], advantages, **same)
  counts = jnp.stack([k, group_size - k], axis=1)
  multiset, _ = rule(
    jnp.broadcast_to(jnp.array([1.0, 0.0]), counts.shape), counts
  )
  _close(
    "a multiset is the group written out",
    jnp.where(rewards > 0, multiset[:, :1], multiset[:, 1:]),
    advantages,
    **same,
  )
  for name, other in [
    ("identity() is the unit of product", sigma.identity()),
    ("product commutes", sigma.divide(power=0.5)),
  ]:
    left = sigma.rule(sigma.product(op, other))(rewards)
    right = sigma.rule(sigma.product(other, op))(rewards)
    _close(name, left[0], right[0], **same)
    _law(name, left[1] == right[1])
  unit, _ = sigma.rule(sigma.product(op, sigma.identity()))(rewards)
  _close("identity() is the unit of product", unit, advantages, **same)

  def scaled(factor):
    factored = sigma.product(op, lambda stats: sigma.Weight(stats.std**factor))
    return jnp.sum(sigma.rule(factored)(rewards)[0][:, 0])

  _law(
    "gradients are finite where a group is silent",
    np.isfinite(jax.grad(scaled)(0.5)),
  )


def assert_gradients(
  policy: policies.Policy,
  rule: sigma.Rule,
  *,
  prompts: Any = None,
  params: Any = None,
  group_size: int = 8,
  seed: int = 0,
  step: float = 1e-5,
  rtol: float = 1e-6,
  reference: Any = None,
  **kwargs: Any,
) -> None:
  """Asserts that the learner descends the very loss that it reports.

  In double precision, a third of each group right, off-policy by a tenth of a
  nat, every fifth token masked and its log-prob NaN: the gradient along three
  random directions against the central difference of `Info.loss`.

  Args:
    policy: the policy.
    rule: the rule.
    prompts: [B, ...]; index 0 by default.
    params: the policy's parameters; `policy.init` by default.
    group_size: G.
    seed: of parameters, answers, rewards and directions.
    step: of the difference. A policy that computes in float32, whatever its
      parameters, needs one of about 1e-2,
    rtol: and a largest relative error as large. Rounding to float64 in the
      difference is allowed for beside it.
    reference: of a KL; the params by default.
    **kwargs: the learner's other arguments.

  Raises:
    AssertionError: naming the two derivatives.
  """
  with jax.enable_x64(True):
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    params = policy.init(next(keys)) if params is None else params
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
    prompts = jnp.zeros([1], jnp.int32) if prompts is None else prompts
    batch = len(jax.tree.leaves(prompts)[0])
    sample_keys = jax.random.split(next(keys), batch)
    answers = policy.sample(params, sample_keys, prompts, group_size)
    shape = answers.tokens.shape
    hidden = jnp.arange(answers.tokens.size).reshape(shape) % 5 == 0
    noise = 0.1 * jax.random.normal(next(keys), shape)
    # 0/1, so that every rule has an advantage for them; a third is right, so
    # that no masked few leave the sum of the advantages at 0.
    rewards = jax.random.permutation(
      next(keys),
      jnp.broadcast_to(jnp.arange(group_size) % 3 == 0, shape[:2]),
      axis=1,
      independent=True,
    ).astype(jnp.float64)
    rollout = rollouts.Rollout(
      prompts=prompts,
      tokens=answers.tokens,
      mask=answers.mask & ~hidden,
      log_probs=jnp.where(hidden, jnp.nan, answers.log_probs + noise),
      rewards=rewards,
      scores=rewards,
      where=jnp.ones(shape[:2], bool),
    )
    learner = learners.policy_gradient(policy, optax.identity(), rule, **kwargs)
    reference = params if reference is None else reference

    @jax.jit
    def loss(params):
      return learner.step(learner.init(params, reference), rollout)[1].loss

    @jax.jit
    def descend(params):
      return gradient(
        policy, rule, params, rollout, reference=reference, **kwargs
      )

    slope = descend(params)
    for _ in range(3):
      key = next(keys)
      direction = jax.tree.map(
        lambda x, key=key: jax.random.normal(key, x.shape), params
      )
      norm = optax.tree.norm(direction)
      ahead, behind = (
        loss(optax.tree.add_scale(params, h / norm, direction))
        for h in (step, -step)
      )
      numerical = float(ahead - behind) / (2 * step)
      analytical = float(optax.tree.vdot(slope, direction) / norm)
      rounding = 1e-15 * (1 + abs(float(ahead))) / step
      error = abs(numerical - analytical)
      if not error <= rtol * abs(numerical) + rounding:  # NaN is no success.
        raise AssertionError(
          "the gradient must be that of the reported loss: it says"
          f" {analytical:.10g}, the central difference {numerical:.10g}."
        )


def _keep_gradient() -> optax.GradientTransformation:
  """An optimizer whose state is the last gradient and that moves nothing."""

  def update(updates, state, params=None):
    del state, params
    return jax.tree.map(jnp.zeros_like, updates), updates

  return optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), update
  )


def _flatten(tree: Any, batch_dims: int) -> np.ndarray:
  """[..., D] of a tree of [..., *]."""
  return np.concatenate(
    [np.reshape(x, (*x.shape[:batch_dims], -1)) for x in jax.tree.leaves(tree)],
    axis=-1,
  )


def _law(name: str, holds: chex.Array) -> None:
  if not np.all(holds):
    raise AssertionError(f"law broken: {name}.")


def _close(name: str, left, right, *, rtol: float, atol: float) -> None:
  np.testing.assert_allclose(
    left, right, rtol=rtol, atol=atol, err_msg=f"law broken: {name}."
  )
