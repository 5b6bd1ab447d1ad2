"""Functions of jax.nn and optax in gin, and the wrappers that they replace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.latent_bottleneck import LatentBottleneck
from meliad_rec.config import config
from meliad_rec.config.saved import MODEL
from meliad_rec.config.saved import SavedConfig
from meliad_rec.layers import layer_config
from meliad_rec.models.model import Model
from meliad_rec.training import optimizer

ACTIVATION = 'layer_config.LayerConfig.activation'
X = jnp.linspace(-2, 2, 9)


def layer_of(model):
  return model.cell.cells[0].config


@pytest.mark.parametrize(
  ('params', 'expected'),
  [
    ([f'{ACTIVATION} = @jax.nn.silu'], jax.nn.silu),
    ([f'{ACTIVATION} = @jax.nn.relu'], jax.nn.relu),
    ([f'{ACTIVATION} = @jax.nn.tanh'], jnp.tanh),
    (
      [f'{ACTIVATION} = @jax.nn.elu', 'jax.nn.elu.alpha = 0.5'],
      lambda x: jax.nn.elu(x, 0.5),
    ),
  ],
)
def test_an_activation_of_jax_is_bound_and_opened_again(params, expected):
  config.parse(['arch/window', 'size/test'], params, kinds=('arch', 'size'))
  model = config.build(Model)(vocab=9)
  np.testing.assert_array_equal(
    layer_of(model).activation(X), jax.jit(expected)(X)
  )
  config.check_read()
  saved = SavedConfig(config.operative(), 'config.gin')
  again = saved.build(Model, {'vocab': 9}, MODEL)
  np.testing.assert_array_equal(
    layer_of(again).activation(X), layer_of(model).activation(X)
  )


def test_other_functions_of_jax_are_not_called_for_a_saved_run():
  text = (
    'from __gin__ import dynamic_registration\nimport jax\n'
    'from meliad_rec.models import model\n'
    'model.Model.cell = @jax.device_get()\n'
  )
  saved = SavedConfig(text, 'config.gin')
  with pytest.raises(ValueError, match='jax.device_get'):
    saved.build(Model, {'vocab': 9}, MODEL)


def test_rules_and_schedules_of_optax():
  config.parse(
    [],
    [
      'meliad_rec.training.optimizer.chain.rule = @optax.lion',
      'optax.lion.b1 = 0.8',
      'meliad_rec.training.optimizer.chain.schedule = '
      '@optax.warmup_cosine_decay_schedule()',
      'optax.warmup_cosine_decay_schedule.init_value = 0.0',
      'optax.warmup_cosine_decay_schedule.peak_value = 0.5',
      'optax.warmup_cosine_decay_schedule.warmup_steps = 4',
      'optax.warmup_cosine_decay_schedule.decay_steps = 10',
    ],
    kinds=(),
  )
  made = config.build(optimizer.chain)()
  config.check_read()
  rates = [float(made.learning_rate(step)) for step in (0, 2, 4, 10)]
  np.testing.assert_allclose(rates, [0, 0.25, 0.5, 0], atol=1e-6)
  weights = {'w': jnp.ones(3)}
  made.update(weights, made.init(weights), weights, jnp.float32(5))


def test_a_wrong_name_is_an_error_with_the_nearest():
  with pytest.raises(ValueError, match="jax.nn has no 'sillu'.*silu"):
    config.parse(
      ['arch/window', 'size/test'],
      [f'{ACTIVATION} = @jax.nn.sillu'],
      kinds=('arch', 'size'),
    )


def test_wrappers_of_older_runs_are_what_they_were(tmp_path):
  """Both by a saved configuration and by a gin file."""
  for name, expected in (
    ('relu', jax.nn.relu),
    ('gelu', lambda x: jax.nn.gelu(x, approximate=False)),
  ):
    text = (
      'from __gin__ import dynamic_registration\n'
      'from meliad_rec import activations\n'
      'from meliad_rec.layers import layer_config\n'
      f'{ACTIVATION} = @activations.{name}\n'
      'layer_config.LayerConfig.d_model = 6\n'
      'layer_config.LayerConfig.window = 8\n'
      'layer_config.LayerConfig.num_heads = 2\n'
      'layer_config.LayerConfig.head_dim = 3\n'
      'layer_config.LayerConfig.mlp_dim = 4\n'
    )
    saved = SavedConfig(text, 'config.gin')
    made = saved.build(layer_config.LayerConfig, {}, MODEL)
    np.testing.assert_array_equal(made.activation(X), jax.jit(expected)(X))
    (tmp_path / 'old.gin').write_text(text)
    config.parse([str(tmp_path / 'old.gin')], [], kinds=())
    made = config.build(layer_config.LayerConfig)()
    np.testing.assert_array_equal(made.activation(X), jax.jit(expected)(X))
    changes = config.differences(text, config.operative())
    assert not any('activation' in change for change in changes)


def test_initial_zeros_of_older_runs_are_those_of_jax():
  text = (
    'from __gin__ import dynamic_registration\n'
    'from meliad_rec.archs import latent_bottleneck\n'
    'latent_bottleneck.LatentBottleneck.slots_init = @latent_bottleneck.zeros\n'
  )
  saved = SavedConfig(text, 'config.gin')
  made = saved.argument(LatentBottleneck, 'slots_init', MODEL)
  np.testing.assert_array_equal(
    made(jax.random.key(0), (2, 3)), jnp.zeros((2, 3))
  )
