"""TPU slices: preemption, stopped and restarted hosts, failed requests.

The commands themselves are in golden/tpu.txt and golden/gke.txt.
"""

import re
import shutil

import pytest

from tests.stand_ins import LAUNCH
from tests.stand_ins import refusal
from tests.stand_ins import StandIns

SLICE = ('--zone=us-west4-a', '--topology=v5e:16x16', '--image=reg.dev/p/i:1')
CREATE = ('create', 'a-run', *SLICE, '--workdir=gs://b/runs/a')
TRAIN = ('--', '--gin_file=arch/window', '--gin_param=STEPS = 10_000')
# Keeps a copy of what is uploaded.
COPY = 'if [ "$3" = - ]; then cat >ended; else cp "${@:(-2):1}" startup.sh; fi'


@pytest.fixture
def cloud(tmp_path):
  copy = f'[ "$2" != cp ] || {COPY}'
  bodies = {'gcloud': copy, 'python': '', 'docker': '', 'sleep': ''}
  return StandIns(tmp_path, **bodies)


def test_create_plans_checks_the_folder_and_requests_the_slice(cloud, tmp_path):
  done = cloud.run('tpu.sh', *CREATE, '--spot', '--project=p', *TRAIN)
  assert done.returncode == 0, done.stderr
  plan, record, ask = cloud.calls()
  assert plan == [
    *('python', '-m', 'meliad_rec', 'plan', '--topology=v5e:16x16'),
    *('--gin_file=arch/window', '--gin_param=STEPS = 10_000'),
  ]
  assert record[:3] == ['gcloud', 'storage', 'cp']
  assert record[4] == 'gs://b/runs/a/launch/startup.sh'
  assert ask == [
    *('gcloud', 'compute', 'tpus', 'queued-resources', 'create', 'a-run'),
    *('--zone=us-west4-a', '--project=p', '--node-id=a-run'),
    *('--accelerator-type=v5litepod-256',),
    *('--runtime-version=v2-alpha-tpuv5-lite', '--spot'),
    '--scopes=https://www.googleapis.com/auth/cloud-platform',
    f'--metadata-from-file=startup-script={record[3]}',
  ]
  script = (tmp_path / 'startup.sh').read_text()
  assert script.startswith('#!/usr/bin/env bash\nimage=reg.dev/p/i:1\n')
  assert re.search(r'ended=gs://b/runs/a/launch/ended-\d+\n', script)


def here(tmp_path):
  """Moves the folder of the startup script to this machine."""
  script = tmp_path / 'startup.sh'
  text = script.read_text().replace('/opt/meliad_rec', str(tmp_path / 'opt'))
  script.write_text(text)


def trained(cloud, tmp_path, **env):
  """Returns the docker calls of the startup script on a host."""
  here(tmp_path)
  cloud.run(str(tmp_path / 'startup.sh'), **env)
  return [call for call in cloud.calls() if call[:2] == ['docker', 'run']]


def test_a_host_trains_with_the_port_pinned(cloud, tmp_path):
  cloud.run('tpu.sh', *CREATE, *TRAIN)
  cloud.calls()
  (run,) = trained(cloud, tmp_path)
  assert run == [
    *('docker', 'run', '--name=meliad_rec', '--rm', '--pull=always', '--init'),
    *('--privileged', '--network=host', '--stop-timeout=600'),
    *('--env=JAX_COORDINATOR_PORT=8476', 'reg.dev/p/i:1'),
    *('--workdir=gs://b/runs/a', '--gin_file=arch/window'),
    '--gin_param=STEPS = 10_000',
  ]


@pytest.mark.parametrize(
  'codes, ended', [('1 134 0', '0'), ('2', '2'), ('137 143 143 0', '0')]
)
def test_a_host_restarts_training_until_its_end_or_a_mistake(
  cloud, tmp_path, codes, ended
):
  """All hosts end with 143 if one of them restarts."""
  cloud.run('tpu.sh', *CREATE, *TRAIN)
  cloud.calls()
  here(tmp_path)
  (tmp_path / 'codes').write_text(codes.replace(' ', '\n') + '\n')
  cloud.answer(
    'docker',
    '[ "$1" = run ] || exit 0\n'
    'code=$(head -n 1 codes); sed -i 1d codes; exit "$code"',
  )
  # The end is reported until that succeeds.
  cloud.answer(
    'gcloud',
    '[ "$3" = - ] || exit 0\n'
    '[ -e tried ] || { touch tried; exit 1; }\ncat >ended',
  )
  cloud.run(str(tmp_path / 'startup.sh'))
  runs = [call for call in cloud.calls() if call[:2] == ['docker', 'run']]
  assert len(runs) == len(codes.split())
  assert (tmp_path / 'ended').read_text() == f'exit code {ended}\n'


def test_a_stopped_host_trains_again_after_run(cloud, tmp_path):
  cloud.run('tpu.sh', *CREATE, *TRAIN)
  cloud.calls()
  here(tmp_path)
  marker = tmp_path / 'opt' / 'stopped'
  cloud.answer('docker', f'[ "$1" != run ] || {{ touch {marker}; exit 143; }}')
  names = lambda: [call[1] for call in cloud.calls() if call[0] == 'docker']
  assert cloud.run(str(tmp_path / 'startup.sh')).returncode == 0
  assert names() == ['stop', 'rm', 'run']
  cloud.run(str(tmp_path / 'startup.sh'))
  assert names() == ['stop', 'rm']
  marker.unlink()
  cloud.run(str(tmp_path / 'startup.sh'))
  assert names() == ['stop', 'rm', 'run']


def test_a_host_retries_its_preparation(cloud, tmp_path):
  cloud.run('tpu.sh', *CREATE, '--data=gs://b/books', *TRAIN)
  cloud.calls()
  here(tmp_path)
  once = '[ "$2" != rsync ] || [ -e tried ] || { touch tried; exit 1; }'
  cloud.answer('gcloud', once)
  cloud.run(str(tmp_path / 'startup.sh'))
  calls = [call[:3] for call in cloud.calls()]
  assert calls.count(['gcloud', 'storage', 'rsync']) == 2
  assert calls.count(['gcloud', 'auth', 'configure-docker']) == 1
  assert ['docker', 'run', '--name=meliad_rec'] in calls


@pytest.mark.parametrize(
  'code, text',
  [(3, 'does not fit'), (4, 'not known'), (1, 'failed'), (2, 'failed')],
)
def test_a_step_that_does_not_fit_requests_nothing(cloud, code, text):
  cloud.answer('python', f'exit {code}')
  done = cloud.run('tpu.sh', *CREATE, *TRAIN)
  assert done.returncode == code
  assert text in done.stderr
  assert [call[0] for call in cloud.calls()] == ['python']


def test_a_folder_that_cannot_be_written(cloud):
  cloud.answer('gcloud', 'exit 1')
  done = cloud.run('tpu.sh', *CREATE, *TRAIN)
  assert 'gs://b/runs/a' in refusal(done)
  assert [call[:3] for call in cloud.calls()][1:] == [
    ['gcloud', 'storage', 'cp']
  ]


def test_a_preempted_slice_is_requested_again(cloud, tmp_path):
  (tmp_path / 'states').write_text('ACTIVE\nSUSPENDED\nACTIVE\n')
  cloud.answer(
    'gcloud',
    'case "$*" in\n'
    '  *describe*) echo WARNING: old >&2; head -n 1 states; sed -i 1d states ;;'
    '\n'
    '  "storage cat "*) [ ! -s states ] && echo exit code 0 ;;\n'
    'esac',
  )
  done = cloud.run('tpu.sh', *CREATE, '--keep', *TRAIN, POLL_SECONDS='0')
  assert done.returncode == 0, done.stderr
  calls = [call[4] for call in cloud.calls() if call[2:3] == ['tpus']]
  describe = 'describe'
  assert calls == [
    *('create', describe, describe, 'delete', 'create', describe),
  ]
  assert 'a-run is SUSPENDED' in done.stderr


def test_failures_while_keeping_a_slice_are_retried(cloud, tmp_path):
  """The request fails twice; training ends with a mistake."""
  (tmp_path / 'states').write_text('FAILED\nNOT_FOUND\nNOT_FOUND\nACTIVE\n')
  (tmp_path / 'asks').write_text('0\n1\n1\n0\n')
  cloud.answer(
    'gcloud',
    'next() { head -n 1 "$1"; sed -i 1d "$1"; }\n'
    'case "$*" in\n'
    '  *describe*) next states ;;\n'
    '  *" create "*) exit "$(next asks)" ;;\n'
    '  "storage cat "*) [ ! -s states ] && echo exit code 2 ;;\n'
    'esac',
  )
  done = cloud.run('tpu.sh', *CREATE, '--keep', *TRAIN, POLL_SECONDS='0')
  assert done.returncode == 2, done.stderr
  calls = [call[4] for call in cloud.calls() if call[2:3] == ['tpus']]
  again = 'describe', 'create'
  assert calls == ['create', 'describe', 'delete', 'create', *again * 2] + [
    'describe'
  ]


def test_a_slice_that_someone_deleted_is_not_requested(cloud):
  cloud.answer(
    'gcloud',
    'case "$*" in *describe*) echo NOT_FOUND; exit 1 ;; *cat*) exit 1 ;; esac',
  )
  done = cloud.run('tpu.sh', *CREATE, '--keep', *TRAIN, POLL_SECONDS='0')
  assert 'a-run was deleted' in refusal(done)


def test_an_old_bash_is_an_error(cloud, tmp_path):
  shutil.copytree(LAUNCH, tmp_path / 'launch')
  shared = tmp_path / 'launch' / 'slice.sh'
  shared.write_text(shared.read_text().replace('BASH_VERSINFO[0]', '3'))
  done = cloud.run(str(tmp_path / 'launch' / 'tpu.sh'), *CREATE, *TRAIN)
  assert 'tpu.sh needs bash 4.4' in refusal(done)


def test_without_an_action_it_shows_the_usage(cloud):
  done = cloud.run('tpu.sh')
  assert done.returncode == 2
  for action in 'create', 'logs', 'attach', 'stop', 'run', 'delete':
    assert f'bash launch/tpu.sh {action} NAME --zone=Z' in done.stderr
  assert not re.search('^set ', done.stderr, re.M)


GKE = (
  *('create', 'a-run', '--cluster=c', '--zone=z', '--topology=v5p:4x4x4'),
  *('--image=reg/i:1', '--workdir=gs://b/runs/a'),
)


@pytest.fixture
def cluster(tmp_path):
  return StandIns(tmp_path, gcloud='', python='', xpk='', kubectl='')


def test_gke_plans_checks_the_folder_and_submits(cluster):
  done = cluster.run('gke.sh', *GKE, *TRAIN)
  assert done.returncode == 0, done.stderr
  plan, record, submit = cluster.calls()
  assert plan[:4] == ['python', '-m', 'meliad_rec', 'plan']
  assert record[4] == 'gs://b/runs/a/launch/command.sh'
  assert submit[:3] == ['xpk', 'workload', 'create']
  assert submit[-1] == (
    '--command=python -m meliad_rec.main --workdir=gs://b/runs/a'
    r' --gin_file=arch/window --gin_param=STEPS\ =\ 10_000'
  )


@pytest.mark.parametrize('code', [3, 4, 1])
def test_gke_submits_nothing_that_is_not_known_to_fit(cluster, code):
  cluster.answer('python', f'exit {code}')
  assert cluster.run('gke.sh', *GKE, *TRAIN).returncode == code
  assert [call[0] for call in cluster.calls()] == ['python']


def test_gke_attaches_to_the_pod_of_process_0(cluster):
  assert 'No pod of a-run' in refusal(cluster.run('gke.sh', 'attach', 'a-run'))
  cluster.calls()
  cluster.answer('kubectl', '[ "$1" != get ] || echo pod/a-run-0')
  cluster.run('gke.sh', 'attach', 'a-run')
  get, shell = cluster.calls()
  assert get[:3] == ['kubectl', 'get', 'pods']
  assert shell[:5] == ['kubectl', 'exec', '--stdin', '--tty', 'pod/a-run-0']
