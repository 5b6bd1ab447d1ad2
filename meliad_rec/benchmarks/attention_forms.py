"""Implementations (forms) of sliding-window attention to compare.

Each form is measured as a program of queries q_BTF, keys k_BSF, values v_BSF,
mask_BS, bias_HW and scale_H (see AttentionInputs). In this file, F is H K: the
heads are merged into one axis, as projections return them. S is W + T: the W
keys of the previous window, followed by the keys of the T queries' own tokens.
The former are already normalized; the latter are not. This package's kernels
normalize keys as they read them. In other forms, an earlier pass does this.
"""

import dataclasses
import functools

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

from meliad_rec.kernels.dispatch import window_attention
from meliad_rec.kernels.reference import AttentionInputs
from meliad_rec.kernels.reference import MASKED
from meliad_rec.kernels.reference import normalize_and_scale
from meliad_rec.kernels.reference import normalize_own_keys


@dataclasses.dataclass(frozen=True)
class AttentionSizes:
  """Sizes of the arrays.

  Attributes:
    rows: batch size.
    tokens: number of queries in a row.
    num_heads: number of heads.
    head_dim: width of each head.
    window: number of keys that a query sees.
    dtype: name of the dtype of queries, keys and values.
  """

  rows: int
  tokens: int
  num_heads: int
  head_dim: int
  window: int
  dtype: str

  def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shape and dtype of each argument of a form's program.

    Their order is q_BTF, k_BSF, v_BSF, mask_BS, bias_HW, scale_H.
    """
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
  'paper': AttentionSizes(1, 4096, 8, 128, 512, 'bfloat16'),
  'small': AttentionSizes(8, 1024, 8, 64, 128, 'float32'),
}


WAYS = 'forward', 'forward+backward'


def whole_blocks(inputs: AttentionInputs):
  """Returns y_BTHK, computed in blocks of W queries by X = 2 W keys.

  The bias is expanded to a number for each pair of query and key of a block.
  """
  (B, T, H, K), W = inputs.q_BTHK.shape, inputs.window
  n = T // W
  blocks = lambda a: a.reshape(B, -1, W, *a.shape[2:])

  def pairs(a):
    a = blocks(a)
    return jnp.concatenate([a[:, :-1], a[:, 1:]], 2)

  back_WX = jnp.arange(W)[:, None] + W - 1 - jnp.arange(2 * W)
  near_WX = (back_WX >= 0) & (back_WX < W)
  one_hot = jax.nn.one_hot(jnp.clip(back_WX, 0, W - 1), W)
  bias_HWX = jnp.einsum('hw,qxw->hqx', inputs.bias_HW, one_hot)
  logits = jnp.einsum(
    'bnqhk,bnxhk->bnhqx',
    blocks(normalize_and_scale(inputs.q_BTHK, inputs.scale_H)),
    pairs(inputs.k_BSHK),
    preferred_element_type=jnp.float32,
  )
  seen = near_WX & pairs(inputs.mask_BS)[:, :, None, None]
  p = jax.nn.softmax(jnp.where(seen, logits + bias_HWX, MASKED), -1)
  p = p.astype(inputs.v_BSHK.dtype)
  y = jnp.einsum('bnhqx,bnxhk->bnqhk', p, pairs(inputs.v_BSHK))
  return y.reshape(B, n * W, H, K)


def of_jax(inputs: AttentionInputs):
  """Returns y_BTHK from jax.nn.dot_product_attention, without bias."""
  W = inputs.window
  q = normalize_and_scale(inputs.q_BTHK, inputs.scale_H)
  # With a local window, it needs as many queries as keys.
  q = jnp.pad(q, ((0, 0), (W, 0), (0, 0), (0, 0)))
  y = jax.nn.dot_product_attention(
    q,
    inputs.k_BSHK,
    inputs.v_BSHK,
    mask=inputs.mask_BS[:, None, None],
    scale=1.0,
    local_window_size=(W - 1, 0),
  )
  return y[:, W:]


def splash(inputs: AttentionInputs):
  """Returns y_BTHK from splash attention, JAX's TPU kernels.

  It has no bias and no padding mask.
  """
  (T, H), W = inputs.q_BTHK.shape[1:3], inputs.window
  S = inputs.k_BSHK.shape[1]
  near = splash_attention.LocalMask((T, S), (W - 1, 0), S - T)
  kernel = splash_attention.make_splash_mha_single_device(
    splash_attention.MultiHeadMask([near] * H),
    # Block sizes with the lowest estimate.
    block_sizes=splash_attention.BlockSizes(*[min(W, 512)] * 8),
  )
  q = normalize_and_scale(inputs.q_BTHK, inputs.scale_H)
  heads_first = (a.swapaxes(1, 2) for a in (q, inputs.k_BSHK, inputs.v_BSHK))
  return jax.vmap(kernel)(*heads_first).swapaxes(1, 2)


def blocked(inputs: AttentionInputs):
  """Returns y_BTHK from this package's attention in XLA, without kernels."""
  return window_attention(inputs, implementation='xla')


BASELINE = 'blocked'
FORMS = {
  'ours': window_attention,
  'blocked': blocked,
  'whole blocks': whole_blocks,
  'jax, no bias': of_jax,
}
# These include a form that runs only on a TPU.
TPU_FORMS = FORMS | {'splash, no bias': splash}


def forms_here() -> dict:
  """Returns {name: function of AttentionInputs}: forms for this machine."""
  return TPU_FORMS if jax.default_backend() == 'tpu' else FORMS


def programs(form: str, setting: AttentionSizes):
  """Returns {'forward': program, 'forward+backward': program} of a form.

  Both programs take the arrays of AttentionSizes.shapes. 'forward' returns the
  outputs y_BTF. 'forward+backward' also returns the gradients of all arrays
  except the mask, as a tuple; y_BTF serves as the gradient of the outputs.

  Args:
    form: name of a form.
    setting: sizes of the arrays.
  """

  def forward(q_BTF, k_BSF, v_BSF, mask_BS, bias_HW, scale_H):
    heads = lambda a: a.reshape(*a.shape[:2], setting.num_heads, -1)
    q_BTHK, k_BSHK, v_BSHK = map(heads, (q_BTF, k_BSF, v_BSF))
    is_ours = form.startswith('our')
    if not is_ours:
      k_BSHK = normalize_own_keys(k_BSHK, q_BTHK.shape[1])
    inputs = AttentionInputs(
      q_BTHK,
      k_BSHK,
      v_BSHK,
      mask_BS,
      bias_HW,
      scale_H,
      normalize_own=is_ours,
    )
    return TPU_FORMS[form](inputs).reshape(q_BTF.shape)

  def both(q, k, v, mask, bias, scale):
    attend = functools.partial(_of_mask, forward, mask)
    y, pull = jax.vjp(attend, q, k, v, bias, scale)
    return y, pull(y)

  return {'forward': forward, 'forward+backward': both}


def _of_mask(forward, mask, q, k, v, bias, scale):
  return forward(q, k, v, mask, bias, scale)
