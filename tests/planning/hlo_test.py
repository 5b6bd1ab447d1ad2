"""A program's cycles and collectives, of a text with known ones."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import pytest

from meliad_rec.distributed import partition
from meliad_rec.planning import hlo
from meliad_rec.planning import topology
from meliad_rec.recurrence import early_exit
from tests.libtpu import needs_libtpu

CHIP = topology.CHIPS['v5e']
COST = 'backend_config={"estimated_cycles":"%d"}'
TEXT = f"""HloModule jit_f

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %x = f32[8]{{0}} get-tuple-element(%p), index=1
  %f.1 = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%fused, {COST % 100}
  %r = f32[8]{{0}} all-reduce(%f.1), replica_groups={{{{0,1}}}}, to_apply=%add
  %k = f32[8]{{0}} custom-call(%r), custom_call_target="tpu_custom_call", \
backend_config={{"cost_estimate":{{"flops":"70","bytes_accessed":"9"}}}}
}}

%condition (p: (s32[], f32[8])) -> pred[] {{
  %n = s32[]{{:T(128)}} constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%until (p: (s32[], f32[8])) -> pred[] {{
  ROOT %go = pred[] get-tuple-element(%p), index=2
}}

%back (p: (s32[], f32[8])) -> pred[] {{
  %zero = s32[]{{:T(128)}} constant(0)
  ROOT %ge = pred[] compare(%l, %zero), direction=GE
}}

%small (a: f32[8]) -> f32[8] {{
  ROOT %c = f32[8]{{0}} copy(%a), {COST % 30}
}}

%large (a: f32[8]) -> f32[8] {{
  ROOT %c = f32[8]{{0}} copy(%a), {COST % 40}
}}

%gather (a: f32[8]) -> (f32[8], f32[16]) {{
  %g.1 = f32[16]{{0}} all-gather(%a), replica_groups={{}}, \
backend_config={{"async_collective_fusion_config":{{}}}}
  ROOT %s = (f32[8]{{0}}) custom-call(%g.1), custom_call_target="\
AsyncCollectiveStart"
}}

%beside (a: f32[8]) -> f32[8] {{
  %g.2 = f32[16]{{0}} all-gather(%a), replica_groups={{}}, \
backend_config={{"async_collective_fusion_config":{{}}}}
}}

%all-reduce-scatter.3 (a: f32[8]) -> f32[2] {{
  %r.2 = f32[8]{{0}} all-reduce(%a), replica_groups={{}}
  ROOT %d = f32[2]{{0}} dynamic-slice(%r.2, %p), dynamic_slice_sizes={{2}}
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body
  %e = (s32[], f32[8]) while(%t), condition=%until, body=%body
  %c = f32[8]{{0}} conditional(%p), branch_computations={{%small, %large}}
  %b = f32[8]{{0}} call(%x), to_apply=%small
  %a.1 = (f32[8]) fusion(%x), kind=kCustom, calls=%gather, {COST % 1}
  %a.2 = f32[8]{{0}} fusion(%x), kind=kOutput, calls=%beside, {COST % 2}
  %a.3 = f32[2]{{0}} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
  %s = f32[4096,8]{{1,0}} sort(%x), dimensions={{0}}
  %z = f32[]{{:T(128)}} sqrt(%x)
}}
"""


def test_loops_count_as_often_as_they_turn():
  found = hlo.read(TEXT)
  assert found.cycles == (5 + 1) * 100 + 40 + 30 + 1 + 2
  assert found.endless == 1
  [(reduce, turns)] = [
    (one, n) for one, n in found.collectives.items() if one.op == 'all-reduce'
  ]
  assert (turns, reduce.size) == (6, 32)
  assert found.kernels == {hlo.Kernel('k', 70, 9): 6}


BACK = '  %b = f32[8]{0} call('
LOOP_BACK = '  %v = (s32[], f32[8]) while(%t), condition=%back, body=%body'


def test_a_loop_back_over_steps_counts_as_often_as_there_may_be():
  """Of which its text says nothing; and it is not 0 times."""
  text = TEXT.replace(BACK, f'{LOOP_BACK}\n{BACK}')
  once = hlo.read(TEXT)
  found = hlo.read(text, depth=7)
  assert found.cycles == once.cycles + 7 * 100
  assert found.kernels.total() == once.kernels.total() + 7
  assert found.endless == once.endless == 1
  unknown = hlo.read(text)
  assert unknown.cycles == once.cycles + 100
  assert unknown.endless == 2


def test_a_collective_beside_fusions_counts_once():
  found = hlo.read(TEXT).collectives.items()
  assert [(n, one.size) for one, n in found if one.op == 'all-gather'] == [
    (1, 64)
  ]


def test_an_all_reduce_of_which_a_part_is_kept_is_a_reduce_scatter():
  found = hlo.read(TEXT).collectives.items()
  assert [(n, one.size) for one, n in found if one.op == 'reduce-scatter'] == [
    (1, 8)
  ]


def test_what_has_no_price_is_named_where_it_is_large():
  assert hlo.read(TEXT).unpriced == {'sort': 1}


def test_a_collective_that_only_starts_has_its_result_beside_its_operand():
  line = (
    '  %g = (f32[4]{0}, f32[12]{0}) all-gather-start(%x), replica_groups={}, '
    'dimensions={0}'
  )
  text = f'ENTRY %m (x: f32[4]) -> f32[4] {{\n{line}\n{COST % 1}\n}}\n'
  [one] = hlo.read(text).collectives
  assert (one.op, one.size) == ('all-gather', 48)


@pytest.mark.parametrize(
  'text', ['', 'ENTRY %main (x: f32[]) -> f32[] {\n}\n', '"estimated_cycles":']
)
def test_an_unknown_text_is_refused(text):
  with pytest.raises(ValueError, match='has no cycles where libtpu'):
    hlo.read(text)


@needs_libtpu
def test_a_product_costs_what_the_chip_can_do():
  """Within a tenth of the peak; one all-reduce; and a scan of three thrice."""
  mesh = partition.make_mesh(model=4, devices=topology.devices('v5e:2x2'))
  n = 4096

  def step(x_AB, w_BC, turns):
    def turn(x_AB, _):
      y_AC = jax.lax.with_sharding_constraint(
        jnp.einsum('ab,bc->ac', x_AB, w_BC), NamedSharding(mesh, whole)
      )
      return y_AC, None

    return jax.lax.scan(turn, x_AB, None, length=turns)[0]

  whole = PartitionSpec()
  shape = lambda *axes: jax.ShapeDtypeStruct(
    (n, n), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*axes))
  )

  def read(turns):
    jitted = jax.jit(step, static_argnums=2)
    lowered = jitted.lower(shape(None, 'model'), shape('model', None), turns)
    return hlo.read(lowered.compile().as_text())

  ideal = 2 * n**3 / 4 * CHIP.clock / CHIP.peak_flops
  once = read(1)
  assert ideal < once.cycles < 1.3 * ideal
  assert sum(once.collectives.values()) == 1
  assert sum(read(3).collectives.values()) == 3


class Products:
  """Steps of one product each, of rows until they are 0."""

  def step(self, shared, rows, l, state):
    del rows, l
    state = state @ shared
    return state, state.sum(-1)

  def alive(self, state):
    return state[:, 0] != 0

  def took(self, added):
    return added != 0


@needs_libtpu
def test_a_loop_that_may_end_early_counts_whole_and_so_does_its_gradient():
  [device] = topology.devices('v5e:1x1')
  place = jax.sharding.SingleDeviceSharding(device)
  shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=place)

  def text(most):
    def total(w, x):
      state, sums, _ = early_exit.while_loop(Products(), w, None, x, most)
      return state.sum() + sums.sum()

    return jax.jit(jax.grad(total)).lower(shape, shape).compile().as_text()

  few, many = text(3), text(7)
  assert hlo.read(many, 7).endless == 0
  assert hlo.read(many).endless == 1
  product = 2 * 1024**3 * CHIP.clock / CHIP.peak_flops
  back = (hlo.read(many, 7).cycles - hlo.read(many).cycles) / 6
  both = (hlo.read(many, 7).cycles - hlo.read(few, 3).cycles) / 4
  assert back > 2 * product
  assert both - back > product
