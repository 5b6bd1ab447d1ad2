"""Halting depth: measured for each token, grouped, and by nesting."""

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
from tests.data.synthetic import listops_test

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
# Tokens that halt together.
UNITS = {'gated': SEGMENT, 'pairs': 1, 'bottleneck': 4, 'chunks': 5, 'text': 1}
every = pytest.mark.parametrize(
  'name',
  [
    name if name == 'pairs' else pytest.param(name, marks=pytest.mark.slow)
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


def alone(name):
  """Yields steps and answers of documents read alone, in one segment each."""
  read, places = documents(name), 64 if name in LONG else SEGMENT
  forward, params = program(name)
  variables = {'params': params}
  state = forward.model.apply(variables, 1, method='initial_state')
  start = np.ones(1, bool)
  apply = jax.jit(
    lambda row, mask: forward.model.apply(
      variables, state, row, start, mask, mutable=['depths']
    )
  )
  for i in range(len(read)):
    ids, at = read[i], np.arange(len(read[i]))
    if read.labels is None:
      ids = np.concatenate([[0], ids[:-1]])
    if read.first_lengths is not None:
      at[read.first_lengths[i] :] += places // 2 - read.first_lengths[i]
    row, mask = np.zeros((1, places), int), np.zeros((1, places), bool)
    row[0, at], mask[0, at] = ids, True
    (_, logits_1TV), sown = apply(row, mask)
    (sowed,) = map(np.asarray, jax.tree.leaves(sown))
    match name:
      case 'gated':
        steps = np.repeat(sowed, places)
      case 'pairs':
        steps = np.concatenate([sowed[0], sowed[1]])
      case 'text':
        steps = np.concatenate([block[0] for block in sowed])
      case 'bottleneck' | 'chunks':
        steps = np.repeat(sowed[:, 0, 0], UNITS[name])
    answers = np.argmax(logits_1TV[0], -1)[at]
    yield steps[at], answers if read.labels is None else answers[-1:]


@every
def test_each_document_is_read_as_if_it_were_alone(name):
  """The steps, where units begin, and means, which are those of evaluation."""
  read, seen = documents(name), []
  found = depth.measure(*program(name), read, ROWS, seen.append)
  for i, (steps, answers) in enumerate(alone(name)):
    got, begins, answered = found.of(i)
    np.testing.assert_array_equal(got, steps)
    np.testing.assert_array_equal(answered[-len(answers) :], answers)
    first = np.arange(len(got)) % UNITS[name] == 0
    np.testing.assert_array_equal(begins, first)
  assert len(np.unique(found.steps)) > 1
  assert seen == sorted(set(seen)) and seen[-1] == len(read.tokens)
  whole = depth.everything(found)
  metrics = evaluate(*program(name), read, ROWS)
  assert whole.mean == pytest.approx(metrics['halting_depth'], rel=1e-6)
  assert whole.most == metrics['halting_depth_max']
  assert whole.accuracy == pytest.approx(metrics['accuracy'], rel=1e-6)


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
      self.sow('depths', 'depth', 3 + more * (places_BT % 2))
      self.sow('depths', 'other', places_BT)
    return state, block.x


def test_steps_of_several_recurrences_are_added():
  made = Document('', np.arange(3, 10), 7, 1)
  read = Documents.collect([made], Bytes())
  found = depth.measure(*build(Model(tiny.V, Twice(), tiny.D)), read, 1)
  assert found.steps.tolist() == [7, 6, 7, 6, 7, 6, 7]
  assert found.steps_NH.T.tolist() == [[3] * 7, [4, 3, 4, 3, 4, 3, 4]]


def test_a_model_that_never_halts():
  core = universal(False, True).clone(halt=None)
  model = Model(tiny.V, Encoder(core, 8), tiny.D)
  with pytest.raises(ValueError, match='Encode'):
    depth.measure(*build(model), documents('text'), 1)


BRACKETS = depth.bracket_steps(listops_trees.VOCABULARY)


def of_listops(labeled=True) -> Depths:
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
    labels=labels if labeled else None,
  )
  begins = rng.random(N) < 0.5
  begins[starts[:-1]] = True
  right = labels if labeled else tokens
  answers = np.where(rng.random(N) < 0.5, right, 9)
  return Depths(documents, rng.integers(1, 5, (N, 2)), begins, answers)


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


def test_groups():
  """All documents, then by length, about equally many, and by nesting."""
  found = of_listops(labeled=False)
  lengths = found.documents.lengths
  read = np.flatnonzero(lengths)
  for each in found, of_listops():
    whole = depth.everything(each)
    assert whole.name == 'all'
    assert whole[1:] == pytest.approx(by_hand(each, read))
  found = of_listops()
  by_length = depth.by_length(found)
  spans = [[int(n) for n in each.name.split('-')] for each in by_length]
  for each, span in zip(by_length, spans, strict=True):
    inside = np.flatnonzero((lengths >= span[0]) & (lengths <= span[-1]))
    assert each[1:] == pytest.approx(by_hand(found, inside))
  assert sum(each.documents for each in by_length) == len(read)
  assert spans == sorted(spans) and 2 < len(spans) <= 8
  assert (spans[0][0], spans[-1][-1]) == (1, lengths.max())
  by_nesting = depth.by_nesting(found, BRACKETS)
  nesting = np.array([listops_test.nesting(d) for d in found.documents])
  for i, each in enumerate(by_nesting):
    inside = np.flatnonzero((nesting == i) & (lengths > 0))
    assert each.name == str(i)
    assert each[1:] == pytest.approx(by_hand(found, inside))
  assert sum(each.documents for each in by_nesting) == len(read)
  assert len(by_nesting) > 3
  found.documents.labels[:] = 0
  assert depth.everything(found).accuracy is None


def test_groups_by_length_have_about_equal_sizes():
  lengths = np.arange(1, 81)
  starts = np.concatenate([[0], np.cumsum(lengths)])
  ones, N = np.ones(80, int), starts[-1]
  documents = Documents(np.ones(N, int), starts, ones, ones, ['x'] * 80)
  depths = Depths(documents, np.ones((N, 1)), np.ones(N, bool), np.ones(N))
  found = depth.by_length(depths)
  assert [each.documents for each in found] == pytest.approx([10] * 8, abs=1)


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


FORMULA = ['a', '(', ')', 'or']


@pytest.mark.parametrize(
  ('words', 'text', 'expected'),
  [
    (None, 'START [MAX 2 [MIN 4 7 ] 0 ] END', [0, 0, 1, 1, 2, 2, 1, 1, 0, 0]),
    (FORMULA, ') ( a or ( a ) ) a', [0, 0, 0, 0, 0, 1, 0, 0, 0]),
    (FORMULA, '( ( a ) or a )', [0, 1, 2, 1, 1, 1, 0]),
    # A word with both brackets opens none.
    (['(a)', '[', 'b]'], '(a) [ (a) b]', [0, 0, 1, 0]),
  ],
)
def test_levels(words, text, expected):
  vocabulary = Words(words) if words else listops_trees.VOCABULARY
  steps, ids = depth.bracket_steps(vocabulary), vocabulary.encode(text)
  assert depth.levels(steps, ids).tolist() == expected


def test_the_deepest_level_is_the_nesting_of_the_task():
  for expression in of_listops().documents:
    expected = listops_test.nesting(expression)
    assert depth.deepest(BRACKETS, expression) == expected
    levels = depth.levels(BRACKETS, expression)
    assert levels.max(initial=0) == expected
  for vocabulary in Bytes(), Words(['(a)', 'b']):
    assert depth.bracket_steps(vocabulary) is None
