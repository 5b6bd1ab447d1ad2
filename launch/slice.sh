#!/usr/bin/env bash
# Functions of tpu.sh and gke.sh, which set `action` and `name`.
# shellcheck disable=SC2034,SC2154

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) \
  || fail "${0##*/} needs bash 4.4 or later, but this is $BASH_VERSION. Install a" \
    "newer one (on macOS: brew install bash) and run the script with it."

python=${PYTHON:-python}
declare -A flag=()  # Flags before --, by name.
train=()            # Flags after --, for meliad_rec.main.

# parse ALLOWED ARGUMENTS...: sets flag and train.
parse() {
  local allowed=" $1 " given advice="Flags of meliad_rec.main come after --."
  [ "$action" = create ] \
    || advice="Flags of meliad_rec.main are fixed by create."
  shift
  while [ $# -gt 0 ]; do
    if asks_dry "$1"; then
      shift
      continue
    fi
    case $1 in
      --)
        shift
        train=("$@")
        [ "$action" = create ] || [ $# = 0 ] \
          || fail "$action takes nothing after --, got $*: remove it. $advice"
        return
        ;;
      --*=?*) given=${1#--} && flag[${given%%=*}]=${given#*=} ;;
      --?*) given=${1#--} && flag[${given%=}]=yes ;;
      *) fail "'$1' is not a flag. Write --flag=value. $advice" ;;
    esac
    [[ $allowed == *" ${given%%=*} "* ]] \
      || fail "There is no flag --${given%%=*} of $action, which takes${allowed% }." \
        "$advice"
    case ${given%%=*} in
      spot | reserved | keep | no_plan)
        [ "$given" = "${given%%=*}" ] \
          || fail "--$given has a value. Write --${given%%=*}, or leave it out."
        ;;
      *)
        [[ $1 == --*=?* ]] \
          || fail "--${given%%=*} has no value. Write --${given%%=*}=..., or" \
            "leave it out."
        ;;
    esac
    shift
  done
}

# need NAMES...: fails unless these flags are given.
need() {
  local each
  for each; do
    [[ -n ${flag[$each]:-} ]] \
      || fail "$action needs --$each. Add --$each=..., as at the head of $0."
  done
}

# Sets the names of the slice for Google Cloud (shaped) and xpk (xpk_type), and
# its software.
slice() {
  local kind shape size prefix
  [[ ${flag[topology]} =~ ^(v5e|v6e):([0-9]+x[0-9]+)$ ||
    ${flag[topology]} =~ ^(v4|v5p):([0-9]+x[0-9]+x[0-9]+)$ ]] \
    || fail "--topology must be a slice of v4, v5e, v5p or v6e, got" \
      "'${flag[topology]}'. Write it like v5e:16x16 or v5p:4x4x4."
  kind=${BASH_REMATCH[1]} shape=${BASH_REMATCH[2]} chips=1
  for size in ${shape//x/ }; do
    chips=$((chips * size))
  done
  ((chips > 0)) || fail "--topology must have no side of 0, got" \
    "'${flag[topology]}'. Give sides of at least 1."
  case $kind:$shape in
    v4:* | v5p:* | *:1x1 | *:2x2 | *:2x4 | *:4x4 | *:4x8 | *:8x8 | *:8x16 | *:16x16) ;;
    *) fail "There is no slice ${flag[topology]}. Those of $kind are 1x1, 2x2, 2x4," \
      "4x4, 4x8, 8x8, 8x16 and 16x16: give --topology=$kind:16x16 or another." ;;
  esac
  # The names of v4 and v5p count cores, two per chip, and leave the shape open.
  # A request for TPU VMs can name the shape instead.
  [ "$kind" = v5e ] && prefix=v5litepod || prefix=$kind
  xpk_type=$prefix-$shape
  case $kind in
    v5e) accelerator=v5litepod-$chips software=v2-alpha-tpuv5-lite ;;
    v6e) accelerator=v6e-$chips software=v2-alpha-tpuv6e ;;
    v5p) accelerator=v5p-$((2 * chips)) software=v2-alpha-tpuv5 ;;
    v4) accelerator=v4-$((2 * chips)) software=tpu-ubuntu2204-base ;;
  esac
  case $kind in
    v5e | v6e) shaped=("--accelerator-type=$accelerator") ;;
    *) shaped=("--type=$kind" "--topology=$shape") ;;
  esac
}

# refuse PATTERN NAME: fails if a flag after -- matches the pattern, because
# --NAME before -- would replace it.
refuse() {
  local each
  for each in "${train[@]}"; do
    [[ ! $each =~ $1 ]] || fail "--$2=${flag[$2]} before -- would replace '$each'" \
      "after --. Give only one of the two."
  done
}

# Passes --mesh=data:64,model:4 on to the trainer.
mesh() {
  local part
  [ -n "${flag[mesh]:-}" ] || return 0
  for part in ${flag[mesh]//,/ }; do
    [[ $part =~ ^(data|fsdp|model):([1-9][0-9]*)$ ]] \
      || fail "--mesh must have sizes of data, fsdp and model, got '$part'." \
        "Write it like data:64,model:4."
  done
  refuse '^--?mesh(=|$)' mesh
  train+=("--mesh=${flag[mesh]}")
}

# Exits unless the training step is known to fit in the slice.
plan() {
  local each own='' code=0
  local asked=("--topology=${flag[topology]}")
  [ -z "${flag[no_plan]:-}" ] || return 0
  [ -z "${flag[vocab_size]:-}" ] || asked+=("--vocab_size=${flag[vocab_size]}")
  for each in "${train[@]}"; do
    [[ ! $each =~ ^--?(gin_|mesh) && -z $own ]] || asked+=("$each")
    # The value of a flag without "=" is the next argument.
    [[ $each =~ ^--?(gin_file|gin_param|mesh)$ ]] && own=yes || own=''
  done
  doing "$python" -m meliad_rec plan "${asked[@]}" || code=$?
  case $code in
    0) ;;
    3)
      echo "error: The step does not fit in ${flag[topology]}, so nothing was" \
        "requested. Follow the advice above, or give --no_plan." >&2
      exit 3
      ;;
    4)
      echo "error: It is not known whether the step fits in ${flag[topology]} (see" \
        "above), so nothing was requested. Fix the cause, or give --no_plan." >&2
      exit 4
      ;;
    *)
      echo "error: Planning failed (see above), so nothing was requested. Fix the" \
        "cause, or give --no_plan." >&2
      exit "$code"
      ;;
  esac
}

# Checks that --workdir is in a bucket.
address() {
  [[ ${flag[workdir]} =~ ^gs://[^/]+/.*[^/]$ ]] \
    || fail "--workdir must be a folder of a bucket, got '${flag[workdir]}'." \
      "Give one that the slice can reach, such as gs://BUCKET/runs/$name."
}

# record FILE: writes what will run to --workdir, which checks that it can be
# written.
record() {
  doing gcloud storage cp "$1" "${flag[workdir]}/launch/${1##*/}" \
    || fail "${flag[workdir]} cannot be written (see above), so nothing was" \
      "requested. Give another --workdir, or the permission to write to it."
}
