"""Questions with a known answer: made by rule, read from a file, or borrowed.

`Questions` is anything with a length and an index: question i is always the
same one, so that a run is resumed by counting. Nothing here imports jax, for
the sake of the processes that verify answers.

>>> sums = arithmetic(digits=2)
>>> prompt, answer, difficulty, _ = sums[0]
>>> int(answer) == sum(int(term) for term in prompt.rstrip("=").split("+"))
True
"""

from collections.abc import Sequence
import dataclasses
import difflib
import hashlib
import json
import math
import operator
import pathlib
import random
from typing import Any, Literal, NamedTuple, Protocol

__all__ = [
  "ALPHABET",
  "Question",
  "Questions",
  "ScoredQuestions",
  "arithmetic",
  "jsonl",
  "reasoning_gym",
]

# Every character of `arithmetic`'s prompts and answers.
ALPHABET = "0123456789+-*="


class Question(NamedTuple):
  """A prompt and what a verifier needs to judge an answer to it.

  Attributes:
    prompt: the text that is asked.
    answer: the right answer, the gold; "" where only a scorer knows.
    difficulty: a label to break accuracy down by.
    entry: whatever else a verifier of this source needs; pickles.
  """

  prompt: str
  answer: str
  difficulty: str = ""
  entry: Any = None


class Questions(Protocol):
  """Numbered questions; an index out of range raises IndexError."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int, /) -> Question: ...


class ScoredQuestions(Questions, Protocol):
  """Questions that come with their own scorer."""

  def score(self, text: str, question: Question, /) -> float: ...


def arithmetic(
  *,
  digits: int | tuple[int, int] = 2,
  terms: int = 2,
  operations: str = "+",
  split: Literal["train", "test"] = "train",
  held_out: float = 0.1,
  seed: int = 0,
  size: int = 1_000_000,
) -> Questions:
  """Questions such as 47+85=, whose answer is 132.

  Question i is a pure function of i and the arguments but `size`. A text may
  come more than once, always on the same side: a hash of the text alone decides
  whether it is held out, so that no "train" question is ever a "test" one,
  whatever the two seeds are.

  Args:
    digits: of each number, or (fewest, most), each as likely as the next.
    terms: how many numbers, at least 2.
    operations: out of "+-*", each as likely as the next; * binds first.
    split: which side of the split.
    held_out: the share of texts that are of the test side, from 0.001 to 0.999.
    seed: of the draws, and not of the split.
    size: how many questions.

  Returns:
    Questions; the difficulty of a sum reads "digits 2, carries 1", that of
    anything else "digits 2, operations *-": the digits are the largest
    number's, the carries what is carried in all when written out.

  Raises:
    ValueError: if an argument is out of its range, or so few texts are
      possible that the split has none.
  """
  low, high = digits if isinstance(digits, tuple) else (digits, digits)
  for name, value, least in [
    ("digits", low, 1),
    ("digits", high, low),
    ("terms", terms, 2),
    ("size", size, 1),
  ]:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      raise ValueError(
        f"`{name}` must be a whole number of at least {least}, got {value!r}."
      )
  if not operations or not set(operations) <= set("+-*"):
    raise ValueError(f'`operations` must be out of "+-*", got {operations!r}.')
  if split not in ("train", "test"):
    raise ValueError(f'`split` must be "train" or "test", got {split!r}.')
  if not 0.001 <= held_out <= 0.999:
    raise ValueError(
      f"`held_out` must be from 0.001 to 0.999, got {held_out!r}: it is the"
      " share of texts on the test side."
    )
  made = _Arithmetic(
    low, high, terms, operations, split == "test", held_out, seed, size
  )
  made[0]  # Raises where there are none.
  return made


def jsonl(
  path: str | pathlib.Path,
  *,
  prompt: str = "prompt",
  answer: str = "answer",
  difficulty: str | None = None,
  template: str = "{prompt}",
  answer_after: str | None = None,
) -> Questions:
  """The questions of a file with a JSON object a line, all checked at once.

  GSM8K, whose answers are worked out and end in the gold after four hashes, is
  `jsonl(path, prompt="question", answer_after="####")`. A text is taken as it
  is; a number becomes the text that stands in the file. Blank lines are passed
  over. A question that comes twice counts twice, but must have the same answer.

  Args:
    path: of the file, in UTF-8.
    prompt: the key of the question.
    answer: the key of the answer.
    difficulty: the key of a label to break accuracy down by.
    template: what is asked, with {prompt} where the question stands.
    answer_after: the mark after whose last occurrence the gold stands; by
      default all of the answer is the gold.

  Raises:
    ValueError: if the template has no place for the question, or there is no
      question in the file, or a line is not JSON, lacks a key or the mark, or
      has an empty value or one that is neither text nor a number, or answers
      an earlier question differently; the file, the line and why are named.
  """
  if "{prompt}" not in template:
    raise ValueError(
      f"`template` must hold {{prompt}}, got {template!r}: every question would"
      " be the same."
    )
  questions: list[Question] = []
  seen: dict[str, tuple[int, str]] = {}
  with open(path, "rb") as lines:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      try:
        record = _read_object(line)
        asked = template.replace("{prompt}", _read_text(record, prompt))
        gold = _read_text(record, answer)
        if answer_after is not None:
          gold = _after(gold, answer_after)
        label = "" if difficulty is None else _read_text(record, difficulty)
        first, earlier = seen.setdefault(asked, (number, gold))
        if earlier != gold:
          raise ValueError(
            f"the answer {gold!r} is not that of line {first}, {earlier!r},"
            " which asks the same"
          )
      except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}.") from error
      questions.append(Question(asked, gold, label))
  if not questions:
    raise ValueError(f"{path} must hold at least one question, got none.")
  return tuple(questions)


def reasoning_gym(
  name: str,
  *,
  size: int = 1_000_000,
  seed: int = 0,
  difficulty_from: Sequence[str] = (),
  **kwargs: Any,
) -> ScoredQuestions:
  """The questions of a dataset of the reasoning-gym package, with its scorer.

  Most of its datasets make question i of seed s from s + i: two that must have
  no question in common, to train and to test, need seeds at least `size` apart.

  Args:
    name: of the dataset.
    size: how many questions; those of some datasets are stored and fewer.
    seed: of the dataset.
    difficulty_from: keys of an entry's metadata that make the difficulty, as
      in "num_terms 3, num_digits 1"; by default the dataset's name, which
      tells the parts of a composite one apart.
    **kwargs: the dataset's own options.

  Returns:
    Questions whose `entry` is the dataset's; the answer is "" where a dataset
    gives none, as its scorer needs none.

  Raises:
    ImportError: if the package is missing.
    ValueError: if there is no dataset of this name, or no such key.
  """
  made = _ReasoningGym(name, size, seed, tuple(difficulty_from), kwargs)
  made[0]  # Raises where a key is missing.
  return made


@dataclasses.dataclass(frozen=True)
class _Arithmetic:
  low: int
  high: int
  terms: int
  operations: str
  held: bool
  held_out: float
  seed: int
  size: int

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, index: int, /) -> Question:
    index = _check_index(index, self.size)
    draw = random.Random(f"{self.seed}/{index}")
    share = self.held_out if self.held else 1 - self.held_out
    # Missing a share that is there so often has a chance of exp(−100).
    for _ in range(math.ceil(100 / share)):
      numbers = [self._number(draw) for _ in range(self.terms)]
      signs = [draw.choice(self.operations) for _ in numbers[1:]]
      prompt = str(numbers[0])
      for sign, value in zip(signs, numbers[1:], strict=True):
        prompt += f"{sign}{value}"
      prompt += "="
      if (_uniform(prompt) < self.held_out) == self.held:
        total = _evaluate(numbers, signs)
        return Question(
          prompt, str(total), self._difficulty(numbers, signs, total)
        )
    raise ValueError(
      f"no question of {self.terms} numbers of {self.low} to {self.high} digits"
      f" is on the side of the split that holds {share:g} of them: there must"
      " be more digits or terms, or a larger share."
    )

  def _number(self, draw: random.Random) -> int:
    digits = draw.randint(self.low, self.high)
    # Of one digit, 0 is a number as well.
    return draw.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)

  def _difficulty(
    self, numbers: list[int], signs: list[str], total: int
  ) -> str:
    digits = f"digits {len(str(max(numbers)))}"
    if set(signs) != {"+"}:
      return f"{digits}, operations {''.join(sorted(set(signs)))}"
    # Legendre: each 1 carried takes 10 from a column and gives 1 to the next.
    carries = (sum(map(_digit_sum, numbers)) - _digit_sum(total)) // 9
    return f"{digits}, carries {carries}"


class _ReasoningGym:
  def __init__(
    self,
    name: str,
    size: int,
    seed: int,
    difficulty_from: tuple[str, ...],
    kwargs: dict[str, Any],
  ):
    try:
      from reasoning_gym import factory
    except ImportError as error:
      raise ImportError(
        "questions of reasoning-gym need the package: pip install"
        " 'groupstd[lm]'."
      ) from error
    if name not in factory.DATASETS:
      near = difflib.get_close_matches(name, factory.DATASETS, n=1)
      hint = f" Did you mean {near[0]!r}?" if near else ""
      raise ValueError(
        f"`name` must be of a dataset of reasoning-gym, got {name!r}.{hint}"
      )
    self._arguments = name, size, seed, difficulty_from, kwargs
    self._difficulty_from = difficulty_from
    self._dataset = factory.create_dataset(name, size=size, seed=seed, **kwargs)

  def __reduce__(self):
    # By how it was made: some datasets hold modules, which do not pickle.
    return _ReasoningGym, self._arguments

  def __len__(self) -> int:
    return len(self._dataset)

  def __getitem__(self, index: int, /) -> Question:
    entry = self._dataset[_check_index(index, len(self))]
    metadata = entry["metadata"]
    label = metadata["source_dataset"]
    if self._difficulty_from:
      missing = [key for key in self._difficulty_from if key not in metadata]
      if missing:
        raise ValueError(
          f"`difficulty_from` must be of the entry's metadata, got {missing[0]}"
          f" of {', '.join(metadata)}."
        )
      label = ", ".join(
        f"{key} {metadata[key]}" for key in self._difficulty_from
      )
    return Question(entry["question"], entry["answer"] or "", label, entry)

  def score(self, text: str, question: Question, /) -> float:
    """The dataset's own score, which may depend on its options."""
    return float(self._dataset.score_answer(text, question.entry))


def _evaluate(numbers: list[int], signs: list[str]) -> int:
  summands = numbers[:1]
  for sign, value in zip(signs, numbers[1:], strict=True):
    if sign == "*":
      summands[-1] *= value
    else:
      summands.append(-value if sign == "-" else value)
  return sum(summands)


def _digit_sum(value: int) -> int:
  return sum(map(int, str(value)))


def _uniform(text: str) -> float:
  """A number in [0, 1) that the text alone decides, for ever."""
  digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
  return int.from_bytes(digest, "big") / 2**48


def _check_index(index: int, size: int) -> int:
  index = operator.index(index)
  if not 0 <= index < size:
    raise IndexError(f"a question's index must be below {size}, got {index}.")
  return index


def _read_object(line: bytes) -> dict[str, Any]:
  # Numbers stay as they are written: a gold is compared exactly.
  try:
    record = json.loads(line, parse_int=str, parse_float=str)
  except json.JSONDecodeError as error:
    raise ValueError(
      f"it must be JSON, got {error.msg!r} at column {error.colno}"
    ) from error
  if not isinstance(record, dict):
    raise ValueError("it must be a JSON object")
  return record


def _read_text(record: dict[str, Any], key: str) -> str:
  if key not in record:
    raise ValueError(f"it must have the key {key!r}, got {', '.join(record)}")
  value = record[key]
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f"{key!r} must be text or a number, got {value!r}")
  return value


def _after(text: str, mark: str) -> str:
  _, found, gold = text.rpartition(mark)
  if not found or not gold.strip():
    raise ValueError(f"the answer must go on after {mark!r}, got {text!r}")
  return gold.strip()
