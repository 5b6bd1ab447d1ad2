#!/usr/bin/env bash
# Trains on a slice of Cloud TPUs; each line is one command:
#
#   bash launch/tpu.sh create NAME --zone=Z --topology=v5e:16x16 --image=IMAGE
#     --workdir=gs://BUCKET/runs/NAME [--spot | --reserved] [--keep]
#     [--mesh=data:64,model:4] [--data=gs://BUCKET/STORE] [--vocab_size=N]
#     [--no_plan] -- --gin_file=... --gin_param=...
#   bash launch/tpu.sh logs NAME --zone=Z [--worker=0]    # follows the output
#   bash launch/tpu.sh attach NAME --zone=Z [--worker=0]  # a shell on a host
#   bash launch/tpu.sh stop NAME --zone=Z    # saves and stops; keeps the slice
#   bash launch/tpu.sh run NAME --zone=Z     # resumes
#   bash launch/tpu.sh delete NAME --zone=Z  # deletes the slice
#
# All take --project=P, and --dry_run, which prints the commands instead of
# running them. `create` checks that --data can be read, that the training step
# fits (meliad-rec plan) and that --workdir can be written, then requests the
# slice. IMAGE is built from launch/Dockerfile. The slice's startup script trains,
# so hosts that restart resume training, unless they were stopped. A preempted
# slice is gone; with --keep, this script keeps running, and requests the slice
# again each time until training has ended. --data is copied to each host and
# becomes STORE.
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
  || fail "'$name' is not a name for a slice. Use lowercase letters, digits" \
    "and -, and a letter first."
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

# on WORKER [COMMAND]: runs a command on a host, or opens a shell.
on() {
  doing gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" "--worker=$1" \
    ${2:+"--command=$2"}
}

# Requests the slice; it is created when there is capacity.
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

# Waits until training has ended, and requests a preempted slice again. Exits
# with the exit code of training.
keep() {
  local said gone='' failed=0
  while true; do
    if said=$(gcloud storage cat "$ended" 2>/dev/null); then
      echo "$said"
      exit "${said##* }"
    fi
    said=$(gcloud compute tpus queued-resources describe "$name" \
      "${where[@]}" '--format=value(state.state)' 2>&1) || true
    case $said in
      # Warnings may precede the state.
      SUSPENDED | FAILED | *$'\n'SUSPENDED | *$'\n'FAILED)
        if [[ $said == *FAILED ]]; then
          gcloud compute tpus queued-resources describe "$name" "${where[@]}" \
            '--format=value(state.failedData.error.message)' >&2 || true
          failed=$((failed + 1))
          ((failed < 5)) || fail "The request for $name failed $failed times in" \
            "a row. Correct the cause above, and create it again."
        fi
        echo "$name is ${said##*$'\n'}: requesting it again." >&2
        ! delete || gone=yes
        ;;
      ACTIVE | *$'\n'ACTIVE) failed=0 ;;
      *NOT_FOUND*)
        [ -n "$gone" ] || fail "$name was deleted before training ended."
        ;;
    esac
    # A failure here is retried until it succeeds.
    [ -z "$gone" ] || ! ask || gone=
    sleep "${POLL_SECONDS:-60}"
  done
}

case $action in
  create)
    [ -z "${flag[spot]:-}" ] || [ -z "${flag[reserved]:-}" ] \
      || fail '--spot and --reserved exclude each other. Give one of them.'
    address
    slice
    mesh
    if [ -n "${flag[data]:-}" ]; then
      refuse '^(--?gin_param=)?[[:space:]]*STORE[[:space:]]*=' data
      doing gcloud storage ls "${flag[data]%/}/" \
        || fail "${flag[data]} cannot be read (see above), so nothing was" \
          "requested. Give another --data, or the permission to read it."
      train+=("--gin_param=STORE = '/data'")
    fi
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
