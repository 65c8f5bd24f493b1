"""Addition learnt from nothing: a small decoder on questions such as 47+85=.

Hardware: two CPU cores. Time: 3 to 8 minutes, by method and what else runs.
Expected: 33 to 35 % of held-out sums right after the warm start; after 400
steps 61 to 64 % (grpo), 61 to 62 % (dr_grpo), 66 % (dapo, with 1.6 times the
rollouts).

  python -m experiments.main --config=configs/arithmetic.py --workdir=runs/a

The argument is the method, of configs/language.py.
"""

import ml_collections

from configs import language


def get_config(method: str = "grpo") -> ml_collections.ConfigDict:
  config = language.base(method, length=6)
  # Numbers of how many digits, how many of them, and which operations.
  config.questions.arithmetic = {
    "digits": (1, 2),
    "terms": 2,
    "operations": "+",
    "split": "train",
  }
  language.hold_out(config, split="test")
  config.tokenizer.characters = {"alphabet": "0123456789+-*="}
  config.verifiers.correct = {"exact": {}}
  config.prompt_width = 6
  config.model = {"width": 128, "num_layers": 3, "num_heads": 4, "hidden": 512}
  config.warmup.num_steps = 100
  config.num_steps = 400
  config.learning_rate = 1.5e-4
  return config
