"""Charts and texts of a run for TensorBoard, as an event file.

The writers of TensorBoard and tensorboardX write in a thread. If it fails once,
as on a full disk, they block for ever. Here, each event is written at once.
"""

from collections.abc import Mapping
import os
from pathlib import Path
import socket
import struct
import time
from typing import Any

from meliad_rec.storage.output_file import Appender


class Board:
  """An event file of one split; `write` and `text` write it at once.

  Args:
    folder: folder of the split, which is created if needed.
    purge_step: TensorBoard hides what was written before at this step and
      later.
  """

  def __init__(self, folder: Path, purge_step: int):
    # TensorBoard reads the files of a folder in the order of their names.
    name = f'{int(time.time())}.{socket.gethostname()}.{os.getpid()}'
    self._file = Appender(folder / f'events.out.tfevents.{name}')
    self._add(file_version='brain.Event:2')
    self._add(step=purge_step, session_log={'status': 'START'})

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one value of each metric: {metric: value}."""
    scalars = [{'tag': k, 'simple_value': v} for k, v in values.items()]
    self._add(step=step, summary={'value': scalars})

  def text(self, step: int, name: str, text: str) -> None:
    """Writes a text in Markdown."""
    from tensorboardX import summary

    self._add(step=step, summary=summary.text(name, text))

  def flush(self) -> None:
    """Tries again to write what could not be written."""
    self._file.append(b'')

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def _add(self, **event: Any) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    # The format of TFRecord.
    content = Event(wall_time=time.time(), **event).SerializeToString()
    size = struct.pack('<Q', len(content))
    self._file.append(
      b''.join(
        part + struct.pack('<I', masked_crc32c(part))
        for part in (size, content)
      )
    )
