"""One training step and one evaluation step, compiled over a mesh.

Gradients are of the mean over the segment's scored tokens, and of what modules
`sow` into 'losses'. They flow through the scan over blocks and stop at the
carry: truncated back-propagation through time, one segment long. What modules
sow into 'figures' is counted beside the tokens.
"""

from collections.abc import Callable
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import optax

from meliad_rec.data.batch import Batch
from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.metrics import figures
from meliad_rec.metrics import losses
from meliad_rec.metrics.metrics import Sums
from meliad_rec.models import sharded_model
from meliad_rec.models.cell import State
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.training.optimizer import ema_update
from meliad_rec.training.optimizer import Optimizer


class TrainState(struct.PyTreeNode):
  """All that a run needs to go on, but the position of its data."""

  step: jax.Array  # int32: steps taken.
  params: Any
  opt_state: Any
  carry: State  # The model's state after the last segment; leaves [B, ...].
  ema: Any  # Moving average of params; None: not kept.
  rng: jax.Array  # uint32: key data of dropout.


def create_state(
  model: Model,
  optimizer: Optimizer,
  seed: int,
  rows: int,
  segment: int,
  ema: bool,
) -> TrainState:
  """A new run's state; of shapes alone under jax.eval_shape."""
  rng_params, rng_dropout = jax.random.split(jax.random.key(seed))
  params = initialize(model, rng_params, rows, segment)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    carry=empty_carry(model, params, rows),
    ema=jax.tree.map(jnp.copy, params) if ema else None,
    rng=jax.random.key_data(rng_dropout),
  )


def train_step(
  model: Model,
  optimizer: Optimizer,
  objective: Callable,
  ema_decay: float | None,
  halting_warmup: int,
  state: TrainState,
  batch: Batch,
) -> tuple[TrainState, Sums]:
  """The state after one update, and what the step counted.

  Args:
    model: applied to the state's parameters.
    optimizer: of optimizer.chain.
    objective: (logits_BTV, targets_BT) -> nats_BT to minimise.
    ema_decay: of the moving average of parameters; None: no average.
    halting_warmup: steps over which the loss of halting rises from nothing to
      its whole weight; 0: none. What else modules sow has it from the first.
    state: where the step before ended.
    batch: one segment of each row.

  Raises:
    ValueError: halting_warmup for a model in which nothing halts.
  """
  rng = jax.random.wrap_key_data(state.rng)
  rng = jax.random.fold_in(rng, state.step)
  halting = 1.0
  if halting_warmup:
    halting = jnp.minimum(1, (state.step + 1) / halting_warmup)

  def loss(params):
    (carry, logits_BTV), sown = model.apply(
      {'params': all_gather_params(params, stacked=False)},
      jax.lax.stop_gradient(state.carry),
      batch.tokens_BT,
      batch.start_B,
      batch.mask_BT,
      rngs={'dropout': rng},
      mutable=['losses', figures.COLLECTION],
    )
    nats_BT = objective(logits_BTV, batch.targets_BT)
    total = losses.masked_mean(nats_BT, batch.scored_BT)
    sown_losses = sown.get('losses', {})
    if halting_warmup and losses.HALTING not in dict(named(sown_losses)):
      raise ValueError(
        f'HALT_WARMUP is {halting_warmup}, and nothing halts in this model; '
        'leave it out.'
      )
    total += auxiliary(sown_losses, halting)
    return total, (carry, sharded_model.count(logits_BTV, batch, sown))

  grads, (carry, sums) = jax.grad(loss, has_aux=True)(state.params)
  sums = sums.replace(gradient_norm=optax.global_norm(grads))
  updates, opt_state = optimizer.update(
    grads, state.opt_state, state.params, sums.scored
  )
  params = optax.apply_updates(state.params, updates)
  ema = state.ema
  if ema_decay is not None:
    ema = ema_update(ema, params, ema_decay, state.step)
  state = state.replace(
    step=state.step + 1,
    params=params,
    opt_state=opt_state,
    carry=carry,
    ema=ema,
  )
  return state, sums


def auxiliary(sown, halting=1.0) -> jax.Array:
  """The sum of what modules sowed as losses.

  Of losses.RowMeans the mean over all that a scan counted: a sum of means over
  chunks would weigh a chunk the more, the fewer of its places are real.

  Args:
    sown: the collection 'losses'.
    halting: factor of those that are named losses.HALTING.
  """
  total = jnp.zeros(())
  for name, loss in named(sown):
    is_mean = isinstance(loss, losses.RowMeans)
    loss = loss.mean() if is_mean else jnp.sum(loss, dtype=jnp.float32)
    total += halting * loss if name == losses.HALTING else loss
  return total


def named(sown) -> list[tuple[str, Any]]:
  """What was sowed as losses, each with the name it was sown by."""
  of_rows = lambda node: isinstance(node, losses.RowMeans)
  found = []
  for path, loss in jax.tree.leaves_with_path(sown, is_leaf=of_rows):
    keys = [at.key for at in path if isinstance(at, jax.tree_util.DictKey)]
    found.append((keys[-1], loss))
  return found
