"""The decoder as a sampler: what it draws is what training scores."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from plain_decoder import (
  FULL,
  PLAIN,
  ROWS,
  cast,
  greedy,
  keys,
  module,
  padded,
  parameters,
)
import pytest
from scipy import stats

from groupstd import (
  learners,
  losses,
  policies,
  rollouts,
  sigma,
  transformer,
)

LENGTH, STOP = 4, (1, 3)
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """What runs once is compiled for longer than it runs."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def sampler(policy):
  return jax.jit(policy.sample, static_argnums=3)


# --- Sampling and training are of one distribution ---


@pytest.mark.parametrize(
  ("temperature", "width"), [(0.6, 6), (1.0, 3), (1.3, 6)]
)
def test_padding_changes_neither_tokens_nor_log_probs(temperature, width):
  """Any side, holes, any width, anything in it; scored as it was drawn."""
  policy = transformer.policy(
    FULL, length=LENGTH, stop=STOP, temperature=temperature
  )
  params = cast(parameters(FULL))
  sample, log_prob = sampler(policy), jax.jit(policy.log_prob)
  first = sample(params, keys(0, 4), padded(width=width), 8)
  assert 0 < first.ended.mean() < 1
  for side, fill in [("left", 99), ("right", -1), ("holes", 2**31 - 1)]:
    prompts = padded(side=side, width=6, fill=fill)
    drawn = sample(params, keys(0, 4), prompts, 8)
    equal(drawn.tokens, first.tokens)
    equal(drawn.mask, first.mask)
    equal(drawn.ended, first.ended)
    close(drawn.log_probs, first.log_probs, rtol=0, atol=1e-5)
    scored = np.where(drawn.mask, log_prob(params, prompts, drawn.tokens), 0)
    close(scored, first.log_probs, rtol=0, atol=1e-5)


def test_the_first_update_is_on_policy():
  """Ratio 1 and no KL to itself, whatever chunks and rematerialisation."""
  config = dataclasses.replace(FULL, chunk=3, remat=True)
  policy = transformer.policy(config, length=LENGTH, stop=STOP, temperature=0.6)
  params, prompts = cast(parameters(config)), padded(side="holes")
  drawn = sampler(policy)(params, keys(0, 4), prompts, 4)
  rewards = (drawn.tokens[..., 0] % 2).astype(jnp.float32)
  learner = learners.policy_gradient(
    policy, optax.sgd(1.0), sigma.rule(sigma.grpo()), kl_coef=0.1, kl=losses.k3
  )
  rollout = rollouts.Rollout(
    prompts=prompts,
    tokens=drawn.tokens,
    mask=drawn.mask,
    log_probs=drawn.log_probs,
    rewards=rewards,
    scores=rewards,
    where=jnp.ones(rewards.shape, bool),
  )
  step = jax.jit(learner.step)
  state, info = step(learner.init(params), rollout)
  close(info.first_ratio, 0, rtol=0, atol=1e-5)
  close(info.kl, 0, rtol=0, atol=1e-10)
  assert info.grad_norm > 0.01
  _, later = step(state, rollout)
  assert later.first_ratio > 0.01
  assert later.kl > 1e-5


TINY = transformer.Config(3, width=4, num_layers=2, num_heads=1, tied=False)
# Whatever ends in 2, or is three tokens long: 1 + 2 + 4·3 answers.
COMPLETE = [
  answer
  for length in (1, 2, 3)
  for answer in itertools.product(range(3), repeat=length)
  if 2 not in answer[:-1] and (answer[-1] == 2 or length == 3)
]


def test_it_is_a_distribution_and_answers_are_drawn_from_it():
  """Every answer enumerated: they sum to 1, and come up that often."""
  policy = transformer.policy(TINY, length=3, stop=(2,), temperature=1.3)
  params = cast(parameters(TINY))
  prompts = padded(((1, 0, 1), (2,)))
  assert len(COMPLETE) == 15
  tokens = np.zeros((2, 15, 3), int)
  mask = np.zeros(tokens.shape, bool)
  for i, answer in enumerate(COMPLETE):
    tokens[:, i, : len(answer)], mask[:, i, : len(answer)] = answer, True
  scored = np.asarray(jax.jit(policy.log_prob)(params, prompts, tokens))
  likely = np.exp(np.where(mask, scored, 0).astype(float).sum(axis=-1))
  close(likely.sum(axis=1), 1, rtol=0, atol=1e-6)
  draws = 20_000
  drawn = sampler(policy)(params, keys(0, 2), prompts, draws)
  for b in range(2):
    counts = collections.Counter(
      tuple(row[kept].tolist())
      for row, kept in zip(
        np.asarray(drawn.tokens[b]), np.asarray(drawn.mask[b]), strict=True
      )
    )
    assert not counts.keys() - {*COMPLETE}
    observed = np.array([counts[answer] for answer in COMPLETE])
    expected = draws * likely[b] / likely[b].sum()
    assert expected.min() > 5
    # Passed by all but one of a million seeds.
    assert stats.chisquare(observed, expected).pvalue > 1e-6
  last = np.take_along_axis(
    np.asarray(drawn.tokens), drawn.mask.sum(axis=2)[..., None] - 1, axis=2
  )
  equal(drawn.ended, last[..., 0] == 2)


# --- Where answers end ---

# 7 → 4 → 5 → 1, 3 → 6, 8 → 0, 2 → 2: chains to each of three stops, 0 among
# them, which also pads what has ended, and one that goes round for ever.
SUCCESSORS = [2, 2, 2, 6, 5, 1, 2, 4, 0]
STOPS = (0, 1, 6)
ENDS = {  # prompt: (answer, whether it ended by itself)
  7: ([4, 5, 1], True),  # at the last slot there is
  4: ([5, 1], True),
  3: ([6], True),  # nothing but its end
  8: ([0], True),
  2: ([2, 2, 2], False),
}
LIST = transformer.Config(9, width=10, num_layers=2, num_heads=1, tied=False)


def listed():
  """Parameters under which a token all but certainly has the one successor."""
  shapes, _ = policies.split(module(LIST))
  params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
  params["embed"]["embedding"] = jnp.eye(9, 10)
  params["norm"]["scale"] = jnp.ones(10)
  params["head"]["kernel"] = 100 * jnp.eye(9)[jnp.array([*SUCCESSORS, 0])]
  return params


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_ends_with_whichever_stop_comes_first(temperature):
  policy = transformer.policy(
    LIST, length=3, stop=STOPS, temperature=temperature
  )
  prompts = padded([(prompt,) for prompt in ENDS])
  drawn = sampler(policy)(listed(), keys(0, 5), prompts, 2)
  for i, (answer, ended) in enumerate(ENDS.values()):
    padding = [0] * (3 - len(answer))
    for g in range(2):
      equal(drawn.tokens[i, g], answer + padding)
      equal(drawn.mask[i, g], [True] * len(answer) + [False] * len(padding))
      equal(drawn.ended[i, g], ended)
  close(drawn.log_probs, 0, rtol=0, atol=1e-6)


def test_an_answer_may_be_one_token():
  policy = transformer.policy(LIST, length=1, stop=STOPS)
  prompts, params = padded([(prompt,) for prompt in ENDS]), listed()
  drawn = sampler(policy)(params, keys(0, 5), prompts, 2)
  equal(drawn.tokens[:, 0, 0], [answer[0] for answer, _ in ENDS.values()])
  equal(drawn.mask, np.ones((5, 2, 1), bool))
  equal(drawn.ended[:, 0], [False, False, True, True, False])
  scored = jax.jit(policy.log_prob)(params, prompts, drawn.tokens)
  close(scored, drawn.log_probs, rtol=0, atol=1e-6)


def test_without_stops_every_answer_is_whole():
  """As `policies.from_nnx` has it: none was cut off."""
  policy = transformer.policy(LIST, length=3)
  drawn = sampler(policy)(listed(), keys(0, 2), padded([(4,), (8,)]), 2)
  assert drawn.ended is None
  assert drawn.mask.all()
  equal(drawn.tokens[:, 0], [[5, 1, 2], [0, 2, 2]])


def test_drawing_stops_when_all_have_ended(monkeypatch):
  """One pass for each token after the first, of the longest answer."""
  decode, passes = transformer.Transformer.decode, []

  def counted(*args):
    jax.debug.callback(lambda: passes.append(1))
    return decode(*args)

  monkeypatch.setattr(transformer.Transformer, "decode", counted)
  policy = transformer.policy(LIST, length=50, stop=STOPS)
  sample, params = sampler(policy), listed()
  for rows, number in [((3, 8), 0), ((3, 4), 1), ((7, 8), 2), ((2, 8), 49)]:
    passes.clear()
    drawn = sample(params, keys(0, 2), padded([(row,) for row in rows]), 2)
    jax.block_until_ready(drawn)
    jax.effects_barrier()
    assert len(passes) == number
    assert drawn.tokens.shape == (2, 2, 50)


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["plain", "full"])
def test_temperature_zero_draws_the_likeliest_token(config):
  """Against the whole sequence anew for each, in numpy."""
  policy = transformer.policy(config, length=6, stop=STOP, temperature=0)
  prompts, params = padded(side="right"), cast(parameters(config))
  drawn = sampler(policy)(params, keys(0, 4), prompts, 2)
  answers = [greedy(config, params, row, 6, STOP) for row in ROWS]
  assert len({*map(tuple, answers)}) > 1
  for i, answer in enumerate(answers):
    for g in range(2):
      equal(drawn.tokens[i, g][drawn.mask[i, g]], answer)
      equal(drawn.ended[i, g], answer[-1] in STOP)
  equal(drawn.log_probs, 0)


# --- Keys ---


def test_the_same_keys_draw_the_same_tokens():
  """Jitted or not, rows together or alone."""
  config = dataclasses.replace(PLAIN, num_layers=1)
  policy = transformer.policy(config, length=2, stop=STOP)
  params, prompts = cast(parameters(config)), padded(side="holes")
  sample = sampler(policy)
  together = sample(params, keys(0, 4), prompts, 8)
  plain = policy.sample(params, keys(0, 4), prompts, 8)
  equal(plain.tokens, together.tokens)
  close(plain.log_probs, together.log_probs, rtol=0, atol=1e-6)
  for b in range(4):
    row = jax.tree.map(lambda x, b=b: x[b : b + 1], prompts)
    alone = sample(params, keys(0, 4)[b : b + 1], row, 8)
    equal(alone.tokens[0], together.tokens[b])
    close(alone.log_probs[0], together.log_probs[b], rtol=0, atol=1e-6)
  other = sample(params, keys(1, 4), prompts, 8)
  assert (other.tokens != together.tokens).any()
  # Within a group, and across prompts, draws differ as well.
  assert (together.tokens[:, 1:] != together.tokens[:, :1]).any()
  same = jax.tree.map(lambda x: jnp.repeat(x[:1], 4, axis=0), prompts)
  apart = sample(params, keys(0, 4), same, 8)
  assert (apart.tokens[1:] != apart.tokens[:1]).any()
