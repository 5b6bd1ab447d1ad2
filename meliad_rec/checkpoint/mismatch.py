"""How a saved state differs from the one wanted: six sentences, never a cast.

Other tokenizer, other data, missing leaf, extra leaf, shape, dtype.
"""

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
