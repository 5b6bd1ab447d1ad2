"""Reading HLO: cycles, collectives and groups of texts with known ones."""

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


FUSED = {
  'product': ['  %d = f32[8,8]{1,0} dot(%a, %b), metadata={}'],
  'nested': ['  %f = f32[8,8]{1,0} fusion(%a), kind=kLoop, calls=%product'],
  'moved': ['  %t = f32[8,8]{0,1} transpose(%a)'],
  'negated': ['  %n = s32[] negate(%a)', '  %c = f32[8]{0} copy(%t)'],
  'bounded': ['  %t = f32[8]{0} tanh(%a)'],
  'added': ['  %t = f32[8]{0} add(%a, %b)', '  %c = f32[8]{0} copy(%t)'],
}


@pytest.mark.parametrize(
  'body, kind',
  [
    ('nested', 'products'),
    ('moved', 'copies'),
    ('negated', 'copies'),
    ('added', 'arithmetic'),
    ('bounded', 'arithmetic'),
  ],
)
def test_kind_of_an_operation(body, kind):
  line = f'  %x.1 = f32[8]{{0}} fusion(%a), kind=kLoop, calls=%{body}'
  assert hlo.label(FUSED, line) == hlo.Label(kind, 'unnamed')


@pytest.mark.parametrize(
  'op_name, place',
  [
    (
      'jit(train_step)/jvp(Model)/cell/cell.run/cells_3/layer/mlp/hidden/dot',
      'forward cell/cells/layer/mlp/hidden',
    ),
    (
      'jit(train_step)/transpose(jvp(Model))/cell/while/body/closed_call/'
      'checkpoint/rematted_computation/cells_12/bhqk,bhxk->bhqx/dot_general',
      'recomputed cell/cells',
    ),
    ('jit(train_step)/transpose(jvp(loss))/mul', 'backward loss'),
    ('jit(train_step)/optimizer/reduce_sum', 'optimizer'),
    (
      'jit(train_step)/jvp(Model)/cell/mlp/mul;jit(train_step)/jvp(Model)/head/add',
      'forward cell/mlp',
    ),
    (
      'jit(train_step)/jvp(Model)/drop/jit(_threefry_fold_in)/train_step/while/or',
      'forward drop',
    ),
    ('jit(train_step)/add', 'step'),
  ],
)
def test_place_of_an_operation(op_name, place):
  assert hlo.place(op_name) == place


def test_all_iterations_of_loops_count_and_each_exchange_once():
  found = hlo.read(TEXT)
  assert found.cycles == (5 + 1) * 100 + 40 + 30 + 1 + 2
  assert found.endless == 1
  assert found.kernels == {hlo.Kernel('k', 70, 9): 6}
  assert found.unpriced == {'sort': 1}
  counts = [(one.op, one.size, n) for one, n in found.collectives.items()]
  assert sorted(counts) == [
    ('all-gather', 64, 1),  # Asynchronous.
    ('all-reduce', 32, 6),
    ('reduce-scatter', 8, 1),  # An all-reduce that keeps a part.
  ]


BACK = '  %b = f32[8]{0} call('
LOOP_BACK = '  %v = (s32[], f32[8]) while(%t), condition=%back, body=%body'


def test_a_backward_loop_counts_the_maximum_of_iterations():
  """Its text does not say the number; it must not count as 0."""
  text = TEXT.replace(BACK, f'{LOOP_BACK}\n{BACK}')
  once = hlo.read(TEXT)
  found = hlo.read(text, depth=7)
  assert found.cycles == once.cycles + 7 * 100
  assert found.kernels.total() == once.kernels.total() + 7
  assert found.endless == once.endless == 1
  unknown = hlo.read(text)
  assert unknown.cycles == once.cycles + 100
  assert unknown.endless == 2


def test_the_result_of_a_start_operation_includes_its_operand():
  line = (
    '  %g = (f32[4]{0}, f32[12]{0}) all-gather-start(%x), replica_groups={}, '
    'dimensions={0}'
  )
  text = f'ENTRY %m (x: f32[4]) -> f32[4] {{\n{line}\n{COST % 1}\n}}\n'
  [one] = hlo.read(text).collectives
  assert (one.op, one.size) == ('all-gather', 48)


def test_an_all_reduce_of_several_arrays_is_their_sum():
  line = (
    '  %r = (f32[4]{0}, f32[12]{0}) all-reduce-start(%x, %y), replica_groups={}'
  )
  text = f'ENTRY %m (x: f32[4]) -> f32[4] {{\n{line}\n{COST % 1}\n}}\n'
  [one] = hlo.read(text).collectives
  assert (one.op, one.size) == ('all-reduce', 64)


def test_an_unknown_format_is_refused():
  for text in 'ENTRY %main (x: f32[]) -> f32[] {\n}\n', '"estimated_cycles":':
    with pytest.raises(ValueError, match='libtpu'):
      hlo.read(text)


def test_an_instruction_of_a_tuple():
  line = (
    '  ROOT %w.1 = (s32[]{:T(128)}, bf16[4,5]{1,0:T(8,128)(2,1)}, /*index=5*/'
    'pred[]) while(%t), condition=%c.2, body=%b.3.sunk'
  )
  name, shape, op, rest = hlo.instruction(line)
  assert (name, op) == ('w.1', 'while')
  assert shape.startswith('(s32[]') and shape.endswith('pred[])')
  assert hlo.called(rest, 'condition') == 'c.2'
  assert hlo.called(rest, 'body') == 'b.3.sunk'
  assert hlo.array_bytes(shape) == 4 + 4 * 5 * 2 + 1
  assert hlo.instruction('  %d = f32[3]{0} copy-done(%s)') is None
  two = 'conditional(%p), true_computation=%yes, false_computation=%no'
  assert hlo.branches(two) == ['yes', 'no']


N = '%n.1 = s32[]{:T(128)} constant(10)'
M = '%m = s32[] constant(7)'
ZERO = '%z = s32[]{:T(128)} constant(0)'


@pytest.mark.parametrize(
  'lines, number',
  [
    ((N, 'ROOT %lt = pred[] compare(%i, %n.1), direction=LT'), 10),
    ((N, M, '%lt = pred[] compare(%i, %n.1), direction=LT'), 10),
    ((ZERO, N, '%lt = pred[] compare(%i, %n.1), direction=LT'), 10),
    ((ZERO, 'ROOT %ge = pred[] compare(%l, %z), direction=GE'), 0),
    ((N, 'ROOT %ge = pred[] compare(%l, %n.1), direction=GE'), None),
    ((ZERO, 'ROOT %lt = pred[] compare(%i, %z), direction=LT'), None),
    ((N, 'ROOT %and = pred[] and(%a, %b)'), None),
  ],
)
def test_the_limit_of_a_loop_is_in_its_condition(lines, number):
  assert hlo.iteration_limit([f'  {line}' for line in lines]) == number


MESH = {'data': 3, 'fsdp': 1, 'model': 2}
DATA = [[0, 2, 4], [1, 3, 5]]
MODEL = [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
  'written, members, axes',
  [
    ('replica_groups={{0,1},{2,3},{4,5}}, x', MODEL, ('model',)),
    ('replica_groups=[3,2]<=[6], x', MODEL, ('model',)),
    ('replica_groups=[2,3]<=[3,2]T(1,0), x', DATA, ('data',)),
    ("replica_groups=mesh['a'=3,'b'=2] {'b'}, x", MODEL, ('model',)),
    ("replica_groups=mesh['a'=3,'b'=2] {'a'}, x", DATA, ('data',)),
    (
      "replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'a'}, x",
      MODEL,
      ('model',),
    ),
    ("replica_groups=mesh['a'=3,'b'=2] {'a','b'}", [list(range(6))], None),
    ('replica_groups={}, x', [list(range(6))], None),
    ('source_target_pairs={{0,1},{2,3}}, x', [[0, 1], [2, 3]], ('model',)),
  ],
)
def test_groups(written, members, axes):
  found = hlo.groups(f'%a = f32[2]{{0}} all-reduce(%b), {written}', 6)
  assert found.tolist() == members
  assert hlo.axes(found, MESH) == (axes or ('data', 'model'))


def test_unknown_groups_are_refused():
  for written in "replica_groups=mesh['a'=6] {'a':(1)2}", 'replica_groups=new':
    with pytest.raises(ValueError, match='unknown way'):
      hlo.groups(written, 6)


@needs_libtpu
def test_a_product_takes_about_the_time_at_peak():
  """Near the peak, with one all-reduce; a scan of three has three."""
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
  """Loop body of one product per step, until rows are 0."""

  def step(self, shared, rows, l, state):
    del rows, l
    state = state @ shared
    return state, state.sum(-1)

  def active(self, state):
    return state[:, 0] != 0

  def changed(self, added):
    return added != 0


@needs_libtpu
@pytest.mark.slow
def test_a_loop_that_may_end_early_and_its_gradient_count_whole():
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
