"""Process that compiles for `attention.estimate` and prints estimates as JSON.

Its command line has the name of the slice, the name of the setting, and the
folder for schedules. If the user can correct an error, it prints
{'mistake': sentence} instead.

XLA estimates no cycles for Pallas kernels, but libtpu can write the schedule of
each kernel to a folder. A schedule lists the instructions of each cycle on a
numbered line. A loop ends with a branch to an earlier line. The cycles of a
kernel are computed from these lines, as if the chip never waited for its memory
and all code under conditions ran.
"""

import dataclasses
import json
from pathlib import Path
import re
import sys

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from meliad_rec.benchmarks import attention_forms as forms
from meliad_rec.config import config
from meliad_rec.distributed import partition
from meliad_rec.planning import hlo
from meliad_rec.planning import topology

# The kernel for bounded logits runs unless scales are large; the backward
# kernel is the same in both cases.
KERNELS = 'window_attention_forward_bounded', 'window_attention_backward'
KERNELS += 'splash_mha_fwd', 'splash_mha_dq', 'splash_mha_dkv'

_PASS = 'packed-bundles-post-ra'
_BUNDLE = re.compile(r'^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}[, ]*)*\s*:')
_BRANCH = re.compile(r'sbr\.rel \(?([^)]*?)\)? ?target bundleno = (\d+)')


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Estimated cost of one form on a TPU.

  Attributes:
    cycles: {way: cycles of all operations that XLA has estimates for}. A way is
      'forward' or 'forward+backward'.
    kernels: {way: cycles of the Pallas kernels, from their schedules}.
    clock: cycles of the chip per second.
    temporary_bytes: bytes of temporary memory of 'forward+backward', according
      to the compiler.
  """

  cycles: dict[str, int]
  kernels: dict[str, int]
  clock: float
  temporary_bytes: int

  def columns(self, baseline: str) -> dict[str, str]:
    """Returns {column: text} for a row of the table, without ratios."""
    del baseline
    found = {}
    for way in forms.WAYS:
      total = self.cycles[way] + self.kernels[way]
      found[f'{way} kcycles'] = f'{total / 1e3:.0f}'
      found['of these kernels' + ' ' * forms.WAYS.index(way)] = (
        f'{self.kernels[way] / 1e3:.0f}'
      )
      found[f'{way} us'] = f'{total / self.clock * 1e6:.0f}'
    return found | {'temp MiB': f'{self.temporary_bytes / 2**20:.1f}'}


def rows(
  name: str, setting: forms.AttentionSizes, folder: str
) -> dict[str, Estimate]:
  """Returns {name of the form: its estimate} for each of TPU_FORMS.

  Args:
    name: name of the slice to compile for, such as 'v5e:2x2'.
    setting: sizes of the arrays.
    folder: folder to which libtpu writes schedules; see `flags`.
  """
  where = topology.parse(name)
  # Kernels read from the mesh which chip they are compiled for.
  mesh = partition.make_mesh(devices=topology.devices(name)[:1])
  place = NamedSharding(mesh, PartitionSpec())
  given = [
    jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place)
    for s in setting.shapes()
  ]
  found = {}
  for form in forms.TPU_FORMS:
    cycles, kernels = {}, {}
    for way, program in forms.programs(form, setting).items():
      with jax.set_mesh(mesh):
        compiled = jax.jit(program).lower(*given).compile()
      text = compiled.as_text()
      cycles[way] = hlo.read(text).cycles
      kernels[way] = sum(
        max(read_cycles(folder, kernel).values())
        for kernel in KERNELS
        if kernel in text
      )
    found[form] = Estimate(
      cycles,
      kernels,
      where.chip.clock,
      compiled.memory_analysis().temp_size_in_bytes,
    )
  return found


def flags(folder: str) -> list[str]:
  """Returns flags that make libtpu write kernels' schedules to a folder."""
  return [
    f'--xla_jf_dump_to={folder}',
    '--xla_jf_dump_llo_text=true',
    f'--xla_jf_dump_llo_pass_label_regex={_PASS}',
  ]


def read_cycles(folder: str | Path, name: str) -> dict[str, int]:
  """Returns {kernel: cycles of a call} for kernels whose names have a prefix.

  Args:
    folder: folder with the schedules; see `flags`.
    name: the prefix; the keys of the result are whole names.

  Raises:
    ValueError: there is no such kernel, or its schedule cannot be read; see
      `cycles`.
  """
  found = {}
  for path in sorted(Path(folder).glob(f'*-{name}*-{_PASS}.txt')):
    if 'schedule-analysis' in path.name:
      continue
    whole = re.search(rf'-({name}[\w.]*)-', path.name)[1]
    found[whole] = cycles(path.read_text(encoding='utf-8', errors='replace'))
  if not found:
    raise ValueError(
      f'libtpu has written no schedule of a kernel {name}. Install the version '
      'of libtpu that meliad_rec[tpu] requires.'
    )
  return found


def cycles(schedule: str) -> int:
  """Returns the cycles of one call of a kernel, from its schedule.

  The longest loop is taken as the loop over the kernel's grid. Other loops
  count as one iteration.

  Args:
    schedule: text of the kernel's schedule.

  Raises:
    ValueError: the schedule has no loop, or does not compare the counter of the
      longest loop with a constant that gives the number of iterations.
  """
  last, loops, compared = 0, [], {}
  for line in schedule.splitlines():
    bundle = _BUNDLE.match(line)
    if not bundle:
      continue
    last = int(bundle[1], 16)
    for register, number in re.findall(
      r'%(\w+)_p\d+ = scmp\.\w+\.s32\.totalorder [^,]*, (\d+)', line
    ):
      compared[register] = int(number)
    for predicate, target in _BRANCH.findall(line):
      if int(target) <= last:
        register = re.sub(r'_p\d+$', '', predicate.lstrip('!%'))
        loops.append((last - int(target) + 2, register))
  if not loops or max(loops)[1] not in compared:
    raise ValueError(
      'The schedule of a kernel has no loop over grid steps, or the number of '
      'iterations cannot be read from it. Install the version of libtpu that '
      'meliad_rec[tpu] requires.'
    )
  body, register = max(loops)
  # Two more iterations fill and empty the loop's pipeline.
  steps = compared[register] - 2
  return last + 1 - body + steps * body


def main(argv: list[str]) -> None:
  name, setting, folder = argv
  try:
    found = rows(name, forms.SETTINGS[setting], folder)
    output = {form: dataclasses.asdict(one) for form, one in found.items()}
  except ValueError as error:
    output = {'mistake': config.sentence(error)}
    if output['mistake'] is None:
      raise
  print(json.dumps(output))


if __name__ == '__main__':
  main(sys.argv[1:])
