"""How token ids become vectors, and outputs become logits.

Letters of this file: N ids of a cluster, E the width of their vectors.
"""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class Embedding(nn.Module):
  """Base class.

  Attributes:
    vocab: ids V.
    d_model: width D.
    logits_divisor: of products with vectors; None: what the class says.
    deviation: standard deviation of the numbers of a new model's vectors of
      inputs.
    own_logits: whether logits have parameters that inputs do not have.
  """

  vocab: int
  d_model: int
  logits_divisor: float | None = None
  deviation: float = 1.0

  @property
  def own_logits(self) -> bool:
    return False

  def __call__(self, tokens_BT):
    """x_BTD float32, NaN at ids beyond the vocabulary."""
    raise NotImplementedError

  def logits(self, y_BTD):
    """logits_BTV float32, from y_BTD float32."""
    raise NotImplementedError

  def divisor(self, default: float) -> float:
    return default if self.logits_divisor is None else self.logits_divisor

  def vectors(self, name: str, *shape: int, deviation: float = 1.0):
    """A parameter whose numbers have this standard deviation.

    Raises:
      ValueError: it is not above 0.
    """
    if deviation <= 0:
      raise ValueError(
        f'The deviation of vectors is {deviation}; it needs to be above 0. Set '
        f'embedding.{type(self).__name__}.deviation.'
      )
    return self.param(name, nn.initializers.normal(deviation), shape)

  def table(self):
    """The vectors of inputs of all ids."""
    shape = self.vocab, self.d_model
    return self.vectors('embedding', *shape, deviation=self.deviation)


class TiedEmbedding(Embedding):
  """Logits are products with the vectors; divided by sqrt(D) by default."""

  def setup(self):
    self.table_VD = self.table()

  def __call__(self, tokens_BT):
    return jnp.take(self.table_VD, tokens_BT, axis=0)

  def logits(self, y_BTD):
    logits_BTV = jnp.einsum('btd,vd->btv', y_BTD, self.table_VD)
    return logits_BTV / self.divisor(math.sqrt(self.d_model))


class UntiedEmbedding(Embedding):
  """A matrix and a bias of its own for logits; by default not divided."""

  @property
  def own_logits(self):
    return True

  def setup(self):
    self.table_VD = self.table()
    self.output = nn.Dense(self.vocab)

  def __call__(self, tokens_BT):
    return jnp.take(self.table_VD, tokens_BT, axis=0)

  def logits(self, y_BTD):
    return self.output(y_BTD) / self.divisor(1.0)


class AdaptiveEmbedding(Embedding, kw_only=True):
  """Narrow vectors for rare ids, and logits in two steps.

  Ids must be sorted by frequency, the most frequent first, for this to be of
  use: see to that when you make the vocabulary. Cluster i holds the ids between
  two cutoffs, and its vectors have D / k^i numbers, which a matrix maps to D
  (Baevski and Auli 2019, section 3). The first step chooses an id of cluster 0
  or another cluster; the second, within that, an id (Grave et al. 2017, section
  4). Logits are logarithms of probabilities: normalised, so that a z-loss finds
  nothing to do.

  Attributes:
    cutoffs: the first id of each cluster but the first, rising.
    width_divisor: k.
    tied: whether both steps use the vectors and matrices of the input; only
      the matrix of cluster 0 is of the input alone. If not, they have their
      own. Products are divided by sqrt(D) by default either way.
  """

  cutoffs: tuple[int, ...]
  width_divisor: int = 4
  tied: bool = True

  @property
  def own_logits(self):
    return not self.tied

  def setup(self):
    V, D, k = self.vocab, self.d_model, self.width_divisor
    edges = 0, *self.cutoffs, V
    if not self.cutoffs or np.any(np.diff(edges) < 1):
      raise ValueError(
        f'The cutoffs are {self.cutoffs} of {V} ids; they need one or more '
        f'numbers that rise, from 1 to {V - 1}. Set CUTOFFS.'
      )
    if k < 1 or k ** len(self.cutoffs) > D:
      raise ValueError(
        f'Vectors of {D} numbers are to narrow {len(self.cutoffs)} times by '
        f'{k}, and 1 must be left; set embedding.AdaptiveEmbedding.'
        'width_divisor.'
      )
    shapes = [(n, D // k**i) for i, n in enumerate(np.diff(edges).tolist())]
    tables = lambda name, deviation: [
      self.vectors(f'{name}_{i}', *shape, deviation=deviation)
      for i, shape in enumerate(shapes)
    ]
    self.tables = tables('embedding', self.deviation)
    self.maps = [Map(E, D) for _, E in shapes]
    self.clusters_CD = self.vectors('clusters', len(self.cutoffs), D)
    if not self.tied:
      self.output_tables = tables('output', 1.0)
      self.output_maps = [Map(E, D) for _, E in shapes]

  def __call__(self, tokens_BT):
    cluster_BT = jnp.searchsorted(
      jnp.asarray(self.cutoffs), tokens_BT, side='right'
    )
    x_BTD = 0
    for i, first in enumerate((0, *self.cutoffs)):
      inside_BT = cluster_BT == i
      ids_BT = jnp.where(inside_BT, tokens_BT - first, 0)
      e_BTE = jnp.take(self.tables[i], ids_BT, axis=0)
      x_BTD += jnp.where(inside_BT[..., None], self.maps[i].widen(e_BTE), 0)
    return x_BTD

  def logits(self, y_BTD):
    tables, maps = self.tables, self.maps
    if not self.tied:
      tables, maps = self.output_tables, self.output_maps
    y_BTD = y_BTD / self.divisor(math.sqrt(self.d_model))
    product = lambda y, table: jnp.einsum('bte,ne->btn', y, table)
    N = len(tables[0])
    first = jnp.concatenate([tables[0], self.clusters_CD])
    first_BTN = jax.nn.log_softmax(product(y_BTD, first))
    parts = [first_BTN[..., :N]]
    for i in range(1, len(tables)):
      within_BTN = product(maps[i].narrow(y_BTD), tables[i])
      cluster_BT1 = first_BTN[..., N + i - 1, None]
      parts.append(cluster_BT1 + jax.nn.log_softmax(within_BTN))
    return jnp.concatenate(parts, -1)


class Map(nn.Module):
  """A matrix between vectors of a cluster and those of the model."""

  width: int
  d_model: int

  def setup(self):
    shape = self.width, self.d_model
    self.kernel_ED = self.param('kernel', nn.initializers.lecun_normal(), shape)

  def widen(self, e_BTE):
    return jnp.einsum('bte,ed->btd', e_BTE, self.kernel_ED)

  def narrow(self, y_BTD):
    return jnp.einsum('btd,ed->bte', y_BTD, self.kernel_ED)
