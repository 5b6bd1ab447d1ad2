"""The values of gin files, and whether one fits a parameter.

The statements of a gin text, by gin's own parser, which touches no state.
"""

import collections.abc
import dataclasses
import inspect
import re
import sys
import tokenize
import types
import typing
from typing import Any

from gin.config_parser import BindingStatement
from gin.config_parser import BlockDeclaration
from gin.config_parser import ConfigParser
from gin.config_parser import ImportStatement
from gin.config_parser import IncludeStatement
from gin.config_parser import ParserDelegate

from meliad_rec.config.renames import Renamer


class ConfigError(ValueError):
  """A mistake in the configuration, told in one sentence."""


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%NAME`: the value that NAME is bound to."""

  name: str

  def __repr__(self):
    return f'%{self.name}'


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/name`, a function or class; with `()` the result of calling it."""

  scope: str
  name: str
  called: bool
  target: Any = None

  def __repr__(self):
    scope = f'{self.scope}/' if self.scope else ''
    return f'@{scope}{self.name}{"()" if self.called else ""}'


def map_leaves(change, value):
  """`value` with `change` applied to each leaf of its tuples, lists, dicts."""
  match value:
    case tuple() | list():
      return type(value)(map_leaves(change, item) for item in value)
    case dict():
      return {
        map_leaves(change, key): map_leaves(change, item)
        for key, item in value.items()
      }
    case _:
      return change(value)


def parameters(target) -> dict[str, inspect.Parameter] | None:
  """Parameters by name; None where Python cannot tell (some C functions)."""
  try:
    return dict(inspect.signature(target).parameters)
  except ValueError:
    return None


def takes(known: dict[str, inspect.Parameter] | None, name: str) -> bool:
  """Whether a function of these parameters may be given one by that name."""
  return (
    known is None
    or name in known
    or any(one.kind is one.VAR_KEYWORD for one in known.values())
  )


def annotation(target, name: str):
  """The annotation of a parameter; `Parameter.empty` where none is known.

  An annotation written as a string is looked up where the class or function
  that wrote it was defined; one that only a type checker can resolve counts as
  none.
  """
  found = parameters(target)[name].annotation
  if not isinstance(found, str):
    return found
  owner = inspect.unwrap(target)
  if inspect.isclass(owner):
    for base in inspect.getmro(owner):
      if name in inspect.get_annotations(base):
        owner = base
        break
  try:
    return eval(found, dict(vars(sys.modules[owner.__module__])))
  except (NameError, AttributeError, KeyError, TypeError):
    return inspect.Parameter.empty


def fits(value, annotation) -> bool:
  """Whether a parameter annotated so takes this value.

  An int is a float, but a bool is no number, a str no sequence, a list no
  tuple. What an annotation does not decide (a protocol, a type variable, the
  result of a function without annotation) fits.
  """
  if isinstance(annotation, typing.ForwardRef | typing.TypeVar | str):
    return True
  if annotation in (Any, inspect.Parameter.empty, object):
    return True
  origin = typing.get_origin(annotation)
  args = typing.get_args(annotation)
  if origin in (typing.Annotated, typing.Final, typing.ClassVar):
    return fits(value, args[0])
  if origin in (typing.Union, types.UnionType):
    return any(fits(value, arg) for arg in args)
  if isinstance(value, Reference):
    return _reference_fits(value, annotation, origin, args)
  if origin is typing.Literal:
    return any(type(value) is type(arg) and value == arg for arg in args)
  if annotation in (None, types.NoneType):
    return value is None
  if annotation in (int, float):
    allowed = (int, float) if annotation is float else (int,)
    return type(value) in allowed
  kind = origin or annotation
  if not isinstance(kind, type):
    return True  # for instance a NewType
  if kind is collections.abc.Callable or kind is type:
    return False
  if issubclass(kind, collections.abc.Collection) and kind is not str:
    return _collection_fits(value, kind, args)
  if getattr(kind, '_is_protocol', False):
    return '__call__' not in vars(kind)
  return isinstance(value, kind)


def _collection_fits(value, kind, args) -> bool:
  if isinstance(value, str) or not isinstance(value, kind):
    return False
  if not args:
    return True
  if isinstance(value, dict):
    return all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
  if kind is tuple and args[-1] is not ...:
    return len(value) == len(args) and all(map(fits, value, args))
  return all(fits(item, args[0]) for item in value)


def _reference_fits(reference, annotation, origin, args) -> bool:
  target = reference.target
  if not reference.called:
    if origin is type:
      wanted = args[0]
      return not isinstance(wanted, type) or (
        inspect.isclass(target) and issubclass(target, wanted)
      )
    if annotation is type:
      return inspect.isclass(target)
    if (origin or annotation) is collections.abc.Callable:
      return True
    kind = origin or annotation
    return getattr(kind, '_is_protocol', False) or (
      isinstance(kind, type) and isinstance(target, kind)
    )
  result = target
  if not inspect.isclass(target):
    result = getattr(target, '__annotations__', {}).get('return')
  kind = origin or annotation
  if not inspect.isclass(result) or not isinstance(kind, type):
    return True
  if getattr(kind, '_is_protocol', False):
    return True
  if kind is float:
    return issubclass(result, int | float)
  return issubclass(result, kind)


def describe(annotation) -> str:
  """The annotation in words: 'an int', "'a' or 'b'", 'an int or None'."""
  origin = typing.get_origin(annotation)
  args = typing.get_args(annotation)
  if origin in (typing.Union, types.UnionType):
    return ' or '.join(describe(arg) for arg in args)
  if origin is typing.Literal:
    return ' or '.join(map(repr, args))
  if annotation in (None, types.NoneType):
    return 'None'
  if (origin or annotation) is collections.abc.Callable:
    return 'a function or class (@name)'
  if isinstance(annotation, type) and origin is None:
    name = annotation.__name__
    return f'{"an" if name[0].lower() in "aeiou" else "a"} {name}'
  return f'a {annotation}'.replace('typing.', '').replace(
    'collections.abc.', ''
  )


__all__ = [
  'DYNAMIC',
  'BindingStatement',
  'BlockDeclaration',
  'ImportStatement',
  'IncludeStatement',
  'statements',
]

DYNAMIC = 'from __gin__ import dynamic_registration'


class _Values(ParserDelegate):
  def configurable_reference(self, scoped_configurable_name, evaluate):
    *scope, name = scoped_configurable_name.rsplit('/', 1)
    return Reference(''.join(scope), name, evaluate)

  def macro(self, macro_name):
    return Macro(macro_name)


def statements(text: str, place):
  """The statements of a text one by one, in the package's current names.

  Args:
    text: of one file.
    place: from the number of a line to how messages call it.

  Raises:
    ConfigError: at the first that is not gin.
  """
  renamer = Renamer()

  def current(leaf):
    if isinstance(leaf, Reference):
      return dataclasses.replace(leaf, name=renamer.selector(leaf.name))
    return leaf

  try:
    for statement in ConfigParser(text, _Values()):
      yield renamer.statement(statement, lambda v: map_leaves(current, v))
  except tokenize.TokenError as error:
    reason, (line, _) = error.args
    raise ConfigError(f'{place(line)}: not gin, {reason}.') from error
  except SyntaxError as error:
    word = re.search(r"Failed to parse token '(\w+)'", error.msg)
    if word:
      word = word[1]
      reason = (
        f"{word} is no value; write '{word}' for a text, %{word} for a macro,"
        f' @{word} for a function or class'
      )
    else:
      reason = f'not gin, {error.msg.splitlines()[0].rstrip(".")}'
    line = (error.text or '').strip()
    reason += f', in "{line}"' if line else ''
    raise ConfigError(f'{place(error.lineno)}: {reason}.') from error
