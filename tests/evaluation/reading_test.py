"""Steps as they are sowed, wherever the tokens come to lie."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.latent_bottleneck import Chunks
from meliad_rec.archs.latent_bottleneck import LatentBottleneck
from meliad_rec.archs.transformer import Encode
from meliad_rec.archs.universal import Universal
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.evaluation import depth
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.layers.core_layer import CoreLayer
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
LONG = 'bottleneck', 'text'  # Documents are longer than a segment.


def universal(together, causal, memory=False):
  layer = CoreLayer(tiny.core_config(causal=causal), memory, together)
  halt = Halt(threshold=0.95, bias_init=-0.5)
  return Universal(
    layer, STEPS, global_halt=together, transition=together, halt=halt
  )


def bottleneck(chunk):
  core = universal(True, False, memory=True)
  config = tiny.core_config(causal=False)
  return LatentBottleneck(config, core, slots=tiny.S, chunk=chunk)


MODELS = {
  'gated': (Encode(universal(True, False)), Classifier(4, pooling.Mean())),
  'pairs': (Encode(universal(False, False)), Matcher(3, pooling.Mean())),
  'bottleneck': (bottleneck(4), Classifier(4, pooling.Slots())),
  'chunks': (Chunks(cell=bottleneck(None), count=5), Classifier(4, None)),
  'text': (Encode(universal(False, True), 8), None),
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
  """Some, of lengths from 1 up to that of a segment or of its half, or over."""
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
  """A model of large random parameters, so that its tokens differ."""
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
  """Steps and answers of a document that is all that the model reads, in one
  segment that holds all of it."""
  read, places = documents(name), 64 if name in LONG else SEGMENT
  ids, n = read[i], len(read[i])
  at = np.arange(n)
  if read.labels is None:
    ids = np.concatenate([[0], ids[:-1]])
  if read.middles is not None:
    at[read.middles[i] :] += places // 2 - read.middles[i]
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
def test_a_document_among_others_is_as_alone(name):
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
  figures = evaluate(*program(name), documents(name), ROWS)
  assert found.mean == pytest.approx(figures['halting_depth'], rel=1e-6)
  assert found.most == figures['halting_depth_max']
  assert found.accuracy == pytest.approx(figures['accuracy'], rel=1e-6)


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


def test_it_tells_how_far_it_is():
  on_progress = []
  depth.measure(*program('text'), documents('text'), 4, on_progress.append)
  assert on_progress[-1] == len(documents('text').tokens)
  assert on_progress == sorted(set(on_progress))


def test_spread_over_chunks_and_pairs():
  together_n4U = jnp.array([[[1], [2], [3], [4]], [[5], [6], [7], [8]]])
  steps, begins = depth.spread(together_n4U, 2, 10)
  assert steps.tolist() == [
    [1, 1, 1, 5, 5, 2, 2, 2, 6, 6],
    [3, 3, 3, 7, 7, 4, 4, 4, 8, 8],
  ]
  assert begins.tolist() == [[True, False, False, True, False] * 2] * 2


class Twice(Cell):
  """State: none. Every second token takes a step more the second time."""

  def initial_state(self, batch):
    return ()

  def __call__(self, state, block):
    for more in range(2):
      places_BT = jnp.cumsum(block.mask, 1, dtype=jnp.float32)
      self.sow('pictures', 'depth', 3 + more * (places_BT % 2))
      self.sow('pictures', 'attention', places_BT)
    return state, block.x


def test_steps_of_recurrences_in_turn_are_added():
  made = Document('', np.arange(3, 10), 7, 1)
  read = Documents.collect([made], Bytes())
  found = depth.measure(*build(Model(tiny.V, Twice(), tiny.D)), read, 1)
  assert found.steps.tolist() == [7, 6, 7, 6, 7, 6, 7]


def test_a_model_that_never_halts():
  core = universal(False, True).clone(halt=None)
  model = Model(tiny.V, Encode(core, 8), tiny.D)
  with pytest.raises(ValueError, match='Nothing in this model halts: Encode'):
    depth.measure(*build(model), documents('text'), 1)
