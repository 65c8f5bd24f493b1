# shellcheck shell=bash disable=SC2034
# What the launchers share: tpu_vm.sh, gke.sh and slurm.sh read it.
#
# Each starts the one entry point, on every host alike,
#
#   python -m experiments.main --cluster=auto --config=$CONFIG \
#       --workdir=$WORKDIR ...
#
# takes its variables from the environment and hands on the other arguments:
#
#   CONFIG=configs/jsonl.py:dapo WORKDIR=/mnt/share/runs/own NODES=4 ... \
#       experiments/launch/slurm.sh --dry_run --config.num_steps=300
#
# With --dry_run it prints what it would do, for a shell to read, and touches
# nothing. A variable that is missing is one line, and exit code 2.
#
# WORKDIR lies on a filesystem that every host has at the same path: all write
# their parts of a checkpoint there, process 0 everything else. That is NFS
# (Filestore), Lustre or another POSIX filesystem. A bucket through Cloud
# Storage FUSE has neither its locks nor, without a hierarchical namespace, its
# atomic renames of folders: nothing then keeps two runs out of one folder, and
# we have not tried it.
#
# What is compiled is kept in .jax_cache beside WORKDIR, so on the same
# filesystem: process 0 writes there, all read, and a restart compiles nothing.
# JAX_COMPILATION_CACHE_DIR names another place, which all hosts must share too.
#
# Exit codes of a run: 0 done, 2 a mistake in the command, 3 it stopped itself,
# 75 a SIGTERM came, it saved, and the same command goes on; others are crashes.
# So 2 and 3 end a job, and everything else starts it again.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

dry_run=
arguments=()
for argument; do
  if [[ $argument == --dry_run ]]; then
    dry_run=yes
  else
    arguments+=("$argument")
  fi
done
set -- ${arguments[@]+"${arguments[@]}"}

# fail MESSAGE: the command was a mistake.
fail() {
  echo "error: $1" >&2
  exit 2
}

# need NAME WHAT: the variable NAME must be set; WHAT says what it is for.
need() {
  [[ -n ${!1-} ]] || fail "$1 is not set: $2"
}

# quoted WORD...: as a shell reads it back, legible.
quoted() {
  local word separator='' quote="'" escaped="'\"'\"'"
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] ||
      word=$quote${word//$quote/$escaped}$quote
    printf '%s%s' "$separator" "$word"
    separator=' '
  done
}

# run COMMAND...: runs it, or in a dry run prints it.
run() {
  if [[ $dry_run ]]; then
    quoted "$@"
    echo
  else
    "$@"
  fi
}

# program PYTHON [FLAG...]: makes `program`, the command of every host.
program() {
  need CONFIG 'the config file and its argument, as configs/jsonl.py:dapo.'
  need WORKDIR "the run's folder, on a filesystem that all hosts share."
  [[ $WORKDIR == /* ]] ||
    fail "WORKDIR must begin with /, got $WORKDIR: hosts have no common folder."
  program=(
    "$1" -m experiments.main --cluster=auto
    "--config=$CONFIG" "--workdir=$WORKDIR" "${@:2}"
  )
}
