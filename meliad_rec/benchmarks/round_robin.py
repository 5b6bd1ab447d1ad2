"""Times functions in turn, so that other load affects all of them alike."""

from collections.abc import Callable
import dataclasses
import statistics
import time


@dataclasses.dataclass(frozen=True)
class Times:
  """Times of one function in seconds.

  Attributes:
    wall: wall-clock time of the call in each round.
    cpu: CPU time of this process during the call in each round.
  """

  wall: list[float]
  cpu: list[float]

  @property
  def median(self) -> float:
    return statistics.median(self.wall)

  @property
  def spread(self) -> float:
    """Interquartile range of the wall times, divided by their median."""
    if len(self.wall) < 2:
      return 0.0
    first, _, third = statistics.quantiles(self.wall, n=4, method='inclusive')
    return (third - first) / self.median

  @property
  def cpu_median(self) -> float:
    return statistics.median(self.cpu)

  def ratio(self, baseline: 'Times') -> float:
    """Returns the median, over rounds, of the ratio of the two wall times.

    The ratio is the time of this function divided by the baseline's time in the
    same round. Other load on the machine affects both, so it cancels out.
    """
    pairs = zip(self.wall, baseline.wall, strict=True)
    return statistics.median(a / b for a, b in pairs)


def round_robin(
  calls: dict[str, Callable[[], None]], rounds: int
) -> dict[str, Times]:
  """Returns {name: times of the function}.

  Each round calls all functions in turn.

  Args:
    calls: {name: function}. A function returns when its work is done. Each is
      called once, without being timed, before the rounds.
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
