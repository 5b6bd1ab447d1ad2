"""Slices of Cloud TPUs: every argument of every gcloud that would be run."""

import re
import shutil
import subprocess

import pytest

from tests.stand_ins import LAUNCH
from tests.stand_ins import refusal
from tests.stand_ins import StandIns

SLICE = ('--zone=us-west4-a', '--topology=v5e:16x16', '--image=reg.dev/p/i:1')
CREATE = ('create', 'a-run', *SLICE, '--workdir=gs://b/runs/a')
TRAIN = ('--', '--gin_file=arch/window', '--gin_param=STEPS = 10_000')
# What is uploaded, to look at.
COPY = 'if [ "$3" = - ]; then cat >ended; else cp "${@:(-2):1}" startup.sh; fi'


@pytest.fixture
def cloud(tmp_path):
  copy = f'[ "$2" != cp ] || {COPY}'
  bodies = {'gcloud': copy, 'python': '', 'docker': '', 'sleep': ''}
  return StandIns(tmp_path, **bodies)


def test_a_slice_is_planned_checked_and_asked_for(cloud, tmp_path):
  done = cloud.run('tpu.sh', *CREATE, '--spot', '--project=p', *TRAIN)
  assert done.returncode == 0, done.stderr
  plan, record, ask = cloud.calls()
  assert plan == [
    *('python', '-m', 'meliad_rec', 'plan', '--topology=v5e:16x16'),
    *('--budget=fits', '--gin_file=arch/window', '--gin_param=STEPS = 10_000'),
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


@pytest.mark.parametrize(
  'topology, shaped, software',
  [
    ('v5e:2x4', ['--accelerator-type=v5litepod-8'], 'v2-alpha-tpuv5-lite'),
    ('v6e:8x8', ['--accelerator-type=v6e-64'], 'v2-alpha-tpuv6e'),
    ('v5p:2x2x4', ['--type=v5p', '--topology=2x2x4'], 'v2-alpha-tpuv5'),
    ('v4:2x2x2', ['--type=v4', '--topology=2x2x2'], 'tpu-ubuntu2204-base'),
  ],
)
def test_generations(cloud, topology, shaped, software):
  arguments = [f'--topology={topology}', '--reserved', '--no_plan']
  done = cloud.run('tpu.sh', *CREATE, *arguments, *TRAIN)
  assert done.returncode == 0, done.stderr
  *_, ask = cloud.calls()
  assert ask[7:-2] == [
    *('--node-id=a-run', *shaped, f'--runtime-version={software}'),
    '--reserved',
  ]


def test_values_of_flags_may_come_next(cloud):
  given = ('--', '--gin_file', 'arch/window', '--profile', '1:2')
  cloud.run('tpu.sh', *CREATE, *given)
  assert cloud.calls()[0][6:] == ['--gin_file', 'arch/window']


def test_a_mesh_is_what_plan_and_trainer_read(cloud, tmp_path):
  mesh = ('--mesh=data:64,model:4', '--data=gs://b/books', '--vocab_size=9')
  done = cloud.run('tpu.sh', *CREATE, *mesh, *TRAIN, '--profile=1:2')
  assert done.returncode == 0, done.stderr
  settings = [
    *('--gin_file=arch/window', '--gin_param=STEPS = 10_000'),
    *('--mesh=data:64,model:4', "--gin_param=STORE = '/data'"),
  ]
  limits = ['--budget=fits', '--vocab_size=9']
  assert cloud.calls()[0][5:] == [*limits, *settings]
  cloud.answer('docker', '')
  assert trained(cloud, tmp_path)[-1][-5:] == [
    *settings[:2],
    '--profile=1:2',
    *settings[2:],
  ]


def here(tmp_path):
  """Puts the folder of the start-up script into one of this machine."""
  script = tmp_path / 'startup.sh'
  text = script.read_text().replace('/opt/meliad_rec', str(tmp_path / 'opt'))
  script.write_text(text)


def trained(cloud, tmp_path, **env):
  """Calls of the start-up script on a host."""
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
def test_a_host_goes_on_until_the_end_or_a_mistake(
  cloud, tmp_path, codes, ended
):
  """143 is what all hosts end with where one of them starts again."""
  cloud.run('tpu.sh', *CREATE, *TRAIN)
  cloud.calls()
  here(tmp_path)
  (tmp_path / 'codes').write_text(codes.replace(' ', '\n') + '\n')
  cloud.answer(
    'docker',
    '[ "$1" = run ] || exit 0\n'
    'code=$(head -n 1 codes); sed -i 1d codes; exit "$code"',
  )
  # That it has ended is said until it is heard.
  cloud.answer(
    'gcloud',
    '[ "$3" = - ] || exit 0\n'
    '[ -e tried ] || { touch tried; exit 1; }\ncat >ended',
  )
  cloud.run(str(tmp_path / 'startup.sh'))
  runs = [call for call in cloud.calls() if call[:2] == ['docker', 'run']]
  assert len(runs) == len(codes.split())
  assert (tmp_path / 'ended').read_text() == f'exit code {ended}\n'


def test_a_stopped_host_trains_again_when_it_is_told_to(cloud, tmp_path):
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


def test_a_host_prepares_until_it_can(cloud, tmp_path):
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
  'code, said',
  [(3, 'does not fit in v5e:16x16'), (1, 'no plan'), (2, 'no plan')],
)
def test_what_does_not_fit_is_not_asked_for(cloud, code, said):
  cloud.answer('python', f'exit {code}')
  done = cloud.run('tpu.sh', *CREATE, *TRAIN)
  assert done.returncode == code
  assert said in done.stderr
  assert [call[0] for call in cloud.calls()] == ['python']


def test_a_folder_that_cannot_be_written(cloud):
  cloud.answer('gcloud', 'exit 1')
  done = cloud.run('tpu.sh', *CREATE, *TRAIN)
  assert 'gs://b/runs/a cannot be written' in refusal(done)
  assert [call[:3] for call in cloud.calls()][1:] == [
    ['gcloud', 'storage', 'cp']
  ]


def test_a_preempted_slice_is_asked_for_again(cloud, tmp_path):
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
  assert 'a-run is SUSPENDED: asking for it again.' in done.stderr


def test_what_fails_while_keeping_a_slice_is_tried_again(cloud, tmp_path):
  """Asking for it fails twice; training ends by a mistake."""
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


def test_a_slice_that_someone_deleted_is_not_asked_for(cloud):
  cloud.answer(
    'gcloud',
    'case "$*" in *describe*) echo NOT_FOUND; exit 1 ;; *cat*) exit 1 ;; esac',
  )
  done = cloud.run('tpu.sh', *CREATE, '--keep', *TRAIN, POLL_SECONDS='0')
  assert 'a-run was deleted before training ended' in refusal(done)


SSH = ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'a-run', '--zone=z']


@pytest.mark.parametrize(
  'arguments, expected',
  [
    (
      ['logs'],
      [
        *(*SSH, '--worker=0'),
        '--command=sudo journalctl --unit=google-startup-scripts --output=cat'
        ' --lines=200 --follow',
      ],
    ),
    (['attach', '--worker=3'], [*SSH, '--worker=3']),
    (
      ['stop'],
      [
        *SSH,
        '--worker=all',
        '--command=sudo touch /opt/meliad_rec/stopped\n'
        '      sudo docker stop --time=600 meliad_rec || true',
      ],
    ),
    (
      ['run'],
      [
        *(*SSH, '--worker=all'),
        '--command=sudo rm -f /opt/meliad_rec/stopped\n'
        '      sudo systemctl restart --no-block google-startup-scripts',
      ],
    ),
    (
      ['delete'],
      [
        *('gcloud', 'compute', 'tpus', 'queued-resources', 'delete', 'a-run'),
        *('--zone=z', '--force', '--quiet'),
      ],
    ),
  ],
)
def test_one_command_each(cloud, arguments, expected):
  action, *more = arguments
  done = cloud.run('tpu.sh', action, 'a-run', '--zone=z', *more)
  assert done.returncode == 0, done.stderr
  assert cloud.calls() == [expected]


@pytest.mark.parametrize('action', ['create', 'logs', 'stop', 'delete'])
def test_a_dry_run_runs_nothing(cloud, action):
  """Also where the variable asks for it, as in all launchers."""
  arguments = CREATE[2:] + TRAIN if action == 'create' else ('--zone=z',)
  done = cloud.run('tpu.sh', action, 'a-run', '--dry_run', *arguments)
  assert done.returncode == 0, done.stderr
  assert cloud.calls() == []
  assert re.search(r'^gcloud compute tpus .*a-run --zone', done.stdout, re.M)
  if action == 'create':
    assert 'python -m meliad_rec plan --topology=v5e:16x16' in done.stdout
    assert r'--gin_param=STEPS\ =\ 10_000' in done.stdout
    assert '  docker run --name=meliad_rec' in done.stdout
  by_variable = cloud.run('tpu.sh', action, 'a-run', *arguments, DRY_RUN='1')
  assert by_variable.returncode == 0 and cloud.calls() == []


@pytest.mark.parametrize(
  'arguments, said',
  [
    (('create', 'A'), "The name of the slice is 'A'"),
    (('create', 'a', *SLICE), 'create needs --workdir=...'),
    (('logs', 'a'), 'logs needs --zone=...'),
    (('logs', 'a', '--zone'), '--zone has no value; write --zone=...'),
    ((*CREATE, '--data='), '--data has no value; write --data=...'),
    ((*CREATE, '--project='), '--project has no value'),
    (('logs', 'a', '--spot'), 'There is no flag --spot of logs'),
    (('stop', 'a', 'now'), "'now' is no flag"),
    ((*CREATE, '--gin_file=arch/window'), 'come after --'),
    ((*CREATE, '--topology=v9:2x2'), "--topology is 'v9:2x2'"),
    ((*CREATE, '--topology=v5p:4x4'), "--topology is 'v5p:4x4'"),
    ((*CREATE, '--topology=v5e:0x4'), 'no side can be 0'),
    ((*CREATE, '--mesh=rows:4'), "the part 'rows:4'"),
    ((*CREATE, '--spot', '--reserved'), 'give one of them'),
    ((*CREATE, '--spot=false'), '--spot=false has a value'),
    ((*CREATE, '--dry_run=no'), '--dry_run=no has a value'),
    ((*CREATE, '--workdir=runs/a'), "--workdir is 'runs/a'"),
    ((*CREATE, '--workdir=gs://b'), "--workdir is 'gs://b'"),
  ],
)
def test_mistakes_ask_for_nothing(cloud, arguments, said):
  assert said in refusal(cloud.run('tpu.sh', *arguments, *TRAIN))
  assert cloud.calls() == []


@pytest.mark.parametrize(
  'nothing', [(), ('--mesh=data:4', '--data=gs://b/s', '--')]
)
def test_a_slice_that_would_train_nothing_is_not_asked_for(cloud, nothing):
  done = cloud.run('tpu.sh', *CREATE, *nothing)
  assert 'What to train is not said' in refusal(done)
  assert cloud.calls() == []


def test_an_old_bash_is_told_what_is_needed(cloud, tmp_path):
  shutil.copytree(LAUNCH, tmp_path / 'launch')
  shared = tmp_path / 'launch' / 'slice.sh'
  shared.write_text(shared.read_text().replace('BASH_VERSINFO[0]', '3'))
  done = cloud.run(str(tmp_path / 'launch' / 'tpu.sh'), *CREATE, *TRAIN)
  assert 'tpu.sh needs bash 4.4 or later, and this is ' in refusal(done)


def test_without_an_action_it_says_what_there_is(cloud):
  done = cloud.run('tpu.sh')
  assert done.returncode == 2
  for action in 'create', 'logs', 'attach', 'stop', 'run', 'delete':
    assert f'bash launch/tpu.sh {action} NAME --zone=Z' in done.stderr
  assert not re.search('^set ', done.stderr, re.M)


def test_shellcheck_finds_nothing():
  try:
    done = subprocess.run(
      ['shellcheck', '-x', *sorted(LAUNCH.glob('*.sh'))],
      cwd=LAUNCH.parent,
      capture_output=True,
      text=True,
    )
  except FileNotFoundError:
    pytest.skip('shellcheck is not installed')
  assert done.returncode == 0, done.stdout
