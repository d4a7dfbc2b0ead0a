"""The lifeline of a process: how it learns what became of the others.

A TCP connection to process 0, see `vit_jax.distributed.hub`. The kernel closes
it
when a process ends, however it does, so that the others know within a second;
collectives would wait, and jax's heartbeats take 100 s. A process that is
stopped, or waits for ever, keeps its connection; it is recognised by what it
last said of itself.
"""

import contextlib
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.callbacks.preemption import Notices
from vit_jax.distributed.channel import Channel
from vit_jax.distributed.hub import BEAT, QUIET_SECONDS, Hub, Member

DIAL_SECONDS = 5.0
ASK_SECONDS = 3.0
STAY_SECONDS = 4.0  # more than `supervision.OWN_WORDS_SECONDS`
SILENT = 4 * BEAT  # Then a process gives no sign of life.
OFFER_BYTES = 1024


class Lost(RuntimeError):
  """Another process of the run ended before its end.

  Attributes:
    code: Exit code, see `exits`, of one that said why it ends, for instance an
      error, which this process may meet, too; None: it said nothing.
  """

  def __init__(self, words: str, code: int | None):
    super().__init__(words)
    self.code = code


class Lifeline:
  """The connection of one process to process 0.

  Args:
    sock: Connected to the hub of process 0.
    member: This process.
    first: Process 0.
    token: Secret of the run.
    notices: Where this process is; told where all stop.
    on_lost: Called in the lifeline's thread, once, when another process has
      ended before its end.
    on_silent: The same when one gives no sign of life for a long time, with a
      text.

  Raises:
    ConnectionError: The other side is not the hub of this run.
  """

  def __init__(
    self,
    sock: socket.socket,
    member: Member,
    first: Member,
    token: str,
    notices: Notices,
    on_lost: Callable[[Lost], None],
    on_silent: Callable[[str], None],
  ):
    self._on_silent = on_silent
    self.member, self._first = member, first
    self._channel = Channel(sock)
    self._notices, self._on_lost = notices, on_lost
    self._table: list[dict[str, Any]] | None = None
    self._answered = threading.Event()
    self._all_left, self._was_told = threading.Event(), threading.Event()
    self._alone = threading.Event()
    self._is_deaf = False  # to the end of others
    self._heard = time.monotonic()
    hello = {"token": token, "index": member.index}
    self._channel.put({**hello, "host": member.host, "pid": member.pid})
    if not any("welcome" in m for m in self._wait(DIAL_SECONDS) or ()):
      self._channel.close()
      raise ConnectionError("no answer")
    threading.Thread(target=self._run, name="lifeline", daemon=True).start()

  def ask(self, reason: str) -> None:
    """Makes all processes agree on where they stop."""
    self._channel.put({"notice": reason})

  def leave(self, seconds: float | None = None, ends: bool = False) -> None:
    """Says that this process ends as it should; waits until all have.

    Args:
      seconds: Most seconds to wait; None: as long as the others live.
      ends: Whether the processes end now, without jax's own shutdown.
    """
    self._channel.put({"bye": True})
    self._all_left.wait(seconds)
    if ends:
      self._stay()

  def ends(self, how: str, code: int) -> None:
    """Tells the others that this process ends before its end.

    Args:
      how: In words.
      code: By which the others know whether to start again; see `exits`.
    """
    self._is_deaf = True
    self._channel.put({"ended": how[:1000], "code": code})
    self._was_told.wait(1.0)
    self._stay()

  def _stay(self) -> None:
    """Lets process 0 end last: jax aborts the others when it is gone."""
    if self.member.index == 0:
      self._alone.wait(STAY_SECONDS)

  def cut(self) -> None:
    """Gives the connection up; what becomes of the others is not told."""
    self._is_deaf = True
    self.leave(0.0)

  def others(self) -> list[Member]:
    """Returns where the other processes are, as far as process 0 knows.

    If it does not answer, it is itself the one that is silent.
    """
    self._answered.clear()
    self._channel.put({"who": self.member.index})
    if not self._answered.wait(ASK_SECONDS) or self._table is None:
      if self.member.index == 0:
        return []
      self._first.silent = time.monotonic() - self._heard
      return [self._first]
    rows = [Member(**row) for row in self._table]
    return [m for m in rows if m.index != self.member.index]

  def _run(self) -> None:
    last = 0.0
    while True:
      before = time.monotonic()
      messages = self._wait(BEAT / 4)
      if time.monotonic() - before > QUIET_SECONDS / 2:
        self._heard = time.monotonic()  # this process itself was stopped
      for message in messages or ():
        self._heard = time.monotonic()
        self._hear(message)
      if time.monotonic() - self._heard > QUIET_SECONDS:
        self._first.silent = time.monotonic() - self._heard
        self._hush(self._first)
      if messages is None:
        self._lose(self._first)
        return
      if time.monotonic() - last >= BEAT and not self._channel.is_waiting:
        last = time.monotonic()
        self._channel.put({"beat": self._place()})
      self._channel.flush()

  def _place(self) -> list[Any]:
    name, seconds, step = self._notices.phases.now()
    return [name, round(seconds, 3), step, self._notices.checks]

  def _wait(self, seconds: float) -> list[dict[str, Any]] | None:
    """Returns messages that come in a while; None: the connection is closed."""
    select.select([self._channel.sock], [], [], seconds)
    messages, is_open = self._channel.take()
    return messages if messages or is_open else None

  def _hear(self, message: dict[str, Any]) -> None:
    """Acts on what the hub says."""
    for kind, value in message.items():
      if kind == "beat" and value is not None:
        self._first = Member(**value)
      elif kind == "hold":
        self._channel.put({"place": self._notices.hold(value)})
      elif kind == "stop":
        self._notices.release(value)
      elif kind == "table":
        self._table = value
        self._answered.set()
      elif kind == "lost":
        how, code = value.pop("how"), value.pop("code")
        self._lose(Member(**value), how, code)
      elif kind == "silent":
        self._hush(Member(**value))
      elif kind == "told":
        self._was_told.set()
      elif kind == "alone":
        self._alone.set()
      elif kind == "all":
        self._all_left.set()

  def _lose(
    self, member: Member, how: str | None = None, code: int | None = None
  ) -> None:
    if self._is_deaf or self._all_left.is_set():
      return
    self._is_deaf = True
    if member.index != self.member.index:
      self._on_lost(Lost(_epitaph(member, how), code))

  def _hush(self, member: Member) -> None:
    if self._is_deaf or member.index == self.member.index:
      return
    self._is_deaf = True
    name, _, step = self._notices.phases.now()
    self._on_silent(
      f"hung        phase {name}, step {step:,}: another process gives no sign"
      f" of life for {member.silent:,.0f} s; jax gives up after 100 s\n"
      + behind(self.member, [member])
    )


def _epitaph(member: Member, how: str | None) -> str:
  """Returns who ended, how, and where it was."""
  where = f"phase {member.name}, step {member.step:,}"
  if how is None:
    how = "ended without a word: killed, crashed, or its machine is cut off"
  else:
    how = f"ended: {how}"
  return f"{member} {how}; it was last seen in {where}"


def behind(here: Member, others: Sequence[Member]) -> str:
  """Returns which process holds the others up, in words.

  Args:
    here: This process.
    others: The others, as `Lifeline.others` returns them.
  """
  where = lambda m: f"phase {m.name} for {m.seconds:,.0f} s, step {m.step:,}"
  silent = [m for m in others if m.silent > SILENT]
  if silent:
    return "\n".join(
      f"{m} is behind: no sign of life for {m.silent:,.0f} s (stopped, or its"
      f" machine is too busy, or cut off); last seen in phase {m.name}, step"
      f" {m.step:,}"
      for m in silent
    )
  place = lambda m: (m.step, m.checks)
  least = min([here, *others], key=place)
  if any(place(m) > place(least) for m in (here, *others)):
    late = [m for m in (here, *others) if place(m) == place(least)]
    return "\n".join(f"{m} is behind: {where(m)}" for m in late)
  return "no process is behind: " + "; ".join(
    f"{m} in {where(m)}" for m in (here, *others)
  )


def connect(
  notices: Notices,
  on_lost: Callable[[Lost], None],
  on_silent: Callable[[str], None],
  coordinator: str | None = None,
) -> tuple[Lifeline | None, str]:
  """Connects all processes of a run to process 0; all must call it.

  Args:
    notices: Those of this process.
    on_lost: See `Lifeline`.
    on_silent: See `Lifeline`.
    coordinator: host:port at which jax's processes met, where it is known.

  Returns:
    The lifeline, or None where not every process could connect, or there is but
    one; and in this case a line that says so, or "".
  """
  import jax
  import numpy as np
  from jax.experimental import multihost_utils

  index, count = jax.process_index(), jax.process_count()
  if count == 1:
    return None, ""
  host = (coordinator or "").rpartition(":")[0].strip("[]")
  member = Member(index, socket.gethostname(), os.getpid())
  hub, offer = None, {}
  if index == 0:
    token = secrets.token_hex(16)
    hub = Hub(count, token, host if _is_loopback(host) else "")
    offer = {"port": hub.port, "token": token, "pid": member.pid}
    offer |= {"host": member.host, "at": _addresses(host)}
  text = json.dumps(offer).encode().ljust(OFFER_BYTES)
  text = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
  offer = json.loads(np.asarray(text).tobytes())
  first = Member(0, offer["host"], offer["pid"])
  lifeline = None
  for address in dict.fromkeys([*filter(None, [host]), *offer["at"]]):
    with contextlib.suppress(OSError):
      sock = socket.create_connection((address, offer["port"]), DIAL_SECONDS)
      lifeline = Lifeline(
        sock, member, first, offer["token"], notices, on_lost, on_silent
      )
      break
  joined = multihost_utils.process_allgather(np.array(lifeline is not None))
  if joined.all():
    return lifeline, ""
  if lifeline is not None:
    lifeline.cut()
  if hub is not None:
    hub.close()
  without = ", ".join(map(str, np.flatnonzero(~joined)))
  return None, (
    f"lifeline    none: process {without} cannot reach process 0"
    f" ({first.host}, port {offer['port']}). One that dies is noticed by jax"
    " alone, after up to 100 s; a signal ends a process without a checkpoint"
  )


def _is_loopback(host: str) -> bool:
  return host in ("localhost", "::1") or host.startswith("127.")


def _addresses(host: str) -> list[str]:
  """Returns addresses at which others may reach this machine."""
  if _is_loopback(host):
    return [host]
  found = [socket.gethostname()]
  for family, far in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2000::")):
    with contextlib.suppress(OSError):
      with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))  # sends nothing; chooses the way out
        found.append(probe.getsockname()[0])
  return found
