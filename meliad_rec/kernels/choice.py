"""Which form of a computation runs where.

The choice is made when a program is compiled, for the platform that it is
compiled for.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax

# The platform whose kernels each form is; None: no kernels.
FORMS = {
  'xla': None,
  'tpu': 'tpu',
  'tpu_interpreted': 'tpu',
  'gpu': 'cuda',
  'gpu_interpreted': 'cuda',
}


@dataclasses.dataclass(frozen=True)
class Choice:
  """What is known when a program is traced.

  Attributes:
    form: one of FORMS; None: what suits the platform.
    platforms: those whose kernels take the shapes.
  """

  form: str | None
  platforms: tuple[str, ...]

  @property
  def interpret(self) -> bool:
    """Whether kernels are to run without the chip that they are for."""
    return bool(self.form and self.form.endswith('_interpreted'))

  @property
  def has_kernels(self) -> bool:
    return self.form != 'xla' and bool(self.platforms)

  def choose(self, kernels: Callable[[Any], Callable], xla: Callable):
    """The branch of the form, or one that chooses by platform.

    Args:
      kernels: platform -> the branch of its kernels.
      xla: the branch of all else.
    """
    if self.form:
      return kernels(FORMS[self.form])
    branches = {name: kernels(name) for name in self.platforms}
    choose = jax.lax.platform_dependent
    return lambda *arguments: choose(*arguments, **branches, default=xla)


def choice(form: str | None, unsupported: dict[str, str | None]) -> Choice:
  """What may run.

  Args:
    form: what is asked for.
    unsupported: for each platform with kernels, why they do not support the
      arguments; None if they do.

  Raises:
    ValueError: there is no such form, or it does not take the arguments.
  """
  if form not in (None, *FORMS):
    raise ValueError(f'form is {form!r}; it must be None, {", ".join(FORMS)}.')
  platform = form and FORMS[form]
  if platform and unsupported.get(platform, 'there are none'):
    raise ValueError(
      f'The kernels {form} do not take this: '
      f'{unsupported.get(platform, "there are none")}.'
    )
  return Choice(
    form, tuple(name for name, why in unsupported.items() if not why)
  )
