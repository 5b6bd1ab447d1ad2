"""Questions to another process, and its answers."""

import dataclasses
import json
from pathlib import Path
import subprocess

import pytest

from meliad_rec.planning import environment
from meliad_rec.planning import question
from tests import planned

ASKED = question.Question(
  'v7x:2x2x1', ('arch/window',), ('SLOTS = 2',), fast=True
)


@pytest.fixture
def child(monkeypatch):
  """Calls to a process, which writes what its list `says`."""

  class Child:
    says = None
    calls = []

    def run(self, module, arguments, devices):
      asked, answered = map(Path, arguments)
      self.calls.append((module, json.loads(asked.read_text()), devices))
      if self.says:
        answered.write_text(json.dumps(self.says))
      told = 'a line\n' * 1000 + 'Traceback: lost'
      return subprocess.CompletedProcess([], 3, '', told)

  found = Child()
  found.calls = []
  monkeypatch.setattr(environment, 'run', found.run)
  return found


def test_an_answer_comes_back_as_it_was(child):
  child.says = dataclasses.asdict(planned.fitting())
  answer = question.ask(ASKED)
  assert answer.fits
  assert answer.sizes == dataclasses.asdict(planned.SIZES)
  [(module, asked, _)] = child.calls
  assert module == 'meliad_rec.planning.worker'
  assert question.Question(**asked) == dataclasses.replace(
    ASKED, gin_file=['arch/window'], gin_param=['SLOTS = 2']
  )


def test_without_libtpu_the_cpu_has_the_devices(child, monkeypatch):
  child.says = dataclasses.asdict(planned.unknown())
  for there, devices in ((True, 0), (False, 8)):
    monkeypatch.setattr(environment, 'installed', lambda there=there: there)
    question.ask(ASKED)
    assert child.calls[-1][2] == devices


def test_a_mistake_is_told(child):
  child.says = {'mistake': 'BATCH is odd; set BATCH.'}
  with pytest.raises(ValueError, match='^BATCH is odd; set BATCH.$'):
    question.ask(ASKED)


def test_a_process_that_fails_is_no_mistake(child):
  with pytest.raises(RuntimeError, match='ended with 3:\na line') as caught:
    question.ask(ASKED)
  assert str(caught.value).endswith('Traceback: lost')
  assert len(str(caught.value)) < 400


def test_fits_is_by_what_the_chip_has():
  assert planned.fitting().fits is True
  assert planned.too_large().fits is False
  assert planned.unknown().fits is None
