r"""Algorithm: what does a program print, whose variables change as it runs?

A program, with the labels below it, reads

  x = 3 ; x ++ ; if x > 2 : y = 9 ; y -- ; print y ; ... END
                                                   8

The task of Fan et al. 2020 and Ju et al. 2021, by the rules of the generator
that the latter published; see programs.py. Each answer takes all changes of a
variable since it was set. To repeat what was last seen of it, be it set or
printed, is right in 47.0 % of cases with 3 variables, 48.5 % with 5: measured,
the mean of 6 seeds of 10,000 programs each, which spread by 0.1 %.

Random programs of a made-up language, and the words they are written in.

The rules are those of the generator that Ju et al. 2021 published. Statements
are drawn one after the other; one that cannot be is drawn anew as a whole, its
kind included. A condition is drawn first and then the statement in it, which is
one that could stand there even if the condition does not hold.
"""

from collections.abc import Mapping
import dataclasses
import functools

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.synthetic import labelled
from meliad_rec.data.synthetic.labelled import distinct
from meliad_rec.data.synthetic.labelled import Draws
from meliad_rec.data.vocabulary import Words

VARIABLES = 'xyzpr'
_SYMBOLS = ('=', '++', '--', ';', 'if', '<', '>', ':', 'print', 'END')
# Kinds of statement, of which the first three may stand behind a condition.
SET, UP, DOWN, PRINT, IF = range(5)

# Facts of a statement; variables are numbered from 0. Behind a condition, kind
# is that of the inner statement. `new` is what the variable is set to, or has.
_STATEMENT = np.dtype(
  [
    ('kind', 'i1'),
    ('variable', 'i1'),
    ('new', 'i2'),
    ('guarded', '?'),
    ('left', 'i1'),
    ('less', '?'),
    ('by_variable', '?'),
    ('right', 'i2'),  # A variable, or a value.
    ('runs', '?'),
  ]
)


@dataclasses.dataclass(frozen=True)
class Programs:
  """The language, and what is drawn of it.

  Attributes:
    variables: how many there are, 1 to 5.
    values: they are 1 to so many, at least 2.
    statements: of a program, conditions with what is in them counted once.
  """

  variables: int
  values: int
  statements: int

  @functools.cached_property
  def vocabulary(self) -> Words:
    """Variables, then values, then the rest."""
    values = map(str, range(1, self.values + 1))
    return Words([*VARIABLES[: self.variables], *values, *_SYMBOLS])

  def draw(self, draws: Draws, count: int) -> np.ndarray:
    """Records [count, statements] of the facts above."""
    programs_PS = np.zeros((count, self.statements), _STATEMENT)
    values_PV = np.zeros((count, self.variables), np.int64)  # 0: not set yet.
    for statement_P in programs_PS.T:
      self._draw_statement(draws, statement_P, values_PV)
      run_P = np.flatnonzero(statement_P['runs'])
      variable_P = statement_P['variable'][run_P]
      values_PV[run_P, variable_P] = statement_P['new'][run_P]
    return programs_PS

  def _draw_statement(self, draws, statement_P, values_PV):
    todo = np.arange(len(values_PV))
    while todo.size:
      kind_N = draws.below(5, todo.size)
      simple_N, fits_N = self._simple(draws, kind_N, values_PV[todo])
      guard_N, holds_N = self._condition(draws, values_PV[todo])
      is_if_N = kind_N == IF
      found_N = np.where(is_if_N, guard_N, simple_N)
      fits_N = np.where(is_if_N, holds_N, fits_N)
      statement_P[todo[fits_N]] = found_N[fits_N]
      todo = todo[~fits_N]
    todo = np.flatnonzero(statement_P['guarded'])
    while todo.size:
      kind_N = draws.below(3, todo.size)
      simple_N, fits_N = self._simple(draws, kind_N, values_PV[todo])
      for name in ('kind', 'variable', 'new'):
        statement_P[name][todo[fits_N]] = simple_N[name][fits_N]
      todo = todo[~fits_N]

  def _simple(self, draws, kind_N, values_NV):
    """Statements of these kinds without a condition, and which can be."""
    made_N = np.zeros(len(kind_N), _STATEMENT)
    is_set_N = kind_N == SET
    variable_N, any_N = _pick(draws, (values_NV > 0) ^ is_set_N[:, None])
    old_N = values_NV[np.arange(len(kind_N)), variable_N]
    constant_N = draws.below(self.values, len(kind_N)) + 1
    changed_N = old_N + (kind_N == UP) - (kind_N == DOWN)
    made_N['kind'] = kind_N
    made_N['variable'] = variable_N
    made_N['new'] = np.where(is_set_N, constant_N, changed_N)
    made_N['runs'] = True
    inside_N = (made_N['new'] >= 1) & (made_N['new'] <= self.values)
    return made_N, any_N & inside_N

  def _condition(self, draws, values_NV):
    """Conditions before statements yet to be drawn, and which can be."""
    made_N = np.zeros(len(values_NV), _STATEMENT)
    n = np.arange(len(values_NV))
    left_N, any_N = _pick(draws, values_NV > 0)
    other_NV = values_NV > 0
    other_NV[n, left_N] = False
    variable_N, another_N = _pick(draws, other_NV)
    constant_N = draws.below(self.values, len(n)) + 1
    by_variable_N = draws.below(2, len(n)) == 1
    less_N = draws.below(2, len(n)) == 1
    a_N = values_NV[n, left_N]
    b_N = np.where(by_variable_N, values_NV[n, variable_N], constant_N)
    made_N['guarded'] = True
    made_N['left'] = left_N
    made_N['less'] = less_N
    made_N['by_variable'] = by_variable_N
    made_N['right'] = np.where(by_variable_N, variable_N, constant_N)
    made_N['runs'] = np.where(less_N, a_N < b_N, a_N > b_N)
    return made_N, any_N & (another_N | ~by_variable_N)

  def write(self, programs_PS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels, both int16 [P, X], 0 where there is none.

    A printed value is the label of the end of its statement.
    """
    s_PS, id_of = programs_PS, dict(zip(_SYMBOLS, self._symbols, strict=True))
    variable = lambda number: 1 + number
    value = lambda number: self.variables + number
    written, printed = variable(s_PS['variable']), s_PS['kind'] == PRINT
    is_set, guarded = s_PS['kind'] == SET, s_PS['guarded']
    does = np.array([id_of['='], id_of['++'], id_of['--'], 0])[s_PS['kind']]
    less = np.where(s_PS['less'], id_of['<'], id_of['>'])
    right = np.where(
      s_PS['by_variable'], variable(s_PS['right']), value(s_PS['right'])
    )
    words = [
      guarded * id_of['if'],
      guarded * variable(s_PS['left']),
      guarded * less,
      guarded * right,
      guarded * id_of[':'],
      np.where(printed, id_of['print'], written),
      np.where(printed, written, does),
      is_set * value(s_PS['new']),
      np.full(s_PS.shape, id_of[';']),
    ]
    tokens_PSX = np.stack(words, 2).astype(np.int16)
    labels_PSX = np.zeros_like(tokens_PSX)
    labels_PSX[..., -1] = printed * value(s_PS['new'])
    end_P1 = np.full((len(s_PS), 1), id_of['END'], np.int16)
    join = lambda a_PSX, last_P1: np.concatenate(
      [a_PSX.reshape(len(a_PSX), -1), last_P1], 1
    )
    return join(tokens_PSX, end_P1), join(labels_PSX, 0 * end_P1)

  @property
  def _symbols(self):
    return self.vocabulary.encode(' '.join(_SYMBOLS)).tolist()


def _pick(draws: Draws, fit_NV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """One of those that fit, each as likely, and whether there is one at all."""
  fits_N = fit_NV.sum(1)
  nth_N = draws.below(np.maximum(fits_N, 1), len(fit_NV)) + 1
  found_NV = fit_NV & (np.cumsum(fit_NV, 1) == nth_N[:, None])
  return found_NV.argmax(1), fits_N > 0


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """The splits train, validation and test of the task.

  No two programs, of whichever splits, are the same.

  Attributes:
    programs: of the training split; the other splits have a tenth each.
    variables: of a program; the papers have 3 and 5.
    statements: of a program, before its END.
    values: variables have those from 1 to so many.
    programs_per_document: that follow one another. The published trainer reads
      all of them as one stream in 512 rows, about 20 in each.
    seed: of the programs.
  """

  programs: int = 10_000
  variables: int = 3
  statements: int = 100
  values: int = 10
  programs_per_document: int = 1
  seed: int = 0

  splits = SPLITS

  def __post_init__(self):
    for name in ('programs', 'statements', 'programs_per_document'):
      labelled.check(f'algorithm.Algorithm.{name}', getattr(self, name), 1)
    name = 'algorithm.Algorithm.variables'
    labelled.check(name, self.variables, 1, len(VARIABLES))
    labelled.check('algorithm.Algorithm.values', self.values, 2, 1000)

  @property
  def vocabulary(self) -> Words:
    """Variables, values and the other words of programs."""
    return self._language.vocabulary

  def documents(self, split: str) -> Documents:
    """All documents of a split; a value is the label where it is printed."""
    tokens_PX, labels_PX = self._language.write(self._split(split))
    return labelled.documents(
      split, tokens_PX, labels_PX, self.programs_per_document, self.vocabulary
    )

  def baselines(self, split: str) -> Mapping[str, float]:
    """What a guess gets wrong, and to repeat what was last set or printed."""
    programs_PS = self._split(split)
    p = np.arange(len(programs_PS))
    seen_PV = np.zeros((len(p), self.variables), np.int64)
    right = asked = 0
    for statement_P in programs_PS.T:
      variable_P, new_P = statement_P['variable'], statement_P['new']
      prints_P = statement_P['kind'] == PRINT
      right += (prints_P & (seen_PV[p, variable_P] == new_P)).sum()
      asked += prints_P.sum()
      shows_P = p[prints_P | (statement_P['kind'] == SET)]
      seen_PV[shows_P, variable_P[shows_P]] = new_P[shows_P]
    return {
      'uniform': 1 - 1 / self.values,
      'last_seen': float(1 - right / max(asked, 1)),
    }

  @functools.cached_property
  def _language(self) -> Programs:
    return Programs(self.variables, self.values, self.statements)

  def _split(self, split: str) -> np.ndarray:
    return self._all[labelled.rows_of(split, self.programs)]

  @functools.cached_property
  def _all(self) -> np.ndarray:
    """Records [programs of all splits, statements]; see programs.py."""
    draws = Draws(self.seed)
    return distinct(
      lambda count: self._language.draw(draws, count),
      labelled.total(self.programs),
      'algorithm.Algorithm.statements',
    )
