"""What to change of a run that does not fit: each is tried, with little care.

The compiler's care changes what a step needs by a few per cent, so what fits
narrowly is to be planned again without --fast.
"""

from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math

from meliad_rec import mesh_flag
from meliad_rec.planning.question import Answer
from meliad_rec.planning.question import Question
from meliad_rec.planning.topology import GIB

REMAT = 'options/remat_full'


@dataclasses.dataclass(frozen=True)
class Trial:
  """A change, and what came of it.

  Attributes:
    kind: 'remat', 'mesh', 'batch' or 'all'.
    flags: of the command, that make the change.
    needed: bytes on each device; None: the change cannot be made, or compiled.
    fits: whether that is no more than there is.
    told: why it cannot; None: it can.
  """

  kind: str
  flags: str
  needed: int | None
  fits: bool
  told: str | None = None


def trials(
  question: Question, answer: Answer, ask: Callable[[Question], Answer]
) -> Iterator[Trial]:
  """Changes of one kind after another, each kind until one fits.

  Args:
    question: of what does not fit.
    answer: to it.
    ask: answers others.
  """
  fitted, refused = set(), set()
  for kind, flags, changed in changes(question, answer.sizes, refused):
    if kind in fitted or (kind == 'all' and fitted):
      continue
    try:
      found = ask(dataclasses.replace(changed, fast=True))
      for note in found.notes:
        # Without data, what nothing reads is but noted.
        if kind == 'remat' and REMAT in note:
          raise ValueError(note)
      if found.needed is None:
        raise ValueError(found.missing)
    except (ValueError, RuntimeError) as error:
      refused.add(kind)
      yield Trial(kind, flags, None, False, _line(error))
      continue
    if found.fits:
      fitted.add(kind)
    yield Trial(kind, flags, found.needed, bool(found.fits))


def changes(
  question: Question, sizes: Mapping, refused: Container[str] = ()
) -> Iterator[tuple[str, str, Question]]:
  """Kind, flags and question of each change, the mildest of a kind first.

  Args:
    question: of what does not fit.
    sizes: fields of its measure.Sizes.
    refused: kinds that cannot be, as far as it is known when 'all' is yielded.
  """
  all_flags, everything = [], question
  if REMAT not in question.gin_file:
    flags = f'--gin_file={REMAT}'
    yield 'remat', flags, _remat(question)
    if 'remat' not in refused:
      everything = _remat(question)
      all_flags.append(flags)
  meshes = list(_meshes(sizes['mesh'], sizes['batch']))
  for axes in meshes:
    yield 'mesh', _mesh_flag(axes), _mesh(question, axes)
  if meshes:
    everything = _mesh(everything, meshes[0])
    all_flags.append(_mesh_flag(meshes[0]))
  places = sizes['mesh']['data'] * sizes['mesh']['fsdp']
  rows = sizes['batch'] // places
  batches = [places * (rows // n) for n in (2, 4, 8) if rows % n == 0]
  for batch in batches:
    yield 'batch', _batch_flag(batch), _batch(question, batch)
  if batches:
    everything = _batch(everything, batches[-1])
    all_flags.append(_batch_flag(batches[-1]))
  if len(all_flags) > 1:
    yield 'all', ' '.join(all_flags), everything


def _line(error: Exception) -> str:
  """Of a process that ended: that it did, and the last that it said."""
  first, *rest = str(error).splitlines()
  return f'{first} {rest[-1]}' if rest else first


def _meshes(mesh: Mapping[str, int], batch: int) -> Iterator[dict[str, int]]:
  """Meshes that cut parameters more than one does."""
  devices = math.prod(mesh.values())
  for model in (1, 2, 4, 8):
    rest = devices // model
    cut = model > mesh['model'] or mesh['fsdp'] < rest
    even = rest * model == devices and batch % max(rest, 1) == 0
    if model >= mesh['model'] and cut and rest > 1 and even:
      yield {'data': 1, 'fsdp': rest, 'model': model}


def _remat(question: Question) -> Question:
  files = (*question.gin_file, REMAT)
  return dataclasses.replace(question, gin_file=files)


def _mesh_flag(axes: Mapping[str, int]) -> str:
  return f'--mesh={mesh_flag.flag(axes)}'


def _mesh(question: Question, axes: Mapping[str, int]) -> Question:
  params = (*question.gin_param, *mesh_flag.bindings(axes))
  return dataclasses.replace(question, gin_param=params)


def _batch_flag(batch: int) -> str:
  return f"--gin_param='BATCH = {batch}'"


def _batch(question: Question, batch: int) -> Question:
  params = (*question.gin_param, f'BATCH = {batch}')
  return dataclasses.replace(question, gin_param=params)


def lines(name: str, tried: Sequence[Trial]) -> list[str]:
  """What was tried for a slice, and what came of it, in words."""
  told = [f'{name}: changes that were tried:']
  for one in tried:
    needs = one.told or f'{one.needed / GIB:.2f} GiB a device'
    told.append(f'  {"fits" if one.fits else "no  "}  {one.flags}: {needs}')
  return told if tried else [f'{name}: there was nothing to try.']
