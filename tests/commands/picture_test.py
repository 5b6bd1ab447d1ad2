"""Pictures as they are drawn."""

from matplotlib.figure import Figure
import matplotlib.image
import pytest

from meliad_rec.commands import depth_report
from meliad_rec.commands.depth_report import Line
from meliad_rec.evaluation.depth import Group


@pytest.fixture
def drawn(monkeypatch):
  """The figures saved; saving itself goes on."""
  figures, save = [], Figure.savefig

  def spy(figure, *args, **kwargs):
    figures.append(figure)
    save(figure, *args, **kwargs)

  monkeypatch.setattr(Figure, 'savefig', spy)
  return figures


def line(words, levels, steps, title='a title'):
  return Line(title, words, levels, steps, None, False)


def test_texts(drawn, tmp_path):
  out = tmp_path / 'texts.png'
  words = ['[MAX', '2', '[MIN', '$', '$', ']', ']']
  levels, steps = [0, 1, 1, 2, 2, 1, 0], [3, 1, 4, 2, 5, 9, 2]
  depth_report.draw_lines(
    [line(words, levels, steps), line(['x'], [0], [2])], out
  )
  assert not list(tmp_path.glob('*.tmp'))
  first, second = drawn[0].axes
  assert [bar.get_height() for bar in first.patches] == steps
  assert first.get_title('left') == 'a title'
  assert [text.get_text() for text in first.texts] == words
  down = [-text.xyann[1] for text in first.texts]
  indents = [(y - down[0]) / (down[1] - down[0]) for y in down]
  assert indents == levels and down[1] > down[0]
  assert [bar.get_height() for bar in second.patches] == [2]
  assert first.get_ylim() == second.get_ylim()
  assert first.get_ylim()[0] == 0


def test_words_do_not_overlap(drawn, tmp_path):
  """Hundred tokens, each in a column of its own."""
  words, levels = ['[MIN'] * 50 + [']'] * 50, [*range(50), *range(49, -1, -1)]
  out = tmp_path / 'x.png'
  depth_report.draw_lines([line(words, levels, [1] * 100)], out)
  boxes = [text.get_window_extent() for text in drawn[0].axes[0].texts]
  assert all(a.x1 <= b.x0 for a, b in zip(boxes, boxes[1:], strict=False))
  height, width, _ = matplotlib.image.imread(out).shape
  assert min(box.y0 for box in boxes) > -1  # Pixels.
  assert width < 2400 and height < 1400


def test_groups(drawn, tmp_path):
  by_length = [Group('1-3', 4, 2.5, 6, 0.5), Group('4-90', 4, 3.5, 7, None)]
  by_nesting = [Group('0', 8, 3.0, 7, 0.25)]
  out = tmp_path / 'groups.png'
  depth_report.draw_groups({'tokens': by_length, 'brackets': by_nesting}, out)
  assert matplotlib.image.imread(out).shape[0] == 600
  above, nested, below, nested_below = drawn[0].axes
  assert [bar.get_height() for bar in above.patches] == [2.5, 3.5]
  assert above.lines[0].get_ydata().tolist() == [6, 7]
  assert below.lines[0].get_ydata()[0] == 50
  assert [bar.get_height() for bar in nested.patches] == [3]
  assert nested_below.lines[0].get_ydata() == [25]
  assert below.get_xlabel() == 'tokens'
  assert nested_below.get_xlabel() == 'brackets'
  names = [label.get_text() for label in below.get_xticklabels()]
  assert names == ['1-3', '4-90']


def test_what_is_too_large_to_be_looked_at(tmp_path):
  wide = [line(['x'] * 1100, [0] * 1100, [1] * 1100)]
  high = [line(['x'], [0], [1])]
  for drawn in (wide, 100 * high):
    with pytest.raises(ValueError, match=r'picture would be \d+ inches wide'):
      depth_report.draw_lines(drawn, tmp_path / 'x.png')
  assert not list(tmp_path.iterdir())


def test_places_where_no_picture_can_be(tmp_path, monkeypatch):
  (tmp_path / 'old.png').touch()
  for name, told in {
    'old.png': 'is there already; remove it',
    'no/x.png': r'The folder of .*no/x\.png is not there',
    'x.pdf': 'is to be a picture; give a name that ends in .png',
  }.items():
    with pytest.raises(ValueError, match=told):
      depth_report.check_place(tmp_path / name)
  depth_report.check_place(str(tmp_path / 'new.png'))
  monkeypatch.setattr(depth_report.os, 'access', lambda *_: False)
  with pytest.raises(ValueError, match=r'new\.png cannot be written; give'):
    depth_report.check_place(tmp_path / 'new.png')
