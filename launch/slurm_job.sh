#!/usr/bin/env bash
# The job that slurm.sh submits: runs one process per task, and queues itself
# again if it was stopped early or lost a host. Its arguments are flags of
# meliad_rec.main.
set -euo pipefail

code=0
# The tasks of srun also get the signal; this script only waits for them.
trap : TERM
srun --kill-on-bad-exit=0 "${PYTHON:-python}" -m meliad_rec.main "$@" || code=$?
case $code in
  143) ;; # It was asked to stop early.
  0 | 2) exit "$code" ;;
  *)
    # A host was lost, or there is a defect, which may repeat forever. Waiting
    # for a host that is lost takes longer: 300 s.
    ((SECONDS >= 240)) || [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ] || exit "$code"
    ;;
esac
# A canceled job is not queued again, and SLURM requeues a preempted job itself.
state=$(squeue --noheader "--jobs=$SLURM_JOB_ID" --format=%T 2>/dev/null || true)
case $state in
  CANCELLED* | COMPLETING | PREEMPTED) exit "$code" ;;
esac
echo "meliad_rec ended with exit code $code: queued again."
exec scontrol requeue "$SLURM_JOB_ID"
