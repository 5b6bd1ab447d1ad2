"""Builds parts of a run from its saved config.gin, which may be untrusted.

Only the objects needed are imported, and only from a list of modules, so that a
run folder from someone else cannot execute code. A notebook may train one run
and open others, each with its own configuration.
"""

from collections.abc import Callable
from collections.abc import Mapping
import importlib
from typing import Any

from meliad_rec.config.evaluator import Evaluator
from meliad_rec.config.reader import load
from meliad_rec.config.reader import Reader
from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import Name

# Modules and names that an untrusted configuration may call: MODEL to build a
# model, DATA to build a dataset. None of them executes code that it is given.
MODEL = (
  'meliad_rec.archs',
  'meliad_rec.kernels',
  'meliad_rec.layers',
  'meliad_rec.models',
  'meliad_rec.recurrence',
  'jax.nn',
)
DATA = (
  'meliad_rec.data.synthetic',
  'meliad_rec.data.listops_files',
  'meliad_rec.data.lra',
  'meliad_rec.data.pairs.Pairs',
  'meliad_rec.data.pairs.Lines',
  'meliad_rec.data.pairs.JsonPairs',
  'meliad_rec.data.store.Store',
  'meliad_rec.data.text.Text',
  'meliad_rec.data.text.vocabulary_of',
  'meliad_rec.data.sources.Code',
  'meliad_rec.data.sources.Concatenated',
  'meliad_rec.data.sources.Corpus',
  'meliad_rec.data.sources.Folder',
  'meliad_rec.data.sources.Jsonl',
  'meliad_rec.data.sources.HuggingFace',
  'meliad_rec.data.sources.Pg19',
  'meliad_rec.data.sources.Projects',
  'meliad_rec.data.vocabulary',
)
_RESTORE = 'Restore the file that was saved'
_VERSION = 'Use the version of meliad_rec that trained the run'


class _NameReader(Reader):
  """A Reader that imports nothing, and rejects a text that includes files.

  It finds the Names of functions and classes, but not the functions and classes
  themselves.
  """

  def file(self, name, where, outer=()):
    raise ConfigError(
      f'{where} includes {name}, but the configuration of a run is complete by '
      f'itself. {_RESTORE}.'
    )

  def import_module(self, statement, where, here):
    alias = statement.bound_name()
    whole = statement.is_from or statement.alias
    here[alias] = statement.module if whole else alias

  def look_up(self, dotted, where, here):
    alias, _, inner = dotted.partition('.')
    return Name(*f'{here.get(alias, alias)}.{inner}'.rsplit('.', 1)), None


class SavedConfig:
  """The saved configuration of a run.

  Args:
    text: gin text that config.operative returned.
    where: the file that the text was read from, for messages.
    trusted: whether every module may be imported and every name called.

  Raises:
    ConfigError: the text is not valid gin, or includes files.
  """

  def __init__(self, text: str, where: str, trusted: bool = False):
    self.where = where
    self.trusted = trusted
    reader = _NameReader()
    reader.text(text, lambda line: f'{where}:{line}', {})
    self._bindings = reader.bindings.values()

  def build(
    self, function: Callable, given: Mapping[str, Any], parts: tuple[str, ...]
  ) -> Any:
    """Calls a function with the arguments that the configuration gives it.

    Args:
      function: a function or class of this package.
      given: further arguments by name; they override the configuration.
      parts: full names of functions and classes that may be called, or of
        modules that contain such.

    Returns:
      The result of the call.

    Raises:
      ConfigError: the configuration calls a name that does not exist; it calls
        a name outside of `parts` and is not trusted; or Evaluator.call raises
        the error.
    """
    name = _name(function)
    return self._evaluator(parts, name).call(name, '', (), given)

  def argument(
    self,
    function: Callable,
    parameter: str,
    parts: tuple[str, ...],
    adapted: Callable[[Callable], Callable] = lambda found: found,
  ) -> Any:
    """Returns one argument that the configuration gives a function.

    Args:
      function: a function or class of this package.
      parameter: name of the argument.
      parts: as in `build`.
      adapted: maps each function or class to what is called in its place.

    Raises:
      ConfigError: as in `build`, or the argument is not set.
    """
    name = _name(function)
    evaluator = self._evaluator(parts, name, adapted)
    binding = evaluator.argument(name, parameter)
    if binding is None:
      raise ConfigError(
        f'{self.where} does not set {name}.{parameter}. {_RESTORE}.'
      )
    return evaluator.value(binding)

  def _evaluator(self, parts, asked, adapted=lambda found: found):
    """Returns an Evaluator that may call only some functions and classes.

    A trusted configuration may call any.

    Args:
      parts, adapted: as in `argument`.
      asked: Name of a function or class that may be called too.
    """
    parts = (*parts, asked.full)
    find = lambda name: adapted(self._find(name, parts))
    return Evaluator(self._bindings, find, _VERSION)

  def _find(self, name, parts):
    """Imports and returns the function or class that has a Name.

    Raises:
      ConfigError: it does not exist, or it may not be called: it is not in
        `parts`, and the configuration is not trusted.
    """
    full = name.full
    inside = any(f'{full}.'.startswith(f'{part}.') for part in parts)
    if not (inside or self.trusted):
      raise ConfigError(
        f'{self.where} calls {full}, which is not a part of meliad_rec that a '
        'saved run may call. If you trust the folder, add --trusted (in '
        'Python, trusted=True).'
      )
    if full.startswith('meliad_rec.'):
      try:
        found = getattr(importlib.import_module(name.module), name.inner)
      except (ImportError, AttributeError):
        raise ConfigError(
          f'{self.where} names {full}, which does not exist here. {_VERSION}.'
        ) from None
    else:
      found = self._elsewhere(name)
    # A module of ours may also hold names that it imports from elsewhere.
    own = getattr(found, '__module__', '').startswith('meliad_rec.')
    own = own or name.module in ('jax.nn', 'jax.nn.initializers')
    if not (callable(found) and (own or self.trusted)):
      raise ConfigError(
        f'{self.where} calls {full}, which is not a part of meliad_rec. '
        f'{_RESTORE}.'
      )
    return found

  def _elsewhere(self, name):
    """Imports and returns a function or class from outside meliad_rec.

    Args:
      name: Name of the function or class. For a method of a class, the module
        in the Name ends in the name of the class.

    Raises:
      ConfigError: it does not exist, or its module cannot be imported.
    """
    first, *_ = name.full.split('.')
    here = {first: load(first, self.where)}
    _, found = Reader().look_up(name.full, self.where, here)
    return found


def _name(function):
  return Name(function.__module__, function.__qualname__)
