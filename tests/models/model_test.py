"""The model: logits, heads, resets, shardings, and what it refuses."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.latent_bottleneck import Chunks
from meliad_rec.archs.window import WindowLayer
from meliad_rec.distributed import partition
from meliad_rec.layers import norms
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models import pooling
from meliad_rec.models import sharded_model
from meliad_rec.models.cell import Cell
from meliad_rec.models.embedding import AdaptiveEmbedding
from meliad_rec.models.embedding import UntiedEmbedding
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.planning import topology
from tests import architectures
from tests import tiny_run
from tests.cells import draw
from tests.libtpu import needs_libtpu

V, D, B, T = 13, 6, 3, 5


class Adder(Cell):
  """State: the sum of inputs, plus 1."""

  def initial_state(self, batch):
    return jnp.ones((batch, D))

  def __call__(self, state, block):
    y_BTD = state[:, None] + jnp.cumsum(block.x, 1)
    return y_BTD[:, -1], y_BTD

  @property
  def is_recurrent(self):
    return True

  def parts(self, state):
    return {'sum': state}

  def with_parts(self, state, parts):
    return parts['sum']


TOKENS = np.random.default_rng(0).integers(1, V, (B, T))
REAL = np.ones((B, T), bool)
NONE = np.zeros(B, bool)


def built(cell=None, tokens=T, **options):
  """Returns a model, its parameters, and its compiled `apply`."""
  model = Model(V, cell or Adder(), D, **options)
  init = jax.jit(lambda rng: initialize(model, rng, B, tokens))
  return model, init(jax.random.key(0)), jax.jit(model.apply)


def normed(y):
  return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize('divisor', [None, 4.0])
def test_logits_are_products_with_the_embedding(divisor):
  _, params, apply = built(logits_divisor=divisor)
  table_VD = np.asarray(params['embed']['embedding'])
  state = np.full((B, D), 2.0, np.float32)
  start = np.array([True, False, False])
  end, logits = apply({'params': params}, state, TOKENS, start, REAL)
  begin = np.where(start[:, None], 1, state)
  y = begin[:, None] + np.cumsum(table_VD[TOKENS], 1)
  expected = normed(y) @ table_VD.T / (divisor or D**0.5)
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(end, y[:, -1], rtol=1e-5)


def test_another_embedding_and_another_norm():
  _, p, apply = built(embedding=UntiedEmbedding, final_norm=norms.LayerNorm)
  p = jax.tree.map(lambda a: draw(*a.shape, seed=a.size), p)
  _, logits = apply({'params': p}, np.zeros((B, D)), TOKENS, NONE, REAL)
  y = np.cumsum(p['embed']['embedding'][TOKENS], 1)
  y = (y - y.mean(-1, keepdims=True)) / (y.std(-1, keepdims=True) + 1e-5)
  y = y * p['norm']['scale'] + p['norm']['bias']
  output = p['embed']['output']
  expected = y @ output['kernel'] + output['bias']
  np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)


def test_clear_state_forgets_before_the_segment():
  _, params, apply = built(clear_state=True)
  run = lambda value: apply(
    {'params': params}, np.full((B, D), value), TOKENS, NONE, REAL
  )[1]
  np.testing.assert_array_equal(run(1.0), run(7.0))


def test_embeddings_are_dropped_before_the_cell():
  model, params, _ = built(embedding_dropout=0.5)
  embed = functools.partial(
    model.apply, {'params': params}, TOKENS, REAL, method='block'
  )
  found = embed(rngs={'dropout': jax.random.key(0)}).x / embed().x
  assert set(np.unique(found)) == {0, 2}


def test_dropout_comes_before_the_logits_and_needs_an_rng():
  _, params, apply = built(dropout=0.5)
  given = {'params': params}, np.ones((B, D), np.float32), TOKENS, NONE, REAL
  end, plain = apply(*given)
  dropped_end, dropped = apply(*given, rngs={'dropout': jax.random.key(1)})
  np.testing.assert_array_equal(end, dropped_end)
  assert (plain != dropped).any()


def test_bfloat16_activations_and_float32_logits():
  seen = []

  class Spy(Adder):
    def __call__(self, state, block):
      seen.append(block.x.dtype)
      return super().__call__(state, block)

  model = Model(V, Spy(), D, dtype='bfloat16')
  given = np.ones((B, D), np.float32), TOKENS, NONE, REAL
  (_, logits), _ = jax.eval_shape(
    lambda rng: model.init_with_output(rng, *given), jax.random.key(0)
  )
  assert set(seen) == {jnp.dtype('bfloat16')}
  assert logits.dtype == jnp.float32


class Noter(Adder):
  """Cell that is not causal, with two memory slots."""

  @property
  def causal(self):
    return False

  def memory_slots(self, state):
    return jnp.stack([state, 3 - state], 1)


JUDGES = {'head': Classifier(3)}
RECURRENT = architectures.recurrent(1, (0,))
BOTTLENECK = architectures.bottleneck(architectures.transformer(memory=True))
WHOLE = Chunks(BOTTLENECK.clone(chunk=None), 4)
ADAPTIVE = functools.partial(AdaptiveEmbedding, cutoffs=(2,), tied=False)


@pytest.mark.parametrize(
  ('cell', 'options', 'message'),
  [
    (architectures.windowed(), {'clear_state': True}, 'clear_state'),
    (
      RECURRENT,
      {'clear_state': True, 'encoder': architectures.transformer(1)},
      'clear_state .* anyway',
    ),
    (
      Chunks(
        architectures.bottleneck(architectures.transformer(memory=True)), 4
      ),
      {'clear_state': True},
      'clear_state .* anyway',
    ),
    (Noter(), {}, 'CAUSAL'),
    (Adder(), JUDGES | {'logits_divisor': 2.0}, 'logits_divisor'),
    (Adder(), JUDGES | {'embedding': UntiedEmbedding}, 'embedding/untied'),
    (Adder(), JUDGES | {'embedding': ADAPTIVE}, 'embedding/untied'),
    (Adder(), {'head': Matcher(3)}, '2 .* 15. Set SEGMENT'),
    (RECURRENT, {'head': Matcher(3)}, '16 .* 15. Set SEGMENT'),
    (Adder(), {'encoder_norm': norms.LayerNorm}, 'encoder_norm'),
    (Adder(), {'dropout': 1.0}, 'dropout must .* Set DROPOUT or'),
    (Adder(), {'embedding_dropout': 10.0}, 'Set model.Model.embedding_dropout'),
  ],
)
def test_settings_that_do_not_fit_each_other(cell, options, message):
  with pytest.raises(ValueError, match=message):
    built(cell, tokens=15, **options)


class Decoder(Adder):
  """Cell that takes a source, and ignores it."""

  def source_kv(self, encoded_BSD, mask_BS):
    return encoded_BSD


class Copy(nn.Module):
  """Encoder that returns its input."""

  def __call__(self, x_BSD, mask_BS):
    return x_BSD


def test_the_state_of_a_decoder_may_be_an_array():
  model, params, apply = built(Decoder(), encoder=Copy())
  read = lambda state: apply(
    {'params': params}, state, TOKENS, NONE, REAL, TOKENS
  )
  empty, whole = read(())
  assert empty == ()
  end, logits = read(model.initial_state(B))
  assert end.shape == (B, D)
  np.testing.assert_array_equal(logits, whole)


def head_of(params, h):
  """Computes the logits of labels 1, 2, ... in NumPy."""
  for name in 'hidden', 'output':
    h = h @ params['head'][name]['kernel'] + params['head'][name]['bias']
    h = np.maximum(h, 0) if name == 'hidden' else h
  return h


@pytest.mark.parametrize('pool', [pooling.Mean(), pooling.Slots()])
def test_a_head_judges_normed_outputs_and_slots(pool):
  model, params, apply = built(Noter(), head=Classifier(3, pool))
  assert set(params) == {'embed', 'head', 'norm'}
  params['norm']['scale'] = params['norm']['scale'] + np.arange(D)
  carry = empty_carry(model, params, B)
  state, logits = apply({'params': params}, carry, TOKENS, ~NONE, REAL)
  y = 1 + np.cumsum(params['embed']['embedding'][TOKENS], 1)
  np.testing.assert_allclose(state['cell'], y[:, -1], rtol=1e-5)
  h = np.stack([y[:, -1], 3 - y[:, -1]], 1) if pool.at_end else y
  pooled = (normed(h) * (1 + np.arange(D))).mean(1)
  expected = head_of(params, pooled)
  np.testing.assert_allclose(logits[:, -1, 1:], expected, rtol=1e-3)
  assert set(state) == set(carry) == {'cell', 'head'}


PAIRS = np.random.default_rng(1).integers(1, V, (B, 2 * T))
PAIRED = np.ones((B, 2 * T), bool)
LAST = Matcher(3, pooling.Last())


def test_the_halves_of_a_row_are_read_as_two_sequences():
  model, params, apply = built(tokens=2 * T, head=LAST)
  carry = empty_carry(model, params, B)
  assert carry['cell'].shape == carry['head'].shape == (B, 2, D)
  carry = jax.tree.map(lambda a: a + 2, carry)
  start = np.array([True, False, False])
  state, logits = apply({'params': params}, carry, PAIRS, start, PAIRED)
  begin = np.where(start, 1, 2)[:, None, None]
  x = np.reshape(params['embed']['embedding'][PAIRS], (B, 2, T, D))
  y = begin + x.sum(2)
  np.testing.assert_allclose(state['cell'], y, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(state['head'], normed(y), rtol=1e-4, atol=1e-5)
  u, v = normed(y).swapaxes(0, 1)
  features = np.concatenate([u, v, u * v, np.abs(u - v)], -1)
  expected = head_of(params, features)[:, None]
  np.testing.assert_allclose(
    logits[..., 1:], np.repeat(expected, 2 * T, 1), rtol=1e-3, atol=1e-4
  )


class Strict(Adder):
  """Cell that outputs the rows of its state."""

  def to_decode_state(self, state):
    assert state.shape == (2 * B, D)
    return state + 1

  def to_segment_state(self, state):
    assert state.shape == (2 * B, D)
    return state - 1

  def parts(self, state):
    assert state.shape == (2 * B, D)
    return {'sum': state + 1}

  def with_parts(self, state, parts):
    assert state.shape == parts['sum'].shape == (2 * B, D)
    return parts['sum']


def test_a_cell_is_asked_about_rows_of_single_sequences():
  model, params, _ = built(Strict(), tokens=2 * T, head=LAST)
  state = jax.tree.map(
    lambda a: np.arange(a.size, dtype=a.dtype).reshape(a.shape),
    empty_carry(model, params, B),
  )
  for name, cell in (
    ('to_decode_state', state['cell'] + 1),
    ('to_segment_state', state['cell'] - 1),
    ('clear', 2 + 0 * state['cell']),
  ):
    changed = model.apply({'params': params}, state, method=name)
    np.testing.assert_array_equal(changed['cell'], cell)
    np.testing.assert_array_equal(changed['head'], state['head'])


def test_slots_of_pairs_are_those_of_both_sequences():
  class Slotted(Strict):
    def memory_slots(self, state):
      return jnp.stack([state, state], 1)

  model, params, _ = built(Slotted(), tokens=2 * T, head=LAST)
  carry = empty_carry(model, params, B)
  carry['cell'] = np.arange(B * 2 * D, dtype=np.float32).reshape(B, 2, D)
  slots = model.apply({'params': params}, carry, method='memory_slots')
  np.testing.assert_array_equal(slots, carry['cell'].repeat(2, 1))


def test_pairs_of_many_devices_are_those_of_one():
  model, params, apply = built(tokens=2 * T, head=Matcher(3))
  rows = 8
  rng = np.random.default_rng(2)
  tokens = rng.integers(1, V, (rows, 2 * T))
  mask = rng.random((rows, 2 * T)) < 0.8
  start = np.arange(rows) % 3 == 0
  carry = jax.tree.map(
    lambda a: np.ones(a.shape, a.dtype), empty_carry(model, params, rows)
  )
  given = carry, tokens, start, mask
  expected = apply({'params': params}, *given)
  mesh = partition.make_mesh(fsdp=2, model=2)
  put = jax.device_put(
    given, NamedSharding(mesh, PartitionSpec(partition.BATCH_AXES))
  )
  shapes = sharded_model.ShardedModel(model, mesh, 2 * T).param_shapes
  places = jax.tree.map(lambda a: a.sharding, shapes)
  found = apply({'params': jax.device_put(params, places)}, *put)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, found, expected)


def test_parameters_have_the_shapes_and_places_of_training():
  program = tiny_run.program(devices=8, fsdp=2, model=2)
  forward = sharded_model.ShardedModel(
    program.model, program.mesh, program.segment
  )
  facts = lambda a: (a.shape, a.dtype, a.sharding.spec)
  mine = jax.tree.map(facts, forward.param_shapes)
  assert mine == jax.tree.map(facts, program.shapes.params)
  specs = {a.sharding.spec for a in jax.tree.leaves(forward.param_shapes)}
  assert len(specs) > 2


@needs_libtpu
def test_evaluation_compiles_for_many_chips_with_kernels():
  """Kernels compile for several chips only under a mesh."""
  mesh = partition.make_mesh(1, 2, 2, devices=topology.devices('v5e:2x2'))
  config = LayerConfig(
    d_model=128,
    num_heads=4,
    head_dim=64,
    mlp_dim=128,
    window=128,
    dtype='bfloat16',
  )
  cell = stack.layers(1, functools.partial(WindowLayer, config))
  model, rows = Model(64, cell, 128, dtype='bfloat16'), 8
  shapes = sharded_model.ShardedModel(model, mesh, 256).param_shapes
  program = dataclasses.replace(
    tiny_run.program(), model=model, mesh=mesh, segment=256, rows=rows
  )
  place = partition.batch_sharding(mesh, rows)
  carry = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
    jax.eval_shape(lambda p: empty_carry(model, p, rows), shapes),
  )
  step = functools.partial(sharded_model.eval_step, model)
  with jax.set_mesh(mesh):
    lowered = jax.jit(step).lower(shapes, carry, program.batch_shapes(rows))
    text = lowered.compile().as_text()
  assert 'window_attention_forward' in text
  # The 128 cached keys of the 4 rows of a device, and the 256 new ones, are not
  # joined.
  assert 'bf16[4,384,' not in text
