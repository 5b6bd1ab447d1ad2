"""The layer: pre-norm attention, then a pre-norm MLP, each with a residual.

Also its norms and activations, and what the backward pass keeps of it.
"""

import dataclasses
import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels import dispatch
from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.layer import Layer
from meliad_rec.layers.layer_config import gelu
from meliad_rec.layers.remat import AUTO
from meliad_rec.layers.remat import remat
from tests import plain_layer
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import F
from tests.architectures import H
from tests.architectures import K
from tests.cells import draw

T = 6
MASK = np.ones((B, T), bool)


@pytest.mark.parametrize('post_norm', [False, True])
@pytest.mark.parametrize('has_memory', [False, True])
def test_layer_is_two_residual_blocks(has_memory, post_norm):
  x, slots = draw(B, T, D), draw(B, 4, D, seed=1)
  layer = Layer(config(post_norm=post_norm), has_memory)

  def forward(m):
    n = m.pre_norm(x)
    past = m.attention.config.empty_past(B).append(m.kv(n, MASK))
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
  norm = lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  before, after = (lambda x: x, norm) if post_norm else (norm, lambda x: x)
  x = after(x + np.concatenate(heads, -1) @ kernel)
  hidden = np.maximum(before(x) @ p['mlp']['hidden']['kernel'], 0)
  x = after(x + hidden @ p['mlp']['output']['linear']['kernel'])
  np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-4)


def test_a_source_is_read_between_attention_and_the_mlp():
  x, source = draw(B, T, D), draw(B, 5, D, seed=1)
  mask_BS = np.arange(5) < np.array([5, 3, 1])[:, None]
  layer = Layer(config(cross=True))

  def forward(m):
    n = m.pre_norm(x)
    past = m.attention.config.empty_past(B).append(m.kv(n, MASK))
    heads = m.attention.attend_window(n, past)
    return m(x, n, past, source_kv=m.source_kv(source, mask_BS)), heads

  run = jax.jit(lambda r: layer.init_with_output(r, method=forward))
  (y, heads), params = run(jax.random.key(0))
  p = params['params']
  linear, norm, unit = plain_layer.linear, plain_layer.norm, plain_layer.unit
  x = x + linear(p['attention']['output']['linear'], heads)
  cross = p['cross_attention']
  n = norm(cross['norm'], x)
  q = unit(plain_layer.heads(cross['query']['heads'], n))
  k = unit(plain_layer.heads(cross['key'], source))
  v = plain_layer.heads(cross['value'], source)
  seen_BTS = np.broadcast_to(mask_BS[:, None], (B, T, 5))
  q = q * cross['query']['scale'][:, None]
  read = plain_layer.attention(q, k, v, seen_BTS)
  x = x + linear(cross['output']['linear'], read)
  mlp = p['mlp']
  hidden = np.maximum(linear(mlp['hidden'], norm(p['mlp_norm'], x)), 0)
  x = x + linear(mlp['output']['linear'], hidden)
  np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-4)


def test_dropout_of_hidden_units_drops_inside_the_mlp():
  """With one hidden unit, the MLP adds nothing, or twice as much."""
  x = draw(B, T, D)
  one = config(mlp_dim=1, activation=lambda h: h)

  def added(m):
    n = m.pre_norm(x)
    past = m.attention.config.empty_past(B).append(m.kv(n, MASK))
    heads = m.attention.attend_window(n, past)
    return m.output(x, heads) - m.attention.project(x, heads)

  params = Layer(one).init(jax.random.key(0), method=added)
  whole = Layer(one).apply(params, method=added)
  dropping = dataclasses.replace(one, hidden_dropout=0.5)
  found = Layer(dropping).apply(
    params, method=added, rngs={'dropout': jax.random.key(1)}
  )
  ratio = np.asarray(found / whole)
  np.testing.assert_allclose(ratio, np.round(ratio / 2) * 2, atol=1e-4)
  assert set(np.unique(np.round(ratio))) == {0, 2}


def test_attention_and_hidden_dropout_may_be_all_that_drops():
  both = config(dropout=0.0, attention_dropout=0.3)
  assert (both.attention_rate, config(dropout=0.3).attention_rate) == (0.3, 0.3)
  locked = config(dropout=0.3, locked_dropout=True)
  assert locked.attention_rate == 0
  assert dataclasses.replace(both, locked_dropout=True).attention_rate == 0.3
  for name in 'attention_dropout', 'hidden_dropout':
    with pytest.raises(ValueError, match=f'LayerConfig.{name}'):
      config(**{name: 1.0})


def test_three_dropouts_change_what_they_should():
  """After the first norm, on probabilities, and after the MLP."""
  x, layer = draw(B, T, D), Layer(config(dropout=0.5))

  def parts(m):
    n = m.pre_norm(x)
    past = m.attention.config.empty_past(B).append(m.kv(n, MASK))
    heads = m.attention.attend_window(n, past)
    between = m.attention.project(x, heads)
    return n, between - x, m.output(x, heads) - between

  params = jax.jit(lambda r: layer.init(r, method=parts))(jax.random.key(0))
  apply = jax.jit(functools.partial(layer.apply, method=parts))
  n, attended, added = apply(params, rngs={'dropout': jax.random.key(1)})
  share = lambda a: float((np.asarray(a)[0, 1:] == 0).mean())
  assert 0.3 < share(n) < 0.7
  assert share(attended) == 0  # The output of attention is not dropped.
  assert 0.3 < share(added) < 0.7


USUAL = {'normalize_qk': False, 'position': positions.NoPosition}
BLOCK = USUAL | {
  'norm': norms.LayerNorm,
  'activation': gelu,
  'mlp_bias': True,
  'depth': 8,
}


def test_the_block_of_the_feedback_transformer():
  """Norms, biases, activation and initial weights follow the config."""
  x = draw(B, T, D)

  def parts(m):
    n = m.pre_norm(x)
    past = m.config.empty_past(B).append(m.kv(n, MASK))
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
  params = jax.tree.map(lambda a: draw(*a.shape, seed=a.size), params)
  apply = jax.jit(functools.partial(Layer(config(**BLOCK)).apply, method=parts))
  x_mid, y = apply({'params': params})
  mlp, norm = params['mlp'], params['mlp_norm']
  n = x_mid - x_mid.mean(-1, keepdims=True)
  n = n / np.sqrt((n**2).mean(-1, keepdims=True) + 1e-5)
  n = n * norm['scale'] + norm['bias']
  units = gelu(n @ mlp['hidden']['kernel'] + mlp['hidden']['bias'])
  linear = mlp['output']['linear']
  expected = x_mid + units @ linear['kernel'] + linear['bias']
  np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)


def test_locked_dropout_is_the_same_for_one_token_and_for_many():
  """Cells that read token by token, all with one rng, need this."""
  names = 'dropout', 'attention_dropout', 'hidden_dropout'
  T, rates = 64, dict.fromkeys(names, 0.4)
  settings = config(**rates, locked_dropout=True, window=64)
  layer, x = Layer(settings), draw(B, 64, D)

  def read(m, first, x, kv):
    """Reads the tokens from `first` on; kv holds the earlier ones."""
    n = m.pre_norm(x)
    past = jax.tree.map(
      lambda a: jax.lax.dynamic_slice_in_dim(a, first, T, 1), kv
    )
    past = past.append(m.kv(n, np.ones(x.shape[:2], bool)))
    return past, m(x, n, past, first=first)

  whole = 0, x, settings.empty_past(B)
  params = jax.jit(functools.partial(layer.init, method=read))(
    jax.random.key(0), *whole
  )
  apply = jax.jit(functools.partial(layer.apply, params, method=read))
  rngs = {'dropout': jax.random.key(2)}
  kv, many = apply(*whole, rngs=rngs)
  for t in 0, 1, 40, 63:
    _, one = apply(t, x[:, t : t + 1], kv, rngs=rngs)
    np.testing.assert_allclose(one[:, 0], many[:, t], rtol=1e-4, atol=1e-5)
  _, plain = apply(*whole)
  assert np.abs(plain - many).max() > 0.1
  # Random bits are drawn for each query of a tile, and each token's units.
  text = str(jax.make_jaxpr(lambda x: apply(0, x, kv, rngs=rngs))(x))
  assert f'u32[16,{H},{T}]' in text and f'u32[{T},{F}]' in text


X = draw(3, 5)


class Twice(nn.Module):
  """Two layers as a function of the module."""

  policy: str

  @nn.compact
  def __call__(self, x):
    return remat(Twice.body, self.policy)(self, x)

  def body(self, x):
    hidden = jnp.tanh(nn.Dense(4, name='hidden')(x))
    return nn.Dense(2, name='output')(hidden)


@pytest.mark.parametrize(
  ('policy', 'tanhs'), [('none', 1), ('dots', 2), ('sublayers', 2), ('full', 2)]
)
def test_what_is_not_kept_is_computed_again(policy, tanhs):
  module = Twice(policy)
  params = Twice('none').init(jax.random.key(0), X)
  gradient = jax.grad(lambda p: jnp.sum(jnp.sin(module.apply(p, X))))
  assert str(jax.make_jaxpr(gradient)(params)).count('= tanh') == tanhs


@pytest.mark.parametrize(('platform', 'tanhs'), [('cpu', 1), ('tpu', 2)])
def test_a_cpu_computes_nothing_again_by_default(monkeypatch, platform, tanhs):
  monkeypatch.setattr(dispatch, 'mesh_platform', lambda: platform)
  test_what_is_not_kept_is_computed_again(AUTO, tanhs)


def test_unknown_remat_is_an_error():
  with pytest.raises(ValueError, match="remat .*'all'"):
    remat(lambda c: c, 'all')


SCALE, BIAS = draw(2, 5, seed=1)


@pytest.mark.parametrize('x', [3 * X + 2, X * 1e-3])
def test_norms(x):
  """1e-6 is added to the mean square, or 1e-5 to the variance."""
  y = norms.RMSNorm().apply({'params': {'scale': SCALE}}, x)
  expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * SCALE
  np.testing.assert_allclose(y, expected, rtol=1e-5)
  y = norms.LayerNorm().apply({'params': {'scale': SCALE, 'bias': BIAS}}, x)
  centred = x - x.mean(-1, keepdims=True)
  expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
  np.testing.assert_allclose(y, expected * SCALE + BIAS, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('norm', [norms.RMSNorm, norms.LayerNorm, norms.NoNorm])
def test_statistics_and_parameters_are_float32(norm):
  x = jnp.asarray(X * 1e-3 + 1, jnp.bfloat16)
  low = norm(dtype='bfloat16')
  y, params = low.init_with_output(jax.random.key(0), x)
  assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(params))
  x = x.astype(jnp.float32)
  exact = norm().apply(params, x)
  for found in y, low.apply(params, x):
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


def test_gelu_is_the_exact_one():
  h = np.linspace(-4, 4, 23, dtype=np.float32)
  below = [(1 + math.erf(h / math.sqrt(2))) / 2 for h in h.tolist()]
  np.testing.assert_allclose(gelu(h), h * below, atol=2e-6)
