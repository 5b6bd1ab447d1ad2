"""What an evaluation within a run leaves behind."""

import dataclasses
import io

import pytest

from meliad_rec.data.documents import Documents
from meliad_rec.experiment import Part
from meliad_rec.report import journal
from meliad_rec.report.report import Report
from meliad_rec.validation import Validation
from tests import tiny_run


@dataclasses.dataclass
class Sample:
  """Stands for generation.sample.Sample, which compiles much."""

  length: int = 5

  def write(self, decoder, documents: Documents, vocabulary):
    assert decoder.variables['params'] is not None
    return vocabulary.decode(documents[0][: self.length])


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  return tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')


def evaluated(workdir, data, stop, **changes):
  program = tiny_run.program()
  validation = Validation(tiny_run.experiment(data, program, **changes))
  params = program.create(0).params
  report = Report(workdir, stream=io.StringIO())
  figures = validation.evaluate(params, 3, report, stop)
  report.close()
  return validation, figures


def test_figures_a_sample_and_a_picture(tmp_path, data):
  part = Part(documents=2, tokens=20)
  validation, figures = evaluated(
    tmp_path, data, lambda: False, part=part, sample=Sample()
  )
  assert len(validation.documents) == 2
  assert figures['tokens'] == 40
  records = journal.read(tmp_path / journal.NAME)
  assert records[0]['split'] == 'validation'
  assert records[0]['bits_per_byte'] == figures['bits_per_byte']
  text = data.vocabulary.decode(data.documents('validation')[0][:5])
  assert records[1] == {'step': 3, 'text': {'sample': text}}
  assert (tmp_path / 'loss_nats_per_token.png').stat().st_size > 1000


def test_one_given_up_leaves_nothing(tmp_path, data):
  _, figures = evaluated(tmp_path, data, lambda: True)
  assert figures is None
  assert journal.read(tmp_path / journal.NAME) == []
