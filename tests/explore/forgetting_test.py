"""Loss by position and distance, and gradients of earlier states."""

import copy
import dataclasses
import re

import jax
import jax.numpy as jnp
from matplotlib.colors import to_rgba
import numpy as np
import pytest
import xarray as xr

from meliad_rec import explore
from meliad_rec.evaluation.recording import Request
from meliad_rec.explore.probe import Probe
from meliad_rec.metrics.losses import cross_entropy
from tests import observed
from tests.explored import block_recurrent
from tests.explored import check
from tests.explored import close
from tests.explored import OTHER
from tests.explored import TEXT
from tests.explored import W


def test_by_position(tmp_path):
  runs = {'recurrent': block_recurrent(), '$\\[$': observed.run('window')}
  shown = explore.by_position(runs, TEXT, bins=4)
  check(shown, tmp_path)
  assert len(shown.data['curve']) == 5  # A window has nothing to clear.
  first, end = (shown.data[name].values for name in ('first', 'end'))
  assert first[0] == 0 and end[-1] == len(TEXT)
  nats, _ = block_recurrent().nats(TEXT)
  bits = [nats[a:b].mean() for a, b in zip(first, end, strict=True)]
  close(shown.data['bits'][0], np.array(bits) / np.log(2))
  name = shown.data['curve'].values[3]
  half = int(re.fullmatch(r'recurrent, cleared once \(at (\d+)\)', name)[1])
  run = block_recurrent()
  clear = run.states(TEXT[:half]).isel(border=0)
  after, _ = run.with_state(clear, TEXT[:half]).nats(TEXT[half:])
  nats = np.concatenate([nats[:half], after])
  bits = [nats[a:b].mean() for a, b in zip(first, end, strict=True)]
  close(shown.data['bits'][3], np.array(bits) / np.log(2))
  with pytest.raises(ValueError, match='bins must be'):
    explore.by_position(run, TEXT, bins=0)
  # A color is a run, and a kind of line is a kind of clearing.
  top, bottom = shown.figure.axes
  looks = [(line.get_color(), line.get_linestyle()) for line in top.lines]
  assert len(set(looks)) == 5
  colors = [color for color, _ in looks]
  assert len({*colors[:4]}) == 1 and colors[4] != colors[0]
  assert looks[4][1] == looks[0][1]
  # The second panel shows the rise above the run's own curve.
  rises = [line.get_ydata() for line in bottom.lines]
  close(rises, shown.data['bits'][1:4] - shown.data['bits'][0])
  legend = top.get_legend().get_window_extent()
  assert legend.y0 >= top.get_window_extent().y1


@pytest.mark.slow
def test_a_run_that_is_cleared_anyway_has_one_curve():
  run = copy.copy(block_recurrent())
  model = run.sharded.model.clone(clear_state=True)
  run.sharded = dataclasses.replace(run.sharded, model=model)
  shown = explore.by_position(run, TEXT, bins=4)
  assert shown.data['curve'].values.tolist() == [run.name]


@pytest.mark.parametrize(
  'show',
  [
    lambda run, *a, **labels: explore.forgetting(run, *a, 20, 2, **labels),
    *(
      pytest.param(show, marks=pytest.mark.slow)
      for show in (
        explore.by_position,
        lambda run, *a, **labels: explore.swap(run, *a, *a, **labels),
        lambda run, *a, **labels: explore.state_gradients(
          run, *a, 2, 2, **labels
        ),
      )
    ),
  ],
)
def test_a_run_that_predicts_labels_is_given_them(show):
  """With the next tokens as labels, it is like a run that predicts those."""
  run = block_recurrent(labels=True)
  ids_T = block_recurrent().encode(TEXT)
  read_T = np.concatenate([[0], ids_T[:-1]])
  plain = show(block_recurrent(), ids_T).data
  labeled = show(run, read_T, labels=ids_T).data
  for name, a in plain.data_vars.items():
    if a.dtype.kind == 'f':
      assert np.abs(a).max() > 0
      close(labeled[name], a)
  with pytest.raises(ValueError, match='labels were not given'):
    show(run, read_T)
  with pytest.raises(ValueError, match='labels were given'):
    show(block_recurrent(), ids_T, labels=ids_T)
  with pytest.raises(ValueError, match='one label'):
    show(run, read_T, labels=ids_T[1:])


def test_tokens_with_the_label_0_are_not_scored(tmp_path):
  run, at = block_recurrent(labels=True), len(TEXT) // 2 // W * W
  ids = run.encode(TEXT)
  labels = np.where(np.arange(len(ids)) % 3 == 0, 0, ids)
  nats = run.predictions(ids, labels=labels)['nats'].values
  full = run.predictions(ids, labels=ids)['nats'].values
  close(nats, np.where(labels == 0, np.nan, full))
  shown = explore.by_position(run, ids, 4, labels)
  check(shown, tmp_path)
  ends = shown.data['end'].values
  parts = np.split(nats, ends[:-1])
  bits = [np.nanmean(part) / np.log(2) for part in parts]
  close(shown.data['bits'][0], bits)
  none = explore.by_position(run, ids, 4, np.zeros_like(ids))
  assert np.isnan(none.data['bits']).all()
  shown = explore.forgetting(run, ids, 20, 2, labels)
  check(shown, tmp_path)
  places = shown.data['at'].values[:, None] + np.arange(20)
  missing = np.isnan(shown.data['cost'].values[0])
  np.testing.assert_array_equal(missing, places % 3 == 0)
  (band,) = shown.figure.axes[0].collections
  assert np.isfinite(band.get_paths()[0].vertices).any()
  shown = explore.swap(run, ids[::-1], ids, labels=labels)
  check(shown, tmp_path)
  top, bottom = shown.figure.axes
  rise = shown.data['swapped'] - shown.data['own']
  close(top.lines[0].get_ydata()[-1], rise.mean() / np.log(2))
  heights = [bar.get_height() for bar in bottom.patches]
  assert len(heights) == np.count_nonzero(labels[at:])
  assert np.isfinite(heights).all()


def test_labels_of_which_none_is_scored():
  run, ids = observed.run('lstm', labels=True), np.arange(1, 17)
  labels = [0] * 16
  with pytest.raises(ValueError, match='none is scored'):
    explore.forgetting(run, ids, 4, 2, labels)
  with pytest.raises(ValueError, match='none is scored'):
    explore.state_gradients(run, ids, 1, 2, labels)


def test_each_run_has_a_color():
  runs = {f'run {i}': observed.run('lstm') for i in range(9)}
  shown = explore.by_distance(runs, OTHER)
  lines = shown.figure.axes[0].lines
  assert len({tuple(to_rgba(line.get_color())) for line in lines}) == 9


@pytest.mark.slow
def test_gradients_and_ablations_count_only_scored_labels():
  run = block_recurrent(labels=True)
  observer, ids = run.observer, run.encode(TEXT)
  even = np.where(np.arange(len(ids)) % 2, 0, ids)
  _, state = observer.read(ids, Request(), last=W)
  norm = lambda labels: observer.state_gradients(ids, state, W, 0, labels)
  assert norm(np.zeros_like(ids)) == 0 < norm(even) != norm(ids)
  shape = 6, sum(a.size for a in observer.parts(state).values())
  states = np.random.default_rng(0).normal(size=shape)
  each = dict.fromkeys(('target', 'predicted'), ('state', [0, 1, 2] * 2))
  each |= dict.fromkeys(('document', 'distance'), ('state', [*range(6)]))
  data = xr.Dataset(each, attrs={'most_common': 1 / 3})
  data['distance'].attrs['long_name'] = 'tokens read'
  found = Probe(data, None, states, None)
  rises = [
    explore.ablate(run, found, [ids], [labels], shuffled=0).data['rise'].item()
    for labels in (even, ids - even, ids)
  ]
  close(np.mean(rises[:2]), rises[2])


def test_the_share_of_names_predicted_right():
  """A name is right if each of its tokens is the most likely one."""
  text, run = 'cat dog cat dot cat', copy.copy(observed.run('window'))
  found = run.predictions(text, 1)
  found['rank'][:] = 1
  for first in 8, 12:  # The second use of cat, and dot.
    found['rank'][first : first + 3] = 0
  found['rank'][16:18] = 0  # Only a part of the third use of cat.
  run.predictions = lambda *_, **__: found
  shown = explore.by_distance(run, text)
  assert shown.data['low'].values.tolist() == [0, 1]
  close(shown.data['right'], [[1 / 3, 1 / 2]])
  labels = [axes.get_ylabel() for axes in shown.figure.axes]
  assert labels == ['loss (bits per name)', 'share of names predicted right']


@pytest.mark.slow
def test_by_distance(tmp_path):
  run = block_recurrent()
  shown = explore.by_distance(run, TEXT)
  check(shown, tmp_path)
  nats, _ = run.nats(TEXT)
  words = 'import', 'argparse', 'parser', 'Argument', 'add'
  first = [nats[i : i + len(w)].sum() for w in words for i in [TEXT.index(w)]]
  # `parser` within `argparse` is not a name, so its first use is later.
  first[2] = nats[17:23].sum()
  close(shown.data['bits'][0, 0], np.mean(first) / np.log(2))
  assert shown.data['count'].values.sum() == 8
  rarely = explore.by_distance(run, TEXT, clear_every=4 * W).data
  assert rarely['curve'].values[1] == f'{run.name}, state cleared every {4 * W}'
  cleared = run.predictions(TEXT, clear_every=4 * W)['nats'].values
  first = [cleared[(i := TEXT.index(w)) : i + len(w)].sum() for w in words]
  first[2] = cleared[17:23].sum()
  close(rarely['bits'][1, 0], np.mean(first) / np.log(2))
  with pytest.raises(ValueError, match='clear_every'):
    explore.by_distance(run, TEXT, clear_every=0)
  with pytest.raises(ValueError, match='no name'):
    explore.by_distance(run, '1 + 2')


@pytest.mark.slow
def test_forgetting(tmp_path):
  run, tokens = block_recurrent(), 20
  shown = explore.forgetting(run, TEXT, tokens=tokens, samples=3)
  check(shown, tmp_path)
  place = int(shown.data['at'][1])
  states = run.states(TEXT[:place])
  bare = run.with_state(states.isel(border=0), TEXT[:place])
  rest = TEXT[place : place + tokens]
  cost = bare.nats(rest)[0] - run.nats(TEXT)[0][place : place + tokens]
  close(shown.data['cost'][0, 1], cost)
  both = {'$\\[$': run, 'b': observed.run('lstm')}
  compared = explore.forgetting(both, TEXT, tokens=tokens, samples=3)
  check(compared, tmp_path)
  assert compared.data['run'].values.tolist() == ['$\\[$', 'b']
  place = int(compared.data['at'][1])
  states = both['b'].states(TEXT[:place])
  bare = both['b'].with_state(states.isel(border=0), TEXT[:place])
  cost = bare.nats(TEXT[place : place + tokens])[0]
  cost -= both['b'].nats(TEXT)[0][place : place + tokens]
  close(compared.data['cost'][1, 1], cost)
  others = {'a': run, 'b': observed.run('window')}
  with pytest.warns(UserWarning, match='no recurrent state in b'):
    kept = explore.forgetting(others, TEXT, tokens, samples=3)
  assert kept.data.identical(
    explore.forgetting({'a': run}, TEXT, tokens, samples=3).data
  )
  with pytest.raises(ValueError, match='longer text'):
    explore.forgetting(run, TEXT, tokens=len(TEXT))


@pytest.mark.parametrize(
  'show',
  [
    *(explore.by_position, explore.forgetting, explore.state_gradients),
    lambda run, text: explore.swap(run, text, text),
    lambda run, text: explore.ask(run, text, 'What?', ['cat']),
    lambda run, text: explore.ablate(run, None, [text]),
  ],
)
def test_another_beginning_is_refused(show):
  """These read parts of a text from the beginning of a document."""
  run = copy.copy(block_recurrent())
  run._observer = dataclasses.replace(run._observer, state=())
  with pytest.raises(ValueError, match='begins with another state'):
    show(run, TEXT)


@pytest.mark.slow
def test_state_gradients(tmp_path):
  run = block_recurrent()
  shown = explore.state_gradients(run, TEXT, back=2, samples=2)
  check(shown, tmp_path)
  observer, ids_T = run.observer, run.encode(TEXT)
  place = int(shown.data['at'][0]) + 2 * W
  _, state = observer.read(ids_T, Request(), last=place)
  inputs = ids_T[place - 1 : place - 1 + W]

  def loss(slots):
    parts = {'layer_1/slots': slots}
    model, variables = observer.model, {'params': run.params}
    changed = model.apply(variables, state, parts, method='with_parts')
    arguments = inputs[None], jnp.zeros(1, bool), jnp.ones((1, W), bool)
    _, logits = model.apply(variables, changed, *arguments)
    return cross_entropy(logits, ids_T[None, place : place + W]).sum()

  slots = observer.parts(state)['layer_1/slots']
  size = jnp.linalg.norm(jax.grad(loss)(slots)) * jnp.linalg.norm(slots)
  close(shown.data['gradient'][0, 0, 0], size)
  both = {'a': run, 'b': observed.run('lstm')}
  compared = explore.state_gradients(both, TEXT, back=2, samples=2)
  check(compared, tmp_path)
  close(compared.data['gradient'][0], shown.data['gradient'][0])
  np.testing.assert_array_equal(compared.data['block'], [W, both['b'].block])
  with pytest.raises(ValueError, match='do not reach the states of a'):
    explore.state_gradients({'a': observed.run('memorizing')}, TEXT, 2, 2)
  both = {'a': observed.run('memorizing'), 'b': run}
  with pytest.warns(
    UserWarning, match='do not reach the states of a.*left out'
  ):
    rest = explore.state_gradients(both, TEXT, back=2, samples=2)
  assert rest.data['run'].values.tolist() == ['b']


@pytest.mark.parametrize(
  'show, message',
  [
    (lambda run: explore.forgetting(run, TEXT, samples=0), 'samples must'),
    (lambda run: explore.forgetting(run, TEXT, tokens=0), 'tokens must'),
    (lambda run: explore.state_gradients(run, TEXT, back=-1), 'back must'),
    (
      lambda _: explore.forgetting({'b': observed.run('window')}, TEXT, 20),
      'no recurrent state in b',
    ),
    (lambda run: explore.source_map(run, 'a', TEXT), 'no encoder'),
    (
      lambda _: explore.by_distance(observed.run('window'), TEXT, W),
      f'clear_every is {W}, but no run has',
    ),
    (lambda run: explore.ask(run, TEXT, 'a?', ['b'], after=-1), 'after must'),
  ],
)
def test_arguments_that_are_refused(show, message):
  with pytest.raises(ValueError, match=message):
    show(block_recurrent())
