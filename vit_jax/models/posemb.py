"""Position embeddings: learned tables, and sines of the grid."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class PositionEmbedding(nn.Module):
  """A learned table, one row per token.

  Attributes:
    num_without: Number of leading tokens without a row.
  """

  num_without: int

  @nn.compact
  def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    _, num_tokens, width = x.shape
    table = self.param(
      "pos_embedding",
      nn.initializers.normal(0.02),
      (1, num_tokens - self.num_without, width),
    )
    return x + _in_front(self.num_without, table).astype(x.dtype)


class PositionEmbedding2D(nn.Module):
  """Learned tables of half the width, of columns (x) and of rows (y).

  A patch gets those of its column and of its row, concatenated.

  Attributes:
    grid: Rows and columns of patches.
    num_without: Number of leading tokens without a position.

  Source: arXiv:2010.11929, appendix D.4.
  """

  grid: tuple[int, int]
  num_without: int

  @nn.compact
  def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    rows, columns = self.grid
    half = x.shape[-1] // 2
    init = nn.initializers.normal(0.02)
    of_x = self.param("pos_embedding_x", init, (1, columns, half))
    of_y = self.param("pos_embedding_y", init, (1, rows, half))
    table = jnp.concatenate(
      [
        jnp.broadcast_to(of_x, (rows, columns, half)),
        jnp.broadcast_to(of_y.swapaxes(0, 1), (rows, columns, half)),
      ],
      axis=-1,
    ).reshape(1, rows * columns, 2 * half)
    return x + _in_front(self.num_without, table).astype(x.dtype)


def _in_front(num_rows: int, table):
  """Puts rows of zeros before a table."""
  return jnp.pad(table, ((0, 0), (num_rows, 0), (0, 0)))


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
