"""Former names of modules, classes and parameters, so that older runs load.

A run keeps its configuration, a gin text, in config.gin. `Renamer` rewrites
such a text, statement by statement, to the current names. `saved_paths` finds
arrays in the run's checkpoints that have former names.
"""

from collections.abc import Callable
from collections.abc import Iterable
import re

from gin.config_parser import BindingStatement
from gin.config_parser import BlockDeclaration
from gin.config_parser import ImportStatement

# Modules of version 0.1.0, without `meliad_rec.`, and their current names.
MODULES = {
  'activations': 'layers.layer_config',
  'archs.chunks': 'archs.latent_bottleneck',
  'archs.encode': 'archs.transformer',
  'archs.feedback_memory': 'archs.feedback',
  'archs.repeat': 'archs.stack',
  'cores.core_config': 'layers.layer_config',
  'cores.core_layer': 'layers.encoder_layer',
  'cores.experts': 'layers.experts',
  'cores.layers': 'archs.transformer',
  'cores.universal': 'archs.universal',
  'data.generated.algorithm': 'data.synthetic.algorithm',
  'data.generated.flip_flop': 'data.synthetic.flip_flop',
  'data.generated.listops': 'data.synthetic.listops',
  'data.generated.logical_inference': 'data.synthetic.logical_inference',
  'data.generated.random_walk': 'data.synthetic.random_walk',
  'data.generated.recall': 'data.synthetic.recall',
  'data.shorter_first': 'data.lanes',
  'embedding': 'models.embedding',
  'evaluation': 'evaluation.evaluation',
  'experiment': 'training.experiment',
  'gates': 'layers.gates',
  'halting.halt': 'recurrence.halt',
  'heads': 'models.heads',
  'layer_config': 'layers.layer_config',
  'losses': 'metrics.losses',
  'model': 'models.model',
  'norms': 'layers.norms',
  'optimizer.optimizer': 'training.optimizer',
  'optimizer.schedules': 'training.schedules',
  'partition': 'distributed.partition',
  'pooling': 'models.pooling',
  'positions': 'layers.positions',
  'span': 'layers.positions',
}
# Classes: current module, former name, current name.
CLASSES = {
  'archs.transformer.Encode': 'Encoder',
  'archs.transformer.Layers': 'EncoderLayers',
  'evaluation.evaluation.Part': 'EvalSubset',
  'layers.encoder_layer.CoreLayer': 'EncoderLayer',
  'layers.layer_config.CoreConfig': 'EncoderConfig',
}
# Functions that now come from another library: name in the current module, and
# full name there.
FUNCTIONS = {
  'archs.latent_bottleneck.zeros': 'jax.nn.initializers.zeros',
  'layers.layer_config.relu': 'jax.nn.relu',
}
# Parameters: current module and class, former name, current name. None means
# that the parameter was removed. None of its values changed a result.
PARAMETERS = {
  **{
    f'layers.layer_config.{config}.{old}': new
    for config in ('LayerConfig', 'EncoderConfig')
    for old, new in (
      ('heads', 'num_heads'),
      ('head_width', 'head_dim'),
      ('mlp_width', 'mlp_dim'),
      ('key_heads', 'num_kv_heads'),
      ('sees_self', 'include_self'),
    )
  },
  'archs.latent_bottleneck.LatentBottleneck.core': 'encoder',
  'archs.latent_bottleneck.LatentBottleneck.first': 'slots_init',
  'archs.transformer.Encoder.core': 'encoder',
  'archs.universal.Universal.exit_per_device': None,
  'archs.universal.Universal.loop': None,
  'archs.universal.Universal.together': 'global_halt',
  'layers.layer_config.LayerConfig.attention_kernels': 'attention',
  **{
    f'layers.positions.{name}.heads': 'num_heads'
    for name in ('T5Bias', 'ALiBi', 'RelativeKeys')
  },
  **{
    f'models.embedding.{kind}Embedding.deviation': 'stddev'
    for kind in ('Tied', 'Untied', 'Adaptive')
  },
  'recurrence.halt.Halt.penalty': 'ponder_cost',
  'training.experiment.Experiment.part': 'eval_subset',
}
# Values that changed: current module and class with the former parameter, and
# {former value: current value}.
VALUES = {
  'archs.universal.Universal.inference': dict.fromkeys(
    ('cond', 'fixed', 'masked'), 'while'
  ),
  'layers.layer_config.LayerConfig.attention_kernels': {
    True: 'auto',
    False: 'xla',
  },
}
# Paths of arrays in checkpoints: pattern of a former name, current name.
PATHS = ((r'(^|/)core/', r'\1encoder/'),)
# Settings added since 0.1.0, and the values at which nothing changes; settings
# that are None are left out.
ADDED = {
  'DEPTHS': '()',
  'EQUALITY': 'False',
  'FILLER_KEYS': 'False',
  'NORMALIZE_MEMORY': 'True',
  'PAIR_PASSES': '1',
  'PUBLISHED': '{}',
  'REMAT_STEPS': '1',
  'TOKENS_PER_ELEMENT': '1',
  'VALIDATION_LIKE_TRAIN': 'True',
  'a2c.A2C.bootstrap_at_limit': 'False',
  'a2c.A2C.remat_steps': '1',
  'algorithm.Algorithm.equality': 'False',
  'associative_recall.AssociativeRecall.filler_keys': 'False',
  'associative_recall.AssociativeRecall.passes': '1',
  'block_recurrent.BlockRecurrentLayer.ids_stddev': '1.0',
  'block_recurrent.BlockRecurrentLayer.sequential': 'False',
  'block_recurrent.BlockRecurrentLayer.states_stddev': '0.1',
  'embedding.TiedEmbedding.ends': '()',
  'experiment.Experiment.buckets': '1',
  'experiment.Experiment.objective': '@losses.objective',
  'experiment.Experiment.published': '{}',
  'flip_flop.FlipFlop.validation_like_train': 'True',
  'gates.FixedGate.keep_bias': '0.0',
  'gates.LSTMGate.keep_bias': '1.0',
  'halt.Halt.length_bound': 'True',
  'layer_config.EncoderConfig.post_norm': 'False',
  'layer_config.LayerConfig.cross': 'False',
  'layer_config.LayerConfig.hidden_dropout': '0.0',
  'layer_config.LayerConfig.post_norm': 'False',
  'layer_config.LayerConfig.qk_scale': '1.0',
  'listops.ListOps.validation_like_train': 'True',
  'listops_files.ListOpsFiles.validation_like_train': 'True',
  'listops_files.LogicalInferenceFiles.validation_like_train': 'True',
  'losses.objective.label_smoothing': '0.0',
  'losses.objective.smooth_target': 'True',
  'losses.objective.z_loss': '0.0',
  'model.Model.embedding_dropout': '0.0',
  'needle.Needle.depths': '()',
  'positions.T5Bias.start': "'alibi'",
  'recurrent_memory.RecurrentMemory.normalize': 'True',
  'transformer.EncoderLayers.sinusoids': 'False',
  'universal.Universal.early_exit': 'True',
  'window.WindowLayer.keeps_inputs': 'False',
  'word_problem.WordProblem.tokens_per_element': '1',
}
_PACKAGE = 'meliad_rec.'


class Renamer:
  """Rewrites the statements of one gin text to the current names."""

  def __init__(self):
    self._aliases = {}  # Former alias of a module -> current alias.
    self._modules = {}  # Current alias -> current module.
    self._former = set()  # Current aliases of modules given by former names.

  def module(self, name: str) -> str:
    """Returns the current name of a module, given as a full dotted name."""
    current = MODULES.get(name.removeprefix(_PACKAGE))
    is_ours = current and name.startswith(_PACKAGE)
    return _PACKAGE + current if is_ours else name

  def selector(self, dotted: str) -> str:
    """Returns the current name of a function or class.

    The former and the current name have the form 'module.name', where `module`
    is an alias that the text imports.
    """
    alias, dot, rest = dotted.partition('.')
    alias = self._aliases.get(alias, alias)
    full = f'{self._modules.get(alias, alias)}.{rest}'
    if full.startswith('jax.'):  # One name, whichever module is imported.
      return full
    path = self._path(alias + dot + rest)
    return FUNCTIONS.get(path, alias + dot + CLASSES.get(path, rest))

  def parameter(self, selector: str, name: str) -> str | None:
    """Returns the current name of a parameter.

    Returns None if the parameter was removed and the text is of an older
    version.

    Args:
      selector: current name of the function or class, as `selector` returns it.
      name: former or current name of the parameter.
    """
    current = PARAMETERS.get(f'{self._path(selector)}.{name}', name)
    is_former = selector.partition('.')[0] in self._former
    return name if current is None and not is_former else current

  def value(self, selector: str, former_name: str, value):
    """Returns the current equivalent of a former value.

    Args:
      selector: current name of the function or class, as `selector` returns it.
      former_name: name of the parameter in the text.
      value: value of the parameter in the text.
    """
    path = f'{self._path(selector)}.{former_name}'
    is_former = selector.partition('.')[0] in self._former or path in PARAMETERS
    if path in VALUES and is_former and isinstance(value, str | bool):
      return VALUES[path].get(value, value)
    return value

  def _path(self, selector: str) -> str:
    """Returns a name without the package; '' if it is not of this package."""
    alias, _, rest = selector.partition('.')
    module = self._modules.get(alias, '')
    path = f'{module.removeprefix(_PACKAGE)}.{rest}'
    return path if module.startswith(_PACKAGE) else ''

  def statement(self, statement, of_value: Callable):
    """Returns one statement in current names.

    Returns None if the statement sets a parameter that was removed.

    Args:
      statement: a statement of gin's parser. The import statements of a text
        must be given before the statements that use their aliases.
      of_value: takes the value of a binding, and returns the same value with
        the current names of functions and classes.
    """
    match statement:
      case ImportStatement():
        module = self.module(statement.module)
        alias = statement.bound_name()
        if statement.is_from and not statement.alias:
          self._aliases[alias] = alias = module.rpartition('.')[2]
        self._modules[alias] = module
        if module != statement.module:
          self._former.add(alias)
        return statement._replace(module=module)
      case BindingStatement(arg_name='', value=value):
        return statement._replace(value=of_value(value))
      case BindingStatement(selector=selector, arg_name=name, value=value):
        selector = self.selector(selector)
        current = self.parameter(selector, name)
        return current and statement._replace(
          selector=selector,
          arg_name=current,
          value=self.value(selector, name, of_value(value)),
        )
      case BlockDeclaration(selector=selector):
        return statement._replace(selector=self.selector(selector))
      case _:
        return statement


def saved_paths(wanted: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
  """Finds the current paths of a checkpoint's arrays.

  Args:
    wanted: paths of this version's arrays.
    saved: paths of the checkpoint's arrays.

  Returns:
    {path in this version: path in the checkpoint}, for every saved path. A
    path that does not occur in this version is mapped to itself.
  """
  wanted, found = set(wanted), {}
  for path in saved:
    current = path
    if path not in wanted:
      for pattern, replacement in PATHS:
        current = re.sub(pattern, replacement, current)
    found[current if current in wanted else path] = path
  return found
