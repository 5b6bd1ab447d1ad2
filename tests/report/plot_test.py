"""Curves, as they are plotted."""

from matplotlib.colors import to_hex
import pytest

from meliad_rec.report import journal
from meliad_rec.report import plot


@pytest.fixture
def run(tmp_path):
  def write(name, values, split='train', metric='loss_nats_per_token'):
    (tmp_path / name).mkdir(exist_ok=True)
    out = journal.Journal(tmp_path / name / journal.NAME)
    for step, value in values.items():
      out.append({'step': step, 'split': split, metric: value})
    out.append({'step': 99, 'text': {'sample': 'x'}})
    out.close()
    return tmp_path / name

  return write


def test_a_run_is_drawn_into_its_folder(run, drawn):
  workdir = run('one', {30: 2.0, 10: 4.0, 20: float('nan')})
  run('one', {20: 3.5}, 'validation')
  out = plot.plot(workdir)
  assert out == str(workdir / 'loss_nats_per_token.png')
  (axes,) = drawn[0].axes
  training, validation = axes.lines
  assert training.get_label() == 'one, train'
  assert list(training.get_xdata()) == [10, 20, 30]
  assert training.get_ydata()[[0, 2]].tolist() == [4.0, 2.0]
  assert validation.get_xydata().tolist() == [[20, 3.5]]
  assert validation.get_marker() == 'o'
  assert axes.get_xlabel() == 'training steps'
  assert axes.get_ylabel() == 'loss (nats per token)'


@pytest.mark.parametrize('text', [r'$\[$', '$5 and $6', r'\$1$', '$', ''])
def test_plain_text_is_no_formula(text):
  figure = plot.new_figure(3, 3)
  found = figure.text(0, 0, plot.plain(text))
  expected = figure.text(0, 0, text, parse_math=False)
  size = lambda text: text.get_window_extent().size.tolist()
  assert size(found) == size(expected)


def test_runs_are_compared_by_color(run, drawn, tmp_path):
  runs = {r'$\[$': run('a', {1: 2.0}), 'recurrent': run('b', {1: 1.0})}
  plot.compare(runs, tmp_path / 'both.png', 'loss_nats_per_token')
  (axes,) = drawn[0].axes
  labels = [line.get_label() for line in axes.lines]
  assert labels == [r'\$\[\$, train', 'recurrent, train']
  assert len({line.get_color() for line in axes.lines}) == 2


def test_every_run_is_in_the_legend_in_its_own_color(run, drawn, tmp_path):
  runs = {name: run(name, {1: 2.0}) for name in ['_a', *map(str, range(11))]}
  plot.compare(runs, tmp_path / 'all.png', 'loss_nats_per_token')
  curves = {name: [(1, [2.0]), (2, [1.0])] for name in runs}
  plot.lines({'passes': curves}, tmp_path / 'lines.png', 'error')
  for figure in drawn:
    (axes,) = figure.axes
    assert len(axes.get_legend().get_texts()) == 12
    assert len({to_hex(line.get_color()) for line in axes.lines}) == 12


def test_what_trivial_answers_reach_is_dashed(run, drawn):
  workdir = run('one', {1: 0.5}, metric='error')
  for name, error in ('trivial/a', 0.75), ('trivial/b', 0.25):
    run('one', {1: error}, name, metric='error')
  plot.plot(workdir, 'error')
  (axes,) = drawn[0].axes
  _, a, b = axes.lines
  assert [line.get_linestyle() for line in axes.lines] == ['-', '--', ':']
  assert (set(a.get_ydata()), set(b.get_ydata())) == ({0.75}, {0.25})
  assert a.get_label() == 'one, trivial/a'


def test_a_band_is_a_standard_deviation_about_the_mean(drawn, tmp_path):
  curves = {'a': [(2, [1.0, 1.0, 4.0]), (8, [3.0])]}
  plot.lines({'passes': curves}, tmp_path / 'lines.png', 'error')
  (axes,) = drawn[0].axes
  assert axes.lines[0].get_xydata().tolist() == [[2, 2], [8, 3]]
  (band,) = axes.collections
  corners = {tuple(each) for each in band.get_paths()[0].vertices.round(3)}
  assert corners == {(2, 0.586), (2, 3.414), (8, 3)}  # 2 -+ the root of 2.


def test_numbers_of_parameters_are_millions(drawn, tmp_path):
  sizes = {'rec': [40_400_000, 1_279_000_000], 'xl': [40_900_000, 327_200_000]}
  curves = {name: [(x, [1.0]) for x in each] for name, each in sizes.items()}
  plot.lines({'parameters': curves}, tmp_path / 'lines.png', 'error')
  (axes,) = drawn[0].axes
  labels = [label.get_text() for label in axes.get_xticklabels()]
  assert labels == ['40.4 M', '327.2 M', '1,279 M']


def test_what_is_not_there(run, tmp_path):
  with pytest.raises(ValueError, match='metrics.jsonl'):
    plot.plot(tmp_path)
  with pytest.raises(ValueError, match='bits_per_byte'):
    plot.plot(run('one', {1: 2.0}), 'bits_per_byte')
