"""A learned bias of attention scores for every offset of two patches (BEiT).

The query at row i, column j and the key at row k, column l of an h x w grid add
to their score, for each head, the entry in row

  (i - k + h - 1) (2 w - 1) + j - l + w - 1

of a table. The last three rows of the table are for the class token as query,
as key, and as both. The model has no other positions.

Source: arXiv:2106.08254, section 2.5; unilm, beit/modeling_finetune.py.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax.models.resample import num_bias_rows


def rows(grid: tuple[int, int]) -> Int[np.ndarray, "n n"]:
  """Returns the row of the table for each query and key; token 0 is the class.

  Example:
    >>> rows((1, 2)).tolist()
    [[5, 3, 3], [4, 1, 0], [4, 2, 1]]
  """
  height, width = grid
  y, x = np.mgrid[:height, :width].reshape(2, -1)
  of_patches = (y[:, None] - y + height - 1) * (2 * width - 1)
  of_patches += x[:, None] - x + width - 1
  last = num_bias_rows(grid)
  table = np.pad(of_patches, ((1, 0), (1, 0)), constant_values=last - 3)
  table[1:, 0], table[0, 0] = last - 2, last - 1
  return table.astype(np.int32)


def bias(
  table: Float[Array, "r heads"], rows: Int[Array, "*b n n"]
) -> Float[Array, "*b heads n n"]:
  """Returns the bias of the score of each query and key."""
  return jnp.moveaxis(table[rows], -1, -3)
