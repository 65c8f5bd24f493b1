"""Expected gradients of the surrogates, over all answers of a small policy.

It has seven answers, of one token or two, so that every expectation is a sum.
Its scores, one-hot vectors minus softmaxes, are written out; the policy
gradient itself is a complex-step derivative of the expected reward.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupstd import losses

close = np.testing.assert_allclose

ANSWERS = np.array([[0, 0], *[[i, j] for i in (1, 2) for j in range(3)]])
MASK = np.array([[True, False]] + [[True, True]] * 6)  # 0 ends an answer.
REWARDS = np.array([0.3, -1.2, 0.8, 1.5, -0.4, 0.1, -0.9])


def token_log_probs(theta, xp=jnp):
  """[7, 2] of each answer's tokens, 0 where there is none; theta [9].

  Three logits of the first token, and three of the second for 1 and 2 each.
  """
  tables = theta.reshape(3, 3)
  tables = tables - xp.log(xp.sum(xp.exp(tables), axis=1, keepdims=True))
  first = tables[0][ANSWERS[:, 0]]
  second = tables[ANSWERS[:, 0], ANSWERS[:, 1]] * MASK[:, 1]
  return xp.stack([first, second], axis=1)


def token_scores(theta):
  """[7, 2, 9]: one-hot minus softmax, in the logits a token is drawn from."""
  tables = np.exp(theta.reshape(3, 3))
  tables /= tables.sum(1, keepdims=True)
  scores = np.zeros((7, 2, 3, 3))
  for i, (first, second) in enumerate(ANSWERS):
    scores[i, 0, 0] = np.eye(3)[first] - tables[0]
    if MASK[i, 1]:
      scores[i, 1, first] = np.eye(3)[second] - tables[first]
  return scores.reshape(7, 2, 9)


def answer_probs(theta):
  return np.exp(token_log_probs(theta, np).sum(1))


def value_gradient(theta):
  """∇E_π[R] by complex steps: exact, and with no score in it."""
  steps = theta + 1e-30j * np.eye(9)
  return np.imag([answer_probs(x) @ REWARDS for x in steps]) / 1e-30


def expected_gradient(surrogate, theta, start, *, per_length=False):
  """−E_{y ~ start}[∇ Σ_t term_t] at theta, or of its mean over tokens."""
  drawn = answer_probs(start)
  share = np.where(MASK, drawn[:, None], 0)
  if per_length:
    share = share / MASK.sum(1, keepdims=True)

  def loss(theta):
    terms, _ = surrogate(
      token_log_probs(theta), token_log_probs(start), REWARDS[:, None], MASK
    )
    return -jnp.sum(share * terms)

  return jax.jit(jax.grad(loss))(jnp.asarray(theta))


def ratios(theta, start):
  return np.exp(token_log_probs(theta, np) - token_log_probs(start, np))


SURROGATES = {
  "reinforce": losses.reinforce(),
  "clipped": losses.clipped(0.1, 0.2),
  "sequence": losses.sequence_clipped(0.1, 0.2),
  "cispo": losses.cispo(0.2),
  "cispo, both": losses.cispo(0.2, 0.1),
}


def coefficients(name, theta, start):
  """[7, 2]: what the form multiplies a token's score by, A excepted."""
  r = ratios(theta, start)
  low, high, rises = 0.9, 1.2, REWARDS[:, None] > 0
  s = np.exp(np.log(r).sum(1, keepdims=True) / MASK.sum(1, keepdims=True))
  inside = lambda x: np.where(rises, x <= high, x >= low)  # noqa: E731
  return {
    "reinforce": np.ones_like(r),
    "clipped": np.where(inside(r), r, 0),
    "sequence": np.where(inside(s), s, 0) * np.ones_like(r),
    "cispo": np.minimum(r, high),
    "cispo, both": np.clip(r, low, high),
  }[name]


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("size", [0.0, 0.02, 0.5])
@pytest.mark.usefixtures("x64")
def test_expected_gradients_are_those_of_the_form(name, size):
  """Where the answers were drawn, within the clip, and beyond it."""
  rng = np.random.default_rng(3)
  start, direction = rng.normal(size=(2, 9))
  theta = start + size * direction
  r = ratios(theta, start)[MASK]
  assert ((r < 0.9).any() and (r > 1.2).any()) == (size == 0.5)
  assert ((r >= 0.9) & (r <= 1.2)).all() == (size < 0.5)
  weights = answer_probs(start) * REWARDS
  per_length = name == "sequence"
  share = weights / MASK.sum(1) if per_length else weights
  each = coefficients(name, theta, start)[..., None] * token_scores(theta)
  found = expected_gradient(
    SURROGATES[name], theta, start, per_length=per_length
  )
  close(found, np.einsum("i,itd->d", share, each), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
  "name", ["reinforce", "clipped", "cispo", "cispo, both"]
)
@pytest.mark.usefixtures("x64")
def test_on_policy_all_are_the_policy_gradient(name):
  theta = np.random.default_rng(4).normal(size=9)
  expected = value_gradient(theta)
  assert np.abs(expected).max() > 0.1
  found = expected_gradient(SURROGATES[name], theta, theta)
  close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.usefixtures("x64")
def test_on_policy_a_sequence_s_is_that_of_the_geometric_mean():
  """Of one length it is the policy gradient over the length, and exact."""
  theta = np.random.default_rng(4).normal(size=9)
  theta[0] = -1e3  # No answer of one token is left.
  found = expected_gradient(
    SURROGATES["sequence"], theta, theta, per_length=True
  )
  close(found, value_gradient(theta) / 2, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["clipped", "cispo", "reinforce"])
@pytest.mark.usefixtures("x64")
def test_off_policy_a_ratio_reweighs_answers_of_one_token(name):
  """E_b[r·A·∇log π] = ∇E_π[A] wherever no clip binds; REINFORCE is biased."""
  wide = {
    "clipped": losses.clipped(0.999, 1e3),
    "cispo": losses.cispo(1e3),
    "reinforce": losses.reinforce(),
  }[name]
  rng = np.random.default_rng(5)
  start, theta, rewards = rng.normal(size=(3, 6))

  def loss(theta):
    log_probs, behaviour = (jax.nn.log_softmax(x) for x in (theta, start))
    args = log_probs[:, None], behaviour[:, None], rewards[:, None]
    terms, _ = wide(*args, jnp.ones([6, 1], bool))
    return -jax.nn.softmax(start) @ terms[:, 0]

  p = np.exp(theta) / np.exp(theta).sum()
  truth = p * (rewards - p @ rewards)
  exact = np.allclose(jax.grad(loss)(theta), truth, rtol=0, atol=1e-14)
  assert exact == (name != "reinforce")
