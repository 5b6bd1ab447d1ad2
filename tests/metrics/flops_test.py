"""FLOPs of traced functions, by hand."""

import jax
import jax.numpy as jnp

from meliad_rec.metrics.flops import forward_flops

A, B, C, N = 3, 5, 7, 4
x = jnp.zeros((A, B))
w = jnp.zeros((B, C))
square = jnp.zeros((B, B))


def test_a_product():
  assert forward_flops(jnp.matmul, x, w) == 2 * A * B * C


def test_a_batched_product():
  many = jnp.zeros((N, A, B))
  assert forward_flops(jnp.matmul, many, w) == 2 * N * A * B * C


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


def test_shapes_are_enough():
  shape = jax.ShapeDtypeStruct((A, B), jnp.float32)
  assert forward_flops(jnp.matmul, shape, w) == 2 * A * B * C
