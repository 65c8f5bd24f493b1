r"""Verifiers: what an answer's text is worth, judged against the gold.

A verifier is (text, question) → a score, or None where it cannot judge. All of
them pickle and use no signals, so that threads and other processes may call
them. An error inside a scorer is raised: it is not a wrong answer.

>>> question = Question("1/4+1/4=", "1/2")
>>> number()("that is 0.5", question), number()("0.25", question)
(1.0, 0.0)
"""

from collections.abc import Callable
import dataclasses
from fractions import Fraction
import random
import re
from typing import Literal

from groupstd.questions import Question, Questions, ScoredQuestions

__all__ = ["Verifier", "check_gold", "exact", "number", "reasoning_gym"]

# (the answer's text, the question) → a score; None abstains.
Verifier = Callable[[str, Question], float | None]

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
# An exponent is short, or a few characters would be a number of any length.
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?"
_NUMBER = (
  r"(?P<sign>(?<![\w)\]}%])[-−+](?:\\?[$€£])?)?"
  rf"(?:\\[dt]?frac\{{(?P<top>{_INTEGER})\}}\{{(?P<bottom>{_INTEGER})\}}"
  rf"|(?P<number>{_DECIMAL})(?:\s*/\s*(?P<over>{_DECIMAL}))?)"
)
_ANSWER = re.compile(_NUMBER)
_GOLD = re.compile(
  rf"(?:\\(?:text|boxed)\{{|\\[(\[]|\\?[$€£]|\s)*{_NUMBER}"
  r"(?:\\[)\]]|\\?[%$€£]|[}.\s])*"
)
_MAX_CHARACTERS = 1000
_NO_ANSWERS = "", "(no answer)"


def exact() -> Verifier:
  """1 if the text is the gold, but for white space around either; else 0.

  None where the gold is empty.
  """
  return _exact


def number(*, which: Literal["first", "last"] = "first") -> Verifier:
  r"""1 if the number that the text gives equals the gold's, exactly; else 0.

  Numbers are compared as fractions: 016 is 16, $1,234.00 is 1234, 1/2 and
  \frac{1}{2} are 0.5, 2e3 is 2000, and 33.3 is not 100/3. A percent sign is
  passed over (50% is 50), as are units and currency marks. A minus counts where
  it touches the number and follows no letter, digit, bracket or percent sign:
  the numbers of 16-3 are 16 and 3. Commas group thousands where each group
  after them is of three digits; a mixed number, 2 1/2, is two numbers. A number
  of over 1,000 characters, or one divided by 0, equals none.

  Args:
    which: the number that counts where there are several. "first" suits a
      policy that answers at once: what runs on after it, as in "8. 4+1=5. 6",
      changes nothing. "last" suits one that reasons before it answers, and
      then needs a stop token after the answer.

  Returns:
    A verifier that says None where the gold is not one number and no more than
    that (marks as above aside): never 1. `check_gold` finds such golds before
    a run.

  Raises:
    ValueError: if `which` is neither.
  """
  if which not in ("first", "last"):
    raise ValueError(f'`which` must be "first" or "last", got {which!r}.')
  return _Number(0 if which == "first" else -1)


def reasoning_gym(
  questions: ScoredQuestions, *, graded: bool = False
) -> Verifier:
  """What the scorer of `questions.reasoning_gym(...)` says.

  That scorer gives parts of 1 for parts of an answer, often by its length: "The
  answer is -4" scores 0.125 where "-4" scores 1.

  Args:
    questions: those that are asked; a scorer may depend on their options.
    graded: whether to give the score itself, rather than 1 where it is 1 and 0
      elsewhere. White space around the text is passed over in either case.
  """
  return _ReasoningGym(questions, graded)


def check_gold(
  questions: Questions,
  verifier: Verifier,
  *,
  samples: int = 1000,
  seed: int = 0,
) -> None:
  """Raises unless golds score 1, and no answer does not.

  To be called before a run, as a gold that its own verifier cannot read would
  make a question that nobody can answer, or that everybody does.

  Args:
    questions: those that will be asked. A question whose answer is "" is only
      checked in the second way.
    verifier: the verifier, for which 1 means right.
    samples: how many to check, or all if there are fewer.
    seed: of which.

  Raises:
    ValueError: naming how many fail, and the first of them.
  """
  size = len(questions)
  chosen = range(size)
  if samples < size:
    chosen = sorted(random.Random(seed).sample(chosen, samples))
  broken = []
  for index in chosen:
    question = questions[index]
    for text in question.answer, *_NO_ANSWERS:
      score = _score(verifier, text, question)
      if (score == 1) != (text not in _NO_ANSWERS):
        broken.append(f"question {index}: {text!r} scores {score}")
        break
  if broken:
    raise ValueError(
      "the right answer must score 1 and none must not, but"
      f" {len(broken)} of {len(chosen)} questions fail: "
      + "; ".join(broken[:3])
      + "."
    )


def _score(verifier: Verifier, text: str, question: Question) -> object:
  try:
    return verifier(text, question)
  except Exception as error:
    return f"nothing but {error!r}"


def _exact(text: str, question: Question) -> float | None:
  gold = question.answer.strip()
  return float(text.strip() == gold) if gold else None


@dataclasses.dataclass(frozen=True)
class _Number:
  position: int

  def __call__(self, text: str, question: Question) -> float | None:
    gold = _value(_GOLD.fullmatch(question.answer))
    if gold is None:
      return None
    found = list(_ANSWER.finditer(text))
    return float(bool(found) and _value(found[self.position]) == gold)


@dataclasses.dataclass(frozen=True)
class _ReasoningGym:
  questions: ScoredQuestions
  graded: bool

  def __call__(self, text: str, question: Question) -> float:
    score = self.questions.score(text.strip(), question)
    return score if self.graded else float(score == 1)


def _value(match: re.Match[str] | None) -> Fraction | None:
  if match is None or len(match[0]) > _MAX_CHARACTERS:
    return None
  over = match["bottom"] or match["over"] or "1"
  denominator = Fraction(over.replace(",", ""))
  if not denominator:
    return None
  value = Fraction((match["top"] or match["number"]).replace(",", ""))
  value /= denominator
  return -value if (match["sign"] or "+")[0] in "-−" else value
