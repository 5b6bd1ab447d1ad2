"""What messages, docstrings and READMEs tell people to type exists."""

import ast
import importlib
from pathlib import Path
import re

from meliad_rec import cli
from meliad_rec.commands import settings
from meliad_rec.config import files
from meliad_rec.config.values import parameters

ROOT = Path(cli.__file__).parents[1]
SOURCES = {
  path.relative_to(ROOT / 'meliad_rec').with_suffix('').as_posix(): ast.parse(
    path.read_text(encoding='utf-8')
  )
  for path in sorted((ROOT / 'meliad_rec').rglob('*.py'))
}
# Flags of other programs, and the word that stands for a name.
OTHERS = {'data_dir', 'logdir', 'flag'}


def flags_of(module, function='define_flags'):
  """The flags that a function of a module defines, itself or through others."""
  found = set()
  for node in ast.walk(SOURCES[module]):
    if isinstance(node, ast.FunctionDef) and node.name == function:
      for call in ast.walk(node):
        if not isinstance(call, ast.Call):
          continue
        name = ast.unparse(call.func)
        if name.startswith('flags.DEFINE_'):
          found.add(call.args[0].value)
        elif re.search(r'\bdefine_\w*flags?$', name):
          owner, _, inner = name.rpartition('.')
          [path] = [
            m for m in SOURCES if owner and m.endswith(f'/{owner}')
          ] or [module]
          found |= flags_of(path, inner)
  return found


FLAGS = {
  command: flags_of(path.replace('.', '/'))
  for command, path in cli.COMMANDS.items()
}
EVERY_FLAG = set().union(*FLAGS.values()) | {'help', 'version'}


def texts(tree):
  """The string literals of a module, parts of f-strings joined by {}."""
  parts = {
    id(part)
    for node in ast.walk(tree)
    if isinstance(node, ast.JoinedStr)
    for part in ast.walk(node)
  }
  for node in ast.walk(tree):
    if isinstance(node, ast.JoinedStr):
      yield ''.join(
        each.value if isinstance(each, ast.Constant) else '{}'
        for each in node.values
      )
    elif (
      isinstance(node, ast.Constant)
      and isinstance(node.value, str)
      and id(node) not in parts
    ):
      yield node.value


def test_flags_exist():
  """A module of a command names flags of that command, others of any."""
  for module, tree in SOURCES.items():
    _check_flags(module, tree)


def _check_flags(module, tree):
  commands = {path.replace('.', '/'): c for c, path in cli.COMMANDS.items()}
  command = commands.get(module)
  # These two say, and use, flags of other commands.
  others = command in (None, 'settings', 'reproduce')
  known = EVERY_FLAG if others else FLAGS[command]
  known = known | OTHERS | {'help'}
  for text in texts(tree):
    # A line with a whole command is checked below.
    lines = text.replace('\\\n', ' ').splitlines()
    rest = [line for line in lines if 'meliad-rec ' not in line]
    for flag in re.findall(r'(?<![\w-])--([a-z]\w*)', '\n'.join(rest)):
      assert flag in known or flag.startswith('xla_'), (module, text)


def test_commands_are_whole():
  """Each command line, wherever it stands, has only flags of its command."""
  documents = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding='utf-8')
    for pattern in ('*.md', '[a-z]*/**/*.md', 'gin/**/*.gin', 'launch/*.sh')
    for path in ROOT.glob(pattern)
    if path.name != 'CHANGELOG.md'
  }
  for module, tree in SOURCES.items():
    documents[module] = '\n'.join(texts(tree))
  checked = 0
  for name, text in documents.items():
    joined = re.sub(r'\\\n[# ]*', ' ', text)
    called = r'(?:meliad-rec|python -m meliad_rec) ([a-z_]+)([^\n`;|#)]*)'
    for command, arguments in re.findall(called, joined):
      if command not in cli.COMMANDS:
        assert name == 'launch/README.md' or not arguments, (name, command)
        continue
      for flag in re.findall(r'(?<![\w-])--([a-z]\w*)', arguments):
        checked += 1
        assert flag in FLAGS[command] | {'help'}, (name, command, flag)
  assert checked > 40


def test_settings_in_messages_exist():
  """Words such as LEARNING_RATE are settings, and %NAME.x are parameters."""
  known = set(settings.meanings())
  for module, tree in SOURCES.items():
    raised = [
      text
      for node in ast.walk(tree)
      if isinstance(node, ast.Raise)
      for text in texts(node)
    ]
    for text in raised:
      told = re.findall(
        r'(?:[Ss]et|[Ll]ower|[Rr]aise) ([A-Z][A-Z_]+[A-Z])\b', text
      )
      assert known.issuperset(told), (module, text)


def test_parameters_in_messages_exist():
  """Names such as optimizer.chain.clip_norm are parameters of the code."""
  for module, tree in SOURCES.items():
    if module == 'config/renames':  # It has former names.
      continue
    for text in texts(tree):
      named = r'\b([a-z_]+)\.([A-Za-z]+)\.([a-z_]+)\b(?! *\()'
      for file, inner, parameter in re.findall(named, text):
        owners = [m for m in SOURCES if m.endswith(f'/{file}')]
        if not owners or not re.match(r'[\w.]+$', inner):
          continue
        names = [f'meliad_rec.{owner.replace("/", ".")}' for owner in owners]
        modules = map(importlib.import_module, names)
        found = [getattr(module, inner, None) for module in modules]
        assert any(
          parameter in dir(each) or parameter in (parameters(each) or {})
          for each in found
          if each is not None
        ), (module, text)


def test_gin_files_in_messages_exist():
  kinds = r'(?<![\w/])((?:arch|size|task|options|experiments)(?:/[a-z]\w+)+)'
  for module, tree in SOURCES.items():
    for text in texts(tree):
      for path in re.findall(rf'{kinds}(?![\w/*])', text):
        whole = files.root() / path
        assert whole.with_suffix('.gin').is_file() or whole.is_dir(), (
          module,
          path,
        )
