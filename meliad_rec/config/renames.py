"""Former names, so that configurations of older runs still load.

A run keeps the gin text that it was trained with. `Renamer` rewrites one such
text, statement by statement, to the names that the package has now.
"""

from collections.abc import Callable

from gin.config_parser import BindingStatement
from gin.config_parser import BlockDeclaration
from gin.config_parser import ImportStatement

# Names in version 0.1.0, without the package's.
MODULES = {
  'activations': 'layers.activations',
  'archs.chunks': 'archs.latent_bottleneck',
  'archs.encode': 'archs.transformer',
  'archs.feedback_memory': 'archs.feedback',
  'archs.repeat': 'archs.stack',
  'cores.core_config': 'layers.core_config',
  'cores.core_layer': 'layers.core_layer',
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
# Parameters: current module and class, former name, current name.
PARAMETERS = {
  **{
    f'layers.{module}.{config}.{old}': new
    for module, config in (
      ('layer_config', 'LayerConfig'),
      ('core_config', 'CoreConfig'),
    )
    for old, new in (
      ('heads', 'num_heads'),
      ('head_width', 'head_dim'),
      ('mlp_width', 'mlp_dim'),
      ('key_heads', 'num_kv_heads'),
      ('sees_self', 'include_self'),
    )
  },
  'archs.universal.Universal.together': 'global_halt',
  'recurrence.halt.Halt.penalty': 'ponder_cost',
}
_PACKAGE = 'meliad_rec.'


class Renamer:
  """Rewrites the statements of one gin text to the current names."""

  def __init__(self):
    self._aliases = {}  # Last part of a former name -> that of the current one.
    self._modules = {}  # Current alias -> current module, without the package.

  def module(self, name: str) -> str:
    """The current name of a module, given as a full dotted name."""
    found = MODULES.get(name.removeprefix(_PACKAGE))
    is_ours = found and name.startswith(_PACKAGE)
    return _PACKAGE + found if is_ours else name

  def selector(self, dotted: str) -> str:
    """The current name of a function or class, given by its module's alias."""
    alias, dot, rest = dotted.partition('.')
    return self._aliases.get(alias, alias) + dot + rest

  def parameter(self, selector: str, name: str) -> str:
    """The current name of a parameter of a current selector."""
    alias, _, rest = selector.partition('.')
    path = f'{self._modules.get(alias, alias)}.{rest}.{name}'
    return PARAMETERS.get(path.removeprefix(_PACKAGE), name)

  def statement(self, statement, of_value: Callable):
    """One statement in current names; `of_value` rewrites a bound value."""
    match statement:
      case ImportStatement():
        module = self.module(statement.module)
        alias = statement.bound_name()
        if statement.is_from and not statement.alias:
          self._aliases[alias] = alias = module.rpartition('.')[2]
        self._modules[alias] = module.removeprefix(_PACKAGE)
        return statement._replace(module=module)
      case BindingStatement(arg_name='', value=value):
        return statement._replace(value=of_value(value))
      case BindingStatement(selector=selector, arg_name=name, value=value):
        selector = self.selector(selector)
        return statement._replace(
          selector=selector,
          arg_name=self.parameter(selector, name),
          value=of_value(value),
        )
      case BlockDeclaration(selector=selector):
        return statement._replace(selector=self.selector(selector))
      case _:
        return statement
