"""What the text of a compiled TPU program says: cycles, kernels, collectives.

XLA writes its estimate of cycles beside each fusion, product and copy, but not
beside collectives, kernels of Pallas and a few small operations. How often a
loop turns, at most, is the constant that its condition compares with.
"""

from collections import Counter
import dataclasses
import re

from meliad_rec.planning import hlo_text

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
  bodies, entry = hlo_text.computations(text)
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
    found = hlo_text.instruction(line)
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
        body = self.total(hlo_text.called(rest, 'body')).times(turns or 1)
        return body + Program(endless=int(turns is None))
      case 'conditional':
        # Of branches, of which one is taken, the dearest.
        return max(
          map(self.total, hlo_text.branches(rest)), key=lambda b: b.cycles
        )
      case 'call':
        return self.total(hlo_text.called(rest, 'to_apply'))
      case 'async':
        return self.total(hlo_text.called(rest, 'calls'))
      case 'custom-call' if '"tpu_custom_call"' in rest:
        return Program(kernels=Counter([_kernel(name, rest)]))
    priced = re.search(r'"estimated_cycles":"(\d+)"', rest)
    cycles = int(priced[1]) if priced else 0
    if kind == 'fusion':
      body = hlo_text.called(rest, 'calls')
      exchanged = self.total(body).collectives
      if body.startswith('all-reduce-scatter'):
        exchanged = _scattered(exchanged, shape)
      waits = name.startswith('async-collective-done')
      if exchanged or priced or waits:
        return Program(cycles=cycles, collectives=exchanged)
    large = (
      op == kind and op not in hlo_text.CHEAP and hlo_text.size(shape) >= _LARGE
    )
    unpriced = Counter([op] if large and not priced else [])
    return Program(cycles=cycles, unpriced=unpriced)

  def turns(self, rest: str) -> int | None:
    """How often a loop does, at most; None: it is not known."""
    condition = self.bodies.get(hlo_text.called(rest, 'condition'), ())
    limit = hlo_text.limit(condition)
    return self.depth if limit == 0 else limit


def _collective(kind: str, op: str, shape: str, line: str) -> Collective:
  sizes = [hlo_text.size(m[0]) for m in hlo_text.ARRAY.finditer(shape)]
  # What starts an exchange is given and gives its operand too.
  whole = sum(sizes) if op == kind or kind == 'all-reduce' else max(sizes)
  return Collective(kind, whole, line)


def _scattered(exchanged: Counter, shape: str) -> Counter:
  """An all-reduce of which each device keeps its part alone, of that shape."""
  size, [line] = hlo_text.size(shape), [one.line for one in exchanged]
  return Counter([Collective('reduce-scatter', size, line)])


def _kernel(name: str, rest: str) -> Kernel:
  found = [
    re.search(rf'"{what}":"(\d+)"', rest)
    for what in ('flops', 'bytes_accessed')
  ]
  return Kernel(name, *(int(one[1]) if one else None for one in found))
