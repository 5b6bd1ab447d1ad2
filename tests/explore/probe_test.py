"""What a linear probe reads from a state."""

import numpy as np
import pytest
import xarray as xr

from meliad_rec import explore
from meliad_rec.explore.probe import _views
from meliad_rec.explore.probe import _without
from meliad_rec.explore.probe import cross_validated
from meliad_rec.explore.probe import erasers
from meliad_rec.explore.probe import of_other_texts
from meliad_rec.explore.probe import Probe
from meliad_rec.explore.probe import ridge
from meliad_rec.explore.probe import subspace
from tests import observed
from tests.explored import block_recurrent
from tests.explored import check
from tests.explored import close


def test_ridge():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(60, 7))
  y = np.stack([x[:, 0], 2 * x[:, 3] - x[:, 1]], 1)
  weights, center = ridge(x, y, 1e-9)
  close((x - center) @ weights.T, y - y.mean(0))
  few, _ = ridge(x[:5], y[:5], 1.0)  # Fewer texts than features.
  many = np.linalg.solve(
    (z := x[:5] - x[:5].mean(0)).T @ z + (z**2).sum() / 7 * np.eye(7),
    z.T @ (y[:5] - y[:5].mean(0)),
  ).T
  close(few, many)


def test_classes_of_unequal_size():
  rng = np.random.default_rng(0)
  y = (rng.random(4000) < 0.1).astype(int)
  x = rng.normal(size=(4000, 8))
  x[:, 0] += 4 * y
  predicted = cross_validated(x, y, np.arange(4000) % 5, 1e-3)
  assert (predicted == y).mean() > 0.97


@pytest.mark.parametrize('N, D, apart', [(5000, 64, 1), (400, 20_000, 1e-3)])
def test_no_linear_probe_reads_what_was_erased(N, D, apart):
  """Also where two classes differ much less than the others."""
  rng = np.random.default_rng(0)
  y = rng.integers(0, 8, N)
  centers = rng.normal(size=(8, D))
  centers[0] = centers[1] + apart * rng.normal(size=D)
  noise = 1e-2 * rng.normal(size=(N, D))
  x = (centers[y] + noise + 10).astype(np.float32)
  [erase] = erasers(x, [y], 0.01)
  # Directions of 8 classes span 7 dimensions.
  close(erase.read_KD @ erase.write_DK, np.eye(7))
  close(erase(x.mean(0, dtype=float)), x.mean(0, dtype=float))
  erased = np.stack([erase(each) for each in x])
  means = np.stack([erased[y == c].mean(0) for c in range(8)])
  close(means, np.broadcast_to(x.mean(0, dtype=float), means.shape))
  # In the directions in which classes do not differ, nothing is changed.
  directions = np.stack([x[y == c].mean(0, dtype=float) for c in range(8)])
  basis = subspace(directions - directions.mean(0))
  other = (erased - x) - (erased - x) @ basis.T @ basis
  assert np.abs(other).max() < 1e-2


def test_erasing_what_a_state_does_not_hold_leaves_most_of_it():
  """Means of shuffled classes differ most where the states vary most."""
  rng = np.random.default_rng(0)
  y = np.arange(400) % 4
  x = rng.normal(size=(400, 40)) * 2.0 ** -np.arange(40)
  x[:, 20] += 1e-3 * y
  x -= x.mean(0)
  own, shuffled = (
    np.linalg.norm([erase(each) - each for each in x]) / np.linalg.norm(x)
    for erase in erasers(x, [y, rng.permutation(y)], 1e-12)
  )
  assert own < 0.4 and shuffled < 0.4


def test_texts_exchange_their_classes():
  document = np.repeat([0, 1, 2], [4, 2, 3])
  y = np.array([*'aaaa', *'bc', *'def'])
  drawn = {
    tuple(of_other_texts(y, document, np.random.default_rng(seed)))
    for seed in range(50)
  }
  assert len(drawn) == 6
  assert tuple('bcbcaadef') in drawn and tuple('defdbcaaa') in drawn


def test_a_part_is_removed_from_a_state_and_nothing_else():
  draw = np.random.default_rng(0).normal
  state = xr.Dataset(
    {
      'slots': (('layer', 'slot', 'feature'), draw(size=(2, 3, 4))),
      'cell': ('feature', draw(size=4)),
      'count': ('row', np.arange(2)),
    },
    {'layer': [2, 5]},
  )
  flat = lambda state, layer: np.concatenate(
    [a.values.ravel() for a in _views(state, layer)]
  )
  for layer, size in (5, 12), (None, 28):
    [erase] = erasers(draw(size=(60, size)), [np.arange(60) % 3], 0.01)
    before = flat(state, layer)
    found, change = _without(state, layer, erase)
    close(flat(found, layer), erase(before))
    close(erase.read_KD @ (flat(found, layer) - erase.mean_D), np.zeros(2))
    parts = erase(before) - before, before - erase.mean_D
    close(change, np.divide(*map(np.linalg.norm, parts)))
    close(flat(state, layer), before)  # The given state is left as it is.
    assert (found['count'] == state['count']).all()
    same = found['slots'].sel(layer=2) == state['slots'].sel(layer=2)
    assert same.all() == (layer == 5)


@pytest.mark.slow
def test_a_probe_reads_the_last_letter_from_an_lstm(tmp_path):
  run = observed.run('lstm')
  rng = np.random.default_rng(0)
  texts = [''.join(rng.choice(list('ab'), 48)) for _ in range(10)]
  targets = [np.array(list(text)) for text in texts]
  found = explore.probe(run, texts, targets, penalty=1e-3)
  check(found, tmp_path)
  assert found.data.attrs['most_common'] < 0.65
  assert found.data.attrs['accuracy'] > 0.95
  noise = [rng.permutation(target) for target in targets]
  assert explore.probe(run, texts, noise).data.attrs['accuracy'] < 0.8
  shown = explore.ablate(run, found, texts[:3], shuffled=2)
  check(shown, tmp_path)
  assert shown.data['rise'].shape == (3, 3)
  rise = np.abs(shown.data['rise']).mean('text').values
  assert rise[0] > 0
  assert (shown.data['change'] > 0).all()
  one = explore.probe(run, texts, targets, layer=1)
  assert one.states.shape[1] < found.states.shape[1]
  highest = explore.probe(run, texts, targets, layer=-1)
  np.testing.assert_array_equal(highest.states, one.states)
  shown = explore.ablate(run, one, texts[:3], shuffled=1)
  assert np.abs(shown.data['rise']).min() > 0
  both = {'all': run, 'one': run}
  probes = {'all': found, 'one': one}
  shown = explore.compare(explore.ablate, both, probes, texts[:3], shuffled=1)
  assert shown.data['rise'].shape == (2, 3, 2)
  with pytest.raises(ValueError, match='a multiple of'):
    explore.ablate(run, found, texts, multiple_of=run.block + 1)
  with pytest.raises(ValueError, match='Layer 7 has no recurrent state'):
    explore.probe(run, texts, targets, layer=7)
  with pytest.raises(ValueError, match='targets must be a list .*got int'):
    explore.probe(run, texts, 5)
  with pytest.raises(ValueError, match='five|5 texts'):
    explore.probe(run, texts[:3], targets[:3])
  with pytest.raises(ValueError, match='one for each'):
    explore.probe(run, texts, [t[:-1] for t in targets])
  with pytest.raises(ValueError, match='one for each'):
    explore.probe(run, texts, [t[:, None] for t in targets])
  with pytest.raises(ValueError, match='distances of shape .47'):
    explore.probe(run, texts, targets, [[1] * 47] * 10)
  far = explore.probe(run, texts, targets, [[*range(48)]] * 10)
  close(far.data['distance'], far.data['tokens'] - 2)
  equal = explore.probe(run, texts, targets, [[3] * 48] * 10)
  [place] = equal.figure.axes[0].lines[0].get_xdata()
  assert place == 3
  with pytest.raises(ValueError, match='distances of 1'):
    explore.probe(run, texts, targets, [[1] * 48])
  with pytest.raises(ValueError, match='longer texts'):
    explore.probe(run, ['a'] * 5, [['a']] * 5)
  with pytest.raises(ValueError, match='at least one'):
    explore.ablate(run, found, [])
  with pytest.raises(ValueError, match='another run'):
    explore.ablate(block_recurrent(), found, texts)


@pytest.mark.parametrize('penalty', [0, -1, np.nan])
def test_a_regression_needs_a_penalty(penalty):
  run, texts = observed.run('lstm'), [np.arange(48)] * 5
  with pytest.raises(ValueError, match='penalty must be'):
    explore.probe(run, texts, texts, penalty=penalty)


@pytest.mark.parametrize(
  'labeled, options, message',
  [
    (False, {'tokens': 0}, 'tokens must be'),
    (False, {'shuffled': -1}, 'shuffled must be'),
    (False, {'labels': [[1] * 48] * 2}, 'labels were given'),
    (True, {}, 'labels were not given'),
    (True, {'labels': [[1] * 48]}, 'labels of 1'),
    (True, {'labels': [[1] * 48, [1] * 47]}, 'one label'),
  ],
)
def test_arguments_of_ablate_that_are_refused(labeled, options, message):
  run = observed.run('lstm', labeled)
  found = Probe(None, None, np.eye(3), None)
  with pytest.raises(ValueError, match=message):
    explore.ablate(run, found, [np.arange(48)] * 2, **options)
