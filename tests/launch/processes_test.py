"""Stopping a run ends all of its processes and does not interrupt a save."""

import os
import signal
import subprocess
import time

import pytest

from tests.stand_ins import StandIns

# Each records that it began and that it was asked to stop. `saved` ends all.
PYTHON = """
[ "$1" != -c ] || { echo 1; exit; }
trap "echo $JAX_PROCESS_ID >>told; on_term; exit 143" TERM
[ ! -e body ] || source ./body
echo $$ >>begun
for _ in {1..400}; do
  [ ! -e saved ] || exit 143
  sleep 0.05
done
"""
# All hosts are this machine, each with its own pid file.
SSH = """
host=${@:(-2):1} command=${!#}
case $command in *"exec env"*) [ ! -e slow ] || sleep 1.5 ;; esac
exec bash -c "${command//\\/tmp\\/meliad_rec_99/$PWD/$host}"
"""
PODS = [('local_pod.sh', '3'), ('gpu.sh', 'a,b,c')]


@pytest.fixture
def machines(tmp_path):
  return StandIns(tmp_path, python=PYTHON, ssh=SSH)


def start(machines, *arguments):
  return machines.start(*arguments, PORT='99', GRACE_SECONDS='2')


def lines(path):
  return path.read_text().split() if path.exists() else []


def until(path, count=1):
  """Waits until a file has this many words."""
  for _ in range(200):
    if len(lines(path)) >= count:
      return
    time.sleep(0.05)
  raise AssertionError(lines(path))


def end(script):
  """Waits for the end of the script and returns its exit code."""
  try:
    script.communicate(timeout=15)
  finally:
    script.kill()
  return script.returncode


def told(tmp_path, on_term=':'):
  """Stops pods of both kinds; yields the processes asked, in order."""
  scripts = {}
  for pod in PODS:
    folder = tmp_path / pod[0]
    folder.mkdir()
    (folder / 'body').write_text(f'on_term() {{ {on_term}; }}\n')
    scripts[folder] = start(StandIns(folder, python=PYTHON, ssh=SSH), *pod)
  for folder, script in scripts.items():
    until(folder / 'begun', 3)
    script.send_signal(signal.SIGTERM)
  for folder, script in scripts.items():
    assert end(script) == 143
    yield lines(folder / 'told')


def test_processes_that_have_not_joined_are_asked_after_process_0(tmp_path):
  for first, *rest in told(tmp_path):
    assert first == '0' and sorted(rest) == ['1', '2']


def test_a_pod_that_saves_is_asked_once(tmp_path):
  """The save takes longer than the grace period after process 0."""
  for asked in told(tmp_path, 'sleep 3.5; touch saved'):
    assert asked == ['0']


@pytest.mark.parametrize('pod', PODS)
def test_a_mistake_of_any_process_is_the_exit_code(machines, tmp_path, pod):
  """Otherwise the first failure is. Lines of all but process 0 are numbered."""
  for codes, expected in ('143 3 2', 2), ('0 3 143', 3):
    (tmp_path / 'body').write_text(
      f'codes=({codes})\necho "$@" >&2\nexit "${{codes[$JAX_PROCESS_ID]}}"\n'
    )
    done = machines.run(*pod, '--gin_param=A = 1', PORT='99')
    assert done.returncode == expected
    said = '-m meliad_rec.main --gin_param=A = 1'
    numbers = ['', '[1] ', '[2] '] if pod[0] == 'local_pod.sh' else [''] * 3
    found = [each for each in done.stderr.splitlines() if said in each]
    assert sorted(found) == sorted(number + said for number in numbers)


def test_a_signal_during_the_start_leaves_no_process(machines, tmp_path):
  ask = '[ "$JAX_PROCESS_ID" != 0 ] || kill -TERM $PPID\n'
  (tmp_path / 'body').write_text(ask)
  script = start(machines, 'local_pod.sh', '40')
  _, errors = script.communicate(timeout=15)
  assert script.returncode == 143, errors
  for number in lines(tmp_path / 'begun'):
    with pytest.raises(ProcessLookupError):
      os.kill(int(number), 0)


@pytest.mark.parametrize('pod', PODS)
def test_a_second_interrupt_ends_processes_that_still_save(
  machines, tmp_path, pod
):
  (tmp_path / 'body').write_text(
    'on_term() { for _ in {1..200}; do sleep 0.1; done; }\n'
  )
  script = start(machines, *pod)
  until(tmp_path / 'begun', 3)
  script.send_signal(signal.SIGINT)
  until(tmp_path / 'told')
  script.send_signal(signal.SIGINT)
  assert end(script) == 137


def test_a_process_that_has_not_begun_is_asked_when_it_has(machines, tmp_path):
  """The pid file of an earlier run is not used."""
  (tmp_path / 'slow').touch()
  with subprocess.Popen(['sleep', '30']) as other:
    (tmp_path / f'a_{os.getuid()}.pid').write_text(f'{other.pid}\n')
    script = start(machines, 'gpu.sh', 'a')
    until(tmp_path / 'record')
    script.send_signal(signal.SIGTERM)
    code = end(script)
    ended = other.poll()
    other.kill()
  assert (code, ended) == (143, None)
