"""Encoders and halting as plain equations of arrays.

"Investigating Recurrent Transformers with Dynamic Halt" (2024), with the
indices of its algorithms corrected.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def norm(p, x_BTD):
  n_BTD = x_BTD - x_BTD.mean(-1, keepdims=True)
  variance = (n_BTD**2).mean(-1, keepdims=True)
  return n_BTD / jnp.sqrt(variance + 1e-5) * p['scale'] + p['bias']


def norms(p, config):
  """Returns the norm before a sublayer, and that of the sum after it."""
  applied, none = functools.partial(norm, p), lambda x_BTD: x_BTD
  return (none, applied) if config.post_norm else (applied, none)


def linear(p, x):
  return x @ p['kernel'] + p['bias']


def gelu(x):
  return x * (1 + jax.scipy.special.erf(x / 2**0.5)) / 2


def sigmoid(x):
  return 1 / (1 + jnp.exp(-x))


def xpos_logits(q_BTHK, k_BSHK, two_sided=False):
  """Pairs (i, i + K/2) turned by their distance, and decayed by it."""
  T, K = q_BTHK.shape[1], q_BTHK.shape[3]
  i = np.arange(K // 2)
  back_TS1 = (np.arange(T)[:, None] - np.arange(T))[..., None]
  angle_TSI = back_TS1 * 10_000.0 ** (-2 * i / K)
  zeta_I = (2 * i + 0.4 * K) / (1.4 * K)
  decay_TSI = zeta_I ** ((abs(back_TS1) if two_sided else back_TS1) / 512)
  q, r = q_BTHK[..., : K // 2], q_BTHK[..., K // 2 :]
  k, l = k_BSHK[..., : K // 2], k_BSHK[..., K // 2 :]
  pairs = lambda a, b: jnp.einsum('bthi,bshi->bhtsi', a, b)
  turned = (pairs(q, k) + pairs(r, l)) * np.cos(angle_TSI)
  turned -= (pairs(r, k) - pairs(q, l)) * np.sin(angle_TSI)
  return (turned * decay_TSI).sum(-1)


def plain_logits(q_BTHK, k_BSHK):
  return jnp.einsum('bthk,bshk->bhts', q_BTHK, k_BSHK)


def attention(p, config, x_BTD, source_BSD, seen_BTS, logits=plain_logits):
  """The stream with attention added; a query that sees nothing adds nothing."""
  heads = lambda name, a: (a @ p[name]['kernel']).reshape(
    *a.shape[:2], config.num_heads, config.head_dim
  )
  before, after = norms(p['norm'], config)
  n_BTD, n_BSD = before(x_BTD), before(source_BSD)
  if 'source_norm' in p:
    n_BSD = norm(p['source_norm'], source_BSD)
  q_BTHK = heads('query', n_BTD) / config.head_dim**0.5
  logits_BHTS = logits(q_BTHK, heads('key', n_BSD))
  e_BHTS = jnp.exp(logits_BHTS) * seen_BTS[:, None]
  total_BHT1 = e_BHTS.sum(-1, keepdims=True)
  p_BHTS = e_BHTS / jnp.where(total_BHT1 > 0, total_BHT1, 1)
  y_BTHK = jnp.einsum('bhts,bshk->bthk', p_BHTS, heads('value', n_BSD))
  y_BTF = y_BTHK.reshape(*x_BTD.shape[:2], -1)
  return after(x_BTD + y_BTF @ p['output']['linear']['kernel'])


def mlp(p, n_BTD):
  return linear(p['output'], gelu(linear(p['hidden'], n_BTD)))


# Parts that repeat are compiled once: leave what calls them as it is, not
# compiled.
@functools.partial(jax.jit, static_argnums=1)
def layer(p, config, x_BTD, mask_BT, memory_BSD=None, source_BTD=None):
  """Returns the outputs of a layer, gated if there are parameters of a gate."""
  B, T, _ = x_BTD.shape
  order_TS = np.tri(T, dtype=bool) if config.causal else np.ones((T, T), bool)
  seen_BTS = mask_BT[:, None] & order_TS
  source_BTD = x_BTD if source_BTD is None else source_BTD
  a_BTD = attention(
    p['attention'], config, x_BTD, source_BTD, seen_BTS, xpos_logits
  )
  if memory_BSD is not None:
    all_BTS = np.ones((B, T, memory_BSD.shape[1]), bool)
    q = p['memory_attention']
    a_BTD = attention(q, config, a_BTD, memory_BSD, all_BTS)
  before, after = norms(p['mlp_norm'], config)
  n_BTD = before(a_BTD)
  y_BTD = after(a_BTD + mlp(p['mlp'], n_BTD))
  if 'gate_mlp' not in p:
    return y_BTD
  g_BTD = sigmoid(mlp(p['gate_mlp'], n_BTD))
  return g_BTD * y_BTD + (1 - g_BTD) * x_BTD


def mean(h_BTD, mask_BT, causal):
  """Returns the mean over all tokens or, if causal, over those up to each."""
  order_TS = (
    np.tri(mask_BT.shape[1]) if causal else np.ones((1, len(mask_BT.T)))
  )
  seen_BTS = mask_BT[:, None] * order_TS
  count_BT1 = jnp.maximum(seen_BTS.sum(-1, keepdims=True), 1)
  return jnp.einsum('bts,bsd->btd', seen_BTS, h_BTD) / count_BT1


def halted(made, p, x_BTD, mask_BT, memory_BSD=None):
  """Runs algorithms 1 and 3: real units, the end, what each step was asked.

  Args are as in `universal`. The third result has (p_BU, active_BU) of each
  step.
  """
  one = made.global_halt and not made.causal
  unit_BU = mask_BT.any(1, keepdims=True) if one else mask_BT
  remainder_BU = jnp.ones(unit_BU.shape)
  none_BU = 0 * remainder_BU
  now = x_BTD, 0 * x_BTD, remainder_BU, jnp.asarray(unit_BU), none_BU, none_BU
  asked = []
  for l in range(made.steps):
    active_BU = now[3]
    now, p_BU = step(made, p, l, now, mask_BT, memory_BSD)
    asked.append((p_BU, active_BU))
  return unit_BU, now, asked


def universal(made, p, x_BTD, mask_BT, memory_BSD=None):
  """Algorithms 1 and 3: y_BTD, ponder cost of each row, steps of each unit.

  Args:
    made: the Universal whose parameters these are.
    p: the parameters.
    x_BTD, mask_BT, memory_BSD: as it takes them.
  """
  unit_BU, now, _ = halted(made, p, x_BTD, mask_BT, memory_BSD)
  h_BTD, mixed_BTD, remainder_BU, _, penalty_BU, depth_BU = now
  if made.halt.leftover:
    penalty_BU = penalty_BU + remainder_BU * depth_BU
  else:
    penalty_BU = penalty_BU - (1 - remainder_BU)
  units_B = jnp.maximum(unit_BU.sum(1), 1)
  penalty_B = made.halt.ponder_cost * (penalty_BU * unit_BU).sum(1) / units_B
  return (
    mixed_BTD + remainder_BU[..., None] * h_BTD,
    penalty_B,
    depth_BU * unit_BU,
  )


@functools.partial(jax.jit, static_argnums=0)
def step(made, p, l, now, mask_BT, memory_BSD):
  """Step l of every unit that is live, and the probabilities of halting."""
  h_BTD, mixed_BTD, remainder_BU, active_BU, penalty_BU, depth_BU = now
  source_BTD = mixed_BTD + remainder_BU[..., None] * h_BTD
  new_BTD = layer(
    *(p['layer'], made.layer.config, h_BTD, mask_BT, memory_BSD),
    None if made.global_halt else source_BTD,
  )
  asked = [h_BTD, new_BTD] if made.transition else [h_BTD]
  if made.global_halt:
    asked = [mean(a, mask_BT, made.causal) for a in asked]
  hidden = gelu(linear(p['gate']['hidden'], jnp.concatenate(asked, -1)))
  p_BU = sigmoid(linear(p['gate']['last'], hidden))[..., 0]
  rest_BU = remainder_BU * (1 - p_BU)
  may_BU = active_BU
  if made.halt.length_bound and not made.causal:
    may_BU = active_BU & (l <= mask_BT.sum(1, keepdims=True))
  active_BU = may_BU & (rest_BU > 1 - made.halt.threshold)
  takes_BU = may_BU if made.halt.keep_crossing else active_BU
  weight_BU = jnp.where(takes_BU, remainder_BU * p_BU, 0)
  now = (
    jnp.where(takes_BU[..., None], new_BTD, h_BTD),
    mixed_BTD + weight_BU[..., None] * h_BTD,
    jnp.where(takes_BU, rest_BU, remainder_BU),
    active_BU,
    penalty_BU + weight_BU * (l + 1),
    depth_BU + takes_BU,
  )
  return now, p_BU


def bottleneck(cell, p, x_BTD, mask_BT):
  """Algorithms 2 and 4: memory, y_BTD, and the penalty of rows, chunk by chunk.

  Args:
    cell: the LatentBottleneck whose parameters these are, of chunks.
    p: the parameters.
    x_BTD, mask_BT: documents, from their start.
  """
  B, T, _ = x_BTD.shape
  m_BSD = jnp.repeat(p['first'][None], B, 0)
  outputs, penalties = [], []
  for start in range(0, T, cell.chunk):
    y_BWD = x_BTD[:, start : start + cell.chunk]
    mask_BW = mask_BT[:, start : start + cell.chunk]
    if hasattr(cell.encoder, 'count'):
      for i in range(cell.encoder.count):
        q, config = p['encoder'][f'layers_{i}'], cell.encoder.layer().config
        y_BWD = layer(q, config, y_BWD, mask_BW, m_BSD)
    else:
      y_BWD, penalty_B, _ = universal(
        cell.encoder, p['encoder'], y_BWD, mask_BW, m_BSD
      )
      penalties.append(penalty_B)
    new_BSD = m_BSD
    for i in range(cell.writers):
      new_BSD = write(p[f'update_{i}'], cell.config, new_BSD, y_BWD, mask_BW)
    m_BSD = jnp.where(mask_BW.any(1)[:, None, None], new_BSD, m_BSD)
    outputs.append(y_BWD)
  return m_BSD, jnp.concatenate(outputs, 1), penalties


@functools.partial(jax.jit, static_argnums=1)
def write(p, config, m_BSD, y_BWD, mask_BW):
  """The memory, after one layer that writes."""
  seen_BSW = jnp.repeat(mask_BW[:, None], m_BSD.shape[1], 1)
  m_BSD = attention(p['attention'], config, m_BSD, y_BWD, seen_BSW)
  return m_BSD + mlp(p['mlp'], norm(p['mlp_norm'], m_BSD))
