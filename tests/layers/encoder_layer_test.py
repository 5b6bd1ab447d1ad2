"""The encoder layer against plain equations; initial weights; dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.dropout import attention_keep
from meliad_rec.layers.encoder_layer import EncoderAttention
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.encoder_layer import EncoderMLP
from meliad_rec.layers.experts import Experts
from meliad_rec.layers.layer_config import EncoderConfig
from tests import plain_encoder
from tests.architectures import D
from tests.architectures import encoder_config
from tests.architectures import F
from tests.architectures import H
from tests.architectures import S
from tests.cells import assert_close

B, T = 3, 6
KINDS = {
  'plain': (False, False),
  'gated': (False, True),
  'reading': (True, False),
  'both': (True, True),
}
kinds = pytest.mark.parametrize('kind', KINDS)


def example(dtype='float32'):
  """Returns the stream, its mask, memory, and a source of keys."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  mask_BT = np.arange(T) < np.array([T, 2, 0])[:, None]
  return normal(B, T, D), mask_BT, normal(B, S, D), normal(B, T, D)


def layer(kind, causal=False, **changes):
  return EncoderLayer(encoder_config(causal, **changes), *KINDS[kind])


def given(kind, dtype='float32'):
  x_BTD, mask_BT, memory_BSD, source_BTD = example(dtype)
  return x_BTD, mask_BT, memory_BSD if KINDS[kind][0] else None, source_BTD


@functools.cache
def parameters(kind):
  init = jax.jit(lambda rng: layer(kind).init(rng, *given(kind)))
  rng = np.random.default_rng(1)
  move = lambda a: np.float32(a + rng.normal(size=a.shape) * 0.2)
  return jax.tree.map(move, init(jax.random.key(0))['params'])


@kinds
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('own', [False, True])
def test_equals_plain_equations(kind, causal, own):
  """Eqs. 9 to 11; keys are from the stream or another source."""
  made, params = layer(kind, causal), parameters(kind)
  *inputs, source_BTD = given(kind)
  source_BTD = None if own else source_BTD
  y_BTD = made.apply({'params': params}, *inputs, source_BTD)
  assert_close(
    y_BTD, plain_encoder.layer(params, made.config, *inputs, source_BTD)
  )


@kinds
def test_gradients_of_all(kind):
  """Gradients are finite and not zero, despite an empty row."""
  x_BTD, *rest = given(kind)

  def loss(params, x_BTD):
    y_BTD = layer(kind).apply({'params': params}, x_BTD, *rest)
    return jnp.sum(jnp.sin(y_BTD))

  grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
  for path, g in jax.tree.leaves_with_path(grad(parameters(kind), x_BTD)):
    assert np.isfinite(g).all() and np.abs(g).max() > 0, path


@kinds
def test_bfloat16(kind):
  """Inputs and outputs are bfloat16, close to float32."""
  low = layer(kind, dtype='bfloat16')
  y_BTD = low.apply({'params': parameters(kind)}, *given(kind, jnp.bfloat16))
  expected = layer(kind).apply({'params': parameters(kind)}, *given(kind))
  assert y_BTD.dtype == jnp.bfloat16
  error = np.abs(y_BTD.astype(np.float32) - expected)
  assert 0 < error.mean() < 0.02


@pytest.mark.parametrize('kind', ['gated', 'both'])
def test_a_gate_that_is_shut_keeps_the_input(kind):
  """The gate interpolates from the input, not from the attended stream."""
  params, inputs = parameters(kind), given(kind)
  bias = params['gate_mlp']['output']['bias']

  def with_bias(value):
    output = params['gate_mlp']['output'] | {'bias': np.full_like(bias, value)}
    gate = params['gate_mlp'] | {'output': output}
    y_BTD = layer(kind).apply({'params': params | {'gate_mlp': gate}}, *inputs)
    return np.asarray(y_BTD)

  np.testing.assert_allclose(with_bias(-100), inputs[0], atol=1e-6)
  plain = {k: v for k, v in params.items() if k != 'gate_mlp'}
  ungated = 'reading' if KINDS[kind][0] else 'plain'
  expected = layer(ungated).apply({'params': plain}, *inputs)
  assert_close(with_bias(100), expected)


@pytest.mark.parametrize('reads', [False, True])
def test_memory_is_neither_missed_nor_ignored(reads):
  x_BTD, mask_BT, memory_BSD, _ = example()
  made = EncoderLayer(encoder_config(), reads)
  with pytest.raises(ValueError, match='EncoderLayer.reads_memory'):
    made.init(jax.random.key(0), x_BTD, mask_BT, None if reads else memory_BSD)


def first_weights(kind, d_model=60, mlp_dim=90):
  """Returns initial parameters of a wide layer."""
  config = EncoderConfig(
    d_model=d_model, num_heads=2, head_dim=8, mlp_dim=mlp_dim, causal=True
  )
  shape = jnp.zeros((1, 2, d_model)), jnp.ones((1, 2), bool)
  memory = (jnp.zeros((1, 3, d_model)),) if KINDS[kind][0] else ()
  made = EncoderLayer(config, *KINDS[kind])
  return jax.jit(made.init)(jax.random.key(0), *shape, *memory)['params']


@kinds
def test_first_kernels_are_those_of_the_authors_code_and_biases_are_0(kind):
  """Kernels of the MLP: Xavier's, but PyTorch's own in layers of TLB and GUTLB.

  Biases there have a deviation of 1e-6, and in layers of TLB and GUTLB numbers
  as large as those of kernels.
  """
  params, (D, F) = first_weights(kind), (60, 90)
  for name in ('mlp', 'gate_mlp') if KINDS[kind][1] else ('mlp',):
    for part, inputs in (('hidden', D), ('output', F)):
      bound = (6 / (D + F)) ** 0.5
      if KINDS[kind][0]:
        bound = inputs**-0.5
      found = params[name][part]
      assert 0.98 < np.abs(found['kernel']).max() / bound <= 1
      np.testing.assert_array_equal(found['bias'], 0)


def test_the_mlp_drops_before_its_activation_and_at_its_end():
  """Dropout precedes the activation."""
  shift = lambda h: h + 5
  config = EncoderConfig(
    d_model=D,
    num_heads=1,
    head_dim=2,
    mlp_dim=F,
    causal=True,
    activation=shift,
    dropout=0.5,
  )
  n_BTD, _, _, _ = example()
  eye = np.eye(D, F, dtype=np.float32)
  params = {
    'hidden': {'kernel': 0 * eye, 'bias': np.full(F, 3, np.float32)},
    'output': {'kernel': eye.T, 'bias': np.zeros(D, np.float32)},
  }
  rngs = {'dropout': jax.random.key(0)}
  y_BTD = EncoderMLP(config, F).apply({'params': params}, n_BTD, rngs=rngs)
  # 0 or 2 * 3 behind the first; 5 more; 0 or twice as much behind the second.
  assert set(np.unique(y_BTD)) == {0.0, 10.0, 22.0}


def test_norm_and_activation_are_choices():
  """Measured where attention adds zeros."""
  x_BTD, mask_BT, _, _ = example()
  made = layer('plain', norm=norms.NoNorm, activation=jnp.sin)
  params = jax.jit(made.init)(jax.random.key(0), x_BTD, mask_BT)['params']
  assert set(params) == {'attention', 'mlp'}
  still = jax.tree.map(jnp.zeros_like, params['attention'])
  mlp = parameters('plain')['mlp']
  y_BTD = made.apply(
    {'params': {'attention': still, 'mlp': mlp}}, x_BTD, mask_BT
  )
  hidden = np.sin(plain_encoder.linear(mlp['hidden'], x_BTD))
  assert_close(y_BTD, x_BTD + plain_encoder.linear(mlp['output'], hidden))


@pytest.mark.parametrize('in_attention', [False, True])
def test_experts_are_of_attention_too_or_of_the_mlp_alone(in_attention):
  """With experts in the MLP alone, attention is the usual one."""
  x_BTD, mask_BT, _, _ = example()
  made = EncoderLayer(encoder_config(), experts=Experts(4, 2, in_attention))
  params = jax.jit(made.init)(jax.random.key(0), x_BTD, mask_BT)['params']
  assert ('choice' in params['attention']) == in_attention
  assert 'choice' in params['mlp']
  _, sown = made.apply({'params': params}, x_BTD, mask_BT, mutable=['routes'])
  assert len(jax.tree.leaves(sown)) == 1 + in_attention
  if not in_attention:
    plain = parameters('plain')
    still = jax.tree.map(jnp.zeros_like, params['mlp'])
    zero_mlp = jax.tree.map(jnp.zeros_like, plain['mlp'])
    given_ = lambda mlp: {'params': plain | {'mlp': mlp}}
    y_BTD = made.apply(given_(still), x_BTD, mask_BT)
    expected = layer('plain', True).apply(given_(zero_mlp), x_BTD, mask_BT)
    assert_close(y_BTD, expected)


LOGITS = {
  positions.NoPosition: plain_encoder.plain_logits,
  positions.XPos: plain_encoder.xpos_logits,
  positions.SymmetricXPos: functools.partial(
    plain_encoder.xpos_logits, two_sided=True
  ),
}
both = pytest.mark.parametrize('causal', [False, True])


def attention_example():
  """Returns a stream, a source and a mask; row 1 has a gap, row 2 is empty."""
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
  other_BSD = rng.normal(size=(B, S, D)).astype(np.float32)
  mask_BT = np.array([[1] * 6, [1, 0, 1, 1, 0, 0], [0] * 6], bool)
  return x_BTD, other_BSD, mask_BT


@functools.cache
def attention_parameters(own=True, position=positions.XPos):
  x_BTD, other_BSD, mask_BT = attention_example()
  source = (x_BTD, mask_BT) if own else (other_BSD, mask_BT[:, :S])
  made = EncoderAttention(encoder_config(position=position), cross=not own)
  params = jax.jit(made.init)(jax.random.key(0), x_BTD, *source)['params']
  rng = np.random.default_rng(1)
  # Strong opinions, and norms that differ.
  move = lambda a: np.float32(a * 2 + rng.normal(size=a.shape) * 0.3)
  return jax.tree.map(move, params)


@both
@pytest.mark.parametrize('position', LOGITS, ids=lambda p: p.__name__)
def test_own_tokens(causal, position):
  config = encoder_config(causal, position=position)
  x_BTD, _, mask_BT = attention_example()
  params = attention_parameters(position=position)
  source_BTD = x_BTD[:, ::-1]  # Of the same tokens, but not the stream.
  y_BTD = EncoderAttention(config).apply(
    {'params': params}, x_BTD, source_BTD, mask_BT
  )
  order_TS = np.tri(T, dtype=bool) if causal else np.ones((T, T), bool)
  expected = plain_encoder.attention(
    *(params, config, x_BTD, source_BTD),
    *(mask_BT[:, None] & order_TS, LOGITS[position]),
  )
  assert_close(y_BTD, expected)


@both
def test_slots_have_no_order(causal):
  """The source has its own norm; a query sees all of it, causal or not."""
  x_BTD, other_BSD, mask_BT = attention_example()
  mask_BS, params = mask_BT[:, :S], attention_parameters(own=False)
  made = EncoderAttention(encoder_config(causal), cross=True)
  apply = functools.partial(made.apply, {'params': params})
  y_BTD = apply(x_BTD, other_BSD, mask_BS)
  seen_BTS = np.repeat(mask_BS[:, None], T, 1)
  expected = plain_encoder.attention(
    params, made.config, x_BTD, other_BSD, seen_BTS
  )
  assert_close(y_BTD, expected)
  assert_close(y_BTD, apply(x_BTD, other_BSD[:, ::-1], mask_BS[:, ::-1]))
  # As many slots as tokens are no reason to be causal.
  longer = np.concatenate([other_BSD, other_BSD[:, :1]], 1)
  seen_BT = np.ones((B, T), bool)
  moved = np.concatenate([longer[:, :-1], -longer[:, -1:]], 1)
  change = apply(x_BTD, longer, seen_BT) - apply(x_BTD, moved, seen_BT)
  assert (np.abs(change).max(-1) > 1e-4).all()


@pytest.mark.parametrize('own', [False, True])
def test_a_query_that_sees_nothing_adds_nothing(own):
  """It also gives no gradient, which could be 0 / 0."""
  x_BTD, other_BSD, mask_BT = attention_example()
  source, mask_BS = (x_BTD, mask_BT) if own else (other_BSD, mask_BT[:, :S])
  made = EncoderAttention(encoder_config(False), cross=not own)

  def loss(params, x_BTD, source):
    y_BTD = made.apply({'params': params}, x_BTD, source, mask_BS)
    return jnp.sum(jnp.sin(y_BTD)), y_BTD

  grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
  gradients, y_BTD = grad(attention_parameters(own), x_BTD, source)
  np.testing.assert_array_equal(y_BTD[2], x_BTD[2])
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
  np.testing.assert_array_equal(gradients[2][2], np.zeros_like(source[2]))
  assert np.abs(gradients[2][1][mask_BS[1]]).max() > 0
  assert np.abs(gradients[2][1][~mask_BS[1]]).max() == 0


@pytest.mark.parametrize('by_row', [False, True])
def test_dropout_of_probabilities(by_row):
  """Heads and queries have their own masks; rows have or share them."""
  wide = encoder_config(attention_dropout=0.3, dropout_by_row=by_row)
  draw = lambda module: attention_keep(module, 0.3, (B, H, 40, 50), by_row)
  apply = functools.partial(EncoderAttention(wide).apply, {}, method=draw)
  found = np.asarray(apply(rngs={'dropout': jax.random.key(0)}))
  assert found.shape == ((B,) if by_row else ()) + (H, 40, 50)
  assert abs(found.mean() - 0.7) < 0.02
  for axis in range(found.ndim):
    a, b = np.moveaxis(found, axis, 0)[:2]
    assert abs((a == b).mean() - 0.58) < 0.15
  assert apply() is None


def test_first_weights():
  """Xavier; smaller by sqrt(2) for queries, keys and values."""
  x_BTD, _, mask_BT = attention_example()
  config = EncoderConfig(
    d_model=64, num_heads=4, head_dim=24, mlp_dim=8, causal=True
  )
  wide_BTD = np.repeat(x_BTD, 4, -1)[..., :64]
  init = jax.jit(EncoderAttention(config).init)
  params = init(jax.random.key(0), wide_BTD, wide_BTD, mask_BT)['params']
  most = (6 / (64 + 4 * 24)) ** 0.5
  for name, bound in (('query', 0.5), ('key', 0.5), ('value', 0.5), (0, 1)):
    kernel = params[name] if name else params['output']['linear']
    largest = np.abs(kernel['kernel']).max()
    assert 0.98 < largest / (most * bound**0.5) <= 1
    assert set(kernel) == {'kernel'}  # No bias.
