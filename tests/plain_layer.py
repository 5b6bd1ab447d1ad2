"""Parts of a decoder layer as plain equations of arrays, of NumPy or JAX."""

import jax.numpy as jnp
import numpy as np

from tests.architectures import H
from tests.architectures import K


def norm(p, x):
  return x / ((x**2).mean(-1, keepdims=True) + 1e-6) ** 0.5 * p['scale']


def unit(x):
  return x / ((x**2).sum(-1, keepdims=True) + 1e-6) ** 0.5


def heads(p, x_BTD):
  return (x_BTD @ p['kernel']).reshape(*x_BTD.shape[:2], H, K)


def attention(q_BTHK, k_BSHK, v_BSHK, seen_BTS, bias_HTS=0.0):
  """[B, T, H K]; a query that sees nothing gets 0."""
  of = np if isinstance(q_BTHK, np.ndarray) else jnp
  logits_BHTS = of.einsum('bthk,bshk->bhts', q_BTHK, k_BSHK) + bias_HTS
  e_BHTS = of.exp(logits_BHTS) * seen_BTS[:, None]
  total_BHT1 = e_BHTS.sum(-1, keepdims=True)
  p_BHTS = e_BHTS / of.where(total_BHT1 > 0, total_BHT1, 1)
  y_BTHK = of.einsum('bhts,bshk->bthk', p_BHTS, v_BSHK)
  return y_BTHK.reshape(*y_BTHK.shape[:2], -1)


def linear(p, h):
  """The heads of one source or of two may be an axis of the kernel."""
  kernel = p['kernel'].reshape(-1, p['kernel'].shape[-1])
  return h @ kernel + p.get('bias', 0)


def output(p, x_BTD, y_BTF):
  """The stream with attention added, and then the MLP."""
  x_BTD = x_BTD + linear(p['attention']['output']['linear'], y_BTF)
  h_BTF = linear(p['mlp']['hidden'], norm(p['mlp_norm'], x_BTD))
  return x_BTD + linear(p['mlp']['output']['linear'], h_BTF * (h_BTF > 0))
