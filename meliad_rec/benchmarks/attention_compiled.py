"""The process that compiles for `attention.estimate`; prints rows as JSON.

Arguments: the slice, the setting, and the folder that schedules are left in. A
mistake is printed as {'mistake': a sentence}.
"""

import dataclasses
import json
import sys

import jax
from jax.sharding import SingleDeviceSharding

from meliad_rec.benchmarks import attention_forms as forms
from meliad_rec.benchmarks import tpu_schedules
from meliad_rec.benchmarks.attention import Estimate
from meliad_rec.config import config
from meliad_rec.planning import hlo
from meliad_rec.planning import topology

# Bounded: what runs unless scales are large. Its gradient is the same for both.
KERNELS = 'window_attention_forward_bounded', 'window_attention_backward'
KERNELS += 'splash_mha_fwd', 'splash_mha_dq', 'splash_mha_dkv'


def rows(name: str, setting: forms.Setting, folder: str) -> dict[str, Estimate]:
  """A row for each form."""
  where = topology.parse(name)
  place = SingleDeviceSharding(topology.devices(name)[0])
  given = [
    jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place)
    for s in setting.shapes()
  ]
  found = {}
  for form in forms.TPU_FORMS:
    cycles, kernels = {}, {}
    for way, program in forms.programs(form, setting).items():
      compiled = jax.jit(program).lower(*given).compile()
      text = compiled.as_text()
      cycles[way] = hlo.read(text).cycles
      kernels[way] = sum(
        max(tpu_schedules.read(folder, kernel).values())
        for kernel in KERNELS
        if kernel in text
      )
    found[form] = Estimate(
      cycles,
      kernels,
      where.chip.clock,
      compiled.memory_analysis().temp_size_in_bytes,
    )
  return found


def main(argv: list[str]) -> None:
  name, setting, folder = argv
  try:
    found = rows(name, forms.SETTINGS[setting], folder)
    told = {form: dataclasses.asdict(one) for form, one in found.items()}
  except ValueError as error:
    told = {'mistake': config.sentence(error)}
    if told['mistake'] is None:
      raise
  print(json.dumps(told))


if __name__ == '__main__':
  main(sys.argv[1:])
