"""Groups of devices, in each way that programs write them."""

import pytest

from meliad_rec.planning import hlo

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


@pytest.mark.parametrize(
  'written', ["replica_groups=mesh['a'=6] {'a':(1)2}", 'replica_groups=new', '']
)
def test_unknown_ones_are_refused(written):
  with pytest.raises(ValueError, match='which is not known; install'):
    hlo.groups(written, 6)
