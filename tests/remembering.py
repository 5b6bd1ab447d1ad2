"""A toy model for memory scans, and the scan that is their definition."""

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.recurrence import memory_scan
from meliad_rec.recurrence.memory_scan import MemoryScanBody

B, T, D, K = 3, 24, 6, 5
PARAMS = {
  'key': (D, K),
  'value': (D, D),
  'query': (D, K),
  'near': (D, D),
  'out': (D, D),
}


def params():
  rngs = jax.random.split(jax.random.key(0), len(PARAMS))
  return {
    name: jax.random.normal(rng, shape) * shape[0] ** -0.5
    for rng, (name, shape) in zip(rngs, PARAMS.items(), strict=True)
  }


def model(C, A, near, span=8, parallel=False) -> MemoryScanBody:
  """Attends A tokens of one memory, and adds the oldest of `near` of another.

  It reads any number of chunks: the second memory is of other length.
  """

  def keys(p, written, inputs):
    a, b = (each * inputs[2][:, None] for each in written)
    return {'k': a @ p['key'], 'v': jnp.tanh(a) @ p['value']}, b @ p['near']

  def read(p, kv, x, inputs, first):
    pair, b = kv
    mask_BS, scale_T, _ = inputs
    n = x.shape[1] // C
    y = []
    for i in range(n):
      now = slice(i * C, (i + 1) * C)
      window = lambda a, length: a[:, i * C : i * C + length]
      mask = jax.lax.dynamic_slice_in_dim(mask_BS, first + i * C, A, 1)
      scale = jax.lax.dynamic_slice_in_dim(scale_T, first + i * C, C)
      q = x[:, now] @ p['query']
      logits = jnp.einsum('btk,bsk->bts', q, window(pair['k'], A))
      prob = jax.nn.softmax(jnp.where(mask[:, None], logits, -1e30), -1)
      h = jnp.einsum('bts,bsd->btd', prob, window(pair['v'], A))
      h = h + window(b, near)[:, :C] * scale[:, None]
      y.append(jnp.tanh(x[:, now] + h @ p['out']))
    y = jnp.concatenate(y, 1)
    return (y, y * 2), y + x

  return MemoryScanBody(keys, read, C, span, parallel)


def given(A, near):
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  mask_BS = jnp.asarray(rng.random((B, A + T)) < 0.8).at[:, 0].set(True)
  inputs = mask_BS, normal(T), normal(B, D)
  return (
    params(),
    (normal(B, A, D), normal(B, near, D)),
    normal(B, T, D),
    inputs,
  )


def plain_scan(model: MemoryScanBody, params, memory, x_BTD, inputs):
  """The definition, by a scan that keeps every window."""
  C = model.chunk

  def step(memory, i):
    kv = jax.tree.map(
      lambda a: memory_scan.pad(a, 0, C), model.keys(params, memory, inputs)
    )
    written, y_BCD = model.read(
      params, kv, memory_scan.slice_tokens(x_BTD, i * C, C), inputs, i * C
    )
    new = jax.tree.map(
      lambda m, w: jnp.concatenate([m, w], 1)[:, C:], memory, written
    )
    return new, y_BCD

  memory, y = jax.lax.scan(step, memory, jnp.arange(x_BTD.shape[1] // C))
  return memory, memory_scan.join(y)
