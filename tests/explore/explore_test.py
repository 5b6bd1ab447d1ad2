"""The functions of meliad_rec.explore on tiny models without training."""

import copy
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from meliad_rec import explore
from meliad_rec.data.vocabulary import Words
from meliad_rec.evaluation.recording import Request
from meliad_rec.explore.probe import ridge
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import size_and_cost
from meliad_rec.explore.state_map import effective_rank
from meliad_rec.metrics.losses import cross_entropy
from meliad_rec.report import journal
from meliad_rec.runs.trained_run import load_run
from tests import observed
from tests import trained

TEXT = 'import argparse\n\nparser = argparse.Argument()\nparser.add(argparse)\n'
OTHER = 'the dog and the cat sat on the mat, and the dog ate the cat\n' * 2
W = 8
close = functools.partial(np.testing.assert_allclose, atol=3e-5, rtol=1e-4)
block_recurrent = functools.partial(observed.run, 'recurrent_fixed_skip')


def check(shown, path):
  """The figure is drawn, and the table has every number."""
  shown.save(path / 'figure.png')
  assert (path / 'figure.png').stat().st_size > 5000
  assert shown._repr_png_().startswith(b'\x89PNG')
  shown.to_csv(path / 'table.csv')
  table = pd.read_csv(path / 'table.csv')
  for name, a in shown.data.data_vars.items():
    if a.dtype.kind == 'f' and a.size == len(table):
      close(np.sort(table[name]), np.sort(a.values.ravel()))


def test_gain(tmp_path):
  run = block_recurrent()
  shown = explore.gain(run, TEXT, top=3)
  check(shown, tmp_path)
  nats, _ = run.nats(TEXT)
  cleared = run.predictions(TEXT, clear_every=W)['nats'].values
  close(shown.data['gain'], (cleared - nats) / np.log(2))
  top = shown.data.attrs['top']
  assert len(top) == 3
  assert top[0]['gain'] >= top[1]['gain']
  for word in top:
    at = word['byte']
    assert TEXT[at : at + len(word['word'])] == word['word'].strip()
    close(word['gain'], shown.data['gain'][at : at + len(word['word'])].sum())
    name = TEXT.index(word['name'], at)
    before = TEXT.rfind(word['name'], 0, name)
    assert word['back'] == (0 if before < 0 else name - before)
    assert word['in_window'] == (0 < word['back'] <= W)
  other = explore.gain(run, TEXT, baseline=observed.run('lstm'))
  close(other.data['baseline_nats'], observed.run('lstm').nats(TEXT)[0])
  rarely = explore.gain(run, TEXT, top=0, clear_every=2 * W)
  cleared = run.predictions(TEXT, clear_every=2 * W)['nats'].values
  close(rarely.data['baseline_nats'], cleared)
  assert rarely.data.attrs['top'] == []
  assert 'cleared every 16 tokens' in rarely.figure.get_suptitle()


def test_words_without_a_name_are_not_first_uses():
  shown = explore.gain(block_recurrent(), 'cat = 1\n\n  cat + 22\n', top=9)
  backs = {w['byte']: (w['word'], w['back']) for w in shown.data.attrs['top']}
  assert backs == {
    0: ('cat', 0),
    4: ('=', -1),
    6: ('1', -1),
    11: ('cat', 11),
    15: ('+', -1),
    17: ('22', -1),
  }


def test_gain_needs_something_to_compare_with():
  window, lstm = observed.run('window'), observed.run('lstm')
  with pytest.raises(ValueError, match='no recurrent state to clear'):
    explore.gain(window, TEXT)
  explore.gain(window, TEXT, baseline=lstm)
  with pytest.raises(ValueError, match='top must be'):
    explore.gain(lstm, TEXT, top=-1)
  with pytest.raises(ValueError, match='clear_every or baseline'):
    explore.gain(lstm, TEXT, window, clear_every=W)


@pytest.mark.slow
@pytest.mark.parametrize(
  'show',
  [
    lambda run, t: explore.gain(run, t),
    lambda run, t: explore.swap(run, OTHER, t),
    lambda run, t: explore.state_map(run, t),
    lambda run, t: explore.ask(run, t, 'What?', ['cat', 'dog']),
  ],
)
def test_results_of_runs_side_by_side(show, tmp_path):
  """Each run has its own numbers, and NaN where another has more of them."""
  runs = {'recurrent': block_recurrent(), 'lstm': observed.run('lstm')}
  shown = explore.compare(show, runs, TEXT)
  check(shown, tmp_path)
  assert shown.data['run'].values.tolist() == [*runs]
  titles = [axes.get_title() for axes in shown.figure.axes]
  assert titles == [f'{n}: {size_and_cost(r)}' for n, r in runs.items()]
  for name, run in runs.items():
    alone, found = show(run, TEXT).data, shown.data.sel(run=name)
    assert shown.data.attrs[name] == alone.attrs
    for key, a in alone.data_vars.items():
      if a.dtype.kind == 'f':
        b = found[key].values[tuple(map(slice, a.shape))]
        np.testing.assert_array_equal(b, a.values)
        assert np.isfinite(found[key].values).sum() == a.size


def test_panels_of_curves_have_one_scale():
  import xarray as xr

  from meliad_rec.report.plot import new_figure

  def show(run, _):
    figure, high = new_figure(3, 2), 1 + (run is lstm)
    figure.subplots().plot([0, high])
    drawn.append(figure)
    return Shown(xr.Dataset({'high': high}), figure)

  drawn, lstm = [], observed.run('lstm')
  runs = {'recurrent': block_recurrent(), 'lstm': lstm}
  shown = explore.compare(show, runs, TEXT)
  assert shown.data['high'].values.tolist() == [1, 2]
  assert {figure.axes[0].get_ylim() for figure in drawn} == {(-0.1, 2.1)}
  with pytest.raises(ValueError, match='at least one'):
    explore.compare(show, {}, TEXT)
  with pytest.raises(ValueError, match='as {name: run}, got a TrainedRun'):
    explore.compare(show, lstm, TEXT)


def test_heat_maps_and_coordinates_side_by_side():
  """Panels are paired by their labels; each run has its own coordinates."""
  import xarray as xr

  from meliad_rec.explore.shown import heat_map
  from meliad_rec.report.plot import new_figure

  def show(run, _):
    high, figure = 1 + (run is lstm), new_figure(3, 4)
    panels = figure.subplots(1 + high)
    if high == 2:  # The other run has no such panel.
      panels[0].plot([0, 9])
      panels[0].set_ylabel('gate')
    heat_map(panels[-2], [[0, high]], 'loss', (0, 2, 1, 0))
    panels[-2].text(1.5, 0.5, 'x', color='black')
    panels[-1].plot([0, high])
    figure.suptitle(f'the name {run.name} ({size_and_cost(run)})')
    drawn.append(figure)
    tokens = 'border', [high, 2 * high]
    data = {'same': ('border', [1.0, 2.0])}
    both = {'tokens': tokens, 'id': ('border', [3, 4])}
    return Shown(xr.Dataset(data, both), figure)

  drawn, lstm = [], observed.run('lstm')
  shown = explore.compare(show, {'b': block_recurrent(), 'a': lstm}, TEXT)
  assert shown.data['tokens'].values.tolist() == [[1, 2], [2, 4]]
  assert shown.data['id'].values.tolist() == [3, 4]
  images = [a.images[0] for f in drawn for a in f.axes if a.images]
  assert [image.get_clim() for image in images] == [(0, 2)] * 2
  assert [i.axes.texts[0].get_color() for i in images] == ['white', 'black']
  assert [f.get_suptitle() for f in drawn] == ['the name b', 'the name a']
  assert drawn[0].axes[1].get_ylim() == drawn[1].axes[2].get_ylim()


def test_mistakes_in_runs_and_paths(tmp_path):
  for runs in ([block_recurrent()], 'runs/tiny'):
    with pytest.raises(ValueError, match=f'got a {type(runs).__name__}'):
      explore.by_position(runs, TEXT)
  with pytest.raises(ValueError, match='at least one'):
    explore.by_position({}, TEXT)
  with pytest.raises(ValueError, match='got a str'):
    explore.gain('runs/tiny', TEXT)
  shown = Shown(pd.DataFrame(), None)
  for write in (shown.save, shown.to_csv):
    with pytest.raises(ValueError, match='does not exist'):
      write(tmp_path / 'none' / 'file')


def test_great_times_have_no_exponent(monkeypatch, tmp_path):
  run = copy.copy(observed.run('window'))
  run.workdir = tmp_path
  (tmp_path / journal.NAME).write_text('')
  records = [{'step_seconds': 1.3104}]
  monkeypatch.setattr(journal, 'read', lambda path: records)
  assert size_and_cost(run).endswith(' M parameters, 1,310 ms/step')


def test_effective_rank():
  close(effective_rank(np.eye(4)[None]), 4)
  close(effective_rank(np.ones((1, 4, 3))), 1)


@pytest.mark.slow
def test_state_map(tmp_path):
  run = block_recurrent()
  shown = explore.state_map(run, [TEXT, OTHER])
  check(shown, tmp_path)
  count = len(TEXT) // W
  slots = run.states(TEXT)['slots'].sel(layer=1).values
  change = np.linalg.norm(slots[1:] - slots[:-1], axis=-1)
  close(
    shown.data['change'][:count], change / np.linalg.norm(slots[1:], axis=-1)
  )
  close(shown.data['effective_rank'][:count], effective_rank(slots[1:]))
  use = shown.data['use'].values
  close(use.sum(1), 1)
  weights = run.attention(TEXT)['token_to_state'][0].mean('head').values
  close(use[1], weights[W : 2 * W].mean(0))
  keep = run.gates(TEXT)['state_keep'][0].mean(['slot', 'feature']).values
  close(shown.data['keep'][:count], keep)
  assert shown.data['document'].values.tolist().count(0) == count
  assert shown.data['read'].values[count] == count * W + W
  coarse = explore.state_map(run, TEXT, every=2 * W)
  close(coarse.data['keep'], keep[1::2])
  close(explore.state_map(run, TEXT, layer=-1).data['keep'], keep)
  ids = run.encode(TEXT)
  assert explore.state_map(run, ids).data.identical(
    explore.state_map(run, [ids]).data
  )
  for wrong, message in ({'layer': 0}, 'one of .1'), ({'part': 'x'}, 'slots'):
    with pytest.raises(ValueError, match=message):
      explore.state_map(run, TEXT, **wrong)


@pytest.mark.slow
def test_state_map_of_parts_without_slots(tmp_path):
  lstm, block = observed.run('lstm'), observed.run('lstm').block
  shown = explore.state_map(lstm, TEXT)
  check(shown, tmp_path)
  assert len(shown.figure.axes) == 1  # One vector: no maps, and no rank.
  assert shown.data.attrs['part'] == 'cell'
  token_keep = lstm.gates(TEXT, -1)['token_keep'].squeeze().mean('feature')
  close(shown.data['keep'][1], token_keep.values[block : 2 * block].mean())
  hidden = explore.state_map(lstm, TEXT, part='hidden')
  assert hidden.data.attrs['part'] == 'hidden'
  assert 'hidden' in hidden.figure.get_suptitle()
  feedback = observed.run('feedback')
  shown = explore.state_map(feedback, TEXT)
  check(shown, tmp_path)
  assert shown.data.attrs['part'] == 'memory/written/0'
  with pytest.raises(ValueError, match='not divided into layers'):
    explore.state_map(feedback, TEXT, layer=0)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['staircase', 'feedback', 'memorizing'])
def test_axes_of_states_have_names(name):
  states = observed.run(name).states(TEXT)
  axes = {dim for a in states.data_vars.values() for dim in a.dims}
  assert axes & {'token', 'place'}
  assert not any('_axis_' in axis for axis in axes)
  changed = observed.run(name).with_state(states.isel(border=0))
  close(changed.nats(TEXT)[0], observed.run(name).nats(TEXT)[0])


@pytest.mark.slow
def test_swap_changes_nothing_between_equal_beginnings(tmp_path):
  run, at = block_recurrent(), 4 * W
  shown = explore.swap(run, TEXT[:at], TEXT, after_b=at)
  check(shown, tmp_path)
  nats, _ = run.nats(TEXT)
  close(shown.data['own'], nats[at:])
  close(shown.data['swapped'], nats[at:])
  assert np.abs(shown.data['cleared'] - nats[at:]).max() > 1e-3
  ids = run.encode
  other = explore.swap(run, ids(OTHER), ids(TEXT), after_b=at).data
  with pytest.raises(ValueError, match='tokens must be'):
    explore.swap(run, OTHER, TEXT, tokens=0)
  assert np.abs(other['swapped'] - nats[at:]).max() > 1e-3


def test_ask(tmp_path):
  run, at = block_recurrent(), 5 * W
  question, answers = 'What?', ['cat', 'argparse']
  shown = explore.ask(run, OTHER, question, answers, after=at + 3)
  check(shown, tmp_path)
  for answer, nats in zip(answers, shown.data['with_state'], strict=True):
    whole, _ = run.nats(OTHER[:at] + question + answer)
    close(nats, whole[at + len(question) :].sum())
  alone, _ = run.nats(question + answers[0])
  close(shown.data['fresh'][0], alone[len(question) :].sum())
  for wrong, message in ('cat', 'list of strings'), (['cat', ''], 'is empty'):
    with pytest.raises(ValueError, match=message):
      explore.ask(run, OTHER, question, wrong)


@pytest.mark.parametrize(
  'name',
  [
    'gated_universal',
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ('universal', 'staircase')
    ),
  ],
)
def test_lens(name, tmp_path):
  run = observed.run(name)
  shown = explore.lens(run, TEXT, tokens=12)
  check(shown, tmp_path)
  close(shown.data['nats'][-1], run.nats(TEXT)[0])
  assert ('depth' in shown.data) == (name != 'staircase')
  count = shown.data.sizes['step']
  assert shown.data['step'].values.tolist() == [*range(1, count + 1)]
  assert '\u23ce' in [t.get_text() for t in shown.figure.axes[1].texts] + [
    t.get_text() for t in shown.figure.axes[1].get_xticklabels()
  ]
  kind = 'pass' if name == 'staircase' else 'step'
  assert shown.figure.axes[1].get_ylabel() == kind
  with pytest.raises(ValueError, match='tokens must be'):
    explore.lens(run, TEXT, tokens=0)


@pytest.mark.slow
def test_lens_of_labels(tmp_path):
  """The losses after the last step equal those that predictions returns."""
  run = observed.run('gated_universal', labels=True)
  ids = run.encode(TEXT)
  labels = np.roll(ids, -1)
  shown = explore.lens(run, ids, labels=labels)
  check(shown, tmp_path)
  close(shown.data['nats'][-1], run.predictions(ids, labels=labels)['nats'])
  with pytest.raises(ValueError, match='labels were not given'):
    run.lens(ids)


def test_by_position(tmp_path):
  runs = {'recurrent': block_recurrent(), 'lstm': observed.run('window')}
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
  both = {'a': run, 'b': observed.run('lstm')}
  compared = explore.forgetting(both, TEXT, tokens=tokens, samples=3)
  check(compared, tmp_path)
  assert compared.data['run'].values.tolist() == ['a', 'b']
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
  ],
)
def test_arguments_that_are_refused(show, message):
  with pytest.raises(ValueError, match=message):
    show(block_recurrent())


@pytest.mark.parametrize(
  'show',
  [
    *(explore.by_position, explore.by_distance, explore.forgetting),
    *(
      explore.state_gradients,
      lambda runs, t: explore.gain(runs['a'], t, runs['b']),
      lambda runs, t: explore.compare(explore.state_map, runs, t),
    ),
  ],
)
def test_runs_with_different_vocabularies_are_refused(show):
  words = copy.copy(block_recurrent())
  words.vocabulary = Words(['a', 'b'])
  both = {'a': block_recurrent(), 'b': words}
  with pytest.raises(ValueError, match='different vocabularies'):
    show(both, TEXT)


@pytest.mark.slow
def test_size_and_cost(tmp_path):
  run = load_run(trained.folder())
  text = size_and_cost(run)
  assert re.fullmatch(r'[\d.]+ M parameters, [\d.,]+ ms/step', text)
  assert size_and_cost(observed.run('window')).endswith(' M parameters')


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


@pytest.mark.slow
def test_a_probe_reads_the_last_letter_from_an_lstm(tmp_path):
  run = observed.run('lstm')
  rng = np.random.default_rng(0)
  texts = [''.join(rng.choice(list('ab'), 48)) for _ in range(10)]
  # The state after n tokens has read token n - 2: the last one is pending.
  targets = [np.array(['a', *text[:-1]]) for text in texts]
  found = explore.probe(run, texts, targets, penalty=1e-3)
  check(found, tmp_path)
  assert found.data.attrs['most_common'] < 0.65
  assert found.data.attrs['accuracy'] > 0.95
  noise = [rng.permutation(target) for target in targets]
  assert explore.probe(run, texts, noise).data.attrs['accuracy'] < 0.8
  shown = explore.ablate(run, found, texts[:3], random=2)
  check(shown, tmp_path)
  assert shown.data['rise'].shape == (3, 3)
  rise = np.abs(shown.data['rise']).mean('text').values
  assert (rise > 0).all()
  one = explore.probe(run, texts, targets, layer=1)
  assert one.directions.shape[1] < found.directions.shape[1]
  shown = explore.ablate(run, one, texts[:3], random=1)
  assert np.abs(shown.data['rise']).min() > 0
  with pytest.raises(ValueError, match='Layer 7 has no recurrent state'):
    explore.probe(run, texts, targets, layer=7)
  with pytest.raises(ValueError, match='five|5 texts'):
    explore.probe(run, texts[:3], targets[:3])
  with pytest.raises(ValueError, match='one for each'):
    explore.probe(run, texts, [t[:-1] for t in targets])
  with pytest.raises(ValueError, match='47 distances'):
    explore.probe(run, texts, targets, [[1] * 47] * 10)
  far = explore.probe(run, texts, targets, [[*range(48)]] * 10)
  close(far.data['distance'], far.data['tokens'] - 1)
  with pytest.raises(ValueError, match='distances of 1'):
    explore.probe(run, texts, targets, [[1] * 48])
  with pytest.raises(ValueError, match='longer texts'):
    explore.probe(run, ['a'] * 5, [['a']] * 5)
  with pytest.raises(ValueError, match='at least one'):
    explore.ablate(run, found, [])
  with pytest.raises(ValueError, match='another run'):
    explore.ablate(block_recurrent(), found, texts)


@pytest.mark.slow
def test_recalled(tmp_path):
  run = observed.run('memorizing')
  shown = explore.recalled(run, TEXT, token=-1, context=2)
  check(shown, tmp_path)
  close(shown.data['weight'].sum('neighbor'), 1)
  place = int(shown.data['place'][0, 0])
  assert shown.data['passage'].values[0, 0] == TEXT[place - 2 : place + 3]
  assert place < len(TEXT) // W * W - 1  # Read before this block.
  share = run.attention(TEXT)['recall_share'][0, -1]
  close(shown.data['share'], share)
  assert 'head 1 50%' in shown.figure.axes[0].get_title(loc='left')
  with pytest.raises(ValueError, match='token must be from'):
    explore.recalled(run, TEXT, token=1000)
  with pytest.raises(ValueError, match='memorizing layers: 1'):
    explore.recalled(run, TEXT, token=-1, layer=0)
  with pytest.raises(ValueError, match='yet.*Choose one from') as error:
    explore.recalled(run, TEXT, token=0)
  first = int(re.search(r'from (\d+) on', str(error.value))[1])
  shown = explore.recalled(run, TEXT, token=first)
  absent = shown.data['weight'].values == 0
  assert (shown.data['place'].values[absent] == -1).all()
  assert (shown.data['passage'].values[absent] == '').all()
  assert len(shown.figure.axes[0].patches) == (~absent[:, :4]).sum()
  with pytest.raises(ValueError, match='recalls no keys'):
    explore.recalled(block_recurrent(), TEXT, token=-1)


@pytest.mark.parametrize('name', ['window', 'feedback'])
def test_source_map(name, tmp_path):
  run, source, text = observed.translator(name), 'a dog', TEXT[: 2 * W + 1]
  shown = explore.source_map(run, source, text)
  check(shown, tmp_path)
  assert ''.join(shown.data['source_text'].values) == source + '\n'
  close(shown.data['weight'].sum('source'), 1)
  upper = explore.source_map(run, source, text, layer=1).data['weight']
  assert np.abs(upper - shown.data['weight']).max() > 1e-5
  # Reading block by block gives the losses of reading all at once.
  ids = [run.encode(a)[None] for a in (text, source + '\n')]
  start_B, mask_BT = np.ones(1, bool), np.ones(ids[0].shape, bool)
  model, variables = run.sharded.model, {'params': run.params}
  inputs_BT = np.pad(ids[0], ((0, 0), (1, 0)))[:, :-1]
  length = -len(text) % W
  start = model.apply(variables, 1, method='initial_state')
  pad = lambda a: np.pad(a, ((0, 0), (0, length)))
  _, logits = model.apply(
    variables, start, pad(inputs_BT), start_B, pad(mask_BT), ids[1]
  )
  expected = -jax.nn.log_softmax(logits)[0, np.arange(len(text)), ids[0][0]]
  found = run.with_source(source)
  close(found.predictions(text)['nats'], expected)
  with pytest.raises(ValueError, match='Give the source by with_source'):
    run.predictions(text)
  with pytest.raises(ValueError, match='The source has several lines'):
    run.with_source('a\nb')
  with pytest.raises(ValueError, match='no encoder, so it cannot read'):
    block_recurrent().with_source(source)


def test_memory_sources(tmp_path):
  shown = explore.memory_sources(observed.run('feedback'))
  check(shown, tmp_path)
  close(shown.data['weight'], np.full((1, 3), 1 / 3))
  with pytest.raises(ValueError, match='weighted memory'):
    explore.memory_sources(block_recurrent())


@pytest.mark.parametrize(
  'name, rows',
  [pytest.param('staircase', 8, marks=pytest.mark.slow), ('universal', 6)],
)
def test_attention_map(name, rows, tmp_path):
  run = observed.run(name)
  shown = explore.attention_map(run, TEXT)
  check(shown, tmp_path)
  assert shown.data.sizes == {'row': rows, 'back': W}
  close(shown.data['weight'].sum('back'), 1)
  assert shown.data['back'].values[0] == 0
  first = shown.data['name'].values[0]
  assert first.endswith(('pass 1', 'step 1'))
  both = {'a': run, 'b': observed.run('window')}
  compared = explore.attention_map(both, TEXT)
  check(compared, tmp_path)
  names = compared.data['name'].values.tolist()
  assert names[0].startswith('a: ')
  assert names[rows:] == ['b: layer 0', 'b: layer 1']
  close(compared.data['weight'][:rows, -W:], shown.data['weight'])


def test_states_of_labeled_runs_are_read_from_ids():
  """The inputs are then the tokens themselves, and labels are the targets."""
  run, plain = observed.run('lstm', labels=True), observed.run('lstm')
  ids = plain.encode(TEXT)
  states = run.states(ids)
  shifted = plain.states(np.append(ids, 5))
  labels = np.roll(ids, -1)
  found = run.predictions(ids, labels=labels)
  assert found['nats'].shape == ids.shape
  # Without the first input, which stands for the start of a text.
  assert (
    np.abs(states['hidden'] - shifted['hidden'][: len(states['border'])]).max()
    > 1e-3
  )
  with pytest.raises(ValueError, match='labels were not given'):
    run.predictions(ids)
  with pytest.raises(ValueError, match='Use predictions'):
    run.nats(TEXT)
  with pytest.raises(ValueError, match='one label'):
    run.predictions(ids, labels=labels[:-1])
