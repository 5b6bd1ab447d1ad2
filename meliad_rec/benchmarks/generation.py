"""Times the token-by-token generation of the models of `bench recurrence`.

  meliad-rec bench generation

A staircase makes N passes over each token, one after another. This takes N
times the work of Transformer-XL (row `xl`). The table shows two sizes of the
state of one text: between two chunks of the text (`state`), and during
generation (`held`). During generation, the state includes the attention keys
computed from it, so that they are not computed again for each token.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses

import jax

from meliad_rec.benchmarks import recurrence
from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.sampling import Sampler
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model

SETTINGS = recurrence.SETTINGS
BASELINE = recurrence.BASELINE
TOKENS = 64  # Tokens generated per text and round.


@dataclasses.dataclass(frozen=True)
class GenerationCost:
  """Cost of generation with one model.

  Attributes:
    times: times to generate the next TOKENS tokens of all texts.
    ratio: this time divided by the baseline's; see Times.ratio.
    rows: number of texts generated in parallel.
    state_bytes: bytes of the state of one text, as it is kept between chunks.
    held_bytes: bytes of this state during generation (its decode state), where
      some models also hold keys and values computed from it.
  """

  times: Times
  ratio: float
  rows: int
  state_bytes: int
  held_bytes: int

  def columns(self, baseline: str) -> dict[str, str]:
    """Returns {column: text} for a row of the table.

    Args:
      baseline: name of the baseline's row, for the headings of ratios.
    """
    seconds = self.times.median
    return {
      'ms/token': f'{seconds / TOKENS * 1e3:.3f}',
      'spread': f'{self.times.spread:.0%}',
      f'/ {baseline}': f'{self.ratio:.3f}',
      'tokens/s': f'{self.rows * TOKENS / seconds:.0f}',
      'state KiB': f'{self.state_bytes / 2**10:.1f}',
      'held KiB': f'{self.held_bytes / 2**10:.1f}',
    }


def measure(
  setting: recurrence.RecurrenceSizes, rounds: int
) -> dict[str, GenerationCost]:
  """Returns {name of the model: cost of generation with it}.

  Args:
    setting: sizes of the models.
    rounds: number of times that each model is timed.
  """
  models = {
    name: (Model(setting.vocab, cell, setting.config.d_model), setting.segment)
    for name, cell in recurrence.cells(setting).items()
  }
  return compare(models, BASELINE, setting.rows, rounds)


def compare(
  models: Mapping[str, tuple[Model, int]], baseline: str, rows: int, rounds: int
) -> dict[str, GenerationCost]:
  """Returns {name of the model: cost of generation with it}.

  Parameters are random. Each model first reads one segment of random tokens.

  Args:
    models: {name: (model that can generate, tokens per segment)}.
    baseline: name of the model that the others are compared with.
    rows: number of texts generated in parallel.
    rounds: number of times that each model is timed.
  """
  writers = {name: _writer(*each, rows) for name, each in models.items()}
  times = round_robin(writers, rounds)
  return {
    name: GenerationCost(
      times=times[name],
      ratio=times[name].ratio(times[baseline]),
      rows=rows,
      state_bytes=state_bytes(*each),
      held_bytes=state_bytes(*each, held=True),
    )
    for name, each in models.items()
  }


def _writer(model: Model, segment: int, rows: int) -> Callable[[], None]:
  """Returns a function; each call generates TOKENS more tokens of all texts."""
  make = jax.jit(lambda rng: initialize(model, rng, 1, segment))
  decoder = Decoder(model, make(jax.random.key(0)), segment, TOKENS)
  shape = rows, segment + 1
  tokens_BT = jax.random.randint(jax.random.key(1), shape, 1, model.vocab)
  reading = decoder.read(decoder.start(rows), tokens_BT)
  sampler = Sampler(1.0, None, 1.0)

  def write():
    nonlocal reading
    (written,) = decoder.generate(reading, TOKENS, sampler, seed=0)
    reading, _ = written

  return write


def state_bytes(model: Model, segment: int, held: bool = False) -> int:
  """Returns the size of one text's state in bytes.

  Args:
    model: the model.
    segment: tokens per segment.
    held: whether to take the state during generation. If False, it is the
      state between two chunks of the text.
  """

  def state(rng):
    params = {'params': initialize(model, rng, 1, segment)}
    state = model.apply(params, 1, method='initial_state')
    return (
      model.apply(params, state, method='to_decode_state') if held else state
    )

  shapes = jax.eval_shape(state, jax.random.key(0))
  return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))
