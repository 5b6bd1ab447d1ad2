"""Checks bindings, builds objects from them, and records the values used.

A binding is a line `function.parameter = value` of a gin file. An argument
passed by a caller overrides a binding, and a binding overrides a default.
`@a/f()` calls `f` inside the scope `a`: the bindings of `f` apply, but a
binding of `a/f` overrides the binding of `f` for the same parameter.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from meliad_rec.config.files import nearest
from meliad_rec.config.values import annotation
from meliad_rec.config.values import Binding
from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import describe
from meliad_rec.config.values import DYNAMIC
from meliad_rec.config.values import fits
from meliad_rec.config.values import Macro
from meliad_rec.config.values import map_leaves
from meliad_rec.config.values import MissingError
from meliad_rec.config.values import Name
from meliad_rec.config.values import parameters
from meliad_rec.config.values import Reference
from meliad_rec.config.values import takes

_RULE = f'# {"=" * 78}'
# Number of macros that one value may use, directly or through others. If each
# macro uses the next one twice, twenty macros take a million.
_MACROS = 10_000


@dataclasses.dataclass(frozen=True)
class Configured:
  """A function or class that takes its arguments from a configuration.

  Each call builds the arguments again, so that no two calls share an object.
  """

  evaluator: 'Evaluator' = dataclasses.field(repr=False)
  name: Name
  scope: str = ''

  def __call__(self, *args, **kwargs):
    return self.evaluator.call(self.name, self.scope, args, kwargs)


class _Infinity(float):
  """An infinite number, written in a way that gin can read."""

  def __repr__(self):
    return '1e999' if self > 0 else '-1e999'


class Evaluator:
  """Builds objects from bindings.

  Args:
    bindings: the configuration; later bindings override earlier ones.
    find: maps a Name to the function or class that has it; raises ConfigError
      if there is none.
    advice: last sentence, without its period, of the message about a macro that
      is not set or a parameter that does not exist.
  """

  def __init__(
    self,
    bindings: Iterable[Binding],
    find: Callable[[Name], Callable],
    advice: str = 'Correct the name',
  ):
    self.find = find
    self._advice = advice
    self._bindings = {}  # (scope, name) -> {parameter: binding}.
    for binding in bindings:
      of_name = self._bindings.setdefault((binding.scope, binding.name), {})
      of_name[binding.parameter] = binding
    self._used = {}  # (scope, name) -> {parameter: value}.
    self._read = set()  # Keys of bindings.
    self._macros = 0  # Used so far by the value being evaluated.

  def call(
    self,
    name: Name,
    scope: str,
    args: tuple,
    kwargs: Mapping[str, Any],
    outer: tuple[Binding, ...] = (),
  ) -> Any:
    """Calls a function with the arguments that its bindings give.

    Args:
      name: name of the function or class.
      scope: names of the scopes entered, separated by '/'; '' for none.
      args, kwargs: arguments of the caller, which override bindings.
      outer: bindings whose values are being evaluated, to detect cycles.

    Returns:
      The result of the call.

    Raises:
      ConfigError: the function does not exist, it does not have a parameter
        that a binding or the caller sets, an argument is missing, a macro is
        not set, or a binding depends on itself.
    """
    target = self.find(name)
    known = parameters(target)
    self._check_given(name, known, kwargs)
    given = {*list(known or ())[: len(args)], *kwargs}
    bound = {p: b for p, b in self._of(name, scope).items() if p not in given}
    for binding in bound.values():
      self._check_parameter(binding, known)
    arguments = {p: self.value(b, scope, outer) for p, b in bound.items()}
    record = {parameter: binding.value for parameter, binding in bound.items()}
    for parameter, one in (known or {}).items():
      if parameter in given or parameter in bound:
        continue
      if one.default is not one.empty:
        if _is_literal(one.default):
          record[parameter] = one.default
      elif one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
        raise ConfigError(
          f'{name} needs {parameter!r}, which no gin file and no --gin_param'
          f' sets. Set {name}.{parameter}.'
        )
    self._used.setdefault((scope, name), {}).update(record)
    return target(*args, **arguments, **kwargs)

  def value(
    self, binding: Binding, scope: str = '', outer: tuple[Binding, ...] = ()
  ) -> Any:
    """Returns the value of a binding, with macros replaced by their values.

    A reference with `()` is called and replaced by the result. A reference
    without `()` becomes a Configured.

    Args:
      binding: the binding.
      scope, outer: as in `call`.

    Raises:
      ConfigError: as in `call`.
    """
    outer = self._entered(binding, outer)
    self._read.add(binding.key)

    def evaluated(leaf):
      match leaf:
        case Macro():
          macro = self._macro(leaf, outer)
          self._used[macro.scope, macro.name] = {'': macro.value}
          return self.value(macro, scope, outer)
        case Reference():
          inner = f'{scope}/{leaf.scope}'.strip('/')
          if leaf.called:
            return self.call(leaf.name, inner, (), {}, outer)
          self.find(leaf.name)
          return Configured(self, leaf.name, inner)
        case _:
          return leaf

    return map_leaves(evaluated, binding.value)

  def argument(self, name: Name, parameter: str) -> Binding | None:
    """Returns the binding that sets a parameter outside of scopes, or None."""
    return self._bindings.get(('', name), {}).get(parameter)

  def check(self, incomplete: bool = False) -> None:
    """Checks, before building, that every binding can be used.

    Args:
      incomplete: whether values that must be set may be missing.

    Raises:
      ConfigError: a macro is not set or depends on itself, a parameter does
        not exist, or a value does not fit its parameter.
    """
    for binding in self._every():
      try:
        value = self._expanded(binding, ())
      except MissingError:
        # An optional one may be of a task that was replaced.
        if incomplete or binding.optional:
          continue
        raise
      if binding.parameter:
        target = self.find(binding.name)
        self._check_parameter(binding, parameters(target))
        _check_type(binding, target, value, self._origin(binding))

  def check_read(self) -> None:
    """Checks that every binding that is not optional has been read.

    A binding is read when its value is used in a call.

    Raises:
      ConfigError: a binding was not read. The message names the most similar
        binding that was read, if any is similar.
    """
    for binding in self._every():
      if binding.optional or binding.key in self._read:
        continue
      peers = [
        other.path
        for other in self._every()
        if other.key in self._read
        and bool(other.parameter) == bool(binding.parameter)
      ]
      raise ConfigError(
        f'{binding.where}: nothing reads {binding.path}'
        f'{nearest(binding.path, peers)}. Correct the name, or remove the'
        ' binding.'
      )

  def text(self) -> str:
    """Returns the bindings read and the defaults used, as gin text.

    Every module gets a unique alias. The text includes no other file.
    """
    aliases = {}

    def short(name):
      if name.module not in aliases:
        alias = name.module.rpartition('.')[2]
        while alias in (*aliases.values(), 'gin'):
          alias += '_'
        aliases[name.module] = alias
      return Name(aliases[name.module], name.inner)

    def as_text(leaf):
      if isinstance(leaf, Reference):
        return dataclasses.replace(leaf, name=short(leaf.name))
      if isinstance(leaf, float) and math.isinf(leaf):
        return _Infinity(leaf)
      return leaf

    macros, sections = {}, {}
    for (scope, name), used in self._used.items():
      title = (f'{scope}/' if scope else '') + str(
        name if isinstance(name, str) else short(name)
      )
      written = {p: repr(map_leaves(as_text, v)) for p, v in used.items()}
      if isinstance(name, str):
        macros[title] = written['']
      elif written:
        sections[title] = {f'{title}.{p}': v for p, v in written.items()}
    lines = [DYNAMIC]
    for module, alias in sorted(aliases.items()):
      parent, _, last = module.rpartition('.')
      line = f'from {parent} import {last}' if parent else f'import {last}'
      lines.append(line if alias == last else f'{line} as {alias}')
    parts = {'Macros': macros} if macros else {}
    for title in sorted(sections, key=str.lower):
      parts[f'Parameters for {title}'] = sections[title]
    for title, bindings in parts.items():
      lines += ['', f'# {title}:', _RULE]
      lines += [f'{path} = {bindings[path]}' for path in sorted(bindings)]
    return '\n'.join(lines) + '\n'

  def _of(self, name, scope):
    """Returns {parameter: binding} of a function inside a scope.

    For the scope 'a/b', bindings of 'a/b' override bindings of 'a', which
    override bindings without a scope.
    """
    bound, entered = dict(self._bindings.get(('', name), {})), ''
    for one in filter(None, scope.split('/')):
      entered = f'{entered}/{one}'.strip('/')
      bound |= self._bindings.get((entered, name), {})
    return bound

  def _every(self):
    return [b for of_name in self._bindings.values() for b in of_name.values()]

  def _macro(self, leaf, outer):
    """Returns the binding that sets a macro.

    Args:
      leaf: the Macro.
      outer: bindings being evaluated. The value of the last one has the macro.

    Raises:
      ConfigError: nothing sets the macro.
    """
    asking = outer[-1]
    if leaf.name == 'gin.REQUIRED':
      raise MissingError(
        f'{asking.where}: {asking.path} must be set by another file or by'
        f" --gin_param='{asking.path} = ...'."
      )
    scope, _, name = leaf.name.rpartition('/')
    found = self._bindings.get((scope, name))
    if found is None:
      macros = [b.path for b in self._every() if not b.parameter]
      raise ConfigError(
        f'{asking.where}: {asking.path} = {asking.value!r}, but nothing sets'
        f' {leaf!r}{nearest(leaf.name, macros)}. {self._advice}.'
      )
    return found['']

  def _origin(self, binding):
    """Returns the binding that gives the value: the last of a row of macros."""
    while isinstance(binding.value, Macro):
      binding = self._macro(binding.value, (binding,))
    return binding

  def _expanded(self, binding, outer):
    """Returns the value of a binding with macros replaced by their values.

    References are not called. For `outer` and errors see `_entered`.
    """
    outer = self._entered(binding, outer)
    return map_leaves(
      lambda leaf: (
        self._expanded(self._macro(leaf, outer), outer)
        if isinstance(leaf, Macro)
        else leaf
      ),
      binding.value,
    )

  def _entered(self, binding, outer):
    """Returns `outer` with one more binding, whose value is needed next.

    Args:
      binding: the binding to add.
      outer: bindings being evaluated. The value of each needs the next one.

    Raises:
      ConfigError: the binding is in `outer` already, so it depends on itself,
        or the first one in `outer` needs more than _MACROS macros in all.
    """
    for start, one in enumerate(outer):
      if one is binding:
        cycle = [each.path for each in (*outer[start:], binding)]
        raise ConfigError(
          f'{binding.where}: {binding.path} depends on itself'
          f' ({" -> ".join(cycle)}). Set'
          f' {"one of them" if len(cycle) > 2 else "it"} to a value.'
        )
    self._macros = self._macros + 1 if outer else 0
    if self._macros > _MACROS:
      raise ConfigError(
        f'{outer[0].where}: {outer[0].path} uses more than {_MACROS:,} macros.'
        ' Replace some of them by their values.'
      )
    return (*outer, binding)

  def _check_given(self, name, known, kwargs):
    """Checks that a function accepts all keyword arguments of its caller.

    Args:
      name: Name of the function.
      known: parameters of the function, from `parameters`.
      kwargs: keyword arguments of the caller.

    Raises:
      ConfigError: the function does not accept one of them.
    """
    for parameter in kwargs:
      if takes(known, parameter):
        continue
      # The caller may pass on a binding of its own.
      found = [b for b in self._every() if b.parameter == parameter]
      source = ''.join(f' ({b.where}: {b.path})' for b in found[:1])
      raise ConfigError(
        f'{name} has no parameter {parameter!r}, but its caller passes this'
        f' argument{source}. Remove the setting of {parameter}, or use'
        f' something with this parameter instead of {name}.'
      )

  def _check_parameter(self, binding, known):
    if not takes(known, binding.parameter):
      raise ConfigError(
        f'{binding.where}: {binding.name} has no parameter'
        f' {binding.parameter!r}{nearest(binding.parameter, known)}.'
        f' {self._advice}.'
      )


def _check_type(binding, target, value, origin):
  """Checks that a value fits its parameter.

  The default of the parameter always fits.

  Args:
    binding: a binding of a parameter.
    target: the function or class that has the parameter.
    value: the binding's value with macros replaced.
    origin: the binding itself, or the binding of the macro that has the value.

  Raises:
    ConfigError: the value does not fit.
  """
  known = parameters(target) or {}
  if binding.parameter not in known:
    return
  default = known[binding.parameter].default
  if type(default) is type(value) and default == value:
    return
  needed = annotation(target, binding.parameter)
  if fits(value, needed):
    return
  given = repr(value)
  if repr(binding.value) != given:
    given = f'{binding.value!r}, which is {given}'
  if isinstance(value, Reference):
    other = dataclasses.replace(value, called=not value.called)
    hint = f'. Write {other!r}' if fits(other, needed) else ''
  else:
    hint = f', not {describe(type(value))}. Set '
    hint += 'it' if origin is binding else origin.path
    hint += f' to {describe(needed)}'
  raise ConfigError(
    f'{binding.where}: {binding.path} = {given}, but {binding.parameter} takes'
    f' {describe(needed)}{hint}.'
  )


def _is_literal(value) -> bool:
  """Returns whether a value can be written as gin text."""
  match value:
    case tuple() | list():
      return all(map(_is_literal, value))
    case dict():
      return all(map(_is_literal, (*value, *value.values())))
    case float():
      return value - value == 0  # Neither infinite nor NaN.
    case _:
      return value is None or type(value) in (bool, int, str, bytes)
