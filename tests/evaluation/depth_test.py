"""Halting depth: measured for each token, grouped, and by nesting."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.latent_bottleneck import Chunks
from meliad_rec.archs.latent_bottleneck import LatentBottleneck
from meliad_rec.archs.transformer import Encoder
from meliad_rec.archs.universal import Universal
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.synthetic import listops_trees
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import Words
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.evaluation import depth
from meliad_rec.evaluation.depth import Depths
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.models import pooling
from meliad_rec.models.cell import Cell
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.recurrence.halt import Halt
from tests import architectures as tiny

SEGMENT, ROWS, STEPS = 24, 3, 6
LONG = 'bottleneck', 'text'  # Their documents are longer than a segment.


def universal(together, causal, memory=False):
  layer = EncoderLayer(tiny.encoder_config(causal=causal), memory, together)
  halt = Halt(threshold=0.95, bias_init=-0.5)
  return Universal(
    layer, STEPS, global_halt=together, transition=together, halt=halt
  )


def bottleneck(chunk):
  core = universal(True, False, memory=True)
  config = tiny.encoder_config(causal=False)
  return LatentBottleneck(config, core, slots=tiny.S, chunk=chunk)


MODELS = {
  'gated': (Encoder(universal(True, False)), Classifier(4, pooling.Mean())),
  'pairs': (Encoder(universal(False, False)), Matcher(3, pooling.Mean())),
  'bottleneck': (bottleneck(4), Classifier(4, pooling.Slots())),
  'chunks': (Chunks(cell=bottleneck(None), count=5), Classifier(4, None)),
  'text': (Encoder(universal(False, True), 8), None),
}
every = pytest.mark.parametrize(
  'name',
  [
    name
    if name in ('gated', 'chunks')
    else pytest.param(name, marks=pytest.mark.slow)
    for name in MODELS
  ],
)


@functools.cache
def documents(name) -> Documents:
  """Random documents, from 1 token to a segment, half of one, or longer."""
  rng = np.random.default_rng(0)
  head = MODELS[name][1]
  pairs = head is not None and head.sequences > 1
  longest = 60 if name in LONG else SEGMENT
  made = []
  for i, length in enumerate([longest, 1, 13, 21, 5, 22, 8]):
    middle, labels = None, None
    if pairs:
      middle = 1 + i % 4
      length = middle + 1 + length % 11
    if head is not None:
      labels = rng.integers(0 if head.pool is None else 1, 3, length)
      labels[:-1] *= head.pool is None
    tokens = rng.integers(3, tiny.V, length)
    made.append(Document(f'{i}', tokens, length, 1, labels, middle))
  return Documents.collect(made, Bytes())


def build(model):
  """Returns a model with large random parameters, so that tokens differ."""
  forward = ShardedModel(model, make_mesh(devices=jax.devices()[:1]), SEGMENT)
  make = jax.jit(lambda rng: initialize(model, rng, 1, SEGMENT))
  params = make(jax.random.key(1))
  return forward, jax.tree.map(lambda a: 2 * a, params)


@functools.cache
def program(name):
  cell, head = MODELS[name]
  return build(Model(tiny.V, cell, tiny.D, head=head))


@functools.cache
def depths(name, rows=ROWS):
  return depth.measure(*program(name), documents(name), rows)


@functools.cache
def applied(name):
  model = program(name)[0].model

  def apply(params, tokens_1T, mask_1T):
    state = model.apply({'params': params}, 1, method='initial_state')
    (_, logits_1TV), sown = model.apply(
      {'params': params},
      state,
      tokens_1T,
      jnp.ones(1, bool),
      mask_1T,
      mutable=['pictures'],
    )
    return sown, jnp.argmax(logits_1TV[0], -1)

  return jax.jit(apply)


def alone(name, i):
  """Returns steps and answers of a document read alone, in one segment."""
  read, places = documents(name), 64 if name in LONG else SEGMENT
  ids, n = read[i], len(read[i])
  at = np.arange(n)
  if read.labels is None:
    ids = np.concatenate([[0], ids[:-1]])
  if read.first_lengths is not None:
    at[read.first_lengths[i] :] += places // 2 - read.first_lengths[i]
  row, mask = np.zeros((1, places), int), np.zeros((1, places), bool)
  row[0, at], mask[0, at] = ids, True
  sown, answers = applied(name)(program(name)[1], row, mask)
  (sowed,) = jax.tree.leaves(sown)
  match name:
    case 'gated':
      steps = np.repeat(sowed, places)
    case 'pairs':
      steps = np.concatenate([sowed[0], sowed[1]])
    case 'text':
      steps = np.concatenate([block[0] for block in sowed])
    case 'bottleneck':
      steps = np.repeat([chunk[0, 0] for chunk in sowed], 4)
    case 'chunks':
      steps = np.repeat([chunk[0, 0] for chunk in sowed], 5)
  answers = answers[at]
  return steps[at], answers if read.labels is None else answers[-1:]


@every
def test_other_documents_have_no_influence(name):
  found, read = depths(name), documents(name)
  for i in range(len(read)):
    steps, answers = alone(name, i)
    got, _, answered = found.of(i)
    np.testing.assert_array_equal(got, steps)
    np.testing.assert_array_equal(answered[-len(answers) :], answers)
  assert len(np.unique(found.steps)) > 1


@every
def test_means_are_those_of_evaluation(name):
  found = depth.everything(depths(name))
  metrics = evaluate(*program(name), documents(name), ROWS)
  assert found.mean == pytest.approx(metrics['halting_depth'], rel=1e-6)
  assert found.most == metrics['halting_depth_max']
  assert found.accuracy == pytest.approx(metrics['accuracy'], rel=1e-6)


def test_where_units_begin():
  starts = documents('gated').starts[:-1]
  assert np.flatnonzero(depths('gated').begins).tolist() == starts.tolist()
  for name, chunk in {
    'bottleneck': 4,
    'chunks': 5,
    'pairs': 1,
    'text': 1,
  }.items():
    lengths = documents(name).lengths
    first = np.concatenate([np.arange(n) % chunk == 0 for n in lengths])
    np.testing.assert_array_equal(depths(name).begins, first)


def test_rows_and_segments_change_nothing():
  one = depths('bottleneck', 1)
  forward, params = program('bottleneck')
  forward = dataclasses.replace(forward, segment=8)
  two = depth.measure(forward, params, documents('bottleneck'), 5)
  for other in (one, two):
    np.testing.assert_array_equal(other.steps, depths('bottleneck').steps)
    np.testing.assert_array_equal(other.begins, depths('bottleneck').begins)


def test_progress_is_reported():
  seen = []
  depth.measure(*program('text'), documents('text'), 4, seen.append)
  assert seen[-1] == len(documents('text').tokens)
  assert seen == sorted(set(seen))


def test_spread_over_chunks_and_pairs():
  together_n4U = jnp.array([[[1], [2], [3], [4]], [[5], [6], [7], [8]]])
  steps, begins = depth.spread(together_n4U, 2, 10)
  assert steps.tolist() == [
    [1, 1, 1, 5, 5, 2, 2, 2, 6, 6],
    [3, 3, 3, 7, 7, 4, 4, 4, 8, 8],
  ]
  assert begins.tolist() == [[True, False, False, True, False] * 2] * 2


class Twice(Cell):
  """State: none. Sows two depths; they differ at every second token."""

  def initial_state(self, batch):
    return ()

  def __call__(self, state, block):
    for more in range(2):
      places_BT = jnp.cumsum(block.mask, 1, dtype=jnp.float32)
      self.sow('pictures', 'depth', 3 + more * (places_BT % 2))
      self.sow('pictures', 'attention', places_BT)
    return state, block.x


def test_steps_of_several_recurrences_are_added():
  made = Document('', np.arange(3, 10), 7, 1)
  read = Documents.collect([made], Bytes())
  found = depth.measure(*build(Model(tiny.V, Twice(), tiny.D)), read, 1)
  assert found.steps.tolist() == [7, 6, 7, 6, 7, 6, 7]


def test_a_model_that_never_halts():
  core = universal(False, True).clone(halt=None)
  model = Model(tiny.V, Encoder(core, 8), tiny.D)
  with pytest.raises(ValueError, match='Encode'):
    depth.measure(*build(model), documents('text'), 1)


BRACKETS = depth.bracket_steps(listops_trees.VOCABULARY)


def of_listops(labelled=True) -> Depths:
  """Returns random steps for random expressions, one of them empty."""
  rng = np.random.default_rng(0)
  tree = listops_trees.grow(Draws(0), 90, 4, 6)
  tokens, starts, values = listops_trees.write(tree)
  starts = np.insert(starts, 7, starts[7])
  N, count = len(tokens), len(starts) - 1
  labels = np.zeros(N, np.uint8)
  labels[starts[1:] - 1] = 1 + np.insert(values, 7, values[6])
  documents = Documents(
    tokens=tokens,
    starts=starts,
    bytes_=np.ones(count, int),
    words=np.ones(count, int),
    names=[f'{i}' for i in range(count)],
    labels=labels if labelled else None,
  )
  begins = rng.random(N) < 0.5
  begins[starts[:-1]] = True
  right = labels if labelled else tokens
  answers = np.where(rng.random(N) < 0.5, right, 9)
  return Depths(documents, rng.integers(1, 9, N), begins, answers)


def by_hand(depths, chosen):
  """Returns documents, mean, most and accuracy of chosen documents."""
  documents, steps, right = depths.documents, [], []
  for i in chosen:
    some, begins, answers = depths.of(i)
    steps += [s for s, first in zip(some, begins, strict=True) if first]
    here = slice(*documents.starts[i : i + 2])
    if documents.labels is None:
      right += list(answers == documents.tokens[here])
    else:
      label = documents.labels[here]
      right += [a == y for a, y in zip(answers, label, strict=True) if y]
  mean = sum(map(int, steps)) / len(steps)
  return len(chosen), mean, max(steps), sum(right) / len(right)


@pytest.mark.parametrize('labelled', [True, False])
def test_the_group_of_all(labelled):
  depths = of_listops(labelled)
  read = np.flatnonzero(depths.documents.lengths)
  assert len(read) == len(depths.documents) - 1
  found = depth.everything(depths)
  assert found.name == 'all'
  assert found[1:] == pytest.approx(by_hand(depths, read))


def test_by_length():
  depths = of_listops()
  lengths = depths.documents.lengths
  found = depth.by_length(depths)
  spans, seen = [], []
  for each in found:
    first, *_, last = [int(n) for n in 2 * each.name.split('-')]
    spans.append((first, last))
    inside = np.flatnonzero((lengths >= first) & (lengths <= last))
    assert each[1:] == pytest.approx(by_hand(depths, inside))
    seen += inside.tolist()
  assert sorted(seen) == np.flatnonzero(lengths).tolist()
  assert spans == sorted(spans)
  assert 2 < len(found) <= 8
  assert spans[0][0] == 1 and spans[-1][1] == lengths.max()


def test_groups_by_length_have_about_equal_sizes():
  lengths = np.arange(1, 81)
  starts = np.concatenate([[0], np.cumsum(lengths)])
  ones, N = np.ones(80, int), starts[-1]
  documents = Documents(np.ones(N, int), starts, ones, ones, ['x'] * 80)
  depths = Depths(documents, np.ones(N), np.ones(N, bool), np.ones(N))
  found = depth.by_length(depths)
  assert [each.documents for each in found] == pytest.approx([10] * 8, abs=1)
  assert found[0].name.startswith('1-')


def test_by_nesting():
  depths = of_listops()
  documents = depths.documents
  found = depth.by_nesting(depths, BRACKETS)
  seen = 0
  for each in found:
    inside = [
      i
      for i in range(len(documents))
      if len(documents[i])
      and listops_trees.nesting(documents[i]) == int(each.name)
    ]
    assert each[1:] == pytest.approx(by_hand(depths, inside))
    seen += len(inside)
  assert seen == len(documents) - 1
  assert [int(each.name) for each in found] == list(range(len(found)))
  assert len(found) > 3


def test_without_labels():
  depths = of_listops()
  depths.documents.labels[:] = 0
  assert depth.everything(depths).accuracy is None
  line = depth.table('tokens', [depth.everything(depths)]).splitlines()[1]
  assert line.split()[-1] == '-'


def test_the_table():
  some = [
    depth.Group('1-9', 1200, 2.25, 7, 0.5),
    depth.Group('10', 3, 10.0, 10, None),
  ]
  assert depth.table('tokens', some).splitlines() == [
    'tokens  documents    mean   most  right',
    '   1-9      1,200    2.25      7  50.0%',
    '    10          3   10.00     10      -',
  ]


def test_levels_of_an_expression():
  ids = listops_trees.VOCABULARY.encode('START [MAX 2 [MIN 4 7 ] 0 ] END')
  assert depth.levels(BRACKETS, ids).tolist() == [0, 0, 1, 1, 2, 2, 1, 1, 0, 0]
  assert depth.deepest(BRACKETS, ids) == 2


def test_levels_of_a_formula():
  words = Words(['a', '(', ')', 'or'])
  steps = depth.bracket_steps(words)
  ids = words.encode(') ( a or ( a ) ) a')
  assert depth.levels(steps, ids).tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0]
  ids = words.encode('( ( a ) or a )')
  assert depth.levels(steps, ids).tolist() == [0, 1, 2, 1, 1, 1, 0]


def test_a_word_with_both_brackets_opens_none():
  assert depth.bracket_steps(Words(['(a)', 'b'])) is None
  steps = depth.bracket_steps(Words(['(a)', '[', 'b]']))
  assert steps.tolist() == [0, 0, 1, -1]


def test_the_deepest_level_is_the_nesting_of_the_task():
  levels = listops_trees.grow(Draws(0), 300, 4, 6)
  tokens, starts, _ = listops_trees.write(levels)
  found = set()
  for begin, end in zip(starts, starts[1:], strict=False):
    expected = listops_trees.nesting(tokens[begin:end])
    assert depth.deepest(BRACKETS, tokens[begin:end]) == expected
    assert depth.levels(BRACKETS, tokens[begin:end]).max() == expected
    found.add(expected)
  assert len(found) > 4


def test_words_without_brackets():
  assert depth.bracket_steps(Words(['a', 'b'])) is None
  assert depth.bracket_steps(Bytes()) is None
  assert depth.deepest(BRACKETS, np.zeros(0, int)) == 0
