"""SLURM jobs, with what they do at each end, and machines over ssh.

The commands themselves are in golden/slurm.txt and golden/gpu.txt.
"""

import pytest

from tests.stand_ins import LAUNCH
from tests.stand_ins import StandIns

TRAIN = ('--gin_file=arch/window', '--gin_param=STEPS = 10')


@pytest.fixture
def cluster(tmp_path):
  running = 'echo RUNNING'
  return StandIns(tmp_path, sbatch='', srun='', scontrol='', squeue=running)


def test_a_job_is_submitted(cluster, tmp_path):
  run = f'{tmp_path}/runs/a'
  assert cluster.run('slurm.sh', '2', '8', run, '--', *TRAIN).returncode == 0
  [call] = cluster.calls()
  job = f'{LAUNCH}/slurm_job.sh'
  assert call[-4:] == [job, f'--workdir={run}', *TRAIN]
  assert (tmp_path / 'runs' / 'a').is_dir()


def test_a_run_in_a_bucket_makes_no_folder(cluster, tmp_path):
  done = cluster.run('slurm.sh', '2', '8', 'gs://b/runs/a', '--', *TRAIN)
  assert done.returncode == 0, done.stderr
  assert '--output=slurm-a.log' in cluster.calls()[0]
  assert not (tmp_path / 'gs:').exists()


@pytest.mark.parametrize(
  'code, restarts, again',
  [
    *((0, 0, False), (2, 0, False), (143, 99, True)),
    *((1, 0, True), (134, 19, True), (1, 20, False)),
  ],
)
def test_a_job_is_queued_again_unless_it_ended(cluster, code, restarts, again):
  cluster.answer('srun', f'exit {code}')
  counted = {'SLURM_JOB_ID': '7', 'SLURM_RESTART_COUNT': str(restarts)}
  done = cluster.run('slurm_job.sh', '--workdir=a', *TRAIN, **counted)
  first, *rest = cluster.calls()
  assert first == [
    *('srun', '--kill-on-bad-exit=0', 'python', '-m', 'meliad_rec.main'),
    *('--workdir=a', *TRAIN),
  ]
  asks = ['squeue', '--noheader', '--jobs=7', '--format=%T']
  assert rest == ([asks, ['scontrol', 'requeue', '7']] if again else [])
  assert done.returncode == (0 if again else code)


@pytest.mark.parametrize('state', ['COMPLETING', 'CANCELLED', 'PREEMPTED'])
def test_a_canceled_job_is_not_queued_again(cluster, state):
  cluster.answer('srun', 'exit 143')
  cluster.answer('squeue', f'echo {state}')
  done = cluster.run('slurm_job.sh', '--workdir=a', *TRAIN, SLURM_JOB_ID='7')
  assert [call[0] for call in cluster.calls()] == ['srun', 'squeue']
  assert done.returncode == 143


@pytest.mark.parametrize(
  'arguments', [(), ('2', 'x', 'runs/a'), ('0', '8', 'runs/a')]
)
def test_the_usage_of_slurm(cluster, arguments):
  done = cluster.run('slurm.sh', *arguments)
  assert done.returncode == 2
  assert 'bash launch/slurm.sh NODES GPUS WORKDIR' in done.stderr
  assert 'set -e' not in done.stderr
  assert cluster.calls() == []


@pytest.fixture
def machines(tmp_path):
  return StandIns(tmp_path, ssh='')


def test_ssh_starts_one_process_on_each_machine(machines):
  done = machines.run('gpu.sh', 'a.b,c', '--gin_param=STEPS = 10', PORT='99')
  assert done.returncode == 0, done.stderr
  for process, call in enumerate(sorted(machines.calls())):
    *ssh, host, command = call
    assert ssh == ['ssh', '-n', '-o', 'BatchMode=yes']
    assert host == ('a.b', 'c')[process]
    assert f' JAX_PROCESS_ID={process} python -m meliad_rec.main' in command
    assert command.endswith(r' --gin_param=STEPS\ =\ 10')


def test_the_exit_code_is_that_of_the_machine_that_failed(machines):
  machines.answer('ssh', '[ "${@:(-2):1}" != c ] || exit 3')
  assert machines.run('gpu.sh', 'a,c').returncode == 3


@pytest.mark.parametrize(
  'hosts', [(), ('a b',), ('--gin_file=x',), ('--help',)]
)
def test_the_usage_of_gpu(machines, hosts):
  done = machines.run('gpu.sh', *hosts)
  assert done.returncode == 2
  assert 'bash launch/gpu.sh HOST,HOST,...' in done.stderr
  assert machines.calls() == []
