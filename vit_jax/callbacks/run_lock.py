"""One run at a time in a folder, also on a disk that several machines share.

Process 0 of a run writes a record of itself to `process.json`, and rewrites
`beat.json`, its heartbeat, while it lives. A later run reads the record. On the
same machine it looks whether that process exists. Of a process elsewhere it
watches the heartbeat: if that does not change twice, each time within
`WATCH_SECONDS`, the process is dead, and its folder is taken over by a new
record. No clock of another machine is read, and nothing is asked of the file
system but that a file which was replaced is read as it is, so this serves a
local disk, NFS and a bucket alike.

Of several runs that start at once, the last to write its record owns the
folder. Each of them waits `SETTLE_SECONDS` from its record to its first other
file; it then reads the record, and stops if that is another's. So does a run
that was suspended and taken for dead, before its next row or checkpoint.
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
from vit_jax.writers import atomic_files

if TYPE_CHECKING:
  from vit_jax.step import TrainState

HEARTBEAT_SECONDS = 10.0
WATCH_SECONDS = 35.0  # three heartbeats, and some for a slow disk
POLL_SECONDS = 1.0  # between two looks at a heartbeat
SETTLE_SECONDS = 1.0  # longer than from reading a record to writing the next
# A request to a bucket takes as long as several steps. So there a row relies on
# what the heartbeat's thread read at most so long ago.
BUCKET_MAX_AGE_SECONDS = 2.5 * HEARTBEAT_SECONDS


class LostError(atomic_files.WriteError):
  """The folder of a run was deleted, or another run took it."""


# Folder -> record and heartbeat of the run that this process saw to be dead: a
# second look does not wait again.
_dead_runs: dict[str, tuple[dict[str, Any], bytes | None]] = {}


def refuse_live(
  workdir: str, note: Callable[[str], None] = exit_codes.say
) -> None:
  """Refuses a folder in which another run trains; writes nothing.

  Each process calls it for itself, and before it joins the others: a second
  start of the same command would join the run that goes on, which jax then
  aborts. A run writes its record after all its processes have joined, so none
  of them sees that of its own start.

  Args:
    workdir: Folder of the run.
    note: Prints a line.

  Raises:
    ConfigError: Another run trains there, or the record cannot be read now.
  """
  folder = epath.Path(workdir)
  with _folder_errors(workdir):
    record = _read_record(folder)
    is_alive = run_record.is_alive(record) if record else False
    if is_alive is None:
      record, is_alive = _watch(folder, record, note)
  if is_alive:
    raise ConfigError(
      [
        f"--workdir: got {workdir!r}, in which another run trains:"
        f" {_who(record)}. Let it finish, end it there, or take another"
        " --workdir."
      ]
    )


def _watch(
  folder: epath.Path, record: dict[str, Any], note: Callable[[str], None]
) -> tuple[dict[str, Any], bool]:
  """Returns the newest record of a folder, and whether its run lives."""
  heartbeat = _read_heartbeat(folder)
  if _dead_runs.get(str(folder)) == (record, heartbeat):
    return record, False
  note(
    f"waits       {WATCH_SECONDS:.0f} s to see whether the run of host"
    f" {record.get('host')} in {folder} still lives"
  )
  changes, deadline = 0, time.monotonic() + WATCH_SECONDS
  while time.monotonic() < deadline:
    time.sleep(POLL_SECONDS)
    newest = _read_record(folder)
    if newest != record:  # it has ended, or another run began
      return newest, bool(newest) and newest.get("ended") is None
    if (newest := _read_heartbeat(folder)) != heartbeat:
      heartbeat, changes = newest, changes + 1
      if changes == 2:  # one may have been its last before it was killed
        return record, True
      deadline = time.monotonic() + WATCH_SECONDS
  note(f"takes over  {folder}: that run gave no sign of life")
  _dead_runs[str(folder)] = record, heartbeat
  return record, False


class RunLock(Callback):
  """Owns the folder of a run from `acquire` to `close`.

  Args:
    workdir: Folder of the run.
    note: Prints a line.
    began: Start of the run in this process, seconds since the epoch; None: now.

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
    self._workdir, self._folder, self._note = workdir, epath.Path(workdir), note
    self._is_first = jax.process_index() == 0
    self._record = run_record.new(jax.process_count(), began)
    self._lost: str | None = None
    self._closed = threading.Event()
    self._settled_at = self._read_at = -math.inf
    self._heartbeat_fails = False

  def acquire(self) -> None:
    """Writes the record of this run and starts its heartbeat; collective.

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
    if error := agreement.text_of_first(error):
      raise ConfigError([error])
    if self._is_first:
      self._settled_at = time.monotonic() + SETTLE_SECONDS
      run_record.open_records[self._record["id"]] = self._end
      self._write_heartbeat()
      threading.Thread(
        target=self._write_heartbeats, name="heartbeat", daemon=True
      ).start()

  def on_start(self, start: int, state: "TrainState", saved: Mapping) -> None:
    self.check()

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    self.check()
    return values

  def before_save(self, step: int) -> None:
    self.check()

  def check(self) -> None:
    """Reads whether the folder still belongs to this run.

    Raises:
      LostError: It was deleted, or another run took it.
    """
    if not self._is_first or self._closed.is_set():
      return
    time.sleep(max(0.0, self._settled_at - time.monotonic()))
    is_local = atomic_files.is_local(self._folder)
    oldest = time.monotonic() - (0.0 if is_local else BUCKET_MAX_AGE_SECONDS)
    if self._read_at < max(oldest, self._settled_at):
      self._read_owner()
    if self._lost:
      raise LostError(self._lost)

  def close(self, error: BaseException | None = None) -> None:
    """Writes how the run ended.

    Args:
      error: What ends it; None: it is finished.
    """
    how = run_record.FINISHED
    if isinstance(error, Stop):
      how = str(error)
    elif error is not None:
      how = f"{type(error).__name__}: {error}"[:500].removesuffix(": ")
    if run_record.open_records.pop(self._record["id"], None):
      self._end(how)

  def __enter__(self):
    self.acquire()
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, *_):
    self.close(error)

  def _end(self, how: str) -> None:
    """Writes the end into the record; see `run_record.end`."""
    self._closed.set()
    self._read_owner()
    if self._lost:
      return
    self._record |= {"ended": round(time.time(), 3), "how": how}
    with contextlib.suppress(OSError):  # that the process is gone will do
      self._write_record()

  def _write_record(self) -> None:
    """Replaces the record by this run's, from a file of this run alone."""
    draft = self._folder / f"{run_record.FILE}.{self._record['id']}"
    try:
      atomic_files.write(draft, json.dumps(self._record, indent=2) + "\n")
      draft.replace(self._folder / run_record.FILE)
    except OSError:
      with contextlib.suppress(OSError):
        draft.unlink(missing_ok=True)
      raise

  def _write_heartbeats(self) -> None:
    while not self._closed.wait(HEARTBEAT_SECONDS) and not self._lost:
      self._write_heartbeat()

  def _write_heartbeat(self) -> None:
    """Rewrites the heartbeat, if the folder is still this run's."""
    self._read_owner()
    if self._lost:
      return
    path = self._folder / run_record.HEARTBEAT
    now = {"id": self._record["id"], "time": round(time.time(), 3)}
    try:
      atomic_files.replace_text(path, json.dumps(now) + "\n")
    except OSError as e:
      if not self._heartbeat_fails and self._folder.exists():
        self._heartbeat_fails = True
        self._note(
          f"heartbeat   {path} cannot be written ({atomic_files.reason(e)}): a"
          " run on another host could take this folder"
        )

  def _read_owner(self) -> None:
    """Notes whether the folder was deleted or taken; an error is neither."""
    began = time.monotonic()
    try:
      record = json.loads((self._folder / run_record.FILE).read_bytes())
      if record["id"] != self._record["id"]:
        self._lost = (
          f"{self._workdir}: another run took this folder ({_who(record)}): it"
          " began at the same moment, or this one gave no sign of life; this"
          " one stops, and leaves its files alone."
        )
    except (FileNotFoundError, NotADirectoryError):
      self._lost = (
        f"{self._workdir}: the folder of this run was deleted or moved, or its"
        f" {run_record.FILE} was; the run stops, and makes no other."
      )
    except Exception:  # damaged, or a bucket that does not answer now
      pass
    self._read_at = began


@contextlib.contextmanager
def _folder_errors(workdir: str) -> Iterator[None]:
  """Makes any error of a file system or a bucket a ConfigError."""
  try:
    yield
  except ConfigError:
    raise
  except Exception as e:  # a bucket's errors are of many classes
    raise ConfigError(
      [
        f"--workdir: got {workdir!r}, where {run_record.FILE} cannot be read"
        f" and written ({atomic_files.reason(e)}); make room, or take another"
        " --workdir."
      ]
    ) from None


def _read_record(folder: epath.Path) -> dict[str, Any]:
  """Returns the record of a folder, {} where there is none or a damaged one.

  Raises:
    OSError: It cannot be read now, so that the owner is unknown.
  """
  path = folder / run_record.FILE
  try:
    with path.open("rb") as file:
      file.read(1)
  except (FileNotFoundError, NotADirectoryError):
    return {}
  return run_record.read(path)


def _read_heartbeat(folder: epath.Path) -> bytes | None:
  try:
    return (folder / run_record.HEARTBEAT).read_bytes()
  except OSError:
    return None


def _who(record: Mapping[str, Any]) -> str:
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
