"""Examples of windowed attention, and forms of it compared."""

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.kernels import reference as ref


def example(T, P, W, H=2, num_kv_heads=2, K=64, dtype='float32', scale=3.0):
  """Operands, of which all have gradients, and the mask."""
  rng = np.random.default_rng(T + W)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  B, S = 2, P + T
  mask_BS = rng.random((B, S)) < 0.8
  mask_BS[1, : P + 3] = False  # The first queries of row 1 see no key.
  bias_HW = jnp.asarray(rng.normal(size=(H, W)), jnp.float32)
  bias_HW = bias_HW.at[0, W // 2 :].set(ref.NEVER)  # As a span does.
  scale_H = jnp.asarray(rng.uniform(1, scale, H), jnp.float32)
  q, k, v = (
    draw(B, T, H, K),
    draw(B, S, num_kv_heads, K),
    draw(B, S, num_kv_heads, K),
  )
  return (q, ref.unit(k), v, bias_HW, scale_H), jnp.asarray(mask_BS)


def with_raw_own(operands, T):
  """Operands whose last T keys are of any length."""
  q, k, *rest = operands
  lengths = jnp.linspace(0.5, 3, T, dtype=k.dtype)[:, None, None]
  own = k[:, k.shape[1] - T :] * lengths
  return q, jnp.concatenate([k[:, : k.shape[1] - T], own], 1), *rest


def both(function, operands, mask_BS, **options):
  """The output, and the gradients of all operands."""

  def loss(operands):
    q, k, v, bias, scale = operands
    y = function(q, k, v, mask_BS, bias, scale_H=scale, **options)
    weights = jnp.sin(jnp.arange(y.size)).reshape(y.shape)
    return jnp.sum(weights * y.astype(ref.wide(y))), y

  (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)
  return [y, *jax.tree.leaves(grads)]


def exactly(operands, mask_BS, **options):
  """The definition in float64, whatever the operands are: as both."""
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), operands)
    return both(ref.window_attention, wide, mask_BS, **options)


def assert_close(found, expected, rate):
  for a, b in zip(found, expected, strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.isfinite(a).all()
    np.testing.assert_allclose(a, b, atol=rate * np.abs(b).max())


def assert_near_in_bfloat16(function, sizes, normalize_own: bool):
  """To 2 % of the definition; the gradient of a scale of 90 to 10 %.

  The latter takes what bfloat16 loses of the outputs that are saved 90 times.
  """
  operands, mask_BS = example(**sizes, dtype='bfloat16')
  if normalize_own:
    operands = with_raw_own(operands, sizes['T'])
  found = both(function, operands, mask_BS, normalize_own=normalize_own)
  expected = exactly(operands, mask_BS, normalize_own=normalize_own)
  assert_close(found[:-1], expected[:-1], 2e-2)
  rate = 0.1 if sizes.get('scale', 0) > 50 else 2e-2
  assert_close(found[-1:], expected[-1:], rate)
