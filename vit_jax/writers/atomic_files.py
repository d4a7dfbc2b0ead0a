"""The small files of a run: written whole or not at all, and read if damaged.

Reading never raises for the contents of a file: it returns what can be read,
and what is damaged. This module imports no jax.
"""

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from etils import epath

from vit_jax.paths import is_remote

MAX_WAITING = 10_000  # records that wait in memory while the disk is full
UPLOAD_SECONDS = 30.0  # seconds between uploads of a file; stores limit them
MAX_SHOWN = 5  # damaged lines, by their numbers
# A line of metrics.jsonl: "step", "time" in seconds since the epoch, metrics.
Row = dict[str, int | float]


class WriteError(OSError):
  """A file of a run cannot be written; the message says what to do."""


class Rows(NamedTuple):
  """The contents of a file of metrics.

  rows: Its rows, in order.
  damaged: Numbers, from 1, of the lines that are not rows: the process died, or
    the disk was full, while they were written.
  """

  rows: list[Row]
  damaged: list[int]


def write(path: epath.Path, data: bytes | str, mode: str = "wb") -> None:
  """Opens, writes and closes a file; all functions here but `append` use it."""
  with os_errors(path), path.open(mode) as file:
    file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def os_errors(path: epath.Path) -> Iterator[None]:
  """Turns errors of an object store, of any class, into OSErrors."""
  try:
    yield
  except OSError:
    raise
  except Exception as e:
    if not is_remote(path):
      raise
    raise OSError(f"{type(e).__name__}: {e}") from e


def append(path: epath.Path, data: bytes, size: int) -> int:
  """Writes after the first `size` bytes of a file, and returns its new size.

  Args:
    path: A local file in an existing folder.
    data: What to write.
    size: Bytes to keep; what a failed write left after them is overwritten.
  """
  number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
  with os.fdopen(number, "r+b") as file:
    size = min(size, os.fstat(number).st_size)
    file.seek(size)
    return size + file.write(data)


def replace_text(
  path: epath.Path, data: bytes | str, suffix: str = "new"
) -> None:
  """Replaces a file; an interruption leaves the old or the new one.

  Args:
    path: The file.
    data: Its new contents.
    suffix: Ends the name of the draft, which a disk needs; an object in a
      bucket is replaced as a whole.
  """
  if is_remote(path):
    write(path, data)
    return
  draft = path.parent / f"{path.name}.{suffix}"
  try:
    write(draft, data)
    draft.replace(path)
  except OSError:
    with contextlib.suppress(OSError):
      draft.unlink(missing_ok=True)
    raise


def replace(path: epath.Path, data: bytes | str) -> None:
  """Writes a file as `replace_text` does.

  Raises:
    WriteError: It cannot be written; the message says what to do.
  """
  try:
    replace_text(path, data)
  except OSError as e:
    raise WriteError(
      f"{path}: cannot be written ({reason(e)}); the old file is unchanged."
    ) from None


def reason(error: Exception) -> str:
  """Returns the system's reason for an error, as a part of a sentence."""
  return getattr(error, "strerror", None) or str(error) or type(error).__name__


def folder_error(workdir: str, error: OSError) -> str:
  """Returns an error message for a --workdir that cannot be written."""
  at = f"{error.filename}: " if error.filename else ""
  why = f"no files can be written ({at}{reason(error)})"
  return f"--workdir: got {workdir!r}, where {why}."


def open_records(
  path: epath.Path,
  data: bytes,
  note: Callable[[str], None] = print,
  check_owner: Callable[[], None] = lambda: None,
) -> "Records":
  """Returns the records of a file, on a disk or in a bucket.

  Args:
    path: The file, which is replaced.
    data: Its first contents.
    note: Prints a line on write errors.
    check_owner: Called before an upload to a bucket, from its thread. If it
      raises an OSError, the folder belongs to another run now, and nothing is
      written.

  Raises:
    WriteError: The file cannot be written now.
  """
  if is_remote(path):
    return _UploadedRecords(path, data, note, check_owner)
  return Records(path, data, note)


class Records:
  """Appends records to a local file; while that fails, records wait in memory.

  A record that was written in part, for example because the disk was full, is
  written again from its beginning.

  Args:
    path: The file, which is replaced.
    data: Its first contents.
    note: Prints a line, once when writing fails, and once when it works again.

  Attributes:
    error: Why records wait, or None.

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
      WriteError: `MAX_WAITING` records wait.
    """
    self._waiting.append(record)
    self._try_to_write()
    self._refuse_too_many()

  def flush(self) -> None:
    """Starts an upload to a bucket; a local file is always written."""

  def close(self) -> str | None:
    """Writes the waiting records, if necessary to a temporary folder.

    Returns:
      Where the records are that could not be written; None without such
      records.
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
    """Writes the waiting records, or prints once why that failed."""
    try:
      self._write()
    except OSError as e:
      if self.error is None:
        self._note(
          f"file        {self._path} cannot be written ({reason(e)}): the run"
          " goes on, and its records wait in memory"
        )
      self.error = e

  def _refuse_too_many(self) -> None:
    if self.error is not None and len(self._waiting) >= MAX_WAITING:
      raise WriteError(
        f"{self._path}: {len(self._waiting):,} records wait"
        f" ({reason(self.error)}); free disk space, and start again."
      )

  def _write(self) -> None:
    data = b"".join(self._waiting)
    self._size = append(self._path, data, self._size)
    self._remove_written(len(self._waiting))

  def _remove_written(self, count: int) -> None:
    """Removes the first records, which are in the file."""
    if self.error is not None:
      self._note(f"file        {self._path}: {count:,} records written again")
    self.error = None
    del self._waiting[:count]


class _UploadedRecords(Records):
  """Records in a bucket: a thread uploads the whole file every few seconds.

  An object of a store cannot be appended to: a client uploads it anew, and
  would download it before.
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
    """Adds a record to the next upload.

    Raises:
      WriteError: `MAX_WAITING` records wait.
    """
    self._waiting.append(record)
    self._refuse_too_many()

  def flush(self) -> None:
    self._wakes.set()

  def close(self) -> str | None:
    """Writes the waiting records, unless another run took the folder."""
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
    count = len(self._waiting)  # more may come meanwhile, after these
    content = self._content + b"".join(self._waiting[:count])
    write(self._path, content)
    self._content = content
    self._remove_written(count)


def contents(path: epath.Path) -> bytes:
  """Reads a file that is about to be rewritten; b"" if it does not exist.

  Raises:
    WriteError: It cannot be read now, so its contents would be lost.
  """
  try:
    with os_errors(path):
      return path.read_bytes()
  except (FileNotFoundError, NotADirectoryError):
    return b""
  except OSError as e:
    raise WriteError(
      f"{path}: cannot be read ({reason(e)}); the file is unchanged."
    ) from None


def read_rows(path: epath.Path) -> Rows:
  """Reads a file of metrics, see `parse_rows`; empty if it does not exist."""
  return parse_rows(path.read_bytes() if path.exists() else b"")


def parse_rows(data: bytes) -> Rows:
  """Returns the rows of a file of metrics.

  A row is a line of JSON: an object of numbers, of which "step" is an integer.
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
  """Returns the first line numbers, and how many more there are.

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
