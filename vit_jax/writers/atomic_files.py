"""The small files of a run: written whole or not at all, read where damaged.

Readers do not raise for what a file holds: they return what can be read, and
what is damaged. Nothing here imports jax.
"""

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from etils import epath

MAX_WAITING = 10_000  # records in memory, for a disk that is full
UPLOAD_SECONDS = 30.0  # between two of a file; stores limit how many
MAX_SHOWN = 5  # damaged lines, by their numbers
# A line of metrics.jsonl: "step", "time" in seconds since the epoch, metrics.
Row = dict[str, int | float]


class WriteError(OSError):
  """A file of a run cannot be written; the text says which, and what to do."""


class Rows(NamedTuple):
  """What was read of a file of metrics.

  rows: Its rows, in order.
  damaged: Numbers, from 1, of the lines that are no rows: the process died, or
    the disk was full, while they were written.
  """

  rows: list[Row]
  damaged: list[int]


def write(path: epath.Path, data: bytes | str, mode: str = "wb") -> None:
  """Opens a file, writes and closes it. All is written by it and `append`."""
  with os_errors(path), path.open(mode) as file:
    file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def os_errors(path: epath.Path) -> Iterator[None]:
  """Makes errors of an object store, of whatever class, OSErrors."""
  try:
    yield
  except OSError:
    raise
  except Exception as e:
    if is_local(path):
      raise
    raise OSError(f"{type(e).__name__}: {e}") from e


def append(path: epath.Path, data: bytes, size: int) -> int:
  """Writes after the first bytes of a file, and returns how many it has then.

  Args:
    path: A local file in an existing folder.
    data: What is written.
    size: Bytes that stay; what a failed write left behind them is overwritten.
  """
  number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
  with os.fdopen(number, "r+b") as file:
    size = min(size, os.fstat(number).st_size)
    file.seek(size)
    return size + file.write(data)


def replace_text(path: epath.Path, data: bytes | str) -> None:
  """Writes a file such that an interruption leaves the old or the new one."""
  draft = path.parent / (path.name + ".new")
  write(draft, data)
  with os_errors(path):
    draft.replace(path)


def replace(path: epath.Path, data: bytes | str) -> None:
  """Writes a file as `replace_text` does.

  Raises:
    WriteError: It cannot be written; the text says what to do.
  """
  try:
    replace_text(path, data)
  except OSError as e:
    raise WriteError(
      f"{path}: cannot be written ({reason(e)}); make room, or see who may"
      " write there, and start again. What was there is unchanged."
    ) from None


def reason(error: Exception) -> str:
  """Returns why the system refused, as a part of a sentence."""
  return getattr(error, "strerror", None) or str(error) or type(error).__name__


def folder_error(workdir: str, error: OSError) -> str:
  """Returns an error text for a --workdir that cannot be written."""
  at = f"{error.filename}: " if error.filename else ""
  return (
    f"--workdir: got {workdir!r}, where no files can be written"
    f" ({at}{reason(error)}); expected a folder, there or to be made."
  )


def is_local(path: epath.Path) -> bool:
  """Whether a path is of the operating system, not of an object store."""
  return "://" not in str(path)


def open_records(
  path: epath.Path,
  data: bytes,
  note: Callable[[str], None] = print,
  check_owner: Callable[[], None] = lambda: None,
) -> "Records":
  """Returns the records of a file, on a disk or in a bucket.

  Args:
    path: The file, which is replaced.
    data: What it holds at first.
    note: Prints a line on what cannot be written.
    check_owner: Called before an upload to a bucket, from its thread. Where it
      raises an OSError the folder is no longer this run's, and nothing is
      written.

  Raises:
    WriteError: The file cannot be written now.
  """
  if is_local(path):
    return Records(path, data, note)
  return _UploadedRecords(path, data, note, check_owner)


class Records:
  """Appends records to a local file; keeps them in memory while that fails.

  A record that was written in part, as when the disk became full, is written
  again from its beginning.

  Args:
    path: The file, which is replaced.
    data: What it holds at first.
    note: Prints a line, once when writing fails, and once when it works again.

  Attributes:
    error: Why records wait; None: none do, or they have not been tried yet.

  Raises:
    WriteError: The file cannot be written now.
  """

  def __init__(
    self,
    path: epath.Path,
    data: bytes,
    note: Callable[[str], None] = print,
  ):
    self._path, self._note = path, note
    replace(path, data)
    self._size = len(data)
    self._waiting: list[bytes] = []
    self.error: OSError | None = None

  def append(self, record: bytes) -> None:
    """Writes a record, and those that wait.

    Raises:
      WriteError: `MAX_WAITING` wait.
    """
    self._waiting.append(record)
    self._try_to_write()
    self._refuse_too_many()

  def flush(self) -> None:
    """Starts an upload to a bucket; a local file is always written."""

  def close(self) -> str | None:
    """Writes what waits, to a temporary folder if it must.

    Returns:
      What became of the records that could not be written; None: there are
      none.
    """
    if not self._waiting:
      return None
    try:
      self._write()
      return None
    except OSError as e:
      failure = f"{self._path}: could not be written ({reason(e)})"
    name = f"vit_jax-{os.getpid()}-{self._path.name}"
    other = epath.Path(tempfile.gettempdir()) / name
    rest = f"its last {len(self._waiting):,} records are"
    try:
      write(other, b"".join(self._waiting), "ab")
    except OSError as e:
      return f"{failure}; {rest} lost: {other}: {reason(e)}."
    return f"{failure}; {rest} in {other}: append them to it, and start again."

  def _try_to_write(self) -> None:
    """Writes what waits, or prints once why that failed."""
    try:
      self._write()
    except OSError as e:
      if self.error is None:
        self._note(
          f"file        {self._path} cannot be written ({reason(e)}): the run"
          " goes on, and its records wait in memory until it can; they are lost"
          " if the process is killed before"
        )
      self.error = e

  def _refuse_too_many(self) -> None:
    if self.error is not None and len(self._waiting) >= MAX_WAITING:
      raise WriteError(
        f"{self._path}: {len(self._waiting):,} records wait, since it cannot"
        f" be written ({reason(self.error)}); make room, or mend the disk, and"
        " start again: the run resumes from its last checkpoint."
      )

  def _write(self) -> None:
    data = b"".join(self._waiting)
    self._size = append(self._path, data, self._size)
    self._remove_written(len(self._waiting))

  def _remove_written(self, count: int) -> None:
    """Forgets the first records, which are in the file."""
    if self.error is not None:
      self._note(f"file        {self._path}: {count:,} records written again")
    self.error = None
    del self._waiting[:count]


class _UploadedRecords(Records):
  """Records in a bucket: a thread uploads the whole file every few seconds.

  No object of a store can be appended to: a client sends it anew, and for
  appending fetches it before.
  """

  def __init__(self, path, data, note, check_owner):
    super().__init__(path, data, note)
    self._content, self._check_owner = data, check_owner
    self._is_closed, self._wakes = False, threading.Event()
    self._thread = threading.Thread(
      target=self._upload, name="upload", daemon=True
    )
    self._thread.start()

  def append(self, record: bytes) -> None:
    """Keeps a record for the next upload.

    Raises:
      WriteError: `MAX_WAITING` records wait.
    """
    self._waiting.append(record)
    self._refuse_too_many()

  def flush(self) -> None:
    self._wakes.set()

  def close(self) -> str | None:
    """Writes what waits, unless the folder was taken by another run."""
    self._is_closed = True
    self._wakes.set()
    self._thread.join()
    try:
      self._check_owner()
    except OSError:
      return None
    return super().close()

  def _upload(self) -> None:
    while not self._is_closed:
      self._wakes.wait(UPLOAD_SECONDS)
      self._wakes.clear()
      if self._is_closed or not self._waiting:
        continue
      try:
        self._check_owner()
      except OSError:  # the loop meets it, too, and ends the run
        return
      self._try_to_write()

  def _write(self) -> None:
    count = len(self._waiting)  # more may come meanwhile, behind these
    content = self._content + b"".join(self._waiting[:count])
    write(self._path, content)
    self._content = content
    self._remove_written(count)


def contents(path: epath.Path) -> bytes:
  """Reads a file that is about to be rewritten; b"" if it does not exist.

  Raises:
    WriteError: It cannot be read now, so that what it holds would be lost.
  """
  try:
    with os_errors(path):
      return path.read_bytes()
  except (FileNotFoundError, NotADirectoryError):
    return b""
  except OSError as e:
    raise WriteError(
      f"{path}: cannot be read ({reason(e)}), and a run that goes on writes it"
      " anew, without what it holds. See to the disk, or to who may read it,"
      " and start again. What was there is unchanged."
    ) from None


def read_rows(path: epath.Path) -> Rows:
  """Reads a file of metrics, see `parse_rows`; empty if there is none."""
  return parse_rows(path.read_bytes() if path.exists() else b"")


def parse_rows(data: bytes) -> Rows:
  """Returns the rows that a file of metrics holds.

  A row is a line of JSON: an object of numbers, of which "step" is whole.
  Numbers may be NaN or infinite, as Python writes them.
  """
  rows, damaged = [], []
  for number, line in enumerate(data.split(b"\n"), 1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except ValueError:
      row = None
    if _is_row(row):
      rows.append(row)
    else:
      damaged.append(number)
  return Rows(rows, damaged)


def lines_text(numbers: Sequence[int]) -> str:
  """Returns the first numbers of lines, and how many there are more.

  Example:
    >>> lines_text([3]), lines_text(range(1, 9))
    ('line 3', 'lines 1, 2, 3, 4, 5 and 3 more')
  """
  shown = ", ".join(f"{n:,}" for n in numbers[:MAX_SHOWN])
  more = len(numbers) - MAX_SHOWN
  plural = "s" * (len(numbers) > 1)
  return f"line{plural} {shown}" + f" and {more:,} more" * (more > 0)


def split_row(row: Row) -> tuple[int, dict[str, float], float]:
  """Returns step, metrics and time of a row."""
  metrics = {k: v for k, v in row.items() if k not in ("step", "time")}
  return row["step"], metrics, row.get("time", 0.0)


def _is_row(row: Any) -> bool:
  return (
    isinstance(row, dict)
    and isinstance(row.get("step"), int)
    and all(isinstance(value, int | float) for value in row.values())
  )
