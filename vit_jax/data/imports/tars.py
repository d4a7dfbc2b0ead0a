"""Reads tars that may be cut off, damaged, or made to do harm.

Nothing is ever extracted to disk, and only members that are files are read:
names with "..", links and devices lead nowhere. No more is read at once than
`MAX_BYTES`, whatever a header states.
"""

import contextlib
import gzip
import os
import tarfile
import zlib
from collections.abc import Iterator

MAX_BYTES = 64 * 2**20  # of a member
MAX_EXPANSION = 20  # of a tar.gz
_BLOCK = 512

# What reading a broken tar raises; the last ones where a header has numbers
# that are none, or chains of headers without an end.
BROKEN = (
  *(tarfile.TarError, OSError, EOFError, zlib.error),
  *(ValueError, OverflowError, RecursionError),
)


class _Limited:
  """A stream that refuses to read more than `MAX_BYTES` at once.

  And more of a compressed one than images in a tar can expand to.
  """

  def __init__(self, stream, size: int):
    self._stream = stream
    self.is_gzip = isinstance(stream, gzip.GzipFile)
    self._end = MAX_EXPANSION * size + MAX_BYTES if self.is_gzip else 2**63
    self.tell, self.seekable = stream.tell, stream.seekable

  def read(self, size: int) -> bytes:
    if not 0 <= size <= MAX_BYTES:
      raise tarfile.ReadError(
        f"a header of {size:,} bytes, expected at most {MAX_BYTES:,}"
      )
    self._check(self._stream.tell() + size)
    return self._stream.read(size)

  def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
    self._check(position)
    return self._stream.seek(position, whence)

  def _check(self, position: int) -> None:
    if position > self._end:
      raise tarfile.ReadError(
        f"it expands to more than {self._end:,} bytes, as no images do"
      )


@contextlib.contextmanager
def opened(stream) -> Iterator[tarfile.TarFile]:
  """Opens a tar, or one compressed with gzip.

  Args:
    stream: The file, open for reading bytes, at its start.

  Raises:
    BROKEN: It is no tar.
  """
  is_gzip = stream.read(2) == b"\x1f\x8b"
  size = stream.seek(0, os.SEEK_END)
  stream.seek(0)
  inner = gzip.GzipFile(fileobj=stream) if is_gzip else stream
  with tarfile.open(fileobj=_Limited(inner, size), mode="r:") as tar:
    yield tar


def is_gzip(tar: tarfile.TarFile) -> bool:
  """Whether going back to a member begins at the start of the file again."""
  return tar.fileobj.is_gzip


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
  """Yields all members; the library's list of them is not kept."""
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
    TooLarge: It states more than `MAX_BYTES`.
    BROKEN: The tar is broken.
  """
  if member.size > MAX_BYTES:
    raise TooLarge(
      f"has a member of {member.size:,} bytes, expected at most {MAX_BYTES:,}"
    )
  return tar.extractfile(member).read()


class TooLarge(Exception):
  """A member is left out for its size; those after it can be read."""
