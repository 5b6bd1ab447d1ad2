#!/usr/bin/env bash
# Trains on machines with GPUs that SLURM gives out:
#
#   bash launch/slurm.sh NODES GPUS WORKDIR [flags of sbatch] -- --gin_file=... ...
#
# One process for each of GPUS a node, which find each other by SLURM; WORKDIR
# and Python (in PYTHON) lie on a disk that all nodes share. Five minutes before
# its time is up, and where SLURM takes the nodes back, the job saves, and is
# queued again. `scancel JOB` ends it: it has SLURM's KillWait (30 s) to save,
# and the same command goes on. DRY_RUN=1 prints what would be run.
set -euo pipefail

fail() {
  echo "error: $*" >&2
  exit 2
}
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ && ${2:-} =~ ^[1-9][0-9]*$ && -n ${3:-} ]]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi
nodes=$1 gpus=$2 workdir=$3
shift 3
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  options+=("$1")
  shift
done
[ $# -gt 1 ] || fail 'What to train is not said; give flags of' \
  'meliad_rec.main after --.'
shift
sbatch=(sbatch "--nodes=$nodes" "--ntasks-per-node=$gpus"
  "--gpus-per-node=$gpus" --requeue --open-mode=append --signal=TERM@300
  "--job-name=${workdir##*/}" "--output=$workdir/slurm.log" "${options[@]}"
  "$(dirname "${BASH_SOURCE[0]}")/slurm_job.sh" "--workdir=$workdir" "$@")
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${sbatch[@]}" | sed 's/ $/\n/'
else
  mkdir -p "$workdir" || fail "$workdir cannot be made; give another WORKDIR."
  "${sbatch[@]}"
fi
