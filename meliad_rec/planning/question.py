"""Asks another process to compile a training step, and returns its answer."""

from collections.abc import Mapping
import dataclasses
import json
from pathlib import Path
import tempfile

from meliad_rec.planning import environment
from meliad_rec.planning import topology

WORKER = 'meliad_rec.planning.worker'


@dataclasses.dataclass(frozen=True)
class Question:
  """The training step of one experiment on one slice.

  Attributes:
    topology: name of the slice, such as 'v5e:16x16'.
    gin_file, gin_param: values of the flags --gin_file and --gin_param, as for
      training.
    vocab_size: size of the vocabulary, in place of the data. None means that
      the data are read.
    fast: whether to compile with little optimization.
  """

  topology: str
  gin_file: tuple[str, ...]
  gin_param: tuple[str, ...]
  vocab_size: int | None = None
  fast: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
  """Facts and estimates about the training step of a Question.

  Attributes:
    topology: name of the slice.
    hbm: bytes that a program may use on each device.
    sizes: {field of measure.Sizes: value}.
    compiled: {field of measure.Compiled: value}. None means that the step was
      not compiled, or that it does not fit in memory.
    needed: bytes that the step needs on each device, according to the compiler.
      None means that they are not known.
    missing: why the compiler's figures are missing. None means that they are
      known.
    notes: remarks for the user.
    remat: flag with which the backward pass keeps less and recomputes more.
      None means that there is none.
  """

  topology: str
  hbm: float
  sizes: Mapping
  compiled: Mapping | None
  needed: int | None
  missing: str | None
  notes: tuple[str, ...] = ()
  remat: str | None = None

  @property
  def fits(self) -> bool | None:
    """Whether the step fits in memory, or None if that is not known."""
    return None if self.needed is None else self.needed <= self.hbm


def ask(question: Question) -> Answer:
  """Starts a process that compiles the step, and returns its answer.

  Raises:
    ValueError: the slice, the configuration or the mesh has a mistake, or the
      process was killed.
    RuntimeError: the process failed for another reason.
  """
  where = topology.parse(question.topology)
  with tempfile.TemporaryDirectory(prefix='meliad_rec_plan_') as folder:
    asked, answered = Path(folder, 'question'), Path(folder, 'answer')
    asked.write_text(json.dumps(dataclasses.asdict(question)))
    done = environment.run(
      WORKER,
      [str(asked), str(answered)],
      devices=0 if environment.installed() else where.devices,
    )
    if not answered.exists():
      raise environment.failed(f'compiles for {question.topology}', done)
    answer = json.loads(answered.read_text())
  if 'mistake' in answer:
    mistake = answer['mistake']
    raise ValueError(mistake)
  return Answer(**answer)
