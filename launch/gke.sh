#!/usr/bin/env bash
# Trains on TPUs of a GKE cluster created by xpk; each line is one command:
#
#   bash launch/gke.sh create NAME --cluster=C --zone=Z --topology=v5e:16x16
#     --image=IMAGE --workdir=gs://BUCKET/runs/NAME [--mesh=data:64,model:4]
#     [--restarts=100] [--vocab_size=N] [--no_plan] -- --gin_file=... ...
#   bash launch/gke.sh logs NAME    # follows the output of process 0
#   bash launch/gke.sh attach NAME  # a shell in the container of process 0
#   bash launch/gke.sh delete NAME --cluster=C --zone=Z  # saves and ends the run
#
# create and delete take --project=P; all take --dry_run, which prints the
# commands instead of running them. `create` checks that the training step fits
# (meliad-rec plan) and that --workdir can be written; after `delete`, it resumes
# the run. A run that is preempted or loses a host restarts by itself. IMAGE is
# built from launch/Dockerfile; a store to train on must be in it, or where the
# cluster mounts a bucket. logs and attach use kubectl's current context.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/slice.sh
source "$here/slice.sh"

action=${1:-} name=${2:-}
case $action in
  create | logs | attach | delete) ;;
  *) usage ;;
esac
[[ $name =~ ^[a-z][a-z0-9-]*$ ]] \
  || fail "'$name' is not a name for a run. Use lowercase letters, digits and" \
    "-, and a letter first."
shift 2
case $action in
  create)
    parse 'cluster zone project dry_run topology image workdir mesh restarts vocab_size no_plan' "$@"
    need cluster zone topology image workdir
    need_train "${train[@]}"
    ;;
  delete) parse 'cluster zone project dry_run' "$@" && need cluster zone ;;
  *) parse 'dry_run' "$@" ;;
esac
where=("--cluster=${flag[cluster]:-}" "--zone=${flag[zone]:-}")
[ -z "${flag[project]:-}" ] || where+=("--project=${flag[project]}")
first="jobset.sigs.k8s.io/jobset-name=$name,batch.kubernetes.io/job-completion-index=0"

case $action in
  create)
    address
    slice
    mesh
    plan
    folder=$(mktemp -d)
    trap 'rm -r "$folder"' EXIT
    command=$(printf '%q ' python -m meliad_rec.main \
      "--workdir=${flag[workdir]}" "${train[@]}")
    echo "$command" >"$folder/command.sh"
    record "$folder/command.sh"
    doing xpk workload create "--workload=$name" "${where[@]}" \
      "--tpu-type=$xpk_type" --num-slices=1 "--docker-image=${flag[image]}" \
      --env=JAX_COORDINATOR_PORT=8476 "--max-restarts=${flag[restarts]:-100}" \
      --restart-on-exit-codes=1 --termination-grace-period-seconds=300 \
      "--command=${command% }"
    ;;
  logs) doing kubectl logs --follow --tail=200 --container=jax-tpu \
    "--selector=$first" ;;
  attach)
    pod=$(doing kubectl get pods "--selector=$first" --output=name)
    if [ -n "$dry_run" ]; then
      echo "$pod"
      pod=POD
    fi
    [ -n "$pod" ] || fail "No pod of $name is running. Check that it was created."
    doing kubectl exec --stdin --tty "$pod" --container=jax-tpu -- bash
    ;;
  delete) doing xpk workload delete "--workload=$name" "${where[@]}" --force ;;
esac
