#!/usr/bin/env bash
# Functions of all scripts: errors, usage and --dry_run.

dry_run=${DRY_RUN:-}

fail() {
  echo "error: $*" >&2
  exit 2
}

# Prints the head of the script.
show_head() {
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0"
}

# Prints the head of the script as an error.
usage() {
  show_head >&2
  exit 2
}

# help_for ARGUMENTS...: prints the head of the script if --help comes first.
help_for() {
  if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    show_head
    exit
  fi
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

# need_train FLAGS...: fails unless there are flags for meliad_rec.main, and
# neither --workdir nor --dry_run among them.
need_train() {
  local each
  [ $# -gt 0 ] || fail 'There is nothing to train. Give flags of' \
    'meliad_rec.main after --.'
  for each; do
    [[ ! $each =~ ^--?workdir(=|$) ]] || fail "$each after -- would replace the" \
      "folder that is given before --. Give the folder before -- only."
    [[ ! $each =~ ^--?dry_run(=|$) ]] || fail "$each after -- would request" \
      "machines that then train nothing. Give --dry_run before --."
  done
}
