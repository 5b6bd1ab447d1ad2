"""One saved step: what is written, and how it is verified when read.

A step is a folder of three items, state (arrays), data and meta (JSON), and a
manifest of its files. State is a nested dict of plain names, whatever classes
hold it in memory, so that reading it needs no class and runs no code.

How a saved state differs from the one wanted: six sentences, never a cast.

Other tokenizer, other data, missing leaf, extra leaf, shape, dtype.
"""

from absl import logging
from etils import epath
import flax
import jax
from jax.experimental import multihost_utils
import orbax.checkpoint as ocp

from meliad_rec.distributed import hosts
from meliad_rec.storage import checksums
from meliad_rec.storage.checksums import fingerprints
from meliad_rec.storage.checksums import leaves_by_path

_SHOWN = 3


class CheckpointError(ValueError):
  """A checkpoint that cannot be used or written; one sentence says why."""


def check_about(where, about, match):
  """Raises unless what is written about the run is what this run has.

  Args:
    where: 'Step 20 of DIR', for the sentence.
    about: dict written by the run that saved.
    match: dict of the keys that must be equal, with this run's values.

  Raises:
    CheckpointError: one of them differs.
  """
  advice = {
    'tokenizer': 'set the vocabulary of that run, or start in another workdir',
    'data': 'give the source of that run, or start in another workdir',
    'steps an update': 'set optimizer.chain.every as in that run, or start in '
    'another workdir',
  }
  for key, needed in match.items():
    if about.get(key) != needed:
      remedy = advice.get(key, 'start in another workdir')
      raise CheckpointError(
        f'{where} was trained with {key} {_short(about.get(key))}, and this run'
        f' has {_short(needed)}; {remedy}.'
      )


def check_leaves(where, saved, wanted):
  """Raises unless both have the same leaves, shapes and dtypes.

  Args:
    where: 'Step 20 of DIR', for the sentence.
    saved: {path: (shape, dtype name)} of the checkpoint.
    wanted: the same of this run's model.

  Raises:
    CheckpointError: the first kind of difference, with its first leaves.
  """
  both = [path for path in wanted if path in saved]
  settings = 'use the settings of config.gin of that run'
  if missing := [path for path in wanted if path not in saved]:
    raise CheckpointError(
      f'{where} lacks {_list(missing)}, which this model needs; {settings}.'
    )
  if extra := [path for path in saved if path not in wanted]:
    raise CheckpointError(
      f'{where} holds {_list(extra)}, which this model does not have;'
      f' {settings}.'
    )
  for kind, index in ('shape', 0), ('dtype', 1):
    given = {path: saved[path][index] for path in both}
    needed = {path: wanted[path][index] for path in both}
    if differ := [
      f'{path} with {kind} {given[path]} where this model needs {needed[path]}'
      for path in both
      if given[path] != needed[path]
    ]:
      raise CheckpointError(f'{where} holds {_list(differ)}; {settings}.')


def _list(names):
  more = len(names) - _SHOWN
  shown = ', '.join(names[:_SHOWN])
  return f'{shown} and {more} more' if more > 0 else shown


def _short(value):
  """Identities hold hashes: their beginnings tell them apart."""
  text = str(value)
  return text if len(text) <= 48 else text[:45] + '...'


_FORMAT = 1


class DamagedError(CheckpointError):
  """A step whose bytes are not those that were saved."""


def table(state):
  """{path: [shape, dtype, fingerprint]} of every array, as meta holds it."""
  leaves = leaves_by_path(state)
  return {
    path: [list(leaves[path].shape), str(leaves[path].dtype), mark]
    for path, mark in fingerprints(state).items()
  }


def items(state, leaves, data, about, metrics, score):
  """What orbax is to write for one step.

  Args:
    state: pytree of arrays.
    leaves: its `table`.
    data: JSON-able position of the data.
    about: JSON-able facts about the run.
    metrics: {name: float}.
    score: [metric's name, value of which lower is better], or None.
  """
  meta = {
    'format': _FORMAT,
    'leaves': leaves,
    'metrics': metrics,
    'score': score,
    'about': about,
  }
  return ocp.args.Composite(
    state=ocp.args.PyTreeSave(_nested(leaves_by_path(state))),
    data=ocp.args.JsonSave(data),
    meta=ocp.args.JsonSave(meta),
  )


class SavedStep:
  """The folder of a committed step."""

  def __init__(self, folder):
    self.folder = epath.Path(folder)
    self._where = f'Step {self.folder.name} of {self.folder.parent}'

  def meta(self):
    """What `items` put into meta; unverified."""
    return ocp.JsonCheckpointHandler().restore(self.folder / 'meta')

  def score(self, metric):
    """(value by `metric`, or by any if None; validation data) or None.

    Lower values are better. One that is not as it was saved is an error line,
    and counts as none.
    """
    if phrases := checksums.damage(self.folder, 'meta/'):
      logging.error('%s has no score: %s.', self._where, '; '.join(phrases))
      return None
    meta = self.meta()
    name, value = meta['score'] or (None, None)
    if value is None or metric not in (None, name):
      return None
    return value, meta['about'].get('validation')

  def load(self, target, match, part=''):
    """Reads and verifies; every difference is an error, none is mended.

    Args:
      target: pytree of arrays or jax.ShapeDtypeStruct with shardings.
      match: {key of about: value} that must be the same.
      part: path of `target` within the state, ending in a slash.

    Returns:
      (target filled, data, about).

    Raises:
      DamagedError: bytes have changed; the sentence names the files.
      CheckpointError: it is whole, but not `target` or not `match`.
    """
    # One host reads every byte, not each of them.
    first = jax.process_index() == 0
    self._verify(checksums.damage(self.folder) if first else [])
    meta = self.meta()
    if meta['format'] != _FORMAT:
      raise CheckpointError(
        f'{self._where} has format {meta["format"]}, this version reads'
        f' {_FORMAT}; install the version of meliad_rec that wrote it.'
      )
    check_about(self._where, meta['about'], match)
    wanted = {
      part + path: _abstract(leaf)
      for path, leaf in leaves_by_path(target).items()
    }
    saved = {k: v for k, v in meta['leaves'].items() if k.startswith(part)}
    check_leaves(
      self._where,
      {k: (tuple(shape), dtype) for k, (shape, dtype, _) in saved.items()},
      {k: (leaf.shape, str(leaf.dtype)) for k, leaf in wanted.items()},
    )
    restored = self._arrays(wanted)
    marks = fingerprints(restored)
    self._verify(
      [f'{k} has other values' for k in saved if marks[k] != saved[k][2]]
    )
    leaves = [restored[path] for path in wanted]
    filled = jax.tree.unflatten(jax.tree.structure(target), leaves)
    data = ocp.JsonCheckpointHandler().restore(self.folder / 'data')
    return filled, data, meta['about']

  def put_aside(self):
    """Renames the folder to STEP.corrupt, in place of any earlier one."""
    aside = self.folder.parent / f'{self.folder.name}.corrupt'
    if jax.process_index() == 0:
      if aside.exists():
        aside.rmtree()
      self.folder.rename(aside)
    multihost_utils.sync_global_devices(f'{self._where} put aside')

  def _arrays(self, wanted):
    """{path: array}, in the shardings of `wanted`."""
    nested = _nested(wanted)
    args = ocp.args.PyTreeRestore(
      nested,
      restore_args=ocp.checkpoint_utils.construct_restore_args(nested),
      partial_restore=True,
    )
    tree, phrases = {}, []
    with ocp.PyTreeCheckpointer() as reader:
      # tensorstore and orbax raise errors of many classes here.
      try:
        tree = reader.restore(self.folder / 'state', args=args)
      except Exception as error:
        phrases = [f'state cannot be read ({first_line(error)})']
    self._verify(phrases)
    return leaves_by_path(tree)

  def _verify(self, phrases):
    """Raises DamagedError with the phrases, on all hosts if on one."""
    if hosts.any_of(bool(phrases)):
      phrases = phrases or ['another host found damage']
      named = '; '.join(phrases[:3])
      more = f' and {len(phrases) - 3} more' if len(phrases) > 3 else ''
      raise DamagedError(f'{self._where} is damaged: {named}{more}.')


def first_line(error):
  """An error in one line of at most 200 characters."""
  return str(error).strip().partition('\n')[0][:200] or type(error).__name__


def _abstract(leaf):
  sharding = getattr(leaf, 'sharding', None)
  sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _nested(leaves):
  return flax.traverse_util.unflatten_dict(leaves, sep='/')
