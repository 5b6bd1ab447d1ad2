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

_HEADER = '# The complete configuration of a run, including defaults.\n'


class _Current:
  """The configuration of the process."""

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
  files: list[str], params: list[str], kinds: tuple = gin_files.KINDS
) -> None:
  """Sets the configuration of the process from files and single bindings.

  The previous configuration is forgotten, so that a notebook's cell can run
  again. Files are read in the order of their kinds (see files.in_order). Later
  files override earlier ones, and single bindings override files. It is an
  error if other files of options/ override all settings of a file of options/.

  Args:
    files: names such as 'arch/X' or 'gin/arch/X.gin', or paths.
    params: single bindings, 'NAME = value' or 'module.function.name = value',
      where `module` is an alias that the files import, or a full dotted name.
    kinds: folders, from each of which exactly one file must be given.

  Raises:
    ConfigError: there is a mistake that can be detected before building.
  """
  reset()
  reader = read(files, params, kinds)
  _evaluator(reader).check()
  _use(reader)


def read(
  files: list[str], params: list[str], kinds: tuple = gin_files.KINDS
) -> Reader:
  """Reads files and single bindings as `parse` does, without checking values.

  The configuration of the process does not change.

  Returns:
    A Reader that holds all bindings.

  Raises:
    ConfigError: a file is missing, or a file or binding has a mistake.
  """
  reader, options = Reader(), {}
  for name in gin_files.in_order(files):
    before = reader.bindings.copy()
    where = f'--gin_file={name}'
    reader.file(name, where)
    if gin_files.kind(gin_files.find(name, where)) == 'options':
      after = reader.bindings.items()
      options[name] = {k: one for k, one in after if before.get(k) is not one}
  gin_files.check_kinds(reader.chains, kinds)
  _check_options(options)
  for param in params:
    reader.param(param)
  return reader


def _check_options(options: dict[str, dict]) -> None:
  """Checks that no file of options/ is overridden entirely by later ones.

  Args:
    options: {name of the file: {Binding.key: binding that the file sets}}, in
      the order of reading.
  """
  last = {key: one for set_ in options.values() for key, one in set_.items()}
  for name, set_ in options.items():
    if not set_ or any(last[key].value == set_[key].value for key in set_):
      continue
    paths = ', '.join(one.path for one in set_.values())
    others = ', '.join(dict.fromkeys(last[key].where for key in set_))
    raise ConfigError(
      f'--gin_file={name} has no effect: all its settings ({paths}) are'
      f' overridden by {others}. Remove one of the two.'
    )


def build(function: Callable) -> Configured:
  """Returns a callable that passes configured arguments to `function`.

  An argument of the caller overrides the configuration. A binding that is
  always overridden counts as unread.
  """
  name = _Current.reader.name(function)
  _Current.reader.targets[name] = function
  return Configured(_Current.evaluator, name)


def check_read() -> None:
  """Checks, after building, that something has read every binding.

  Bindings of shipped arch, size and task files and of defaults.gin may stay
  unread, because an architecture need not have memory slots, for instance.

  Raises:
    ConfigError: a binding was not read. The message names the most similar
      binding that was read, if any is similar.
  """
  _Current.evaluator.check_read()


def operative() -> str:
  """Returns the bindings and defaults used so far, as a gin text."""
  return _HEADER + _Current.evaluator.text()


def differences(before: str, after: str) -> list[str]:
  """Returns a line for each setting that differs between two configurations.

  Both are texts that `operative` returned.

  A setting that an older version did not have counts as a change only if its
  value has an effect: if it is neither None nor the value in renames.ADDED.

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
    if old.get(path, renames.ADDED.get(path, 'None')) != new.get(path)
  ]


def settings(text: str) -> dict[str, Any]:
  """Returns the settings of a gin text by name; imports nothing that it names.

  A number, bool, string or None, or a tuple or list of these, is returned as a
  value. Anything else is returned as its gin text.

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
  """Returns the message of an error that is a user's mistake; None for a bug.

  A ValueError that this package raises is a message for the user. One from
  elsewhere, such as a wrong shape in JAX, is a bug and needs its traceback.
  """
  if not isinstance(error, ValueError):
    return None
  last = traceback.extract_tb(error.__traceback__)[-1]
  ours = Path(last.filename).is_relative_to(Path(__file__).parents[1])
  return str(error) if ours and last.line.startswith('raise') else None


reset()
