"""Arrays of a `.npz`, read one by one, and never unpickled."""

import os
import threading
import tokenize
import weakref
import zipfile
import zlib

import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.weights.lazy import LazyArray

# A float32 parameter of random sign does not compress; zeros do, and heads are
# published as zeros. A larger ratio cannot be that of a model.
MAX_EXPANSION = 50
ALWAYS_ALLOWED = 2**30  # bytes

# What zipfile raises on damaged files; the last two where damage looks like an
# unknown compression, or like encryption.
DAMAGES = (zipfile.BadZipFile, EOFError, OSError, zlib.error, RuntimeError)


def open_npz(path: str | os.PathLike) -> dict[str, LazyArray]:
  """Returns the arrays by name; each is read on use.

  The file stays open as long as one of them is referenced. `path` may be
  anything that `epath` opens, such as gs://.

  Raises:
    ValueError: The file is damaged, has other contents than arrays of numbers,
      or claims to be far larger than it is.
  """
  stream = epath.Path(path).open("rb")
  try:
    archive = zipfile.ZipFile(stream)
    weakref.finalize(archive, stream.close)
    infos = [i for i in archive.infolist() if i.filename.endswith(".npy")]
    _check_expansion(path, infos)
    lock = threading.Lock()  # one file handle for all
    arrays = {}
    for info in infos:
      name = info.filename.removesuffix(".npy")
      shape, dtype = _header(path, name, archive, info)
      arrays[name] = LazyArray(
        shape, dtype, lambda i=info: _read(path, archive, i, lock)
      )
    return arrays
  except DAMAGES as e:
    stream.close()
    raise _damaged(path, e) from None


def _header(path, name, archive, info) -> tuple[tuple[int, ...], np.dtype]:
  """Returns shape and type as the first bytes of the array state them."""
  with archive.open(info) as stream:
    try:
      version = np.lib.format.read_magic(stream)
      read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
      }[version]
      shape, _, dtype = read(stream)
      start = stream.tell()
    except (ValueError, KeyError, tokenize.TokenError) as e:
      raise ValueError(
        f"{path}: got an array {name!r} with a broken head ({e}); copy the file"
        " again."
      ) from None
  if dtype.hasobject:
    raise ValueError(
      f"{path}: got pickled objects in {name!r}, expected numbers; these"
      " are not loaded, since a pickle may run any code."
    )
  size = int(np.prod(shape, dtype=object)) * dtype.itemsize
  if start + size != info.file_size:
    raise ValueError(
      f"{path}: got {info.file_size:,} bytes for {name!r}, expected"
      f" {start + size:,} for its shape {shape}; copy the file again."
    )
  # numpy has no bfloat16 and stores it as two nameless bytes.
  return tuple(shape), np.dtype(jnp.bfloat16) if dtype == "V2" else dtype


def _read(path, archive, info, lock) -> np.ndarray:
  try:
    with lock, archive.open(info) as stream:
      array = np.lib.format.read_array(stream, allow_pickle=False)
  except (*DAMAGES, ValueError) as e:
    raise _damaged(path, e) from None
  return array.view(jnp.bfloat16) if array.dtype == "V2" else array


def _check_expansion(path, infos: list[zipfile.ZipInfo]) -> None:
  stored = sum(i.compress_size for i in infos)
  stated = sum(i.file_size for i in infos)
  if stated > max(ALWAYS_ALLOWED, MAX_EXPANSION * stored):
    raise ValueError(
      f"{path}: got {stored:,} bytes that state to expand to {stated:,},"
      f" expected at most {MAX_EXPANSION} times as many: no weights compress"
      " like that. Take the file from its publisher."
    )


def _damaged(path, error: Exception) -> ValueError:
  return ValueError(
    f"got {str(path)!r}, which cannot be read as a .npz ({error}); expected a"
    " whole file of arrays: copy it again, and compare its size."
  )
