#!/usr/bin/env bash
# Shows what recurrence gains on the source code of this machine.
#
#   bash launch/showpiece.sh [--gin_param='STEPS = 1_200' ...]
#
# Creates the virtual environment .venv, tokenizes the Python packages in it once,
# and trains a Block-Recurrent Transformer and a sliding window with one more
# layer side by side, in two to four hours on two CPU cores. Then it compares their
# losses token by token, and draws them: gain in training, by distance, and a page
# of text colored by gain. When run again, it resumes. OUT is the
# folder of the runs, STORE that of the tokens; arguments are passed to
# `meliad-rec reproduce`.
set -euo pipefail
# shellcheck source=launch/this_code.sh
source "$(dirname "${BASH_SOURCE[0]}")/this_code.sh"

out="${OUT:-runs/showpiece}"
"${run[@]}" reproduce cpu/code --rows=slide,rec --jobs=2 --splits=test \
  --tokens=65536 --out="$out" --gin_param="$store_setting" "$@"
echo "== A is slide, B is rec"
losses=seed0/test_first_65536.npz
"${run[@]}" evaluate --compare="$out/slide_$losses,$out/rec_$losses" --unit=word \
  --plot="$out/gain.png"
