"""Forms of windowed attention that a user could pick, all of one signature.

Each takes q_BTF, k_BSF, v_BSF with heads side by side, as projections leave
them, mask_BS, bias_HW and scale_H; keys are those of a window, of unit length,
and the queries' own, which are brought to it: by our kernels as they read them,
and for the other forms before.
"""

import dataclasses
import functools

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

from meliad_rec.kernels import xla
from meliad_rec.kernels.reference import NEVER
from meliad_rec.kernels.reference import normalize_own_keys
from meliad_rec.kernels.reference import scaled_unit
from meliad_rec.kernels.window_attention import window_attention


@dataclasses.dataclass(frozen=True)
class Setting:
  """Sizes, by the letters of cell.py: rows B, tokens T, and so on."""

  rows: int
  tokens: int
  num_heads: int
  head_dim: int
  window: int
  dtype: str

  def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of what a form takes."""
    B, T, W = self.rows, self.tokens, self.window
    F, S = self.num_heads * self.head_dim, self.window + self.tokens
    shape = jax.ShapeDtypeStruct
    return (
      shape((B, T, F), self.dtype),
      shape((B, S, F), self.dtype),
      shape((B, S, F), self.dtype),
      shape((B, S), jnp.bool),
      shape((self.num_heads, W), jnp.float32),
      shape((self.num_heads,), jnp.float32),
    )


SETTINGS = {
  'paper': Setting(1, 4096, 8, 128, 512, 'bfloat16'),
  'small': Setting(8, 1024, 8, 64, 128, 'float32'),
}


def whole_blocks(q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, *, scale_H):
  """W queries by 2 W keys at a time, with a bias for each pair of the two."""
  (B, T, H, K), W = q_BTHK.shape, bias_HW.shape[1]
  n = T // W
  blocks = lambda a: a.reshape(B, -1, W, *a.shape[2:])

  def pairs(a):
    a = blocks(a)
    return jnp.concatenate([a[:, :-1], a[:, 1:]], 2)

  back_WX = jnp.arange(W)[:, None] + W - 1 - jnp.arange(2 * W)
  near_WX = (back_WX >= 0) & (back_WX < W)
  one_hot = jax.nn.one_hot(jnp.clip(back_WX, 0, W - 1), W)
  bias_HWX = jnp.einsum('hw,qxw->hqx', bias_HW, one_hot)
  logits = jnp.einsum(
    'bnqhk,bnxhk->bnhqx',
    blocks(scaled_unit(q_BTHK, scale_H)),
    pairs(k_BSHK),
    preferred_element_type=jnp.float32,
  )
  seen = near_WX & pairs(mask_BS)[:, :, None, None]
  p = jax.nn.softmax(jnp.where(seen, logits + bias_HWX, NEVER), -1)
  p = p.astype(v_BSHK.dtype)
  y = jnp.einsum('bnhqx,bnxhk->bnqhk', p, pairs(v_BSHK))
  return y.reshape(B, n * W, H, K)


def of_jax(q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, *, scale_H):
  """jax.nn.dot_product_attention with a local window; without the bias."""
  W = bias_HW.shape[1]
  # It takes as many queries as keys.
  q = jnp.pad(scaled_unit(q_BTHK, scale_H), ((0, 0), (W, 0), (0, 0), (0, 0)))
  y = jax.nn.dot_product_attention(
    q,
    k_BSHK,
    v_BSHK,
    mask=mask_BS[:, None, None],
    scale=1.0,
    local_window_size=(W - 1, 0),
  )
  return y[:, W:]


def splash(q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, *, scale_H):
  """The kernels for TPU that come with jax; without the bias and the mask."""
  del mask_BS
  (T, H), S, W = q_BTHK.shape[1:3], k_BSHK.shape[1], bias_HW.shape[1]
  near = splash_attention.LocalMask((T, S), (W - 1, 0), S - T)
  kernel = splash_attention.make_splash_mha_single_device(
    splash_attention.MultiHeadMask([near] * H),
    # Those that the estimate is lowest with.
    block_sizes=splash_attention.BlockSizes(*[min(W, 512)] * 8),
  )
  heads_first = (
    a.swapaxes(1, 2) for a in (scaled_unit(q_BTHK, scale_H), k_BSHK, v_BSHK)
  )
  return jax.vmap(kernel)(*heads_first).swapaxes(1, 2)


def ours(q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, *, scale_H):
  return window_attention(
    q_BTHK,
    k_BSHK,
    v_BSHK,
    mask_BS,
    bias_HW,
    scale_H=scale_H,
    normalize_own=True,
  )


BASELINE = 'blocked'
FORMS = {
  'ours': ours,
  'blocked': xla.window_attention,
  'whole blocks': whole_blocks,
  'jax, no bias': of_jax,
}
# Those that run on a TPU alone.
TPU_FORMS = FORMS | {'splash, no bias': splash}


def programs(form: str, setting: Setting):
  """Forward, and forward and backward: functions of what shapes() says."""

  def forward(q_BTF, k_BSF, v_BSF, mask_BS, bias_HW, scale_H):
    heads = lambda a: a.reshape(*a.shape[:2], setting.num_heads, -1)
    q_BTHK, k_BSHK, v_BSHK = map(heads, (q_BTF, k_BSF, v_BSF))
    if form != 'ours':
      k_BSHK = normalize_own_keys(k_BSHK, q_BTHK.shape[1])
    y_BTHK = TPU_FORMS[form](
      q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, scale_H=scale_H
    )
    return y_BTHK.reshape(q_BTF.shape)

  def both(q, k, v, mask, bias, scale):
    attend = functools.partial(_of_mask, forward, mask)
    y, pull = jax.vjp(attend, q, k, v, bias, scale)
    return y, pull(y)

  return {'forward': forward, 'forward+backward': both}


def _of_mask(forward, mask, q, k, v, bias, scale):
  return forward(q, k, v, mask, bias, scale)
