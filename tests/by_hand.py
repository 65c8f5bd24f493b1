"""Gradients written out by hand.

The policy is a table of logits for each prompt and position, so that the score
of a token is its one-hot vector minus the softmax.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from groupstd import learners, losses, policies, rollouts, sigma

B, G, T, V = 8, 4, 6, 3
DAPO, GRPO = sigma.rule(sigma.dapo()), sigma.rule(sigma.grpo())
AGGREGATES = [
  losses.token_mean(),
  losses.sequence_mean(),
  losses.sequence_sum(10.0),
  losses.group_sum(2.0),
]
KEEP_GRADIENT = optax.trace(0.0)  # Its state is the last gradient.


def softmax(params):
  return np.exp(params) / np.exp(params).sum(-1, keepdims=True)


def log_prob(params, prompts, tokens):
  log_probs = jax.nn.log_softmax(params[prompts])[:, None]  # [B, 1, T, V]
  return jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]


def log_prob_and_entropy(params, prompts, tokens):
  logits = jax.nn.log_softmax(params[prompts])[:, None]  # [B, 1, T, V]
  entropy = -jnp.sum(jnp.exp(logits) * logits, axis=-1)
  return log_prob(params, prompts, tokens), jnp.broadcast_to(
    entropy, tokens.shape
  )


TABLE = policies.softmax(B, V)._replace(
  log_prob=log_prob, log_prob_and_entropy=log_prob_and_entropy
)
PARAMS = np.random.default_rng(0).normal(size=(B, T, V)).astype(np.float32)


def batch(rewards=None, lengths=None, *, stale=0.0, prompts=None, where=None):
  """Uneven answers; two groups of eight are silent, by default.

  The behaviour log-probs are those of PARAMS, but for noise of size `stale`.
  """
  rng = np.random.default_rng(1)
  if rewards is None:
    rewards = rng.integers(0, 2, (B, G))
    rewards[0], rewards[1], rewards[2:, 0], rewards[2:, 1] = 0, 1, 0, 1
  rewards = np.asarray(rewards, np.float32)
  shape = rewards.shape
  if lengths is None:
    lengths = rng.integers(0, T + 1, shape)
  if prompts is None:
    prompts = np.arange(shape[0])
  tokens = rng.integers(0, V, (*shape, T))
  onehot = np.eye(V, dtype=np.float32)[tokens]
  drawn = (onehot * np.log(softmax(PARAMS))[prompts][:, None]).sum(-1)
  return rollouts.Rollout(
    prompts=np.asarray(prompts),
    tokens=tokens,
    mask=np.arange(T) < np.asarray(lengths)[..., None],
    log_probs=drawn + stale * rng.normal(size=drawn.shape).astype(np.float32),
    rewards=rewards,
    scores=rewards,
    where=np.ones(shape, bool) if where is None else np.asarray(where),
  )


def ascent(rollout, weights, params=PARAMS):
  """Σ weights·s: −∇ of a loss that weighs the tokens' log-probs so."""
  onehot = np.eye(V)[rollout.tokens]
  scores = onehot - softmax(np.float64(params))[rollout.prompts][:, None]
  found = np.zeros(PARAMS.shape)
  masked = np.where(rollout.mask, weights, 0)[..., None]
  np.add.at(found, rollout.prompts, (masked * scores).sum(1))
  return found


def make(
  rule=DAPO, optimizer=KEEP_GRADIENT, policy=TABLE, *, reference=None, **kwargs
):
  learner = learners.policy_gradient(policy, optimizer, rule, **kwargs)
  return learner._replace(init=lambda params: learner.init(params, reference))


def step_each(made, *batches, params=PARAMS):
  """[(state, info), ...] of each learner on each batch, in one program."""
  states = [learner.init(jnp.asarray(params)) for learner in made]

  def each(*batches):
    return [
      learner.step(state, rollout)
      for learner, state in zip(made, states, strict=True)
      for rollout in batches
    ]

  return jax.jit(each)(*batches)
