"""The configuration of this process: parses it, builds from it, writes it.

  config.parse(['arch/window', 'size/tiny', 'task/code'], ['STEPS = 100'])
  experiment = config.build(Experiment)()
  config.check_read()

A mistake raises a ConfigError with the file and line, the value given, what is
needed, and the nearest known name. No other folder of the package imports gin.
`reader.py` reads files, and `evaluator.py` builds objects.
"""

from collections.abc import Callable
from pathlib import Path
import traceback
from typing import Any

from meliad_rec.config import files as gin_files
from meliad_rec.config import renames
from meliad_rec.config.evaluator import Configured
from meliad_rec.config.evaluator import Evaluator
from meliad_rec.config.reader import Reader
from meliad_rec.config.values import BindingStatement
from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import statements


class _Current:
  """Holder of the gin configuration that `parse` read in this process."""

  reader: Reader
  evaluator: Evaluator


def _use(reader: Reader) -> None:
  _Current.reader = reader
  _Current.evaluator = _evaluator(reader)


def _evaluator(reader: Reader) -> Evaluator:
  return Evaluator(reader.bindings.values(), reader.targets.__getitem__)


def reset() -> None:
  """Forgets the configuration, as if nothing had been parsed."""
  _use(Reader())


def parse(
  files: list[str],
  params: list[str],
  kinds: tuple = gin_files.KINDS,
  *,
  incomplete: bool = False,
) -> None:
  """Sets the configuration of the process from files and single bindings.

  The previous configuration is forgotten, so that a notebook's cell can run
  again. Files are read in the order of their kinds (see files.in_order). Later
  files override earlier ones, and single bindings override files. A file of
  options/ that has no effect, because later files of options/ set all its
  settings to other values, is an error. So is a user's own file of experiments/
  or scale/ that other files override in this way.

  Args:
    files: names such as 'arch/X' or 'gin/arch/X.gin', or paths.
    params: single bindings, 'NAME = value' or 'module.function.name = value',
      where `module` is an alias that the files import, or a full dotted name.
    kinds: folders, from each of which exactly one file must be given.
    incomplete: whether values that must be set may be missing. If one of them
      is needed, building raises the error.

  Raises:
    ConfigError: there is a mistake that can be detected before building.
  """
  reset()
  reader = read(files, params, kinds)
  _evaluator(reader).check(incomplete)
  _use(reader)


def read(
  files: list[str], params: list[str], kinds: tuple = gin_files.KINDS
) -> Reader:
  """Reads files and single bindings as `parse` does, but checks less.

  It does not check whether macros are set, parameters exist and values fit. The
  configuration of the process does not change.

  Args:
    files, params, kinds: as in `parse`.

  Returns:
    A Reader that holds all bindings.

  Raises:
    ConfigError: a file is missing, the files cannot be combined, or a file or
      binding has a mistake of another kind.
  """
  reader, options, first = Reader(), [], []
  for name in gin_files.in_order(files):
    before = reader.bindings.copy()
    where = f'--gin_file={name}'
    reader.file(name, where)
    path = gin_files.find(name, where)
    set_ = {
      key: one
      for key, one in reader.bindings.items()
      if key not in before or before[key].where != one.where
    }
    match gin_files.kind(path):
      case 'options':
        options.append((name, set_))
      case 'experiments' | 'scale' if not gin_files.is_shipped(path):
        first.append((name, set_))
  gin_files.check_kinds(reader.chains, kinds)
  last = {key: one for _, set_ in options for key, one in set_.items()}
  _check_effect(options, last, 'Remove it, or the options that override it')
  advice = 'Files in folders called experiments or scale are read first. Move'
  _check_effect(first, reader.bindings, f'{advice} it to another folder')
  reader.params(params)
  return reader


def _check_effect(files: list[tuple[str, dict]], last: dict, advice: str):
  """Checks that every file has an effect.

  A file has none if later files set all its settings, some of them to other
  values.

  Args:
    files: name of each file, and {Binding.key: binding in the file}.
    last: {Binding.key: binding that counts}.
    advice: end of the message, without its period.

  Raises:
    ConfigError: a file has no effect.
  """
  for name, set_ in files:
    counts = any(last[key] is one for key, one in set_.items())
    if counts or all(last[key].value == one.value for key, one in set_.items()):
      continue
    paths = ', '.join(one.path for one in set_.values())
    others = ', '.join(dict.fromkeys(last[key].where for key in set_))
    raise ConfigError(
      f'--gin_file={name} has no effect: all its settings ({paths}) are'
      f' overridden by {others}. {advice}.'
    )


def build(function: Callable) -> Configured:
  """Returns a callable that passes configured arguments to `function`.

  An argument of the caller overrides the configuration. If the caller always
  overrides a binding, `check_read` counts the binding as unread.
  """
  name = _Current.reader.name(function)
  _Current.reader.targets[name] = function
  return Configured(_Current.evaluator, name)


def check_read() -> None:
  """Checks, after building, that every binding has been read.

  A binding is read when its value is used in a call. Bindings of shipped arch,
  size and task files and of defaults.gin may stay unread. A size may set the
  number of memory slots, for instance, for an architecture that has none.

  Raises:
    ConfigError: a binding was not read. The message names the most similar
      binding that was read, if any is similar.
  """
  _Current.evaluator.check_read()


def operative() -> str:
  """Returns the bindings and defaults used so far, as a gin text."""
  return gin_files.HEADER + _Current.evaluator.text()


def differences(before: str, after: str) -> list[str]:
  """Compares two configurations.

  A setting that only `after` has counts as a difference only if its value has
  an effect: if the value is neither None nor the one in renames.ADDED.

  Args:
    before, after: texts that `operative` returned.

  Returns:
    A line for each setting that differs: 'STEPS was 100 and is 200'.

  Raises:
    ConfigError: a text is not valid gin.
  """
  old, new = (
    {path: repr(value) for path, value in _values(text).items()}
    for text in (before, after)
  )
  return [
    f'{path} was {old.get(path, "not set")} and is {new.get(path, "not set")}'
    for path in sorted(old.keys() | new.keys())
    if old.get(path, renames.ADDED.get(path.rpartition('/')[2], 'None'))
    != new.get(path)
  ]


def settings(text: str) -> dict[str, Any]:
  """Returns the settings of a gin text, without importing what the text names.

  Returns:
    {name: value}. A number, bool, string or None, or a tuple or list of these,
    is a Python value. Any other value is its gin text.

  Raises:
    ConfigError: the text is not valid gin.
  """
  return {
    name: value if _is_plain(value) else repr(value)
    for name, value in _values(text).items()
  }


def _is_plain(value) -> bool:
  if isinstance(value, tuple | list):
    return all(map(_is_plain, value))
  return value is None or isinstance(value, bool | int | float | str)


def _values(text):
  return {
    '/'.join(filter(None, (each.scope, each.selector)))
    + (each.arg_name and f'.{each.arg_name}'): each.value
    for each in statements(text, lambda line: f'config.gin:{line}')
    if isinstance(each, BindingStatement)
  }


def sentence(error: Exception) -> str | None:
  """Returns an error's message if it is a user's mistake; None for a bug.

  A ValueError that this package raises is a user's mistake. Any other error,
  such as one about shapes that JAX raises, is a bug and needs its traceback.
  """
  if not isinstance(error, ValueError):
    return None
  last = traceback.extract_tb(error.__traceback__)[-1]
  ours = Path(last.filename).is_relative_to(Path(__file__).parents[1])
  return str(error) if ours and last.line.startswith('raise') else None


reset()
