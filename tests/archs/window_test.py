"""Window layers: what a token sees, across blocks and at a document's start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.window import VanillaLayer
from meliad_rec.archs.window import WindowLayer
from meliad_rec.models.cell import run
from tests import cells
from tests.architectures import config
from tests.architectures import T
from tests.architectures import W

now_T1, seen_T = np.arange(T)[:, None], np.arange(T)
BACK_TT = now_T1 - seen_T
# Each sees its own inputs by the residual connection too.
SEES = {
  'the window before it': (WindowLayer(config()), BACK_TT <= W),
  'one less and itself': (WindowLayer(config(include_self=True)), BACK_TT < W),
  'its own block': (VanillaLayer(config()), now_T1 // W == seen_T // W),
}


@pytest.mark.parametrize('what', SEES)
def test_what_a_token_sees(what):
  cell, expected_TT = SEES[what]
  block = cells.example(lengths=[T])
  params = {'params': cells.parameters(cell, block)}

  @jax.jit
  @jax.vmap
  def change(one_T):
    apply = lambda b: cell.apply(params, b, method=cells.forward)[1][0]
    other = block.replace(x=block.x + one_T[:, None])
    return abs(apply(other) - apply(block)).max(-1)

  changed_TT = change(np.eye(T, dtype=np.float32)).T > 1e-5
  np.testing.assert_array_equal(changed_TT, expected_TT & (BACK_TT >= 0))


def test_kept_inputs_give_parameters_the_gradients_of_the_whole_text():
  """The loss covers only the second half of the text."""
  block, half = cells.example(lengths=[T]), T // 2
  keeps, plain = (
    WindowLayer(config(), keeps_inputs=on) for on in (True, False)
  )
  params = cells.parameters(plain, block)

  def in_halves(params, cell):
    apply = functools.partial(cell.apply, {'params': params}, method=run)
    start = cell.apply({'params': params}, 1, method='initial_state')
    state, _ = apply(start, cells.part(block, 0, half))
    state = jax.lax.stop_gradient(state)
    return apply(state, cells.part(block, half, T))[1]

  def whole(params, cell):
    _, y_BTD = cell.apply({'params': params}, block, method=cells.forward)
    return y_BTD[:, half:]

  def outcome(read, cell):
    loss = lambda params: jnp.sum(jnp.sin(read(params, cell)))
    return jax.jit(jax.value_and_grad(loss))(params)

  expected = outcome(whole, plain)
  cells.assert_close(outcome(in_halves, keeps), expected)
  loss, grads = outcome(in_halves, plain)
  cells.assert_close(loss, expected[0])
  difference = jax.tree.map(
    lambda a, b: np.abs(a - b).max() > 1e-3, grads, expected[1]
  )
  of = difference['layer']['attention']
  assert of['key']['kernel'] and of['value']['kernel']
  assert not difference['layer']['mlp']['hidden']['kernel']


def test_nothing_precedes_a_block_of_its_own_even_in_compat_meliad():
  """There, zeros before a document are seen: as many as fit the window."""
  short, long = (
    VanillaLayer(config(compat_meliad=True, window=window))
    for window in (W, 2 * W)
  )
  block = cells.example(2 * W)
  params = cells.parameters(long, block)
  _, expected = cells.apply(long, params, block)
  _, y_BTD = cells.apply(short, params, cells.part(block, 0, W))
  cells.assert_close(y_BTD, expected[:, :W])
