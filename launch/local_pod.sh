#!/usr/bin/env bash
# Trains on this machine as a pod does: N processes that share one run.
#
#   bash launch/local_pod.sh N [flags of meliad_rec.main]
#
# Each process has DEVICES devices (1) of its own, all on the CPU. Lines of all
# but process 0 begin with their number. SIGTERM to any one of them, or to this
# script, saves on all at the same step and ends all with 143; run again, also
# with another N, training goes on where it stopped.
set -euo pipefail

if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi
count=$1
shift
python=${PYTHON:-python}
port=$("$python" -c 'import socket
free = socket.socket()
free.bind(("localhost", 0))
print(free.getsockname()[1])')

export JAX_PLATFORMS=cpu JAX_COORDINATOR_ADDRESS="localhost:$port"
export JAX_NUM_PROCESSES=$count
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=${DEVICES:-1}"
pids=()
for ((process = 0; process < count; process++)); do
  export JAX_PROCESS_ID=$process
  if [ "$process" = 0 ]; then
    "$python" -m meliad_rec.main "$@" &
  else
    "$python" -m meliad_rec.main "$@" > >(sed -u "s/^/[$process] /") \
      2> >(sed -u "s/^/[$process] /" >&2) &
  fi
  pids+=($!)
  echo "Process $process of $count is $!." >&2
done

# A signal ends `wait`, and the processes, which save, are to be waited for.
trap 'kill -TERM "${pids[0]}" 2>/dev/null || true' TERM INT
worst=0
for pid in "${pids[@]}"; do
  code=0
  wait "$pid" || code=$?
  while kill -0 "$pid" 2>/dev/null; do
    code=0
    wait "$pid" || code=$?
  done
  if [ "$code" != 0 ] && { [ "$worst" = 0 ] || [ "$code" = 2 ]; }; then
    worst=$code
  fi
done
exit "$worst"
