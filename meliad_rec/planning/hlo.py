"""What the text of a compiled TPU program says: cycles, kernels, collectives.

XLA writes its estimate of cycles beside each fusion, product and copy, but not
beside collectives, kernels of Pallas and a few small operations. How often a
loop turns, at most, is the constant that its condition compares with.

The text of a compiled program, taken apart: HLO as XLA prints it.

Which devices exchange with which, as the text of a program says it.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import re

import numpy as np

# What takes no time, or whose time is counted where it starts.
FREE = {
  'parameter',
  'tuple',
  'get-tuple-element',
  'constant',
  'bitcast',
  'partition-id',
  'replica-id',
  'after-all',
  'opt-barrier',
  'domain',
}
# Views and fillings, mostly, of which the compiler gives no price.
CHEAP = {
  'custom-call',
  'reshape',
  'copy',
  'iota',
  'broadcast',
  'dynamic-update-slice',
}
ARRAY = re.compile(r'\b([a-z]+\d*)\[([\d,]*)\]')
_BYTES = {'pred': 1, 'bf16': 2} | {
  f'{kind}{bits}': bits // 8 for kind in 'suf' for bits in (8, 16, 32, 64)
}


def computations(text: str) -> tuple[dict[str, list[str]], str | None]:
  """Lines of each computation, and the name of that which is run."""
  bodies, entry, current = {}, None, None
  for line in text.splitlines():
    head = re.match(r'(ENTRY )?%([\w.\-]+) \(.*\{\s*$', line)
    if head:
      current = bodies.setdefault(head[2], [])
      entry = head[2] if head[1] else entry
    elif line.startswith('}'):
      current = None
    elif current is not None:
      current.append(line)
  return bodies, entry


def instruction(line: str) -> tuple[str, str, str, str] | None:
  """Name, shape, operation, and the line from there.

  None: the line is none, or one that takes no time.
  """
  found = re.match(r'\s*(?:ROOT )?%([\w.\-]+) = ', line)
  if not found:
    return None
  rest = line[found.end() :]
  # Shapes hold brackets of their own, and of tuples blanks too.
  depth = 0
  for end, letter in enumerate(rest):
    depth += (letter in '({[') - (letter in ')}]')
    if letter == ' ' and depth == 0:
      op = re.match(r'[a-z][a-z0-9\-]*', rest[end + 1 :])
      if not op or op[0] in FREE or op[0].endswith('-done'):
        return None
      return found[1], rest[:end], op[0], rest[end + 1 :]
  return None


def called(rest: str, role: str) -> str:
  return re.search(rf'\b{role}=%?([\w.\-]+)', rest)[1]


def branches(rest: str) -> list[str]:
  listed = re.search(r'branch_computations=\{(.*?)\}', rest)
  if listed:
    return re.findall(r'%([\w.\-]+)', listed[1])
  return [called(rest, f'{way}_computation') for way in ('true', 'false')]


def turn_limit(condition: Sequence[str]) -> int | None:
  """The number that a loop's counter stays below, by its condition's lines.

  0: the counter falls, down to 0, from where it is not said. None: the
  condition compares with no number.
  """
  text = '\n'.join(condition)
  numbers = {
    name: int(number)
    for name, number in re.findall(
      r'%(\S+) = s32\[\]\S* constant\((-?\d+)\)', text
    )
  }
  compared = [
    (way, numbers.get(name))
    for name, way in re.findall(
      r' compare\(%\S+, %(\S+)\), direction=(\w+)', text
    )
  ]
  found = [n for way, n in compared if way == 'LT' and n is not None and n > 0]
  return min(found, default=0 if ('GE', 0) in compared else None)


def array_bytes(shape: str) -> int:
  """Bytes of the arrays of a shape."""
  return sum(
    _BYTES.get(kind, 0) * math.prod(int(n) for n in sizes.split(',') if n)
    for kind, sizes in ARRAY.findall(shape)
  )


COLLECTIVES = (
  'all-reduce',
  'all-gather',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)
_LARGE = 2**16  # Bytes.


@dataclasses.dataclass(frozen=True)
class Collective:
  """An exchange between devices.

  Attributes:
    op: of COLLECTIVES.
    size: bytes that it gives to each device.
    line: the instruction, which says between which devices.
  """

  op: str
  size: int
  line: str


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A call of a Pallas kernel.

  Attributes:
    name: of the instruction.
    flops, size: operations and bytes that the kernel says it takes; None: it
      does not say.
  """

  name: str
  flops: int | None
  size: int | None


@dataclasses.dataclass(frozen=True)
class Program:
  """What one run of a program does on each device, by the compiler.

  Attributes:
    cycles: of all that the compiler prices.
    collectives, kernels: how often each is run.
    unpriced: how often larger operations without an estimate are, by name.
    endless: loops of which it is not known how often they turn; once, here.
  """

  cycles: int = 0
  collectives: Counter = dataclasses.field(default_factory=Counter)
  kernels: Counter = dataclasses.field(default_factory=Counter)
  unpriced: Counter = dataclasses.field(default_factory=Counter)
  endless: int = 0

  def __add__(self, other: 'Program') -> 'Program':
    return Program(
      self.cycles + other.cycles,
      self.collectives + other.collectives,
      self.kernels + other.kernels,
      self.unpriced + other.unpriced,
      self.endless + other.endless,
    )

  def times(self, turns: int) -> 'Program':
    """As a loop repeats it."""
    more = lambda counter: Counter({k: turns * n for k, n in counter.items()})
    return Program(
      turns * self.cycles,
      more(self.collectives),
      more(self.kernels),
      more(self.unpriced),
      self.endless,
    )


def read(text: str, depth: int | None = None) -> Program:
  """What a compiled program does.

  Args:
    text: its HLO.
    depth: turns, at most, of loops that go back over the steps of one that ends
      by what it computes, since their text does not say; None: not known.

  Raises:
    ValueError: the text is not as this reader knows it.
  """
  bodies, entry = computations(text)
  if entry is None or '"estimated_cycles":' not in text:
    raise ValueError(
      'the text of the compiled program has no cycles where libtpu 0.0.42 '
      'writes them; install the libtpu that meliad_rec[tpu] names.'
    )
  return _Reader(bodies, depth).total(entry)


class _Reader:
  """Adds up computations, each once."""

  def __init__(self, bodies: dict[str, list[str]], depth: int | None):
    self.bodies, self.depth = bodies, depth
    self.done = {}

  def total(self, name: str) -> Program:
    if name not in self.done:
      lines = self.bodies.get(name, ())
      starts = any('"AsyncCollectiveStart"' in line for line in lines)
      self.done[name] = sum(
        (self.one(line, starts) for line in lines), start=Program()
      )
    return self.done[name]

  def one(self, line: str, starts: bool) -> Program:
    """What an instruction does, with all that it calls."""
    found = instruction(line)
    if found is None:
      return Program()
    name, shape, op, rest = found
    kind = op.removesuffix('-start')
    if kind in COLLECTIVES:
      # One that runs beside fusions is written in each of them.
      if 'async_collective_fusion_config' in rest and not starts:
        return Program()
      return Program(collectives=Counter([_collective(kind, op, shape, line)]))
    match kind:
      case 'while':
        turns = self.turns(rest)
        body = self.total(called(rest, 'body')).times(turns or 1)
        return body + Program(endless=int(turns is None))
      case 'conditional':
        # Of branches, of which one is taken, the dearest.
        return max(map(self.total, branches(rest)), key=lambda b: b.cycles)
      case 'call':
        return self.total(called(rest, 'to_apply'))
      case 'async':
        return self.total(called(rest, 'calls'))
      case 'custom-call' if '"tpu_custom_call"' in rest:
        return Program(kernels=Counter([_kernel(name, rest)]))
    priced = re.search(r'"estimated_cycles":"(\d+)"', rest)
    cycles = int(priced[1]) if priced else 0
    if kind == 'fusion':
      body = called(rest, 'calls')
      exchanged = self.total(body).collectives
      if body.startswith('all-reduce-scatter'):
        exchanged = _scattered(exchanged, shape)
      waits = name.startswith('async-collective-done')
      if exchanged or priced or waits:
        return Program(cycles=cycles, collectives=exchanged)
    large = op == kind and op not in CHEAP and array_bytes(shape) >= _LARGE
    unpriced = Counter([op] if large and not priced else [])
    return Program(cycles=cycles, unpriced=unpriced)

  def turns(self, rest: str) -> int | None:
    """How often a loop does, at most; None: it is not known."""
    condition = self.bodies.get(called(rest, 'condition'), ())
    limit = turn_limit(condition)
    return self.depth if limit == 0 else limit


def _collective(kind: str, op: str, shape: str, line: str) -> Collective:
  sizes = [array_bytes(m[0]) for m in ARRAY.finditer(shape)]
  # What starts an exchange is given and gives its operand too.
  whole = sum(sizes) if op == kind or kind == 'all-reduce' else max(sizes)
  return Collective(kind, whole, line)


def _scattered(exchanged: Counter, shape: str) -> Counter:
  """An all-reduce of which each device keeps its part alone, of that shape."""
  size, [line] = array_bytes(shape), [one.line for one in exchanged]
  return Counter([Collective('reduce-scatter', size, line)])


def _kernel(name: str, rest: str) -> Kernel:
  found = [
    re.search(rf'"{what}":"(\d+)"', rest)
    for what in ('flops', 'bytes_accessed')
  ]
  return Kernel(name, *(int(one[1]) if one else None for one in found))


def groups(instruction: str, devices: int) -> np.ndarray:
  """int [groups, members]: numbers of the devices in each, in a mesh's order.

  Args:
    instruction: a collective's line.
    devices: of the whole program.

  Raises:
    ValueError: they are written in no way that is known here.
  """
  pairs = re.search(
    r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}', instruction
  )
  if pairs:
    return _listed(pairs[1])
  listed = re.search(r'replica_groups=\{((?:\{[\d,]*\},?)*)\}', instruction)
  if listed:
    # None named: all of them are one group.
    return _listed(listed[1]) if listed[1] else np.arange(devices)[None]
  counted = re.search(r'replica_groups=(\[[\d,]+\]<=\S+?)(?:, |$)', instruction)
  if counted:
    shape, order = counted[1].split('<=')
    return _counted(order).reshape(_numbers(shape))
  named = re.search(
    r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{(.*?)\}',
    instruction,
  )
  if named:
    return _named(*named.groups(), instruction)
  raise _unknown(instruction)


def axes(found: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The axes of a mesh along which the members of a group differ.

  Args:
    found: of `groups`.
    mesh: sizes of its axes, in order.
  """
  places = np.stack(np.unravel_index(found, tuple(mesh.values())), -1)
  differ = (places != places[:, :1]).any((0, 1))
  return tuple(name for name, one in zip(mesh, differ, strict=True) if one)


def _listed(text: str) -> np.ndarray:
  return np.array([_numbers(group) for group in re.findall(r'\{.*?\}', text)])


def _counted(text: str) -> np.ndarray:
  """'[64,4]T(1,0)': numbers from 0 in that shape, its axes in that order."""
  found = re.fullmatch(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  shape = _numbers(found[1])
  numbers = np.arange(np.prod(shape)).reshape(shape)
  return numbers.transpose(_numbers(found[2])) if found[2] else numbers


def _named(sizes: str, order: str | None, along: str, instruction: str):
  """A mesh of its own, and the axes of it along which a group lies."""
  size = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", sizes)}
  chosen = [name.strip().strip("'") for name in along.split(',')]
  if not set(chosen) <= set(size):
    raise _unknown(instruction)
  shape = tuple(size.values())
  ordered = _counted(order) if order else np.arange(np.prod(shape))
  names = list(size)
  last = [names.index(name) for name in chosen]
  first = [i for i in range(len(names)) if i not in last]
  members = int(np.prod([size[name] for name in chosen]))
  return ordered.reshape(shape).transpose(first + last).reshape(-1, members)


def _numbers(text: str) -> list[int]:
  return [int(number) for number in re.findall(r'\d+', text)]


def _unknown(instruction: str) -> ValueError:
  written = re.search(r'replica_groups=\S*', instruction)
  return ValueError(
    f'the groups of a collective are written {written and written[0]!r}, which '
    'is not known; install the libtpu that meliad_rec[tpu] names.'
  )
