"""Stands for a run's data, of which a plan needs only the vocabulary."""

from collections.abc import Sequence
import dataclasses

from meliad_rec.config.files import in_order
from meliad_rec.config.reader import Reader
from meliad_rec.config.values import Reference
from meliad_rec.data.text import Text
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.training.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Ids:
  """A vocabulary of which the size alone is known."""

  size: int


@dataclasses.dataclass(frozen=True)
class NoData:
  """A dataset without splits.

  Attributes:
    vocabulary: what the ids would mean.
  """

  vocabulary: Vocabulary | Ids

  splits = ()

  def documents(self, split: str):
    """Raises ValueError: there are none."""
    raise ValueError(f'A plan reads no data, so none of split {split!r}.')


def bindings(
  files: Sequence[str], params: Sequence[str], vocab_size: int | None
) -> tuple[str, ...]:
  """Values of --gin_param that put NoData in place of a run's data.

  Args:
    files, params: of the configuration.
    vocab_size: ids of the vocabulary; None: text is left out, which is looked
      up where it lies, but for its vocabulary. Other data are opened quickly.
  """
  if vocab_size is not None:
    return (*_bindings(f'@{_name(Ids)}()'), f'{_name(Ids)}.size = {vocab_size}')
  reader = Reader()
  for name in in_order(list(files)):
    reader.file(name, f'--gin_file={name}')
  for param in params:
    reader.param(param)
  data = _reference(reader, Experiment, 'data')
  vocabulary = _reference(reader, Text, 'vocabulary')
  if data is None or vocabulary is None or data.target is not Text:
    return ()
  return _bindings(f'@{_name(vocabulary.target)}()')


def _bindings(vocabulary: str) -> tuple[str, ...]:
  return (
    f'{_name(Experiment)}.data = @{_name(NoData)}()',
    f'{_name(NoData)}.vocabulary = {vocabulary}',
  )


def _reference(reader: Reader, target, parameter: str) -> Reference | None:
  """The plain `@name()` that a parameter is bound to; None: another value."""
  bound = reader.bindings.get(('', target, parameter))
  value = bound and bound.value
  plain = isinstance(value, Reference) and value.called and not value.scope
  return value if plain else None


def _name(target) -> str:
  return f'{target.__module__}.{target.__qualname__}'
