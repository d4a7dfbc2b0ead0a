"""Masks of rectangular blocks of patches, as in BEiT, iBOT and DINOv2.

A share of all crops of the batch is masked. The ratios of the masked crops are
spread evenly: with n of them, crop i has a ratio uniform between the borders i
and i + 1 of n + 1 equally distant ones. Blocks are added to a crop until the
number of its masked patches is reached. A block has an area uniform between 4
patches and what is missing, and an aspect ratio log-uniform between 0.3 and 1 /
0.3; it must lie inside the grid, be less high and less wide than the grid, and
add between one patch and what is missing. After 10 attempts without a block
there are no more, so some crops have up to 5 masked patches too few.

Source: arXiv:2106.08254, algorithm 1, for the blocks; arXiv:2304.07193, section
  4, and arXiv:2111.07832, for their ratios.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MIN_PATCHES = 4  # least area of a block
ASPECT = 0.3  # smallest ratio of a block's height to its width
TRIES = 10  # attempts for a block
# All attempts for a crop, a static number. Of 10,000 crops of 16 x 16 patches
# none needed more than 32, of 6,000 crops of 37 x 37 patches none more than 41.
ATTEMPTS = 64


class Masks(NamedTuple):
  """The masked patches of some crops.

  masked: Whether a patch is masked, patches row by row.
  places: Numbers of the masked patches in ascending order, then numbers of
    others; a static number k of them.
  weights: 1 / (masked patches of the crop) for each place with a masked patch,
    otherwise 0.
  """

  masked: Bool[Array, "b n"]
  places: Int[Array, "b k"]
  weights: Float[Array, "b k"]


def ratios(
  key: jax.Array,
  crops: Int[Array, " b"],
  num_crops: int,
  share: float,
  least: float,
  most: float,
) -> Float[Array, " b"]:
  """Returns the share of masked patches of each crop; 0 for most of them.

  Args:
    key: The same for all crops of the batch.
    crops: Places of the crops in the whole batch, 0 to num_crops - 1.
    num_crops: Crops of the whole batch.
    share: Share of the crops that are masked, rounded down.
    least, most: Smallest and largest ratio of a masked crop.
  """
  num_masked = int(num_crops * share)
  key_order, key_ratios = jax.random.split(key)
  rank = jax.random.permutation(key_order, num_crops)
  within = jax.random.uniform(key_ratios, (num_crops,))
  ratio = least + (most - least) * (rank + within) / max(num_masked, 1)
  return jnp.where(rank < num_masked, ratio, 0.0)[crops]


def blocks(
  key: jax.Array, target: Int[Array, ""], grid: tuple[int, int]
) -> Bool[Array, "gh gw"]:
  """Draws the mask of a crop, with `target` masked patches or a few less.

  Args:
    key: The crop's own.
    target: At most half of the patches.
    grid: Rows and columns of patches.
  """
  rows, columns = (jnp.arange(n) for n in grid)

  def attempt(carry, uniform):
    mask, missing, failures = carry
    area = MIN_PATCHES + (missing - MIN_PATCHES) * uniform[0]
    aspect = jnp.exp(math.log(ASPECT) * (1 - 2 * uniform[1]))
    height = jnp.round(jnp.sqrt(area * aspect))
    width = jnp.round(jnp.sqrt(area / aspect))
    top = jnp.floor(uniform[2] * (grid[0] - height + 1))
    left = jnp.floor(uniform[3] * (grid[1] - width + 1))
    block = (
      ((rows >= top) & (rows < top + height))[:, None]
      & ((columns >= left) & (columns < left + width))[None, :]
      & ~mask
    )
    new = block.sum(dtype=jnp.int32)
    is_block = (height < grid[0]) & (width < grid[1])
    is_block &= (new > 0) & (new <= missing) & (failures < TRIES)
    mask = jnp.where(is_block, mask | block, mask)
    missing = jnp.where(is_block, missing - new, missing)
    return (mask, missing, jnp.where(is_block, 0, failures + 1)), None

  uniforms = jax.random.uniform(key, (ATTEMPTS, 4))
  start = jnp.zeros(grid, bool), jnp.asarray(target, jnp.int32), jnp.int32(0)
  (mask, _, _), _ = jax.lax.scan(attempt, start, uniforms)
  return mask


def draw(
  keys: jax.Array,
  ratio: Float[Array, " b"],
  grid: tuple[int, int],
  most: float,
) -> Masks:
  """Draws the masks of crops.

  Args:
    keys: A typed key of jax.random for each crop.
    ratio: Share of masked patches of each crop, see `ratios`.
    grid: Rows and columns of patches.
    most: Largest ratio. The number of places is that of its masked patches,
      rounded down.
  """
  num_patches = grid[0] * grid[1]
  target = jnp.floor(ratio * num_patches).astype(jnp.int32)
  masked = jax.vmap(lambda key, n: blocks(key, n, grid))(keys, target)
  masked = masked.reshape(len(masked), num_patches)
  places = jnp.argsort(~masked, axis=1, stable=True)
  places = places[:, : int(num_patches * most)]
  counts = jnp.maximum(masked.sum(1, dtype=jnp.float32), 1.0)
  weights = jnp.take_along_axis(masked, places, 1) / counts[:, None]
  return Masks(masked, places, weights)
