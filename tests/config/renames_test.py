"""Former names in configurations and checkpoints of older runs."""

from meliad_rec.config.renames import saved_paths
from meliad_rec.config.values import statements

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
"""


def test_configurations_get_current_names():
  *_, layer, scoped, heads, together = statements(FORMER, str)
  assert layer.selector == 'transformer.EncoderLayers'
  assert layer.value.name == 'layer_config.EncoderConfig'
  assert (scoped.scope, scoped.selector, scoped.arg_name) == (
    *('a', 'layer_config.EncoderConfig', 'num_heads'),
  )
  assert (heads.selector, heads.arg_name) == (
    *('layer_config.LayerConfig', 'num_heads'),
  )
  assert together.arg_name == 'global_halt'


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
