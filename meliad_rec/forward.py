"""A model on a mesh: what reading text with it takes, compiled and placed."""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from meliad_rec import partition
from meliad_rec import train_step
from meliad_rec.data.batch import Batch
from meliad_rec.model import empty_carry
from meliad_rec.model import initialize
from meliad_rec.model import Model
from meliad_rec.within_mesh import WithinMesh


@dataclasses.dataclass(frozen=True)
class Forward:
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
    step = functools.partial(train_step.eval_step, self.model)
    rows = NamedSharding(self.mesh, PartitionSpec(partition.BATCH_AXES))
    whole = NamedSharding(self.mesh, PartitionSpec())
    # Said, not left to the compiler: every host must be able to read the sums.
    placed = jax.jit(step, donate_argnums=1, out_shardings=(rows, whole, rows))
    return WithinMesh(self.mesh, placed)

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
