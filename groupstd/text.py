"""Tasks in words: questions, a tokenizer and verifiers.

What is measured of an answer is measured on the tokens that were sampled: they
are counted by their mask, decoded for the verifiers, and never encoded again.
"""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from groupstd import policies, tasks
from groupstd.questions import Questions
from groupstd.tokenizers import Tokenizer
from groupstd.verifiers import Pool

__all__ = ["LengthPenalty", "soft_overlong", "task"]

# Token counts [B, G] → what is added to the rewards, [B, G].
LengthPenalty = Callable[[np.ndarray], np.ndarray]

# Of no more questions is every prompt encoded when a task is made.
_CHECKED_AT_START = 100_000


def task(
  questions: Questions,
  tokenizer: Tokenizer,
  pool: Pool,
  *,
  width: int,
  length: int,
  weights: Mapping[str, float] | None = None,
  score: str | None = None,
  length_penalty: LengthPenalty | tuple[int, int] | None = None,
  shuffle: bool = True,
  seed: int = 0,
) -> tasks.Task:
  """Questions in words: rewards = Σ weights·parts, a part for each verifier.

  Every epoch asks each question at most once, in an order of its own; its
  batches are full, and what would be a short last one is left out. An id is a
  question's index. Prompts are `policies.Prompts`, padded on the left.

  The tokens that were sampled are decoded, and never encoded again. Where a
  part abstains or fails it adds 0 and the other weights stay as they are. Where
  that is the part named `score` the answer has no score, and no reward either.

  Of up to 100,000 questions, those that cannot be asked are left out, with a
  warning that counts them; among more, a step that meets one raises.

  Args:
    questions: numbered; the same number must always be the same question.
    tokenizer: of the policy.
    pool: of verifiers; it counts their failures.
    width: P, how many tokens a prompt has at most.
    length: T, how many tokens an answer has at most, its stop included.
    weights: by the names of all parts; 1 each by default.
    score: which part decides silence; may be left out if there is one verifier.
    length_penalty: adds a part named "length", of the answers' token counts;
      (limit, buffer) stands for `soft_overlong(limit, buffer)`.
    shuffle: whether an epoch's order is random, a function of (seed, epoch).
    seed: of the order.

  Raises:
    ValueError: if names do not match, a number is out of its range, or no
      question can be asked; from its functions, if a step asks for more
      questions than there are, for one that has no token or more than `width`,
      or for an example longer than `length`.
  """
  for name, value in ("width", width), ("length", length):
    if value < 1:
      raise ValueError(f"`{name}` must be at least 1, got {value}.")
  if isinstance(length_penalty, tuple):
    length_penalty = soft_overlong(*length_penalty)
  names = [*pool.verifiers, *(["length"] if length_penalty else [])]
  weights = dict.fromkeys(names, 1.0) if weights is None else dict(weights)
  score = _check_parts(pool.verifiers, names, weights, score)
  kept = _askable(questions, tokenizer, width)

  @functools.lru_cache(maxsize=2)
  def order(epoch):
    rng = np.random.default_rng([seed, epoch])
    return rng.permutation(kept) if shuffle else kept

  def epoch(step, num_groups):
    tasks.check_asked(num_groups, len(kept))
    number, batch = divmod(int(step), len(kept) // num_groups)
    return number, batch * num_groups

  def prompts(step, num_groups):
    number, start = epoch(step, num_groups)
    ids = order(number)[start : start + num_groups].tolist()
    encoded = [tokenizer.encode(questions[i].prompt) for i in ids]
    for i, tokens in zip(ids, encoded, strict=True):
      if not 1 <= len(tokens) <= width:
        raise ValueError(
          f"a prompt must have 1 to {width} tokens, got {len(tokens)} of"
          f" question {i}: {questions[i].prompt[:80]!r}."
        )
    ids = jnp.asarray(ids)
    padded = _pad(encoded, tokenizer.pad, width, left=True)
    return ids, policies.Prompts(*padded, ids)

  def reward(prompts, tokens, mask):
    tokens, mask = np.asarray(tokens), np.asarray(mask)
    asked = [questions[i] for i in np.asarray(prompts.index).tolist()]
    parts = pool(
      [
        (tokenizer.decode(tokens[b, g, mask[b, g]].tolist()), question)
        for b, question in enumerate(asked)
        for g in range(tokens.shape[1])
      ]
    )
    parts = {k: x.reshape(tokens.shape[:2]) for k, x in parts.items()}
    if length_penalty:
      parts["length"] = length_penalty(mask.sum(axis=-1))
    rewards = sum(
      weights[name] * np.where(np.isnan(part), 0, part)
      for name, part in parts.items()
    )
    # A reward without a score is dropped where verdicts are checked.
    where = ~np.isnan(parts[score])
    return tasks.Verdict(parts[score], where, rewards, parts)

  def examples(step, num_groups):
    ids, asked = prompts(step, num_groups)
    ids = np.asarray(ids).tolist()
    encoded = [
      [*tokenizer.encode(questions[i].answer), *tokenizer.stop[:1]] for i in ids
    ]
    long = [i for i, x in zip(ids, encoded, strict=True) if len(x) > length]
    if long:
      raise ValueError(
        f"`length` must hold every answer and its stop, got {length}:"
        f" {len(long)} of the {num_groups} answers of step {step} are longer,"
        f" the first that of question {long[0]},"
        f" {questions[long[0]].answer[:80]!r}."
      )
    tokens, mask = _pad(encoded, tokenizer.pad, length, left=False)
    return asked, tokens[:, None], mask[:, None]

  return tasks.Task(prompts, reward, examples, epoch)


def soft_overlong(limit: int, buffer: int) -> LengthPenalty:
  """0 up to limit − buffer tokens, then linearly down to −1 at the limit.

  The soft overlong punishment of arXiv:2503.14476 for an answer of n tokens:
  min(0, max(−1, (limit − buffer − n) / buffer)). With a buffer of 0 it is −1
  beyond the limit.

  Raises:
    ValueError: if `buffer` is below 0 or above `limit`.

  >>> soft_overlong(limit=10, buffer=4)(np.array([6, 7, 10, 11]))
  array([ 0.  , -0.25, -1.  , -1.  ])
  """
  if not 0 <= buffer <= limit:
    raise ValueError(
      f"`buffer` must be from 0 to the limit of {limit}, got {buffer}: the"
      " penalty starts at limit − buffer tokens."
    )

  def penalty(lengths):
    return np.clip((limit - buffer - lengths) / max(buffer, 1), -1, 0)

  return penalty


def _check_parts(
  verifiers: Mapping[str, Any],
  names: list[str],
  weights: Mapping[str, float],
  score: str | None,
) -> str:
  """The name of the part that decides silence."""
  if len(names) > len(set(names)):
    raise ValueError(
      'no verifier must be named "length", got one: it is the penalty\'s name.'
    )
  if set(weights) != set(names) or not all(
    map(math.isfinite, weights.values())
  ):
    raise ValueError(
      f"`weights` must be finite numbers for {', '.join(names)}, got {weights}."
    )
  if score is None and len(verifiers) == 1:
    return next(iter(verifiers))
  if score is None or score not in verifiers:
    raise ValueError(
      f"`score` must be one of {', '.join(verifiers)}, got {score!r}: one part"
      " decides which groups are silent."
    )
  return score


def _askable(
  questions: Questions, tokenizer: Tokenizer, width: int
) -> np.ndarray:
  """The indices of the questions that can be asked, or may be."""
  indices = np.arange(len(questions))
  if len(indices) <= _CHECKED_AT_START:
    reasons: dict[int, str] = {}
    for i in indices.tolist():
      try:
        length = len(tokenizer.encode(questions[i].prompt))
      except ValueError as error:  # Outside the vocabulary.
        reasons[i] = str(error)
        continue
      if not 1 <= length <= width:
        reasons[i] = (
          f"its prompt must have 1 to {width} tokens, it has {length}"
        )
    if reasons:
      first = min(reasons)
      warnings.warn(
        f"{len(reasons)} of {len(questions)} questions are left out; the first"
        f" is question {first}: {reasons[first].rstrip('.')}.",
        stacklevel=3,
      )
    fits = np.array([i not in reasons for i in indices.tolist()], bool)
    indices = indices[fits]
  if not len(indices):
    raise ValueError(
      f"a question must have a prompt of 1 to {width} tokens, got none among"
      f" {len(questions)}."
    )
  return indices


def _pad(
  rows: list[list[int]], pad: int, width: int, *, left: bool
) -> tuple[jax.Array, jax.Array]:
  """Rows of at most `width` tokens as (tokens, mask), [N, width] each."""
  place = np.arange(width)
  lengths = np.array([len(row) for row in rows])[:, None]
  mask = place >= width - lengths if left else place < lengths
  tokens = np.full(mask.shape, pad, np.int32)
  tokens[mask] = [token for row in rows for token in row]
  return jnp.asarray(tokens), jnp.asarray(mask)
