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
on_term() { :; }
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


def stop(script):
  """Stops the script and returns its exit code."""
  script.send_signal(signal.SIGTERM)
  try:
    script.communicate(timeout=15)
  finally:
    script.kill()
  return script.returncode


def is_alive(number):
  try:
    os.kill(int(number), 0)
  except ProcessLookupError:
    return False
  return True


@pytest.mark.parametrize('pod', PODS)
def test_processes_that_have_not_joined_are_asked_after_process_0(
  machines, tmp_path, pod
):
  script = start(machines, *pod)
  until(tmp_path / 'begun', 3)
  assert stop(script) == 143
  first, *rest = lines(tmp_path / 'told')
  assert first == '0' and sorted(rest) == ['1', '2']


@pytest.mark.parametrize('pod', PODS)
def test_a_pod_that_saves_is_asked_once(machines, tmp_path, pod):
  """The save takes longer than the grace period after process 0."""
  (tmp_path / 'body').write_text('on_term() { sleep 3.5; touch saved; }\n')
  script = start(machines, *pod)
  until(tmp_path / 'begun', 3)
  assert stop(script) == 143
  assert lines(tmp_path / 'told') == ['0']


def test_a_signal_during_the_start_leaves_no_process(machines, tmp_path):
  ask = '[ "$JAX_PROCESS_ID" != 0 ] || kill -TERM $PPID\n'
  (tmp_path / 'body').write_text(ask)
  script = start(machines, 'local_pod.sh', '40')
  _, errors = script.communicate(timeout=15)
  assert script.returncode == 143, errors
  assert not any(map(is_alive, lines(tmp_path / 'begun')))


def test_a_process_that_has_not_begun_is_asked_when_it_has(machines, tmp_path):
  """The pid file of an earlier run is not used."""
  (tmp_path / 'slow').touch()
  other = subprocess.Popen(['sleep', '30'])
  try:
    (tmp_path / 'a.pid').write_text(f'{other.pid}\n')
    script = start(machines, 'gpu.sh', 'a')
    until(tmp_path / 'record')
    assert stop(script) == 143
    assert other.poll() is None
  finally:
    other.kill()
    other.wait()
