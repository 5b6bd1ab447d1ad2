"""Experiments: wrong settings, the summary, evaluation during a run."""

import dataclasses
import io
import math
import re
import types

import numpy as np
import pytest

from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import ShorterFirst
from meliad_rec.data.synthetic.copying_pairs import CopyingPairs
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher
from meliad_rec.models.model import Model
from meliad_rec.reinforcement.a2c import A2C
from meliad_rec.reinforcement.corridor import Corridor
from meliad_rec.report import journal
from meliad_rec.report.report import Report
from meliad_rec.training import summary
from meliad_rec.training import validation
from meliad_rec.training.experiment import EvalSubset
from meliad_rec.training.progress import Progress
from meliad_rec.training.validation import Validation
from tests import architectures as tiny
from tests import tiny_run
from tests.counting import Counting


@pytest.mark.parametrize(
  'name, value',
  [
    *((name, 0) for name in ('batch', 'segment', 'steps', 'keep', 'patience')),
    *((f'{each}_every', 0) for each in ('log', 'eval', 'save')),
    *(('seed', -1), ('seed', 2**32), ('halting_warmup', 2**31)),
    ('steps', 2**31),
    *(('ema_decay', 1.0), ('best_metric', 'bits_per_bite')),
  ],
)
def test_a_setting_out_of_range_is_named(data, name, value):
  with pytest.raises(ValueError, match=f'{name} .*{value!r}. Set'):
    tiny_run.experiment(data, tiny_run.program(), **{name: value})


def test_a_step_of_too_many_tokens_is_refused(data):
  with pytest.raises(ValueError, match=r'2\*\*31 tokens.*65536 rows of 32768'):
    tiny_run.experiment(data, tiny_run.program(), batch=2**16, segment=2**15)


def test_an_environment_that_is_not_complete_is_told_what_it_lacks(data):
  class Unfinished:
    actions, observations, limit, endless = 2, 3, 8, False
    reset = observe = step = None

  with pytest.raises(ValueError, match=r'environment .*\(it lacks picture\)'):
    tiny_run.experiment(Unfinished(), tiny_run.program(), objective=A2C())


def test_the_repr_of_an_environment_shows_its_settings():
  class Plain(Corridor):
    __repr__ = object.__repr__

  made = lambda env: tiny_run.experiment(
    env, tiny_run.program(), objective=A2C()
  )
  assert made(Corridor(3)).source_identity == 'environment Corridor(length=3)'
  with pytest.raises(ValueError, match='repr shows its settings .* got <'):
    made(Plain(3))


@pytest.mark.parametrize('segment, steps', [(16, 2), (8, 6)])
def test_initial_segments_must_be_shorter_and_few(data, segment, steps):
  first = ShorterFirst(segment, steps)
  with pytest.raises(ValueError, match='FIRST_SEGMENT and FIRST_STEPS'):
    tiny_run.experiment(data, tiny_run.program(), shorter_first=first)


def test_the_program_is_made_of_the_settings(data):
  sizes, program = [], tiny_run.program()

  def model(size):
    sizes.append(size)
    return program.model

  made = tiny_run.experiment(data, program, model=model, halting_warmup=7)
  del made.__dict__['program']
  found = made.program
  assert (found.rows, found.segment) == (made.batch, made.segment)
  assert found.halting_warmup == 7
  assert made.program is found
  assert sizes == [data.vocabulary.size]


def after(values, best_is='lowest'):
  progress = Progress().judged_by('m', 'v')
  for step, value in enumerate(values, 1):
    progress = progress.after(step, value, best_is)
  return progress


def test_the_best_and_how_long_ago():
  assert after([3.0, 1.0, 2.0]) == Progress(3, 'm', 'v', 1.0, 1)
  assert after([3.0, 1.0, 2.0], 'highest') == Progress(3, 'm', 'v', 3.0, 2)
  assert after([1.0, 1.0]).since_best == 1
  # Non-finite values are never best.
  assert after([math.nan]) == Progress(1, 'm', 'v', None, 1)
  assert after([math.nan, 2.0]) == Progress(2, 'm', 'v', 2.0, 0)
  assert after([2.0, math.nan]) == Progress(2, 'm', 'v', 2.0, 1)
  assert after([-math.inf, 2.0]).best == 2.0
  stale = after([1.0, 2.0, 2.0])
  assert [stale.is_stale(n) for n in (None, 2, 3)] == [False, True, False]


def test_another_metric_or_other_documents_restart_the_search(caplog):
  before = Progress(5, 'm', 'v', 0.5, 3)
  assert before.judged_by('m', 'v') == before
  assert Progress().judged_by('m', 'v') == Progress(0, 'm', 'v')
  assert caplog.text == ''
  for other, changed in ('x', 'v'), ('m', 'x'):
    assert before.judged_by(other, changed) == Progress(5, other, changed)
  assert 'best_metric' in caplog.text and 'validation data' in caplog.text


def test_the_table_of_parameters_adds_up():
  table = summary.parameter_table(tiny_run.program().shapes.params)
  *rows, last = table.splitlines()
  counts = [int(row.split(')')[1].split()[0].replace(',', '')) for row in rows]
  total, embedding = sum(counts), 259 * 20
  assert last.startswith(f'{total:,} parameters, {total - embedding:,} without')
  shown = ['(259,', '20)', f'{embedding:,}']
  assert any(row.split()[1:4] == shown for row in rows), table


def test_data_and_memory_are_shown(data, capsys):
  """Two more documents of each split are empty."""

  def documents(split):
    full = data.documents(split)
    return dataclasses.replace(
      full,
      starts=np.concatenate([[0, 0], full.starts]),
      bytes_=np.concatenate([[0, 0], full.bytes_]),
      words=np.concatenate([[0, 0], full.words]),
      names=['', '', *full.names],
    )

  emptier = types.SimpleNamespace(
    vocabulary=data.vocabulary, documents=documents
  )
  empty = r'\(2 empty left out\)'
  for given, left_out in (data, ''), (emptier, f' {empty}'):
    experiment = tiny_run.experiment(given, tiny_run.program())
    summary.show(experiment)
    shown = capsys.readouterr().out
    line = f'validation: 3 documents{left_out}, 183 tokens, 183 bytes'
    assert re.search(line, shown)
    assert '6 steps of 4 x 16 = 64 tokens' in shown
    sizes = re.search(r'(\d+\.\d) MiB state and batch, (\d+\.\d) MiB', shown)
    assert all(float(size) > 0 for size in sizes.groups())
    line = rf'[\d,]+ parameters on 1 x cpu; 9 documents{left_out} of 1,062 .*'
    assert re.fullmatch(line, summary.sentence(experiment))
  walk = tiny_run.experiment(RandomWalk(10, 9), tiny_run.program())
  summary.show(walk)
  shown = capsys.readouterr().out
  assert 'train: 1 document, 100 tokens, 90 scored\n' in shown


@dataclasses.dataclass
class Sample:
  """Replaces generation.sample.Sample, which takes long to compile."""

  length: int = 5

  def write(self, decoder, documents: Documents, vocabulary, stop):
    assert decoder.variables['params'] is not None
    return vocabulary.decode(documents[0][: self.length])


def evaluated(workdir, experiment, stop=lambda: False):
  """Returns the validation, its metrics, records, and what it printed."""
  program, out = experiment.program, io.StringIO()
  validation = Validation(experiment)
  report = Report(workdir, 0, stream=out)
  params = program.create(0).params
  metrics = validation.evaluate(params, 3, report, stop)
  report.close()
  path = workdir / journal.NAME  # It begins with the first record.
  records = journal.read(path) if path.exists() else []
  return validation, metrics, records, out.getvalue()


def test_it_reports_metrics_a_sample_and_a_plot(tmp_path, data):
  subset = EvalSubset(documents=2, tokens=20)
  experiment = tiny_run.experiment(
    data, tiny_run.program(), eval_subset=subset, sample=Sample()
  )
  validation, metrics, records, _ = evaluated(tmp_path / 'a', experiment)
  assert len(validation.documents) == 2
  assert metrics['tokens'] == 40
  assert records[0]['split'] == 'validation'
  assert records[0]['bits_per_byte'] == metrics['bits_per_byte']
  text = data.vocabulary.decode(data.documents('validation')[0][:5])
  assert records[1] == {'step': 3, 'text': {'sample': text}}
  plot = tmp_path / 'a' / 'loss_nats_per_token.png'
  assert plot.stat().st_size > 1000
  # If it is stopped, nothing is reported.
  _, metrics, records, _ = evaluated(tmp_path / 'b', experiment, lambda: True)
  assert (metrics, records) == (None, [])


# 19 words, 1 of them not scored; the test program has 259 words.
WALK = RandomWalk(episodes=20, actions=18, grid=3, episodes_per_document=1)


class Whole(Counting):
  """Needs whole documents."""

  @property
  def needs_whole_document(self):
    return True


def with_model(**changes):
  """Returns the tiny program with another model."""
  settings = {'vocab': 259, 'cell': Counting(), 'd_model': 20} | changes
  return dataclasses.replace(tiny_run.program(), model=Model(**settings))


@pytest.mark.parametrize('depth', [0.0, 0.02, None])
def test_halting_before_the_first_step_is_reported(caplog, depth):
  metrics = {'loss_nats_per_token': 2.0}
  if depth is not None:
    metrics['halting_depth'] = depth
  validation._log_use_of_state(100, metrics, last=False)
  assert ('halt before their first step' in caplog.text) == (depth == 0)


@pytest.mark.parametrize(
  'step, cost, told',
  [(2000, 0.0019, True), (2000, 0.0021, False)]
  + [(1999, 0.0, False), (2000, -0.1, True), (2000, None, False)],
)
def test_a_state_that_is_not_used_is_reported(caplog, step, cost, told):
  metrics = {'loss_nats_per_token': 2.0}
  if cost is not None:
    metrics['cleared_cost'] = cost
  validation._log_use_of_state(step, metrics, last=False)
  for words in (
    f'state hardly helps after {step} steps',
    f'changes the loss by {cost or 0:+.2g} nats',
  ):
    assert (words in caplog.text) == told
  assert 'Value of the recurrent state' not in caplog.text
  with caplog.at_level('INFO'):
    validation._log_use_of_state(step, metrics, last=True)
  if cost is None or told:
    assert 'Value of the recurrent state' not in caplog.text
  else:
    assert f'change by {cost:+.4f} nats/token (now 2.0000)' in caplog.text


def test_labels_are_reported_with_trivial_answers(tmp_path, caplog):
  program = with_model(head=Classifier(WALK.vocabulary.size - 1, None))
  experiment = tiny_run.experiment(WALK, program, best_metric='accuracy')
  with caplog.at_level('INFO'):
    _, metrics, records, shown = evaluated(tmp_path, experiment)
  assert f'uniform: error {100 * 8 / 9:.2f} %' in caplog.text
  first, *others = records
  assert first['error'] == metrics['error'] == 1 - metrics['accuracy']
  assert metrics['scored_tokens'] == 2 * 18
  trivial = WALK.baselines('validation').items()
  expected = {f'trivial/{name}': error for name, error in trivial}
  assert {each['split']: each['error'] for each in others} == expected
  assert all(each['step'] == 3 for each in others)
  assert 'step 3  trivial/uniform  error 88.89%' in shown
  assert (tmp_path / 'error.png').stat().st_size > 1000


BY_ERROR = {'best_metric': 'error'}


@pytest.mark.parametrize(
  ('labels', 'model', 'changes', 'expected'),
  [
    (True, {}, {}, "best_metric is 'bits_per_byte', .* loss_nats_per_token"),
    (True, {}, BY_ERROR | {'sample': Sample()}, 'SAMPLE .* 5'),
    (True, {}, BY_ERROR | {'eval_subset': EvalSubset(tokens=1)}, 'EVAL_TOKENS'),
    (True, {'head': Matcher(13)}, BY_ERROR, 'Matcher'),
    (
      *(True, {'cell': Whole()}),
      BY_ERROR | {'segment': 32, 'shorter_first': ShorterFirst(8, 2)},
      'FIRST_SEGMENT',
    ),
    (False, {}, BY_ERROR, "best_metric is 'error', .* bits_"),
    (False, {'head': Classifier(3)}, {}, 'Classifier'),
    (False, {'cell': Whole()}, {'segment': 200, 'sample': Sample()}, 'Whole'),
  ],
)
def test_what_the_experiment_cannot_evaluate(
  data, labels, model, changes, expected
):
  program = with_model(**model) if model else tiny_run.program()
  documents = WALK if labels else data
  with pytest.raises(ValueError, match=expected):
    Validation(tiny_run.experiment(documents, program, **changes))


def test_the_shortest_bucket_has_whole_blocks():
  encoder = tiny.transformer(1, causal=False)
  cell = tiny.recurrent(changes={'cross': True})
  program, pairs = with_model(cell=cell, encoder=encoder), CopyingPairs(50)
  make = lambda buckets: Validation(
    tiny_run.experiment(pairs, program, segment=2 * tiny.W, buckets=buckets)
  )
  make(2)
  needed = rf'BUCKETS .* multiple of {tiny.W} .* got {tiny.W // 2}\.'
  with pytest.raises(ValueError, match=needed):
    make(3)


def test_only_validation_may_have_documents_longer_than_segments(data):
  """The longest documents have 82 tokens in validation, 186 in training."""
  other = {'train': 'validation', 'validation': 'train'}
  swapped = types.SimpleNamespace(
    vocabulary=data.vocabulary,
    documents=lambda split: data.documents(other[split]),
  )
  program, subset = (
    with_model(cell=Whole()),
    {'eval_subset': EvalSubset(tokens=90)},
  )
  make = lambda given, **more: Validation(
    tiny_run.experiment(given, program, segment=90, **more)
  )
  assert make(swapped, **subset).sharded is program
  assert make(swapped).sharded.segment == 186
  with pytest.raises(ValueError, match='SEGMENT'):
    make(data, **subset)
