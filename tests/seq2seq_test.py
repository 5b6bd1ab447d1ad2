"""Laws of models that map sequences to sequences, at a tiny size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.lstm import LSTM
from meliad_rec.data.pair_batches import PairBatches
from meliad_rec.data.synthetic.copying_pairs import CopyingPairs
from meliad_rec.distributed import partition
from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.decoder import Decoder
from meliad_rec.metrics import losses
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.planning import hlo
from tests import architectures as tiny

B, T, S, V, D = tiny.B, tiny.T, 7, tiny.V, tiny.D
CROSS = {'cross': True}
DECODERS = {
  'window': lambda: tiny.windowed(**CROSS),
  'window_scanned': lambda: tiny.windowed(**CROSS, layers=3),
  'block_recurrent': lambda: tiny.recurrent(changes=CROSS),
  'block_recurrent_in_scan': lambda: tiny.recurrent(
    changes=CROSS, hoist=False, remat='full'
  ),
  'feedback': lambda: tiny.feedback(changes=CROSS),
  'feedback_keys_per_layer': lambda: tiny.feedback(
    changes=CROSS, share_keys=False
  ),
  'lstm': lambda: stack.layers(2, lambda: LSTM(D, cross=tiny.config())),
}
QUICK = ('feedback',)
each = pytest.mark.parametrize(
  'name',
  [
    n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
    for n in DECODERS
  ],
)
close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)


def encoder(**changes):
  return tiny.transformer(1, causal=False, **changes)


@functools.cache
def built(name):
  """Returns a tiny model, its parameters, a source and a target."""
  model = Model(V, DECODERS[name](), D, encoder=encoder())
  params = jax.jit(lambda rng: initialize(model, rng, B, T))(jax.random.key(0))
  keys = jax.random.split(jax.random.key(1))
  source_BS = np.array(jax.random.randint(keys[0], (B, S), 1, V))
  source_BS[0, 5:] = source_BS[1, 6:] = 0
  tokens_BT = np.array(jax.random.randint(keys[1], (B, T), 1, V))
  tokens_BT[:, 0] = 0
  return model, {'params': params}, source_BS, tokens_BT


def logits_of(name, source_BS, tokens_BT, mask_BT=None, params=None):
  model, own, _, _ = built(name)
  mask_BT = np.ones(tokens_BT.shape, bool) if mask_BT is None else mask_BT
  start_B = np.ones(len(tokens_BT), bool)
  _, logits = jax.jit(model.apply)(
    params or own, (), tokens_BT, start_B, mask_BT, source_BS
  )
  return np.asarray(logits)


@each
def test_steps_give_the_logits_of_teacher_forcing(name):
  model, params, source_BS, tokens_BT = built(name)
  whole = logits_of(name, source_BS, tokens_BT)

  @jax.jit
  def stepwise(params):
    kv = model.apply(params, source_BS, method='encode_source')
    state = model.apply(params, B, method='initial_state')
    state = model.apply(params, state, method='to_decode_state')

    def step(state, tokens_B):
      return model.apply(params, state, tokens_B, kv, method='decode_step')

    return jax.lax.scan(step, state, jnp.asarray(tokens_BT.T))[1]

  close(np.swapaxes(stepwise(params), 0, 1), whole)


@each
def test_padding_changes_nothing_and_rows_are_independent(name):
  _, _, source_BS, tokens_BT = built(name)
  whole = logits_of(name, source_BS, tokens_BT)
  longer_BS = np.pad(source_BS, ((0, 0), (0, 4)))
  close(logits_of(name, longer_BS, tokens_BT), whole)
  mask_BT = np.arange(T) < np.array([[T], [5], [T - 3]])
  padded = logits_of(name, source_BS, tokens_BT * mask_BT, mask_BT)
  close(padded[mask_BT], whole[mask_BT])
  order = [2, 0, 1]
  close(logits_of(name, source_BS[order], tokens_BT[order]), whole[order])


@each
def test_every_output_depends_on_the_source(name):
  _, _, source_BS, tokens_BT = built(name)
  whole = logits_of(name, source_BS, tokens_BT)
  other_BS = source_BS.copy()
  other_BS[:, 2] = other_BS[:, 2] % (V - 1) + 1
  changed = np.abs(logits_of(name, other_BS, tokens_BT) - whole).max(-1)
  assert changed.min() > 1e-5


@each
def test_every_parameter_has_a_gradient(name):
  model, params, source_BS, tokens_BT = built(name)
  start_B, mask_BT = np.ones(B, bool), np.ones((B, T), bool)

  @jax.jit
  @jax.grad
  def gradients(params):
    _, logits = model.apply(params, (), tokens_BT, start_B, mask_BT, source_BS)
    return jnp.mean(jax.nn.logsumexp(logits, -1) * jnp.sin(jnp.arange(T)))

  for path, leaf in jax.tree.leaves_with_path(gradients(params)):
    assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path


@pytest.mark.parametrize(
  'name', [pytest.param('window', marks=pytest.mark.slow), 'feedback']
)
def test_scores_of_a_search_are_those_of_its_tokens(name):
  """A state or source of another hypothesis would give another score."""
  model, params, source_BS, _ = built(name)
  decoder = Decoder(model, params['params'], T)
  beam, end = BeamSearch(beams=3, alpha=0.6), 3
  found = decoder.translate(source_BS, 8, beam, end)
  score_BK, tokens_BKL = map(np.asarray, (found.score_BK, found.tokens_BKL))
  assert np.isfinite(score_BK).all()
  flat_NT = np.zeros((score_BK.size, T), int)
  flat_NT[:, :8] = tokens_BKL.reshape(-1, 8)
  inputs_NT = np.pad(flat_NT, ((0, 0), (1, 0)))[:, :-1]
  logits = logits_of(name, source_BS.repeat(3, 0), inputs_NT)
  log_p = jax.nn.log_softmax(logits)
  log_p_NT = np.take_along_axis(log_p, flat_NT[..., None], 2)[..., 0]
  real_NT = flat_NT != 0
  total_N = np.where(real_NT, log_p_NT, 0).sum(1)
  expected_N = total_N / real_NT.sum(1) ** 0.6
  close(score_BK.ravel(), expected_N)


@each
def test_devices_search_their_own_rows(name):
  """They gather no state or hypothesis, and find what one device finds."""
  model, params, source_BS, _ = built(name)
  decoder = Decoder(model, params['params'], T)
  beam, end = BeamSearch(beams=3, alpha=0.6), 3
  source_BS = np.resize(source_BS, (8, S))
  one = decoder.translate(source_BS, 8, beam, end)
  mesh = partition.make_mesh(8)
  rows = partition.batch_sharding(mesh, 8)
  with jax.set_mesh(mesh):
    search = jax.jit(
      lambda source_BS: decoder._traced_targets(
        decoder.variables, (beam, 8, end), source_BS
      ),
      in_shardings=rows,
      out_shardings=rows,
    )
    search = search.lower(source_BS).compile()
    found = search(jax.device_put(source_BS, rows))
  text = search.as_text()
  assert 'while' in text
  assert not {'all-gather', 'all-to-all', 'collective-permute'} & {
    op for op in hlo.COLLECTIVES if f' {op}(' in text or f' {op}-start(' in text
  }
  np.testing.assert_array_equal(found.tokens_BKL, one.tokens_BKL)
  close(found.score_BK, one.score_BK)


def test_only_short_pairs_of_test_are_in_train():
  data = CopyingPairs(20_000, 2, 6)
  train, test = data.documents('train'), data.documents('test')
  seen = {train[i].tobytes() for i in range(len(train))}
  is_seen = [test[i].tobytes() in seen for i in range(len(test))]
  assert {*test.first_lengths[is_seen] - 1} == {2, 3}


def test_batches_hold_each_pair_once():
  documents = CopyingPairs(50, 1, 12).documents('train')
  options = {'source_segment': 16, 'buckets': 2, 'seed': 3}
  reader, seen, shapes = PairBatches(documents, 4, 16, **options), [], set()
  while len(seen) < 50:
    batch, _ = next(reader)
    shapes.add(batch.tokens_BT.shape)
    for row in np.flatnonzero(batch.document_B >= 0):
      i = batch.document_B[row]
      seen.append(i)
      source, target = np.split(documents[i], [documents.first_lengths[i]])
      found = batch.targets_BT[row][batch.mask_BT[row]]
      np.testing.assert_array_equal(found, target)
      np.testing.assert_array_equal(
        batch.tokens_BT[row, 1 : len(target)], target[:-1]
      )
      assert (batch.source_BS[row, : len(source)] == source).all()
      assert not batch.source_BS[row, len(source) :].any()
  assert sorted(seen) == list(range(50))
  assert shapes == {(4, 16), (8, 8)}


def test_smoothing_over_other_ids():
  """As in fairseq: the target keeps 1 - epsilon; others share epsilon."""
  rng = np.random.default_rng(0)
  logits, targets = rng.normal(size=(B, T, V)), rng.integers(0, V, (B, T))
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  nll = -np.take_along_axis(log_p, targets[..., None], 2)[..., 0]
  each = 0.1 / (V - 1)
  expected = (1 - 0.1 - each) * nll - each * log_p.sum(-1)
  found = losses.objective(
    jnp.asarray(logits), targets, label_smoothing=0.1, smooth_target=False
  )
  close(found, expected)
