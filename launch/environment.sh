#!/usr/bin/env bash
# Creates the virtual environment .venv of this checkout, if necessary.
#
#   bash launch/environment.sh          # to train, evaluate and generate
#   bash launch/environment.sh test     # to run the tests too
#   bash launch/environment.sh colab    # or any other extras of setup.py
#
# Needs only Python 3.11 to 3.13 on the PATH (or in PYTHON). pip uses its own
# configuration. When run again, it installs only if setup.py has changed.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_for "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_suitable() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
    >/dev/null 2>&1
}

# is_installed EXTRA: whether it was installed with the current setup.py.
is_installed() {
  local stamp extras
  for stamp in .venv/installed*; do
    extras="${stamp#.venv/installed}"
    if [[ -z "$1" || ",${extras#-}," == *",$1,"* ]]; then
      cmp -s setup.py "$stamp" && return 0
    fi
  done
  return 1
}

extra="${1:-}"
bin=.venv/bin
if ! [ -x $bin/python ] || ! is_suitable $bin/python; then
  found=
  for python in "${PYTHON:-python3}" python3.12 python3.11 python3.13 python; do
    if is_suitable "$python"; then
      found="$python"
      break
    fi
  done
  [ -n "$found" ] || fail "Python 3.11, 3.12 or 3.13 is needed, but none is on" \
    "the PATH. Install one, or name one: PYTHON=/path/to/python3 bash $0."
  echo "Creating .venv with $("$found" --version)."
  "$found" -m venv --clear .venv || fail "$found cannot create a virtual" \
    "environment. Install its module venv (on Debian and Ubuntu: apt install" \
    "python3-venv), or name another Python in PYTHON."
fi

if ! is_installed "$extra"; then
  echo "Installing meliad_rec${extra:+ for $extra} into .venv (takes minutes, once)."
  hint=
  if $bin/python -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then
    hint="For Python 3.13 a package of seqio is compiled, which needs a C++"
    hint+=" compiler and Python's headers (Debian: apt install g++ python3-dev)."
  fi
  # Python compiles what is imported; compiling all takes a minute more.
  $bin/python -m pip install -qq --disable-pip-version-check --no-compile \
    -e ".${extra:+[$extra]}" \
    || fail "pip could not install meliad_rec. See above. $hint"
  cp setup.py ".venv/installed${extra:+-$extra}"
fi
