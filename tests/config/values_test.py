"""Which values fit which annotations."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal
from typing import Protocol

import pytest

from meliad_rec.config.values import annotation
from meliad_rec.config.values import describe
from meliad_rec.config.values import fits
from meliad_rec.config.values import map_leaves
from meliad_rec.config.values import Reference
from meliad_rec.config.values import statements


class Gate(Protocol):
  def __call__(self, x): ...


class Base:
  pass


class Derived(Base):
  def __call__(self):
    pass


def make() -> Derived:
  return Derived()


def untold():
  pass


def reference(target, called):
  return Reference('', target.__name__, called, target)


@pytest.mark.parametrize(
  ('value', 'wanted', 'expected'),
  [
    (1, int, True),
    (True, int, False),
    (True, bool, True),
    (1, bool, False),
    (1, float, True),
    (True, float, False),
    (1.0, int, False),
    ('a', str, True),
    (None, None, True),
    (0, None, False),
    ('a', Any, True),
    ('a', 'Unresolvable', True),
    (1, int | None, True),
    (None, int | None, True),
    ('1', int | None, False),
    (1, Literal[1, 'a'], True),
    (True, Literal[1, 'a'], False),
    ((1, 2), tuple[int, int], True),
    ((1, 2, 3), tuple[int, int], False),
    ((), tuple[int, ...], True),
    ((1, 2.0), tuple[int, ...], False),
    ((1, 2.0), tuple, True),
    ([1], tuple, False),
    ([1], Sequence[int], True),
    ((1,), Sequence[int], True),
    ('a', Sequence[str], False),
    ({'a': 1}, dict[str, int], True),
    ({'a': '1'}, Mapping[str, int], False),
    ('a', Callable, False),
    ('a', Callable[[int], int], False),
    ('a', Gate, False),
    ('a', Base, False),
    (reference(untold, False), Callable, True),
    (reference(untold, False), Gate, True),
    (reference(untold, False), int, False),
    (reference(untold, True), int, True),
    (reference(make, True), Base, True),
    (reference(make, True), int, False),
    (reference(Derived, True), Base, True),
    (reference(Base, True), Derived, False),
    (reference(Derived, False), Base, False),
    (reference(Derived, False), type[Base], True),
    (reference(Base, False), type[Derived], False),
    (reference(Derived, True), Callable, True),
    (reference(Base, True), Callable, False),
    ((reference(Derived, True),) * 2, tuple[Base, ...], True),
    ((reference(Derived, False),), tuple[Base, ...], False),
  ],
)
def test_fits(value, wanted, expected):
  assert fits(value, wanted) is expected


@pytest.mark.parametrize(
  ('wanted', 'words'),
  [
    (int, 'an int'),
    (float | None, 'a float or None'),
    (Literal['a', 2], "'a' or 2"),
    (tuple[int, ...], 'a tuple[int, ...]'),
    (Callable[[int], int] | None, 'a function or class (@name) or None'),
  ],
)
def test_describe(wanted, words):
  assert describe(wanted) == words


def test_annotations_written_as_strings_are_looked_up_where_they_were_written():
  class Written(Base):
    gate: 'Gate'

    def __init__(self, gate: 'Gate', base: 'Base', missing: 'Missing'):  # noqa: F821
      pass

  assert annotation(Written, 'gate') is Gate
  assert annotation(Written, 'base') is Base
  assert fits('a', annotation(Written, 'missing'))


def test_map_leaves_keeps_the_shape():
  value = {'a': (1, [2, {3: 4}]), 'b': 5}
  double = lambda leaf: leaf * 2
  assert map_leaves(double, value) == {'aa': (2, [4, {6: 8}]), 'bb': 10}


@pytest.mark.parametrize(
  ('former', 'current'), [(True, 'auto'), (False, 'xla')]
)
def test_a_former_parameter_has_its_current_name_and_value(former, current):
  text = f"""from __gin__ import dynamic_registration
from meliad_rec import layer_config

layer_config.LayerConfig.attention_kernels = {former}
layer_config.LayerConfig.sees_self = True
"""
  *_, kernels, own = statements(text, str)
  assert (kernels.arg_name, kernels.value) == ('attention', current)
  assert (own.arg_name, own.value) == ('include_self', True)
