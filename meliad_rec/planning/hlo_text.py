"""The text of a compiled program, taken apart: HLO as XLA prints it."""

from collections.abc import Sequence
import math
import re

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


def limit(condition: Sequence[str]) -> int | None:
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


def size(shape: str) -> int:
  """Bytes of the arrays of a shape."""
  return sum(
    _BYTES.get(kind, 0) * math.prod(int(n) for n in sizes.split(',') if n)
    for kind, sizes in ARRAY.findall(shape)
  )
