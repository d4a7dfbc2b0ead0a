"""Position embeddings: fixed sines, and how a learned table is resized."""

import numpy as np
from jaxtyping import Float


def resample_posemb(
  table: Float[np.ndarray, "1 n d"],
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
  has_cls_row: bool,
) -> Float[np.ndarray, "1 m d"]:
  """Interpolates a learned table to another grid of patches.

  Bilinear between the corners, which stay where they are: row i of the new
  grid lies at i (old - 1) / (new - 1) of the old one, and so for columns.
  Nothing is guessed from the number of rows.

  Args:
    table: One row a token, in raster order.
    old_grid: Rows and columns of patches that the table was made for.
    new_grid: Rows and columns wanted.
    has_cls_row: Whether row 0 belongs to the class token; it is kept as it is.

  Returns:
    The new table, of the same type; the same one if the grids are equal.

  Raises:
    ValueError: The table has not as many rows as the old grid.

  Source: arXiv:2010.11929, section 3.2; the rule is that of the paper's code,
  scipy.ndimage.zoom with order=1.

  Example:
    >>> line = np.array([0.0, 2.0]).reshape(1, 2, 1)
    >>> resample_posemb(line, (1, 2), (1, 3), has_cls_row=False).ravel()
    array([0., 1., 2.])
  """
  num_extra = int(has_cls_row)
  expected = old_grid[0] * old_grid[1] + num_extra
  if table.shape[1] != expected:
    raise ValueError(
      f"position table: got {table.shape[1]} rows, expected {expected}:"
      f" {old_grid[0]} x {old_grid[1]} patches"
      f" {'and' if has_cls_row else 'without'} a class token. State the grid"
      " that the table was trained for."
    )
  if old_grid == new_grid:
    return table
  extra, patches = table[0, :num_extra], table[0, num_extra:]
  patches = np.einsum(
    "yh,xw,hwd->yxd",
    _interpolation(old_grid[0], new_grid[0]),
    _interpolation(old_grid[1], new_grid[1]),
    patches.reshape(*old_grid, -1).astype(np.float64),
    optimize=True,
  ).reshape(-1, table.shape[2])
  return np.concatenate([extra, patches.astype(table.dtype)])[None]


def _interpolation(old: int, new: int) -> Float[np.ndarray, "new old"]:
  """Weights of the old points in the new ones; a single point is the first."""
  at = np.linspace(0, old - 1, new)
  return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old)))


def sincos2d(grid_h: int, grid_w: int, width: int) -> Float[np.ndarray, "n d"]:
  """Fixed embedding of a grid's positions: sines and cosines of x and of y.

  Row y * grid_w + x is [sin(x f), cos(x f), sin(y f), cos(y f)], with the
  width / 4 frequencies f_k = 10000^(-k / (width / 4 - 1)).

  Args:
    grid_h: Rows of patches.
    grid_w: Patches in a row.
    width: Width of a token; a multiple of 4, at least 8.

  Raises:
    ValueError: `width` is another number.

  Source: big_vision, models/vit.py; arXiv:2205.01580, section 3.

  Example:
    >>> sincos2d(2, 2, 8)[0]
    array([0., 0., 1., 1., 0., 0., 1., 1.], dtype=float32)
  """
  if width % 4 or width < 8:
    raise ValueError(
      f"sincos2d: got a width of {width}, expected a multiple of 4, at least 8."
      " Change config.model.width or config.model.posemb."
    )
  y, x = np.mgrid[:grid_h, :grid_w]
  frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
  x, y = (np.outer(v.ravel(), frequencies) for v in (x, y))
  table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
  return table.astype(np.float32)
