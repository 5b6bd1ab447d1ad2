"""A trained run, opened from its folder: it generates and evaluates text.

run = meliad_rec.load_run('runs/tiny')
run.generate('def main(', tokens=100)[0]
run.evaluate(open('book.txt').read())['bits_per_byte']
"""

from collections.abc import Iterator
from collections.abc import Sequence
import functools
from pathlib import Path

import numpy as np

from meliad_rec.config.saved import MODEL
from meliad_rec.config.saved import SavedConfig
from meliad_rec.data.documents import count_words
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.distributed import partition
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.generation import saved_state
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.decoder import DecoderState
from meliad_rec.generation.sampling import Sampler
from meliad_rec.generation.text import TextGenerator
from meliad_rec.models.checks import check_can_generate
from meliad_rec.models.checks import check_data_compatible
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.runs import folder as run_folder
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.checksums import digest
from meliad_rec.storage.workdir import place


def load_run(
  workdir: str | Path, step: int | str | None = None, trusted: bool = False
) -> 'TrainedRun':
  """Opens a run. The data it was trained on are not needed.

  Args:
    workdir: folder that training wrote.
    step: step of a checkpoint, or 'best' by the run's own metric. None: the
      newest checkpoint.
    trusted: whether config.gin may import and call modules outside meliad_rec.
      Set it only for folders whose author you trust.

  Raises:
    ValueError: the folder has no run or no such checkpoint, or is damaged.
  """
  folder = place(workdir)
  text, facts, vocabulary = run_folder.read(folder)
  config = SavedConfig(text, str(folder / run_folder.CONFIG), trusted)
  model = config.build(Model, {'vocab': vocabulary.size}, MODEL)
  sharded = ShardedModel(model, partition.make_mesh(), facts['segment'])
  checkpoints = Checkpoints(
    folder / run_folder.CHECKPOINTS, best_metric=facts['best_metric']
  )
  if checkpoints.latest() is None:
    raise ValueError(
      f'{folder} has no checkpoint. Train until the first one is saved.'
    )
  part = 'ema' if facts['averages'] else 'params'
  step, params, about = checkpoints.restore_params(
    sharded.param_shapes, step, {'tokenizer': vocabulary.identity}, part
  )
  facts = about | facts
  return TrainedRun(sharded, params, vocabulary, config, facts, step)


class TrainedRun:
  """A model with its parameters and vocabulary.

  Attributes:
    sharded: the model on a mesh of all devices.
    params: its parameters, or their moving average if the run keeps one.
    vocabulary: converts text to tokens and back.
    config: configuration of the run.
    batch: documents that training read in parallel.
    labels: whether the model predicts labels instead of text.
    validation: identity of the validation split in training. None if unknown.
    step: training step of the checkpoint.
  """

  def __init__(self, sharded, params, vocabulary, config, facts, step):
    self.sharded, self.params = sharded, params
    self.vocabulary, self.config = vocabulary, config
    self.batch, self.labels = facts['batch'], facts['labels']
    self.validation = facts.get('validation split')
    self.step = step

  @functools.cached_property
  def text_generator(self) -> TextGenerator:
    """The generator of this run; ValueError if the model cannot generate."""
    run_folder.check_text(self.labels)
    model, mesh = self.sharded.model, self.sharded.mesh
    check_can_generate(model)
    decoder = Decoder(model, self.params, self.sharded.segment, mesh=mesh)
    return TextGenerator(decoder, self.vocabulary)

  @functools.cached_property
  def identity(self) -> dict[str, str]:
    """The vocabulary and a digest of the parameters."""
    parameters = digest(self.params)
    return {'vocabulary': self.vocabulary.identity, 'parameters': parameters}

  def generate(
    self,
    prompt: str = '',
    tokens: int = 200,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    samples: int = 1,
  ) -> list[str]:
    """Returns continuations of a prompt, without the prompt.

    Args:
      prompt: any length; '' begins a document.
      tokens: number of tokens to generate.
      temperature, top_k, top_p: see Sampler; temperature 0 is greedy.
      seed: equal seeds give equal texts.
      samples: number of different texts. The first texts do not depend on this
        number.
    """
    texts = [''] * samples
    sampler = Sampler(temperature, top_k, top_p)
    state = self.read(prompt).repeat(samples)
    for _, pieces in self.text_generator.write(state, tokens, sampler, seed):
      texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    return texts

  def stream(
    self,
    prompt: str = '',
    tokens: int = 200,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
  ) -> Iterator[str]:
    """Yields the text of `generate` in pieces, as it is generated."""
    sampler = Sampler(temperature, top_k, top_p)
    state = self.read(prompt)
    for _, pieces in self.text_generator.write(state, tokens, sampler, seed):
      yield pieces[0]

  def read(self, text: str, state: DecoderState | None = None) -> DecoderState:
    """Returns the state after a text; see TextGenerator.read."""
    return self.text_generator.read(text, state)

  def save_state(self, path: str | Path, state: DecoderState) -> None:
    """Writes a state to a file."""
    saved_state.save(path, state, self.identity)

  def load_state(self, path: str | Path) -> DecoderState:
    """Returns a state that `save_state` of the same run and step wrote."""
    like = self.text_generator.decoder.start(1)
    return saved_state.load(path, like, self.identity)

  def evaluate(self, texts: str | Sequence[str]) -> dict[str, float]:
    """Returns metrics over documents; see evaluation.evaluate."""
    texts = [texts] if isinstance(texts, str) else texts
    return self._evaluate(self.documents(texts))

  def nats(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns -ln p of each token of a text, and the byte where it begins."""
    documents = self.documents([text])
    losses = TokenLosses.of(documents, self.vocabulary)
    self._evaluate(documents, losses.parts)
    return losses.nats, losses.bytes_[:-1]

  def _evaluate(self, documents, nats_of=None):
    sharded, rows = self.sharded, self.rows(len(documents))
    check_data_compatible(sharded.model, documents, sharded.segment, 'SEGMENT')
    return evaluate(sharded, self.params, documents, rows, nats_of=nats_of)

  def documents(
    self, texts: Sequence[str], names: Sequence[str] | None = None
  ) -> Documents:
    """Tokenizes texts as documents; ValueError if the model predicts labels."""
    run_folder.check_text(self.labels)
    names = names or [f'text {i}' for i in range(len(texts))]
    encode = self.vocabulary.encode
    documents = (
      Document(name, encode(text), len(text.encode()), count_words(text))
      for name, text in zip(names, texts, strict=True)
    )
    return Documents.collect(documents, self.vocabulary)

  def rows(self, documents: int) -> int:
    """Returns the number of batch rows with which to read some documents.

    It is the batch of training or the number of documents, if that is less,
    rounded up to a multiple of the devices that share rows.
    """
    mesh = self.sharded.mesh
    shards = np.prod([mesh.shape[axis] for axis in partition.BATCH_AXES])
    wanted = min(self.batch, documents)
    return int(-(-wanted // shards) * shards)
