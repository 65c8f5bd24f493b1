"""The work that the language model's benchmark times: the same for all.

A decoder of Qwen2's shape reads random prompts and is rewarded for the vowels
and digits that it writes.

Nothing here imports jax, as verifying processes import this.
"""

import random
import string
from typing import NamedTuple

from groupstd import questions, tokenizers

# 20 of the 64 tokens: what a policy that knows nothing gets is 0.31.
COUNTED = frozenset("aeiouAEIOU" + string.digits)
# 62 characters; with 0 and 1, which read as nothing here, 64 tokens.
_ALPHABET = string.ascii_letters + string.digits


class Size(NamedTuple):
  """What a step is made of.

  Attributes:
    width: D, of the residual stream.
    layers: L.
    heads: H, of queries, keys and values alike.
    hidden: F, of the feed-forward layer.
    prompt: P, tokens of every prompt.
    length: T, tokens of every answer.
    groups: B.
    group_size: G.
    chunk: prompts whose gradient is taken at once by what cuts the batch: as
      many as keep a layer's activations in a core's cache.
    learning_rate: of AdamW.
  """

  width: int
  layers: int
  heads: int
  hidden: int
  prompt: int
  length: int
  groups: int
  group_size: int
  chunk: int
  learning_rate: float

  @property
  def vocabulary(self) -> int:
    return len(_ALPHABET) + 2

  @property
  def parameters(self) -> int:
    """Embedding, q, k, v with their biases, o, SwiGLU, norms.

    >>> SIZES["S"].parameters, SIZES["M"].parameters
    (1059456, 6318848)
    """
    d, f = self.width, self.hidden
    block = 4 * d * d + 3 * d + 3 * d * f + 2 * d
    return self.vocabulary * d + self.layers * block + d

  def sampling_flops(self, *, shared: bool) -> int:
    """Multiplications and additions of one sampling pass, in all its products.

    Args:
      shared: whether a prompt is computed once a group, or once an answer.
    """
    rows, pairs = self._rows(shared)
    heads = self.groups * (1 if shared else self.group_size)
    heads += self.groups * self.group_size * (self.length - 1)
    return self._flops(rows, pairs, heads)

  def update_flops(self, *, shared: bool) -> int:
    """The same of the gradient: forward, and twice that backward."""
    heads = self.groups * self.group_size * self.length
    return 3 * self._flops(*self._rows(shared), heads)

  def _rows(self, shared: bool) -> tuple[int, int]:
    """Tokens that go through the layers, and pairs that attend, causally.

    An answer's last token is drawn and goes through nothing.
    """
    prompt, more = self.prompt, self.length - 1
    answers = self.groups * self.group_size
    prompts = self.groups if shared else answers
    pairs = prompts * prompt * (prompt + 1) // 2
    pairs += answers * (more * prompt + more * (more + 1) // 2)
    return prompts * prompt + answers * more, pairs

  def _flops(self, rows: int, pairs: int, heads: int) -> int:
    """2 for each weight that a row meets, 4·D for each pair and layer."""
    d, f = self.width, self.hidden
    weights = self.layers * (4 * d * d + 3 * d * f)
    return (
      2 * rows * weights
      + 4 * d * self.layers * pairs
      + 2 * heads * d * self.vocabulary
    )


SIZES = {
  "tiny": Size(16, 2, 2, 32, 5, 6, 4, 4, chunk=2, learning_rate=0.01),
  "S": Size(128, 4, 4, 512, 16, 16, 32, 8, chunk=2, learning_rate=0.0012),
  "M": Size(256, 6, 4, 1024, 16, 64, 16, 8, chunk=2, learning_rate=0.001),
}


def tokenizer() -> tokenizers.Tokenizer:
  """A character a token, and no token that ends an answer."""
  return tokenizers.characters(_ALPHABET)._replace(stop=())


def asked(size: Size, number: int) -> list[questions.Question]:
  """Random texts of exactly `size.prompt` tokens, the same ones every time."""
  draw = random.Random(0)
  return [
    questions.Question("".join(draw.choices(_ALPHABET, k=size.prompt)), "")
    for _ in range(number)
  ]


def share(
  text: str, question: questions.Question, *, length: int
) -> float | None:
  """The reward: how many of an answer's `length` tokens are counted ones.

  >>> share("a1bc", questions.Question("", ""), length=8)
  0.25
  """
  del question
  return sum(character in COUNTED for character in text) / length
