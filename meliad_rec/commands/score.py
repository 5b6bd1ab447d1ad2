r"""Scores translations by BLEU, or summaries by ROUGE.

  meliad-rec score TARGETS REFERENCES
  meliad-rec score SUMMARIES REFERENCES --rouge

Both files have one text in each line. There are two figures of BLEU: that of
sacreBLEU, with its tokenizer 13a, and that of texts that are tokenized already,
in which hyphens between words are split, as in Ott et al. 2018. ROUGE is the
mean F1 without stemming; ROUGE-L compares whole texts.
"""

from collections.abc import Sequence
import re

from absl import flags

from meliad_rec.commands.translate import read_lines
from meliad_rec.report import console


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
  console.plain()
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
  measure = rouge if args.rouge else bleu
  for name, value in measure(texts, references).items():
    print(f'{name:24} {value:.2f}')


def bleu(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
  """Returns {name: BLEU in percent} of texts, one reference each.

  Raises:
    ValueError: the package sacrebleu is missing.
  """
  try:
    import sacrebleu
  except ImportError:
    raise ValueError(
      'BLEU needs the package sacrebleu. Install meliad_rec[text].'
    ) from None
  standard = sacrebleu.corpus_bleu(texts, [references])
  split = [[*map(split_compounds, lines)] for lines in (texts, references)]
  tokenized = sacrebleu.corpus_bleu(
    split[0], [split[1]], tokenize='none', force=True
  )
  return {
    'sacreBLEU (13a)': standard.score,
    'tokenized, split BLEU': tokenized.score,
  }


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
  """Returns {name: mean F1 in percent} of texts, one reference each.

  Raises:
    ValueError: the package rouge-score is missing.
  """
  try:
    from rouge_score import rouge_scorer
  except ImportError:
    raise ValueError(
      'ROUGE needs the package rouge-score. Install meliad_rec[text].'
    ) from None
  names = ['rouge1', 'rouge2', 'rougeL']
  scorer = rouge_scorer.RougeScorer(names)
  scores = [*map(scorer.score, references, texts)]
  mean = lambda name: sum(s[name].fmeasure for s in scores) / len(scores)
  return {name: 100 * mean(name) for name in names}


def split_compounds(line: str) -> str:
  """Splits hyphens between words, as scripts of fairseq do for WMT."""
  return re.sub(r'(\S)-(\S)', r'\1 ##AT##-##AT## \2', line)
