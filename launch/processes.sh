#!/usr/bin/env bash
# Functions of local_pod.sh and gpu.sh: processes that end together. The scripts
# set `pids`, start no process once `asked` is set, and define `tell INDEX`,
# which asks a process to stop.

pids=()
asked=''
trap 'asked=yes' INT TERM

# runs INDEX: whether this process is still running.
runs() {
  kill -0 "${pids[$1]}" 2>/dev/null
}

# Waits for all processes. When this is asked to stop, it asks process 0, and all that have
# joined it save at the same step and end. Processes that still run GRACE_SECONDS
# (10) later have not joined, and are asked too. Returns 2 if a process ended with
# 2, otherwise the exit code of the first process that failed, or 0.
attend() {
  local index code running=yes worst=0 since=$SECONDS told=()
  [ -n "${pids[*]:-}" ] || return 143
  while [ -n "$running" ]; do
    running=''
    for index in "${!pids[@]}"; do
      runs "$index" || continue
      running=yes
      if is_due "$index" && tell "$index"; then
        told[index]=yes
      fi
      [ "$index" != 0 ] || since=$SECONDS
    done
    sleep 0.3 || true # Ctrl-C ends it.
  done
  for index in "${!pids[@]}"; do
    code=0
    wait "${pids[index]}" || code=$?
    if [ "$code" != 0 ] && { [ "$worst" = 0 ] || [ "$code" = 2 ]; }; then
      worst=$code
    fi
  done
  return "$worst"
}

# is_due INDEX: whether to ask this process to stop now.
is_due() {
  [ -n "$asked" ] && [ -z "${told[$1]:-}" ] || return 1
  [ "$1" = 0 ] && return
  ! runs 0 && ((SECONDS - since >= ${GRACE_SECONDS:-10}))
}
