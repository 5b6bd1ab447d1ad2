"""A model on a mesh, and the compiled steps that evaluate it."""

from collections.abc import Callable
import dataclasses
import functools

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from meliad_rec.data.batch import Batch
from meliad_rec.distributed import partition
from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.distributed.hosts import mesh_jit
from meliad_rec.metrics import losses
from meliad_rec.metrics import metrics
from meliad_rec.metrics import state_use
from meliad_rec.metrics.metrics import MeanMetric
from meliad_rec.metrics.metrics import Metric
from meliad_rec.metrics.metrics import Sums
from meliad_rec.models.cell import State
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model


@dataclasses.dataclass(frozen=True)
class ShardedModel:
  """A model and the mesh of devices that it runs on.

  A carry is the state of the model between two steps.

  Attributes:
    model: the model.
    mesh: from partition.make_mesh.
    segment: number of tokens of each row in one step.
  """

  model: Model
  mesh: Mesh
  segment: int

  @functools.cached_property
  def param_shapes(self):
    """The jax.ShapeDtypeStruct of each parameter, with its sharding."""
    shapes = jax.eval_shape(
      lambda rng: initialize(self.model, rng, 1, self.segment),
      jax.random.key(0),
    )

    def place(path, leaf):
      name = partition.path_string(path)
      spec = partition.param_spec(self.mesh, name, leaf.shape)
      return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec)
      )

    return jax.tree_util.tree_map_with_path(place, shapes)

  def empty_carry(self, params, rows: int):
    """Returns the carry before the first segment, sharded by rows.

    Args:
      params: the parameters; only their shapes matter.
      rows: rows of the whole batch, over all hosts.
    """
    sharding = partition.batch_sharding(self.mesh, rows)
    shapes = jax.eval_shape(lambda p: empty_carry(self.model, p, rows), params)
    return jax.tree.map(
      lambda a: jnp.zeros(a.shape, a.dtype, device=sharding), shapes
    )

  def put(self, batch: Batch, rows: int) -> Batch:
    """Returns the whole batch as arrays on the devices.

    Args:
      batch: this host's rows of the batch.
      rows: rows of the whole batch, over all hosts.
    """
    sharding = partition.batch_sharding(self.mesh, rows)
    return jax.tree.map(
      lambda a: jax.make_array_from_process_local_data(
        sharding, a, (rows, *a.shape[1:])
      ),
      batch,
    )

  @functools.cached_property
  def eval_step(self) -> Callable:
    """Compiled function (params, carry, batch) -> (carry, Sums, TokenScores).

    The argument `carry` is donated: its memory is reused, so it cannot be read
    afterward.
    """
    return self._compiled(eval_step)

  @functools.cached_property
  def ablation_step(self) -> Callable:
    """Compiled function like `eval_step`, but with more metrics.

    Its Sums also have the metrics of `ablations`, which show what the recurrent
    state is worth. The function takes three times as long.
    """
    return self._compiled(ablation_step)

  def _compiled(self, step: Callable) -> Callable:
    rows = NamedSharding(self.mesh, PartitionSpec(partition.BATCH_AXES))
    replicated = NamedSharding(self.mesh, PartitionSpec())
    return mesh_jit(
      self.mesh,
      functools.partial(step, self.model),
      donate_argnums=1,
      # Explicit, because every host must be able to read the sums.
      out_shardings=(rows, replicated, rows),
    )

  def forward(self, params, carry, batch: Batch):
    """Returns the next carry and logits_BTV, with dropout as in training.

    The random key of dropout is the same in each call.
    """
    return self.model.apply(
      {'params': params},
      carry,
      *batch.inputs,
      rngs={'dropout': jax.random.key(0)},
    )


class TokenScores(struct.PyTreeNode):
  """Losses and hits of the predictions of each token of a segment."""

  nats_BT: jax.Array  # float32 loss in nats.
  correct_BT: jax.Array  # bool, whether the most likely token is the target.


def eval_step(
  model: Model, params, carry: State, batch: Batch
) -> tuple[State, Sums, TokenScores]:
  """Returns the next carry, and the metrics of a segment and of its tokens.

  Args:
    model: the model.
    params: its parameters.
    carry: state of the model before the segment.
    batch: the segment.

  Returns:
    The next carry, the Sums of the metrics, and the scores of each token.
  """
  (carry, logits_BTV), sown = model.apply(
    {'params': all_gather_params(params, stacked=False)},
    carry,
    *batch.inputs,
    mutable=[metrics.COLLECTION],
  )
  scores = TokenScores(
    losses.cross_entropy(logits_BTV, batch.targets_BT),
    losses.correct(logits_BTV, batch.targets_BT),
  )
  return carry, count(logits_BTV, batch, sown), scores


def ablation_step(
  model: Model, params, carry: State, batch: Batch
) -> tuple[State, Sums, TokenScores]:
  """Returns the results of `eval_step`, with more metrics in the Sums.

  The additional metrics are the result of `ablations`.
  """
  after, sums, scores = eval_step(model, params, carry, batch)
  more = ablations(model, params, carry, batch, scores.nats_BT)
  return after, sums.replace(sown={**sums.sown, **more}), scores


def ablations(
  model: Model, params, carry: State, batch: Batch, nats_BT
) -> dict[str, Metric]:
  """Measures by how much the loss rises if a model loses its recurrent state.

  The segment is read again from two other states. In one, the recurrent part of
  the carry is cleared; in the other, each row gets the recurrent part of the
  previous row. Rows that begin a document do not count, since they have no
  earlier state.

  Args:
    model: a recurrent model.
    params: its parameters.
    carry: state of the model before the segment.
    batch: the segment.
    nats_BT: loss of each token in nats, read from `carry`.

  Returns:
    {name: metric}. 'cleared_cost' and 'shuffled_cost' are increases of the loss
    over `nats_BT`, means in nats per token. If the model has memory slots,
    there is also 'row_difference' (see state_use.row_difference). With a single
    row, 'shuffled_cost' and 'row_difference' have count 0.
  """
  variables = {'params': all_gather_params(params, stacked=False)}
  rolled = jax.tree.map(lambda a: jnp.roll(a, 1, 0), carry)
  goes_on_B = ~batch.start_B & jnp.any(batch.mask_BT, 1)
  pair_B = goes_on_B & jnp.roll(goes_on_B, 1) & (len(goes_on_B) > 1)

  def cost(other: State, rows_B) -> MeanMetric:
    _, logits_BTV = model.apply(variables, other, *batch.inputs)
    other_BT = losses.cross_entropy(logits_BTV, batch.targets_BT)
    counted_BT = batch.scored_BT & rows_B[:, None]
    return MeanMetric(
      jnp.sum(jnp.where(counted_BT, other_BT - nats_BT, 0)),
      jnp.sum(counted_BT, dtype=jnp.float32),
    )

  cleared = model.apply(variables, carry, method='clear')
  parts = model.apply(variables, rolled, method='parts')
  shuffled = model.apply(variables, carry, parts, method='with_parts')
  found = {
    'cleared_cost': cost(cleared, goes_on_B),
    'shuffled_cost': cost(shuffled, pair_B),
  }
  slots_BSD = model.apply(variables, carry, method='memory_slots')
  if slots_BSD is not None:
    found['row_difference'] = state_use.row_difference(slots_BSD, pair_B)
  return found


def count(logits_BTV, batch: Batch, sown) -> Sums:
  """Returns the Sums of a segment.

  Args:
    logits_BTV: the model's outputs.
    batch: the segment.
    sown: the collections that the model's `apply` returned. Only
      metrics.COLLECTION is used.
  """
  with jax.named_scope('metrics'):
    return Sums.of_step(
      losses.cross_entropy(logits_BTV, batch.targets_BT),
      losses.correct(logits_BTV, batch.targets_BT),
      batch.mask_BT,
      batch.scored_BT,
      sown=metrics.collect(sown.get(metrics.COLLECTION, {})),
    )
