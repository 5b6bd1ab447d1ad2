"""Kernels run as a TPU would run them, with its memories, cores and races."""

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp


def without_races(kernels, given, seed, **options):
  """The output, and gradients of a loss as attention examples have it.

  Grid steps run in any order that the kernels allow, on two cores. Memory that
  nothing wrote is NaN, and what reads past its end raises.

  Args:
    kernels: a module with `attend` and `gradients`.
    given: the arguments of `attend`.
    seed: of the order.
    options: of both.
  """
  interpret = pltpu.InterpretParams(
    detect_races=True,
    out_of_bounds_reads='raise',
    uninitialized_memory='nan',
    num_cores_or_threads=2,
    random_seed=seed,
  )
  pltpu.reset_tpu_interpret_mode_state()
  o, lse = kernels.attend(*given, **options, interpret=interpret)
  assert not interpret_pallas_call.races.races_found
  do = jnp.sin(jnp.arange(o.size)).reshape(o.shape)
  grads = kernels.gradients(*given, o, lse, do, **options, interpret=interpret)
  assert not interpret_pallas_call.races.races_found
  return [o, *jax.tree.leaves(grads)]
