"""Arrays of a `.npz`, read one by one, and never unpickled."""

import contextlib
import math
import os
import weakref
import zipfile
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.weights.weights_file import LazyArray


def open_npz(path: str | os.PathLike) -> dict[str, LazyArray]:
  """Returns lazy arrays by name.

  The file stays open while one of them is referenced.

  Args:
    path: A file on disk, or wherever `epath` reads (gs://).

  Raises:
    ValueError: The file is damaged, or contains anything but arrays of numbers.
  """
  closing = contextlib.ExitStack()  # in a bucket `open` returns a context
  stream = closing.enter_context(epath.Path(path).open("rb"))
  try:
    with _one_error(path):
      file = np.load(stream, allow_pickle=False)
  except ValueError:
    closing.close()
    raise
  weakref.finalize(file, closing.close)
  members = file.zip.infolist()
  arrays = {}
  for member in members:
    if member.filename.endswith(".npy"):
      name = member.filename.removesuffix(".npy")
      with _one_error(path, name):
        shape, dtype = _read_header(file.zip, member)
      arrays[name] = LazyArray(
        shape, dtype, lambda n=name: _read(path, file, n)
      )
  return arrays


def _read_header(
  archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> tuple[tuple[int, ...], np.dtype]:
  """Returns the shape and type of an array.

  Raises:
    ValueError: It is not an array of numbers, or its size does not match its
      shape. (numpy would allocate memory for the shape before it reads.)
  """
  with archive.open(member) as stream:
    version = np.lib.format.read_magic(stream)
    read_header = {
      (1, 0): np.lib.format.read_array_header_1_0,
      (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    shape, _, dtype = read_header(stream)
    start = stream.tell()
  if dtype.hasobject:
    raise ValueError("pickled objects, expected numbers")
  size = start + math.prod(shape) * dtype.itemsize
  if size != member.file_size:
    raise ValueError(f"{member.file_size:,} bytes, expected {size:,}")
  # numpy has no bfloat16 and stores it as two nameless bytes.
  return tuple(shape), np.dtype(jnp.bfloat16) if dtype == "V2" else dtype


def _read(
  path: str | os.PathLike, file: np.lib.npyio.NpzFile, name: str
) -> np.ndarray:
  with _one_error(path, name):
    array = file[name]
  return array.view(jnp.bfloat16) if array.dtype == "V2" else array


@contextlib.contextmanager
def _one_error(path: str | os.PathLike, name: str = "") -> Iterator[None]:
  """Turns all errors of zipfile and numpy for a damaged file into ValueError.

  They raise a dozen types: damage can look like an unknown compression, like
  encryption, like a header that is not a Python literal, ...
  """
  try:
    yield
  except Exception as e:
    of_array = f"in its array {name!r}: " if name else ""
    reason = str(e)[:200] or type(e).__name__
    raise ValueError(
      f"got {str(path)!r}, expected a whole .npz or .pth ({of_array}{reason})."
    ) from None
