"""Documents of synthetic tasks as words."""


def spelled(task, split):
  """Yields the words of each document, and its labels (words or None)."""
  documents, words = task.documents(split), task.vocabulary.words
  for i in range(len(documents)):
    tokens, labels = documents.read(i, 0, documents.lengths[i])
    yield (
      [words[token - 1] for token in tokens],
      [words[label - 1] if label else None for label in labels],
    )
