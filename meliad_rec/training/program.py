"""A model and its optimiser on a mesh: compiled steps and sharded arrays."""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from meliad_rec.data.batch import Batch
from meliad_rec.distributed import partition
from meliad_rec.distributed import partition as state_sharding
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.training import train_step
from meliad_rec.training.optimizer import Optimizer
from meliad_rec.training.train_step import TrainState


@dataclasses.dataclass(frozen=True)
class TrainProgram(ShardedModel):
  """What a run computes, and where.

  Attributes:
    model, mesh, segment: see ShardedModel; a step is one segment of each row.
    optimizer: of the model.
    objective: (logits_BTV, targets_BT) -> nats_BT to minimise.
    rows: rows of a training batch, over all hosts.
    ema_decay: of the moving average of parameters; None: no average.
    halting_warmup: see train_step.
  """

  optimizer: Optimizer
  objective: Callable
  rows: int
  ema_decay: float | None = None
  halting_warmup: int = 0

  @functools.cached_property
  def shapes(self) -> TrainState:
    """The train state as jax.ShapeDtypeStruct with shardings."""
    shapes = jax.eval_shape(self._create, 0)
    places = state_sharding.state_shardings(self.mesh, shapes, self.rows)
    return jax.tree.map(
      lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
      shapes,
      places,
    )

  def create(self, seed: int) -> TrainState:
    """A new run's state, made where it belongs."""
    with jax.set_mesh(self.mesh):
      return self._create_in_place(np.uint32(seed))

  @functools.cached_property
  def _create_in_place(self) -> Callable:
    places = jax.tree.map(lambda a: a.sharding, self.shapes)
    return jax.jit(self._create, out_shardings=places)

  @functools.cached_property
  def traced(self) -> jax.stages.Traced:
    """What train_step is compiled of; a defect of the program shows here."""
    step = functools.partial(
      train_step.train_step,
      self.model,
      self.optimizer,
      self.objective,
      self.ema_decay,
      self.halting_warmup,
    )
    places = jax.tree.map(lambda a: a.sharding, self.shapes)
    whole = NamedSharding(self.mesh, PartitionSpec())
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, whole))
    with jax.set_mesh(self.mesh):
      return jitted.trace(self.shapes, self.batch_shapes(self.rows))

  @functools.cached_property
  def train_step(self) -> jax.stages.Compiled:
    """(state, batch) -> (state, Sums); compiled once, state donated."""
    with jax.set_mesh(self.mesh):
      return self.traced.lower().compile()

  def batch_shapes(self, rows: int) -> Batch:
    """A batch as jax.ShapeDtypeStruct with shardings."""
    place = partition.batch_sharding(self.mesh, rows)

    def shape(dtype, *axes):
      return jax.ShapeDtypeStruct((rows, *axes), dtype, sharding=place)

    return Batch(
      tokens_BT=shape(jnp.int32, self.segment),
      targets_BT=shape(jnp.int32, self.segment),
      mask_BT=shape(bool, self.segment),
      scored_BT=shape(bool, self.segment),
      start_B=shape(bool),
      document_B=shape(jnp.int32),
      offset_B=shape(jnp.int32),
    )

  def _create(self, seed) -> TrainState:
    return train_step.create_state(
      self.model,
      self.optimizer,
      seed,
      self.rows,
      self.segment,
      ema=self.ema_decay is not None,
    )
