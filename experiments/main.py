"""Trains one config: the entry point of every single run.

  python -m experiments.main --config=configs/bernoulli.py:dapo \
      --workdir=runs/dapo --config.num_steps=300

Started again with the same command, a run goes on from where it was left.
"""

from absl import flags
from ml_collections.config_flags import config_flags

from experiments import cli

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "The config file, and its argument after a colon."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder.")


def main(argv):
  del argv
  path = cli.require(_WORKDIR)
  from experiments import train, workdir  # After the flags: jax takes a second.

  train.run(_CONFIG.value, path)
  last = workdir.read_metrics(path)[-1]
  print(f"{path}: {', '.join(f'{k} {v:.4g}' for k, v in last.items())}")


if __name__ == "__main__":
  cli.run(main)
