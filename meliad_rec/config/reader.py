"""Gin files read into checked bindings, and written as one gin text."""

import dataclasses
import re
import sys

from meliad_rec.config import files as gin_files
from meliad_rec.config import names as gin_names
from meliad_rec.config.binding import Binding
from meliad_rec.config.binding import check_type
from meliad_rec.config.files import nearest
from meliad_rec.config.syntax import BindingStatement
from meliad_rec.config.syntax import BlockDeclaration
from meliad_rec.config.syntax import DYNAMIC
from meliad_rec.config.syntax import ImportStatement
from meliad_rec.config.syntax import IncludeStatement
from meliad_rec.config.syntax import statements
from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import Macro
from meliad_rec.config.values import map_leaves
from meliad_rec.config.values import parameters
from meliad_rec.config.values import Reference
from meliad_rec.config.values import takes


class Reader:
  """What was read so far.

  bindings: by key; the last one of a key.
  chains: each file read, after the files that include it, outermost first.
  modules: what the files import, by name; None if they mean several by it.
  aliases: names that the flat text gives to modules.
  """

  def __init__(self):
    self.bindings = {}
    self.chains = []
    self.modules = {'meliad_rec': sys.modules['meliad_rec']}
    self.aliases = {}

  def file(self, name, where, outer=()):
    """Reads a file and those it includes; `outer` are the including ones."""
    path = gin_files.find(name, where)
    if path in outer:
      raise ConfigError(f'{where} includes {name}, which includes it again.')
    self.chains.append((*outer, path))
    label = gin_files.label(path)
    shipped = gin_files.is_shipped(path)
    try:
      text = path.read_text(encoding='utf-8')
    except UnicodeDecodeError as error:
      raise ConfigError(f'{where}: {label} is not UTF-8 text.') from error
    self.text(
      text,
      lambda line: f'{label}:{line}',
      optional=shipped and gin_files.is_optional(path),
      chain=(*outer, path),
    )

  def param(self, text):
    """Reads one binding; it may name every module that the files import."""
    where = f'--gin_param {text!r}'
    if not re.match(r'[^=#]+=', text):
      raise ConfigError(f'{where} has no "="; write NAME = value.')
    clear = {name: one for name, one in self.modules.items() if one}
    self.text(text, lambda _: where, modules=clear)

  def text(self, text, place, optional=False, chain=(), modules=None):
    """Reads the text of one file.

    Args:
      text: statements.
      place: from the number of a line to how messages call it.
      optional: whether what is set here may go unread.
      chain: this file, after those that include it.
      modules: modules by name; None if the text imports what it names.
    """
    here = modules or {}
    set_here = {}
    dynamic = False
    for statement in statements(text, place):
      where = place(statement.location.line_num)
      match statement:
        case IncludeStatement():
          self.file(statement.filename, where, chain)
        case ImportStatement() if statement.format() == DYNAMIC:
          dynamic = True
        case ImportStatement() if not dynamic:
          raise ConfigError(
            f'{where}: write "{DYNAMIC}" before "{statement.format()}".'
          )
        case ImportStatement():
          self._import(statement, where, here)
        case BlockDeclaration():
          self._resolve(statement.selector, where, here)
        case BindingStatement():
          binding = self._binding(statement, where, here, optional)
          if binding.key in set_here:
            raise ConfigError(
              f'{where} sets {binding.path} again, after'
              f' {set_here[binding.key]}; keep one of the two.'
            )
          set_here[binding.key] = where
          self.bindings[binding.key] = binding

  def check(self):
    """Every macro is set, and every value fits its parameter.

    Raises:
      ConfigError: one is not or does not.
    """
    for binding in self.bindings.values():
      value = self._expand(binding.value, binding)
      if binding.target:
        check_type(binding, value)

  def flat(self) -> str:
    """All bindings as one gin text, without includes, each name unique."""
    lines = [DYNAMIC]
    for module, alias in self.aliases.items():
      parent, _, last = module.rpartition('.')
      line = f'from {parent} import {last}' if parent else f'import {last}'
      lines.append(line if alias == last else f'{line} as {alias}')
    for binding in self.bindings.values():
      lines.append(f'{binding.path} = {binding.value!r}')
    return '\n'.join(lines) + '\n'

  def _import(self, statement, where, here):
    module = gin_names.load(statement.module, where)
    name = statement.bound_name()
    if not (statement.is_from or statement.alias):
      module = sys.modules[name]
    here[name] = module
    if self.modules.setdefault(name, module) is not module:
      self.modules[name] = None

  def _binding(self, statement, where, here, optional):
    scope, selector, parameter, value, _ = statement
    value = map_leaves(lambda leaf: self._target(leaf, where, here), value)
    if not parameter:
      return Binding(scope, selector, '', None, value, where, optional)
    name, target = self._resolve(selector, where, here)
    known = parameters(target)
    if not takes(known, parameter):
      raise ConfigError(
        f'{where}: {selector} has no parameter {parameter!r}'
        f'{nearest(parameter, known)}.'
      )
    return Binding(scope, name, parameter, target, value, where, optional)

  def _target(self, leaf, where, here):
    if not isinstance(leaf, Reference):
      return leaf
    name, target = self._resolve(leaf.name, where, here)
    return dataclasses.replace(leaf, name=name, target=target)

  def _resolve(self, dotted, where, here):
    """The name that the flat text has for it, and the function or class."""
    module, inner, target = gin_names.look_up(dotted, here, where)
    if module.__name__ not in self.aliases:
      alias = module.__name__.rpartition('.')[2]
      while alias in (*self.aliases.values(), 'gin'):
        alias += '_'
      self.aliases[module.__name__] = alias
    return f'{self.aliases[module.__name__]}.{inner}', target

  def _expand(self, value, binding, outer=()):
    """The value with macros replaced by what they are bound to."""

    def expand(leaf):
      if not isinstance(leaf, Macro):
        return leaf
      scope, _, name = leaf.name.rpartition('/')
      macro = self.bindings.get((scope, name, ''))
      if macro is None and leaf.name == 'gin.REQUIRED':
        raise ConfigError(
          f'{binding.where}: {binding.path} must be set by another file or by'
          f" --gin_param='{binding.path} = ...'."
        )
      if macro is None:
        names = [one.path for one in self.bindings.values() if not one.target]
        raise ConfigError(
          f'{binding.where}: {binding.path} = {binding.value!r}, but nothing'
          f' sets {leaf.name}{nearest(leaf.name, names)}.'
        )
      if macro.key in outer:
        raise ConfigError(f'{macro.where}: {macro.path} is set to itself.')
      return self._expand(macro.value, macro, (*outer, macro.key))

    return map_leaves(expand, value)
