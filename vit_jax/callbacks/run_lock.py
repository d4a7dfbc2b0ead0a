"""One run at a time in a folder, also on a disk that several machines share.

The first process of a run holds the folder by its record in `process.json`,
with a random id, and rewrites `beat.json` while it lives. Whoever comes later
looks whether the process is there, by its number on the same machine; on
another one by the beat, which either changes twice, each time within
`WATCH_SECONDS`, or belongs to a run that is dead. No clock of another machine
is read.

A record is followed by exactly one other: who makes `process.after-<id>`, which
a file system lets only one process do, holds the folder after the record `id`.
Where files cannot be made like that (an object store), the record is written,
and read again after `SETTLE_SECONDS`. A run that was taken for dead, as it was
suspended, finds another id in `process.json` before its next row, and stops.
"""

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from vit_jax.callbacks import goodput, run_record
from vit_jax.callbacks.phases import Phases
from vit_jax.callbacks.preemption import Stop
from vit_jax.config import ConfigError
from vit_jax.distributed import agreement, exit_codes
from vit_jax.writers import atomic_files

BEAT_SECONDS = 10.0
WATCH_SECONDS = 35.0  # three beats, and some for a slow disk
SETTLE_SECONDS = 2.0  # longer than from reading a record to writing the next
SEEN_SECONDS = 25.0  # so old may be what is known of a bucket: two beats
BEAT_BYTES = 1024  # always as many, so that a full disk can still be written to
_WATCH = "watch"
_ID = re.compile("[0-9a-f]{16}")


class LostError(atomic_files.WriteError):
  """The folder of a run was deleted, or another run took it."""


# Files of runs that `_Look` has found dead, by folder: no second wait.
_dead: dict[str, tuple] = {}


class _Look:
  """Looks whether another run holds a folder; writes nothing, alone.

  Args:
    workdir: Folder of the run.
    note: Prints a line.
  """

  def __init__(self, workdir: str, note: Callable[[str], None]):
    self._workdir, self._folder = workdir, epath.Path(workdir)
    self._note = note
    self._before, self._sign = {}, None  # the holder before, and its beat
    self._has_changed = False

  def _found(self, find: Callable[[], str]) -> str:
    """Returns what `find` returns, or words that the record is out of reach."""
    try:
      return find()
    except Exception as e:  # of a bucket they are no OSErrors; others wait
      return (
        f"--workdir: got {self._workdir!r}, where {run_record.FILE} cannot be"
        f" read and written ({atomic_files.reason(e)}); make room, or take"
        " another"
        " --workdir."
      )

  def _look(self) -> str:
    """Returns words if another run holds the folder, or `_WATCH`."""
    if not self._sign:
      held = self._is_held()
      if held is not None:
        return self._words(self._before) if held else ""
      self._sign = self._signs(), time.monotonic()
      if _dead.pop(self._workdir, None) == self._sign[0]:
        return ""
      self._note(
        f"waits       {WATCH_SECONDS:.0f} s to see whether the run of host"
        f" {self._before.get('host')} in {self._workdir} still lives"
      )
    signs, since = self._sign
    if (now := self._signs()) != signs:
      held = self._is_held()
      if held is not None or self._has_changed:
        return "" if held is False else self._words(self._before)
      # Its last beat, maybe, before it ends or is killed: one tells nothing.
      self._has_changed, self._sign = True, (now, time.monotonic())
      return _WATCH
    if time.monotonic() - since < WATCH_SECONDS:
      return _WATCH
    self._note(f"takes over  {self._workdir}: that run gave no sign of life")
    return ""

  def _is_held(self) -> bool | None:
    """Reads who holds the folder; returns whether it does, None: not known."""
    self._before = self._holder()[-1]
    return run_record.is_held(self._before) if self._before else False

  @property
  def _is_local(self) -> bool:
    return atomic_files.is_local(self._folder)

  def _holder(self) -> list[dict[str, Any]]:
    """Returns the record, and those that follow it, the last of which holds."""
    chain = [self._read()]
    while self._is_local and len(chain) < 1000:
      path = self._claim_path(_key(chain[-1]))
      found = atomic_files.read_json(path).values
      if not found or _key(found) in map(_key, chain):
        break
      chain.append(found)
    return chain

  def _read(self) -> dict[str, Any]:
    """Returns the record, {} where there is none, or a damaged one.

    Raises:
      OSError: It cannot be read now, so that nobody knows who holds the folder.
    """
    path = self._folder / run_record.FILE
    try:
      with path.open("rb") as file:
        file.read(1)
    except (FileNotFoundError, NotADirectoryError):
      return {}
    return atomic_files.read_json(path).values

  def _claim_path(self, key: str) -> epath.Path:
    return self._folder / f"process.after-{key}"

  def _signs(self) -> tuple:
    """Returns what changes while a run lives."""
    found = []
    for name in (run_record.FILE, run_record.BEAT):
      try:
        found.append((self._folder / name).read_bytes())
      except OSError:
        found.append(None)
    return tuple(found)

  def _words(self, record: dict[str, Any]) -> str:
    return (
      f"--workdir: got {self._workdir!r}, in which another run trains:"
      f" {_who(record)}. Let it finish, end it there, or take another"
      " --workdir."
    )


class Lock(_Look):
  """Holds a run's folder while it is the context; all processes make it.

  Making it refuses a folder that another run holds, before anything is
  written; entering it takes the folder. Both are collective: what process 0
  finds ends all of them.

  Args:
    workdir: Folder of the run.
    note: Prints a line.
    phases: Of this process; None: those of a new one.

  Attributes:
    tells: What each beat says of the run beside that it lives, a dict for JSON;
      at first that the process before stopped, and this one is starting.
    last_words: What the last beat of the process before said; {}: nothing.

  Raises:
    ConfigError: Another run holds the folder.
  """

  def __init__(
    self,
    workdir: str,
    note: Callable[[str], None] = exit_codes.say,
    phases: Phases | None = None,
  ):
    super().__init__(workdir, note)
    self._record = run_record.record(jax.process_count())
    self._is_first = jax.process_index() == 0
    self._lost: str | None = None
    self._stopped, self._count, self._last_beat = threading.Event(), 0, 0.0
    self._seen = -math.inf
    self._is_told = False
    self._refuse_if(self._look)
    path = self._folder / run_record.BEAT
    self.last_words = (
      atomic_files.read_json(path).values if self._is_first else {}
    )
    key = goodput.KEY
    until_now = goodput.Goodput(phases or Phases(), self.last_words.get(key))
    self.tells: Callable[[], dict[str, Any]] = lambda: {key: until_now.at()}

  def check(self) -> None:
    """Sees that the folder is still this run's, and beats; a short read.

    A bucket takes as long to answer as several steps, so there the thread that
    beats asks; here what it found counts, unless the process was suspended.

    Raises:
      LostError: It was deleted, or another run took it.
    """
    if not self._is_first or self._stopped.is_set():
      return
    now = time.monotonic()
    if not self._is_local and now - self._seen < SEEN_SECONDS:
      pass
    elif now - self._last_beat >= 1.0:
      self._beat()
    else:
      self._see()
    if self._lost:
      raise LostError(self._lost)

  def __enter__(self):
    run_record.held[self._record["id"]] = self._end
    try:
      self._refuse_if(self._take)
    except ConfigError:
      run_record.held.pop(self._record["id"], None)
      raise
    if self._is_first:
      self._beat()
      threading.Thread(target=self._beats, name="beat", daemon=True).start()
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, *_):
    how = run_record.FINISHED
    if isinstance(error, Stop):
      how = str(error)
    elif kind is not None:
      how = f"{kind.__name__}: {error}"[:500].removesuffix(": ")
    if run_record.held.pop(self._record["id"], None):
      self._end(how)

  def _end(self, how: str) -> None:
    """Writes the end of the record; see `lifetime.end`."""
    if not self._is_first:
      return
    self._stopped.set()
    self._beat()  # the last, with all that it tells
    if self._lost:
      return
    self._record |= {"ended": round(time.time(), 3), "how": how}
    with contextlib.suppress(OSError):  # a process that is not there tells, too
      self._write_record()

  def _refuse_if(self, find: Callable[[], str]) -> None:
    """Raises what process 0 finds, in all processes.

    Args:
      find: Returns a fault, "" for none, or `_WATCH` to be asked again.
    """
    while True:
      fault = self._found(find) if self._is_first else ""
      if (fault := agreement.text_of_first(fault)) != _WATCH:
        break
      time.sleep(1.0)
    if fault:
      raise ConfigError([fault])

  # What process 0 does.

  def _take(self) -> str:
    """Writes the record, or returns words if another run was faster."""
    self._folder.mkdir(parents=True, exist_ok=True)
    for _ in range(100):
      base, *_ = chain = self._holder()
      if _key(chain[-1]) != _key(self._before):
        now = chain[-1]
        if run_record.is_held(now) is not False:
          return self._words(now)
        return (
          f"--workdir: got {self._workdir!r}, which another run used while this"
          f" one began ({_who(now)}); start again."
        )
      claimed = self._claim(_key(chain[-1])) if self._is_local else None
      if claimed is None:
        self._write_record()
        time.sleep(SETTLE_SECONDS)
        now = self._read()
        if _key(now) != _key(self._record):
          return self._words(now)
        self._tidy()
        return ""
      if not claimed:
        continue
      if _key(self._read()) != _key(base):  # the link followed an old record
        self._claim_path(_key(chain[-1])).unlink(missing_ok=True)
        continue
      self._write_record()
      self._tidy()
      return ""
    return f"--workdir: got {self._workdir!r}, which several runs try to take."

  def _tidy(self) -> None:
    """Deletes what says who follows other records than this one."""
    for path in self._folder.glob("process.after-*"):
      if path != self._claim_path(_key(self._record)):
        path.unlink(missing_ok=True)

  @property
  def _draft(self) -> epath.Path:
    """A file of this process alone."""
    return self._folder / f"process.draft-{self._record['id']}"

  def _claim(self, key: str) -> bool | None:
    """Whether this process follows the record; None: files cannot tell."""
    draft = self._draft
    atomic_files.write(draft, json.dumps(self._record))
    try:
      os.link(draft, self._claim_path(key))
      return True
    except FileExistsError:
      return False
    except OSError:
      return None  # a file system without links
    finally:
      draft.unlink(missing_ok=True)

  def _write_record(self) -> None:
    draft = self._draft
    atomic_files.write(draft, json.dumps(self._record, indent=2) + "\n")
    draft.replace(self._folder / run_record.FILE)

  def _beats(self) -> None:
    while not self._stopped.wait(BEAT_SECONDS) and not self._lost:
      self._beat()

  def _beat(self) -> None:
    """Rewrites the beat in the folder that is still this run's."""
    self._see()
    if self._lost:
      return
    self._last_beat, self._count = time.monotonic(), self._count + 1
    now = {**self.tells(), "id": self._record["id"], "count": self._count}
    now["time"] = round(time.time(), 3)
    text = json.dumps(now).ljust(BEAT_BYTES - 1) + "\n"
    path = self._folder / run_record.BEAT
    try:
      if not self._is_local:
        atomic_files.write(path, text)
        return
      number = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
      with os.fdopen(number, "wb") as file:  # not cut first: a full disk
        file.write(text.encode())
        file.truncate()
    except OSError as e:
      if not self._is_told and self._folder.exists():
        self._is_told = True

        self._note(
          f"beat        {path} cannot be written ({atomic_files.reason(e)}): a"
          " run on"
          " another host could take this folder"
        )

  def _see(self) -> None:
    """Notes whether the folder was deleted or taken; an error is neither."""
    path = self._folder / run_record.FILE
    began = time.monotonic()
    try:
      found = json.loads(path.read_bytes())
      if found["id"] != self._record["id"]:
        self._lost = (
          f"{self._workdir}: another run took this folder ({_who(found)}), as"
          " this one gave no sign of life; this one stops, and leaves its files"
          " alone."
        )
    except (FileNotFoundError, NotADirectoryError):
      self._lost = (
        f"{self._workdir}: the folder of this run was deleted or moved, or its"
        f" {run_record.FILE} was; the run stops, and makes no other."
      )
    except Exception:  # also of a bucket that does not answer now
      pass
    self._seen = began


def look(workdir: str, note: Callable[[str], None] = exit_codes.say) -> None:
  """Refuses a folder that another run holds; each process for itself.

  Before the processes of a run join: those of the same command, started a
  second time, would join the run that is going on, which jax then aborts. A run
  writes its record after all its processes have joined, so that none of them
  finds that of its own start.

  Args:
    workdir: Folder of the run.
    note: Prints a line.

  Raises:
    ConfigError: Another run holds the folder.
  """
  found = _Look(workdir, note)
  while (fault := found._found(found._look)) == _WATCH:
    time.sleep(1.0)
  if fault:
    raise ConfigError([fault])
  if found._sign:
    _dead[workdir] = found._sign[0]


def _key(record: dict[str, Any]) -> str:
  """Returns the id of a record, "none" where there is none."""
  found = str(record.get("id"))
  if _ID.fullmatch(found):
    return found
  # By an earlier version: told apart by what it has.
  return f"{record['pid']}" if isinstance(record.get("pid"), int) else "none"


def _who(record: dict[str, Any]) -> str:
  began = record.get("began")
  try:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began))
  except (TypeError, ValueError, OverflowError, OSError):
    when = "an unknown time"
  count = record.get("processes") or 1
  of = f", the first of {count}" if count != 1 else ""
  return (
    f"host {record.get('host')}, process {record.get('pid')}{of}, begun {when}"
  )
