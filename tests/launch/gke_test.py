"""GKE: every argument of every xpk and kubectl that would be run."""

import pytest

from tests.stand_ins import refusal
from tests.stand_ins import StandIns

CLUSTER = ('--cluster=c', '--zone=z')
CREATE = (
  *('create', 'a-run', *CLUSTER, '--topology=v5p:4x4x4', '--image=reg/i:1'),
  '--workdir=gs://b/runs/a',
)
TRAIN = ('--', '--gin_file=arch/window', '--gin_param=STEPS = 10')
FIRST = (
  '--selector=jobset.sigs.k8s.io/jobset-name=a-run,'
  'batch.kubernetes.io/job-completion-index=0'
)


@pytest.fixture
def cloud(tmp_path):
  return StandIns(tmp_path, gcloud='', python='', xpk='', kubectl='')


def test_a_run_is_planned_checked_and_submitted(cloud):
  done = cloud.run('gke.sh', *CREATE, '--project=p', *TRAIN)
  assert done.returncode == 0, done.stderr
  plan, record, submit = cloud.calls()
  assert plan == [
    *('python', '-m', 'meliad_rec', 'plan', '--topology=v5p:4x4x4'),
    *('--budget=fits', *TRAIN[1:]),
  ]
  assert record[:3] == ['gcloud', 'storage', 'cp']
  assert record[4] == 'gs://b/runs/a/launch/command.sh'
  assert submit == [
    *('xpk', 'workload', 'create', '--workload=a-run', *CLUSTER),
    *('--project=p', '--tpu-type=v5p-4x4x4', '--num-slices=1'),
    *('--docker-image=reg/i:1', '--env=JAX_COORDINATOR_PORT=8476'),
    *('--max-restarts=100', '--restart-on-exit-codes=1'),
    '--termination-grace-period-seconds=300',
    '--command=python -m meliad_rec.main --workdir=gs://b/runs/a'
    r' --gin_file=arch/window --gin_param=STEPS\ =\ 10',
  ]


def test_one_command_each(cloud):
  cloud.answer('kubectl', '[ "$1" != get ] || echo pod/a-run-0')
  logs = ['--follow', '--tail=200', '--container=jax-tpu', FIRST]
  cloud.run('gke.sh', 'logs', 'a-run')
  assert cloud.calls() == [['kubectl', 'logs', *logs]]
  cloud.run('gke.sh', 'attach', 'a-run')
  assert cloud.calls() == [
    ['kubectl', 'get', 'pods', FIRST, '--output=name'],
    [
      *('kubectl', 'exec', '--stdin', '--tty', 'pod/a-run-0'),
      *('--container=jax-tpu', '--', 'bash'),
    ],
  ]
  cloud.run('gke.sh', 'delete', 'a-run', *CLUSTER)
  assert cloud.calls() == [
    ['xpk', 'workload', 'delete', '--workload=a-run', *CLUSTER, '--force']
  ]


@pytest.mark.parametrize('action', ['create', 'logs', 'attach', 'delete'])
def test_a_dry_run_runs_nothing(cloud, action):
  needed = {'create': CREATE[2:] + TRAIN, 'delete': CLUSTER}.get(action, ())
  done = cloud.run('gke.sh', action, 'a-run', '--dry_run', *needed)
  assert done.returncode == 0, done.stderr
  assert cloud.calls() == []
  assert 'xpk workload' in done.stdout or 'kubectl ' in done.stdout


@pytest.mark.parametrize(
  ('code', 'said'), [(3, 'does not fit'), (4, 'is not known'), (1, 'no plan')]
)
def test_what_is_not_known_to_fit_is_not_submitted(cloud, code, said):
  cloud.answer('python', f'exit {code}')
  done = cloud.run('gke.sh', *CREATE, *TRAIN)
  assert done.returncode == code and said in done.stderr
  assert [call[0] for call in cloud.calls()] == ['python']


@pytest.mark.parametrize(
  'arguments, said',
  [
    (('create', 'a', *CLUSTER), 'create needs --topology=...'),
    (('delete', 'a'), 'delete needs --cluster=...'),
    (('logs', 'a', '--zone=z'), 'There is no flag --zone of logs'),
    ((*CREATE, '--workdir=/mnt/a', *TRAIN), "--workdir is '/mnt/a'"),
    (CREATE, 'What to train is not said'),
    ((*CREATE, '--mesh=data:4', '--'), 'What to train is not said'),
  ],
)
def test_mistakes_submit_nothing(cloud, arguments, said):
  assert said in refusal(cloud.run('gke.sh', *arguments))
  assert cloud.calls() == []


def test_a_run_without_a_pod(cloud):
  assert 'No pod of a-run runs' in refusal(
    cloud.run('gke.sh', 'attach', 'a-run')
  )
