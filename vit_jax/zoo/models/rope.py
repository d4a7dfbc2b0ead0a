"""Rotary positions of patches on a grid, as in DINOv3 and EVA-02.

The channels of a head form pairs. In queries and keys, each pair is rotated by
an angle: the patch's row or column times a frequency. So the product of a query
and a key depends on the offset between their patches. With n channels there are
n / 4 frequencies f_j; half of the angles belong to the row y, half to the
column x:

  dinov3  y = 2 (i + 1/2) / rows - 1,  x alike; f_j = 2 pi / 100^(4 j / n);
          pair j is channels j and j + n / 2, its angle the j-th of
          [y f_0, y f_1, ..., x f_0, x f_1, ...].
  eva02   y = 16 i / rows,  x alike; f_j = 10000^(-4 j / n);
          pair j is channels 2 j and 2 j + 1, with the same angles.

Source: dinov3, layers/rope_position_encoding.py; timm,
  layers/pos_embed_sincos.py, for EVA-02; arXiv:2104.09864, section 3.2.
"""

from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from vit_jax.families.vit import ViTConfig

EVA02_GRID = 16  # rows and columns of the pre-training's patches


class Rotation(NamedTuple):
  """Cosine and sine for every token and channel, float32.

  They are the same for all images (b = 1), or not. A token without a position
  has angles of 0.
  """

  cos: Float[Array, "#b n 1 d"]
  sin: Float[Array, "#b n 1 d"]


class Angles(NamedTuple):
  """Angles for every token and channel, float32, which a block rescales."""

  angles: Float[Array, "#b n 1 d"]

  def rescaled(self, factor: Float[Array, ""]) -> Rotation:
    """Returns the rotation for coordinates times a factor."""
    angles = self.angles * factor
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotation(
  options: ViTConfig, grid: tuple[int, int], num_tokens: int
) -> Rotation | None:
  """Returns the rotation of the tokens of an image; None without `rope`.

  Args:
    options: The model's options.
    grid: Rows and columns of patches.
    num_tokens: Number of tokens; the patches are the last ones.
  """
  if options.rope is None:
    return None
  table = _table(options, grid, num_tokens)
  return Rotation(
    jnp.asarray(np.cos(table), "float32"), jnp.asarray(np.sin(table), "float32")
  )


def unscaled(
  options: ViTConfig, grid: tuple[int, int], num_tokens: int
) -> Angles:
  """Returns the angles of `rotation`."""
  return Angles(jnp.asarray(_table(options, grid, num_tokens), "float32"))


def _table(
  options: ViTConfig, grid: tuple[int, int], num_tokens: int
) -> Float[np.ndarray, "1 n 1 d"]:
  head_dim = options.size.width // options.size.num_heads
  table = angles(options.rope, grid, head_dim, options.rope_periods)
  return np.pad(table, ((num_tokens - len(table), 0), (0, 0)))[None, :, None]


def angles(
  rope: str, grid: tuple[int, int], head_dim: int, periods: str = "float32"
) -> Float[np.ndarray, "n d"]:
  """Returns the angle of every channel for the patches, row by row; radians.

  Args:
    rope: "dinov3" or "eva02".
    grid: Rows and columns of patches.
    head_dim: Channels of a head, a multiple of 4.
    periods: Type to which the periods 100^(4 j / n) are rounded.
  """
  y, x = np.mgrid[: grid[0], : grid[1]].reshape(2, -1, 1).astype(np.float64)
  exponents = np.arange(head_dim // 4) / (head_dim // 4)
  if rope == "dinov3":
    rounded = (100.0**exponents).astype(getattr(ml_dtypes, periods, periods))
    frequencies = 2 * np.pi / rounded.astype(np.float64)
    y, x = (2 * (i + 0.5) / n - 1 for i, n in zip((y, x), grid, strict=True))
    return np.tile(np.concatenate([y * frequencies, x * frequencies], 1), 2)
  frequencies = 10_000.0**-exponents
  y, x = (EVA02_GRID * i / n for i, n in zip((y, x), grid, strict=True))
  both = np.concatenate([y * frequencies, x * frequencies], 1)
  return np.repeat(both, 2, axis=1)


def rotate(
  x: Float[Array, "b n heads d"], rope: str, by: Rotation
) -> Float[Array, "b n heads d"]:
  """Returns queries or keys, rotated in float32 and cast back to their type.

  Args:
    x: Queries or keys.
    rope: Which channels are pairs: "dinov3" or "eva02".
    by: The rotation.
  """
  if rope == "dinov3":
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
  else:
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    turned = jnp.stack([-pairs[..., 1], pairs[..., 0]], -1).reshape(x.shape)
  return (x * by.cos + turned * by.sin).astype(x.dtype)
