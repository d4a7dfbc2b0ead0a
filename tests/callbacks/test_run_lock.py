"""One run at a time in a folder: the second is refused, a dead one is not."""

import contextlib
import errno
import io
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

import disk
import pytest

from vit_jax.callbacks import run_lock, run_record
from vit_jax.callbacks.goodput import KEY, Goodput
from vit_jax.callbacks.phases import Phases
from vit_jax.config import ConfigError
from vit_jax.writers import atomic_files

HOLDS = (
  "import sys, time; from vit_jax.callbacks.run_lock import Lock\n"
  "with Lock(sys.argv[1]): print('held', flush=True); time.sleep(600)"
)


def _record(folder):
  return json.loads((folder / run_record.FILE).read_text())


def _write(folder, **changes):
  """Writes a record of another machine, whose run was not ended."""
  record = run_record.record(4) | {"host": "pod-7", "boot": "x", "pid": 4242}
  record |= {"began": 1e9, **changes}
  (folder / run_record.FILE).write_text(json.dumps(record))
  return record


@contextlib.contextmanager
def _beating(folder):
  """Another machine rewrites the beat."""
  stop = threading.Event()

  def beats():
    for count in range(1000):
      (folder / run_record.BEAT).write_text(f"{count}")
      if stop.wait(0.2):
        return

  thread = threading.Thread(target=beats)
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()


@pytest.fixture
def soon(monkeypatch):
  """Seconds become tenths."""
  for name in ("BEAT_SECONDS", "WATCH_SECONDS", "SETTLE_SECONDS"):
    monkeypatch.setattr(run_lock, name, getattr(run_lock, name) / 30)


def test_where_numbers_alone_tell_processes_apart(monkeypatch):
  monkeypatch.setattr(run_record, "_ticks", lambda pid: None)  # as on a Mac
  monkeypatch.setattr(run_record, "_boot", lambda: None)
  record = run_record.record()
  assert run_record.is_held(record) is False  # this process holds no folder
  assert run_record.is_held(record | {"pid": os.getppid()}) is None
  assert run_record.is_held(record | {"pid": 2**22 + 1}) is False


def test_a_record_that_cannot_be_read_now_is_no_leave(tmp_path):
  (tmp_path / run_record.FILE).symlink_to(run_record.FILE)  # to itself
  with pytest.raises(ConfigError, match="cannot be read and written"):
    run_lock.Lock(str(tmp_path))


def test_a_second_process_is_refused_and_a_killed_one_is_not(tmp_path):
  process = subprocess.Popen(
    [sys.executable, "-c", HOLDS, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "held\n"
  before = disk.contents(tmp_path)
  with pytest.raises(ConfigError) as e:
    run_lock.Lock(str(tmp_path))
  (fault,) = e.value.faults
  assert re.fullmatch(
    f"--workdir: got '{tmp_path}', in which another run trains: host .*,"
    rf" process {process.pid}, begun 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC. Let"
    " it finish, end it there, or take another --workdir.",
    fault,
  )
  assert disk.contents(tmp_path) == before
  process.send_signal(signal.SIGSTOP)  # it is there, though it does nothing
  with pytest.raises(ConfigError):
    run_lock.Lock(str(tmp_path))
  process.kill()
  process.wait()
  with run_lock.Lock(str(tmp_path)):
    assert _record(tmp_path)["pid"] == os.getpid()


def test_one_process_may_not_hold_it_twice(tmp_path):
  with (
    run_lock.Lock(str(tmp_path)),
    pytest.raises(ConfigError, match="another"),
  ):
    run_lock.Lock(str(tmp_path))
  with pytest.raises(ValueError), run_lock.Lock(str(tmp_path)):
    raise ValueError("what was wrong")
  assert _record(tmp_path)["how"] == "ValueError: what was wrong"
  record = _record(tmp_path) | {"ended": None}  # its end was not written
  (tmp_path / run_record.FILE).write_text(json.dumps(record))
  with run_lock.Lock(str(tmp_path)):
    pass
  names = {p.name for p in tmp_path.iterdir()}
  assert names == {run_record.FILE, run_record.BEAT}


@pytest.mark.parametrize(
  "where",
  [
    pytest.param({}, marks=pytest.mark.slow),
    {"boot": run_record._boot(), "pids": 7},
  ],
)
def test_elsewhere_a_beat_tells(tmp_path, soon, where):
  """On another machine, and in a container on this one."""
  _write(tmp_path, **where)
  said = []
  with _beating(tmp_path), pytest.raises(ConfigError) as e:
    run_lock.Lock(str(tmp_path), said.append)
  assert "host pod-7, process 4242, the first of 4, begun 2001-09-09" in str(
    e.value
  )
  began = time.monotonic()
  with run_lock.Lock(str(tmp_path), said.append):  # the beat stands still now
    assert time.monotonic() - began > run_lock.WATCH_SECONDS
    assert _record(tmp_path)["pid"] == os.getpid()
  assert "that run gave no sign of life" in said[-1]
  assert all("waits  " in x and "pod-7" in x for x in (said[0], said[-2]))


@pytest.mark.slow
def test_before_processes_join_each_looks_for_itself(
  tmp_path, soon, monkeypatch
):
  monkeypatch.setattr(
    run_lock.agreement, "text_of_first", None
  )  # no collective
  said = []
  run_lock.look(str(tmp_path / "new"), said.append)
  record = _write(tmp_path)
  end = lambda: _write(tmp_path, id=record["id"], ended=1.0)
  timer = threading.Timer(0.1, end)  # one that is ending while it is watched
  timer.start()
  run_lock.look(str(tmp_path), said.append)
  timer.join()
  run_lock.look(str(tmp_path), said.append)
  assert len(said) == 1 and "waits  " in said[0]
  _write(tmp_path)
  with (
    _beating(tmp_path),
    pytest.raises(ConfigError, match=r"another run trains: host pod-7"),
  ):
    run_lock.look(str(tmp_path), said.append)
  assert {p.name for p in tmp_path.iterdir()} == {
    run_record.FILE,
    run_record.BEAT,
  }


def test_a_run_found_dead_before_they_join_is_not_watched_again(tmp_path, soon):
  _write(tmp_path)
  said = []
  run_lock.look(str(tmp_path), said.append)
  with run_lock.Lock(str(tmp_path), said.append):
    assert _record(tmp_path)["pid"] == os.getpid()
  assert [x.split()[0] for x in said] == ["waits", "takes"]


@pytest.mark.slow
def test_a_last_beat_is_no_sign_of_life(tmp_path, soon):
  _write(tmp_path)
  timer = threading.Timer(0.1, (tmp_path / run_record.BEAT).write_text, ["1"])
  timer.start()
  said = []
  run_lock.look(str(tmp_path), said.append)
  assert timer.finished.is_set()
  assert [x.split()[0] for x in said] == ["waits", "takes"]


@pytest.mark.parametrize("text", [b"", b"\0" * 99, b'{"pid"', b"[1]", b"{}"])
def test_a_damaged_record_holds_nothing(tmp_path, text):
  (tmp_path / run_record.FILE).write_bytes(text)
  with run_lock.Lock(str(tmp_path)):
    assert _record(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize(
  "has_links", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_of_those_that_start_at_once_one_goes_on(
  tmp_path, soon, monkeypatch, has_links
):
  def no_link(*_):
    raise OSError(errno.EPERM, "no links")

  def slow_write(path, data):  # long from the claim to the record
    time.sleep(0.01)
    write(path, data)

  write = atomic_files.write
  monkeypatch.setattr(atomic_files, "write", slow_write)
  if not has_links:
    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 1.0)
  for run in range(20 if has_links else 3):
    folder = tmp_path / str(run)
    if run % 2:  # another died here, between its claim and its record
      folder.mkdir()
      dead = _write(folder, ended=1.0)
      claim = dead | {"id": "0" * 16, "ended": 2.0}
      (folder / f"process.after-{dead['id']}").write_text(json.dumps(claim))
    barrier, done, went_on = threading.Barrier(8), threading.Barrier(8), []

    def start(folder=folder, barrier=barrier, done=done, went_on=went_on):
      barrier.wait()
      try:
        with run_lock.Lock(str(folder)) as held:
          went_on.append(held)
          done.wait(60)
          held.check()
      except ConfigError:
        done.wait(60)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert len(went_on) == 1
    left = {p.name for p in folder.iterdir()}
    assert left == {run_record.FILE, run_record.BEAT}


def test_one_that_was_taken_for_dead_notices(tmp_path):
  with (
    pytest.raises(run_lock.LostError) as e,
    run_lock.Lock(str(tmp_path)) as held,
  ):
    held.check()
    other = _write(tmp_path)
    before = disk.contents(tmp_path)
    held.check()
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
    run_lock.Lock(str(folder)) as held,
  ):
    shutil.rmtree(folder)
    if is_made_again:
      folder.mkdir()
    time.sleep(3 * run_lock.BEAT_SECONDS)
    held.check()
  assert f"{folder}: the folder of this run was deleted or moved" in str(
    e.value
  )
  assert folder.exists() == is_made_again
  assert not is_made_again or not list(folder.iterdir())


def test_a_disk_that_is_full_is_told(tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(atomic_files, "write", disk.full)
    with pytest.raises(ConfigError, match="process.json cannot .* .No space"):
      run_lock.Lock(str(tmp_path)).__enter__()
  log = type("Log", (io.StringIO,), {"write": disk.full})()  # on the same disk
  with run_lock.Lock(str(tmp_path)) as held, monkeypatch.context() as patch:
    held.check()
    patch.setattr(sys, "stderr", log)
    patch.setattr(os, "open", disk.full)
    held._beat()
    assert held._is_told


def test_a_beat_is_always_as_long_and_says_what_it_is_told(tmp_path):
  path = tmp_path / run_record.BEAT
  with run_lock.Lock(str(tmp_path)) as held:
    assert held.last_words == {}
    assert path.stat().st_size == run_lock.BEAT_BYTES
    held.tells = lambda: {"step": 7}
  assert path.stat().st_size == run_lock.BEAT_BYTES
  assert run_lock.Lock(str(tmp_path)).last_words["step"] == 7


def test_time_counts_from_the_first_beat(tmp_path):
  """Killed before there is an account of its own, a run has lost none."""
  now = began = time.time()
  clock = lambda: now
  for _ in range(3):
    with run_lock.Lock(str(tmp_path), phases=Phases(clock=clock)):
      now += 5.0
  found = run_lock.Lock(str(tmp_path)).last_words[KEY]
  assert found["began"] == pytest.approx(began, abs=1.0)
  assert found["seconds"]["start"] == 15.0
  assert Goodput(Phases(), None, found).at()["began"] == found["began"]


def test_an_object_store_is_read_back(tmp_path, soon, monkeypatch):
  monkeypatch.setattr(atomic_files, "is_local", lambda path: False)
  with run_lock.Lock(str(tmp_path)) as held:
    held.check()
    assert pathlib.Path(tmp_path / run_record.BEAT).exists()
    with pytest.raises(ConfigError):
      run_lock.Lock(str(tmp_path))
