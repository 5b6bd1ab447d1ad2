#!/usr/bin/env bash
# Trains the systems of table 1 of Hutchins et al. 2022 side by side, at size
# small (about 5 M parameters) and equal tokens, on a store that
# `python -m meliad_rec tokenize` wrote:
#
#   bash launch/compare.sh STORE OUT [STEPS] [further flags of meliad_rec.main]
#
# Each system has a folder in OUT. Run again, each resumes where it stopped.
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//' >&2
  exit 2
fi
store=$1 out=$2 steps=1000
shift 2
if [[ ${1:-} =~ ^[0-9_]+$ ]]; then
  steps=$1
  shift
fi
python=${PYTHON:-python}

# Name, architecture, and options.
systems=(
  'slide_6 window'
  'slide_7 window --gin_param=LAYERS=7'
  'xl window --gin_param=SEGMENT=128 --gin_param=BATCH=32'
  'rec_fixed_skip block_recurrent --gin_file=options/recurrent/fixed_skip'
  'rec_fixed_dual block_recurrent --gin_file=options/recurrent/fixed_dual'
  'rec_lstm_dual block_recurrent --gin_file=options/recurrent/lstm_dual'
  'feedback_fixed_skip block_feedback --gin_file=options/block_feedback/fixed_skip'
)
for system in "${systems[@]}"; do
  read -r name arch options <<<"$system"
  echo "== $name"
  # shellcheck disable=SC2086  # The options are several words.
  "$python" -m meliad_rec.main \
    --gin_file="arch/$arch" --gin_file=size/small --gin_file=task/store \
    --gin_file=options/schedule/cosine $options \
    --gin_param="STORE = '$store'" --gin_param="STEPS = $steps" \
    --gin_param='LEARNING_RATE = 0.02' --gin_param='WARMUP_STEPS = 100' \
    --gin_param="EVAL_EVERY = $steps" --gin_param='SAVE_EVERY = 250' \
    --workdir="$out/$name" "$@"
done
echo
read -ra names < <(printf '%s ' "${systems[@]%% *}")
"$python" -m meliad_rec runs "${names[@]/#/$out/}" --plot="$out/curves.png"
