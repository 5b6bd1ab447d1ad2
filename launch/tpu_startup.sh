#!/usr/bin/env bash
# Trains on a host of a slice, each time it starts. tpu.sh prepends the variables
# image, data, ended (addresses) and train (flags of meliad_rec.main).
# shellcheck disable=SC2154
set -euo pipefail

# `tpu.sh stop` creates this file, and `tpu.sh run` removes it.
stopped=/opt/meliad_rec/stopped
mkdir -p /opt/meliad_rec/data

# Fetches the data and logs in to the registry; repeated until it succeeds.
prepare() {
  if [ -n "$data" ]; then
    gcloud storage rsync --recursive "$data" /opt/meliad_rec/data || return
  fi
  gcloud auth configure-docker "${image%%/*}" --quiet
}

# A container left by an earlier start of this script saves before it ends.
docker stop --time=600 meliad_rec >/dev/null 2>&1 || true
docker rm --force meliad_rec >/dev/null 2>&1 || true
until prepare; do
  sleep "${AGAIN_SECONDS:-10}"
done

# finish TEXT: reports that training has ended, and ends with its exit code.
finish() {
  until echo "$1" | gcloud storage cp - "$ended"; do
    sleep "${AGAIN_SECONDS:-10}"
  done
  exit "$code"
}

failures=0  # Failures in a row, each soon after the start.
while [ ! -e "$stopped" ]; do
  code=0 since=$SECONDS
  # The image is fetched by a command of its own, because `tpu.sh stop` cannot
  # stop a container whose image is still being fetched.
  docker pull --quiet "$image" || code=$?
  [ ! -e "$stopped" ] || break
  # This port is open between the hosts of a slice.
  [ "$code" != 0 ] || docker run --name=meliad_rec --rm --init --privileged \
    --network=host --stop-timeout=600 --env=JAX_COORDINATOR_PORT=8476 \
    ${data:+--volume=/opt/meliad_rec/data:/data:ro} \
    "$image" "${train[@]}" || code=$?
  echo "meliad_rec ended with exit code $code."
  # Training has ended, or has a mistake that would only repeat.
  case $code in 0 | 2) finish "exit code $code" ;; esac
  # Waiting for a host that is lost takes longer: 300 s.
  ((SECONDS - since < 240)) && failures=$((failures + 1)) || failures=0
  ((failures < 20)) || finish "meliad_rec failed $failures times in a row, each \
time within 4 minutes. See \`tpu.sh logs\`, and correct the cause; exit code $code"
  # A host was lost or restarted, and all stopped: start again together.
  sleep "${AGAIN_SECONDS:-10}"
done
