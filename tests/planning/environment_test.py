"""What a child that compiles for TPUs is given."""

import os
import subprocess

import pytest

from meliad_rec.planning import environment


def test_a_child_runs_on_the_cpu_and_asks_nobody(monkeypatch):
  monkeypatch.setenv('JAX_PLATFORMS', 'tpu')
  monkeypatch.setenv('KEPT', 'yes')
  found = environment.variables()
  assert found['JAX_PLATFORMS'] == 'cpu'
  assert found['TPU_SKIP_MDS_QUERY'] == '1'
  assert found['KEPT'] == 'yes'


def test_flags_of_libtpu_join_those_that_are_set(monkeypatch):
  monkeypatch.delenv('LIBTPU_INIT_ARGS', raising=False)
  assert 'LIBTPU_INIT_ARGS' not in environment.variables()
  monkeypatch.setenv('LIBTPU_INIT_ARGS', '--a=1')
  found = environment.variables(['--b=2', '--c=3'])
  assert found['LIBTPU_INIT_ARGS'] == '--a=1 --b=2 --c=3'


def test_ensure_sets_what_is_not_set(monkeypatch):
  monkeypatch.setattr(environment, 'installed', lambda: True)
  for name in environment.VARIABLES:
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('TPU_LOG_DIR', 'own')
  environment.ensure()
  assert os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] == '1'
  assert os.environ['TPU_LOG_DIR'] == 'own'
  assert 'JAX_PLATFORMS' not in os.environ


def test_without_libtpu_the_extra_is_named(monkeypatch):
  monkeypatch.setattr(environment, 'installed', lambda: False)
  with pytest.raises(ValueError, match=r'install meliad_rec\[tpu\]'):
    environment.ensure()


def test_a_child_may_have_devices_in_place_of_tpus(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--own=1')
  assert environment.variables()['XLA_FLAGS'] == '--own=1'
  found = environment.variables(devices=6)['XLA_FLAGS']
  assert found == '--own=1 --xla_force_host_platform_device_count=6'


def test_run_gives_back_what_a_child_says():
  done = environment.run('platform', ['terse'])
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout


def test_a_process_that_ended_says_how_and_its_last_lines():
  done = subprocess.CompletedProcess([], -9, '', 'a line\n' * 99 + 'Killed')
  told = str(environment.failed('compiles', done)).splitlines()
  assert told[0] == 'The process that compiles ended with -9:'
  assert told[1:] == ['a line'] * 29 + ['Killed']
