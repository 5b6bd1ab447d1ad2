#!/usr/bin/env bash
# Trains on a host of a slice, at each of its starts. tpu.sh puts in front:
#   image, data, ended (addresses), train (flags of meliad_rec.main).
# shellcheck disable=SC2154
set -euo pipefail

# `stop` makes this file, and `run` removes it.
stopped=/opt/meliad_rec/stopped
mkdir -p /opt/meliad_rec/data

# What a run needs here; a failure passes, or is told again and again.
prepare() {
  if [ -n "$data" ]; then
    gcloud storage rsync --recursive "$data" /opt/meliad_rec/data || return
  fi
  gcloud auth configure-docker "${image%%/*}" --quiet
}

# One that the last start of this script left here saves before it ends.
docker stop --time=600 meliad_rec >/dev/null 2>&1 || true
docker rm --force meliad_rec >/dev/null 2>&1 || true
until prepare; do
  sleep "${AGAIN_SECONDS:-10}"
done
while [ ! -e "$stopped" ]; do
  code=0
  # The firewall of a slice lets this port through.
  docker run --name=meliad_rec --rm --pull=always --init --privileged \
    --network=host --stop-timeout=600 --env=JAX_COORDINATOR_PORT=8476 \
    ${data:+--volume=/opt/meliad_rec/data:/data:ro} \
    "$image" "${train[@]}" || code=$?
  echo "meliad_rec ended with exit code $code."
  case $code in
    0 | 2)
      # Done, or a mistake, which another start would only repeat.
      until echo "exit code $code" | gcloud storage cp - "$ended"; do
        sleep "${AGAIN_SECONDS:-10}"
      done
      exit "$code"
      ;;
  esac
  # A host was lost or starts again, and all stopped: they meet again.
  sleep "${AGAIN_SECONDS:-10}"
done
