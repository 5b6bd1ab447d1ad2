"""ListOps and logical inference from files in the published forms."""

import pytest

from meliad_rec.data.listops_files import ListOpsFiles
from meliad_rec.data.listops_files import LogicalInferenceFiles
from meliad_rec.data.synthetic.listops import ListOps
from meliad_rec.data.synthetic.logical_inference import LogicalInference


@pytest.mark.parametrize(
  ('read', 'generated'),
  [(ListOpsFiles, ListOps), (LogicalInferenceFiles, LogicalInference)],
)
def test_ids_are_those_of_generated_examples(read, generated):
  assert read.vocabulary.words == generated.vocabulary.words


def write(folder, **texts):
  for name, text in texts.items():
    (folder / f'{name}.tsv').write_text(text)
  return f'{folder}/{{split}}.tsv'


def test_expressions_of_both_forms(tmp_path):
  path = write(
    tmp_path,
    basic_train='Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n7\t7\n',
    val='3\t( ( [MIN 3 ) ] )\n',
  )
  data = ListOpsFiles(path.replace('{split}', 'basic_{split}'))
  found = data.documents('train')
  assert found.names == ['train-2', 'train-3']
  spelled = data.vocabulary.decode(found.tokens)
  assert spelled == 'START [MAX 2 9 ] END START 7 END'
  assert found.labels.tolist() == [0, 0, 0, 0, 0, 10, 0, 0, 8]
  short = ListOpsFiles(path, max_length=3, ends=False)
  [only] = short.documents('validation').labels.reshape(1, -1)
  assert only.tolist() == [0, 0, 4]


def test_long_expressions_are_left_out_of_train_but_not_of_tests(tmp_path):
  text = '4\t[SM 2 2 ]\n1\t1\n'
  path = write(tmp_path, train=text, test=text)
  data = ListOpsFiles(path, max_length=3)
  assert [len(data.documents(s).names) for s in ('train', 'test')] == [1, 2]


def test_validation_leaves_out_long_expressions_unless_it_has_all(tmp_path):
  path = write(tmp_path, train='1\t1\n', val='4\t[SM 2 2 ]\n1\t1\n')
  for like_train, count in (True, 1), (False, 2):
    data = ListOpsFiles(path, 3, validation_like_train=like_train)
    assert len(data.documents('validation').names) == count


def test_relations_of_formulas(tmp_path):
  path = write(tmp_path, test_7='<\t( a ( and b ) )\ta\n')
  data = LogicalInferenceFiles(path)
  assert data.splits == ('test_7',)
  found = data.documents('test_7')
  spelled = data.vocabulary.decode(found.tokens)
  assert spelled == 'START ( a ( and b ) ) END START a END'
  assert found.first_lengths.tolist() == [9]
  assert found.labels.tolist() == [0] * 11 + [2]


@pytest.mark.parametrize(
  ('kind', 'line'),
  [
    (ListOpsFiles, '10\t[MAX 2 9 ]'),
    (ListOpsFiles, '\t[MAX 2 9 ]'),
    (ListOpsFiles, '9\t'),
    (ListOpsFiles, '9\t[MOX 2 9 ]'),
    (ListOpsFiles, '9'),
    (LogicalInferenceFiles, '?\ta\tb'),
    (LogicalInferenceFiles, '<\ta'),
    (LogicalInferenceFiles, '<\ta\t'),
    (LogicalInferenceFiles, '<\ta\tg'),
  ],
)
def test_other_lines_are_refused(tmp_path, kind, line):
  good = '9\t[MAX 2 9 ]' if kind is ListOpsFiles else '<\ta\tb'
  data = kind(write(tmp_path, train=f'{good}\n{line}\n'))
  with pytest.raises(ValueError, match=r'train\.tsv:2 is not an? .*tabs'):
    data.documents('train')


def test_the_first_line_is_read_unless_it_names_fields(tmp_path):
  path = write(tmp_path, train='\ufeff9\t[MAX 2 9 ]\n', test='10\t[MAX 2 9 ]\n')
  data = ListOpsFiles(path)
  assert data.documents('train').names == ['train-1']
  with pytest.raises(ValueError, match=r'test\.tsv:1 is not'):
    data.documents('test')
