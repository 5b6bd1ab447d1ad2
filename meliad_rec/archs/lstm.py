"""LSTM layer (Hochreiter and Schmidhuber 1997), with the forget gates of Gers
et al. 2000.

Letters of this file: F = 4 D, for the input gate, the forget gate, the
candidate values and the output gate, in this order.
"""

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.layers import gates
from meliad_rec.layers.dropout import check_rate
from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.layers.layer import cross_attention
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.metrics import pictures
from meliad_rec.metrics import state_use
from meliad_rec.models.cell import Cell


class LSTM(Cell):
  """State: the cell vector and the hidden vector, each [B, D] float32.

  There is no residual connection.

  Attributes:
    d_model: width of inputs and outputs.
    dropout: rate of dropout on inputs.
    dtype: dtype of outputs and of the operands of matrix products; sums, gates
      and the state are float32.
    cross: sizes of attention to the output of an encoder, which is added to the
      hidden vectors; the recurrence does not read it. None means that there is
      no encoder.
  """

  d_model: int
  dropout: float = 0.0
  dtype: str = 'float32'
  cross: LayerConfig | None = None

  is_recurrent = True

  def setup(self):
    D = self.d_model
    check_rate('dropout', self.dropout, 'DROPOUT')
    self.drop = TiledDropout(self.dropout)
    lecun = per_gate(nn.initializers.lecun_normal())
    orthogonal = per_gate(nn.initializers.orthogonal())
    self.input_DF = self.param('input_kernel', lecun, D)
    self.recurrent_DF = self.param('recurrence', orthogonal, D)
    self.bias_F = self.param('gate_bias', initial_bias, D)
    if self.cross:
      self.cross_attention = cross_attention(self.cross, gates.Residual)

  def initial_state(self, batch):
    zeros_BD = jnp.zeros((batch, self.d_model))
    return zeros_BD, zeros_BD

  def source_kv(self, encoded_BSD, mask_BS):
    if not self.cross:
      raise ValueError(
        'This LSTM does not attend to the output of an encoder. Choose '
        'options/encoder/transformer_lstm in place of another encoder.'
      )
    return self.cross_attention.kv(encoded_BSD, mask_BS)

  def parts(self, state):
    return dict(zip(('cell', 'hidden'), state, strict=True))

  def with_parts(self, state, parts):
    return parts['cell'], parts['hidden']

  def __call__(self, state, block):
    x_BTD = self.drop(block.x).astype(self.dtype)
    kernel_DF = self.input_DF.astype(self.dtype)
    z_BTF = product('btd,df->btf', x_BTD, kernel_DF) + self.bias_F
    kernel_DF = self.recurrent_DF.astype(self.dtype)
    state, h_BTD, z_BTF = recur(kernel_DF, state, z_BTF, block.mask)
    gate = lambda i: jax.nn.sigmoid(jnp.split(z_BTF, 4, -1)[i])
    state_use.sow_gate(self, gate(1), block.mask)
    pictures.sow(self, 'token_write', lambda: gate(0))
    pictures.sow(self, 'token_keep', lambda: gate(1))
    pictures.sow(self, 'token_output', lambda: gate(3))
    y_BTD = h_BTD.astype(self.dtype)
    if self.cross:
      y_BTD = self.cross_attention.read_source(y_BTD, block.source_kv)
    return state, y_BTD


@jax.custom_vjp
def recur(kernel_DF, state, z_BTF, mask_BT):
  """Runs the LSTM over a segment; padding leaves the state unchanged.

  Args:
    kernel_DF: matrix from the hidden vector to the three gates and the
      candidate values; F = 4 D.
    state: cell and hidden vectors before the segment, c_BD and h_BD.
    z_BTF: what the tokens and the biases contribute to the gates and the
      candidate values, before their nonlinearities.
    mask_BT: bool, False at padding.

  Returns:
    The state after the segment; h_BTD float32, the hidden vector after each
    token; and z_BTF plus what the hidden vectors contribute, for metrics and
    pictures: no gradient flows through it.
  """
  return forward(kernel_DF, state, z_BTF, mask_BT)[0]


def forward(kernel_DF, state, z_BTF, mask_BT):
  """Returns the results of `recur`, and the residuals for `backward`."""
  dtype, mask_TB = kernel_DF.dtype, mask_BT.swapaxes(0, 1)

  def step(state, inputs):
    z_BF, mask_B = inputs
    c_BD, h_BD = state
    z_BF += product('bd,df->bf', h_BD.astype(dtype), kernel_DF)
    new = update(z_BF, c_BD, h_BD, mask_B)
    return new, (new[1], (z_BF, c_BD, h_BD))

  state, (h_TBD, steps) = jax.lax.scan(
    step, state, (z_BTF.swapaxes(0, 1), mask_TB)
  )
  h_BTD, z_BTF = (a.swapaxes(0, 1) for a in (h_TBD, steps[0]))
  return (state, h_BTD, z_BTF), (kernel_DF, steps, mask_TB)


def backward(residuals, gradients):
  """Returns the gradients of the arguments of `recur`; None for the mask.

  The gradient of the kernel is a single matrix product, computed after the
  scan. If JAX differentiated the scan, each step would compute a product of its
  own and add it to the gradient.

  Args:
    residuals: the second result of `forward`.
    gradients: the gradients of the results of `recur`.
  """
  kernel_DF, steps, mask_TB = residuals
  d_state, d_y_BTD, _ = gradients
  dtype = kernel_DF.dtype

  def step(d_state, inputs):
    values, mask_B, d_y_BD = inputs
    d_c_BD, d_h_BD = d_state
    _, pull = jax.vjp(lambda *a: update(*a, mask_B), *values)
    d_z_BF, d_c_BD, d_h_BD = pull((d_c_BD, d_h_BD + d_y_BD))
    d_h_BD += product('bf,df->bd', d_z_BF.astype(dtype), kernel_DF)
    return (d_c_BD, d_h_BD), d_z_BF

  d_state, d_z_TBF = jax.lax.scan(
    step, d_state, (steps, mask_TB, d_y_BTD.swapaxes(0, 1)), reverse=True
  )
  h_TBD = steps[2]
  d_kernel_DF = product(
    'tbd,tbf->df', h_TBD.astype(dtype), d_z_TBF.astype(dtype)
  )
  return d_kernel_DF.astype(dtype), d_state, d_z_TBF.swapaxes(0, 1), None


recur.defvjp(forward, backward)


def update(z_BF, c_BD, h_BD, mask_B):
  """Returns the cell and hidden vectors after one token.

  Args:
    z_BF: gates and candidate values before their nonlinearities; F = 4 D.
    c_BD: cell vectors before the token.
    h_BD: hidden vectors before the token.
    mask_B: bool, False at padding, which leaves both vectors unchanged.
  """
  i, f, new, o = jnp.split(z_BF, 4, -1)
  next_c_BD = jax.nn.sigmoid(f) * c_BD + jax.nn.sigmoid(i) * jnp.tanh(new)
  next_h_BD = jax.nn.sigmoid(o) * jnp.tanh(next_c_BD)
  keep = lambda a, b: jnp.where(mask_B[:, None], a, b)
  return keep(next_c_BD, c_BD), keep(next_h_BD, h_BD)


def product(subscripts, a, b):
  """Returns the einsum of two arrays, accumulated and returned in float32."""
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def per_gate(init: Callable) -> Callable:
  """Returns an initializer (rng, D) -> [D, 4 D].

  It draws four square matrices, side by side, for the input gate, the forget
  gate, the candidate values and the output gate.

  Args:
    init: initializer of each matrix: (rng, shape) -> matrix.
  """

  def draw(rng, D):
    kernels = [init(r, (D, D)) for r in jax.random.split(rng, 4)]
    return jnp.concatenate(kernels, 1)

  return draw


def initial_bias(_, D):
  """Returns the initial biases of the gates and the candidate values, [4 D].

  They are 1 for the forget gate, so that a new model remembers, and 0
  elsewhere. The first argument, a random key, is not used.
  """
  return jnp.zeros((4, D)).at[1].set(1).reshape(-1)
