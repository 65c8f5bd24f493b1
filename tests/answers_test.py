"""Verifiers: situations that broke others', and exact fractions."""

from concurrent import futures
from fractions import Fraction
import multiprocessing
import pickle
import random
import time

import pytest

from groupstd import answers, questions


def judge(verifier, text, gold):
  return verifier(text, questions.Question("", gold))


@pytest.mark.parametrize(
  ("gold", "text", "score"),
  [
    ("-12", "12", 0),
    ("-12", "-12", 1),
    ("-12", "−12", 1),
    ("-12", "x=-12", 1),
    ("12", "-12", 0),
    ("12", "+12", 1),
    ("-5", "-$5", 1),
    ("-5", "$-5", 1),
    ("16", "016", 1),
    ("016", "16", 1),
    ("16", "16.", 1),
    ("16", "16.0", 1),
    ("16", "1.6", 0),
    ("1234", "$1,234.00", 1),
    ("1,234", "1234", 1),
    ("$1,234.00", "1234", 1),
    ("1234567", "1,234,567 ducks", 1),
    ("1", "1,23", 1),  # No thousands: two numbers.
    ("50", "50%", 1),
    ("50%", "50", 1),
    ("0.5", "50%", 0),
    ("1/2", "0.5", 1),
    ("0.5", "1/2", 1),
    ("0.5", "1 / 2", 1),
    (".5", "0.5", 1),
    (r"\frac{1}{2}", ".5", 1),
    ("-0.5", r"-\dfrac{1}{2}", 1),
    ("0", "1/0", 0),
    ("63/400", "64/400", 0),
    ("63/400", "0.1575", 1),
    (r"\text{13}", "13", 1),
    ("13", r"\text{13}", 1),
    (r"\boxed{-13}", r"so \(\boxed{-13}\).", 1),
    ("100/3", "33.3", 0),
    ("100/3", "33.333333333333333", 0),
    ("2000", "2e3", 1),
    ("2000", "20", 0),
    ("16", "", 0),
    ("16", "sixteen", 0),
    ("5", "１５", 0),  # Digits of another script are none here.
    ("16", "16-3", 1),  # A minus between numbers is none of the second's.
    ("3", "16", 0),
  ],
)
def test_number(gold, text, score):
  assert judge(answers.number(), text, gold) == score


def test_number_of_an_answer_that_runs_on():
  """The first number, or the last: one rule is chosen, and it is kept."""
  runs_on = "8. 4+1=5. 6+2=8. 3+3=6"
  reasons = "16 - 3 - 4 = 9 eggs, 9*2 = $18"
  assert judge(answers.number(), runs_on, "8") == 1
  assert judge(answers.number(which="first"), runs_on, "6") == 0
  assert judge(answers.number(which="last"), runs_on, "8") == 0
  assert judge(answers.number(which="last"), runs_on, "6") == 1
  assert judge(answers.number(which="last"), reasons, "18") == 1
  assert judge(answers.number(which="first"), reasons, "18") == 0
  assert judge(answers.number(which="last"), "16-3", "3") == 1
  with pytest.raises(ValueError, match='"first" or "last", got \'any\''):
    answers.number(which="any")  # type: ignore


UNREADABLE = [
  *("x", "x^2", "2x", r"\sqrt{2}", r"2\pi", "1/0", "1,23", "-", "1e9999"),
  *("", "(3, 4)", "2 1/2", "1 or 2", "5 apples", "1" * 2000),
]


@pytest.mark.parametrize("gold", UNREADABLE)
def test_unreadable_gold_is_never_right(gold):
  verifier = answers.number()
  for text in [gold, "1", "2", "3", "5", "64/400", ""]:
    assert judge(verifier, text, gold) is None


def writings(value, draw):
  """Ways of writing a fraction."""
  top, bottom = abs(value.numerator), value.denominator
  sign = "-" if value < 0 else draw.choice(["", "+"])
  factor = draw.randint(1, 9)
  yield f"{sign}{factor * top}/{factor * bottom}"
  yield rf"${sign}\frac{{{top}}}{{{bottom}}}$"
  yield f"{sign}{top:,}/{bottom:,}"
  while bottom % 2 == 0:
    bottom //= 2
  while bottom % 5 == 0:
    bottom //= 5
  if bottom == 1:
    # Its decimals end: with as many as the denominator's prime factors.
    places = len(bin(value.denominator))
    whole, rest = divmod(abs(value), 1)
    decimals = f"{int(rest * 10**places):0{places}}"
    yield f"{sign}${whole:,}.{decimals}"
    yield f"{sign}00{whole}.{decimals}e0"
    yield f"{sign}{whole}{decimals}e-{places}"


def test_number_against_fractions():
  """Every writing of a equals every writing of b exactly when a = b."""
  draw = random.Random(0)
  verifier = answers.number()
  seen = 0
  for _ in range(300):
    values = [
      Fraction(draw.randint(-9999, 9999), draw.choice([1, 2, 7, 8, 40, 125]))
      for _ in range(2)
    ]
    near = values[0] + Fraction(1, 10**12)
    for a in writings(values[0], draw):
      for value in [*values, near]:
        for b in writings(value, draw):
          seen += 1
          assert judge(verifier, f"is {a}.", b) == (values[0] == value), (a, b)
  assert seen > 9000


def test_number_takes_any_text_in_no_time():
  """Nothing a model writes makes it compute a vast number, or backtrack."""
  verifier = answers.number(which="last")
  start = time.perf_counter()
  for text in [
    "9" * 20_000,
    "1e" + "9" * 20_000,
    "9e999" * 4000,
    "1,111" * 4000,
    "1,111," * 4000,
    "1 / " * 5000,
    "1" + " " * 20_000,
    "-$" * 10_000,
    r"\frac{1}{" * 2000,
  ]:
    assert judge(verifier, text, "8") == 0
    judge(verifier, "8", text)
  # Each takes some milliseconds at most.
  assert time.perf_counter() - start < 5


def test_exact():
  verifier = answers.exact()
  assert judge(verifier, " 132\n", "132") == 1
  assert judge(verifier, "132", " 132 ") == 1
  assert judge(verifier, "0132", "132") == 0
  assert judge(verifier, "132 1", "132") == 0
  assert judge(verifier, "", "132") == 0
  assert judge(verifier, "", " ") is None


# --- The check of golds ---


def asked(*golds):
  return [questions.Question(f"{i}?", gold) for i, gold in enumerate(golds)]


def test_check_gold():
  answers.check_gold(asked("1", "1,000", "-1/2"), answers.number())
  with pytest.raises(
    ValueError, match=r"2 of 4 questions fail: question 1: 'x\^2' scores None"
  ):
    answers.check_gold(asked("1", "x^2", "2", "2 1/2"), answers.number())
  with pytest.raises(ValueError, match=r"question 0: '' scores 1\.0"):
    answers.check_gold(asked("1"), lambda text, question: 1.0)
  # A gold that cannot be read must not make any reading right.
  with pytest.raises(ValueError, match=r"'\(no answer\)' scores True"):
    answers.check_gold(asked("1"), lambda text, question: text != "")
  # An error is a failure where the gold is judged, and only there.
  answers.check_gold(asked("1"), lambda text, question: int(text) == 1)
  with pytest.raises(ValueError, match="'x' scores nothing but ValueError"):
    answers.check_gold(asked("x"), lambda text, question: int(text) == 1)


def test_check_gold_samples():
  """All where there are few; otherwise so many, from anywhere, in order."""
  calls = []

  def verifier(text, question):
    if text == question.answer:
      calls.append(int(text))
    return float(text == question.answer)

  hundred = asked(*map(str, range(100)))
  answers.check_gold(hundred, verifier, samples=100)
  assert calls == list(range(100))
  calls.clear()
  answers.check_gold(hundred, verifier, samples=10, seed=1)
  assert len(set(calls)) == 10
  assert calls == sorted(calls)
  assert calls[-1] > 50


def test_arithmetic_golds():
  made = questions.arithmetic(digits=(1, 4), terms=3, operations="+-*")
  for verifier in (
    answers.exact(),
    answers.number(),
    answers.number(which="last"),
  ):
    answers.check_gold(made, verifier, samples=100)


# --- reasoning-gym ---


@pytest.fixture
def gym():
  """The package, without which a test is skipped."""
  return pytest.importorskip("reasoning_gym")


def test_reasoning_gym_is_binary_unless_told(gym):
  """The package's own score of a longer text is a part of 1."""
  made = questions.reasoning_gym("basic_arithmetic", size=5, seed=1)
  question = made[0]
  gold = question.answer
  longer = f"The answer is {gold}"
  binary = answers.reasoning_gym(made)
  graded = answers.reasoning_gym(made, graded=True)
  for text in gold, f" {gold}\n":
    assert binary(text, question) == graded(text, question) == 1
  assert binary(longer, question) == 0
  assert graded(longer, question) == len(gold) / len(longer)
  assert binary("", question) == graded("", question) == 0


def test_reasoning_gym_scores_under_the_options_asked_with(gym):
  """Four numbers that make 24 are right if they are among those allowed."""
  allowed = questions.reasoning_gym("puzzle24", size=2)
  smaller = questions.reasoning_gym("puzzle24", size=2, max_value=5)
  text = "6*4*1*1"
  assert answers.reasoning_gym(allowed)(text, allowed[0]) == 1
  assert answers.reasoning_gym(smaller)(text, smaller[0]) == 0
  twin = pickle.loads(pickle.dumps(answers.reasoning_gym(smaller)))
  assert twin(text, smaller[0]) == 0


def test_reasoning_gym_errors_are_not_wrong_answers(gym):
  made = questions.reasoning_gym("prime_factorization", size=2)
  with pytest.raises(ValueError, match="invalid literal"):
    answers.reasoning_gym(made)("seven", made[0])
  answers.check_gold(made, answers.reasoning_gym(made))


def test_check_gold_finds_a_scorer_that_takes_anything(gym):
  made = questions.reasoning_gym("game_of_life_halting", size=50)
  with pytest.raises(ValueError, match=r"'\(no answer\)' scores 1\.0"):
    answers.check_gold(made, answers.reasoning_gym(made))


# --- Elsewhere than in the main thread ---


def test_verifiers_in_threads_and_processes(gym):
  """No alarm signal, nothing that does not pickle."""
  made = questions.reasoning_gym("chain_sum", size=2)
  half = questions.Question("1/2=", "1/2")
  calls = [
    (answers.exact(), "1/2", half, 1),
    (answers.exact(), "0.5", half, 0),
    (answers.number(), "0.5", half, 1),
    (answers.number(which="last"), "0.5 or 0.6", half, 0),
    (answers.number(), "0.5", questions.Question("", "?"), None),
    (answers.reasoning_gym(made), made[1].answer, made[1], 1),
    (answers.reasoning_gym(made, graded=True), "", made[1], 0),
  ]
  processes = futures.ProcessPoolExecutor(
    1, mp_context=multiprocessing.get_context("spawn")
  )
  for executor in futures.ThreadPoolExecutor(2), processes:
    with executor:
      given = [
        executor.submit(verifier, text, question)
        for verifier, text, question, _ in calls
      ]
      assert [x.result(60) for x in given] == [score for *_, score in calls]
