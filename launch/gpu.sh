#!/usr/bin/env bash
# Trains on machines with GPUs that ssh reaches, one process on each:
#
#   bash launch/gpu.sh HOST,HOST,... [flags of meliad_rec.main]
#
# All have the same folders: this one is entered, and PYTHON (python) run. HOST
# is a name by which the others reach the first, at PORT (8476). Ctrl-C saves on
# all and ends all. On one machine no script is needed: meliad_rec.main uses all
# its GPUs. DRY_RUN=1 prints what would be run.
set -euo pipefail

if ! [[ ${1:-} =~ ^[A-Za-z0-9][A-Za-z0-9._-]*(,[A-Za-z0-9][A-Za-z0-9._-]*)*$ ]]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi
IFS=, read -ra hosts <<<"$1"
shift
pid_file=/tmp/meliad_rec_${PORT:-8476}.pid
pids=()
for process in "${!hosts[@]}"; do
  command="cd $(printf %q "$PWD") && echo \$\$ >$pid_file && exec $(printf '%q ' env \
    "JAX_COORDINATOR_ADDRESS=${hosts[0]}:${PORT:-8476}" \
    "JAX_NUM_PROCESSES=${#hosts[@]}" "JAX_PROCESS_ID=$process" \
    "${PYTHON:-python}" -m meliad_rec.main "$@")"
  remote=(ssh -n -o BatchMode=yes "${hosts[process]}" "${command% }")
  if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${remote[@]}" | sed 's/ $/\n/'
  else
    "${remote[@]}" &
    pids+=($!)
  fi
done
# One that is asked to stop stops all.
trap 'ssh -n -o BatchMode=yes "${hosts[0]}" "kill -TERM \$(cat $pid_file)" || true' INT TERM
worst=0
for pid in "${pids[@]}"; do
  code=0
  wait "$pid" || code=$?
  while kill -0 "$pid" 2>/dev/null; do  # The signal ended `wait`.
    code=0
    wait "$pid" || code=$?
  done
  [ "$code" = 0 ] || worst=$code
done
exit "$worst"
