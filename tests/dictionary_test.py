"""c_G(p)·∇p is what the learner's own loss ascends, for any op and policy.

By enumeration of every group of a small policy, and by sampling a network; then
the entries of the dictionary, each a known objective and the operation that
ascends it at a finite G (arXiv:2607.00152 and the sources named).
"""

from fractions import Fraction
import itertools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from groupstd import (
  losses,
  objectives,
  policies,
  rollouts,
  sigma,
  testing,
  theory,
)

TABLE = np.random.default_rng(0).normal(size=(9, 9))  # [G, k]
PS = np.array([0.01, 0.03, 0.1, 0.25, 0.5, 0.7, 0.9, 0.97, 0.99])


def random_table(stats):
  """A random weight, of either sign, for each G and k."""
  k = jnp.round(stats.mean * stats.size).astype(int)
  return sigma.Weight(jnp.asarray(TABLE)[stats.size.astype(int), k])


def half_masked(stats):
  """Drops the groups with more than half right, and weighs by σ^(−½)."""
  return sigma.Weight(stats.std**-0.5, stats.mean <= 0.5)


OPS = {
  "grpo": sigma.grpo(),
  "dr_grpo": sigma.dr_grpo(),
  "dapo": sigma.dapo(),
  "rloo": sigma.rloo(),
  "max_rl": sigma.max_rl(),
  "power ½": sigma.divide(power=0.5),
  "power 2": sigma.divide(power=2),
  "sample σ": sigma.divide(power=1.5, ddof=1, eps=1e-3),
  "random table": random_table,
  "half masked": half_masked,
}


def constant_reference(rewards, where=None, scores=None):
  """A = R − 0.3: outside the zero-sum family, so silent groups speak."""
  del scores
  valid = True if where is None else where > 0
  keep = jnp.ones(rewards.shape[:-1], bool)
  return jnp.where(valid, rewards - 0.3, 0), keep


def pkpo(m):
  """A₊ = m, A₋ = m·(1 − C(G − 1 − k, m − 1)/C(G − 1, m − 1)).

  PKPO's estimator (arXiv:2505.15201) by its meaning: an answer's reward is the
  mean, over the sets of m answers of G that it is in, of whether any is right.
  """

  def rule(rewards, where=None, scores=None):
    del scores
    where = jnp.ones(rewards.shape) if where is None else where
    k = jnp.sum(rewards * where, axis=-1, keepdims=True)
    others = jnp.sum(where, axis=-1, keepdims=True) - 1
    i = jnp.arange(m - 1)
    left = (others - k)[..., None] - i
    ratio = jnp.prod(jnp.maximum(left, 0) / (others[..., None] - i), axis=-1)
    advantages = m * jnp.where(rewards > 0, 1, 1 - ratio)
    keep = jnp.ones(rewards.shape[:-1], bool)
    return jnp.where(where > 0, advantages, 0), keep

  return rule


RULES = {
  **{name: sigma.rule(op) for name, op in OPS.items()},
  "pass@2": sigma.rule(sigma.pass_at(2)),
  "PKPO, m = 2": pkpo(2),
  "constant": constant_reference,
}


# --- Every group of a policy on four answers ---

SIZES = [2, 3, 4, 5]
RIGHT = np.array([1.0, 0.0, 1.0, 0.0])
TOKENS = np.concatenate(
  [
    np.pad(list(itertools.product(range(4), repeat=size)), ((0, 0), (0, width)))
    for size, width in zip(SIZES, (3, 2, 1, 0), strict=True)
  ]
)  # [N, 5], the groups of each size, in slots that `where` leaves empty
OF_SIZE = np.repeat(SIZES, [4**size for size in SIZES])
WHERE = np.arange(5) < OF_SIZE[:, None]


@pytest.fixture(scope="module")
def quick_compilation():
  """What runs once is compiled for longer than it runs."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def softmax_of(ps):
  """Logits [P, 1, 4] with which two of the four answers have p in all."""
  odds = np.random.default_rng(1).uniform(0.5, 2.0, size=(ps.size, 2, 2))
  share = odds / odds.sum(axis=-1, keepdims=True)
  probs = share * np.stack([ps, 1 - ps], axis=-1)[..., None]
  return np.log(np.swapaxes(probs, 1, 2).reshape(-1, 1, 4))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.usefixtures("quick_compilation", "x64")
def test_the_loss_ascends_the_objective_over_all_groups(name):
  """Mean gradient = c_G(p)∇p to 1e-12 of max|c_G|‖∇p‖, G = 2, …, 5."""
  policy, rule = policies.softmax(1, 4), RULES[name]
  logits = softmax_of(PS)

  def ascent(logits, tokens, where):  # of a batch of one group
    tokens = tokens[None, :, None]
    rollout = rollouts.Rollout(
      prompts=jnp.array([0]),
      tokens=tokens,
      mask=where[None, :, None],
      log_probs=jnp.zeros(tokens.shape),
      rewards=jnp.asarray(RIGHT)[tokens[..., 0]],
      scores=jnp.asarray(RIGHT)[tokens[..., 0]],
      where=where[None],
    )
    kwargs = {"aggregate": losses.group_sum()}
    return -testing.gradient(policy, rule, logits, rollout, **kwargs)

  over_groups = jax.vmap(ascent, (None, 0, 0))
  updates = jax.jit(jax.vmap(over_groups, (0, None, None)))(
    logits, TOKENS, WHERE
  )[:, :, 0]  # [P, N, 4]
  probs = np.exp(logits[:, 0])  # [P, 4]
  chance = np.where(WHERE, probs[:, TOKENS], 1).prod(axis=-1)  # [P, N]
  slope = probs * (RIGHT - PS[:, None])  # ∇p
  for size in SIZES[name == "pass@2" :]:  # pass@m is reached from G = m + 1 on
    of_size = size == OF_SIZE
    mean = np.einsum("pn,pnd->pd", chance[:, of_size], updates[:, of_size])
    weight = theory.objective_weight(rule, PS, size)[:, None]
    error = np.linalg.norm(mean - weight * slope, axis=-1)
    bound = np.abs(weight).max() * np.linalg.norm(slope, axis=-1)
    assert np.all(error <= 1e-12 * bound), (size, (error / bound).max())
    assert np.all(bound > 1e-3)


# --- A sampled network ---


class Network(nnx.Module):
  """Two layers, of the sum of what was said before."""

  def __init__(self):
    self.embed = nnx.Embed(3, 4, rngs=nnx.Rngs(0))
    self.head = nnx.Linear(4, 3, rngs=nnx.Rngs(1))

  def __call__(self, tokens):  # [N, L] → [N, L, V]
    hidden = jnp.tanh(2 * jnp.cumsum(self.embed(tokens), axis=1))
    return 2 * self.head(hidden)


def is_right(tokens):
  return jnp.sum(tokens, axis=-1) % 3 == 0


@pytest.mark.usefixtures("quick_compilation")
def test_the_loss_of_a_network_ascends_the_objective():
  """Within 4 standard errors, each small enough to find a fault of 1%.

  40 batches of 2048 groups of G = 6 answers of two tokens: the mean gradient,
  in every parameter and along ∇p, against c_G(p)∇p. The same check must fail
  for 1.01 and 0.99 of c_G. Of 10·28 comparisons one run in twelve would have
  one beyond 4 (t, 39), were they independent; the keys are fixed.
  """
  size, batch, batches = 6, 2048, 40
  table = sigma.table(np.abs(TABLE[size, 1:size]) + 0.5)
  # A weight of either sign may leave c_G too small for a part of it to show.
  ops = [table, *(op for op in OPS.values() if op is not random_table)]
  policy = policies.from_nnx(Network(), length=2)
  params = policy.init(jax.random.key(0))
  prompt = jnp.array([[1, 2]])
  answers = jnp.array(list(itertools.product(range(3), repeat=2)))[None]

  def success(params):
    log_probs = policy.log_prob(params, prompt, answers).sum(-1)
    return jnp.sum(jnp.exp(log_probs) * is_right(answers))

  def ascent(key):
    prompts = jnp.repeat(prompt, batch, axis=0)
    keys = jax.random.split(key, batch)
    drawn = policy.sample(params, keys, prompts, size)
    rewards = is_right(drawn.tokens).astype(jnp.float32)
    rollout = rollouts.Rollout(
      prompts=prompts,
      tokens=drawn.tokens,
      mask=drawn.mask,
      log_probs=drawn.log_probs,
      rewards=rewards,
      scores=rewards,
      where=jnp.ones(rewards.shape, bool),
    )
    kwargs = {"aggregate": losses.group_sum(batch)}
    return [
      -flat(testing.gradient(policy, sigma.rule(op), params, rollout, **kwargs))
      for op in ops
    ]

  p, slope = jax.value_and_grad(success)(params)
  slope = np.asarray(flat(slope), float)
  keys = jax.random.split(jax.random.key(0), batches)
  updates = jax.jit(lambda keys: jax.lax.map(ascent, keys))(keys)
  for op, update in zip(ops, updates, strict=True):
    axes = np.stack([slope, *np.eye(slope.size)])
    along = np.asarray(update, float) @ axes.T
    error = along.std(axis=0, ddof=1) / math.sqrt(batches)
    weight = theory.objective_weight(sigma.rule(op), float(p), size)

    def within(factor, weight=weight, along=along, axes=axes, error=error):
      expected = factor * weight * axes @ slope
      return np.all(np.abs(along.mean(axis=0) - expected) <= 4 * error)

    assert within(1)
    assert not within(1.01)
    assert not within(0.99)


def flat(tree):
  return jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])


# --- Entries of the dictionary ---


@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_dr_grpo_ascends_p(size):
  """F = ((G − 1)/G)p; so does GRPO at G = 2 and 3, up to a constant."""
  p = np.array([0.0, *PS, 1.0])
  rule = sigma.rule(sigma.dr_grpo())
  np.testing.assert_allclose(
    objectives.objective(rule, p, size), (size - 1) / size * p, rtol=1e-13
  )
  grpo = objectives.objective(sigma.rule(sigma.grpo()), p, size)
  straight = np.abs(grpo / math.sqrt(size - 1) - p) < 1e-13
  assert straight.all() == (size <= 3)


@pytest.mark.parametrize(
  ("size", "tries"), [(2, [1]), (3, [1, 2]), (8, range(1, 8)), (20, [5, 19])]
)
def test_every_pass_at_m_below_the_group_size(size, tries):
  """F = 1 − (1 − p)^m and c_G = m(1 − p)^(m − 1), m = 1, …, G − 1."""
  p = np.array([0.0, *PS, 1.0])
  for m in tries:
    rule = sigma.rule(sigma.pass_at(m))
    np.testing.assert_allclose(
      objectives.objective(rule, p, size), 1 - (1 - p) ** m, rtol=1e-12
    )
    np.testing.assert_allclose(
      theory.objective_weight(rule, p, size),
      m * (1 - p) ** (m - 1),
      rtol=1e-12,
      atol=1e-14,
    )


def test_pass_at_m_in_expectation_is_pkpo():
  """arXiv:2505.15201: same c_G for m < G; at m = G only PKPO has one.

  A zero-sum rule weighs groups by what G − 2 answers say, a degree less.
  """
  size = 8
  for m in range(1, size):
    np.testing.assert_allclose(
      theory.objective_weight(sigma.rule(sigma.pass_at(m)), PS, size),
      theory.objective_weight(pkpo(m), PS, size),
      rtol=1e-12,
    )
  np.testing.assert_allclose(
    objectives.objective(pkpo(size), PS, size), 1 - (1 - PS) ** size, rtol=1e-12
  )
  whole = theory.objective_weight(sigma.rule(sigma.pass_at(size)), PS, size)
  assert np.isnan(whole).all()


@pytest.mark.parametrize("size", [2, 5, 8, 40])
def test_max_rl_ascends_log_p_cut_at_the_group_size(size):
  """F = E[H_j], j ~ Bin(G − 1, p), = Σ_{m<G} (1 − (1 − p)^m)/m.

  arXiv:2602.02710. So it is the sum of pass@m over m, each weighed 1/m.
  """
  rule = sigma.rule(sigma.max_rl())
  got = objectives.objective(rule, [*PS, 1.0], size)
  harmonic = [sum(Fraction(1, m) for m in range(1, n)) for n in range(1, 41)]
  for p, value in zip([*PS, 1.0], got, strict=True):
    p = Fraction(p)
    cut = sum((1 - (1 - p) ** m) / m for m in range(1, size))
    mean = sum(
      math.comb(size - 1, j) * p**j * (1 - p) ** (size - 1 - j) * harmonic[j]
      for j in range(size)
    )
    assert cut == mean
    assert value == pytest.approx(float(cut), rel=1e-12)


def test_grpos_weight_is_capped_at_the_ends():
  """c_G → √(G − 1); extreme over middle 1.07, 1.43, 2.00, 4.00."""
  rule = sigma.rule(sigma.grpo())
  for size, ratio in ((4, 1.07), (8, 1.43), (16, 2.0), (64, 4.0)):
    weight = theory.objective_weight(rule, [0, 1e-9, 0.5, 1], size)
    ends = weight[[0, 1, 3]]
    np.testing.assert_allclose(ends, math.sqrt(size - 1), rtol=1e-6)
    assert weight.max() <= math.sqrt(size - 1) * (1 + 1e-12)
    assert ends[0] / weight[2] == pytest.approx(ratio, abs=5e-3)


def from_half(op, p, size):
  """F_G(p) − F_G(½), free of the constant."""
  values = objectives.objective(sigma.rule(op), [*p, 0.5], size)
  return values[:-1] - values[-1]


P = np.array([0.2, 0.3, 0.8])


def test_grpo_tends_to_the_arcsine_as_one_over_g():
  """2 arcsin √p − (2p − 1)/(4G√(p(1 − p))) + O(G^(−2)), from ½ on.

  The attenuation 1 − 1/(8Gp(1 − p)) (arXiv:2607.00152) under the integral.
  """
  limit = 2 * np.arcsin(np.sqrt(P)) - math.pi / 2
  first = -(2 * P - 1) / (4 * np.sqrt(P * (1 - P)))
  errors = {}
  for size in (64, 256):
    errors[size] = from_half(sigma.grpo(), P, size) - limit
    # The next order is 1/(Gp(1 − p)) of this one, or a few.
    order = 1 / (size * P * (1 - P))
    assert np.all(np.abs(size * errors[size] / first - 1) < 2 * order)
  rest = [errors[size] - first / size for size in (64, 256)]
  np.testing.assert_allclose(rest[0] / rest[1], 16, rtol=0.1)


def test_dr_grpo_tends_to_p_as_one_over_g():
  for size in (8, 512):
    error = from_half(sigma.divide(power=0), P, size) - (P - 0.5)
    np.testing.assert_allclose(error, -(P - 0.5) / size, rtol=1e-9)


@pytest.mark.parametrize("size", [8, 32])
def test_dividing_by_the_variance_tends_to_the_logit_exponentially(size):
  """c_G = (1 − s)/(p(1 − p)): only silence keeps it from the logit's slope."""
  weight = theory.objective_weight(sigma.rule(sigma.divide(power=2)), P, size)
  silent = P**size + (1 - P) ** size
  np.testing.assert_allclose(weight, (1 - silent) / (P * (1 - P)), rtol=1e-11)
  error = from_half(sigma.divide(power=2), P, size) - special.logit(P)
  # ∫ s/(x(1 − x)) from p to ½, at most its width times its largest value.
  bound = np.abs(P - 0.5) * silent / (P * (1 - P))
  assert np.all(np.abs(error) <= bound + 1e-11)
  # And 1/(x(1 − x)) ≥ 4.
  least = 4 * np.abs(P ** (size + 1) - (1 - P) ** (size + 1)) / (size + 1)
  assert np.all(np.abs(error) >= least - 1e-11)


@pytest.mark.parametrize("size", [8, 32])
def test_max_rl_tends_to_the_logarithm_exponentially(size):
  """F_G(p) − F_G(1) = log p + r, 0 < r < (1 − p)^G/(Gp)."""
  values = objectives.objective(sigma.rule(sigma.max_rl()), [*P, 1.0], size)
  rest = values[:-1] - values[-1] - np.log(P)
  bound = (1 - P) ** size / (size * P)
  assert np.all(rest <= bound + 1e-12)
  assert np.all(rest >= bound * P - 1e-12)  # its first term


def test_the_weights_shape_passes_to_the_objective():
  """Bernstein: sign, monotonicity and convexity of w are those of c_G."""
  rng = np.random.default_rng(3)
  size, p = 9, np.linspace(0, 1, 401)
  for _ in range(20):
    convex = np.cumsum(np.cumsum(rng.exponential(size=size - 1)))
    convex -= rng.uniform(0, 12) * np.arange(size - 1)
    for weights, order in (
      (rng.exponential(size=size - 1), 0),
      (np.cumsum(rng.exponential(size=size - 1)) - 5, 1),
      (convex, 2),
    ):
      rule = sigma.rule(sigma.table(weights))
      c = theory.objective_weight(rule, p, size)
      assert np.all(np.diff(weights, n=order) >= 0)
      assert np.all(np.diff(c, n=order) >= -1e-12)
