"""Signals that ask a run to stop. main_test.py stops real ones."""

import os
import signal
import time

import jax
import pytest

from meliad_rec.distributed import preemption
from meliad_rec.distributed.preemption import StopRequest
from meliad_rec.storage.checkpoints import Checkpoints


def handlers():
  return [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]


@pytest.fixture
def stop():
  """A request to stop; the handlers of signals are restored afterwards."""
  before, made = handlers(), StopRequest()
  assert handlers() == before
  assert not made.reached()
  assert made.exit_code == 0
  yield made
  made.close()
  assert handlers() == before


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(stop, number, capfd):
  os.kill(os.getpid(), number)
  assert stop.reached()
  assert stop.exit_code == 128 + number
  said = capfd.readouterr().err
  assert f'{number.name}: saving and stopping after this step.' in said
  assert ('Ctrl-C again' in said) == (number == signal.SIGINT)


def test_a_second_ctrl_c_interrupts(stop):
  os.kill(os.getpid(), signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


def test_where_ctrl_c_was_ignored_a_second_one_is_not_promised(capfd):
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    (request := StopRequest()).listen()
    os.kill(os.getpid(), signal.SIGINT)
    assert request.reached()
    request.close()
  finally:
    signal.signal(signal.SIGINT, before)
  assert 'Ctrl-C again' not in capfd.readouterr().err


def test_a_run_catches_signals_from_the_first_question_on(tmp_path):
  before, made = handlers(), StopRequest()
  Checkpoints(tmp_path)
  assert handlers() == before
  made.reached()
  caught = handlers()
  assert all(a != b for a, b in zip(caught, before, strict=True))
  with preemption.at_once():
    assert handlers() == [signal.SIG_DFL] * 2
  assert handlers() == caught
  made.close()
  assert handlers() == before


def test_signals_that_are_ignored_stay_ignored(monkeypatch):
  before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
  try:
    with preemption.at_once():
      assert handlers() == [signal.SIG_DFL, signal.SIG_IGN]
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    with preemption.at_once():
      assert signal.SIG_DFL not in handlers()
  finally:
    signal.signal(signal.SIGTERM, before)


def test_a_host_stopped_by_agreement_exits_as_after_sigterm(stop, monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  agreed = {1: False, 2: True}
  monkeypatch.setattr(
    preemption.multihost_utils, 'reached_preemption_sync_point', agreed.get
  )
  assert not stop.reached()
  assert stop.exit_code == 0
  assert stop.reached()
  assert stop.exit_code == 143
