#!/bin/bash
# Train on a TPU slice of several hosts: PROJECT=… ZONE=… docs/launch/tpu-pod.sh
#
# Run it on your own machine, with gcloud, in a checkout of zoo. It makes a slice, copies the
# checkout to every host, and starts the same command on all of them. JAX finds the other hosts by
# itself. FOLDER is on a file system that all hosts mount, such as Filestore by NFS; a bucket
# behind gcsfuse has neither the locks nor the renames that a run folder needs.
set -euo pipefail

PROJECT=${PROJECT:?the project to bill}
ZONE=${ZONE:?a zone that has the slice, such as us-west4-a}
NAME=${NAME:-zoo}
TYPE=${TYPE:-v5litepod-16}                 # 16 chips of v5e on four hosts
VERSION=${VERSION:-v2-alpha-tpuv5-lite}
FOLDER=${FOLDER:-/mnt/shared}

tpu() {
    gcloud compute tpus tpu-vm "$1" "$NAME" --project="$PROJECT" --zone="$ZONE" "${@:2}"
}

on_all_hosts() {
    tpu ssh --worker=all --command="$1"
}

tpu describe > /dev/null 2>&1 || tpu create --accelerator-type="$TYPE" --version="$VERSION"

# Without the local environment and runs; `git archive` leaves both behind.
git archive --format=tar.gz --output=/tmp/zoo.tar.gz HEAD
gcloud compute tpus tpu-vm scp /tmp/zoo.tar.gz "$NAME:" \
    --project="$PROJECT" --zone="$ZONE" --worker=all
# The image's own Python is older than zoo's 3.11, so uv fetches one.
on_all_hosts "mkdir -p zoo && tar -xzf zoo.tar.gz -C zoo && cd zoo && pip install -q uv &&
    python3 -m uv venv -q --clear --python 3.12 .venv &&
    python3 -m uv pip install -q -e . 'jax[tpu]'"

on_all_hosts "cd zoo && .venv/bin/python -m recipes.lm --distributed \
    --run-dir $FOLDER/runs/tpu --mesh fsdp=16 --data '$FOLDER/corpus/**/*.txt' \
    --data.batch-size 256 --steps 20000"

# The slice is billed until it is deleted:
echo "gcloud compute tpus tpu-vm delete $NAME --project=$PROJECT --zone=$ZONE"
