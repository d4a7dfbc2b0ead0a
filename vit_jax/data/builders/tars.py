"""Reads the members of tars, and notices tars that are cut off.

Nothing is extracted to disk, and only members that are files are read, so that
names with "..", links and devices do no harm.
"""

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator

_BLOCK = 512
_CHUNK = 2**20  # bytes read at once, whatever size a header states

# What reading a broken tar raises; the last three for headers with malformed
# numbers, or endless chains of headers.
BROKEN = (
  *(tarfile.TarError, OSError, EOFError, zlib.error),
  *(ValueError, OverflowError, RecursionError),
)


def opened(stream: io.BufferedReader) -> tarfile.TarFile:
  """Opens a tar, or one compressed with gzip, as a context.

  Args:
    stream: The file, open for reading bytes, at its start.

  Raises:
    BROKEN: It is not a tar, or it has another compression.
  """
  has_gzip = stream.read(2) == b"\x1f\x8b"
  stream.seek(0)
  return tarfile.open(fileobj=stream, mode="r:gz" if has_gzip else "r:")


def is_gzip(tar: tarfile.TarFile) -> bool:
  """Whether seeking backwards would decompress from the start again."""
  return isinstance(tar.fileobj, gzip.GzipFile)


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
  """Yields all members, and clears the library's list of them."""
  while (member := tar.next()) is not None:
    tar.members.clear()
    yield member


def file_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
  """Yields the members that are files.

  Raises:
    BROKEN: The tar is broken. The block of zeros that ends every tar is
      required, because Python's library accepts a tar that is cut off in a
      header.
  """
  for member in members(tar):
    if member.isfile():
      yield member
  # Gzip checks its own end, and seeking backwards in it is slow.
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
