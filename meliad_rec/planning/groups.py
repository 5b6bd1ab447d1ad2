"""Which devices exchange with which, as the text of a program says it."""

from collections.abc import Mapping
import re

import numpy as np


def groups(instruction: str, devices: int) -> np.ndarray:
  """int [groups, members]: numbers of the devices in each, in a mesh's order.

  Args:
    instruction: a collective's line.
    devices: of the whole program.

  Raises:
    ValueError: they are written in no way that is known here.
  """
  pairs = re.search(
    r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}', instruction
  )
  if pairs:
    return _listed(pairs[1])
  listed = re.search(r'replica_groups=\{((?:\{[\d,]*\},?)*)\}', instruction)
  if listed:
    # None named: all of them are one group.
    return _listed(listed[1]) if listed[1] else np.arange(devices)[None]
  counted = re.search(r'replica_groups=(\[[\d,]+\]<=\S+?)(?:, |$)', instruction)
  if counted:
    shape, order = counted[1].split('<=')
    return _counted(order).reshape(_numbers(shape))
  named = re.search(
    r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{(.*?)\}',
    instruction,
  )
  if named:
    return _named(*named.groups(), instruction)
  raise _unknown(instruction)


def axes(found: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The axes of a mesh along which the members of a group differ.

  Args:
    found: of `groups`.
    mesh: sizes of its axes, in order.
  """
  places = np.stack(np.unravel_index(found, tuple(mesh.values())), -1)
  differ = (places != places[:, :1]).any((0, 1))
  return tuple(name for name, one in zip(mesh, differ, strict=True) if one)


def _listed(text: str) -> np.ndarray:
  return np.array([_numbers(group) for group in re.findall(r'\{.*?\}', text)])


def _counted(text: str) -> np.ndarray:
  """'[64,4]T(1,0)': numbers from 0 in that shape, its axes in that order."""
  found = re.fullmatch(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  shape = _numbers(found[1])
  numbers = np.arange(np.prod(shape)).reshape(shape)
  return numbers.transpose(_numbers(found[2])) if found[2] else numbers


def _named(sizes: str, order: str | None, along: str, instruction: str):
  """A mesh of its own, and the axes of it along which a group lies."""
  size = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", sizes)}
  chosen = [name.strip().strip("'") for name in along.split(',')]
  if not set(chosen) <= set(size):
    raise _unknown(instruction)
  shape = tuple(size.values())
  ordered = _counted(order) if order else np.arange(np.prod(shape))
  names = list(size)
  last = [names.index(name) for name in chosen]
  first = [i for i in range(len(names)) if i not in last]
  members = int(np.prod([size[name] for name in chosen]))
  return ordered.reshape(shape).transpose(first + last).reshape(-1, members)


def _numbers(text: str) -> list[int]:
  return [int(number) for number in re.findall(r'\d+', text)]


def _unknown(instruction: str) -> ValueError:
  written = re.search(r'replica_groups=\S*', instruction)
  return ValueError(
    f'the groups of a collective are written {written and written[0]!r}, which '
    'is not known; install the libtpu that meliad_rec[tpu] names.'
  )
