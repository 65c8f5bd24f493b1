"""Answers of one token or three, and what length normalisation breaks.

Dividing each answer's log-prob by its length (`losses.sequence_mean`) leaves
the identity in place, with s_i/|y_i| for s_i (arXiv:2607.00152, Theorem 1). But
E[s | R = 1] = ∇p/p, from which E[g] = c_G(p)∇p follows, becomes

  E[s/|y| | R = 1] = ∇E[R/|y|]/p,  E[s/|y| | R = 0] = ∇E[(1 − R)/|y|]/(1 − p),

as Σ_y π(y)R(y)s(y)/|y| = ∇Σ_y π(y)R(y)/|y|. A centred rule weighs the two by
E_k[σ²w] and −E_k[σ²w], which is ±p(1 − p)·c_G(p). So, for any policy,

  E[(1/G)ΣA_i s_i/|y_i|] = c_G(p)·((1 − p)∇E[R/|y|] − p∇E[(1 − R)/|y|])
                         = c_G(p)·(∇E[R/|y|] − p∇E[1/|y|])
                         = c_G(p)·(E[1/|y|]·∇p + ∇Cov(R, 1/|y|)).

The first term is the old direction at another rate. The second is the failure:
how length and correctness go together. Its share is the same for every such
rule and group size. It vanishes where no parameter can make them go together;
that they do not yet, Cov = 0, is not enough. Nor is the sum in general the
gradient of anything: there is then no objective to ascend.
"""

import jax
import jax.numpy as jnp
import numpy as np

from groupstd import policies

_LONG = 3  # Tokens of a long answer; a short one has 1.


def one_or_three(num_prompts: int) -> policies.Policy:
  """Answers of one token or of three; a softmax table [N, 3, 3] draws them.

  Token 0 or 1 at first ends the answer, 2 goes on for two more. What is right
  is for a reward function to say: here, an answer whose last token is 1.
  """

  def sample(params, keys, prompts, group_size):
    def draw(key, logits):
      return jax.random.categorical(key, logits, shape=(group_size, _LONG))

    tokens = jax.vmap(draw)(keys, params[prompts])
    return policies.Sample(
      tokens, token_mask(tokens), log_prob(params, prompts, tokens)
    )

  def log_prob(params, prompts, tokens):
    log_probs = jax.nn.log_softmax(params[prompts])[:, None]  # [B, 1, T, V]
    return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]

  return policies.Policy(
    lambda key: jax.random.normal(key, (num_prompts, _LONG, 3)),
    sample,
    log_prob,
  )


def token_mask(tokens: jax.Array) -> jax.Array:
  """Which of an answer's three tokens belong to it, [..., 3]."""
  return (jnp.arange(_LONG) == 0) | (tokens[..., :1] == 2)


def last_is_one(tokens: jax.Array) -> jax.Array:
  """Whether an answer of `one_or_three` is right, [...]."""
  last = jnp.where(tokens[..., 0] == 2, tokens[..., -1], tokens[..., 0])
  return last == 1


def terms(params: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(E[1/|y|], ∇p, ∇Cov(R, 1/|y|)) at one prompt's table [1, 3, 3].

  Summed over all answers of `one_or_three`, 2 short and 9 long.
  """
  answers = all_answers()
  right = last_is_one(answers) * 1.0
  inverse = 1 / jnp.sum(token_mask(answers), axis=-1)

  def moments(params):
    log_probs = one_or_three(1).log_prob(params, jnp.array([0]), answers[None])
    chance = jnp.exp(jnp.sum(log_probs[0] * token_mask(answers), axis=-1))
    p, mean = chance @ right, chance @ inverse
    return jnp.stack([mean, p, chance @ (right * inverse) - p * mean])

  slopes = jax.jacrev(moments)(params)
  return moments(params)[0], slopes[1], slopes[2]


def all_answers() -> jax.Array:
  """[11, 3]: what `one_or_three` can say."""
  long = [[2, i, j] for i in range(3) for j in range(3)]
  return jnp.array([[0, 0, 0], [1, 0, 0], *long])


def sweep() -> dict[str, list[float]]:
  """∇Cov(R, 1/|y|) over E[1/|y|]∇p, by P(right | short) − P(right | long).

  A quarter of the answers are right and half are long. `size` is the ratio of
  the norms; `along`, that of the components along ∇p, by how much faster p
  itself ascends.
  """
  coupling = np.linspace(-0.45, 0.45, 19)

  def ratios(c):
    short, long = 0.25 + c / 2, 0.25 - c / 2
    table = [
      [(1 - short) / 2, short / 2, 0.5],
      [1 / 3, 1 / 3, 1 / 3],
      [(1 - long) / 2, long, (1 - long) / 2],
    ]
    mean, slope, cross = terms(jnp.log(jnp.array([table])))
    norm = jnp.linalg.norm(slope)
    along = jnp.vdot(cross, slope) / (mean * norm**2)
    return jnp.linalg.norm(cross) / (mean * norm), along

  size, along = jax.jit(jax.vmap(ratios))(coupling)
  return {
    "coupling": coupling.tolist(),
    "size": size.tolist(),
    "along": along.tolist(),
  }
