"""What is bound arrives, and no mistake is silent."""

from collections.abc import Callable
import dataclasses
import itertools
import math
import os
import sys
import types
from typing import Literal

import pytest

from meliad_rec.config import config
from meliad_rec.config import files as gin_files


@dataclasses.dataclass(frozen=True)
class Layer:
  width: int
  rate: float = 0.5
  kind: Literal['dual', 'single'] = 'dual'
  places: 'tuple[int, ...]' = ()
  limit: 'int | None' = None
  gate: Callable = abs


def repeat(layer: Layer, count: int) -> tuple:
  return (layer,) * count


def train(steps: int, model: Callable = Layer, seed: int = None):  # noqa: RUF013
  return steps, model, seed


HEAD = 'from __gin__ import dynamic_registration\n'
FILES = {
  'arch/window.gin': f"""{HEAD}import toy
toy.Layer:
  width = %WIDTH
toy.repeat.layer = @toy.Layer()
""",
  'arch/lstm.gin': "include 'gin/arch/window.gin'\n",
  'size/tiny.gin': 'WIDTH = 7\nSLOTS = 5\n',
  'size/small.gin': 'WIDTH = 11\nSLOTS = 5\n',
  'task/copy.gin': f'{HEAD}import toy\ntoy.repeat.count = 3\n',
  'options/single.gin': f"{HEAD}import toy\ntoy.Layer.kind = 'single'\n",
  'options/wide.gin': 'WIDTH = 23\n',
  'options/wider.gin': 'WIDTH = 29\n',
  'options/wider_and_slots.gin': 'WIDTH = 29\nSLOTS = 6\n',
  'experiments/table.gin': """
include 'arch/window'
include 'size/tiny'
include 'task/copy'
WIDTH = 13
""",
  'experiments/other.gin': "include 'experiments/table'\n",
}
USUAL = ['arch/window', 'size/tiny', 'task/copy']


@pytest.fixture(autouse=True)
def shipped(tmp_path, monkeypatch):
  """A gin folder of a few files, and a module `toy` that they configure."""
  root = tmp_path / 'shipped' / 'gin'
  for name, text in FILES.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text.lstrip())
  monkeypatch.setattr(gin_files, 'root', lambda: root)
  toy = types.ModuleType('toy')
  toy.Layer, toy.repeat, toy.train = Layer, repeat, train
  toy.size = 3
  monkeypatch.setitem(sys.modules, 'toy', toy)
  (tmp_path / 'here').mkdir()
  monkeypatch.chdir(tmp_path / 'here')
  config.reset()
  yield root
  config.reset()


def write(text, name='own.gin'):
  os.makedirs(os.path.dirname(name) or '.', exist_ok=True)
  with open(name, 'w') as file:
    file.write(text)
  return name


def mistake(files=USUAL, params=(), kinds=gin_files.KINDS):
  with pytest.raises(config.ConfigError) as info:
    config.parse(list(files), list(params), kinds)
    config.build(repeat)()
    config.check_read()
  assert '\n' not in str(info.value)
  return str(info.value)


def widths(files, params=()):
  """The width of each layer."""
  config.parse(list(files), list(params))
  return [layer.width for layer in config.build(repeat)()]


def test_prefix_and_ending_may_be_left_out():
  assert widths(['arch/window', 'size/tiny.gin', 'gin/task/copy']) == [7, 7, 7]


def test_later_files_and_then_single_bindings_win():
  assert widths([*USUAL, write('WIDTH = 17\n')]) == [17] * 3
  params = 'WIDTH = 19', 'toy.repeat.count = 2', 'toy.Layer.kind = "single"'
  assert widths([*USUAL, 'own'], params) == [19, 19]
  assert config.build(repeat)()[0].kind == 'single'
  config.check_read()


def test_the_order_of_kinds_is_fixed():
  for files in itertools.permutations([*USUAL, 'options/wide']):
    assert widths(files)[0] == 23


def test_files_of_no_kind_win_the_last_of_them():
  narrow = write('WIDTH = 3\n', 'narrow.gin')
  for place in range(3):
    files = ['options/wide', 'experiments/table']
    files.insert(place, narrow)
    assert widths(files)[0] == 3
  assert widths([write('WIDTH = 5\n', 'wider.gin'), *files])[0] == 3


def test_a_file_may_include_all_kinds():
  assert widths(['experiments/table'])[0] == 13
  config.check_read()
  # An own one is corrected by options.
  included = ''.join(f"include '{name}.gin'\n" for name in USUAL)
  whole = write(f'{included}WIDTH = 3\n', 'whole.gin')
  for files in ['options/wide', whole], [whole, 'options/wide']:
    assert widths(files)[0] == 23
  # An included file of the same kind is part of the one given.
  assert len(widths(['arch/lstm', 'size/tiny', 'task/copy'])) == 3


@pytest.mark.parametrize('given', [Layer, repeat])
def test_what_no_file_names_can_be_built(given):
  config.parse([], [], kinds=())
  assert config.build(train)(2) == (2, Layer, None)
  assert config.build(train)(2, given) == (2, given, None)
  assert 'train.seed = None' in config.operative()


def test_parsing_again_forgets_and_accepts_classes_defined_again():
  # An int is a float, and the default of any type may be given.
  config.parse(USUAL, ['toy.Layer.rate = 1', 'toy.train.seed = None'])
  first = config.build(repeat)()[0]
  sys.modules['toy'].Layer = type('Layer', (Layer,), {})
  sys.modules['toy'].repeat = lambda layer, count: (layer, count)
  sys.modules['toy'].repeat.__name__ = 'repeat'
  config.parse(USUAL, [])
  again, count = config.build(sys.modules['toy'].repeat)()
  assert (first.rate, again.rate, count) == (1, 0.5, 3)
  assert type(again) is sys.modules['toy'].Layer
  config.check_read()


def test_the_operative_configuration_parses_back_to_itself():
  params = 'toy.Layer.places = (1, -2)', 'toy.Layer.rate = -1e999'
  config.parse([*USUAL, 'options/single'], params)
  first = config.build(repeat)()
  assert first[0].rate == -math.inf
  config.check_read()
  text = config.operative()
  assert 'SLOTS' not in text
  config.parse([write(text, 'run/config.gin')], [])
  assert config.build(repeat)() == first
  config.check_read()
  assert config.operative() == text


def test_scopes_hold_for_what_a_reference_builds():
  text = f'{HEAD}import toy\n'
  text += 'toy.repeat.layer = @wide/toy.Layer()\nwide/toy.Layer.width = 31\n'
  config.parse([*USUAL, write(text)], ['toy.Layer.rate = 0.25'])
  layer = config.build(repeat)()[0]
  assert (layer.width, layer.rate) == (31, 0.25)
  assert 'wide/toy.Layer.rate = 0.25' in config.operative()


def test_a_reference_without_a_call_builds_its_arguments_for_each_call():
  def twice(make):
    return make(), make(9), make(9, rate=1.0)

  toy = sys.modules['toy']
  toy.Box = lambda width, rate=0.5, layer=None: (width, rate, layer)
  toy.Box.__name__, toy.twice = 'Box', twice
  twice.__qualname__, twice.__module__ = 'twice', 'toy'
  params = [
    'toy.twice.make = @toy.Box',
    'toy.Box.width = %WIDTH',
    'toy.Box.layer = @toy.Layer()',
  ]
  config.parse(USUAL, params)
  first, second, third = config.build(twice)()
  assert (first[0], second[0], third[:2]) == (7, 9, (9, 1.0))
  assert first[2] == second[2] and first[2] is not second[2]


def test_an_argument_that_the_chosen_function_lacks_is_named():
  sys.modules['toy'].wrap = lambda layer: layer(position=1)
  sys.modules['toy'].wrap.__name__ = 'wrap'
  config.parse(USUAL, ['toy.wrap.layer = @toy.Layer'])
  with pytest.raises(config.ConfigError, match=r"toy\.Layer .*'position'"):
    config.build(sys.modules['toy'].wrap)()


def test_an_option_that_others_override_entirely_is_refused():
  found = mistake([*USUAL, 'options/wide', 'options/wider'])
  assert all(part in found for part in ('options/wide ', 'WIDTH', 'wider.gin'))
  wider = 'options/wider'
  assert mistake(['experiments/table', 'options/wide', wider]) == found
  assert widths([*USUAL, 'options/wider_and_slots', 'options/wide'])[0] == 23
  assert widths([*USUAL, wider, wider])[0] == 29
  # Not even if one of its settings is the same in the others.
  same = write('WIDTH = 23\nSLOTS = 5\n', 'options/same')
  other = write('WIDTH = 29\nSLOTS = 5\n', 'options/other')
  assert all(part in mistake([*USUAL, same, other]) for part in (same, 'SLOTS'))


@pytest.mark.parametrize('folder', ['experiments', 'experiments/my', 'scale'])
def test_an_own_file_that_others_override_entirely_is_refused(
  folder, monkeypatch
):
  own = write('WIDTH = 99\n', f'{folder}/own.gin')
  found = mistake([*USUAL, own])
  assert all(part in found for part in (own, 'tiny.gin', 'to another folder'))
  monkeypatch.chdir(folder)  # Only the folder's name counts.
  assert mistake([*USUAL, 'own']) == found.replace(own, 'own')
  write("include 'size/tiny'\nWIDTH = 99\n")  # It overrides what it includes.
  assert widths(['arch/window', 'task/copy', 'own'])[0] == 99


def test_parts_of_whole_configurations_can_be_replaced():
  toy = sys.modules['toy']
  toy.Deep = type('Deep', (Layer,), {'__init__': lambda self, depth: None})
  layer = 'toy.repeat.layer = @toy.Deep()'
  option = write(
    f'{HEAD}import toy\n{layer}\ntoy.Deep.depth = 3\n', 'options/d'
  )
  config.parse(['experiments/table'], ['toy.Layer.kind = "single"'])
  config.build(repeat)()
  # The name of its folder does not matter.
  saved = write(config.operative(), 'task/config.gin')
  for whole in saved, 'experiments/table':
    for files, params in (
      ([whole, option], []),
      ([whole], [layer, 'toy.Deep.depth = 3']),
      ([whole], ['toy.Layer.width = 3']),
    ):
      config.parse(files, params)
      config.build(repeat)()
      config.check_read()
    # Single settings themselves must be read.
    found = mistake(
      [whole], [layer, 'toy.Deep.depth = 3', 'toy.train.seed = 2']
    )
    assert 'nothing reads toy.train.seed' in found


def test_names_in_experiments_are_checked(shipped):
  path = shipped / 'experiments/table.gin'
  text = path.read_text().replace('13', '%gin.REQUIRED')
  path.write_text(f'{text}WIDHT = 5\n')
  found = mistake(['experiments/table'], ['WIDTH = 3'])
  assert 'nothing reads WIDHT' in found


def test_wrong_files():
  for files, parts in (
    (['arch/windw', *USUAL[1:]], ("'arch/windw'", 'nearest is arch/window')),
    (['window', *USUAL[1:]], ("'window'", '(perhaps arch/window)')),
    (['arch/window', 'task/copy'], ('size/', 'small, tiny')),
    ([*USUAL, 'size/small'], ('size/tiny.gin', 'size/small.gin', '2 files')),
    ([*USUAL, '~nobody/x'], ("'~nobody/x'",)),
    (
      ['experiments/table', 'experiments/other'],
      ('table.gin and experiments/other.gin are 2 experiments',),
    ),
  ):
    found = mistake(files)
    assert all(part in found for part in parts), found


@pytest.mark.parametrize(
  ('lines', 'parts'),
  [
    ("include 'arch/windoe.gin'", (':3', 'windoe', 'nearest is arch/window')),
    ("include 'own.gin'", (':3', 'includes it again')),
    ('toy.Layer.places = (1, %WIDHT)', (':3', '(1, %WIDHT)', 'is WIDTH')),
    ('WIDTH = %DOUBLE\nDOUBLE = %WIDTH', ('WIDTH -> DOUBLE -> WIDTH',)),
    ('TOP = %gin.REQUIRED\ntoy.Layer.limit = %TOP', (':3', "'TOP = ...'")),
    ('from meliad_rec import confg', (':3', 'confg', 'nearest is config')),
    ('import twice', (':3', 'ValueError: on purpose')),
    ('toys.Layer.width = 3', (':3', "'toys'", 'nearest is toy')),
    ('toy.repeat.layer = @toy.Layr()', (':3', "'Layr'", 'nearest is Layer')),
    ('toy.size.x = 1', (':3', 'toy.size is an int')),
    ('toy.Layer:\n  widht = 3', (':4', "'widht'", 'nearest is width')),
    ('toy.Layer.kind = single', (':3', "Write 'single'", '@single')),
    ('WIDTH = 1 2', (':3', 'Expected newline')),
    ('WIDTH = -%SLOTS', (':3', '"-" can only precede a number')),
    ('SLOTS = (\n  -@toy.train(), 2)', (':4', '"-" can only precede')),
    ("SLOTS = {['a']: 3}", (':3', 'a key of a dict must be a number')),
    ('toy.Layer:\nwidth = 3', (':4', 'Expected indentation')),
    ('WIDTH = 3\nSLOTS = 4\nWIDTH = 5', (':5', 'WIDTH', ':3')),
    ('toy.train.steps = 3', (':3', 'nothing reads toy.train.steps')),
  ],
)
def test_mistakes_in_a_file(lines, parts, tmp_path, monkeypatch):
  (tmp_path / 'twice.py').write_text("raise ValueError('on purpose')")
  monkeypatch.syspath_prepend(tmp_path)
  found = mistake([*USUAL, write(f'{HEAD}import toy\n{lines}\n')])
  assert all(part in found for part in parts), found


def test_mistakes_in_imports():
  found = mistake([*USUAL, write('import toy\n')])
  assert 'own.gin:1' in found and 'dynamic_registration' in found
  # A name that means two modules.
  files = [*USUAL, write(f'{HEAD}import json as toy\n')]
  found = mistake(files, ['toy.Layer.rate = 1.0'])
  assert "'toy' in toy.Layer means several modules" in found


@pytest.mark.parametrize(
  ('param', 'parts'),
  [
    ('WIDTH 3', ('no "="',)),
    ('WIDHT = 3', ('nothing reads WIDHT', 'nearest is WIDTH')),
    # Any module of the package, by its full name.
    ('meliad_rec.config.files.names.kind = "x"', ('reads files.names.kind',)),
    ('meliad_rec.config.file.names.kind = 3', ("'file' (nearest is files)",)),
  ],
)
def test_mistakes_in_a_single_binding(param, parts):
  found = mistake(params=[param])
  assert f'--gin_param {param!r}' in found
  assert all(part in found for part in parts), found


@pytest.mark.parametrize(
  ('binding', 'message'),
  [
    ("Layer.width = '3'", 'an int, not a str'),
    ('Layer.width = True', 'an int, not a bool'),
    ('Layer.rate = None', 'a float, not None'),
    ("Layer.kind = 'twin'", "'dual' or 'single'"),
    ("Layer.places = (1, '2')", 'a tuple[int, ...]'),
    ('Layer.limit = 1.5', 'an int or None, not a float'),
    ("Layer.gate = 'sigmoid'", '(@name), not a str'),
    ('Layer.width = @toy.repeat', 'an int'),
    ('repeat.layer = @toy.Layer', 'a Layer. Write @toy.Layer()'),
    ('Layer.gate = @toy.repeat()', 'Write @toy.repeat'),
  ],
)
def test_ill_typed_value(binding, message):
  text = mistake(params=[f'toy.{binding}'])
  assert text.startswith(f'--gin_param {f"toy.{binding}"!r}: toy.')
  assert message in text


def test_ill_typed_macro_names_both_places():
  found = mistake(params=["WIDTH = '7'"])
  parts = 'window.gin:4', 'Layer.width = %WIDTH', "'7'", 'an int, not a str'
  assert all(part in found for part in parts), found


@pytest.mark.parametrize('value', ['/a/path', '"a', '“a”'])
def test_a_string_without_quotes(value):
  found = mistake(params=[f'WIDTH = {value}'])
  assert '(a string needs quotes), in "WIDTH = ' in found, found


@pytest.mark.parametrize('value', ['1' * 30, f'-{2**63}', f'({2**63},)'])
def test_a_number_that_no_array_holds(value):
  found = mistake(params=[f'WIDTH = {value}'])
  assert 'a number must be below 2**63, in "WIDTH = ' in found, found
  config.parse(USUAL, [f'WIDTH = {2**63 - 1}'])


def test_of_macros_in_a_row_the_one_with_the_value_is_named():
  found = mistake(params=['WIDTH = %SIZE', "SIZE = '7'"])
  assert found.endswith('not a str. Set SIZE to an int.'), found


def test_binding_in_another_scope_is_unread():
  config.parse(USUAL, ['late/toy.Layer.rate = 1', 'late/toy.train.seed = 2'])
  config.build(repeat)()
  with pytest.raises(config.ConfigError, match='nothing reads late/toy.Layer'):
    config.check_read()


def test_only_what_the_package_raises_is_shown_as_a_sentence():
  config.parse([], [], kinds=())
  for function, given, name in (
    (repeat, {'count': 2}, 'repeat.layer'),
    (Layer, {}, 'config_test.Layer.wid'),
  ):
    with pytest.raises(config.ConfigError, match=name) as info:
      config.build(function)(**given)
    assert config.sentence(info.value) == str(info.value)
  with pytest.raises(ValueError, match='literal') as defect:
    int('x')
  assert config.sentence(defect.value) is None


def test_differences_of_two_configurations_without_importing_anything():
  before = """
    from __gin__ import dynamic_registration
    from no_such import module
    STEPS = 40
    SAMPLE = None
    module.Thing.size = 3
    a/module.Thing.size = 5
  """
  after = before.replace('40', '60').replace('size = 5', 'size = (5, 6)')
  after = after.replace('SAMPLE = None', 'LOG_EVERY = %STEPS')
  assert config.differences(before, before) == []
  assert config.differences(before, after) == [
    'LOG_EVERY was not set and is %STEPS',
    'SAMPLE was None and is not set',
    'STEPS was 40 and is 60',
    'a/module.Thing.size was 5 and is (5, 6)',
  ]


def test_settings_of_newer_versions_are_no_differences():
  before = f'{HEAD}from meliad_rec.layers import layer_config\n'
  before += 'from meliad_rec.layers import positions\n'
  before += 'from meliad_rec.models import embedding\n'
  after = before + 'a/layer_config.LayerConfig.cross = False\n'
  after += "positions.T5Bias.start = 'alibi'\n"
  after += 'embedding.TiedEmbedding.ends = ()\n'
  assert config.differences(before, after) == []
