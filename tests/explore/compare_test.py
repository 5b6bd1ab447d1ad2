"""Results of several runs side by side, their size, and what is refused."""

import copy
from pathlib import Path
import re

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from meliad_rec import explore
from meliad_rec.data.vocabulary import Words
from meliad_rec.explore import page
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import size_and_cost
from meliad_rec.report import journal
from meliad_rec.runs.trained_run import load_run
from tests import observed
from tests import trained
from tests.explored import block_recurrent
from tests.explored import check
from tests.explored import OTHER
from tests.explored import TEXT


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


@pytest.mark.parametrize('way', ['x', 'y'])
def test_panels_of_bars_have_one_scale(way):
  """Horizontal bars, listed downwards, share the range of their lengths."""
  import xarray as xr

  from meliad_rec.report.plot import new_figure

  def show(run, _):
    figure, lengths = new_figure(3, 2), [1, 2 + (run is lstm)]
    axes = figure.subplots()
    if way == 'y':
      axes.bar([0, 1], lengths)
    else:
      axes.barh([0, 1], lengths)
      axes.invert_yaxis()
    drawn.append(getattr(axes, f'get_{way}lim'))
    return Shown(xr.Dataset({'high': lengths[1]}), figure)

  drawn, lstm = [], observed.run('lstm')
  runs = {'recurrent': block_recurrent(), 'lstm': lstm}
  explore.compare(show, runs, TEXT)
  first, second = (limits() for limits in drawn)
  assert first == second
  assert first[0] == 0 and first[1] > 3
  for function in 'state_map', None:
    with pytest.raises(ValueError, match='compare takes a function'):
      explore.compare(function, runs, TEXT)


def test_arguments_of_each_run_and_wide_pictures():
  """Wide pictures are above each other."""
  import xarray as xr

  from meliad_rec.report.plot import new_figure

  def show(run, of_run, same, *, option, multiple_of=None):
    numbers = {'of_run': of_run, 'same': same, 'option': option}
    multiples.append(multiple_of)
    return Shown(xr.Dataset(numbers), new_figure(width, 2))

  runs = {'a': block_recurrent(), 'b': observed.run('lstm')}
  sizes, multiples = {}, []
  for width in 8, 9:
    shown = explore.compare(
      show, runs, {'a': 1, 'b': 2}, 3, option={'b': 5, 'a': 4}
    )
    sizes[width] = shown.figure.get_size_inches().tolist()
  found = {name: a.values.tolist() for name, a in shown.data.items()}
  assert found == {'of_run': [1, 2], 'same': [3, 3], 'option': [4, 5]}
  assert sizes == {8: [16, 2.4], 9: [9, 4.8]}
  assert multiples == [8] * 4  # Blocks have 8 and 2 tokens.
  with pytest.raises(ValueError, match='runs a, b, but this one is for a, c'):
    explore.compare(show, runs, {'a': 1, 'c': 2}, 3, option=4)


def test_heat_maps_and_coordinates_side_by_side(tmp_path):
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
  shown = explore.compare(show, {'$^$': block_recurrent(), 'a': lstm}, TEXT)
  check(shown, tmp_path)
  assert shown.data['tokens'].values.tolist() == [[1, 2], [2, 4]]
  assert shown.data['id'].values.tolist() == [3, 4]
  images = [a.images[0] for f in drawn for a in f.axes if a.images]
  assert [image.get_clim() for image in images] == [(0, 2)] * 2
  assert [i.axes.texts[0].get_color() for i in images] == ['white', 'black']
  assert [f.get_suptitle() for f in drawn] == [
    r'the name \$^\$',
    'the name a',
  ]
  assert drawn[0].axes[1].get_ylim() == drawn[1].axes[2].get_ylim()


@pytest.mark.parametrize('suffix', ['', '.gz', '.xz', '.zip'])
def test_a_table_is_written_whole_or_not_at_all(suffix, tmp_path, monkeypatch):
  path = tmp_path / f'table.csv{suffix}'
  shown = Shown(xr.Dataset({'x': ('place', [1.5, 2.5])}), None)
  shown.to_csv(path)
  pd.testing.assert_frame_equal(pd.read_csv(path), shown.table())
  before = path.read_bytes()
  assert (before == b'"place","x"\n0,1.5\n1,2.5\n') == (suffix == '')

  def fail(table, out, **_):
    Path(out).write_text('place')
    raise OSError('The disk is full.')

  monkeypatch.setattr(pd.DataFrame, 'to_csv', fail)
  with pytest.raises(OSError, match='full'):
    shown.to_csv(path)
  assert path.read_bytes() == before
  assert [*tmp_path.iterdir()] == [path]


def test_mistakes_in_runs_and_paths(tmp_path):
  for runs in ([block_recurrent()], 'runs/tiny'):
    with pytest.raises(ValueError, match=f'got a {type(runs).__name__}'):
      explore.by_position(runs, TEXT)
  with pytest.raises(ValueError, match='at least one'):
    explore.by_position({}, TEXT)
  for show in (
    *(explore.gain, explore.state_map, explore.lens),
    lambda runs, text: explore.recalled(runs, text, -1),
    lambda runs, text: explore.swap(runs, text, text),
    lambda runs, text: explore.ask(runs, text, 'a?', ['b']),
    lambda runs, text: explore.probe(runs, [text], [text]),
    lambda runs, text: explore.ablate(runs, None, [text]),
    lambda runs, _: explore.memory_sources(runs),
    lambda runs, text: explore.source_map(runs, 'a', text),
  ):
    for runs in 'runs/tiny', {'a': block_recurrent()}:
      told = f'got a {type(runs).__name__}. explore.compare'
      with pytest.raises(ValueError, match=told):
        show(runs, TEXT)
  shown = Shown(pd.DataFrame(), None)
  for write in (shown.save, shown.to_csv):
    with pytest.raises(ValueError, match='does not exist'):
      write(tmp_path / 'none' / 'file')
    with pytest.raises(ValueError, match='path must be .*got NoneType'):
      write(None)
  shown = explore.lens(observed.run('universal'), TEXT)
  with pytest.raises(ValueError, match='dpi must be'):
    shown.save(tmp_path / 'file.png', dpi=0)
  with pytest.raises(ValueError, match='a.xyz is no format .* .svg'):
    shown.save(tmp_path / 'a.xyz')
  assert not list(tmp_path.iterdir())


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


def test_cost_is_in_tokens_per_second(monkeypatch, tmp_path):
  run = copy.copy(observed.run('window'))
  run.workdir = tmp_path
  (tmp_path / journal.NAME).write_text('')
  # Steps of the same time with 512 and 8 times as many tokens.
  records = [{'step_seconds': 1, 'tokens_per_second': t} for t in (512, 4096)]
  monkeypatch.setattr(journal, 'read', lambda path: records)
  assert size_and_cost(run).endswith(' M parameters, 2,304 tokens/s')
  assert page._size(run) == f'{run.parameters:,}, trained at 2,304 tokens/s'


@pytest.mark.slow
def test_size_and_cost(tmp_path):
  run = load_run(trained.folder())
  text = size_and_cost(run)
  assert re.fullmatch(r'[\d.]+ M parameters, [\d.,]+ tokens/s', text)
  assert size_and_cost(observed.run('window')).endswith(' M parameters')
