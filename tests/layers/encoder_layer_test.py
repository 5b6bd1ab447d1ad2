"""The encoder layer against plain equations; initial weights; dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.encoder_layer import EncoderAttention
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.encoder_layer import EncoderMLP
from meliad_rec.layers.experts import Experts
from meliad_rec.layers.layer_config import EncoderConfig
from meliad_rec.metrics import pictures
from tests import plain_encoder
from tests.architectures import D
from tests.architectures import encoder_config
from tests.architectures import F
from tests.architectures import S
from tests.cells import assert_close
from tests.cells import draw

B, T = 3, 6
# Whether a layer reads memory, and whether it is gated.
KINDS = {
  'plain': (False, False),
  'gated': (False, True),
  'reading': (True, False),
  'both': (True, True),
}


def example(dtype='float32'):
  """Returns the stream, its mask, memory, and a source of keys."""
  mask_BT = np.arange(T) < np.array([T, 2, 0])[:, None]
  x_BTD, memory_BSD, source_BTD = (
    draw(B, n, D, seed=seed).astype(dtype) for seed, n in enumerate((T, S, T))
  )
  return x_BTD, mask_BT, memory_BSD, source_BTD


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


@pytest.mark.parametrize(
  ('kind', 'causal', 'post_norm'),
  [
    *((kind, False, False) for kind in KINDS),
    ('both', True, True),
    *(
      pytest.param(kind, *how, marks=pytest.mark.slow)
      for how in ((True, False), (False, True))
      for kind in KINDS
    ),
  ],
)
def test_equals_plain_equations(kind, causal, post_norm):
  """Eqs. 9 to 11, and their gradients; causal layers have another source."""
  made = layer(kind, causal, post_norm=post_norm)
  x_BTD, *rest, source_BTD = given(kind)
  rest.append(source_BTD if causal else None)

  def outcome(layer):
    def loss(params, x_BTD):
      y_BTD = layer(params, x_BTD)
      return jnp.sum(jnp.sin(y_BTD)), y_BTD

    grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    return grad(parameters(kind), x_BTD)

  found = outcome(lambda p, x_BTD: made.apply({'params': p}, x_BTD, *rest))
  plain = lambda p, x_BTD: plain_encoder.layer(p, made.config, x_BTD, *rest)
  jax.tree.map(assert_close, found, outcome(plain))
  for path, g in jax.tree.leaves_with_path(found[0]):
    assert np.abs(g).max() > 0, path


def test_gates_are_shown():
  """Their weights of the old and the new stream."""
  x_BTD, *rest = given('gated')
  made, params = layer('gated'), parameters('gated')
  _, sown = made.apply(
    {'params': params}, x_BTD, *rest, mutable=pictures.COLLECTION
  )
  shown = sown[pictures.COLLECTION]
  ([new_BTD], [old_BTD]) = shown['token_write'], shown['token_keep']
  plain = {name: p for name, p in params.items() if name != 'gate_mlp'}
  ungated_BTD = layer('plain').apply({'params': plain}, x_BTD, *rest)
  gated_BTD = made.apply({'params': params}, x_BTD, *rest)
  assert_close(gated_BTD, new_BTD * ungated_BTD + old_BTD * x_BTD)
  assert np.abs(new_BTD - old_BTD).max() > 0.1


def test_bfloat16():
  """Inputs and outputs are bfloat16, close to float32."""
  run = lambda dtype: jax.jit(layer('both', dtype=dtype).apply)(
    {'params': parameters('both')}, *given('both', dtype)
  )
  y_BTD = run('bfloat16')
  assert y_BTD.dtype == jnp.bfloat16
  error = np.abs(y_BTD.astype(np.float32) - run('float32'))
  assert 0 < error.mean() < 0.02


@pytest.mark.parametrize('reads', [False, True])
def test_memory_is_neither_missed_nor_ignored(reads):
  x_BTD, mask_BT, memory_BSD, _ = example()
  made = EncoderLayer(encoder_config(), reads)
  with pytest.raises(ValueError, match='EncoderLayer.reads_memory'):
    made.init(jax.random.key(0), x_BTD, mask_BT, None if reads else memory_BSD)


def assert_uniform(kernel, most):
  assert 0.98 < np.abs(kernel).max() / most <= 1


@pytest.mark.parametrize('kind', ['gated', 'both'])
def test_first_weights_are_those_of_the_authors_code_and_biases_are_0(kind):
  """Xavier's, and smaller by sqrt(2) for queries, keys and values.

  In layers of TLB and GUTLB, kernels of MLPs are PyTorch's own. Biases there
  have a deviation of 1e-6, and in layers of TLB and GUTLB numbers as large as
  those of kernels.
  """
  D, F, heads = 60, 90, 4 * 24
  config = EncoderConfig(
    d_model=D, num_heads=4, head_dim=24, mlp_dim=F, causal=True
  )
  shape = jnp.zeros((1, 2, D)), jnp.ones((1, 2), bool)
  memory = (jnp.zeros((1, 3, D)),) if KINDS[kind][0] else ()
  made = EncoderLayer(config, *KINDS[kind])
  params = jax.jit(made.init)(jax.random.key(0), *shape, *memory)['params']
  for name in 'mlp', 'gate_mlp':
    for part, inputs in (('hidden', D), ('output', F)):
      xavier = (6 / (D + F)) ** 0.5
      found = params[name][part]
      assert_uniform(found['kernel'], inputs**-0.5 if memory else xavier)
      np.testing.assert_array_equal(found['bias'], 0)
  most = (6 / (D + heads)) ** 0.5
  attention = params['attention']
  for name, bound in (('query', 0.5), ('key', 0.5), ('value', 0.5), (0, 1)):
    found = attention[name] if name else attention['output']['linear']
    assert_uniform(found['kernel'], most * bound**0.5)
    assert set(found) == {'kernel'}  # No bias.


def test_the_mlp_drops_before_its_activation_and_at_its_end():
  """Dropout precedes the activation."""
  config = encoder_config(activation=lambda h: h + 5, dropout=0.5)
  eye = np.eye(D, F, dtype=np.float32)
  params = {
    'hidden': {'kernel': 0 * eye, 'bias': np.full(F, 3, np.float32)},
    'output': {'kernel': eye.T, 'bias': np.zeros(D, np.float32)},
  }
  rngs, n_BTD = {'dropout': jax.random.key(0)}, example()[0]
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
  y_BTD = jax.jit(made.apply)(
    {'params': {'attention': still, 'mlp': mlp}}, x_BTD, mask_BT
  )
  hidden = np.sin(plain_encoder.linear(mlp['hidden'], x_BTD))
  assert_close(y_BTD, x_BTD + plain_encoder.linear(mlp['output'], hidden))


@pytest.mark.parametrize('in_attention', [False, True])
def test_experts_are_of_attention_too_or_of_the_mlp_alone(in_attention):
  x_BTD, mask_BT, _, _ = example()
  made = EncoderLayer(encoder_config(), experts=Experts(4, 2, in_attention))
  init = lambda rng: made.init(rng, x_BTD, mask_BT)
  params = jax.eval_shape(init, jax.random.key(0))['params']
  assert ('choice' in params['attention']) == in_attention
  assert 'choice' in params['mlp']


# Row 1 has a gap, row 2 is empty.
GAPS = np.array([[1] * 6, [1, 0, 1, 1, 0, 0], [0] * 6], bool)


@functools.cache
def attention_parameters(own=True, position=positions.XPos):
  x_BTD, _, other_BSD, source_BTD = example()
  source = (source_BTD, GAPS) if own else (other_BSD, GAPS[:, :S])
  made = EncoderAttention(
    encoder_config(position=position),
    'token_to_token' if own else 'token_to_state',
  )
  params = jax.jit(made.init)(jax.random.key(0), x_BTD, *source)['params']
  rng = np.random.default_rng(1)
  # Strong opinions, and norms that differ.
  move = lambda a: np.float32(a * 2 + rng.normal(size=a.shape) * 0.3)
  return jax.tree.map(move, params)


@pytest.mark.parametrize(
  ('position', 'causal', 'logits'),
  [
    (positions.NoPosition, True, plain_encoder.plain_logits),
    (positions.XPos, False, plain_encoder.xpos_logits),
    (
      positions.SymmetricXPos,
      False,
      functools.partial(plain_encoder.xpos_logits, two_sided=True),
    ),
  ],
)
def test_own_tokens(position, causal, logits):
  config = encoder_config(causal, position=position)
  x_BTD, _, _, source_BTD = example()
  params = attention_parameters(position=position)
  y_BTD = jax.jit(EncoderAttention(config).apply)(
    {'params': params}, x_BTD, source_BTD, GAPS
  )
  order_TS = np.tri(T, dtype=bool) if causal else np.ones((T, T), bool)
  expected = plain_encoder.attention(
    *(params, config, x_BTD, source_BTD, GAPS[:, None] & order_TS, logits)
  )
  assert_close(y_BTD, expected)


@pytest.mark.parametrize('causal', [False, True])
def test_slots_have_no_order(causal):
  """The source has its own norm; a query sees all of it, causal or not."""
  x_BTD, _, other_BSD, source_BTD = example()
  params = attention_parameters(own=False)
  assert 'source_norm' in params
  made = EncoderAttention(encoder_config(causal), 'token_to_state')
  # As many slots as tokens are no reason to be causal.
  for slots_BSD in other_BSD, source_BTD:
    mask_BS = GAPS[:, : slots_BSD.shape[1]]
    expected = plain_encoder.attention(
      *(params, made.config, x_BTD, slots_BSD),
      np.repeat(mask_BS[:, None], T, 1),
    )
    found = jax.jit(made.apply)({'params': params}, x_BTD, slots_BSD, mask_BS)
    assert_close(found, expected)


@pytest.mark.parametrize('own', [False, True])
def test_a_query_that_sees_nothing_adds_nothing(own):
  """It also gives no gradient, which could be 0 / 0."""
  x_BTD, _, other_BSD, _ = example()
  source, mask_BS = (x_BTD, GAPS) if own else (other_BSD, GAPS[:, :S])
  made = EncoderAttention(
    encoder_config(False), 'token_to_token' if own else 'token_to_state'
  )

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
