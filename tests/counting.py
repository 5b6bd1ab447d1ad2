"""A cell that only counts, by which figures are followed to where they show."""

import jax.numpy as jnp

from meliad_rec.metrics import figures
from meliad_rec.models.cell import Cell


class Counting(Cell):
  """State: tokens read. Hands tokens on; says how deep each place of x lies."""

  def __call__(self, state_B, block):
    mask_BT = block.mask.astype(jnp.float32)
    depth_BT = mask_BT * (1 + jnp.arange(mask_BT.shape[1]))
    mean = figures.Ratio(depth_BT, mask_BT)
    figures.sow(self, 'halting_depth', mean)
    figures.sow(self, 'halting_depth_max', figures.Peak(depth_BT))
    return state_B + mask_BT.sum(1), block.x

  def initial_state(self, batch):
    return jnp.zeros(batch)
