"""The benchmark of the corridor: its table, and that memory pays."""

import dataclasses

import numpy as np
import pytest

from meliad_rec.benchmarks import corridor
from meliad_rec.commands import bench
from tests import command


def test_the_command_prints_a_row_for_each_agent(monkeypatch, capsys):
  def train(sizes, cell, seeds):
    return np.arange(seeds) / 2

  monkeypatch.setattr(corridor, 'train', train)
  assert command.run(bench, 'corridor', '--seeds=3') == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split()[0] == 'return' and len(lines) == 8
  found = lines[1].split()
  assert found[:6] == ['feedback', '2', '0.50', '0.00', '0.50', '1.00']


def test_flags_of_other_benchmarks_are_refused():
  assert '--rounds' in command.mistake(bench, 'corridor', '--rounds=3')


@pytest.mark.slow
def test_feedback_remembers_beyond_its_span_and_a_transformer_does_not():
  sizes = dataclasses.replace(corridor.SIZES, spans=(2,))
  cells = corridor.cells(sizes)
  train = lambda name: np.asarray(corridor.train(sizes, cells[name], 1))
  assert train('feedback 2') >= 0.95
  assert train('window 2') <= 0.1
