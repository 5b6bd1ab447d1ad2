"""What is bound arrives, and no mistake is silent."""

from collections.abc import Callable
import itertools
import os
import sys
import types
from typing import Literal

from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

from meliad_rec.config import config
from meliad_rec.config import files as gin_files


class Layer(nn.Module):
  width: int
  rate: float = 0.5
  kind: Literal['dual', 'single'] = 'dual'
  places: 'tuple[int, ...]' = ()
  limit: 'int | None' = None
  gate: Callable = nn.sigmoid

  @nn.compact
  def __call__(self, x_BD):
    hidden_BF = nn.Dense(self.width, name='inner')(x_BD)
    return nn.Dense(x_BD.shape[-1], name='outer')(self.gate(hidden_BF))


def repeat(layer: Layer, count: int) -> tuple:
  return (layer,) * count


def train(steps: int, model: Callable = Layer, seed: int = None):  # noqa: RUF013
  return steps, model, seed


FILES = {
  'arch/window.gin': """
from __gin__ import dynamic_registration
import toy
toy.Layer:
  width = %WIDTH
toy.repeat.layer = @toy.Layer()
""",
  'arch/lstm.gin': "include 'gin/arch/window.gin'\n",
  'size/tiny.gin': 'WIDTH = 7\nSLOTS = 5\n',
  'size/small.gin': 'WIDTH = 11\nSLOTS = 5\n',
  'task/copy.gin': """
from __gin__ import dynamic_registration
import toy
toy.repeat.count = 3
""",
  'options/single.gin': """
from __gin__ import dynamic_registration
import toy
toy.Layer.kind = 'single'
""",
  'options/wide.gin': 'WIDTH = 23\n',
  'options/wider.gin': 'WIDTH = 29\n',
  'options/wider_and_slots.gin': 'WIDTH = 29\nSLOTS = 6\n',
  'experiments/table.gin': """
include 'arch/window'
include 'size/tiny'
include 'task/copy'
WIDTH = 13
""",
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


def own(*lines):
  """The mistake in a file of one's own, which begins with the two imports."""
  text = 'from __gin__ import dynamic_registration\nimport toy\n'
  return mistake([*USUAL, write(text + '\n'.join(lines) + '\n')])


@pytest.mark.parametrize(
  'name',
  ['arch/window', 'arch/window.gin', 'gin/arch/window', 'gin/arch/window.gin'],
)
def test_prefix_and_ending_may_be_left_out(name):
  config.parse([name, 'size/tiny', 'task/copy'], [])
  layers = config.build(repeat)()
  assert [layer.width for layer in layers] == [7, 7, 7]


def test_later_files_and_then_single_bindings_win():
  config.parse([*USUAL, write('WIDTH = 17\n')], [])
  assert config.build(repeat)()[0].width == 17
  config.parse([*USUAL, 'own'], ['WIDTH = 19', 'toy.repeat.count = 2'])
  assert [layer.width for layer in config.build(repeat)()] == [19, 19]
  config.check_read()


@pytest.mark.parametrize(
  'files', itertools.permutations([*USUAL, 'options/wide'])
)
def test_the_order_of_kinds_is_fixed(files):
  config.parse(list(files), [])
  assert config.build(repeat)()[0].width == 23


def test_an_option_that_others_undo_whole_is_refused():
  assert mistake([*USUAL, 'options/wide', 'options/wider']) == (
    '--gin_file=options/wide has no effect: what it sets, WIDTH, is set anew by'
    ' options/wider.gin:1; leave out one of the two.'
  )
  wins = ['options/wider_and_slots', 'options/wide'], ['options/wider'] * 2
  for options, width in zip(wins, (23, 29), strict=True):
    config.parse([*USUAL, *options], [])
    assert config.build(repeat)()[0].width == width


def test_files_of_no_kind_win_the_last_of_them():
  narrow = write('WIDTH = 3\n', 'narrow.gin')
  for place in range(3):
    files = ['options/wide', 'experiments/table']
    files.insert(place, narrow)
    config.parse(files, [])
    assert config.build(repeat)()[0].width == 3
  config.parse([write('WIDTH = 5\n', 'wider.gin'), *files], [])
  assert config.build(repeat)()[0].width == 3


def test_an_own_file_that_has_all_kinds_is_corrected_by_options():
  included = ''.join(f"include '{name}.gin'\n" for name in USUAL)
  whole = write(f'{included}WIDTH = 3\n', 'whole.gin')
  for files in ['options/wide', whole], [whole, 'options/wide']:
    config.parse(files, [])
    assert config.build(repeat)()[0].width == 23


def test_an_experiment_includes_all_kinds():
  config.parse(['experiments/table'], [])
  assert config.build(repeat)()[0].width == 13
  config.check_read()


def test_an_included_file_of_the_same_kind_is_part_of_the_one_given():
  config.parse(['arch/lstm', 'size/tiny', 'task/copy'], [])
  assert len(config.build(repeat)()) == 3


@pytest.mark.parametrize('given', [Layer, repeat])
def test_what_no_file_names_can_be_built(given):
  config.parse([], [], kinds=())
  assert config.build(train)(2) == (2, Layer, None)
  assert config.build(train)(2, given) == (2, given, None)
  assert 'train.seed = None' in config.operative()


def test_parsing_again_forgets_and_accepts_classes_defined_again():
  config.parse(USUAL, ['toy.Layer.rate = 1'])
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
  config.parse([*USUAL, 'options/single'], ['toy.Layer.places = (1, -2)'])
  first = config.build(repeat)()
  config.check_read()
  text = config.operative()
  assert 'SLOTS' not in text
  config.parse([write(text, 'run/config.gin')], [])
  assert config.build(repeat)() == first
  config.check_read()
  assert config.operative() == text


def test_a_bound_size_reaches_the_parameters_with_remat_and_scan_on():
  class Lifted(nn.Module):
    layer: nn.Module
    passes: int

    @nn.compact
    def __call__(self, x_BD):
      body = nn.remat(lambda layer, x_BD, _: (layer(x_BD), None))
      lifted = nn.scan(
        body,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        length=self.passes,
      )
      return lifted(self.layer, x_BD, None)[0]

  config.parse(USUAL, [])
  model = Lifted(config.build(Layer)(), passes=4)
  variables = model.init(jax.random.key(0), jnp.ones((2, 3)))
  kernel_LDF = variables['params']['layer']['inner']['kernel']
  assert kernel_LDF.shape == (4, 3, 7)


def test_sizes_of_another_architecture_may_go_unread():
  config.parse(USUAL, [])
  config.build(repeat)()
  config.check_read()  # SLOTS of size/tiny


def test_ints_are_floats_and_defaults_always_fit():
  config.parse(
    USUAL,
    ['toy.Layer.rate = 1', 'toy.train.seed = None', 'toy.Layer.limit = 4'],
  )
  assert config.build(repeat)()[0].rate == 1


# The mistakes: place, given, needed, nearest.


def test_missing_file(shipped):
  assert mistake(['arch/windw', 'size/tiny', 'task/copy']) == (
    "--gin_file=arch/windw names the gin file 'arch/windw', which is neither"
    f' among the shipped ones in {shipped} nor a path from {os.getcwd()}'
    ' (nearest is arch/window).'
  )


def test_missing_include(shipped):
  message = own("include 'arch/windoe.gin'")
  assert message.startswith(
    "own.gin:3 names the gin file 'arch/windoe.gin', which is neither among"
  )
  assert message.endswith('(nearest is arch/window).')


def test_a_file_that_includes_itself():
  assert own("include 'own.gin'") == (
    'own.gin:3 includes own.gin, which includes it again.'
  )


def test_no_file_of_a_kind():
  assert mistake(['arch/window', 'task/copy']) == (
    'No file of size/ was given, and a run takes exactly one: add'
    ' --gin_file=size/NAME, where NAME is one of small, tiny, or a file of your'
    ' own in a folder called size.'
  )


def test_two_files_of_a_kind():
  assert mistake([*USUAL, 'size/small']) == (
    'size/tiny.gin and size/small.gin are 2 files of size/, and a run takes'
    ' exactly one: leave out the others.'
  )


def test_a_file_of_ones_own_counts_by_its_folder():
  mine = write('WIDTH = 3\n', 'mine/size/mine.gin')
  config.parse(['arch/window', mine, 'task/copy'], [])
  assert config.build(repeat)()[0].width == 3


def test_undefined_macro():
  assert own('toy.Layer.places = (1, %WIDHT)') == (
    'own.gin:3: toy.Layer.places = (1, %WIDHT), but nothing sets WIDHT (nearest'
    ' is WIDTH).'
  )


def test_macro_set_to_itself():
  assert own('WIDTH = %DOUBLE', 'DOUBLE = %WIDTH').endswith('is set to itself.')


def test_required_macro():
  assert own('toy.Layer.limit = %LIMIT', 'LIMIT = %gin.REQUIRED') == (
    'own.gin:4: LIMIT must be set by another file or by'
    " --gin_param='LIMIT = ...'."
  )


def test_misspelt_module():
  assert own('from meliad_rec import confg') == (
    'own.gin:3: there is no module meliad_rec.confg (nearest is config).'
  )


def test_module_that_fails_while_imported(tmp_path, monkeypatch):
  (tmp_path / 'twice.py').write_text(
    'import gin\n'
    '@gin.configurable\ndef same(): pass\n'
    '@gin.configurable\ndef same(): pass\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  assert own('import twice') == (
    'own.gin:3: twice cannot be imported, ValueError: A different configurable'
    " matching 'twice.same' already exists."
  )


def test_name_that_is_not_imported():
  assert own('toys.Layer.width = 3') == (
    "own.gin:3: nothing imported is called 'toys' in toys.Layer (nearest is"
    ' toy); import it, or in a --gin_param write its full name.'
  )


def test_misspelt_configurable():
  assert own('toy.repeat.layer = @toy.Layr()') == (
    "own.gin:3: toy has no 'Layr' (nearest is Layer)."
  )


def test_binding_of_what_cannot_be_called():
  assert own('toy.size.x = 1') == (
    'own.gin:3: toy.size is an int, and needed is a function or class.'
  )


def test_misspelt_parameter():
  assert own('toy.Layer:', '  widht = 3') == (
    "own.gin:4: toy.Layer has no parameter 'widht' (nearest is width)."
  )


def test_imports_without_dynamic_registration():
  assert mistake([*USUAL, write('import toy\n')]) == (
    'own.gin:1: write "from __gin__ import dynamic_registration" before'
    ' "import toy".'
  )


def test_single_binding_names_modules_of_the_files():
  config.parse(USUAL, ['toy.Layer.kind = "single"'])
  assert config.build(repeat)()[0].kind == 'single'


def test_single_binding_may_name_any_module_of_the_package_in_full():
  assert mistake(
    params=['meliad_rec.config.files.names.kind = "x"']
  ).startswith(
    '--gin_param \'meliad_rec.config.files.names.kind = "x"\': nothing reads'
    ' files.names.kind'
  )
  assert mistake(params=['meliad_rec.config.file.names.kind = "x"']).endswith(
    "meliad_rec.config has no 'file' (nearest is files)."
  )


def test_single_binding_refuses_a_name_that_means_two_modules():
  text = 'from __gin__ import dynamic_registration\nimport json as toy\n'
  message = mistake([*USUAL, write(text)], ['toy.Layer.rate = 1.0'])
  assert "nothing imported is called 'toy' in toy.Layer" in message


def test_single_binding_without_equals_sign():
  assert mistake(params=['WIDTH 3']) == (
    '--gin_param \'WIDTH 3\' has no "="; write NAME = value.'
  )


def test_text_without_quotes():
  assert own('toy.Layer.kind = single') == (
    "own.gin:3: single is no value; write 'single' for a text, %single for a"
    ' macro, @single for a function or class, in "toy.Layer.kind = single".'
  )


@pytest.mark.parametrize(
  ('line', 'reason'),
  [
    ('WIDTH = 1 2', 'not gin, Expected newline'),
    ('WIDTH = [1, 2', 'not gin, '),
    ('WIDTH', "not gin, Couldn't parse statement, expected ':' or '='"),
    ('toy.Layer:\nwidth = 3', 'not gin, Expected indentation.'),
  ],
)
def test_syntax_error(line, reason):
  message = own(line)
  assert message.startswith('own.gin:')
  assert reason in message


def test_a_name_set_twice_in_one_file():
  assert own('WIDTH = 3', 'SLOTS = 4', 'WIDTH = 5') == (
    'own.gin:5 sets WIDTH again, after own.gin:3; keep one of the two.'
  )


@pytest.mark.parametrize(
  ('binding', 'message'),
  [
    ("Layer.width = '3'", 'an int, not a str'),
    ('Layer.width = 3.0', 'an int, not a float'),
    ('Layer.width = True', 'an int, not a bool'),
    ("Layer.rate = '0.1'", 'a float, not a str'),
    ('Layer.rate = None', 'a float, not None'),
    ("Layer.kind = 'twin'", "'dual' or 'single', not a str"),
    ('Layer.kind = 3', "'dual' or 'single', not an int"),
    ('Layer.places = 3', 'a tuple[int, ...], not an int'),
    ("Layer.places = (1, '2')", 'a tuple[int, ...], not a tuple'),
    ('Layer.places = [1]', 'a tuple[int, ...], not a list'),
    ('Layer.limit = 1.5', 'an int or None, not a float'),
    ("Layer.gate = 'sigmoid'", 'a function or class (@name), not a str'),
    ('Layer.width = @toy.repeat', 'an int'),
    ('repeat.layer = @toy.Layer', 'a Layer; write @toy.Layer()'),
    ('Layer.gate = @toy.repeat()', 'a function or class; write @toy.repeat'),
  ],
)
def test_ill_typed_value(binding, message):
  text = mistake(params=[f'toy.{binding}'])
  given = binding.split(' = ')[1]
  assert text.startswith(f'--gin_param {f"toy.{binding}"!r}: toy.')
  assert f' = {given}, and needed is ' in text
  assert message.replace('class;', 'class (@name);') in text


def test_ill_typed_macro_names_both_places():
  assert mistake(params=["WIDTH = '7'"]) == (
    "arch/window.gin:4: toy.Layer.width = %WIDTH, that is '7', and needed is an"
    ' int, not a str.'
  )


def test_unread_macro():
  assert mistake(params=['WIDHT = 3']) == (
    "--gin_param 'WIDHT = 3': nothing reads WIDHT (nearest is WIDTH); correct"
    ' the name, or remove the binding if what was built does not use it.'
  )


def test_unread_binding():
  assert own('toy.train.steps = 3') == (
    'own.gin:3: nothing reads toy.train.steps; correct the name, or remove the'
    ' binding if what was built does not use it.'
  )


def test_binding_in_another_scope_is_unread():
  config.parse(USUAL, ['late/toy.Layer.rate = 1', 'late/toy.train.seed = 2'])
  config.build(repeat)()
  with pytest.raises(config.ConfigError, match='nothing reads late/toy.Layer'):
    config.check_read()


def test_missing_value_is_a_sentence():
  config.parse([], [], kinds=())
  with pytest.raises(TypeError) as info:
    config.build(repeat)(count=2)
  assert config.sentence(info.value) == (
    "repeat needs 'layer', which no gin file and no --gin_param sets; bind"
    ' repeat.layer.'
  )
  with pytest.raises(TypeError) as info:
    config.build(Layer)()
  told = config.sentence(info.value)
  assert told.startswith("config_test.Layer needs 'width', which")
  assert told.endswith('bind config_test.Layer.width.')


def test_only_what_the_package_raises_is_told_as_a_sentence():
  with pytest.raises(ValueError, match='width') as theirs:
    config.parse(USUAL, ['toy.Layer.widht = 3'])
  assert config.sentence(theirs.value) == str(theirs.value)
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
