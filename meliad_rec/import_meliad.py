r"""Makes a run of weights that google-research/meliad trained.

  python -m meliad_rec.import_meliad --source=CHECKPOINT --out=RUN \
    --gin_file=arch/block_recurrent --gin_file=size/150m \
    --gin_file=task/pg19 --gin_file=options/compat_meliad

Source is a folder checkpoint_N (or what it holds) that orbax wrote, or an .npz
of {name: array}; meliad_names.py tells the names. The run stands at step 0,
with a new optimizer state. meliad never learns to predict a document's first
token, so losses of an imported model are high there.
"""

from collections.abc import Mapping
from pathlib import Path
import zipfile

from absl import flags
from flax.traverse_util import flatten_dict
from flax.traverse_util import unflatten_dict
import jax
import numpy as np
import orbax.checkpoint as ocp

from meliad_rec import activations
from meliad_rec import cli
from meliad_rec import meliad_names
from meliad_rec import run_folder
from meliad_rec import trainer
from meliad_rec.archs.block_feedback import BlockFeedback
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.repeat import Repeat
from meliad_rec.archs.stack import Stack
from meliad_rec.archs.window import WindowLayer
from meliad_rec.cell import Cell
from meliad_rec.config import config
from meliad_rec.experiment import Experiment
from meliad_rec.layer_config import LayerConfig
from meliad_rec.model import Model
from meliad_rec.positions import T5Bias

EMBEDDING = 'embed/embedding'


def define_flags() -> None:
  cli.define_flags()
  flags.DEFINE_string('source', None, 'Checkpoint folder or .npz file.')
  flags.DEFINE_string('out', None, 'Folder of the run, empty or new.')
  flags.mark_flags_as_required(['source', 'out'])


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise ValueError(f'{argv[1]!r} is no flag; write --flag=value.')
  args = flags.FLAGS
  config.parse(args.gin_file, args.gin_param)
  experiment = config.build(Experiment)()
  _ = experiment.program.shapes  # Builds all layers, which read their settings.
  config.check_read()
  import_run(args.source, experiment, args.out)


def import_run(source: str, experiment: Experiment, out: str) -> None:
  """Writes the folder of a run at step 0, with the weights in `source`.

  Args:
    source: see `read`.
    experiment: built from the configuration that is now parsed.
    out: an empty or new folder.

  Raises:
    ValueError: source cannot be read or does not fit the model, or out is in
      use.
  """
  if Path(out).exists() and any(Path(out).iterdir()):
    raise ValueError(f'{out} is not empty; give an --out that is new.')
  meliad = read(source)
  program = experiment.program
  check_numerics(program.model, meliad)
  name = meliad_names.parameters(meliad).get(EMBEDDING)
  if name and (unused := len(meliad[name]) - program.model.vocab) > 0:
    # meliad rounds vocabularies up: its 260 bytes are 256 and 3 special ids.
    print(f'left out the embeddings of the last {unused} ids: no text has them')
    meliad = meliad | {name: meliad[name][: program.model.vocab]}
  params = meliad_names.convert(meliad, program.shapes.params)
  places = jax.tree.map(lambda a: a.sharding, program.shapes)
  params = jax.device_put(params, places.params)
  state = program.create(experiment.seed)
  state = state.replace(
    params=params,
    opt_state=jax.jit(
      experiment.optimizer.init, out_shardings=places.opt_state
    )(params),
    ema=None if state.ema is None else params,
  )
  run_folder.write(out, experiment, config.operative())
  run = trainer.Run(experiment, out, {'config': config.operative()})
  run.state = state
  run.save(None)
  run.checkpoints.close()
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  print(f'wrote {out}: {count:,} parameters from {source}, at step 0')


def read(source: str) -> dict[str, np.ndarray]:
  """{name: array} of a checkpoint; of an orbax folder parameters alone.

  Raises:
    ValueError: it is neither a folder that orbax wrote nor an .npz of arrays.
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
        f'{path} holds more than arrays ({error}); write it with '
        'np.savez(path, **arrays).'
      ) from None
  raise ValueError(
    f'{path} is no checkpoint: it must be an .npz file, or a folder that holds '
    '_METADATA or tstate/_METADATA, such as checkpoint_N; correct --source.'
  )


def _read_orbax(folder: Path) -> dict[str, np.ndarray]:
  with ocp.PyTreeCheckpointer() as reader:
    saved = reader.metadata(folder).item_metadata.tree
    saved = flatten_dict(saved, sep='/')
    names = meliad_names.parameters(saved).values()
    item = unflatten_dict({name: saved[name] for name in names}, sep='/')
    host = ocp.RestoreArgs(restore_type=np.ndarray)
    args = ocp.args.PyTreeRestore(
      item, jax.tree.map(lambda _: host, item), partial_restore=True
    )
    return flatten_dict(reader.restore(folder, args=args), sep='/')


def check_numerics(model: Model, meliad: Mapping[str, np.ndarray]) -> None:
  """Raises ValueError where the model's logits would not be meliad's."""
  for layer in layer_configs(model.cell):
    position = layer.position(layer.heads)
    if not layer.compat_meliad:
      raise ValueError(
        'meliad computes attention otherwise; add '
        '--gin_file=options/compat_meliad.'
      )
    is_t5 = isinstance(position, T5Bias) and position.max_distance == 128
    if layer.sees_self or not is_t5:
      raise ValueError(
        f'position is {type(position).__name__} and sees_self '
        f'{layer.sees_self}; meliad has T5Bias with max_distance 128, and '
        'False. Set these of layer_config.LayerConfig.'
      )
    if layer.activation is not activations.relu:
      raise ValueError('meliad has a ReLU; leave options/activation_gelu out.')
  names = meliad_names.parameters(meliad)
  width = divided_by = model.d_model
  if any(meliad_names.RELEASE_2022 in name for name in names.values()):
    divided_by = len(meliad[names[EMBEDDING]]) if EMBEDDING in names else width
    scales = (n for short, n in names.items() if '/attention_scale' in short)
    negative = [name for name in scales if np.min(meliad[name]) < 0]
    if negative:
      raise ValueError(
        f'{negative[0]} is negative, which only the release of 2022 takes as it'
        ' is; this model takes the absolute value, so it cannot be imported.'
      )
  divisor = model.logits_divisor or width**0.5
  if not np.isclose(divisor, divided_by**0.5, rtol=1e-3):
    raise ValueError(
      f'The checkpoint was trained with logits divided by {divided_by**0.5:.5g}'
      f', and this model divides them by {divisor:.5g}; set '
      f'model.Model.logits_divisor = {divided_by**0.5!r}.'
    )


def layer_configs(cell: Cell) -> list[LayerConfig]:
  """Those of all layers; ValueError for layers that meliad has not."""
  match cell:
    case Stack():
      return [found for each in cell.cells for found in layer_configs(each)]
    case Repeat(share=False):
      return layer_configs(cell.cell)
    case WindowLayer() | BlockRecurrentLayer() | BlockFeedback():
      return [cell.config]
  raise ValueError(
    f'{type(cell).__name__} is not as in meliad; choose arch/window, '
    'arch/block_recurrent or arch/block_feedback.'
  )


if __name__ == '__main__':
  cli.run_main(main, define_flags)
