"""The benchmark's three programs do the same work; nothing here is timed."""

import functools
import json
import math
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import (
  benchmark_language,
  benchmark_programs,
  benchmark_work,
  floor,
)
from groupstd import learners, losses, rollouts, sigma

# Programs are compiled for long and run for a moment.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

SIZE = benchmark_work.SIZES["tiny"]
LOOPS = {"floor": floor.floor(SIZE), "plain": floor.plain(SIZE)}


@functools.cache
def case():
  """Ours with parameters that are far from flat, and a batch."""
  rng = np.random.default_rng(0)
  policy = benchmark_programs.policy(SIZE)
  params = jax.tree.map(
    # Biases and scales too, which begin at 0 and 1.
    lambda x: x + rng.normal(0, 0.3, x.shape).astype(np.float32),
    policy.init(jax.random.key(0)),
  )
  shape = SIZE.groups, SIZE.group_size, SIZE.length
  prompts = rng.integers(0, SIZE.vocabulary, (SIZE.groups, SIZE.prompt))
  tokens = rng.integers(0, SIZE.vocabulary, shape)
  rewards = rng.integers(0, 3, shape[:2]).astype(np.float32)
  rewards[0] = 1  # A silent group, whose σ divides nothing.
  return policy, params, jnp.asarray(prompts), jnp.asarray(tokens), rewards


@functools.cache
def both():
  """(params, prompts, tokens) → our log-probs and entropies."""
  return jax.jit(case()[0].log_prob_and_entropy)


def our_log_probs():
  _, params, prompts, tokens, _ = case()
  return both()(params, prompts, tokens)[0]


@functools.cache
def our_likeliest():
  _, params, prompts, *_ = case()
  greedy = benchmark_programs.policy(SIZE, temperature=0.0)
  unused = jax.random.split(jax.random.key(0), SIZE.groups)
  sample = jax.jit(greedy.sample, static_argnums=3)
  return sample(sharp(params), unused, prompts, SIZE.group_size).tokens


def sharp(params):
  """With logits so far apart that chance decides nothing."""
  return params | {"norm": {"scale": 1e4 * params["norm"]["scale"]}}


@pytest.mark.parametrize("name", LOOPS)
def test_log_probs_are_ours(name):
  _, params, prompts, tokens, _ = case()
  loop = LOOPS[name]
  found = jax.jit(loop.log_prob)(loop.convert(params), prompts, tokens)
  # float32's rounding through two layers, at log-probs of about −5.
  np.testing.assert_allclose(found, our_log_probs(), rtol=1e-5, atol=1e-5)


@functools.cache
def our_step():
  """What plain descent of rate 1 takes away: the gradient itself."""
  policy, params, prompts, tokens, rewards = case()
  learner = learners.policy_gradient(
    policy,
    optax.sgd(1.0),
    sigma.rule(sigma.divide()),
    surrogate=losses.clipped(low=0.2, high=0.2),
  )
  rollout = rollouts.Rollout(
    prompts=prompts,
    tokens=tokens,
    mask=jnp.ones(tokens.shape, bool),
    log_probs=our_log_probs(),
    rewards=jnp.asarray(rewards),
    scores=jnp.asarray(rewards),
    where=jnp.ones(rewards.shape, bool),
  )
  stepped, _ = jax.jit(learner.step)(learner.init(params), rollout)
  return jax.tree.map(jnp.subtract, params, stepped.params)


@pytest.mark.parametrize("name", LOOPS)
def test_the_update_is_our_learners(name):
  _, params, prompts, tokens, rewards = case()
  loop = LOOPS[name]
  gradient = jax.jit(loop.gradient)(
    loop.convert(params), prompts, tokens, floor.advantages(rewards)
  )
  size = optax.tree.norm(gradient)
  assert size > 0.01
  off = jax.tree.map(jnp.subtract, gradient, loop.convert(our_step()))
  assert optax.tree.norm(off) < 1e-5 * size
  for leaf in jax.tree.leaves(gradient):
    assert jnp.max(jnp.abs(leaf)) > 0


@pytest.mark.parametrize("name", LOOPS)
def test_samples_are_of_the_distribution_that_log_prob_says(name):
  """The mean surprise at what is drawn is the entropy of what it is drawn from.

  At each position E[−log π(token)] = E[H], where both are of the prefixes that
  were drawn; ours gives either for the loop's tokens.
  """
  _, params, prompts, *_ = case()
  loop = LOOPS[name]
  sample = jax.jit(loop.sample)
  gaps = []
  for i in range(200):
    tokens = sample(loop.convert(params), jax.random.key(i), prompts)
    log_probs, entropies = both()(params, prompts, tokens)
    gaps.append(np.asarray(-log_probs - entropies).reshape(-1, SIZE.length))
  gaps = np.concatenate(gaps)
  error = gaps.std(axis=0) / math.sqrt(len(gaps))
  assert np.all(np.abs(gaps.mean(axis=0)) < 4 * error)
  # And sharp enough to see a prefix or a position mistaken.
  assert np.all(error < 0.05)


@pytest.mark.parametrize("name", LOOPS)
def test_the_likeliest_tokens_are_ours(name):
  _, params, prompts, *_ = case()
  loop = LOOPS[name]
  tokens = jax.jit(loop.sample)(
    loop.convert(sharp(params)), jax.random.key(0), prompts
  )
  np.testing.assert_array_equal(tokens, our_likeliest())
  assert len(np.unique(tokens)) > 5


def test_an_advantage_of_a_silent_group_is_zero():
  found = floor.advantages(np.array([[1.0, 1, 1, 1], [0, 1, 0, 1]]))
  np.testing.assert_array_equal(found, [[0, 0, 0, 0], [-1, 1, -1, 1]])


def enumerated(size, *, shared):
  """(sampling, update) FLOPs, token by token and pair by pair."""
  d, v = size.width, size.vocabulary
  through = size.layers * 2 * (4 * d * d + 3 * d * size.hidden)
  layers = prefix = heads = 0
  for _ in range(size.groups):
    for answer in range(size.group_size):
      for place in range(size.prompt + size.length - 1):
        if place < size.prompt and shared and answer:
          continue
        # A product with each key that it may see, and one with its value.
        layers += through + size.layers * 4 * d * (place + 1)
      heads += size.length
      prefix += answer > 0 and shared
  head = 2 * d * v
  # In sampling a group's first tokens are drawn from one row of logits.
  return layers + head * (heads - prefix), 3 * (layers + head * heads)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["tiny", "S"])
def test_flops_are_those_of_each_token_and_pair(name, shared):
  size = benchmark_work.SIZES[name]
  sampling, update = enumerated(size, shared=shared)
  assert size.sampling_flops(shared=shared) == sampling
  assert size.update_flops(shared=shared) == update


def products(jaxpr):
  """FLOPs of the program's products of matrices."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      shape = equation.invars[0].aval.shape
      inner = math.prod(shape[i] for i in contracted)
      total += 2 * inner * math.prod(equation.outvars[0].aval.shape)
    for value in equation.params.values():
      if isinstance(value, jax.extend.core.ClosedJaxpr):
        total += products(value.jaxpr)
  return total


def test_the_floors_program_multiplies_what_the_formula_says():
  """Forward; whole squares where a causal mask leaves half to be seen."""
  _, params, prompts, tokens, _ = case()
  loop = LOOPS["floor"]
  found = products(
    jax.make_jaxpr(loop.log_prob)(loop.convert(params), prompts, tokens).jaxpr
  )
  more, answers = SIZE.length - 1, SIZE.groups * SIZE.group_size
  hidden = SIZE.groups * SIZE.prompt * (SIZE.prompt - 1) // 2
  hidden += answers * more * (more - 1) // 2
  # The program's one product of all rows with the prompt's keys is halved by
  # no mask for answers.
  unseen = 4 * SIZE.width * SIZE.layers * hidden
  assert found == SIZE.update_flops(shared=True) // 3 + unseen


def test_parameters_are_counted():
  _, params, *_ = case()
  number = sum(x.size for x in jax.tree.leaves(params))
  assert number == SIZE.parameters
  for loop in LOOPS.values():
    converted = jax.tree.leaves(loop.convert(params))
    assert sum(x.size for x in converted) == number


def test_ours_is_rewarded_as_the_loops_are():
  tokenizer = benchmark_work.tokenizer()
  assert tokenizer.vocab_size == SIZE.vocabulary
  assert tokenizer.stop == ()
  counted = [
    benchmark_work.share(tokenizer.decode([i]), None, length=1)
    for i in range(SIZE.vocabulary)
  ]
  assert sum(counted) == 20
  for question in benchmark_work.asked(SIZE, 10):
    assert len(tokenizer.encode(question.prompt)) == SIZE.prompt


@pytest.mark.parametrize("name", ["ours", "plain"])
def test_a_step_trains_and_says_where_its_seconds_went(name):
  size = SIZE._replace(layers=1)
  if name == "ours":
    program = benchmark_programs.ours(size, steps=2, workers=0)
  else:
    program = benchmark_programs.by_hand(size, name, steps=2)
  try:
    begun = time.monotonic()
    _, step = program.step(program.start(0))
    seconds = time.monotonic() - begun
  finally:
    program.close()
  # Of 96 tokens, each of which counts with 20 in 64: 5 standard errors.
  assert abs(step.reward - 20 / 64) < 5 * 0.05
  assert min(step[1:]) > 0
  assert sum(step[1:]) <= seconds


def test_programs_take_turns_from_the_same_start():
  told = []

  def program(name):
    def step(state):
      told.append((name, *state))
      run, number = state
      return (run, number + 1), benchmark_programs.Step(number, 1, 2, 3)

    return benchmark_programs.Program(lambda run: (run, 0), step)

  names = "floor", "ours", "plain"
  times = benchmark_language.measure(
    {name: program(name) for name in names}, runs=2, steps=3
  )
  warm, told = told[:3], told[3:]
  assert [x[0] for x in warm] == list(names)
  for i, (run, number) in enumerate([(r, s) for r in (0, 1) for s in range(3)]):
    turn = told[3 * i : 3 * i + 3]
    assert sorted(turn) == [(name, run, number) for name in names]
    assert turn[0][0] == names[number % 3]
  for columns in times.values():
    np.testing.assert_array_equal(columns["reward"], [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(columns["update"], np.full((2, 3), 3))
    np.testing.assert_allclose(columns["host"], columns["wall"] - 6)
    assert columns["wall"].shape == columns["cpu"].shape == (2, 3)


def test_a_summary_compares_each_step_with_the_floors():
  times = np.array([[1.0, 2, 4]])
  names = *benchmark_programs.Step._fields, "host", "cpu"
  columns = dict.fromkeys(names, times)
  found = benchmark_language.summary(
    SIZE,
    {
      "floor": {**columns, "wall": times},
      # Twice as long in every step, whatever else the cores are doing.
      "plain": {**columns, "wall": 2 * times, "cpu": 3 * times},
    },
  )
  assert found["plain"]["wall_over_floor"] == 2
  assert found["plain"]["cpu_over_floor"] == 3
  assert found["plain"]["wall"] == {"median": 4, "min": 2, "max": 8}
  assert found["floor"]["rewards"] == [1, 2, 4]
  work = SIZE.sampling_flops(shared=True) + SIZE.update_flops(shared=True)
  rate = found["floor"]["wall_gflop_per_s"]
  assert rate == pytest.approx(work / 2 / 1e9)
  update = SIZE.update_flops(shared=True)
  rate = found["plain"]["update_gflop_per_s"]
  assert rate == pytest.approx(update / 2 / 1e9)
  json.dumps(found)


def test_importing_the_work_does_not_import_jax():
  """A verifying process imports it, and should begin at once."""
  code = "import sys, experiments.benchmark_work; print('jax' in sys.modules)"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "False"
