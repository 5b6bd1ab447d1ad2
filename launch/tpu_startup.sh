#!/usr/bin/env bash
# Trains on a host of a slice, at each of its starts. tpu.sh puts in front:
#   image, data, ended (addresses), train (flags of meliad_rec.main).
# shellcheck disable=SC2154
set -euo pipefail

if [ -n "$data" ]; then
  mkdir -p /opt/meliad_rec/data
  gcloud storage rsync --recursive "$data" /opt/meliad_rec/data
fi
gcloud auth configure-docker "${image%%/*}" --quiet
docker rm --force meliad_rec >/dev/null 2>&1 || true
while true; do
  code=0
  # The firewall of a slice lets this port through.
  docker run --name=meliad_rec --rm --init --privileged --network=host \
    --stop-timeout=600 --env=JAX_COORDINATOR_PORT=8476 \
    ${data:+--volume=/opt/meliad_rec/data:/data:ro} \
    "$image" "${train[@]}" || code=$?
  echo "meliad_rec ended with exit code $code."
  case $code in
    130 | 143) exit 0 ;; # It was asked to stop; the next start goes on.
    0 | 2)
      # Done, or a mistake, which another start would only repeat.
      echo "exit code $code" | gcloud storage cp - "$ended"
      exit "$code"
      ;;
  esac
  # A host was lost, and all stopped: they meet again.
  sleep "${AGAIN_SECONDS:-10}"
done
