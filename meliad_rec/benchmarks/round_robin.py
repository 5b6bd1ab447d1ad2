"""Times of several things that take turns, so that a busy machine is fair."""

from collections.abc import Callable
import dataclasses
import statistics
import time


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of each round, by the clock and by the processors."""

  wall: list[float]
  cpu: list[float]

  @property
  def median(self) -> float:
    return statistics.median(self.wall)

  @property
  def spread(self) -> float:
    """Distance between the quartiles, as a share of the median."""
    if len(self.wall) < 2:
      return 0.0
    first, _, third = statistics.quantiles(self.wall, n=4, method='inclusive')
    return (third - first) / self.median

  @property
  def cpu_median(self) -> float:
    return statistics.median(self.cpu)

  def ratio(self, baseline: 'Times') -> float:
    """The median over rounds of the ratio within a round.

    Load that comes and goes changes a round as a whole, and drops out.
    """
    pairs = zip(self.wall, baseline.wall, strict=True)
    return statistics.median(a / b for a, b in pairs)


def round_robin(
  calls: dict[str, Callable[[], None]], rounds: int
) -> dict[str, Times]:
  """Times of each call, each round calling all of them in turn.

  Args:
    calls: each returns when its work is done. Called once before the rounds.
    rounds: how often each is timed.

  Raises:
    ValueError: no rounds.
  """
  if rounds < 1:
    raise ValueError(
      f'{rounds} rounds time nothing; set --rounds to 1 or more.'
    )
  times = {name: Times([], []) for name in calls}
  for call in calls.values():
    call()
  for _ in range(rounds):
    for name, call in calls.items():
      wall, cpu = time.perf_counter(), time.process_time()
      call()
      times[name].wall.append(time.perf_counter() - wall)
      times[name].cpu.append(time.process_time() - cpu)
  return times
