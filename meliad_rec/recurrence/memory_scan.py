"""Scan over chunks of tokens, which read a memory that earlier chunks wrote.

Each chunk reads the memory, and appends to it the vectors that it writes (Fan
et al. 2020; Ju et al. 2021). For the backward pass, a plain scan would store
the keys and values of the memory that each chunk reads. These overlap, so each
key would be stored many times. This scan stores each written vector once, and
computes keys and values again.

The gradients of the vectors that a chunk wrote depend on the gradients of later
chunks. The backward pass therefore runs from the last chunk to the first. A
policy chooses which values each call of `MemoryScanBody.read` keeps for the
backward pass.

No other gradients depend on each other in this way. If a chunk is one token,
they can be computed in parallel, span by span; a span is a number of
consecutive tokens. Once the gradients of the vectors that a span wrote are
known, the whole span is read again at once, as in a Transformer-XL, in a few
products of many rows.

Letters of this file: A tokens of memory before the segment, C tokens of a
chunk, K tokens of a span, n chunks. A name that begins with d_ is a gradient.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

Tree = Any  # A pytree; every leaf [B, tokens, ...].


class MemoryScanBody(NamedTuple):
  """Functions that read and write memory, and settings of the backward pass.

  A is the number of tokens of memory that a chunk reads.

  Attributes:
    keys: (params, written, inputs) -> kv, the keys and values of the vectors
      that any number of tokens wrote. The keys and values of a token depend on
      no other token.
    read: (params, kv, x_BTD, inputs, first) -> (written, y_BTD), the vectors
      that n chunks write, and their outputs. `first` is the position of the
      first token of these chunks in the segment. In the leaves of kv,
      [B, A + n C, ...], chunk i sees A tokens, from token i C on; i and tokens
      are counted from 0.
    chunk: number of tokens C in a chunk.
    span: maximum number of tokens that the backward pass processes at once, but
      at least one chunk.
    parallel: whether gradients of parameters are computed for all tokens of a
      span at once. The backward pass then reads each token twice. If False,
      these gradients are computed chunk by chunk.
    policy: jax.checkpoint policy that selects which values of `read` are kept
      for the backward pass. Not used if `parallel`.
  """

  keys: Callable
  read: Callable
  chunk: int
  span: int
  parallel: bool
  policy: Callable = jax.checkpoint_policies.nothing_saveable


def memory_scan(body: MemoryScanBody, params, memory: Tree, x_BTD, inputs):
  """Reads a segment chunk by chunk.

  Args:
    body: functions that read and write.
    params: parameters of these functions.
    memory: vectors written before the segment. Leaves are [B, A, ...] for A
      tokens of memory; A may differ between leaves.
    x_BTD: the tokens of the segment; T is a multiple of `body.chunk`.
    inputs: argument of both functions that gets no gradients: a pytree, for
      example of masks and random keys.

  Returns:
    The memory after the segment, and y_BTD.
  """
  seen, y_BTD = _scan(body, params, memory, x_BTD, inputs)
  return jax.tree.map(
    lambda m, s: s[:, s.shape[1] - m.shape[1] :], memory, seen
  ), y_BTD


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(body, params, memory, x_BTD, inputs):
  """Returns the memory followed by all vectors that chunks wrote, and y_BTD.

  The arguments are those of memory_scan.
  """
  read = lambda *arguments: (body.read(*arguments), ())
  return _sweep(body, read, params, memory, x_BTD, inputs)[0]


def _forward(body, params, memory, x_BTD, inputs):
  read = functools.partial(read_with_pullback, body)
  results, pulls = _sweep(body, read, params, memory, x_BTD, inputs)
  return results, (params, results[0], x_BTD, inputs, pulls)


def _sweep(body, read, params, memory, x_BTD, inputs):
  """Returns the results of `_scan`, and the pullback of each chunk.

  The pullbacks are stacked by span and chunk.

  Args:
    body: MemoryScanBody.
    read: (arguments of body.read) -> (results of body.read, pullback).
    params, memory, x_BTD, inputs: as in memory_scan.
  """
  C, T = body.chunk, x_BTD.shape[1]
  K = divisor(T, C, body.span)

  def span(carry, j):
    seen, kv = carry  # Keys of the A tokens before the span.

    def step(carry, i):
      seen, kv = carry
      now = i * C
      window = jax.tree.map(
        lambda a: slice_tokens(a, now, a.shape[1] - K + C), kv
      )
      x_BCD = slice_tokens(x_BTD, j * K + now, C)
      (written, y_BCD), pull = read(params, window, x_BCD, inputs, j * K + now)
      new = body.keys(params, written, inputs)
      kv = jax.tree.map(lambda a, n: put(a, n, a.shape[1] - K + now), kv, new)
      seen = jax.tree.map(
        lambda a, n: put(a, n, a.shape[1] - T + j * K + now),
        seen,
        written,
      )
      return (seen, kv), (y_BCD, pull)

    longer = jax.tree.map(lambda a: pad(a, 0, K), kv)
    (seen, kv), (y, pulls) = jax.lax.scan(
      step, (seen, longer), jnp.arange(K // C)
    )
    kv = jax.tree.map(lambda a: a[:, K:], kv)
    return (seen, kv), (join(y), pulls)

  seen = jax.tree.map(lambda a: pad(a, 0, T), memory)
  kv = body.keys(params, memory, inputs)
  (seen, _), (y, pulls) = jax.lax.scan(span, (seen, kv), jnp.arange(T // K))
  return (seen, join(y)), pulls


def read_with_pullback(body, *arguments):
  """Returns the results of `body.read`, and its pullback.

  If body.parallel, () takes the place of the pullback. The pullback does not
  store the arguments of `read`: the keys of successive chunks overlap, and the
  parameters are the same in every chunk. `_by_chunks` inserts the arguments
  again.
  """
  if body.parallel:
    return body.read(*arguments), ()
  read = jax.checkpoint(body.read, prevent_cse=False, policy=body.policy)
  results, pull = jax.vjp(read, *arguments)
  # `args_res` is undocumented. JAX 0.10 has it; setup.py bounds the version.
  pull.args_res[:] = [None] * len(arguments)
  return results, pull


def _backward(body, residuals, gradients):
  """Returns gradients of params, memory and x_BTD; None for the inputs.

  Args:
    body: MemoryScanBody.
    residuals: params; seen, which is the memory followed by all vectors that
      chunks wrote; x_BTD; inputs; and the pullbacks, stacked by span and chunk.
    gradients: the gradients of seen and of y_BTD.
  """
  params, seen, x_BTD, inputs, pulls = residuals
  d_seen, d_y_BTD = gradients
  T = x_BTD.shape[1]
  K = divisor(T, body.chunk, body.span)
  memory = jax.tree.map(lambda a: a[:, : a.shape[1] - T], seen)
  keys = lambda params, written: body.keys(params, written, inputs)
  differentiate = _in_parallel if body.parallel else _by_chunks

  def span(carry, xs):
    j, pulls = xs
    at = j * K
    part = _Span(
      at,
      jax.tree.map(
        lambda m, s: slice_tokens(s, at, m.shape[1] + K), memory, seen
      ),
      slice_tokens(x_BTD, at, K),
      jax.tree.map(
        lambda m, d: slice_tokens(d, m.shape[1] + at, K), memory, d_seen
      ),
      slice_tokens(d_y_BTD, at, K),
      pulls,
    )
    d_params, d_kv = carry
    more, d_kv, d_x_BKD = differentiate(body, params, inputs, part, d_kv)
    return (jax.tree.map(jnp.add, d_params, more), d_kv), d_x_BKD

  kv = jax.eval_shape(keys, params, memory)
  # Gradients of many tokens are summed in float32.
  wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
  (d_params, d_kv), d_x = jax.lax.scan(
    span,
    (jax.tree.map(wide, params), jax.tree.map(wide, kv)),
    (jnp.arange(T // K), pulls),
    reverse=True,
  )
  d_kv = _like(d_kv, kv)
  if body.parallel:
    (d_memory,) = jax.vjp(functools.partial(keys, params), memory)[1](d_kv)
  else:
    more, d_memory = jax.vjp(keys, params, memory)[1](d_kv)
    d_params = jax.tree.map(jnp.add, d_params, more)
  d_memory = jax.tree.map(lambda a, d: a + d[:, : a.shape[1]], d_memory, d_seen)
  return _like(d_params, params), d_memory, join(d_x), None


def _like(gradients, tree):
  """Casts gradients to the dtypes of the arrays in `tree`."""
  return jax.tree.map(lambda d, a: d.astype(a.dtype), gradients, tree)


class _Span(NamedTuple):
  """K tokens of the segment, and the inputs of their backward pass.

  Attributes:
    at: position of the span's first token in the segment.
    seen: vectors written by the A tokens of memory before the span, then by the
      K tokens of the span.
    x_BKD: the tokens of the span.
    d_written: gradients of the vectors that the span wrote, only the part that
      comes through the memory after the segment.
    d_y_BKD: gradients of the span's outputs.
    pulls: pullbacks of the span's chunks, stacked; () if `parallel` is True.
  """

  at: jax.Array
  seen: Tree
  x_BKD: jax.Array
  d_written: Tree
  d_y_BKD: jax.Array
  pulls: Tree


def _in_parallel(body, params, inputs, span, d_kv):
  """Computes a span's gradients: recurrent ones first, others in parallel.

  The gradients of the vectors that the span wrote are recurrent. A is the
  number of tokens of memory that a chunk reads.

  Args:
    body: MemoryScanBody.
    params, inputs: as in memory_scan.
    span: the span.
    d_kv: gradients of the keys and values of the last A tokens up to the end of
      the span, only the part that comes from tokens after the span.

  Returns:
    Gradients of the parameters, to be summed over spans; gradients of the keys
    and values of the A tokens before the span, the part that comes from the
    span and from later tokens; and gradients of x_BKD, the span's tokens.
  """

  def pull(_, now, window, x_BCD, cotangents):
    read = lambda kv: body.read(params, kv, x_BCD, inputs, now)
    return (), *jax.vjp(read, window)[1](cotangents), ()

  def pull_keys(part, own):
    keys = lambda part: body.keys(params, part, inputs)
    return (), *jax.vjp(keys, part)[1](own)

  _, d_kv, d_written, _ = _backward_sweep(
    body, params, inputs, span, d_kv, (), pull, pull_keys
  )

  def read_span(params, x_BKD):
    kv = body.keys(params, span.seen, inputs)
    return body.read(params, kv, x_BKD, inputs, span.at)

  _, pull_span = jax.vjp(read_span, params, span.x_BKD)
  d_params, d_x_BKD = pull_span((d_written, span.d_y_BKD))
  return d_params, d_kv, d_x_BKD


def _by_chunks(body, params, inputs, span, d_kv):
  """Computes a span's gradients chunk by chunk; see `_in_parallel`.

  There, the gradients of the parameters include those through the keys and
  values that the span reads. Here, they include those through the keys and
  values of the span's own tokens instead, so `_backward` adds those through the
  keys and values of the memory before the segment.
  """

  def pull(pullback, now, window, x_BCD, cotangents):
    pullback.args_res[:] = [params, window, x_BCD, inputs, now]
    return pullback(cotangents)[:3]

  def pull_keys(part, own):
    keys = lambda params, part: body.keys(params, part, inputs)
    return jax.vjp(keys, params, part)[1](own)

  none = jax.tree.map(jnp.zeros_like, params)
  d_params, d_kv, _, d_x = _backward_sweep(
    body, params, inputs, span, d_kv, none, pull, pull_keys
  )
  return d_params, d_kv, join(d_x)


def _backward_sweep(
  body, params, inputs, span, d_kv, d_params, pull, pull_keys
):
  """Computes gradients chunk by chunk, from a span's last chunk to its first.

  "Keys" here means keys and values, and A is the number of tokens of memory
  that a chunk reads.

  Args:
    body, params, inputs, span, d_kv: see _in_parallel.
    d_params: zeros to which gradients of parameters are added; () if these
      gradients are not computed.
    pull: function (pullback, position, keys, tokens, gradients of the results
      of body.read) -> gradients of (params, keys, tokens), for one chunk.
      `position` is the position of the chunk's first token in the segment.
      Gradients of params and tokens are () if they are not computed.
    pull_keys: function (written, gradients of its keys) -> gradients of
      (params, written), for one chunk.

  Returns:
    Gradients of the parameters; gradients of the keys of the A tokens before
    the span; complete gradients of the vectors that the span wrote; and the
    gradients that `pull` returns for the tokens, stacked by chunk.
  """
  C, K = body.chunk, span.x_BKD.shape[1]
  kv = body.keys(params, span.seen, inputs)
  length = lambda a: a.shape[1] - K

  def step(carry, xs):
    i, pullback = xs
    d_params, d_kv = carry
    now = i * C
    own = jax.tree.map(lambda a: slice_tokens(a, length(a) + now, C), d_kv)
    own = _like(own, kv)
    part = jax.tree.map(
      lambda a: slice_tokens(a, length(a) + now, C), span.seen
    )
    more, d_part = pull_keys(part, own)
    d_params = jax.tree.map(jnp.add, d_params, more)
    d_part = jax.tree.map(
      lambda d, more: slice_tokens(d, now, C) + more, span.d_written, d_part
    )
    more, d_window, d_x = pull(
      pullback,
      span.at + now,
      jax.tree.map(lambda a: slice_tokens(a, now, length(a) + C), kv),
      slice_tokens(span.x_BKD, now, C),
      (d_part, slice_tokens(span.d_y_BKD, now, C)),
    )
    d_params = jax.tree.map(jnp.add, d_params, more)
    d_kv = jax.tree.map(
      lambda a, more: put(a, slice_tokens(a, now, more.shape[1]) + more, now),
      d_kv,
      d_window,
    )
    return (d_params, d_kv), (d_part, d_x)

  d_kv = jax.tree.map(lambda a: pad(a, K, 0), d_kv)
  (d_params, d_kv), (d_written, d_x) = jax.lax.scan(
    step, (d_params, d_kv), (jnp.arange(K // C), span.pulls), reverse=True
  )
  d_kv = jax.tree.map(lambda a: a[:, : length(a)], d_kv)
  return d_params, d_kv, jax.tree.map(join, d_written), d_x


_scan.defvjp(_forward, _backward)


def divisor(T: int, C: int, most: int) -> int:
  """Returns the largest multiple of C that divides T and is at most `most`.

  If there is none, the result is C.
  """
  multiples = range(C, min(most, T) + 1, C)
  return max((K for K in multiples if T % K == 0), default=C)


def slice_tokens(a, first, length: int):
  """Returns `length` tokens of an array, from position `first` on."""
  return jax.lax.dynamic_slice_in_dim(a, first, length, 1)


def put(a, part, first):
  """Returns `a` with `part` in place of its tokens from position `first` on."""
  return jax.lax.dynamic_update_slice_in_dim(a, part, first, 1)


def pad(a, before: int, after: int):
  """Returns `a` with zeros added before and after its tokens."""
  return jnp.pad(a, ((0, 0), (before, after)) + ((0, 0),) * (a.ndim - 2))


def join(a):
  """Joins the outputs of a scan: [n, B, C, ...] -> [B, n C, ...]."""
  a = jnp.moveaxis(a, 0, 1)
  return a.reshape(a.shape[0], -1, *a.shape[3:])
