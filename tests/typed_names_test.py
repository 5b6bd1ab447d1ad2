"""What type checkers and editors see of the package; .ci/run starts mypy."""

import ast
from pathlib import Path

import meliad_rec

PACKAGE = Path(meliad_rec.__file__).parent


def test_type_checkers_see_the_names_that_are_imported_lazily():
  tree = ast.parse((PACKAGE / '__init__.py').read_text(encoding='utf-8'))
  seen = {
    alias.name: f'{node.module}.{alias.name}'
    for node in ast.walk(tree)
    if isinstance(node, ast.ImportFrom) and node.module.startswith('meliad_rec')
    for alias in node.names
    if alias.asname == alias.name  # Only such an import is public to checkers.
  }
  lazy = {
    name: f'meliad_rec.{place.replace(":", ".")}'
    for name, place in meliad_rec._PUBLIC.items()
  }
  assert seen == lazy
  assert (PACKAGE / 'py.typed').is_file()
