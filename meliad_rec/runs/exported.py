"""Writes and reads exported models: folders to keep or to publish.

  model.safetensors     the parameters, by their paths in the model
  config.gin, run.json  as in the folder of the run (folder.py)
  vocabulary.model,
  tokenizer.json or
  vocabulary.txt        as in the folder of the run, if it has such a file
  README.md             a model card

The header of model.safetensors holds the step, facts about the training, and
the fingerprint of every array, so that any change is noticed when it is read.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import os
from pathlib import Path
import secrets
import shutil
from typing import Any

from etils import epath
import jax
import numpy as np

from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.storage import checksums
from meliad_rec.storage.saved_step import changed
from meliad_rec.storage.saved_step import check_about
from meliad_rec.storage.saved_step import DamagedError
from meliad_rec.storage.saved_step import leaf_table
from meliad_rec.storage.saved_step import match_leaves
from meliad_rec.storage.workdir import in_bucket
from meliad_rec.storage.workdir import local

PARAMETERS = 'model.safetensors'
CARD = 'README.md'
_KEY = 'meliad_rec'  # Entry of the file's header that holds our facts.


def is_in(folder: Path | epath.Path) -> bool:
  """Returns whether a folder holds an exported model."""
  return (folder / PARAMETERS).is_file()


def check_new(out: str | os.PathLike) -> Path:
  """Checks that a model can be exported to a folder, and returns its path.

  Call this before long work.

  Raises:
    ValueError: the package safetensors is missing; or `out` is an address such
      as gs://X, is not empty, or cannot be created or replaced.
  """
  _library()
  folder = local(out, 'An exported model')
  if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
    raise ValueError(f'{folder} exists and is not empty. Give a new folder.')
  if folder.exists() and (
    folder.samefile('.') or folder.is_symlink() or os.path.ismount(folder)
  ):
    raise ValueError(
      f'{folder} cannot be replaced, because it is the current folder, a link '
      'or a mounted disk. Give a folder inside it.'
    )
  parent = folder.absolute().parent
  if not (parent.is_dir() and os.access(parent, os.W_OK)):
    raise ValueError(
      f'{folder} cannot be created, because {parent} is not a folder that can '
      'be written. Give another folder.'
    )
  return folder


def write(
  out: str | os.PathLike,
  files: Iterable[Path | epath.Path],
  params: Any,
  facts: Mapping[str, Any],
  card: str,
) -> None:
  """Writes the folder of an exported model, whole or not at all.

  Args:
    out: a new or empty folder.
    files: files of the run to copy; see folder.files.
    params: parameters; dtypes and bits are preserved.
    facts: JSON-able facts that `read` returns.
    card: text of README.md.

  Raises:
    ValueError: as for `check_new`, or model.safetensors cannot be written.
  """
  folder, library = check_new(out), _library()
  header = checksums.seal({'leaves': leaf_table(params), 'facts': dict(facts)})
  arrays = {
    name: np.asarray(leaf, order='C')
    for name, leaf in leaves_by_path(jax.device_get(params)).items()
  }
  new = folder.absolute()
  new = new.with_name(f'.{new.name}.{secrets.token_hex(4)}')
  new.mkdir()
  try:
    for path in files:
      (new / path.name).write_bytes(path.read_bytes())
    (new / CARD).write_text(card, encoding='utf-8')
    library.numpy.save_file(arrays, new / PARAMETERS, {_KEY: header})
    # Some versions write a file that only its owner can read.
    (new / PARAMETERS).chmod((new / CARD).stat().st_mode)
    new.replace(folder)
  except library.SafetensorError as error:
    raise ValueError(
      f'{folder / PARAMETERS} cannot be written ({error}). Free some space, or '
      'give another folder.'
    ) from None
  finally:
    shutil.rmtree(new, ignore_errors=True)


def read(
  folder: Path | epath.Path,
  target: Any,
  match: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
  """Reads and verifies an exported model.

  Args:
    folder: folder that `write` wrote.
    target: the parameters as jax.ShapeDtypeStruct with shardings, or a function
      that chooses some; see SavedStep.load.
    match: {name: value} that the facts in the file must contain.

  Returns:
    (tree like `target` with the saved arrays, facts).

  Raises:
    ValueError: the package safetensors is missing; or model.safetensors is
      damaged, was not written by `write`, or differs from `target` or `match`.
  """
  where = f'{folder / PARAMETERS}'
  with _opened(folder) as file:
    leaves, facts = _header(file, where)
    check_about(where, facts, match or {})
    target, wanted, former = match_leaves(where, leaves, target)
    if missing := set(former.values()) - set(file.keys()):
      raise _damaged(where, f'{min(missing)} is missing')
    arrays = {}
    for path, leaf in wanted.items():
      array = file.get_tensor(former[path])
      if (array.shape, str(array.dtype)) != (leaf.shape, str(leaf.dtype)):
        raise _damaged(where, f'{former[path]} has another shape or dtype')
      arrays[path] = jax.make_array_from_callback(
        leaf.shape, leaf.sharding, array.__getitem__
      )
  if phrases := changed(arrays, leaves, former):
    raise _damaged(where, '; '.join(phrases[:3]))
  leaves = [arrays[path] for path in wanted]
  return jax.tree.unflatten(jax.tree.structure(target), leaves), facts


def _header(file, where) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns what the header of an open file holds.

  Args:
    file: the file as `_opened` yields it.
    where: path of the file, for messages.

  Returns:
    (saved_step.leaf_table of the parameters, facts).

  Raises:
    ValueError: the header is missing or was changed.
  """
  sealed = (file.metadata() or {}).get(_KEY)
  if sealed is None:
    raise ValueError(
      f'{where} was not written by meliad-rec export. Give the folder of a run '
      'or of a model that it exported.'
    )
  try:
    header = checksums.unseal(sealed)
    return header['leaves'], header['facts']
  except (ValueError, KeyError, TypeError):
    raise _damaged(where, 'its header was changed') from None


@contextlib.contextmanager
def _opened(folder) -> Iterator[Any]:
  """Opens the parameters of an exported model with safetensors.safe_open."""
  if in_bucket(folder):
    raise ValueError(
      f'{folder} holds an exported model, which can be read only from a '
      'disk. Copy the folder to one.'
    )
  library = _library()
  try:
    with library.safe_open(folder / PARAMETERS, 'np') as file:
      yield file
  except library.SafetensorError as error:
    raise _damaged(folder / PARAMETERS, str(error)) from None


def _damaged(where, why: str) -> DamagedError:
  return DamagedError(
    f'{where} is damaged ({why}). Copy the folder again, or export the run '
    'again.'
  )


def _library():
  """Returns the module safetensors; ValueError if it is not installed."""
  try:
    import safetensors.numpy
  except ImportError:
    raise ValueError(
      'Exported models need the package safetensors. Install '
      'meliad_rec[export].'
    ) from None
  return safetensors
