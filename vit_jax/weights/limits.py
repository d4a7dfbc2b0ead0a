"""How much a file of weights may state, checked before memory is taken for it.

So loading takes at most about twice the file, and half a GiB.
"""

import math
from collections.abc import Iterable, Sequence

from vit_jax.options import shown

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


def num_bytes(shapes: Iterable[tuple[Sequence[int], int]]) -> int:
  """Returns the bytes of arrays of (shape, bytes of an element)."""
  return sum(math.prod(shape) * size for shape, size in shapes)
