#!/usr/bin/env bash
# Trains on a slice of Cloud TPUs; each line is one command:
#
#   bash launch/tpu.sh create NAME --zone=Z --topology=v5e:16x16 --image=IMAGE
#     --workdir=gs://BUCKET/runs/NAME [--spot | --reserved] [--keep]
#     [--mesh=data:64,model:4] [--data=gs://BUCKET/STORE] [--vocab_size=N]
#     [--no_plan] -- --gin_file=... --gin_param=...
#   bash launch/tpu.sh logs NAME --zone=Z [--worker=0]    # what it says, live
#   bash launch/tpu.sh attach NAME --zone=Z [--worker=0]  # a shell on a host
#   bash launch/tpu.sh stop NAME --zone=Z    # saves and stops, keeps the slice
#   bash launch/tpu.sh run NAME --zone=Z     # goes on
#   bash launch/tpu.sh delete NAME --zone=Z  # gives the slice back
#
# All take --project=P, and --dry_run, which prints what would be run. `create`
# checks first that the step fits (meliad_rec.commands.plan) and that the folder of the
# run can be written, then asks for the slice. IMAGE is what launch/Dockerfile
# makes. The command to train is in the slice's start-up script: hosts that start
# again go on, unless they were stopped. A preempted slice is gone; with --keep,
# this script stays, and asks for it again, until training has ended. --data is
# copied to each host, and is STORE there.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/slice.sh
source "$here/slice.sh"

action=${1:-} name=${2:-}
case $action in
  create | logs | attach | stop | run | delete) ;;
  *) usage ;;
esac
[[ $name =~ ^[a-z][a-z0-9-]*$ ]] \
  || fail "The name of the slice is '$name'; give small letters, digits and -."
shift 2
case $action in
  create)
    parse 'zone project dry_run topology image workdir spot reserved keep mesh data vocab_size no_plan' "$@"
    need zone topology image workdir
    need_train "${train[@]}"
    ;;
  logs | attach) parse 'zone project dry_run worker' "$@" && need zone ;;
  *) parse 'zone project dry_run' "$@" && need zone ;;
esac
where=("--zone=${flag[zone]}")
[ -z "${flag[project]:-}" ] || where+=("--project=${flag[project]}")

# on WORKER [COMMAND]: runs it there, or opens a shell.
on() {
  doing gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" "--worker=$1" \
    ${2:+"--command=$2"}
}

# Asks for the slice; it comes when it is there.
ask() {
  doing gcloud compute tpus queued-resources create "$name" "${where[@]}" \
    "--node-id=$name" "${shaped[@]}" "--runtime-version=$software" \
    ${flag[spot]:+--spot} ${flag[reserved]:+--reserved} \
    --scopes=https://www.googleapis.com/auth/cloud-platform \
    "--metadata-from-file=startup-script=$script"
}

delete() {
  doing gcloud compute tpus queued-resources delete "$name" "${where[@]}" \
    --force --quiet
}

# Waits for the end of training, and asks again for a slice that was preempted.
# Gives the exit code of training.
keep() {
  local said gone=
  while true; do
    if said=$(gcloud storage cat "$ended" 2>/dev/null); then
      echo "$said"
      exit "${said##* }"
    fi
    said=$(gcloud compute tpus queued-resources describe "$name" \
      "${where[@]}" '--format=value(state.state)' 2>&1) || true
    case $said in
      # Warnings may come before it.
      SUSPENDED | FAILED | *$'\n'SUSPENDED | *$'\n'FAILED)
        echo "$name is ${said##*$'\n'}: asking for it again." >&2
        ! delete || gone=yes
        ;;
      *NOT_FOUND*)
        [ -n "$gone" ] || fail "$name was deleted before training ended."
        ;;
    esac
    # What fails here is tried again, as long as it takes.
    [ -z "$gone" ] || ! ask || gone=
    sleep "${POLL_SECONDS:-60}"
  done
}

case $action in
  create)
    [ -z "${flag[spot]:-}" ] || [ -z "${flag[reserved]:-}" ] \
      || fail '--spot and --reserved are two kinds of slices; give one of them.'
    address
    slice
    mesh
    [ -z "${flag[data]:-}" ] || train+=("--gin_param=STORE = '/data'")
    plan
    ended=${flag[workdir]}/launch/ended-$(date +%s)
    folder=$(mktemp -d)
    trap 'rm -r "$folder"' EXIT
    script=$folder/startup.sh
    {
      echo '#!/usr/bin/env bash'
      printf '%s=%q\n' image "${flag[image]}" data "${flag[data]:-}" \
        ended "$ended"
      printf 'train=('
      printf ' %q' "--workdir=${flag[workdir]}" "${train[@]}"
      echo ' )'
      sed 1d "$here/tpu_startup.sh"
    } >"$script"
    [ -z "$dry_run" ] || sed 's/^/  /' "$script"
    record "$script"
    ask
    if [ -n "${flag[keep]:-}" ] && [ -z "$dry_run" ]; then
      keep
    fi
    ;;
  logs)
    on "${flag[worker]:-0}" \
      'sudo journalctl --unit=google-startup-scripts --output=cat --lines=200 --follow'
    ;;
  attach) on "${flag[worker]:-0}" ;;
  stop)
    on all 'sudo touch /opt/meliad_rec/stopped
      sudo docker stop --time=600 meliad_rec || true'
    ;;
  run)
    on all 'sudo rm -f /opt/meliad_rec/stopped
      sudo systemctl restart --no-block google-startup-scripts'
    ;;
  delete) delete ;;
esac
