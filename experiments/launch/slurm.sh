#!/usr/bin/env bash
# A SLURM job on NVIDIA GPUs, one process a GPU.
#
#   export NODES=4 GPUS=8 CPUS=12 TIME=24:00:00
#   export CONFIG=configs/jsonl.py:dapo WORKDIR=/lustre/me/runs/own
#   experiments/launch/slurm.sh [--dry_run] [--config.x=y ...]
#
# common.sh explains the rest; slurm.sbatch is what runs. Partition, account and
# the like are sbatch's own variables: SBATCH_PARTITION, SBATCH_ACCOUNT. The
# checkout lies on the shared filesystem, with its .venv, once made by
#
#   python3 -m venv .venv && .venv/bin/pip install -e '.[cuda,lm,logs]'
#
# (PYTHON names another interpreter.)
#
#   scancel --signal=TERM $JOB    saves, and the job goes back into the queue
#   scancel $JOB                  ends it; slurm.sh again goes on
#
# Not run by us: checked against SLURM's manuals of sbatch, srun and scontrol
# (stored copies, to 2026) and jax 0.10.2's detection of SLURM. Tried was this
# with stand-ins for sbatch, srun and scontrol: two processes on one machine's
# CPUs found each other so, saved on SIGTERM, were requeued and went on.

# shellcheck source=experiments/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need NODES 'how many nodes.'
need GPUS 'how many GPUs, and so processes, each node has.'
need CPUS 'how many cores each process has: XLA and the verifiers use them.'
need TIME 'the limit of one stay in the queue, as 24:00:00.'
program "${PYTHON:-$ROOT/.venv/bin/python}" "$@"

# jax gives the process with SLURM_LOCALID i the GPU i, so each must see all of
# its node: --gpus-per-task would hide the others, and numbers would not match.
run sbatch --job-name=groupstd "--chdir=$ROOT" \
  "--nodes=$NODES" "--ntasks-per-node=$GPUS" "--gpus-per-node=$GPUS" \
  "--cpus-per-task=$CPUS" "--time=$TIME" \
  "$ROOT/experiments/launch/slurm.sbatch" "${program[@]}"
