"""Jobs on TPU slices, GKE, SLURM and machines over ssh, as they go wrong.

The commands that start them are in golden/.
"""

import re
import shutil

import pytest

from tests.stand_ins import LAUNCH
from tests.stand_ins import refusal
from tests.stand_ins import StandIns

TRAIN = ('--', '--gin_file=arch/window', '--gin_param=STEPS = 10_000')
RUN = ('--image=reg.dev/p/i:1', '--workdir=gs://b/runs/a', *TRAIN)
TPU = ('tpu.sh', 'create', 'a-run', '--zone=z', '--topology=v5e:4x4', *RUN)
GKE = ('gke.sh', *TPU[1:3], '--cluster=c', *TPU[3:])
# Keeps a copy of the startup script, and of the second report of the end. The
# first report fails, and so does the first copy of the data.
GCLOUD = """
case "$2 ${3:-}" in
  'rsync --recursive' | 'cp -')
    [ -e "tried $2" ] || { touch "tried $2"; exit 1; }
    [ "$2" = rsync ] || cat >ended ;;
  cp*) cp "$3" startup.sh ;;
esac
"""


@pytest.fixture
def cloud(tmp_path):
  """Stand-ins for all commands; all succeed."""
  known = 'python', 'docker', 'sleep', 'kubectl', 'srun', 'scontrol'
  return StandIns(tmp_path, gcloud=GCLOUD, **dict.fromkeys(known, ''))


@pytest.fixture
def host(cloud, tmp_path):
  """Returns a function that starts a host: its startup script runs here."""
  assert cloud.run(*TPU[:3], '--data=gs://b/s', *TPU[3:]).returncode == 0
  script = tmp_path / 'startup.sh'
  text = script.read_text()
  assert re.search(r'^ended=gs://b/runs/a/launch/ended-\d+$', text, re.M)
  script.write_text(text.replace('/opt/meliad_rec', str(tmp_path / 'opt')))
  cloud.calls()
  return lambda: cloud.run(str(script)).returncode


@pytest.mark.parametrize('codes', [(137, 143, 1, 0), (2,)])
def test_a_host_trains_until_the_end_or_a_mistake(cloud, host, tmp_path, codes):
  """All hosts end with 143 if one of them restarts."""
  (tmp_path / 'codes').write_text(''.join(f'{code}\n' for code in codes))
  cloud.answer(
    'docker',
    '[ "$1" = run ] || exit 0\n'
    'code=$(head -n 1 codes); sed -i 1d codes; exit "$code"',
  )
  assert host() == codes[-1]
  calls = [call for call in cloud.calls() if call[0] != 'sleep']
  assert [call[1:3] for call in calls[:5]] == [
    *(['stop', '--time=600'], ['rm', '--force']),
    *(['storage', 'rsync'], ['storage', 'rsync'], ['auth', 'configure-docker']),
  ]
  pull = ['docker', 'pull', '--quiet', 'reg.dev/p/i:1']
  run = [
    *('docker', 'run', '--name=meliad_rec', '--rm', '--init'),
    *('--privileged', '--network=host', '--stop-timeout=600'),
    '--env=JAX_COORDINATOR_PORT=8476',
    f'--volume={tmp_path}/opt/data:/data:ro',
    *('reg.dev/p/i:1', '--workdir=gs://b/runs/a', *TRAIN[1:]),
    "--gin_param=STORE = '/data'",
  ]
  assert calls[5:-2] == [pull, run] * len(codes)
  assert (tmp_path / 'ended').read_text() == f'exit code {codes[-1]}\n'


def test_a_stopped_host_trains_again_after_run(cloud, host, tmp_path):
  marker = tmp_path / 'opt' / 'stopped'
  cloud.answer('docker', f'[ "$1" != run ] || {{ touch {marker}; exit 143; }}')
  names = lambda: [call[1] for call in cloud.calls() if call[0] == 'docker']
  assert host() == 0
  assert names() == ['stop', 'rm', 'pull', 'run']
  host()
  assert names() == ['stop', 'rm']
  marker.unlink()
  host()
  assert names() == ['stop', 'rm', 'pull', 'run']


def test_a_host_that_is_stopped_while_it_fetches_the_image_does_not_train(
  cloud, host, tmp_path
):
  marker = tmp_path / 'opt' / 'stopped'
  cloud.answer('docker', f'[ "$1" != pull ] || touch {marker}')
  assert host() == 0
  calls = [call[1] for call in cloud.calls() if call[0] == 'docker']
  assert calls == ['stop', 'rm', 'pull']


@pytest.mark.parametrize('command', ['pull', 'run'])
def test_a_failure_that_repeats_ends_training(cloud, host, tmp_path, command):
  cloud.answer('docker', f'[ "$1" != {command} ] || exit 125')
  assert host() == 125
  tried = [call for call in cloud.calls() if call[:2] == ['docker', command]]
  assert len(tried) == 20
  ended = (tmp_path / 'ended').read_text()
  assert 'failed 20 times' in ended and ended.endswith(' exit code 125\n')


@pytest.mark.parametrize(
  ('create', 'code', 'text'),
  [
    (TPU, 3, 'does not fit'),
    (GKE, 4, 'not known'),
    *((TPU, 1, 'failed'), (GKE, 2, 'failed')),
  ],
)
def test_a_step_that_may_not_fit_requests_nothing(cloud, create, code, text):
  cloud.answer('python', f'exit {code}')
  done = cloud.run(*create)
  assert done.returncode == code
  assert text in done.stderr
  assert [call[0] for call in cloud.calls()] == ['python']


@pytest.mark.parametrize('create', [TPU, GKE])
def test_a_folder_that_cannot_be_written_requests_nothing(cloud, create):
  cloud.answer('gcloud', 'exit 1')
  assert 'gs://b/runs/a' in refusal(cloud.run(*create))
  assert [call[:2] for call in cloud.calls()][1:] == [['gcloud', 'storage']]


def test_data_that_cannot_be_read_request_nothing(cloud):
  cloud.answer('gcloud', 'exit 1')
  done = cloud.run(*TPU[:3], '--data=gs://b/s/', *TPU[3:])
  assert 'gs://b/s/ cannot be read' in refusal(done)
  assert cloud.calls() == [['gcloud', 'storage', 'ls', 'gs://b/s/']]


@pytest.mark.parametrize(
  ('states', 'asks', 'code', 'said', 'calls'),
  [
    (
      *('ACTIVE SUSPENDED ACTIVE', '0 0', 0, 'a-run is SUSPENDED'),
      'create describe describe delete create describe',
    ),
    # A request that fails is retried.
    (
      *(
        'FAILED no NOT_FOUND NOT_FOUND ACTIVE',
        '0 1 1 0',
        2,
        'a-run is FAILED',
      ),
      'create describe describe delete create describe create describe create '
      'describe',
    ),
    # One that is refused each time is not.
    (
      *('FAILED no ' * 5 + 'ACTIVE', '0 ' * 5, 2, 'failed 5 times'),
      'create describe describe ' + 'delete create describe describe ' * 4,
    ),
    # Someone deleted the slice.
    ('NOT_FOUND ACTIVE', '0', 2, 'a-run was deleted', 'create describe'),
  ],
)
def test_a_preempted_slice_is_requested_again(
  cloud, tmp_path, states, asks, code, said, calls
):
  """Training ends with a code after the last state of the slice."""
  (tmp_path / 'states').write_text(states.replace(' ', '\n') + '\n')
  (tmp_path / 'asks').write_text(asks.replace(' ', '\n') + '\n')
  cloud.answer(
    'gcloud',
    'next() { head -n 1 "$1"; sed -i 1d "$1"; }\n'
    'case "$*" in\n'
    '  *describe*) echo WARNING: old >&2; next states ;;\n'
    '  *" create "*) exit "$(next asks)" ;;\n'
    f'  "storage cat "*) [ ! -s states ] && echo exit code {code} ;;\n'
    'esac',
  )
  done = cloud.run(*TPU[:3], '--keep', *TPU[3:], POLL_SECONDS='0')
  assert done.returncode == code, done.stderr
  assert said in done.stderr
  of_slice = [call[4] for call in cloud.calls() if call[2:3] == ['tpus']]
  assert of_slice == calls.split()


def test_an_old_bash_is_an_error(cloud, tmp_path):
  shutil.copytree(LAUNCH, tmp_path / 'launch')
  shared = tmp_path / 'launch' / 'slice.sh'
  shared.write_text(shared.read_text().replace('BASH_VERSINFO[0]', '3'))
  for script, *arguments in TPU, GKE:
    done = cloud.run(str(tmp_path / 'launch' / script), *arguments)
    assert f'{script} needs bash 4.4' in refusal(done)


def test_gke_attaches_to_a_pod_that_runs(cloud):
  assert 'No pod of a-run' in refusal(cloud.run('gke.sh', 'attach', 'a-run'))


@pytest.mark.parametrize(
  ('code', 'restarts', 'seconds', 'state', 'again'),
  [
    *((0, 0, 0, '', False), (2, 0, 0, '', False), (143, 99, 0, '', True)),
    *((1, 0, 0, 'RUNNING', True), (134, 19, 0, '', True)),
    # A failure soon after the start may be a defect.
    *((1, 20, 0, '', False), (1, 20, 240, '', True)),
    # A canceled job is not queued again.
    *((143, 0, 0, state, False) for state in ('COMPLETING', 'CANCELLED by 1')),
    (143, 0, 0, 'PREEMPTED', False),
  ],
)
def test_a_slurm_job_is_queued_again_unless_it_ended(
  cloud, code, restarts, seconds, state, again
):
  cloud.answer('srun', f'exit {code}')
  cloud.answer('squeue', f'echo {state}' if state else 'exit 1')
  # Bash counts on from the SECONDS that it is given.
  counted = {'SLURM_RESTART_COUNT': f'{restarts}', 'SECONDS': f'{seconds}'}
  done = cloud.run(
    *('slurm_job.sh', '--workdir=a', *TRAIN[1:]), SLURM_JOB_ID='7', **counted
  )
  first, *rest = cloud.calls()
  assert first == [
    *('srun', '--kill-on-bad-exit=0', 'python', '-m', 'meliad_rec.main'),
    *('--workdir=a', *TRAIN[1:]),
  ]
  asks = ['squeue', '--noheader', '--jobs=7', '--format=%T']
  asked = [asks] if again or code == 143 else []
  assert rest == asked + [['scontrol', 'requeue', '7']] * again
  assert done.returncode == (0 if again else code)
