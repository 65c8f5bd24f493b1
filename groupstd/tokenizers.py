"""Tokenizers: text to token ids and back.

A prompt is encoded once and an answer is decoded for the verifier; an answer is
never encoded again, since that does not give back the ids that were drawn: a
sampled "a", "b" reads "ab", which may be one token of its own. What trains is
what was sampled.
"""

from collections.abc import Callable, Sequence
import difflib
import functools
import pathlib
from typing import Any, NamedTuple

__all__ = ["Tokenizer", "characters", "from_file"]


class Tokenizer(NamedTuple):
  """A text's token ids, and the other way round.

  Attributes:
    encode: text → ids; nothing is added at either end.
    decode: ids → text, without padding and end tokens. Different ids may read
      the same, so that encode(decode(ids)) need not be ids.
    vocab_size: one more than the largest id.
    pad: the id of padding; whether a slot is padding is a mask's to say, as an
      end token may serve.
    stop: the ids that end an answer, any of them.
  """

  encode: Callable[[str], list[int]]
  decode: Callable[[Sequence[int]], str]
  vocab_size: int
  pad: int
  stop: tuple[int, ...]


def characters(alphabet: str) -> Tokenizer:
  """One token a character: 0 pads, 1 ends, 2, 3, … are the alphabet's.

  Args:
    alphabet: every character there is, each once.

  Raises:
    ValueError: if the alphabet is empty or repeats itself; from `encode`, at a
      character outside it; from `decode`, at an id outside the vocabulary.

  >>> tokenizer = characters("0123456789+=")
  >>> tokenizer.encode("1+2=")
  [3, 12, 4, 13]
  >>> tokenizer.decode([3, 12, 4, 13, 5, 1, 0])
  '1+2=3'
  """
  if not alphabet or len(set(alphabet)) < len(alphabet):
    raise ValueError(
      f"`alphabet` must hold characters, each once, got {alphabet!r}: an id is"
      " a character's place in it."
    )
  ids = {character: i for i, character in enumerate(alphabet, start=2)}
  texts = {0: "", 1: ""} | {i: character for character, i in ids.items()}
  return Tokenizer(
    encode=functools.partial(_encode_characters, ids),
    decode=functools.partial(_decode_characters, texts),
    vocab_size=len(texts),
    pad=0,
    stop=(1,),
  )


def from_file(
  path: str | pathlib.Path, *, stop: Sequence[str] = (), pad: str | None = None
) -> Tokenizer:
  """The tokenizer of a tokenizer.json, as the `tokenizers` library reads it.

  `encode` adds no token of its own: a chat's marks and the like are written in
  the prompt, where the library knows them by their text. `decode` leaves every
  token in but padding and end tokens, so that a verifier sees such marks.

  Args:
    path: of the tokenizer.json; its own padding and truncation are not used.
    stop: the texts of the tokens that end an answer; a chat model often has
      two. With none an answer only ends where it is cut off.
    pad: the text of the padding token; by default the file's, or else the
      first end token.

  Raises:
    ImportError: if the `tokenizers` library is missing.
    ValueError: if the file cannot be read, a token is not in the vocabulary,
      or there is none to pad with.
  """
  try:
    import tokenizers
  except ImportError as error:
    raise ImportError(
      "reading a tokenizer.json needs the `tokenizers` library:"
      " pip install 'groupstd[lm]'."
    ) from error
  if isinstance(stop, str):
    raise ValueError(
      f"`stop` must be a sequence of tokens' texts, got {stop!r}: several"
      " tokens may end an answer."
    )
  try:
    library = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The library raises nothing more specific.
    raise ValueError(f"{path} must be a tokenizer.json: {error}") from error
  vocabulary = library.get_vocab()
  padding = library.padding
  library.no_padding()
  library.no_truncation()
  if pad is None:
    pad = padding["pad_token"] if padding else next(iter(stop), None)
  if pad is None:
    raise ValueError(
      f"`pad` must be given, as {path} names no padding token and there is no"
      " `stop` to serve as one."
    )
  end_ids = tuple(_token_id(vocabulary, "stop", text) for text in stop)
  pad_id = _token_id(vocabulary, "pad", pad)
  return Tokenizer(
    encode=functools.partial(_encode, library),
    decode=functools.partial(_decode, library, frozenset((pad_id, *end_ids))),
    vocab_size=max(vocabulary.values()) + 1,
    pad=pad_id,
    stop=end_ids,
  )


def _encode_characters(ids: dict[str, int], text: str) -> list[int]:
  try:
    return [ids[character] for character in text]
  except KeyError as error:
    raise ValueError(
      f"a text must be of the alphabet {''.join(ids)!r}, got {error} in"
      f" {text!r}."
    ) from None


def _decode_characters(texts: dict[int, str], ids: Sequence[int]) -> str:
  try:
    return "".join(texts[i] for i in ids)
  except KeyError as error:
    raise ValueError(
      f"a token's id must be at least 0 and below {len(texts)}, got {error}."
    ) from None


def _encode(library: Any, text: str) -> list[int]:
  return library.encode(text, add_special_tokens=False).ids


def _decode(library: Any, dropped: frozenset[int], ids: Sequence[int]) -> str:
  kept = [int(i) for i in ids if i not in dropped]
  return library.decode(kept, skip_special_tokens=False)


def _token_id(vocabulary: dict[str, int], name: str, text: str) -> int:
  if text not in vocabulary:
    near = difflib.get_close_matches(text, vocabulary, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
      f"`{name}` must be of the tokenizer's vocabulary, got {text!r}.{hint}"
    )
  return vocabulary[text]
