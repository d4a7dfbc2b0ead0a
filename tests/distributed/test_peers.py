"""Lifelines of several processes, as threads on the loopback."""

import contextlib
import socket
import time

import pytest

from vit_jax.callbacks.phases import Phases
from vit_jax.callbacks.preemption import Notices, Stop
from vit_jax.distributed import hub as hub_lib
from vit_jax.distributed import peers
from vit_jax.distributed.hub import Hub, Member

COUNT = 3
DEEP = b"[" * 1020 + b"\n"  # more than Python's own limit


@pytest.fixture
def quick(monkeypatch):
  monkeypatch.setattr(hub_lib, "BEAT", 0.1)
  monkeypatch.setattr(peers, "BEAT", 0.1)
  monkeypatch.setattr(peers, "SILENT", 0.4)


class Peer:
  """A process with a lifeline; `lost` has who was told to have ended."""

  def __init__(self, index, port, token="secret", step=1):
    self.lost = []
    self.notices = Notices(Phases(), lambda reason: self.lost.append(reason))
    self.notices.phases.enter("step")
    self.notices.phases.beat(step)
    self.sock = socket.create_connection(("127.0.0.1", port), 5)
    self.lifeline = peers.Lifeline(
      self.sock,
      Member(index, f"host{index}", 100 + index),
      Member(0, "host0", 100),
      token,
      self.notices,
      self.lost.append,
      self.lost.append,
    )
    self.notices.join(self.lifeline.ask)


@pytest.fixture
def run(quick):
  hub = Hub(COUNT, "secret", "127.0.0.1")
  found = [Peer(i, hub.port) for i in range(COUNT)]
  yield hub, found
  for peer in found:
    with contextlib.suppress(OSError):
      peer.lifeline.cut()
  hub.close()


def _until(true, seconds=5.0):
  end = time.monotonic() + seconds
  while not true():
    assert time.monotonic() < end, "it did not come"
    time.sleep(0.01)


def _die(peer):
  """As the kernel does for a process that ends."""
  peer.sock.shutdown(socket.SHUT_RDWR)


def test_a_notice_in_one_stops_all_at_the_same_check(run):
  _, found = run
  for i, peer in enumerate(found):
    for _ in range(i):
      peer.notices.check()
  found[1].notices.notice("SIGTERM")
  _until(lambda: all(p.notices._stop_at for p in found))
  for peer in found:
    with pytest.raises(Stop, match="SIGTERM"):
      for _ in range(10):
        peer.notices.check()
    assert peer.notices.checks == 3  # one more than the furthest had done


def test_before_a_first_update_all_end_at_once(quick):
  hub = Hub(2, "secret", "127.0.0.1")
  found = [Peer(0, hub.port, step=1), Peer(1, hub.port, step=0)]
  found[0].notices.notice("SIGTERM")
  _until(lambda: all(p.lost == ["SIGTERM"] for p in found))
  hub.close()


def test_a_death_is_told_to_all_others_with_its_last_place(run):
  _, found = run
  found[2].notices.phases.beat(41)
  time.sleep(0.3)
  began = time.monotonic()
  _die(found[2])
  _until(lambda: found[0].lost and found[1].lost)
  assert time.monotonic() - began < 2.0
  for peer in found[:2]:
    (lost,) = peer.lost
    assert lost.code is None
    assert str(lost).startswith("process 2 (host host2, pid 102) ended without")
    assert str(lost).endswith("last seen in phase step, step 41")


def test_an_error_is_told_in_its_own_words_and_only_once(run):
  _, found = run
  found[1].lifeline.ends("ValueError: no such thing", 1)
  _die(found[1])
  _until(lambda: found[0].lost and found[2].lost)
  time.sleep(0.3)
  (lost,) = found[0].lost
  assert lost.code == 1 and "ended: ValueError: no such thing" in str(lost)
  assert found[1].lost == [] and len(found[2].lost) == 1


def test_the_death_of_process_0_is_noticed(run):
  hub, found = run
  hub.close()
  _until(lambda: found[1].lost and found[2].lost)
  assert str(found[1].lost[0]).startswith("process 0 (host host0, pid 100)")
  assert found[0].lost == []  # it does not mourn itself


def test_an_orderly_end_is_no_death_however_late_the_others_are(run):
  _, found = run
  found[1].lifeline.leave(0.05)
  found[2].lifeline.leave(0.05)
  _die(found[2])
  time.sleep(0.3)
  assert found[0].lost == found[1].lost == []
  found[0].lifeline.leave(5.0)
  assert found[0].lifeline._all_left.is_set()
  _until(found[1].lifeline._all_left.is_set)


def test_who_is_silent_is_told_by_the_table(run):
  _, found = run
  time.sleep(0.3)
  assert [m.index for m in found[0].lifeline.others()] == [1, 2]
  assert all(m.silent < 0.4 for m in found[1].lifeline.others())
  text = peers.behind(
    Member(0, "a", 1, "step", 9.0, 5, 5),
    [Member(1, "b", 2, "step", 9.0, 5, 5)],
  )
  assert text.startswith("no process is behind: process 0")


def test_a_stranger_learns_nothing_and_harms_nobody(run):
  hub, found = run
  with pytest.raises(ConnectionError, match="no answer"):
    Peer(1, hub.port, token="guessed")
  for words in (
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * 5000,
    b'["a"]\n',
    b"{}\n",
    DEEP,
  ):
    with socket.create_connection(("127.0.0.1", hub.port), 5) as sock:
      sock.sendall(words)
      sock.settimeout(0.3)
      with contextlib.suppress(OSError):
        assert sock.recv(100) == b""
  found[1].notices.notice("SIGTERM")
  _until(lambda: all(p.notices._stop_at for p in found))
  assert all(p.lost == [] for p in found)


class Mute(Peer):
  """A process that is stopped as soon as it is connected."""

  def __init__(self, index, port):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(peers.Lifeline, "_run", lambda self: None)
      super().__init__(index, port)


def test_a_process_without_a_sign_of_life_is_named(quick, monkeypatch):
  monkeypatch.setattr(hub_lib, "QUIET_SECONDS", 1.0)
  hub = Hub(COUNT, "secret", "127.0.0.1")
  found = [Peer(0, hub.port), Peer(1, hub.port), Mute(2, hub.port)]
  time.sleep(0.5)
  assert found[0].lost == []
  _until(lambda: found[0].lost and found[1].lost)
  first, last = found[1].lost[0].splitlines()
  assert first.startswith("hung        phase step, step 1: another process")
  assert last.startswith("process 2 (host host2, pid 102) is behind: no sign")
  assert len(found[0].lost) == 1
  hub.close()


def test_a_mute_process_0_is_named_by_the_others(quick, monkeypatch):
  monkeypatch.setattr(peers, "QUIET_SECONDS", 1.0)
  monkeypatch.setattr(Hub, "_beat", lambda self, now: None)
  hub = Hub(1, "secret", "127.0.0.1")
  peer = Peer(1, hub.port)
  _until(lambda: peer.lost)
  assert "process 0 (host host0, pid 100) is behind" in peer.lost[0]
  hub.close()
