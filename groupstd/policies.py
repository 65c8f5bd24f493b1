"""Policies: records of pure functions from parameters to answers and log-probs.

What the learner needs of a model is here and nothing else, so that a scalar, a
table and a transformer train through the same step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Policy", "Sample", "bernoulli", "from_nnx", "softmax"]


class Sample(NamedTuple):
  """Answers drawn for B prompts, G each.

  Attributes:
    tokens: [B, G, T] integers.
    mask: [B, G, T], which tokens belong to the answer.
    log_probs: [B, G, T], of each token under the policy that drew it.
  """

  tokens: jax.Array
  mask: jax.Array
  log_probs: jax.Array


class _SampleFn(Protocol):
  def __call__(
    self, params: Any, keys: jax.Array, prompts: Any, group_size: int, /
  ) -> Sample: ...


class Policy(NamedTuple):
  """A policy π(tokens | prompt).

  Attributes:
    init: key → params, a pytree.
    sample: (params, keys [B], prompts [B, ...], group_size) → Sample.
    log_prob: (params, prompts [B, ...], tokens [B, G, T]) → [B, G, T]; finite
      at every token that `sample` can draw.
  """

  init: Callable[[chex.PRNGKey], Any]
  sample: _SampleFn
  log_prob: Callable[[Any, Any, jax.Array], jax.Array]


def bernoulli(probabilities: chex.Array | Sequence[float]) -> Policy:
  """One logit θ per prompt; an answer is right with p = sigmoid(θ).

  The scalar policy of arXiv:2607.00152: the score of an answer y ∈ {0, 1} is
  y − p, so the contrast between right and wrong is 1 and the update of a group
  is σ²·w itself. A prompt is its index.

  Args:
    probabilities: [N] in (0, 1), where training starts.

  Raises:
    ValueError: if a probability is not inside (0, 1), where θ is finite.
  """
  probabilities = np.asarray(probabilities, np.float64)
  inside = (probabilities > 0) & (probabilities < 1)
  if probabilities.ndim != 1 or not np.all(inside):
    raise ValueError(
      "`probabilities` must be [N] inside (0, 1), got shape"
      f" {probabilities.shape} and {probabilities[~inside][:3]}: the logit of 0"
      " or 1 is infinite."
    )

  def init(key):
    del key  # The start is given, not drawn.
    return jnp.asarray(np.log(probabilities) - np.log1p(-probabilities))

  def sample(params, keys, prompts, group_size):
    draws = jax.vmap(lambda key: jax.random.uniform(key, (group_size, 1)))(keys)
    p = jax.nn.sigmoid(params[prompts])
    tokens = (draws < p[:, None, None]).astype(jnp.int32)
    return Sample(
      tokens,
      jnp.ones(tokens.shape, bool),
      log_prob(params, prompts, tokens),
    )

  def log_prob(params, prompts, tokens):
    theta = params[prompts]  # [B]
    group_size = tokens.shape[1]

    def repeat(x):
      # Stacked, its transpose is additions that fuse with the rest; that of a
      # broadcast is a reduction that XLA:CPU runs ten times slower.
      return jnp.stack([x] * group_size, axis=1)[..., None]  # [B, G, 1]

    return tokens * repeat(theta) - repeat(jax.nn.softplus(theta))

  return Policy(init, sample, log_prob)


def softmax(num_prompts: int, num_answers: int) -> Policy:
  """A table of logits: π(y | x) = softmax(θ_x)_y, an answer being one token.

  Small enough to enumerate, which makes it the oracle of many tests.
  """

  def init(key):
    return jax.random.normal(key, (num_prompts, num_answers))

  def sample(params, keys, prompts, group_size):
    def draw(key, logits):
      return jax.random.categorical(key, logits, shape=(group_size, 1))

    tokens = jax.vmap(draw)(keys, params[prompts])
    return Sample(
      tokens,
      jnp.ones(tokens.shape, bool),
      log_prob(params, prompts, tokens),
    )

  def log_prob(params, prompts, tokens):
    log_probs = jax.nn.log_softmax(params[prompts])  # [B, V]
    return _pick(log_probs[:, None, None], tokens)

  return Policy(init, sample, log_prob)


def from_nnx(
  module: nnx.Module, *, length: int, stop: Sequence[int] = ()
) -> Policy:
  """A Policy of a flax.nnx module from tokens [N, L] to logits [N, L, V].

  The module is split once and its parameters are a plain pytree after, which is
  checked by path and shape before every merge; what else it holds stays as it
  is. Prompts are [B, P] tokens of one length, at least 1; sampling runs the
  whole sequence anew for each token, which suits any module and only small
  ones.

  Args:
    module: causal: the logits at a position may depend on what is before it.
    length: T, how many tokens an answer has at most.
    stop: tokens that end an answer; they belong to it.

  Raises:
    ValueError: if `length` is below 1; from the policy's functions, if prompts
      are empty, or the parameters' paths or shapes are not the module's.
  """
  if length < 1:
    raise ValueError(f"`length` must be at least 1, got {length}.")
  graph, state, rest = nnx.split(module, nnx.Param, ...)
  initial = nnx.to_pure_dict(state)
  expected = _signature(initial)

  def apply(params, tokens):
    if (found := _signature(params)) != expected:
      wrong = sorted(set(found.items()) ^ set(expected.items()))
      raise ValueError(
        "the parameters' paths and shapes must be the module's, they differ at"
        f" {wrong[:4]}: a merge goes by order and would mix them up."
      )
    logits = nnx.merge(graph, params, rest)(tokens)
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    return jax.nn.log_softmax(logits.astype(dtype))

  def init(key):
    del key  # The module was made with its own.
    return jax.tree.map(jnp.copy, initial)

  def repeat(prompts, group_size):  # → [B·G, P]
    if prompts.ndim != 2 or not prompts.shape[1]:
      raise ValueError(
        "`prompts` must be [B, P] with P at least 1, got shape"
        f" {prompts.shape}: the first token's logits are at the last of them."
      )
    return jnp.repeat(prompts, group_size, axis=0)

  def sample(params, keys, prompts, group_size):
    rows = repeat(prompts, group_size)
    batch, width = prompts.shape
    tokens = jnp.pad(rows, ((0, 0), (0, length)))
    ended = jnp.zeros(len(tokens), bool)

    def extend(carry, t):
      tokens, ended = carry
      log_probs = apply(params, tokens)[:, width + t - 1]  # [B·G, V]
      draw = jax.vmap(
        lambda key, row: jax.random.categorical(jax.random.fold_in(key, t), row)
      )
      drawn = jax.vmap(lambda key: jax.random.split(key, group_size))(keys)
      token = draw(drawn.reshape(-1), log_probs)
      token = jnp.where(ended, 0, token).astype(tokens.dtype)
      mask = ~ended
      ended = ended | jnp.isin(token, jnp.array(stop, tokens.dtype)) & mask
      return (tokens.at[:, width + t].set(token), ended), (
        token,
        mask,
        _pick(log_probs, token),
      )

    _, drawn = jax.lax.scan(extend, (tokens, ended), jnp.arange(length))
    return Sample(
      *(
        jnp.moveaxis(x, 0, -1).reshape(batch, group_size, length) for x in drawn
      )
    )

  def log_prob(params, prompts, tokens):
    batch, group_size, _ = tokens.shape
    rows = repeat(prompts, group_size)
    answers = tokens.reshape(batch * group_size, -1)
    sequence = jnp.concatenate([rows, answers.astype(rows.dtype)], axis=1)
    log_probs = apply(params, sequence)[:, prompts.shape[1] - 1 : -1]
    return _pick(log_probs, answers).reshape(tokens.shape)

  return Policy(init, sample, log_prob)


def _pick(log_probs: jax.Array, tokens: jax.Array) -> jax.Array:
  """log_probs [..., V] at tokens [...]."""
  log_probs = jnp.broadcast_to(log_probs, (*tokens.shape, log_probs.shape[-1]))
  return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


def _signature(params: Any) -> dict[str, tuple[int, ...]]:
  """Path → shape of every leaf."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  return {jax.tree_util.keystr(path): jnp.shape(x) for path, x in leaves}
