"""Lines of JSON between two processes, neither of which ever waits."""

import json
import socket
import threading
from typing import Any

LONGEST = 1 << 16  # bytes of a line
# Without an answer for so long the other machine is down, or cut off: not the
# other process, whose kernel answers even while it is stopped.
ANSWER_SECONDS = 30


class Channel:
  """One connection; any thread may put, one takes.

  Args:
    sock: Connected.
  """

  def __init__(self, sock: socket.socket):
    self.sock = sock
    self._lock = threading.Lock()
    self._in, self._out = bytearray(), bytearray()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
      ("TCP_NODELAY", 1),
      ("TCP_KEEPIDLE", ANSWER_SECONDS // 3),
      ("TCP_KEEPINTVL", ANSWER_SECONDS // 6),
      ("TCP_KEEPCNT", 4),
      ("TCP_USER_TIMEOUT", 1000 * ANSWER_SECONDS),
    ):
      if hasattr(socket, name):  # not all of them outside Linux
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

  @property
  def is_waiting(self) -> bool:
    """Whether the other side has not taken all that was put."""
    return bool(self._out)

  def put(self, message: dict[str, Any]) -> None:
    """Sends a message now, or as soon as `flush` can."""
    with self._lock:
      self._out += json.dumps(message).encode() + b"\n"
    self.flush()

  def flush(self) -> None:
    """Sends what waits, as far as it goes."""
    with self._lock:
      try:
        del self._out[: self.sock.send(self._out) if self._out else 0]
      except BlockingIOError:
        pass
      except OSError:  # closed; `take` tells
        self._out.clear()

  def take(self, longest: int = LONGEST) -> tuple[list[dict[str, Any]], bool]:
    """Returns the messages that have come, and whether more may come.

    Args:
      longest: Bytes of a line; a longer one ends the connection.
    """
    is_open = True
    try:
      while data := self.sock.recv(LONGEST):
        self._in += data
      is_open = False
    except BlockingIOError:
      pass
    except OSError:  # reset, or no answer for `ANSWER_SECONDS`
      is_open = False
    *lines, rest = bytes(self._in).split(b"\n")
    self._in = bytearray(rest)
    try:
      found = [json.loads(line) for line in lines if len(line) <= longest]
    except (ValueError, RecursionError):  # a stranger may send anything
      return [], False
    found = [m for m in found if isinstance(m, dict)]
    return found, is_open and len(rest) <= longest

  def close(self) -> None:
    """Closes the connection; the other side sees it at once."""
    self.sock.close()
