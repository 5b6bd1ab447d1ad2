"""Long Range Arena (Tay et al. 2021): its tasks that need published files.

A document is a sequence, and its class is the label of the last token. For
Retrieval it is a pair of sequences. Text is read as bytes, at the ids of
`Bytes`, and images as gray levels, row by row, at the ids 1 to 256.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
from pathlib import Path

import numpy as np

from meliad_rec.data.dataset import Cached
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.split_files import read_text
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.vocabulary import Words
from meliad_rec.report.console import suppress_stderr
from meliad_rec.storage.workdir import expand_home

# Ids of the bytes vocabulary that no text has, for START and END.
_START, _END = 2, 1
_TENTHS = {'train': 'train[:90%]', 'validation': 'train[90%:]', 'test': 'test'}
_LUMA = np.float32([0.2989, 0.5870, 0.1140])
_RELEASE = (
  '`curl -O https://storage.googleapis.com/long-range-arena/lra_release.gz` '
  '(8 GB) and unpack it'
)


class LabeledSequences(Cached):
  """Base class of datasets of labeled sequences; see the module.

  Attributes:
    vocabulary: the vocabulary of the ids.
    ends: whether a sequence has START and END.
  """

  vocabulary: Vocabulary = Bytes()
  splits = SPLITS
  ends: bool

  def examples(self, split: str) -> Iterator[tuple[str, list[np.ndarray], int]]:
    """Yields (name, ids of 1 or 2 sequences, class from 0) of a split."""
    raise NotImplementedError

  def _documents(self, split):
    documents = (self._document(*each) for each in self.examples(split))
    return Documents.collect(documents, self.vocabulary)

  def _document(self, name, sequences, label) -> Document:
    sizes = [len(sequence) for sequence in sequences]
    if self.end_ids:
      start, end = self.end_ids
      sequences = [np.r_[start, sequence, end] for sequence in sequences]
    tokens = np.concatenate(sequences)
    labels = np.zeros_like(tokens)
    labels[-1] = label + 1
    first = len(sequences[0]) if len(sequences) > 1 else None
    return Document(name, tokens, sum(sizes), 1, labels, first)

  @property
  def end_ids(self) -> tuple[int, ...]:
    """The ids before and after each sequence; () if there are none."""
    return self._ends if self.ends else ()

  @property
  def _ends(self) -> tuple[int, int]:
    return _START, _END


class GrayImages(LabeledSequences):
  """Base class of datasets of gray images: levels from 0 to 255, row by row."""

  vocabulary = Words([*map(str, range(256)), 'START', 'END'])

  @property
  def _ends(self) -> tuple[int, int]:
    return 257, 258


@dataclasses.dataclass(frozen=True)
class IMDbText(LabeledSequences):
  """Reviews of IMDb as bytes; class 1 is a positive review.

  Attributes:
    data_dir: folder in which `tfds build imdb_reviews` wrote the reviews. None:
      the default folder of tensorflow-datasets.
    tfds_splits: for train, validation and test, the part of the dataset. The
      Long Range Arena trains on all of 'train', and validates on 'test'.
    max_length: maximum bytes of a review; the rest is left out.
    ends: whether a review has START and END.
  """

  data_dir: str | None = None
  tfds_splits: Mapping[str, str] = dataclasses.field(
    default_factory=_TENTHS.copy
  )
  max_length: int = 4096
  ends: bool = True

  def examples(self, split):
    rows = _tfds('imdb_reviews', self.data_dir, self.tfds_splits, split)
    for number, row in enumerate(rows):
      ids = np.frombuffer(row['text'], np.uint8)[: self.max_length] + np.int32(
        3
      )
      yield f'{split}-{number}', [ids], int(row['label'])


@dataclasses.dataclass(frozen=True)
class Image(GrayImages):
  """Images of CIFAR-10 in gray: 1,024 levels each, and 10 classes.

  Attributes:
    data_dir: folder in which `tfds build cifar10` wrote the images. None: the
      default folder of tensorflow-datasets.
    tfds_splits: for train, validation and test, the part of the dataset.
    ends: whether an image has START and END.
  """

  data_dir: str | None = None
  tfds_splits: Mapping[str, str] = dataclasses.field(
    default_factory=_TENTHS.copy
  )
  ends: bool = True

  def examples(self, split):
    rows = _tfds('cifar10', self.data_dir, self.tfds_splits, split)
    for number, row in enumerate(rows):
      ids = gray(row['image']).ravel() + np.int32(1)
      yield f'{split}-{number}', [ids], int(row['label'])


@dataclasses.dataclass(frozen=True)
class Retrieval(LabeledSequences):
  """Pairs of articles of the ACL Anthology Network as bytes.

  Class 1 is a pair in which one article cites the other. All splits together
  need about 8 GB of memory.

  Attributes:
    path: folder with new_aan_pairs.train.tsv, .eval.tsv and .test.tsv, whose
      columns are label, two ids and two texts.
    max_length: maximum bytes of an article; the rest is left out.
    ends: whether an article has START and END.
  """

  path: str
  max_length: int = 4096
  ends: bool = True

  def examples(self, split):
    name = 'eval' if split == 'validation' else split
    path = Path(expand_home(self.path), f'new_aan_pairs.{name}.tsv')
    if not path.is_file():
      raise ValueError(
        f'There is no file {path.absolute()}. Run {_RELEASE}, and set AAN to '
        'its folder lra_release/lra_release/tsv_data.'
      )
    # As bytes: lines end at a newline only, and a text may contain others.
    with path.open('rb') as file:
      for number, row in enumerate(file, 1):
        try:
          # Quotes are text, as in the code of the Long Range Arena.
          label, _, _, *texts = row.decode().rstrip('\n').split('\t')
          both = [
            Bytes().encode(text)[: self.max_length] for text in texts if text
          ]
          label = int(float(label))
        except ValueError:
          both, label = [], 0
        if len(both) != 2 or label not in (0, 1):
          raise ValueError(
            f'{path}: row {number} is not a label 0 or 1, two ids and two '
            'texts, separated by tabs. Get the file again.'
          )
        yield f'{split}-{number}', both, label


@dataclasses.dataclass(frozen=True)
class PathfinderFiles(GrayImages):
  """Images of 32 x 32 points; class 1 if a path connects the two circles.

  80 % of the images are in train, 10 % in validation and 10 % in test, after
  they are shuffled. Empty files, of which the release has one, are left out.

  Attributes:
    path: folder with metadata/*.npy and imgs/, such as pathfinder32/
      curv_contour_length_14 of the release.
    seed: seed of the order of the images before they are split.
    ends: whether an image has START and END.
  """

  path: str
  seed: int = 42
  ends: bool = True

  def examples(self, split):
    from PIL import Image as Png  # Comes with matplotlib.

    count = len(self._listed)
    order = np.random.RandomState(self.seed).permutation(count)
    train, validation = count * 8 // 10, count // 10
    begin, end = {
      'train': (0, train),
      'validation': (train, train + validation),
      'test': (train + validation, count),
    }[split]
    for i in order[begin:end]:
      path, label = self._listed[i]
      if not path.is_file():
        raise ValueError(
          f'There is no image {path.absolute()}, which the files of metadata/ '
          'list. Unpack the release again, or correct PATHFINDER.'
        )
      if not path.stat().st_size:
        continue
      with Png.open(path) as image:
        ids = np.asarray(image.convert('L')).ravel() + np.int32(1)
      yield path.relative_to(self._root).as_posix(), [ids], label

  @property
  def _root(self) -> Path:
    return Path(expand_home(self.path))

  @functools.cached_property
  def _listed(self) -> list[tuple[Path, int]]:
    """(path, class) of each image."""
    paths = sorted(self._root.glob('metadata/*.npy'))
    if not paths:
      raise ValueError(
        f'There are no files metadata/*.npy in {self._root.absolute()}. Run '
        f'{_RELEASE}, and set PATHFINDER to its folder lra_release/lra_release/'
        'pathfinder32/curv_contour_length_14.'
      )
    # The files are lines of text, in spite of their names.
    listed = []
    for path in paths:
      for number, row in enumerate(read_text(path).splitlines(), 1):
        match row.split():
          case []:
            continue
          case [folder, name, _, '0' | '1' as label, *_]:
            listed.append((self._root / folder / name, int(label)))
          case _:
            raise ValueError(
              f'{path}:{number} is not the folder and name of an image, a '
              'number and a class 0 or 1. Unpack the release again.'
            )
    return listed


def gray(rgb_HWC: np.ndarray) -> np.ndarray:
  """Returns the gray levels, uint8 [H, W], of an image uint8 [H, W, 3].

  They equal the results of tf.image.rgb_to_grayscale, which the Long Range
  Arena uses, except that rounding may move a level by 1.
  """
  luma_HW = (rgb_HWC.astype(np.float32) / np.float32(255)) @ _LUMA
  return (luma_HW * np.float32(255.5)).astype(np.uint8)


def _tfds(
  name: str, data_dir: str | None, tfds_splits: Mapping[str, str], split: str
) -> Iterator:
  """Yields rows {feature: value} of a part of a dataset, in their order."""
  if {*tfds_splits} != {*SPLITS}:
    raise ValueError(
      f'tfds_splits must have {", ".join(SPLITS)}, got '
      f'{", ".join(tfds_splits)}. Set the tfds_splits of the task.'
    )
  with suppress_stderr():
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=data_dir and expand_home(data_dir))
  if not builder.data_path.exists():
    raise ValueError(
      f'{name} is not in {builder.data_path}. Run `tfds build {name}'
      f'{f" --data_dir={data_dir}" if data_dir else ""}`, or set TFDS to the '
      'data_dir it was built in.'
    )
  with suppress_stderr():
    rows = builder.as_dataset(split=tfds_splits[split], shuffle_files=False)
    yield from rows.as_numpy_iterator()
