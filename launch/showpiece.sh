#!/usr/bin/env bash
# Shows what recurrence gains on the source code of this machine.
#
#   bash launch/showpiece.sh [--gin_param='STEPS = 6_000' ...]
#
# Creates the virtual environment .venv, tokenizes the Python packages in it once,
# and trains a Block-Recurrent Transformer and a sliding window with one more
# layer, in about half an hour on two CPU cores. Then it compares their losses
# token by token, and draws them: training, gain by distance, and a page of text
# colored by gain. Run again, it resumes where it was stopped. OUT is the folder of
# both runs, STORE that of the tokens; arguments are passed to `meliad-rec train`.
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0"
  exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/environment.sh

# Hides the log lines of XLA, and of TensorFlow where a library loads it.
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-3}"
export TF_ENABLE_ONEDNN_OPTS="${TF_ENABLE_ONEDNN_OPTS:-0}"
out="${OUT:-runs/showpiece}"
store="${STORE:-runs/quickstart_text}"
run=(.venv/bin/python -m meliad_rec)
# Once: with packages installed later, the data would differ, which is an error.
if ! [ -e "$store" ]; then
  echo "Tokenizing the source code of this machine into $store (once)."
  "${run[@]}" tokenize --source=code --out="$store"
fi
for name in slide rec; do
  echo "== $name"
  "${run[@]}" train --gin_file="experiments/cpu/code_$name" \
    --gin_param="STORE = '$store'" --workdir="$out/$name" "$@"
  "${run[@]}" evaluate --workdir="$out/$name" --split=test --tokens=65536 \
    --out="$out/$name.npz"
done
echo "== A is slide, B is rec"
"${run[@]}" evaluate --compare="$out/slide.npz,$out/rec.npz" --unit=word \
  --plot="$out/gain.png"
