"""Masked patch prediction: some patches are corrupted, and predicted.

The network's parameters have the same paths as without this objective, so that
another objective can load them. The mask token and the prediction head are
under `masked_patch`.
"""

from typing import Any, NamedTuple

import einops
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt8

from vit_jax.models.layers import chosen, head
from vit_jax.models.noise import RECORDS
from vit_jax.models.precision import at_least_float32

NUM_COLORS = 512  # 3 bits for each of red, green and blue
CORRUPTED = 0.5  # share of the patches of an image
MASKED, REPLACED = 0.8, 0.1  # shares of these; others do not change


class Plan(NamedTuple):
  """Which k of the n patches of every image are corrupted, and how.

  places: Numbers of these patches, all different, in no order.
  sources: The patch whose embedding each of them gets: another one, or itself.
  is_masked: Whether it gets the mask token instead.
  """

  places: Int[Array, "b k"]
  sources: Int[Array, "b k"]
  is_masked: Bool[Array, "b k"]


def draw(key: jax.Array, records: Int[Array, " b"], num_patches: int) -> Plan:
  """Draws the plan; for a record, it depends only on the record's number.

  A share `CORRUPTED` of the patches is corrupted, rounded down but at least
  one. Each of them is masked with probability `MASKED`, replaced by any other
  patch of the image with probability `REPLACED`, and otherwise left unchanged.

  Args:
    key: Key of the step, typed.
    records: Numbers of the records.
    num_patches: Patches of an image, 2 or more.
  """
  num_corrupted = max(1, int(CORRUPTED * num_patches))

  def draw_plan(record):
    key_places, key_kinds, key_sources = jax.random.split(
      jax.random.fold_in(key, record), 3
    )
    places = jax.random.permutation(key_places, num_patches)[:num_corrupted]
    kind = jax.random.uniform(key_kinds, (num_corrupted,))
    away = jax.random.randint(key_sources, (num_corrupted,), 1, num_patches)
    is_masked = kind < MASKED
    is_replaced = ~is_masked & (kind < MASKED + REPLACED)
    others = (places + away) % num_patches
    return Plan(places, jnp.where(is_replaced, others, places), is_masked)

  return jax.vmap(draw_plan)(records)


def corrupt(
  tokens: Float[Array, "b n d"], mask_token: Float[Array, " d"], plan: Plan
) -> Float[Array, "b n d"]:
  """Returns the tokens, in which those that the plan names are corrupted."""
  new = jnp.where(
    plan.is_masked[..., None],
    mask_token[None, None],  # float32, for the sum that is its gradient
    chosen(tokens, plan.sources),
  ).astype(tokens.dtype)
  rows = jnp.arange(len(tokens))[:, None]
  return tokens.at[rows, plan.places].set(new, unique_indices=True)


def patches_of(
  images: UInt8[Array, "b h w c"], side: int
) -> UInt8[Array, "b n p p c"]:
  """Divides images into patches, row by row, in the order of the tokens."""
  return einops.rearrange(
    images, "b (gh ph) (gw pw) c -> b (gh gw) ph pw c", ph=side, pw=side
  )


def colors(
  patches: UInt8[Array, "b k p p c"], num_cells: int
) -> Int[Array, "b k cells"]:
  """Returns the mean colour of each cell of a patch, one of `NUM_COLORS`.

  The colour is 64 r + 8 g + b, where r, g and b are the three upper bits of the
  mean of 0..255 over the cell. Integer arithmetic makes it exact.

  Args:
    patches: Their side p is a multiple of `num_cells`.
    num_cells: Cells along a side; 1 for the whole patch.
  """
  cells = einops.rearrange(
    patches.astype(jnp.int32),
    "b k (ch ph) (cw pw) c -> b k (ch cw) (ph pw) c",
    ch=num_cells,
    cw=num_cells,
  )
  levels = cells.sum(-2) // (cells.shape[-2] * 32)
  return levels[..., 0] * 64 + levels[..., 1] * 8 + levels[..., 2]


class Predictions(nn.Module):
  """Parameters of the objective: mask token and prediction head.

  Attributes:
    num_outputs: Numbers predicted for each patch.
    width: Width of a token.
    dtype: Type of the matrix products; the head's is at least float32.
  """

  num_outputs: int
  width: int
  dtype: DTypeLike

  def setup(self):
    self.mask_token = self.param(
      "mask_token", nn.initializers.normal(0.02), (self.width,)
    )
    self.head = head(self.num_outputs, 0.0, at_least_float32(self.dtype))

  def __call__(self, x: Float[Array, "b k d"]) -> Float[Array, "b k outputs"]:
    return self.head(x)


class MaskedPatchModel(nn.Module):
  """A network with the predictions of its patches.

  Attributes:
    network: A network without a head, with the `embed` and `encode` of `ViT`.
    num_outputs, width, dtype: See `Predictions`.
  """

  network: nn.Module
  num_outputs: int
  width: int
  dtype: DTypeLike

  def setup(self):
    nn.share_scope(self, self.network)
    self.masked_patch = Predictions(self.num_outputs, self.width, self.dtype)

  def __call__(
    self, images: Float[Array, "b h w c"], **options
  ) -> tuple[Array, dict[str, Any]]:
    """Applies the network to images without corruption; see `ViT.__call__`."""
    if self.is_initializing():
      self.masked_patch(jnp.zeros((1, 1, self.width)))
    return self.network(images, **options)

  def predict_patches(
    self, images: Float[Array, "b h w c"], plan: Plan, records: RECORDS
  ) -> Float[Array, "b k outputs"]:
    """Corrupts the embeddings of images, and predicts the corrupted patches.

    Args:
      images: Floats in [-1, 1].
      plan: What is corrupted in each image.
      records: A number for each image; None for no dropout.

    Returns:
      Predictions of the patches `plan.places`, float32.
    """
    tokens, _ = self.network.embed(images)
    grid = tokens.shape[1:3]
    tokens = einops.rearrange(tokens, "b gh gw d -> b (gh gw) d")
    tokens = corrupt(tokens, self.masked_patch.mask_token, plan)
    tokens = tokens.reshape(len(tokens), *grid, -1)
    encoded, _ = self.network.encode(tokens, records)
    # A class token is in front of the patches.
    patches = encoded[:, -grid[0] * grid[1] :]
    return self.masked_patch(chosen(patches, plan.places))
