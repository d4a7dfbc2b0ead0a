"""Arrays that are read when they are looked at, one by one."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class LazyArray:
  """An array in a file, known by its shape; `np.asarray` reads it.

  Nothing is kept: every look reads again, so a file of any size takes the
  memory of one array at a time.

  Attributes:
    shape: Of what `read` returns.
    dtype: Of what `read` returns.
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
    """Returns what `change` makes of the array, of that shape, as lazily."""
    return LazyArray(shape, self.dtype, lambda: change(np.asarray(self)))


def lazy(array: np.ndarray) -> LazyArray:
  """Wraps an array that is in memory already."""
  return LazyArray(np.shape(array), array.dtype, lambda: array)
