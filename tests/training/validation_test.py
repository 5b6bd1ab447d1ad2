"""What an evaluation within a run leaves behind."""

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


class Whole(Adder):
  """Reads documents at once."""

  @property
  def needs_whole_document(self):
    return True


def with_model(**changes):
  """The tiny program with a model of its own; not to be compiled."""
  settings = {'vocab': 259, 'cell': Adder(), 'd_model': D} | changes
  return dataclasses.replace(tiny_run.program(), model=Model(**settings))


def test_a_head_is_evaluated_on_its_labels(tmp_path):
  program = with_model(head=Classifier(WALK.vocabulary.size - 1, None))
  experiment = tiny_run.experiment(WALK, program, best_metric='error')
  validation = Validation(experiment)
  params = initialize(program.model, jax.random.key(0), 4, tiny_run.SEGMENT)
  report = Report(tmp_path, stream=io.StringIO())
  figures = validation.evaluate(params, 3, report, lambda: False)
  report.close()
  assert figures['scored_tokens'] == 2 * 18
  assert 0 <= figures['error'] <= 1


@pytest.mark.parametrize(
  ('model', 'changes', 'told'),
  [
    ({'head': Classifier(3)}, {}, 'go up to 13, and the Classifier has 3 cl'),
    ({'head': Matcher(13)}, {}, 'A Matcher judges pairs, and these documents'),
    ({'cell': Whole()}, {}, 'segment of 19 places; SEGMENT is 16, so set it'),
    (
      {'cell': Whole()},
      {'segment': 32, 'shorter_first': ShorterFirst(8, 2)},
      'segment of 19 places; FIRST_SEGMENT is 8, so set it',
    ),
  ],
)
def test_what_the_model_cannot_read_is_told_at_once(model, changes, told):
  experiment = tiny_run.experiment(
    WALK, with_model(**model), best_metric='error', **changes
  )
  with pytest.raises(ValueError, match=told):
    Validation(experiment)


@pytest.mark.parametrize(
  ('model', 'changes', 'told'),
  [
    ({'head': Classifier(3)}, {}, 'Classifier for labels, and these docume'),
    # Documents of validation have 82 tokens at most, of training 186.
    ({'cell': Whole()}, {'segment': 90}, 'of 186 places; SEGMENT is 90'),
    (
      {'cell': Whole()},
      {'segment': 200, 'sample': Sample()},
      'Whole reads a document at once, and cannot write',
    ),
  ],
)
def test_what_the_model_cannot_do_with_text(data, model, changes, told):
  experiment = tiny_run.experiment(data, with_model(**model), **changes)
  with pytest.raises(ValueError, match=told):
    Validation(experiment)


class Longer:
  """Of whose documents those of validation are the longest."""

  vocabulary, splits = WALK.vocabulary, WALK.splits

  def documents(self, split):
    tokens = 15 if split == 'train' else None
    return WALK.documents(split).head(None, tokens, self.vocabulary)


def test_both_splits_must_be_readable():
  changes = {'best_metric': 'error', 'segment': 15}
  part = Part(tokens=12)
  make = lambda data, **more: Validation(
    tiny_run.experiment(data, with_model(cell=Whole()), **changes, **more)
  )
  make(Longer(), part=part)
  for data, more in (Longer(), {}), (WALK, {'part': part}):
    with pytest.raises(ValueError, match='of 19 places; SEGMENT is 15'):
      make(data, **more)


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
