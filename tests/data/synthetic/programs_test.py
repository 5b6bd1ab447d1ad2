"""The language against an interpreter, and against a slow generator."""

import collections
import random

import numpy as np
import pytest

from meliad_rec.data.synthetic.algorithm import Programs
from meliad_rec.data.synthetic.labelled import Draws

LANGUAGES = [Programs(3, 10, 30), Programs(5, 4, 25), Programs(1, 2, 9)]


def texts(language, count, seed=0):
  """The words of each program, and its labels as words or None."""
  words = language.vocabulary.words
  written = language.write(language.draw(Draws(seed), count))
  for tokens, labels in zip(*written, strict=True):
    real = tokens > 0
    yield (
      [words[i - 1] for i in tokens[real]],
      [words[i - 1] if i else None for i in labels[real]],
    )


def interpret(words, most):
  """Runs a program word by word; the labels, and each statement's words."""
  values, labels, statements, at = {}, [], [], 0
  while words[at] != 'END':
    begin, runs = at, True
    if words[at] == 'if':
      _, a, sign, b, colon = words[at : at + 5]
      assert colon == ':'
      right = values[b] if b in values else int(b)
      runs = values[a] < right if sign == '<' else values[a] > right
      assert sign in '<>' and a != b
      at += 5
    match words[at : at + 4]:
      case [variable, '=', k, ';']:
        # Nothing is set twice, and what did not run has set nothing.
        assert variable not in values
        new, length = int(k), 4
      case [variable, '++', ';', *_]:
        new, length = values[variable] + 1, 3
      case [variable, '--', ';', *_]:
        new, length = values[variable] - 1, 3
      case ['print', variable, ';', *_]:
        assert at == begin  # Never behind a condition.
        new, length = values[variable], 3
    if runs:
      values[variable] = new
    at += length
    labels += [None] * (at - begin)
    if words[begin] == 'print':
      labels[-1] = str(new)
    statements.append(words[begin:at])
    assert new in range(1, most + 1)
  assert at == len(words) - 1
  return [*labels, None], statements


@pytest.mark.parametrize('language', LANGUAGES)
def test_labels_are_what_running_the_text_prints(language):
  for words, labels in texts(language, 200):
    found, statements = interpret(words, language.values)
    assert found == labels
    assert len(statements) == language.statements


def slow_program(variables, values, statements, rng):
  """One statement after the other, by the rules as they are told."""
  names = 'xyzpr'[:variables]
  state, written = {}, []

  def simple(kinds):
    while True:
      kind = rng.choice(kinds)
      if kind == 'set' and len(state) < variables:
        variable = rng.choice([name for name in names if name not in state])
        return kind, variable, rng.randint(1, values)
      if kind == 'set' or not state:
        continue
      variable = rng.choice(sorted(state))
      new = state[variable] + {'up': 1, 'down': -1, 'print': 0}[kind]
      if 1 <= new <= values:
        return kind, variable, new

  while len(written) < statements:
    kind = rng.choice(['set', 'up', 'down', 'print', 'if'])
    if kind != 'if':
      # Drawn anew as a whole, kind included, where it cannot be.
      if kind == 'set' and len(state) == variables:
        continue
      if kind != 'set' and not state:
        continue
      if kind in ('up', 'down'):
        variable = rng.choice(sorted(state))
        new = state[variable] + (1 if kind == 'up' else -1)
        if not 1 <= new <= values:
          continue
      else:
        _, variable, new = simple([kind])
      state[variable] = new
      written.append(kind)
      continue
    if not state:
      continue
    a, by_variable = rng.choice(sorted(state)), rng.random() < 0.5
    others = sorted(set(state) - {a})
    if by_variable and not others:
      continue
    b = state[rng.choice(others)] if by_variable else rng.randint(1, values)
    runs = state[a] < b if rng.random() < 0.5 else state[a] > b
    kind, variable, new = simple(['set', 'up', 'down'])
    if runs:
      state[variable] = new
    of = 'variable' if by_variable else 'constant'
    written.append(f'if {of}: {kind}')
  return written


def kinds(words, most):
  """As `slow_program` writes them."""
  _, statements = interpret(words, most)
  names = {'=': 'set', '++': 'up', '--': 'down'}
  for words in statements:
    before = ''
    if words[0] == 'if':
      of = 'constant' if words[3].isdecimal() else 'variable'
      before, words = f'if {of}: ', words[5:]
    yield before + ('print' if words[0] == 'print' else names[words[1]])


@pytest.mark.parametrize(('variables', 'values'), [(3, 10), (5, 3)])
def test_kinds_come_as_often_as_from_the_slow_form(variables, values):
  """At each of the first places, within 5 standard deviations."""
  rng, count = random.Random(0), 4000
  language = Programs(variables, values, 12)
  tallies = [collections.Counter(), collections.Counter()]
  for words, _ in texts(language, count):
    tallies[0].update(enumerate(kinds(words, values)))
  for _ in range(count):
    tallies[1].update(enumerate(slow_program(variables, values, 12, rng)))
  for each in tallies[0] | tallies[1]:
    fast, slow = (tally[each] for tally in tallies)
    assert abs(fast - slow) < 5 * np.sqrt(fast + slow + 1), each


def test_words_of_the_papers_sizes():
  """And padding: the published vocabularies have 26 and 28 entries, which are
  these and its marks for no label, end of line and unknown."""
  assert len(Programs(3, 10, 100).vocabulary.words) == 26 - 3
  assert len(Programs(5, 10, 100).vocabulary.words) == 28 - 3
