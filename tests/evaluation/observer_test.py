"""What an Observer records, for every architecture."""

import dataclasses
import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.data.vocabulary import Bytes
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.evaluation import recording
from meliad_rec.evaluation.observer import Observer
from meliad_rec.evaluation.recording import Request
from meliad_rec.evaluation.text_observer import TextObserver
from meliad_rec.metrics import pictures
from meliad_rec.models.sharded_model import ShardedModel
from tests import architectures as tiny

SEGMENT, TOKENS = 16, 43  # The last block is not full.
# The others are slow.
QUICK = 'recurrent_fixed_skip', 'gated_universal'
every = pytest.mark.parametrize('name', tiny.each(quick=QUICK), scope='module')
recurrent = pytest.mark.parametrize(
  'name', tiny.each(lambda a: a.recurrent, QUICK), scope='module'
)
close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)
SHOWN = tuple(name for name in pictures.AXES if name != 'lens')


@functools.cache
def observer(name) -> Observer:
  m = tiny.build(name)
  mesh = make_mesh(devices=jax.devices()[:1])
  return Observer(ShardedModel(m.model, mesh, SEGMENT), m.params)


@functools.cache
def tokens():
  return np.random.default_rng(0).integers(1, tiny.V, TOKENS)


@functools.cache
def observed(name):
  states = tiny.ARCHITECTURES[name].recurrent
  request = Request(states=states, top=3, pictures=SHOWN)
  return observer(name).read(tokens(), request)


@functools.cache
def whole(name):
  """The logits of the tokens, and the state after the whole blocks."""
  o, m = observer(name), tiny.build(name)
  inputs = np.concatenate([[0], tokens()[:-1]])
  length = TOKENS - TOKENS % o.block
  call = lambda part: m.apply(
    jax.tree.map(lambda a: a[:1], m.carry),
    part[None],
    np.ones(1, bool),
    np.ones((1, len(part)), bool),
  )
  padded = np.pad(inputs, (0, -TOKENS % o.block))
  return call(padded)[1][0, :TOKENS], call(inputs[:length])[0]


@every
def test_pictures_change_no_output(name):
  """Losses and ranks are those of one call for the whole text."""
  logits, _ = whole(name)
  found = observed(name)[0].tokens
  logp = np.asarray(jax.nn.log_softmax(logits))
  own = logp[np.arange(TOKENS), tokens()]
  close(found['nats'], -own)
  close(found['entropy'], -(np.exp(logp) * logp).sum(1))
  close(found['top_nats'], -np.sort(logp)[:, :-4:-1])
  np.testing.assert_array_equal(found['top_ids'][:, 0], logp.argmax(1))
  assert (found['rank'] == (logp > own[:, None] + 1e-5).sum(1)).mean() > 0.95


@recurrent
def test_states_are_those_at_block_borders(name):
  o = observer(name)
  recording, state = observed(name)
  after = o.parts(whole(name)[1])
  initial = o.parts(o.start())
  assert recording.states.keys() == after.keys() == initial.keys()
  for part, a in recording.states.items():
    assert len(a) == TOKENS // o.block + 1
    close(a[0], initial[part][0])
    close(a[-1], after[part][0])
  jax.tree.map(close, o.parts(state), after)


@pytest.mark.parametrize('name', ['recurrent_fixed_skip', 'lstm'])
def test_fewer_states(name):
  request = Request(states=True, every=3)
  few = observer(name).read(tokens(), request)[0].states
  for part, a in observed(name)[0].states.items():
    np.testing.assert_array_equal(few[part], a[::3])


@every
def test_weights_of_attention_add_up_to_one(name):
  """Those of a query that sees no key add up to 0.

  Except in a vanilla layer, this is the first token at most.
  """
  found = observed(name)[0].pictures
  if name == 'recurrent_memory':
    for layer, a in found['token_to_token'].items():
      close(a.sum(-1) + found['token_to_state'][layer].sum(-1), 1)
    return
  for kind, layers in found.items():
    axis = pictures.AXES[kind][0]
    for a in layers.values():
      at = a.ndim - len(pictures.AXES[kind])
      assert np.isfinite(a).all() and (a >= 0).all()
      blocks = TOKENS // observer(name).block
      assert a.shape[at] == (TOKENS if axis == 'token' else blocks), kind
      if kind in ('recall_back', 'recall_share') or kind in pictures.GATES:
        continue
      total = a.sum(-1)
      assert (np.isclose(total, 1) | np.isclose(total, 0)).all()
      if kind in ('token_to_token', 'token_to_state') and name != 'vanilla':
        assert np.isclose(np.take(total, range(1, TOKENS), at), 1).all()
      if axis == 'slot':
        assert np.isclose(total, 1).all(), kind


# Pictures that each architecture has, with their layers.
ALL3 = {(i, 0) for i in range(3)}
LAYERS = {
  'vanilla': {'token_to_token': {(0, 0), (1, 0)}},
  'recurrent_fixed_skip': {
    'token_to_token': ALL3,
    **dict.fromkeys(
      ('token_to_state', 'state_to_state', 'state_to_token'), {(1, 0)}
    ),
    **dict.fromkeys(('state_keep', 'state_write'), {(1, 0)}),
  },
  'block_feedback': {
    'token_to_token': ALL3,
    'token_to_state': ALL3,
    **dict.fromkeys(('state_to_state', 'state_to_token'), {(1, 0)}),
    **dict.fromkeys(('state_keep', 'state_write'), {(1, 0)}),
  },
  'memorizing': {
    'token_to_token': ALL3,
    **dict.fromkeys(('recall_weight', 'recall_back', 'recall_share'), {(1, 0)}),
  },
  'lstm': dict.fromkeys(
    ('token_keep', 'token_write', 'token_output'), {(0, 0), (1, 0)}
  ),
  'repeated': {'token_to_token': {(i, 0) for i in range(6)}},
  'staircase': {'token_to_token': {(i, j) for i in range(2) for j in range(4)}},
  'universal': {'token_to_token': {(-1, 0)}},
  'gated_universal': dict.fromkeys(
    ('token_to_token', 'token_keep', 'token_write'), {(-1, 0)}
  ),
  'latent_bottleneck': {
    **dict.fromkeys(
      ('token_to_token', 'token_to_state', 'state_to_token'), {(0, 0), (1, 0)}
    ),
  },
}


@pytest.mark.parametrize(
  'name',
  [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in LAYERS
  ],
)
def test_layers_of_pictures(name):
  found = observed(name)[0].pictures
  assert {kind: set(layers) for kind, layers in found.items()} == LAYERS[name]


def test_pictures_of_one_layer():
  request = Request(pictures=SHOWN, layer=1)
  found = observer('repeated').read(tokens(), request)[0].pictures
  every = observed('repeated')[0].pictures['token_to_token']
  assert set(found['token_to_token']) == {(1, 0)}
  close(found['token_to_token'][1, 0], every[1, 0])


def test_a_token_attends_to_what_changes_its_output():
  """The window of a vanilla layer begins again in each block."""
  a = observed('vanilla')[0].pictures['token_to_token'][0, 0]
  back = np.arange(tiny.W)
  place = np.arange(TOKENS) % tiny.W
  assert (a[:, 0][back >= place[:, None]] == 0).all()
  assert (a[:, 0][back < place[:, None]] > 0).all()


def test_recalled_keys_are_those_before_the_window():
  found = observed('memorizing')[0].pictures
  weight = found['recall_weight'][1, 0]
  back = found['recall_back'][1, 0][weight > 0]
  place = np.broadcast_to(np.arange(TOKENS)[:, None, None], weight.shape)
  place = place[weight > 0]
  assert len(back)
  assert (back > place % tiny.W).all()
  assert (back <= place).all()


@pytest.mark.parametrize(
  'name',
  [
    'universal',
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ('gated_universal', 'staircase')
    ),
  ],
)
def test_the_last_step_of_the_lens_is_the_prediction(name):
  lens = observer(name).read(tokens(), Request(lens=2))[0].lens
  nats = observed(name)[0].tokens['nats']
  close(lens['nats'][-1], nats)
  # The first step has other likely tokens, best first.
  assert lens['top_nats'].shape == (*lens['nats'].shape, 2)
  assert (np.diff(lens['top_nats']) >= 0).all()
  assert np.abs(lens['nats'][0] - nats).max() > 1e-3


@pytest.mark.parametrize('name', ['recurrent_fixed_skip', 'lstm'])
def test_clearing_forgets_what_came_before(name):
  """Cleared in the middle, the rest is read as from a cleared state."""
  o, half = observer(name), 2 * SEGMENT
  request = Request(top=1)
  cleared = o.read(tokens(), request, clear_every=half)[0].tokens['nats']
  plain = observed(name)[0].tokens['nats']
  close(cleared[:half], plain[:half])
  _, state = o.read(tokens(), request, last=half)
  # The state after a part of a segment, then after the rest.
  _, part = o.read(tokens(), Request(), last=half - o.block)
  _, again = o.read(tokens(), Request(), part, half - o.block, half)
  jax.tree.map(close, o.parts(again), o.parts(state))
  rest, _ = o.read(tokens(), request, o.clear(state), first=half)
  close(cleared[half:], rest.tokens['nats'])
  assert np.abs(cleared - plain).max() > 1e-3
  model = o.model.clone(clear_state=True)
  sharded = ShardedModel(model, make_mesh(devices=jax.devices()[:1]), half)
  own = Observer(sharded, tiny.build(name).params)
  close(own.read(tokens(), request)[0].tokens['nats'], cleared)
  for before in 0, half:  # A state given there would be cleared at once.
    with pytest.raises(ValueError, match=f'state given after {before}.'):
      TextObserver(own, Bytes()).from_state({}, tokens()[:before])


def test_refused():
  o = observer('recurrent_fixed_skip')
  read = functools.partial(o.read, tokens())
  with pytest.raises(ValueError, match='multiple of 8'):
    read(Request(), first=3)
  with pytest.raises(ValueError, match='no token'):
    read(Request(), last=0)
  with pytest.raises(ValueError, match='passes'):
    read(Request(lens=1))
  with pytest.raises(ValueError, match='layer_1/slots'):
    o.with_parts(o.start(), {'slots': jnp.zeros(3)})
  with pytest.raises(ValueError, match='shape'):
    o.with_parts(o.start(), {'layer_1/slots': jnp.zeros(3)})


def test_arrays_that_are_too_large_are_refused(monkeypatch):
  monkeypatch.setattr(recording, 'LIMIT', 1000)
  with pytest.raises(ValueError, match='shorter text'):
    observer('recurrent_fixed_skip').read(tokens(), Request(states=True))
  # The state is returned as float32.
  shapes = {'states': {'slots': jax.ShapeDtypeStruct((1, 300), jnp.bfloat16)}}
  with pytest.raises(ValueError, match='shorter text'):
    recording.Recorder(shapes, Request(states=True), {}, 8, 8)


def test_a_recording_is_not_copied():
  """Reading needs little more memory than its result takes."""
  o = observer('recurrent_fixed_skip')
  request = Request(states=True, top=2, pictures=SHOWN)
  # Long, so that the memory of tracing, 1.3 MB, is small beside the result.
  long = np.tile(tokens(), 300)
  o.read(long[:TOKENS], request)  # Compiles.
  tracemalloc.start()
  found, _ = o.read(long, request)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  arrays = jax.tree.leaves(dataclasses.asdict(found))
  assert peak < 1.3 * sum(a.nbytes for a in arrays)


def test_pictures_are_copied_once(monkeypatch):
  def read(*_, **__):
    layers = {
      (i, j): np.full((TOKENS, 1000), i + j) for i in (0, 1) for j in (0, 2)
    }
    return recording.Recording({}, {}, {}, {'token_keep': layers}), None

  o = observer('recurrent_fixed_skip')
  monkeypatch.setattr(o, 'read', read)
  show = lambda: TextObserver(o, Bytes()).pictures(tokens(), [], None)
  show()  # Imports xarray.
  tracemalloc.start()
  found = show()
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  a = found['token_keep']
  assert a[..., 0, 0].values.tolist() == [[0, 2], [1, 3]]
  assert peak < 2.3 * a.nbytes


def test_names_of_parts():
  """Every leaf of a state has its own name."""
  o = observer('feedback')
  assert set(o.parts(o.start())) == {'memory', 'mask'}
