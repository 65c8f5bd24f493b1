"""A task of the reasoning-gym package (pip install -e '.[lm]'), from nothing.

Hardware: two CPU cores.

  python -m experiments.main --config=configs/reasoning_gym.py:dapo \
      --config.questions.reasoning_gym.name=gcd --workdir=runs/gym

The argument is the method, of configs/language.py. The dataset's own options
are further entries of `questions.reasoning_gym`, here in the file. A reward is
1 where its scorer says 1, and 0 elsewhere.
"""

import ml_collections

from configs import language


def get_config(method: str = "grpo") -> ml_collections.ConfigDict:
  config = language.base(method, length=16)
  config.questions.reasoning_gym = {
    "name": "chain_sum",
    "size": 5_000,
    "seed": 0,
  }
  # Question i of a seed is made from seed + i: held-out ones start far away.
  language.hold_out(config, seed=1_000_000, size=1_000)
  config.verifiers.correct = {"reasoning_gym": {"graded": False}}
  config.tokenizer.characters = {"alphabet": language.PRINTABLE}
  config.prompt_width = 128
  config.model = {"width": 128, "num_layers": 3, "num_heads": 4, "hidden": 512}
  config.warmup.num_steps = 300
  return config
