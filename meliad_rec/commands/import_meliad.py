r"""Makes a run from weights trained by google-research/meliad.

  meliad-rec import_meliad --source=CHECKPOINT --out=RUN \
    --gin_file=arch/block_recurrent --gin_file=size/150m \
    --gin_file=task/pg19 --gin_file=options/compat_meliad

The source is an .npz of {name: array}, or a folder that orbax wrote:
checkpoint_N or checkpoint_N/tstate. The run starts at step 0, with a new
optimizer state. meliad never learns to predict a document's first token, so an
imported model has a high loss there.

Names of arrays may have any of the three forms that meliad has used:

  transformer0/tbase/...              revision cc1aef5 (June 2025), the stack
                                      with recurrence (configs/base_memory.gin)
  layer_stack/transformer0/tbase/...  the same revision, the stack without
                                      recurrence (configs/base_transformer.gin)
  decoder/transformer0/tbase/...      the release of 2022

Names may begin with params/, target/ or optimizer/target/, as in checkpoints.
The other arrays of a checkpoint (optimizer, caches) are ignored.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import itertools
import math
from pathlib import Path
import re
import zipfile

from absl import flags
from flax.traverse_util import flatten_dict
from flax.traverse_util import unflatten_dict
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from meliad_rec.archs.block_feedback import BlockFeedback
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.stack import Repeat
from meliad_rec.archs.stack import Stack
from meliad_rec.archs.window import WindowLayer
from meliad_rec.config import config
from meliad_rec.config import config_flags
from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.layers.gates import LSTMGate
from meliad_rec.layers.positions import T5Bias
from meliad_rec.models.cell import Cell
from meliad_rec.models.embedding import TiedEmbedding
from meliad_rec.models.model import Model
from meliad_rec.runs import folder as run_folder
from meliad_rec.runs import training
from meliad_rec.storage.saved_step import first_line
from meliad_rec.storage.workdir import place
from meliad_rec.training import trainer
from meliad_rec.training.experiment import Experiment

HOLDERS = ('optimizer/', 'target/', 'params/')
RELEASE_2022 = 'decoder/'
EMBEDDING = 'embed/embedding'

# {path of our parameter: meliad's name}, outside the layers.
TOP = {
  'embed/embedding': 'embed/embedding',
  'norm/scale': 'final_layernorm/scale',
}
# The same inside a layer, for the token and the state direction alike.
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
# Output projections, where a gate joins them to the residual stream.
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
# Our prefixes and meliad's, by direction.
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


def define_flags() -> None:
  config_flags.define_flags()
  flags.DEFINE_string(
    'source', None, 'Checkpoint folder or .npz file of meliad.'
  )
  flags.DEFINE_string(
    'out', None, 'Folder of the new run; must be empty or not exist.'
  )
  flags.mark_flags_as_required(['source', 'out'])


def main(argv: list[str]) -> None:
  config_flags.check_no_arguments(argv)
  args = flags.FLAGS
  config.parse(args.gin_file, args.gin_param)
  experiment = training.build(None)
  if experiment.env is not None:
    raise ValueError(
      'meliad has no agents, but these gin files set an environment. Give the '
      'gin files of a model of text.'
    )
  import_run(args.source, experiment, args.out)


def import_run(source: str, experiment: Experiment, out: str) -> None:
  """Writes the folder of a run at step 0, with the weights in `source`.

  Args:
    source: path of a checkpoint of meliad; see `read`.
    experiment: built from the current configuration.
    out: an empty or new folder.

  Raises:
    ValueError: `source` cannot be read or does not fit the model, or `out` is
      not empty or is an address that cannot hold a run.
  """
  folder = place(out)
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(f'--out={out} is not empty. Give a new folder.')
  meliad = read(source)
  program = experiment.program
  check_numerics(program.model, meliad)
  name = parameters(meliad).get(EMBEDDING)
  if name and (unused := len(meliad[name]) - program.model.vocab) > 0:
    # meliad rounds vocabularies up: 256 bytes and 3 special ids become 260.
    print(f'ignored the embeddings of the last {unused} ids, which are unused')
    meliad = meliad | {name: meliad[name][: program.model.vocab]}
  params = convert(meliad, program.shapes.params)
  params = jax.tree.map(
    lambda array, like: jax.device_put(array, like.sharding),
    params,
    program.shapes.params,
  )
  state = program.begin_with(program.create(experiment.seed), params)
  run_folder.write(folder, experiment, config.operative())
  run = trainer.Run(experiment, folder, {'config': config.operative()})
  run.state = state
  run.save(None)
  run.checkpoints.close()
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  print(f'wrote {out}: {count:,} parameters from {source}, at step 0')


def read(source: str) -> dict[str, np.ndarray]:
  """Reads a checkpoint of meliad.

  Args:
    source: an .npz file of {name: array}, or a folder that orbax wrote.

  Returns:
    {name: array}. From a folder of orbax, only parameters are read.

  Raises:
    ValueError: `source` is neither, is damaged, or is an .npz file that has
      more than arrays.
  """
  path = Path(source)
  for folder in (path, path / 'tstate'):
    if (folder / '_METADATA').is_file():
      return _read_orbax(folder.absolute())
  if path.is_file() and zipfile.is_zipfile(path):
    try:
      with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
    except ValueError as error:
      raise ValueError(
        f'{path} contains more than arrays ({error}). Write it with '
        'np.savez(path, **arrays).'
      ) from None
    except Exception as error:
      raise _damaged(path, error) from None
  raise ValueError(
    f'--source={path} is not a checkpoint. Give an .npz file, or a folder with '
    '_METADATA or tstate/_METADATA, such as checkpoint_N.'
  )


def _read_orbax(folder: Path) -> dict[str, np.ndarray]:
  with ocp.PyTreeCheckpointer() as reader:
    try:
      saved = reader.metadata(folder).item_metadata.tree
    except Exception as error:
      raise _damaged(folder, error) from None
    saved = flatten_dict(saved, sep='/')
    names = parameters(saved).values()
    item = unflatten_dict({name: saved[name] for name in names}, sep='/')
    host = ocp.RestoreArgs(restore_type=np.ndarray)
    args = ocp.args.PyTreeRestore(
      item, jax.tree.map(lambda _: host, item), partial_restore=True
    )
    try:
      return flatten_dict(reader.restore(folder, args=args), sep='/')
    except Exception as error:
      raise _damaged(folder, error) from None


def _damaged(path: Path, error: Exception) -> ValueError:
  """Returns the error for a checkpoint that a library cannot read.

  numpy, zipfile, orbax and tensorstore raise errors of a dozen classes.
  """
  return ValueError(
    f'{path} is damaged ({first_line(error)}). Copy or download it again.'
  )


def check_numerics(model: Model, meliad: Mapping[str, np.ndarray]) -> None:
  """Checks that a model with meliad's parameters would have meliad's logits.

  It compares settings, and computes no logits.

  Args:
    model: the model that would take meliad's parameters.
    meliad: {name: array} of the checkpoint.

  Raises:
    ValueError: the logits would differ, because of a setting of the model or a
      negative attention scale in the checkpoint.
  """
  embedding = model.embedding(model.vocab, model.d_model)
  if type(embedding) is not TiedEmbedding or model.clear_state:
    raise ValueError(
      'meliad has a TiedEmbedding and keeps the recurrent state, got '
      f'{type(embedding).__name__} and clear_state {model.clear_state}. Remove '
      'model.Model.embedding and model.Model.clear_state.'
    )
  for cell in layers(model.cell):
    gate = None if isinstance(cell, WindowLayer) else cell.gate()
    if isinstance(gate, LSTMGate) and gate.keep_bias != 1:
      raise ValueError(
        f'meliad has gates with keep_bias 1, got {gate.keep_bias}. Remove '
        'gates.LSTMGate.keep_bias.'
      )
    layer = cell.config
    position = layer.position(layer.num_heads)
    if not layer.compat_meliad:
      raise ValueError(
        'meliad computes attention differently. Add '
        '--gin_file=options/compat_meliad.'
      )
    is_t5 = isinstance(position, T5Bias)
    distance = f' with max_distance {position.max_distance}' if is_t5 else ''
    is_same = is_t5 and position.max_distance == 128
    if layer.post_norm:
      raise ValueError(
        'meliad has norms before sublayers, but post_norm is True. Remove '
        'layer_config.LayerConfig.post_norm.'
      )
    if layer.include_self or not is_same:
      raise ValueError(
        'meliad has position T5Bias with max_distance 128 and include_self '
        f'False, got {type(position).__name__}{distance} and include_self '
        f'{layer.include_self}. Set position and include_self of '
        'layer_config.LayerConfig, and positions.T5Bias.max_distance.'
      )
    h = np.linspace(-2, 2, 9)
    if not np.array_equal(layer.activation(h), np.maximum(h, 0)):
      raise ValueError(
        'meliad uses ReLU. Set layer_config.LayerConfig.activation to '
        '@jax.nn.relu.'
      )
  names = parameters(meliad)
  width = divided_by = model.d_model
  if any(RELEASE_2022 in name for name in names.values()):
    divided_by = len(meliad[names[EMBEDDING]]) if EMBEDDING in names else width
    scales = (n for short, n in names.items() if '/attention_scale' in short)
    negative = [name for name in scales if np.min(meliad[name]) < 0]
    if negative:
      raise ValueError(
        f'{negative[0]} is negative, which only the meliad release of 2022 '
        'supports. This model takes its absolute value, so it cannot be '
        'imported.'
      )
  divisor = model.logits_divisor or width**0.5
  if not np.isclose(divisor, divided_by**0.5, rtol=1e-3):
    raise ValueError(
      f'The checkpoint was trained with logits divided by {divided_by**0.5:.5g}'
      f', but this model divides them by {divisor:.5g}. Set '
      f'model.Model.logits_divisor = {divided_by**0.5!r}.'
    )


def layers(
  cell: Cell,
) -> list[WindowLayer | BlockRecurrentLayer | BlockFeedback]:
  """Returns the layers of a cell; those that Repeat makes from one, once.

  Raises:
    ValueError: the cell contains a kind of layer that meliad does not have.
  """
  match cell:
    case Stack():
      return [found for each in cell.cells for found in layers(each)]
    case Repeat(share=False):
      return layers(cell.cell)
    case WindowLayer() | BlockRecurrentLayer() | BlockFeedback():
      return [cell]
  raise ValueError(
    f'meliad has no {type(cell).__name__}. Choose arch/window, '
    'arch/block_recurrent or arch/block_feedback.'
  )


def parameters(names: Iterable[str]) -> dict[str, str]:
  """Finds the parameters among the arrays of a meliad checkpoint.

  Args:
    names: names of all arrays.

  Returns:
    {short name: name}. The short name lacks prefixes such as target/, decoder/
    and layer_stack/, so it is the same in all forms of a checkpoint. If some
    names begin with optimizer/, target/ or params/, the others are left out.
  """
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
  """Finds the names that meliad gives to the parameters of our model.

  Args:
    target: parameters of our model: arrays or jax.ShapeDtypeStruct.

  Returns:
    {path of our parameter: meliad's short names; see `parameters`}. A parameter
    of stacked layers has several names, one for each layer.

  Raises:
    ValueError: meliad has no counterpart of a parameter.
  """
  leaves = leaves_by_path(target)
  counts = {}  # {cell: layers in it}; several layers are stacked.
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
        f'meliad has no parameter like {path} of this model. Choose'
        ' arch/window, arch/block_recurrent or arch/block_feedback.'
      )
  return found


def shape_there(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape in meliad of a parameter that has `shape` in our model.

  meliad's kernels are matrices. The rows of an output projection hold the heads
  of self-attention, followed by the heads of cross-attention.

  Args:
    name: meliad's name of the parameter.
    shape: shape in our model, without an axis for stacked layers.
  """
  if name.endswith('/kernel'):
    return math.prod(shape[:-1]), shape[-1]
  return shape


def convert(meliad: Mapping[str, np.ndarray], target):
  """Returns parameters of our model with meliad's values.

  Args:
    meliad: {name: array} of a checkpoint.
    target: parameters of our model: arrays or jax.ShapeDtypeStruct.

  Returns:
    The structure of `target`, with NumPy arrays of its shapes and dtypes.

  Raises:
    ValueError: names are missing or unknown, shapes differ, or arrays do not
      hold floating-point numbers. The message lists all of these.
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
        differ.append(f'{name} of shape {given} instead of {needed}')
      elif not jnp.issubdtype(dtype := meliad[known[name]].dtype, jnp.floating):
        differ.append(f'{name} of {dtype} instead of floating-point numbers')
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
      ' arch, size, options and vocabulary of its training.'
    )
  filled = [a.astype(x.dtype) for a, x in zip(filled, leaves, strict=True)]
  return jax.tree.unflatten(jax.tree.structure(target), filled)


def grouped(names: Iterable[str]) -> list[str]:
  """Merges names that differ only in the layer into 'transformer{0,1}/...'."""
  layers = {}
  for name in names:
    number = re.match(r'transformer(\d+)/', name)
    rest = name[number.end() :] if number else name
    layers.setdefault((bool(number), rest), []).append(number and number[1])
  return [
    f'transformer{{{",".join(numbers)}}}/{rest}' if in_layer else rest
    for (in_layer, rest), numbers in layers.items()
  ]
