"""Begins a run with the parameters of another run (--init_from).

The new run may have other data, another schedule, another head, more layers or
a longer memory. Parameters with the same path are taken. A parameter that only
the new model has keeps its initial value, and one that only the source has is
ignored.
"""

from collections import Counter
from collections.abc import Iterable
import dataclasses
import math
from typing import Any

import jax

from meliad_rec.config.renames import saved_paths
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.runs import folder as run_folder
from meliad_rec.storage.saved_step import check_leaves
from meliad_rec.storage.workdir import place


@dataclasses.dataclass(frozen=True)
class Account:
  """An account of the parameters that a new run takes from another one.

  Attributes:
    source: the step and folder that the parameters are from, as text.
    taken: {path: number of parameters} of the arrays that are taken.
    new: {path: number of parameters} of the arrays that only the new run has.
    left: paths of the arrays that only the source has.
  """

  source: str
  taken: dict[str, int]
  new: dict[str, int]
  left: list[str]

  def __str__(self) -> str:
    taken = sum(self.taken.values())
    lines = [
      f'Took {taken:,} of {taken + sum(self.new.values()):,} parameters from '
      f'{self.source}: {len(self.taken)} of {len(self.taken) + len(self.new)} '
      'arrays.'
    ]
    if self.new:
      lines.append(
        f'New, with initial values of their own: {_grouped(self.new)}.'
      )
    if self.left:
      lines.append(
        f'Ignored, because the model does not have them: {_grouped(self.left)}.'
      )
    return '\n'.join(lines)


class Source:
  """A run, or an exported model, whose parameters a new run begins with.

  The code that its configuration names is not imported.

  Args:
    name: folder of the run or model; or FOLDER:STEP, where STEP is the number
      of a checkpoint or 'best'. Without a step, the newest is used. If the run
      keeps an average of its parameters, the average is used.

  Raises:
    ValueError: the folder has no run, or is damaged.
  """

  def __init__(self, name: str):
    self.name, self._step = name, None
    folder, _, step = name.rpartition(':')
    if (step.isdecimal() or step == 'best') and not place(name).exists():
      self.name = folder
      self._step = step if step == 'best' else int(step)
    self._folder = place(self.name)
    if not (self._folder / run_folder.CONFIG).is_file():
      raise ValueError(
        f'--init_from={name} is not the folder of a run or of an exported'
        f' model: there is no {self._folder / run_folder.CONFIG}. Correct the'
        ' path.'
      )
    _, self._facts, vocabulary = run_folder.read(self._folder)
    if vocabulary is None:
      raise ValueError(
        f'--init_from={name} is a run of agents, with whose parameters no model'
        ' of text can begin. Give another run, or remove --init_from.'
      )

  def account(self, params: Any, vocabulary: Vocabulary) -> Account:
    """Returns the Account that `fill` would return, but reads no arrays.

    Arguments and errors are as in `fill`.
    """
    return self._read(params, vocabulary, lambda _: {})[1]

  def fill(self, params: Any, vocabulary: Vocabulary) -> tuple[Any, Account]:
    """Replaces a model's parameters by those of the source with the same paths.

    Args:
      params: tree of initial parameters, or of jax.ShapeDtypeStruct with
        shardings.
      vocabulary: vocabulary of the new run.

    Returns:
      (tree like `params`, with the arrays of the source where paths are equal;
      Account).

    Raises:
      ValueError: the vocabularies differ, no parameter has the same path, or
        one with the same path has another shape or dtype; or the source is
        damaged or has no such step.
    """
    found, account = self._read(params, vocabulary, lambda shapes: shapes)
    filled = [found.get(k, leaf) for k, leaf in leaves_by_path(params).items()]
    return jax.tree.unflatten(jax.tree.structure(params), filled), account

  def _read(self, params, vocabulary, choose):
    """Reads arrays of the source.

    Args:
      params, vocabulary: as in `fill`.
      choose: takes {saved path: jax.ShapeDtypeStruct} of all arrays that the
        model has too, and returns the part of this dict to read.

    Returns:
      ({path in `params`: array that was read}, Account).

    Raises:
      ValueError: as in `fill`.
    """
    known = self._facts['vocabulary']
    if vocabulary.identity != known:
      raise ValueError(
        f'--init_from={self.name} was trained with the vocabulary {known}, but '
        f'this run has {vocabulary.identity}. Give data with the vocabulary of '
        'that run.'
      )
    wanted = leaves_by_path(params)
    former, left = {}, []

    def fitting(saved):
      for path, name in saved_paths(wanted, saved).items():
        if path in wanted:
          former[path] = name
        else:
          left.append(path)
      if not former:
        raise ValueError(
          f'--init_from={self.name} has no parameter that this model has. '
          'Choose the arch and options of that run.'
        )
      check_leaves(
        f'--init_from={self.name}',
        {path: saved[name] for path, name in former.items()},
        {k: (wanted[k].shape, str(wanted[k].dtype)) for k in former},
      )
      return choose({name: _shape(wanted[k]) for k, name in former.items()})

    step, found, _ = run_folder.read_params(
      self._folder, self._facts, fitting, self._step
    )
    sizes = {path: math.prod(leaf.shape) for path, leaf in wanted.items()}
    account = Account(
      source=f'step {step} of {self.name}',
      taken={path: sizes[path] for path in former},
      new={path: n for path, n in sizes.items() if path not in former},
      left=left,
    )
    return {k: found[n] for k, n in former.items() if n in found}, account


def _shape(leaf) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _grouped(paths: Iterable[str]) -> str:
  """Returns array paths as text, such as 'cell/cells_0 (9 arrays), norm/scale'.

  Paths whose first two parts are equal are counted together.
  """
  groups = Counter('/'.join(path.split('/')[:2]) for path in paths)
  return ', '.join(
    f'{group} ({count} arrays)' if count > 1 else group
    for group, count in groups.items()
  )
