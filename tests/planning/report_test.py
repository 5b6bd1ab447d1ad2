"""The plan as people read it, and its advice."""

from collections import Counter
import dataclasses

import pytest

from meliad_rec.planning import estimate
from meliad_rec.planning import report
from tests import planned


def test_columns_are_slices():
  found = report.table([planned.fitting(), planned.too_large('v5p:2x2x2')])
  lines = found.splitlines()
  assert 'Estimates' in lines[0] and 'nothing ran on a TPU' in lines[0]
  assert lines[2].split() == ['v5e:2x4', 'v5p:2x2x2']
  line = lambda name: next(one for one in lines if one.startswith(name))
  assert '4.25 of 15.75 (27%)' in line('  total')
  assert '20.00 of 15.75: does not fit' in line('  total')
  assert line('ms per step').split() == ['ms', 'per', 'step', '1,000.0', 'n/a']
  assert line('MFU').split() == ['MFU', '25%', 'n/a']
  assert line('tokens/s').split() == ['tokens/s', '32,768', 'n/a']
  assert line('hours for 7,200 steps').split()[-2:] == ['2.0', 'n/a']
  assert 'v5e:2x4: note: a loop counts once' in lines
  assert any('3 x all-reduce over data, 5.0 MiB' in one for one in lines)


def test_time_by_kind_and_by_place():
  lines = report.breakdown([planned.fitting()], 'place').splitlines()
  assert lines[1] == 'v5e:2x4: time of a step by place'
  ms, _, _, _, _, share, place = lines[2].split(maxsplit=6)
  assert (ms, share, place) == ('625.00', '62.5%', 'forward cell/mlp')
  kinds = report.breakdown([planned.fitting()], 'kind')
  assert [line.split()[-1] for line in kinds.splitlines()[2:]] == [
    'products',
    'collectives',
    'kernels',
    'copies',
  ]
  assert report.breakdown([planned.unknown()], 'kind').endswith('n/a')


def test_small_times_are_added_up_in_the_last_line():
  times = Counter({'mlp': 1.0, 'loss': 0.5, 'embed': 0.001, 'norm': 0.0005})
  found = estimate.largest_first(times)
  assert list(found) == ['mlp', 'loss', '2 others, each less than 0.1%']
  assert sum(found.values()) == pytest.approx(times.total())
  assert list(estimate.largest_first(Counter({'mlp': 1.0}))) == ['mlp']


def test_the_rest_is_known_without_a_compiler_or_flops():
  found = report.column(planned.unknown())
  assert found['parameters'] == '123,456,789'
  assert found['GiB per device: parameters'] == '0.50'
  assert found['  total'] == 'n/a of 15.75'
  assert found['MFU'] == 'n/a'
  one = planned.fitting()
  one = dataclasses.replace(one, sizes={**one.sizes, 'flops': None})
  assert report.rates(one)['MFU'] is None
  found = report.column(one)
  assert (found['TFLOP per step'], found['MFU']) == ('n/a', 'n/a')
  assert found['tokens/s'] == '32,768'


def sized(data, fsdp, model, batch):
  """An answer that does not fit on this mesh."""
  mesh = {'data': data, 'fsdp': fsdp, 'model': model}
  answer = planned.too_large()
  return dataclasses.replace(
    answer, sizes={**answer.sizes, 'mesh': mesh, 'batch': batch}
  )


@pytest.mark.parametrize(
  'mesh, batch, changes',
  [
    ((4, 1, 2), 32, ['--mesh=data:2,fsdp:2,model:2', "'BATCH = 16'"]),
    ((256, 1, 1), 256, ['--mesh=data:16,fsdp:16']),
    ((12, 1, 1), 24, ['--mesh=data:3,fsdp:4', "'BATCH = 12'"]),
    ((2, 4, 1), 8, ['--mesh=fsdp:8']),
    ((1, 1, 8), 3, []),
  ],
)
def test_advice_recomputes_shards_more_or_takes_fewer_rows(
  mesh, batch, changes
):
  found = report.advice(sized(*mesh, batch))
  assert 'v5e:2x4: a step needs 20.00 GiB' in found
  for change in ['--gin_file=options/remat/full', *changes]:
    assert change in found
  assert ('--mesh' in found, 'BATCH' in found) == (
    any('mesh' in one for one in changes),
    any('BATCH' in one for one in changes),
  )


def test_advice_is_for_what_does_not_fit_or_is_not_known():
  assert report.advice(planned.fitting()) is None
  assert 'not known: no libtpu' in report.advice(planned.unknown())
  without = dataclasses.replace(planned.too_large(), remat=None)
  assert 'remat' not in report.advice(without)


def test_the_batch_in_the_advice_is_that_of_one_agent():
  answer = sized(4, 1, 1, 320)
  answer = dataclasses.replace(answer, sizes={**answer.sizes, 'agents': 10})
  assert "'BATCH = 16'" in report.advice(answer)
