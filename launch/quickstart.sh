#!/usr/bin/env bash
# Trains a small Block-Recurrent Transformer on source code of this machine.
#
#   bash launch/quickstart.sh [--gin_param='STEPS = 2_000' ...]
#
# Creates the virtual environment .venv, tokenizes the Python packages in it once,
# trains for about five minutes on two CPU cores, and shows losses, an evaluation
# on unseen code, and a sample. Run again, it resumes where it was stopped.
# WORKDIR is the folder of the run, STORE that of the tokens; arguments are passed
# to `meliad-rec train`.
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
workdir="${WORKDIR:-runs/quickstart}"
store="${STORE:-runs/quickstart_text}"
# Once: with packages installed later, the data would differ, which is an error.
if ! [ -e "$store" ]; then
  echo "Tokenizing the source code of this machine into $store (once)."
  .venv/bin/python -m meliad_rec tokenize --source=code --out="$store"
fi
.venv/bin/python -m meliad_rec train --gin_file=experiments/quickstart \
  --gin_param="STORE = '$store'" --workdir="$workdir" "$@"

# shellcheck disable=SC2016  # The here-document expands everything.
cat <<END

In $workdir: checkpoints/, metrics.jsonl, loss_nats_per_token.png, tensorboard/
Generate text:  .venv/bin/meliad-rec generate --workdir=$workdir --prompt='def '
Evaluate:       .venv/bin/meliad-rec evaluate --workdir=$workdir --split=test
Train longer:   ${WORKDIR:+WORKDIR='$WORKDIR' }${STORE:+STORE='$STORE' }bash launch/quickstart.sh --gin_param='STEPS = 2_000'
END
