"""Embeddings of token ids, and logits of ids from the outputs of a model.

Letters of this file: N ids of a cluster (see AdaptiveEmbedding), E width of
their vectors, C clusters except cluster 0.
"""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.distributed import weight_update


class Embedding(nn.Module):
  """Base class of embeddings.

  Attributes:
    vocab: number of ids V.
    d_model: width D.
    logits_divisor: number by which logits are divided, or in AdaptiveEmbedding
      the outputs from which they are computed. None means the default of the
      class.
    stddev: standard deviation of the initial input vectors.
    has_output_params: whether logits are computed with vectors of their own,
      instead of the vectors of the inputs.
  """

  vocab: int
  d_model: int
  logits_divisor: float | None = None
  stddev: float = 1.0

  has_output_params = False

  def __call__(self, tokens_BT):
    """Returns x_BTD float32, vectors of ids; NaN if an id is V or more."""
    raise NotImplementedError

  def logits(self, y_BTD):
    """Returns logits_BTV float32 from y_BTD float32."""
    raise NotImplementedError

  def divisor(self, default: float) -> float:
    """Returns logits_divisor, or the default if it is None."""
    return default if self.logits_divisor is None else self.logits_divisor

  def vectors(self, name: str, *shape: int, stddev: float | np.ndarray = 1.0):
    """Returns a new parameter with random initial values.

    Args:
      name: name of the parameter.
      *shape: its shape.
      stddev: standard deviation of the initial values, of all or of each
        row.

    Raises:
      ValueError: stddev is not above 0.
    """
    if np.min(stddev) <= 0:
      raise ValueError(
        f'stddev must be above 0, got {self.stddev}. Set '
        f'embedding.{type(self).__name__}.stddev.'
      )
    if not isinstance(stddev, np.ndarray):
      return self.param(name, nn.initializers.normal(stddev), shape)
    normal = nn.initializers.normal(1.0)
    return self.param(
      name, lambda key, shape: normal(key, shape) * stddev[:, None], shape
    )


class TiedEmbedding(Embedding):
  """Embedding whose logits are products with the input vectors.

  The same table of vectors is used for inputs and outputs. By default, logits
  are divided by sqrt(D).

  Attributes:
    ends: ids whose initial vectors have a deviation of 1, such as START and END
      in the code of the dynamic-halt paper; -1 is the last id.
  """

  ends: tuple[int, ...] = ()

  def setup(self):
    self.table_VD = self.table(1.0)

  def table(self, scale: float):
    """Returns the parameter [V, D]; `scale` multiplies its deviations."""
    stddev = self.stddev * scale
    if self.ends:
      if not all(-self.vocab <= i < self.vocab for i in self.ends):
        raise ValueError(
          f'ends must be ids from {-self.vocab} to {self.vocab - 1}, got '
          f'{self.ends}. Set embedding.{type(self).__name__}.ends.'
        )
      stddev = np.full(self.vocab, stddev, np.float32)
      stddev[[*self.ends]] = scale
    shape = self.vocab, self.d_model
    return self.vectors('embedding', *shape, stddev=stddev)

  def one_use(self):
    """Returns the parameter, for one of its two uses."""
    return weight_update.one_use(self.table_VD, 'embed/embedding')

  def __call__(self, tokens_BT):
    return jnp.take(self.one_use(), tokens_BT, axis=0)

  def logits(self, y_BTD):
    logits_BTV = jnp.einsum('btd,vd->btv', y_BTD, self.one_use())
    return logits_BTV / self.divisor(math.sqrt(self.d_model))


class ScaledEmbedding(TiedEmbedding):
  """Tied embedding of short vectors, which inputs multiply by sqrt(D).

  A new model is the same function as with TiedEmbedding, but Adam, whose steps
  do not depend on the length of vectors, moves them sqrt(D) times as far in
  proportion. By default, logits are not divided. Vaswani et al. 2017, section
  3.4; the deviation is fairseq's.

  Attributes:
    stddev, ends: as in TiedEmbedding, but all deviations are divided by
      sqrt(D).
  """

  def setup(self):
    self.table_VD = self.table(1 / math.sqrt(self.d_model))

  def __call__(self, tokens_BT):
    return super().__call__(tokens_BT) * math.sqrt(self.d_model)

  def logits(self, y_BTD):
    return y_BTD @ self.one_use().T / self.divisor(1.0)


class UntiedEmbedding(Embedding):
  """Embedding whose logits have a separate matrix and bias.

  By default, logits are not divided.
  """

  has_output_params = True

  def setup(self):
    shape = self.vocab, self.d_model
    self.table_VD = self.vectors('embedding', *shape, stddev=self.stddev)
    self.output = nn.Dense(self.vocab)

  def __call__(self, tokens_BT):
    return jnp.take(self.table_VD, tokens_BT, axis=0)

  def logits(self, y_BTD):
    return self.output(y_BTD) / self.divisor(1.0)


class AdaptiveEmbedding(Embedding, kw_only=True):
  """Embedding with narrow vectors for rare ids, and logits in two steps.

  It is useful only if the vocabulary sorts ids by frequency, the most frequent
  first. Ids are divided into clusters of consecutive ids, from cluster 0 on.
  The vectors of cluster i have width D / k^i, where k is width_divisor. A
  matrix for each cluster maps them to width D (Baevski and Auli 2019, section
  3). An id is predicted in one or two steps: first an id of cluster 0 or one of
  the other clusters, and then an id within that other cluster (Grave et al.
  2017, section 4). Logits are log probabilities, so a z-loss has no effect. By
  default, they are computed from outputs divided by sqrt(D).

  Attributes:
    cutoffs: first id of each cluster except cluster 0, increasing.
    width_divisor: factor k by which the width falls from each cluster to the
      next.
    tied: whether logits use the vectors and matrices of inputs. If False, they
      have separate ones. In both cases, logits use no matrix for cluster 0, and
      have a vector for each of the other clusters.
  """

  cutoffs: tuple[int, ...]
  width_divisor: int = 4
  tied: bool = True

  @property
  def has_output_params(self):
    return not self.tied

  def setup(self):
    V, D, k = self.vocab, self.d_model, self.width_divisor
    edges = 0, *self.cutoffs, V
    if not self.cutoffs or np.any(np.diff(edges) < 1):
      raise ValueError(
        f'cutoffs must be increasing numbers from 1 to {V - 1}, got '
        f'{self.cutoffs}. Set CUTOFFS.'
      )
    if k < 1 or k ** len(self.cutoffs) > D:
      raise ValueError(
        'width_divisor must be at least 1, and width_divisor to the power of '
        f'{len(self.cutoffs)}, the number of cutoffs, at most {D}, the width '
        f'of the model, got {k}. Set embedding.AdaptiveEmbedding.width_divisor.'
      )
    shapes = [(n, D // k**i) for i, n in enumerate(np.diff(edges).tolist())]
    tables = lambda name, stddev: [
      self.vectors(f'{name}_{i}', *shape, stddev=stddev)
      for i, shape in enumerate(shapes)
    ]
    self.tables = tables('embedding', self.stddev)
    self.maps = [Projection(E, D) for _, E in shapes]
    self.clusters_CD = self.vectors('clusters', len(self.cutoffs), D)
    if not self.tied:
      self.output_tables = tables('output', 1.0)
      self.output_maps = [Projection(E, D) for _, E in shapes]

  def one_use(self):
    """Returns the tables of the inputs, for one of their two uses if tied."""
    return [
      weight_update.one_use(table, f'embed/embedding_{i}')
      for i, table in enumerate(self.tables)
    ]

  def __call__(self, tokens_BT):
    tables = self.one_use()
    cluster_BT = jnp.searchsorted(
      jnp.asarray(self.cutoffs), tokens_BT, side='right'
    )
    x_BTD = 0
    for i, first in enumerate((0, *self.cutoffs)):
      inside_BT = cluster_BT == i
      ids_BT = jnp.where(inside_BT, tokens_BT - first, 0)
      e_BTE = jnp.take(tables[i], ids_BT, axis=0)
      x_BTD += jnp.where(inside_BT[..., None], self.maps[i].widen(e_BTE), 0)
    return x_BTD

  def logits(self, y_BTD):
    if self.tied:
      tables, maps = self.one_use(), self.maps
    else:
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


class Projection(nn.Module):
  """Matrix [E, D] that maps vectors of a cluster to width D.

  Its transpose maps back to width E.

  Attributes:
    width: width E of the vectors of the cluster.
    d_model: width D.
  """

  width: int
  d_model: int

  def setup(self):
    shape = self.width, self.d_model
    self.kernel_ED = self.param('kernel', nn.initializers.lecun_normal(), shape)

  def widen(self, e_BTE):
    return jnp.einsum('bte,ed->btd', e_BTE, self.kernel_ED)

  def narrow(self, y_BTD):
    return jnp.einsum('btd,ed->bte', y_BTD, self.kernel_ED)
