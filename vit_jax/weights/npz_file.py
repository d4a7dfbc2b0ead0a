"""Arrays of a `.npz`, read one by one, and never unpickled."""

import contextlib
import math
import os
import weakref
import zipfile
import zlib

import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.weights.weights_file import LazyArray

# What zipfile raises on damaged files: OverflowError where a place is far
# beyond the end; the last three where damage looks like an unknown compression,
# like encryption, or like a name in another alphabet.
DAMAGES = (
  *(zipfile.BadZipFile, EOFError, OSError, zlib.error, OverflowError),
  *(NotImplementedError, RuntimeError, ValueError),
)
_HEADERS = {
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
}


def open_npz(path: str | os.PathLike) -> dict[str, LazyArray]:
  """Returns the arrays by name; each is read on use.

  The file stays open as long as one of them is referenced. `path` may be
  anything that `epath` opens, such as gs://.

  Raises:
    ValueError: The file is damaged, or has other contents than arrays of
      numbers.
  """
  closing = contextlib.ExitStack()  # in a bucket `open` returns a context
  stream = closing.enter_context(epath.Path(path).open("rb"))
  try:
    file = np.load(stream, allow_pickle=False)
  except DAMAGES as e:
    closing.close()
    raise _damaged(path, e) from None
  weakref.finalize(file, closing.close)
  members = {info.filename: info for info in file.zip.infolist()}
  if any(name.endswith("data.pkl") for name in members):
    raise ValueError(
      f"got {str(path)!r}, which is a pickle of PyTorch, may run any code and"
      " is never loaded; save it as .safetensors with safetensors.torch."
    )
  arrays = {}
  for member, info in members.items():
    if member.endswith(".npy"):
      name = member.removesuffix(".npy")
      shape, dtype = _header(path, file, info)
      arrays[name] = LazyArray(
        shape, dtype, lambda n=name: _read(path, file, n)
      )
  return arrays


def _header(
  path, file: np.lib.npyio.NpzFile, info: zipfile.ZipInfo
) -> tuple[tuple[int, ...], np.dtype]:
  """Returns shape and type as the first bytes of the array state them.

  numpy takes memory for that shape before it reads, so its size must be that of
  the member.
  """
  name = info.filename.removesuffix(".npy")
  try:
    stream = file.zip.open(info)
  except DAMAGES as e:
    raise _damaged(path, e) from None
  with stream:
    try:
      shape, _, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
      start = stream.tell()
    except Exception as e:  # numpy evaluates the header as a Python literal
      raise ValueError(
        f"{path}: got an array {name!r} with a broken header"
        f" ({str(e)[:200] or type(e).__name__}); copy the file again."
      ) from None
  if dtype.hasobject:
    raise ValueError(
      f"{path}: got pickled objects in {name!r}, expected numbers; these"
      " are not loaded, since a pickle may run any code."
    )
  size = start + math.prod(shape) * dtype.itemsize
  if size != info.file_size:
    raise ValueError(
      f"{path}: got {info.file_size:,} bytes for {name!r}, expected"
      f" {size:,} for its shape {shape}; copy the file again."
    )
  # numpy has no bfloat16 and stores it as two nameless bytes.
  return tuple(shape), np.dtype(jnp.bfloat16) if dtype == "V2" else dtype


def _read(path, file: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
  try:
    array = file[name]
  except DAMAGES as e:
    raise _damaged(path, e) from None
  return array.view(jnp.bfloat16) if array.dtype == "V2" else array


def _damaged(path, error: Exception) -> ValueError:
  return ValueError(
    f"got {str(path)!r}, which cannot be read as a .npz ({str(error)[:200]});"
    " expected a whole file of arrays: copy it again, and compare its size."
  )
