"""Mathematics on a TPU slice: decoders of the shapes that people train.

Hardware: a slice of TPUs of one of the topologies below; the argument is the
model, and after an @ the topology: qwen3_0_6b@v5e:16x16. Without one it is the
smallest of them that the model fits.

Expected time: not measured, as none was rented. What a step takes at the least,
and whether it fits, is found out without one:

  python -m experiments.aot --config=configs/pod.py:qwen3_8b \
      --topology=v5p:4x4x4

The run itself, on every host of the slice:

  python -m experiments.main --config=configs/pod.py:qwen3_8b \
      --workdir=gs/runs/qwen3 --cluster=auto \
      --config.questions.jsonl.path=train.jsonl \
      --config.held_out.jsonl.path=test.jsonl \
      --config.tokenizer.from_file.path=tokenizer.json --config.init=START

Questions are JSON lines of a prompt and a number, and START is a run's folder
with the parameters to start from: a decoder of this size that has read nothing
answers nothing right.

Sizes follow DAPO's run (arXiv:2503.14476), 512 prompts of 16 answers, where the
slice has the memory for as many caches at once; answers are of 1,024 or 2,048
tokens, as a grade school's or a competition's easier questions need. Each
device takes the gradient of one group at a time. Computation is in bfloat16;
parameters, moments and gradients are float32.
"""

from typing import NamedTuple

import ml_collections

from configs import language

_SHARED = {
  "num_kv_heads": 8,
  "head_dim": 128,
  "dtype": "bfloat16",
  "remat": True,
  "chunk": 64,
}
_QWEN3 = {
  **_SHARED,
  # The table's rows; the tokenizer has fewer tokens.
  "vocab_size": 151_936,
  "rope_theta": 1e6,
  "qk_norm": True,
}
_MODELS = {
  # arXiv:2505.09388, table 1.
  "qwen3_0_6b": {
    **_QWEN3,
    "width": 1024,
    "num_layers": 28,
    "num_heads": 16,
    "hidden": 3072,
  },
  "qwen3_8b": {
    **_QWEN3,
    "width": 4096,
    "num_layers": 36,
    "num_heads": 32,
    "hidden": 12_288,
    "tied": False,
  },
  # arXiv:2407.21783, table 3; its stretched positions are for longer texts.
  "llama3_8b": {
    **_SHARED,
    "vocab_size": 128_256,
    "rope_theta": 5e5,
    "norm_eps": 1e-5,
    "width": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "hidden": 14_336,
    "tied": False,
  },
}
# What ends an answer, and what pads a prompt.
_TOKENS = {
  "qwen3": (("<|im_end|>", "<|endoftext|>"), "<|endoftext|>"),
  "llama3": (("<|eot_id|>", "<|end_of_text|>"), "<|finetune_right_pad_id|>"),
}


class _Slice(NamedTuple):
  """A mesh and a batch, which the chips' memory goes with.

  `tensor` is as small as lets a group's activations fit a device, and to sample
  as lets the parameters; `fsdp` is what is left.
  """

  fsdp: int
  tensor: int
  sampling_tensor: int
  num_groups: int
  group_size: int
  answer_length: int


_SMALL = {
  "v5e:4x4": _Slice(16, 1, 1, 64, 8, 1024),
  "v6e:8x8": _Slice(64, 1, 1, 256, 16, 1024),
  "v5p:4x4x4": _Slice(64, 1, 1, 512, 16, 2048),
  "v5e:16x16": _Slice(256, 1, 1, 256, 16, 1024),
}
_LARGE = {
  "v5p:4x4x4": _Slice(16, 4, 4, 512, 16, 2048),
  "v6e:8x8": _Slice(8, 8, 8, 256, 16, 1024),
  "v5e:16x16": _Slice(32, 8, 8, 256, 16, 1024),
}
_SLICES = {"qwen3_0_6b": _SMALL, "qwen3_8b": _LARGE, "llama3_8b": _LARGE}


def get_config(name: str) -> ml_collections.ConfigDict:
  model, _, topology = name.partition("@")
  for choice, choices in (model, _SLICES), (topology, _SLICES.get(model, {})):
    if choice and choice not in choices:
      raise ValueError(
        f"the argument must be a model, or model@topology, of"
        f" {', '.join(choices)}, got {name!r}"
      )
  slices = _SLICES[model]
  part = slices[topology] if topology else next(iter(slices.values()))
  config = language.base("dapo", length=part.answer_length)
  config.model = _MODELS[model]
  stop, pad = _TOKENS[model.partition("_")[0]]
  config.tokenizer.from_file = {
    "path": "tokenizer.json",
    "stop": stop,
    "pad": pad,
  }
  config.questions.jsonl = {
    "path": "train.jsonl",
    "prompt": "prompt",
    "answer": "answer",
    "template": "{prompt}",
  }
  language.hold_out(config, path="test.jsonl")
  # A chain of thought ends in the number that it found.
  config.verifiers.correct = {"number": {"which": "last"}}
  config.verifier_workers = 8
  config.prompt_width = 512
  config.num_groups = part.num_groups
  config.group_size = part.group_size
  config.micro_batches = part.num_groups // part.fsdp
  config.mesh = {
    "data": 1,
    "fsdp": part.fsdp,
    "tensor": part.tensor,
    "sampling_tensor": part.sampling_tensor,
  }
  config.num_steps = 500
  config.optimizer = {"adamw": {"b2": 0.95, "weight_decay": 0.1}}
  config.learning_rate = 1e-6
  config.checkpoint_every = 20
  return config
