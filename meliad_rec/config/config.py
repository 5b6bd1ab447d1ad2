"""The configuration of a run: gin files read, checked, applied, written back.

The only library file that uses gin (syntax.py borrows its parser), and only
for what gin does well. Files are resolved and checked before gin sees them,
since gin accepts wrong types and bindings that nothing reads, hides a missing
include behind an AttributeError and finds an undefined macro only when it is
used. Each mistake is a ConfigError of one sentence: the place, what was given,
what is needed, the nearest name.
"""

from pathlib import Path
import re
import traceback

import gin
from gin.config import interactive_mode

from meliad_rec.config import files as gin_files
from meliad_rec.config.reader import Reader
from meliad_rec.config.values import BindingStatement
from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import statements

__all__ = [
  'ConfigError',
  'build',
  'check_read',
  'differences',
  'operative',
  'parse',
  'reset',
  'sentence',
]

_HEADER = '# What a run used, defaults included: complete by itself.\n'
_bound = {}


def reset() -> None:
  """Forgets the configuration, as if nothing had been parsed."""
  gin.clear_config()
  _bound.clear()


def parse(
  files: list[str], params: list[str], kinds: tuple = gin_files.KINDS
) -> None:
  """Makes these files and single bindings the configuration of the process.

  What was parsed before is forgotten, so that running a notebook's cell again
  is harmless. Files are read in the order of their kinds (see files.in_order).
  Later ones win over earlier ones, single bindings over files; but options that
  others undo whole were given for nothing, which is a mistake.

  Args:
    files: names as 'arch/X', 'gin/arch/X.gin', or paths of one's own.
    params: single bindings, 'NAME = value' or 'module.function.name = value';
      module is any that the files import, or its full dotted name.
    kinds: the folders of which exactly one file must be given.

  Raises:
    ConfigError: any mistake that can be seen before building.
  """
  reset()
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
  reader.check()
  # Interactive: a class defined again by a notebook's cell replaces the old.
  with interactive_mode():
    gin.parse_config(reader.flat())
  _bound.update(reader.bindings)


def _check_options(options: dict[str, dict]) -> None:
  """Of what each file sets, by name, those behind it leave something."""
  last = {key: one for set_ in options.values() for key, one in set_.items()}
  for name, set_ in options.items():
    if not set_ or any(last[key].value == set_[key].value for key in set_):
      continue
    paths = ', '.join(one.path for one in set_.values())
    others = ', '.join(dict.fromkeys(last[key].where for key in set_))
    raise ConfigError(
      f'--gin_file={name} has no effect: what it sets, {paths}, is set anew by'
      f' {others}; leave out one of the two.'
    )


def build(function):
  """The function or class that takes its parameters from the configuration.

  What the caller passes wins over the configuration, and a binding that always
  loses counts as unread.
  """
  try:
    return gin.get_configurable(function)
  except ValueError:  # no gin file names it
    with interactive_mode():
      return gin.external_configurable(function, module=function.__module__)


def check_read() -> None:
  """Every binding has been read; call it after everything is built.

  Only what shipped files set may go unread, options and experiments aside: an
  architecture need not have, for instance, slots.

  Raises:
    ConfigError: a binding that nothing read, with the nearest that was.
  """
  reader = Reader()
  reader.text(gin.operative_config_str(), lambda line: f'operative:{line}')
  read = reader.bindings.values()
  for binding in _bound.values():
    if binding.optional or any(map(binding.is_read_as, read)):
      continue
    peers = [
      other.path for other in read if bool(other.target) == bool(binding.target)
    ]
    raise ConfigError(
      f'{binding.where}: nothing reads {binding.path}'
      f'{gin_files.nearest(binding.path, peers)}; correct the name, or remove'
      ' the binding if what was built does not use it.'
    )


def operative() -> str:
  """The bindings read so far and all defaults, as a gin file that parses."""
  return _HEADER + gin.operative_config_str()


def differences(before: str, after: str) -> list[str]:
  """What the second of two operative configurations changed, a line each."""
  old, new = _values(before), _values(after)
  return [
    f'{path} was {old.get(path, "not set")} and is {new.get(path, "not set")}'
    for path in sorted(old.keys() | new.keys())
    if old.get(path) != new.get(path)
  ]


def _values(text):
  """{path: value as written}; imports nothing that the text names."""
  return {
    '/'.join(filter(None, (each.scope, each.selector)))
    + (each.arg_name and f'.{each.arg_name}'): repr(each.value)
    for each in statements(text, lambda line: f'config.gin:{line}')
    if isinstance(each, BindingStatement)
  }


def sentence(error: Exception) -> str | None:
  """What to tell a person of an error; None if it is no mistake of theirs.

  A ValueError that this package raised itself is one sentence made for people,
  once what gin appends to it is cut off. Any other one, such as a wrong shape
  inside of jax, is a defect of the program and wants its traceback.
  """
  text, *calls = str(error).split('\n  In call to configurable ')
  if isinstance(error, TypeError):
    unbound = re.search(r'for arguments: \[(.*?)\]', text)
    if not (calls and unbound):
      return None
    whole = re.search(r"<class '(?:\w+\.)*(\w+\.\w+)'>", calls[0])
    name = whole[1] if whole else calls[0].split("'")[1]
    return (
      f'{name} needs {unbound[1]}, which no gin file and no --gin_param sets;'
      f' bind {name}.{unbound[1].split(chr(39))[1]}.'
    )
  last = traceback.extract_tb(error.__traceback__)[-1]
  ours = Path(last.filename).is_relative_to(Path(__file__).parents[1])
  return text if ours and last.line.startswith('raise') else None
