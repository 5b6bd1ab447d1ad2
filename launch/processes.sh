#!/usr/bin/env bash
# Functions of local_pod.sh and gpu.sh: processes that end together. The scripts
# set `pids`, start no process once `asked` is set, and define `tell INDEX SIGNAL`,
# which sends a signal to a process.

pids=()
asked='' interrupts=0
trap 'asked=yes' TERM
trap 'interrupted' INT

# Asks all processes to stop; the second Ctrl-C lets `attend` end them at once.
interrupted() {
  asked=yes interrupts=$((interrupts + 1))
  [ "$interrupts" -gt 1 ] || echo 'Press Ctrl-C again to stop at once.' >&2
}

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
      if [ "$interrupts" -gt 1 ]; then
        tell "$index" KILL || true
      elif is_due "$index" && tell "$index" TERM; then
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
