"""The small files of a run: written whole or not at all, read whatever is left.

Readers never raise for what a file holds: they return what can be read, and a
text for each thing that cannot. Nothing here imports jax.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

MOST_LINES = 10_000  # that wait in memory for a disk that is full
MOST_TOLD = 5  # odd lines, one by one


class WriteError(OSError):
  """A file of a run cannot be written; the text says which, and what to do."""


class Read(NamedTuple):
  """What was read of a file.

  values: A dict, or a list of rows; empty if nothing could be read.
  faults: A text for each thing that could not, with the path.
  """

  values: Any
  faults: list[str]


def write(path: epath.Path, text: str | bytes, mode: str = "w") -> None:
  """Opens a file, writes and closes it. All is written by it and `append`."""
  with path.open(mode) as file:
    file.write(text)


def append(path: epath.Path, text: str | bytes, size: int) -> int:
  """Writes after the first bytes of a file, and returns how many it has then.

  Args:
    path: In a folder that is there.
    text: What is written.
    size: Bytes that stay; what a write that failed left behind them does not.
  """
  if not is_local(path):  # an object store, whose files cannot be cut
    write(path, text, "a" if isinstance(text, str) else "ab")
    return size
  number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
  with os.fdopen(number, "r+b") as file:
    size = min(size, os.fstat(number).st_size)
    file.truncate(size)
    file.seek(size)
    data = text.encode() if isinstance(text, str) else text
    return size + file.write(data)


def replace_text(path: epath.Path, text: str) -> None:
  """Writes a file such that an interruption leaves the old or the new one."""
  draft = path.parent / (path.name + ".new")
  write(draft, text)
  draft.replace(path)


def replace(path: epath.Path, text: str) -> None:
  """Does as `replace_text`.

  Raises:
    WriteError: It cannot be written, in words.
  """
  try:
    replace_text(path, text)
  except OSError as e:
    raise WriteError(
      f"{path}: cannot be written ({reason(e)}); make room, or see who may"
      " write there, and start again. What was there is unchanged."
    ) from None


def reason(error: OSError) -> str:
  """Returns why the system refused, as a part of a sentence."""
  return error.strerror or str(error) or type(error).__name__


def is_local(path: epath.Path) -> bool:
  """Whether a path is of the operating system, not of an object store."""
  return "://" not in str(path)


class Lines:
  """Appends lines to a file; keeps them in memory while that fails.

  A line that was written in part, as when the disk became full, is written
  again from its beginning.

  Args:
    path: The file, which is replaced.
    text: What it holds at first.
    note: Prints a line, once when writing fails, and once when it works again.

  Raises:
    WriteError: The file cannot be written now.
  """

  def __init__(
    self, path: epath.Path, text: str, note: Callable[[str], None] = print
  ):
    self._path, self._note = path, note
    replace(path, text)
    self._size = len(text.encode())
    self._waiting: list[str] = []
    self._error: OSError | None = None

  def append(self, line: str) -> None:
    """Writes a line, and those that wait.

    Raises:
      WriteError: `MOST_LINES` wait.
    """
    self._waiting.append(line)
    try:
      self._write("".join(f"{x}\n" for x in self._waiting))
    except OSError as e:
      if self._error is None:
        self._note(
          f"metrics     {self._path} cannot be written ({reason(e)}): the run"
          " goes on, and its rows wait in memory until it can; they are lost if"
          " the process is killed before."
        )
      self._error = e
      if len(self._waiting) >= MOST_LINES:
        raise WriteError(
          f"{self._path}: {len(self._waiting):,} rows wait, since it cannot be"
          f" written ({reason(e)}); make room, or mend the disk, and start"
          " again: the run resumes from its last checkpoint."
        ) from None
      return
    if self._error is not None:
      count = len(self._waiting)
      self._note(f"metrics     {self._path}: {count:,} rows written again")
    self._error, self._waiting = None, []

  def close(self) -> str | None:
    """Writes what waits, elsewhere if it must.

    Returns:
      What became of the rows that could not be written; None: there are none.
    """
    if not self._waiting:
      return None
    rest = "".join(f"{x}\n" for x in self._waiting)
    count, self._waiting = len(self._waiting), []
    try:
      self._write(rest)
      return None
    except OSError as e:
      said = f"{self._path}: could not be written ({reason(e)})"
    name = f"vit_jax-metrics-{os.getpid()}.jsonl"
    other = epath.Path(tempfile.gettempdir()) / name
    try:
      write(other, rest, "a")
    except OSError as e:
      return f"{said}; its last {count:,} rows are lost: {other}: {reason(e)}."
    return (
      f"{said}; its last {count:,} rows are in {other}: append them to it, and"
      " start again."
    )

  def _write(self, text: str) -> None:
    self._size = append(self._path, text, self._size)


def read_json(path: epath.Path) -> Read:
  """Reads an object of JSON; {} without a fault if the file is missing."""
  try:
    if not path.exists():
      return Read({}, [])
    values = json.loads(path.read_bytes().decode("utf-8"))
  except OSError as e:
    return Read({}, [f"{path}: cannot be read ({reason(e)})"])
  except (ValueError, RecursionError) as e:
    return Read({}, [f"{path}: expected JSON, got {_what(e)}"])
  if not isinstance(values, dict):
    kind = type(values).__name__
    return Read({}, [f"{path}: expected an object of JSON, got a {kind}"])
  return Read(values, [])


def read_rows(path: epath.Path) -> Read:
  """Reads lines of metrics: objects of JSON with a "step".

  Lines that are none are left out, with a fault that numbers them; so are
  values that are no numbers. Values may be NaN or infinite, as Python writes
  them; a fault names them.
  """
  try:
    data = path.read_bytes() if path.exists() else b""
  except OSError as e:
    return Read([], [f"{path}: cannot be read ({reason(e)})"])
  rows, odd = [], []
  *lines, last = data.split(b"\n")
  for number, line in enumerate([*lines, last], 1):
    if not line.strip():
      continue
    try:
      row = _row(line)
    except (ValueError, RecursionError) as e:
      # The process died, or the disk was full, while it was written.
      is_cut = number > len(lines)
      odd.append(
        f"line {number}: {'cut off' if is_cut else _what(e)}; left out"
      )
      continue
    values = {k: v for k, v in row.items() if _is_number(v)}
    if values.keys() < row.keys():
      names = ", ".join(sorted(row.keys() - values.keys())[:3])
      odd.append(f"line {number}: {names[:100]}: no number; left out")
    if bad := [k for k, v in values.items() if not math.isfinite(v)]:
      odd.append(f"line {number}: {', '.join(bad[:3])[:100]}: not finite")
    rows.append(values)
  more = len(odd) - MOST_TOLD
  told = "; ".join(odd[:MOST_TOLD]) + f"; and {more:,} more" * (more > 0)
  return Read(rows, [f"{path}: {told}"] if odd else [])


def _row(line: bytes) -> dict[str, Any]:
  """Parses a line.

  Raises:
    ValueError: It is no row.
  """
  row = json.loads(line.decode("utf-8"))
  if not isinstance(row, dict):
    raise ValueError(f"a {type(row).__name__}")
  step = row.get("step")
  if not isinstance(step, int) or isinstance(step, bool) or step < 0:
    raise ValueError("no step")
  return row


def _is_number(value: Any) -> bool:
  if isinstance(value, bool) or not isinstance(value, int | float):
    return False
  return not isinstance(value, int) or abs(value) < 2**63


def _what(error: Exception) -> str:
  """Returns what was found in place of JSON, in a few words."""
  if isinstance(error, UnicodeDecodeError):
    return f"bytes that are no UTF-8, at {error.start}"
  if isinstance(error, json.JSONDecodeError):
    return f"{error.msg} at {error.pos}"
  if isinstance(error, RecursionError):
    return "too many brackets"
  return str(error)[:100]
