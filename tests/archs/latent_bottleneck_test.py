"""TLB and GUTLB against the algorithms in plain arrays, chunk by chunk."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.latent_bottleneck import Chunks
from meliad_rec.archs.latent_bottleneck import LatentBottleneck
from meliad_rec.archs.transformer import EncoderLayers
from meliad_rec.archs.universal import Universal
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.experts import Experts
from meliad_rec.metrics import metrics
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.recurrence.halt import Halt
from meliad_rec.training.train_step import auxiliary
from tests import cells
from tests import plain_encoder
from tests.architectures import D
from tests.architectures import encoder_config
from tests.architectures import F
from tests.architectures import S
from tests.cells import assert_close

W, CHUNKS = 3, 2
T = W * CHUNKS
KINDS = {'tlb': False, 'gutlb': True}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def model(kind, causal=False, changes=None, **options):
  config = encoder_config(causal, **(changes or {}))
  layer = functools.partial(EncoderLayer, config, reads_memory=True)
  encoder = EncoderLayers(layer, 1)
  if KINDS[kind]:
    halt = Halt(threshold=0.9, bias_init=-1.0)
    encoder = Universal(layer(gated=True), 3, True, True, halt)
  options = {'slots': S, 'writers': 2, 'chunk': W} | options
  return LatentBottleneck(config, encoder, **options)


def example():
  """Row 0 is full, 1 ends in the first chunk, 2 is empty, 3 lacks one token."""
  return cells.example(T, [T, 2, 0, T - 1])


@functools.cache
def parameters(kind):
  return cells.parameters(model(kind), example())


def outcome(cell, kind):
  def run(params, block):
    (memory, y_BTD), sown = cell.apply(
      {'params': params},
      block,
      method=cells.forward,
      rngs={'dropout': jax.random.key(0)},
      mutable=['losses'],
    )
    return (memory, auxiliary(sown.get('losses', {}))), y_BTD

  return cells.outcome(run, parameters(kind), example())


@pytest.mark.parametrize(
  'kind, remat', [('tlb', 'none'), slow('gutlb', 'none'), slow('gutlb', 'full')]
)
def test_is_the_algorithm(kind, remat):
  """Compares values and all gradients, through all chunks."""
  cell = model(kind, remat=remat)

  def plain(params, block):
    memory, y_BTD, penalties = plain_encoder.bottleneck(
      cell, params, block.x, block.mask
    )
    # The mean over each row's chunks that hold any token, then over rows.
    real_B = block.mask.reshape(-1, CHUNKS, W).any(2).sum(1)
    assert set(real_B) == {0, 1, 2}
    cost_B = sum(penalties) / np.maximum(real_B, 1)
    return (memory, cost_B.sum() / (real_B > 0).sum()), y_BTD

  expected = cells.outcome(plain, parameters(kind), example(), compiled=False)
  assert_close(outcome(cell, kind), expected)
  ((_, cost), _), _ = expected
  assert (cost > 0) == KINDS[kind]


@pytest.mark.parametrize(
  'alike', [pytest.param(True, marks=pytest.mark.slow), False]
)
def test_slots_that_begin_alike_stay_alike(alike):
  """They also have equal gradients. By default, they do not begin alike."""
  init = nn.initializers.zeros if alike else model('tlb').slots_init
  params = cells.initial(model('tlb', slots_init=init), example())
  run = lambda p, b: model('tlb').apply({'params': p}, b, method=cells.forward)
  ((memory, _), (gradients, _)) = cells.outcome(run, params, example())
  for slots in (memory[0], gradients['first']):
    assert (np.ptp(slots, 0).max() < 1e-5) == alike
  assert alike or 0.017 < params['first'].std() < 0.023


def test_writers_have_a_width_of_their_own():
  for width, expected in ((None, D), (7, 7)):
    params = cells.shapes(model('tlb', writer_mlp_dim=width), example())
    for i in range(2):
      hidden = params[f'update_{i}']['mlp']['hidden']['kernel']
      assert hidden.shape == (D, expected)
    layer = params['encoder']['layers_0']['mlp']['hidden']['kernel']
    assert layer.shape == (D, F)


class Same(nn.Module):
  """Encoder that returns its input."""

  causal = True

  def __call__(self, x_BWD, mask_BW, memory_BSD):
    return x_BWD


@pytest.mark.parametrize('by_row', [False, True])
@pytest.mark.parametrize('equal', [False, True])
def test_chunks_drop_alike_or_not(equal, by_row):
  config = encoder_config(dropout=0.5, dropout_by_row=by_row)
  cell = LatentBottleneck(config, Same(), S, chunk=None if equal else W)
  cell = Chunks(cell, length=W) if equal else cell
  block = example()
  block = block.replace(x=np.ones_like(block.x))
  variables = {'params': cells.initial(cell, block)}
  rngs = {'dropout': jax.random.key(0)}
  _, y_BTD = cell.apply(variables, block, rngs=rngs, method=cells.forward)
  assert set(np.unique(y_BTD)) == {0, 2}
  assert np.array_equal(y_BTD[:, :W], y_BTD[:, W:]) != by_row


def test_norms_of_writers_may_follow_the_sums():
  cell, block = model('tlb', changes={'post_norm': True}), cells.example(T)
  memory_BSD, _ = cells.apply(cell, cells.initial(cell, block), block)
  np.testing.assert_allclose(memory_BSD.mean(-1), 0, atol=1e-5)
  np.testing.assert_allclose(memory_BSD.std(-1), 1, atol=1e-2)


def test_a_token_sees_later_ones_in_its_own_chunk():
  cell, block, at = model('tlb'), cells.example(T, [T]), W + 1
  sign_T1 = np.where(np.arange(T) == at, -1, 1)[:, None]
  other = block.replace(x=block.x * np.float32(sign_T1))
  (_, a), (_, b) = (
    cells.apply(cell, parameters('tlb'), each) for each in (block, other)
  )
  changed_T = np.abs(a - b)[0].max(-1) > 1e-5
  np.testing.assert_array_equal(changed_T, np.arange(T) >= W)
  assert not cell.causal and model('tlb', causal=True).causal
  assert cell.block_length == W and not cell.needs_whole_document
  # One chunk of any length would not obey the splitting law.
  assert model('tlb', chunk=None).needs_whole_document


def test_embeddings_are_dropped_too():
  """Measured where attention and MLP add zeros."""
  cell = model('tlb', changes={'dropout': 0.5})
  still = jax.tree.map(jnp.zeros_like, parameters('tlb'))
  ones = example().replace(x=np.ones_like(example().x))
  rngs = {'dropout': jax.random.key(0)}
  _, y_BTD = cells.apply(cell, still, ones, rngs=rngs)
  assert set(np.unique(y_BTD)) == {0.0, 2.0}
  np.testing.assert_array_equal(cells.apply(cell, still, ones)[1], ones.x)


def test_memory_is_not_rounded_to_the_dtype_of_activations():
  """Measured where writers add zeros."""
  cell = model('tlb', changes={'dtype': 'bfloat16'})
  still = jax.tree.map(jnp.zeros_like, parameters('tlb'))
  still |= {'first': parameters('tlb')['first']}
  block = example().replace(x=jnp.asarray(example().x, 'bfloat16'))
  memory, _ = cells.apply(cell, still, block)
  np.testing.assert_array_equal(memory[0], still['first'])


def test_halting_counts_the_chunks_of_all_rows():
  cell, params = model('gutlb'), parameters('gutlb')
  _, sown = cells.apply(cell, params, example(), mutable='metrics')
  seen = metrics.collect(sown['metrics'])
  # Two chunks of rows 0 and 3, one of row 1.
  assert float(seen['halting_depth'].count) == 5
  assert 0 < float(seen['halting_depth_max'].value) <= 3


def test_chunks_of_padding_do_not_dilute_the_balance_of_experts():
  cell = model('gutlb')
  layer = cell.encoder.layer.clone(experts=Experts(4, 2, balance=0.03))
  cell = cell.clone(encoder=cell.encoder.clone(layer=layer))
  block = cells.example(T + W, [T, 2])
  params = cells.parameters(cell, block)

  def balance(block):
    sown = cells.apply(cell, params, block, mutable=['losses', 'metrics'])[1]
    seen = metrics.collect(sown['metrics'])['expert_imbalance']
    sown = {'balance': sown['losses']['encoder']['balance']}
    return float(auxiliary(sown)), float(seen.total / seen.count)

  found, expected = balance(block), balance(cells.part(block, 0, T))
  assert found == pytest.approx(expected, rel=1e-5)
  assert min(map(abs, expected)) > 1e-5


class Length(Cell):
  """State: number of chunks with tokens. Outputs the length of each chunk."""

  causal = False
  is_recurrent = True

  def initial_state(self, batch):
    return jnp.zeros(batch)

  def __call__(self, state_B, block):
    length = block.mask.shape[1]
    return state_B + block.mask.any(1), jnp.full_like(block.x, length)

  def parts(self, state_B):
    return {'count': state_B}

  def with_parts(self, state_B, parts):
    return parts['count']

  def memory_slots(self, state_B):
    return state_B[:, None, None]


@pytest.mark.parametrize(
  'tokens, options, length, filled',
  [
    (512, {'length': 100}, 86, [6, 3]),
    (1024, {'count': 5}, 205, [5, 3]),
    (100, {'length': 100}, 100, [1, 1]),
    # Of five chunks of four the last would be empty, and is not counted.
    (16, {'count': 5}, 4, [4, 2]),
    (3, {'count': 5}, 1, [3, 1]),
  ],
)
def test_how_long_chunks_are(tokens, options, length, filled):
  """Row 1 is half as long."""
  mask_BT = np.arange(tokens) < np.array([tokens, tokens // 2])[:, None]
  block = Block(np.zeros((2, tokens, 1), np.float32), mask_BT)
  state_B, y_BTD = Chunks(Length(), **options).apply({}, jnp.zeros(2), block)
  np.testing.assert_array_equal(y_BTD, np.full((2, tokens, 1), length))
  assert state_B.tolist() == filled


def test_chunks_are_those_of_a_fixed_length():
  """If the length does not divide the tokens, padding comes last."""
  params, block = parameters('tlb'), cells.example(T - 1, [T - 1, W + 1])

  def chunks(params, block):
    cell = Chunks(model('tlb', chunk=None), length=W)
    return cell.apply({'params': {'cell': params}}, block, method=cells.forward)

  def fixed(params, block):
    pad = lambda a: jnp.pad(a, ((0, 0), (0, 1)) + ((0, 0),) * (a.ndim - 2))
    padded = jax.tree.map(pad, block)
    cell = model('tlb')
    state, y = cell.apply({'params': params}, padded, method=cells.forward)
    return state, y[:, :-1]

  assert_close(*(cells.outcome(f, params, block) for f in (chunks, fixed)))


def test_what_chunks_take_from_the_cell():
  cell, state_B = Chunks(Length(), count=2), jnp.arange(2.0)
  assert cell.is_recurrent and not cell.causal
  assert cell.needs_whole_document and cell.takes_segments
  assert not cell.can_step and cell.block_length is None
  apply = functools.partial(cell.apply, {}, state_B)
  np.testing.assert_array_equal(apply(method='clear'), [0, 0])
  slots = apply(method='memory_slots')
  np.testing.assert_array_equal(slots[:, 0, 0], [0, 1])
