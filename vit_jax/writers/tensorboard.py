"""Scalars for TensorBoard: the rows of `metrics.jsonl`, each once."""

import contextlib
import io
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from vit_jax.paths import run_path
from vit_jax.writers import atomic_files
from vit_jax.writers.atomic_files import Row

FOLDER = "tensorboard"
_VERSION = "brain.Event:2"  # of the format; the first record of a file


class TensorBoard:
  """A `MetricWriter` of one file, which replaces files of earlier processes.

  A process that is killed leaves rows that its successor writes again. So the
  successor begins a new file with the rows that the run keeps, with their
  original times. (clu's SummaryWriter only appends: a resumed run would have
  rows twice.) If the file cannot be written, TensorBoard is given up, and the
  run goes on.

  Args:
    workdir: Folder of the run.
    rows: The rows that it keeps.
    note: Prints a line on write errors.
    check_owner: See `atomic_files.open_records`.
  """

  def __init__(
    self,
    workdir: str,
    rows: Iterable[Row],
    note: Callable[[str], None] = print,
    check_owner: Callable[[], None] = lambda: None,
  ):
    # Not needed to read metrics, nor installed for it; imports no TensorFlow.
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer import record_writer

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._buffer = io.BytesIO()
    self._record_writer = record_writer.RecordWriter(self._buffer)
    self._folder = run_path(workdir) / FOLDER
    self._note = note
    self._file: atomic_files.Records | None = None
    with self._gives_up():
      self._folder.mkdir(parents=True, exist_ok=True)
      for path in self._folder.glob("*tfevents*"):
        path.unlink()
      first = self._event(wall_time=time.time(), file_version=_VERSION)
      self._record_writer.write(first.SerializeToString())
      for row in rows:
        self._add(*atomic_files.split_row(row))
      name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
      self._file = atomic_files.open_records(
        self._folder / name, self._take_buffer(), lambda _: None, check_owner
      )

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes a row."""
    if self._file is None:
      return
    with self._gives_up():
      self._add(step, scalars, time.time())
      self._file.append(self._take_buffer())
      if self._file.error:
        raise self._file.error

  def flush(self) -> None:
    """Starts an upload to a bucket; a local file is always written."""
    if self._file is not None:
      self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    file, self._file = self._file, None
    with self._gives_up():
      if file is not None and (left := file.close()):
        raise OSError(left)

  @contextlib.contextmanager
  def _gives_up(self) -> Iterator[None]:
    """Gives up TensorBoard if it cannot be written."""
    try:
      with atomic_files.os_errors(self._folder):
        yield
    except OSError as e:
      self._file = None
      self._note(
        f"tensorboard cannot be written ({atomic_files.reason(e)}): it lacks"
        " rows until the next start; metrics.jsonl has every row"
      )

  def _take_buffer(self) -> bytes:
    """Returns the bytes that were added since the last call."""
    data = self._buffer.getvalue()
    self._buffer.seek(0)
    self._buffer.truncate()
    return data

  def _add(
    self, step: int, scalars: Mapping[str, float], wall_time: float
  ) -> None:
    values = [
      self._summary.Value(tag=name, simple_value=value)
      for name, value in scalars.items()
    ]
    summary = self._summary(value=values)
    event = self._event(step=step, wall_time=wall_time, summary=summary)
    self._record_writer.write(event.SerializeToString())
