"""What a recurrence in depth costs when it halts early, and when it cannot.

Rows are the loops of halting/ at depths that are forced: a gate whose answer
is the same for every state halts all tokens after so many steps. Settings
'exit', 'global' and 'chunks' have one core, forward and backward: GUT over a
sequence, the same where halting is asked of the states before a step alone, and
GUT in each chunk; 'inference' has rows that halt at unlike depths; and 'depth'
has a model at its greatest depths, by epochs of the ListOps task: with its
exit, without, and where it is never asked whether it halts.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from meliad_rec.benchmarks.forced_halting import compiled
from meliad_rec.benchmarks.forced_halting import NEVER
from meliad_rec.benchmarks.forced_halting import Setting
from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times

DEPTHS = ((3,), 20), ((10,), 20), ((21,), 20)
SETTINGS = {
  'exit': Setting(16, 64, 128, ('masked', 'fixed', 'cond', 'while'), DEPTHS),
  'global': Setting(
    *(16, 64, 128, ('masked', 'fixed', 'cond', 'while'), DEPTHS),
    transition=False,
  ),
  # Causal, or chunks of 4 tokens would take no more than 5 steps.
  'chunks': Setting(
    *(16, 64, 128, ('masked', 'cond', 'while'), (((3,), 20), ((21,), 20))),
    chunk=4,
    causal=True,
  ),
  'inference': Setting(
    16,
    64,
    128,
    ('masked', 'while', 'compacted'),
    (((2, 3, 4, 6, 9, 13, 17, 20), 20),),
    trains=False,
  ),
  # 32 expressions of at most 100 tokens, START and END; 79,500 an epoch.
  'depth': Setting(
    32,
    102,
    128,
    (NEVER, 'fixed', 'while'),
    tuple(((5,), most) for most in (10, 20, 30, 40)),
    epoch=79_500,
  ),
}
BASELINE = 'first'


@dataclasses.dataclass(frozen=True)
class Row:
  """What a loop costs at a depth.

  Attributes:
    times: of a call, seconds.
    ratio: of that to the first row's.
    steps: that count, of the deepest row.
    temporary_bytes: as the compiler plans them.
    epoch_seconds: reckoned from the time of a call; None: not asked.
  """

  times: Times
  ratio: float
  steps: float
  temporary_bytes: int
  epoch_seconds: float | None

  def columns(self, baseline: str) -> dict[str, str]:
    """Names and values for a table."""
    found = {
      'ms': f'{self.times.median * 1e3:.0f}',
      'spread': f'{self.times.spread:.0%}',
      f'/ {baseline}': f'{self.ratio:.3f}',
      'steps': f'{self.steps:.0f}',
      'temp MiB': f'{self.temporary_bytes / 2**20:.1f}',
    }
    if self.epoch_seconds is not None:
      found['epoch min'] = f'{self.epoch_seconds / 60:.1f}'
    return found


def measure(setting: Setting, rounds: int) -> dict[str, Row]:
  """A row for each loop at each depth."""
  programs = {
    f'{loop}, {_name(loop, steps, most)} of {most}': compiled(
      setting, loop, steps, most
    )
    for steps, most in setting.depths
    for loop in setting.loops
  }
  calls = {name: _caller(*call) for name, call in programs.items()}
  times = round_robin(calls, rounds)
  first = next(iter(times.values()))
  of_epoch = lambda t: (
    None if setting.epoch is None else t.median * setting.epoch / setting.rows
  )
  return {
    name: Row(
      times=times[name],
      ratio=times[name].ratio(first),
      steps=float(jnp.max(program(*arguments)[0])),
      temporary_bytes=program.memory_analysis().temp_size_in_bytes,
      epoch_seconds=of_epoch(times[name]),
    )
    for name, (program, arguments) in programs.items()
  }


def _caller(program, arguments) -> Callable[[], None]:
  return lambda: jax.block_until_ready(program(*arguments))


def _name(loop, steps, most):
  if loop == NEVER:
    return f'{most}'
  return f'{steps[0]}' if len(steps) == 1 else f'{min(steps)} to {max(steps)}'
