"""What google-research/meliad calls the parameters of this package's models.

Three ways to name the same arrays are accepted:

  transformer0/tbase/...              revision cc1aef5 (June 2025), the stack
                                      with recurrence (configs/base_memory.gin)
  layer_stack/transformer0/tbase/...  the same, the stack without
                                      (configs/base_transformer.gin)
  decoder/transformer0/tbase/...      the release of 2022

each alone, or below params/, target/ or optimizer/target/ as in checkpoints,
of which everything beside it (optimizer, caches) is left out.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import itertools
import math
import re

import jax
import numpy as np

from meliad_rec.partition import path_string

HOLDERS = ('optimizer/', 'target/', 'params/')
RELEASE_2022 = 'decoder/'

TOP = {
  'embed/embedding': 'embed/embedding',
  'norm/scale': 'final_layernorm/scale',
}
# Of a layer, below the part that both directions have in common.
COMMON = {
  'attention/norm/scale': '_kvq/pre_attn_layernorm/scale',
  'attention/key/kernel': '_kvq/keys_layer/kernel',
  'attention/value/kernel': '_kvq/values_layer/kernel',
  'attention/query/heads/kernel': '_kvq/queries_layer/kernel',
  'attention/query/scale': '_kvq/attention_scale',
  'attention/memory_query/heads/kernel': '_kvq/queries2_layer/kernel',
  'attention/memory_query/scale': 'attention_scale2',
  'ids': '_kvq/position_embeddings',
  'mlp_norm/scale': 'pre_ffn_layernorm/scale',
  'mlp/hidden/kernel': 'ffn/hidden0/kernel',
}
JOINS = {
  'linear/kernel': 'output_layer/kernel',
  'z/kernel': 'output_layer/kernel',
  'gate': 'gate_bias',
  'i/kernel': 'input_gate/kernel',
  'i/bias': 'input_gate/bias',
  'f/kernel': 'forget_gate/kernel',
  'f/bias': 'forget_gate/bias',
}
COMMON |= {
  f'attention/output/{k}': f'post_attn_mlp/{v}' for k, v in JOINS.items()
}
COMMON |= {f'mlp/output/{k}': f'ffn/{v}' for k, v in JOINS.items()}
SIDES = {'layer': 'tbase', 'tokens': 'tbase', 'states': 'recurrent_tbase'}
LAYER = {
  f'{ours}/{k}': f'{theirs}/{v}'
  for ours, theirs in SIDES.items()
  for k, v in COMMON.items()
}
LAYER |= {
  'layer/attention/position/table': 'relative_positions/rel_embedding',
  'tokens/attention/position/table': 'relative_positions/rel_embedding',
  'states/first': 'recurrent_initial_state',
}
IN_LAYER = re.compile(r'cell/(?:cells|layers)_(\d+)/(cell/)?(.+)')


def parameters(names: Iterable[str]) -> dict[str, str]:
  """{name without what it lies below: name} of what are parameters."""
  found = {name: name for name in names}
  for holder in HOLDERS:
    held = {
      short.removeprefix(holder): name
      for short, name in found.items()
      if short.startswith(holder)
    }
    found = held or found
  return {
    re.sub(
      '/tbase/pre_attn_layernorm/',
      '/tbase/_kvq/pre_attn_layernorm/',
      short.removeprefix(RELEASE_2022).removeprefix('layer_stack/'),
    ): name
    for short, name in found.items()
  }


def sources(target) -> dict[str, list[str]]:
  """{path: meliad's names} of our parameters; of stacked layers several.

  Raises:
    ValueError: meliad has no such parameter.
  """
  leaves = {
    path_string(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(target)
  }
  counts = {}  # {cell: layers in it}; a cell of several holds them stacked.
  for path, leaf in leaves.items():
    if match := IN_LAYER.fullmatch(path):
      counts[int(match[1])] = leaf.shape[0] if match[2] else 1
  sizes = [counts[cell] for cell in sorted(counts)]
  first = [0, *itertools.accumulate(sizes)]
  found = {}
  for path in leaves:
    match = IN_LAYER.fullmatch(path)
    if path in TOP:
      found[path] = [TOP[path]]
    elif match and match[3] in LAYER:
      cell = int(match[1])
      found[path] = [
        f'transformer{i}/{LAYER[match[3]]}'
        for i in range(first[cell], first[cell + 1])
      ]
    else:
      raise ValueError(
        f'The model has a parameter {path}, and meliad has none like it; choose'
        ' arch/window, arch/block_recurrent or arch/block_feedback.'
      )
  return found


def shape_there(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """The shape that meliad gives a parameter which here has `shape`.

  Its kernels are matrices: heads of two sources lie behind one another, those
  of the own tokens (of the states, on their side) first.
  """
  if name.endswith('/kernel'):
    return math.prod(shape[:-1]), shape[-1]
  return shape


def convert(meliad: Mapping[str, np.ndarray], target):
  """Parameters of our model with meliad's values.

  Args:
    meliad: {name: array}, named in one of the ways above.
    target: the parameters to be filled: arrays or jax.ShapeDtypeStruct.

  Returns:
    As target, NumPy arrays of its shapes and dtypes.

  Raises:
    ValueError: names are missing or unknown or shapes differ; it names all.
  """
  known = parameters(meliad)
  wanted = sources(target)
  leaves = jax.tree.leaves(target)
  missing, differ, filled = [], [], []
  for (path, names), leaf in zip(wanted.items(), leaves, strict=True):
    stacked = '/cell/' in path.removeprefix('cell/')
    each = leaf.shape[1:] if stacked else leaf.shape
    arrays = []
    for name in names:
      needed = shape_there(name, each)
      if name not in known:
        missing.append(name)
      elif (given := meliad[known[name]].shape) != needed:
        differ.append(f'{name} of shape {given} for {needed}')
      else:
        arrays.append(np.asarray(meliad[known[name]]).reshape(each))
    if len(arrays) == len(names):
      filled.append(np.stack(arrays) if stacked else arrays[0])
  used = {name for names in wanted.values() for name in names}
  phrases = [
    f'{what} {", ".join(grouped(names))}'
    for what, names in (
      ('it lacks', missing),
      ('the model has no', [name for name in known if name not in used]),
      ('it holds', differ),
    )
    if names
  ]
  if phrases:
    raise ValueError(
      f'The checkpoint does not fit the model: {"; ".join(phrases)}. Choose the'
      ' arch, size, options and vocabulary that it was trained with.'
    )
  filled = [a.astype(x.dtype) for a, x in zip(filled, leaves, strict=True)]
  return jax.tree.unflatten(jax.tree.structure(target), filled)


def grouped(names: Iterable[str]) -> list[str]:
  """Names that differ in the layer alone made one: transformer{0,1,2}/..."""
  layers = {}
  for name in names:
    number = re.match(r'transformer(\d+)/', name)
    rest = name[number.end() :] if number else name
    layers.setdefault((bool(number), rest), []).append(number and number[1])
  return [
    f'transformer{{{",".join(numbers)}}}/{rest}' if in_layer else rest
    for (in_layer, rest), numbers in layers.items()
  ]
