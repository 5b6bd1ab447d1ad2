"""One binding, the place it was written in, and the check of its value."""

import dataclasses
from typing import Any

from meliad_rec.config.values import annotation
from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import describe
from meliad_rec.config.values import fits
from meliad_rec.config.values import parameters
from meliad_rec.config.values import Reference


@dataclasses.dataclass(frozen=True)
class Binding:
  """`scope/name.parameter = value`, or `scope/name = value`, a macro.

  where: the place, as messages call it.
  optional: whether nothing need read it.
  """

  scope: str
  name: str
  parameter: str
  target: Any
  value: Any
  where: str
  optional: bool

  @property
  def path(self):
    scope = f'{self.scope}/' if self.scope else ''
    return scope + (
      f'{self.name}.{self.parameter}' if self.target else self.name
    )

  @property
  def key(self):
    return self.scope, self.target or self.name, self.parameter

  def is_read_as(self, other):
    """Whether `other`, of the operative configuration, may have read this.

    Gin records the scope of the call, which the binding's scope begins.
    """
    return self.key[1:] == other.key[1:] and (
      other.scope == self.scope
      or not self.scope
      or other.scope.startswith(f'{self.scope}/')
    )


def check_type(binding: Binding, value) -> None:
  """The value fits the annotation of its parameter, or is its default.

  Args:
    binding: of a function or class.
    value: what it binds, with macros replaced.

  Raises:
    ConfigError: it does not fit.
  """
  known = parameters(binding.target) or {}
  if binding.parameter not in known:
    return
  default = known[binding.parameter].default
  if type(default) is type(value) and default == value:
    return
  needed = annotation(binding.target, binding.parameter)
  if fits(value, needed):
    return
  given = repr(value)
  if repr(binding.value) != given:
    given = f'{binding.value!r}, that is {given}'
  if isinstance(value, Reference):
    other = dataclasses.replace(value, called=not value.called)
    hint = f'; write {other!r}' if fits(other, needed) else ''
  else:
    hint = f', not {describe(type(value))}'
  raise ConfigError(
    f'{binding.where}: {binding.path} = {given}, and needed is'
    f' {describe(needed)}{hint}.'
  )
