"""Gradients of several segments in one update, each token weighing the same.

The segments are consecutive in time: every training step reads the next one
and the carry goes on, only the parameters wait. So accumulating K segments
is like reading segments K times as long, with gradients cut K times as often.
optax.MultiSteps would weigh each segment the same, however few of its tokens
are real; here padding changes nothing.
"""

from collections.abc import Callable
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import optax


class Accumulated(struct.PyTreeNode):
  """State: gradients summed so far, and the state of the inner optimiser."""

  gradients: Any  # Like the parameters, float32: sum of tokens * gradient.
  tokens: jax.Array  # float32, tokens in that sum.
  steps: jax.Array  # int32, steps in that sum, below `every`.
  inner: optax.OptState


def accumulate(
  inner: optax.GradientTransformation, every: int
) -> tuple[Callable, Callable]:
  """`init(params)` and `update(gradients, state, params, tokens)`.

  Args:
    inner: runs once in `every` steps, on the mean over all tokens of them.
    every: steps.

  Returns:
    init, and update, which takes the gradients of a mean over `tokens` tokens
    and returns (updates, state); updates are zeros in all but each last step.
  """

  def init(params):
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return Accumulated(
      gradients=zeros,
      tokens=jnp.zeros((), jnp.float32),
      steps=jnp.zeros((), jnp.int32),
      inner=inner.init(params),
    )

  def update(gradients, state, params, tokens):
    tokens = jnp.asarray(tokens, jnp.float32)
    summed = state.replace(
      gradients=jax.tree.map(
        lambda total, g: total + tokens * g, state.gradients, gradients
      ),
      tokens=state.tokens + tokens,
      steps=state.steps + 1,
    )

    def now(summed):
      mean = jax.tree.map(
        lambda total, g: (total / jnp.maximum(summed.tokens, 1)).astype(
          g.dtype
        ),
        summed.gradients,
        gradients,
      )
      updates, new = inner.update(mean, summed.inner, params)
      updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)
      return updates, Accumulated(
        gradients=jax.tree.map(jnp.zeros_like, summed.gradients),
        tokens=jnp.zeros_like(summed.tokens),
        steps=jnp.zeros_like(summed.steps),
        inner=new,
      )

    def later(summed):
      return jax.tree.map(jnp.zeros_like, params), summed

    return jax.lax.cond(summed.steps == every, now, later, summed)

  return init, update
