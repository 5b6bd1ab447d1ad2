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
from meliad_rec.distributed import partition
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.layer_config import EncoderConfig
from meliad_rec.metrics import metrics
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import run
from meliad_rec.recurrence.halt import Halt
from meliad_rec.training.train_step import auxiliary
from tests import architectures as tiny
from tests import plain_encoder
from tests.architectures import D
from tests.architectures import encoder_config
from tests.architectures import S
from tests.architectures import W as CHUNKS_W
from tests.cells import assert_close

B, W, CHUNKS = 4, 3, 2
T = W * CHUNKS
KINDS = {'tlb': False, 'gutlb': True}
kinds = pytest.mark.parametrize('kind', KINDS)


def model(kind, causal=False, changes=None, **options):
  config = encoder_config(causal, **(changes or {}))
  layer = functools.partial(EncoderLayer, config, reads_memory=True)
  encoder = EncoderLayers(layer, 1)
  if KINDS[kind]:
    halt = Halt(threshold=0.9, bias_init=-1.0)
    encoder = Universal(layer(gated=True), 3, True, True, halt)
  options = {'slots': S, 'writers': 2, 'chunk': W} | options
  return LatentBottleneck(config, encoder, **options)


def example(tokens=T):
  """Row 0 is full, 1 ends in the first chunk, 2 is empty, 3 lacks one token."""
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, tokens, D)).astype(np.float32)
  return Block(x_BTD, np.arange(tokens) < np.array([T, 2, 0, T - 1])[:, None])


def forward(cell, block):
  return run(cell, cell.initial_state(len(block.mask)), block)


@functools.cache
def parameters(kind):
  init = jax.jit(functools.partial(model(kind).init, method=forward))
  one = jax.tree.map(lambda a: a[:, :W], example())
  params = init(jax.random.key(0), one)['params']
  rng = np.random.default_rng(1)
  move = lambda a: np.float32(a + rng.normal(size=a.shape) * 0.1)
  return jax.tree.map(move, params)


def applied(cell, params, block, **options):
  run_ = functools.partial(cell.apply, method=forward, **options)
  return jax.jit(run_)({'params': params}, block)


def of(run_, params):
  """Results of run_(params, x) and gradients of all of them."""
  block = example()

  def loss(params, x_BTD):
    memory, y_BTD, cost = run_(params, x_BTD)
    y_BTD = jnp.where(block.mask[..., None], y_BTD, 0)
    total = jnp.sum(jnp.sin(y_BTD)) + jnp.sum(memory**2) + cost
    return total, (memory, y_BTD, cost)

  grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
  return grad(params, block.x)


@pytest.mark.parametrize(
  'kind', ['tlb', pytest.param('gutlb', marks=pytest.mark.slow)]
)
def test_is_the_algorithm(kind):
  """Compares values and all gradients, through all chunks."""
  cell, params, mask_BT = model(kind), parameters(kind), example().mask

  def made(params, x_BTD):
    (memory, y_BTD), sown = cell.apply(
      {'params': params},
      Block(x_BTD, mask_BT),
      method=forward,
      rngs={'dropout': jax.random.key(0)},
      mutable=['losses'],
    )
    return memory, y_BTD, auxiliary(sown.get('losses', {}))

  def plain(params, x_BTD):
    memory, y_BTD, penalties = plain_encoder.bottleneck(
      cell, params, x_BTD, mask_BT
    )
    # The mean over each row's chunks that hold any token, then over rows.
    real_B = mask_BT.reshape(B, CHUNKS, W).any(2).sum(1)
    assert set(real_B) == {0, 1, 2}
    cost_B = sum(penalties) / np.maximum(real_B, 1)
    return memory, y_BTD, cost_B.sum() / (real_B > 0).sum()

  expected = of(plain, params)
  jax.tree.map(assert_close, of(made, params), expected)
  cost = expected[1][2]
  assert (cost > 0) == KINDS[kind]


@pytest.mark.slow
@kinds
def test_remat_changes_nothing(kind):
  """Early exit in depth, within a rematerialized chunk."""

  def made(params, x_BTD, remat):
    (memory, y_BTD), sown = model(kind, remat=remat).apply(
      {'params': params},
      example().replace(x=x_BTD),
      method=forward,
      rngs={'dropout': jax.random.key(0)},
      mutable=['losses'],
    )
    return memory, y_BTD, auxiliary(sown.get('losses', {}))

  once, again = (
    of(functools.partial(made, remat=remat), parameters(kind))
    for remat in ('none', 'full')
  )
  jax.tree.map(assert_close, once, again)


@pytest.mark.slow
def test_a_mesh_changes_nothing():
  def made(params, x_BTD):
    (memory, y_BTD), sown = model('gutlb').apply(
      {'params': params},
      example().replace(x=x_BTD),
      method=forward,
      rngs={'dropout': jax.random.key(0)},
      mutable=['losses'],
    )
    return memory, y_BTD, auxiliary(sown['losses'])

  expected = of(made, parameters('gutlb'))
  mesh = partition.make_mesh(2, 2, 2)
  place = lambda path, a: jax.device_put(
    a,
    jax.sharding.NamedSharding(
      mesh,
      partition.param_spec(
        mesh, f'cell/{partition.path_string(path)}', a.shape
      ),
    ),
  )
  params = jax.tree_util.tree_map_with_path(place, parameters('gutlb'))
  with jax.set_mesh(mesh):
    found = of(made, params)
  jax.tree.map(assert_close, jax.device_get(found), jax.device_get(expected))


@kinds
def test_rows_whose_chunk_is_empty_keep_their_memory(kind):
  """The bits of empty rows stay; other rows change."""
  block = example()
  memories = [parameters(kind)['first']]
  for end in (W, T):
    part = jax.tree.map(lambda a, end=end: a[:, :end], block)
    memories.append(applied(model(kind), parameters(kind), part)[0])
  first, middle, last = memories
  np.testing.assert_array_equal(middle[2], first)
  np.testing.assert_allclose(last[1:3], middle[1:3], rtol=1e-6)
  for row in (0, 3):
    assert np.abs(last[row] - middle[row]).max() > 1e-3


@pytest.mark.parametrize(
  'first, alike',
  [
    (nn.initializers.zeros, True),
    (nn.initializers.ones, True),
    (nn.initializers.normal(0.02), False),
    (nn.initializers.normal(1.0), False),
  ],
)
def test_slots_that_begin_alike_stay_alike(first, alike):
  """They also have equal gradients."""
  slots = first(jax.random.key(5), (S, D))
  gradients, memory = through_slots()(parameters('tlb') | {'first': slots})
  for slots in (memory[0], gradients['first']):
    spread = np.ptp(slots, 0).max()
    assert (spread < 1e-5) == alike
    assert alike or spread > 0.01


@functools.cache
def through_slots():
  """Returns gradients of a loss of all slots, and the slots."""
  weight_D = np.random.default_rng(2).normal(size=D)

  def loss(params):
    apply = functools.partial(model('tlb').apply, method=forward)
    memory, y_BTD = apply({'params': params}, example())
    return jnp.sum(jnp.sin(y_BTD)) + jnp.sum(memory * weight_D), memory

  return jax.jit(jax.grad(loss, has_aux=True))


def test_first_slots_are_small_and_unlike():
  init = functools.partial(model('tlb', slots=300).init, method='initial_state')
  first_SD = init(jax.random.key(0), B)['params']['first']
  assert 0.019 < first_SD.std() < 0.021


@kinds
@pytest.mark.parametrize('causal', [False, True])
def test_which_outputs_a_token_changes(kind, causal):
  """A token sees later tokens only in its own chunk, if not causal."""
  cell, block = model(kind, causal), example()
  assert cell.causal == causal
  at = W + 1
  block = block.replace(mask=np.ones((B, T), bool))
  moved = -block.x[:, at]
  other = block.replace(x=jnp.asarray(block.x).at[:, at].set(moved))
  apply = jax.jit(functools.partial(cell.apply, method=forward))
  params = {'params': parameters(kind)}
  change_BTD = np.abs(apply(params, block)[1] - apply(params, other)[1])
  changed_T = change_BTD.max((0, 2)) > 1e-5
  expected_T = np.arange(T) >= (at if causal else W)
  np.testing.assert_array_equal(changed_T, expected_T)


def test_memory_is_float32_whatever_activations_are():
  cell = model('gutlb', changes={'dtype': 'bfloat16'})
  block = example().replace(x=jnp.asarray(example().x, jnp.bfloat16))
  memory, y_BTD = applied(cell, parameters('gutlb'), block)
  expected, _ = applied(model('gutlb'), parameters('gutlb'), example())
  assert memory.dtype == jnp.float32 and y_BTD.dtype == jnp.bfloat16
  assert 0 < np.abs(memory - expected).mean() < 0.02


def test_summary_and_clear():
  cell, params = model('tlb'), {'params': parameters('tlb')}
  state, _ = applied(cell, parameters('tlb'), example())
  np.testing.assert_array_equal(
    cell.apply(params, state, method='memory_slots'), state
  )
  cleared = cell.apply(params, state, method='clear')
  np.testing.assert_array_equal(
    cleared, np.stack([params['params']['first']] * B)
  )
  assert (
    cell.is_recurrent and not cell.can_step and not cell.needs_whole_document
  )
  assert cell.block_length == W and not cell.takes_segments
  assert model('tlb', chunk=None).block_length is None


def test_embeddings_are_dropped_too():
  """Measured where attention and MLP add zeros."""
  cell = model('tlb', changes={'dropout': 0.5})
  still = jax.tree.map(jnp.zeros_like, parameters('tlb'))
  ones = example().replace(x=np.ones((B, T, D), np.float32))
  _, y_BTD = applied(cell, still, ones, rngs={'dropout': jax.random.key(0)})
  assert set(np.unique(y_BTD)) == {0.0, 2.0}
  _, y_BTD = applied(cell, still, ones)
  np.testing.assert_array_equal(y_BTD, ones.x)


def test_halting_counts_the_chunks_of_all_rows():
  cell, block = model('gutlb'), example()
  _, sown = applied(cell, parameters('gutlb'), block, mutable=['metrics'])
  seen = metrics.collect(sown['metrics'])
  # Two chunks of rows 0 and 3, one of row 1.
  assert float(seen['halting_depth'].count) == 5
  assert 0 < float(seen['halting_depth_max'].value) <= 3


@pytest.mark.parametrize('kind, millions', [('tlb', 8.17), ('gutlb', 6.59)])
def test_parameters_at_the_papers_size(kind, millions):
  """ListOps as counted in the authors' code: 18 words, 10 classes."""
  config = EncoderConfig(
    d_model=512, num_heads=8, head_dim=64, mlp_dim=1024, causal=False
  )
  layer = functools.partial(EncoderLayer, config, reads_memory=True)
  encoder = EncoderLayers(layer, 2)
  if KINDS[kind]:
    encoder = Universal(layer(gated=True), 5, True, True)
  cell = LatentBottleneck(config, encoder, slots=20, chunk=20)
  block = Block(jnp.zeros((1, 20, 512)), jnp.ones((1, 20), bool))
  init = functools.partial(cell.init, method=forward)
  shapes = jax.eval_shape(init, jax.random.key(0), block)['params']
  own = sum(a.size for a in jax.tree.leaves(shapes))
  head = 512 * 512 + 512 + 512 * 10 + 10
  assert round((own + 18 * 512 + head) / 1e6, 2) == millions


@pytest.mark.parametrize('slots, writers', [(0, 1), (S, 0)])
def test_slots_and_writers_are_needed(slots, writers):
  cell = model('tlb', slots=slots, writers=writers)
  with pytest.raises(ValueError, match='SLOTS and WRITERS'):
    cell.init(jax.random.key(0), example(), method=forward)


def test_chunks_have_tokens():
  cell = model('tlb', chunk=0)
  with pytest.raises(ValueError, match='WINDOW'):
    cell.init(jax.random.key(0), example(), method=forward)


class Length(Cell):
  """State: number of chunks with tokens. Outputs the length of each chunk."""

  def initial_state(self, batch):
    return jnp.zeros(batch)

  def __call__(self, state_B, block):
    length = block.mask.shape[1]
    return state_B + block.mask.any(1), jnp.full_like(block.x, length)

  def clear(self, state_B):
    return 0 * state_B

  def memory_slots(self, state_B):
    return state_B[:, None, None]

  @property
  def is_recurrent(self):
    return True


def lengths(tokens, **options):
  """Returns chunk lengths, and the number of chunks that rows fill."""
  cell = Chunks(Length(), **options)
  mask_BT = np.arange(tokens) < np.array([tokens, tokens // 2])[:, None]
  block = Block(np.zeros((2, tokens, 1), np.float32), mask_BT)
  state_B, y_BTD = cell.apply({}, jnp.zeros(2), block)
  assert y_BTD.shape == (2, tokens, 1)
  (length,) = set(np.unique(y_BTD))
  return length, state_B.tolist()


@pytest.mark.parametrize(
  'tokens, options, length, filled',
  [
    (512, {'length': 100}, 86, [6, 3]),
    (1024, {'length': 100}, 94, [11, 6]),
    (512, {'count': 5}, 103, [5, 3]),
    (1024, {'count': 5}, 205, [5, 3]),
    (100, {'length': 100}, 100, [1, 1]),
    (12, {'length': 4}, 4, [3, 2]),
    # Of five chunks of four the last would be empty, and is not counted.
    (16, {'count': 5}, 4, [4, 2]),
    (3, {'count': 5}, 1, [3, 1]),
  ],
)
def test_how_long_chunks_are(tokens, options, length, filled):
  assert lengths(tokens, **options) == (length, filled)


def bottleneck(chunk):
  encoder = tiny.transformer(1, memory=True)
  return tiny.LatentBottleneck(encoder_config(), encoder, slots=S, chunk=chunk)


def chunks_example(tokens):
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(2, tokens, D)).astype(np.float32)
  return Block(x_BTD, np.arange(tokens) < np.array([[tokens], [CHUNKS_W + 1]]))


@functools.cache
def outcome(chunked, tokens, padded):
  """Returns state, outputs and gradients."""
  cell = (
    Chunks(bottleneck(None), length=CHUNKS_W)
    if chunked
    else bottleneck(CHUNKS_W)
  )
  block = jax.tree.map(
    lambda a: np.pad(a, ((0, 0), (0, padded)) + ((0, 0),) * (a.ndim - 2)),
    chunks_example(tokens),
  )
  init = functools.partial(bottleneck(CHUNKS_W).init, method=forward)
  params = jax.jit(init)(jax.random.key(0), chunks_example(CHUNKS_W))['params']

  def loss(params):
    inner = {'cell': params} if chunked else params
    state, y_BTD = cell.apply({'params': inner}, block, method=forward)
    y_BTD = y_BTD[:, :tokens]
    return jnp.sum(jnp.sin(y_BTD)) + jnp.sum(state**2), (state, y_BTD)

  return jax.jit(jax.grad(loss, has_aux=True))(params)


@pytest.mark.parametrize(
  'tokens, padded',
  [
    pytest.param(2 * CHUNKS_W, 0, marks=pytest.mark.slow),
    (2 * CHUNKS_W - 1, 1),
  ],
)
def test_is_the_cell_in_chunks(tokens, padded):
  """Equals a fixed length; padding comes last if it does not divide."""
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    outcome(True, tokens, 0),
    outcome(False, tokens, padded),
  )


def test_what_it_takes_from_the_cell():
  cell = Chunks(Length(), count=2)
  assert cell.is_recurrent and cell.causal
  assert cell.needs_whole_document and cell.takes_segments and cell.scans_blocks
  assert not cell.can_step and cell.block_length is None
  state_B = jnp.arange(2.0)
  clear = cell.apply({}, state_B, method='clear')
  np.testing.assert_array_equal(clear, [0, 0])
  summary = cell.apply({}, state_B, method='memory_slots')
  np.testing.assert_array_equal(summary[:, 0, 0], [0, 1])
  assert not Chunks(tiny.windowed(), count=2).is_recurrent
  both = tiny.LatentBottleneck(
    encoder_config(causal=False), tiny.transformer(memory=True, causal=False), S
  )
  assert not Chunks(both, count=2).causal


@pytest.mark.parametrize(
  'options', [{}, {'length': 4, 'count': 2}, {'length': 0}, {'count': -1}]
)
def test_one_of_length_and_count_is_needed(options):
  with pytest.raises(ValueError, match='Chunks.length and count'):
    lengths(12, **options)


def test_a_cell_that_cuts_blocks_itself_is_refused():
  """The length of its own would be ignored."""
  cell = Chunks(bottleneck(CHUNKS_W), length=CHUNKS_W)
  with pytest.raises(ValueError, match='LatentBottleneck.chunk'):
    cell.init(jax.random.key(0), chunks_example(CHUNKS_W), method=forward)
