"""What all synthetic tasks have in common: documents, numbers, settings."""

import dataclasses

import numpy as np
import pytest

from meliad_rec.data import dataset
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.algorithm import Algorithm
from meliad_rec.data.synthetic.arithmetic import Arithmetic
from meliad_rec.data.synthetic.associative_recall import AssociativeRecall
from meliad_rec.data.synthetic.by_size import BySize
from meliad_rec.data.synthetic.cellular_automaton import CellularAutomaton
from meliad_rec.data.synthetic.copying import Copying
from meliad_rec.data.synthetic.counting import Counting
from meliad_rec.data.synthetic.flip_flop import FlipFlop
from meliad_rec.data.synthetic.labeled import distinct
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.synthetic.listops import ListOps
from meliad_rec.data.synthetic.logical_inference import LogicalInference
from meliad_rec.data.synthetic.needle import Needle
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.data.synthetic.recall import Recall
from meliad_rec.data.synthetic.word_problem import WordProblem
from meliad_rec.data.vocabulary import Words

WORDS = Words(['a', 'bc', 'é'])
TOKENS = np.array([[1, 0, 2], [3, 3, 3], [0, 0, 1], [2, 1, 0], [0, 3, 0]])
LABELS = np.array([[0, 0, 3], [1, 0, 2], [0, 0, 0], [3, 3, 0], [0, 1, 0]])

FEW = {'sequences': 60, 'test_sequences': 20}
LISTOPS = ListOps(trees=2000, max_length=30, test_trees=40)
# A task, and the identity of a split: golden, because other content would be
# other data under the same name.
TASKS = {
  'algorithm': (
    Algorithm(programs=30, statements=8, values=4, programs_per_document=3),
    ('test', 'f8b54611a199'),
  ),
  'arithmetic': (Arithmetic(**FEW), ('test_64', '85760ae32655')),
  'arithmetic in brackets': (
    Arithmetic(brackets=True, **FEW),
    ('train', '8bbf26a41930'),
  ),
  'associative_recall': (
    AssociativeRecall(rewrites=0.3, **FEW),
    ('test_32', 'ec678c5133e7'),
  ),
  'cellular_automaton': (CellularAutomaton(**FEW), ('test_2', 'dca3216cc1b6')),
  'copying': (Copying(**FEW), ('test_80', '5006f2961724')),
  'counting': (Counting(**FEW), ('test', 'cefa39f3ed1b')),
  'flip_flop': (
    FlipFlop(sequences=60, length=40, test_sequences=20),
    ('test', '9c3b20826ac3'),
  ),
  'listops': (LISTOPS, ('train', '475c9573b264')),
  'listops of a length': (LISTOPS, ('length_900_1000', '250548c967eb')),
  'logical_inference': (
    LogicalInference(pairs=5000),
    ('bin_5', 'db2bb0a3313d'),
  ),
  'needle': (Needle(chains=2, hops=1, **FEW), ('test_1024', 'c902ad94d1be')),
  'random_walk': (
    RandomWalk(episodes=40, actions=13, grid=3, episodes_per_document=4),
    ('test', 'ca6bd623d11c'),
  ),
  'recall': (
    Recall(documents_in_train=30, questions=2, letters=2, countdown=3),
    ('test', '4c8d89331c1b'),
  ),
  'word_problem': (
    WordProblem(group='S5', **FEW),
    ('test_64_last', 'a77ee1c08adb'),
  ),
}


@pytest.mark.parametrize('name', TASKS)
def test_tasks_are_datasets_with_the_same_data_on_every_machine(name):
  task, (split, identity) = TASKS[name]
  assert isinstance(task, dataset.Dataset)
  other = dataclasses.replace(task, seed=1)
  assert task.documents(split).identity.startswith(identity)
  assert not other.documents(split).identity.startswith(identity)
  with pytest.raises(ValueError, match="'dev'. Choose one of train"):
    task.documents('dev')
  found = dataset.baselines(task, split)
  assert found == (task.baselines(split) if name != 'recall' else {})


# Tasks by size draw short sequences more than once.
DISTINCT = [n for n, (t, _) in TASKS.items() if not isinstance(t, BySize)]


@pytest.mark.parametrize('name', [n for n in DISTINCT if ' ' not in n])
def test_no_two_documents_are_the_same(name):
  """Except that some splits are parts of others."""
  task, _ = TASKS[name]
  parts = ('_last', 'test_short', 'bin_', 'validation_')
  texts = [
    task.documents(split)[i].tobytes()
    for split in task.splits
    if not any(part in split for part in parts)
    for i in range(len(task.documents(split)))
  ]
  assert len(texts) == len(set(texts)) > 10


def test_bytes_and_words_are_those_of_the_text():
  for task, (split, _) in TASKS.values():
    documents = task.documents(split)
    for i in range(min(len(documents), 50)):
      text = task.vocabulary.decode(documents[i])
      assert documents.bytes_[i] == len(text.encode())
      assert documents.words[i] == len(text.split())


def test_recall_asks_for_the_name_that_it_begins_with():
  task, letters = Recall(200, questions=2, letters=2, countdown=3), set()
  for ids in task.documents('train'):
    text = task.vocabulary.decode(ids)
    name = text[5:7]
    part = f'{name} 03 02 01 \n'
    assert text == f'name:{part}name?{part}name?{part}'
    letters.update(name)
  assert len(letters) == 16


@pytest.mark.parametrize('per', [1, 2, 9])
def test_documents_are_consecutive_rows(per):
  documents = labeled.from_rows('dev', TOKENS, LABELS, per, WORDS)
  assert documents.names == [f'dev-{i}' for i in range(len(documents))]
  for i, first in enumerate(range(0, 5, per)):
    rows = range(first, min(first + per, 5))
    real = [(n, x) for n in rows for x in range(3) if TOKENS[n, x]]
    begin, end = documents.starts[i : i + 2]
    assert documents[i].tolist() == [TOKENS[at] for at in real]
    assert documents.labels[begin:end].tolist() == [LABELS[at] for at in real]
  assert len(documents) == i + 1


def test_measuring_in_chunks_changes_nothing(monkeypatch):
  whole = labeled.from_rows('dev', TOKENS, LABELS, 1, WORDS)
  monkeypatch.setattr(labeled, '_CHUNK', 2)
  arrays = whole.tokens, whole.starts, whole.labels
  chunked = labeled.from_tokens('dev', *arrays, WORDS)
  assert chunked.identity == whole.identity and chunked.names == whole.names


@pytest.mark.parametrize('in_train', [1, 30])
def test_splits_divide_all_rows(in_train):
  rows = np.arange(labeled.total_rows(in_train))
  parts = [
    rows[labeled.split_rows(split, in_train)]
    for split in ('train', 'validation', 'test')
  ]
  assert np.concatenate(parts).tolist() == rows.tolist()
  tenth = max(in_train // 10, 1)
  assert [len(part) for part in parts] == [in_train, tenth, tenth]


def test_numbers_are_the_same_on_every_machine():
  """Golden, from NumPy 2.4: others would change all data."""
  below = lambda *seeds: Draws(*seeds).below(100, 6).tolist()
  assert below(3) == [80, 61, 38, 84, 46, 87]
  assert below(3, 0) == [59, 11, 86, 30, 0, 73]
  streams = [below(3), below(4), below(3, 0), below(3, 1), below(3, 1, 0)]
  assert len({*map(tuple, streams)}) == 5
  assert Draws(3).bits(3).tolist() == [3485385464, 367860371, 770692085]
  with pytest.raises(ValueError, match='seed .* -1'):
    Draws(-1)


def test_numbers_are_uniform():
  """Within 5 standard deviations."""
  counts = np.bincount(Draws(0).below(7, 70_000))
  assert len(counts) == 7
  assert np.abs(counts - 10_000).max() < 5 * np.sqrt(10_000)
  points = Draws(0).between_0_and_1(50_001)
  assert points.shape == (50_001,)
  assert 0 < points.min() < 1e-3 and 1 - 1e-3 < points.max() < 1
  counts = np.histogram(points, 10, (0, 1))[0]
  assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)


@pytest.mark.parametrize('bits', [0, 2**32 - 1])
def test_points_are_never_0_or_1(bits, monkeypatch):
  monkeypatch.setattr(Draws, 'bits', lambda _, n: np.full(n, bits, np.uint32))
  assert 0 < Draws(0).between_0_and_1(1)[0] < 1


def test_each_number_may_have_its_own_end():
  ends = np.array([1, 2, 5, 1000] * 50)
  drawn = Draws(1).below(ends, 200)
  assert (drawn < ends).all() and (drawn >= 0).all()
  assert drawn.max() > 500


def test_distinct_rows_are_in_the_order_drawn():
  batches = [Draws(i).below(4, 18).reshape(9, 2) for i in range(9)]
  rows = [*dict.fromkeys(map(tuple, np.concatenate(batches).tolist()))]
  for left_out in [], rows[1:3]:
    draws = iter(batches)
    excluded = {np.array(row).tobytes() for row in left_out}
    found = distinct(lambda _, draws=draws: next(draws), 9, 'x', excluded)
    expected = [row for row in rows if row not in left_out]
    assert [*map(tuple, found.tolist())] == expected[:9]
    assert len([*draws]) < 8  # It needed more than the first.


@pytest.mark.parametrize(
  ('task', 'settings', 'message'),
  [
    (Algorithm, {'programs': 0}, 'got 0. Set algorithm.Algorithm.programs'),
    (Algorithm, {'variables': 6}, 'from 1 to 5, got 6'),
    (Algorithm, {'values': 1}, 'Algorithm.values'),
    (Arithmetic, {'modulus': 11}, 'from 2 to 10.*Arithmetic.modulus'),
    (AssociativeRecall, {'keys': 63}, 'at least 64.*AssociativeRecall.keys'),
    (AssociativeRecall, {'power': 0}, 'above 0.*AssociativeRecall.power'),
    (AssociativeRecall, {'passes': 4}, 'at least 10, got 8. Set .*length'),
    (AssociativeRecall, {'rewrites': 1}, 'AssociativeRecall.rewrites'),
    (CellularAutomaton, {'test_sizes': (10,)}, 'from 1 to 9, got 10'),
    (CellularAutomaton, {'radius': 3}, 'CellularAutomaton.radius'),
    (
      Copying,
      {'max_size': 9},
      'at least 40, got 9. Set copying.Copying.max_size',
    ),
    (
      Needle,
      {'min_size': 13},
      'at least 14, got 13. Set needle.Needle.min_size',
    ),
    (Needle, {'chains': 101}, 'Needle.names'),
    (WordProblem, {'group': 'Q8'}, "no group 'Q8'.*WordProblem.group"),
    (WordProblem, {'group': 'S6'}, 'from 2 to 5.*WordProblem.group'),
    (WordProblem, {'group': 'Z9', 'moved': 2}, 'Remove .*WordProblem.moved'),
    (WordProblem, {'group': 'A5', 'moved': 2}, 'only its identity'),
    (WordProblem, {'group': 'S5xS5'}, 'more than 2000 elements'),
    (WordProblem, {'group': None}, 'no group None'),
    (WordProblem, {'test_sizes': 64}, 'whole numbers such as .64,.'),
    (WordProblem, {'test_sizes': (0,)}, 'WordProblem.test_sizes'),
    (WordProblem, {'test_sizes': ((0, 9),)}, 'at least 1, got 0'),
    (WordProblem, {'test_sizes': ((9, 4),)}, 'pairs such as .*9, 4'),
    (FlipFlop, {'sequences': 0}, 'FlipFlop.sequences'),
    (FlipFlop, {'length': 7}, 'even.*FlipFlop.length'),
    (FlipFlop, {'ignore': 1.5}, 'FlipFlop.ignore'),
    (ListOps, {'trees': 2}, 'ListOps.trees'),
    (ListOps, {'max_args': 1}, 'ListOps.max_args'),
    (ListOps, {'max_args': 10, 'max_depth': 1800}, '=1800 .* inf words'),
    (ListOps, {'max_args': 15}, 'max_args=15 .* words'),
    (LogicalInference, {'pairs': 0}, 'pairs'),
    (LogicalInference, {'train_operators': 13}, 'train_operators'),
    (RandomWalk, {'episodes': 0}, 'RandomWalk.episodes'),
    (RandomWalk, {'grid': 1}, 'RandomWalk.grid'),
    (Recall, {'countdown': 100}, 'Recall.countdown'),
    (Recall, {'documents_in_train': -5}, 'documents'),
    (Recall, {'questions': 0}, 'Recall.questions'),
    (Recall, {'letters': 8}, 'Recall.letters'),
    (Recall, {'seed': -1}, 'Recall.seed'),
  ],
)
def test_settings_out_of_range_are_refused(task, settings, message):
  with pytest.raises(ValueError, match=message):
    task(**settings)


@pytest.mark.parametrize(
  ('task', 'split', 'message'),
  [
    (
      Algorithm(variables=1, statements=1),
      'test',
      '12000 .* only 10. .*Algorithm.statements',
    ),
    (
      ListOps(trees=400, max_length=1, seed=1),
      'validation',
      'validation .* 1 words. .*ListOps.trees',
    ),
    (
      ListOps(max_args=2, max_depth=2),
      'train',
      '100000 .*ListOps.max_args',
    ),
    (
      ListOps(max_depth=4),
      'length_600_700',
      '601 to 699 words. .*ListOps.max_args',
    ),
    (LogicalInference(pairs=9), 'bin_12', 'bin_12. .*LogicalInference.pairs'),
    (RandomWalk(99, actions=3), 'test', '117 .*RandomWalk.actions'),
    (Recall(300, letters=2), 'train', '360 .*letters'),
  ],
)
def test_splits_that_cannot_be_filled_are_refused(task, split, message):
  with pytest.raises(ValueError, match=message):
    task.documents(split)
