"""Several updates of one batch: epochs, mini-batches, and what is left out.

Sums of some dozen float32 terms in another order differ by about 10⁻⁷ of their
size, and adam divides two of them.
"""

import re

from by_hand import (
  AGGREGATES,
  PARAMS,
  TABLE,
  B,
  G,
  T,
  batch,
  make,
  step_each,
)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from groupstd import losses

NAN, INF = float("nan"), float("inf")
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal

EVERYTHING = {
  "surrogate": losses.clipped(0.1),
  "kl_coef": 0.3,
  "reference": jnp.asarray(PARAMS[::-1]),
  "entropy_coef": 0.2,
}


def part(rollout, first, parts):
  """Every so manieth group."""
  return jax.tree.map(lambda x: x[first::parts], rollout)


def in_turn(learner, batches):
  """[(state, info), ...] of one step after the other."""
  step, found = jax.jit(learner.step), []
  state = learner.init(jnp.asarray(PARAMS))
  for rollout in batches:
    state, info = step(state, rollout)
    found.append((state, info))
  return found


# --- The updates are those of steps made one by one ---


@pytest.mark.parametrize(
  ("number", "epochs", "mini_batches", "micro_batches"),
  [(0, 2, 1, 1), (1, 2, 2, 1), (2, 1, 4, 2), (3, 2, 2, 2), (0, 1, 2, 1)],
)
def test_updates_are_the_steps_on_their_groups(
  number, epochs, mini_batches, micro_batches
):
  """One after the other, with the log-probs as drawn, each its denominator.

  Groups go to the parts in turn, as a deck is dealt. What is reported are sums
  of numerators over sums of denominators, and sums of counts.
  """
  given = {
    "optimizer": optax.adam(0.03),
    "aggregate": AGGREGATES[number],
    **EVERYTHING,
  }
  rollout = batch(stale=0.3)
  whole = make(
    epochs=epochs,
    mini_batches=mini_batches,
    micro_batches=micro_batches,
    **given,
  )
  ((state, info),) = in_turn(whole, [rollout])
  deals = [part(rollout, i, mini_batches) for i in range(mini_batches)]
  steps = in_turn(make(**given), epochs * deals)
  last, infos = steps[-1][0], [info for _, info in steps]
  close(state.params, last.params, rtol=0, atol=3e-6)
  jax.tree.map(
    lambda x, y: close(x, y, rtol=3e-5, atol=1e-7),
    state.opt_state,
    last.opt_state,
  )
  assert state.opt_state[0].count == epochs * mini_batches
  assert (state.step, info.skipped, info.nonfinite) == (1, 0, 0)

  def of_all(name, weights=None):
    values = np.array([getattr(info, name) for info in infos], float)
    return values if weights is None else np.average(values, weights=weights)

  tokens = [x.mask.sum(where=each(x)) for x in epochs * deals]
  for name, expected in {
    "denominator": of_all("denominator").sum(),
    "loss": of_all("loss", of_all("denominator")),
    "kl": of_all("kl", of_all("denominator")),
    "entropy": of_all("entropy", tokens),
    "clip_fraction": of_all("clip_fraction", tokens),
    "clamped": of_all("clamped").sum(),
    "grad_norm": of_all("grad_norm").max(),
    "max_advantage": of_all("max_advantage").max(),
    "first_ratio": infos[0].first_ratio,
    "kept": 6,
    "silent": 2,
    "regularized": 6,
  }.items():
    close(getattr(info, name), expected, rtol=3e-5, err_msg=name)
  assert 0 < info.clip_fraction < 1
  assert len(set(of_all("denominator"))) > 1 or mini_batches == 1 or number == 3


def each(rollout):
  """Which tokens are of groups that DAPO keeps."""
  return np.ptp(rollout.rewards, axis=1)[:, None, None] > 0


def test_advantages_are_the_whole_batch_s():
  """A rule that centres on all rewards is not one that centres on a half's."""

  def across(rewards, where=None, scores=None):
    return rewards - jnp.mean(rewards), jnp.ones(len(rewards), bool)

  def given(rewards, where=None, scores=None):
    return rewards, jnp.ones(len(rewards), bool)

  rollout = batch(np.arange(B)[:, None] + np.zeros(G))
  centred = rollout._replace(rewards=rollout.rewards - rollout.rewards.mean())
  optimizer = {"optimizer": optax.sgd(0.1)}
  ((state, info),) = in_turn(
    make(across, mini_batches=2, **optimizer), [rollout]
  )
  halves = [part(centred, i, 2) for i in range(2)]
  *_, (expected, _) = in_turn(make(given, **optimizer), halves)
  close(state.params, expected.params, rtol=0, atol=1e-6)
  assert info.max_advantage == 3.5


# --- Updates left out ---


def test_the_schedule_counts_updates_made():
  """Of four mini-batches one is silent: three updates a step, not four or one.

  The rate ends after the fifth update, within the second step.
  """
  rewards = np.tile([1, 0, 0, 1], (B, 1))
  rewards[1::4] = 0.7
  rollout = batch(rewards)
  schedule = optax.linear_schedule(0.1, 0.0, 5)
  learner = make(
    optimizer=optax.chain(optax.scale_by_schedule(schedule), optax.scale(-1)),
    mini_batches=4,
  )
  states = in_turn(learner, [rollout] * 3)
  for number, (state, info) in enumerate(states, start=1):
    assert (info.skipped, info.nonfinite) == (1, 0)
    assert (info.kept, info.silent) == (6, 2)
    assert state.opt_state[0].count == 3 * number
    assert state.step == number
  first, second, third = (state.params for state, _ in states)
  kept = [part(rollout, i, 4) for i in (0, 2, 3)]
  by_hand = in_turn(make(optimizer=optax.sgd(schedule)), 2 * kept)
  close(first, by_hand[2][0].params, rtol=0, atol=1e-6)
  close(second, by_hand[5][0].params, rtol=0, atol=1e-6)
  equal(third, second)


def test_one_part_that_is_not_finite_is_left_out_alone():
  """And all are where an advantage is not: the batch is then in doubt."""
  rollout = batch(np.tile([1, 0, 0, 1], (B, 1)), np.full((B, G), T))
  spoilt = rollout._replace(log_probs=rollout.log_probs.copy())
  spoilt.log_probs[3, 2, 1] = NAN
  rewards = rollout.rewards.copy()
  rewards[6, 0] = NAN
  doubtful = rollout._replace(rewards=rewards, scores=rewards)
  learner = make(
    optimizer=optax.adam(0.1), surrogate=losses.clipped(), mini_batches=2
  )
  found, refused = step_each([learner], spoilt, doubtful)
  assert (found[1].nonfinite, found[1].skipped) == (1, 0)
  whole = make(optimizer=optax.adam(0.1), surrogate=losses.clipped())
  ((even, _),) = step_each([whole], part(rollout, 0, 2))
  close(found[0].params, even.params, rtol=0, atol=1e-6)
  assert found[0].opt_state[0].count == 1
  assert (refused[1].nonfinite, refused[1].skipped) == (2, 0)
  equal(refused[0].params, PARAMS)
  assert refused[0].opt_state[0].count == 0


# --- The first ratio ---


def test_the_first_ratio_is_one_where_the_policy_drew():
  """To rounding of float32 log-probs; off by the largest of noise otherwise."""
  made = [
    make(optimizer=optax.sgd(5.0), epochs=3, surrogate=losses.clipped()),
    make(micro_batches=4),
    make(correction=losses.truncate()),
  ]
  own, stale = batch(), batch(stale=0.3)
  results = step_each(made, own, stale)
  off = stale.log_probs - own.log_probs
  largest = np.abs(np.expm1(-off))[stale.mask & each(stale)].max()
  for (_, first), (_, second) in zip(results[::2], results[1::2], strict=True):
    assert first.first_ratio < 1e-6
    assert second.first_ratio == pytest.approx(largest, rel=1e-5)
  assert np.abs(results[0][0].params - PARAMS).max() > 0.1  # It moved, after.
  (_, info) = step_each([make(mini_batches=2)], stale)[0]
  first = part(stale, 0, 2)
  largest = np.abs(np.expm1(-off[::2]))[first.mask & each(first)].max()
  assert info.first_ratio == pytest.approx(largest, rel=1e-5)


# --- Programs ---


def test_what_is_not_asked_for_costs_nothing():
  """One forward pass and no loop by default; another where one is needed."""

  def counted(**kwargs):
    calls = []

    def count(evaluate):
      def counting(*args):
        calls.append(evaluate)
        return evaluate(*args)

      return counting

    policy = TABLE._replace(
      log_prob=count(TABLE.log_prob),
      log_prob_and_entropy=count(TABLE.log_prob_and_entropy),
    )
    learner = make(policy=policy, **kwargs)
    state = learner.init(jnp.asarray(PARAMS))
    program = str(jax.make_jaxpr(learner.step)(state, batch()))
    return len(calls), len(re.findall(r"\b(?:scan|while)\[", program))

  assert counted() == (1, 0)
  assert counted(surrogate=losses.clipped()) == (1, 0)
  assert counted(entropy_coef=0.1) == (1, 0)
  assert counted(kl_coef=0.1) == (2, 0)
  assert counted(correction=losses.truncate()) == (2, 0)
  assert counted(epochs=3)[1] == 2
  assert counted(micro_batches=2)[1] == 1


def test_all_updates_are_one_program_that_takes_its_state_over():
  learner = make(
    optimizer=optax.adam(0.1),
    epochs=2,
    mini_batches=2,
    micro_batches=2,
    correction=losses.drop(),
    **EVERYTHING,
  )
  step = jax.jit(learner.step, donate_argnums=0)
  state = learner.init(jnp.array(PARAMS))
  for seed in range(4):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 2, (B, G)) * rng.integers(0, 2, (B, 1))
    given = state
    state, info = step(state, batch(rewards, rng.integers(0, T + 1, (B, G))))
    assert given.reference.is_deleted()
    equal(state.reference, EVERYTHING["reference"])
    assert info.nonfinite == 0
  assert step._cache_size() == 1
  assert not EVERYTHING["reference"].is_deleted()


# --- The reference is in the state ---


def test_a_kl_starts_at_zero_and_goes_on_after_a_restart():
  """Its gradient too; a copy of the params, and not what they are by then."""
  kwargs = {"optimizer": optax.sgd(1.0), "surrogate": losses.clipped()}
  learner, free = make(kl_coef=0.5, **kwargs), make(**kwargs)
  step = jax.jit(learner.step)
  start = learner.init(jnp.array(PARAMS))
  state, info = step(start, batch())
  assert (info.kl, info.clamped) == (0, 0)
  ((other, _),) = step_each([free], batch())
  close(state.params, other.params, rtol=0, atol=1e-7)
  state, _ = step(state, batch())
  assert start.reference is not start.params
  saved = jax.device_get(state)
  expected = step(state, batch())
  assert expected[1].kl > 1e-4
  again = make(kl_coef=0.5, **kwargs)  # Another process, which knows no past.
  restored = jax.tree.map(jnp.asarray, saved)
  jax.tree.map(equal, jax.jit(again.step)(restored, batch()), expected)
  # Not a constant of the program either.
  moved, info = step(state._replace(reference=state.params), batch())
  assert info.kl == 0
  equal(moved.reference, state.params)
  assert step._cache_size() == 1


def test_a_reference_is_of_the_params_shapes_and_kept_only_for_a_kl():
  learner = make(kl_coef=0.1, reference=jnp.zeros((B, T, 2)))
  with pytest.raises(AssertionError, match="shape"):
    learner.init(jnp.asarray(PARAMS))
  learner = make(reference=jnp.zeros((B, T, 2)))
  assert learner.init(jnp.asarray(PARAMS)).reference is None
