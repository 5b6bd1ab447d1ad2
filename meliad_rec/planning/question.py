"""What the command asks the process that compiles, and what that answers."""

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
  """A step of one experiment on one slice.

  Attributes:
    topology: name of the slice.
    gin_file, gin_param: as main takes them.
    vocab_size: of the vocabulary; None: what the data say.
    fast: whether to compile with little care.
  """

  topology: str
  gin_file: tuple[str, ...]
  gin_param: tuple[str, ...]
  vocab_size: int | None = None
  fast: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
  """What is known of the step.

  Attributes:
    topology: name of the slice.
    hbm: bytes that a program may use on each of its devices.
    sizes: fields of measure.Sizes.
    compiled: fields of measure.Compiled; None: it was not, or does not fit.
    needed: bytes on each device, by the compiler; None: it does not say.
    missing: why there is nothing from the compiler; None: there is.
    notes: what else is to be known.
  """

  topology: str
  hbm: float
  sizes: Mapping
  compiled: Mapping | None
  needed: int | None
  missing: str | None
  notes: tuple[str, ...] = ()

  @property
  def fits(self) -> bool | None:
    """Whether the step fits; None: it is not known."""
    return None if self.needed is None else self.needed <= self.hbm


def ask(question: Question) -> Answer:
  """The answer of a process of its own.

  Raises:
    ValueError: the configuration has a mistake, or the mesh is none.
    RuntimeError: the process failed otherwise.
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
