"""The state of one text put into another, and questions after a long text.

Such exchanges of internal states are known as interchange interventions (Geiger
et al. 2021).
"""

from collections.abc import Sequence

import numpy as np

from meliad_rec.config.values import check_count
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.vocabulary import WordList
from meliad_rec.data.vocabulary import Words
from meliad_rec.explore.shown import block_multiple
from meliad_rec.explore.shown import check_run
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import label_curves
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import size_and_cost
from meliad_rec.explore.shown import with_units
from meliad_rec.report.console import symbols
from meliad_rec.report.plot import new_figure
from meliad_rec.report.plot import plain
from meliad_rec.runs.checks import check_list
from meliad_rec.runs.checks import check_text
from meliad_rec.runs.folder import check_is_of_text
from meliad_rec.runs.observed_run import Text
from meliad_rec.runs.trained_run import TrainedRun

# Legend of the figure of `ask`: what the model read before the answer.
_READ = {
  'with_state': 'after the text and the question',
  'cleared': 'the same, state cleared before the question',
  'fresh': 'after the question alone',
}


def swap(
  run: TrainedRun,
  a: Text,
  b: Text,
  after_a: int | None = None,
  after_b: int | None = None,
  tokens: int = 256,
  labels: np.ndarray | None = None,
  *,
  multiple_of: int | None = None,
) -> Shown:
  """Puts the state of text A into text B, and shows which losses change.

  Attention caches stay B's.

  Args:
    run: a recurrent run.
    a: text whose state is taken: a string, or the ids of its tokens.
    b: text into which it is put.
    after_a: number of tokens of A to read; None means all.
    after_b: number of tokens of B before the swap; None means the first half.
    tokens: number of tokens of B to read after it.
    labels: ids of the labels of all tokens of B, if the model predicts labels.
    multiple_of: after_a and after_b are rounded down to a multiple of it, which
      is a multiple of `run.block`. None means `run.block`.

  Returns:
    For each token of B after the swap, 'own', 'swapped' and 'cleared': its loss
    in nats with the state of B, the state of A and a cleared state; and
    'own_best' and 'swapped_best', the most likely token with each. If the model
    predicts labels, these are the losses of labels, NaN where a label is 0, and
    the likeliest ones. The attributes 'after_a' and 'after_b' are the numbers
    of tokens that were read.

  Raises:
    ValueError: a text is too short, `tokens`, `after_a` or `after_b` is no
      whole number of at least 1, labels are missing or not expected,
      `multiple_of` is no multiple of a block, the run is not recurrent, or its
      texts begin with another state (see `with_state`).
  """
  check_run(run)
  run.check_state_unmodified('swap')
  check_count('tokens', tokens, 1)
  for name, value in ('after_a', after_a), ('after_b', after_b):
    if value is not None:
      check_count(name, value, 1)
  run.check_texts([a])
  run.check_readable(b, labels)
  ids_a, ids_b = run.encode(a), run.encode(b)
  W = block_multiple(run, multiple_of)
  whole = lambda count: count - count % W
  at_a = whole(len(ids_a) if after_a is None else after_a)
  at_b = whole(len(ids_b) // 2 if after_b is None else after_b)
  rest = ids_b[at_b : at_b + tokens]
  if labels is not None:
    labels = labels[at_b : at_b + tokens]
  places = ('a', ids_a, at_a, 0), ('b', ids_b, at_b, 1)
  for name, ids, at, more in places:
    if not 0 < at <= len(ids) - more:
      raise ValueError(
        f'{at:,} of the {len(ids):,} tokens of text {name} would be read '
        f'before the swap, but needed are from {W:,}, a block, to '
        f'{len(ids) - more:,}. Give a longer text, or another after_{name}.'
      )
  border = lambda ids_T: run.states(ids_T, len(ids_T)).isel(border=-1)
  before = ids_b[:at_b]
  initial = run.states(before, at_b).isel(border=0)
  states = {
    'own': border(before),
    'swapped': border(ids_a[:at_a]),
    'cleared': initial,
  }
  found = {
    name: run.with_state(state, before).predictions(rest, 1, labels=labels)
    for name, state in states.items()
  }
  data = found['own'][['nats']].rename(nats='own')
  for name in ('swapped', 'cleared'):
    data[name] = found[name]['nats']
  for name in ('own', 'swapped'):
    data[f'{name}_best'] = found[name]['top_text'].isel(choice=0)
  data.attrs |= {'after_a': at_a, 'after_b': at_b}
  figure = _draw(data)
  figure.suptitle(
    plain(
      f'{run.name}: B, with the state of A put in after {at_b:,} tokens '
      f'(A: {at_a:,} tokens read)'
    )
  )
  return Shown(data, figure)


def _draw(data):
  figure = new_figure(11, 6)
  top, bottom = figure.subplots(2)
  scored = np.flatnonzero(~np.isnan(data['own'].values))
  for name, color in zip(('swapped', 'cleared'), COLORS, strict=False):
    rise = (data[name] - data['own']).values[scored] / np.log(2)
    means = np.cumsum(rise) / np.arange(1, len(scored) + 1)
    top.plot(scored + 1, means, color=color, label=f'state {name}')
  top.axhline(0, color='black', lw=0.8)
  label_curves(
    top, 'tokens after the swap', 'mean rise of the loss\n(bits per token)'
  )
  rise = (data['swapped'] - data['own']).values / np.log(2)
  most = np.argsort(-np.abs(rise[scored]))[:30]
  most = np.sort(scored[most])
  labels = [_label(data, i) for i in most]
  best = [
    plain(f'{symbols(own)}\u2192{symbols(swapped)}') if own != swapped else ''
    for own, swapped in zip(
      data['own_best'].values[most],
      data['swapped_best'].values[most],
      strict=True,
    )
  ]
  bars = bottom.bar(
    range(len(most)),
    rise[most],
    color=COLORS[0],
  )
  bottom.bar_label(bars, best, family='monospace', size=7, padding=2)
  bottom.margins(y=0.15)
  bottom.set_xticks(range(len(most)), labels, rotation=90, family='monospace')
  bottom.set_ylabel('rise of the loss (bits)')
  bottom.set_title(
    'the tokens that change most, with the two before; on a bar: the likeliest '
    'token with its own state \u2192 with the swapped one, if they differ',
    size=9,
  )
  bottom.grid(axis='y', alpha=0.3)
  return figure


def _label(data, i: int) -> str:
  return plain(symbols(''.join(data['text'].values[max(i - 2, 0) : i + 1])))


def ask(
  run: TrainedRun,
  text: Text,
  question: str,
  answers: Sequence[str],
  after: int = 60_000,
  *,
  multiple_of: int | None = None,
) -> Shown:
  """Asks a question after a long text, and compares the losses of answers.

  For example, the title of a book, which is in its first lines, may be asked
  for after 60,000 tokens.

  Args:
    run: a recurrent run.
    text: the text. It is read up to `after` tokens, or to its end.
    question: text that is read after it, such as '\\n\\nThe title is '.
    answers: possible answers, such as titles: the book's and other books'.
    after: number of tokens of the text to read, rounded down to a multiple of
      `multiple_of`.
    multiple_of: a multiple of `run.block`; None means `run.block`.

  Returns:
    'with_state', 'cleared' and 'fresh' [answer], the loss of each answer in
    nats: after the text and the question; after both, but with the state
    cleared between them, so that only attention still reaches the end of the
    text; and after the question alone. A token may hold the end of the question
    and the beginning of an answer. Then the losses of all answers begin at this
    token.

  Raises:
    ValueError: there is no answer, one is empty, the question or an answer is
      not a string of UTF-8, `after` is below 1, `multiple_of` is no multiple of
      a block, the text is shorter than that, the run is not recurrent, or its
      texts begin with another state (see `with_state`).
  """
  import xarray as xr

  check_run(run)
  check_is_of_text(run.labels)
  run.check_state_unmodified('ask')
  run.check_texts([text])
  check_list('answers', answers)
  answers = list(answers)
  check_count('after', after, 1)
  check_text('The question', question)
  for answer in answers:
    check_text('An answer', answer)
    if not answer:
      raise ValueError('An answer is empty, so it has no loss. Remove it.')
  W, ids_T = block_multiple(run, multiple_of), run.encode(text)[:after]
  ids_T = ids_T[: len(ids_T) - len(ids_T) % W]
  if not answers:
    raise ValueError('There is no answer. Give at least one.')
  if not len(ids_T):
    raise ValueError(
      f'Of the {len(run.encode(text)):,} tokens of the text, at most {after:,} '
      f'are read, but a state needs {W:,}, a block. Give a longer text, or a '
      'larger after.'
    )
  states = run.states(ids_T, len(ids_T))
  runs = {
    'with_state': run.with_state(states.isel(border=-1), ids_T),
    'cleared': run.with_state(states.isel(border=0), ids_T),
    'fresh': run,
  }
  texts, first = with_answers(run.vocabulary, question, answers)
  losses = {
    name: [
      one.predictions(text, 1)['nats'].values[first:].sum() for text in texts
    ]
    for name, one in runs.items()
  }
  data = xr.Dataset(
    {name: ('answer', np.array(v)) for name, v in losses.items()},
    {'answer': list(answers)},
  )
  with_units(data, **dict.fromkeys(losses, 'nats'))
  figure = new_figure(8, 1.9 + 0.6 * len(answers))
  axes = figure.subplots()
  for i, (name, color) in enumerate(zip(losses, COLORS, strict=False)):
    place = np.arange(len(answers)) + 0.25 * (i - 1)
    axes.barh(place, losses[name], 0.23, color=color, label=_READ[name])
  axes.set_yticks(range(len(answers)), [plain(repr(a)) for a in answers])
  axes.invert_yaxis()
  axes.set_xlabel(f'loss after {len(ids_T):,} tokens (nats per answer)')
  axes.legend(fontsize='small', loc='lower center', bbox_to_anchor=(0.5, 1))
  asked = symbols(question[-60:])
  figure.suptitle(plain(f'{run.name} ({size_and_cost(run)}), asked {asked!r}'))
  return Shown(data, figure)


def with_answers(
  vocabulary: Vocabulary, question: str, answers: Sequence[str]
) -> tuple[list[np.ndarray], int]:
  """Returns the ids of a question with each answer, and where answers begin.

  Args:
    vocabulary: the vocabulary. One of words separates the question and an
      answer, as it does all words.
    question: the question.
    answers: the answers.

  Returns:
    The ids of each text; and the number of ids, the same in all, that come from
    the question alone.
  """
  encode = vocabulary.encode
  asked = encode(question)
  if isinstance(vocabulary, Words | WordList):
    texts = [np.concatenate([asked, encode(answer)]) for answer in answers]
    return texts, len(asked)
  texts = [encode(question + answer) for answer in answers]

  def common(ids):
    size = min(len(ids), len(asked))
    return int(np.cumprod(ids[:size] == asked[:size]).sum())

  return texts, min(map(common, texts))
