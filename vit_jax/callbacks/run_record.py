"""Which process trains in the folder of a run, and how it ended.

`process.json` names the process. One that is killed writes no end, so a reader
on the same machine looks whether the process is still there; a reader on
another one watches the heartbeat that `vit_jax.callbacks.run_lock` writes.
Nothing here imports jax.
"""

import os
import pathlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax.config import json_file

FILE = "process.json"
HEARTBEAT = "beat.json"  # rewritten while the process lives
FINISHED = "finished"

# Id of each record that this process has not ended -> writes its end.
open_records: dict[str, Callable[[str], None]] = {}


def end(how: str) -> None:
  """Writes the end of the records of this process, if any; from any thread.

  Args:
    how: "finished", the notice that stopped the run, or its error.
  """
  while open_records:
    _, write_end = open_records.popitem()
    write_end(how)


def read(path: str | os.PathLike) -> dict[str, Any]:
  """Returns the record or heartbeat in a file, {} if there is no whole one."""
  try:
    return json_file.read(path)
  except (OSError, ValueError):
    return {}


def earlier(workdir: str | os.PathLike) -> list[tuple[float, float]]:
  """Returns start and last sign of life of each process that trained before
  the one of the record; seconds since the epoch."""
  intervals = read(epath.Path(workdir) / FILE).get("earlier")
  return [
    (interval[0], interval[1])
    for interval in (intervals if isinstance(intervals, list) else [])
    if isinstance(interval, list)
    and len(interval) == 2
    and all(map(json_file.is_number, interval))
  ]


def intervals(workdir: str | os.PathLike) -> list[tuple[float, float]]:
  """Returns what `earlier` does, and the process of the record."""
  folder = epath.Path(workdir)
  record, heartbeat = read(folder / FILE), read(folder / HEARTBEAT)
  signs = [record.get("began"), record.get("ended")]
  if heartbeat.get("id") == record.get("id"):
    signs.append(heartbeat.get("time"))
  signs = [sign for sign in signs if json_file.is_number(sign)]
  last = [(min(signs), max(signs))] if signs else []
  return earlier(workdir) + last


def new(
  num_processes: int = 1,
  began: float | None = None,
  earlier: Sequence[tuple[float, float]] = (),
) -> dict[str, Any]:
  """Returns a record of this process.

  Args:
    num_processes: Number of processes of the run; this is the first.
    began: Start of the run in this process, seconds since the epoch; None: now.
    earlier: Start and last sign of life of each process that trained in the
      folder before, in order.

  Returns:
    The arguments; "id", a random text; "host", "machine", "pid" and "ticks",
    which tell this process from any other; "ended" and "how", None until it
    ends, then when and how, see `end`.
  """
  return {
    "id": secrets.token_hex(8),
    "host": socket.gethostname(),
    "machine": _machine(),
    "pid": os.getpid(),
    "ticks": _start_ticks(os.getpid()),
    "processes": num_processes,
    "began": round(time.time() if began is None else began, 3),
    "earlier": list(earlier),
    "ended": None,
    "how": None,
  }


def is_alive(record: Mapping[str, Any]) -> bool | None:
  """Whether the run of a record goes on, as far as its process tells.

  None: that cannot be seen from here. The process is, or was, on another
  machine or in a container with its own numbers; or its number may be another
  process's by now, which only Linux tells.

  Args:
    record: Contents of `process.json`.
  """
  if record.get("ended") is not None:
    return False
  if record.get("machine") != _machine():
    return None
  pid = record.get("pid")
  if not isinstance(pid, int) or pid < 1:
    return False
  if pid == os.getpid() and record.get("ticks") == _start_ticks(pid):
    return record.get("id") in open_records  # else an earlier run of ours
  try:
    os.kill(pid, 0)  # sends nothing
  except (ProcessLookupError, OverflowError):
    return False
  except PermissionError:
    pass  # of another user
  if record.get("ticks") is None:
    return None
  return _start_ticks(pid) == record["ticks"]


def _machine() -> str:
  """Returns the start of the kernel and the numbering of its processes, which
  a container may have of its own; the host's name where it is not Linux."""
  try:
    path = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return f"{path.read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
  except OSError:
    return socket.gethostname()


def _start_ticks(pid: int) -> int | None:
  """Returns when a process began, in Linux's count.

  It tells a process from a later one of the same number. None where the count
  or the process does not exist, or where the process has ended and its parent
  has not yet taken note.
  """
  try:
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return None
  # The name, in brackets, may have spaces. From field 3 of man 5 proc_pid_stat.
  state, *fields = text.rpartition(")")[2].split()
  return None if state in "ZX" else int(fields[18])
