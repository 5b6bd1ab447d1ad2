"""The compiled training step of a run, and its sharded train state."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from meliad_rec.data.batch import Batch
from meliad_rec.distributed import partition
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.training.optimizer import Optimizer
from meliad_rec.training.train_step import create_state
from meliad_rec.training.train_step import train_step
from meliad_rec.training.train_step import TrainState


@dataclasses.dataclass(frozen=True)
class TrainProgram(ShardedModel):
  """A model and its optimizer on a mesh of devices.

  A training step reads one segment of each row.

  Attributes:
    model, mesh, segment: as in ShardedModel.
    optimizer: from optimizer.chain.
    objective: (logits_BTV, targets_BT) -> nats_BT to minimize.
    rows: rows of a training batch, over all hosts.
    ema_decay: decay of the moving average of the parameters; None: no average.
    halting_warmup: steps over which the weight of the ponder loss rises to its
      full value; 0 disables the warm-up.
    source_segment: tokens of the source of each row; None without an encoder.
  """

  optimizer: Optimizer
  objective: Callable
  rows: int
  ema_decay: float | None = None
  halting_warmup: int = 0
  source_segment: int | None = None

  @property
  def places(self) -> int:
    """Number of tokens and places of padding that a training step reads."""
    return self.rows * self.segment

  @functools.cached_property
  def shapes(self) -> TrainState:
    """The train state, with a jax.ShapeDtypeStruct in place of each array.

    Each of them has a sharding.
    """
    # The same mesh as in `create`, so that JAX does not trace the function
    # again.
    with jax.set_mesh(self.mesh):
      shapes = jax.eval_shape(self._create_state, np.uint32(0))
    return jax.tree.map(
      lambda a, sharding: jax.ShapeDtypeStruct(
        a.shape, a.dtype, sharding=sharding
      ),
      shapes,
      partition.state_shardings(self.mesh, shapes, self.rows),
    )

  def batch_shapes(self, rows: int) -> Batch:
    """Returns a Batch with a jax.ShapeDtypeStruct in place of each array.

    Each of them has a sharding.

    Args:
      rows: rows of the batch, over all hosts.
    """
    sharding = partition.batch_sharding(self.mesh, rows)

    def shape(dtype, *axes):
      return jax.ShapeDtypeStruct((rows, *axes), dtype, sharding=sharding)

    sources = self.source_segment
    return Batch(
      source_BS=None if sources is None else shape(jnp.int32, sources),
      tokens_BT=shape(jnp.int32, self.segment),
      targets_BT=shape(jnp.int32, self.segment),
      mask_BT=shape(bool, self.segment),
      scored_BT=shape(bool, self.segment),
      start_B=shape(bool),
      document_B=shape(jnp.int32),
      offset_B=shape(jnp.int32),
    )

  def empty_batch(self, rows: int) -> Batch:
    """Returns a batch of NumPy arrays in which all positions are padding.

    Args:
      rows: rows of the batch.
    """
    return jax.tree.map(
      lambda a: np.zeros((rows, *a.shape[1:]), a.dtype),
      self.batch_shapes(self.rows),
    )

  def create(self, seed: int) -> TrainState:
    """Creates the state of a new run, sharded from the start."""
    with jax.set_mesh(self.mesh):
      return self._create_sharded(np.uint32(seed))

  def begin_with(self, state: TrainState, params: Any) -> TrainState:
    """Returns the state of a new run that begins with given parameters.

    The state of the optimizer is computed from these parameters, and the moving
    average begins with a copy of them.

    Args:
      state: from `create`.
      params: parameters with the shapes and shardings of the state's.
    """

    def begin(params):
      ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
      return self.optimizer.init(params), ema

    places = self._shardings
    with jax.set_mesh(self.mesh):
      begun = jax.jit(begin, out_shardings=(places.opt_state, places.ema))
      opt_state, ema = begun(params)
    return state.replace(params=params, opt_state=opt_state, ema=ema)

  @functools.cached_property
  def traced(self) -> jax.stages.Traced:
    """The training step, traced but not compiled.

    Errors of the model occur when this property is first read.
    """
    replicated = NamedSharding(self.mesh, PartitionSpec())
    jitted = jax.jit(
      self._step, donate_argnums=0, out_shardings=(self._shardings, replicated)
    )
    with jax.set_mesh(self.mesh):
      return jitted.trace(self.shapes, self.batch_shapes(self.rows))

  @functools.cached_property
  def train_step(self) -> jax.stages.Compiled:
    """The compiled training step: (state, batch) -> (state, Sums).

    It is compiled when this property is first read. A call donates the state
    that it is given.
    """
    with jax.set_mesh(self.mesh):
      return self.traced.lower().compile()

  @property
  def _step(self) -> Callable:
    """Function (state, batch) -> (state, Sums)."""
    return functools.partial(
      train_step,
      self.model,
      self.optimizer,
      self.objective,
      self.ema_decay,
      self.halting_warmup,
    )

  @property
  def _shardings(self) -> TrainState:
    return jax.tree.map(lambda a: a.sharding, self.shapes)

  @functools.cached_property
  def _create_sharded(self) -> Callable:
    return jax.jit(self._create_state, out_shardings=self._shardings)

  @functools.cached_property
  def _create_state(self) -> Callable:
    """Function of a seed. It is one object, so JAX traces it only once."""
    return functools.partial(
      create_state,
      self.model,
      self.optimizer,
      rows=self.rows,
      segment=self.segment,
      ema=self.ema_decay is not None,
    )
