"""Windowed attention: ours, against the forms that a user could pick instead.

Measured on the machine that it runs on, or for a TPU by what its compiler says.
Ours is the kernels on a TPU or a GPU, and else the blocked form.
"""

import dataclasses
import json
import tempfile

import jax
import jax.numpy as jnp

from meliad_rec.benchmarks import attention_forms as forms
from meliad_rec.benchmarks import tpu_schedules
from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.planning import environment
from meliad_rec.planning import topology

SETTINGS = forms.SETTINGS
BASELINE = forms.BASELINE
WAYS = 'forward', 'forward+backward'


@dataclasses.dataclass(frozen=True)
class Row:
  """What one form costs.

  Attributes:
    times: seconds of each call, by WAYS.
    ratios: to the baseline's.
    temporary_bytes: of forward and backward.
  """

  times: dict[str, Times]
  ratios: dict[str, float]
  temporary_bytes: int

  def columns(self, baseline: str) -> dict[str, str]:
    """Names and values for a table."""
    found = {}
    for way in WAYS:
      found[f'{way} ms'] = f'{self.times[way].median * 1e3:.2f}'
      found[f'{way} spread'] = f'{self.times[way].spread:.0%}'
      found[f'{way} / {baseline}'] = f'{self.ratios[way]:.3f}'
    return found | {'temp MiB': f'{self.temporary_bytes / 2**20:.1f}'}


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What one form costs a TPU, by its compiler.

  Attributes:
    cycles: of what XLA prices, by WAYS.
    kernels: of Pallas, at most, by WAYS.
    clock: cycles per second.
    temporary_bytes: of forward and backward.
  """

  cycles: dict[str, int]
  kernels: dict[str, int]
  clock: float
  temporary_bytes: int

  def columns(self, baseline: str) -> dict[str, str]:
    """Names and values for a table."""
    del baseline
    found = {}
    for way in WAYS:
      total = self.cycles[way] + self.kernels[way]
      found[f'{way} kcycles'] = f'{total / 1e3:.0f}'
      found['of it kernels' + ' ' * WAYS.index(way)] = (
        f'{self.kernels[way] / 1e3:.0f}'
      )
      found[f'{way} us'] = f'{total / self.clock * 1e6:.0f}'
    return found | {'temp MiB': f'{self.temporary_bytes / 2**20:.1f}'}


def measure(setting: forms.Setting, rounds: int) -> dict[str, Row]:
  """A row for each form, on this machine."""
  is_tpu = jax.default_backend() == 'tpu'
  names = forms.TPU_FORMS if is_tpu else forms.FORMS
  keys = jax.random.split(jax.random.key(0), len(setting.shapes()))
  given = [_draw(*each) for each in zip(keys, setting.shapes(), strict=True)]
  compiled = {
    (form, way): jax.jit(program).lower(*given).compile()
    for form in names
    for way, program in forms.programs(form, setting).items()
  }
  call = lambda run: lambda: jax.block_until_ready(run(*given))
  times = round_robin({k: call(run) for k, run in compiled.items()}, rounds)
  return {
    form: Row(
      times={way: times[form, way] for way in WAYS},
      ratios={w: times[form, w].ratio(times[BASELINE, w]) for w in WAYS},
      temporary_bytes=_temporary(compiled[form, WAYS[1]]),
    )
    for form in names
  }


def estimate(setting: forms.Setting, name: str) -> dict[str, Estimate]:
  """A row for each form, of one device of a slice such as 'v5e:2x2'.

  Raises:
    ValueError: there is no such slice, or no compiler for it, or what it says
      is not known.
    RuntimeError: the process that compiles failed otherwise.
  """
  topology.parse(name)
  environment.check()
  with tempfile.TemporaryDirectory() as folder:
    (number,) = (k for k, s in SETTINGS.items() if s == setting)
    ended = environment.run(
      'meliad_rec.benchmarks.attention_compiled',
      [name, number, folder],
      tpu_schedules.flags(folder),
    )
  if ended.returncode:
    raise environment.failed(f'compiles attention for {name}', ended)
  rows = json.loads(ended.stdout.splitlines()[-1])
  if 'mistake' in rows:
    mistake = rows['mistake']
    raise ValueError(mistake)
  return {form: Estimate(**row) for form, row in rows.items()}


def _draw(key, shape):
  if shape.dtype == jnp.bool:
    return jnp.ones(shape.shape, bool)
  return jax.random.normal(key, shape.shape, shape.dtype)


def _temporary(compiled) -> int:
  return compiled.memory_analysis().temp_size_in_bytes
