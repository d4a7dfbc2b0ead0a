"""One run at a time in a folder: the second is refused, a dead one is not."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import disk
import pytest

from vit_jax.callbacks import run_lock, run_record
from vit_jax.config import ConfigError
from vit_jax.writers import atomic_files

LOCK_AND_SLEEP = (
  "import sys, time; from vit_jax.callbacks.run_lock import RunLock\n"
  "with RunLock(sys.argv[1]): print('locked', flush=True); time.sleep(600)"
)


FILES = {run_record.FILE, run_record.HEARTBEAT}


def _record(folder):
  return json.loads((folder / run_record.FILE).read_text())


def _write(folder, **changes):
  """Writes a record of another machine, whose run was not ended."""
  record = run_record.new(4) | {
    "host": "pod-7",
    "machine": "another",
    "pid": 4242,
  }
  record |= {"began": 1e9, **changes}
  (folder / run_record.FILE).write_text(json.dumps(record))
  return record


@contextlib.contextmanager
def _heartbeats(folder):
  """Another machine rewrites the heartbeat."""
  stop = threading.Event()

  def write():
    for count in range(1000):
      (folder / run_record.HEARTBEAT).write_text(f"{count}")
      if stop.wait(0.2):
        return

  thread = threading.Thread(target=write)
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()


@pytest.fixture
def soon(monkeypatch):
  """The lock is thirty times as fast."""
  for name in ("HEARTBEAT", "WATCH", "POLL", "SETTLE"):
    name += "_SECONDS"
    monkeypatch.setattr(run_lock, name, getattr(run_lock, name) / 30)


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
  process = subprocess.Popen(
    [sys.executable, "-c", LOCK_AND_SLEEP, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "locked\n"
  before = disk.contents(tmp_path)
  with pytest.raises(ConfigError) as e:
    run_lock.RunLock(str(tmp_path))
  (error,) = e.value.errors
  assert re.fullmatch(
    f"--workdir: got '{tmp_path}', in which another run trains: host .*,"
    rf" process {process.pid}, begun 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC\.",
    error,
  )
  assert disk.contents(tmp_path) == before
  process.send_signal(signal.SIGSTOP)  # it is there, though it does nothing
  with pytest.raises(ConfigError):
    run_lock.RunLock(str(tmp_path))
  process.kill()
  process.wait()
  with run_lock.RunLock(str(tmp_path)):
    assert _record(tmp_path)["pid"] == os.getpid()


def test_one_process_may_not_lock_it_twice(tmp_path):
  with (
    run_lock.RunLock(str(tmp_path)),
    pytest.raises(ConfigError, match="another"),
  ):
    run_lock.RunLock(str(tmp_path))
  with pytest.raises(ValueError), run_lock.RunLock(str(tmp_path)):
    raise ValueError("what was wrong")
  assert _record(tmp_path)["how"] == "ValueError: what was wrong"
  record = _record(tmp_path) | {"ended": None}  # its end was not written
  (tmp_path / run_record.FILE).write_text(json.dumps(record))
  with run_lock.RunLock(str(tmp_path)):
    pass
  assert {p.name for p in tmp_path.iterdir()} == FILES


@pytest.mark.parametrize(
  "where",
  [
    pytest.param({}, marks=pytest.mark.slow),
    {"machine": f"{run_record.new()['machine']}7"},
  ],
)
def test_elsewhere_the_heartbeat_tells(tmp_path, soon, where):
  """On another machine, and in a container on this one."""
  _write(tmp_path, **where)
  notes = []
  with _heartbeats(tmp_path), pytest.raises(ConfigError) as e:
    run_lock.RunLock(str(tmp_path), notes.append)
  assert "host pod-7, process 4242, the first of 4, begun 2001-09-09" in str(
    e.value
  )
  began = time.monotonic()
  with run_lock.RunLock(
    str(tmp_path), notes.append
  ):  # the heartbeat has stopped
    assert time.monotonic() - began > run_lock.WATCH_SECONDS
    assert _record(tmp_path)["pid"] == os.getpid()
  assert "that run had no heartbeat" in notes[-1]
  assert all("waits  " in x and "pod-7" in x for x in (notes[0], notes[-2]))


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
  tmp_path, monkeypatch, beats, is_alive, end
):
  now = 0.0

  def sleep(seconds):
    nonlocal now
    now += seconds
    if now in beats:
      (tmp_path / run_record.HEARTBEAT).write_text(f"{now}")

  clock = types.SimpleNamespace(sleep=sleep, monotonic=lambda: now)
  monkeypatch.setattr(run_lock, "time", clock)
  _write(tmp_path)
  refused = pytest.raises(ConfigError, match="another run trains")
  with refused if is_alive else contextlib.nullcontext():
    run_lock.refuse_live(str(tmp_path), lambda line: None)
  assert now == end


@pytest.mark.slow
def test_before_processes_join_each_looks_for_itself(
  tmp_path, soon, monkeypatch
):
  monkeypatch.setattr(
    run_lock.agreement, "broadcast_text", None
  )  # no collective
  notes = []
  run_lock.refuse_live(str(tmp_path / "new"), notes.append)
  record = _write(tmp_path)
  end = lambda: _write(tmp_path, id=record["id"], ended=1.0)
  timer = threading.Timer(0.1, end)  # one that is ending while it is watched
  timer.start()
  run_lock.refuse_live(str(tmp_path), notes.append)
  timer.join()
  run_lock.refuse_live(str(tmp_path), notes.append)
  assert len(notes) == 1 and "waits  " in notes[0]
  _write(tmp_path)
  with (
    _heartbeats(tmp_path),
    pytest.raises(ConfigError, match=r"another run trains: host pod-7"),
  ):
    run_lock.refuse_live(str(tmp_path), notes.append)
  assert {p.name for p in tmp_path.iterdir()} == FILES


def test_a_run_that_was_dead_before_they_join_is_not_watched_again(
  tmp_path, soon
):
  _write(tmp_path)
  notes = []
  run_lock.refuse_live(str(tmp_path), notes.append)
  with run_lock.RunLock(str(tmp_path), notes.append):
    assert _record(tmp_path)["pid"] == os.getpid()
  assert [x.split()[0] for x in notes] == ["waits", "takes"]


@pytest.mark.parametrize("text", [b"", b'{"pid"', b"[1]"])
def test_a_damaged_record_locks_nothing(tmp_path, soon, text):
  (tmp_path / run_record.FILE).write_bytes(text)
  with run_lock.RunLock(str(tmp_path)):
    assert _record(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize(
  "is_local", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_of_those_that_start_at_once_one_goes_on(
  tmp_path, soon, monkeypatch, is_local
):
  def slow_write(path, data):  # long from reading the record to replacing it
    time.sleep(0.01)
    write(path, data)

  write = atomic_files.write
  monkeypatch.setattr(atomic_files, "write", slow_write)
  monkeypatch.setattr(run_lock, "is_remote", lambda path: not is_local)
  monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 0.5)
  for run in range(2):
    folder = tmp_path / str(run)
    if run % 2:  # a dead run was there
      folder.mkdir()
      _write(folder, ended=1.0)
    barrier, done, results = threading.Barrier(8), threading.Barrier(8), []

    def start(folder=folder, barrier=barrier, done=done, results=results):
      barrier.wait()
      try:
        with run_lock.RunLock(str(folder)) as lock:
          lock.on_start(0, None, {})
          results.append("owns it")
          done.wait(60)
          lock.check()
          results.append("still")
          return
      except (ConfigError, run_lock.LostError):
        done.wait(60)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert results == ["owns it", "still"]
    assert {p.name for p in folder.iterdir()} == FILES


@pytest.mark.parametrize("is_local", [True, False])
def test_a_run_settles_before_its_first_check(tmp_path, monkeypatch, is_local):
  monkeypatch.setattr(run_lock, "is_remote", lambda path: not is_local)
  monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 60.0)
  waited = []
  monkeypatch.setattr(time, "sleep", waited.append)
  with run_lock.RunLock(str(tmp_path)) as lock:
    lock.check()
  # Less the time since the record was written.
  most = 60.0 if is_local else 120.0
  assert most - 30.0 < waited[0] <= most


def test_one_that_was_taken_for_dead_notices(tmp_path):
  with (
    pytest.raises(run_lock.LostError) as e,
    run_lock.RunLock(str(tmp_path)) as lock,
  ):
    lock.check()
    other = _write(tmp_path)
    before = disk.contents(tmp_path)
    lock.check()
  assert "another run took this folder (host pod-7, process 4242" in str(
    e.value
  )
  assert disk.contents(tmp_path) == before and _record(tmp_path) == other


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_deleted_folder_is_noticed_and_not_made_again(
  tmp_path, soon, is_made_again
):
  folder = tmp_path / "run"
  with (
    pytest.raises(run_lock.LostError) as e,
    run_lock.RunLock(str(folder)) as lock,
  ):
    shutil.rmtree(folder)
    if is_made_again:
      folder.mkdir()
    time.sleep(3 * run_lock.HEARTBEAT_SECONDS)
    lock.check()
  assert f"{folder}: the folder of this run was deleted or moved" in str(
    e.value
  )
  assert folder.exists() == is_made_again
  assert not is_made_again or not list(folder.iterdir())


def test_a_disk_that_is_full_is_reported(tmp_path, soon, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(atomic_files, "write", disk.full)
    with pytest.raises(ConfigError, match="process.json cannot .* .No space"):
      run_lock.RunLock(str(tmp_path)).acquire()
  assert not list(tmp_path.iterdir())
  notes = []
  with run_lock.RunLock(str(tmp_path), notes.append) as lock:
    monkeypatch.setattr(atomic_files, "write", disk.full)
    time.sleep(3 * run_lock.HEARTBEAT_SECONDS)
    lock.check()
  (note,) = notes  # once
  assert "beat.json cannot be written (No space left on device)" in note


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
