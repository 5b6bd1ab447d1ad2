"""Mistakes made on purpose: a short message answers each; nothing is lost.

`python -m tests.mistakes_test` prints each mistake and its answer.
"""

import concurrent.futures
import dataclasses
import hashlib
import multiprocessing
import os
from pathlib import Path
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

import pytest

from meliad_rec import cli

ROOT = Path(__file__).parents[1]
SERVER = multiprocessing.get_context('forkserver')
PRELOADED = (
  'pytest',
  'meliad_rec.main',
  'meliad_rec.commands.evaluate',
  'meliad_rec.commands.explore',
  'meliad_rec.commands.generate',
  'meliad_rec.commands.tokenize',
  'meliad_rec.commands.train_vocab',
  'meliad_rec.commands.depth',
)
# A run of `size/test`; {store}, {run} and {tmp} are folders.
TRAIN = (
  'train --gin_file=arch/block_recurrent --gin_file=size/test'
  " --gin_file=task/store --gin_param='LAYERS = 2'"
  " --gin_param='RECURRENT_LAYERS = (-1,)' --gin_param='SAMPLE = 0'"
  " --gin_param='STEPS = 4'"
)
STORED = f'{TRAIN} --gin_param=\'STORE = "{{store}}"\''
NEW = f'{STORED} --workdir={{tmp}}/new'
ARCH = 'train --workdir={tmp}/new --gin_file=arch/block_recurrent'


@dataclasses.dataclass(frozen=True)
class Mistake:
  """A command line, or Python code if it begins with 'python:'."""

  command: str
  says: str  # Pattern of the answer.
  code: int = 2
  shell: str = ''  # Commands that prepare it.


def broken(part, change):
  """Shell commands that copy the run to {tmp}/bad and change a part of it."""
  return f'cp -r {{run}} {{tmp}}/bad; cd {{tmp}}/bad/{part}; {change}'


def overwrite(file):
  """A shell command that changes a few bytes of a file."""
  return f'printf xxxx | dd of=$(ls {file}) bs=1 seek=99 conv=notrunc 2> err'


MISTAKES = [
  # The command line.
  Mistake('trian', 'nearest is train'),
  Mistake('train', 'Add --workdir=DIR'),
  Mistake('train --workdir={tmp}/new', 'No file of arch/ was given'),
  Mistake('train runs/x', "'runs/x' is not a flag"),
  Mistake('train --steps=100', "--gin_param='STEPS = 100'"),
  Mistake('train --store=x', '--gin_param=\'STORE = "x"\''),
  Mistake(f'{STORED} --workdir={{store}}', 'another --workdir'),
  Mistake('train --wrkdir=x', 'nearest is workdir'),
  Mistake('train --dry_run=perhaps', 'not true or false'),
  Mistake(f'{NEW} --init_from={{tmp}}/no', '--init_from=.*/no is not'),
  Mistake(
    'evaluate --workdir={run} --split=test --path=x', 'so --path cannot be used'
  ),
  Mistake('generate --workdir={run} --temp=0.3', 'nearest is temperature'),
  Mistake('explore {run}', 'Give the folder of a run and a text file'),
  Mistake('explore {run} {tmp}/no --out={tmp}/p.html', 'cannot be read'),
  Mistake('explore {run} {tmp}/no --out={tmp}/p.pdf', 'does not end in .html'),
  Mistake('evaluate --workdir={run}', 'Give one thing to evaluate'),
  Mistake('evaluate --workdir={tmp}', 'not the folder of a run'),
  Mistake('evaluate --split=test', 'Add --workdir=DIR'),
  Mistake(
    'evaluate --workdir={run} --split=test --batch=0',
    '0 is not a positive integer',
  ),
  Mistake('evaluate --workdir={run} --split=test --step=x', "got 'x'"),
  Mistake(
    'evaluate --workdir={run} --split=test --top=3',
    'only be used with --compare',
  ),
  Mistake('evaluate --compare=a.npz', 'takes two files'),
  Mistake('evaluate --compare={tmp}/a.npz,{tmp}/b.npz', 'a.npz does not exist'),
  Mistake('evaluate --workdir={run} --file={tmp}/none', 'No file matches'),
  Mistake('evaluate --workdir={run} --split=tset', "has no split 'tset'"),
  Mistake(
    'evaluate --workdir={run} --split=test --store={tmp}/no',
    'not a token store',
  ),
  Mistake('evaluate --workdir={run} --split=test --store=', '--store is empty'),
  Mistake('evaluate --workdir={run} --store={store} --file=x', 'Add --split'),
  Mistake(
    'evaluate --workdir={run} --split=test --out=/no/a.npz',
    'folder of .* does not exist',
  ),
  Mistake('generate --workdir={run} --prompt=a --prompt_file=b', 'not both'),
  Mistake('generate --workdir={run} --prompt_file={tmp}/no', 'cannot be read'),
  Mistake('generate --workdir={run} --temperature=-1', 'temperature must be'),
  Mistake('generate --workdir={run} --top_p=2', 'top_p must be'),
  Mistake('generate --workdir={run} --tokens=-1', '-1 is not a non-neg'),
  Mistake(
    'generate --workdir={run} --greedy --top_k=3', 'combined with --greedy'
  ),
  Mistake(
    'generate --workdir={run} --load_state={tmp}/s.npz', 's.npz does not exist'
  ),
  Mistake('generate --workdir={run} --step=3', 'has no step 3'),
  Mistake('depth --workdir={run} --split=test', 'does not halt'),
  Mistake('depth --workdir={run}', 'Give one thing to read'),
  Mistake('runs', 'No run was given'),
  Mistake('runs {tmp}', 'metrics.jsonl.* does not exist'),
  Mistake('runs {run} --metric=bits', 'has no bits'),
  Mistake('runs {run} --plot={tmp}/x.jpg', 'does not end in .png'),
  Mistake('settings LEARNING_RAT', 'nearest is LEARNING_RATE'),
  Mistake('bench halitng', 'nearest is halting'),
  Mistake('plan', 'Give --topology'),
  Mistake('plan --topology=v9:2x2', 'not a slice of TPUs'),
  Mistake('import_meliad', '--source and --out must be given'),
  # Configuration.
  Mistake(f'{NEW} --gin_param=BATCH', 'has no "="'),
  Mistake(f"{NEW} --gin_param='BATCH = two'", "'two' for a string"),
  Mistake(f"{NEW} --gin_param='BATCH = 0'", 'at least 1'),
  Mistake(f"{NEW} --gin_param='BATCH = 2.5'", 'an int'),
  Mistake(f"{NEW} --gin_param='SAVE_EVERY = 0'", 'Set SAVE_EVERY'),
  Mistake(f"{NEW} --gin_param='STEPS = 0'", 'at least 1 step'),
  Mistake(f"{NEW} --gin_param='steps = 5'", 'STEPS'),
  Mistake(f"{NEW} --gin_param='SEGMENT = 13'", 'SEGMENT'),
  Mistake(f'{NEW} --gin_param=\'DTYPE = "float31"\'', "'float31'"),
  Mistake(
    f"{NEW} --gin_param='optimizer.chain.clip = 1.0'", 'nearest is clip_norm'
  ),
  Mistake(f'{NEW} --gin_param=\'LEARNING_RATE = "high"\'', 'takes a float'),
  Mistake(f'{NEW} --gin_file=size/tiny', '2 files of size/'),
  Mistake(
    f'{NEW} --gin_file=options/position/ropes',
    'nearest is options/position/rope',
  ),
  Mistake(
    f'{ARCH} --gin_file=size/tyni --gin_file=task/code', 'nearest is size/tiny'
  ),
  Mistake(f'{ARCH} --gin_file=size/test', 'No file of task/'),
  Mistake(
    f'{NEW} --gin_file={{tmp}}/a.gin',
    'a.gin:3',
    shell='printf "STEPS = 4\\nSTEPS = (" > {tmp}/a.gin',
  ),
  Mistake(f'{NEW} --mesh=model:3', 'needs 3 devices'),
  Mistake(f'{NEW} --mesh=row:2', "contains 'row:2'"),
  Mistake(f'{NEW} --profile=3', '--profile must be'),
  # Data.
  Mistake(f'{TRAIN} --workdir={{tmp}}/new', 'STORE must be set'),
  Mistake(
    f'{TRAIN} --workdir={{tmp}}/new --gin_param=\'STORE = "/no"\'',
    '/no is not a token store',
  ),
  Mistake(
    'tokenize --source=folder --path={tmp} --out={tmp}/s',
    'There are no files in',
    shell='rm -rf {tmp}/*',
  ),
  Mistake('tokenize --path={tmp} --out={tmp}/s', '--source is missing'),
  Mistake('tokenize --source=folder --out={tmp}/s', 'Set --path'),
  Mistake(
    'tokenize --source=folder --path={tmp} --field=x --out={tmp}/s',
    'not use --field',
  ),
  Mistake(
    'tokenize --source=code --vocabulary={tmp}/v.model --out={tmp}/s',
    'v.model cannot',
  ),
  Mistake('tokenize --source=code --out={store}', 'replace it with --force'),
  Mistake(
    'tokenize --source=pairs --path={tmp}/{{split}}.de '
    '--target={tmp}/{{split}}.en --out={tmp}/s',
    'cannot hold pairs',
  ),
  Mistake('tokenize --verify={tmp}', 'not a token store'),
  Mistake(
    'tokenize --verify={tmp}/s',
    'changed since the store was written',
    shell='cp -r {store} {tmp}/s; cd {tmp}/s; ' + overwrite('train.tok*'),
  ),
  Mistake(
    'train_vocab --source=folder --path={tmp}/b --size=300 --out={tmp}/v',
    'end in .model',
  ),
  Mistake(
    'train_vocab --source=folder --path={tmp}/b --size=9 --out={tmp}/v.model',
    'Change --size',
    shell='mkdir {tmp}/b; for i in 1 2 3 4 5; do echo a$i > {tmp}/b/$i; done',
  ),
  # Checkpoints and folders.
  Mistake('generate --workdir={tmp}', 'not the folder of a run'),
  Mistake(f'{STORED} --workdir=/dev/null/x', 'cannot be stored'),
  Mistake(
    f"{STORED} --workdir={{run}} --gin_param='MLP_DIM = 24'"
    " --gin_param='STEPS = 5'",
    'where this model needs',
  ),
  Mistake(f'{STORED} --workdir=s3://a/b', 'local or mounted folders'),
  Mistake(
    'generate --workdir={tmp}/bad',
    'meta/metadata was changed',
    shell=broken(
      'checkpoints/4',
      overwrite('meta/metadata'),
    ),
  ),
  Mistake(
    'generate --workdir={tmp}/bad',
    'copy of step 4',
    shell=broken('checkpoints', 'mv 4 9'),
  ),
  Mistake(
    'generate --workdir={tmp}/bad',
    'has no checkpoint',
    shell=broken('', 'rm -rf checkpoints/*'),
  ),
  Mistake(
    'generate --workdir={tmp}/bad',
    'run.json is damaged',
    shell=broken('', 'echo "{{" > run.json'),
  ),
  Mistake(
    'generate --workdir={tmp}/bad',
    'config.gin:.* not valid gin',
    shell=broken('', 'echo "A = (" > config.gin'),
  ),
  Mistake(
    'generate --workdir={tmp}/bad',
    'calls os.system',
    shell=broken(
      '',
      'sed -i -e "/import model$/a import os"'
      ' -e "s/^model.Model.cell = .*/model.Model.cell = @os.system()/"'
      ' config.gin',
    ),
  ),
  Mistake(
    'runs {tmp}/bad', 'Line 1 of', shell=broken('', 'echo "{{" > metrics.jsonl')
  ),
  # Python.
  Mistake("python: meliad_rec.load_run('{tmp}')", 'not the folder of a run'),
  Mistake("python: meliad_rec.load_run('{run}', step=3)", 'has no step 3'),
  Mistake("python: meliad_rec.load_run('{run}', step='bset')", "got 'bset'"),
  Mistake(
    "python: meliad_rec.load_run('{run}').generate(123)",
    'must be a string, got int',
  ),
  Mistake(
    "python: meliad_rec.load_run('{run}').generate('a', tokens=-1)", 'got -1'
  ),
  Mistake(
    "python: meliad_rec.load_run('{run}').generate('a', temperature=-1.0)",
    'temperature must be',
  ),
  Mistake(
    "python: meliad_rec.load_run('{run}').evaluate('')", 'Nothing to read'
  ),
  Mistake('python: meliad_rec.Attention', 'has no attribute'),
]


def contents(folder):
  return {
    path: hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(folder.rglob('*'))
    if path.is_file()
  }


# What a Python user does, with the answer where a command would print it.
PYTHON = """
import sys
import meliad_rec
try:
  {}
except (ValueError, AttributeError) as error:
  if isinstance(error, AttributeError) and 'meliad_rec' not in str(error):
    raise
  print(f'error: {{error}}', file=sys.stderr)
  sys.exit(2)
"""


def called(command, cwd, err):
  """Returns exit code and stderr of a command in a process of its own.

  It is forked from a process that has imported the package, which takes most of
  the time of a command that fails, but has not started JAX.
  """
  child = SERVER.Process(target=_call, args=(command, cwd, err))
  child.start()
  child.join()
  return child.exitcode, err.read_text()


def _call(command, cwd, err):
  """Runs a command, and writes its stderr to a file."""
  os.chdir(cwd)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
  os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
  if command.startswith('python: '):
    exec(PYTHON.format(command.removeprefix('python: ')))
  else:
    sys.argv = ['meliad-rec', *shlex.split(command)]
    cli.main()


def answers():
  """Yields (mistake, exit code, stderr, whether a run or store has changed)."""
  from tests import tiny_run  # Starts JAX, as a process that forks must not.

  with tempfile.TemporaryDirectory() as name:
    base = Path(name)
    run, store = base / 'run', base / 'store'
    tiny_run.write_store(str(store))
    train = f'{STORED.format(store=store)} --workdir={run}'
    code, text = called(train, base, base / 'err')
    if code:
      raise RuntimeError(text)
    before = contents(run), contents(store)

    def answer(number):
      mistake, tmp = MISTAKES[number], base / f'tmp{number}'
      tmp.mkdir()
      where = {'run': run, 'store': store, 'tmp': tmp}
      if mistake.shell:
        shell = mistake.shell.format(**where)
        subprocess.run(['bash', '-c', shell], check=True, cwd=base)
      err = base / f'err{number}'
      code, text = called(mistake.command.format(**where), base, err)
      text = text.replace(str(tmp), 'TMP').replace(name, '')
      shutil.rmtree(tmp)
      return mistake, code, text, before != (contents(run), contents(store))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      yield from pool.map(answer, range(len(MISTAKES)))


def problem(mistake, code, text, lost):
  """What is wrong with an answer, or None."""
  lines = text.splitlines()
  said = [line for line in lines if line.startswith('error: ')]
  if code != mistake.code:
    return f'exit code {code}'
  if 'Traceback' in text or len(said) != 1 or lines[-1:] != said:
    return f'{len(said)} sentences in {len(lines)} lines'
  if not re.search(mistake.says, said[0]):
    return f'does not say {mistake.says}'
  return 'something was lost' if lost else None


@pytest.mark.slow
def test_each_mistake_is_answered_in_one_sentence():
  from tests import tiny_run

  done = subprocess.run(
    [sys.executable, '-m', 'tests.mistakes_test'],
    cwd=ROOT,
    env=tiny_run.environment(),
    capture_output=True,
    text=True,
    timeout=1800,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert len(MISTAKES) >= 60


def main():
  os.environ.setdefault('GLIBC_TUNABLES', '')  # See cli._use_huge_pages.
  SERVER.set_forkserver_preload(list(PRELOADED))
  wrong = 0
  print('| mistake | answer |\n|---|---|')
  for mistake, code, text, lost in answers():
    said = text.strip().splitlines()
    short = mistake.command.replace(STORED, 'train ...').replace(
      TRAIN, 'train ...'
    )
    answer = ' '.join(said[-1:]).removeprefix('error: ').replace('|', '\\|')
    print(f'| `{short}` | {answer} |'.replace(str(ROOT), ''), flush=True)
    if found := problem(mistake, code, text, lost):
      wrong += 1
      print(f'WRONG: {found}\n{text[-1500:]}', flush=True)
  return 1 if wrong else 0


if __name__ == '__main__':
  sys.exit(main())
