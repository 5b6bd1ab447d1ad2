"""A trained run, opened from its folder: it generates and evaluates text.

run = meliad_rec.load_run('runs/tiny')
run.generate('def main(', tokens=100)[0]
run.evaluate(open('book.txt').read())['bits_per_byte']
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import os
from pathlib import Path
from typing import Any

from etils import epath
import jax
import numpy as np

from meliad_rec.config.saved import MODEL
from meliad_rec.config.saved import SavedConfig
from meliad_rec.config.values import check_count
from meliad_rec.config.values import check_path
from meliad_rec.data.dataset import Dataset
from meliad_rec.data.documents import Documents
from meliad_rec.data.pairs import end_of_line
from meliad_rec.data.text import document
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.distributed import partition
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.generation import saved_state
from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.decoder import DecoderState
from meliad_rec.generation.sampling import Sampler
from meliad_rec.generation.text import check_until
from meliad_rec.generation.text import TextGenerator
from meliad_rec.generation.translation import Translation
from meliad_rec.models.checks import check_can_generate
from meliad_rec.models.checks import check_data_compatible
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.runs import display
from meliad_rec.runs import exported
from meliad_rec.runs import folder as run_folder
from meliad_rec.runs.checks import check_list
from meliad_rec.runs.checks import check_text
from meliad_rec.runs.observed_run import ObservedRun
from meliad_rec.runs.run_data import open_data
from meliad_rec.storage.checksums import digest
from meliad_rec.storage.workdir import place


def load_run(
  workdir: str | os.PathLike[str],
  step: int | str | None = None,
  trusted: bool = False,
  average: int = 1,
) -> 'TrainedRun':
  """Opens a run, or a model that was exported from one.

  The data that the run was trained on are not needed.

  Args:
    workdir: folder that training or `TrainedRun.export` wrote.
    step: step of a checkpoint, or 'best' for the best on validation. None: the
      newest checkpoint.
    trusted: whether config.gin may import and call modules outside meliad_rec.
      Set it only for folders whose author you trust.
    average: the parameters are the mean of this many checkpoints that the
      folder still has, the last of which is `step` (Vaswani et al. 2017,
      section 6.1).

  Returns:
    The run at this step, on all devices of this process.

  Raises:
    ValueError: the folder has no run or no such checkpoint, or is damaged.
  """
  check_path('workdir', workdir)
  if step not in (None, 'best'):
    run_folder.check_step(step)
  folder = place(workdir)
  text, facts, vocabulary = run_folder.read(folder)
  if vocabulary is None:
    raise ValueError(
      f'{folder} is a run of agents, which have no text. Open it with '
      'meliad-rec play or meliad_rec.load_agent.'
    )
  config = SavedConfig(text, str(folder / run_folder.CONFIG), trusted)
  model = config.build(Model, {'vocab': vocabulary.size}, MODEL)
  sharded = ShardedModel(model, partition.make_mesh(), facts['segment'])
  step, params, about = run_folder.read_params(
    folder, facts, sharded.param_shapes, step, average
  )
  facts = {'average': average} | about | facts
  return TrainedRun(sharded, params, vocabulary, config, facts, step, folder)


class TrainedRun(ObservedRun):
  """A model with its parameters and vocabulary; `load_run` opens one.

  Attributes:
    workdir: the folder that the run was opened from.
    sharded: the model on a mesh of all devices.
    params: parameters of the model, or their moving average if the run keeps
      one.
    vocabulary: converts text to tokens and back.
    config: configuration of the run.
    batch: number of documents that training read in parallel.
    labels: whether the model predicts labels instead of text.
    validation: fingerprint of the validation split that training used, a text
      that is equal only for equal documents; None if unknown.
    started_in: folder in which training was started, to which the paths of its
      data are relative; '' if unknown.
    step: training step of the checkpoint.
    average: number of checkpoints, up to `step`, whose mean are the parameters.
  """

  def __init__(
    self,
    sharded: ShardedModel,
    params: Any,
    vocabulary: Vocabulary,
    config: SavedConfig,
    facts: Mapping[str, Any],
    step: int,
    workdir: Path | epath.Path = Path(),
  ):
    self.sharded, self.params = sharded, params
    self.vocabulary, self.config = vocabulary, config
    self.batch: int = facts['batch']
    self.labels: bool = facts['labels']
    self.validation: str | None = facts.get('validation split')
    self.started_in: str = facts.get('started_in', '')
    self.step, self.workdir = step, workdir
    self.average: int = facts.get('average', 1)
    self._facts = facts

  def __repr__(self) -> str:
    return display.as_text(self._title, self._rows)

  def _repr_html_(self) -> str:
    """Returns a table and the loss curves as HTML, which notebooks show."""
    return display.as_html(self._title, self._rows, self.workdir)

  @property
  def _title(self) -> str:
    return f'{type(self).__name__} of {self.workdir}, step {self.step:,}'

  @property
  def _rows(self) -> dict[str, str]:
    name = self.vocabulary.identity
    name = name if len(name) <= 32 else f'{name[:29]}...'
    return {
      'model': display.describe(self.sharded.model),
      'parameters': f'{self.parameters:,}',
      'vocabulary': f'{name}, {self.vocabulary.size:,} ids',
    }

  @property
  def name(self) -> str:
    """Name of the folder that the run was opened from."""
    return self.workdir.name or Path.cwd().name

  @property
  def parameters(self) -> int:
    """Number of parameters of the model."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.params))

  @functools.cached_property
  def _decoder(self) -> Decoder:
    """The decoder, whose compiled functions are kept."""
    model, mesh = self.sharded.model, self.sharded.mesh
    return Decoder(model, self.params, self.sharded.segment, mesh=mesh)

  @functools.cached_property
  def text_generator(self) -> TextGenerator:
    """The generator of this run; ValueError if the model cannot generate."""
    run_folder.check_is_of_text(self.labels)
    check_can_generate(self.sharded.model)
    return TextGenerator(self._decoder, self.vocabulary)

  @functools.cached_property
  def identity(self) -> dict[str, str]:
    """Identities of the vocabulary and the parameters, as text.

    'vocabulary' is the identity of the vocabulary, and 'parameters' the sha256
    of the parameters. A saved state is loaded only if both are the same.
    """
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
    until: str | None = None,
  ) -> list[str]:
    """Returns continuations of a prompt, without the prompt.

    Args:
      prompt: text of any length; '' begins a document.
      tokens: number of tokens to generate.
      temperature, top_k, top_p: see Sampler; temperature 0 is greedy.
      seed: at least 0 and below 2**32; equal seeds give equal texts.
      samples: number of texts, each sampled independently. With a larger
        number, the same texts come first and further ones follow.
      until: text that ends a continuation, which includes it; None: none does.

    Raises:
      ValueError: an argument is out of its range, or the model cannot generate:
        it predicts labels, or must read a whole document at once.
    """
    check_count('samples', samples, 1)
    sampler = Sampler(temperature, top_k, top_p)
    texts = [''] * samples
    for pieces in self._pieces(prompt, tokens, sampler, seed, samples, until):
      texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    return texts

  def translate(
    self,
    lines: Sequence[str],
    beam: BeamSearch | None = None,
    tokens: int | None = None,
    on_progress: Callable[[int], None] = lambda lines: None,
    batch: int | None = None,
  ) -> list[str]:
    """Returns the most likely target of each source, found by a beam search.

    If training read only the first words of a source (SOURCE_WORDS), so does
    this.

    Args:
      lines: the sources, without newlines.
      beam: settings of the search. None: the run's configuration.
      tokens: greatest number of tokens of a target. None: 1.2 times as many as
        the longest source of a batch, rounded up to a multiple of 16, plus 10.
      on_progress: called after each batch with the number of sources so far.
      batch: number of sources translated at once. None: the rows of a training
        step, at most 128.

    Raises:
      ValueError: the model has no encoder, a source is not a single line,
        `beam` is not a BeamSearch, or `tokens` or `batch` is below 1.
    """
    self._check_encoder('translate', 'Use meliad-rec generate.')
    check_list('lines', lines)
    for name, value in ('tokens', tokens), ('batch', batch):
      if value is not None:
        check_count(name, value, 1)
    if beam is None:
      beam = Translation.of(self._facts['translation']).beam
    if not isinstance(beam, BeamSearch):
      raise ValueError(
        f'beam must be a generation.beam.BeamSearch or None, got {beam!r}.'
      )
    end = end_of_line(self.vocabulary)
    ids = [self.source_ids(s, f'Source {n}') for n, s in enumerate(lines)]
    # Sources of about the same length share a batch.
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    if not order:
      return []
    rows = self.rows(len(ids), batch or min(self.batch, 128))
    targets = [''] * len(ids)
    for begin in range(0, len(order), rows):
      part = order[begin : begin + rows]
      S = -(-len(ids[part[0]]) // 16) * 16  # Few shapes are compiled.
      source_BS = np.zeros((rows, S), np.int32)
      for row, i in enumerate(part):
        source_BS[row, : len(ids[i])] = ids[i]
      count = S * 6 // 5 + 10 if tokens is None else tokens
      found = self._decoder.translate(source_BS, count, beam, end)
      best_BL = np.asarray(found.tokens_BKL)[:, 0]
      for i, ids_L in zip(part, best_BL, strict=False):
        real = (ids_L != 0) & (ids_L != end)
        targets[i] = self.vocabulary.decode(ids_L[real])
      on_progress(begin + len(part))
    return targets

  def stream(
    self,
    prompt: str = '',
    tokens: int = 200,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    until: str | None = None,
  ) -> Iterator[str]:
    """Yields the text of `generate` in pieces, as it is generated.

    Arguments and errors are as in `generate`.
    """
    sampler = Sampler(temperature, top_k, top_p)
    pieces = self._pieces(prompt, tokens, sampler, seed, 1, until)
    return (piece for [piece] in pieces)

  def _pieces(
    self, prompt, tokens, sampler, seed, samples, until
  ) -> Iterator[list[str]]:
    """Reads the prompt, and returns an iterator over each text's next piece."""
    check_count('tokens', tokens, 0)
    check_count('seed', seed, 0, 2**32)
    check_until(until)
    state = self.read(prompt).repeat(samples)
    steps = self.text_generator.write(state, tokens, sampler, seed, until)
    return (pieces for _, pieces in steps)

  def read(self, text: str, state: DecoderState | None = None) -> DecoderState:
    """Returns the model's state after reading a text.

    `text_generator.write` generates text from this state.

    Args:
      text: text to read.
      state: state to continue from. None begins a document.

    Raises:
      ValueError: `text` is not a string, `state` is not a state that `read`
        returned, or the model cannot generate.
    """
    if state is not None and not isinstance(state, DecoderState):
      raise ValueError(
        f'state must be a state that `read` returned, got {state!r}.'
      )
    check_text('The prompt', text)
    generator = self.text_generator
    if state is None and self.begins_changed:
      state = generator.decoder.with_parts_of(
        generator.read_ids(self._observer.before), self._observer.state
      )
      return generator.read_ids(self.vocabulary.encode(text), state)
    return generator.read(text, state)

  def save_state(
    self, path: str | os.PathLike[str], state: DecoderState
  ) -> None:
    """Writes a state to an .npz file; ValueError if it cannot be written."""
    saved_state.save(path, state, self.identity)

  def load_state(self, path: str | os.PathLike[str]) -> DecoderState:
    """Returns a state that `save_state` of the same run and step wrote.

    Raises:
      ValueError: the file is missing, damaged, or of another run or step.
    """
    like = self.text_generator.decoder.start(1)
    return saved_state.load(path, like, self.identity)

  def evaluate(
    self, texts: str | Sequence[str] | Documents
  ) -> dict[str, float]:
    """Returns {name: value} of metrics over all texts; see gin/README.md.

    Args:
      texts: a document, or several; every token of each is predicted once. A
        split is `run.data().documents('test')`.

    Raises:
      ValueError: a document is not a string, all are empty, or the model
        predicts labels and these are texts.
    """
    self.check_state_unmodified('evaluate')
    if not isinstance(texts, Documents):
      texts = self.documents([texts] if isinstance(texts, str) else texts)
    return self._evaluate(texts)

  def nats(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the loss of each token of a text, and where each token begins.

    Returns:
      (nats_T, byte_offsets_T), for the T tokens of the text. nats_T is -ln p of
      each token. byte_offsets_T is the index of each token's first byte in the
      UTF-8 text, as the tokens spell it; a vocabulary of words may spell spaces
      differently.
      `predictions` also returns the most likely alternatives of each token.

    Raises:
      ValueError: as in `evaluate`.
    """
    if self.labels:
      raise ValueError(
        'This run predicts labels, and nats returns the losses of text. Use '
        'predictions(ids, labels=...).'
      )
    documents = self.documents([text])
    losses = TokenLosses.of(documents, self.vocabulary)
    if self.begins_changed:
      nats_T = self.predictions(text, 1)['nats'].values
      return nats_T, losses.bytes_[:-1]
    self._evaluate(documents, losses.parts)
    return losses.nats, losses.bytes_[:-1]

  def export(self, out: str | os.PathLike[str]) -> None:
    """Writes the model to a new folder, which `load_run` opens.

    The folder has model.safetensors with the parameters bit for bit, the
    configuration, the vocabulary, and a model card to complete. If the run
    keeps a moving average of its parameters, the average is written instead of
    them.

    Args:
      out: a new or empty folder on a disk.

    Raises:
      ValueError: the folder is not empty or cannot be written, or the package
        safetensors is missing (meliad_rec[export] installs it).
    """
    rows = self._rows | {'step': f'{self.step:,}'}
    if self.average > 1:
      rows['step'] = f'mean of {self.average} checkpoints up to {rows["step"]}'
    else:  # Only these parameters were evaluated.
      rows |= display.quality(self.workdir, self.step)
    name = Path(out).absolute().name
    hidden = 'config', 'started_in', 'began with'  # The last two are paths.
    facts = {k: v for k, v in self._facts.items() if k not in hidden}
    facts |= {'step': self.step, 'tokenizer': self.vocabulary.identity}
    card = display.as_card(name, rows, self.labels, self.sharded.model)
    files = run_folder.files(self.workdir)
    exported.write(out, files, self.params, facts, card)

  def _evaluate(
    self, documents: Documents, losses_out: list | None = None
  ) -> dict[str, float]:
    sharded, rows = self.sharded, self.rows(len(documents))
    check_data_compatible(sharded.model, documents, sharded.segment, 'SEGMENT')
    return evaluate(
      sharded, self.params, documents, rows, losses_out=losses_out
    )

  def data(
    self,
    store: str | None = None,
    path: str | None = None,
    split_file: str | None = None,
  ) -> Dataset:
    """Returns the data of the run.

    Args:
      store, path, split_file: as in run_data.open_data, if the data were moved.
    """
    return open_data(self, store, path, split_file)

  def documents(
    self, texts: Sequence[str], names: Sequence[str] | None = None
  ) -> Documents:
    """Tokenizes texts as documents.

    Args:
      texts: one string for each document.
      names: names of the documents, for messages.

    Raises:
      ValueError: the model predicts labels, a text is not a string, there is no
        text, or the numbers of texts and names differ.
    """
    run_folder.check_is_of_text(self.labels)
    check_list('texts', texts)
    texts = list(texts)
    for number, text in enumerate(texts):
      check_text(f'Text {number}', text)
    names = names or [f'text {i}' for i in range(len(texts))]
    if not texts:
      raise ValueError('There is no text to read. Give at least one.')
    if len(names) != len(texts):
      raise ValueError(
        f'Each text needs one name, got {len(texts)} texts and {len(names)} '
        'names.'
      )
    documents = (
      document(name, text, self.vocabulary)
      for name, text in zip(names, texts, strict=True)
    )
    return Documents.collect(documents, self.vocabulary)

  def rows(self, documents: int, batch: int | None = None) -> int:
    """Returns the number of batch rows with which to read documents.

    It is the smaller of both numbers, rounded up; see partition.rows_for.

    Args:
      documents: number of documents.
      batch: rows of a batch. None: the run's own number.
    """
    return partition.rows_for(self.sharded.mesh, documents, batch or self.batch)
