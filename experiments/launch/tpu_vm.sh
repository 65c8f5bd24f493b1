#!/usr/bin/env bash
# A TPU slice of Cloud TPU VMs, from the request to the end of the run.
#
#   tpu_vm.sh create [--spot ...]   asks for the slice; the rest is gcloud's
#   tpu_vm.sh status                ACTIVE once it is there
#   tpu_vm.sh install               mounts the share, installs, on all hosts
#   tpu_vm.sh start [--config.x=y]  starts the run on all hosts
#   tpu_vm.sh logs                  follows host 0
#   tpu_vm.sh stop                  saves and ends; `start` goes on
#   tpu_vm.sh delete                gives the slice back
#
# with --dry_run anywhere to see the commands. common.sh explains the rest. The
# project is gcloud's, or CLOUDSDK_CORE_PROJECT.
#
#   export NAME=rl ZONE=us-east5-a ACCELERATOR=v5p-32 RUNTIME=v2-alpha-tpuv5
#   export SHARE=10.0.0.2:/runs REPOSITORY=https://... REVISION=main
#   export CONFIG=configs/jsonl.py:dapo WORKDIR=/mnt/share/own
#
# A preempted slice is gone: delete, create, install and start again; the run
# goes on from its last save.
#
# Not run by us: checked against the documentation of Google Cloud (TPU software
# versions, queued resources, JAX on TPU slices; stored copies, 2025 and 2026),
# the --help of gcloud 528.0.0, and systemd's list of transient settings. Google
# now calls this API finished (fixes only, nothing from TPU7x on) and recommends
# GKE: gke.sh.

# shellcheck source=experiments/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MOUNT=${MOUNT:-/mnt/share}
CODE=/opt/groupstd

step=${1-}
shift || true

need NAME 'what the slice and its request are called.'
need ZONE 'the zone of the slice, as us-east5-a.'

# everywhere WORKERS COMMAND...: as root on those hosts. Users that ssh makes
# may have another number on each host, and a share knows numbers only.
everywhere() {
  run gcloud compute tpus tpu-vm ssh "$NAME" "--zone=$ZONE" "--worker=$1" \
    "--command=$(quoted sudo -H "${@:2}")"
}

case $step in
create)
  need ACCELERATOR 'the type of the slice, as v5p-32.'
  need RUNTIME "its software: v2-alpha-tpuv6e, v2-alpha-tpuv5 (v5p),\
 v2-alpha-tpuv5-lite (v5e) or tpu-ubuntu2204-base (v4)."
  run gcloud compute tpus queued-resources create "$NAME" "--zone=$ZONE" \
    "--node-id=$NAME" "--accelerator-type=$ACCELERATOR" \
    "--runtime-version=$RUNTIME" "$@"
  ;;

status)
  run gcloud compute tpus queued-resources describe "$NAME" "--zone=$ZONE" \
    '--format=value(state.state)'
  ;;

install)
  need SHARE "the NFS export to mount at $MOUNT, as 10.0.0.2:/runs."
  need REPOSITORY 'the git repository that every host fetches.'
  need REVISION 'the branch, tag or full commit of it that is run.'
  # The system's Python may be older than 3.11, so uv brings one.
  # shellcheck disable=SC2016
  everywhere all bash -euc '
share=$1 mount=$2 code=$3 repository=$4 revision=$5
if ! mountpoint -q "$mount"; then
  apt-get -o DPkg::Lock::Timeout=600 -qq update
  apt-get -o DPkg::Lock::Timeout=600 -qq install -y nfs-common git
  mkdir -p "$mount"
  mount -t nfs "$share" "$mount"
fi
git init -q "$code"
cd "$code"
git fetch -q --depth=1 "$repository" "$revision"
git checkout -q --detach FETCH_HEAD
curl -LsSf https://astral.sh/uv/install.sh |
  env UV_UNMANAGED_INSTALL="$code/.uv" sh
.uv/uv venv --allow-existing --python=3.12 .venv
.uv/uv pip install --python=.venv -e ".[tpu,lm,logs]"
' install "$SHARE" "$MOUNT" "$CODE" "$REPOSITORY" "$REVISION"
  ;;

start)
  program "$CODE/.venv/bin/python" "$@"
  [[ $WORKDIR == "$MOUNT"/* ]] ||
    fail "WORKDIR must be below $MOUNT, where the share is, got $WORKDIR."
  dollar='$'
  # A service outlives the ssh connection, gets SIGTERM when the machine goes
  # down, and starts again by itself: when one host fails, the others end too,
  # and all meet again. Only the main process gets the SIGTERM (KillMode), and
  # systemd reads $$ as $.
  everywhere all systemd-run --unit=groupstd --uid=root --collect \
    "--working-directory=$CODE" \
    --property=Restart=on-failure '--property=RestartPreventExitStatus=2 3' \
    --property=RestartSec=30 \
    --property=StartLimitIntervalSec=3600 --property=StartLimitBurst=10 \
    --property=KillMode=mixed --property=TimeoutStopSec=600 \
    -- "${program[@]//$dollar/$dollar$dollar}"
  ;;

logs)
  everywhere 0 journalctl --unit=groupstd --lines=100 --follow
  ;;

stop)
  everywhere all systemctl stop groupstd
  ;;

delete)
  run gcloud compute tpus queued-resources delete "$NAME" "--zone=$ZONE" --force
  ;;

*)
  fail "the step must be one of create, status, install, start, logs, stop,\
 delete, got '$step'."
  ;;
esac
