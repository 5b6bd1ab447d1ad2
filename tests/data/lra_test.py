"""Tasks of the Long Range Arena, from tiny files in the published formats."""

import numpy as np
from PIL import Image as Png
import pytest

from meliad_rec.data.lra import gray
from meliad_rec.data.lra import Image
from meliad_rec.data.lra import IMDbText
from meliad_rec.data.lra import PathfinderFiles
from meliad_rec.data.lra import Retrieval

SPLITS = 'train', 'validation', 'test'


def prepared(folder, name, version, features, rows_of):
  """Writes a dataset as `tfds build` does."""
  tf = pytest.importorskip('tensorflow')
  tfds = pytest.importorskip('tensorflow_datasets')
  folder = folder.joinpath(name, *version)
  folder.mkdir(parents=True)
  features = tfds.features.FeaturesDict(features(tfds.features))
  infos = []
  for split, rows in rows_of.items():
    file = folder / f'{name}-{split}.tfrecord-00000-of-00001'
    with tf.io.TFRecordWriter(str(file)) as writer:
      for row in rows:
        writer.write(features.serialize_example(row))
    template = tfds.core.ShardedFileTemplate(
      data_dir=folder,
      dataset_name=name,
      split=split,
      filetype_suffix='tfrecord',
    )
    infos.append(
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=[len(rows)],
        num_bytes=0,
        filename_template=template,
      )
    )
  tfds.folder_dataset.write_metadata(
    data_dir=folder,
    features=features,
    split_infos=infos,
    filename_template='{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}',
  )


def test_reviews_are_bytes_with_the_class_on_the_last_token(tmp_path):
  texts = [f'review {i} \u00e9' for i in range(10)]
  prepared(
    tmp_path,
    'imdb_reviews',
    ('plain_text', '1.0.0'),
    lambda f: {'text': f.Text(), 'label': f.ClassLabel(names=['neg', 'pos'])},
    {
      'train': [{'text': t, 'label': i % 2} for i, t in enumerate(texts)],
      'test': [{'text': 'good', 'label': 1}],
    },
  )
  data = IMDbText(str(tmp_path))
  counts = [len(data.documents(split)) for split in SPLITS]
  assert counts == [9, 1, 1]
  for i, text in enumerate(texts):
    split, place = ('validation', 0) if i == 9 else ('train', i)
    tokens, labels = data.documents(split).read(place, 0, 13)
    assert tokens.tolist() == [2, *(b + 3 for b in text.encode()), 1]
    assert labels.tolist() == [0] * 12 + [i % 2 + 1]
  cut = IMDbText(str(tmp_path), max_length=3, ends=False).documents('test')
  assert data.vocabulary.decode(cut[0]) == 'goo' and cut.bytes_ == [3]
  tfds_splits = {'train': 'train', 'validation': 'test', 'test': 'test'}
  official = IMDbText(str(tmp_path), tfds_splits)
  assert [len(official.documents(split)) for split in SPLITS] == [10, 1, 1]
  with pytest.raises(ValueError, match='tfds_splits must have'):
    IMDbText(str(tmp_path), {'train': 'train'}).documents('train')


def test_images_are_the_grey_levels_of_tensorflow(tmp_path):
  tf = pytest.importorskip('tensorflow')
  image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
  expected = np.asarray(tf.image.rgb_to_grayscale(image))[..., 0]
  # A rounding of the last bit may move a level by 1.
  assert np.abs(gray(image).astype(int) - expected).max() <= 1
  assert (gray(image) == expected).mean() > 0.99
  row = {'image': image, 'label': 7, 'id': 'a'}
  prepared(
    tmp_path,
    'cifar10',
    ('3.0.2',),
    lambda f: {
      'id': f.Text(),
      'image': f.Image(shape=(32, 32, 3)),
      'label': f.ClassLabel(num_classes=10),
    },
    {'train': [row] * 10, 'test': [row]},
  )
  documents = Image(str(tmp_path)).documents('test')
  tokens, labels = documents.read(0, 0, 1026)
  np.testing.assert_array_equal(tokens[1:-1], gray(image).ravel() + 1)
  assert tokens[[0, -1]].tolist() == [257, 258]
  assert labels.tolist() == [0] * 1025 + [8]


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    (lambda path: IMDbText(path), 'tfds build imdb_reviews --data_dir='),
    (lambda path: Image(path), 'tfds build cifar10 --data_dir='),
    (lambda path: Retrieval(path), 'lra_release.gz.* and set AAN'),
    (lambda path: PathfinderFiles(path), 'lra_release.gz.* and set PATHFINDER'),
  ],
)
def test_missing_files_are_reported_with_their_command(tmp_path, data, message):
  with pytest.raises(ValueError, match=message):
    data(str(tmp_path)).documents('train')
  with pytest.raises(ValueError, match="no split 'dev'"):
    data(str(tmp_path)).documents('dev')


def test_articles_of_a_pair_are_cut_and_follow_each_other(tmp_path):
  first, long = '"A" "b, c', 'x' * 200_000  # A quote without an end is text.
  rows = f'1.0\tA1\tB2\t{first}\t{long}\n0.0\tA1\tC3\td\t"\n'
  (tmp_path / 'new_aan_pairs.eval.tsv').write_text(rows)
  data = Retrieval(str(tmp_path), max_length=100)
  documents = data.documents('validation')
  assert documents.first_lengths.tolist() == [len(first) + 2, 3]
  assert documents.lengths.tolist() == [11 + 102, 6]
  assert data.vocabulary.decode(documents[0]) == first + 'x' * 100
  assert data.vocabulary.decode(documents[1]) == 'd"'
  assert documents.labels[[112, 118]].tolist() == [2, 1]
  assert np.count_nonzero(documents.labels) == 2
  rows = b'0.0\tA\tB\tone\rline\tx\n'
  (tmp_path / 'new_aan_pairs.train.tsv').write_bytes(rows)
  whole = Retrieval(str(tmp_path)).documents('train')[0]
  assert data.vocabulary.decode(whole) == 'one\rlinex'
  for wrong in b'2.0\ta\tb\tc\td', b'1.0\ta\tb\tc', b'1.0\ta\tb\tc\t\xff':
    (tmp_path / 'new_aan_pairs.test.tsv').write_bytes(wrong)
    with pytest.raises(ValueError, match='row 1 is not a label'):
      data.documents('test')


def test_pathfinder_is_split_and_skips_the_empty_file(tmp_path):
  draw = np.random.default_rng(0)
  images = draw.integers(0, 256, (20, 32, 32), np.uint8)
  (tmp_path / 'metadata').mkdir()
  for part in range(2):
    folder = tmp_path / 'imgs' / str(part)
    folder.mkdir(parents=True)
    lines = []
    for i in range(10):
      Png.fromarray(images[10 * part + i]).save(folder / f'sample_{i}.png')
      lines.append(f'imgs/{part} sample_{i}.png {i} {i % 2} 14 2 1.0')
    text = '\n'.join(lines) + '\n'
    (tmp_path / 'metadata' / f'{part}.npy').write_text(text)
  (tmp_path / 'imgs' / '1' / 'sample_3.png').write_bytes(b'')
  data = PathfinderFiles(str(tmp_path), ends=False)
  names = {split: data.documents(split).names for split in SPLITS}
  every = [name for split in SPLITS for name in names[split]]
  assert len(set(every)) == len(every) == 19
  assert sum(map(len, names.values())) == 19 and len(names['train']) >= 15
  for split in SPLITS:
    documents = data.documents(split)
    for i, name in enumerate(names[split]):
      part, number = int(name[5]), int(name[14])
      tokens, labels = documents.read(i, 0, 1024)
      expected = images[10 * part + number].ravel().astype(int) + 1
      np.testing.assert_array_equal(tokens, expected)
      assert labels[-1] == number % 2 + 1
  (tmp_path / 'imgs' / '0' / 'sample_7.png').unlink()
  with pytest.raises(ValueError, match='no image .*sample_7.png'):
    again = PathfinderFiles(str(tmp_path))
    for split in SPLITS:
      again.documents(split)
  (tmp_path / 'metadata' / '1.npy').write_text('imgs/1 sample_0.png 0 2\n')
  with pytest.raises(ValueError, match='1.npy:1 is not .* class 0 or 1'):
    PathfinderFiles(str(tmp_path)).documents('test')
