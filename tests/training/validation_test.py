"""Evaluation during a run."""

import dataclasses
import io

import jax
import pytest

from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import ShorterFirst
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.report import journal
from meliad_rec.report.report import Report
from meliad_rec.training.experiment import Part
from meliad_rec.training.validation import Validation
from tests import tiny_run
from tests.models.model_test import Adder
from tests.models.model_test import D


@dataclasses.dataclass
class Sample:
  """Replaces generation.sample.Sample, which takes long to compile."""

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
  metrics = validation.evaluate(params, 3, report, stop)
  report.close()
  return validation, metrics


def test_it_reports_metrics_a_sample_and_a_plot(tmp_path, data):
  part = Part(documents=2, tokens=20)
  validation, metrics = evaluated(
    tmp_path, data, lambda: False, part=part, sample=Sample()
  )
  assert len(validation.documents) == 2
  assert metrics['tokens'] == 40
  records = journal.read(tmp_path / journal.NAME)
  assert records[0]['split'] == 'validation'
  assert records[0]['bits_per_byte'] == metrics['bits_per_byte']
  text = data.vocabulary.decode(data.documents('validation')[0][:5])
  assert records[1] == {'step': 3, 'text': {'sample': text}}
  assert (tmp_path / 'loss_nats_per_token.png').stat().st_size > 1000


# 19 words, 1 of them not scored; the test program has 259 words.
WALK = RandomWalk(episodes=20, actions=18, grid=3, episodes_per_document=1)


def test_labels_are_reported_with_trivial_answers(tmp_path, caplog):
  out = io.StringIO()
  program = tiny_run.program()
  with caplog.at_level('INFO'):
    validation = Validation(
      tiny_run.experiment(WALK, program, best_metric='accuracy')
    )
  baselines = WALK.baselines('validation')
  assert f'uniform: error {100 * 8 / 9:.2f} %' in caplog.text
  report = Report(tmp_path, stream=out)
  params = program.create(0).params
  metrics = validation.evaluate(params, 3, report, lambda: False)
  report.close()
  first, *others = journal.read(tmp_path / journal.NAME)
  assert first['error'] == metrics['error'] == 1 - metrics['accuracy']
  shown = {f'trivial/{name}': error for name, error in baselines.items()}
  assert {each['split']: each['error'] for each in others} == shown
  assert all(each['step'] == 3 for each in others)
  assert 'step 3  trivial/uniform  error 88.89%' in out.getvalue()
  assert (tmp_path / 'error.png').stat().st_size > 1000


class Whole(Adder):
  """Needs whole documents."""

  @property
  def needs_whole_document(self):
    return True


def with_model(**changes):
  """Returns the tiny program with another model, not to be compiled."""
  settings = {'vocab': 259, 'cell': Adder(), 'd_model': D} | changes
  return dataclasses.replace(tiny_run.program(), model=Model(**settings))


def test_a_head_is_evaluated_on_its_labels(tmp_path):
  program = with_model(head=Classifier(WALK.vocabulary.size - 1, None))
  experiment = tiny_run.experiment(WALK, program, best_metric='error')
  validation = Validation(experiment)
  params = initialize(program.model, jax.random.key(0), 4, tiny_run.SEGMENT)
  report = Report(tmp_path, stream=io.StringIO())
  metrics = validation.evaluate(params, 3, report, lambda: False)
  report.close()
  assert metrics['scored_tokens'] == 2 * 18
  assert 0 <= metrics['error'] <= 1


BY_ERROR = {'best_metric': 'error'}


@pytest.mark.parametrize(
  ('model', 'changes', 'expected'),
  [
    (None, {}, "best_metric is 'bits_per_byte', .* loss_nats_per_token"),
    (None, BY_ERROR | {'sample': Sample()}, 'SAMPLE .* 5'),
    (None, BY_ERROR | {'part': Part(tokens=1)}, 'EVAL_TOKENS'),
    ({'head': Classifier(3)}, BY_ERROR, '13'),
    ({'head': Matcher(13)}, BY_ERROR, 'Matcher'),
    ({'cell': Whole()}, BY_ERROR, 'SEGMENT'),
    (
      {'cell': Whole()},
      BY_ERROR | {'segment': 32, 'shorter_first': ShorterFirst(8, 2)},
      'FIRST_SEGMENT',
    ),
  ],
)
def test_labels_that_the_experiment_cannot_evaluate(model, changes, expected):
  program = with_model(**model) if model else tiny_run.program()
  with pytest.raises(ValueError, match=expected):
    Validation(tiny_run.experiment(WALK, program, **changes))


@pytest.mark.parametrize(
  ('model', 'changes', 'expected'),
  [
    (None, BY_ERROR, "best_metric is 'error', .* bits_"),
    ({'head': Classifier(3)}, {}, 'Classifier'),
    # Documents have at most 82 tokens in validation, and 186 in training.
    ({'cell': Whole()}, {'segment': 90}, 'SEGMENT'),
    ({'cell': Whole()}, {'segment': 200, 'sample': Sample()}, 'Whole'),
  ],
)
def test_text_that_the_experiment_cannot_evaluate(
  data, model, changes, expected
):
  program = with_model(**model) if model else tiny_run.program()
  with pytest.raises(ValueError, match=expected):
    Validation(tiny_run.experiment(data, program, **changes))


class Longer:
  """Data whose longest documents are those of validation."""

  vocabulary, splits = WALK.vocabulary, WALK.splits

  def documents(self, split):
    tokens = 15 if split == 'train' else None
    return WALK.documents(split).head(None, tokens, self.vocabulary)


def test_both_splits_must_be_readable():
  make = lambda data, **more: Validation(
    tiny_run.experiment(
      data, with_model(cell=Whole()), segment=15, **BY_ERROR, **more
    )
  )
  part = Part(tokens=12)
  make(Longer(), part=part)
  for data, more in (Longer(), {}), (WALK, {'part': part}):
    with pytest.raises(ValueError, match='SEGMENT'):
      make(data, **more)


def test_a_stopped_evaluation_reports_nothing(tmp_path, data):
  _, metrics = evaluated(tmp_path, data, lambda: True)
  assert metrics is None
  assert journal.read(tmp_path / journal.NAME) == []
