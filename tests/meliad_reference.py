"""The decoder of google-research/meliad in NumPy float64: slow and obvious.

Written from the specification of what its code computes (June 2025; training
and dropout left out), and sharing nothing with meliad_rec. Loops over rows,
blocks, queries, keys and heads. Parameters are a flat dict under meliad's own
names, such as 'transformer0/tbase/_kvq/keys_layer/kernel'.
"""

import dataclasses
import math

import numpy as np

BUCKETS, MAX_DISTANCE = 32, 128
MASKED, PHANTOM = -1e6, -1e3


@dataclasses.dataclass(frozen=True)
class Sizes:
  """As meliad's settings; `feedback` is its dstack_window_length > 0."""

  vocab: int = 31
  width: int = 18
  num_heads: int = 2
  head_dim: int = 7
  hidden: int = 26
  window: int = 20
  layers: int = 2
  recurrent: tuple[int, ...] = ()
  states: int = 5
  gate: str = 'bias'
  gate_config: str = 'skip'
  feedback: bool = False


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
  """Every parameter and its shape."""
  z = sizes
  found = {
    'embed/embedding': (z.vocab, z.width),
    'final_layernorm/scale': (z.width,),
  }
  for i in range(z.layers):
    name = f'transformer{i}'
    recurrent = i in z.recurrent
    found |= _side(z, f'{name}/tbase', recurrent or z.feedback, False)
    found[f'{name}/relative_positions/rel_embedding'] = (z.num_heads, BUCKETS)
    if recurrent:
      found |= _side(z, f'{name}/recurrent_tbase', True, True)
      found[f'{name}/recurrent_initial_state'] = (z.states, z.width)
  return found


def _side(z, name, two_sources, is_state):
  inner = z.num_heads * z.head_dim
  both = 2 * inner if two_sources else inner
  single = is_state and z.gate_config == 'single'
  skip = is_state and z.gate_config == 'skip'
  found = {
    f'{name}/_kvq/pre_attn_layernorm/scale': (z.width,),
    f'{name}/_kvq/attention_scale': (z.num_heads,),
  }
  for kind in ('keys', 'values', 'queries', *['queries2'] * two_sources):
    found[f'{name}/_kvq/{kind}_layer/kernel'] = (z.width, inner)
  if two_sources:
    found[f'{name}/attention_scale2'] = (z.num_heads,)
  if is_state:
    found[f'{name}/_kvq/position_embeddings'] = (z.states, z.width)
  joins = []
  if not single:
    joins.append(('post_attn_mlp', both))
  if not skip:
    found[f'{name}/ffn/hidden0/kernel'] = (
      both if single else z.width,
      z.hidden,
    )
    joins.append(('ffn', z.hidden))
  if not (skip or single):
    found[f'{name}/pre_ffn_layernorm/scale'] = (z.width,)
  for join, width in joins:
    found[f'{name}/{join}/output_layer/kernel'] = (width, z.width)
    if is_state and z.gate == 'bias':
      found[f'{name}/{join}/gate_bias'] = (z.width,)
    if is_state and z.gate == 'lstm':
      for gate in ('input_gate', 'forget_gate'):
        found[f'{name}/{join}/{gate}/kernel'] = (width, z.width)
        found[f'{name}/{join}/{gate}/bias'] = (z.width,)
  return found


def random_params(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
  """Values far from the initial ones, so that each of them matters."""
  rng = np.random.default_rng(seed)
  params = {}
  for name, shape in shapes(sizes).items():
    value = rng.normal(size=shape)
    if name.endswith('kernel'):
      value /= math.sqrt(shape[0])
    if name.endswith('layernorm/scale'):
      value = 1 + 0.3 * value
    if 'attention_scale' in name:
      value *= 3  # Negative ones too: meliad takes the absolute value.
    params[name] = value.astype(np.float32)
  return params


class Decoder:
  """Keeps, for every row and layer, the caches between segments."""

  def __init__(self, params: dict[str, np.ndarray], sizes: Sizes, rows: int):
    self.p = {k: v.astype(np.float64) for k, v in params.items()}
    self.z = sizes
    self.rows = [None] * rows

  def segment(self, tokens_BT, start_B) -> np.ndarray:
    """Logits [B, T, V] of one segment after the other."""
    found = []
    for b, tokens_T in enumerate(tokens_BT):
      if start_B[b]:
        self.rows[b] = [self.new_document(i) for i in range(self.z.layers)]
      row = []
      for first in range(0, len(tokens_T), self.z.window):
        block = tokens_T[first : first + self.z.window]
        row += self.block(block, self.rows[b])
      found.append(row)
    return np.array(found)

  def new_document(self, layer):
    """Keys and values of a block of zeros, which nothing masks; states."""
    z = self.z
    zeros = np.zeros((z.window, z.num_heads, z.head_dim))
    states = None
    if layer in z.recurrent:
      states = self.p[f'transformer{layer}/recurrent_initial_state']
    return {'keys': zeros, 'values': zeros, 'states': states}

  def block(self, tokens_W, caches):
    """Logits of one block of one row, through the whole stack."""
    fed_back = None
    if self.z.feedback:
      last = max(self.z.recurrent)
      name = f'transformer{last}/recurrent_tbase'
      fed_back = self.kvq(name, caches[last]['states'])
    x = [self.p['embed/embedding'][token] for token in tokens_W]
    for i in range(self.z.layers):
      x = self.layer(f'transformer{i}', x, caches[i], fed_back)
    logits = []
    for row in x:
      y = norm(row, self.p['final_layernorm/scale'])
      logits.append(self.p['embed/embedding'] @ y / math.sqrt(self.z.width))
    return logits

  def layer(self, name, x, cache, fed_back):
    """Outputs of one layer for one block; the cache moves on by the block."""
    side = f'{name}/tbase'
    own = self.kvq(side, x)
    keys = np.concatenate([cache['keys'], own['keys']])
    values = np.concatenate([cache['values'], own['values']])
    memory = fed_back
    if cache['states'] is not None:
      memory, cache['states'] = self.states(name, cache['states'], keys, values)
    bias = self.p[f'{name}/relative_positions/rel_embedding']
    heads = self.attend(
      own['queries'], keys, values, own['scale'], bias_HN=bias
    )
    if memory is not None:
      cross = self.attend(
        own['queries2'], memory['keys'], memory['values'], own['scale2']
      )
      heads = np.concatenate([heads, cross], 1)
    cache['keys'], cache['values'] = own['keys'], own['values']
    outputs = []
    for row, h in zip(x, heads, strict=True):
      row = self.join(f'{side}/post_attn_mlp', h.reshape(-1), row, 'residual')
      n = norm(row, self.p[f'{side}/pre_ffn_layernorm/scale'])
      n = np.maximum(n @ self.p[f'{side}/ffn/hidden0/kernel'], 0)
      outputs.append(self.join(f'{side}/ffn', n, row, 'residual'))
    return outputs

  def states(self, name, states, keys, values):
    """Returns what tokens see of the states before a block; states after it."""
    side = f'{name}/recurrent_tbase'
    own = self.kvq(side, states)
    itself = self.attend(
      own['queries'], own['keys'], own['values'], own['scale']
    )
    tokens = self.attend(own['queries2'], keys, values, own['scale2'])
    after, gate = [], self.z.gate
    for old, *heads in zip(states, itself, tokens, strict=True):
      h = np.concatenate(heads).reshape(-1)
      match self.z.gate_config:
        case 'skip':
          new = self.join(f'{side}/post_attn_mlp', h, old, gate)
        case 'dual':
          new = self.join(f'{side}/post_attn_mlp', h, old, gate)
          n = norm(new, self.p[f'{side}/pre_ffn_layernorm/scale'])
          n = np.maximum(n @ self.p[f'{side}/ffn/hidden0/kernel'], 0)
          new = self.join(f'{side}/ffn', n, new, gate)
        case 'single':
          n = np.maximum(h @ self.p[f'{side}/ffn/hidden0/kernel'], 0)
          new = self.join(f'{side}/ffn', n, old, gate, activation=np.tanh)
      after.append(new)
    return own, np.array(after)

  def kvq(self, side, x):
    """Keys, values, queries [S, H, K] and the scales of attention."""
    p = self.p
    scale = p[f'{side}/_kvq/pre_attn_layernorm/scale']
    x = np.array([norm(row, scale) for row in x])
    if f'{side}/_kvq/position_embeddings' in p:
      x = x + p[f'{side}/_kvq/position_embeddings']
    found = {'scale': np.abs(p[f'{side}/_kvq/attention_scale'])}
    if f'{side}/attention_scale2' in p:
      found['scale2'] = np.abs(p[f'{side}/attention_scale2'])
    for kind in ('keys', 'values', 'queries', 'queries2'):
      kernel = p.get(f'{side}/_kvq/{kind}_layer/kernel')
      if kernel is not None:
        y = (x @ kernel).reshape(-1, self.z.num_heads, self.z.head_dim)
        if kind != 'values':
          y = y / np.sqrt(np.sum(y * y, -1, keepdims=True) + 1e-6)
        found[kind] = y
    return found

  def attend(self, queries, keys, values, scale_H, bias_HN=None):
    """Returns heads [T, H, K]; a bias implies a causal window."""
    out = np.zeros_like(queries)
    for t in range(len(queries)):
      for h in range(self.z.num_heads):
        logits = []
        for s in range(len(keys)):
          logit = queries[t, h] @ keys[s, h]
          if bias_HN is not None:
            # Of two blocks of keys, the queries are aligned to the second.
            distance = t + self.z.window - s
            logit += bias_HN[h, bucket(distance)]
          logit *= scale_H[h]
          if bias_HN is not None and not 0 < distance <= self.z.window:
            logit = MASKED
          logits.append(logit)
        top = max(*logits, PHANTOM)
        weights = [math.exp(logit - top) for logit in logits]
        total = sum(weights) + math.exp(PHANTOM - top)
        for s in range(len(keys)):
          out[t, h] += weights[s] / total * values[s, h]
    return out

  def join(self, name, h, old, gate, activation=lambda z: z):
    """Joins the old value with the output of an MLP whose hidden layer is h."""
    z = activation(h @ self.p[f'{name}/output_layer/kernel'])
    match gate:
      case 'residual':
        return old + z
      case 'bias':
        g = sigmoid(self.p[f'{name}/gate_bias'])
        return old * g + z * (1 - g)
      case 'lstm':
        forget, take = (
          h @ self.p[f'{name}/{kind}/kernel'] + self.p[f'{name}/{kind}/bias']
          for kind in ('forget_gate', 'input_gate')
        )
        return old * sigmoid(forget + 1) + z * sigmoid(take - 1)


def norm(x_D, scale_D):
  return x_D / math.sqrt(np.mean(x_D * x_D) + 1e-6) * scale_D


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def bucket(distance: int) -> int:
  """Returns T5's bucket: 0 to 15 exact, then 16 at logarithmic distances."""
  exact = BUCKETS // 2
  if distance < exact:
    return max(distance, 0)
  share = math.log(distance / exact) / math.log(MAX_DISTANCE / exact)
  return min(exact + int(share * (BUCKETS - exact)), BUCKETS - 1)
