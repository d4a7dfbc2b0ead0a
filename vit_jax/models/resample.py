"""Resizes parameters learned on a grid: position tables, patch kernels.

All methods are linear and separable: a matrix [new, old] for the rows and one
for the columns, in float64.
"""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from vit_jax.options import nearest

NUM_CLASS_ROWS = 3  # of a table of biases, after the rows of offsets


def resample_posemb(
  table: Float[np.ndarray, "1 n d"],
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
  num_class_rows: int,
  method: str = "zoom",
) -> Float[np.ndarray, "1 m d"]:
  """Interpolates a learned table to another grid of patches.

  The methods of `METHODS`:

  - "zoom": bilinear between the corners, which do not move: row i of the new
    grid is at i (old - 1) / (new - 1) of the old one, and columns alike. This
    is the paper's code, scipy.ndimage.zoom with order=1.

  All others align the centres of patches: row i of the new grid is at (i + 1/2)
  old / new - 1/2 of the old one.

  - "bilinear": linear; if the grid shrinks, the filter is widened by old / new
    (antialiasing). Weights outside of the grid are dropped, the others divided
    by their sum. FlexiViT uses it, as jax.image.resize(method="bilinear").
  - "linear": as "bilinear" without antialiasing, and at the edges as "hf";
    transformers' BEiT.
  - "bicubic": as "bilinear" with Keys' cubic filter, a = -1/2;
    jax.image.resize(method="bicubic").
  - "timm": another name of "bicubic", the method of timm's
    resample_abs_pos_embed: torch uses a = -1/2 with antialiasing.
  - "hf": Keys' filter with a = -3/4, without antialiasing. A point outside of
    the grid counts for the nearest point of the edge. This is torch's bicubic
    without antialiasing, in the code of DeiT and MAE and in
    interpolate_pos_encoding of Hugging Face's ViT.
  - "dinov2": as "hf", but row i of the new grid is at (i + 1/2) old / (new +
    1/10) - 1/2 of the old one: Meta's code of DINO, and of DINOv2 without
    registers. Its models with registers have "bicubic".

  Args:
    table: One row per token, in raster order.
    old_grid: Rows and columns of patches of the table.
    new_grid: Rows and columns of the new table.
    num_class_rows: Leading rows of class tokens, which do not change.
    method: A name of `METHODS`.

  Returns:
    The new table, of the same type; the same table if the grids are equal.

  Raises:
    ValueError: The number of rows does not match the old grid, or the method is
      unknown.

  Source: arXiv:2010.11929, section 3.2, for "zoom"; R. Keys, Cubic convolution
    interpolation for digital image processing, IEEE TASSP 29(6), 1981, for the
    cubic filters.

  Example:
    >>> line = np.array([0.0, 2.0]).reshape(1, 2, 1)
    >>> resample_posemb(line, (1, 2), (1, 3), 0).ravel()
    array([0., 1., 2.])
  """
  if method not in METHODS:
    raise ValueError(
      f"position table: got method {method!r}, expected one of"
      f" {', '.join(METHODS)}.{nearest(method, METHODS)}"
    )
  expected = old_grid[0] * old_grid[1] + num_class_rows
  if table.shape[1] != expected:
    raise ValueError(
      f"position table: got {table.shape[1]} rows, expected {expected}:"
      f" {old_grid[0]} x {old_grid[1]} patches"
      f" {'and' if num_class_rows else 'without'} a class token. State the grid"
      " that the table was trained for."
    )
  if old_grid == new_grid:
    return table
  extra, patches = np.split(table[0], [num_class_rows])
  patches = np.einsum(
    "yh,xw,hwd->yxd",
    METHODS[method](old_grid[0], new_grid[0]),
    METHODS[method](old_grid[1], new_grid[1]),
    patches.reshape(*old_grid, -1).astype(np.float64),
    optimize=True,
  ).reshape(-1, table.shape[2])
  return np.concatenate([extra, patches.astype(table.dtype)])[None]


def num_bias_rows(grid: tuple[int, int]) -> int:
  """Returns the number of rows of a table of `relative_bias` for a grid."""
  return (2 * grid[0] - 1) * (2 * grid[1] - 1) + NUM_CLASS_ROWS


def resample_relative_bias(
  table: Float[np.ndarray, "r heads"],
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
  method: str,
) -> Float[np.ndarray, "s heads"]:
  """Interpolates the biases of offsets to another grid; see `relative_bias`.

  The offsets are a grid of (2 h - 1) x (2 w - 1) points, resampled as
  `resample_posemb` resamples patches. The exception is "timm": linear between
  points whose distances from the centre grow geometrically up to the new edge,
  as in timm's BEiT and unilm. The rows of the class token do not change.

  Args:
    table: One row per offset, then the rows of the class token.
    old_grid: Rows and columns of patches of the table.
    new_grid: Rows and columns of the new table.
    method: A name of `METHODS`.

  Returns:
    The new table, of the same type.

  Raises:
    ValueError: The number of rows does not match the old grid, or the method is
      unknown.

  Source: timm, layers/pos_embed_rel.py, resize_rel_pos_bias_table.
  """
  old, new = ([2 * n - 1 for n in grid] for grid in (old_grid, new_grid))
  offsets, last = np.split(table, [-NUM_CLASS_ROWS])
  if method == "timm":
    of_rows, of_columns = map(_geometric, old, new)
    offsets = offsets.reshape(*old, -1).astype(np.float64)
    offsets = np.einsum("yh,xw,hwn->yxn", of_rows, of_columns, offsets)
    offsets = offsets.reshape(-1, table.shape[1]).astype(table.dtype)
  else:
    offsets = resample_posemb(offsets[None], tuple(old), tuple(new), 0, method)
    offsets = offsets[0]
  return np.concatenate([offsets, last])


def _geometric(old: int, new: int) -> Float[np.ndarray, "new old"]:
  """Returns the interpolation matrix of an axis; never I, not for old = new."""
  low, high = 1.01, 1.5  # the ratio, found as timm does
  while high - low > 1e-6:
    ratio = (low + high) / 2
    if (1 - ratio ** (old // 2)) / (1 - ratio) > new // 2:
      high = ratio
    else:
      low = ratio
  half = np.cumsum(ratio ** np.arange(old // 2))
  points = np.concatenate([-half[::-1], [0], half])
  wanted = np.arange(new) - new // 2
  return np.stack([np.interp(wanted, points, e) for e in np.eye(old)], axis=1)


def resample_patch_kernel(
  kernel: Float[np.ndarray, "p_h p_w c d"], new: tuple[int, int]
) -> Float[np.ndarray, "q_h q_w c d"]:
  """Resizes the patch embedding to patches of another size (PI-resize).

  B resizes an old patch x linearly to the new size, without antialiasing. The
  new kernel is the w that minimises the mean of (<x, kernel> - <B x, w>)^2 over
  white noise x:

    w = (B^T)^+ kernel,  ^+ the pseudoinverse.

  If no side shrinks, the two inner products are equal for every x. The bias of
  the embedding does not change.

  Args:
    kernel: Kernel for patches of (p_h, p_w) pixels.
    new: (q_h, q_w), height and width of the new patch in pixels.

  Returns:
    The new kernel, of the same type; the same kernel if the sizes are equal.

  Source: arXiv:2212.08013, section 3.4. The authors' code (big_vision,
    models/proj/flexi/vit.py) resizes with tf.image.resize, which is bilinear
    and by default not antialiased.

  Example:
    >>> resample_patch_kernel(np.ones((4, 4, 1, 1)), (2, 2)).ravel().round(6)
    array([4., 4., 4., 4.])
  """
  if kernel.shape[:2] == tuple(new):
    return kernel
  # (A kron B)^+ = A^+ kron B^+: each side is inverted separately.
  to_rows, to_columns = (
    np.linalg.pinv(_weights(p, q, _triangle, antialias=False).T)
    for p, q in zip(kernel.shape[:2], new, strict=True)
  )
  resized = np.einsum(
    "yh,xw,hwcd->yxcd",
    to_rows,
    to_columns,
    kernel.astype(np.float64),
    optimize=True,
  )
  return resized.astype(kernel.dtype)


def _zoom(old: int, new: int) -> Float[np.ndarray, "new old"]:
  """Returns weights of old points in new ones; one new point is the first."""
  return _triangle(np.linspace(0, old - 1, new)[:, None] - np.arange(old))


def _weights(
  old: int,
  new: int,
  kernel: Callable[[np.ndarray], np.ndarray],
  antialias: bool,
  more: float = 0.0,
) -> Float[np.ndarray, "new old"]:
  """Returns weights of old points in new ones, with centres aligned.

  Args:
    old: Number of old points.
    new: Number of new points.
    kernel: Weight by distance, in old points; zero from 2 on.
    antialias: Whether the kernel is widened by old / new, if that is above 1,
      and weights outside are dropped. Otherwise a weight outside counts for the
      point at that edge.
    more: Added to `new` in the ratio old / new.
  """
  centres = (np.arange(new)[:, None] + 0.5) * old / (new + more) - 0.5
  if antialias:
    weights = kernel((centres - np.arange(old)) / max(1, old / new))
    return weights / weights.sum(axis=1, keepdims=True)
  points = np.arange(-2, old + 2)
  edges = np.clip(points, 0, old - 1)[:, None] == np.arange(old)
  return kernel(centres - points) @ edges


def _triangle(distance: np.ndarray) -> np.ndarray:
  return np.maximum(0, 1 - np.abs(distance))


def _keys(distance: np.ndarray, a: float) -> np.ndarray:
  """Keys' cubic filter; `a` is its slope at distance 1."""
  x = np.abs(distance)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = a * (((x - 5) * x + 8) * x - 4)
  return np.where(x < 1, near, np.where(x < 2, far, 0))


_bicubic = functools.partial(
  _weights, kernel=functools.partial(_keys, a=-0.5), antialias=True
)

_sharp = functools.partial(
  _weights, kernel=functools.partial(_keys, a=-0.75), antialias=False
)

# Name -> function of (old, new) that returns the weights [new, old].
METHODS: dict[str, Callable[[int, int], np.ndarray]] = {
  "zoom": _zoom,
  "bilinear": functools.partial(_weights, kernel=_triangle, antialias=True),
  "linear": functools.partial(_weights, kernel=_triangle, antialias=False),
  "bicubic": _bicubic,
  "timm": _bicubic,
  "hf": _sharp,
  "dinov2": functools.partial(_sharp, more=0.1),
}
