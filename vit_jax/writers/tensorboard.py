"""Scalars for TensorBoard: always the rows of `metrics.jsonl`, once each."""

import io
import socket
import time
from collections.abc import Callable, Iterable

from etils import epath

from vit_jax.writers import uploads
from vit_jax.writers.trackers import Row

FOLDER = "tensorboard"
_VERSION = "brain.Event:2"  # of the format; the first record of a file


class Board:
  """Writes one file of events, which replaces those of earlier processes.

  A process that is killed leaves rows which its successor writes again. So the
  successor begins a new file with the rows that the run keeps, with their own
  times.

  Args:
    workdir: Folder of the run.
    rows: The rows that it keeps.
    guard: See `uploads.records`.

  Raises:
    OSError: It cannot be written.
  """

  def __init__(
    self,
    workdir: str,
    rows: Iterable[Row],
    guard: Callable[[], None] = lambda: None,
  ):
    # Not needed to read metrics, nor installed for it; imports no TensorFlow.
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer import record_writer

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    folder = epath.Path(workdir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*tfevents*"):
      path.unlink()
    name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
    self._buffer = io.BytesIO()
    self._records = record_writer.RecordWriter(self._buffer)
    first = self._event(wall_time=time.time(), file_version=_VERSION)
    self._records.write(first.SerializeToString())
    for row in rows:
      self._add(row)
    data = self._taken()
    self._file = uploads.records(folder / name, data, lambda _: None, guard)

  def write(self, row: Row) -> None:
    """Writes a row of `metrics.jsonl`: "step", "time" in seconds, metrics.

    Raises:
      OSError: It cannot be written.
    """
    self._add(row)
    self._file.append(self._taken())
    if self._file.error:
      raise self._file.error

  def close(self) -> None:
    """Closes the file.

    Raises:
      OSError: The last rows cannot be written.
    """
    if left := self._file.close():
      raise OSError(left)

  def _taken(self) -> bytes:
    """Returns the bytes of what was added since the last call."""
    data = self._buffer.getvalue()
    self._buffer.seek(0)
    self._buffer.truncate()
    return data

  def _add(self, row: Row) -> None:
    values = [
      self._summary.Value(tag=key, simple_value=value)
      for key, value in row.items()
      if key not in ("step", "time")
    ]
    event = self._event(
      step=row["step"],
      wall_time=row.get("time", 0.0),
      summary=self._summary(value=values),
    )
    self._records.write(event.SerializeToString())
