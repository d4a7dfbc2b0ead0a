"""Position embeddings that are not learned: sines of the grid."""

import numpy as np
from jaxtyping import Float


def sincos2d(grid_h: int, grid_w: int, width: int) -> Float[np.ndarray, "n d"]:
  """Returns a fixed embedding of a grid's positions: sines, cosines of x and y.

  Row y * grid_w + x is [sin(x f), cos(x f), sin(y f), cos(y f)], with the width
  / 4 frequencies f_k = 10000^(-k / (width / 4 - 1)).

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
