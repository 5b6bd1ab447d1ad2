"""Reads the HLO text of a compiled program: cycles, kernels, collectives.

XLA for TPUs writes its estimate of cycles for each fusion, product and copy,
but not for collectives, Pallas kernels and a few small operations. The maximum
number of iterations of a loop is the constant that its condition compares a
counter with. The lines of collectives say which devices exchange with which.
The kind and place of operations can be read from the text of any backend.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import re

import numpy as np

# Operations that take no time, or whose time is counted at their start.
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
# Mostly views and constants, for which the compiler estimates no cycles.
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
  """Returns {computation: its lines}, and the name of the entry, if any."""
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
  """Returns an instruction's name, shape, operation, and rest of the line.

  The rest begins with the operation. Returns None if the line is not an
  instruction, or if the instruction takes no time.
  """
  found = re.match(r'\s*(?:ROOT )?%([\w.\-]+) = ', line)
  if not found:
    return None
  rest = line[found.end() :]
  # Shapes contain brackets, and those of tuples also spaces.
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
  """Returns the name of the computation in attribute `role`, such as 'body'."""
  return re.search(rf'\b{role}=%?([\w.\-]+)', rest)[1]


def branches(rest: str) -> list[str]:
  """Returns the names of the computations that a conditional chooses from."""
  listed = re.search(r'branch_computations=\{(.*?)\}', rest)
  if listed:
    return re.findall(r'%([\w.\-]+)', listed[1])
  return [called(rest, f'{way}_computation') for way in ('true', 'false')]


def iteration_limit(condition: Sequence[str]) -> int | None:
  """Returns the limit that a loop's counter stays below.

  It is read from the lines of the condition. 0 means that the counter falls to
  0 from an unknown start. None means that no constant is compared.
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
  """Returns the total bytes of the arrays in the text of a shape."""
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
    op: one of COLLECTIVES.
    size: bytes of the result on each device.
    line: the HLO instruction, which names the groups of devices.
  """

  op: str
  size: int
  line: str


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A call of a Pallas kernel.

  Attributes:
    name: name of the instruction.
    flops, size: FLOP and bytes that the kernel declares; None if it does not.
    place: see Label.
  """

  name: str
  flops: int | None
  size: int | None
  place: str = 'unnamed'


@dataclasses.dataclass(frozen=True)
class Program:
  """Work of a program on each device.

  Attributes:
    work: {Label: the compiler's estimate of cycles}.
    collectives, kernels: number of executions of each Collective or Kernel.
    unpriced: {large operation without estimated cycles: its executions}.
    endless: number of loops of unknown length, which count as one iteration.
  """

  work: Counter = dataclasses.field(default_factory=Counter)
  collectives: Counter = dataclasses.field(default_factory=Counter)
  kernels: Counter = dataclasses.field(default_factory=Counter)
  unpriced: Counter = dataclasses.field(default_factory=Counter)
  endless: int = 0

  @property
  def cycles(self) -> int:
    """Sum of the compiler's estimates of cycles."""
    return sum(self.work.values())

  def __add__(self, other: 'Program') -> 'Program':
    return Program(
      self.work + other.work,
      self.collectives + other.collectives,
      self.kernels + other.kernels,
      self.unpriced + other.unpriced,
      self.endless + other.endless,
    )

  def times(self, count: int) -> 'Program':
    """Returns the work of running this program `count` times, as in a loop."""
    more = lambda counter: Counter({k: count * n for k, n in counter.items()})
    return Program(
      more(self.work),
      more(self.collectives),
      more(self.kernels),
      more(self.unpriced),
      self.endless,
    )


def read(text: str, depth: int | None = None) -> Program:
  """Returns the work that a compiled program does on each device.

  Args:
    text: HLO text of the program.
    depth: maximum iterations of the backward passes of data-dependent loops; it
      is not in the text. None means that it is not known.

  Raises:
    ValueError: the format of the text is unknown.
  """
  bodies, entry = computations(text)
  if entry is None or '"estimated_cycles":' not in text:
    raise ValueError(
      'the compiled program has no cycles where libtpu 0.0.42 writes them. '
      'Install the version of libtpu that meliad_rec[tpu] requires.'
    )
  return _Reader(bodies, depth).total(entry)


@dataclasses.dataclass(frozen=True)
class Label:
  """Kind of an operation, and the part of a training step it belongs to.

  Attributes:
    kind: a name in KINDS, 'arithmetic' (of single elements) or 'copies'.
    place: direction and modules, such as 'backward cells/layer/mlp/hidden'.
  """

  kind: str
  place: str


# Kinds, and operations in a fusion that show the kind; the first found counts.
KINDS = {
  'products': {'dot', 'convolution'},
  'random numbers': {'rng-bit-generator', 'shift-right-logical'},
  'sums': {'reduce', 'reduce-window'},
  'lookups': {'gather', 'scatter', 'sort'},
}
# Without compare, select and negate, which also compute addresses of copies.
_ARITHMETIC = {
  *('abs', 'add', 'cosine', 'divide', 'erf', 'exponential', 'log', 'logistic'),
  *('exponential-minus-one', 'log-plus-one', 'maximum', 'minimum', 'multiply'),
  *('power', 'rsqrt', 'sine', 'sqrt', 'subtract', 'tanh'),
}
# Parts of names that do not tell the place in the model: methods, loops, calls.
_NOISE = re.compile(
  r'.*\.\w*|.*->.*|while|body|cond|branch_\d+_fun|closed_call|checkpoint|remat'
  r'|rematted_computation|shard_map|custom_\w*|jit\(.*|jvp\(.*|transpose\(.*'
)


def label(bodies: Mapping[str, Sequence[str]], line: str) -> Label:
  """Returns the label of an instruction.

  Args:
    bodies: lines of the program's computations, by name.
    line: the instruction.
  """
  operations = _operations(bodies, line)
  kind = next(
    (kind for kind, shown in KINDS.items() if operations & shown),
    'arithmetic' if operations & _ARITHMETIC else 'copies',
  )
  return Label(kind, _place_of(line))


def _operations(bodies, line: str) -> set[str]:
  """Returns the operations in an instruction and in what it fuses or calls."""
  found = instruction(line)
  if found is None:
    return set()
  _, _, op, rest = found
  if op not in ('fusion', 'call'):
    return {op}
  lines = bodies.get(called(rest, 'calls' if op == 'fusion' else 'to_apply'))
  return set().union(*(_operations(bodies, line) for line in lines or ()))


def _place_of(line: str) -> str:
  named = re.search(r'op_name="([^"]*)"', line)
  return place(named[1]) if named else 'unnamed'


def place(op_name: str) -> str:
  """Returns an operation's place in the model, such as 'backward cell/mlp'.

  Args:
    op_name: metadata such as 'jit(step)/transpose(jvp(Model))/cell/mlp/dot'.
  """
  # XLA joins the names of operations that it made into one by ';'.
  parts = op_name.split(';')[0].split('/')
  program = re.match(r'jit\((\w+)\)', op_name)
  directions = {
    'recomputed': 'rematted_computation' in parts,
    'backward': 'transpose(' in op_name,
    'forward': 'jvp(' in op_name,
  }
  direction = next((name for name, here in directions.items() if here), '')
  # A scope at the top, such as the loss, is inside: jvp(loss).
  scope = re.search(r'jvp\(([a-z]\w*)\)', op_name)
  modules = [scope[1]] if scope else []
  modules += [
    re.sub(r'_?\d+$', '', part)
    for part in parts[:-1]
    if not (_NOISE.fullmatch(part) or program and part == program[1])
  ]
  return f'{direction} {"/".join(dict.fromkeys(modules))}'.strip() or 'step'


class _Reader:
  """Reader that sums the work of computations, and reads each of them once."""

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
    """Returns the work of an instruction, including what it calls.

    `starts`: whether the line's computation starts an asynchronous collective.
    """
    found = instruction(line)
    if found is None:
      return Program()
    name, shape, op, rest = found
    kind = op.removesuffix('-start')
    if kind in COLLECTIVES:
      # An asynchronous collective is repeated in each fusion beside it.
      if 'async_collective_fusion_config' in rest and not starts:
        return Program()
      return Program(collectives=Counter([_collective(kind, op, shape, line)]))
    match kind:
      case 'while':
        count = self.iterations(rest)
        body = self.total(called(rest, 'body')).times(count or 1)
        return body + Program(endless=int(count is None))
      case 'conditional':
        # One branch is taken; the most expensive one counts.
        return max(map(self.total, branches(rest)), key=lambda b: b.cycles)
      case 'call':
        return self.total(called(rest, 'to_apply'))
      case 'async':
        return self.total(called(rest, 'calls'))
      case 'custom-call' if '"tpu_custom_call"' in rest:
        return Program(kernels=Counter([_kernel(name, rest)]))
    priced = re.search(r'"estimated_cycles":"(\d+)"', rest)
    work = Counter()
    if priced:
      work[label(self.bodies, line)] = int(priced[1])
    if kind == 'fusion':
      body = called(rest, 'calls')
      exchanged = self.total(body).collectives
      if body.startswith('all-reduce-scatter'):
        exchanged = _scattered(exchanged, shape)
      waits = name.startswith('async-collective-done')
      if exchanged or priced or waits:
        return Program(work, exchanged)
    large = op == kind and op not in CHEAP and array_bytes(shape) >= _LARGE
    unpriced = Counter([op] if large and not priced else [])
    return Program(work, unpriced=unpriced)

  def iterations(self, rest: str) -> int | None:
    """Returns the maximum iterations of a loop, or None if not known."""
    condition = self.bodies.get(called(rest, 'condition'), ())
    limit = iteration_limit(condition)
    return self.depth if limit == 0 else limit


def _collective(kind: str, op: str, shape: str, line: str) -> Collective:
  sizes = [array_bytes(m[0]) for m in ARRAY.finditer(shape)]
  # The result of a start operation includes its operand.
  whole = sum(sizes) if op == kind or kind == 'all-reduce' else max(sizes)
  return Collective(kind, whole, line)


def _scattered(exchanged: Counter, shape: str) -> Counter:
  """Returns one reduce-scatter in place of an all-reduce and a split."""
  size, [line] = array_bytes(shape), [one.line for one in exchanged]
  return Counter([Collective('reduce-scatter', size, line)])


def _kernel(name: str, rest: str) -> Kernel:
  found = [
    re.search(rf'"{what}":"(\d+)"', rest)
    for what in ('flops', 'bytes_accessed')
  ]
  numbers = (int(one[1]) if one else None for one in found)
  return Kernel(name, *numbers, _place_of(rest))


def groups(instruction: str, devices: int) -> np.ndarray:
  """Returns the groups of devices that exchange data, int [groups, members].

  Members are indices of devices in the mesh's order.

  Args:
    instruction: line of a collective.
    devices: number of devices of the program.

  Raises:
    ValueError: the groups are written in an unknown format.
  """
  pairs = re.search(
    r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}', instruction
  )
  if pairs:
    return _listed(pairs[1])
  listed = re.search(r'replica_groups=\{((?:\{[\d,]*\},?)*)\}', instruction)
  if listed:
    # No group is listed: all devices are one group.
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
  """Returns the names of the mesh axes along which members of a group differ.

  Args:
    found: result of `groups`.
    mesh: sizes of the mesh's axes by name, in order.
  """
  coordinates = np.stack(np.unravel_index(found, tuple(mesh.values())), -1)
  differ = (coordinates != coordinates[:, :1]).any((0, 1))
  return tuple(name for name, one in zip(mesh, differ, strict=True) if one)


def _listed(text: str) -> np.ndarray:
  return np.array([_numbers(group) for group in re.findall(r'\{.*?\}', text)])


def _counted(text: str) -> np.ndarray:
  """Returns 0, 1, ... as an array; '[4,2]T(1,0)' is [4, 2], transposed."""
  found = re.fullmatch(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  shape = _numbers(found[1])
  numbers = np.arange(np.prod(shape)).reshape(shape)
  return numbers.transpose(_numbers(found[2])) if found[2] else numbers


def _named(sizes: str, order: str | None, along: str, instruction: str):
  """Returns the groups along axes of a mesh that the instruction defines."""
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
    'the groups of a collective are written in an unknown way, '
    f'{written and written[0]!r}. Install the version of libtpu that '
    'meliad_rec[tpu] requires.'
  )
