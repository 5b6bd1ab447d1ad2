"""What an evaluation within a run leaves behind."""

import dataclasses
import io

import pytest

from meliad_rec.data.documents import Documents
from meliad_rec.data.generated.random_walk import RandomWalk
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


# 19 words, of which 1 is not scored; the test program knows 259 words.
WALK = RandomWalk(episodes=20, actions=18, grid=3, episodes_per_document=1)


def test_labels_are_shown_beside_what_trivial_answers_reach(tmp_path, caplog):
  out = io.StringIO()
  program = tiny_run.program()
  with caplog.at_level('INFO'):
    validation = Validation(
      tiny_run.experiment(WALK, program, best_metric='accuracy')
    )
  baselines = WALK.baselines('validation')
  assert f'uniform: wrong in {100 * 8 / 9:.2f} %' in caplog.text
  report = Report(tmp_path, stream=out)
  params = program.create(0).params
  figures = validation.evaluate(params, 3, report, lambda: False)
  report.close()
  first, *others = journal.read(tmp_path / journal.NAME)
  assert first['error'] == figures['error'] == 1 - figures['accuracy']
  shown = {f'trivial/{name}': error for name, error in baselines.items()}
  assert {each['split']: each['error'] for each in others} == shown
  assert all(each['step'] == 3 for each in others)
  assert 'step 3  trivial/uniform  error 88.89%' in out.getvalue()
  assert (tmp_path / 'error.png').stat().st_size > 1000


@pytest.mark.parametrize(
  ('changes', 'told'),
  [
    ({}, "^best_metric is 'bits_per_byte', .* loss_nats_per_token"),
    ({'best_metric': 'error', 'sample': Sample()}, '^SAMPLE is 5, and a model'),
    ({'best_metric': 'error', 'part': Part(tokens=1)}, '^No label of the vali'),
  ],
)
def test_what_labels_cannot_give_is_told_at_once(changes, told):
  experiment = tiny_run.experiment(WALK, tiny_run.program(), **changes)
  with pytest.raises(ValueError, match=told):
    Validation(experiment)


def test_text_has_no_error(data):
  experiment = tiny_run.experiment(
    data, tiny_run.program(), best_metric='error'
  )
  with pytest.raises(ValueError, match="^best_metric is 'error', .* bits_"):
    Validation(experiment)


def test_one_given_up_leaves_nothing(tmp_path, data):
  _, figures = evaluated(tmp_path, data, lambda: True)
  assert figures is None
  assert journal.read(tmp_path / journal.NAME) == []
