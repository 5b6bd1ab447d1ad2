"""Encoders over documents or blocks: what tokens see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.transformer import Encoder
from meliad_rec.archs.transformer import EncoderLayers
from meliad_rec.archs.universal import Universal
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.layer_config import EncoderConfig
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from tests.architectures import D
from tests.architectures import encoder_config
from tests.architectures import S
from tests.architectures import T
from tests.architectures import transformer
from tests.architectures import W
from tests.cells import assert_close

B = 3
causal_or_not = pytest.mark.parametrize('causal', [False, True])


def example():
  """Row 1 ends in its second block; row 2 is empty."""
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
  return Block(x_BTD, np.arange(T) < np.array([T, W + 2, 0])[:, None])


def encode(causal, window=None, **options):
  return Encoder(transformer(causal=causal), window, **options)


def forward(cell, block):
  return run(cell, cell.initial_state(len(block.mask)), block)


@functools.cache
def parameters():
  init = functools.partial(encode(True).init, method=forward)
  return jax.jit(init)(jax.random.key(0), example())


@functools.cache
def compiled(causal, window=None):
  return jax.jit(
    functools.partial(encode(causal, window).apply, method=forward)
  )


@causal_or_not
@pytest.mark.parametrize('window', [None, W])
def test_what_a_token_changes(causal, window):
  """A token sees its document or block, or only earlier tokens of it."""
  block, at = example().replace(mask=np.ones((B, T), bool)), W + 2
  sign_T1 = np.where(np.arange(T) == at, -1, 1)[:, None]
  other = block.replace(x=block.x * sign_T1.astype(np.float32))
  apply = functools.partial(compiled(causal, window), parameters())
  change_BTD = np.abs(apply(block)[1] - apply(other)[1])
  changed_T = change_BTD.max((0, 2)) > 1e-6
  expected_T = np.arange(T) >= at if causal else np.ones(T, bool)
  if window:
    expected_T &= np.arange(T) // window == at // window
  np.testing.assert_array_equal(changed_T, expected_T)
  assert encode(causal, window).causal == causal


@causal_or_not
def test_padding_is_invisible(causal):
  """Neither its values nor its amount matter."""
  block = example()
  apply = functools.partial(compiled(causal), parameters())
  _, y_BTD = apply(block)
  _, other_BTD = apply(block.replace(x=block.x + 3 * ~block.mask[..., None]))
  assert_close(y_BTD[block.mask], other_BTD[block.mask])
  short = jax.tree.map(lambda a: a[1:2, : W + 2], block)
  assert_close(apply(short)[1][0], y_BTD[1, : W + 2])


def test_blocks_are_documents_of_their_own():
  block = example()
  _, y_BTD = compiled(False, W)(parameters(), block)
  for start in range(0, T, W):
    part = jax.tree.map(lambda a, s=start: a[:, s : s + W], block)
    _, alone_BTD = compiled(False)(parameters(), part)
    real = part.mask
    assert_close(y_BTD[:, start : start + W][real], alone_BTD[real])


def test_state_is_none_and_documents_are_whole():
  assert encode(True).initial_state(B) == ()
  assert compiled(True)(parameters(), example())[0] == ()
  for window in (None, W):
    cell = encode(True, window)
    assert cell.needs_whole_document == cell.takes_segments == (window is None)
    assert cell.block_length == window
    assert cell.block_setting == 'BLOCK'
    assert not cell.can_step and not cell.is_recurrent
  with pytest.raises(ValueError, match='Encoder has no memory slots'):
    encode(True).memory_slots(())


def test_inputs_are_dropped():
  """All rows share one mask."""
  block = example().replace(mask=np.ones((B, T), bool))
  ones = block.replace(x=np.ones((B, T, D), np.float32))
  still = jax.tree.map(jnp.zeros_like, parameters())
  apply = functools.partial(encode(True, dropout=0.5).apply, method=forward)
  _, y_BTD = apply(still, ones, rngs={'dropout': jax.random.key(0)})
  assert set(np.unique(y_BTD)) == {0.0, 2.0}
  np.testing.assert_array_equal(y_BTD[0], y_BTD[1])
  np.testing.assert_array_equal(apply(still, ones)[1], ones.x)


PAPERS = {
  'transformer': (lambda layer: EncoderLayers(layer, 4), 8.68),
  'ut': (lambda layer: Universal(layer(), 10, False, False), 2.64),
  'gut': (lambda layer: Universal(layer(gated=True), 10, True, True), 3.95),
}


@pytest.mark.parametrize('name', PAPERS)
def test_parameters_at_the_papers_size(name):
  """ListOps as counted in the authors' code: 18 words, 10 classes."""
  make, millions = PAPERS[name]
  config = EncoderConfig(
    d_model=512, num_heads=8, head_dim=64, mlp_dim=1024, causal=False
  )
  cell = Encoder(make(functools.partial(EncoderLayer, config)))
  block = Block(jnp.zeros((1, 2, 512)), jnp.ones((1, 2), bool))
  init = functools.partial(cell.init, method=forward)
  shapes = jax.eval_shape(init, jax.random.key(0), block)['params']
  own = sum(a.size for a in jax.tree.leaves(shapes))
  head = 512 * 512 + 512 + 512 * 10 + 10
  assert round((own + 18 * 512 + head) / 1e6, 2) == millions


def test_blocks_have_tokens():
  with pytest.raises(ValueError, match='BLOCK'):
    encode(True, 0).init(jax.random.key(0), example(), method=forward)


LAYERS_T, COUNT = 6, 3


def layers_example(memory):
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, LAYERS_T, D)).astype(np.float32)
  mask_BT = np.arange(LAYERS_T) < np.array([LAYERS_T, 4, 0])[:, None]
  slots = rng.normal(size=(B, S, D)).astype(np.float32)
  return x_BTD, mask_BT, slots if memory else None


@pytest.mark.parametrize('memory', [False, True])
def test_is_one_layer_after_another(memory):
  """All layers read the same memory."""
  made, (x_BTD, *rest) = transformer(COUNT, memory), layers_example(memory)
  init = jax.jit(lambda rng: made.init(rng, x_BTD, *rest)['params'])
  params = init(jax.random.key(0))
  y_BTD = made.apply({'params': params}, x_BTD, *rest)
  one = EncoderLayer(encoder_config(), memory)
  for i in range(COUNT):
    x_BTD = one.apply({'params': params[f'layers_{i}']}, x_BTD, *rest)
  np.testing.assert_allclose(y_BTD, x_BTD, rtol=1e-5, atol=1e-6)
  assert set(params) == {f'layers_{i}' for i in range(COUNT)}
  a, b = (params[f'layers_{i}']['mlp']['hidden']['kernel'] for i in (0, 1))
  assert np.abs(a - b).max() > 0.1


@pytest.mark.parametrize('causal', [False, True])
def test_causal(causal):
  x_BTD, mask_BT, _ = layers_example(False)
  layer = functools.partial(EncoderLayer, encoder_config(causal))
  made = EncoderLayers(layer, 2)
  params = jax.jit(made.init)(jax.random.key(0), x_BTD, mask_BT)
  early_TD = np.arange(LAYERS_T)[:, None] < 3
  all_BTD = made.apply(params, -x_BTD, mask_BT)
  some_BTD = made.apply(params, np.where(early_TD, -x_BTD, x_BTD), mask_BT)
  same = np.abs(all_BTD - some_BTD)[0, :3].max() < 1e-6
  assert same == causal == made.causal


def test_layers_are_needed():
  with pytest.raises(ValueError, match='LAYERS'):
    transformer(0).init(jax.random.key(0), *layers_example(False))
