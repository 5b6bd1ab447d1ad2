"""Times the beam search of models that write the targets of sources.

  meliad-rec bench translation --setting=small

Fan et al. 2020, table 5: an encoder of 6 layers, and 2 layers of a Transformer
or of a Feedback Transformer that write the target. The parameters are random,
and every target has as many tokens as the setting says.
"""

from collections.abc import Callable
import dataclasses

import jax
import numpy as np

from meliad_rec.benchmarks.generation import state_bytes
from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.config import config
from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.decoder import Decoder
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.training.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class TranslationSizes:
  """Sizes that the models share.

  Attributes:
    size: gin file of size/ with their widths.
    layers: layers that write the target.
    encoder_layers: layers of the encoder.
    vocab: number of ids.
    batches: numbers of sources that are translated at once.
    source: tokens of a source.
    target: tokens of a target.
    beams: hypotheses of each source.
  """

  size: str
  layers: int
  encoder_layers: int
  vocab: int
  batches: tuple[int, ...]
  source: int
  target: int
  beams: int = 5


SETTINGS = {
  'small': TranslationSizes('multi30k', 2, 6, 8000, (1, 16, 64), 32, 32),
  'wmt14': TranslationSizes('wmt14', 2, 6, 32_000, (1, 32, 256), 32, 32),
}
ARCHS = {'transformer': 'arch/window', 'feedback': 'arch/feedback'}
BASELINE = 'transformer'


@dataclasses.dataclass(frozen=True)
class TranslationCost:
  """Cost of translation with one model and one number of sources.

  Attributes:
    times: times to translate all sources.
    ratio: this time divided by the Transformer's for as many sources.
    tokens: tokens of all targets.
    state_bytes: bytes of the state of one hypothesis. The search reorders only
      the parts of the state that it reads. XLA drops others from the loop, such
      as the vectors from which Feedback computed its keys and values.
    parameters: number of parameters.
  """

  times: Times
  ratio: float
  tokens: int
  state_bytes: int
  parameters: int

  def columns(self, baseline: str) -> dict[str, str]:
    """Returns {column: text} for a row of the table.

    Args:
      baseline: name of the model that others are compared with.
    """
    seconds = self.times.median
    return {
      'ms': f'{seconds * 1e3:.0f}',
      'spread': f'{self.times.spread:.0%}',
      f'/ {baseline}': f'{self.ratio:.3f}',
      'tokens/s': f'{self.tokens / seconds:.0f}',
      'state KiB': f'{self.state_bytes / 2**10:.1f}',
      'M parameters': f'{self.parameters / 1e6:.2f}',
    }


def measure(
  setting: TranslationSizes, rounds: int
) -> dict[str, TranslationCost]:
  """Returns {model and number of sources: cost of translation with it}.

  Args:
    setting: sizes of the models.
    rounds: number of times that each model is timed.
  """
  models = {name: _model(arch, setting) for name, arch in ARCHS.items()}
  decoders = {
    name: Decoder(model, _parameters(model, setting), setting.target)
    for name, model in models.items()
  }
  calls = {
    (name, rows): _translator(decoder, setting, rows)
    for rows in setting.batches
    for name, decoder in decoders.items()
  }
  times = round_robin(calls, rounds)
  return {
    f'{name}, {rows}': TranslationCost(
      times=times[name, rows],
      ratio=times[name, rows].ratio(times[BASELINE, rows]),
      tokens=rows * setting.target,
      state_bytes=state_bytes(models[name], setting.target, held=True),
      parameters=sum(
        a.size for a in jax.tree.leaves(decoders[name].variables['params'])
      ),
    )
    for name, rows in calls
  }


def _model(arch: str, setting: TranslationSizes) -> Model:
  names = [arch, f'size/{setting.size}', 'task/copying_pairs']
  names += ['options/layer/layer_norm', 'options/encoder/transformer']
  sizes = {
    'LAYERS': setting.layers,
    'ENCODER_LAYERS': setting.encoder_layers,
    'WINDOW': setting.target,
    'SEGMENT': setting.target,
  }
  config.parse(names, [f'{name} = {value}' for name, value in sizes.items()])
  return config.build(Experiment)().model(setting.vocab)


def _parameters(model: Model, setting: TranslationSizes):
  make = jax.jit(lambda rng: initialize(model, rng, 1, setting.target))
  return make(jax.random.key(0))


def _translator(
  decoder: Decoder, setting: TranslationSizes, rows: int
) -> Callable[[], None]:
  """Returns a function that translates the same sources at each call."""
  rng = np.random.default_rng(0)
  source_BS = rng.integers(1, setting.vocab, (rows, setting.source), np.int32)
  beam = BeamSearch(setting.beams)
  never = 0  # Padding, which a target never has, so that it never ends.

  def translate():
    found = decoder.translate(source_BS, setting.target, beam, never)
    jax.block_until_ready(found)

  return translate
