#!/usr/bin/env bash
# A TPU slice of Google Kubernetes Engine, as a JobSet: one pod a host.
#
#   export NAME=rl IMAGE=us-docker.pkg.dev/... CLAIM=runs
#   export ACCELERATOR=tpu-v5p-slice TOPOLOGY=2x2x4
#   export CONFIG=configs/jsonl.py:dapo WORKDIR=/mnt/share/own
#   experiments/launch/gke.sh [--dry_run] [--config.x=y ...]
#
# What --dry_run prints can be given to kubectl diff -f -.
# common.sh explains the rest. Once:
#
#   - the cluster has a node pool of that accelerator and topology, or is
#     Autopilot, and JobSet (kubectl apply --server-side -f the manifests.yaml
#     of a release of kubernetes-sigs/jobset);
#   - IMAGE is built from the Dockerfile here;
#   - CLAIM is a PersistentVolumeClaim that is ReadWriteMany, as one of
#     Filestore: it is mounted at MOUNT, and WORKDIR lies below it.
#
#   kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=$NAME    what it says
#   kubectl delete jobset $NAME    saves and ends; gke.sh again goes on
#
# Not run by us: checked against the API's types (jobset.x-k8s.io/v1alpha2,
# kubernetes-sigs/jobset at commit 0336a8fd), that repository's examples for TPU
# slices and failure policies, Kubernetes' documentation of pod failure policies
# (stable since 1.31), and GKE's of TPUs (stored copies, 2025 and 2026).

# shellcheck source=experiments/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MOUNT=${MOUNT:-/mnt/share}
# Of a multi-host slice: 4 on v4, v5e, v5p, v6e and TPU7x.
CHIPS=${CHIPS:-4}

need NAME 'what the JobSet is called.'
need IMAGE 'the container image, built from experiments/launch/Dockerfile.'
need CLAIM 'the PersistentVolumeClaim, ReadWriteMany, that WORKDIR lies on.'
need ACCELERATOR "the node label cloud.google.com/gke-tpu-accelerator, as\
 tpu-v5p-slice."
need TOPOLOGY "the node label cloud.google.com/gke-tpu-topology, as 2x2x4."
program python "$@"
[[ $WORKDIR == "$MOUNT"/* ]] ||
  fail "WORKDIR must be below $MOUNT, where the claim is, got $WORKDIR."
[[ $TOPOLOGY =~ ^[1-9][0-9]*(x[1-9][0-9]*)+$ ]] ||
  fail "TOPOLOGY must be sides with x between them, as 2x2x4, got $TOPOLOGY."
[[ $CHIPS =~ ^[1-9][0-9]*$ ]] ||
  fail "CHIPS must be how many chips a host has, got $CHIPS."
chips=$((${TOPOLOGY//x/*}))
((chips % CHIPS == 0)) ||
  fail "CHIPS=$CHIPS, of a host, must divide the $chips chips of $TOPOLOGY."
hosts=$((chips / CHIPS))

# string WORD: as YAML writes it.
string() {
  local quote="'"
  printf "'%s'" "${1//$quote/$quote$quote}"
}

# Kubernetes replaces $(NAME) in a command, and reads $$ as $.
dollar='$'
command=
for word in "${program[@]//$dollar/$dollar$dollar}"; do
  command+="
                  - $(string "$word")"
done

manifest() {
  cat <<END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $(string "$NAME")
  annotations:
    # The job has a node pool, that is a slice, to itself.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  # A headless service of this name: through it pods find each other, and GKE
  # sets TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, which --cluster=auto reads.
  network:
    enableDNSHostnames: true
    subdomain: $(string "$NAME")
  failurePolicy:
    # One host lost is all hosts again, with the same command: 75, an eviction
    # and a crash are BackoffLimitExceeded, for which no rule stands here.
    maxRestarts: 100
    rules:
      - action: FailJobSet
        onJobFailureReasons:
          - PodFailurePolicy
  replicatedJobs:
    - name: slice
      replicas: 1
      template:
        spec:
          # $chips chips, $CHIPS a host.
          parallelism: $hosts
          completions: $hosts
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules:
              # A mistake in the command, or a run that stopped itself.
              - action: FailJob
                onExitCodes:
                  containerName: main
                  operator: In
                  values: [2, 3]
          template:
            spec:
              restartPolicy: Never
              # From SIGTERM: to the end of a step, and a save.
              terminationGracePeriodSeconds: 600
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $(string "$ACCELERATOR")
                cloud.google.com/gke-tpu-topology: $(string "$TOPOLOGY")
              containers:
                - name: main
                  image: $(string "$IMAGE")
                  command:$command
                  ports:
                    - containerPort: 8471 # The chips' own.
                    - containerPort: 8482 # jax.distributed's.
                  securityContext:
                    privileged: true
                  resources:
                    limits:
                      google.com/tpu: $CHIPS
                  volumeMounts:
                    - name: share
                      mountPath: $(string "$MOUNT")
              volumes:
                - name: share
                  persistentVolumeClaim:
                    claimName: $(string "$CLAIM")
END
}

if [[ $dry_run ]]; then
  echo '# kubectl apply -f -, of:'
  manifest
else
  manifest | kubectl apply -f -
fi
