"""Sizes of a step, by hand, and results of compilers."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.window import WindowLayer
from meliad_rec.distributed import partition
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.metrics import losses
from meliad_rec.models.model import Model
from meliad_rec.planning import measure
from meliad_rec.planning import topology
from meliad_rec.training import optimizer
from meliad_rec.training import schedules
from meliad_rec.training.program import TrainProgram
from tests.libtpu import needs_libtpu

ROWS, SEGMENT, VOCAB, D = 8, 24, 32, 128


def program(devices, model=2, dtype='float32', rule=optimizer.adafactor):
  config = LayerConfig(
    d_model=D, num_heads=2, head_dim=64, mlp_dim=256, window=8, dtype=dtype
  )
  return TrainProgram(
    model=Model(VOCAB, stack.layers(2, lambda: WindowLayer(config)), D),
    optimizer=optimizer.chain(rule, schedules.rsqrt(10)),
    objective=losses.objective,
    mesh=partition.make_mesh(model=model, devices=devices),
    rows=ROWS,
    segment=SEGMENT,
  )


def experiment(devices, **settings):
  return types.SimpleNamespace(
    program=program(devices, **settings), batch=ROWS, segment=SEGMENT, steps=7
  )


def test_sizes_need_no_compiler():
  found = measure.sizes(experiment(jax.devices()))
  assert found.mesh == {'data': 4, 'fsdp': 1, 'model': 2}
  assert (found.devices, found.hosts) == (8, None)
  assert (found.tokens, found.steps) == (ROWS * SEGMENT, 7)
  kernels = 2 * (4 * D * 128 + 2 * D * 256) + VOCAB * D
  rest = found.parameters - kernels
  assert 0 < rest < 0.02 * kernels
  # Kernels and the embedding are halved over model, the rest is not.
  assert found.held['parameters'] == 4 * (kernels // 2 + rest)
  assert found.held['average'] == 0
  # Tokens, targets and two masks of 2 rows, and three values per row.
  assert found.held['batch'] == 2 * (SEGMENT * (4 + 4 + 1 + 1) + 1 + 4 + 4)
  # 3 x 2 FLOP per parameter and token, and attention.
  products = 3 * 2 * kernels * ROWS * SEGMENT
  assert products < found.flops < 1.5 * products


def test_moments_are_sharded_like_their_parameters():
  held = measure.sizes(experiment(jax.devices(), rule=optimizer.adamw)).held
  counts = 4 * 2  # Steps of Adam and of the schedule.
  assert held['optimizer'] == 2 * held['parameters'] + counts


def test_a_loop_of_unknown_length_has_no_flops():
  one = experiment(jax.devices())
  more, square = lambda a: a.sum() > 0, lambda a: a @ a
  endless = lambda *_: jax.lax.while_loop(more, square, jnp.ones((D, D)))
  one.program.__dict__['forward'] = endless
  found = measure.sizes(one)
  assert (found.depth, found.flops) == (None, None)


@dataclasses.dataclass
class Broken:
  """A program that does not compile."""

  message: str

  @property
  def train_step(self):
    raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
  'message, needed',
  [
    ('RESOURCE_EXHAUSTED: on HBM, the total (367.50G)', 367.5 * 2**30),
    # Rounded: one byte more than the chip has.
    (
      'RESOURCE_EXHAUSTED: of memory hbm. Used 15.75G of 15.75G hbm. Exceeded '
      'hbm capacity by 1.5M.',
      63 * 2**28 + 1,
    ),
  ],
)
def test_a_step_that_does_not_fit_says_what_it_needs(message, needed):
  where = topology.parse('v5e:2x2')
  with pytest.raises(measure.TooLarge, match='GiB on each device') as caught:
    measure.compiled(Broken(message), where, None)
  assert caught.value.needed == needed > where.chip.hbm


def test_other_errors_stay():
  for message in 'INTERNAL: (4.0G) hbm', 'RESOURCE_EXHAUSTED: of vmem (4.0G)':
    with pytest.raises(jax.errors.JaxRuntimeError, match=message[:8]):
      measure.compiled(Broken(message), topology.parse('v5e:2x2'), None)


def test_with_an_unknown_format_the_memory_is_known():
  sizes = types.SimpleNamespace(
    argument_size_in_bytes=3,
    peak_memory_in_bytes=10,
    generated_code_size_in_bytes=5,
  )
  step = types.SimpleNamespace(
    memory_analysis=lambda: sizes, as_text=lambda: 'another format'
  )
  one = types.SimpleNamespace(train_step=step, mesh=None)
  found = measure.compiled(one, topology.parse('v5e:2x2'), None)
  assert (found.arguments, found.temporary, found.code) == (3, 7, 5)
  assert found.needed == 15
  assert found.parts is None and found.exchanges is None
  assert 'n/a: the compiled program' in found.notes[0]


@needs_libtpu
def test_the_trainers_step_compiles_for_a_slice():
  one = program(topology.devices('v5e:2x2'), dtype='bfloat16')
  found = measure.compiled(one, topology.parse('v5e:2x2'), None)
  assert 0 < found.needed < 2**30
  parts = {(part.kind, part.place): part.seconds for part in found.parts}
  assert parts['products', 'backward logits'] > 0
  assert all(seconds >= 0 for seconds in parts.values())
  assert any(place == 'optimizer' for _, place in parts)
  kinds = {(e.op, e.axes) for e in found.exchanges}
  assert ('all-reduce', 'data') in kinds and ('all-reduce', 'model') in kinds
  for one in found.exchanges:
    assert one.count > 0 and one.size > 0 and one.seconds > 0
