"""`python -m meliad_rec COMMAND` does the same as `meliad-rec COMMAND`."""

from meliad_rec.cli import main

if __name__ == '__main__':
  main()
