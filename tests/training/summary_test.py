"""The summary of a run."""

import dataclasses
import re
import types

import numpy as np
import pytest

from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.training import summary
from tests import tiny_run


@pytest.fixture(scope='module')
def experiment(tmp_path_factory):
  data = tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')
  return tiny_run.experiment(data, tiny_run.program())


def with_data(experiment, data):
  changed = dataclasses.replace(experiment, data=data)
  changed.__dict__['program'] = experiment.program
  return changed


def test_the_table_adds_up():
  table = summary.parameter_table(tiny_run.program().shapes.params)
  *rows, last = table.splitlines()
  counts = [int(row.split(')')[1].split()[0].replace(',', '')) for row in rows]
  total, embedding = sum(counts), 259 * 20
  assert last.startswith(f'{total:,} parameters, {total - embedding:,} without')
  assert any(
    row.split()[1:4] == ['(259,', '20)', f'{embedding:,}'] for row in rows
  ), table


def test_data_and_memory_are_shown(experiment, capsys):
  summary.show(experiment)
  shown = capsys.readouterr().out
  assert 'validation: 3 documents, 183 tokens, 183 bytes' in shown
  assert '6 steps of 4 x 16 = 64 tokens' in shown
  sizes = re.search(r'(\d+\.\d) MiB state and batch, (\d+\.\d) MiB', shown)
  assert all(float(size) > 0 for size in sizes.groups())
  line = summary.sentence(experiment)
  assert re.match(r'[\d,]+ parameters on 1 x cpu; 9 documents of 1,062', line)
  assert line.endswith('6 steps of 4 x 16 tokens.') and '\n' not in line
  summary.show(with_data(experiment, RandomWalk(10, 9)))
  shown = capsys.readouterr().out
  assert 'train: 1 documents, 100 tokens, 90 scored\n' in shown


def test_empty_documents_are_reported(experiment, capsys):
  """Each split has two more of them."""

  def documents(split):
    full = experiment.data.documents(split)
    return dataclasses.replace(
      full,
      starts=np.concatenate([[0, 0], full.starts]),
      bytes_=np.concatenate([[0, 0], full.bytes_]),
      words=np.concatenate([[0, 0], full.words]),
      names=['', '', *full.names],
    )

  data = types.SimpleNamespace(
    vocabulary=experiment.data.vocabulary, documents=documents
  )
  changed = with_data(experiment, data)
  assert '9 documents (2 empty left out)' in summary.sentence(changed)
  summary.show(changed)
  shown = capsys.readouterr().out
  assert 'validation: 3 documents (2 empty left out), 183 tokens' in shown
