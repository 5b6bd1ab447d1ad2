"""The PG-19 books (Rae et al. 2020), prepared by tensorflow-datasets."""

from collections.abc import Iterator
import dataclasses

from meliad_rec.data.documents import SPLITS
from meliad_rec.report.console import suppress_stderr
from meliad_rec.storage.workdir import expand_home

_NAME = 'pg19:0.1.1'


@dataclasses.dataclass(frozen=True)
class Pg19:
  """The PG-19 books; one book is one document.

  Attributes:
    data_dir: folder in which `tfds build` wrote the books. None means the
      default folder of tensorflow-datasets.

  Raises:
    ValueError: the books have not been prepared in this folder. Raised by
      `read`.
  """

  data_dir: str | None = None

  description = 'pg19: tensorflow-datasets pg19 0.1.1'
  splits = SPLITS

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields (book_id, text) of every book of a split in a fixed order."""
    with suppress_stderr():
      import tensorflow_datasets as tfds

      place = self.data_dir and expand_home(self.data_dir)
      builder = tfds.builder(_NAME, data_dir=place)
    if not builder.data_path.exists():
      folder = self.data_dir or builder.data_path.parents[1]
      raise ValueError(
        f'pg19 is not in {builder.data_path}. Run `tfds build pg19 '
        f'--data_dir={folder}` (11 GB), or set --path (in gin: '
        'sources.Pg19.data_dir) to the data_dir it was built in.'
      )
    with suppress_stderr():
      books = builder.as_dataset(split=split).as_numpy_iterator()
    for book in books:
      yield str(book['book_id']), book['book_text'].decode()
