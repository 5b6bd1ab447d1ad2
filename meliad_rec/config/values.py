"""Statements and values of gin files, and checks of values.

This module uses only the parser of gin, which keeps no global state.
"""

import collections.abc
from collections.abc import Mapping
import dataclasses
import functools
import inspect
import math
import numbers
import os
from pathlib import Path
import re
import sys
import tokenize
import types
import typing
from typing import Any
from typing import NamedTuple

from gin.config_parser import BindingStatement as BindingStatement
from gin.config_parser import BlockDeclaration as BlockDeclaration
from gin.config_parser import ConfigParser
from gin.config_parser import ImportStatement as ImportStatement
from gin.config_parser import IncludeStatement as IncludeStatement
from gin.config_parser import ParserDelegate

from meliad_rec.config.renames import Renamer

DYNAMIC = 'from __gin__ import dynamic_registration'


class ConfigError(ValueError):
  """A mistake in the configuration; the message says how to correct it."""


class MissingError(ConfigError):
  """A value that must be set is not."""


class Name(NamedTuple):
  """The name of a function or class: its module, and its name in the module."""

  module: str
  inner: str

  def __str__(self):
    return f'{self.module.rpartition(".")[2]}.{self.inner}'

  @property
  def full(self) -> str:
    return f'{self.module}.{self.inner}'


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%NAME` in a gin file: the value that the line `NAME = value` sets."""

  name: str

  def __repr__(self):
    return f'%{self.name}'


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/name`, a function or class, or `@scope/name()`, its result.

  Attributes:
    scope: scope of the call; '' for none.
    name: name of the function or class: as the gin file writes it or, after a
      Reader has looked it up, as a Name.
    called: whether `()` follows.
    target: the function or class; None until a Reader has imported it.
  """

  scope: str
  name: Name | str
  called: bool
  target: Any = None

  def __repr__(self):
    scope = f'{self.scope}/' if self.scope else ''
    return f'@{scope}{self.name}{"()" if self.called else ""}'


@dataclasses.dataclass(frozen=True)
class Binding:
  """`scope/name.parameter = value`, or the macro `scope/name = value`.

  Attributes:
    scope: '' for no scope.
    name: Name of the function or class; for a macro, its name as a string.
    parameter: '' for a macro.
    value: the right side of the line, with its macros and references.
    where: the flag, or the file and line, that sets it; for messages.
    optional: whether the binding may stay unread.
    files: the file that sets it, after those that include it, outermost first;
      () for a single binding.
  """

  scope: str
  name: Name | str
  parameter: str
  value: Any
  where: str
  optional: bool = False
  files: tuple[Path, ...] = ()

  @property
  def key(self) -> tuple[str, Name | str, str]:
    """Target of the binding, equal for bindings that override each other."""
    return self.scope, self.name, self.parameter

  @property
  def path(self) -> str:
    """The left side of the binding, as messages and files show it."""
    scope = f'{self.scope}/' if self.scope else ''
    return f'{scope}{self.name}' + (self.parameter and f'.{self.parameter}')


def map_leaves(change, value):
  """Returns a value with `change` applied to each of its leaves.

  The leaves of a tuple or list are the leaves of its items. A dict has the
  leaves of its keys and values. Any other value is itself a leaf.
  """
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


@functools.lru_cache(4096)
def parameters(target) -> Mapping[str, inspect.Parameter] | None:
  """Returns the parameters of a callable by name; None if it has no signature.

  Some classes and functions written in C have no signature.
  """
  try:
    return inspect.signature(target).parameters
  except ValueError:
    return None


def takes(known: Mapping[str, inspect.Parameter] | None, name: str) -> bool:
  """Returns whether a function accepts a keyword argument.

  Args:
    known: parameters of the function, from `parameters`. None: any argument
      counts as accepted.
    name: name of the argument.
  """
  return (
    known is None
    or name in known
    or any(one.kind is one.VAR_KEYWORD for one in known.values())
  )


def annotation(target, name: str):
  """Returns the annotation of a parameter; `Parameter.empty` if unknown.

  An annotation in quotes is evaluated in the module that contains it. An
  annotation that only a type checker can resolve counts as unknown.
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
  """Returns whether a value fits a parameter with this annotation.

  An int fits float. A bool does not fit a number, a str does not fit a
  sequence, and a list does not fit a tuple. A value also fits if there is too
  little information: the annotation is a type variable, or the value is the
  result of a function without a return annotation. A Reference fits every
  protocol. Any other value fits a protocol that does not define `__call__`.
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
  target, kind = reference.target, origin or annotation
  if getattr(kind, '_is_protocol', False):
    return True
  if not reference.called:
    if kind is type:
      wanted = args[0] if args and isinstance(args[0], type) else object
      return inspect.isclass(target) and issubclass(target, wanted)
    return kind is collections.abc.Callable or (
      isinstance(kind, type) and isinstance(target, kind)
    )
  result = target
  if not inspect.isclass(target):
    result = getattr(target, '__annotations__', {}).get('return')
  if not inspect.isclass(result) or not isinstance(kind, type):
    return True
  return issubclass(result, (int, float) if kind is float else kind)


def cut(text: str) -> str:
  """Shortens a text to at most 80 characters, for a message."""
  return text if len(text) <= 80 else f'{text[:77]}...'


def describe(annotation) -> str:
  """Returns the annotation in words, such as 'an int or None'."""
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


class _Values(ParserDelegate):
  def configurable_reference(self, scoped_configurable_name, evaluate):
    *scope, name = scoped_configurable_name.rsplit('/', 1)
    return Reference(''.join(scope), name, evaluate)

  def macro(self, macro_name):
    return Macro(macro_name)


class _Parser(ConfigParser):
  """A parser that rejects mistakes which gin's own parser lets pass."""

  def parse_value(self):
    token = self.current_token
    place = None, token.start[0], None, token.line
    try:
      value = super().parse_value()
    except TypeError:  # An item of a container raises a SyntaxError itself.
      reason = 'a key of a dict must be a number or a string'
      raise SyntaxError(reason, place) from None
    if token.string == '-' and isinstance(value, Macro | Reference):
      raise SyntaxError('"-" can only precede a number', place)
    if isinstance(value, int) and abs(value) >= 2**63:
      raise SyntaxError('a number must be below 2**63', place)
    return value


def statements(text: str, place):
  """Yields the statements of a gin text, as objects of gin's parser.

  Names of older versions are replaced with current ones; see renames.py.

  Args:
    text: content of one file.
    place: maps a line number to its description in messages.

  Raises:
    ConfigError: a statement is not valid gin, or a value is nested too deeply.
  """
  renamer = Renamer()

  def current(leaf):
    if isinstance(leaf, Reference):
      return dataclasses.replace(leaf, name=renamer.selector(leaf.name))
    return leaf

  try:
    parser = _Parser(text, _Values())
    for statement in parser:
      statement = renamer.statement(statement, lambda v: map_leaves(current, v))
      if statement is not None:
        yield statement
  except RecursionError as error:
    line, _ = parser.current_token.start
    raise ConfigError(
      f'{place(line)}: a value is nested too deeply. Use fewer levels of'
      ' brackets.'
    ) from error
  except tokenize.TokenError as error:
    reason, (line, _) = error.args
    raise ConfigError(f'{place(line)}: not valid gin, {reason}.') from error
  except SyntaxError as error:
    word = re.search(r"Failed to parse token '(\w+)'", error.msg)
    if word:
      word = word[1]
      reason = (
        f"{word} is not a value. Write '{word}' for a string, %{word} for a"
        f' macro, @{word} for a function or class'
      )
    else:
      reason = f'not valid gin, {error.msg.splitlines()[0].rstrip(".")}'
      if reason.endswith('parse value'):
        reason += ' (a string needs quotes)'
    line = cut((error.text or '').strip())
    reason += f', in "{line}"' if line else ''
    raise ConfigError(f'{place(error.lineno)}: {reason}.') from error


def is_number(value) -> bool:
  """Returns whether a value is a real number; True and False are not."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_path(name: str, value: Any) -> None:
  """Raises ValueError unless value is a str or a path object."""
  if not isinstance(value, str | os.PathLike):
    raise ValueError(f'{name} must be a str or a path object, got {value!r}.')


def check_count(
  name: str, value: int, least: int, below: float = math.inf
) -> None:
  """Raises ValueError unless value is an integer and least <= value < below.

  The error message calls the value `name`.
  """
  whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not (whole and least <= value < below):
    limit = '' if below == math.inf else f' and below {below:,}'
    raise ValueError(
      f'{name} must be a whole number of at least {least}{limit}, got '
      f'{value!r}.'
    )
