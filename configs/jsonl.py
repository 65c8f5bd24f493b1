"""Questions from a file with a JSON object a line: {"prompt": …, "answer": …}.

Hardware: two CPU cores.

  python -m experiments.main --config=configs/jsonl.py:grpo --workdir=runs/own \
      --config.questions.jsonl.path=train.jsonl \
      --config.held_out.jsonl.path=test.jsonl

The argument is the method, of configs/language.py. An answer is right where the
first number in it is the file's. Texts are read a character at a time, by a
model that has read nothing else; what else the file's questions need
(`answer_after`, a template, another tokenizer) is set here.
"""

import ml_collections

from configs import language


def get_config(method: str = "grpo") -> ml_collections.ConfigDict:
  config = language.base(method, length=16)
  config.questions.jsonl = {
    "path": "train.jsonl",
    "prompt": "prompt",
    "answer": "answer",
    "template": "{prompt}",
  }
  language.hold_out(config, path="test.jsonl")
  config.tokenizer.characters = {"alphabet": language.PRINTABLE}
  config.prompt_width = 128
  config.model = {"width": 128, "num_layers": 3, "num_heads": 4, "hidden": 512}
  config.warmup.num_steps = 300
  config.warmup.batch_size = 32
  config.eval_questions = 64
  return config
