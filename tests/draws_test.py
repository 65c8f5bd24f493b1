"""What is drawn: the law of groups and redraws, and on what it depends.

Statistical tests have fixed seeds and say how rarely right code would fail.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from groupstd import (
  draws,
  learners,
  losses,
  policies,
  rollouts,
  sigma,
  tasks,
  theory,
)

# Of one comparison; there are fewer than 500 in this file.
FALSE_ALARM = 1e-6
# p = 10⁻¹³, .001, .02, .3, .5 and the complements.
LOGITS = [-30.0, math.log(1 / 999), math.log(1 / 49), math.log(3 / 7), 0.0]
LOGITS += [-logit for logit in LOGITS[:-1]]
BOTH = pytest.mark.parametrize(
  "make", [rollouts.collector, draws.collect_bernoulli]
)
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


def scalar(num_prompts, make=draws.collect_bernoulli, **kwargs):
  """A collector of the scalar policy that asks every prompt."""
  return make(
    policies.bernoulli(np.full(num_prompts, 0.5)),
    tasks.bernoulli(num_prompts),
    num_groups=num_prompts,
    **kwargs,
  )


def count_right(rollout):
  return jnp.sum(rollout.rewards * rollout.where, axis=1).astype(int)


def fits(observed, expected):
  """Chi-square of counts; cells below 10 expected are pooled, as a Poisson."""
  big = expected >= 10
  distance = ((observed - expected)[big] ** 2 / expected[big]).sum()
  rest, mean = observed[~big].sum(), expected[~big].sum()
  # One degree of freedom more than there are, which is on the safe side.
  assert stats.chi2.sf(distance, max(big.sum(), 1)) > FALSE_ALARM
  assert stats.poisson.sf(rest - 1, mean) > FALSE_ALARM


def law(p, group_size, max_draws):
  """P(k) of the group used, P(silent draws before it), P(k) if it is mixed."""
  k = stats.binom.pmf(np.arange(group_size + 1), group_size, p)
  silent, mixed = k[0] + k[-1], k[1:-1].sum()
  powers = silent ** np.arange(max_draws)
  used = k * powers.sum()
  used[[0, -1]] = k[[0, -1]] * powers[-1]
  failures = np.append(powers * mixed, silent**max_draws)
  return used, failures, np.concatenate([[0], k[1:-1], [0]]) / mixed


def check_law(drawn, group_size):
  """Holds batches of at most 1, …, 4 draws against the exact law, p by p."""
  ks = np.stack([count_right(rollout) for rollout, _ in drawn])
  silent = (ks == 0) | (ks == group_size)
  # A group that spoke is not drawn again, whatever draws were left.
  equal(ks[:-1][~silent[:-1]], ks[1:][~silent[:-1]])
  failures = silent.sum(0)
  for number, (_, counts) in enumerate(drawn, start=1):
    groups = np.minimum(failures + 1, number).sum()
    assert jax.tree.map(int, counts) == rollouts.Counts(
      first_draws=failures.size,
      first_silent=(failures >= 1).sum(),
      left_silent=(failures >= number).sum(),
      drawn=groups * group_size,
      dropped=(groups - failures.size) * group_size,
    )
  for theta, k, failed in zip(
    LOGITS,
    np.split(ks, len(LOGITS), axis=1),
    np.split(failures, len(LOGITS)),
    strict=True,
  ):
    p = 1 / (1 + math.exp(-theta))
    for number in 1, 4:
      used, failing, mixed = law(p, group_size, number)
      seen = np.bincount(k[number - 1], minlength=group_size + 1)
      fits(seen, failed.size * used)
      seen = np.bincount(np.minimum(failed, number), minlength=number + 1)
      fits(seen, failed.size * failing)
      # Five standard errors by the exact law: once in 2·10⁶.
      spent = np.minimum(np.arange(number + 1) + 1, number)
      variance = max(failing @ spent**2 - (failing @ spent) ** 2, 0)
      expected = theory.expected_draws(p, group_size, number)
      error = abs(seen @ spent / failed.size - expected)
      assert error < 5 * math.sqrt(variance / failed.size) + 1e-9
    # What a redrawn group says does not depend on having been redrawn.
    redrawn = k[3][(failed > 0) & (failed < 4)]
    fits(np.bincount(redrawn, minlength=group_size + 1), len(redrawn) * mixed)


@pytest.mark.parametrize("group_size", [2, 8, 64])
def test_exact_draws_are_binomial_after_geometrically_many(group_size):
  copies = 20_000
  make = functools.partial(scalar, len(LOGITS) * copies, group_size=group_size)
  collects = [make(max_draws=number) for number in (1, 2, 3, 4)]
  draw = jax.jit(lambda params: [collect(params, 3) for collect in collects])
  check_law(draw(jnp.repeat(jnp.array(LOGITS), copies)), group_size)


def test_any_policy_is_drawn_by_the_same_law():
  params = jnp.repeat(jnp.array(LOGITS), 2000)
  make = functools.partial(
    scalar, params.size, rollouts.collector, group_size=8
  )
  check_law([make(max_draws=n)(params, 3) for n in (1, 2, 3, 4)], 8)


@BOTH
def test_steps_and_prompts_draw_independently(make):
  """Correlations of k over 90,000 pairs, within five standard errors of 0."""
  collect = scalar(300, make, group_size=2)
  if make is draws.collect_bernoulli:
    collect = jax.jit(collect)
  ks = np.array(
    [count_right(collect(jnp.zeros(300), step)[0]) for step in range(300)]
  )
  fits(np.bincount(ks.ravel()), ks.size * np.array([0.25, 0.5, 0.25]))
  ks = ks - 1  # Mean 0, variance ½.
  for products in (
    ks[1:] * ks[:-1],
    ks[:, 1:] * ks[:, :-1],
    (ks * ks.T)[np.triu_indices(300, k=1)],  # Step 5's prompt 7, and the like.
  ):
    assert abs(products.mean()) < 5 * 0.5 / math.sqrt(products.size)


# --- Keys ---


@BOTH
def test_an_answer_depends_on_parameters_step_and_prompt_alone(make):
  def asking(*ids):
    prompts = jnp.array(ids)
    task = tasks.bernoulli(10)._replace(prompts=lambda *_: (prompts, prompts))
    return make(policy, task, num_groups=len(ids), group_size=5, max_draws=3)

  policy = policies.bernoulli(np.full(10, 0.1))
  params = policy.init(jax.random.key(0))
  few, _ = asking(3, 1, 4, 6)(params, 7)
  more = asking(9, 4, 0, 3, 1, 7, 5, 6)
  for _ in range(2):  # And not on what was drawn before.
    many, _ = more(params, 7)
    jax.tree.map(
      equal, few, jax.tree.map(lambda x: x[np.array([3, 4, 1, 7])], many)
    )
    more(params, 8)


def test_seed_step_prompt_and_draw_are_each_another_key():
  """Answers that are the very keys, none of them right: all are redrawn."""

  def sample(params, keys, prompts, group_size):
    bits = jax.random.key_data(keys)[:, None]  # [B, 1, 2]
    tokens = jnp.tile(bits, (1, group_size, 1))
    return policies.Sample(tokens, tokens >= 0, jnp.zeros(tokens.shape))

  def reward(prompts, tokens, mask):
    return np.zeros(tokens.shape[:2]), np.ones(tokens.shape[:2], bool)

  policy = policies.bernoulli([0.5])._replace(sample=sample)
  task = tasks.bernoulli(10)._replace(reward=reward)
  found = set()
  for seed in 0, 1:
    for max_draws in 1, 2, 3:
      collect = rollouts.collector(
        policy,
        task,
        num_groups=10,
        group_size=2,
        seed=seed,
        max_draws=max_draws,
      )
      for step in range(3):
        rollout, _ = collect(None, step)
        found |= {np.asarray(bits).tobytes() for bits in rollout.tokens[:, 0]}
  assert len(found) == 2 * 3 * 3 * 10


# --- Multisets ---


def test_a_multiset_is_the_group_written_out():
  """The same k, gradient and, after 5 steps, parameters."""
  policy = policies.bernoulli(np.linspace(0.05, 0.95, 40))

  @functools.partial(jax.jit, static_argnums=1)
  def run(params, multiset):
    collect = scalar(40, group_size=6, max_draws=3, multiset=multiset, seed=5)

    def step(state, _):
      rollout, counts = collect(state.params, state.step)
      state, info = learner.step(state, rollout)
      return state, (count_right(rollout), counts, info.grad_norm)

    state, (*drawn, norms) = jax.lax.scan(step, learner.init(params), length=5)
    return drawn, norms, state.params

  learner = learners.policy_gradient(
    policy,
    optax.sgd(0.5),
    sigma.rule(sigma.dapo()),
    surrogate=losses.clipped(),
    aggregate=losses.group_sum(),
  )
  start = policy.init(jax.random.key(0))
  drawn, norms, params = run(start, True)
  plain_drawn, plain_norms, plain_params = run(start, False)
  jax.tree.map(equal, drawn, plain_drawn)
  close(norms, plain_norms, rtol=1e-6)
  close(params, plain_params, rtol=0, atol=1e-6)
  assert np.abs(params - start).max() > 0.5


def test_exact_draws_stop_at_the_size_where_powers_underflow():
  with pytest.raises(ValueError, match=r"at most 100 .* got 101"):
    scalar(4, group_size=101)
  params = jnp.array([-30.0, 0.0, 1.0, 30.0])
  rollout, _ = scalar(4, group_size=100)(params, 0)
  equal(rollout.where.sum(1), 100)
  equal(rollout.where[jnp.array([0, 3]), 0], [0, 100])
