"""Examples of attention, and comparisons of its implementations."""

import functools

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from meliad_rec.kernels import reference as ref
from meliad_rec.kernels import xla
from meliad_rec.kernels.dispatch import Dispatch
from meliad_rec.kernels.dispatch import WINDOW_NAMES


def example(
  T,
  P,
  W,
  H=2,
  num_kv_heads=2,
  K=64,
  dtype='float32',
  scale=3.0,
  keys=False,
  bias=0,
  **options,
) -> ref.AttentionInputs:
  """Returns inputs with P past keys; scale=None leaves queries as drawn."""
  rng = np.random.default_rng(T + W)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  B, S = 2, P + T
  mask_BS = rng.random((B, S)) < 0.8
  mask_BS[1, : P + 3] = False  # The first queries of row 1 see no key.
  bias_HW = jnp.asarray(rng.normal(size=(H, W)) + bias, jnp.float32)
  bias_HW = bias_HW.at[0, (W + 1) // 2 :].set(ref.MASKED)  # As a span does.
  scale_H = np.linspace(scale or 1, 1, H)
  return ref.AttentionInputs(
    draw(B, T, H, K),
    ref.l2_normalize(draw(B, S, num_kv_heads, K)),
    draw(B, S, num_kv_heads, K),
    jnp.asarray(mask_BS),
    bias_HW,
    None if scale is None else jnp.asarray(scale_H, jnp.float32),
    jnp.asarray(rng.normal(size=(W, K)), jnp.float32) if keys else None,
    **options,
  )


def memory_example(
  T, S, H=2, num_kv_heads=2, K=64, dtype='float32', scale=3.0
) -> ref.MemoryInputs:
  """Returns inputs whose second row sees no slot; scale as in `example`."""
  rng = np.random.default_rng(T + S)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  B = 2
  mask_BS = rng.random((B, S)) < 0.8
  mask_BS[1] = False
  return ref.MemoryInputs(
    draw(B, T, H, K),
    ref.l2_normalize(draw(B, S, num_kv_heads, K)),
    draw(B, S, num_kv_heads, K),
    jnp.asarray(mask_BS),
    scale and jnp.linspace(scale, 1, H),
  )


def window_by_xla(inputs, dropout=None, tile=None):
  """Windowed attention in XLA with `tile` queries in a sub-block."""
  by_xla = (
    functools.partial(xla.window_attend, tile=tile),
    functools.partial(xla.window_gradients, tile=tile),
  )
  return Dispatch((), 'xla', by_xla, WINDOW_NAMES)(inputs, dropout)


def with_raw_own(inputs):
  """Returns inputs whose own keys are to be normalized."""
  T, P = inputs.q_BTHK.shape[1], inputs.k_BSHK.shape[1]
  P -= T
  lengths = jnp.linspace(0.5, 3, T, dtype=inputs.k_BSHK.dtype)
  own = inputs.k_BSHK[:, P:] * lengths[:, None, None]
  k_BSHK = jnp.concatenate([inputs.k_BSHK[:, :P], own], 1)
  return inputs.replace(k_BSHK=k_BSHK, normalize_own=True)


def both(function, inputs, *args, **options):
  """Returns the output, and the gradients of all inputs but the mask."""
  grad, arrays = grad_of(function, inputs, *args, **options)
  (_, y), grads = jax.jit(grad)(arrays)
  return [y, *jax.tree.leaves(grads)]


def grad_of(function, inputs, *args, **options):
  """Returns a function of ((loss, outputs), gradients), and its argument."""

  def loss(arrays):
    y = function(arrays.replace(mask_BS=inputs.mask_BS), *args, **options)
    weights = jnp.sin(jnp.arange(y.size)).reshape(y.shape)
    return jnp.sum(weights * y.astype(ref.sum_dtype(y))), y

  return jax.value_and_grad(loss, has_aux=True), inputs.replace(mask_BS=None)


def exactly(inputs, keep_HTS=None):
  """Returns output and gradients by the definition, in float64."""
  exact = lambda a: np.asarray(a, None if a.dtype == bool else np.float64)
  with jax.enable_x64(True):
    inputs, keep_HTS = jax.tree.map(exact, (inputs, keep_HTS))
    if isinstance(inputs, ref.AttentionInputs):
      return both(ref.window_attention, inputs)
    return both(ref.memory_attention, inputs, keep_HTS)


def assert_close(found, expected, rate):
  for a, b in zip(found, expected, strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.isfinite(a).all()
    np.testing.assert_allclose(a, b, atol=rate * np.abs(b).max())


def assert_exact(function, inputs, rate):
  """Checks output and gradients against the definition."""
  assert_close(both(function, inputs), exactly(inputs), rate)


def assert_near_in_bfloat16(function, inputs):
  """Checks to 2 % of the definition; the gradient of a scale of 45 to 10 %.

  That gradient magnifies 45 times the rounding of the saved outputs.
  """
  found, expected = both(function, inputs), exactly(inputs)
  assert_close(found[:-1], expected[:-1], 2e-2)
  is_large = jnp.max(inputs.scale_H) > 20
  assert_close(found[-1:], expected[-1:], 0.1 if is_large else 2e-2)


def without_races(kernels, inputs, keep, seed):
  """Runs kernels as a TPU would, with its memories, cores and races.

  Grid steps run in any order that the kernels allow, on two cores. Memory that
  nothing wrote is NaN, and reading past its end raises.

  Args:
    kernels: a module with `attend` and `gradients`.
    inputs, keep: arguments of `attend`.
    seed: for the order of grid steps.

  Returns:
    The output and gradients, as `both`.
  """
  interpret = pltpu.InterpretParams(
    detect_races=True,
    out_of_bounds_reads='raise',
    uninitialized_memory='nan',
    num_cores_or_threads=2,
    random_seed=seed,
  )
  pltpu.reset_tpu_interpret_mode_state()
  o, lse = kernels.attend(inputs, keep, interpret=interpret)
  assert not interpret_pallas_call.races.races_found
  do = jnp.sin(jnp.arange(o.size)).reshape(o.shape)
  grads = kernels.gradients(inputs, keep, o, lse, do, interpret=interpret)
  assert not interpret_pallas_call.races.races_found
  return [o, *jax.tree.leaves(grads)]
