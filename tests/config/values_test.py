"""Which values fit which annotations; names of older runs."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal
from typing import Protocol

import pytest

from meliad_rec.config.renames import saved_paths
from meliad_rec.config.values import annotation
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
    (1, bool, False),
    (1, float, True),
    (True, float, False),
    (1.0, int, False),
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
    ((1, 2.0), tuple[int, ...], False),
    ([1], tuple, False),
    ([1], Sequence[int], True),
    ('a', Sequence[str], False),
    ({'a': 1}, dict[str, int], True),
    ({'a': '1'}, Mapping[str, int], False),
    ('a', Callable, False),
    ('a', Gate, False),
    ('a', Base, False),
    (reference(untold, False), Callable, True),
    (reference(untold, False), Gate, True),
    (reference(untold, True), int, True),
    (reference(make, True), Base, True),
    (reference(Derived, True), Base, True),
    (reference(Base, True), Derived, False),
    (reference(Derived, False), Base, False),
    (reference(Derived, False), type[Base], True),
    (reference(Derived, True), Callable, True),
    (reference(Base, True), Callable, False),
    ((reference(Derived, True),) * 2, tuple[Base, ...], True),
  ],
)
def test_fits(value, wanted, expected):
  assert fits(value, wanted) is expected


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


FORMER = """
from __gin__ import dynamic_registration
from meliad_rec.cores import core_config
from meliad_rec.cores import layers
from meliad_rec.cores import universal
from meliad_rec import layer_config
layers.Layers.layer = @a/core_config.CoreConfig
a/core_config.CoreConfig.heads = 3
layer_config.LayerConfig.heads = 4
universal.Universal.together = True
universal.Universal.loop = 'fixed'
universal.Universal.exit_per_device = False
layer_config.LayerConfig.attention_kernels = True
layer_config.LayerConfig.attention_kernels = False
"""


def test_configurations_get_current_names():
  *_, layer, scoped, heads, together, yes, no = statements(FORMER, str)
  assert layer.selector == 'transformer.EncoderLayers'
  assert layer.value.name == 'layer_config.EncoderConfig'
  assert (scoped.scope, scoped.selector, scoped.arg_name) == (
    *('a', 'layer_config.EncoderConfig', 'num_heads'),
  )
  assert (heads.selector, heads.arg_name) == (
    *('layer_config.LayerConfig', 'num_heads'),
  )
  assert together.arg_name == 'global_halt'
  assert (yes.arg_name, yes.value, no.value) == ('attention', 'auto', 'xla')


def test_names_of_other_packages_stay():
  text = (
    'from archs import transformer\n'
    'from layers import layer_config\n'
    'transformer.Layers.layer = @transformer.Encode\n'
    'layer_config.LayerConfig.heads = 3\n'
  )
  *_, layer, heads = statements(text, str)
  assert layer.selector == 'transformer.Layers'
  assert layer.value.name == 'transformer.Encode'
  assert heads.arg_name == 'heads'


def test_former_parameters_of_current_modules_stay():
  """So that they are errors, and not ignored."""
  text = (
    'from meliad_rec.archs import universal\nuniversal.Universal.loop = 1\n'
  )
  *_, loop = statements(text, str)
  assert loop.arg_name == 'loop'


def test_arrays_are_found_by_former_paths():
  wanted = ['params/cell/encoder/w', 'mu/encoder/w', 'core/b', 'new']
  saved = ['params/cell/core/w', 'mu/core/w', 'core/b', 'other/core/c']
  assert saved_paths(wanted, saved) == {
    'params/cell/encoder/w': 'params/cell/core/w',
    'mu/encoder/w': 'mu/core/w',
    'core/b': 'core/b',
    'other/core/c': 'other/core/c',
  }
