r"""Scores translations by BLEU, or summaries by ROUGE.

  meliad-rec score TARGETS REFERENCES
  meliad-rec score SUMMARIES REFERENCES --rouge

Both files have one text in each line. BLEU is given three times: as computed by
sacreBLEU (tokenizer 13a), and for text that is already tokenized, with hyphens
between words split, as Ott et al. 2018 do for WMT, and unsplit, as in results
on IWSLT14. ROUGE is the mean F1 without stemming; rougeL compares whole texts,
and rougeLsum sentence by sentence. All are in percent. The packages for both
come with meliad_rec[text].
"""

from absl import flags

from meliad_rec.data.split_files import read_lines
from meliad_rec.metrics import text_scores

# Arguments that the help shows, besides flags.
ARGUMENTS = 'TEXTS REFERENCES'


def define_flags() -> None:
  flags.DEFINE_bool('rouge', False, 'Print ROUGE instead of BLEU.')
  flags.DEFINE_bool('lowercase', False, 'Compare in lower case.')


def main(argv: list[str]) -> None:
  if len(argv) != 3:
    raise ValueError(
      'Give a file of texts and one of references, as in: meliad-rec score '
      f'TEXTS REFERENCES. Got {len(argv) - 1} arguments.'
    )
  args = flags.FLAGS
  texts, references = read_lines(argv[1]), read_lines(argv[2])
  if len(texts) != len(references):
    raise ValueError(
      f'{argv[1]} has {len(texts)} lines, but {argv[2]} has '
      f'{len(references)}. Line n of one must belong to line n of the other.'
    )
  if args.lowercase:
    texts, references = (
      [line.lower() for line in lines] for lines in (texts, references)
    )
  measure = text_scores.rouge if args.rouge else text_scores.bleu
  for name, value in measure(texts, references).items():
    print(f'{name:24} {value:.2f}')
