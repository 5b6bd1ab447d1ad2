"""The laws of law_test.py for models with heads, over the same list."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.latent_bottleneck import LatentBottleneck
from meliad_rec.archs.transformer import Encoder
from meliad_rec.archs.universal import Universal
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import Lanes
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.distributed import partition
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.metrics.losses import cross_entropy
from meliad_rec.models import pooling
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Head
from meliad_rec.models.heads import Matcher
from meliad_rec.models.laws import Laws
from meliad_rec.models.model import Model
from meliad_rec.recurrence.halt import Halt
from tests import architectures as tiny
from tests.architectures import ALL
from tests.architectures import ARCHITECTURES
from tests.architectures import NONE
from tests.architectures import real

B, T, W, C = tiny.B, tiny.T, tiny.W, 4
HEADS = {
  'tokens': Classifier(C, None),
  'mean': Classifier(C, pooling.Mean()),
  'first': Classifier(C, pooling.First()),
  'last': Classifier(2, pooling.Last()),
  'pairs_mean': Matcher(C, pooling.Mean()),
  'pairs_last': Matcher(C, pooling.Last()),
  'slots': Classifier(C, pooling.Slots()),
  'pairs_slots': Matcher(2, pooling.Slots()),
}
# Pools do not depend on the architecture, but the rows of pairs do.
FAST = [
  *(('lstm', head) for head in ('tokens', 'last')),
  ('window', 'pairs_mean'),
]
SLOW = [
  *(('lstm', 'first'), ('lstm', 'pairs_last')),
  *(('recurrent_fixed_skip', 'last'), ('latent_bottleneck', 'pairs_slots')),
  *(('memorizing', 'pairs_last'), ('feedback', 'mean')),
  *(('staircase_by_chunks', 'pairs_last'), ('block_feedback', 'pairs_slots')),
  *(('gated_latent_bottleneck', 'slots'), ('recurrent_memory', 'slots')),
]
# Encoders that are not causal, over whole documents.
ENCODERS = {
  'encoder': lambda: Encoder(tiny.transformer(causal=False)),
  'gated_encoder': lambda: Encoder(
    Universal(
      EncoderLayer(tiny.encoder_config(causal=False), gated=True),
      *(6, True, True, Halt(threshold=0.99, bias_init=-0.5)),
    )
  ),
}
ENCODED = [('encoder', 'pairs_mean'), ('gated_encoder', 'tokens')]
close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)


def of(fast, slow=SLOW, fits=lambda name, head: True):
  """One model after another, so that each is compiled once."""
  marked = [pytest.param(*one, marks=pytest.mark.slow) for one in slow]
  cases = [
    given
    for given, one in zip(fast + marked, fast + slow, strict=True)
    if fits(*one)
  ]
  return pytest.mark.parametrize(('name', 'head'), cases, scope='module')


every = of(FAST)
encoding_too = of(FAST + ENCODED)
# What block feedback does behind its states says nothing of these.
BEHIND_STATES = 'layers_1/tokens', 'layers_2', 'norm'


class Built(Laws):
  """A model with a head; each sequence of its rows has T tokens."""

  @property
  def head(self) -> Head:
    return self.model.head

  @property
  def sides(self):
    """[B, sequences, T]"""
    return self.tokens_BT.reshape(B, self.head.sequences, T)

  @property
  def thirds(self):
    """Three segments, each with one window per sequence."""
    parts = np.split(np.asarray(self.sides), T // W, 2)
    return [part.reshape(B, -1) for part in parts]

  @property
  def at_end(self):
    """Whether logits are correct only after a segment."""
    pool = self.head.pool
    return self.head.sequences > 1 or (pool is not None and pool.at_end)

  def judged(self, logits_BTV):
    """Returns the logits that are correct."""
    return logits_BTV[:, -1:] if self.at_end else logits_BTV


@functools.cache
def build(name: str, head: str) -> Built:
  head = HEADS[head]
  cell = (ENCODERS.get(name) or ARCHITECTURES[name].cell)()
  model = Model(tiny.V, cell, tiny.D, head=head)
  return Built(model, B, head.sequences * T)


def read(m, state, parts, start_B=ALL):
  """Returns the state after parts, and the logits of each."""
  found = []
  for tokens_BT in parts:
    state, logits = m.apply(state, tokens_BT, start_B, real(tokens_BT))
    found.append(m.judged(logits))
    start_B = NONE
  return state, found


def trees_close(a, b):
  jax.tree.map(close, a, b)


def differ(a, b, by=1e-4):
  return np.abs(np.asarray(a) - np.asarray(b)).max() > by


@every
def test_split(name, head):
  """Law 1: three segments equal one, in logits and in the final state."""
  m = build(name, head)
  state, (whole,) = read(m, m.carry, [m.tokens_BT])
  end, parts = read(m, m.carry, m.thirds)
  found = parts[-1] if m.at_end else jnp.concatenate(parts, 1)
  close(found, whole)
  trees_close(state, end)
  assert all(a.shape[0] == B for a in jax.tree.leaves(end))


# The state of memorizing has a part that resets itself.
@of(
  [*FAST, ('memorizing', 'pairs_last')],
  [o for o in SLOW if o[0] != 'memorizing'],
)
def test_reset(name, head):
  """Law 3: with start the old state has no effect; without it, it has one."""
  m = build(name, head)
  first, second, _ = m.thirds
  state, _ = read(m, m.carry, [first])
  _, (fresh,) = read(m, m.carry, [second])
  _, (again,) = read(m, state, [second])
  close(fresh, again)
  _, (goes_on,) = read(m, state, [second], NONE)
  _, (mixed,) = read(m, state, [second], np.arange(B) == 1)
  close(mixed[1], fresh[1])
  close(mixed[::2], goes_on[::2])
  assert differ(fresh, goes_on)


@encoding_too
def test_rows_and_sequences(name, head):
  """Law 6: rows do not influence each other, nor the sequences of a pair."""
  m = build(name, head)
  first, *_ = m.thirds
  state, (logits,) = read(m, m.carry, [first])
  side = m.head.sequences - 1
  other = first.copy()
  other[1, side * W :] = other[1, side * W :] % (tiny.V - 1) + 1
  after, (changed,) = read(m, m.carry, [other])
  close(changed[::2], logits[::2])
  assert differ(changed[1], logits[1])
  if side:
    leaves = [jax.tree.leaves(tree) for tree in (after, state)]
    leaves = list(zip(*leaves, strict=True))
    for a, b in leaves:
      assert a.shape[:2] == (B, 2)
      close(a[:, 0], b[:, 0])
    assert any(differ(a[1, 1], b[1, 1]) for a, b in leaves)


@encoding_too
def test_padding(name, head):
  """Law 6: neither padding nor labels after it influence anything."""
  m = build(name, head)
  first, second, third = m.thirds
  state, _ = read(m, m.carry, [first])
  # In row 0 the first sequence ends after 3 tokens, a second after 5.
  sides = second.reshape(B, -1, W)
  ends = np.array([3, 5])[: m.head.sequences]
  mask = np.ones(sides.shape, bool)
  mask[0] = np.arange(W) < ends[:, None]
  flat = lambda a: a.reshape(B, -1)
  ended = []
  for tokens in sides, np.where(mask, sides, sides % (tiny.V - 1) + 1):
    after, logits = m.apply(state, flat(tokens), NONE, flat(mask))
    judged = np.asarray(m.judged(logits))
    if m.head.pool is None:
      judged = np.where(flat(mask)[..., None], judged, 0)
    ended.append((judged, read(m, after, [third], NONE)[1]))
  trees_close(*ended)
  if not m.at_end and m.model.cell.causal:
    _, (whole,) = read(m, state, [second], NONE)
    close(ended[0][0][0, :3], whole[0, :3])
    if m.head.pool is not None:
      close(ended[0][0][0, -1], whole[0, 2])


@of(FAST, fits=lambda name, head: ARCHITECTURES[name].cell().can_step)
def test_token_by_token(name, head):
  """Laws 1 and 5: steps give the logits of segments, and the same state."""
  m = build(name, head)
  state, parts = read(m, m.carry, m.thirds)
  variables = {'params': m.params}
  method = lambda f: jax.jit(
    functools.partial(m.model.apply, variables, method=f)
  )
  step = method('decode_step')
  opened = method(lambda model: model.to_decode_state(model.initial_state(B)))()
  for t in range(T):
    tokens = m.sides[:, :, t]
    alone = m.head.sequences == 1
    opened, logits_BV = step(opened, tokens[:, 0] if alone else tokens)
    part = parts[t // W]
    if alone:
      close(logits_BV, part[:, t % W])
    elif t % W == W - 1:
      close(logits_BV, part[:, -1])
  trees_close(state, method('to_segment_state')(opened))


# The first output depends little on most parameters.
@of(FAST + ENCODED, fits=lambda name, head: head != 'first')
def test_gradients(name, head):
  """Law 4: every parameter gets a finite, non-zero gradient."""
  m = build(name, head)
  labels_B1 = jnp.arange(B)[:, None] % 2 + 1

  def loss(params):
    _, logits = m.model.apply(
      {'params': params}, m.carry, m.tokens_BT, ALL, real(m.tokens_BT)
    )
    return cross_entropy(logits[:, -1:], labels_B1).mean()

  gradients = jax.jit(jax.grad(loss))(m.params)
  assert set(gradients) == {'cell', 'embed', 'head', 'norm'}
  for path, g in jax.tree_util.tree_leaves_with_path(gradients):
    assert np.isfinite(g).all(), path
    where = partition.path_string(path)
    unread = (name, head) == ('block_feedback', 'pairs_slots') and any(
      part in where for part in BEHIND_STATES
    )
    assert unread or np.abs(g).max() > 0, path


def documents(pairs):
  """Returns documents of 1 to 40 tokens, or pairs; all labels are 1."""
  rng = np.random.default_rng(0)

  def document(i):
    sides = rng.integers(1, 40, 2)
    ids = rng.integers(1, tiny.V, sides.sum() if pairs else sides[0])
    labels = np.zeros(len(ids), int)
    labels[-1] = 1
    middle = int(sides[0]) if pairs else None
    return Document(f'{i}', ids, 1, 1, labels, middle)

  return Documents.collect(map(document, range(7)), Bytes())


def judgements(m, documents, segment):
  """Returns the logits at each label, after reading all in lanes."""
  lanes = Lanes(documents, B, segment, seed=0, repeat=False)
  carry, found = m.carry, {}
  for batch, _ in lanes:
    carry, logits = m.apply(
      carry, batch.tokens_BT, batch.start_B, batch.mask_BT
    )
    for row, place in np.argwhere(batch.scored_BT):
      found[int(batch.document_B[row])] = logits[row, place]
  return np.stack([found[i] for i in range(len(documents))])


@of(
  [
    *(('lstm', 'last'), ('lstm', 'pairs_last'), ('lstm', 'pairs_mean')),
    ('latent_bottleneck', 'slots'),
  ],
  [
    *(('lstm', 'mean'), ('recurrent_fixed_skip', 'slots')),
    ('latent_bottleneck', 'pairs_slots'),
    *(('recurrent_memory', 'slots'), ('block_feedback', 'pairs_slots')),
  ],
)
def test_documents_are_judged_the_same_in_any_segments(name, head):
  m = build(name, head)
  data = documents(m.head.sequences > 1)
  whole = judgements(m, data, 80)
  assert np.std(whole[:, -1]) > 1e-3
  close(judgements(m, data, 14 if name == 'lstm' else 2 * W), whole)


@pytest.mark.parametrize(
  ('bottleneck', 'by_row'), [(False, False), (False, True), (True, True)]
)
def test_equal_rows_have_equal_logits_in_training_or_not(bottleneck, by_row):
  """Rows share dropout, and so do equal sequences of a pair."""
  rates = {'dropout': 0.2, 'attention_dropout': 0.3, 'dropout_by_row': by_row}
  encoder = tiny.transformer(1, bottleneck, causal=False, **rates)
  cell = Encoder(encoder, dropout=0.2, dropout_by_row=by_row)
  if bottleneck:
    config = tiny.encoder_config(False, **rates)
    cell = LatentBottleneck(config, encoder, slots=tiny.S, chunk=W)
  model = Model(tiny.V, cell, tiny.D, head=Matcher(C, pooling.Mean()))
  tokens_BT = jnp.tile(jnp.arange(1, W + 1), (B, 2))
  m = Laws(model, B, 2 * W)
  apply = functools.partial(
    *(model.apply, {'params': m.params}, m.carry),
    *(tokens_BT, ALL, real(tokens_BT)),
  )
  state, logits_BTV = jax.jit(apply)(rngs={'dropout': jax.random.key(1)})
  by = 1e-3 if by_row else 1e-5
  assert differ(logits_BTV[0], logits_BTV[1], by) == by_row
  assert differ(logits_BTV[1], logits_BTV[2], by) == by_row
  sum_B2D, _ = state['head']
  assert differ(sum_B2D[:, 0], sum_B2D[:, 1], by) == by_row
