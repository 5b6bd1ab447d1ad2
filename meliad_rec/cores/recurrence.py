"""One step of a recurrence in depth, as a function of arrays alone."""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.cores import experts
from meliad_rec.cores.core_layer import CoreLayer
from meliad_rec.dropout import drop_by
from meliad_rec.halting import halt as halting
from meliad_rec.halting.gate import HaltingGate
from meliad_rec.halting.gate import mean
from meliad_rec.halting.halt import Counts
from meliad_rec.halting.halt import Halt
from meliad_rec.halting.halt import Units


class Shared(struct.PyTreeNode):
  """What is of no row."""

  layer: dict  # Parameters.
  gate: dict | None  # Parameters; None: nothing halts.
  rng: jax.Array | None  # Key data of dropout; None: there is none.


class Rows(struct.PyTreeNode):
  """What a step reads, and leaves as it is."""

  mask_BT: jax.Array
  memory_BSD: jax.Array | None
  most_B1: jax.Array  # int32, steps but one that a unit can take.

  @classmethod
  def of(cls, mask_BT, memory_BSD, causal: bool) -> 'Rows':
    """As many steps as there are tokens, and one; where causal, any number.

    How many there are would tell a token of those behind it.
    """
    most_B1 = jnp.sum(mask_BT, 1, keepdims=True, dtype=jnp.int32)
    if causal:
      most_B1 = jnp.full_like(most_B1, jnp.iinfo(jnp.int32).max)
    return cls(mask_BT, memory_BSD, most_B1)


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
  together: bool
  transition: bool
  steps: int
  layer_drop: float = 0.0

  def first(self, shared: Shared, rows: Rows, x_BTD) -> tuple[State, Counts]:
    """The state before step 0, and what was counted to make it."""
    live_BU = rows.mask_BT
    if self.together and not self.layer.config.causal:
      live_BU = jnp.any(live_BU, 1, keepdims=True)
    units = Units.first(live_BU)
    p_BU, counts = None, self.nothing(units)
    if self.halt and not self.transition:
      units, p_BU, counts = self.ask_ahead(shared, rows, 0, x_BTD, units)
    mixed_BTD = None
    if not self.together:
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
      takes_BU, weight_BU = units.live > 0, jnp.zeros_like(units.live)
    else:
      p_BU = state.p_BU
      if self.transition:
        p_BU = self.ask(shared, rows, h_BTD, new_BTD)
        counts = self.asked(counts, p_BU, units, l)
      units, takes_BU, weight_BU = halting.advance(
        self.halt, units, p_BU, l, rows.most_B1
      )
    counts = counts.replace(
      penalty=weight_BU * (l + 1), depth=takes_BU.astype(jnp.float32)
    )
    routes = experts.routes(sown, takes_BU & rows.mask_BT)
    part_BTD = weight_BU[..., None] * h_BTD.astype(jnp.float32)
    h_BTD = jnp.where(takes_BU[..., None], new_BTD, h_BTD)
    if self.halt and not self.transition:
      units, next_p_BU, more = self.ask_ahead(shared, rows, l + 1, h_BTD, units)
      counts = counts.replace(p=more.p, asked=more.asked)
    if self.together:
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
    if not self.together:
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
    if self.together:
      causal = self.layer.config.causal
      h_BTD = [mean(h, rows.mask_BT, causal) for h in h_BTD]
    return self.gate.apply({'params': shared.gate}, *h_BTD)

  def ask_ahead(self, shared, rows, l, h_BTD, units):
    """Units without those that step l would halt; p_BU and counts of it."""
    p_BU = self.ask(shared, rows, h_BTD)
    counts = self.asked(self.nothing(units), p_BU, units, l)
    units = halting.foresee(self.halt, units, p_BU, l, rows.most_B1)
    return units, p_BU, counts

  def nothing(self, units: Units) -> Counts:
    zeros_BU = jnp.zeros_like(units.left)
    zeros_BL = jnp.zeros((len(zeros_BU), self.steps))
    return Counts(zeros_BU, zeros_BU, zeros_BL, zeros_BL)

  def asked(self, counts: Counts, p_BU, units: Units, l) -> Counts:
    return counts.replace(
      p=halting.at_step(p_BU * units.live, l, self.steps),
      asked=halting.at_step(units.live, l, self.steps),
    )


def mix(mixed_BTD, state: State):
  """The output, were this state the last."""
  last_BTD = state.units.left[..., None] * state.h_BTD.astype(jnp.float32)
  return (mixed_BTD + last_BTD).astype(state.h_BTD.dtype)
