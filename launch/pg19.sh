#!/usr/bin/env bash
# Makes a vocabulary of 32,000 SentencePiece pieces and a token store of PG19:
#
#   bash launch/pg19.sh OUT [--path=DATA_DIR] [further flags of the source]
#
# Needs the books as `tfds build pg19` prepares them; DATA_DIR is its data_dir.
# Writes OUT/pieces.model and OUT/store, and leaves what is already there. Train
# with --gin_file=task/store and --gin_param="STORE = 'OUT/store'"; `meliad-rec
# evaluate` then reports the perplexity per word, where words are separated by
# whitespace; the published number of words of the test set is 6,966,499. SIZE is
# the number of pieces.
#
# These pieces keep newlines. Published vocabularies turn them into spaces, and
# models then need not predict where lines end, so perplexities are lower. To
# compare with Hutchins et al. 2022, first copy theirs to OUT/pieces.model: for
# table 1 that of T5, for table 2 the one of PG19 in the authors' code:
#
#   mkdir -p OUT
#   gsutil cp gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model \
#     OUT/pieces.model
#   url=https://github.com/google-research/meliad/raw/main/transformer/vocabs
#   curl -fLo OUT/pieces.model $url/pg19train_bpe_32000.model
#
# To read the original text files without TensorFlow, or other books with one
# file for each in train/, validation/ and test/:
#
#   mkdir BOOKS
#   gsutil -m cp -r gs://deepmind-gutenberg/{train,validation,test} BOOKS
#   bash launch/pg19.sh OUT --source=folder --path=BOOKS
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# -gt 0 && $1 != -* ]] || usage
out=$1
shift
run=("${PYTHON:-python}" -m meliad_rec)
mkdir -p "$out"
if ! [ -e "$out/pieces.model" ]; then
  "${run[@]}" train_vocab --source=pg19 --out="$out/pieces.model" \
    --size="${SIZE:-32000}" "$@"
fi
if ! [ -e "$out/store" ]; then
  "${run[@]}" tokenize --source=pg19 --out="$out/store" \
    --vocabulary="$out/pieces.model" "$@"
fi
echo "In $out: pieces.model and store."
