#!/usr/bin/env bash
# Functions of all launchers: errors, usage and --dry_run.

dry_run=${DRY_RUN:-}

fail() {
  echo "error: $*" >&2
  exit 2
}

# Prints the head of the script.
usage() {
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0" >&2
  exit 2
}

# asks_dry ARGUMENT: whether this is --dry_run; if so, turns it on.
asks_dry() {
  case $1 in
    --dry_run) dry_run=yes ;;
    --dry_run=*) fail "$1 has a value. Write --dry_run, or leave it out." ;;
    *) return 1 ;;
  esac
}

# doing COMMAND...: runs the command, or with --dry_run prints it.
doing() {
  local line
  if [ -n "$dry_run" ]; then
    line=$(printf '%q ' "$@")
    printf '%s\n' "${line% }"
  else
    "$@"
  fi
}

# need_train FLAGS...: fails unless there are flags for meliad_rec.main.
need_train() {
  [ $# -gt 0 ] || fail 'There is nothing to train. Give flags of' \
    'meliad_rec.main after --.'
}
