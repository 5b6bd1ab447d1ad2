#!/usr/bin/env bash
# Trains like a pod on this machine: N processes share one run.
#
#   bash launch/local_pod.sh N [flags of meliad_rec.main]
#
# Each process has DEVICES devices (default 1), all on the CPU. Output lines of
# all but process 0 begin with the number of the process. SIGTERM to any process
# or to this script saves on all at the same step and ends all with 143. The same
# command, also with another N, resumes.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/common.sh
source "$here/common.sh"

[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || usage
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

# numbered INDEX: copies all lines and puts this number before each.
numbered() {
  local line
  trap '' INT TERM
  while IFS= read -r line || [ -n "$line" ]; do
    printf '[%s] %s\n' "$1" "$line"
  done
}

# tell INDEX SIGNAL: sends a signal to a process.
tell() {
  kill "-$2" "${pids[$1]}" 2>/dev/null
}

# shellcheck source=launch/processes.sh
source "$here/processes.sh"
for ((process = 0; process < count; process++)); do
  [ -z "$asked" ] || break
  export JAX_PROCESS_ID=$process
  if [ "$process" = 0 ]; then
    "$python" -m meliad_rec.main "$@" &
  else
    "$python" -m meliad_rec.main "$@" > >(numbered "$process") \
      2> >(numbered "$process" >&2) &
  fi
  pids+=($!)
  echo "Process $process of $count is $!." >&2
done
attend
