"""A decoder-only transformer as a Policy: its training pass and its sampling.

The decoder is a flax.nnx module, used functionally: split once, the parameters
a plain pytree after. A group's prompt is computed once, in either.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from groupstd import policies
from groupstd.decoder import Config, Transformer

__all__ = ["Config", "Transformer", "policy"]

# With fewer rows a token takes as long.
_FEWEST = 16


class _Rows(NamedTuple):
  """Answers being drawn, in rows of any layout [B, G].

  Attributes:
    keys: of each answer.
    asked: the number of its prompt.
    drawn: [B, G, T] so far.
    token: the last.
    cache: keys and values for each layer, [B, K, G, T, D].
  """

  keys: jax.Array
  asked: jax.Array
  drawn: policies.Sample
  token: jax.Array
  cache: tuple[tuple[jax.Array, jax.Array], ...]


def policy(
  config: Config,
  *,
  length: int,
  stop: Sequence[int] = (),
  temperature: float = 1.0,
  packing: int | None = None,
  lay: Callable[[jax.Array], jax.Array] | None = None,
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
    packing: how many times the answers that go on, when they are down to a
      quarter, are moved together into as many rows, with a copy of the prompt
      each. What is drawn stays the same, sooner where lengths differ; each time
      is one more loop to compile. By default once if T is at least 32.
    lay: activations [B, N, W] of the log-probs' pass → where they lie on a
      mesh, such as `sharding.lay_groups(mesh)`; as XLA likes by default.

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
  if packing is None:
    packing = int(length >= 32)
  if packing < 0:
    raise ValueError(f"`packing` must be at least 0, got {packing}.")
  wrong = [token for token in stop if not 0 <= token < config.vocab_size]
  if wrong:
    raise ValueError(
      f"`stop` must hold tokens below the {config.vocab_size} of the"
      f" vocabulary, got {wrong}: no answer would end in them."
    )
  laid = {} if lay is None else {"lay": lay}
  shapes = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), **laid))
  merge: Callable[[Any], Any] = policies.split(shapes)[1]

  @jax.jit
  def init(key):
    return policies.split(Transformer(config, rngs=nnx.Rngs(key)))[0]

  def sample(params, keys, prompts, group_size):
    model = merge(params)
    tokens, real = policies.check_prompts(prompts)
    batch = len(tokens)
    before = jnp.sum(real, axis=1)  # [B]
    hidden, kept = model.prefill(tokens, real)
    prompts = tuple(zip(*map(jnp.unstack, kept), strict=True))
    layers = model.layers()

    def alone(asked):
      """Prompts, a copy for each answer [B, G]."""
      copies = jax.tree.map(lambda x: jnp.swapaxes(x[asked], 1, 2), prompts)
      return copies, real[asked][:, None, :, None]

    def put(whole, t, column):
      return jax.lax.dynamic_update_slice_in_dim(
        whole, column[..., None].astype(whole.dtype), t, axis=2
      )

    def draw(rows, hidden, t):
      """Draws token t of all answers, where they have not ended."""
      logits = model.logits(hidden)  # [B, G, V]
      if temperature:
        log_probs = jax.nn.log_softmax(logits / temperature)

        def one(key, row):
          return jax.random.categorical(jax.random.fold_in(key, t), row)

        token = jax.vmap(jax.vmap(one))(rows.keys, log_probs)
        log_prob = policies.pick(log_probs, token)
      else:
        token = jnp.argmax(logits, axis=-1)
        log_prob = jnp.zeros(token.shape, logits.dtype)
      drawn = rows.drawn
      going = ~drawn.ended
      token = jnp.where(going, token, 0).astype(jnp.int32)
      drawn = policies.Sample(
        put(drawn.tokens, t, token),
        put(drawn.mask, t, going),
        put(drawn.log_probs, t, jnp.where(going, log_prob, 0)),
        drawn.ended | jnp.isin(token, jnp.array(stop, jnp.int32)) & going,
      )
      return rows._replace(drawn=drawn, token=token)

    def finish(t, rows, prompt, mask, packing):
      """Draws the answers from token t on to their ends."""
      total = rows.token.size
      room = total // 8 * 2 if packing and total >= 4 * _FEWEST else 0

      def going_on(carry):
        t, rows = carry
        return (t < length - 1) & (jnp.sum(~rows.drawn.ended) > room)

      def extend(carry):
        t, rows = carry
        hidden, cache = model.decode(
          layers,
          rows.token,
          before[rows.asked] + t,
          prompt,
          mask,
          rows.cache,
          t,
        )
        return t + 1, draw(rows._replace(cache=cache), hidden, t + 1)

      def pack(t, rows):
        going_first = jnp.argsort(rows.drawn.ended.reshape(-1), stable=True)
        chosen = going_first[:room].reshape(2, -1)
        b, g = jnp.divmod(chosen, rows.token.shape[1])
        packed = jax.tree.map(lambda x: x[b, g], rows._replace(cache=()))
        cache = jax.tree.map(
          lambda x: jnp.swapaxes(x[b, :, g], 1, 2), rows.cache
        )
        packed = packed._replace(cache=cache)
        drawn = finish(t, packed, *alone(packed.asked), packing - 1)
        return jax.tree.map(
          lambda whole, part: whole.at[b, g].set(part), rows.drawn, drawn
        )

      t, rows = jax.lax.while_loop(going_on, extend, (t, rows))
      if not room:
        return rows.drawn
      unfinished = (t < length - 1) & ~jnp.all(rows.drawn.ended)
      return jax.lax.cond(unfinished, pack, lambda t, rows: rows.drawn, t, rows)

    # XLA:CPU is ten times slower at attention where an axis is 1. Groups of one
    # share nothing, and so may stand in any layout.
    single = group_size == 1 and batch % 2 == 0
    shape = (2, batch // 2) if single else (batch, group_size)
    number = jnp.arange(batch * group_size).reshape(shape)
    asked, member = number // group_size, number % group_size
    blank = jnp.zeros((*shape, length), jnp.int32)
    dtype = kept[0].dtype
    empty = jnp.zeros(
      (shape[0], config.kv_heads, shape[1], length, config.head_size), dtype
    )
    rows = _Rows(
      jax.vmap(jax.vmap(jax.random.fold_in))(keys[asked], member),
      asked,
      policies.Sample(
        blank,
        jnp.zeros_like(blank, bool),
        jnp.zeros_like(blank, jnp.promote_types(dtype, jnp.float32)),
        jnp.zeros(shape, bool),
      ),
      jnp.zeros(shape, jnp.int32),
      ((empty, empty),) * config.num_layers,
    )
    rows = draw(rows, _last(hidden, real)[asked], 0)
    shared = prompts, real[:, None, None, None]
    drawn = finish(
      0,
      rows,
      *(alone(asked) if single else shared),
      packing if len(stop) else 0,
    )
    drawn = jax.tree.map(
      lambda x: x.reshape(batch, group_size, *x.shape[2:]), drawn
    )
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
