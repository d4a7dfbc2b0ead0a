"""Arrays in files that are read on use, one by one."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class LazyArray:
  """An array in a file, known by its shape; `np.asarray` reads it.

  Nothing is kept: every use reads it again, so a file of any size takes the
  memory of one array at a time.

  Attributes:
    shape: Shape of what `read` returns.
    dtype: Type of what `read` returns.
    read: Returns the array.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    array = np.asarray(self.read())
    assert array.shape == self.shape, (array.shape, self.shape)
    return array if dtype is None else array.astype(dtype, copy=False)

  def then(
    self,
    shape: tuple[int, ...],
    change: Callable[[np.ndarray], np.ndarray],
  ) -> "LazyArray":
    """Returns the lazy array of `change(array)`, which must have that shape."""
    return LazyArray(shape, self.dtype, lambda: change(np.asarray(self)))


def lazy(array: np.ndarray) -> LazyArray:
  """Wraps an array that is in memory already."""
  return LazyArray(np.shape(array), array.dtype, lambda: array)
