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


def test_a_product():
  assert forward_flops(jnp.matmul, x, w) == 2 * A * B * C


def test_a_batched_product():
  many = jnp.zeros((N, A, B))
  assert forward_flops(jnp.matmul, many, w) == 2 * N * A * B * C


def test_rows_meet_the_matrix_of_their_group():
  groups = jnp.array([1, 2])
  matrices = jnp.zeros((2, B, C))
  found = forward_flops(jax.lax.ragged_dot, x, matrices, groups)
  assert found == 2 * A * B * C


def test_additions_are_not_counted():
  assert forward_flops(jnp.add, x, x) == 0


def test_a_scan_counts_as_often_as_it_runs():
  def loop(x):
    return jax.lax.scan(lambda x, _: (x @ square, None), x, length=N)[0]

  assert forward_flops(loop, x) == N * 2 * A * B * B


def test_the_dearest_branch_counts():
  def choose(x):
    return jax.lax.cond(
      x[0, 0] > 0, lambda x: x @ square, lambda x: x @ square @ square, x
    )

  assert forward_flops(choose, x) == 2 * 2 * A * B * B


def test_what_is_jitted_or_recomputed_is_found_once():
  inner = jax.jit(jax.checkpoint(lambda x: x @ w))
  assert forward_flops(inner, x) == 2 * A * B * C


def halts(x):
  """A product before a loop of unknown length, and one in it."""
  deep = lambda x: jnp.abs(x).sum() > 1
  return jax.lax.while_loop(deep, lambda x: x @ square, x @ square)


def test_the_body_of_a_while_of_unknown_length_counts_once():
  assert forward_flops(halts, x) == 2 * 2 * A * B * B
  assert loops(jax.make_jaxpr(halts)(x).jaxpr) == [None]


def counted(goes_on, turn):
  """Loops (turns so far, state) from 0, inside of what is jitted."""

  def loop(x):
    after = lambda carry: (turn(carry[0]), carry[1] @ square)
    return jax.lax.while_loop(lambda carry: goes_on(*carry), after, (0, x))[1]

  return jax.jit(loop)


def test_the_body_of_a_while_counts_as_often_as_it_may():
  early = lambda l, x: (x.sum() > 1) & ((l < N) & (x.sum() < 9) & (l < 2 * N))
  loop = counted(early, lambda l: l + 1)
  assert forward_flops(loop, x) == N * 2 * A * B * B
  assert loops(jax.make_jaxpr(loop)(x).jaxpr) == [N]


@pytest.mark.parametrize(
  'goes_on, turn',
  [
    (lambda l, x: l < N, lambda l: 2 * l),
    (lambda l, x: l < N, lambda l: l + l),
    (lambda l, x: (l < N) | (x.sum() > 1), lambda l: l + 1),
    (lambda l, x: x.sum() < 9, lambda l: l + 1),
    (lambda l, x: l < x.sum(), lambda l: l + 1),
    (lambda l, x: l >= 0, lambda l: l - 1),
  ],
)
def test_other_conditions_do_not_tell_how_often(goes_on, turn):
  assert loops(jax.make_jaxpr(counted(goes_on, turn))(x).jaxpr) == [None]


@pytest.mark.parametrize('turns', [0, 1, 3.5])
def test_or_as_often_as_it_is_said_to_run(turns):
  traced = jax.make_jaxpr(halts)(x).jaxpr
  assert count(traced, turns) == (1 + turns) * 2 * A * B * B


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
  assert forward_flops(function, x) == 2 * A * B * C
  in_scan = lambda x: jax.lax.map(function, jnp.stack([x] * N))
  assert forward_flops(in_scan, x) == N * 2 * A * B * C
  both = lambda x: jax.grad(lambda x: function(x).sum())(x)
  assert forward_flops(both, x) > 2 * A * B * C


def test_shapes_are_enough():
  shape = jax.ShapeDtypeStruct((A, B), jnp.float32)
  assert forward_flops(jnp.matmul, shape, w) == 2 * A * B * C


def test_a_loop_without_products_says_nothing():
  """As the one that writes a ring of keys."""
  body = lambda i, x: jax.lax.dynamic_update_slice(x, x[:1], (i,))
  moves = lambda n, x: jax.lax.fori_loop(n, n + 1, body, x)
  assert loops(jax.make_jaxpr(moves)(2, jnp.ones(9)).jaxpr) == []


def device(kind):
  return types.SimpleNamespace(device_kind=kind)


@pytest.mark.parametrize(
  'kind, peak',
  [
    ('TPU v4', 275e12),
    ('TPU v5 lite', 197e12),
    ('TPU v5', 459e12),
    ('TPU v5p', 459e12),
    ('TPU v6 lite', 918e12),
    ('TPU7x', 1153.5e12),
    ('NVIDIA A100-SXM4-80GB', 312e12),
    ('NVIDIA H100 80GB HBM3', 989e12),
    ('NVIDIA H100 PCIe', 756e12),
    ('NVIDIA H200', 989e12),
  ],
)
def test_peak_flops_by_the_names_of_devices(kind, peak):
  assert peak_flops([device(kind)] * 2) == 2 * peak


def test_unknown_chips_have_no_peak():
  assert peak_flops(jax.devices('cpu')) is None
  assert peak_flops([device('TPU v4'), device('TPU v99')]) is None
