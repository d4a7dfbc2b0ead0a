"""The bytes of a file, or why there are none: its own fault or its store's."""

import errno
import os
import time

# The store has no answer now: a file server, or what stands for one (FUSE).
AWAY = {
  errno.ECONNABORTED,
  errno.ECONNREFUSED,
  errno.ECONNRESET,
  errno.EHOSTDOWN,
  errno.EHOSTUNREACH,
  errno.ENETDOWN,
  errno.ENETUNREACH,
  errno.ENOTCONN,
  errno.ESTALE,
  errno.ETIMEDOUT,
}
# Begins the fault of a file whose store does not answer.
UNAVAILABLE = b"UNAVAILABLE"
# Between tries after EIO, which a bad disk gives as well as a busy store.
WAITS_SECONDS = (1.0, 2.0, 4.0)


def read(path: bytes) -> tuple[bytes, bytes]:
  """Returns the bytes of a file, and why there are none or b"".

  The fault begins with `UNAVAILABLE` if the store does not answer now.
  """
  for wait in (*WAITS_SECONDS, None):
    try:
      with open(path, "rb") as file:
        return file.read(), b""
    except OSError as e:
      error = e
    if error.errno != errno.EIO or wait is None:
      break
    time.sleep(wait)
  why = error.strerror or str(error)
  if error.errno in AWAY:
    return b"", UNAVAILABLE + f": {printable(path)}: {why}".encode()
  if os.path.islink(path) and not os.path.exists(path):
    target = printable(os.readlink(path))
    return b"", f"is a link to {target}, which is not there.".encode()
  return b"", f"cannot be read: {why}.".encode()


def path_bytes(path: str) -> bytes:
  """Returns the bytes of a path, whatever they are."""
  return path.encode("utf-8", "surrogateescape")


def printable(path: str | bytes) -> str:
  """Returns a path on one line, bytes that are no text as escapes.

  Example:
    >>> printable("a\\nb" + chr(0xdce9))
    'a\\\\nb\\\\xe9'
  """
  data = path if isinstance(path, bytes) else path_bytes(path)
  text = data.decode("utf-8", "backslashreplace")
  return "".join(
    c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
  )
