"""Cycles of Pallas kernels, by the instructions that libtpu writes for them.

libtpu can be told to leave each kernel's schedule in a folder: a line for every
cycle in which instructions are issued, and a branch backward for every loop.
What a condition leaves out counts as done: the cycles are at most those of a
chip that never waits for its memory.
"""

from pathlib import Path
import re

_PASS = 'packed-bundles-post-ra'
_BUNDLE = re.compile(r'^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}[, ]*)*\s*:')
_BRANCH = re.compile(r'sbr\.rel \(?([^)]*?)\)? ?target bundleno = (\d+)')


def flags(folder: str) -> list[str]:
  """What libtpu must be told before it is loaded, to leave schedules there."""
  return [
    f'--xla_jf_dump_to={folder}',
    '--xla_jf_dump_llo_text=true',
    f'--xla_jf_dump_llo_pass_label_regex={_PASS}',
  ]


def read(folder: str | Path, name: str) -> dict[str, int]:
  """Cycles of each kernel whose name begins so, by its whole name.

  Raises:
    ValueError: there is none, or it is not written as this reader knows it.
  """
  found = {}
  for path in sorted(Path(folder).glob(f'*-{name}*-{_PASS}.txt')):
    if 'schedule-analysis' in path.name:
      continue
    whole = re.search(rf'-({name}[\w.]*)-', path.name)[1]
    found[whole] = cycles(path.read_text(encoding='utf-8', errors='replace'))
  if not found:
    raise ValueError(
      f'libtpu has left no schedule of a kernel {name}; install the libtpu '
      'that meliad_rec[tpu] names.'
    )
  return found


def cycles(schedule: str) -> int:
  """Of one kernel, that runs all its grid steps in one loop.

  Raises:
    ValueError: no loop is found, or not how often it turns.
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
      'the schedule of a kernel has no loop over grid steps that this reader '
      'knows; install the libtpu that meliad_rec[tpu] names.'
    )
  body, register = max(loops)
  # The loop turns twice more, to fill and to empty its pipeline.
  steps = compared[register] - 2
  return last + 1 - body + steps * body
