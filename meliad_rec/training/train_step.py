"""One training step: the state and a batch in, the new state and Sums out.

The step minimizes the mean loss over the scored tokens of the batch, plus the
losses that modules `sow` into 'losses'. The gradient flows through the scan
over blocks and stops at the carry, which is the state from the previous
segment. This is truncated back-propagation through time over one segment. The
Sums also hold the metrics that modules sow.
"""

from collections.abc import Callable
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import optax

from meliad_rec.data.batch import Batch
from meliad_rec.distributed import weight_update
from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.layers.positions import clip_spans
from meliad_rec.metrics import losses
from meliad_rec.metrics import metrics
from meliad_rec.metrics.metrics import Sums
from meliad_rec.models.cell import State
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import count
from meliad_rec.training.optimizer import ema_update
from meliad_rec.training.optimizer import Optimizer


class TrainState(struct.PyTreeNode):
  """Everything a run needs to continue, except its position in the data."""

  step: jax.Array  # int32: steps taken.
  params: Any
  opt_state: Any
  carry: State  # The model's state after the last segment; leaves [B, ...].
  ema: Any  # Moving average of params; None: not kept.
  rng: jax.Array  # uint32: key data for dropout.

  def updated(
    self,
    grads: Any,
    optimizer: Optimizer,
    tokens: jax.Array,
    carry: State,
    ema_decay: float | None,
  ) -> 'TrainState':
    """Returns the state after a step.

    With `every` of optimizer.chain, replicas exchange parameters in each of
    these steps, although most of them change none.

    Args:
      grads: gradients of the parameters, from weight_update.scatter_gradients.
      optimizer: from optimizer.chain.
      tokens: number of tokens that the gradients are a mean over.
      carry: the model's state after the segment.
      ema_decay: decay of the moving average of the parameters; None: none.
    """
    params = weight_update.own_part(self.params)
    updates, opt_state = optimizer.update(grads, self.opt_state, params, tokens)
    params = clip_spans(optax.apply_updates(params, updates))
    params = weight_update.gather_params(params)
    ema = self.ema
    if ema_decay is not None:
      ema = ema_update(ema, params, ema_decay, self.step)
    return self.replace(
      step=self.step + 1,
      params=params,
      opt_state=opt_state,
      carry=carry,
      ema=ema,
    )


def create_state(
  model: Model,
  optimizer: Optimizer,
  seed: int,
  rows: int,
  segment: int,
  ema: bool,
) -> TrainState:
  """Creates the state of a new run; may be called in jax.eval_shape or jit.

  Args:
    model: the model.
    optimizer: from optimizer.chain.
    seed: seed of parameters and dropout.
    rows: rows of a training batch, over all hosts.
    segment: tokens of each row in a step.
    ema: whether to keep a moving average of the parameters.
  """
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
  """Returns the state after one step, and the Sums of the step.

  Args:
    model: applied to the state's parameters.
    optimizer: from optimizer.chain.
    objective: (logits_BTV, targets_BT) -> nats_BT to minimize.
    ema_decay: decay of the moving average of the parameters; None: no average.
    halting_warmup: steps over which the weight of the ponder loss rises
      linearly to its full value; 0 disables the warm-up. Other losses always
      have their full weight.
    state: state after the previous step.
    batch: one segment of each row.

  Raises:
    ValueError: halting_warmup is set, but the model does not halt.
  """
  rng = jax.random.wrap_key_data(state.rng)
  rng = jax.random.fold_in(rng, state.step)
  halting_weight = 1.0
  if halting_warmup:
    halting_weight = jnp.minimum(1, (state.step + 1) / halting_warmup)

  def loss(params):
    (carry, logits_BTV), sown = model.apply(
      {'params': all_gather_params(params, stacked=False)},
      jax.lax.stop_gradient(state.carry),
      *batch.inputs,
      rngs={'dropout': rng},
      mutable=['losses', metrics.COLLECTION],
    )
    with jax.named_scope('loss'):
      nats_BT = objective(logits_BTV, batch.targets_BT)
      total = losses.masked_mean(nats_BT, batch.scored_BT)
    sown_losses = sown.get('losses', {})
    if halting_warmup and losses.HALTING not in dict(by_name(sown_losses)):
      raise ValueError(
        f'HALT_WARMUP is {halting_warmup}, but this model does not halt. '
        'Remove HALT_WARMUP.'
      )
    total += auxiliary(sown_losses, halting_weight)
    return total, (carry, count(logits_BTV, batch, sown))

  grads, (carry, sums) = jax.grad(loss, has_aux=True)(state.params)
  with jax.named_scope('optimizer'):
    grads = weight_update.scatter_gradients(grads)
    sums = sums.replace(gradient_norm=optax.global_norm(grads))
    state = state.updated(grads, optimizer, sums.scored, carry, ema_decay)
  return state, sums


def auxiliary(sown, halting_weight=1.0) -> jax.Array:
  """Returns the sum of the losses that modules sowed, a scalar.

  A losses.RowMeans counts with its mean: a row's terms from all chunks are
  averaged first, and then the rows are. If the means of the chunks were added
  instead, tokens in chunks with padding would have more weight than others.

  Args:
    sown: the variable collection 'losses'.
    halting_weight: factor for losses named losses.HALTING.
  """
  total = jnp.zeros(())
  for name, loss in by_name(sown):
    is_mean = isinstance(loss, losses.RowMeans)
    loss = loss.mean() if is_mean else jnp.sum(loss, dtype=jnp.float32)
    total += halting_weight * loss if name == losses.HALTING else loss
  return total


def by_name(sown) -> list[tuple[str, Any]]:
  """Returns (name, loss) of each loss in the variable collection 'losses'.

  A loss is an array or a losses.RowMeans. A name may occur several times.
  """
  is_mean = lambda node: isinstance(node, losses.RowMeans)
  named = []
  for path, loss in jax.tree.leaves_with_path(sown, is_leaf=is_mean):
    keys = [at.key for at in path if isinstance(at, jax.tree_util.DictKey)]
    named.append((keys[-1], loss))
  return named
