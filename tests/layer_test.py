"""The layer: pre-norm attention, then a pre-norm MLP, each with a residual."""

import jax
import numpy as np
import pytest

from meliad_rec.layer import Layer
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import K


@pytest.mark.parametrize('has_memory', [False, True])
def test_layer_is_two_residual_blocks(has_memory):
  T, S = 6, 4
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  x, slots = draw(B, T, D), draw(B, S, D)
  layer = Layer(config(), has_memory)

  def forward(m):
    n = m.enter(x)
    past = m.attention.config.empty_past(B).append(m.kv(n, np.ones((B, T))))
    memory = m.attention.kv(slots) if has_memory else None
    heads = [m.attention.read_past(n, past)]
    if has_memory:
      heads.append(m.attention.read_memory(n, memory))
    return m(x, n, past, memory), heads

  run = jax.jit(lambda r: layer.init_with_output(r, method=forward))
  (y, heads), params = run(jax.random.key(0))
  p = params['params']
  kernel = np.reshape(p['attention']['output']['linear']['kernel'], (-1, D))
  assert kernel.shape == ((1 + has_memory) * H * K, D)
  x = x + np.concatenate(heads, -1) @ kernel
  n = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  hidden = np.maximum(n @ p['mlp']['hidden']['kernel'], 0)
  x = x + hidden @ p['mlp']['output']['linear']['kernel']
  np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-4)


def test_three_dropouts_change_what_they_should():
  """After the first norm, of probabilities, of the MLP's output."""
  T = 6
  x = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
  layer = Layer(config(dropout=0.5))
  mask = np.ones((B, T), bool)

  def parts(m):
    n = m.enter(x)
    past = m.attention.config.empty_past(B).append(m.kv(n, mask))
    heads = m.attention.read_past(n, past)
    between = m.attention.write(x, heads)
    return n, between - x, m.finish(x, heads) - between

  params = jax.jit(lambda r: layer.init(r, method=parts))(jax.random.key(0))
  n, attended, added = layer.apply(
    params, method=parts, rngs={'dropout': jax.random.key(1)}
  )
  share = lambda a: float((np.asarray(a)[0, 1:] == 0).mean())
  assert 0.3 < share(n) < 0.7
  assert share(attended) == 0  # The output of attention is not dropped.
  assert 0.3 < share(added) < 0.7
