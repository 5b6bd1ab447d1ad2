"""Tasks tested at greater sizes, each against a slow form of itself."""

import itertools

import numpy as np
import pytest

from meliad_rec.data.synthetic.arithmetic import Arithmetic
from meliad_rec.data.synthetic.associative_recall import AssociativeRecall
from meliad_rec.data.synthetic.cellular_automaton import CellularAutomaton
from meliad_rec.data.synthetic.cellular_automaton import step
from meliad_rec.data.synthetic.copying import Copying
from meliad_rec.data.synthetic.copying_pairs import CopyingPairs
from meliad_rec.data.synthetic.counting import Counting
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.synthetic.needle import Needle
from meliad_rec.data.synthetic.object_collision import ObjectCollision
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.data.synthetic.recall import Recall
from meliad_rec.data.synthetic.word_problem import group
from meliad_rec.data.synthetic.word_problem import WordProblem

FEW = {'sequences': 300, 'test_sequences': 20}


def sequences(task, split='train'):
  """Yields the words of each document, and its labels; None without one."""
  documents, words = task.documents(split), [None, *task.vocabulary.words]
  for begin, end in itertools.pairwise(documents.starts):
    ids = documents.tokens[begin:end], documents.labels[begin:end]
    yield tuple([words[i] for i in part] for part in ids)


def product(a, b):
  """The product of two elements by their names."""
  if '_' in a:
    pairs = zip(a.split('_'), b.split('_'), strict=True)
    return '_'.join(product(*pair) for pair in pairs)
  if len(a) == 1:
    return str((int(a) + int(b)) % 5)
  return ''.join(b[int(i) - 1] for i in a)


@pytest.mark.parametrize('name', ['Z5', 'S3', 'A5', 'A4xZ5'])
def test_a_label_is_the_product_of_all_elements_so_far(name):
  task = WordProblem(group=name, **FEW)
  for words, labels in sequences(task):
    assert labels == [*itertools.accumulate(words, product)]


@pytest.mark.parametrize(
  ('name', 'order'), [('Z60', 60), ('S3', 6), ('S5', 120), ('A5', 60)]
)
def test_groups_are_groups(name, order):
  names, table_GG = group(name)
  everything = np.arange(order)
  assert len({*names}) == order and table_GG.shape == (order, order)
  assert (table_GG[0] == everything).all() and (
    table_GG[:, 0] == everything
  ).all()
  assert (np.sort(table_GG, 1) == everything).all()  # Every element divides.
  a, b, c = Draws(0).below(order, 300).reshape(3, 100)
  left, right = table_GG[table_GG[a, b], c], table_GG[a, table_GG[b, c]]
  assert (left == right).all()


def test_elements_can_be_limited_to_those_that_move_little():
  for moved, count in (2, 11), (3, 31), (5, 120):
    task = WordProblem(group='S5', moved=moved, **FEW)
    drawn = {word for words, _ in sequences(task) for word in words}
    assert len(drawn) == count
    for word in drawn:
      assert sum(a != b for a, b in zip(word, '12345', strict=True)) <= moved


def test_an_element_may_have_four_tokens_with_the_label_on_the_last():
  plain, slow = (
    WordProblem(group='S5', tokens_per_element=n, **FEW) for n in (1, 4)
  )
  for split in 'train', 'test_64_last':
    pairs = zip(sequences(plain, split), sequences(slow, split), strict=True)
    for (words, labels), (more, later) in pairs:
      assert more == [w for word in words for w in (word, '.', '.', '.')]
      assert later == [w for label in labels for w in (None, None, None, label)]
  assert plain.guess() == slow.guess() == 1 - 1 / 120


def test_the_last_label_alone_can_be_scored():
  task = WordProblem(**FEW)
  both = (sequences(task, split) for split in ('test_64', 'test_64_last'))
  pairs = zip(*both, strict=True)
  for (words, labels), (same, last) in pairs:
    assert words == same and last == [None] * 63 + labels[-1:]
  assert 'test_64_last' not in Arithmetic().splits


@pytest.mark.parametrize('split', ['test_128', 'test_128_last', 'test_40_50'])
def test_a_split_may_have_a_size_that_is_not_listed(split):
  listed = WordProblem(test_sizes=(128, (40, 50)), **FEW)
  other = WordProblem(test_sizes=(), **FEW)
  assert split not in other.splits
  assert [*sequences(other, split)] == [*sequences(listed, split)]
  assert other.baselines(split) == listed.baselines(split)
  deep = Needle(depths=(50,), **FEW)
  assert deep.documents('test_700_depth_50').lengths.tolist() == [700] * 20
  for none in 'test_0', 'test_50_40', 'test_128_lost', 'best':
    with pytest.raises(ValueError, match=f'no split .{none}.* train, valid'):
      other.documents(none)


@pytest.mark.parametrize('brackets', [False, True])
@pytest.mark.parametrize('modulus', [5, 10])
def test_expressions_have_their_values(brackets, modulus):
  task = Arithmetic(brackets=brackets, modulus=modulus, **FEW)
  counts = np.zeros(modulus)
  for words, labels in sequences(task):
    *expression, equals = words
    assert equals == '=' and labels[:-1] == [None] * len(expression)
    value = eval(' '.join(expression)) % modulus
    assert labels[-1] == str(value)
    counts[value] += 1
    numbers = sum(word.isdecimal() for word in words)
    operations = sum(word in '+-*' for word in expression)
    assert operations == numbers - 1
    # Sizes from 3 to 40 tokens, rounded down to those that exist.
    assert 2 <= len(words) <= (38 if brackets else 40)
    assert expression.count('(') == (operations if brackets else 0)
  assert (counts > 0).all()


@pytest.mark.parametrize(('rewrites', 'passes'), [(0, 1), (0.5, 1), (0.5, 2)])
def test_the_last_value_of_each_key_is_asked_for_once(rewrites, passes):
  task = AssociativeRecall(rewrites=rewrites, passes=passes, **FEW)
  repeated = pairs = 0
  for words, labels in sequences(task):
    size = len(words) // 8
    context, begin = words[: 2 * size], 2 * size * passes
    assert words[:begin] == context * passes
    given = dict(zip(context[::2], context[1::2], strict=True))
    repeated, pairs = repeated + size - len(given), pairs + size
    asked = [w if w[0] == 'k' else None for w in words[begin:]]
    found = dict(zip(asked, labels[begin:], strict=True))
    assert found.pop(None) is None and found == given
    assert len([w for w in asked if w]) == len(given)
    assert not any(labels[:begin]) and not any(asked[1::2])
  # The first pair of a sequence has no key to repeat.
  assert abs(repeated / pairs - rewrites * (1 - 1 / 10)) < 0.02


def test_the_filler_may_have_keys_without_labels():
  task = AssociativeRecall(filler_keys=True, **FEW | {'test_sizes': ()})
  keys = fillers = 0
  for words, labels in sequences(task):
    size = len(words) // 8
    assert sum(label is not None for label in labels) == size
    filler = [
      word for word, label in zip(words, labels, strict=True) if label is None
    ][2 * size :]
    keys += sum(word[0] == 'k' for word in filler)
    fillers += len(filler)
  assert abs(keys / fillers - 0.5) < 0.02


def test_questions_come_early_unless_the_power_is_1():
  early = {}
  for power in 0.01, 1:
    task = AssociativeRecall(
      min_size=4, max_size=4, length=42, power=power, sequences=2000
    )
    places = [
      i - 8
      for words, _ in sequences(task)
      for i in range(8, len(words))
      if words[i][0] == 'k'
    ]
    early[power] = np.mean(np.array(places) < 80)
  # Half of the places; by the power law, far more than that.
  assert abs(early[1] - 0.5) < 0.02 and early[0.01] > 0.8


def test_automata_follow_rules_that_train_and_test_do_not_share():
  rules = {}
  for split in 'train', 'test', 'test_3':
    task = CellularAutomaton(radius=1, cells=11, shown=12, **FEW)
    rules[split] = set()
    for words, labels in sequences(task, split):
      sign, ahead = words[12 * 12 - 1][0], int(words[12 * 12 - 1][1:])
      assert sign == '+' and words[-11:] == ['?'] * 11
      assert ahead == 3 if split == 'test_3' else 1 <= ahead <= 4
      states = [words[i : i + 11] for i in range(0, 12 * 12, 12)]
      rule = {}
      for before, after in itertools.pairwise(states):
        for i in range(11):
          seen = before[i - 1], before[i], before[(i + 1) % 11]
          assert rule.setdefault(seen, after[i]) == after[i]
      if len(rule) == 8:
        state = states[-1]
        for _ in range(ahead):
          left, right = state[-1:] + state[:-1], state[1:] + state[:1]
          around = zip(left, state, right, strict=True)
          state = [rule[seen] for seen in around]
        assert labels == [None] * 144 + state
        rules[split].add(tuple(sorted(rule.items())))
  assert len(rules['train']) > 50 and len(rules['test'] | rules['test_3']) > 2
  assert not rules['train'] & (rules['test'] | rules['test_3'])


def test_rule_110_is_rule_110():
  rule_NR = np.array([[110 >> i & 1 for i in range(8)]])
  state_NW, drawn = np.array([[0, 0, 0, 0, 0, 1]]), []
  for _ in range(4):
    drawn.append(''.join(map(str, state_NW[0])))
    state_NW = step(state_NW, rule_NR, 1)
  assert drawn == ['000001', '000011', '000111', '001101']


@pytest.mark.parametrize('backward', [False, True])
def test_copies_are_copies(backward):
  task = Copying(min_size=3, max_size=9, backward=backward, **FEW)
  for split in 'train', 'test_80':
    for words, labels in sequences(task, split):
      size = words.index('=')
      digits, copied = words[:size], labels[size:]
      assert copied == digits[::-1] if backward else copied == digits
      assert words[size + 1 :] == copied[:-1] and not any(labels[:size])
      assert 3 <= size <= 9 if split == 'train' else size == 80


def test_there_are_as_many_b_as_a():
  task = Counting(min_size=2, max_size=9, **FEW)
  wrong = labeled = 0
  for words, labels in sequences(task):
    size = words.count('a')
    assert words == ['a'] * size + ['b'] * size and 2 <= size <= 9
    # What comes next, where it is certain.
    assert labels == [None] * size + [*words, '.'][size + 1 :]
    wrong, labeled = wrong + 1, labeled + size
  assert task.baselines('train')['likeliest'] == wrong / labeled


@pytest.mark.parametrize(('chains', 'hops'), [(1, 0), (3, 2), (8, 0)])
def test_the_needle_is_found_by_following_its_chain(chains, hops):
  task = Needle(chains=chains, hops=hops, digits=3, names=24, **FEW)
  places = []
  for words, labels in sequences(task):
    assert 64 <= len(words) <= 512
    question, values = len(words) - 4, {}
    for i in [i for i in range(question) if words[i] == '=']:
      name, first = words[i - 1], words[i + 1]
      value = values[first] if first in values else words[i + 1 : i + 4]
      assert (
        name not in values and words[i + 2 + 2 * (first not in values)] == '.'
      )
      values[name] = value
      places.append(i / len(words))
    assert len(values) == chains * (1 + hops)
    answer = values[words[question]]
    assert labels == [None] * (question + 1) + answer
    assert words[question + 1 :] == ['=', *answer[:2]]
  counts = np.histogram(places, 4, (0, 1))[0]
  assert counts.min() > 0.6 * counts.max()


def test_a_split_of_a_depth_has_its_needles_there():
  task = Needle(depths=(0, 25, 100), digits=3, test_sizes=(64, 128), **FEW)
  for size in 64, 128:
    filler = size - 6 - 4  # Without statement and question.
    for depth in 0, 25, 100:
      for words, _ in sequences(task, f'test_{size}_depth_{depth}'):
        assert len(words) == size
        assert words.index('=') - 1 == depth * filler // 100
  with pytest.raises(ValueError, match='test_64_depth_50'):
    task.documents('test_64_depth_50')
  with pytest.raises(ValueError, match='from 0 to 100, got 101'):
    Needle(depths=(101,))


def test_the_least_size_has_room_for_all_chains():
  assert Needle().min_size == 64
  task = Needle(chains=4, hops=3, **FEW)
  assert task.min_size == 4 * (3 + 5) + 12 * 4 + 1 + 5
  lengths = task.documents('train').lengths
  assert task.min_size <= lengths.min() < lengths.max() <= task.max_size


def test_a_million_tokens_take_a_second_and_hold_one_needle():
  task = Needle(test_sizes=(1_000_000,), test_sequences=2)
  documents = task.documents('test_1000000')
  assert np.diff(documents.starts).tolist() == [1_000_000] * 2
  assert (documents.labels > 0).sum() == 2 * 5


@pytest.mark.parametrize(
  ('task', 'tokens_of'),
  [
    (WordProblem(sequences=8000, min_size=3, max_size=6), lambda size: size),
    (Copying(sequences=8000, min_size=3, max_size=6), lambda size: 2 * size),
    (Counting(sequences=8000, min_size=3, max_size=6), lambda size: 2 * size),
  ],
)
def test_all_sizes_are_equally_frequent(task, tokens_of):
  lengths = np.diff(task.documents('train').starts)
  counts = [np.sum(lengths == tokens_of(size)) for size in range(3, 7)]
  assert sum(counts) == 8000
  assert np.abs(np.array(counts) - 2000).max() < 5 * np.sqrt(2000)
  for size in task.test_sizes[:1]:
    lengths = np.diff(task.documents(f'test_{size}').starts)
    assert len(lengths) == 2000 and {*lengths.tolist()} == {tokens_of(size)}


@pytest.mark.parametrize(('brackets', 'step'), [(False, 2), (True, 4)])
def test_expressions_are_as_long_as_their_size_allows(brackets, step):
  task = Arithmetic(brackets=brackets, **FEW)
  for size in 64, 128, 256:
    (length,) = {*task.documents(f'test_{size}').lengths.tolist()}
    assert size - step < length <= size
  assert task.documents('train').lengths.max() == (38 if brackets else 40)
  assert task.documents('test_40_256').lengths.min() >= 38


def test_a_test_split_may_have_all_sizes_of_a_range():
  task = WordProblem(test_sizes=(9, (4, 7)), sequences=9, test_sequences=4000)
  assert task.splits[3:] == (
    *('test_9', 'test_4_7', 'test_9_last', 'test_4_7_last'),
  )
  lengths = task.documents('test_4_7_last').lengths
  counts = np.bincount(lengths, minlength=8)
  assert not counts[:4].any() and np.abs(counts[4:] - 1000).max() < 150
  assert {*task.documents('test_9').lengths.tolist()} == {9}


def test_drawing_in_chunks_is_noticed_by_nobody(monkeypatch):
  """A split of many chunks is as long, and has no chunk twice."""
  monkeypatch.setattr('meliad_rec.data.synthetic.by_size._CHUNK_TOKENS', 900)
  task = Copying(**FEW)
  texts = [' '.join(words) for words, _ in sequences(task)]
  assert len(texts) == len({*texts}) == 300


@pytest.mark.parametrize(
  'task',
  [
    Needle(**FEW, depths=(50,)),
    ObjectCollision(streams=3, steps=512),
    RandomWalk(episodes=100),
    Recall(documents_in_train=50),
    CopyingPairs(sequences=50, test_sequences=5),
  ],
)
def test_documents_are_made_once(task):
  for split in task.splits:
    assert task.documents(split) is task.documents(split)
  with pytest.raises(ValueError, match='no_such'):
    task.documents('no_such')
