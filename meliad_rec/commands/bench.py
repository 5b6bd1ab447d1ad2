r"""Measures the library on this machine: meliad-rec bench NAME.

  meliad-rec bench step --setting=meliad --rounds=20
  meliad-rec bench recurrence

NAME is one of:

  step        training steps of the models of the Block-Recurrent paper, table 1
  recurrence  training steps of the models of the Staircase and Feedback papers
  generation  generation with the models of `recurrence`
  translation beam search of the models of the Feedback paper, table 5
  memorizing  training steps of Memorizing Transformers, by size of the memory
  halting     recurrence in depth of universal transformers, with and without
              early halting
  attention   implementations of windowed attention, measured here or, with
              --topology, estimated for a TPU
  experiments training steps of any experiments, or with --generate their
              generation of text, compared with the first
  tasks       trains architectures on tasks that need memory, and reports their
              accuracy

  meliad-rec bench experiments cpu/code_slide cpu/code_rec \
    --gin_param="STORE = 'STORE'"
  meliad-rec bench tasks --out=DIR --tasks=parity --archs=lstm,window --jobs=2
"""

import dataclasses
import json

from absl import flags

from meliad_rec.benchmarks import attention
from meliad_rec.benchmarks import experiments
from meliad_rec.benchmarks import generation
from meliad_rec.benchmarks import halting
from meliad_rec.benchmarks import memorizing
from meliad_rec.benchmarks import recurrence
from meliad_rec.benchmarks import step
from meliad_rec.benchmarks import tasks
from meliad_rec.benchmarks import trace
from meliad_rec.benchmarks import training
from meliad_rec.benchmarks import translation
from meliad_rec.config import config_flags
from meliad_rec.config.files import nearest
from meliad_rec.storage.workdir import local

# Arguments that the help shows, besides flags.
ARGUMENTS = 'NAME [EXPERIMENT ...]'

BENCHES = {
  'step': step,
  'recurrence': recurrence,
  'generation': generation,
  'translation': translation,
  'memorizing': memorizing,
  'halting': halting,
  'attention': attention,
}

_MEASURED = 'Measured on this machine.'

# Flags that only the benchmark `tasks` has, and flags that it lacks.
_OF_TASKS = 'out', 'archs', 'tasks', 'rates', 'seeds', 'jobs', 'steps'
_OF_SETTINGS = 'setting', 'by', 'topology'
_OF_EXPERIMENTS = ('generate',)
_OF_OTHERS = *_OF_SETTINGS, *_OF_EXPERIMENTS, 'rounds', 'json'


def define_flags() -> None:
  settings = (f'{name}: {", ".join(b.SETTINGS)}' for name, b in BENCHES.items())
  flags.DEFINE_string(
    'setting',
    None,
    'Sizes to measure, by name, or for halting the kind of experiment; the '
    f'first of a benchmark is its default. {"; ".join(settings)}.',
  )
  flags.DEFINE_integer(
    'rounds',
    20,
    'Number of times that each row of the table is timed.',
    lower_bound=1,
  )
  flags.DEFINE_enum(
    'by',
    None,
    ['kind', 'place'],
    f'Print where the time of each training step goes, from a trace of '
    f'{trace.STEPS} steps, instead of timing them: by kind of operation, or by '
    'place in the model. For step and recurrence; tried on a CPU only.',
  )
  flags.DEFINE_bool(
    'json',
    False,
    'Print JSON, with the time of each round in seconds, sizes in bytes and, '
    'with --topology, cycles.',
  )
  flags.DEFINE_string(
    'topology',
    None,
    'Slice of TPUs, such as v5e:2x2, for which attention is compiled and '
    'estimated, instead of measured here.',
  )

  flags.DEFINE_multi_string(
    'gin_param',
    [],
    "experiments, tasks: one setting 'NAME = value' of all runs; repeatable.",
  )
  flags.DEFINE_bool(
    'generate',
    False,
    'experiments: time the generation of a text, with random parameters, '
    'instead of training steps.',
  )

  # Flags of the benchmark `tasks`.
  flags.DEFINE_string('out', None, 'tasks: folder of the runs and the table.')
  flags.DEFINE_list('archs', [*tasks.ARCHS], 'tasks: architectures to train.')
  flags.DEFINE_list('tasks', [*tasks.TASKS], 'tasks: tasks to train on.')
  flags.DEFINE_list('rates', ['0.003', '0.001'], 'tasks: learning rates.')
  flags.DEFINE_integer('seeds', 1, 'tasks: runs with each rate.', lower_bound=1)
  flags.DEFINE_integer(
    'jobs', 1, 'tasks: runs at a time, which share the cores.', lower_bound=1
  )
  flags.DEFINE_integer(
    'steps',
    None,
    'tasks: training steps; default: as many as each task needs.',
    lower_bound=1,
  )


def main(argv: list[str]) -> int:
  known = [*BENCHES, 'experiments', 'tasks']
  compares = argv[1:2] == ['experiments']
  if not compares and (len(argv) != 2 or argv[1] not in known):
    given = ' '.join(argv[1:])
    wrong = f'There is no benchmark {given!r}{nearest(given, known)}.'
    raise ValueError(
      f'{wrong if given else "No benchmark was named."} Give one of '
      f'{", ".join(known)}.'
    )
  args = flags.FLAGS
  if argv[1] == 'tasks':
    config_flags.refuse(_OF_OTHERS, 'is not a flag of the benchmark tasks')
    return measure_tasks(args)
  config_flags.refuse(_OF_TASKS, 'is a flag of the benchmark tasks only')
  if compares:
    config_flags.refuse(_OF_SETTINGS, 'is no flag of the benchmark experiments')
    measure = experiments.measure
    if args.generate:
      measure = experiments.measure_generation
    rows = measure(argv[2:], args.gin_param, args.rounds)
    show(rows, argv[2], args.json, {'source': _MEASURED})
    return 0
  why = 'is a flag of the benchmark experiments only'
  config_flags.refuse(_OF_EXPERIMENTS, why)
  why = 'is a flag of the benchmarks experiments and tasks only'
  config_flags.refuse(['gin_param'], why)
  bench, setting = BENCHES[argv[1]], args.setting
  if setting is None:
    setting = next(iter(bench.SETTINGS))
  if setting not in bench.SETTINGS:
    raise ValueError(
      f'There is no setting {setting!r}{nearest(setting, bench.SETTINGS)}. Set '
      f'--setting to one of {", ".join(bench.SETTINGS)}.'
    )
  if args.topology is not None and bench is not attention:
    raise ValueError(
      f'Benchmark {argv[1]} does not use --topology. Remove it, or choose '
      'the benchmark attention.'
    )
  if args.by:
    if not hasattr(bench, 'programs'):
      raise ValueError(
        f'Benchmark {argv[1]} does not use --by. Remove it, or choose step or '
        'recurrence.'
      )
    config_flags.refuse(['json', 'rounds'], 'cannot be combined with --by')
    for name, program in bench.programs(bench.SETTINGS[setting]).items():
      text = program.train_step.as_text()
      seconds = trace.measure(training.stepper(program), text)
      print(trace.table(name, seconds, args.by), end='\n\n', flush=True)
    return 0
  source = _MEASURED
  if args.topology is not None:
    config_flags.refuse(['rounds'], 'cannot be combined with --topology')
    source = f'Compiler estimates for {args.topology}, not measured.'
    if not args.json:
      print(source, flush=True)
    rows = attention.estimate(bench.SETTINGS[setting], args.topology)
  else:
    rows = bench.measure(bench.SETTINGS[setting], args.rounds)
  facts = {'source': source, 'setting': setting}
  show(rows, bench.BASELINE, args.json, facts)
  return 0


def show(rows: dict, baseline: str, as_json: bool, facts: dict | None = None):
  """Prints the results of a benchmark, as a table or as JSON.

  Args:
    rows: {name: result}, as `table` takes them; dataclasses.
    baseline: as `table` takes it.
    as_json: whether to print JSON.
    facts: {name: JSON value}, which only JSON shows.
  """
  if not as_json:
    print(table(rows, baseline))
    return
  found = {name: dataclasses.asdict(row) for name, row in rows.items()}
  print(json.dumps((facts or {}) | {'rows': found}, indent=1))


def measure_tasks(args) -> int:
  """Runs the benchmark `tasks`, and returns the exit code."""
  if not args.out:
    raise ValueError('The benchmark tasks needs a folder. Add --out=DIR.')
  try:
    rates = [float(rate) for rate in args.rates]
  except ValueError:
    rates = []
  if not rates or not all(0 < rate < 1000 for rate in rates):
    raise ValueError(
      f'--rates={",".join(args.rates)} must be numbers above 0 and below 1000,'
      ' such as 0.003,0.001.'
    )
  return tasks.measure(
    *(local(args.out, 'A table'), args.archs, args.tasks, rates),
    *(args.seeds, args.jobs, args.steps, args.gin_param),
  )


def table(rows: dict, baseline: str) -> str:
  """Returns a table as text: the names of the columns, then a line per row.

  Args:
    rows: {name: result}. The method `columns` of a result takes `baseline` and
      returns {column: text}.
    baseline: name of the row that the other rows are compared with.
  """
  found = {name: row.columns(baseline) for name, row in rows.items()}
  heads = list(next(iter(found.values())))
  lines = [['', *heads]]
  lines += [[name, *columns.values()] for name, columns in found.items()]
  first, *widths = (max(map(len, cells)) for cells in zip(*lines, strict=True))
  return '\n'.join(
    ' '.join(
      [
        f'{name:<{first}}',
        *(f'{c:>{w}}' for c, w in zip(rest, widths, strict=True)),
      ]
    )
    for name, *rest in lines
  )
