"""When the process of a run began, and how it ended: `process.json`.

A process that is killed writes no end. So the file names the process, and
whoever reads it on the same host can see whether that process is still there.
"""

import contextlib
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import Any

from vit_jax.runtime.preemption import Stop

FILE = "process.json"
FINISHED = "finished"


# The record of this process, while it is open: its folder and contents.
_open: dict[str, dict[str, Any]] = {}


@contextlib.contextmanager
def recorded(workdir: str) -> Iterator[None]:
  """Writes `process.json` at the start and at the end; only process 0 does.

  Its keys: host, pid, began (seconds since the epoch), ticks (see `_ticks`),
  ended (None until then) and how: "finished", the notice that stopped it, or
  the error in words.
  """
  from vit_jax.runtime.run_info import write_json  # jax: readers need it not

  record = {
    "host": socket.gethostname(),
    "pid": os.getpid(),
    "ticks": _ticks(os.getpid()),
    "began": round(time.time(), 3),
    "ended": None,
    "how": None,
  }
  write_json(workdir, FILE, record)
  _open[workdir] = record
  how = FINISHED
  try:
    yield
  except Stop as stop:
    how = str(stop)
    raise
  except BaseException as e:
    how = f"{type(e).__name__}: {e}"[:500].removesuffix(": ")
    raise
  finally:
    end(how)


def end(how: str) -> None:
  """Writes the end of what is `recorded` now, if anything is; from any thread.

  Args:
    how: As in `recorded`.
  """
  from vit_jax.runtime.run_info import write_json

  while _open:
    workdir, record = _open.popitem()
    record |= {"ended": round(time.time(), 3), "how": how}
    write_json(workdir, FILE, record)


def is_alive(record: dict[str, Any]) -> bool | None:
  """Whether the process of a record is there; None: it was on another host.

  Args:
    record: Contents of `process.json`.
  """
  if record.get("host") != socket.gethostname():
    return None
  pid = record.get("pid")
  if not isinstance(pid, int) or pid < 1:
    return False
  try:
    os.kill(pid, 0)  # sends nothing
  except ProcessLookupError:
    return False
  except PermissionError:
    pass  # of another user
  return _ticks(pid) == record.get("ticks")


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
