"""Opens the data of a trained run, even if they were moved.

Paths in the configuration of a run are relative to the folder in which the run
was started.
"""

import functools
import glob
from pathlib import Path

from meliad_rec.config.saved import DATA
from meliad_rec.data import listops_files
from meliad_rec.data import lra
from meliad_rec.data import pairs
from meliad_rec.data import sources
from meliad_rec.data import text
from meliad_rec.data import vocabulary
from meliad_rec.data.dataset import Dataset
from meliad_rec.data.store import Store
from meliad_rec.storage.workdir import expand_home
from meliad_rec.storage.workdir import is_address
from meliad_rec.training.experiment import Experiment

# {class: {parameter that is a path: flag that replaces it, or None}}.
_FLAGS = {
  listops_files.ListOpsFiles: {'path': 'path'},
  listops_files.LogicalInferenceFiles: {'path': 'path'},
  lra.IMDbText: {'data_dir': 'path'},
  lra.Image: {'data_dir': 'path'},
  lra.PathfinderFiles: {'path': 'path'},
  lra.Retrieval: {'path': 'path'},
  pairs.Lines: {'source': None, 'target': None},
  pairs.JsonPairs: {'path': 'path'},
  Store: {'path': 'store'},
  sources.Corpus: {'path': 'path'},
  sources.Folder: {'path': 'path', 'split_file': 'split_file'},
  sources.Jsonl: {'path': 'path'},
  sources.Pg19: {'data_dir': 'path'},
  sources.HuggingFace: {'path': 'path'},
  sources.Projects: {'path': 'path', 'names': None},
}
# Replaced by the vocabulary in the folder of the run.
_VOCABULARIES = (
  vocabulary.open_vocabulary,
  vocabulary.SentencePiece,
  vocabulary.Tokenizer,
  text.vocabulary_of,
)


def open_data(
  run,
  store: str | None = None,
  path: str | None = None,
  split_file: str | None = None,
) -> Dataset:
  """Opens the data of a run, or a token store in their place.

  Args:
    run: a TrainedRun.
    store: a token store to open instead. None: the run's own data.
    path: new place of the run's data: of the folder, files or data_dir that the
      configuration names. None: the place that training used.
    split_file: new place of the run's split file. None: the place that training
      used.

  Raises:
    ValueError: the data do not exist or have another vocabulary, or `path` or
      `split_file` is given for data that do not have one.
  """
  moved = {'path': path, 'split_file': split_file}
  unused = {f'--{flag}' for flag, place in moved.items() if place}

  def adapted(found):
    if found in _VOCABULARIES:
      return lambda *_, **__: run.vocabulary

    @functools.wraps(found)
    def at_its_place(**arguments):
      for name, flag in _FLAGS[found].items():
        if moved.get(flag):
          unused.discard(f'--{flag}')
          arguments[name] = moved[flag]
        elif arguments.get(name):
          # A dataset on the Hub has a name instead of a path.
          needed = found is not sources.HuggingFace
          arguments[name] = _place(
            arguments[name], run.started_in, flag, needed
          )
      return found(**arguments)

    return at_its_place if found in _FLAGS else found

  if store:
    data = Store(store)
  else:
    data = run.config.argument(Experiment, 'data', DATA, adapted)
  if unused:
    listed = ' and '.join(sorted(unused))
    if isinstance(data, Store) and not store:
      raise ValueError(
        f'The data of this run are the token store {data.path}, so {listed} '
        'cannot be used. Give the place of a store as --store.'
      )
    raise ValueError(
      f'{listed} cannot be used with '
      f'{"--store" if store else "the data of this run"}. Remove {listed}.'
    )
  if data.vocabulary.identity != run.vocabulary.identity:
    raise ValueError(
      f'The data have the vocabulary {data.vocabulary.identity}, but the run '
      f'was trained with {run.vocabulary.identity}. Give a --store with the '
      'vocabulary of the run.'
    )
  return data


def _place(path: str, started_in: str, flag: str | None, needed: bool) -> str:
  """Returns a path in a run's configuration as a path that is valid here.

  Args:
    path: a path or pattern, relative to `started_in`; or an address.
    started_in: folder in which the run was started.
    flag: name of the flag that gives another path, for the message. None: there
      is no such flag. Then only a pattern with {split} is checked.
    needed: whether a path must exist. If not, a path that does not exist is
      returned unchanged. Other patterns and addresses are never checked.

  Raises:
    ValueError: the path does not exist, but must, or no file matches.
  """
  if is_address(path):
    return path
  place = Path(started_in, expand_home(path))
  is_pattern = glob.has_magic(path) or '{split}' in path
  if flag is None and '{split}' in path:
    parts = map(glob.escape, str(place).split('{split}'))
    if not glob.glob('*'.join(parts)):
      raise ValueError(
        f'The data of this run were in {place}, where no file is now. Put the '
        'files back, or translate a file of sources with meliad-rec translate '
        'RUN FILE.'
      )
  if flag is None or is_pattern or place.exists():
    return str(place)
  if not needed:
    return path
  raise ValueError(
    f'The data of this run were in {place}, which does not exist. Give their '
    f'new place as --{flag}.'
  )
