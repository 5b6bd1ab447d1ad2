"""Shows the number of steps that a halting model takes, as text and plots."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from pathlib import Path

import numpy as np

from meliad_rec.config.saved import DATA
from meliad_rec.data.documents import count_words
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.vocabulary import Words
from meliad_rec.evaluation.depth import bracket_steps
from meliad_rec.evaluation.depth import Depths
from meliad_rec.evaluation.depth import Group
from meliad_rec.evaluation.depth import levels
from meliad_rec.report import plot
from meliad_rec.runs.checks import check_text
from meliad_rec.runs.trained_run import TrainedRun
from meliad_rec.training.experiment import Experiment

_BETWEEN = '||'  # Separates the two texts of a pair.


@dataclasses.dataclass(frozen=True)
class Line:
  """A text and the steps of its tokens, in reading order.

  Attributes:
    title: summary of the steps, after the predicted label of the whole text if
      the model predicts one.
    words: the text of each token.
    levels: number of brackets that are open around each token.
    steps: steps taken at each token.
    labels: predicted label of each token; None if the model does not predict
      labels of single tokens.
    together: whether all tokens halt together, after the same steps.
  """

  title: str
  words: Sequence[str]
  levels: Sequence[int]
  steps: Sequence[int]
  labels: Sequence[str] | None
  together: bool

  def __str__(self) -> str:
    """Returns the title and a line for each token.

    Tokens that halt together and have no labels share one line.
    """
    if self.together and self.labels is None:
      return f'{self.title}: {" ".join(self.words)}'
    labels = self.labels or [''] * len(self.words)
    wide = max(map(len, labels))
    rows = zip(self.steps, labels, self.levels, self.words, strict=True)
    return '\n'.join(
      [
        self.title,
        *(
          f'{steps:>5}  {label:{wide}}  {"  " * level}{word}'
          for steps, label, level, word in rows
        ),
      ]
    )


def documents_of(run: TrainedRun, texts: Sequence[str]) -> Documents:
  """Returns texts as documents in the form of the run's data.

  If the run classifies pairs, each string must hold two texts with || between
  them. If the run predicts labels, every token of the documents gets the label
  0, because the true labels are not known.

  Raises:
    ValueError: a text is empty, is not UTF-8, has unknown words, or is not a
      pair although the run needs one; or the class of the run's data is not
      part of this package, and --trusted was not given.
  """
  ends = end_ids(run) if run.labels else ()
  pairs = run.sharded.model.sequences > 1
  documents = []
  for text in texts:
    check_text('--text', text)
    parts = text.split(_BETWEEN) if pairs else [text]
    if pairs and len(parts) != 2:
      raise ValueError(
        f'The run classifies pairs of texts, got {text!r}. Write two, '
        f'separated by {_BETWEEN}.'
      )
    sides = [encode(run.vocabulary, part, ends) for part in parts]
    tokens = np.concatenate(sides)
    if any(side.size <= len(ends) for side in sides):
      side = f' on a side of {_BETWEEN}' if pairs else ''
      raise ValueError(f'--text is empty{side}. Give it at least one token.')
    labels = np.zeros_like(tokens) if run.labels else None
    middle = len(sides[0]) if pairs else None
    size, words = len(text.encode()), count_words(text)
    documents.append(Document(text, tokens, size, words, labels, middle))
  return Documents.collect(documents, run.vocabulary)


def end_ids(run: TrainedRun) -> tuple[int, ...]:
  """Returns the ids that the run's data have before and after a sequence.

  Only data that have such ids are built; their files are not needed.

  Returns:
    Two ids, or () if the data have none.

  Raises:
    ConfigError: as SavedConfig.argument.
  """
  none = lambda *_, **__: None
  known = lambda found: found if hasattr(found, 'end_ids') else none
  data = run.config.argument(Experiment, 'data', DATA, known)
  return getattr(data, 'end_ids', ())


def encode(
  vocabulary: Vocabulary, text: str, ends: Sequence[int]
) -> np.ndarray:
  """Returns the ids of a text.

  Args:
    vocabulary: vocabulary of the text.
    text: the text.
    ends: ids that are added before and after the text, unless it has them; or
      ().
  """
  ids = vocabulary.encode(text)
  before = [id_ for id_ in ends[:1] if id_ not in ids[:1]]
  after = [id_ for id_ in ends[1:] if id_ not in ids[-1:]]
  return np.r_[before, ids, after].astype(ids.dtype)


def line_of(run: TrainedRun, depths: Depths, i: int) -> Line:
  """Returns the report of one document.

  It has the words of the document, and the steps in depth and the predicted
  label of each token.

  Args:
    run: the run that read the documents.
    depths: steps in depth of all documents.
    i: index of the document.
  """
  ids, vocabulary = depths.documents[i], run.vocabulary
  steps, begins, answers = depths.of(i)
  brackets = bracket_steps(vocabulary)
  together = bool(begins.sum() == 1)
  title = f'{steps[begins].mean():.2f} steps, {steps.max()} at most'
  if together:
    title = f'{steps[0]} steps for all {len(ids)} tokens'
  head = run.sharded.model.head
  labels = [named(vocabulary, id_) for id_ in answers] if run.labels else None
  if labels and head is not None and head.pool is not None:
    title, labels = f'label {labels[-1]}, {title}', None
  return Line(
    title=title,
    words=spelled(vocabulary, ids),
    levels=[0] * len(ids) if brackets is None else levels(brackets, ids),
    steps=steps,
    labels=labels,
    together=together,
  )


def named(vocabulary: Vocabulary, label: int) -> str:
  """Returns the word of a label, or its class, from 0, if it has no word."""
  if isinstance(vocabulary, Words) and 1 <= label < vocabulary.size:
    return vocabulary.words[label - 1]
  return str(label - 1)


def spelled(vocabulary: Vocabulary, ids: np.ndarray) -> list[str]:
  """Returns the text of each token, without whitespace around it.

  A token of whitespace only is written as a Python string, such as "' '".
  """
  pieces = [b.decode('utf-8', 'replace') for b in vocabulary.token_bytes(ids)]
  return [piece.strip() or repr(piece) for piece in pieces]


_COLUMN = 0.15  # Inches per token.
_LETTER, _LEVEL = 4.5, 8  # Points per letter and per level.
_SIZE = 7  # Font size in points.
_POINTS = 72  # Points per inch.
_BARS = 1.2  # Height of the bars in inches.
_MOST = 160  # Largest side in inches, for about 1000 tokens.


def draw_lines(drawn: Sequence[Line], out: str | Path) -> None:
  """Draws texts below one another, with a bar of the steps above each token.

  The more brackets surround a token, the lower its text is drawn.

  Args:
    drawn: at least one text.
    out: path of the PNG.

  Raises:
    ValueError: the texts are too long or too many for one picture.
  """
  longest = max(len(line.words) for line in drawn)
  inches = [_BARS + _words_height(line) / _POINTS + 0.4 for line in drawn]
  width, height = max(longest * _COLUMN, 4) + 0.8, sum(inches)
  if max(width, height) > _MOST:
    raise ValueError(
      f'The picture would be {width:.0f} inches wide and {height:.0f} high, '
      f'but at most {_MOST} are possible. Give shorter or fewer texts, or '
      'remove --out.'
    )
  figure = plot.new_figure(width, height)
  rows = figure.subplots(
    len(drawn), squeeze=False, sharex=True, sharey=True, height_ratios=inches
  )[:, 0]
  for axes, line in zip(rows, drawn, strict=True):
    places = range(len(line.words))
    axes.bar(places, line.steps, width=0.8)
    for x, word, level in zip(places, line.words, line.levels, strict=True):
      axes.annotate(
        plot.plain(word),
        (x, 0),
        xycoords=('data', 'axes fraction'),
        xytext=(0, -3 - _LEVEL * level),
        textcoords='offset points',
        rotation=90,
        ha='center',
        va='top',
        family='monospace',
        fontsize=_SIZE,
      )
    axes.set_title(plot.plain(line.title), loc='left', fontsize=9)
    axes.set_xticks([])
    axes.set_xlim(-0.6, longest - 0.4)
    _count(axes)
  plot.save(figure, out)


def draw_groups(drawn: Mapping[str, Sequence[Group]], out: str | Path) -> None:
  """Draws the mean and maximum steps of groups, and below them the accuracy.

  Args:
    drawn: {label of the horizontal axis: groups of documents in order}. Each
      item is a column of the picture.
    out: path of the PNG.
  """
  widths = [max(0.4 * len(each), 3) for each in drawn.values()]
  figure = plot.new_figure(sum(widths) + 1.5, 5)
  both = figure.subplots(
    2,
    len(drawn),
    squeeze=False,
    sharex='col',
    sharey='row',
    width_ratios=widths,
  )
  for (heading, each), (above, below) in zip(
    drawn.items(), both.T, strict=True
  ):
    names = [one.name for one in each]
    above.bar(names, [one.mean for one in each], label='mean')
    above.plot(names, [one.most for one in each], 'k_', label='most')
    _count(above)
    right = [float('nan') if a is None else 100 * a for *_, a in each]
    below.plot(names, right, 'o-')
    below.set_ylim(0, 100)
    below.set_ylabel('correct, %')
    below.set_xlabel(heading)
    below.tick_params('x', rotation=45)
  marks = both[0, 0].get_legend_handles_labels()
  figure.legend(*marks, loc='outside upper center', ncols=2)
  plot.save(figure, out)


def _words_height(line):
  """Returns the height of a Line's words below the bars, in points."""
  return max(
    len(word) * _LETTER + _LEVEL * level
    for word, level in zip(line.words, line.levels, strict=True)
  )


def _count(axes):
  """Labels the vertical axis with steps, in whole numbers from 0."""
  axes.set_ylabel('steps')
  axes.set_ylim(bottom=0)
  axes.yaxis.get_major_locator().set_params(integer=True)
  axes.grid(axis='y', alpha=0.3)
  axes.set_axisbelow(True)
