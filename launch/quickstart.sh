#!/usr/bin/env bash
# Trains a small Block-Recurrent Transformer on source code of this machine.
#
#   bash launch/quickstart.sh [--gin_param='STEPS = 2_000' ...]
#
# Creates the virtual environment .venv, tokenizes the Python packages in it once,
# trains on two CPU cores, and shows losses, an evaluation on unseen code, and a
# sample, all in about six minutes. When run again, it resumes.
# WORKDIR is the folder of the run, STORE that of the tokens; arguments are passed
# to `meliad-rec train`.
set -euo pipefail
# shellcheck source=launch/this_code.sh
source "$(dirname "${BASH_SOURCE[0]}")/this_code.sh"

workdir="${WORKDIR:-runs/quickstart}"
"${run[@]}" train --gin_file=experiments/quickstart \
  --gin_param="$store_setting" --workdir="$workdir" "$@"

for each; do
  case $each in --dry_run | --dry_run=[tTyY1]*) exit ;; esac
done
where=$(printf %q "$workdir")
echo
# The commands are for the root of the checkout, to which this script went.
[ "$OLDPWD" -ef . ] || printf 'First:          cd %q\n' "$PWD"
# shellcheck disable=SC2016  # The here-document expands everything.
cat <<END
In $workdir: checkpoints/, metrics.jsonl, loss_nats_per_token.png, tensorboard/
Generate text:  .venv/bin/meliad-rec generate --workdir=$where --prompt='def '
Evaluate:       .venv/bin/meliad-rec evaluate --workdir=$where --split=test
Train longer:   ${WORKDIR:+WORKDIR=$where }${STORE:+STORE=$(printf %q "$STORE") }bash launch/quickstart.sh --gin_param='STEPS = 2_000'
END
