"""What a trained run shows of a text, by name."""

import copy
import functools
from unittest import mock

import jax
import numpy as np
import pytest

from meliad_rec import explore
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import Words
from meliad_rec.explore.probe import Probe
from meliad_rec.models.model import Model
from meliad_rec.runs.trained_run import load_run
from tests import architectures as tiny
from tests import observed
from tests import trained

TEXT = 'the cat sat on the mat, and the dog ate the l\u00f6g.' * 2
NO_PROBE = Probe(None, None, np.eye(3), None)
close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)


@functools.cache
def run():
  return load_run(trained.folder())


@functools.cache
def states():
  return run().states(TEXT)


def test_a_run_is_named_after_its_folder(monkeypatch):
  assert run().name == run().workdir.name
  monkeypatch.chdir(run().workdir)
  assert load_run('.').name == run().workdir.name


def test_predictions_have_the_text_and_the_losses():
  found = run().predictions(TEXT, top=3)
  nats, bytes_ = run().nats(TEXT)
  close(found['nats'], nats)
  np.testing.assert_array_equal(found['byte'], bytes_)
  assert found.sizes == {'token': len(TEXT.encode()), 'choice': 3}
  assert ''.join(found['text'].values[:7]) == TEXT[:7]
  best = found['top_nats'].values[:, 0]
  rank = found['rank'].values
  close(best[rank == 0], nats[rank == 0])
  ids = run().predictions(run().vocabulary.encode(TEXT), top=3)
  close(ids['nats'], nats)


def test_predictions_of_a_text_are_computed_once(monkeypatch):
  fresh = load_run(trained.folder())
  own = fresh.predictions(TEXT, top=3)
  cleared = fresh.predictions(TEXT, 2, clear_every=fresh.block)
  assert np.abs(own['nats'] - cleared['nats']).max() > 1e-4
  other = fresh.predictions(TEXT[1:], top=3)
  read = mock.Mock(side_effect=AssertionError('read again'))
  monkeypatch.setattr(fresh.observer, 'read', read)
  again = fresh.predictions(TEXT, top=2)
  again['nats'] += 1  # The caller's own copy.
  assert fresh.predictions(TEXT, top=3).identical(own)
  assert fresh.predictions(TEXT[1:], top=3).identical(other)
  found = fresh.predictions(TEXT, 2, clear_every=fresh.block)
  assert found.identical(cleared)
  with pytest.raises(AssertionError, match='read again'):
    fresh.predictions(TEXT, top=4)
  with pytest.raises(AssertionError, match='read again'):
    fresh.with_state(states().isel(border=1)).predictions(TEXT, top=3)


def test_depth_of_ids_is_that_of_their_text():
  halting = observed.run('gated_universal')
  ids = halting.vocabulary.encode(TEXT)
  depth = halting.depth(TEXT)
  assert depth['steps'].values.max() > depth['steps'].values.min()
  np.testing.assert_array_equal(depth['by_layer'].sum('layer'), depth['steps'])
  assert halting.depth(ids).identical(depth)
  labeled = observed.run('gated_universal', labels=True)
  np.testing.assert_array_equal(labeled.depth(ids)['byte'], depth['byte'])


def test_states_have_places_in_the_text():
  W = run().block
  slots = states()['slots']
  assert slots.dims == ('border', 'layer', 'slot', 'feature')
  assert slots['layer'].values.tolist() == [1]
  np.testing.assert_array_equal(
    states()['byte'], W * np.arange(len(TEXT.encode()) // W + 1)
  )
  fewer = run().states(TEXT, every=3 * W)['slots']
  np.testing.assert_array_equal(fewer, slots[::3])


def test_attention_and_gates_are_named():
  found = run().attention(TEXT)
  assert found['token_to_token'].dims == ('layer', 'token', 'head', 'back')
  assert found['token_to_state'].dims == ('layer', 'token', 'head', 'slot')
  assert found['token_to_state']['layer'].values.tolist() == [1]
  assert found['state_to_token'].dims[:3] == ('layer', 'block', 'slot')
  one = run().attention(TEXT, layer=0)
  assert set(one) == {'token_to_token'}
  close(one['token_to_token'], found['token_to_token'].sel(layer=[0]))
  last = run().attention(TEXT, layer=-1)
  close(last['token_to_token'], found['token_to_token'].sel(layer=[1]))
  gates = run().gates(TEXT)
  assert gates['state_keep'].dims == ('layer', 'block', 'slot', 'feature')


def test_a_text_goes_on_from_its_own_state():
  """From the state and the caches after a part, the rest has its own losses."""
  at = 8 * run().block
  before, rest = TEXT[:at], TEXT[at:]
  own = run().with_state(states().isel(border=8), before)
  nats, _ = own.nats(rest)
  close(nats, run().nats(TEXT)[0][at:])
  fresh, _ = run().with_state(states().isel(border=8)).nats(rest)
  assert np.abs(fresh - nats).max() > 1e-3
  options = {'tokens': 12, 'temperature': 0}
  assert own.generate('', **options) == run().generate(before, **options)


def test_a_changed_state_changes_what_follows():
  at = 8 * run().block
  changed = states().isel(border=8).copy(deep=True)
  changed['slots'].loc[{'slot': 2}] = 0
  other = run().with_state(changed, TEXT[:at])
  nats, _ = other.nats(TEXT[at:])
  assert np.abs(nats - run().nats(TEXT)[0][at:]).max() > 1e-4
  seen = other.states(TEXT[at:])
  close(seen['slots'][0], changed['slots'])
  by_name = {'layer_1/slots': changed['slots'].sel(layer=1).values}
  again, _ = run().with_state(by_name, TEXT[:at]).nats(TEXT[at:])
  close(nats, again)
  close(run().nats(TEXT)[0], run().predictions(TEXT)['nats'])  # As before.
  with pytest.raises(ValueError, match='begins with another state'):
    other.evaluate(TEXT)


def test_clearing_is_counted_from_the_start_of_the_text():
  W = run().block
  own = run().with_state(states().isel(border=3), TEXT[: 3 * W])
  rest = TEXT[3 * W :]
  cleared = own.predictions(rest, clear_every=2 * W)['nats'].values
  plain = own.predictions(rest)['nats'].values
  assert np.abs(cleared[:W] - plain[:W]).max() > 1e-4  # Cleared at 0.
  bare = run().states(rest)  # Border 0 is a new state.
  fresh = run().with_state(bare.isel(border=0), TEXT[: 5 * W])
  then = fresh.predictions(TEXT[5 * W : 7 * W])['nats'].values
  close(cleared[2 * W : 4 * W], then)


def test_a_state_of_another_model_is_refused_but_its_arrays_are_not():
  """Both have the same shapes."""
  other = observed.untrained(run().sharded.model)
  other.params = jax.tree.map(lambda a: a + 0.1, other.params)
  state = other.states(TEXT).isel(border=-1)
  with pytest.raises(ValueError, match='from another run or step'):
    run().with_state(state)
  own = run().states(TEXT).isel(border=-1)
  named = {f'layer_1/{k}': a.sel(layer=1).values for k, a in state.items()}
  given = run().with_state(named).states(TEXT).isel(border=0)
  for name, a in given.items():
    close(a, state[name])
    assert np.abs(a.values - own[name].values).max() > 1e-3


def test_a_model_is_traced_once_for_each_kind_of_reading(monkeypatch):
  reader = copy.copy(run())
  vars(reader).pop('_observer', None)
  reader.states(TEXT)
  traced = []
  traces = type(reader.observer)._traced_read
  monkeypatch.setattr(
    type(reader.observer),
    '_traced_read',
    lambda *a: traced.append(1) or traces(*a),
  )
  reader.states(TEXT * 2)
  reader.with_state(reader.states(TEXT).isel(border=-1)).states(TEXT)
  assert not traced
  reader.gates(TEXT)
  assert traced


def test_states_in_bfloat16_are_numbers():
  cell = tiny.feedback({'dtype': 'bfloat16'})
  low = observed.untrained(Model(Bytes().size, cell, tiny.D, dtype='bfloat16'))
  read = low.states(TEXT)
  assert read['memory'].dtype == np.float32
  again = low.with_state(read.isel(border=2)).states(TEXT)
  close(again['memory'][0], read['memory'][2])


def test_clearing_the_state_has_a_cost():
  W = run().block
  cleared = run().predictions(TEXT, clear_every=W)['nats'].values
  plain = run().nats(TEXT)[0]
  close(cleared[:W], plain[:W])
  assert np.abs(cleared - plain).max() > 1e-4


@pytest.mark.parametrize(
  'call, message',
  [
    (lambda r: r.states(5), 'must be a string'),
    (lambda r: r.states(''), 'empty'),
    (lambda r: r.states([5, 7]), 'or a one-dimensional NumPy array.*got list'),
    (lambda r: r.states(np.ones(8)), 'array of integers'),
    (lambda r: r.states(TEXT, every=3), 'every must be a multiple of 4'),
    (lambda r: r.states(TEXT, every=4.0), 'every must be a whole.* got 4.0'),
    (lambda r: r.attention(TEXT, layer=7), 'layer 7.*layers 0, 1'),
    (lambda r: r.attention(TEXT, layer='1'), "layer must be.* got '1'"),
    (lambda r: r.gates(TEXT, layer=1.0), 'layer must be.* got 1.0'),
    (lambda r: explore.state_map(r, TEXT, layer='1'), "got '1'"),
    (lambda r: explore.probe(r, [TEXT] * 5, [TEXT] * 5, layer='1'), "got '1'"),
    (lambda r: explore.state_map(r, [TEXT, '', TEXT]), '^Text 1 is empty'),
    (lambda r: explore.state_map(r, ''), '^The text is empty'),
    (lambda r: explore.state_map(r, []), 'There is no text'),
    (lambda r: explore.state_map(r, None), 'must be a string, got NoneType'),
    (lambda r: explore.ablate(r, None, [TEXT]), 'what explore.probe returned'),
    (lambda r: explore.probe(r, [*'abcd', ''], [*'abcd', '']), '^Text 4 is em'),
    (lambda r: explore.ablate(r, NO_PROBE, [TEXT, '']), '^Text 1 is empty'),
    (lambda r: r.predictions(TEXT, top=0), 'top must be'),
    (lambda r: r.predictions(TEXT, top=260), 'top is 260.* only 259 tokens'),
    (lambda r: r.predictions(TEXT, labels=np.ones(3)), 'labels were given'),
    (lambda r: r.predictions(TEXT, clear_every=3), 'clear_every'),
    (lambda r: r.lens(TEXT), 'passes'),
    (lambda r: r.depth(TEXT), 'does not halt'),
    (lambda r: r.with_state(states()), 'borders'),
    (lambda r: r.with_state({'x': np.zeros(3)}), "no part 'x'"),
    (lambda r: r.with_state({'layer_1/slots': np.zeros(3)}), 'shape'),
    (lambda r: r.with_state(states().isel(border=1), 'abc'), 'before must'),
    (lambda r: r.with_state(None), 'must be one border.*NoneType'),
    (lambda r: r.states(np.arange(250, 300)), 'id 259.* from 0 to 258'),
    (lambda r: r.states(np.arange(-3, 30)), 'id -3'),
  ],
)
def test_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call(run())


@pytest.mark.parametrize(
  'labels, message',
  [
    ([3] * 7, r'16 tokens, but labels of shape \(7,\)'),
    (np.ones((16, 2), int), 'shape'),
    ([3.5] * 16, 'integers, got float64'),
    ([3] * 15 + [259], 'id 259.* from 0 to 258'),
    ([3] * 15 + [-1], 'id -1'),
  ],
)
def test_refused_labels(labels, message):
  labeled = observed.run('recurrent_fixed_skip', labels=True)
  with pytest.raises(ValueError, match=message):
    labeled.predictions(np.arange(16), labels=labels)


def test_a_small_vocabulary_has_fewer_likely_tokens():
  small = copy.copy(run())
  small._observer = mock.Mock()
  for size, vocabulary in (3, Words(['a', 'b'])), (5, Bytes()):
    small.vocabulary = vocabulary
    small.predictions('a b')
    small._observer.predictions.assert_called_with('a b', size, None, None)


def test_a_layer_without_a_number_is_layer_0():
  one = observed.run('universal')
  whole = one.attention(TEXT)['token_to_token']
  for layer in 0, -1:
    close(one.attention(TEXT, layer)['token_to_token'], whole)
  with pytest.raises(ValueError, match='layers 0'):
    one.attention(TEXT, 1)
