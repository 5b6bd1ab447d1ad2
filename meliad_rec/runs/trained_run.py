"""A trained run, opened from its folder alone: it writes, reads and scores.

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
from meliad_rec.generation.decoder import Reading
from meliad_rec.generation.sampling import Sampler
from meliad_rec.generation.text import Writer
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
  """Opens a run; the data it was trained on need not be there.

  Args:
    workdir: folder that training wrote.
    step: of a checkpoint, or 'best' by the run's own metric; None: the newest.
    trusted: whether config.gin may import and call modules that are not
      meliad_rec's own; only for folders whose writer you trust.

  Raises:
    ValueError: no run, no such checkpoint, or one that is damaged.
  """
  folder = place(workdir)
  text, facts, vocabulary = run_folder.read(folder)
  config = SavedConfig(text, str(folder / run_folder.CONFIG), trusted)
  model = config.build(Model, {'vocab': vocabulary.size}, MODEL)
  forward = ShardedModel(model, partition.make_mesh(), facts['segment'])
  checkpoints = Checkpoints(
    folder / run_folder.CHECKPOINTS, best_metric=facts['best_metric']
  )
  if checkpoints.latest() is None:
    raise ValueError(
      f'{folder} holds no checkpoint; train until the first one is saved.'
    )
  part = 'ema' if facts['averages'] else 'params'
  step, params, about = checkpoints.restore_params(
    forward.param_shapes, step, {'tokenizer': vocabulary.identity}, part
  )
  facts = about | facts
  return TrainedRun(forward, params, vocabulary, config, facts, step)


class TrainedRun:
  """A model with its parameters and vocabulary.

  Attributes:
    forward: the model on a mesh of all devices.
    params: its parameters, or their average where the run keeps one.
    vocabulary: text to tokens and back.
    config: what the run was made of.
    batch: documents that training read side by side.
    labels: whether it predicts labels of tokens, and no text.
    validation: identity of the validation split in training; None: not known.
    step: of the checkpoint.
  """

  def __init__(self, forward, params, vocabulary, config, facts, step):
    self.forward, self.params = forward, params
    self.vocabulary, self.config = vocabulary, config
    self.batch, self.labels = facts['batch'], facts['labels']
    self.validation = facts.get('validation split')
    self.step = step

  @functools.cached_property
  def writer(self) -> Writer:
    """Reads and writes text; ValueError if the model writes none."""
    run_folder.check_text(self.labels)
    own = self.forward
    check_can_generate(own.model)
    decoder = Decoder(own.model, self.params, own.segment, mesh=own.mesh)
    return Writer(decoder, self.vocabulary)

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
    """What the model writes after a prompt, which is not repeated.

    Args:
      prompt: any length; '' begins a document.
      tokens: to write.
      temperature, top_k, top_p: see Sampler; temperature 0 is greedy.
      seed: the same one gives the same text.
      samples: texts to write, each another; the first ones stay the same where
        more are asked for.
    """
    texts = [''] * samples
    sampler = Sampler(temperature, top_k, top_p)
    reading = self.read(prompt).repeat(samples)
    for _, pieces in self.writer.write(reading, tokens, sampler, seed):
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
    """The text of `generate`, in pieces, as it is written."""
    sampler = Sampler(temperature, top_k, top_p)
    for _, pieces in self.writer.write(
      self.read(prompt), tokens, sampler, seed
    ):
      yield pieces[0]

  def read(self, text: str, reading: Reading | None = None) -> Reading:
    """Where the model stands behind a text; see Writer.read."""
    return self.writer.read(text, reading)

  def save_reading(self, path: str | Path, reading: Reading) -> None:
    """Writes where the model stands to a file."""
    saved_state.save(path, reading, self.identity)

  def load_reading(self, path: str | Path) -> Reading:
    """Where `save_reading` of the same run and step stood."""
    return saved_state.load(path, self.writer.decoder.start(1), self.identity)

  def evaluate(self, texts: str | Sequence[str]) -> dict[str, float]:
    """Figures over documents, each token predicted once; metrics/units.py."""
    texts = [texts] if isinstance(texts, str) else texts
    return self._evaluate(self.documents(texts))

  def nats(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """-ln p of each token of a document, and the byte at which each begins."""
    documents = self.documents([text])
    losses = TokenLosses.of(documents, self.vocabulary)
    self._evaluate(documents, losses.parts)
    return losses.nats, losses.bytes_[:-1]

  def _evaluate(self, documents, nats_of=None):
    forward, rows = self.forward, self.rows(len(documents))
    check_data_compatible(forward.model, documents, forward.segment, 'SEGMENT')
    return evaluate(forward, self.params, documents, rows, nats_of=nats_of)

  def documents(
    self, texts: Sequence[str], names: Sequence[str] | None = None
  ) -> Documents:
    """Texts as documents; ValueError if the run is of labels."""
    run_folder.check_text(self.labels)
    names = names or [f'text {i}' for i in range(len(texts))]
    encode = self.vocabulary.encode
    documents = (
      Document(name, encode(text), len(text.encode()), count_words(text))
      for name, text in zip(names, texts, strict=True)
    )
    return Documents.collect(documents, self.vocabulary)

  def rows(self, documents: int) -> int:
    """Documents to read side by side: as in training, on whatever devices."""
    places = np.prod([self.forward.mesh.shape[a] for a in partition.BATCH_AXES])
    wanted = min(self.batch, documents)
    return int(-(-wanted // places) * places)
