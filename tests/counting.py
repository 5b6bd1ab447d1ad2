"""A cell that only sows metrics, to follow them to the report."""

import jax.numpy as jnp

from meliad_rec.metrics import metrics
from meliad_rec.models.cell import Cell


class Counting(Cell):
  """State: tokens read. Returns its input; sows each place as a depth."""

  def __call__(self, state_B, block):
    mask_BT = block.mask.astype(jnp.float32)
    depth_BT = mask_BT * (1 + jnp.arange(mask_BT.shape[1]))
    mean = metrics.MeanMetric(depth_BT, mask_BT)
    metrics.sow(self, 'halting_depth', mean)
    metrics.sow(self, 'halting_depth_max', metrics.MaxMetric(depth_BT))
    return state_B + mask_BT.sum(1), block.x

  def initial_state(self, batch):
    return jnp.zeros(batch)
