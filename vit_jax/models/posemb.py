"""Position embeddings: learned tables and fixed sines and cosines."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.families.vit import ViTConfig
from vit_jax.models.resample import METHODS


class LearnedOn(NamedTuple):
  """The grid of a learned table, for images of another size.

  grid: Rows and columns of patches of the table.
  method: How the forward pass resizes the table to the images' grid, a name of
    `resample.METHODS`.
  """

  grid: tuple[int, int]
  method: str


def learned_positions(
  options: ViTConfig, grid: tuple[int, int], table_of: LearnedOn | None = None
) -> Float[Array, "1 n d"] | None:
  """Returns the calling module's table of positions, a row for each token.

  Its parameters are under `posembed_input`. A class token without a position of
  its own (`cls_row` False) gets zeros.

  Args:
    options: The model's options.
    grid: Rows and columns of patches.
    table_of: The grid on which the table is learned; None: `grid`.

  Returns:
    The table; None if the model learns none.
  """
  if table_of is not None and table_of.grid != grid:
    table = learned_positions(options, table_of.grid)
    return table if table is None else _resized(options, table, table_of, grid)
  width = options.size.width
  if options.posemb == "learn":
    num_rows = grid[0] * grid[1] + options.num_class_rows
    table = PositionEmbedding(num_rows, width, name="posembed_input")()
  elif options.posemb == "learn2d":
    table = PositionEmbedding2D(grid, width, name="posembed_input")()
  else:
    return None
  num_zeros = options.num_class_tokens - options.num_class_rows
  return jnp.pad(table, ((0, 0), (num_zeros, 0), (0, 0)))


def _resized(
  options: ViTConfig,
  table: Float[Array, "1 n d"],
  table_of: LearnedOn,
  grid: tuple[int, int],
) -> Float[Array, "1 m d"]:
  """Returns a table resized to another grid, as `resample.resample_posemb`."""
  extra, patches = jnp.split(table[0], [options.num_class_tokens])
  matrix = METHODS[table_of.method]
  patches = jnp.einsum(
    "yh,xw,hwd->yxd",
    *(
      jnp.asarray(matrix(old, new), table.dtype)
      for old, new in zip(table_of.grid, grid, strict=True)
    ),
    patches.reshape(*table_of.grid, -1),
    precision="highest",
  ).reshape(-1, table.shape[2])
  return jnp.concatenate([extra, patches])[None]


class PositionEmbedding(nn.Module):
  """A learned table, one row per token.

  Attributes:
    num_rows: Number of rows: one for each patch, and for each class token that
      has a position.
    width: Width of a token.
  """

  num_rows: int
  width: int

  @nn.compact
  def __call__(self) -> Float[Array, "1 n d"]:
    init = nn.initializers.normal(0.02)
    shape = (1, self.num_rows, self.width)
    return jnp.asarray(self.param("pos_embedding", init, shape))


class PositionEmbedding2D(nn.Module):
  """Learned tables of half the width, for columns (x) and rows (y).

  A patch gets the concatenation of the entries of its column and its row.

  Attributes:
    grid: Rows and columns of patches.
    width: Width of a token; even.

  Source: arXiv:2010.11929, appendix D.4.
  """

  grid: tuple[int, int]
  width: int

  @nn.compact
  def __call__(self) -> Float[Array, "1 n d"]:
    (rows, columns), half = self.grid, self.width // 2
    init = nn.initializers.normal(0.02)
    of_x = self.param("pos_embedding_x", init, (1, columns, half))
    of_y = self.param("pos_embedding_y", init, (1, rows, half))
    return jnp.concatenate(
      [
        jnp.broadcast_to(of_x, (rows, columns, half)),
        jnp.broadcast_to(of_y.swapaxes(0, 1), (rows, columns, half)),
      ],
      axis=-1,
    ).reshape(1, rows * columns, self.width)


def sincos2d(grid_h: int, grid_w: int, width: int) -> Float[np.ndarray, "n d"]:
  """Returns a fixed embedding of a grid: sines and cosines of x and y.

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
