"""Questions: right answers, a split by text, and files checked at the door."""

import collections
import itertools
import json
import pickle
import subprocess
import sys

import pytest
import scipy.stats

from groupstd import answers, questions, tokenizers

# --- Arithmetic ---


def numbers_of(prompt):
  for sign in "+-*=":
    prompt = prompt.replace(sign, " ")
  return prompt.split()


@pytest.mark.parametrize(
  ("digits", "terms", "operations"),
  [
    (2, 2, "+"),
    (1, 4, "+-*"),
    ((1, 5), 3, "-"),
    ((3, 4), 2, "*+"),
    (7, 2, "*"),
  ],
)
def test_arithmetic_is_right(digits, terms, operations):
  """Against Python's own reading of the prompt."""
  made = questions.arithmetic(
    digits=digits, terms=terms, operations=operations, size=300
  )
  low, high = digits if isinstance(digits, tuple) else (digits, digits)
  lengths, signs = set(), set()
  for i in range(len(made)):
    prompt, answer, _, entry = made[i]
    assert prompt.endswith("=")
    assert entry is None
    assert str(eval(prompt[:-1])) == answer
    assert set(prompt + answer) <= set(questions.ALPHABET)
    numbers = numbers_of(prompt)
    assert len(numbers) == terms
    assert all(str(int(number)) == number for number in numbers)
    lengths |= {len(number) for number in numbers}
    signs |= set(prompt) & set("+-*")
  assert lengths == set(range(low, high + 1))
  assert signs == set(operations)


def test_alphabet_is_what_the_tokenizer_needs():
  tokenizer = tokenizers.characters(questions.ALPHABET)
  made = questions.arithmetic(digits=(1, 3), operations="+-*", size=50)
  for question in map(made.__getitem__, range(50)):
    for text in question[:2]:
      assert tokenizer.decode(tokenizer.encode(text)) == text


def test_arithmetic_is_a_function_of_its_index():
  """Whatever came before, however many there are, and after pickling."""
  made = questions.arithmetic(size=100)
  all_of_them = [made[i] for i in range(100)]
  assert [made[i] for i in reversed(range(100))] == all_of_them[::-1]
  twin = pickle.loads(pickle.dumps(questions.arithmetic(size=10**9)))
  assert [twin[i] for i in range(100)] == all_of_them
  other = questions.arithmetic(size=100, seed=1)
  assert [other[i] for i in range(100)] != all_of_them


def test_arithmetic_in_another_process():
  """Not of the process's hash seed either; and nothing heavy is imported."""
  code = (
    "from groupstd import answers, questions, tokenizers; import sys;"
    "assert not {'jax', 'reasoning_gym', 'tokenizers'} & set(sys.modules);"
    "print(questions.arithmetic(split='test')[12345])"
  )
  expected = questions.arithmetic(split="test")[12345]
  for hash_seed in "1", "2":
    done = subprocess.run(
      [sys.executable, "-c", code],
      env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
      capture_output=True,
      text=True,
      check=True,
    )
    assert done.stdout.strip() == str(expected)


def texts(**kwargs):
  """How often each text of a small space comes in 6,000 questions."""
  made = questions.arithmetic(digits=1, operations="+-*", size=6000, **kwargs)
  return collections.Counter(made[i].prompt for i in range(len(made)))


def test_split_is_by_text():
  """Both sides are disjoint whatever their seeds, and leave nothing out."""
  train = texts(split="train", held_out=0.3, seed=0)
  test = texts(split="test", held_out=0.3, seed=0)
  other = texts(split="test", held_out=0.3, seed=7)
  space = {
    f"{a}{sign}{b}="
    for a, b in itertools.product(range(10), repeat=2)
    for sign in "+-*"
  }
  # A text that comes with chance 1/300 is missed with exp(−20) or less.
  assert not set(train) & set(test)
  assert set(test) == set(other)
  assert set(train) | set(test) == space
  # 300 texts, each held out with chance 0.3: within four deviations of 7.9.
  assert abs(len(test) - 90) < 32
  # Drawing again until a text is of the split leaves its texts equally likely.
  for counts in train, test:
    assert scipy.stats.chisquare([*counts.values()]).pvalue > 1e-3
  # Holding more out only moves texts one way.
  assert set(texts(split="test", held_out=0.1)) < set(test)


def test_split_without_a_text():
  with pytest.raises(ValueError, match="no question of 2 numbers of 1 to 1"):
    questions.arithmetic(digits=1, split="test", held_out=0.001)


def carried(numbers):
  """Column by column, as on paper."""
  carry = total = 0
  for place in range(max(map(len, numbers)) + 1):
    column = sum(int(n[-1 - place]) for n in numbers if place < len(n)) + carry
    carry = column // 10
    total += carry
  return total


@pytest.mark.parametrize("terms", [2, 3, 12])
def test_difficulty(terms):
  made = questions.arithmetic(digits=(1, 4), terms=terms, size=300)
  labels = set()
  for question in map(made.__getitem__, range(300)):
    numbers = numbers_of(question.prompt)
    digits = max(map(len, numbers))
    labels.add(question.difficulty)
    assert question.difficulty == f"digits {digits}, carries {carried(numbers)}"
  assert len(labels) > 5
  mixed = questions.arithmetic(terms=4, operations="+*", size=100)
  assert {mixed[i].difficulty for i in range(100)} >= {
    "digits 2, operations *",
    "digits 2, operations *+",
  }


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"digits": 0}, "`digits` must be a whole number of at least 1, got 0"),
    ({"digits": (3, 2)}, "`digits` must be a whole number of at least 3"),
    ({"digits": 1.5}, "got 1.5"),
    ({"terms": 1}, "`terms`"),
    ({"size": 0}, "`size`"),
    ({"size": True}, "`size`"),
    ({"operations": ""}, "`operations`"),
    ({"operations": "+/"}, "`operations`"),
    ({"split": "valid"}, "`split`"),
    ({"held_out": 0.0}, "`held_out`"),
    ({"held_out": float("nan")}, "`held_out`"),
  ],
)
def test_arithmetic_refuses(kwargs, message):
  with pytest.raises(ValueError, match=message):
    questions.arithmetic(**kwargs)


def assert_indexed(made):
  assert len(made) == len([made[i] for i in range(3)]) == 3
  for index in 3, -1:
    with pytest.raises(IndexError, match=f"below 3, got {index}"):
      made[index]


def test_index_out_of_range():
  assert_indexed(questions.arithmetic(size=3))


# --- Files ---


def write(path, *lines):
  path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
  return path


@pytest.fixture
def path(tmp_path):
  return tmp_path / "questions.jsonl"


def test_jsonl(path):
  records = [
    {"q": "1+1?", "a": "2", "level": "easy"},
    {"q": "line\u2028one\nσ {x}", "a": "x", "level": 2},
    {"q": "1+1?", "a": "2", "level": "easy"},
  ]
  write(path, "", *(json.dumps(x, ensure_ascii=False) for x in records), "  ")
  made = questions.jsonl(
    path, prompt="q", answer="a", difficulty="level", template="Q{1}: {prompt}"
  )
  first = questions.Question("Q{1}: 1+1?", "2", "easy")
  second = questions.Question("Q{1}: line\u2028one\nσ {x}", "x", "2")
  # What comes twice counts twice.
  assert [made[i] for i in range(len(made))] == [first, second, first]
  assert pickle.loads(pickle.dumps(made)) == made
  with pytest.raises(IndexError):
    made[3]


def test_jsonl_numbers_stay_as_they_are_written(path):
  """A float would lose these digits, or the gold's own writing."""
  golds = ["12345678901234567890.10", "1e400", "-0.10", "7"]
  write(
    path,
    *(f'{{"prompt": {i}, "answer": {x}}}' for i, x in enumerate(golds)),
  )
  made = questions.jsonl(path)
  assert [question.answer for question in made] == golds
  assert [question.prompt for question in made] == ["0", "1", "2", "3"]


def test_jsonl_with_a_byte_order_mark(path):
  path.write_text('{"prompt": "σ", "answer": "1"}', encoding="utf-8-sig")
  assert questions.jsonl(path)[0].prompt == "σ"


GOOD = '{"prompt": "a", "answer": "1"}'


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ('{"prompt": "b"', r"it must be JSON, got .* at column"),
    ("[1, 2]", "it must be a JSON object"),
    ('{"prompt": "b", "gold": "1"}', "the key 'answer', got prompt, gold"),
    ('{"answer": "1"}', "the key 'prompt'"),
    ('{"prompt": null, "answer": "1"}', "'prompt' must be text .* got None"),
    ('{"prompt": "b", "answer": ["1"]}', r"'answer' must be text .*\['1'\]"),
    ('{"prompt": "b", "answer": true}', "'answer' must be text .* got True"),
    ('{"prompt": "b", "answer": NaN}', "'answer' must be text .* got nan"),
    ('{"prompt": "b", "answer": " "}', "'answer' must be text"),
    ('{"prompt": "", "answer": "1"}', "'prompt' must be text"),
    ('{"prompt": "a", "answer": "2"}', "'2' is not that of line 1, '1'"),
  ],
)
def test_jsonl_names_the_line(path, line, message):
  write(path, GOOD, "", line)
  with pytest.raises(
    ValueError, match=rf"questions.jsonl, line 3: .*{message}"
  ):
    questions.jsonl(path)


def test_jsonl_refuses(path):
  path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff", "answer": "1"}')
  with pytest.raises(ValueError, match=r"line 2: .*0xff"):
    questions.jsonl(path)
  write(path, "", " ")
  with pytest.raises(ValueError, match="at least one question, got none"):
    questions.jsonl(path)
  write(path, GOOD)
  with pytest.raises(ValueError, match="`template` must hold"):
    questions.jsonl(path, template="{question}")
  with pytest.raises(ValueError, match=r"line 1: it must have the key 'level'"):
    questions.jsonl(path, difficulty="level")
  for answer in "1", "1 #### ":
    write(path, json.dumps({"prompt": "a", "answer": answer}))
    with pytest.raises(ValueError, match="line 1: the answer must go on after"):
      questions.jsonl(path, answer_after="####")


def test_gold_after_a_mark(path):
  """As GSM8K writes it, thousands commas and all."""
  write(
    path,
    json.dumps({"question": "a", "answer": "2*3 = <<2*3=6>>6\n#### 1,206"}),
    json.dumps({"question": "b", "answer": "#### 1 or\n#### -7 "}),
  )
  made = questions.jsonl(path, prompt="question", answer_after="####")
  assert [made[i].answer for i in range(2)] == ["1,206", "-7"]
  answers.check_gold(made, answers.number())


@pytest.mark.parametrize(("name", "size"), [("train", 7473), ("test", 1319)])
def test_gsm8k(external_data, name, size):
  """Every gold is a number, and the only one that its verifier takes."""
  made = questions.jsonl(
    external_data / "data" / "gsm8k" / f"{name}.jsonl",
    prompt="question",
    answer_after="####",
  )
  assert len(made) == size
  verifier = answers.number(which="last")
  answers.check_gold(made, verifier, samples=size)
  commas = [made[i] for i in range(size) if "," in made[i].answer]
  assert commas
  for question in commas:
    plain = question.answer.replace(",", "")
    assert verifier(f"so the answer is ${plain}.00.", question) == 1
    assert verifier(plain[:-1], question) == 0


# --- reasoning-gym ---


@pytest.fixture
def gym():
  """The package, without which a test is skipped."""
  return pytest.importorskip("reasoning_gym")


def test_reasoning_gym_is_the_package_s_own(gym):
  made = questions.reasoning_gym(
    "chain_sum",
    size=20,
    seed=5,
    max_terms=3,
    difficulty_from=["num_terms", "num_digits"],
  )
  theirs = gym.create_dataset("chain_sum", size=20, seed=5, max_terms=3)
  assert len(made) == 20
  for i in reversed(range(20)):
    prompt, answer, difficulty, entry = made[i]
    assert entry == theirs[i]
    assert (prompt, answer) == (entry["question"], entry["answer"])
    terms = entry["metadata"]["num_terms"]
    digits = entry["metadata"]["num_digits"]
    assert difficulty == f"num_terms {terms}, num_digits {digits}"


@pytest.mark.parametrize("name", ["chain_sum", "string_manipulation", "arc_1d"])
def test_reasoning_gym_pickles(name, gym):
  """Two of these hold what does not pickle by itself."""
  made = questions.reasoning_gym(name, size=5, seed=3)
  twin = pickle.loads(pickle.dumps(made))
  for i in range(5):
    assert twin[i] == made[i] == pickle.loads(pickle.dumps(made[i]))
    assert made[i].difficulty == name


def test_reasoning_gym_seeds_overlap(gym):
  """Question i of seed s is question 0 of seed s + i, as documented."""
  first = questions.reasoning_gym("chain_sum", size=10, seed=0)
  second = questions.reasoning_gym("chain_sum", size=10, seed=4)
  assert [first[i].prompt for i in range(4, 10)] == [
    second[i].prompt for i in range(6)
  ]


def test_reasoning_gym_index_out_of_range(gym):
  assert_indexed(questions.reasoning_gym("chain_sum", size=3))


def test_reasoning_gym_composite(gym):
  """The difficulty tells the parts apart, and each has its own scorer."""
  part = gym.composite.DatasetSpec
  parts = ["chain_sum", "leg_counting"]
  made = questions.reasoning_gym(
    "composite",
    size=20,
    datasets=[part(name=name, weight=1, config={}) for name in parts],
  )
  assert {made[i].difficulty for i in range(20)} == set(parts)
  answers.check_gold(made, answers.reasoning_gym(made))


def test_reasoning_gym_without_an_answer(gym):
  """Where only the scorer knows, the gold is empty text."""
  question = questions.reasoning_gym("graph_color", size=2)[0]
  assert question.answer == ""
  assert question.entry["answer"] is None


def test_reasoning_gym_refuses(gym, monkeypatch):
  with pytest.raises(
    ValueError, match=r"'chain_sums'. Did you mean 'chain_sum'"
  ):
    questions.reasoning_gym("chain_sums")
  with pytest.raises(ValueError, match="got levels of source_dataset"):
    questions.reasoning_gym("chain_sum", difficulty_from=["levels"])
  with pytest.raises(TypeError, match="max_term"):
    questions.reasoning_gym("chain_sum", max_term=3)
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  with pytest.raises(ImportError, match=r"groupstd\[lm\]"):
    questions.reasoning_gym("chain_sum")
