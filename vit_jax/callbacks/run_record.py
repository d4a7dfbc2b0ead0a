"""Who holds the folder of a run, since when, and how it ended: `process.json`.

A process that is killed writes no end. So the file names the process, and
whoever reads it on the same machine can see whether that process is still
there. See `vit_jax.callbacks.run_lock`, which writes it. Nothing here imports
jax.
"""

import os
import pathlib
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from vit_jax.config import json_file

FILE = "process.json"
# Its contents; see `vit_jax.config.json_file.faults`.
SHAPE = {
  "id": str,
  "host": str,
  "boot": str,
  "pids": int,
  "processes": int,
  "pid": json_file.Whole(0, 2**31 - 1),
  "ticks": int,
  "began": float,
  "ended": float,
  "how": str,
}
BEAT = "beat.json"  # rewritten while the process lives
FINISHED = "finished"


# By its id, what writes the end of each record that this process holds.
held: dict[str, Callable[[str], None]] = {}


def end(how: str) -> None:
  """Writes the end of the records of this process, if any; from any thread.

  Args:
    how: "finished", the notice that stopped the run, or the error in words.
  """
  while held:
    _, write = held.popitem()
    write(how)


def record(num_processes: int = 1) -> dict[str, Any]:
  """Returns the record of this process.

  Returns:
    id: A random text, which no other record has.
    host: Name of the machine.
    boot: The kernel's own id of its start, shared by all containers on it.
    pids: Number of the namespace in which `pid` counts.
    pid, ticks: Number of the process, and when it began, see `_ticks`.
    processes: How many processes the run has; this is the first.
    began: Seconds since the epoch.
    ended, how: None until it ends; then when and how, see `end`.
  """
  return {
    "id": secrets.token_hex(8),
    "host": socket.gethostname(),
    "boot": _boot(),
    "pids": _pids(),
    "pid": os.getpid(),
    "ticks": _ticks(os.getpid()),
    "processes": num_processes,
    "began": round(time.time(), 3),
    "ended": None,
    "how": None,
  }


def is_alive(record: dict[str, Any]) -> bool | None:
  """Whether the process of a record is there; None: it cannot be seen, as it
  was on another machine, or in a container with its own numbers.

  Args:
    record: Contents of `process.json`.
  """
  if record.get("boot") is None:  # not Linux, or by an earlier version
    if record.get("host") != socket.gethostname():
      return None
  elif (record["boot"], record.get("pids")) != (_boot(), _pids()):
    return None
  pid = record.get("pid")
  if not isinstance(pid, int) or pid < 1:
    return False
  try:
    os.kill(pid, 0)  # sends nothing
  except (ProcessLookupError, OverflowError):
    return False
  except PermissionError:
    pass  # of another user
  return _ticks(pid) == record.get("ticks")


def is_held(record: dict[str, Any]) -> bool | None:
  """Whether the process of a record still trains; None: it cannot be seen.

  As `is_alive`, but for an earlier run of this process, whose end could not be
  written, and where nothing tells processes of one number apart.
  """
  if record.get("ended") is not None:
    return False
  alive = is_alive(record)
  if alive and record["pid"] == os.getpid():
    return record.get("id") in held
  if alive and record.get("ticks") is None:
    return None  # not Linux: the number may be that of another by now
  return alive


def _boot() -> str | None:
  try:
    path = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip()
  except OSError:
    return None


def _pids() -> int | None:
  try:
    return os.stat("/proc/self/ns/pid").st_ino
  except OSError:
    return None


def _ticks(pid: int) -> int | None:
  """Returns when a process began, in Linux's count, which tells it from a later
  one of the same number; None where that, or the process, is not there, or has
  ended and only waits for its parent to take note."""
  try:
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return None
  # The name, in brackets, may have spaces. From field 3 of man 5 proc_pid_stat.
  state, *fields = text.rpartition(")")[2].split()
  return None if state in "ZX" else int(fields[18])
