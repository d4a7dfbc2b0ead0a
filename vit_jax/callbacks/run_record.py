"""Which process trains in the folder of a run, and how it ended.

`process.json` names the process. A process that is killed does not write its
end. So a reader on the same machine checks whether the process exists; a reader
on another machine watches the heartbeat, see `run_lock`. This module imports no
jax.
"""

import os
import pathlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.config import json_file

FILE = "process.json"
HEARTBEAT = "beat.json"  # rewritten while the process lives
FINISHED = "finished"

# Id of each record that this process has not ended -> writes its end.
open_records: dict[str, Callable[[str], None]] = {}


def new(num_processes: int = 1, began: float | None = None) -> dict[str, Any]:
  """Returns a record of this process.

  Args:
    num_processes: Number of processes of the run; this is the first.
    began: Start of the run in this process, seconds since the epoch; None for
      now.

  Returns:
    "id", a random text; "host", "machine", "pid" and "ticks", which together
    identify the process; "processes" and "began"; "earlier", start and last
    sign of life of each process that trained in the folder before; "ended" and
    "how", None until the process ends, then the time and the reason, see `end`.
  """
  return {
    "id": secrets.token_hex(8),
    "host": socket.gethostname(),
    "machine": _machine(),
    "pid": os.getpid(),
    "ticks": _start_ticks(os.getpid()),
    "processes": num_processes,
    "began": round(time.time() if began is None else began, 3),
    "earlier": [],
    "ended": None,
    "how": None,
  }


def end(how: str) -> None:
  """Writes the end into the records of this process; from any thread.

  Args:
    how: "finished", the signal that stopped the run, or its error.
  """
  while open_records:
    _, write_end = open_records.popitem()
    write_end(how)


def read(path: str | os.PathLike) -> dict[str, Any]:
  """Returns the record or heartbeat in a file; {} if missing or damaged."""
  try:
    return json_file.read(path)
  except (OSError, ValueError):
    return {}


def describe(record: Mapping[str, Any]) -> str:
  """Returns host, process and start of a record as text."""
  try:
    began = time.gmtime(record.get("began"))
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", began)
  except (TypeError, ValueError, OverflowError, OSError):
    when = "an unknown time"
  count = record.get("processes") or 1
  which = f", the first of {count}" if count != 1 else ""
  return (
    f"host {record.get('host')}, process {record.get('pid')}{which}, begun"
    f" {when}"
  )


def earlier(workdir: str | os.PathLike) -> list[tuple[float, float]]:
  """Returns start and last sign of life of each earlier process.

  Both are seconds since the epoch. The process of the record is not among them.
  """
  from vit_jax.paths import run_path  # --help does not wait for it

  intervals = read(run_path(workdir) / FILE).get("earlier")
  return [
    (interval[0], interval[1])
    for interval in (intervals if isinstance(intervals, list) else [])
    if isinstance(interval, list)
    and len(interval) == 2
    and all(map(json_file.is_number, interval))
  ]


def intervals(workdir: str | os.PathLike) -> list[tuple[float, float]]:
  """Returns the intervals of `earlier`, and the record's own."""
  from vit_jax.paths import run_path

  folder = run_path(workdir)
  record, heartbeat = read(folder / FILE), read(folder / HEARTBEAT)
  signs = [record.get("began"), record.get("ended")]
  if heartbeat.get("id") == record.get("id"):
    signs.append(heartbeat.get("time"))
  signs = [sign for sign in signs if json_file.is_number(sign)]
  last = [(min(signs), max(signs))] if signs else []
  return earlier(workdir) + last


def is_alive(record: Mapping[str, Any]) -> bool | None:
  """Whether the process of a record still runs; None if unknown.

  It is unknown if the process is, or was, on another machine or in a container
  with its own process numbers; or, outside of Linux, if another process may
  have its number by now.

  Args:
    record: Contents of `process.json`.
  """
  if record.get("ended") is not None:
    return False
  if record.get("machine") != _machine():
    return None
  pid, ticks = record.get("pid"), record.get("ticks")
  if not isinstance(pid, int) or pid < 1:
    return False
  if pid == os.getpid() and ticks == _start_ticks(pid):
    return record.get("id") in open_records  # False for an earlier run
  try:
    os.kill(pid, 0)  # signal 0 only checks that the process exists
  except (ProcessLookupError, OverflowError):
    return False
  except PermissionError:
    pass  # it exists, and is another user's
  return None if ticks is None else _start_ticks(pid) == ticks


def _machine() -> str:
  """Returns the name of the space in which a process number is unique.

  It is the host's name and, on Linux, the namespace of process numbers, of
  which a container has its own.
  """
  try:
    namespace = os.stat("/proc/self/ns/pid").st_ino
  except OSError:
    return socket.gethostname()
  return f"{socket.gethostname()}/{namespace}"


def _start_ticks(pid: int) -> int | None:
  """Returns when a process began, in Linux's ticks since the boot.

  It distinguishes a process from a later one of the same number. None if the
  count or the process does not exist, or if the process is a zombie.
  """
  try:
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return None
  # The name, in brackets, may have spaces. From field 3 of man 5 proc_pid_stat.
  state, *fields = text.rpartition(")")[2].split()
  return None if state in "ZX" else int(fields[18])
