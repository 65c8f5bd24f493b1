"""Tasks in words: which questions a step asks, and what answers are worth."""

import contextlib
import fractions
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from groupstd import policies, questions, sigma, tasks, text, tokenizers
from groupstd.questions import Question
from groupstd.verifiers import Pool

NAN = float("nan")
DIGITS = tokenizers.characters("0123456789+=")
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


def right(said, question):
  return float(said == question.answer)


def constant(value):
  return lambda *_: value


def make(asked=None, pool=None, *, tokenizer=DIGITS, **kwargs):
  asked = asked or [Question(f"{i}+1=", f"{i + 1}") for i in range(10)]
  pool = pool or Pool({"right": right}, num_workers=0)
  return text.task(
    asked, tokenizer, pool, **{"width": 5, "length": 4, **kwargs}
  )


def worth(task, said, tokenizer=DIGITS):
  """The checked verdict on these answers to the first questions, [B][G]."""
  _, prompts = task.prompts(0, len(said))
  width = max([len(x) for group in said for x in group] + [1])
  tokens = np.zeros((len(said), len(said[0]), width), np.int32)
  mask = np.zeros(tokens.shape, bool)
  for b, group in enumerate(said):
    for g, answer in enumerate(group):
      tokens[b, g, : len(answer)] = tokenizer.encode(answer)
      mask[b, g, : len(answer)] = True
  verdict = task.reward(prompts, tokens, mask)
  return tasks.check_scores(verdict, prompts.index, len(said[0]))


# --- Which questions a step asks ---


@pytest.mark.parametrize("num_groups", [1, 3, 5, 10])
def test_an_epoch_asks_every_question_once_but_for_a_last_short_batch(
  num_groups,
):
  task = make(seed=1)
  batches = 10 // num_groups
  orders = []
  for epoch in range(4):
    seen = []
    for batch in range(batches):
      step = epoch * batches + batch
      ids, prompts = task.prompts(step, num_groups)
      equal(ids, prompts.index)
      assert task.epoch(step, num_groups) == (epoch, len(seen))
      seen += ids.tolist()
    assert len(set(seen)) == len(seen) == batches * num_groups
    orders.append(tuple(seen))
  assert len(set(orders)) == 4
  # A function of seed and step, whatever was asked before.
  for seed, same in (1, True), (2, False):
    ids, _ = make(seed=seed).prompts(jnp.array(3 * batches), num_groups)
    assert (tuple(ids.tolist()) == orders[3][:num_groups]) == same


def test_every_order_of_an_epoch_is_as_likely_as_the_next():
  """3,000 epochs of 3 questions, within 5 standard errors: once in 10⁵."""
  task = make([Question(x, "") for x in "123"])
  seen = [tuple(task.prompts(step, 3)[0].tolist()) for step in range(3000)]
  for order in itertools.permutations(range(3)):
    error = abs(seen.count(order) - 500)
    assert error < 5 * np.sqrt(3000 * 1 / 6 * 5 / 6)


def test_without_shuffling_questions_come_in_order():
  task = make(shuffle=False)
  for step in 0, 1, 2, 3:
    equal(task.prompts(step, 5)[0], np.arange(5) + 5 * (step % 2))


@pytest.mark.parametrize("asked", [0, -1, 11])
def test_more_questions_than_there_are_or_none_are_refused(asked):
  for ask in make().prompts, make().epoch, make().examples:
    with pytest.raises(ValueError, match=f"1 to 10 prompts, got {asked}"):
      ask(0, asked)


def test_prompts_are_padded_on_the_left_to_one_width():
  asked = [Question("1+2=", "3"), Question("=", ""), Question("12+3=", "15")]
  _, prompts = make(asked, shuffle=False).prompts(0, 3)
  assert isinstance(prompts, policies.Prompts)
  equal(prompts.mask.sum(1), [4, 1, 5])
  for tokens, mask, question in zip(*prompts[:2], asked, strict=True):
    equal(np.sort(mask), mask)  # False, …, False, True, …, True.
    assert DIGITS.decode(tokens[mask].tolist()) == question.prompt
    equal(tokens[~mask], DIGITS.pad)


# --- Questions that cannot be asked ---


def test_prompts_of_no_token_or_too_many_are_left_out_and_counted():
  asked = [Question(x, "") for x in ("1", "é", "123456", "2", "12345", "")]
  with pytest.warns(
    UserWarning, match="3 of 6 questions .* the first is question 1: .*'é'"
  ):
    task = make(asked)
  for epoch in range(3):
    assert {*task.prompts(epoch, 3)[0].tolist()} == {0, 3, 4}


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("asked", [[Question("123456", "")] * 3, ()])
def test_a_task_without_a_question_is_refused(asked):
  with pytest.raises(ValueError, match="of 1 to 5 tokens, got none among"):
    text.task(
      asked, DIGITS, Pool({"right": right}, num_workers=0), width=5, length=4
    )


class Counted:
  """A million questions, each eighth of which is too long."""

  def __init__(self):
    self.asked = 0

  def __len__(self):
    return 1_000_000

  def __getitem__(self, index):
    self.asked += 1
    return Question("123456" if index % 8 == 0 else f"{index % 7}=", "7")


def test_of_a_million_questions_only_those_asked_are_looked_at():
  asked = Counted()
  task = make(asked, shuffle=False)
  with pytest.raises(
    ValueError, match="1 to 5 tokens, got 6 of question 0: '1"
  ):
    task.prompts(0, 4)
  task = make(asked, seed=3)
  for step in range(4):
    with contextlib.suppress(ValueError):
      task.prompts(step, 4)
  assert asked.asked < 200
  assert task.epoch(250_001, 4) == (1, 4)


# --- What answers are worth ---


def test_what_was_sampled_is_decoded_and_never_encoded_again():
  """A toy vocabulary in which "a", "b" reads as another token would."""
  heard = []

  def listen(said, question):
    heard.append((said, question.answer))
    return 1.0

  texts = ["", "", "a", "b", "ab"]
  encoded = []

  def encode(what):
    encoded.append(what)
    return [4]

  toy = tokenizers.Tokenizer(
    encode, lambda ids: "".join(texts[i] for i in ids), 5, 0, (1,)
  )
  task = make(
    [Question("x", "first"), Question("y", "second")],
    Pool({"listen": listen}, num_workers=0),
    tokenizer=toy,
    shuffle=False,
  )
  _, prompts = task.prompts(0, 2)
  tokens = np.array([[[2, 3, 1], [4, 1, 3]], [[3, 3, 3], [2, 2, 2]]])
  mask = np.array([[[1, 1, 1], [1, 1, 0]], [[0, 1, 1], [0, 0, 0]]], bool)
  del encoded[:]
  for given in (tokens, mask), (jnp.array(tokens), jnp.array(mask)):
    task.reward(prompts, *given)
    assert heard == [
      ("ab", "first"),
      ("ab", "first"),
      ("bb", "second"),
      ("", "second"),
    ]
    del heard[:]
  assert not encoded


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_answer_is_held_against_its_own_question(num_workers):
  with Pool({"right": right}, num_workers=num_workers) as pool:
    task = make(pool=pool, seed=5)
    ids = task.prompts(0, 4)[0].tolist()
    said = [[f"{i + 1}", "0", f"{ids[0] + 1}"] for i in ids]
    verdict = worth(task, said)
  expected = [
    [x == f"{i + 1}" for x in row] for i, row in zip(ids, said, strict=True)
  ]
  for found in verdict.scores, verdict.rewards, verdict.parts["right"]:
    equal(found, expected)
  assert verdict.where.all()


def test_the_reward_is_the_weighted_one():
  """Constant functions 1 and 0 of weights .7 and .3 are worth .7, not 1."""
  pool = Pool({"one": constant(1), "zero": constant(0)}, num_workers=0)
  task = make(pool=pool, weights={"one": 0.7, "zero": 0.3}, score="zero")
  verdict = worth(task, [["1", "2"], ["3", "4"]])
  equal(verdict.rewards, np.full((2, 2), 0.7))
  equal(verdict.scores, np.zeros((2, 2)))
  equal(verdict.parts["one"], np.ones((2, 2)))
  equal(verdict.parts["zero"], np.zeros((2, 2)))
  equal(worth(make(pool=pool, score="one"), [["1"] * 2]).rewards, [[1, 1]])


def test_one_of_two_functions_may_abstain_everywhere():
  """It adds nothing, and the other's weight stays as it is."""
  pool = Pool({"right": right, "never": constant(None)}, num_workers=0)
  weights = {"right": 0.5, "never": 0.5}
  said = [["1", "0", "0"]]
  task = make(pool=pool, weights=weights, score="right", shuffle=False)
  verdict = worth(task, said)
  equal(verdict.rewards, [[0.5, 0, 0]])
  assert verdict.where.all()
  equal(verdict.parts["never"], [[NAN] * 3])
  # Deciding, it leaves no score: a silent group, whatever the other says.
  task = make(pool=pool, weights=weights, score="never", shuffle=False)
  verdict = worth(task, said)
  assert not verdict.where.any()
  equal(verdict.rewards, [[0, 0, 0]])
  assert sigma.group_stats(verdict.rewards, verdict.where).silent.all()
  assert pool.counts.abstained == 6


def test_an_abstention_or_a_failure_does_not_count_as_wrong():
  """[1, –, 0, 0] and [1, !, 0, 0] are groups of three."""

  def fussy(said, question):
    if said == "+":
      raise ValueError("cannot read +")
    return None if said == "=" else right(said, question)

  pool = Pool({"fussy": fussy}, num_workers=0, max_failures=0.5)
  verdict = worth(
    make(pool=pool, shuffle=False),
    [["1", "=", "0", "0"], ["2", "+", "0", "0"]],
  )
  root = np.sqrt(2)
  advantages, _ = sigma.rule(sigma.dapo())(verdict.rewards, verdict.where)
  close(advantages, [[root, 0, -root / 2, -root / 2]] * 2, rtol=1e-6)
  assert pool.counts[1:] == (1, 1, 0, 0)


# --- The length penalty ---


@pytest.mark.parametrize(
  ("limit", "buffer"), [(10, 4), (10, 10), (5, 1), (7, 0), (16384 + 4096, 4096)]
)
def test_the_soft_overlong_penalty_is_that_of_the_paper(limit, buffer):
  """arXiv:2503.14476: 0, then linear in the buffer, then −1 past the limit."""
  start = limit - buffer
  lengths = np.array(sorted({0, start, start + 1, limit - 1, limit, limit + 1}))
  expected = [
    fractions.Fraction(0)
    if n <= start
    else fractions.Fraction(start - n, buffer)
    if n <= limit
    else fractions.Fraction(-1)
    for n in lengths.tolist()
  ]
  found = text.soft_overlong(limit, buffer)(lengths)
  close(found, [float(x) for x in expected], rtol=1e-15)


def test_a_buffer_longer_than_the_limit_is_refused():
  for buffer in -1, 11:
    with pytest.raises(ValueError, match=f"to the limit of 10, got {buffer}"):
      text.soft_overlong(10, buffer)


@pytest.mark.parametrize(
  "penalty",
  [(3, 2), text.soft_overlong(3, 2), lambda n: -np.maximum(n - 1, 0) / 2],
)
def test_length_is_counted_in_tokens_and_weighs_what_it_is_given(penalty):
  """Silence is not its to decide: the scores are the verifier's word."""
  task = make(
    length_penalty=penalty, weights={"right": 1.0, "length": 0.5}, shuffle=False
  )
  verdict = worth(task, [["1", "10", "001", ""], ["0", "00", "000", "0"]])
  length = [[0, -0.5, -1, 0], [0, -0.5, -1, 0]]
  equal(verdict.parts["length"], length)
  equal(verdict.scores, [[1, 0, 0, 0], [0, 0, 0, 0]])
  equal(verdict.rewards, verdict.scores + 0.5 * np.array(length))
  stats = sigma.group_stats(verdict.rewards, verdict.where, verdict.scores)
  equal(stats.silent, [False, True])
  assert stats.std[1] > 0


def test_a_penalty_of_one_number_for_all_is_refused():
  task = make(length_penalty=lambda n: np.array(-1.0))
  with pytest.raises(
    ValueError, match=r"part 'length' must have shape \(1, 2\)"
  ):
    worth(task, [["1", "2"]])


# --- Examples ---


def test_examples_are_the_prompts_with_their_right_answers():
  task = make(seed=2)
  for step in 0, 3:
    ids, asked = task.prompts(step, 3)
    prompts, tokens, mask = task.examples(step, 3)
    for x, y in zip(prompts, asked, strict=True):
      equal(x, y)
    assert tokens.shape == mask.shape == (3, 1, 4)
    for i, row, kept in zip(
      ids.tolist(), tokens[:, 0], mask[:, 0], strict=True
    ):
      assert row[kept].tolist() == [*DIGITS.encode(f"{i + 1}"), DIGITS.stop[0]]
      equal(np.sort(kept)[::-1], kept)
    assert (task.reward(prompts, tokens, mask).scores == 1).all()


def test_an_answer_longer_than_the_room_for_it_is_refused_and_named():
  asked = [Question("1", "1234"), Question("2", "123"), Question("3", "12345")]
  task = make(asked, shuffle=False)
  _, tokens, mask = task.examples(1, 1)
  assert mask.all()
  assert tokens[0, 0, -1] == DIGITS.stop[0]
  with pytest.raises(
    ValueError, match=r"got 4: 2 of the 3 answers .* question 0, '1234'"
  ):
    task.examples(0, 3)


def test_arithmetic_of_a_million_questions_is_asked_and_answered():
  asked = questions.arithmetic(digits=2, terms=2)
  tokenizer = tokenizers.characters(questions.ALPHABET)
  task = make(asked, tokenizer=tokenizer, width=6)
  prompts, tokens, mask = task.examples(7, 8)
  assert (task.reward(prompts, tokens, mask).scores == 1).all()


# --- What is refused ---


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"width": 0}, "`width` must be at least 1, got 0"),
    ({"length": 0}, "`length` must be at least 1, got 0"),
    ({}, "`score` must be one of a, b, got None"),
    ({"score": "c"}, "`score` must be one of a, b, got 'c'"),
    (
      {"score": "a", "weights": {"a": 1.0}},
      "`weights` must be .* for a, b, got",
    ),
    (
      {"score": "a", "weights": {"a": 1.0, "b": NAN}},
      "`weights` must be finite numbers",
    ),
    (
      {"score": "a", "weights": {"a": 1, "b": 1}, "length_penalty": (4, 2)},
      "`weights` must be .* for a, b, length",
    ),
  ],
)
def test_names_and_numbers_that_do_not_fit_are_refused(arguments, message):
  pool = Pool({"a": right, "b": right}, num_workers=0)
  with pytest.raises(ValueError, match=message):
    make(pool=pool, **arguments)


def test_the_penalty_s_name_is_taken():
  pool = Pool({"length": right}, num_workers=0)
  make(pool=pool)
  with pytest.raises(ValueError, match='no verifier must be named "length"'):
    make(pool=pool, length_penalty=(4, 2))
