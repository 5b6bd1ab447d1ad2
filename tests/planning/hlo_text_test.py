"""Lines of HLO, taken apart."""

import pytest

from meliad_rec.planning import hlo

TEXT = """HloModule jit_f, is_scheduled=true

%inner (a: f32[3]) -> f32[3] {
  %a = f32[3]{0} parameter(0)
  ROOT %double.1 = f32[3]{0:T(128)} add(%a, %a)
}

ENTRY %main.9_spmd (x: f32[3], y: s32[]) -> (f32[3]) {
  %x = f32[3]{0} parameter(0)
}
"""


def test_computations_by_name_and_the_one_that_is_run():
  bodies, entry = hlo.computations(TEXT)
  assert entry == 'main.9_spmd'
  assert {name: len(lines) for name, lines in bodies.items()} == {
    'inner': 2,
    'main.9_spmd': 1,
  }
  assert hlo.computations('nothing') == ({}, None)


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


def test_what_takes_no_time_is_none():
  for line in (
    '  %a = f32[3]{0} parameter(0)',
    '  %d = f32[3]{0} copy-done(%s)',
    '}',
    '',
  ):
    assert hlo.instruction(line) is None


def test_branches_in_both_spellings():
  assert hlo.branches('conditional(%p), branch_computations={%a, %b.1}') == (
    ['a', 'b.1']
  )
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
    (('ROOT %go = pred[] get-tuple-element(%p), index=2',), None),
    ((), None),
  ],
)
def test_the_limit_of_a_loop_is_what_its_counter_is_compared_with(
  lines, number
):
  assert hlo.turn_limit([f'  {line}' for line in lines]) == number
