"""Policies: records of pure functions from parameters to answers and log-probs.

What the learner needs of a model is here and nothing else, so that a scalar, a
table and a transformer train through the same step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import chex
from flax import nnx
import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

__all__ = [
  "Policy",
  "Prompts",
  "Sample",
  "bernoulli",
  "check_prompts",
  "entropy_of",
  "from_nnx",
  "pick",
  "softmax",
  "split",
]


class Prompts(NamedTuple):
  """B prompts of mixed length, padded to one width.

  Attributes:
    tokens: [B, P] integers; anything where the mask is False.
    mask: [B, P], which tokens are real. Padding may stand on either side:
      positions count real tokens only, so its side and width change nothing.
    index: [B], which questions of the task they are; policies do not look.
  """

  tokens: jax.Array
  mask: jax.Array
  index: jax.Array


class Sample(NamedTuple):
  """Answers drawn for B prompts, G each.

  Attributes:
    tokens: [B, G, T] integers.
    mask: [B, G, T], which tokens belong to the answer.
    log_probs: [B, G, T], of each token under the policy that drew it.
    ended: [B, G], whether an answer came to its end by itself, and was not cut
      off at T tokens; None: all did.
  """

  tokens: jax.Array
  mask: jax.Array
  log_probs: jax.Array
  ended: jax.Array | None = None


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
    log_prob_and_entropy: the same arguments → (log_probs, entropies), [B, G, T]
      each, in one pass: the entropy −Σ_v π_v log π_v, in nats, of the
      distribution that each token was drawn from. None: not offered.
  """

  init: Callable[[chex.PRNGKey], Any]
  sample: _SampleFn
  log_prob: Callable[[Any, Any, jax.Array], jax.Array]
  log_prob_and_entropy: (
    Callable[[Any, Any, jax.Array], tuple[jax.Array, jax.Array]] | None
  ) = None


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

  def repeat(x, tokens):
    # Stacked, its transpose is additions that fuse with the rest; that of a
    # broadcast is a reduction that XLA:CPU runs ten times slower.
    return jnp.stack([x] * tokens.shape[1], axis=1)[..., None]  # [B, G, 1]

  def log_prob(params, prompts, tokens):
    theta = params[prompts]  # [B]
    return tokens * repeat(theta, tokens) - repeat(
      jax.nn.softplus(theta), tokens
    )

  def log_prob_and_entropy(params, prompts, tokens):
    rarer = -jnp.abs(params[prompts])  # Its logit; either way H is the same.
    entropy = jax.nn.softplus(rarer) - rarer * jax.nn.sigmoid(rarer)
    return log_prob(params, prompts, tokens), repeat(entropy, tokens)

  return Policy(init, sample, log_prob, log_prob_and_entropy)


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
    return pick(log_probs[:, None, None], tokens)

  def log_prob_and_entropy(params, prompts, tokens):
    entropy = entropy_of(jax.nn.log_softmax(params[prompts]))  # [B]
    return log_prob(params, prompts, tokens), jnp.broadcast_to(
      entropy[:, None, None], tokens.shape
    )

  return Policy(init, sample, log_prob, log_prob_and_entropy)


def split(module: nnx.Module) -> tuple[Any, Callable[[Any], nnx.Module]]:
  """A module as (params, merge), where merge(params) is the module again.

  The params are a plain dict of `nnx.Param`s' arrays, which are the module's
  own: copy them before they are donated. What else the module holds stays as it
  is. A merge goes by order and would mix up what lies under other names, so
  paths and shapes are checked before it.

  Returns:
    The params, and a merge.

  Raises:
    ValueError: from the merge, if the paths or shapes are not the module's.
  """
  graph, state, rest = nnx.split(module, nnx.Param, ...)
  params = nnx.to_pure_dict(state)
  expected = _signature(params)

  def merge(params: Any) -> nnx.Module:
    if (found := _signature(params)) != expected:
      wrong = [
        f"{path} {found.get(path, 'missing')}"
        f" for {expected.get(path, 'nothing')}"
        for path in sorted(found | expected)
        if found.get(path) != expected.get(path)
      ]
      raise ValueError(
        "the parameters' paths and shapes must be the module's, got"
        f" {'; '.join(wrong[:4])}: a merge goes by order and would mix them up."
      )
    return nnx.merge(graph, params, rest)

  return params, merge


def from_nnx(
  module: nnx.Module,
  *,
  length: int,
  stop: Sequence[int] = (),
  temperature: float = 1.0,
) -> Policy:
  """A Policy of a flax.nnx module from tokens [N, L] to logits [N, L, V].

  π(token | before) = softmax(logits / temperature), for the tokens drawn and
  for their log-probs alike, so that the first ratio is 1 at any temperature.
  Top-p and top-k are not offered: a token cut off by parameters that have moved
  has probability 0, and no ratio; scored by the whole softmax instead, the
  first ratio is not 1.

  Prompts are [B, P] tokens of one length, or `Prompts`, whose real tokens are
  moved to the front, with the answer right behind them and the padding last,
  where a causal module does not look: their positions are 0, 1, …, and so
  rotary and learned positions do as well. Sampling runs the whole sequence, of
  P + T tokens, anew for each token, until all answers have ended, which suits
  any module and only small ones. After its stop an answer is token 0, mask
  False, log-prob 0. Parameters are a plain dict, checked as in `split`.

  Args:
    module: causal: the logits at a position may depend on it and what is before
      it, and not on chance.
    length: T, how many tokens an answer has at most.
    stop: tokens that end an answer; they belong to it. Without any, every
      answer has T tokens and ends there by itself.
    temperature: positive; at 0 the best token is certain and nothing trains.

  Raises:
    ValueError: if `length` is below 1 or `temperature` not positive and finite;
      from the policy's functions, if prompts are empty (inside jit, one without
      a real token is taken for token 0), or the parameters' paths or shapes are
      not the module's.
  """
  if length < 1:
    raise ValueError(f"`length` must be at least 1, got {length}.")
  if not 0 < temperature < float("inf"):
    raise ValueError(
      f"`temperature` must be positive and finite, got {temperature}: at 0 the"
      " best token has log-prob 0 whatever the parameters, and nothing trains."
    )
  initial, merge = split(module)

  def init(key):
    del key  # The module was made with its own.
    return jax.tree.map(jnp.copy, initial)

  def predict(params, prompts, tokens, slots):
    """log π(· | prompt, tokens before the slot), [B, G, S, V]."""
    batch, group_size, _ = tokens.shape
    given, real = check_prompts(prompts)
    last = jnp.sum(real, axis=1, keepdims=True) - 1  # [B, 1]
    real = jnp.pad(real, ((0, 0), (0, tokens.shape[2])), constant_values=True)
    order = jnp.argsort(~real, axis=1, stable=True)  # [B, P + T]
    given = jnp.repeat(given[:, None], group_size, axis=1)
    sequence = jnp.concatenate([given, tokens], axis=2)
    sequence = jnp.take_along_axis(sequence, order[:, None], axis=2)
    logits = merge(params)(sequence.reshape(batch * group_size, -1))
    logits = logits.reshape(batch, group_size, *logits.shape[1:])
    before = (last + slots)[:, None, :, None]  # [B, 1, S, 1]
    logits = jnp.take_along_axis(logits, before, axis=2)
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    return jax.nn.log_softmax(logits.astype(dtype) / temperature)

  def sample(params, keys, prompts, group_size):
    keys = jax.vmap(lambda key: jax.random.split(key, group_size))(keys)

    def step(carry):
      t, drawn = carry
      rows = predict(params, prompts, drawn.tokens, t[None])[:, :, 0]

      def draw(key, row):
        return jax.random.categorical(jax.random.fold_in(key, t), row)

      token = jax.vmap(jax.vmap(draw))(keys, rows).astype(jnp.int32)  # [B, G]
      going = ~drawn.ended
      return t + 1, Sample(
        drawn.tokens.at[..., t].set(jnp.where(going, token, 0)),
        drawn.mask.at[..., t].set(going),
        drawn.log_probs.at[..., t].set(jnp.where(going, pick(rows, token), 0)),
        drawn.ended | jnp.isin(token, jnp.array(stop, jnp.int32)),
      )

    def unfinished(carry):
      t, drawn = carry
      return (t < length) & ~jnp.all(drawn.ended)

    tokens = jnp.zeros((*keys.shape, length), jnp.int32)
    blank = Sample(
      tokens,
      jnp.zeros_like(tokens, bool),
      jnp.zeros_like(jax.eval_shape(log_prob, params, prompts, tokens)),
      jnp.zeros(keys.shape, bool),
    )
    _, drawn = jax.lax.while_loop(unfinished, step, (jnp.array(0), blank))
    return drawn if len(stop) else drawn._replace(ended=None)

  def log_prob_and_entropy(params, prompts, tokens):
    slots = jnp.arange(tokens.shape[2])
    log_probs = predict(params, prompts, tokens, slots)
    return pick(log_probs, tokens), entropy_of(log_probs)

  def log_prob(params, prompts, tokens):
    return log_prob_and_entropy(params, prompts, tokens)[0]

  return Policy(init, sample, log_prob, log_prob_and_entropy)


def pick(log_probs: jax.Array, tokens: jax.Array) -> jax.Array:
  """log_probs [..., V] at tokens [...]."""
  log_probs = jnp.broadcast_to(log_probs, (*tokens.shape, log_probs.shape[-1]))
  return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


def entropy_of(log_probs: jax.Array) -> jax.Array:
  """−Σ π·log π over the last axis, where 0·log 0 is 0."""
  possible = ~jnp.isneginf(log_probs)
  log_probs = jnp.where(possible, log_probs, 0)
  terms = jnp.where(possible, jnp.exp(log_probs) * log_probs, 0)
  return -jnp.sum(terms, axis=-1)


def check_prompts(prompts: Any) -> tuple[jax.Array, jax.Array]:
  """Tokens, 0 where not real, and which are, at least one a row; [B, P]."""
  if isinstance(prompts, Prompts):
    tokens, mask = prompts.tokens, prompts.mask
  else:
    tokens, mask = prompts, np.ones(prompts.shape, bool)
  if tokens.ndim != 2 or not tokens.shape[1] or tokens.shape != mask.shape:
    raise ValueError(
      "`prompts` must be [B, P] with P at least 1, and so must their mask, got"
      f" {tokens.shape} and {mask.shape}: an answer's first token is drawn"
      " after the last of them."
    )
  if not isinstance(mask, Tracer):
    empty = np.flatnonzero(~np.asarray(mask).any(axis=1))
    if len(empty):
      raise ValueError(
        f"a prompt must have a real token, got none in rows {empty[:4]}: an"
        " answer's first token is drawn after the last of them."
      )
  empty = ~jnp.any(mask, axis=1, keepdims=True)
  first = jnp.arange(tokens.shape[1]) == 0
  return jnp.where(mask, tokens, 0), jnp.logical_or(mask, empty & first)


def _signature(params: Any) -> dict[str, tuple[int, ...]]:
  """Path → shape of every leaf."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  return {jax.tree_util.keystr(path): jnp.shape(x) for path, x in leaves}
