"""Reads tars that may be cut off."""

import gzip
import tarfile
from collections.abc import Iterator

# What reading a broken tar raises.
BROKEN = (tarfile.TarError, OSError, EOFError)
_BLOCK = 512


def files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
  """Yields the members that are files.

  Raises:
    tarfile.TarError, OSError, EOFError: The tar is broken. Python's library
      takes one that is cut off within a header for a whole one; here the block
      of zeros that ends every tar must be there.
  """
  for member in tar:
    if member.isfile():
      yield member
  # Gzip has an end of its own, and to go back in it is slow.
  if not isinstance(tar.fileobj, gzip.GzipFile):
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(_BLOCK) != bytes(_BLOCK):
      raise tarfile.ReadError("it is cut off: a tar's last block is missing")
