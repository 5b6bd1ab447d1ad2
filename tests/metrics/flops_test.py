"""FLOPs of traced functions, by hand, and of chips."""

import types

import jax
import jax.numpy as jnp
import pytest

from meliad_rec.metrics.flops import count
from meliad_rec.metrics.flops import forward_flops
from meliad_rec.metrics.flops import loops
from meliad_rec.metrics.flops import peak_flops

A, B, C, N = 3, 5, 7, 4
x = jnp.zeros((A, B))
w = jnp.zeros((B, C))
square = jnp.zeros((B, B))
PRODUCT, SQUARE = 2 * A * B * C, 2 * A * B * B


def repeated(x):
  return jax.lax.scan(lambda x, _: (x @ square, None), x, length=N)[0]


def chosen(x):
  deep = lambda x: x @ square @ square
  return jax.lax.cond(x[0, 0] > 0, lambda x: x @ square, deep, x)


GROUPS = jnp.zeros((2, B, C)), jnp.array([1, 2])


@pytest.mark.parametrize(
  ('function', 'arguments', 'flops'),
  [
    (jnp.matmul, (jax.ShapeDtypeStruct((A, B), jnp.float32), w), PRODUCT),
    (jnp.matmul, (jnp.zeros((N, A, B)), w), N * PRODUCT),
    # Rows are multiplied by the matrix of their group.
    (jax.lax.ragged_dot, (x, *GROUPS), PRODUCT),
    (jnp.add, (x, x), 0),
    (repeated, (x,), N * SQUARE),
    (chosen, (x,), 2 * SQUARE),
    (jax.jit(jax.checkpoint(lambda x: x @ w)), (x,), PRODUCT),
  ],
)
def test_products_are_counted_as_often_as_they_run(function, arguments, flops):
  assert forward_flops(function, *arguments) == flops


def halts(x):
  """A product before a loop of unknown length, and one in it."""
  deep = lambda x: jnp.abs(x).sum() > 1
  return jax.lax.while_loop(deep, lambda x: x @ square, x @ square)


@pytest.mark.parametrize('turns', [None, 0, 3.5])
def test_a_while_of_unknown_length_counts_once_or_as_often_as_is_said(turns):
  traced = jax.make_jaxpr(halts)(x).jaxpr
  assert count(traced, turns) == (1 + (1 if turns is None else turns)) * SQUARE
  assert loops(traced) == [None]


def counted(goes_on, turn):
  """Returns a jitted loop over (turns so far, state), from 0 turns."""

  def loop(x):
    after = lambda carry: (turn(carry[0]), carry[1] @ square)
    return jax.lax.while_loop(lambda carry: goes_on(*carry), after, (0, x))[1]

  return jax.jit(loop)


@pytest.mark.parametrize(
  ('goes_on', 'turn', 'turns'),
  [
    (
      lambda l, x: (x.sum() > 1) & ((l < N) & (x.sum() < 9) & (l < 2 * N)),
      *(lambda l: l + 1, N),
    ),
    (lambda l, x: l < N, lambda l: 2 * l, None),
    (lambda l, x: (l < N) | (x.sum() > 1), lambda l: l + 1, None),
    (lambda l, x: l < x.sum(), lambda l: l + 1, None),
    (lambda l, x: l >= 0, lambda l: l - 1, None),
  ],
)
def test_a_while_counts_as_often_as_its_condition_tells(goes_on, turn, turns):
  loop = counted(goes_on, turn)
  assert forward_flops(loop, x) == (turns or 1) * SQUARE
  assert loops(jax.make_jaxpr(loop)(x).jaxpr) == [turns]


def with_own_derivatives(kind):
  """x @ w, whose derivatives hold more products."""
  function = kind(lambda x: x @ w)
  match function:
    case jax.custom_vjp():
      function.defvjp(
        lambda x: (x @ w @ w.T @ w, x), lambda x, dy: (dy @ w.T @ w @ w.T,)
      )
    case jax.custom_jvp():
      function.defjvp(lambda x, dx: (x[0] @ w, dx[0] @ w @ w.T @ w))
  return function


@pytest.mark.parametrize('kind', [jax.custom_vjp, jax.custom_jvp])
def test_of_functions_with_derivatives_of_their_own_the_function_counts(kind):
  function = with_own_derivatives(kind)
  in_scan = lambda x: jax.lax.map(function, jnp.stack([x] * N))
  assert forward_flops(in_scan, x) == N * PRODUCT
  both = lambda x: jax.grad(lambda x: function(x).sum())(x)
  assert forward_flops(both, x) > PRODUCT


def test_a_loop_without_products_says_nothing():
  """As the one that writes a ring of keys."""
  body = lambda i, x: jax.lax.dynamic_update_slice(x, x[:1], (i,))
  moves = lambda n, x: jax.lax.fori_loop(n, n + 1, body, x)
  assert loops(jax.make_jaxpr(moves)(2, jnp.ones(9)).jaxpr) == []


@pytest.mark.parametrize(
  ('kinds', 'peak'),
  [
    (['TPU v4'] * 2, 2 * 275e12),
    (['TPU v5 lite'], 197e12),
    (['TPU v5'], 459e12),
    (['NVIDIA A100-SXM4-80GB'], 312e12),
    (['NVIDIA H100 80GB HBM3'], 989e12),
    (['NVIDIA H100 PCIe'], 756e12),
    (['NVIDIA H200'], 989e12),
    (['NVIDIA H200 NVL'], 835e12),
    (['cpu'], None),
    (['TPU v4', 'TPU v99'], None),
  ],
)
def test_peak_flops_by_the_names_of_devices(kinds, peak):
  devices = [types.SimpleNamespace(device_kind=kind) for kind in kinds]
  assert peak_flops(devices) == peak
