"""Lists architectures, sizes, tasks, options, experiments and their settings.

  meliad-rec settings
  meliad-rec settings LEARNING_RATE
  meliad-rec settings options/position/rope
  meliad-rec settings layer_config.LayerConfig

With the name of a gin file, this shows what the file sets. With the name of a
macro (a setting in capitals), it shows which files set the macro. The last part
of a file's name, such as rope, is enough. With the name of a class or function,
it shows the parameters that can be set, as module.Class.parameter.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap

from absl import flags

import meliad_rec
from meliad_rec.config import files
from meliad_rec.config.values import BindingStatement
from meliad_rec.config.values import IncludeStatement
from meliad_rec.config.values import parameters
from meliad_rec.config.values import statements

# Arguments that the help shows, besides flags.
ARGUMENTS = '[NAME]'

_FOLDERS = {
  'arch': 'Architectures, one in a run',
  'size': 'Sizes, one in a run',
  'task': 'Tasks, one in a run',
  'options': 'Options, any number',
  'experiments': 'Experiments, complete by themselves',
  'scale': 'Smaller scales of experiments',
}
_ROW = re.compile(r'\| `([A-Z_]+)` \| (.*) \|')
# An entry of a docstring's list of attributes or arguments.
_ENTRY = re.compile(r'^  (\w+(?:, \w+)*): (.+(?:\n {4}.*)*)', re.MULTILINE)


def define_flags() -> None:
  """Defines no flags."""


def main(argv: list[str]) -> None:
  """Prints all settings, or the details of the names given."""
  flags.FLAGS.mark_as_parsed()
  if not argv[1:]:
    print('\n'.join(overview()))
  for name in argv[1:]:
    print('\n\n'.join(details(name)))


def meanings() -> dict[str, str]:
  """Returns {macro: meaning}, from gin/README.md."""
  text = (files.root() / 'README.md').read_text(encoding='utf-8')
  return dict(_ROW.findall(text))


def overview() -> Iterator[str]:
  """Yields the lines of a list of all macros and shipped gin files."""
  yield "Settings, given as --gin_param='NAME = value', and their defaults:"
  for name, meaning in meanings().items():
    yield from _entry(name, f'{meaning} [{_default(setters(name))}]')
  for folder, title in _FOLDERS.items():
    yield f'\n{title}, given as --gin_file={folder}/NAME:'
    for name in files.names(folder):
      file = f'{folder}/{name}'
      yield from _entry(name, _comment(file)[0])
      if folder == 'size':
        sets = [
          f'{one.arg_name or one.selector} {one.value!r}'
          for one in _statements(file)
          if isinstance(one, BindingStatement)
        ]
        yield from _entry('', ', '.join(sets))


def details(name: str) -> list[str]:
  """Returns a description of each file, macro or class of that name.

  Raises:
    ValueError: nothing has the name.
  """
  known = meanings()
  if name in known:
    return [_macro(name, known[name])]
  short = name.removeprefix('gin/').removesuffix('.gin')
  found = [
    file
    for file in files.names()
    if file == short or file.endswith(f'/{short}')
  ]
  if not found and '.' in short:
    return [*_targets(short)]
  if not found:
    last = [file.rpartition('/')[2] for file in files.names()]
    near = files.nearest(short, [*known, *files.names(), *last])
    raise ValueError(
      f'There is no macro or gin file called {name!r}{near}. '
      '`meliad-rec settings` lists all, and `meliad-rec settings module.Class` '
      'the parameters of a class.'
    )
  return [_file(file) for file in found]


def setters(macro: str) -> Mapping[str, str]:
  """Returns {file: value} of the shipped files that set a macro."""
  found = {}
  for file in files.names():
    for one in _statements(file):
      is_macro = isinstance(one, BindingStatement) and not one.arg_name
      if is_macro and one.selector == macro:
        found[file] = repr(one.value)
  return found


def _macro(name, meaning):
  lines = [f'{name}: {meaning}']
  lines += [f'  {file:<52} {value}' for file, value in setters(name).items()]
  return '\n'.join(lines if lines[1:] else [*lines, '  set by no shipped file'])


def _file(file):
  lines = [f'gin/{file}.gin', *(f'  {line}' for line in _comment(file)), '']
  known = meanings()
  for one in _statements(file):
    if isinstance(one, IncludeStatement):
      lines.append(f'  includes {one.filename}')
    elif isinstance(one, BindingStatement):
      scope = f'{one.scope}/' if one.scope else ''
      path = f'{scope}{one.selector}' + (one.arg_name and f'.{one.arg_name}')
      meaning = '' if one.arg_name else f'  # {known.get(one.selector, "")}'
      lines.append(f'  {path} = {one.value!r}{meaning}')
  return '\n'.join(lines)


def _targets(dotted: str) -> Iterator[str]:
  """Yields a description of each class or function that a dotted name means.

  Args:
    dotted: such as 'layer_config.LayerConfig', or one of its parameters,
      'layer_config.LayerConfig.window'.
  """
  known, any_found = [], False
  wanted = dotted.removeprefix('meliad_rec.').split('.')
  for count in 1, 2:  # parts of the name after the module
    path, (target, *parameter) = wanted[:-count], wanted[-count:]
    for module in _modules() if path else ():
      if not f'.{module}'.endswith('.'.join(['', *path])):
        continue
      found = getattr(importlib.import_module(module), target, None)
      if not callable(found) or found.__module__ != module:
        continue
      rows = _parameters(found)
      if parameter and parameter[0] not in rows:
        known += [f'{".".join(path)}.{target}.{name}' for name in rows]
        continue
      rows = {name: rows[name] for name in parameter or rows}
      yield '\n'.join(_described(found, rows))
      any_found = True
  if not any_found:
    raise ValueError(
      f'meliad_rec has no class, function or parameter {dotted!r}'
      f'{files.nearest(dotted, known)}. Write it as module.Class or '
      'module.Class.parameter; meliad_rec/README.md lists the modules.'
    )


def _modules() -> list[str]:
  """Returns the dotted names of all modules of the package."""
  found = pkgutil.walk_packages(meliad_rec.__path__, 'meliad_rec.')
  return [one.name for one in found if not one.ispkg]


def _described(target, rows):
  """Yields the lines that describe a class or function and some parameters."""
  *_, module = target.__module__.split('.')
  name = f'{module}.{target.__qualname__}'
  yield f"{name}, given as --gin_param='{name}.PARAMETER = value':"
  summary = (inspect.getdoc(target) or '').partition('\n\n')[0]
  yield from (f'  {line}' for line in summary.splitlines())
  yield ''
  for parameter, text in rows.items():
    yield from _entry(parameter, text)


def _parameters(target) -> dict[str, str]:
  """Returns {parameter: its meaning and default} of a class or function.

  The meanings come from the docstrings of the target and of its base classes.
  """
  bases = inspect.getmro(target) if inspect.isclass(target) else [target]
  meanings = {}
  for base in bases:
    for names, text in _ENTRY.findall(inspect.cleandoc(base.__doc__ or '')):
      for name in names.split(', '):
        meanings.setdefault(name, ' '.join(text.split()))
  rows = {}
  for name, one in (parameters(target) or {}).items():
    if name in ('parent', 'name') or one.kind is one.VAR_KEYWORD:
      continue
    default = one.default
    default = getattr(default, '__name__', None) or repr(default)
    default = 'to be set' if one.default is one.empty else default
    rows[name] = f'{meanings.get(name, "")} [{default}]'.strip()
  return rows


def _default(found: Mapping[str, str]) -> str:
  """Returns the default of a macro as text, such as '8192 in arch/memorizing'.

  If files of size/ set the macro, the text has the words 'by size' in place of
  their values.

  Args:
    found: {file: value} of the files that set the macro, from `setters`.
  """
  parts = {}
  kind = lambda file: file.partition('/')[0]
  first = {'defaults', 'arch', 'size', 'task'}
  if not any(kind(file) in first for file in found):
    first = {'options'}
  for file, value in found.items():
    if kind(file) == 'size':
      parts['by size'] = []
    elif kind(file) in first:
      value = value.replace('%gin.REQUIRED', 'to be set')
      parts.setdefault(value, []).append(file)
  if len(parts) == 1 and ('defaults' in found or len(found) > 2):
    return next(iter(parts))
  texts = [
    f'{value} in {", ".join(of_value)}' if of_value else value
    for value, of_value in parts.items()
  ]
  return '; '.join(texts) or 'no default'


def _entry(name, text):
  """Yields the lines of a name and its text, in two columns."""
  if len(name) > 21:
    yield f'  {name}'
    name = ''
  yield from textwrap.wrap(
    text,
    80,
    initial_indent=f'  {name:<22}',
    subsequent_indent=' ' * 24,
    break_on_hyphens=False,
  )


def _text(file):
  return (files.root() / f'{file}.gin').read_text(encoding='utf-8')


def _comment(file):
  """Returns the lines of a shipped file's first comment, without '# '."""
  lines = _text(file).splitlines()
  return [line[2:] for line in lines[: _end(lines)]]


def _end(lines):
  return next(i for i, line in enumerate(lines) if not line.startswith('#'))


@functools.cache
def _statements(file):
  """Returns the statements of a shipped file; cached, as it never changes."""
  return list(statements(_text(file), lambda line: f'{file}.gin:{line}'))
