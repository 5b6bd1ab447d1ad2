#!/usr/bin/env bash
# The job that slurm.sh submits: one process a task, and again where it was
# stopped before its end. Its arguments are flags of meliad_rec.main.
set -euo pipefail

code=0
# The tasks of srun get the signal too; this script only waits.
trap : TERM
srun --kill-on-bad-exit=0 "${PYTHON:-python}" -m meliad_rec.main "$@" || code=$?
case $code in
  143) ;; # It was asked to stop before its end.
  0 | 2) exit "$code" ;;
  *)
    # A host was lost, or there is a defect, which comes again and again.
    [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ] || exit "$code"
    ;;
esac
# After scancel nothing is queued again, and what SLURM takes it queues itself.
state=$(squeue --noheader "--jobs=$SLURM_JOB_ID" --format=%T 2>/dev/null || true)
case $state in
  CANCELLED* | COMPLETING | PREEMPTED) exit "$code" ;;
esac
echo "meliad_rec ended with exit code $code: queued again."
exec scontrol requeue "$SLURM_JOB_ID"
