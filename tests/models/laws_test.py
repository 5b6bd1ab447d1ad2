"""check_laws accepts a sound cell, and names the law that another breaks."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

import meliad_rec
from meliad_rec.archs.transformer import Encoder
from meliad_rec.models.cell import Cell
from meliad_rec.models.laws import check_laws
from tests import architectures as tiny

D = 6


class Sum(Cell):
  """State: a decayed sum of the inputs, [B, D]."""

  @nn.compact
  def __call__(self, state_BD, block):
    w_D = self.param('w', nn.initializers.ones, D)

    def step(s_BD, token):
      x_BD, mask_B1 = token
      new_BD = self.update(s_BD, x_BD)
      s_BD = jnp.where(self.real(mask_B1), new_BD, s_BD)
      return s_BD, s_BD

    tokens = block.x.swapaxes(0, 1), block.mask.T[..., None]
    state_BD, s_TBD = jax.lax.scan(step, self.before(state_BD), tokens)
    return self.after(state_BD), self.output(block.x, s_TBD.swapaxes(0, 1), w_D)

  def initial_state(self, batch):
    return jnp.zeros((batch, D))

  def before(self, state_BD):
    return state_BD

  def after(self, state_BD):
    return state_BD

  def update(self, s_BD, x_BD):
    return 0.9 * s_BD + x_BD

  def real(self, mask_B1):
    return mask_B1

  def output(self, x_BTD, s_BTD, w_D):
    return x_BTD + w_D * s_BTD


class Forgets(Sum):
  """Does not carry its state."""

  def after(self, state_BD):
    return jnp.zeros_like(state_BD)


class LooksAhead(Sum):
  """Adds the next token."""

  def output(self, x_BTD, s_BTD, w_D):
    return super().output(x_BTD, s_BTD, w_D) + jnp.roll(x_BTD, -1, 1)


class Mixes(Sum):
  """Averages over rows."""

  def update(self, s_BD, x_BD):
    return 0.9 * s_BD + x_BD.mean(0)


class ReadsPadding(Sum):
  """Adds padding to its state."""

  def real(self, mask_B1):
    return jnp.ones_like(mask_B1)


class Unused(Sum):
  """Has a parameter that nothing depends on."""

  def output(self, x_BTD, s_BTD, w_D):
    return x_BTD + s_BTD


class Cuts(Sum):
  """Lets no gradient pass through the state."""

  def before(self, state_BD):
    return jax.lax.stop_gradient(state_BD)


class Idle(Sum):
  """Never changes its state, nor reads it."""

  def update(self, s_BD, x_BD):
    return 0 * x_BD

  def output(self, x_BTD, s_BTD, w_D):
    return w_D * x_BTD


class Late(Sum):
  """Its output is that of the tokens before."""

  def output(self, x_BTD, s_BTD, w_D):
    return w_D * (s_BTD - x_BTD)


class Infinite(Sum):
  """Its gradient is that of a root at 0."""

  def output(self, x_BTD, s_BTD, w_D):
    return x_BTD + s_BTD + jnp.sqrt(w_D - 1)


class StepsDiffer(Sum):
  """Token by token, its outputs are larger."""

  def decode_step(self, decode_state, block):
    state_BD, y_B1D = self(decode_state, block)
    return state_BD, y_B1D + 1


class Grows(Sum):
  """Keeps all inputs."""

  block_length = 2

  def before(self, state_BD):
    return state_BD[..., -D:]

  def __call__(self, state_BD, block):
    after_BD, y_BTD = super().__call__(state_BD, block)
    return jnp.concatenate([state_BD, after_BD], 1), y_BTD


class ChangesDtype(Sum):
  """Returns its state in another dtype."""

  def after(self, state_BD):
    return state_BD.astype(jnp.bfloat16)

  def before(self, state_BD):
    return state_BD.astype(jnp.float32)


class ChangesStructure(Sum):
  """Returns its state in a tuple."""

  def after(self, state_BD):
    return (state_BD,)


def test_a_sound_cell_passes():
  laws = meliad_rec.check_laws(Sum(), D)
  assert len(laws) == 8
  assert 'A token changes its own output and later ones' in laws[2]


@pytest.mark.parametrize(
  ('cell', 'message'),
  [
    (Grows, r'float32\[3, 12\], not float32\[3, 6\]'),
    (ChangesDtype, r'bfloat16\[3, 6\], not float32'),
    (ChangesStructure, r"\('float32\[3, 6\]',\), not float32"),
    (Forgets, 'Outputs differ if a document is read in parts, by up to'),
    (LooksAhead, 'Outputs differ if a document is read in parts, by up to'),
    (Mixes, 'Tokens of one row change outputs of another'),
    (ReadsPadding, 'Tokens at padding change the state'),
    (Unused, 'The gradient of cell/w is 0'),
    (Infinite, 'The gradient of cell/w is not finite'),
    (Cuts, 'Gradients depend on where a document is cut'),
    (Idle, 'The state changes no output'),
    (Late, 'Token 0 does not change its own output'),
    (StepsDiffer, 'Step 0 gives another output'),
  ],
)
def test_a_broken_law_is_named(cell, message):
  with pytest.raises(ValueError, match=message):
    check_laws(cell(), D)


class AheadInBlock(LooksAhead):
  """Adds the next token of its block of eight."""

  block_length = 8


def test_causality_within_a_block():
  with pytest.raises(ValueError, match='Token 3 changes outputs before it'):
    check_laws(AheadInBlock(), D)


def test_what_cannot_be_checked_is_refused():
  with pytest.raises(ValueError, match='must be an instance of a subclass'):
    check_laws(Sum, D)
  for window in None, 8:
    cell = Encoder(tiny.transformer(causal=False), window)
    with pytest.raises(ValueError, match='Encoder .* attends to later tokens'):
      check_laws(cell, tiny.D)
