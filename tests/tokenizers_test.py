"""Tokenizers: round trips, and what decoding cannot give back."""

import pickle
import random
import sys

import numpy as np
import pytest

from groupstd import questions, tokenizers

ALPHABET = questions.ALPHABET


def test_characters_round_trip():
  """decode∘encode is the identity on every text of the alphabet."""
  tokenizer = tokenizers.characters(ALPHABET)
  draw = random.Random(0)
  for length in range(30):
    text = "".join(draw.choices(ALPHABET, k=length))
    ids = tokenizer.encode(text)
    assert len(ids) == length
    assert tokenizer.decode(ids) == text
    # And encode∘decode: one token a character leaves nothing to merge.
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_characters_ids():
  """Every id is used once: pad, end, then the alphabet in its order."""
  tokenizer = tokenizers.characters(ALPHABET)
  ids = [tokenizer.pad, *tokenizer.stop, *tokenizer.encode(ALPHABET)]
  assert ids == list(range(tokenizer.vocab_size))


def test_characters_decode_drops_padding_and_ends():
  tokenizer = tokenizers.characters("ab")
  a, b = tokenizer.encode("ab")
  pad, (end,) = tokenizer.pad, tokenizer.stop
  assert tokenizer.decode([pad, a, end, b, end, pad, pad]) == "ab"
  assert tokenizer.decode([*np.array([pad, a, b, end], np.int32)]) == "ab"
  assert tokenizer.decode([]) == tokenizer.decode([pad, end]) == ""


def test_characters_refuse():
  tokenizer = tokenizers.characters("ab")
  with pytest.raises(ValueError, match=r"'ab', got 'c' in 'abc'"):
    tokenizer.encode("abc")
  for wrong in -1, 4:
    with pytest.raises(ValueError, match=f"below 4, got {wrong}"):
      tokenizer.decode([2, wrong])
  for alphabet in "", "aba":
    with pytest.raises(ValueError, match="each once"):
      tokenizers.characters(alphabet)


@pytest.fixture
def library():
  """The tokenizers library, without which a test is skipped."""
  return pytest.importorskip("tokenizers")


def save(library, path, *, merges=(), special=(), bos=False, **kwargs):
  """A byte-level BPE with all bytes, some merges and special tokens."""
  alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
  pieces = [*alphabet, *("".join(pair) for pair in merges)]
  model = library.models.BPE({p: i for i, p in enumerate(pieces)}, list(merges))
  made = library.Tokenizer(model)
  made.pre_tokenizer = library.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  made.decoder = library.decoders.ByteLevel()
  made.add_special_tokens([*special])
  if bos:
    made.post_processor = library.processors.TemplateProcessing(
      single=f"{special[0]} $A",
      special_tokens=[(special[0], made.token_to_id(special[0]))],
    )
  if "padding" in kwargs:
    token = kwargs["padding"]
    made.enable_padding(
      pad_id=made.token_to_id(token), pad_token=token, length=20
    )
  if "truncation" in kwargs:
    made.enable_truncation(kwargs["truncation"])
  made.save(str(path))
  return made


@pytest.fixture
def path(tmp_path):
  return tmp_path / "tokenizer.json"


def test_file_round_trip(library, path):
  """A byte-level tokenizer gives back any text, in any script."""
  save(library, path, merges=[("a", "b")], special=["<end>"])
  tokenizer = tokenizers.from_file(path, stop=["<end>"])
  draw = random.Random(0)
  for text in ["", " ab  ba\n", "47+85=", "σ²·w − ½", "数学😀"]:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = draw.sample(tokenizer.encode(text), len(tokenizer.encode(text)))
    again = tokenizer.decode(tokenizer.encode(tokenizer.decode(ids)))
    assert again == tokenizer.decode(ids)


def test_sampled_ids_are_not_those_of_their_text(library, path):
  """ "a", "b" reads "ab", one token: only the sampled ids may train."""
  save(library, path, merges=[("a", "b")], special=["<end>"])
  tokenizer = tokenizers.from_file(path, stop=["<end>"])
  sampled = [*tokenizer.encode("a"), *tokenizer.encode("b")]
  assert tokenizer.decode(sampled) == "ab"
  assert len(sampled) == 2
  assert len(tokenizer.encode("ab")) == 1


def test_file_several_ends(library, path):
  made = save(library, path, special=["<pad>", "<end>", "<turn>", "<think>"])
  tokenizer = tokenizers.from_file(path, stop=["<end>", "<turn>"], pad="<pad>")
  assert tokenizer.stop == tuple(map(made.token_to_id, ["<end>", "<turn>"]))
  assert tokenizer.pad == made.token_to_id("<pad>")
  # Marks written in a prompt are tokens of their own, and a verifier sees all
  # but padding and ends.
  ids = tokenizer.encode("<think>a<turn>b<end><pad>")
  assert len(ids) == 6
  assert tokenizer.decode(ids) == "<think>ab"
  assert tokenizer.decode([*np.array(ids)]) == "<think>ab"


def test_file_adds_nothing(library, path):
  """No token of a template of the file, no padding and no truncation."""
  made = save(
    library, path, special=["<s>"], bos=True, padding="<s>", truncation=5
  )
  assert len(made.encode("abc").ids) == 20
  assert len(made.encode("a" * 40).ids) == 20
  tokenizer = tokenizers.from_file(path)
  assert tokenizer.pad == made.token_to_id("<s>")
  assert len(tokenizer.encode("abc")) == 3
  assert len(tokenizer.encode("a" * 40)) == 40
  assert tokenizer.encode("<s>a")[0] == tokenizer.pad


def test_file_vocabulary_with_holes(library, path):
  """Ids need not be consecutive; a model needs a row for the largest."""
  model = library.models.WordLevel({"a": 0, "b": 9, "<unk>": 4}, "<unk>")
  library.Tokenizer(model).save(str(path))
  assert tokenizers.from_file(path, pad="a").vocab_size == 10


def test_file_pads_with(library, path):
  """The token asked for, or else the file's, or else the first end."""
  made = save(
    library, path, special=["<pad>", "<end>", "<turn>"], padding="<pad>"
  )
  ids = {text: made.token_to_id(text) for text in ["<pad>", "<end>", "<turn>"]}
  stop = ["<end>", "<turn>"]
  assert tokenizers.from_file(path, stop=stop).pad == ids["<pad>"]
  chosen = tokenizers.from_file(path, stop=stop, pad="<turn>")
  assert chosen.pad == ids["<turn>"]
  save(library, path, special=["<pad>", "<end>", "<turn>"])
  assert tokenizers.from_file(path, stop=stop).pad == ids["<end>"]
  with pytest.raises(ValueError, match="`pad` must be given"):
    tokenizers.from_file(path)


def test_file_refuses(library, path, tmp_path, monkeypatch):
  save(library, path, special=["<|im_end|>"])
  with pytest.raises(ValueError, match=r"`stop`.*Did you mean '<\|im_end\|>'"):
    tokenizers.from_file(path, stop=["<im_end>"])
  with pytest.raises(ValueError, match="`pad` must be of the tokenizer's"):
    tokenizers.from_file(path, pad="nothing like it")
  with pytest.raises(ValueError, match="sequence of tokens' texts"):
    tokenizers.from_file(path, stop="<|im_end|>")
  with pytest.raises(ValueError, match=r"absent\.json must be a tokenizer"):
    tokenizers.from_file(tmp_path / "absent.json")
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(ImportError, match=r"groupstd\[lm\]"):
    tokenizers.from_file(path)


def test_tokenizers_pickle(library, path):
  save(library, path, merges=[("a", "b")], special=["<end>"])
  for tokenizer in [
    tokenizers.characters("ab+"),
    tokenizers.from_file(path, stop=["<end>"]),
  ]:
    twin = pickle.loads(pickle.dumps(tokenizer))
    assert twin[2:] == tokenizer[2:]
    assert twin.encode("ab+a") == tokenizer.encode("ab+a")
    assert twin.decode(tokenizer.encode("ab+a")) == "ab+a"
