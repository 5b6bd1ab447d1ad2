"""Universal and Gated Universal Transformer: one layer, until it halts.

"Investigating Recurrent Transformers with Dynamic Halt" (2024), algorithms 1
and 3. UT (Dehghani et al. 2019): each token halts by itself, by what its state
says, and keys and values are of the output so far. GUT: a gated layer, all
tokens halt together, asked of the means of the states before and behind a
layer; where the layer is causal, each position halts by the means up to it.

One step of a recurrence in depth, as a function of arrays alone.
"""

import dataclasses
import functools

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.layers import experts
from meliad_rec.layers.core_layer import CoreLayer
from meliad_rec.layers.dropout import check_layer_drop
from meliad_rec.layers.dropout import drop_by
from meliad_rec.layers.experts import mean_imbalance
from meliad_rec.metrics import figures
from meliad_rec.metrics import losses
from meliad_rec.metrics.figures import Peak
from meliad_rec.metrics.figures import Ratio
from meliad_rec.recurrence import early_exit
from meliad_rec.recurrence import halt as halting
from meliad_rec.recurrence.early_exit import compacted_loop
from meliad_rec.recurrence.early_exit import per_device
from meliad_rec.recurrence.halt import Counts
from meliad_rec.recurrence.halt import Halt
from meliad_rec.recurrence.halt import HaltingGate
from meliad_rec.recurrence.halt import mean
from meliad_rec.recurrence.halt import Units


class Shared(struct.PyTreeNode):
  """What is of no row."""

  layer: dict  # Parameters.
  gate: dict | None  # Parameters; None: nothing halts.
  rng: jax.Array | None  # Key data of dropout; None: there is none.


class Rows(struct.PyTreeNode):
  """What a step reads, and leaves as it is."""

  mask_BT: jax.Array
  memory_BSD: jax.Array | None
  max_steps_B1: jax.Array  # int32, steps but one that a unit can take.

  @classmethod
  def of(cls, mask_BT, memory_BSD, causal: bool) -> 'Rows':
    """As many steps as there are tokens, and one; where causal, any number.

    How many there are would tell a token of those behind it.
    """
    max_steps_B1 = jnp.sum(mask_BT, 1, keepdims=True, dtype=jnp.int32)
    if causal:
      max_steps_B1 = jnp.full_like(max_steps_B1, jnp.iinfo(jnp.int32).max)
    return cls(mask_BT, memory_BSD, max_steps_B1)


class State(struct.PyTreeNode):
  """What goes from step to step."""

  h_BTD: jax.Array
  units: Units
  p_BU: jax.Array | None  # Of h, where it is known before the step.
  mixed_BTD: jax.Array | None  # Weighted states, where keys are made of them.


class Added(struct.PyTreeNode):
  """What steps add up."""

  counts: Counts
  mixed_BTD: jax.Array | None  # Weighted states, where no step reads them.
  routes: list[experts.Routes]  # Of each router; none without experts.


@dataclasses.dataclass(frozen=True, eq=False)
class Recurrence:
  """The step, and what it begins with; one of loop.Steps.

  Attributes:
    layer: unbound.
    gate: unbound; None where nothing halts.
    halt: how; None: never.
    together, transition: see Universal.
    steps: the most there are.
    layer_drop: see Universal.
  """

  layer: CoreLayer
  gate: HaltingGate | None
  halt: Halt | None
  global_halt: bool
  transition: bool
  steps: int
  layer_drop: float = 0.0

  def first(self, shared: Shared, rows: Rows, x_BTD) -> tuple[State, Counts]:
    """The state before step 0, and what was counted to make it."""
    active_BU = rows.mask_BT
    if self.global_halt and not self.layer.config.causal:
      active_BU = jnp.any(active_BU, 1, keepdims=True)
    units = Units.first(active_BU)
    p_BU, counts = None, self.nothing(units)
    if self.halt and not self.transition:
      units, p_BU, counts = self.ask_ahead(shared, rows, 0, x_BTD, units)
    mixed_BTD = None
    if not self.global_halt:
      mixed_BTD = jnp.zeros(x_BTD.shape, jnp.float32)
    return State(x_BTD, units, p_BU, mixed_BTD), counts

  def alive(self, state: State):
    """Rows that go on, [B] bool."""
    return state.units.alive_B

  def took(self, added: Added):
    """Rows in which any unit took the step on, [B] bool."""
    return jnp.any(added.counts.depth > 0, 1)

  def step(self, shared: Shared, rows: Rows, l, state: State):
    """The state behind step l, and what it adds."""
    new_BTD, sown = self.run_layer(shared, rows, l, state)
    units, h_BTD, next_p_BU = state.units, state.h_BTD, None
    counts = self.nothing(units)
    if not self.halt:
      takes_BU, weight_BU = units.active > 0, jnp.zeros_like(units.active)
    else:
      p_BU = state.p_BU
      if self.transition:
        p_BU = self.ask(shared, rows, h_BTD, new_BTD)
        counts = self.asked(counts, p_BU, units, l)
      units, takes_BU, weight_BU = halting.advance(
        self.halt, units, p_BU, l, rows.max_steps_B1
      )
    counts = counts.replace(
      ponder_cost=weight_BU * (l + 1), depth=takes_BU.astype(jnp.float32)
    )
    routes = experts.routes(sown, takes_BU & rows.mask_BT)
    part_BTD = weight_BU[..., None] * h_BTD.astype(jnp.float32)
    h_BTD = jnp.where(takes_BU[..., None], new_BTD, h_BTD)
    if self.halt and not self.transition:
      units, next_p_BU, more = self.ask_ahead(shared, rows, l + 1, h_BTD, units)
      counts = counts.replace(p=more.p, asked=more.asked)
    if self.global_halt:
      return State(h_BTD, units, next_p_BU, None), Added(
        counts, part_BTD, routes
      )
    mixed_BTD = state.mixed_BTD + part_BTD
    return State(h_BTD, units, next_p_BU, mixed_BTD), Added(
      counts, None, routes
    )

  def run_layer(self, shared, rows, l, state):
    """What the layer makes of the state, and its routes.

    Keys are of the output so far, where tokens halt by themselves.
    """
    rngs, source_BTD, key = {}, None, None
    if shared.rng is not None:
      key = jax.random.fold_in(jax.random.wrap_key_data(shared.rng), l)
      rngs['dropout'] = key
    if not self.global_halt:
      source_BTD = mix(state.mixed_BTD, state)
    new_BTD, sown = self.layer.apply(
      {'params': shared.layer},
      state.h_BTD,
      rows.mask_BT,
      rows.memory_BSD,
      source_BTD,
      rngs=rngs,
      mutable=['routes'],
    )
    if self.layer_drop and key is not None:
      # Folded again: the layer draws from the key itself.
      drop = jax.random.fold_in(key, 0)
      new_BTD = drop_by(drop, self.layer_drop, state.h_BTD, new_BTD)
    return new_BTD, sown.get('routes', {})

  def ask(self, shared, rows, *h_BTD):
    """p_BU of one state, or of the states before and behind a layer."""
    if self.global_halt:
      causal = self.layer.config.causal
      h_BTD = [mean(h, rows.mask_BT, causal) for h in h_BTD]
    return self.gate.apply({'params': shared.gate}, *h_BTD)

  def ask_ahead(self, shared, rows, l, h_BTD, units):
    """Units without those that step l would halt; p_BU and counts of it."""
    p_BU = self.ask(shared, rows, h_BTD)
    counts = self.asked(self.nothing(units), p_BU, units, l)
    units = halting.foresee(self.halt, units, p_BU, l, rows.max_steps_B1)
    return units, p_BU, counts

  def nothing(self, units: Units) -> Counts:
    zeros_BU = jnp.zeros_like(units.remainder)
    zeros_BL = jnp.zeros((len(zeros_BU), self.steps))
    return Counts(zeros_BU, zeros_BU, zeros_BL, zeros_BL)

  def asked(self, counts: Counts, p_BU, units: Units, l) -> Counts:
    return counts.replace(
      p=halting.at_step(p_BU * units.active, l, self.steps),
      asked=halting.at_step(units.active, l, self.steps),
    )


def mix(mixed_BTD, state: State):
  """The output, were this state the last."""
  last_BTD = state.units.remainder[..., None] * state.h_BTD.astype(jnp.float32)
  return (mixed_BTD + last_BTD).astype(state.h_BTD.dtype)


LOOPS = {
  'while': early_exit.while_loop,
  'cond': early_exit.cond_loop,
  'fixed': early_exit.fixed_loop,
  'masked': early_exit.masked_loop,
}
INFERENCE = LOOPS | {'compacted': compacted_loop}


class Universal(nn.Module):
  """A layer run again and again.

  Attributes:
    layer: the layer.
    steps: the most that are taken, in training and, where eval_steps is None,
      else.
    together: whether all tokens halt together (GUT), or each by itself (UT).
    transition: whether halting is asked of the states before and behind a
      layer (GUT), or of those before it (UT).
    halt: how; None: never, and the output is the last state.
    eval_steps: the most in evaluation.
    loop: of training, a name in LOOPS: 'while' and 'cond' end when all have
      halted, 'fixed' and 'masked' never.
    inference: in evaluation, a name in INFERENCE.
    layer_drop: share of training steps in which a step of the recurrence leaves
      its layer out, for each step by itself, the same in all chunks; halting is
      asked all the same.
    exit_per_device: whether each device of a mesh ends by itself; see
      per_device.py.
  """

  layer: CoreLayer
  steps: int
  global_halt: bool
  transition: bool
  halt: Halt | None = Halt()
  eval_steps: int | None = None
  loop: str = 'while'
  inference: str = 'while'
  exit_per_device: bool = False
  layer_drop: float = 0.0

  def setup(self):
    if min(self.steps, self.max_steps(False)) < 1:
      raise ValueError(
        f'The most steps are {self.steps}, in evaluation {self.eval_steps}; '
        'set DEPTH and EVAL_DEPTH to 1 or more.'
      )
    for name, loops in (('loop', LOOPS), ('inference', INFERENCE)):
      if getattr(self, name) not in loops:
        raise ValueError(
          f'{name} is {getattr(self, name)!r}; it must be one of '
          f'{", ".join(loops)}. Set universal.Universal.{name}.'
        )
    check_layer_drop(self.layer_drop)
    if self.halt:
      self.gate = HaltingGate(self.layer.config.d_model, self.halt.bias_init)

  @property
  def causal(self) -> bool:
    """Whether no output depends on a later token."""
    return self.layer.config.causal

  def __call__(self, x_BTD, mask_BT, memory_BSD=None):
    """y_BTD; arguments: see CoreLayer."""
    if self.is_initializing():
      return self.once(x_BTD, mask_BT, memory_BSD)
    trains = self.has_rng('dropout')
    most = self.max_steps(trains)
    bounded = self.halt and not self.causal
    steps = min(most, x_BTD.shape[1] + 1) if bounded else most
    run = LOOPS[self.loop] if trains else INFERENCE[self.inference]
    run = per_device(run) if self.exit_per_device else run
    recurrence = self.recurrence(steps)
    shared = self.shared()
    rows = Rows.of(mask_BT, memory_BSD, self.causal)
    state, begun = recurrence.first(shared, rows, x_BTD)
    state, added, ran_B = run(recurrence, shared, rows, state, steps)
    counts = jax.tree.map(jnp.add, begun, added.counts)
    self.report(rows, state.units.remainder, counts, ran_B)
    if added.routes:
      imbalance = mean_imbalance(added.routes)
      weight = self.layer.experts.balance
      self.sow('losses', 'balance', weight * imbalance)
      figures.sow(self, 'expert_imbalance', Ratio(imbalance, jnp.ones(())))
    mixed_BTD = added.mixed_BTD if self.global_halt else state.mixed_BTD
    return mix(mixed_BTD, state)

  def max_steps(self, trains: bool) -> int:
    """Steps that are taken at most."""
    if trains or self.eval_steps is None:
      return self.steps
    return self.eval_steps

  def once(self, x_BTD, mask_BT, memory_BSD):
    """One step, which makes the parameters of all."""
    if self.halt:
      self.gate(*[x_BTD[:, :1]] * (2 if self.transition else 1))
    return self.layer(x_BTD, mask_BT, memory_BSD)

  def recurrence(self, steps: int) -> Recurrence:
    return Recurrence(
      self.layer.unbind()[0],
      self.gate.unbind()[0] if self.halt else None,
      self.halt,
      self.global_halt,
      self.transition,
      steps,
      self.layer_drop,
    )

  def shared(self) -> Shared:
    rng = None
    if self.has_rng('dropout'):
      rng = jax.random.key_data(self.make_rng('dropout'))
    # Gathered once, and not in each step.
    params = all_gather_params(self.variables['params'])
    return Shared(params['layer'], params.get('gate'), rng)

  def report(self, rows: Rows, remainder_BU, counts: Counts, ran_B):
    """Sows the loss of halting, its figures, and the depth of each token.

    In chunks the loss is a mean over those of a row that hold tokens, and then
    over rows.
    """
    if not self.halt:
      return
    unit_BU = rows.mask_BT
    if remainder_BU.shape[1] == 1:
      unit_BU = jnp.any(unit_BU, 1, keepdims=True)
    real_BU = unit_BU.astype(jnp.float32)
    units_B = jnp.maximum(jnp.sum(real_BU, 1), 1)
    mean_B = lambda a_BU: jnp.sum(a_BU * real_BU, 1) / units_B
    real_B = jnp.any(unit_BU, 1).astype(jnp.float32)
    cost_B = mean_B(halting.cost(self.halt, remainder_BU, counts))
    # Rows of no token cost nothing, and do not count.
    loss = losses.RowMeans(self.halt.ponder_cost * cost_B, real_B)
    self.sow('losses', losses.HALTING, loss)
    self.sow('pictures', 'depth', counts.depth)
    sow = functools.partial(figures.sow, self)
    units = jnp.sum(real_BU)
    sow('halting_depth', Ratio(jnp.sum(counts.depth * real_BU), units))
    sow('halting_depth_max', Peak(jnp.max(counts.depth)))
    sow('halting_left', Ratio(jnp.sum(remainder_BU * real_BU), units))
    sow(
      'halting_waste',
      Ratio(jnp.sum(ran_B * real_B), jnp.sum(mean_B(counts.depth))),
    )
    for l in range(counts.p.shape[1]):
      asked = jnp.sum(counts.asked[:, l])
      sow(f'halting_p_{l}', Ratio(jnp.sum(counts.p[:, l]), asked))
