"""The layer: pre-norm attention, then a pre-norm MLP, each with a residual."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers import activations
from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.layer import Layer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.layers.remat import remat
from meliad_rec.models.cell import Cell
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import F
from tests.architectures import H
from tests.architectures import K


@pytest.mark.parametrize('has_memory', [False, True])
def test_layer_is_two_residual_blocks(has_memory):
  T, S = 6, 4
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  x, slots = draw(B, T, D), draw(B, S, D)
  layer = Layer(config(), has_memory)

  def forward(m):
    n = m.pre_norm(x)
    past = m.attention.config.empty_past(B).append(m.kv(n, np.ones((B, T))))
    memory = m.attention.kv(slots) if has_memory else None
    heads = [m.attention.attend_window(n, past)]
    if has_memory:
      heads.append(m.attention.attend_memory(n, memory))
    return m(x, n, past, memory), heads

  run = jax.jit(lambda r: layer.init_with_output(r, method=forward))
  (y, heads), params = run(jax.random.key(0))
  p = params['params']
  kernel = np.reshape(p['attention']['output']['linear']['kernel'], (-1, D))
  assert kernel.shape == ((1 + has_memory) * H * K, D)
  x = x + np.concatenate(heads, -1) @ kernel
  n = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  hidden = np.maximum(n @ p['mlp']['hidden']['kernel'], 0)
  x = x + hidden @ p['mlp']['output']['linear']['kernel']
  np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-4)


def test_three_dropouts_change_what_they_should():
  """After the first norm, on probabilities, and after the MLP."""
  T = 6
  x = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
  layer = Layer(config(dropout=0.5))
  mask = np.ones((B, T), bool)

  def parts(m):
    n = m.pre_norm(x)
    past = m.attention.config.empty_past(B).append(m.kv(n, mask))
    heads = m.attention.attend_window(n, past)
    between = m.attention.project(x, heads)
    return n, between - x, m.output(x, heads) - between

  params = jax.jit(lambda r: layer.init(r, method=parts))(jax.random.key(0))
  n, attended, added = layer.apply(
    params, method=parts, rngs={'dropout': jax.random.key(1)}
  )
  share = lambda a: float((np.asarray(a)[0, 1:] == 0).mean())
  assert 0.3 < share(n) < 0.7
  assert share(attended) == 0  # The output of attention is not dropped.
  assert 0.3 < share(added) < 0.7


USUAL = {'normalize_qk': False, 'position': positions.NoPosition}
BLOCK = USUAL | {
  'norm': norms.LayerNorm,
  'activation': activations.gelu,
  'mlp_bias': True,
  'depth': 8,
}


def test_the_block_of_the_feedback_transformer():
  """Norms, biases, activation and initial weights follow the config."""
  x = np.random.default_rng(0).normal(size=(B, 6, D)).astype(np.float32)

  def parts(m):
    n = m.pre_norm(x)
    past = m.config.empty_past(B).append(m.kv(n, np.ones(x.shape[:2], bool)))
    between = m.attention.project(x, m.attention.attend_window(n, past))
    return between, m(x, n, past)

  def first(config):
    init = lambda rng: Layer(config).init(rng, method=parts)
    return jax.jit(init)(jax.random.key(0))['params']

  params, plain = first(config(**BLOCK)), first(config(**USUAL))
  for part in 'attention', 'mlp':
    a, b = (p[part]['output']['linear']['kernel'] for p in (params, plain))
    np.testing.assert_allclose(a, b / 4, rtol=1e-5)
  np.testing.assert_array_equal(
    params['mlp']['hidden']['kernel'], plain['mlp']['hidden']['kernel']
  )
  assert sum(a.size for a in jax.tree.leaves(params)) == (
    4 * D * H * K + 2 * D * F + F + D + 2 * 2 * D
  )
  params = jax.tree.map(
    lambda a: np.random.default_rng(a.size).normal(size=a.shape), params
  )
  x_mid, y = Layer(config(**BLOCK)).apply({'params': params}, method=parts)
  mlp, norm = params['mlp'], params['mlp_norm']
  n = x_mid - x_mid.mean(-1, keepdims=True)
  n = n / np.sqrt((n**2).mean(-1, keepdims=True) + 1e-5)
  n = n * norm['scale'] + norm['bias']
  units = activations.gelu(n @ mlp['hidden']['kernel'] + mlp['hidden']['bias'])
  linear = mlp['output']['linear']
  expected = x_mid + units @ linear['kernel'] + linear['bias']
  np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)


def test_locked_dropout_is_the_same_for_one_token_and_for_many():
  """Cells that read token by token, all with one rng, need this."""
  T, settings = 64, config(dropout=0.4, locked_dropout=True, window=64)
  layer = Layer(settings)
  x = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)

  def read(m, first, x, kv):
    """Tokens from `first` on, of which kv holds those before."""
    n = m.pre_norm(x)
    past = jax.tree.map(lambda a: a[:, first : first + T], kv)
    past = past.append(m.kv(n, np.ones(x.shape[:2], bool)))
    return past, m(x, n, past)

  whole = 0, x, settings.empty_past(B)
  params = layer.init(jax.random.key(0), *whole, method=read)
  apply = lambda *args: layer.apply(
    params, *args, method=read, rngs={'dropout': jax.random.key(2)}
  )
  kv, many = apply(*whole)
  for t in 0, 1, 40, 63:
    _, one = apply(t, x[:, t : t + 1], kv)
    np.testing.assert_allclose(one[:, 0], many[:, t], rtol=1e-4, atol=1e-5)
  _, plain = layer.apply(params, *whole, method=read)
  assert np.abs(plain - many).max() > 0.1


class Two(Cell):
  """State: none. Two layers that share a position module, or not."""

  config: LayerConfig
  shared: bool

  def setup(self):
    self.position = self.config.position(self.config.num_heads)
    given = self.position if self.shared else None
    self.layers = [Layer(self.config, position=given) for _ in range(2)]

  def __call__(self, state, block):
    x_BTD = block.x
    for layer in self.layers:
      n_BTD = layer.pre_norm(x_BTD)
      past = self.config.empty_past(len(x_BTD))
      past = past.append(layer.kv(n_BTD, block.mask))
      x_BTD = layer(x_BTD, n_BTD, past)
    return state, x_BTD


X = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)


class Twice(nn.Module):
  """Two layers as a function of the module."""

  policy: str

  @nn.compact
  def __call__(self, x):
    return remat(Twice.body, self.policy)(self, x)

  def body(self, x):
    hidden = jnp.tanh(nn.Dense(4, name='hidden')(x))
    return nn.Dense(2, name='output')(hidden)


def gradient(policy):
  module = Twice(policy)
  params = Twice('none').init(jax.random.key(0), X)
  return jax.grad(lambda p: jnp.sum(jnp.sin(module.apply(p, X)))), params


@pytest.mark.parametrize(
  'policy, tanhs',
  [
    ('none', 1),
    ('dots', 2),
    ('projections', 2),
    ('attention', 2),
    ('sublayers', 2),
    ('full', 2),
  ],
)
def test_values_stay_and_what_is_not_kept_is_computed_again(policy, tanhs):
  gradient_of, params = gradient(policy)
  expected, _ = gradient('none')
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.jit(gradient_of)(params),
    jax.jit(expected)(params),
  )
  assert str(jax.make_jaxpr(gradient_of)(params)).count('= tanh') == tanhs


def test_unknown_remat_is_an_error():
  with pytest.raises(ValueError, match="remat .*'all'"):
    remat(lambda c: c, 'all')
