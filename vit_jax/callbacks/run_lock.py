"""One run at a time in a folder, also on a disk that several machines share.

Process 0 of a run writes `process.json`, a record of its host, process and
start. While it lives, it rewrites `beat.json`, its heartbeat. A later run reads
both before it writes anything:

- A run on the same machine is alive if its process exists.
- A run on another machine is alive if its heartbeat changes twice, each time
  within `WATCH_SECONDS`. No clock of another machine is used.

If the run is alive, the later one ends with an error; otherwise it takes the
folder. If several runs start at once, the last one that writes its record owns
the folder. So each waits `SETTLE_SECONDS` before its first other file, then
reads the record, and stops if it is another's. A run that was suspended, and
taken for dead, does the same before its next row or checkpoint.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from vit_jax.callbacks import run_record
from vit_jax.callbacks.base import Callback, Stop
from vit_jax.config import ConfigError
from vit_jax.distributed import agreement, exit_codes
from vit_jax.paths import is_remote, run_path
from vit_jax.writers import atomic_files

if TYPE_CHECKING:
  from vit_jax.step import TrainState

HEARTBEAT_SECONDS = 10.0
WATCH_SECONDS = 35.0  # three heartbeats, and some for a slow disk
POLL_SECONDS = 1.0
# Longer than from reading a record to writing the next; in a bucket, where that
# takes several requests, twice as long.
SETTLE_SECONDS = 0.5


class LostError(atomic_files.WriteError):
  """The folder of a run was deleted, or another run took it."""


# Folder -> record and heartbeat of a run that this process watched and saw to
# be dead, so that it is not watched again.
_dead_runs: dict[str, tuple[dict[str, Any] | None, bytes | None]] = {}


def refuse_live(
  workdir: str, note: Callable[[str], None] = exit_codes.say
) -> None:
  """Raises if another run trains in a folder; writes nothing.

  Each process calls it before it joins the others. (A second start of the same
  command would join the live run, and jax would then abort that run.) A run
  writes its record after all its processes have joined, so its own record
  raises nothing.

  Args:
    workdir: Folder of the run.
    note: Prints a line.

  Raises:
    ConfigError: Another run trains there, or the record cannot be read now.
  """
  folder = run_path(workdir)
  with _folder_errors(workdir):
    record = _read_record(folder)
    is_alive = False if record == {} else None  # None: unknown
    if record:
      is_alive = run_record.is_alive(record)
    if is_alive is None:
      record, is_alive = _watch(folder, record, note)
  if is_alive:
    raise ConfigError(
      [
        f"--workdir: got {workdir!r}, in which another run trains:"
        f" {run_record.describe(record)}."
      ]
    )


def _watch(
  folder: epath.Path,
  record: dict[str, Any] | None,
  note: Callable[[str], None],
) -> tuple[dict[str, Any], bool]:
  """Returns the newest record of a folder, and whether its run is alive."""
  heartbeat = _read_heartbeat(folder)
  if _dead_runs.get(str(folder)) == (record, heartbeat):
    return record or {}, False
  host = (record or {}).get("host")
  seconds = f"{WATCH_SECONDS:.0f} s"
  note(f"waits       {seconds} for a heartbeat of host {host} in {folder}")
  changes, deadline = 0, time.monotonic() + WATCH_SECONDS
  while time.monotonic() < deadline:
    time.sleep(POLL_SECONDS)
    newest = _read_record(folder)
    if record is None:
      record = newest
    elif newest not in (None, record):  # another run began
      return newest, bool(newest) and newest.get("ended") is None
    if record and record.get("ended") is not None:
      return record, False
    if (newest := _read_heartbeat(folder)) != heartbeat:
      heartbeat, changes = newest, changes + 1
      if changes == 2:  # the first may have been its last before it was killed
        return record or {}, True
      deadline = time.monotonic() + WATCH_SECONDS
  note(f"takes over  {folder}: that run had no heartbeat")
  _dead_runs[str(folder)] = record, heartbeat
  return record or {}, False


class RunLock(Callback):
  """Owns the folder of a run from `acquire` to `close`.

  Args:
    workdir: Folder of the run.
    note: Prints a line.
    began: Start of the run in this process, seconds since the epoch; None for
      now.

  Raises:
    ConfigError: Another run trains in the folder.
  """

  def __init__(
    self,
    workdir: str,
    note: Callable[[str], None] = exit_codes.say,
    began: float | None = None,
  ):
    refuse_live(workdir, note)
    self._workdir, self._folder, self._note = workdir, run_path(workdir), note
    self._is_first = jax.process_index() == 0
    self._record = run_record.new(jax.process_count(), began)
    self._loss: str | None = None  # how the folder was lost
    self._closed = threading.Event()
    self._settled_at = -math.inf
    self._heartbeat_fails = False

  def acquire(self) -> None:
    """Writes the record of this run and starts its heartbeat. Collective.

    Raises:
      ConfigError: In all processes; another run was faster, or the folder
        cannot be written.
    """
    error = ""
    try:
      if self._is_first:
        refuse_live(self._workdir, self._note)
        with _folder_errors(self._workdir):
          self._folder.mkdir(parents=True, exist_ok=True)
          self._record["earlier"] = run_record.intervals(self._folder)
          self._write_record()
    except ConfigError as e:
      (error,) = e.errors
    if error := agreement.broadcast_text(error):
      raise ConfigError([error])
    if self._is_first:
      seconds = SETTLE_SECONDS * (2 if is_remote(self._folder) else 1)
      self._settled_at = time.monotonic() + seconds
      run_record.open_records[self._record["id"]] = self._write_end
      self._write_heartbeat()
      threading.Thread(
        target=self._write_heartbeats, name="heartbeat", daemon=True
      ).start()

  def on_start(self, start: int, state: "TrainState", saved: Mapping) -> None:
    self.check()

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    # Whoever writes a row checks the owner: the loop on a local disk, a thread
    # in a bucket.
    if self._loss:
      raise LostError(self._loss)
    return values

  def before_save(self, step: int) -> None:
    self.check()

  def check(self) -> None:
    """Checks that the folder still belongs to this run.

    Raises:
      LostError: It was deleted, or another run took it.
    """
    if self._is_first and not self._closed.is_set():
      time.sleep(max(0.0, self._settled_at - time.monotonic()))
      if self._is_lost():
        raise LostError(self._loss)

  def close(self, error: BaseException | None = None) -> None:
    """Writes how the run ended.

    Args:
      error: What ended it; None if it is finished.
    """
    how = run_record.FINISHED
    if isinstance(error, Stop):
      how = str(error)
    elif error is not None:
      how = f"{type(error).__name__}: {error}"[:500].removesuffix(": ")
    if run_record.open_records.pop(self._record["id"], None):
      self._write_end(how)

  def __enter__(self):
    self.acquire()
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, *_):
    self.close(error)

  def _is_lost(self) -> bool:
    """Whether the folder was deleted or taken; False if it cannot be read."""
    try:
      record = json.loads((self._folder / run_record.FILE).read_bytes())
      if record["id"] != self._record["id"]:
        self._loss = (
          f"{self._workdir}: another run took this folder"
          f" ({run_record.describe(record)}); this one stops."
        )
    except (FileNotFoundError, NotADirectoryError):
      self._loss = (
        f"{self._workdir}: the folder of this run was deleted or moved, or its"
        f" {run_record.FILE} was; the run stops."
      )
    except Exception:  # damaged, or a bucket that does not answer now
      pass
    return self._loss is not None

  def _write_record(self) -> None:
    """Atomically replaces process.json by the record of this run."""
    atomic_files.replace_text(
      self._folder / run_record.FILE,
      json.dumps(self._record, indent=2) + "\n",
      suffix=self._record["id"],
    )

  def _write_end(self, how: str) -> None:
    """Writes the end into the record; see `run_record.end`."""
    self._closed.set()
    if not self._is_lost():
      self._record |= {"ended": round(time.time(), 3), "how": how}
      with contextlib.suppress(OSError):  # a later run sees no process
        self._write_record()

  def _write_heartbeats(self) -> None:
    while not self._closed.wait(HEARTBEAT_SECONDS) and not self._is_lost():
      self._write_heartbeat()

  def _write_heartbeat(self) -> None:
    path = self._folder / run_record.HEARTBEAT
    now = {"id": self._record["id"], "time": round(time.time(), 3)}
    try:
      atomic_files.replace_text(path, json.dumps(now) + "\n")
    except OSError as e:
      if not self._heartbeat_fails and self._folder.exists():
        self._heartbeat_fails = True
        self._note(
          f"heartbeat   {path} cannot be written ({atomic_files.reason(e)})"
        )


@contextlib.contextmanager
def _folder_errors(workdir: str) -> Iterator[None]:
  """Turns errors of a file system or a bucket into ConfigError."""
  try:
    yield
  except ConfigError:
    raise
  except Exception as e:  # a bucket's errors are of many classes
    what = f"{run_record.FILE} cannot be used ({atomic_files.reason(e)})"
    raise ConfigError([f"--workdir: got {workdir!r}, where {what}."]) from None


def _read_record(folder: epath.Path) -> dict[str, Any] | None:
  """Returns the record of a folder; {} if there is none.

  None if it is no JSON: its run may be alive.

  Raises:
    OSError: It cannot be read now, so that the owner is unknown.
  """
  try:
    data = (folder / run_record.FILE).read_bytes()
  except (FileNotFoundError, NotADirectoryError):
    return {}
  try:
    record = json.loads(data)
  except ValueError:
    return None
  return record if isinstance(record, dict) else None


def _read_heartbeat(folder: epath.Path) -> bytes | None:
  try:
    return (folder / run_record.HEARTBEAT).read_bytes()
  except OSError:
    return None
