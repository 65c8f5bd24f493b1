"""Trains one config: the entry point of every single run.

  python -m experiments.main --config=configs/bernoulli.py:dapo \
      --workdir=runs/dapo --config.num_steps=300

Started again with the same command, a run goes on from where it was left.

On a TPU pod, under SLURM or on GKE every host runs the command, with
--cluster=auto. Anywhere else each of its processes is told of the others:

  --coordinator=10.0.0.1:8476 --num_processes=4 --process_id=2
"""

from absl import flags
from ml_collections.config_flags import config_flags

from experiments import cli

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "The config file, and its argument after a colon."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder.")
_CLUSTER = flags.DEFINE_enum(
  "cluster",
  "alone",
  ["alone", "auto"],
  "Whether this is one process of several, which jax is to find.",
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port of the first of several processes."
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "How many processes there are.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "Which of them this is.", lower_bound=0
)


def main(argv):
  del argv
  path = cli.require(_WORKDIR)
  options = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
  with cli.joined(_CLUSTER.value, *options):
    # After the flags: jax takes a second.
    from experiments import train, workdir
    from groupstd import hosts

    train.run(_CONFIG.value, path)
    if hosts.index() == 0:
      last = workdir.read_metrics(path)[-1]
      print(f"{path}: {', '.join(f'{k} {v:.4g}' for k, v in last.items())}")


if __name__ == "__main__":
  cli.run(main)
