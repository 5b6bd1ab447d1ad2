#!/usr/bin/env bash
# Trains on GPU machines over ssh, one process on each:
#
#   bash launch/gpu.sh HOST,HOST,... [--dry_run] [flags of meliad_rec.main]
#
# Each machine runs PYTHON (default python) in the folder where this script is
# started, which all of them must have under the same path. The others reach the
# first HOST by its name, at PORT (default 8476). Ctrl-C saves and ends the run on
# all of them. A single machine needs no script: meliad_rec.main uses all of its
# GPUs. --dry_run (or DRY_RUN=1) prints the commands.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/common.sh
source "$here/common.sh"

[[ ${1:-} =~ ^[A-Za-z0-9][A-Za-z0-9._-]*(,[A-Za-z0-9][A-Za-z0-9._-]*)*$ ]] \
  || usage
IFS=, read -ra hosts <<<"$1"
shift
train=()
for each; do
  asks_dry "$each" || train+=("$each")
done
# Other users of a host have files of their own.
pid_file="/tmp/meliad_rec_${PORT:-8476}_\$(id -u).pid"

# on INDEX COMMAND: runs a command on a host.
on() {
  doing ssh -n -o BatchMode=yes "${hosts[$1]}" "$2"
}

# tell INDEX SIGNAL: sends a signal to a process; fails until it has started. The
# number in an old file may belong to another process by now, so the command line
# is checked.
tell() {
  on "$1" "pid=\$(cat $pid_file) && grep -q meliad_rec.main /proc/\$pid/cmdline \
&& kill -$2 \$pid" 2>/dev/null
}

# shellcheck source=launch/processes.sh
source "$here/processes.sh"
for process in "${!hosts[@]}"; do
  [ -z "$asked" ] || break
  command="cd $(printf %q "$PWD") && echo \$\$ >$pid_file && exec $(printf '%q ' env \
    "JAX_COORDINATOR_ADDRESS=${hosts[0]}:${PORT:-8476}" \
    "JAX_NUM_PROCESSES=${#hosts[@]}" "JAX_PROCESS_ID=$process" \
    "${PYTHON:-python}" -m meliad_rec.main ${train[@]+"${train[@]}"})"
  if [ -n "$dry_run" ]; then
    on "$process" "${command% }"
  else
    on "$process" "${command% }" &
    pids+=($!)
  fi
done
[ -n "$dry_run" ] || attend
