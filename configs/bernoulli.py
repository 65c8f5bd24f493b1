"""The scalar policy on Big-Math's difficulty: one logit a prompt, one answer.

Hardware: one CPU core. Time: 2 s an arm, compilation included.
Expected: the initially hardest quarter ends at p = 0.99 (grpo), 0.89 (dr_grpo)
and 0.998 (dapo), the last at 3.5 times the rollouts (arXiv:2607.00152).

  python -m experiments.main --config=configs/bernoulli.py:dapo --workdir=runs/a

The argument is the method; `--config.sigma.divide.power=0.7` and the like
override its parts.
"""

import ml_collections

# The σ part of each method, and what else sets it apart.
_METHODS = {
  "grpo": {"sigma": {"divide": {"power": 1.0}}},
  "dr_grpo": {"sigma": {"identity": {}}},
  # Redraws the same prompt, as the controlled run of the paper does.
  "dapo": {"sigma": {"mask": {}, "divide": {"power": 1.0}}, "max_draws": 4},
  # Replaces silent groups by other prompts', as DAPO was published.
  "dapo_replace": {
    "sigma": {"mask": {}, "divide": {"power": 1.0}},
    "max_rounds": 4,
  },
  "half": {"sigma": {"divide": {"power": 0.5}}},
  "rloo": {"sigma": {"rloo": {}}},
  "max_rl": {"sigma": {"max_rl": {}}},
  # Ascends the chance that one of four answers is right.
  "pass_at_4": {"sigma": {"pass_at": {"m": 4}}},
  # Undoes what a finite group costs GRPO: the weights whose objective weight
  # is nearest to 1/√(p(1 − p)), GRPO's at large G.
  "inverse": {"wanted_power": 0.5},
  # GRPO with as many rollouts in all, each prompt's group of a planned size.
  "planned": {"sigma": {"divide": {"power": 1.0}}, "plan": "update"},
}


def get_config(method: str = "grpo") -> ml_collections.ConfigDict:
  if method not in _METHODS:
    raise ValueError(
      f"the method must be one of {', '.join(_METHODS)}, got {method!r}"
    )
  config = ml_collections.ConfigDict()

  # What is built: experiments/scalar.py.
  config.builder = "scalar"

  # --- the problem ---
  # How many prompts, drawn from Big-Math's 65 solve rates: 215608 is as many
  # as it has.
  config.num_prompts = 6000
  # Only problems solved at times (0 < p < 1): the others teach nothing.
  config.interior = True
  # Success probabilities at the start are held within these.
  config.clip = (0.02, 0.98)

  # --- the method ---
  # A product of σ-operations: each name is a function of groupstd.sigma.
  config.sigma = {}
  # Where not 0, sigma is instead the table of weights whose objective weight
  # comes nearest to (p(1 − p))^(−this) on `clip`.
  config.wanted_power = 0.0
  # Whether they may not be negative: less near, and far less noisy.
  config.wanted_nonnegative = False
  # Per-token loss: a function of groupstd.losses, as is the aggregate. Each
  # prompt moves by its own update, whatever the number of prompts.
  config.surrogate = {"reinforce": {}}
  config.aggregate = {"group_sum": {"denominator": 1.0}}
  # Draws that a prompt may have in a step until its group is not silent.
  config.max_draws = 1
  # Rounds of other prompts that may take the place of silent groups.
  config.max_rounds = 1

  # --- the run ---
  # Rollouts of a prompt in a group, G.
  config.group_size = 8
  # What a plan of each prompt's own G, for as many rollouts in all, makes the
  # most of: "update" (the expected update) or "mixed" (groups that are not
  # silent). Empty for the same G for all.
  config.plan = ""
  # Steps between plans, and the largest group of one.
  config.plan_every = 10
  config.max_group_size = 64
  # Prompts in a step: all of them, or as many as leave every round others.
  config.num_groups = config.get_ref("num_prompts") // (
    _METHODS[method].get("max_rounds", 1)
  )
  config.num_steps = 150
  # A function of optax and its arguments.
  config.optimizer = {"sgd": {"learning_rate": 0.5}}
  # Of the population, of which prompts a step asks, and of every draw.
  config.seed = 0
  # Whether a group is its two distinct answers and how often each occurred
  # (the same update, several times faster), or all its answers.
  config.multiset = True

  # --- the machine ---
  # Devices the groups are cut over.
  config.num_devices = 1
  # Steps between checkpoints, and between measurements of the whole policy.
  config.checkpoint_every = 50
  config.observe_every = 1
  # The newest checkpoints that stay; and the one with the largest of a metric.
  config.keep_checkpoints = 2
  config.keep_best = ""
  # Trackers that get the metrics too: "tensorboard", "wandb", "trackio".
  config.report_to = ()

  for field, value in _METHODS[method].items():
    config[field] = value
  return config
