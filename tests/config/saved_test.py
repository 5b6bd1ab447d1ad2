"""What a saved configuration builds, and what it may not."""

import jax
import pytest

from meliad_rec.config import config
from meliad_rec.config import files
from meliad_rec.config.saved import DATA
from meliad_rec.config.saved import MODEL
from meliad_rec.config.saved import SavedConfig
from meliad_rec.layers.gates import LSTMGate
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.training.experiment import Experiment

HEAD = """from __gin__ import dynamic_registration
from meliad_rec.archs import stack
from meliad_rec.data import store
from meliad_rec.layers import gates
from meliad_rec.models import model
from meliad_rec.training import experiment
"""


def shapes(model):
  made = jax.eval_shape(lambda: initialize(model, jax.random.key(0), 1, 12))
  return jax.tree.map(lambda a: a.shape, made)


def twice(gin_files, kinds=files.KINDS):
  """A model by gin, and from the operative configuration, of equal shapes."""
  config.parse(gin_files, [], kinds)
  model = config.build(Model)(vocab=9)
  expected = shapes(model)
  saved = SavedConfig(config.operative(), 'config.gin')
  config.reset()
  again = saved.build(Model, {'vocab': 9}, MODEL)
  assert shapes(again) == expected
  return model, again


@pytest.mark.parametrize('arch', files.names('arch'))
def test_it_builds_what_gin_builds(arch):
  """Every architecture that is shipped, from its operative configuration."""
  options = ['options/position/rope']
  recurs = arch in ('block_recurrent', 'block_feedback')
  if recurs:
    options.append('options/recurrent/clear_state')
  if arch == 'block_recurrent':
    options.append('options/recurrent/lstm_dual')
  gin_files = [f'arch/{arch}', 'size/test', *options]
  model, again = twice(gin_files, ('arch', 'size'))
  assert again.clear_state == recurs
  assert again.cell.block_length == model.cell.block_length


def test_public_names_are_those_of_the_modules(tmp_path):
  text = (files.root() / 'arch/window.gin').read_text()
  text = text.replace(
    'from meliad_rec.models import model', 'import meliad_rec'
  )
  own = tmp_path / 'arch/mine.gin'
  own.parent.mkdir()
  own.write_text(text.replace('model.Model', 'meliad_rec.Model'))
  twice([str(own), 'size/test'], ('arch', 'size'))


@pytest.mark.parametrize(
  ('arch', 'task', 'options'),
  [
    ('latent_bottleneck', 'listops', ['pool/slots']),
    ('window', 'logical_inference', ['pool/first', 'layer/final_norm_none']),
  ],
)
def test_heads_and_their_parts_are_built(arch, task, options):
  options = [f'options/{option}' for option in options]
  model, again = twice([f'arch/{arch}', 'size/test', f'task/{task}', *options])
  assert again.head == model.head is not None


def test_nothing_but_what_is_asked_for_is_imported():
  text = f'{HEAD}import no_such_module\n'
  text += 'experiment.Experiment.data = @no_such_module.Data()\n'
  text += 'experiment.Experiment.batch = %BATCH\nBATCH = 7\n'
  saved = SavedConfig(text, 'config.gin')
  assert saved.argument(Experiment, 'batch', DATA) == 7
  with pytest.raises(ValueError, match='calls no_such_module.Data, which is'):
    saved.argument(Experiment, 'data', DATA)
  trusting = SavedConfig(text, 'config.gin', trusted=True)
  with pytest.raises(ValueError, match='no module no_such_module.*PYTHONPATH'):
    trusting.argument(Experiment, 'data', DATA)


@pytest.mark.parametrize(
  ('module', 'told'),
  [
    ('class Data(:', 'cannot be imported .SyntaxError'),
    ('1 / 0', 'cannot be imported .ZeroDivisionError'),
    ('import no_such_package', "No module named 'no_such_package'"),
    ('class Daten: pass', "has no 'Data' .nearest is Daten"),
  ],
)
def test_a_broken_module_is_a_sentence(module, told, tmp_path, monkeypatch):
  name = f'users_{abs(hash(module))}'
  (tmp_path / f'{name}.py').write_text(module)
  monkeypatch.syspath_prepend(tmp_path)
  text = f'{HEAD}import {name}\nexperiment.Experiment.data = @{name}.Data()\n'
  saved = SavedConfig(text, 'config.gin', trusted=True)
  with pytest.raises(ValueError, match=told):
    saved.argument(Experiment, 'data', DATA)


def test_a_class_method_is_found(tmp_path, monkeypatch):
  module = 'class Box:\n  @classmethod\n  def big(cls, n=1):\n    return n\n'
  (tmp_path / 'users_boxes.py').write_text(module)
  monkeypatch.syspath_prepend(tmp_path)
  text = f'{HEAD}import users_boxes\nusers_boxes.Box.big.n = 7\n'
  text += 'experiment.Experiment.data = @users_boxes.Box.big()\n'
  saved = SavedConfig(text, 'config.gin', trusted=True)
  assert saved.argument(Experiment, 'data', DATA) == 7
  with pytest.raises(ValueError, match='calls users_boxes.Box.big, which is'):
    SavedConfig(text, 'config.gin').argument(Experiment, 'data', DATA)


def test_scopes_are_entered():
  text = f'{HEAD}experiment.Experiment.model = @a/gates.LSTMGate\n'
  text += "gates.LSTMGate.dtype = 'x'\na/gates.LSTMGate.name = 'n'\n"
  text += "b/gates.LSTMGate.dtype = 'y'\n"
  made = SavedConfig(text, 'c').argument(Experiment, 'model', MODEL)
  assert made() == LSTMGate(dtype='x', name='n')


@pytest.mark.parametrize(
  ('value', 'more'),
  [
    ('%A', 'A = %A'),
    ('%A', "A = [1, {'b': %B}]\nB = (%A,)"),
    ('@stack.layers()', 'stack.layers.layer = @stack.layers()'),
    ('@a/stack.layers()', 'a/stack.layers.layer = @a/stack.layers()'),
  ],
)
def test_a_name_set_to_itself_is_a_sentence(value, more):
  text = f'{HEAD}model.Model.cell = {value}\n{more}\n'
  text += f'experiment.Experiment.model = {value}\n'
  saved = SavedConfig(text, 'config.gin')
  with pytest.raises(ValueError, match='config.gin:.* depends on itself'):
    saved.build(Model, {}, MODEL)
  with pytest.raises(ValueError, match='config.gin:.* depends on itself'):
    saved.argument(Experiment, 'model', MODEL)


@pytest.mark.parametrize(
  ('value', 'told'),
  [
    ('@os.system()', 'calls os.system'),
    (
      '@stack.functools.partial()',
      'stack.functools.partial, which does not exist here',
    ),
    ('@stack.Callable()', 'not a part of meliad_rec. Restore'),
    ('@store.shutil.rmtree()', 'calls meliad_rec.data.store.shutil.rmtree'),
    ('@store.write()', 'calls meliad_rec.data.store.write'),
    ('@stack.no_such()', 'stack.no_such, which does not exist here'),
    ('%NOWHERE', 'nothing sets %NOWHERE'),
    ('1\nmodel.Model.celll = 2', "no parameter 'celll' .nearest is"),
    ("1\ninclude 'other.gin'", 'includes other.gin'),
  ],
)
def test_refused(value, told):
  text = f'{HEAD}import os\nmodel.Model.cell = {value}\n'
  with pytest.raises(ValueError, match=told):
    SavedConfig(text, 'config.gin').build(Model, {}, MODEL)
