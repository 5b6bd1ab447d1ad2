"""A model on a mesh, and the compiled step that evaluates it."""

from collections.abc import Callable
import dataclasses
import functools

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
    """Shapes, dtypes and shardings of the parameters: jax.ShapeDtypeStruct."""
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
    """Returns the carry before the first segment, sharded over the rows."""
    sharding = partition.batch_sharding(self.mesh, rows)
    shapes = jax.eval_shape(lambda p: empty_carry(self.model, p, rows), params)
    return jax.tree.map(
      lambda a: jnp.zeros(a.shape, a.dtype, device=sharding), shapes
    )

  def put(self, batch: Batch, rows: int) -> Batch:
    """Puts this host's rows of a batch on the devices.

    Args:
      batch: the local rows.
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
    """Compiled function (params, carry, batch) -> (carry, Sums, nats_BT).

    The argument `carry` is donated: its memory is reused, so it cannot be read
    afterward.
    """
    rows = NamedSharding(self.mesh, PartitionSpec(partition.BATCH_AXES))
    replicated = NamedSharding(self.mesh, PartitionSpec())
    return mesh_jit(
      self.mesh,
      functools.partial(eval_step, self.model),
      donate_argnums=1,
      # Explicit, because every host must be able to read the sums.
      out_shardings=(rows, replicated, rows),
    )

  def forward(self, params, carry, batch: Batch):
    """Returns the next carry and logits_BTV, with dropout as in training.

    The random key of dropout is always the same.
    """
    return self.model.apply(
      {'params': params},
      carry,
      batch.tokens_BT,
      batch.start_B,
      batch.mask_BT,
      rngs={'dropout': jax.random.key(0)},
    )


def eval_step(
  model: Model, params, carry: State, batch: Batch
) -> tuple[State, Sums, jax.Array]:
  """Returns the next carry, the metrics of a segment, and its losses.

  Args:
    model: the model.
    params: its parameters.
    carry: state of the model before the segment.
    batch: the segment.

  Returns:
    The next carry; the Sums of the metrics; and nats_BT, the loss of each token
    in nats.
  """
  (carry, logits_BTV), sown = model.apply(
    {'params': all_gather_params(params, stacked=False)},
    carry,
    batch.tokens_BT,
    batch.start_B,
    batch.mask_BT,
    mutable=[metrics.COLLECTION],
  )
  nats_BT = losses.cross_entropy(logits_BTV, batch.targets_BT)
  return carry, count(logits_BTV, batch, sown), nats_BT


def count(logits_BTV, batch: Batch, sown) -> Sums:
  """Returns the sums of a segment's metrics.

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
