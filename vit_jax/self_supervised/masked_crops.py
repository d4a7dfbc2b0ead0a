"""The network of DINOv2: a `MultiCrop` whose patches can be masked.

The network's parameters have the same paths as without the objective. Mask
token and heads are under the name of the heads' module.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, Float, Int

from vit_jax.families import ModelConfig
from vit_jax.models.layers import chosen
from vit_jax.models.noise import RECORDS
from vit_jax.models.posemb import LearnedOn
from vit_jax.self_supervised.heads import (
  METHOD,
  DINOHead,
  MultiCrop,
  prototype_vectors,
)


class Heads(nn.Module):
  """Mask token, head of the class token, and a head of patches or None.

  Attributes:
    token_head: Maps class tokens to scores; patches too, without another head.
    patch_head: Maps patches to scores.
    width: Width of a token.
  """

  token_head: DINOHead
  patch_head: DINOHead | None
  width: int

  def setup(self):
    zeros = nn.initializers.zeros
    self.mask_token = self.param("mask_token", zeros, (self.width,))

  def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b k"]:
    """Returns the scores of class tokens."""
    if self.is_initializing() and self.patch_head is not None:
      self.patch_head(x)
    return self.token_head(x)

  def macs(self, width: int) -> int:
    """Returns the multiply-adds for a class token."""
    return self.token_head.macs(width)

  @property
  def of_patches(self) -> DINOHead:
    """The head of patches."""
    return self.patch_head or self.token_head


class Crops(NamedTuple):
  """What the student learns of crops.

  scores: Of the class tokens, float32.
  vectors: The class tokens, after the last norm.
  patches: The patches, after the last norm.
  chosen: The head's vectors of the chosen patches, of length 1.
  prototypes: Those of the chosen patches, float32.
  """

  scores: Float[Array, "b k"]
  vectors: Float[Array, "b d"]
  patches: Float[Array, "b n d"]
  chosen: Float[Array, "b m e"]
  prototypes: Float[Array, "e k"]


class MaskedCrops(MultiCrop):
  """A network with `Heads`, for images of several sizes."""

  def crops(
    self,
    images: Float[Array, "b h w c"],
    records: RECORDS,
    places: Int[Array, "b m"],
    masked: Bool[Array, "b n"] | None = None,
  ) -> Crops:
    """Applies network and heads to images.

    Args:
      images: Floats in [-1, 1].
      records: A number for each image; None for no dropout.
      places: Numbers of the chosen patches.
      masked: Which patches are replaced by the mask token, before positions are
        added; None for none.
    """
    tokens, _ = self.network.embed(images)
    grid = tokens.shape[1:3]
    if masked is not None:
      masked = masked.reshape(*tokens.shape[:3], 1)
      # In float32, for the sum that is its gradient.
      masked_tokens = self.head.mask_token[None, None, None]
      masked_tokens = jnp.where(masked, masked_tokens, tokens)
      tokens = masked_tokens.astype(tokens.dtype)
    table = LearnedOn(self.model.grid(self.image_size), METHOD)
    encoded, _ = self.network.encode(tokens, records, table=table)
    patches = encoded[:, -grid[0] * grid[1] :]
    head = self.head.of_patches
    vectors = head(chosen(patches, places), is_scored=False)
    prototypes = prototype_vectors(head.variables["params"]["prototypes"])
    token = encoded[:, 0]
    return Crops(self.head(token), token, patches, vectors, prototypes)


def initial(params: dict, rng: jax.Array, own: str, patch: int) -> dict:
  """Returns a network's parameters as DINOv2 initialises them.

  Class token and registers are normal with a standard deviation of 1e-6;
  positions and kernels with 0.02. The patch embedding, bias included, is
  uniform in +-1 / sqrt(3 patch^2), as a convolution of PyTorch. Other biases
  are zero. Those of heads, and of norms and LayerScale, do not change.

  Args:
    params: The module's parameters.
    rng: A key.
    own: Start of the paths that do not change.
    patch: Side of a patch, pixels.

  Source: dinov2, models/vision_transformer.py.
  """

  def value(number, name, x):
    key, last = jax.random.fold_in(rng, number), name.split("/")[-1]
    if name.startswith(own):
      return x
    if name.startswith("embedding/"):
      limit = (patch * patch * 3) ** -0.5
      return jax.random.uniform(key, x.shape, minval=-limit, maxval=limit)
    if name in ("cls", "registers"):
      return 1e-6 * jax.random.normal(key, x.shape)
    if last == "kernel" or last.startswith("pos_embedding"):
      return 0.02 * jax.random.normal(key, x.shape)
    return jnp.zeros(x.shape) if last == "bias" else x

  leaves = sorted(flatten_dict(params, sep="/").items())
  new = {name: value(i, name, x) for i, (name, x) in enumerate(leaves)}
  return unflatten_dict(new, sep="/")


def features(
  module: nn.Module, model: ModelConfig, image_size: tuple[int, int]
):
  """Returns a function of (params, images) to the patches' features.

  Args:
    module: A network with `embed` and `encode`.
    model: Its options.
    image_size: (height, width), pixels, of the images of its positions.
  """

  def encoded(module, images):
    tokens, _ = module.embed(images)
    table = LearnedOn(model.grid(image_size), METHOD)
    x, _ = module.encode(tokens, None, table=table)
    return x[:, -tokens.shape[1] * tokens.shape[2] :]

  return lambda params, images: module.apply(
    {"params": params}, images, method=encoded
  )
