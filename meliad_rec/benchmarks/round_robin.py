"""Times functions in turn, so that other load on the machine affects all."""

from collections.abc import Callable
import dataclasses
import statistics
import time


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of one function in each round, as wall time and as CPU time."""

  wall: list[float]
  cpu: list[float]

  @property
  def median(self) -> float:
    return statistics.median(self.wall)

  @property
  def spread(self) -> float:
    """Interquartile range of the wall times divided by their median."""
    if len(self.wall) < 2:
      return 0.0
    first, _, third = statistics.quantiles(self.wall, n=4, method='inclusive')
    return (third - first) / self.median

  @property
  def cpu_median(self) -> float:
    return statistics.median(self.cpu)

  def ratio(self, baseline: 'Times') -> float:
    """Returns the median of each round's wall time divided by the baseline's.

    Other load on the machine affects a whole round, so it cancels out.
    """
    pairs = zip(self.wall, baseline.wall, strict=True)
    return statistics.median(a / b for a, b in pairs)


def round_robin(
  calls: dict[str, Callable[[], None]], rounds: int
) -> dict[str, Times]:
  """Returns the times of each function; each round calls all of them in turn.

  Args:
    calls: functions by name, which return when their work is done. Each is
      called once before the rounds.
    rounds: number of times that each function is timed.

  Raises:
    ValueError: rounds is below 1.
  """
  if rounds < 1:
    raise ValueError(f'rounds must be at least 1, got {rounds}. Set --rounds.')
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
