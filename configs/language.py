"""What every run of a language model has in common, and the methods.

A config of its own (arithmetic.py, jsonl.py, reasoning_gym.py) says what is
asked and how large the model is; its argument is the method.
"""

from typing import Any

import ml_collections

# Every character of the keyboard, for tasks in words.
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))

# What sets each method apart, as published, but that a batch makes one update
# where `mini_batches` does not say more: then no ratio leaves 1, no clip binds.
_GRPO = {"divide": {"power": 1.0}}
_DAPO = {"mask": {}, "divide": {"power": 1.0}}


def _methods(length: Any) -> dict[str, dict[str, Any]]:
  """By name; `length` is a reference, so that what depends on it follows."""
  summed = {"aggregate": {"sequence_sum": {"denominator": length}}}
  reinforce = {"surrogate": {"reinforce": {}}, **summed}
  dapo = {
    "sigma": _DAPO,
    "surrogate": {"clipped": {"low": 0.2, "high": 0.28}},
    "aggregate": {"token_mean": {}},
    # Its soft overlong punishment, in tokens.
    "length_buffer": length // 5,
    "weights": {"length": 1.0},
  }
  return {
    # arXiv:2402.03300: σ divides, KL to the reference, mean of sequences.
    "grpo": {
      "sigma": _GRPO,
      "aggregate": {"sequence_mean": {}},
      "kl_coef": 0.04,
    },
    # arXiv:2503.20783: neither σ nor lengths divide.
    "dr_grpo": {"sigma": {"identity": {}}, **summed},
    # arXiv:2503.14476: silent groups are replaced by other prompts'.
    "dapo": {**dapo, "max_rounds": 3},
    # The same, but silent groups are redrawn from the same prompt.
    "dapo_redraw": {**dapo, "max_draws": 4},
    # arXiv:2402.14740: each is held against the mean of the others.
    "rloo": {"sigma": {"rloo": {}}, **reinforce},
    # arXiv:2602.02710: ascends log p as far as G allows.
    "max_rl": {"sigma": {"max_rl": {}}, **reinforce},
    # Ascends the chance that one of four answers is right (arXiv:2505.15201).
    "pass_at_4": {"sigma": {"pass_at": {"m": 4}}, **reinforce},
    # arXiv:2507.18071: the ratio is a sequence's.
    "gspo": {
      "sigma": _GRPO,
      "surrogate": {"sequence_clipped": {"low": 3e-4, "high": 4e-4}},
      "aggregate": {"sequence_mean": {}},
      "mini_batches": 4,
    },
    # arXiv:2506.13585: the ratio's clip weighs, and stops no gradient.
    "cispo": {
      "sigma": _GRPO,
      "surrogate": {"cispo": {"high": 0.28}},
      "aggregate": {"token_mean": {}},
      "mini_batches": 4,
    },
    # TRL's scale_rewards="batch": σ is of all rewards of the batch.
    "batch_scaled": {
      "rule": {"batch_scaled": {}},
      "aggregate": {"token_mean": {}},
    },
    # Between Dr. GRPO and GRPO.
    "half": {
      "sigma": {"divide": {"power": 0.5}},
      "aggregate": {"token_mean": {}},
    },
  }


def base(method: str, length: int) -> ml_collections.ConfigDict:
  """A config without its questions.

  Args:
    method: what is trained with.
    length: how many tokens an answer has at most.
  """
  config = ml_collections.ConfigDict()
  # Of an answer, at most, its stop included.
  config.answer_length = length
  methods = _methods(config.get_ref("answer_length"))
  if method not in methods:
    raise ValueError(
      f"the method must be one of {', '.join(methods)}, got {method!r}"
    )
  # What is built: experiments/language.py.
  config.builder = "language"

  # --- the task ---
  # Trained on and evaluated on: each a function of groupstd.questions.
  config.questions = {}
  config.held_out = {}
  # A function of groupstd.tokenizers.
  config.tokenizer = {}
  # By name, what judges an answer: each a function of groupstd.answers.
  config.verifiers = {"correct": {"number": {}}}
  # The verifier whose word decides which groups are silent.
  config.score = "correct"
  # Questions whose own answers it must call right before a run begins; 0 where
  # a score of 1 is not what means right.
  config.checked_golds = 200
  # What each verifier, and the length, weighs in the reward.
  config.weights = {"correct": 1.0}
  # Over how many tokens before the longest answer DAPO's soft penalty grows to
  # 1; none where 0.
  config.length_buffer = 0
  # Tokens of a prompt, at most.
  config.prompt_width = 64
  # Processes that verify, seconds that one answer may take, and the share of a
  # step's answers whose verifier may fail.
  config.verifier_workers = 1
  config.verifier_seconds = 5.0
  config.max_failures = 0.2

  # --- the model ---
  # Arguments of groupstd.transformer.Config.
  config.model = {}
  # A run's folder whose parameters this one starts from; if there is none, it
  # starts with a warm start.
  config.init = ""
  # Supervised steps on the answers themselves; none with num_steps 0.
  config.warmup = {
    "num_steps": 0,
    "batch_size": 256,
    "learning_rate": 1e-3,
    "warmup_updates": 20,
    "decay": "constant",
    "clip_norm": 1.0,
    "optimizer": {"adamw": {"b2": 0.99, "weight_decay": 0.01}},
    "checkpoint_every": 100,
    "observe_every": 50,
  }

  # --- the method ---
  # A product of σ-operations: each name is a function of groupstd.sigma.
  config.sigma = {}
  # Or a rule that is none: a function of groupstd.rules.
  config.rule = {}
  # Per-token loss, and how tokens add up: functions of groupstd.losses.
  config.surrogate = {"clipped": {"low": 0.2, "high": 0.2}}
  config.aggregate = {}
  # KL to the policy before the first step, and its estimator.
  config.kl_coef = 0.0
  config.kl = "k3"
  config.entropy_coef = 0.0
  # Whether silent groups that are kept are under KL and entropy.
  config.regularize_silent = True
  # For rollouts that another program drew: a function of groupstd.losses.
  config.correction = {}
  # Draws that a prompt may have in a step until its group is not silent.
  config.max_draws = 1
  # Rounds of other prompts that may take the place of silent groups.
  config.max_rounds = 1
  # Whether answers that are cut off train no token.
  config.mask_truncated = False
  # Of sampling and of log-probs alike.
  config.temperature = 1.0

  # --- the run ---
  # Prompts in a step, and rollouts of each.
  config.num_groups = 64
  config.group_size = 8
  config.num_steps = 200
  # Times each batch is gone through, updates each time, and the parts in which
  # an update's gradient is taken: silent groups cost nothing but for those that
  # fill a part, and parts that fit a CPU's cache are faster than all at once.
  # With 0 a short trial at the start chooses how many (experiments/chunks.py).
  config.epochs = 1
  config.mini_batches = 1
  config.micro_batches = 8
  # A function of optax, its rate, and the norm that gradients are clipped to.
  config.optimizer = {"adamw": {"b2": 0.99, "weight_decay": 0.0}}
  config.learning_rate = 3e-4
  config.warmup_updates = 10
  config.decay = "constant"
  config.clip_norm = 1.0
  # Of parameters, order of questions and every draw.
  config.seed = 0
  # Steps in a row that may train on nothing, since the process began.
  config.max_skipped = 20

  # --- the machine ---
  # Devices: copies of the parameters, over how many each is cut, and over how
  # many each product within a layer is; one of them may be -1, what is left.
  # Groups are cut over data·fsdp. Answers are drawn by devices that have whole
  # layers, or with sampling_tensor above 0 cut over as many.
  config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "sampling_tensor": 0}
  # Seconds that one of several processes may take for its share of verifying,
  # before the others give it up.
  config.host_seconds = 600.0
  config.checkpoint_every = 50
  # The newest that stay; and the one with the largest of a metric such as
  # "accuracy", of the steps that have it: observe_every should divide
  # checkpoint_every.
  config.keep_checkpoints = 2
  config.keep_best = ""
  # Steps between evaluations, of this many held-out questions.
  config.observe_every = 20
  config.eval_questions = 512
  # Share of the groups whose texts go to rollouts.jsonl.
  config.rollouts_share = 0.02
  # Trackers that get the metrics too: "tensorboard", "wandb", "trackio".
  config.report_to = ()

  for field, value in methods[method].items():
    if field == "weights":
      config.weights.update(value)
    else:
      config[field] = value
  return config


def hold_out(config: ml_collections.ConfigDict, **differing: Any) -> None:
  """Evaluates on the same source as is trained on, but for these arguments.

  What a command says of `config.questions` then holds for both.
  """
  source: Any
  for name, source in config.questions.items():
    same = {x: source.get_ref(x) for x in source if x not in differing}
    config.held_out[name] = same | differing
