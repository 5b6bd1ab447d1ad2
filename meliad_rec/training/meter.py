"""Training figures between two lines of the report."""

import math
import time

import jax

from meliad_rec.data.batch import Batch
from meliad_rec.data.documents import Documents
from meliad_rec.metrics import flops
from meliad_rec.metrics import flops as chips
from meliad_rec.metrics.metrics import label_quality
from meliad_rec.metrics.metrics import quality
from meliad_rec.metrics.metrics import speed
from meliad_rec.metrics.metrics import Sums
from meliad_rec.metrics.metrics import Totals
from meliad_rec.training.program import TrainProgram


class Meter:
  """Counts steps and the time they take, evaluations and saves left out.

  Args:
    program: what is timed.
    documents: of the training split; for its bytes per token.
  """

  def __init__(self, program: TrainProgram, documents: Documents):
    self.program = program
    self.peak_flops = chips.peak_flops(program.mesh.devices.flat)
    self.traced = None
    if self.peak_flops is not None:
      self.traced = jax.make_jaxpr(program.forward)(
        program.shapes.params,
        program.shapes.carry,
        program.batch_shapes(program.rows),
      )
    self.tokens_per_epoch = len(documents.tokens)
    self.bytes_per_token = documents.bytes_.sum() / self.tokens_per_epoch
    self.labelled = documents.labels is not None
    self.totals, self.seconds, self.since = Totals(), 0.0, None

  def start(self) -> None:
    """Starts the clock, or lets it run on."""
    self.since = self.since or time.perf_counter()

  def pause(self) -> None:
    """Stops the clock, for all that is no training step."""
    if self.since is not None:
      self.seconds += time.perf_counter() - self.since
      self.since = None

  def add(self, sums: Sums) -> Sums:
    """Waits for a step, and adds what it counted; returns it, on the host."""
    sums = jax.device_get(sums)
    self.totals.add(sums)
    return sums

  def figures(self, step: int, tokens: int) -> dict[str, float]:
    """What to report of the steps since the last call.

    Args:
      step: the last of them.
      tokens: read by then since the run began.
    """
    self.pause()
    totals, seconds = self.totals, self.seconds
    self.totals, self.seconds = Totals(), 0.0
    rate = self.program.optimizer.learning_rate(step - 1)
    return {
      **self._quality(totals),
      **totals.sown,
      **speed(totals, seconds, self._flops(totals), self.peak_flops),
      'learning_rate': float(rate),
      'gradient_norm': totals.gradient_norm,
      'epoch': tokens / self.tokens_per_epoch,
    }

  def _flops(self, totals: Totals) -> float | None:
    """Of a token or padded place, forward and backward."""
    if self.traced is None:
      return None
    # A loop counts as often as it was of use: what it computes for those that
    # have halted is no model FLOP, and no more is what remat repeats. Loops but
    # `while` (options/loop_*) count whole.
    turns = totals.sown.get('halting_depth', 1.0)
    forward = flops.count(self.traced.jaxpr, turns)
    # Backward costs twice forward.
    return 3 * forward / (self.program.rows * self.program.segment)

  def _quality(self, totals: Totals) -> dict[str, float]:
    if not self.labelled:
      return quality(totals, totals.tokens * self.bytes_per_token)
    # A few steps may well be without any label that counts.
    return label_quality(totals) if totals.scored else {}


def is_finite(sums: Sums) -> bool:
  """Whether a step's loss and gradient are."""
  return math.isfinite(sums.nats) and math.isfinite(sums.gradient_norm)


def check_finite(what: str, batch: Batch, sums: Sums) -> None:
  """Raises ValueError where a loss or gradient is not.

  Args:
    what: 'Step 7', for the sentence.
    batch: what was read, named in the sentence by its documents.
    sums: on the host.
  """
  if is_finite(sums):
    return
  rows = zip(batch.document_B.tolist(), batch.offset_B.tolist(), strict=True)
  raise ValueError(
    f'{what} has loss {sums.nats / max(sums.scored, 1):.4g} and gradient '
    f'norm {sums.gradient_norm:.4g}, on the batch of document:token '
    f'{", ".join(f"{d}:{t}" for d, t in rows)}; the run stopped, and its last '
    'checkpoint is from before. Lower LEARNING_RATE, set '
    'optimizer.chain.clip_norm, or use DTYPE = "float32".'
  )
