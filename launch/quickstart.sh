#!/usr/bin/env bash
# Trains a small Block-Recurrent Transformer on source code of this machine.
#
#   bash launch/quickstart.sh [--gin_param='STEPS = 2_000' ...]
#
# Makes the virtual environment .venv, tokenises the Python packages there once,
# trains for about four minutes on two CPU cores, and shows losses, an evaluation
# on code it has not seen, and a sample. Run again, it goes on where it was
# stopped. WORKDIR is the folder of the run, STORE that of the tokens; arguments
# are those of `python -m meliad_rec.main`.
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0"
  exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/environment.sh
# Training on a CPU touches much fresh memory: huge pages save page faults.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

# TensorFlow, which reads the text, talks a lot where there is no GPU.
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-3}"
export TF_ENABLE_ONEDNN_OPTS="${TF_ENABLE_ONEDNN_OPTS:-0}"
workdir="${WORKDIR:-runs/quickstart}"
store="${STORE:-runs/quickstart_text}"
# Once: packages installed later would be other data, which a run refuses.
if ! [ -e "$store" ]; then
  echo "Tokenising the source code of this machine into $store (once)."
  .venv/bin/python -m meliad_rec tokenize --source=code --out="$store"
fi
.venv/bin/python -m meliad_rec.main --gin_file=experiments/quickstart \
  --gin_param="STORE = '$store'" --workdir="$workdir" "$@"

# shellcheck disable=SC2016  # Within these quotes all is expanded.
cat <<END

In $workdir: checkpoints/, metrics.jsonl, loss_nats_per_token.png, tensorboard/
Let it write:   .venv/bin/meliad-rec generate --workdir=$workdir --prompt='def '
Evaluate it:    .venv/bin/meliad-rec evaluate --workdir=$workdir --split=test
Train longer:   ${WORKDIR:+WORKDIR='$WORKDIR' }${STORE:+STORE='$STORE' }bash launch/quickstart.sh --gin_param='STEPS = 2_000'
END
