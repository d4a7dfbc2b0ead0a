"""Reads the members of tars, whole or cut off.

Nothing is ever extracted to disk, and only members that are files are read:
names with "..", links and devices lead nowhere.
"""

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator

_BLOCK = 512
_CHUNK = 2**20  # bytes read at once, whatever size a header states

# What reading a broken tar raises; the last three where a header has numbers
# that are none, or chains of headers without an end.
BROKEN = (
  *(tarfile.TarError, OSError, EOFError, zlib.error),
  *(ValueError, OverflowError, RecursionError),
)


def opened(stream: io.BufferedReader) -> tarfile.TarFile:
  """Opens a tar, or one compressed with gzip, as a context.

  Args:
    stream: The file, open for reading bytes, at its start.

  Raises:
    BROKEN: It is no tar.
  """
  has_gzip = stream.read(2) == b"\x1f\x8b"
  stream.seek(0)
  return tarfile.open(fileobj=stream, mode="r:gz" if has_gzip else "r:")


def is_gzip(tar: tarfile.TarFile) -> bool:
  """Whether going back to a member begins at the start of the file again."""
  return isinstance(tar.fileobj, gzip.GzipFile)


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
  """Yields all members; the library's list of them is cleared."""
  while (member := tar.next()) is not None:
    tar.members.clear()
    yield member


def files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
  """Yields the members that are files.

  Raises:
    BROKEN: The tar is broken. Python's library takes one that is cut off within
      a header for a whole one; here the block of zeros that ends every tar must
      be there.
  """
  for member in members(tar):
    if member.isfile():
      yield member
  # Gzip has an end of its own, and to go back in it is slow.
  if not is_gzip(tar):
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(_BLOCK) != bytes(_BLOCK):
      raise tarfile.ReadError("it is cut off: a tar's last block is missing")


def read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
  """Returns the contents of a member that is a file.

  Raises:
    BROKEN: The tar is broken.
  """
  stream = tar.extractfile(member)
  return b"".join(iter(lambda: stream.read(_CHUNK), b""))
