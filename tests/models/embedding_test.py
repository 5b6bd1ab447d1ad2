"""Embeddings against slow forms, their sizes, and what they refuse."""

import functools
import math

from flax import linen as nn
import jax
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.models.embedding import AdaptiveEmbedding
from meliad_rec.models.embedding import ScaledEmbedding
from meliad_rec.models.embedding import TiedEmbedding
from meliad_rec.models.embedding import UntiedEmbedding
from tests.cells import draw

B, T, V, D = 3, 5, 31, 20
CUTOFFS, WIDTHS = (6, 17), (20, 6, 2)  # 20, 20 / 3 and 20 / 9.
EDGES = (0, *CUTOFFS, V)
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))
TOKENS.flat[:6] = (0, 5, 6, 16, 17, 30)  # Both ends of each cluster.
Y = draw(B, T, D, seed=1)


def adaptive(**options):
  settings = {'cutoffs': CUTOFFS, 'width_divisor': 3} | options
  return AdaptiveEmbedding(V, D, **settings)


# And divisors of their logits.
KINDS = {
  'tied': (TiedEmbedding(V, D), math.sqrt(D)),
  'scaled': (ScaledEmbedding(V, D), 1),
  'untied': (UntiedEmbedding(V, D), 1),
  'adaptive': (adaptive(), math.sqrt(D)),
  'adaptive_untied': (adaptive(tied=False), math.sqrt(D)),
}
every = pytest.mark.parametrize('kind', KINDS)


def both(module):
  return module(TOKENS), module.logits(Y)


def built(module):
  """Returns vectors, logits and parameters."""
  init = jax.jit(lambda rng: module.init_with_output(rng, method=both))
  (x, logits), params = init(jax.random.key(0))
  return np.asarray(x), np.asarray(logits), params['params']


@functools.cache
def example(kind):
  """Returns what `built` does; do not change it."""
  return built(KINDS[kind][0])


def test_tied():
  """Runs depend on the first values, not only on their distribution."""
  x, logits, params = example('tied')
  flax = nn.Embed(V, D, embedding_init=nn.initializers.normal(1.0))
  table = flax.init(jax.random.key(0), TOKENS)['params']['embedding']
  np.testing.assert_array_equal(params['embedding'], table)
  np.testing.assert_array_equal(x, table[TOKENS])
  np.testing.assert_allclose(logits, Y @ table.T / math.sqrt(D), rtol=1e-4)


def test_scaled():
  """The function of new parameters is that of TiedEmbedding."""
  (x, logits, params), tied = example('scaled'), example('tied')
  table = params['embedding'] * math.sqrt(D)
  np.testing.assert_allclose(table, tied[2]['embedding'], rtol=1e-5)
  np.testing.assert_allclose(x, tied[0], rtol=1e-5)
  np.testing.assert_allclose(logits, tied[1], rtol=1e-4, atol=1e-5)


def test_untied():
  module = UntiedEmbedding(V, D)
  params = example('untied')[2]
  bias = np.arange(V, dtype=np.float32)
  params = params | {'output': params['output'] | {'bias': bias}}
  x, logits = jax.jit(functools.partial(module.apply, method=both))(
    {'params': params}
  )
  np.testing.assert_array_equal(x, params['embedding'][TOKENS])
  expected = Y @ params['output']['kernel'] + bias
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def softmax(x):
  return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def slow_adaptive(params, tied):
  """Computes x_BTD and logits_BTV by definition, token by token."""
  out = 'embedding' if tied else 'output'
  maps = 'maps' if tied else 'output_maps'
  cluster_of = [sum(i >= c for c in CUTOFFS) for i in range(V)]
  x, logits = [], []
  for token in TOKENS.flat:
    i = cluster_of[token]
    row = params[f'embedding_{i}'][token - EDGES[i]]
    x.append(row @ params[f'maps_{i}']['kernel'])
  for y in Y.reshape(-1, D):
    head = [v @ y for v in params[f'{out}_0']]
    head += [v @ y for v in params['clusters']]
    p_first = softmax(np.array(head) / math.sqrt(D))
    for token in range(V):
      i = cluster_of[token]
      if i == 0:
        logits.append(np.log(p_first[token]))
        continue
      narrow = params[f'{maps}_{i}']['kernel'] @ y
      p_inside = softmax(params[f'{out}_{i}'] @ narrow / math.sqrt(D))
      p_cluster = p_first[CUTOFFS[0] + i - 1]
      logits.append(np.log(p_cluster * p_inside[token - EDGES[i]]))
  return np.reshape(x, Y.shape), np.reshape(logits, (B, T, V))


@pytest.mark.parametrize(
  'tied', [pytest.param(True, marks=pytest.mark.slow), False]
)
def test_adaptive_is_its_definition(tied):
  """Compares gradients with differences in float64, in one direction each."""
  kind = 'adaptive' if tied else 'adaptive_untied'
  x, logits, params = example(kind)
  assert logits.dtype == np.float32
  np.testing.assert_allclose(np.exp(logits).sum(-1), 1, rtol=1e-5)
  exact = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  expected_x, expected = slow_adaptive(exact, tied)
  np.testing.assert_allclose(x, expected_x, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
  rng = np.random.default_rng(2)
  weights = rng.normal(size=Y.shape), rng.normal(size=(B, T, V))
  loss = lambda outputs: sum(
    (w * a).sum() for w, a in zip(weights, outputs, strict=True)
  )
  forward = lambda p: KINDS[kind][0].apply({'params': p}, method=both)
  grads = jax.jit(jax.grad(lambda p: loss(forward(p))))(params)
  leaves, tree = jax.tree.flatten(exact)
  for i, grad in enumerate(jax.tree.leaves(grads)):
    way, ends = rng.normal(size=grad.shape), []
    for step in 1e-5, -1e-5:
      moved = [a + step * way if a is leaves[i] else a for a in leaves]
      ends.append(loss(slow_adaptive(jax.tree.unflatten(tree, moved), tied)))
    slope = (ends[0] - ends[1]) / 2e-5
    assert abs(slope) > 1e-2
    np.testing.assert_allclose(np.sum(grad * way), slope, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('tied', [True, False])
def test_logits_and_vectors_begin_with_variance_1(tied):
  V, D = 900, 240
  module = AdaptiveEmbedding(V, D, cutoffs=(300, 600), tied=tied)
  y = np.random.default_rng(0).normal(size=(1, 50, D)).astype(np.float32)
  forward = lambda m: (m(np.arange(V)[None]), m.logits(y))
  init = jax.jit(lambda rng: module.init_with_output(rng, method=forward))
  (x, logits), _ = init(jax.random.key(0))
  for first in 0, 300, 600:
    there = slice(first, first + 300)
    np.testing.assert_allclose(np.std(x[0, there]), 1, rtol=0.1)
    spread = np.std(logits[0, :, there], -1).mean()
    np.testing.assert_allclose(spread, 1, rtol=0.1)


@pytest.mark.parametrize(('tied', 'millions'), [(True, 247), (False, 291)])
def test_sizes_on_wikitext_103_are_those_of_the_paper(tied, millions):
  """Baevski and Auli 2019, table 2: 16 layers of width 1024, 4096 within."""
  V, D = 267_744, 1024
  module = AdaptiveEmbedding(V, D, cutoffs=(20_000, 60_000), tied=tied)
  forward = lambda m: m.logits(m(np.zeros((1, 1), int)))
  shapes = jax.eval_shape(
    lambda rng: module.init(rng, method=forward), jax.random.key(0)
  )
  embedding = sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))
  layer = 4 * (D * D + D) + 2 * D * 4 * D + 5 * D + 4 * D
  assert round((embedding + 16 * layer) / 1e6) == millions


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    *(('cutoffs', c) for c in ((), (6, 6), (0, 6), (6, 31))),
    *(('width_divisor', k) for k in (5, 0)),
    ('stddev', 0),
  ],
)
def test_impossible_settings(name, value):
  with pytest.raises(ValueError, match=f'{name} must'):
    built(adaptive(**{name: value}))


@every
def test_the_divisor_may_be_given_and_an_id_beyond_the_vocabulary_is_told(kind):
  module, default = KINDS[kind]
  _, logits, params = example(kind)
  divided = lambda by: module.clone(logits_divisor=by).apply(
    {'params': params}, Y, method='logits'
  )
  found = jax.jit(lambda: (divided(default), divided(2 * default)))()
  np.testing.assert_allclose(found[0], logits, rtol=1e-5, atol=1e-6)
  assert np.abs(found[1] - logits).max() > 0.1
  ids = np.array([[V - 1, V, V + 9]])
  x = jax.jit(module.apply)({'params': params}, ids)
  np.testing.assert_array_equal(np.isnan(x).all(-1)[0], [False, True, True])


@every
def test_vectors_of_inputs_begin_as_wide_as_is_said(kind):
  module, _ = KINDS[kind]
  plain, _, params = example(kind)
  narrow, _, drawn = built(module.clone(stddev=0.02))
  np.testing.assert_allclose(narrow, 0.02 * plain, rtol=1e-4, atol=1e-7)
  assert 0.9 < plain.std() < 1.1
  named = jax.tree.leaves_with_path(params)
  for (path, a), b in zip(named, jax.tree.leaves(drawn), strict=True):
    name = partition.path_string(path)
    scale = 0.02 if name.startswith('embedding') else 1
    np.testing.assert_allclose(b, scale * a, rtol=1e-4)
    assert len(partition.logical_axes(f'embed/{name}')) == a.ndim, name


@pytest.mark.parametrize('kind', ['tied', 'scaled'])
def test_vectors_of_start_and_end_may_begin_wider_than_those_of_words(kind):
  module = KINDS[kind][0].clone(stddev=0.02)
  words, found = (
    built(each)[2]['embedding'] for each in (module, module.clone(ends=(1, -1)))
  )
  is_end_V = np.isin(np.arange(V), [1, V - 1])
  np.testing.assert_allclose(found[~is_end_V], words[~is_end_V], rtol=1e-6)
  np.testing.assert_allclose(0.02 * found[is_end_V], words[is_end_V], rtol=1e-5)
  for wrong in V, -V - 1:
    with pytest.raises(ValueError, match=f'ends must .* from -{V} to {V - 1}'):
      built(module.clone(ends=(1, wrong)))
