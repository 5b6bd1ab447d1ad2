"""What to change of a run that does not fit: each is tried, with little care.

The compiler's care changes what a step needs by a few per cent, so what fits
narrowly is to be planned again without --fast.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import math

from meliad_rec.config import config_flags
from meliad_rec.planning.question import Answer
from meliad_rec.planning.question import Question
from meliad_rec.planning.topology import GIB

REMAT = 'options/remat_full'


@dataclasses.dataclass(frozen=True)
class Change:
  """Of what is asked.

  Attributes:
    kind: 'remat', 'mesh' or 'batch', or 'all' of them.
    flags: of the command, that make the change.
    files, params: what they add to the configuration.
  """

  kind: str
  flags: str
  files: tuple[str, ...] = ()
  params: tuple[str, ...] = ()

  def of(self, question: Question) -> Question:
    return dataclasses.replace(
      question,
      gin_file=(*question.gin_file, *self.files),
      gin_param=(*question.gin_param, *self.params),
    )


@dataclasses.dataclass(frozen=True)
class Trial:
  """A change, and what came of it.

  Attributes:
    kind, flags: of the change.
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

  Where none does, the best of each kind together; what cannot be made, or
  compiled, is not among them.

  Args:
    question: of what does not fit.
    answer: to it.
    ask: answers others.
  """
  fitted, best = False, {}
  for kind, several in itertools.groupby(
    changes(question, answer.sizes), lambda change: change.kind
  ):
    for change in several:
      trial = attempt(change, question, ask)
      yield trial
      if trial.fits:
        fitted = True
        break
      least, _ = best.get(kind, (math.inf, None))
      if trial.told is None and trial.needed < least:
        best[kind] = trial.needed, change
  if not fitted and len(best) > 1:
    yield attempt(together([one for _, one in best.values()]), question, ask)


def attempt(
  change: Change, question: Question, ask: Callable[[Question], Answer]
) -> Trial:
  """What comes of a change of what does not fit."""
  kind, flags = change.kind, change.flags
  try:
    found = ask(dataclasses.replace(change.of(question), fast=True))
    for note in found.notes:
      # Without data, what nothing reads is but noted.
      if kind == 'remat' and REMAT in note:
        raise ValueError(note)
    if found.needed is None:
      raise ValueError(found.missing)
  except (ValueError, RuntimeError) as error:
    return Trial(kind, flags, None, False, _line(error))
  return Trial(kind, flags, found.needed, bool(found.fits))


def changes(question: Question, sizes: Mapping) -> Iterator[Change]:
  """Those of each kind, the mildest first.

  Args:
    question: of what does not fit.
    sizes: fields of its measure.Sizes.
  """
  if REMAT not in question.gin_file:
    yield Change('remat', f'--gin_file={REMAT}', files=(REMAT,))
  for axes in _meshes(sizes['mesh'], sizes['batch']):
    flags, params = (
      f'--mesh={config_flags.mesh_text(axes)}',
      config_flags.mesh_bindings(axes),
    )
    yield Change('mesh', flags, params=params)
  places = sizes['mesh']['data'] * sizes['mesh']['fsdp']
  rows = sizes['batch'] // places
  for fewer in (2, 4, 8):
    if rows % fewer == 0:
      param = f'BATCH = {places * (rows // fewer)}'
      yield Change('batch', f"--gin_param='{param}'", params=(param,))


def together(several: Sequence[Change]) -> Change:
  """All of these in one."""
  return Change(
    'all',
    ' '.join(one.flags for one in several),
    tuple(name for one in several for name in one.files),
    tuple(param for one in several for param in one.params),
  )


def _line(error: Exception) -> str:
  """Of a process that ended: that it did, and the last that it said."""
  first, *rest = str(error).splitlines()
  return f'{first} {rest[-1]}' if rest else first


def _meshes(mesh: Mapping[str, int], batch: int) -> Iterator[dict[str, int]]:
  """Meshes that cut parameters more than one does; few, as each is compiled.

  Over fsdp about half of the way, in powers, with data for the rest: that is
  milder, and divides widths that all devices do not. Then over all of fsdp, and
  over more of model.
  """
  devices = math.prod(mesh.values())
  for more in (1, 2, 4):
    model = more * mesh['model']
    rest = devices // model
    if rest * model != devices or rest < 2 or batch % rest:
      continue
    cuts = {rest}
    if more == 1:
      half = math.isqrt(rest * mesh['fsdp'] - 1) + 1  # The root, rounded up.
      cuts |= {next(n for n in range(half, rest + 1) if rest % n == 0)}
      cuts -= {mesh['fsdp']}  # As it is.
    for fsdp in sorted(cuts):
      yield {'data': rest // fsdp, 'fsdp': fsdp, 'model': model}


def lines(name: str, tried: Sequence[Trial]) -> list[str]:
  """What was tried for a slice, and what came of it, in words."""
  told = [f'{name}: changes that were tried:']
  for one in tried:
    needs = one.told or f'{one.needed / GIB:.2f} GiB a device'
    told.append(f'  {"fits" if one.fits else "no  "}  {one.flags}: {needs}')
  return told if tried else [f'{name}: there was nothing to try.']
