"""What --dry_run says."""

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


def test_the_table_adds_up():
  table = summary.parameter_table(tiny_run.program().shapes.params)
  *rows, last = table.splitlines()
  counts = [int(row.split(')')[1].split()[0].replace(',', '')) for row in rows]
  embedding = 259 * 20
  assert last == (
    f'{sum(counts):,} parameters, {sum(counts) - embedding:,} without the '
    'embedding'
  )
  assert rows[-1].split('  ')[0].startswith('norm/scale')
  assert any(
    row.split()[1:4] == ['(259,', '20)', f'{embedding:,}'] for row in rows
  ), table


def with_empty_documents(experiment):
  """The experiment, whose validation and train splits have two more."""

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
  return dataclasses.replace(experiment, data=data)


def test_empty_documents_are_told(experiment, capsys):
  several = with_empty_documents(experiment)
  several.__dict__['program'] = experiment.program
  told = '9 documents (2 empty left out) of 1,062 tokens'
  assert told in summary.sentence(several)
  summary.show(several)
  told = 'validation: 3 documents (2 empty left out), 183 tokens'
  assert told in capsys.readouterr().out


def test_all_is_shown(experiment, capsys):
  summary.show(experiment)
  shown = capsys.readouterr().out
  assert 'validation: 3 documents, 183 tokens, 183 bytes' in shown
  assert '6 steps of 4 x 16 = 64 tokens' in shown
  memory = r'by the compiler: (\d+\.\d) MiB state and batch, (\d+\.\d) MiB temp'
  assert all(float(size) > 0 for size in re.search(memory, shown).groups())


def test_labels_have_no_bytes(experiment, capsys):
  labelled = dataclasses.replace(experiment, data=RandomWalk(10, 9))
  labelled.__dict__['program'] = experiment.program
  summary.show(labelled)
  shown = capsys.readouterr().out
  assert 'train: 1 documents, 100 tokens, 90 scored\n' in shown


def test_the_run_in_one_line(experiment):
  said = summary.sentence(experiment)
  assert re.match(r'[\d,]+ parameters on 1 x cpu; 9 documents of 1,062', said)
  assert said.endswith('6 steps of 4 x 16 tokens.')
  assert '\n' not in said
