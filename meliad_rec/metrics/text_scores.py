"""BLEU and ROUGE of texts, in percent, by sacrebleu and rouge-score."""

from collections.abc import Sequence
import re

# Names of the results of `measure`.
NAMES = (
  *('sacrebleu', 'sacrebleu_lowercase'),
  *('tokenized_bleu', 'tokenized_bleu_unsplit'),
  *('rouge1', 'rouge2', 'rougeL', 'rougeLsum'),
)


def measure(
  texts: Sequence[str], references: Sequence[str]
) -> dict[str, float]:
  """Returns {name in NAMES: value} of texts, one reference each.

  Raises:
    ValueError: a package is missing, or the numbers of texts differ.
  """
  lower = bleu(*([*map(str.lower, each)] for each in (texts, references)))
  found = bleu(texts, references) | rouge(texts, references)
  found['sacrebleu_lowercase'] = lower['sacrebleu']
  return {name: found[name] for name in NAMES}


def bleu(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
  """Returns {name: BLEU} of texts, one reference each.

  'sacrebleu' is computed by sacreBLEU (tokenizer 13a). The others are for texts
  that are tokenized already: 'tokenized_bleu' splits hyphens between words, as
  Ott et al. 2018 do for WMT, and 'tokenized_bleu_unsplit' does not, as in
  results on IWSLT14.

  Raises:
    ValueError: the package sacrebleu is missing, or the numbers of texts
      differ.
  """
  try:
    import sacrebleu
  except ImportError:
    raise ValueError(
      'BLEU needs the package sacrebleu. Install meliad_rec[text].'
    ) from None
  _check(texts, references)
  standard = sacrebleu.corpus_bleu(texts, [references])

  def tokenized(change):
    found, wanted = ([*map(change, each)] for each in (texts, references))
    options = {'tokenize': 'none', 'force': True}
    return sacrebleu.corpus_bleu(found, [wanted], **options).score

  return {
    'sacrebleu': standard.score,
    'tokenized_bleu': tokenized(split_compounds),
    'tokenized_bleu_unsplit': tokenized(str),
  }


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
  """Returns {name: mean F1} of texts, one reference each.

  There is no stemming. 'rougeL' compares whole texts, and 'rougeLsum' sentence
  by sentence, as usual for CNN-DailyMail: in both texts, a sentence ends at a
  space after a period, a question mark or an exclamation mark.

  Raises:
    ValueError: the package rouge-score is missing, or the numbers of texts
      differ.
  """
  try:
    from rouge_score import rouge_scorer
    from rouge_score import tokenizers
  except ImportError:
    raise ValueError(
      'ROUGE needs the package rouge-score. Install meliad_rec[text].'
    ) from None
  _check(texts, references)
  names = ['rouge1', 'rouge2', 'rougeL', 'rougeLsum']
  words = tokenizers.DefaultTokenizer(use_stemmer=False)
  scorer = rouge_scorer.RougeScorer(names, tokenizer=words)
  lines = lambda text: re.sub(r'(?<=[.!?])\s+', '\n', text)
  scores = [*map(scorer.score, map(lines, references), map(lines, texts))]
  mean = lambda name: sum(s[name].fmeasure for s in scores) / len(scores)
  return {name: 100 * mean(name) for name in names}


def split_compounds(line: str) -> str:
  """Splits hyphens between words, as scripts of fairseq do for WMT."""
  return re.sub(r'(\S)-(\S)', r'\1 ##AT##-##AT## \2', line)


def _check(texts, references):
  if len(texts) != len(references):
    raise ValueError(
      f'There are {len(texts)} texts, but {len(references)} references. Text n '
      'must belong to reference n.'
    )
