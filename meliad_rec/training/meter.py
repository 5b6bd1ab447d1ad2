"""Metrics and time of the training steps between two reports."""

from collections import Counter
from collections.abc import Mapping
import math
import time

import jax

from meliad_rec.data.batch import Batch
from meliad_rec.data.documents import Documents
from meliad_rec.metrics import flops
from meliad_rec.metrics.metrics import Sums
from meliad_rec.metrics.totals import counts
from meliad_rec.metrics.totals import label_quality
from meliad_rec.metrics.totals import quality
from meliad_rec.metrics.totals import speed
from meliad_rec.metrics.totals import Totals
from meliad_rec.training.program import TrainProgram


class StepMeter:
  """A counter of the metrics and the time of training steps.

  Its clock leaves out evaluations and saves: see `pause`.

  Args:
    programs: the programs whose steps are timed, {tokens of a row: program}, as
      Experiment.programs. All have the same train state.
  """

  def __init__(self, programs: Mapping[int, TrainProgram]):
    self.programs, (self.program, *_) = programs, programs.values()
    self.peak_flops = flops.peak_flops(self.program.mesh.devices.flat)
    self.traced = None
    if self.peak_flops is not None:
      self.traced = {
        segment: flops.trace(
          program.forward,
          self.program.shapes.params,
          self.program.shapes.carry,
          program.batch_shapes(program.rows),
        )
        for segment, program in programs.items()
      }
    self.totals, self.seconds, self.since = Totals(), 0.0, None
    self.steps = Counter()  # {tokens of a row: steps}

  def start(self) -> None:
    """Starts the clock if it is stopped."""
    self.since = self.since or time.perf_counter()

  def pause(self) -> None:
    """Stops the clock during anything other than training steps."""
    if self.since is not None:
      self.seconds += time.perf_counter() - self.since
      self.since = None

  def add(self, sums: Sums, segment: int | None = None) -> Sums:
    """Waits for the Sums of a step and adds them to the totals.

    Args:
      sums: sums of the step, on the devices.
      segment: tokens of a row in the step; None: as in the first program.

    Returns:
      The same sums, copied to the host.
    """
    sums = jax.device_get(sums)
    self.totals.add(sums)
    self.steps[segment or self.program.segment] += 1
    return sums

  def metrics(self, step: int, tokens: int) -> dict[str, float]:
    """Returns {metric: value} of the steps since the last call.

    Stops the clock, and sets it and the totals to 0.

    Args:
      step: number of the last of these steps, counted from 1.
      tokens: tokens that the run has read so far, in all its steps.
    """
    self.pause()
    totals, seconds = self.totals, self.seconds
    per_place = self._flops(totals)
    self.totals, self.seconds, self.steps = Totals(), 0.0, Counter()
    return {
      **self.quality(totals),
      **totals.sown,
      **speed(totals, seconds, per_place, self.peak_flops),
      'learning_rate': self.learning_rate(step),
      'gradient_norm': totals.gradient_norm,
      **self.progress(tokens),
    }

  def quality(self, totals: Totals) -> dict[str, float]:
    """Returns {metric: value} of the totals of some steps."""
    raise NotImplementedError

  def progress(self, tokens: int) -> dict[str, float]:
    """Returns {metric: value} of the tokens that the run has read so far."""
    del tokens
    return {}

  def learning_rate(self, step: int) -> float:
    """Returns the learning rate that a step used.

    Args:
      step: number of the step, counted from 1.
    """
    return float(self.program.optimizer.learning_rate(step - 1))

  def _flops(self, totals: Totals) -> float | None:
    """Returns the FLOPs of the forward and the backward pass per token.

    Here, a position of padding counts as a token. Returns None if the peak
    FLOP/s of the devices are not known.

    Args:
      totals: totals of the steps, for their mean halting depth.
    """
    if self.traced is None:
      return None
    # A `while` loop counts as many iterations as the mean halting depth, or as
    # its maximum if nothing halts. Work for halted tokens is not a model FLOP,
    # nor is recomputation by remat.
    turns = totals.sown.get('halting_depth')
    forward = sum(
      steps * flops.count(self.traced[segment], turns)
      for segment, steps in self.steps.items()
    )
    places = sum(
      steps * self.programs[segment].places
      for segment, steps in self.steps.items()
    )
    # The backward pass costs twice the forward pass.
    return 3 * forward / places


class Meter(StepMeter):
  """A counter of the metrics and the time of training steps on documents.

  Args:
    programs: as in StepMeter.
    documents: the training split, for its bytes per token and tokens per epoch.
  """

  def __init__(
    self, programs: Mapping[int, TrainProgram], documents: Documents
  ):
    super().__init__(programs)
    self.tokens_per_epoch = documents.tokens_read
    self.bytes_per_token = documents.bytes_.sum() / self.tokens_per_epoch
    self.labeled = documents.labels is not None

  def quality(self, totals: Totals) -> dict[str, float]:
    if not self.labeled:
      return quality(totals, totals.tokens * self.bytes_per_token)
    if totals.scored:
      return label_quality(totals)
    # A few steps may contain no scored label, but their tokens count.
    return {**counts(totals), 'scored_tokens': 0}

  def progress(self, tokens: int) -> dict[str, float]:
    return {'epoch': tokens / self.tokens_per_epoch}


def is_finite(sums: Sums) -> bool:
  """Returns whether a step's loss and gradient norm are finite."""
  return math.isfinite(sums.nats) and math.isfinite(sums.gradient_norm)


def check_finite(what: str, batch: Batch, sums: Sums) -> None:
  """Raises ValueError if a step's loss or gradient norm is not finite.

  Args:
    what: name of the step for the message, such as 'Step 7'.
    batch: batch of the step; the message names its documents. The batches of
      agents have none.
    sums: sums of the step, on the host.
  """
  if is_finite(sums):
    return
  where = ''
  if isinstance(batch, Batch):
    rows = zip(batch.document_B.tolist(), batch.offset_B.tolist(), strict=True)
    where = (
      ' on the batch whose rows begin at document:token '
      f'{", ".join(f"{d}:{t}" for d, t in rows)}'
    )
  # Steps of agents are not scored.
  loss = sums.nats / max(sums.scored or sums.tokens, 1)
  raise ValueError(
    f'{what} has loss {loss:.4g} and gradient norm '
    f'{sums.gradient_norm:.4g}{where}. The run stopped; its last checkpoint is '
    'from before this step. Lower LEARNING_RATE, set '
    'optimizer.chain.clip_norm, or use DTYPE = "float32".'
  )
