#!/usr/bin/env bash
# Runs the tests, after making the virtual environment .venv that they need.
#
#   bash tests/run.sh                      # all but the slow ones
#   bash tests/run.sh -m slow              # the slow ones: kills, resumes, ...
#   bash tests/run.sh tests/law_test.py    # any arguments of pytest
#
# MELIAD_REC_JOBS is the number of processes: 2 where it is not set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/environment.sh test
exec .venv/bin/python -m pytest -n "${MELIAD_REC_JOBS:-2}" "$@"
