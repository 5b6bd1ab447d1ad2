"""Compares implementations of sliding-window attention.

  meliad-rec bench attention [--setting=small] [--topology=v5e:2x2]

Times are measured on this machine or, with --topology, estimated by the TPU
compiler. Each row of the table is one implementation (form). `ours` uses Pallas
kernels on a TPU and a GPU. Elsewhere it runs XLA code, as `blocked` does
everywhere.
"""

import dataclasses
import json
import tempfile

import jax
import jax.numpy as jnp

from meliad_rec.benchmarks import attention_compiled
from meliad_rec.benchmarks import attention_forms as forms
from meliad_rec.benchmarks.attention_compiled import Estimate
from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.planning import environment
from meliad_rec.planning import topology

SETTINGS = forms.SETTINGS
BASELINE = forms.BASELINE
WAYS = forms.WAYS


@dataclasses.dataclass(frozen=True)
class AttentionCost:
  """Measured cost of one form.

  A way is one of WAYS: 'forward' or 'forward+backward'.

  Attributes:
    times: {way: times of a call}.
    ratios: {way: time divided by the baseline's}; see Times.ratio.
    temporary_bytes: bytes of temporary memory of 'forward+backward', according
      to the compiler.
  """

  times: dict[str, Times]
  ratios: dict[str, float]
  temporary_bytes: int

  def columns(self, baseline: str) -> dict[str, str]:
    """Returns {column: text} for a row of the table.

    Args:
      baseline: name of the baseline's row, for the headings of ratios.
    """
    found = {}
    for way in WAYS:
      found[f'{way} ms'] = f'{self.times[way].median * 1e3:.2f}'
      found[f'{way} spread'] = f'{self.times[way].spread:.0%}'
      found[f'{way} / {baseline}'] = f'{self.ratios[way]:.3f}'
    return found | {'temp MiB': f'{self.temporary_bytes / 2**20:.1f}'}


def measure(
  setting: forms.AttentionSizes, rounds: int
) -> dict[str, AttentionCost]:
  """Measures the cost of each of `forms_here` on this machine.

  Args:
    setting: sizes of the arrays.
    rounds: number of times that each program is timed.

  Returns:
    {name of the form: its cost}.
  """
  names = forms.forms_here()
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
    form: AttentionCost(
      times={way: times[form, way] for way in WAYS},
      ratios={w: times[form, w].ratio(times[BASELINE, w]) for w in WAYS},
      temporary_bytes=_temporary(compiled[form, WAYS[1]]),
    )
    for form in names
  }


def estimate(setting: forms.AttentionSizes, name: str) -> dict[str, Estimate]:
  """Returns the estimated cost of each form on one device of a slice of TPUs.

  The keys of the result are the names of the forms.

  Args:
    setting: one of the values of SETTINGS.
    name: name of the slice, such as 'v5e:2x2'.

  Raises:
    ValueError: there is no such slice, or libtpu is missing or is not the
      version that this package needs.
    RuntimeError: the process that compiles failed for another reason.
  """
  topology.parse(name)
  environment.check()
  with tempfile.TemporaryDirectory() as folder:
    (number,) = (k for k, s in SETTINGS.items() if s == setting)
    ended = environment.run(
      attention_compiled.__name__,
      [name, number, folder],
      attention_compiled.flags(folder),
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
