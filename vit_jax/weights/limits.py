"""How much a file of weights may state, checked before memory is taken for it.

So loading takes at most about twice the file, and 256 MiB.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.config import json_file
from vit_jax.options import shown
from vit_jax.weights.beside import beside, length

# The largest published model has 3,000 arrays with its optimizer's moments.
MAX_ARRAYS = 10_000
MAX_NAME = 500  # characters
MAX_NAMES_BYTES = 8 * 2**20  # of a file's table of contents
MAX_SIDE = 2**31 - 1
MAX_DIMENSIONS = 8
# Parameters hardly compress, but zeros do, and heads are published as zeros.
MAX_EXPANSION = 2
ALWAYS_ALLOWED = 2**27  # bytes


def check_names(names: Sequence[str], where) -> None:
  """Raises ValueError for too many arrays, a name twice, or one too long."""
  if len(names) > MAX_ARRAYS:
    raise ValueError(
      f"{where}: got {len(names):,} arrays, expected at most {MAX_ARRAYS:,}: no"
      " model has so many. Take the file from its publisher."
    )
  if long := [n for n in names if len(n) > MAX_NAME]:
    raise ValueError(
      f"{where}: got an array with a name of {len(long[0]):,} characters,"
      f" {shown(long[0])}, expected at most {MAX_NAME}. Take the file from its"
      " publisher."
    )
  seen: set[str] = set()
  for name in names:
    if name in seen:
      raise ValueError(
        f"{where}: got two arrays of the name {name!r}, expected one. Take the"
        " file from its publisher."
      )
    seen.add(name)


def check_shape(shape: Iterable[int], name: str, where) -> None:
  """Raises ValueError unless all sides are 0 to `MAX_SIDE`."""
  shape = tuple(shape)
  is_good = len(shape) <= MAX_DIMENSIONS and all(
    isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_SIDE
    for n in shape
  )
  if not is_good:
    raise ValueError(
      f"{where}: got the shape {shown(shape)} for {name!r}, expected at most"
      f" {MAX_DIMENSIONS} sides of 0 to {MAX_SIDE:,}. Copy the file again."
    )


def check_expansion(stored: int, stated: int, where) -> None:
  """Raises ValueError if a file would expand beyond the limit.

  Args:
    stored: Bytes on disk.
    stated: Bytes that the arrays take in memory.
    where: The file.
  """
  if stated > MAX_EXPANSION * stored + ALWAYS_ALLOWED:
    raise ValueError(
      f"{where}: got {stored:,} bytes that state to expand to {stated:,},"
      f" expected at most {MAX_EXPANSION} times as many and"
      f" {ALWAYS_ALLOWED // 2**20} MiB: weights hardly compress. If you trust"
      " it, save it again without compression (numpy.savez)."
    )


def checked_tree(
  folder: epath.Path, described: Callable[[epath.Path], Any]
) -> Any:
  """Returns the shapes and types of a tree that Orbax wrote.

  Args:
    folder: Of the tree.
    described: Reads them, with Orbax.

  Raises:
    ValueError: Its JSON is beyond the limits of `json_file`; a file in it is a
      link out of it; or its arrays would take far more than their files.
  """
  json_file.read(folder / "_METADATA")
  stored = sum(_sizes(folder))
  tree = described(folder)
  stated = largest = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(path)
    shape, dtype = getattr(leaf, "shape", ()), getattr(leaf, "dtype", None)
    check_shape(shape, name, folder)
    itemsize = np.dtype(dtype).itemsize if dtype else 8
    stated += math.prod(shape) * itemsize
    # A chunk is read as a whole, however large the array is.
    storage = getattr(leaf, "storage", None)
    chunk = math.prod(storage.chunk_shape or ()) if storage else 0
    largest = max(largest, chunk * itemsize)
  check_expansion(stored, stated + largest, folder)
  return tree


def _sizes(folder: epath.Path) -> Iterator[int]:
  """Yields the sizes of the files of a folder, and of its folders."""
  for path in folder.iterdir():
    beside(folder, path.name)  # no link out
    if path.is_dir():
      yield from _sizes(path)
    else:
      yield length(path)
