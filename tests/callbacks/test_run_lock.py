"""One run at a time in a folder: the second is refused, a dead one is not."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import threading
import time

import disk
import pytest
import several
from clock import Clock

from vit_jax.callbacks import run_lock, run_record
from vit_jax.config import ConfigError
from vit_jax.writers import atomic_files

FILES = {run_record.FILE, run_record.HEARTBEAT}
# Another program that trains: it writes its record, and lives.
RUN = (
  "import json, pathlib, sys, time; from vit_jax.callbacks import run_record\n"
  "record = json.dumps(run_record.new())\n"
  "pathlib.Path(sys.argv[1], run_record.FILE).write_text(record)\n"
  "print('trains', flush=True); time.sleep(600)"
)


def _record(folder):
  return json.loads((folder / run_record.FILE).read_text())


def _write(folder, **changes):
  """Writes a record of another machine, whose run was not ended."""
  record = run_record.new(4) | {"host": "pod-7", "machine": "another"}
  record |= {"pid": 4242, "began": 1e9, **changes}
  (folder / run_record.FILE).write_text(json.dumps(record))
  return record


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(run_lock, "time", clock.module())
  return clock


@pytest.fixture
def fast(monkeypatch):
  """A heartbeat every 10 ms."""
  monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)


def test_where_numbers_alone_tell_processes_apart(monkeypatch):
  """As on a Mac, which has no /proc."""

  def missing(*_):
    raise FileNotFoundError

  monkeypatch.setattr(pathlib.Path, "read_text", missing)
  record = run_record.new()
  assert run_record.is_alive(record) is False  # this process has no folder
  assert run_record.is_alive(record | {"pid": os.getppid()}) is None
  assert run_record.is_alive(record | {"pid": 2**22 + 1}) is False


def test_a_second_process_is_refused_and_a_killed_one_is_not(tmp_path):
  with several.program(RUN, str(tmp_path)) as process:
    assert process.stdout.readline() == "trains\n"
    before = disk.contents(tmp_path)
    with pytest.raises(ConfigError, match=rf"process {process.pid}, begun"):
      run_lock.RunLock(str(tmp_path))
    assert disk.contents(tmp_path) == before
    process.send_signal(signal.SIGSTOP)  # it is there, though it does nothing
    with pytest.raises(ConfigError):
      run_lock.RunLock(str(tmp_path))
  with run_lock.RunLock(str(tmp_path)):
    assert _record(tmp_path)["pid"] == os.getpid()


def test_the_record_says_how_a_run_ended(tmp_path, clock):
  with run_lock.RunLock(str(tmp_path)), pytest.raises(ConfigError):
    run_lock.RunLock(str(tmp_path))  # not twice, in one process
  with pytest.raises(ValueError), run_lock.RunLock(str(tmp_path)):
    raise ValueError("what was wrong")
  assert _record(tmp_path)["how"] == "ValueError: what was wrong"
  # Its end was not written, or the record is damaged: nothing is locked.
  unended = json.dumps(_record(tmp_path) | {"ended": None})
  for text in (unended, "", '{"pid"', "[1]"):
    (tmp_path / run_record.FILE).write_text(text)
    with run_lock.RunLock(str(tmp_path)):
      assert _record(tmp_path)["pid"] == os.getpid()
  assert {p.name for p in tmp_path.iterdir()} == FILES


# Seconds of heartbeats; whether the run is alive, and when that is known.
WATCHED = [
  ((), False, 35),
  ((1,), False, 36),  # may have been its last
  ((1, 30), True, 30),
  ((30, 60), True, 60),
  ((30, 70), False, 65),
]


@pytest.mark.parametrize("beats, is_alive, end", WATCHED)
def test_elsewhere_a_run_lives_whose_heartbeat_changes_twice(
  tmp_path, clock, beats, is_alive, end
):
  """On another machine, or in a container on this one."""
  _write(tmp_path)
  beat = lambda: (tmp_path / run_record.HEARTBEAT).write_text(f"{clock.now}")
  clock.acts, notes = dict.fromkeys(beats, beat), []
  refused = pytest.raises(ConfigError, match="pod-7, process 4242, the first")
  with refused if is_alive else contextlib.nullcontext():
    run_lock.refuse_live(str(tmp_path), notes.append)
  assert clock.now == end
  if not is_alive:  # it is watched once: not again where the folder is taken
    with run_lock.RunLock(str(tmp_path)):
      assert _record(tmp_path)["pid"] == os.getpid()
    assert clock.now == end
  verbs = [note.split()[0] for note in notes]
  assert verbs == ["waits", "takes"][: 1 if is_alive else 2]
  assert {p.name for p in tmp_path.iterdir()} <= FILES


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_run_that_ends_while_it_is_watched_is_dead(
  tmp_path, clock, is_damaged
):
  record = _write(tmp_path)
  if is_damaged:
    (tmp_path / run_record.FILE).write_bytes(b"{")
  clock.acts[3] = lambda: _write(tmp_path, id=record["id"], ended=1.0)
  run_lock.refuse_live(str(tmp_path))
  run_lock.refuse_live(str(tmp_path))
  assert clock.now == 3


def test_of_two_that_start_at_once_the_last_that_writes_goes_on(
  tmp_path, monkeypatch
):
  """The second takes the folder after the first has read that it is free."""
  first, second = (run_lock.RunLock(str(tmp_path)) for _ in range(2))
  write = atomic_files.write

  def after_the_second(path, data):
    monkeypatch.setattr(atomic_files, "write", write)
    second.acquire()
    write(path, data)

  monkeypatch.setattr(atomic_files, "write", after_the_second)
  first.acquire()
  first.on_start(0, None, {})
  with pytest.raises(run_lock.LostError):
    second.on_start(0, None, {})
  second.close()
  first.check()
  first.close()
  assert {p.name for p in tmp_path.iterdir()} == FILES


@pytest.mark.parametrize("is_bucket", [False, True])
def test_a_run_settles_before_its_first_check(
  tmp_path, clock, monkeypatch, is_bucket
):
  monkeypatch.setattr(run_lock, "is_remote", lambda path: is_bucket)
  monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 60.0)
  with run_lock.RunLock(str(tmp_path)) as lock:
    lock.check()
    lock.check()
  assert clock.slept == [120.0 if is_bucket else 60.0, 0.0]


def test_one_that_was_taken_for_dead_notices(tmp_path):
  lost = pytest.raises(run_lock.LostError, match="pod-7, process 4242")
  with lost, run_lock.RunLock(str(tmp_path)) as lock:
    lock.check()
    other = _write(tmp_path)
    before = disk.contents(tmp_path)
    lock.check()
  assert disk.contents(tmp_path) == before and _record(tmp_path) == other


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_deleted_folder_is_noticed_and_not_made_again(
  tmp_path, fast, is_made_again
):
  folder = tmp_path / "run"
  lost = pytest.raises(run_lock.LostError, match=f"{folder}: .* deleted")
  with lost, run_lock.RunLock(str(folder)) as lock:
    (beats,) = (t for t in threading.enumerate() if t.name == "heartbeat")
    shutil.rmtree(folder)
    if is_made_again:
      folder.mkdir()
    beats.join(10.0)
    assert not beats.is_alive()
    lock.check()
  assert folder.exists() == is_made_again
  assert not is_made_again or not list(folder.iterdir())


def test_a_disk_that_is_full_is_reported_once(tmp_path, fast, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(atomic_files, "write", disk.full)
    with pytest.raises(ConfigError, match="process.json .*No space"):
      run_lock.RunLock(str(tmp_path)).acquire()
  assert not list(tmp_path.iterdir())
  notes, beats = [], threading.Semaphore(0)

  def full(*_):
    beats.release()
    disk.full()

  with run_lock.RunLock(str(tmp_path), notes.append) as lock:
    monkeypatch.setattr(atomic_files, "write", full)
    assert all(beats.acquire(timeout=10.0) for _ in range(3))
    lock.check()
  (note,) = notes
  assert "beat.json" in note and "No space" in note


def test_the_record_has_when_earlier_processes_lived(tmp_path):
  began = time.time() - 5.0
  with run_lock.RunLock(str(tmp_path), began=began):
    assert run_record.earlier(tmp_path) == []
  ended = _record(tmp_path)["ended"]
  (first,) = run_record.intervals(tmp_path)
  assert first == (pytest.approx(began, abs=1e-3), ended)
  # Killed: its last sign of life is its heartbeat.
  _write(tmp_path, id="7", earlier=[first])
  heartbeat = json.dumps({"id": "7", "time": 1e9 + 60})
  (tmp_path / run_record.HEARTBEAT).write_text(heartbeat)
  assert run_record.intervals(tmp_path) == [first, (1e9, 1e9 + 60)]
  (tmp_path / run_record.HEARTBEAT).write_text(heartbeat.replace("7", "8"))
  assert run_record.intervals(tmp_path) == [first, (1e9, 1e9)]
  _write(tmp_path, ended=2e9, earlier=[first, None, [1], ["a", 2]])
  with run_lock.RunLock(str(tmp_path)):
    assert run_record.earlier(tmp_path) == [first, (1e9, 2e9)]
