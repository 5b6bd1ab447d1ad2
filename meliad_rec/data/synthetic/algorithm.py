r"""Algorithm: predicts the values that a program with variables prints.

A program, with its labels below, reads

  x = 3 ; x ++ ; if x > 2 : y = 9 ; y -- ; print y ; ... END
                                                   8

This is the task of Fan et al. 2020 and Ju et al. 2021, with the rules of the
generator published by Ju et al. A printed value depends on all changes of the
variable since it was set. Predicting the value last set or printed for the
variable is right at 47.0 % of prints with 3 variables and at 48.5 % with 5
(measured: the mean over 6 seeds with 10,000 programs each).

Statements are drawn one after another. If a statement is impossible, such as a
print of a variable without a value, it is drawn again as a whole, including its
kind. A condition is drawn before the statement that it guards. The guarded
statement must be possible even if the condition is false.

Fan et al. 2020 disagree about conditions. The example program of their table 7,
like the generator of Ju et al., has < and > only, and so has this task by
default; sections 4.1.2 and 7.4 have conditions such as `if x == 4`. With
`equality`, conditions are <, > and ==, all equally likely; the value last set
or printed is then right at 47.9 % and 49.5 % of prints (measured: seed 0).

Letters of this file: P programs, S statements, V variables, X words, N programs
for which a statement is drawn.
"""

from collections.abc import Mapping
import dataclasses
import functools

import numpy as np

from meliad_rec.data.dataset import Cached
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.labeled import distinct
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.vocabulary import Words

VARIABLES = 'xyzpr'
_SYMBOLS = ('=', '++', '--', ';', 'if', '<', '>', ':', 'print', 'END')
_EQUAL = '=='
# A condition has one of these operators; the last only with `equality`.
_COMPARISONS = '>', '<', _EQUAL
# Kinds of statements; a condition may guard the first three.
SET, UP, DOWN, PRINT, IF = range(5)


@dataclasses.dataclass(frozen=True)
class Algorithm(Cached):
  """The algorithm task, with splits train, validation and test.

  No two programs are the same, within a split or across splits.

  Attributes:
    programs: number of programs in train; validation and test have a tenth
      each.
    variables: number of variables in a program, at most 5. Fan et al. 2020 and
      Ju et al. 2021 report results with 3 and 5.
    statements: number of statements in a program, before its END.
    values: the greatest value of a variable; the least is 1.
    programs_per_document: number of consecutive programs in a document. The
      trainer of Ju et al. 2021 cuts one stream of programs into 512 batch rows
      of about 20 programs each.
    seed: seed of the programs.
    equality: whether conditions may be ==, besides < and >.
  """

  programs: int = 10_000
  variables: int = 3
  statements: int = 100
  values: int = 10
  programs_per_document: int = 1
  seed: int = 0
  equality: bool = False

  splits = SPLITS

  def __post_init__(self):
    for name in ('programs', 'statements', 'programs_per_document'):
      labeled.check_setting(
        f'algorithm.Algorithm.{name}', getattr(self, name), 1
      )
    most = len(VARIABLES)
    labeled.check_setting(
      'algorithm.Algorithm.variables', self.variables, 1, most
    )
    labeled.check_setting('algorithm.Algorithm.values', self.values, 2, 1000)

  @property
  def vocabulary(self) -> Words:
    """The words of programs: variables, then values, then all others."""
    return self._language.vocabulary

  def _documents(self, split):
    """Makes the documents of a split; printed values are the labels."""
    tokens_PX, labels_PX = self._language.write(self._split(split))
    return labeled.from_rows(
      split, tokens_PX, labels_PX, self.programs_per_document, self.vocabulary
    )

  def baselines(self, split: str) -> Mapping[str, float]:
    """Returns {name: error rate from 0 to 1} of two trivial predictors.

    `uniform` guesses a random value. `last_seen` answers with the value in the
    last print or assignment (`=`) of the variable, even if the condition of
    that assignment was false.
    """
    programs_PS = self._split(split)
    p = np.arange(len(programs_PS))
    seen_PV = np.zeros((len(p), self.variables), np.int64)
    right = prints = 0
    for statement_P in programs_PS.T:
      variable_P, new_P = statement_P['variable'], statement_P['new']
      is_print_P = statement_P['kind'] == PRINT
      right += (is_print_P & (seen_PV[p, variable_P] == new_P)).sum()
      prints += is_print_P.sum()
      shows_P = p[is_print_P | (statement_P['kind'] == SET)]
      seen_PV[shows_P, variable_P[shows_P]] = new_P[shows_P]
    return {
      'uniform': 1 - 1 / self.values,
      'last_seen': float(1 - right / max(prints, 1)),
    }

  @functools.cached_property
  def _language(self) -> 'Programs':
    return Programs(self.variables, self.values, self.statements, self.equality)

  def _split(self, split: str) -> np.ndarray:
    return self._all[labeled.split_rows(split, self.programs)]

  @functools.cached_property
  def _all(self) -> np.ndarray:
    """Different programs, of all splits: _STATEMENT [programs, statements]."""
    draws = Draws(self.seed)
    return distinct(
      lambda count: self._language.draw(draws, count),
      labeled.total_rows(self.programs),
      'algorithm.Algorithm.statements',
    )


# A statement. With a condition, kind, variable and new describe the guarded
# statement. Variables are numbered from 0.
_STATEMENT = np.dtype(
  [
    ('kind', 'i1'),
    ('variable', 'i1'),
    ('new', 'i2'),  # The value of the variable after the statement.
    ('guarded', '?'),  # Whether there is a condition, such as `left < right`.
    ('left', 'i1'),  # A variable.
    ('comparison', 'i1'),  # Index of the operator in _COMPARISONS.
    ('by_variable', '?'),  # Whether `right` is a variable rather than a value.
    ('right', 'i2'),
    ('runs', '?'),  # Whether the statement is executed.
  ]
)


@dataclasses.dataclass(frozen=True)
class Programs:
  """Writes and draws programs of the algorithm task.

  Attributes:
    variables: number of variables, 1 to 5.
    values: the greatest value of a variable, at least 2; the least is 1.
    statements: number of statements in a program; a condition and the statement
      it guards count as one.
    equality: whether conditions may be ==.
  """

  variables: int
  values: int
  statements: int
  equality: bool

  @functools.cached_property
  def vocabulary(self) -> Words:
    """The words of programs: variables, then values, then all others."""
    values = map(str, range(1, self.values + 1))
    equal = [_EQUAL] if self.equality else []
    return Words([*VARIABLES[: self.variables], *values, *_SYMBOLS, *equal])

  def draw(self, draws: Draws, count: int) -> np.ndarray:
    """Draws random programs: _STATEMENT [count, statements]."""
    programs_PS = np.zeros((count, self.statements), _STATEMENT)
    values_PV = np.zeros((count, self.variables), np.int64)  # 0: not set.
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
      simple_N, possible_N = self._simple(draws, kind_N, values_PV[todo])
      guard_N, possible_if_N = self._condition(draws, values_PV[todo])
      is_if_N = kind_N == IF
      drawn_N = np.where(is_if_N, guard_N, simple_N)
      possible_N = np.where(is_if_N, possible_if_N, possible_N)
      statement_P[todo[possible_N]] = drawn_N[possible_N]
      todo = todo[~possible_N]
    todo = np.flatnonzero(statement_P['guarded'])
    while todo.size:
      kind_N = draws.below(3, todo.size)
      simple_N, possible_N = self._simple(draws, kind_N, values_PV[todo])
      for name in ('kind', 'variable', 'new'):
        statement_P[name][todo[possible_N]] = simple_N[name][possible_N]
      todo = todo[~possible_N]

  def _simple(self, draws, kind_N, values_NV):
    """Draws statements of the given kinds, without conditions.

    SET needs a variable without a value; all other kinds need a variable with a
    value. A statement is impossible if there is no such variable, or if the new
    value of the variable is not from 1 to `values`.

    Args:
      draws: the random numbers.
      kind_N: kinds of the statements.
      values_NV: values of the variables before the statements; 0 if not set.

    Returns:
      The statements [N], and bool [N], whether each is possible.
    """
    statement_N = np.zeros(len(kind_N), _STATEMENT)
    is_set_N = kind_N == SET
    variable_N, any_N = _pick(draws, (values_NV > 0) ^ is_set_N[:, None])
    old_N = values_NV[np.arange(len(kind_N)), variable_N]
    constant_N = draws.below(self.values, len(kind_N)) + 1
    changed_N = old_N + (kind_N == UP) - (kind_N == DOWN)
    new_N = np.where(is_set_N, constant_N, changed_N)
    statement_N['kind'] = kind_N
    statement_N['variable'] = variable_N
    statement_N['new'] = new_N
    statement_N['runs'] = True
    return statement_N, any_N & (new_N >= 1) & (new_N <= self.values)

  def _condition(self, draws, values_NV):
    """Draws conditions for statements that are drawn later.

    A condition compares a variable with another variable or with a constant. It
    is impossible if a variable that it needs has no value.

    Args:
      draws: the random numbers.
      values_NV: values of the variables before the conditions; 0 if not set.

    Returns:
      Statements [N] in which only the condition is drawn, and bool [N], whether
      each condition is possible.
    """
    statement_N = np.zeros(len(values_NV), _STATEMENT)
    n = np.arange(len(values_NV))
    left_N, any_N = _pick(draws, values_NV > 0)
    is_other_NV = values_NV > 0
    is_other_NV[n, left_N] = False
    variable_N, any_other_N = _pick(draws, is_other_NV)
    constant_N = draws.below(self.values, len(n)) + 1
    by_variable_N = draws.below(2, len(n)) == 1
    comparison_N = draws.below(3 if self.equality else 2, len(n))
    a_N = values_NV[n, left_N]
    b_N = np.where(by_variable_N, values_NV[n, variable_N], constant_N)
    statement_N['guarded'] = True
    statement_N['left'] = left_N
    statement_N['comparison'] = comparison_N
    statement_N['by_variable'] = by_variable_N
    statement_N['right'] = np.where(by_variable_N, variable_N, constant_N)
    statement_N['runs'] = np.choose(
      comparison_N, [a_N > b_N, a_N < b_N, a_N == b_N]
    )
    return statement_N, any_N & (any_other_N | ~by_variable_N)

  def write(self, programs_PS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids and the labels of programs, both int16 [P, X].

    The id is 0 where there is no word, and the label is 0 where there is none.
    A printed value is the label of the `;` of its statement.
    """
    s_PS = programs_PS
    id_of = {word: id_ for id_, word in enumerate(self.vocabulary.words, 1)}
    variable = lambda number: 1 + number
    value = lambda number: self.variables + number
    target, guarded = variable(s_PS['variable']), s_PS['guarded']
    is_set, is_print = s_PS['kind'] == SET, s_PS['kind'] == PRINT
    change = np.array([id_of['='], id_of['++'], id_of['--'], 0])[s_PS['kind']]
    operators = [id_of[word] for word in _COMPARISONS if word in id_of]
    comparison = np.array(operators)[s_PS['comparison']]
    right = np.where(
      s_PS['by_variable'], variable(s_PS['right']), value(s_PS['right'])
    )
    words = [
      guarded * id_of['if'],
      guarded * variable(s_PS['left']),
      guarded * comparison,
      guarded * right,
      guarded * id_of[':'],
      np.where(is_print, id_of['print'], target),
      np.where(is_print, target, change),
      is_set * value(s_PS['new']),
      np.full(s_PS.shape, id_of[';']),
    ]
    tokens_PSX = np.stack(words, 2).astype(np.int16)
    labels_PSX = np.zeros_like(tokens_PSX)
    labels_PSX[..., -1] = is_print * value(s_PS['new'])
    end_P1 = np.full((len(s_PS), 1), id_of['END'], np.int16)
    append = lambda a_PSX, last_P1: np.concatenate(
      [a_PSX.reshape(len(a_PSX), -1), last_P1], 1
    )
    return append(tokens_PSX, end_P1), append(labels_PSX, 0 * end_P1)


def _pick(
  draws: Draws, candidate_NV: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Picks a random candidate in each row.

  Args:
    draws: the random numbers.
    candidate_NV: bool, True at the candidates of each row.

  Returns:
    int64 [N], the index of the candidate, and bool [N], whether the row has
    any. Without one, the index is 0.
  """
  count_N = candidate_NV.sum(1)
  nth_N = draws.below(np.maximum(count_N, 1), len(candidate_NV)) + 1
  is_nth_NV = np.cumsum(candidate_NV, 1) == nth_N[:, None]
  return (candidate_NV & is_nth_NV).argmax(1), count_N > 0
