"""The command that shows depths, in words and in pictures."""

import atexit
import functools
from pathlib import Path
import shutil
import tempfile
import types

import matplotlib.image
import numpy as np
import pytest

from meliad_rec.commands import depth
from meliad_rec.commands import depth_report
from meliad_rec.commands.depth_report import Line
from meliad_rec.config import config
from meliad_rec.config.saved import DATA
from meliad_rec.config.saved import SavedConfig
from meliad_rec.data.synthetic import listops
from meliad_rec.data.synthetic.logical_inference import LogicalInference
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import Words
from meliad_rec.evaluation.depth import Depths
from meliad_rec.evaluation.depth import Group
from meliad_rec.models import pooling
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher
from meliad_rec.report.plot import plain
from meliad_rec.runs import folder as run_folder
from meliad_rec.runs.run_data import open_data
from meliad_rec.runs.trained_run import load_run
from meliad_rec.training import trainer
from meliad_rec.training.experiment import Experiment
from tests import command

EXPRESSION = '[MAX 2 [MIN 3 4 ] 0 ]'
TEXT = f'--text={EXPRESSION}'
LONG = f'--text=[MAX {"2 " * 30} ]'


@functools.cache
def folder() -> Path:
  """The folder of a run on expressions of at most 20 tokens, at step 0."""
  top = Path(tempfile.mkdtemp(prefix='halting'))
  atexit.register(shutil.rmtree, top, ignore_errors=True)
  bindings = 'TREES = 400', 'MAX_LENGTH = 20', 'SEGMENT = 24', 'DEPTH = 7'
  files = ['arch/gated_universal', 'size/test', 'task/listops']
  config.parse(files, [*bindings, 'BATCH = 8'])
  experiment = config.build(Experiment)()
  run = trainer.Run(experiment, str(top), {})
  run.state = run.program.create(experiment.seed)
  run.save(None)
  run.checkpoints.close()
  run_folder.write(top, experiment, config.operative())
  config.reset()
  return top


@pytest.fixture
def tell(capsys):
  """Runs the command; returns what it prints."""

  def run(*arguments):
    assert command.run(depth, f'--workdir={folder()}', *arguments) == 0
    return capsys.readouterr().out

  return run


@pytest.mark.slow
def test_tokens_of_a_text_halt_together(tell, tmp_path):
  out = tmp_path / 'depth.png'
  told = tell(TEXT, '--text=7', f'--out={out}')
  first, second, wrote = told.splitlines()
  assert wrote == f'wrote {out}'
  assert out.read_bytes().startswith(b'\x89PNG')
  label, rest = first.split(', ')
  assert label.removeprefix('label ') in '0123456789'
  steps, text = rest.split(' steps for all 10 tokens: ')
  assert 0 <= int(steps) <= 7
  assert text == f'START {EXPRESSION} END'
  assert second.endswith(' steps for all 3 tokens: START 7 END')
  assert 'steps for all 34 tokens' in tell(LONG, '--segment=34')


@pytest.mark.slow
def test_a_split(tell, tmp_path):
  """The line counts the documents and tokens of the data."""
  out = tmp_path / 'depth.png'
  told = tell('--split=train', '--batch=11', f'--out={out}')
  first, *lines, wrote = told.splitlines()
  assert wrote == f'wrote {out}'
  assert out.read_bytes().startswith(b'\x89PNG')
  data = load_run(folder()).config.argument(Experiment, 'data', DATA)
  documents = data.documents('train')
  tokens = len(documents.tokens)
  assert first.endswith(f': {len(documents)} documents, {tokens:,} tokens')
  heads = [line.split()[0] for line in lines if 'documents' in line]
  assert heads == ['tokens', 'brackets']
  told = tell('--split=train', '--documents=5')
  assert ': 5 documents, ' in told.splitlines()[0]


@pytest.mark.parametrize(
  ('arguments', 'told'),
  [
    (['--workdir=', TEXT], '--workdir=DIR'),
    (['--workdir=/', TEXT], 'is not the folder of a run'),
    ([], 'Give one thing to read'),
    ([TEXT, '--split=test'], 'Give one thing to read'),
    ([TEXT, '--documents=3'], '--documents'),
    ([TEXT, 'more'], "'more' is not a flag"),
    (['--workdir=', 'a', 'b'], "'b' is not a flag"),
    (['--text=[MAX 2 x ]'], "no word 'x'"),
    (['--split=tset'], "'tset'"),
    ([LONG, '--segment=8'], '--segment must be at least 34'),
    ([TEXT, '--segment=9'], '--segment must be at least 10'),
    ([TEXT, '--out=x.jpg'], '.png'),
  ],
)
def test_what_cannot_be_read_or_written(arguments, told):
  assert told in command.mistake(depth, f'--workdir={folder()}', *arguments)


def test_data_of_another_vocabulary():
  data = types.SimpleNamespace(vocabulary=Bytes())
  config = types.SimpleNamespace(argument=lambda *_: data)
  words = types.SimpleNamespace(identity='words: a')
  run = types.SimpleNamespace(vocabulary=words, config=config)
  with pytest.raises(ValueError, match='the vocabulary bytes, .* --store'):
    open_data(run)


LISTOPS = listops.VOCABULARY
SHORT = '[MAX 2 [MIN 3 ] ]'


def stand_in(vocabulary, head=None, labels=True, data=None):
  config = types.SimpleNamespace(argument=lambda *_: data)
  sequences = 1 if head is None else head.sequences
  model = types.SimpleNamespace(head=head, sequences=sequences)
  return types.SimpleNamespace(
    vocabulary=vocabulary,
    labels=labels,
    config=config,
    sharded=types.SimpleNamespace(model=model),
  )


def line(run, text, steps, begins, answers):
  documents = depth_report.documents_of(run, [text])
  facts = [np.asarray(each) for each in (steps, begins, answers)]
  facts[0] = facts[0][:, None]
  return depth_report.line_of(run, Depths(documents, *facts), 0)


def test_start_and_end_are_put_around_once():
  ends = listops.ListOps().end_ids
  for given in '{}', 'START {}', '{} END', 'START {} END':
    ids = depth_report.encode(LISTOPS, given.format(SHORT), ends)
    assert LISTOPS.decode(ids) == f'START {SHORT} END'
  assert LISTOPS.decode(depth_report.encode(LISTOPS, SHORT, ())) == SHORT


@pytest.mark.parametrize(
  ('data', 'settings', 'ids'),
  [
    ('lra.IMDbText', {}, [2, 100, 1]),
    ('lra.IMDbText', {'ends': False}, [100]),
    ('listops_files.ListOpsFiles', {'path': '{split}'}, [16, 5, 17]),
    ('listops_files.ListOpsFiles', {'path': '{split}', 'ends': False}, [5]),
    ('listops.ListOps', {}, [16, 5, 17]),
    ('listops.ListOps', {'ends': False}, [5]),
    # These data do not exist.
    ('store.Store', {'path': '/nowhere'}, [100]),
  ],
)
def test_a_text_has_the_form_of_the_data(data, settings, ids):
  is_words = 5 in ids
  run = stand_in(LISTOPS if is_words else Bytes(), Classifier(10, None))
  lines = [
    'from __gin__ import dynamic_registration',
    'from meliad_rec.data import listops_files',
    'from meliad_rec.data import lra',
    'from meliad_rec.data import store',
    'from meliad_rec.data.synthetic import listops',
    'from meliad_rec.training import experiment',
    f'experiment.Experiment.data = @{data}()',
    *(f'{data}.{name} = {value!r}' for name, value in settings.items()),
  ]
  run.config = SavedConfig('\n'.join(lines), 'config.gin')
  found = depth_report.documents_of(run, ['4' if is_words else 'a'])
  assert found[0].tolist() == ids


def test_data_of_others_are_not_called_to_read_a_text():
  run = stand_in(Bytes(), Classifier(10, None))
  text = 'import os\nmeliad_rec.training.experiment.Experiment.data = @os.x()'
  text = f'from __gin__ import dynamic_registration\n{text}'
  run.config = SavedConfig(text, 'config.gin')
  with pytest.raises(ValueError, match='add --trusted'):
    depth_report.documents_of(run, ['a'])


def test_documents_of_labeled_pairs():
  data = LogicalInference()
  judges = stand_in(data.vocabulary, Matcher(7, pooling.Mean()), data=data)
  found = depth_report.documents_of(judges, ['( a and b ) || a', 'a||b'])
  assert found.first_lengths.tolist() == [7, 3]
  assert judges.vocabulary.decode(found[0]) == (
    'START ( a and b ) END START a END'
  )
  assert not found.labels.any()
  for text in ('a', 'a || b || c'):
    with pytest.raises(ValueError, match=r'pairs of texts, .* separated by'):
      depth_report.documents_of(judges, [text])
  for text in '||', 'a ||', '|| a', 'a || START END':
    with pytest.raises(ValueError, match=r'--text is empty on a side of \|\|'):
      depth_report.documents_of(judges, [text])


def test_documents_of_text():
  writes = stand_in(Bytes(), labels=False)
  found = depth_report.documents_of(writes, ['a bc', 'd'])
  assert found.labels is None and found.first_lengths is None
  assert (found.lengths.tolist(), found.words.tolist()) == ([4, 1], [2, 1])
  with pytest.raises(ValueError, match='--text is empty'):
    depth_report.documents_of(writes, ['a', ''])
  with pytest.raises(ValueError, match='--text has a lone surrogate'):
    depth_report.documents_of(writes, ['caf\udce9'])


def test_all_halt_together_and_are_judged_as_one():
  data = listops.ListOps()
  judges = stand_in(LISTOPS, Classifier(10, pooling.Mean()), data=data)
  begins = [True] + [False] * 7
  answers = [9] * 7 + [4]  # The id of a label is that of a word.
  found = line(judges, SHORT, [5] * 8, begins, answers)
  assert str(found) == (
    'label 3, 5 steps for all 8 tokens: START [MAX 2 [MIN 3 ] ] END'
  )


def test_each_token_halts_and_is_judged_by_itself():
  judges = stand_in(LISTOPS, Classifier(14, None), data=listops.ListOps())
  found = line(
    judges, '[MAX 2 ]', [1, 2, 4, 12, 1], [True] * 5, [1, 11, 1, 2, 3]
  )
  assert str(found).splitlines() == [
    '4.00 steps, 12 at most',
    '    1  0     START',
    '    2  [MIN  [MAX',
    '    4  0       2',
    '   12  1     ]',
    '    1  2     END',
  ]


def test_means_are_over_what_halts():
  data = listops.ListOps()
  judges = stand_in(LISTOPS, Classifier(10, pooling.Last()), data=data)
  begins = [True, False, False, True, False]
  found = line(judges, '[MAX 2 ]', [4, 4, 4, 7, 7], begins, [1] * 5)
  assert found.title == 'label 0, 5.50 steps, 7 at most'
  assert str(found).count('\n') == 5


def test_text_has_no_labels():
  writes = stand_in(Bytes(), labels=False)
  found = line(writes, 'a\n b', [1, 2, 3, 4], [True] * 4, [0] * 4)
  assert found.labels is None
  assert found.words == ['a', "'\\n'", "' '", 'b']
  # Labels of words, and classes that no word has.
  assert depth_report.named(Words(['a', 'b']), 2) == 'b'
  assert depth_report.named(Words(['a', 'b']), 3) == '2'
  assert depth_report.named(Bytes(), 2) == '1'


def line_of_words(words, levels, steps, title='a title'):
  return Line(title, words, levels, steps, None, False)


def test_texts(drawn, tmp_path):
  out = tmp_path / 'texts.png'
  words = ['[MAX', '2', '[MIN', '$', '$', ']', ']']
  levels, steps = [0, 1, 1, 2, 2, 1, 0], [3, 1, 4, 2, 5, 9, 2]
  depth_report.draw_lines(
    [line_of_words(words, levels, steps), line_of_words(['x'], [0], [2])], out
  )
  first, second = drawn[0].axes
  assert [bar.get_height() for bar in first.patches] == steps
  assert first.get_title('left') == 'a title'
  assert [text.get_text() for text in first.texts] == [*map(plain, words)]
  down = [-text.xyann[1] for text in first.texts]
  indents = [(y - down[0]) / (down[1] - down[0]) for y in down]
  assert indents == levels and down[1] > down[0]
  assert first.get_ylim() == second.get_ylim()
  assert first.get_ylim()[0] == 0


def test_words_do_not_overlap(drawn, tmp_path):
  """A hundred tokens are drawn, each in a column of its own."""
  words, levels = ['[MIN'] * 50 + [']'] * 50, [*range(50), *range(49, -1, -1)]
  out = tmp_path / 'x.png'
  depth_report.draw_lines([line_of_words(words, levels, [1] * 100)], out)
  boxes = [text.get_window_extent() for text in drawn[0].axes[0].texts]
  assert all(a.x1 <= b.x0 for a, b in zip(boxes, boxes[1:], strict=False))
  height, width, _ = matplotlib.image.imread(out).shape
  assert min(box.y0 for box in boxes) > -1  # Pixels.
  assert width < 2400 and height < 1400


def test_groups(drawn, tmp_path):
  by_length = [Group('1-3', 4, 2.5, 6, 0.5), Group('4-90', 4, 3.5, 7, None)]
  by_nesting = [Group('0', 8, 3.0, 7, 0.25)]
  groups = {'tokens': by_length, 'brackets': by_nesting}
  depth_report.draw_groups(groups, tmp_path / 'groups.png')
  above, nested, below, nested_below = drawn[0].axes
  assert [bar.get_height() for bar in above.patches] == [2.5, 3.5]
  assert above.lines[0].get_ydata().tolist() == [6, 7]
  assert below.lines[0].get_ydata()[0] == 50
  assert [bar.get_height() for bar in nested.patches] == [3]
  assert nested_below.lines[0].get_ydata() == [25]
  assert below.get_xlabel() == 'tokens'
  names = [label.get_text() for label in below.get_xticklabels()]
  assert names == ['1-3', '4-90']


def test_what_is_too_large_to_be_looked_at(tmp_path):
  wide = [line_of_words(['x'] * 1100, [0] * 1100, [1] * 1100)]
  high = [line_of_words(['x'], [0], [1])]
  for drawn in (wide, 100 * high):
    with pytest.raises(ValueError, match='inches'):
      depth_report.draw_lines(drawn, tmp_path / 'x.png')
