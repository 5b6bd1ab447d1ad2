"""Embeddings against slow forms, their sizes, and what they refuse."""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.models.embedding import AdaptiveEmbedding
from meliad_rec.models.embedding import TiedEmbedding
from meliad_rec.models.embedding import UntiedEmbedding
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from tests import architectures as tiny

B, T, V, D = 3, 5, 31, 20
CUTOFFS, WIDTHS = (6, 17), (20, 6, 2)  # 20, 20 / 3 and 20 / 9.
EDGES = (0, *CUTOFFS, V)
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))
TOKENS.flat[:6] = (0, 5, 6, 16, 17, 30)  # Both ends of each cluster.
Y = np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)


def adaptive(**options):
  settings = {'cutoffs': CUTOFFS, 'width_divisor': 3} | options
  return AdaptiveEmbedding(V, D, **settings)


def both(module):
  return module(TOKENS), module.logits(Y)


def built(module):
  """Returns vectors, logits and parameters."""
  init = jax.jit(lambda rng: module.init_with_output(rng, method=both))
  (x, logits), params = init(jax.random.key(0))
  return np.asarray(x), np.asarray(logits), params['params']


def test_tied():
  x, logits, params = built(TiedEmbedding(V, D))
  table = params['embedding']
  np.testing.assert_array_equal(x, table[TOKENS])
  np.testing.assert_allclose(logits, Y @ table.T / math.sqrt(D), rtol=1e-4)


def test_tied_begins_as_the_embedding_of_flax():
  """Runs depend on the values, not only on the distribution."""
  _, _, params = built(TiedEmbedding(V, D))
  flax = nn.Embed(V, D, embedding_init=nn.initializers.normal(1.0))
  expected = flax.init(jax.random.key(0), TOKENS)['params']
  assert params.keys() == expected.keys()
  np.testing.assert_array_equal(params['embedding'], expected['embedding'])


def test_untied():
  module = UntiedEmbedding(V, D)
  _, _, params = built(module)
  assert params['output'].keys() == {'kernel', 'bias'}
  params['output']['bias'] = jnp.arange(V, dtype=jnp.float32)
  x, logits = module.apply({'params': params}, method=both)
  np.testing.assert_array_equal(x, params['embedding'][TOKENS])
  expected = Y @ params['output']['kernel'] + np.arange(V)
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


@pytest.mark.parametrize('tied', [True, False])
def test_adaptive_is_its_definition(tied):
  module = adaptive(tied=tied)
  x, logits, params = built(module)
  assert logits.dtype == np.float32
  np.testing.assert_allclose(np.exp(logits).sum(-1), 1, rtol=1e-5)
  exact = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  expected_x, expected = slow_adaptive(exact, tied)
  np.testing.assert_allclose(x, expected_x, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('tied', [True, False])
def test_gradients_of_adaptive_are_those_of_its_definition(tied):
  """Compares with differences in float64, along one direction each."""
  module = adaptive(tied=tied)
  _, _, params = built(module)
  rng = np.random.default_rng(2)
  weights = rng.normal(size=Y.shape), rng.normal(size=(B, T, V))
  loss = lambda outputs: sum(
    (w * a).sum() for w, a in zip(weights, outputs, strict=True)
  )
  forward = lambda p: module.apply({'params': p}, method=both)
  grads = jax.jit(jax.grad(lambda p: loss(forward(p))))(params)
  leaves, tree = jax.tree.flatten(params)
  for i, (leaf, grad) in enumerate(
    zip(leaves, jax.tree.leaves(grads), strict=True)
  ):
    way = rng.normal(size=leaf.shape)
    ends = []
    for step in 1e-5, -1e-5:
      moved = [np.asarray(a, np.float64) for a in leaves]
      moved[i] = moved[i] + step * way
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


@pytest.mark.parametrize('tied', [True, False])
def test_adaptive_sizes(tied):
  _, _, params = built(adaptive(tied=tied))
  sizes = np.diff(EDGES)
  tables = sum(n * e for n, e in zip(sizes, WIDTHS, strict=True))
  maps = D * sum(WIDTHS)
  expected = tables + maps + len(CUTOFFS) * D
  # The first cluster's map is of the input alone.
  expected += 0 if tied else tables + maps - D * D
  assert sum(a.size for a in jax.tree.leaves(params)) == expected


@pytest.mark.parametrize('tied, millions', [(True, 247), (False, 291)])
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
  'options',
  [
    *({'cutoffs': c} for c in ((), (17, 6), (6, 6), (0, 6), (6, 31))),
    {'width_divisor': 5},
    {'width_divisor': 0},
  ],
)
def test_impossible_clusters(options):
  (name,) = options
  with pytest.raises(ValueError, match=f'{name} must'):
    built(adaptive(**options))


KINDS = {
  'tied': (TiedEmbedding(V, D), math.sqrt(D)),
  'untied': (UntiedEmbedding(V, D), 1),
  'adaptive': (adaptive(), math.sqrt(D)),
  'adaptive_untied': (adaptive(tied=False), math.sqrt(D)),
}
every = pytest.mark.parametrize('kind', KINDS)


@every
def test_the_divisor_may_be_given(kind):
  module, default = KINDS[kind]
  _, logits, params = built(module)
  divided = lambda by: module.clone(logits_divisor=by).apply(
    {'params': params}, Y, method='logits'
  )
  np.testing.assert_allclose(divided(default), logits, rtol=1e-5, atol=1e-6)
  assert np.abs(divided(2 * default) - logits).max() > 0.1


@every
def test_an_id_beyond_the_vocabulary_is_told(kind):
  module, _ = KINDS[kind]
  _, _, params = built(module)
  x = module.apply({'params': params}, np.array([[V - 1, V, V + 9]]))
  np.testing.assert_array_equal(
    np.isnan(x).all(-1)[0], [False, True, True], str(x)
  )


@every
def test_every_parameter_matches_exactly_one_sharding_rule(kind):
  module, _ = KINDS[kind]

  def embedding(vocab, d_model, logits_divisor):
    return module.clone(vocab=vocab, d_model=d_model)

  model = Model(tiny.V, tiny.windowed(1), tiny.D, embedding=embedding)
  shapes = jax.eval_shape(
    lambda rng: initialize(model, rng, tiny.B, tiny.T), jax.random.key(0)
  )
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
    name = partition.path_string(path)
    if name.startswith('embed/'):
      assert len(partition.logical_axes(name)) == leaf.ndim, name


@every
def test_vectors_of_inputs_begin_as_wide_as_is_said(kind):
  module, _ = KINDS[kind]
  plain, logits, params = built(module)
  narrow, changed, drawn = built(module.clone(deviation=0.02))
  np.testing.assert_allclose(narrow, 0.02 * plain, rtol=1e-4, atol=1e-7)
  assert 0.9 < plain.std() < 1.1
  inputs = {name for name in params if name.startswith('embedding')}
  assert inputs
  for name in params:
    scale = 0.02 if name in inputs else 1
    jax.tree.map(
      lambda a, b, by=scale: np.testing.assert_allclose(a, by * b, rtol=1e-4),
      *(drawn[name], params[name]),
    )


def test_vectors_need_some_deviation():
  with pytest.raises(ValueError, match='TiedEmbedding.deviation'):
    built(TiedEmbedding(V, D, deviation=0))
