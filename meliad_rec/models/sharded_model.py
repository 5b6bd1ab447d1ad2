"""A model on a mesh: what reading text with it takes, compiled and placed."""

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
from meliad_rec.distributed.hosts import MeshJit
from meliad_rec.metrics import figures
from meliad_rec.metrics import losses
from meliad_rec.metrics.metrics import Sums
from meliad_rec.models.cell import State
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model


@dataclasses.dataclass(frozen=True)
class ShardedModel:
  """A model, and where it is computed.

  Attributes:
    model: the model.
    mesh: of partition.make_mesh.
    segment: tokens of a row that are read at once.
  """

  model: Model
  mesh: Mesh
  segment: int

  @functools.cached_property
  def param_shapes(self):
    """The parameters as jax.ShapeDtypeStruct with shardings."""
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

  @functools.cached_property
  def eval_step(self) -> Callable:
    """(params, carry, batch) -> (carry, Sums, nats_BT); carry donated."""
    step = functools.partial(eval_step, self.model)
    rows = NamedSharding(self.mesh, PartitionSpec(partition.BATCH_AXES))
    whole = NamedSharding(self.mesh, PartitionSpec())
    # Said, not left to the compiler: every host must be able to read the sums.
    placed = jax.jit(step, donate_argnums=1, out_shardings=(rows, whole, rows))
    return MeshJit(self.mesh, placed)

  def forward(self, params, carry, batch: Batch):
    """The carry after a batch, and logits_BTV, as training computes them."""
    return self.model.apply(
      {'params': params},
      carry,
      batch.tokens_BT,
      batch.start_B,
      batch.mask_BT,
      rngs={'dropout': jax.random.key(0)},
    )

  def empty_carry(self, params, rows: int):
    """What an evaluation of `rows` rows starts from."""
    place = partition.batch_sharding(self.mesh, rows)
    shapes = jax.eval_shape(lambda p: empty_carry(self.model, p, rows), params)
    return jax.tree.map(
      lambda a: jnp.zeros(a.shape, a.dtype, device=place), shapes
    )

  def put(self, batch: Batch, rows: int) -> Batch:
    """This host's rows of a batch, as arrays on the devices."""
    place = partition.batch_sharding(self.mesh, rows)
    return jax.tree.map(
      lambda a: jax.make_array_from_process_local_data(
        place, a, (rows, *a.shape[1:])
      ),
      batch,
    )


def eval_step(
  model: Model, params, carry: State, batch: Batch
) -> tuple[State, Sums, jax.Array]:
  """The carry after a segment, its sums, and nats_BT of each target."""
  (carry, logits_BTV), sown = model.apply(
    {'params': all_gather_params(params, stacked=False)},
    carry,
    batch.tokens_BT,
    batch.start_B,
    batch.mask_BT,
    mutable=[figures.COLLECTION],
  )
  nats_BT = losses.cross_entropy(logits_BTV, batch.targets_BT)
  return carry, count(logits_BTV, batch, sown), nats_BT


def count(logits_BTV, batch: Batch, sown) -> Sums:
  """What is counted of one segment; `sown`: collections by name."""
  return Sums.of_step(
    losses.cross_entropy(logits_BTV, batch.targets_BT),
    losses.correct(logits_BTV, batch.targets_BT),
    batch.mask_BT,
    batch.scored_BT,
    sown=figures.collect(sown.get(figures.COLLECTION, {})),
  )
