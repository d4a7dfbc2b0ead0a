"""What process 0 does for the lifelines of all processes of a run.

It hears where each process is, passes on who ended, and finds the point at
which all stop; see `vit_jax.distributed.peers` for the other side.
"""

import contextlib
import dataclasses
import hmac
import selectors
import socket
import threading
import time
from typing import Any

from vit_jax.callbacks.preemption import Place, agreed
from vit_jax.distributed.channel import Channel

BEAT = 1.0  # seconds between signs of life
# A process that gives no sign of life for so long hangs, or is stopped. jax
# would end the others after 100 s, without a word.
QUIET_SECONDS = 80.0
HELLO_SECONDS = 10.0  # for a stranger to say who it is
HELLO_BYTES = 1024


@dataclasses.dataclass
class Member:
  """A process of the run, as process 0 knows it.

  Attributes:
    index: `jax.process_index()`.
    host: Name of its machine.
    pid: Its number there.
    name: Its phase, see `phases.NAMES`.
    seconds: In that phase without progress.
    step: Updates that it gave to its devices.
    checks: See `preemption.Place`.
    silent: Seconds since its last sign of life.
  """

  index: int
  host: str
  pid: int
  name: str = "start"
  seconds: float = 0.0
  step: int = 0
  checks: int = 0
  silent: float = 0.0

  def __str__(self) -> str:
    return f"process {self.index} (host {self.host}, pid {self.pid})"


class _Line:
  """A connection; `member` is None until it says who it is."""

  def __init__(self, sock: socket.socket):
    self.channel, self.since = Channel(sock), time.monotonic()
    self.member: Member | None = None
    self.heard = self.since
    self.is_over = False  # it said that it ends


class Hub:
  """Serves the lifelines, in a thread of process 0.

  Args:
    count: Number of processes.
    token: Secret of the run; who does not know it is no process of the run.
    address: To listen at; "": every address of this machine.
  """

  def __init__(self, count: int, token: str, address: str = ""):
    self._count, self._token = count, token
    self._server = _listening(address)
    self._server.setblocking(False)
    self.port: int = self._server.getsockname()[1]
    self._selector = selectors.DefaultSelector()
    self._selector.register(self._server, selectors.EVENT_READ)
    self._lines: list[_Line] = []
    self._places: dict[int, Place] | None = None  # None: no notice has come
    self._left: set[int] = set()  # who said goodbye
    self._is_closed = False
    self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
    self._thread.start()

  def close(self) -> None:
    """Ends the thread and all connections."""
    self._is_closed = True
    self._thread.join(2 * BEAT)

  def _run(self) -> None:
    last = 0.0
    while not self._is_closed:
      for key, _ in self._selector.select(BEAT / 4):
        if key.data is None:
          self._accept()
        else:
          self._read(key.data)
      now = time.monotonic()
      if now - last >= BEAT:
        if now - last > QUIET_SECONDS / 2:  # this process itself was stopped
          for line in self._lines:
            line.heard = now
        last = now
        self._beat(now)
      for line in self._lines:
        line.channel.flush()
    for line in self._lines:
      line.channel.close()
    self._server.close()

  def _accept(self) -> None:
    with contextlib.suppress(OSError):
      sock, _ = self._server.accept()
      line = _Line(sock)
      self._lines.append(line)
      self._selector.register(sock, selectors.EVENT_READ, line)

  def _beat(self, now: float) -> None:
    """Gives a sign of life, and turns strangers away."""
    table = self._table()  # once: there may be a thousand processes
    first = next((row for row in table if row["index"] == 0), None)
    for line in list(self._lines):
      if line.member is None and now - line.since > HELLO_SECONDS:
        self._drop(line)
      elif line.member is not None and not line.channel.is_waiting:
        line.channel.put({"beat": first})
    for row in table:
      if row["silent"] > QUIET_SECONDS:
        self._tell({"silent": row})

  def _read(self, line: _Line) -> None:
    known = line.member is not None
    messages, is_open = line.channel.take(*() if known else (HELLO_BYTES,))
    try:
      for message in messages:
        line.heard = time.monotonic()
        if line.member is not None:
          self._hear(line, line.member, message)
        else:
          self._welcome(line, message)
    except (KeyError, TypeError, ValueError):  # not what a process of ours says
      is_open = False
    if not is_open:
      self._drop(line)
      if line.member is not None and not line.is_over:
        self._tell_lost(line)

  def _welcome(self, line: _Line, message: dict[str, Any]) -> None:
    """Takes in a process of the run; ValueError for a stranger."""
    token = str(message.get("token")).encode()
    if not hmac.compare_digest(token, self._token.encode()):
      raise ValueError("a stranger")
    line.member = Member(
      int(message["index"]), str(message["host"]), int(message["pid"])
    )
    line.channel.put({"welcome": self._count})

  def _drop(self, line: _Line) -> None:
    self._selector.unregister(line.channel.sock)
    line.channel.close()
    self._lines.remove(line)
    if {m.member.index for m in self._lines if m.member} == {0}:
      self._tell({"alone": True})

  def _hear(self, line: _Line, member: Member, message: dict[str, Any]) -> None:
    """Acts on what a process says."""
    for kind, value in message.items():
      if kind == "beat":
        member.name, member.seconds, member.step, member.checks = value
      elif kind == "notice" and self._places is None:
        self._places = {}
        self._tell({"hold": value, "by": str(member)})
      elif kind == "place" and self._places is not None:
        self._places[member.index] = Place(*value)
        self._agree()
      elif kind == "who":
        line.channel.put({"table": self._table()})
      elif kind == "ended":
        line.is_over = True
        self._tell_lost(line, str(value), int(message["code"]))
        line.channel.put({"told": True})
      elif kind == "bye":
        line.is_over = True
        self._agree()
        self._left.add(member.index)
        if len(self._left) == self._count:
          self._tell({"all": True})

  def _agree(self) -> None:
    """Tells where all stop, once every process has said where it is."""
    if not self._places:
      return
    missing = [
      m
      for m in self._lines
      if m.member and not m.is_over and m.member.index not in self._places
    ]
    if not missing:
      self._tell({"stop": agreed(self._places.values())})
      self._places = {}  # one notice is enough: a later one finds no place

  def _tell(self, message: dict[str, Any]) -> None:
    for line in self._lines:
      if line.member is not None:
        line.channel.put(message)

  def _tell_lost(
    self, line: _Line, how: str | None = None, code: int | None = None
  ) -> None:
    """Tells the others who ended, in its own words, if any, and its code."""
    row = {**dataclasses.asdict(line.member), "how": how, "code": code}
    row["silent"] = time.monotonic() - line.heard
    for other in self._lines:
      if other is not line and other.member is not None:
        other.channel.put({"lost": row})

  def _table(self) -> list[dict[str, Any]]:
    """Returns a row for each process that has not ended."""
    now = time.monotonic()
    return [
      {**dataclasses.asdict(m.member), "silent": now - m.heard}
      for m in self._lines
      if m.member is not None and not m.is_over
    ]


def _listening(address: str) -> socket.socket:
  """Returns a server on a free port, also by IPv6 where there is one."""
  if not address and socket.has_dualstack_ipv6():
    with contextlib.suppress(OSError):
      return socket.create_server(
        ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
      )
  return socket.create_server((address, 0))
