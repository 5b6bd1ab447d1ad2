"""One saved training step: how it is written, read and verified.

A step is a folder. It holds three items and a manifest of their files. The
items are state (arrays), data (JSON: the run's position in the data and its
progress) and meta (JSON: facts about the step). The state is a nested dict with
strings as keys, whatever its classes are in memory, so that reading it runs no
code of these classes. A committed step (see step_writer.py) is never rewritten.
If it is evaluated later, its score and its new `data` are written to
scores.json, beside the steps.

`SavedStep.load` never casts a dtype and never fills in a missing leaf (an array
of the state). It is an error if the saved state differs from the requested one
in its tokenizer, training documents, names of leaves, shapes or dtypes.
"""

from collections.abc import Mapping
import os
from typing import Any

from absl import logging
from etils import epath
import flax
import jax
from jax.experimental import multihost_utils
import orbax.checkpoint as ocp

from meliad_rec.config.renames import saved_paths
from meliad_rec.distributed import hosts
from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.storage import checksums
from meliad_rec.storage import output_file
from meliad_rec.storage.checksums import fingerprints

# {path: [shape, dtype name, fingerprint]} of the arrays of a state.
LeafTable = Mapping[str, list[Any]]
ShapeAndType = tuple[tuple[int, ...], str]
# [name of the metric, value], where lower values are better.
Score = list[Any]
SCORES = 'scores.json'
_FORMAT = 1
_SHOWN = 3  # Leaves that an error message names.


class CheckpointError(ValueError):
  """The error raised if a checkpoint cannot be used or written."""


class DamagedError(CheckpointError):
  """The error raised if the bytes of a step have changed since it was saved."""


def leaf_table(state: Any) -> LeafTable:
  """Returns {path: [shape, dtype name, fingerprint]} of a state's arrays."""
  leaves = leaves_by_path(state)
  return {
    path: [list(leaves[path].shape), str(leaves[path].dtype), fingerprint]
    for path, fingerprint in fingerprints(state).items()
  }


def save_args(
  step: int,
  state: Any,
  leaves: LeafTable,
  data: Any,
  about: Mapping[str, Any],
  metrics: Mapping[str, float],
  score: Score | None,
) -> ocp.args.Composite:
  """Returns the arguments with which orbax writes one step.

  Args:
    step: number of the step.
    state: pytree of arrays.
    leaves: the `leaf_table` of the state.
    data: the run's position in the data and its progress, as JSON values.
    about: facts about the run, as JSON values.
    metrics: {name: float} of the state; {} if it was not evaluated.
    score: [name of the metric, value], where lower values are better; None if
      there is no score.
  """
  meta = {
    'format': _FORMAT,
    'step': step,
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
  """A committed step, to be read and verified.

  Args:
    folder: folder of the step; its name is the number of the step.
  """

  def __init__(self, folder: str | os.PathLike):
    self.folder = epath.Path(folder)
    self._where = f'Step {self.folder.name} of {self.folder.parent}'

  def load(
    self, target: Any, match: Mapping[str, Any], part: str = ''
  ) -> tuple[Any, Any, dict[str, Any]]:
    """Reads and verifies the step.

    Args:
      target: pytree of arrays or jax.ShapeDtypeStruct with shardings; or a
        function that chooses the arrays to read. Such a function maps {saved
        path: (shape, dtype name)} to {saved path: jax.ShapeDtypeStruct}; the
        paths do not include `part`.
      match: {name: value} that the saved facts about the run must contain; see
        check_about.
      part: path of `target` within the state, ending in a slash, such as
        'params/'; '' for the whole state.

    Returns:
      (tree, data, facts about the run). `tree` is like `target`, or like the
      result of the function, with the saved arrays. `data` is what `save_args`
      was given or, if `add_score` was called later, what this was given.

    Raises:
      DamagedError: bytes have changed; the message names files or arrays.
      CheckpointError: the step is intact but differs from `target` or `match`.
    """
    # Process 0 reads every byte, the other hosts only what they need.
    is_first = jax.process_index() == 0
    self._verify(checksums.damage(self.folder) if is_first else [])
    meta = self.meta()
    if meta['format'] != _FORMAT:
      raise CheckpointError(
        f'{self._where} has format {meta["format"]}, but this version reads'
        f' format {_FORMAT}. Install the version of meliad_rec that wrote it.'
      )
    # Steps of version 0.1.0 do not say their number.
    if str(number := meta.get('step', self.folder.name)) != self.folder.name:
      self._verify([f'it is a copy of step {number}'])
    check_about(self._where, meta['about'], match)
    leaves = {k: v for k, v in meta['leaves'].items() if k.startswith(part)}
    target, wanted, former = match_leaves(self._where, leaves, target, part)
    stored = {}
    if wanted:  # Empty if the target is a function that only looks at shapes.
      stored = self._arrays({former[k]: leaf for k, leaf in wanted.items()})
    restored = {k: stored[former[k]] for k in wanted}
    self._verify(changed(restored, leaves, former))
    filled = jax.tree.unflatten(
      jax.tree.structure(target), [restored[path] for path in wanted]
    )
    data = ocp.JsonCheckpointHandler().restore(self.folder / 'data')
    if later := self._later(meta):
      data = later['data']
    return filled, data, meta['about']

  def meta(self) -> dict[str, Any]:
    """Returns the item meta, a JSON object made by `save_args`, unverified."""
    return ocp.JsonCheckpointHandler().restore(self.folder / 'meta')

  def score(self, metric: str | None) -> tuple[float, str, str | None] | None:
    """Returns (value, metric, identity of the validation data), or None.

    Lower values are better. None means that the step has no score for this
    metric. None is also returned if the bytes of meta, which holds the score,
    have changed; this is logged as an error.

    Args:
      metric: name of the metric. None: any metric.
    """
    try:
      phrases = checksums.damage(self.folder, 'meta/')
      meta = None if phrases else self.meta()
    except OSError as error:
      phrases = [first_line(error)]
    if phrases:
      if self.folder.exists():  # Not deleted by a run that trains.
        logging.error(
          '%s: its score is not used: %s.', self._where, '; '.join(phrases)
        )
      return None
    later = self._later(meta)
    name, value = (later or meta)['score'] or (None, None)
    if value is None or metric not in (None, name):
      return None
    return value, name, (later or meta['about']).get('validation')

  def add_score(self, score: Score, validation: str | None, data: Any) -> None:
    """Records the score of a step that was saved before it was evaluated.

    Every host must call this. A failure is logged and not raised.

    Args:
      score: [name of the metric, value], where lower values are better.
      validation: identity of the validation data.
      data: the run's position in the data and its progress after the
        evaluation, as JSON values; `load` returns them in place of the saved
        ones.
    """
    if jax.process_index() == 0:
      scores = self._read_scores()
      steps = self.folder.parent
      scores = {
        step: scores[step] for step in scores if (steps / step).exists()
      }
      scores[self.folder.name] = {
        'leaves': checksums.sha256(self.meta()['leaves']),
        'score': score,
        'validation': validation,
        'data': data,
      }
      # Libraries for buckets raise errors with no common class.
      try:
        output_file.write(steps / SCORES, checksums.seal(scores))
      except Exception as error:
        logging.error(
          '%s: its score was not saved (%s).', self._where, first_line(error)
        )
    multihost_utils.sync_global_devices(f'{self._where} has a score')

  def put_aside(self) -> None:
    """Renames the folder to STEP.corrupt; replaces an older STEP.corrupt.

    Every host must call this.
    """
    aside = self.folder.parent / f'{self.folder.name}.corrupt'
    if jax.process_index() == 0:
      if aside.exists():
        aside.rmtree()
      self.folder.rename(aside)
    multihost_utils.sync_global_devices(f'{self._where} put aside')

  def _later(self, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the entry that `add_score` wrote for this step's state.

    Returns None if there is no entry, or if it is for another state.

    Args:
      meta: the item meta of this step.
    """
    found = self._read_scores().get(self.folder.name)
    if found and found['leaves'] == checksums.sha256(meta['leaves']):
      return found
    return None

  def _read_scores(self) -> dict[str, Any]:
    path = self.folder.parent / SCORES
    if not path.exists():
      return {}
    try:
      return checksums.unseal(path.read_text())
    except ValueError as error:
      logging.error('%s is not used: %s.', path, error)
      return {}

  def _arrays(
    self, wanted: Mapping[str, jax.ShapeDtypeStruct]
  ) -> dict[str, jax.Array]:
    """Reads arrays of the saved state.

    Args:
      wanted: {path: jax.ShapeDtypeStruct with a sharding}.

    Returns:
      {path: array}.

    Raises:
      DamagedError: an array cannot be read.
    """
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

  def _verify(self, phrases: list[str]) -> None:
    """Raises DamagedError on all hosts if any host found damage.

    Args:
      phrases: damage that this host found, one phrase each; empty if none.
    """
    if hosts.any_of(bool(phrases)):
      phrases = phrases or ['another host found damage']
      named = '; '.join(phrases[:3])
      more = f' and {len(phrases) - 3} more' if len(phrases) > 3 else ''
      raise DamagedError(f'{self._where} is damaged: {named}{more}.')


def check_about(
  where: str, about: Mapping[str, Any], match: Mapping[str, Any]
) -> None:
  """Checks that a step was saved by a run like this one.

  Args:
    where: the step, such as 'Step 20 of DIR', for the message.
    about: facts written by the run that saved the step.
    match: facts of this run. Each must have the same value in `about`, except
      'documents', which is not compared: if 'data' differs, the message uses
      'documents' to say what the data are.

  Raises:
    CheckpointError: a fact differs.
  """
  advice = {
    'tokenizer': 'Set VOCABULARY as in that run, or give another --workdir',
    'data': 'The training documents have changed, or another source was given. '
    'Restore the documents of that run, or give another --workdir. A token '
    'store (meliad-rec tokenize, with --source=code for task/code) keeps '
    'documents as they are',
    'steps an update': 'Set optimizer.chain.every as in that run, or give '
    'another --workdir',
  }
  for key, needed in match.items():
    if key == 'documents' or about.get(key) == needed:
      continue
    remedy = advice.get(key, 'Give another --workdir')
    then, now = _short(f'{about.get(key)}', f'{needed}')
    then = f'{key} {then.removeprefix(f"{key} ")}'
    if key == 'data' and 'documents' in match:
      known = about.get('documents')
      then = 'other data' + (f', {known}' if known else '')
      now = match['documents']
    raise CheckpointError(
      f'{where} was trained with {then}, but this run has {now}. {remedy}.'
    )


def match_leaves(
  where: str, leaves: LeafTable, target: Any, part: str = ''
) -> tuple[Any, dict[str, jax.ShapeDtypeStruct], dict[str, str]]:
  """Finds the saved arrays that a target needs.

  Args:
    where: the step, such as 'Step 20 of DIR', for the message.
    leaves: the `leaf_table` of what is saved.
    target, part: as in SavedStep.load.

  Returns:
    (tree, wanted, former). `tree` is the target or, if that is a function, its
    result. `wanted` is {path: jax.ShapeDtypeStruct} of the leaves of `tree`.
    `former` is {path: saved path}; the two paths are the same unless an older
    version saved the array under another name.

  Raises:
    CheckpointError: the leaves, shapes or dtypes differ.
  """
  shapes = {k: (tuple(shape), dtype) for k, (shape, dtype, _) in leaves.items()}
  if callable(target):
    target = target({k.removeprefix(part): v for k, v in shapes.items()})
    shapes = {part + k: shapes[part + k] for k in target}
  wanted = {
    part + k: _abstract(leaf) for k, leaf in leaves_by_path(target).items()
  }
  former = saved_paths(wanted, shapes)
  check_leaves(
    where,
    {path: shapes[name] for path, name in former.items()},
    {path: (leaf.shape, str(leaf.dtype)) for path, leaf in wanted.items()},
  )
  return target, wanted, former


def changed(
  restored: Mapping[str, jax.Array],
  leaves: LeafTable,
  former: Mapping[str, str],
) -> list[str]:
  """Returns a list with a phrase for each array whose values have changed.

  Args:
    restored: {path: array} as read.
    leaves: the `leaf_table` of what was saved.
    former: {path in `restored`: path in `leaves`}.
  """
  return [
    f'{former[path]} has changed values'
    for path, mark in fingerprints(restored).items()
    if mark != leaves[former[path]][2]
  ]


def check_leaves(
  where: str,
  saved: Mapping[str, ShapeAndType],
  wanted: Mapping[str, ShapeAndType],
) -> None:
  """Checks that two states have the same leaves, shapes and dtypes.

  Args:
    where: the step, such as 'Step 20 of DIR', for the message.
    saved: {path: (shape, dtype name)} of the checkpoint.
    wanted: {path: (shape, dtype name)} of this run's model.

  Raises:
    CheckpointError: they differ; the message names the first few leaves.
  """
  both = [path for path in wanted if path in saved]
  settings = 'Use the settings in the config.gin of that run'
  if missing := [path for path in wanted if path not in saved]:
    raise CheckpointError(
      f'{where} lacks {_list(missing)}, which this model needs. {settings}.'
    )
  if extra := [path for path in saved if path not in wanted]:
    raise CheckpointError(
      f'{where} holds {_list(extra)}, which this model does not have.'
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
      raise CheckpointError(f'{where} holds {_list(differ)}. {settings}.')


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's message, cut after 200 characters.

  Returns the name of the error's class if there is no message.
  """
  return str(error).strip().partition('\n')[0][:200] or type(error).__name__


def _list(names: list[str]) -> str:
  more = len(names) - _SHOWN
  shown = ', '.join(names[:_SHOWN])
  return f'{shown} and {more} more' if more > 0 else shown


def _short(*texts: str) -> list[str]:
  """Returns texts that differ, cut to at most 48 characters.

  They are returned whole if they would look the same. Most longer texts contain
  a hash, and their beginning is enough to tell them apart.
  """
  cut = [text if len(text) <= 48 else text[:45] + '...' for text in texts]
  return cut if len({*cut}) == len(cut) else [*texts]


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, 'sharding', None)
  sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
  return flax.traverse_util.unflatten_dict(leaves, sep='/')
