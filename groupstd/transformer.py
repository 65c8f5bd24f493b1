"""A decoder-only transformer as a Policy: its training pass and its sampling.

The decoder is a flax.nnx module, used functionally: split once, the parameters
a plain pytree after. A group's prompt is computed once, in either.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from groupstd import policies
from groupstd.decoder import Config, Transformer

__all__ = ["Config", "Transformer", "policy"]


def policy(
  config: Config,
  *,
  length: int,
  stop: Sequence[int] = (),
  temperature: float = 1.0,
) -> policies.Policy:
  """π(y|x) = Π_t softmax(logits_t / temperature), prompts padded or not.

  Prompts are `policies.Prompts`, or [B, P] tokens of one length. Answers are
  drawn with a cache of keys and values until all have ended. There is no top-p
  or top-k: what is sampled is what is trained, so that the first ratio is 1.

  Args:
    config: the decoder's shape.
    length: T, how many tokens an answer has at most.
    stop: tokens that end an answer; they belong to it. Without any, every
      answer has T tokens and ends there by itself.
    temperature: of sampling and of log-probs alike; 0 draws the likeliest
      token, to evaluate with: it has no log-probs to train on.

  Raises:
    ValueError: if a number is out of its range, or a stop token not in the
      vocabulary; from the policy's functions, if the parameters' paths or
      shapes are not the decoder's; from the log-probs, if the temperature is 0.
  """
  if length < 1:
    raise ValueError(f"`length` must be at least 1, got {length}.")
  if not 0 <= temperature < math.inf:
    raise ValueError(
      f"`temperature` must be at least 0 and finite, got {temperature}."
    )
  wrong = [token for token in stop if not 0 <= token < config.vocab_size]
  if wrong:
    raise ValueError(
      f"`stop` must hold tokens below the {config.vocab_size} of the"
      f" vocabulary, got {wrong}: no answer would end in them."
    )
  shapes = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  merge: Callable[[Any], Any] = policies.split(shapes)[1]

  @jax.jit
  def init(key):
    return policies.split(Transformer(config, rngs=nnx.Rngs(key)))[0]

  def sample(params, keys, prompts, group_size):
    model = merge(params)
    asked, real = policies.check_prompts(prompts)
    batch = len(asked)
    shape = batch, group_size, length
    before = jnp.sum(real, axis=1)[:, None]  # [B, 1]
    hidden, (key, value) = model.prefill(asked, real)
    hidden = jnp.broadcast_to(
      _last(hidden, real)[:, None], (batch, group_size, config.width)
    )
    prompt = key, value, real[:, None, None, None, None]
    empty = jnp.zeros(
      (batch, config.kv_heads, group_size, length, config.head_size), key.dtype
    )

    def put(whole, t, column):
      return jax.lax.dynamic_update_slice_in_dim(
        whole, column[..., None].astype(whole.dtype), t, axis=2
      )

    def draw(state, hidden, t):
      """Draws token t of all answers, where they have not ended."""
      logits = model.logits(hidden)  # [B, G, V]
      if temperature:
        log_probs = jax.nn.log_softmax(logits / temperature)
        token = jax.vmap(
          lambda k, row: jax.random.categorical(jax.random.fold_in(k, t), row)
        )(keys, log_probs)
        log_prob = policies.pick(log_probs, token)
      else:
        token = jnp.argmax(logits, axis=-1)
        log_prob = jnp.zeros(token.shape, logits.dtype)
      going = ~state.ended
      token = jnp.where(going, token, 0).astype(jnp.int32)
      return policies.Sample(
        put(state.tokens, t, token),
        put(state.mask, t, going),
        put(state.log_probs, t, jnp.where(going, log_prob, 0)),
        state.ended | jnp.isin(token, jnp.array(stop, jnp.int32)) & going,
      ), token

    def going_on(carry):
      t, state, *_ = carry
      return (t < length - 1) & ~jnp.all(state.ended)

    def extend(carry):
      t, state, token, cache = carry
      hidden, cache = model.decode(token, before + t, prompt, cache, t)
      state, token = draw(state, hidden, t + 1)
      return t + 1, state, token, cache

    dtype = jnp.promote_types(key.dtype, jnp.float32)
    nothing = policies.Sample(
      jnp.zeros(shape, jnp.int32),
      jnp.zeros(shape, bool),
      jnp.zeros(shape, dtype),
      jnp.zeros(shape[:2], bool),
    )
    state, token = draw(nothing, hidden, 0)
    cache = ((empty, empty),) * config.num_layers
    carry = 0, state, token, cache
    _, drawn, *_ = jax.lax.while_loop(going_on, extend, carry)
    return drawn if len(stop) else drawn._replace(ended=None)

  def distributions(params, prompts, tokens):
    """The model, and the hidden states that give each token, [B, G, T, W]."""
    if not temperature:
      raise ValueError(
        "`temperature` must be above 0 to train, got 0: the likeliest answer"
        " has log-prob 0, and no gradient."
      )
    model = merge(params)
    asked, real = policies.check_prompts(prompts)
    before, answered = model.answers(asked, real, tokens[..., :-1])
    first = _last(before, real)[:, None, None]
    first = jnp.broadcast_to(first, (*tokens.shape[:2], 1, config.width))
    hidden = jnp.concatenate([first, answered], axis=2)
    return model, hidden[:, :, : tokens.shape[2]]  # Of no slots, none.

  def per_token(params, prompts, tokens, function):
    """function(log-softmax [..., V], tokens), a chunk of positions at once."""
    model, hidden = distributions(params, prompts, tokens)

    def apply(hidden, tokens):
      logits = model.logits(hidden) / temperature
      return function(jax.nn.log_softmax(logits), tokens)

    total = tokens.shape[-1]
    chunk = min(config.chunk or total, total)
    if chunk == total:
      return apply(hidden, tokens)

    def cut(x):  # [B, G, T, ...] → [chunks, B, G, chunk, ...]
      extra = [(0, 0)] * x.ndim
      extra[2] = (0, -total % chunk)
      x = jnp.pad(x, extra)
      x = x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])
      return jnp.moveaxis(x, 2, 0)

    def join(x):
      x = jnp.moveaxis(x, 0, 2)
      return x.reshape(*x.shape[:2], -1)[..., :total]

    rows = jax.lax.map(
      lambda row: jax.checkpoint(apply)(*row), (cut(hidden), cut(tokens))
    )
    return jax.tree.map(join, rows)

  def log_prob(params, prompts, tokens):
    return per_token(params, prompts, tokens, policies.pick)

  def log_prob_and_entropy(params, prompts, tokens):
    def both(log_probs, tokens):
      return policies.pick(log_probs, tokens), policies.entropy_of(log_probs)

    return per_token(params, prompts, tokens, both)

  return policies.Policy(init, sample, log_prob, log_prob_and_entropy)


def _last(hidden: jax.Array, mask: jax.Array) -> jax.Array:
  """[B, P, W] → [B, W]: at the last real token."""
  last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
  return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
