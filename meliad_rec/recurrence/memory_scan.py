"""Recurrence over a memory of what the model itself wrote, kept once.

Chunk by chunk, a model reads the memory that the chunks before it wrote, and
writes its own (Fan et al. 2020; Ju et al. 2021). The backward pass of a plain
scan keeps the window of keys and values of every chunk, many times the text.
This one keeps what was written, once, and makes the keys again. Backwards, from
the last chunk to the first, it finds the gradients of what was written, which
alone recur. Chunk by chunk it keeps of each `read` what a policy says. Short
chunks leave the gradients of parameters for later: with all that was written
known, a span of them is read in parallel, as a Transformer-XL reads, in
products of many rows instead of a few.

Parts of arrays along axis 1, that of tokens, and how a scan stacks them.

The backward pass of a memory scan, from the last token to the first.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp


def divisor(T: int, C: int, most: int) -> int:
  """The most tokens, in whole chunks, that divide T; up to `most` if it can."""
  few = range(C, min(most, T) + 1, C)
  return max((K for K in few if T % K == 0), default=C)


def slice_tokens(a, first, length: int):
  return jax.lax.dynamic_slice_in_dim(a, first, length, 1)


def put(a, part, first):
  return jax.lax.dynamic_update_slice_in_dim(a, part, first, 1)


def pad(a, before: int, behind: int):
  return jnp.pad(a, ((0, 0), (before, behind)) + ((0, 0),) * (a.ndim - 2))


def join(a):
  """[n, B, C, ...] of a scan -> [B, n C, ...]."""
  a = jnp.moveaxis(a, 0, 1)
  return a.reshape(a.shape[0], -1, *a.shape[3:])


Tree = Any  # A pytree; every leaf [B, tokens, ...].


def read_with_pullback(model, *arguments):
  """What `model.read` gives, and its pullback; of a parallel one nothing.

  The pullback keeps none of the arguments, and is given them again: windows of
  keys overlap, and every chunk has the same parameters.
  """
  if model.parallel:
    return model.read(*arguments), ()
  body = jax.checkpoint(model.read, prevent_cse=False, policy=model.policy)
  found, pull = jax.vjp(body, *arguments)
  pull.args_res[:] = [None] * len(arguments)
  return found, pull


def backward(model, kept, gradients):
  """Gradients of params, memory and x_BTD; None for the inputs.

  Args:
    model: of scan.py.
    kept: params; seen, which is memory and all that was written behind it;
      x_BTD; inputs; and what `read` keeps of each chunk of each span.
    gradients: of seen, and of y_BTD.
  """
  params, seen, x_BTD, inputs, pulls = kept
  d_seen, d_y_BTD = gradients
  T = x_BTD.shape[1]
  K = divisor(T, model.chunk, model.span)
  memory = jax.tree.map(lambda a: a[:, : a.shape[1] - T], seen)
  keys = lambda params, written: model.keys(params, written, inputs)
  way = _in_parallel if model.parallel else _by_chunks

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
    more, d_kv, d_x_BKD = way(model, params, inputs, part, d_kv)
    return (jax.tree.map(jnp.add, d_params, more), d_kv), d_x_BKD

  kv = jax.eval_shape(keys, params, memory)
  none = lambda a: jnp.zeros(a.shape, a.dtype)
  # Many tokens read a key: their gradients add up in float32.
  wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
  (d_params, d_kv), d_x = jax.lax.scan(
    span,
    (jax.tree.map(none, params), jax.tree.map(wide, kv)),
    (jnp.arange(T // K), pulls),
    reverse=True,
  )
  d_kv = _like(d_kv, kv)
  if model.parallel:
    (d_memory,) = jax.vjp(functools.partial(keys, params), memory)[1](d_kv)
  else:
    more, d_memory = jax.vjp(keys, params, memory)[1](d_kv)
    d_params = jax.tree.map(jnp.add, d_params, more)
  d_memory = jax.tree.map(lambda a, d: a + d[:, : a.shape[1]], d_memory, d_seen)
  return d_params, d_memory, join(d_x), None


def _like(gradients, tree):
  """Gradients as numbers of the kind that they are of."""
  return jax.tree.map(lambda d, a: d.astype(a.dtype), gradients, tree)


class _Span(NamedTuple):
  """K tokens of the segment, and what the backward pass knows of them."""

  at: jax.Array  # The first one.
  seen: Tree  # Written at the A tokens before them, and at them.
  x_BKD: jax.Array
  d_written: Tree  # Gradients from outside of the scan.
  d_y_BKD: jax.Array
  pulls: Tree  # What is kept of each chunk.


def _in_parallel(model, params, inputs, span, d_kv):
  """Gradients of a span: what recurs first, then the rest in parallel.

  Args:
    d_kv: of the keys of the A tokens before the span's end, by later ones.

  Returns:
    Gradients of the parameters, of the keys of the A tokens before the span,
    and of x_BKD.
  """

  def pull(_, now, window, x_BCD, cotangents):
    read_with_pullback = lambda kv: model.read(params, kv, x_BCD, inputs, now)
    return (), *jax.vjp(read_with_pullback, window)[1](cotangents), ()

  def pull_keys(part, own):
    keys = lambda part: model.keys(params, part, inputs)
    return (), *jax.vjp(keys, part)[1](own)

  _, d_kv, d_written, _ = _backward_sweep(
    model, params, inputs, span, d_kv, (), pull, pull_keys
  )

  def all_(params, x_BKD):
    kv = model.keys(params, span.seen, inputs)
    return model.read(params, kv, x_BKD, inputs, span.at)

  _, back = jax.vjp(all_, params, span.x_BKD)
  d_params, d_x_BKD = back((d_written, span.d_y_BKD))
  return d_params, d_kv, d_x_BKD


def _by_chunks(model, params, inputs, span, d_kv):
  """As _in_parallel; every gradient at its chunk."""

  def pull(kept, now, window, x_BCD, cotangents):
    kept.args_res[:] = [params, window, x_BCD, inputs, now]
    return kept(cotangents)[:3]

  def pull_keys(part, own):
    keys = lambda params, part: model.keys(params, part, inputs)
    return jax.vjp(keys, params, part)[1](own)

  none = jax.tree.map(jnp.zeros_like, params)
  d_params, d_kv, _, d_x = _backward_sweep(
    model, params, inputs, span, d_kv, none, pull, pull_keys
  )
  return d_params, d_kv, join(d_x)


def _backward_sweep(
  model, params, inputs, span, d_kv, d_params, pull, pull_keys
):
  """The recurrence of a span's gradients, from its last chunk to its first.

  Returns:
    d_params; d_kv of the A tokens before the span; all of d_written; and what
    `pull` gives for the tokens.
  """
  C, K = model.chunk, span.x_BKD.shape[1]
  kv = model.keys(params, span.seen, inputs)
  length = lambda a: a.shape[1] - K

  def step(carry, xs):
    i, kept = xs
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
      kept,
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


Tree = Any  # A pytree; every leaf [B, tokens, ...].


class MemoryScanBody(NamedTuple):
  """What reads and writes.

  Attributes:
    keys: (params, written, inputs) -> kv. What queries see of what was written
      at any number of tokens, each by itself.
    read: (params, kv, x_BTD, inputs, first) -> (written, y_BTD). Reads n
      chunks; `first` is the position of their first token in the segment.
      Chunk i sees,
      of each leaf of kv [B, A + n C, ...], the A tokens from i C on.
    chunk: C.
    span: tokens whose keys the backward pass holds at once, at most.
    parallel: whether gradients of parameters are found span by span, in
      parallel, which computes all twice, or chunk by chunk.
    policy: chunk by chunk, what is kept of `read`: a policy of jax.checkpoint.
      Of its arguments nothing is. Not used in parallel.
  """

  keys: Callable
  read: Callable
  chunk: int
  span: int
  parallel: bool
  policy: Callable = jax.checkpoint_policies.nothing_saveable


def memory_scan(model: MemoryScanBody, params, memory: Tree, x_BTD, inputs):
  """Reads a segment.

  Args:
    model: what reads and writes.
    params: its parameters.
    memory: what was written before; each leaf [B, A, ...], its own A.
    x_BTD: the segment's tokens, whole chunks.
    inputs: what both need that has no gradients: masks, keys of dropout.

  Returns:
    The memory behind the segment, and y_BTD.
  """
  seen, y_BTD = _scan(model, params, memory, x_BTD, inputs)
  return jax.tree.map(
    lambda m, s: s[:, s.shape[1] - m.shape[1] :], memory, seen
  ), y_BTD


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(model, params, memory, x_BTD, inputs):
  """Memory and all that was written behind it, and y_BTD."""
  read = lambda *arguments: (model.read(*arguments), ())
  return _sweep(model, read, params, memory, x_BTD, inputs)[0]


def _forward(model, params, memory, x_BTD, inputs):
  read = functools.partial(read_with_pullback, model)
  found, kept = _sweep(model, read, params, memory, x_BTD, inputs)
  return found, (params, found[0], x_BTD, inputs, kept)


_scan.defvjp(_forward, backward)


def _sweep(model, read, params, memory, x_BTD, inputs):
  """What `_scan` gives, and what `read` keeps of each chunk of each span."""
  C, T = model.chunk, x_BTD.shape[1]
  K = divisor(T, C, model.span)

  def span(carry, j):
    seen, kv = carry  # Keys of the A tokens before the span.

    def step(carry, i):
      seen, kv = carry
      now = i * C
      window = jax.tree.map(
        lambda a: slice_tokens(a, now, a.shape[1] - K + C), kv
      )
      x_BCD = slice_tokens(x_BTD, j * K + now, C)
      (written, y_BCD), kept = read(params, window, x_BCD, inputs, j * K + now)
      new = model.keys(params, written, inputs)
      kv = jax.tree.map(lambda a, n: put(a, n, a.shape[1] - K + now), kv, new)
      seen = jax.tree.map(
        lambda a, n: put(a, n, a.shape[1] - T + j * K + now),
        seen,
        written,
      )
      return (seen, kv), (y_BCD, kept)

    longer = jax.tree.map(lambda a: pad(a, 0, K), kv)
    (seen, kv), (y, kept) = jax.lax.scan(
      step, (seen, longer), jnp.arange(K // C)
    )
    kv = jax.tree.map(lambda a: a[:, K:], kv)
    return (seen, kv), (join(y), kept)

  seen = jax.tree.map(lambda a: pad(a, 0, T), memory)
  kv = model.keys(params, memory, inputs)
  (seen, _), (y, kept) = jax.lax.scan(span, (seen, kv), jnp.arange(T // K))
  return (seen, join(y)), kept
