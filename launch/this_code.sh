#!/usr/bin/env bash
# First part of quickstart.sh and showpiece.sh: goes to the root of the checkout,
# creates .venv, and tokenizes the source code of this machine once into STORE.
# Sets `store`, `store_setting`, its line of gin, and `run`, the command meliad-rec.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_for "$@"
# Folders are relative to where the script is started, not to the checkout.
for each in WORKDIR STORE OUT; do
  case ${!each:-} in
    '' | /* | *://*) ;;
    \~/*) printf -v "$each" %s "$HOME/${!each#\~/}" ;;
    *) printf -v "$each" %s "$PWD/${!each}" ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/environment.sh

# Hides the log lines of XLA, and of TensorFlow where a library loads it.
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-3}"
export TF_ENABLE_ONEDNN_OPTS="${TF_ENABLE_ONEDNN_OPTS:-0}"
run=(.venv/bin/python -m meliad_rec)
store="${STORE:-runs/quickstart_text}"
# In a string of gin, a backslash stands before a backslash or a quote.
escaped=${store//\\/\\\\}
# shellcheck disable=SC2034  # The scripts that source this one use it.
store_setting="STORE = '${escaped//\'/\\\'}'"
# Once: with packages installed later, the data would differ, which is an error.
if ! [ -e "$store" ]; then
  echo "Tokenizing the source code of this machine into $store (once)."
  "${run[@]}" tokenize --source=code --out="$store"
fi
