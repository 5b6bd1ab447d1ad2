#!/usr/bin/env bash
# Trains on GPU nodes of a SLURM cluster:
#
#   bash launch/slurm.sh NODES GPUS WORKDIR [--dry_run] [flags of sbatch]
#     -- --gin_file=... ...
#
# Starts one process per GPU (GPUS per node); they find each other through SLURM.
# Python (in PYTHON) must be on a disk that all nodes share, and so must WORKDIR,
# unless it is in a bucket (gs://); the output is then in slurm-NAME.log here. Five
# minutes before its time limit, and when it is preempted, the job saves and is
# queued again. It is also queued again if a host is lost; but after 20 times, a
# job that fails within four minutes ends. `scancel JOB` ends it; it has SLURM's
# KillWait (30 s) to save, and the same command resumes. --dry_run (or DRY_RUN=1)
# prints the command.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/common.sh
source "$here/common.sh"

[[ ${1:-} =~ ^[1-9][0-9]*$ && ${2:-} =~ ^[1-9][0-9]*$ && -n ${3:-} ]] || usage
nodes=$1 gpus=$2 given=$3
shift 3
workdir=${given%"${given##*[!/]}"}
name=${workdir##*/}
[ -n "$name" ] || fail "WORKDIR must have a name, got '$given'. Give a folder" \
  "for this run."
log=$workdir/slurm.log
if [[ $given =~ ^[A-Za-z][A-Za-z0-9+.-]*:/ ]]; then
  [[ $workdir =~ ^gs://[^/]+/.*[^/]$ ]] \
    || fail "WORKDIR must be on a disk or in a bucket (gs://), got '$given'. Give a" \
      "folder that all nodes share, or one like gs://BUCKET/runs/a."
  log=slurm-$name.log
fi
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  asks_dry "$1" || options+=("$1")
  shift
done
need_train "${@:2}"
shift
if [ -z "$dry_run" ] && [[ $workdir != gs://* ]]; then
  mkdir -p "$workdir" || fail "$workdir cannot be created. Give another WORKDIR."
fi
doing sbatch "--nodes=$nodes" "--ntasks-per-node=$gpus" \
  "--gpus-per-node=$gpus" --requeue --open-mode=append --signal=TERM@300 \
  "--job-name=$name" "--output=$log" ${options[@]+"${options[@]}"} \
  "$here/slurm_job.sh" "--workdir=$workdir" "$@"
