"""Labeled documents, random numbers, and what all tasks have in common."""

import dataclasses
import itertools

import numpy as np
import pytest

from meliad_rec.data import dataset
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.algorithm import Algorithm
from meliad_rec.data.synthetic.flip_flop import FlipFlop
from meliad_rec.data.synthetic.labeled import distinct
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.synthetic.listops import ListOps
from meliad_rec.data.synthetic.logical_inference import LogicalInference
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.data.synthetic.recall import Recall
from meliad_rec.data.vocabulary import Words

WORDS = Words(['a', 'bc', 'é'])
TOKENS = np.array([[1, 0, 2], [3, 3, 3], [0, 0, 1], [2, 1, 0], [0, 3, 0]])
LABELS = np.array([[0, 0, 3], [1, 0, 2], [0, 0, 0], [3, 3, 0], [0, 1, 0]])

# A task, and the beginning of a document: golden, because other content would
# be other data under the same name.
TASKS = {
  'algorithm': (
    Algorithm(programs=30, statements=8, values=4, programs_per_document=3),
    ('test', 0, 'y = 1 ; y ++ ; if y < 2 : y -- ; print y ; y -- ; print y ;'),
  ),
  'flip_flop': (
    FlipFlop(sequences=60, length=40, test_sequences=20),
    ('test', 0, 'w 1 w 0 i 1 i 1 i 1 r 0 i 1 w 0 i 0 i 0 i 1 i 1 r 0 w 0 i 0 '),
  ),
  'listops': (
    ListOps(trees=2000, max_length=30, test_trees=40),
    ('train', 1, 'START [SM 9 3 [MED [SM 8 4 ] 8 4 9 ] 1 ] END'),
  ),
  'listops of a length': (
    ListOps(trees=2000, max_length=30, test_trees=40),
    ('length_900_1000', 1, 'START [MIN [MAX [MAX 1 5 3 [MED 7 1 [SM [MED 0 [M'),
  ),
  'logical_inference': (
    LogicalInference(pairs=5000),
    ('bin_5', 50, 'START c END START ( c ( or ( not ( ( c ( and a ) ) ( or'),
  ),
  'random_walk': (
    RandomWalk(episodes=40, actions=13, grid=3, episodes_per_document=4),
    ('test', 0, 'RESET F F R R R L F F F R F R F '),
  ),
  'recall': (
    Recall(documents_in_train=30, questions=2, letters=2, countdown=3),
    ('test', 0, 'name:GM 03 02 01 \nname?GM 03 02 01 \nname?GM'),
  ),
}


@pytest.mark.parametrize('name', TASKS)
def test_tasks_are_datasets_with_the_same_data_on_every_machine(name):
  task, (split, i, text) = TASKS[name]
  assert isinstance(task, dataset.Dataset)
  documents = task.documents(split)
  assert task.vocabulary.decode(documents[i]).startswith(text)
  again, other = (dataclasses.replace(task, seed=seed) for seed in (0, 1))
  assert again.documents(split).identity == documents.identity
  assert other.documents(split).identity != documents.identity
  with pytest.raises(ValueError, match="'dev'; it has train"):
    task.documents('dev')


@pytest.mark.parametrize('name', TASKS)
def test_no_two_documents_are_the_same(name):
  """Except that some splits are parts of others."""
  task, _ = TASKS[name]
  parts = ('_last', 'test_short', 'bin_')
  texts = [
    task.documents(split)[i].tobytes()
    for split in task.splits
    if not any(part in split for part in parts)
    for i in range(len(task.documents(split)))
  ]
  assert len(texts) == len(set(texts)) > 10


def test_bytes_and_words_are_those_of_the_text():
  for task, (split, _, _) in TASKS.values():
    documents = task.documents(split)
    for i in range(min(len(documents), 50)):
      text = task.vocabulary.decode(documents[i])
      assert documents.bytes_[i] == len(text.encode())
      assert documents.words[i] == len(text.split())


def test_baselines_are_empty_if_a_task_has_none():
  task, _ = TASKS['algorithm']
  assert dataset.baselines(task, 'test') == task.baselines('test') != {}
  assert dataset.baselines(Recall(), 'test') == {}


@pytest.mark.parametrize('per', [1, 2, 5, 9])
def test_documents_are_consecutive_rows(per):
  documents = labeled.from_rows('dev', TOKENS, LABELS, per, WORDS)
  assert documents.names == [f'dev-{i}' for i in range(len(documents))]
  for i, first in enumerate(range(0, 5, per)):
    rows = range(first, min(first + per, 5))
    real = [(n, x) for n in rows for x in range(3) if TOKENS[n, x]]
    begin, end = documents.starts[i : i + 2]
    assert documents[i].tolist() == [TOKENS[at] for at in real]
    assert documents.labels[begin:end].tolist() == [LABELS[at] for at in real]
    text = WORDS.decode(documents[i])
    assert documents.bytes_[i] == len(text.encode())
    assert documents.words[i] == len(text.split())
  assert len(documents) == i + 1


def test_measuring_in_chunks_changes_nothing(monkeypatch):
  whole = labeled.from_rows('dev', TOKENS, LABELS, 1, WORDS)
  monkeypatch.setattr(labeled, '_CHUNK', 2)
  arrays = whole.tokens, whole.starts, whole.labels
  chunked = labeled.from_tokens('dev', *arrays, WORDS)
  assert chunked.bytes_.tolist() == whole.bytes_.tolist()
  assert chunked.identity == whole.identity and chunked.names == whole.names


@pytest.mark.parametrize('in_train', [1, 7, 30])
def test_splits_divide_all_rows(in_train):
  rows = np.arange(labeled.total_rows(in_train))
  parts = [
    rows[labeled.split_rows(split, in_train)]
    for split in ('train', 'validation', 'test')
  ]
  assert np.concatenate(parts).tolist() == rows.tolist()
  tenth = max(in_train // 10, 1)
  assert [len(part) for part in parts] == [in_train, tenth, tenth]


def test_settings_out_of_range_are_refused():
  labeled.check_setting('a.B.c', 5, 1, 5)
  for value in 0, 6:
    with pytest.raises(ValueError, match=f'got {value}. Set a.B.c'):
      labeled.check_setting('a.B.c', value, 1, 5)


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
  bits = np.unpackbits(Draws(0).bits(10_001).view(np.uint8))
  assert bits.size == 32 * 10_001
  assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)
  points = Draws(0).between_0_and_1(50_001)
  assert points.shape == (50_001,)
  assert 0 < points.min() < 1e-3 and 1 - 1e-3 < points.max() < 1
  counts = np.histogram(points, 10, (0, 1))[0]
  assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)
  draws = Draws(0)
  orders = [tuple(draws.order(3).tolist()) for _ in range(6000)]
  counts = [orders.count(order) for order in itertools.permutations(range(3))]
  assert sum(counts) == 6000
  assert max(counts) - min(counts) < 10 * np.sqrt(1000)


@pytest.mark.parametrize('bits', [0, 2**32 - 1])
def test_points_are_never_0_or_1(bits, monkeypatch):
  monkeypatch.setattr(Draws, 'bits', lambda _, n: np.full(n, bits, np.uint32))
  assert 0 < Draws(0).between_0_and_1(1)[0] < 1


def test_each_number_may_have_its_own_end():
  ends = np.array([1, 2, 5, 1000] * 50)
  drawn = Draws(1).below(ends, 200)
  assert (drawn < ends).all() and (drawn >= 0).all()
  assert drawn.max() > 500
  assert Draws(1).below(3, 0).tolist() == []


def test_distinct_rows_are_in_the_order_drawn():
  drawn = []

  def draw(count):
    rows = Draws(len(drawn)).below(4, 2 * count).reshape(count, 2)
    drawn.append(rows)
    return rows

  rows = distinct(draw, 9, 'x').tolist()
  unique = [*map(list, dict.fromkeys(map(tuple, np.concatenate(drawn))))]
  assert rows == unique[:9]
  assert len(drawn) > 1


def test_distinct_rows_leave_out_excluded_ones():
  draw = lambda _: Draws(0).below(5, 40)[:, None]
  rows = distinct(draw, 5, 'x').tolist()
  excluded = {np.array(row).tobytes() for row in rows[1:3]}
  assert distinct(draw, 3, 'x', excluded).tolist() == [rows[0], *rows[3:]]


def test_too_few_distinct_rows_are_reported():
  draws = Draws(0)
  with pytest.raises(ValueError, match='^5 different .* 100 .* only 3. .* x'):
    distinct(lambda count: draws.below(3, count)[:, None], 5, 'x')
