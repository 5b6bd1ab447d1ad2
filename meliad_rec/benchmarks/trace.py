"""Measures where the time of a training step goes, with a profiler trace.

Each execution of an operation of the compiled program is an event in the trace.
Operations have the same kinds and places as in `meliad-rec plan --by`; see
planning/hlo.py. Tried on a CPU only.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
import tempfile

import jax

from meliad_rec.planning import estimate
from meliad_rec.planning import hlo
from meliad_rec.planning.hlo import Label
from meliad_rec.training import profile

STEPS = 5
# Operations that run other operations. Only the time of the others counts.
OUTER = {'while', 'conditional', 'call'}


def measure(step: Callable[[], None], text: str) -> Counter[Label]:
  """Returns {label: seconds that its operations take in a step, on average}.

  If operations run at the same time, each counts in full. The sum of the
  seconds may therefore exceed the time of a step.

  Args:
    step: function that runs a compiled step to its end.
    text: HLO text of the compiled step.

  Raises:
    ValueError: the trace has no operation of the step.
  """
  step()
  with tempfile.TemporaryDirectory(prefix='meliad_rec_trace_') as folder:
    with jax.profiler.trace(folder, profiler_options=profile.options()):
      for _ in range(STEPS):
        step()
    [file] = Path(folder).rglob('*.xplane.pb')
    data = jax.profiler.ProfileData.from_file(str(file))
    labels, found = _labels(text), Counter()
    for plane in data.planes:
      for line in plane.lines:
        for event in line.events:
          # On a GPU, events have names of kernels; a stat names the operation.
          name = dict(event.stats).get('hlo_op', event.name)
          if name in labels:
            found[labels[name]] += event.duration_ns / 1e9 / STEPS
  if not found:
    raise ValueError(
      'The trace shows no operation of the compiled program on this device. '
      'Use --by on a CPU, or meliad-rec plan --by for a TPU.'
    )
  return found


def _labels(text: str) -> dict[str, Label]:
  """Returns {name of an operation: its Label}, from HLO text of a program.

  Operations that run other operations (OUTER) are left out.
  """
  bodies, _ = hlo.computations(text)
  labels = {}
  for lines in bodies.values():
    for line in lines:
      found = hlo.instruction(line)
      if found and found[2] not in OUTER:
        labels[found[0]] = hlo.label(bodies, line)
  return labels


def table(name: str, seconds: Counter[Label], by: str) -> str:
  """Returns a table, as text, of where the time of a step goes.

  Lines are in the order of their times, the longest first; the last one adds up
  those with less than a thousandth of the time.

  Args:
    name: name of the program.
    seconds: result of `measure`.
    by: field of Label by which times are summed: 'kind' or 'place'.
  """
  times = Counter()
  for label, time in seconds.items():
    times[getattr(label, by)] += time
  total = max(times.total(), 1e-9)
  lines = [f'{name}: time of a step by {by}']
  lines += [
    f'{1e3 * time:9.2f} ms {time / total:6.1%}  {key}'
    for key, time in estimate.largest_first(times).items()
  ]
  return '\n'.join(lines)
