"""`python -m meliad_rec COMMAND` does the same as `meliad-rec COMMAND`."""

from meliad_rec.distributed import interrupts


def main() -> None:
  """Runs the console command."""
  interrupts.end_at_once()  # Before the imports, which take seconds.
  from meliad_rec import cli

  cli.main()


if __name__ == '__main__':
  main()
