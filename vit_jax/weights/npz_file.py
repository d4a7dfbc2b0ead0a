"""Arrays of a `.npz`, read one by one, and never unpickled."""

import contextlib
import io
import math
import os
import threading
import weakref
import zipfile
import zlib

import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.weights import limits
from vit_jax.weights.lazy import LazyArray

MAX_HEAD = 2**14  # bytes of an array's description, which numpy limits as well

_END, _LOCATOR = b"PK\x05\x06", b"PK\x06\x07"
_TAIL = 2**16 + 22 + 76  # bytes: a comment, and the records that end a zip

# What zipfile raises on damaged files: the third where a place is far beyond
# the end; the last ones where damage looks like an unknown compression, like
# encryption, or like a name in another alphabet.
DAMAGES = (
  *(zipfile.BadZipFile, EOFError, OSError, zlib.error, OverflowError),
  *(NotImplementedError, RuntimeError, ValueError),
)


def open_npz(path: str | os.PathLike) -> dict[str, LazyArray]:
  """Returns the arrays by name; each is read on use.

  The file stays open as long as one of them is referenced. `path` may be
  anything that `epath` opens, such as gs://.

  Raises:
    ValueError: The file is damaged, has other contents than arrays of numbers,
      or claims to be far larger than it is.
  """
  closing = contextlib.ExitStack()  # of a bucket `open` is a context
  stream = closing.enter_context(epath.Path(path).open("rb"))
  try:
    _check_count(stream, path)
    archive = zipfile.ZipFile(stream)
  except DAMAGES as e:
    closing.close()
    raise _damaged(path, e) from None
  weakref.finalize(archive, closing.close)
  if any(name.endswith("data.pkl") for name in archive.namelist()):
    raise ValueError(
      f"got {str(path)!r}, which is a pickle of PyTorch, may run any code and"
      " is never loaded; save it as .safetensors with safetensors.torch."
    )
  infos = [i for i in archive.infolist() if i.filename.endswith(".npy")]
  names = [info.filename.removesuffix(".npy") for info in infos]
  limits.check_names(names, path)
  stored = sum(i.compress_size for i in infos)
  limits.check_expansion(stored, sum(i.file_size for i in infos), path)
  lock = threading.Lock()  # one file handle for all
  arrays = {}
  for name, info in zip(names, infos, strict=True):
    shape, dtype = _header(path, name, archive, info)
    arrays[name] = LazyArray(
      shape, dtype, lambda i=info: _read(path, archive, i, lock)
    )
  return arrays


def _header(path, name, archive, info) -> tuple[tuple[int, ...], np.dtype]:
  """Returns shape and type as the first bytes of the array state them."""
  try:
    with archive.open(info) as stream:
      head = io.BytesIO(stream.read(MAX_HEAD))
  except DAMAGES as e:
    raise _damaged(path, e) from None
  try:
    version = np.lib.format.read_magic(head)
    read = {
      (1, 0): np.lib.format.read_array_header_1_0,
      (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    shape, _, dtype = read(head)
  except Exception as e:  # numpy evaluates it as literals, of any kind
    raise ValueError(
      f"{path}: got an array {name!r} with a broken head"
      f" ({str(e)[:200] or type(e).__name__}); copy the file again."
    ) from None
  if dtype.hasobject:
    raise ValueError(
      f"{path}: got pickled objects in {name!r}, expected numbers; these"
      " are not loaded, since a pickle may run any code."
    )
  limits.check_shape(shape, name, path)
  size = math.prod(shape) * dtype.itemsize
  start = head.tell()
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
  except DAMAGES as e:
    raise _damaged(path, e) from None
  return array.view(jnp.bfloat16) if array.dtype == "V2" else array


def _check_count(stream, path) -> None:
  """Raises if the table of contents is too long, before it is read.

  It ends the file: its end record states its number of bytes, at least 46 for
  each member. zipfile keeps a few hundred bytes for each.
  """
  stream.seek(0, os.SEEK_END)
  stream.seek(max(0, stream.tell() - _TAIL))
  tail = stream.read()
  is_last = tail[-22:-18] == _END and tail[-2:] == b"\0\0"
  at = len(tail) - 22 if is_last else tail.rfind(_END)
  num_bytes = int.from_bytes(tail[at + 12 : at + 16], "little")
  if tail[max(0, at - 20) : at].startswith(_LOCATOR):  # zip64 has its own
    num_bytes = int.from_bytes(tail[at - 36 : at - 28], "little")
  stream.seek(0)
  if at >= 0 and num_bytes > limits.MAX_NAMES_BYTES:
    raise ValueError(
      f"a table of contents of {num_bytes:,} bytes, expected at most"
      f" {limits.MAX_NAMES_BYTES:,}"
    )


def _damaged(path, error: Exception) -> ValueError:
  return ValueError(
    f"got {str(path)!r}, which cannot be read as a .npz ({str(error)[:200]});"
    " expected a whole file of arrays: copy it again, and compare its size."
  )
