"""MAE's network: a model on the visible patches, and a decoder of all patches.

The model's parameters have the same paths as without this objective, so that
another objective can load them. Mask token and decoder are under `mae`.

Source: arXiv:2111.06377; facebookresearch/mae, models_mae.py.
"""

import math
import re
from typing import Any

import einops
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, UInt8

from vit_jax.families import ModelConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.models.encoder import Encoder
from vit_jax.models.layers import Dense, chosen
from vit_jax.models.noise import RECORDS
from vit_jax.models.precision import at_least_float32

# Mean and deviation of ImageNet's colours, for pixels in [0, 1].
COLOURS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def num_visible(num_patches: int, mask_ratio: float) -> int:
  """Returns how many of the patches the encoder sees; at least one.

  Example:
    >>> num_visible(196, 0.75)
    49
  """
  return max(1, int(num_patches * (1 - mask_ratio)))


def draw(
  key: jax.Array, records: Int[Array, " b"], num_patches: int
) -> Int[Array, "b n"]:
  """Returns a uniform permutation of the patches for each record.

  The first patches of a permutation are visible. It depends only on the key and
  on the record's number.

  Args:
    key: Key of the step, typed.
    records: Numbers of the records.
    num_patches: Patches of an image.
  """

  places = jnp.arange(num_patches)

  def order(record):
    noise = jax.random.bits(jax.random.fold_in(key, record), (num_patches,))
    one, other = noise[:, None], noise[None]
    is_before = places[None] < places[:, None]
    is_lower = (other < one) | ((other == one) & is_before)
    return is_lower.sum(1, dtype=jnp.int32)  # ranks of noise

  return jax.vmap(order)(records)


def places_in(order: Int[Array, "b n"]) -> Int[Array, "b n"]:
  """Returns the place of each patch in an order: the inverse permutation.

  It compares all pairs: XLA takes minutes to compile a sort for a TPU.

  Example:
    >>> places_in(jnp.array([[2, 0, 1]])).tolist()
    [[1, 2, 0]]
  """
  numbers = jnp.arange(order.shape[1])[None, :, None]
  return jnp.argmax(order[:, None] == numbers, axis=-1)


def is_masked(order: Int[Array, "b n"], num_kept: int) -> Float[Array, "b n"]:
  """Returns 1 for masked patches and 0 for the `num_kept` first in the order.

  Example:
    >>> is_masked(jnp.array([[2, 0, 1]]), 1).tolist()
    [[1.0, 1.0, 0.0]]
  """
  return jnp.float32(places_in(order) >= num_kept)


def pixels_of(
  images: UInt8[Array, "b h w c"], side: int
) -> Float[Array, "b n ppc"]:
  """Returns the pixels of all patches, standardised with ImageNet's colours.

  Patches are row by row, as the tokens, and so are the pixels in a patch; the
  three colours of a pixel are neighbours.

  Args:
    images: Values 0 to 255.
    side: Side of a patch, pixels.
  """
  mean, std = (np.float32(x)[None, None, None] for x in COLOURS)
  x = (images.astype(jnp.float32) / 255.0 - mean) / std
  return einops.rearrange(
    x, "b (gh ph) (gw pw) c -> b (gh gw) (ph pw c)", ph=side, pw=side
  )


def images_of(
  pixels: Float[Array, "b n ppc"], grid: tuple[int, int]
) -> UInt8[Array, "b h w c"]:
  """Returns the images of pixels as those of `pixels_of`, clipped to 0..255."""
  side = math.isqrt(pixels.shape[-1] // 3)
  x = einops.rearrange(
    pixels,
    "b (gh gw) (ph pw c) -> b (gh ph) (gw pw) c",
    gh=grid[0],
    ph=side,
    pw=side,
  )
  mean, std = (np.float32(x)[None, None, None] for x in COLOURS)
  return jnp.round(jnp.clip(x * std + mean, 0, 1) * 255).astype(jnp.uint8)


def moments(
  pixels: Float[Array, "b n v"],
) -> tuple[Float[Array, "b n 1"], Float[Array, "b n 1"]]:
  """Returns mean and sqrt(var + 1e-6) of the values of each patch.

  The variance is the unbiased one: the sum is divided by v - 1.
  """
  var = pixels.var(-1, keepdims=True, ddof=1)
  return pixels.mean(-1, keepdims=True), jnp.sqrt(var + 1e-6)


def standardised(pixels: Float[Array, "b n v"]) -> Float[Array, "b n v"]:
  """Returns the values of each patch, minus the mean, by the deviation."""
  mean, deviation = moments(pixels)
  return (pixels - mean) / deviation


def sincos(grid: tuple[int, int], width: int) -> Float[np.ndarray, "n d"]:
  """Returns the fixed positions of MAE for a grid of patches, row by row.

  They are [sin(x f), cos(x f), sin(y f), cos(y f)], as `posemb.sincos2d`, with
  other frequencies f_k = 10000^(-k / (width / 4)): here the last one is not
  reached.

  Args:
    grid: Rows and columns.
    width: Width of a token, a multiple of 4.

  Source: facebookresearch/mae, util/pos_embed.py.
  """
  y, x = np.mgrid[: grid[0], : grid[1]]
  frequencies = 10_000.0 ** -(np.arange(width // 4) / (width // 4))
  x, y = (np.outer(v.ravel(), frequencies) for v in (x, y))
  table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
  return table.astype(np.float32)


class Decoder(nn.Module):
  """Predicts all patches from the tokens of the visible ones.

  Attributes:
    options: Sizes of the blocks.
    num_outputs: Numbers predicted for each patch.
  """

  options: ViTConfig
  num_outputs: int

  @nn.compact
  def __call__(
    self,
    encoded: Float[Array, "b m d"],
    order: Int[Array, "b n"],
    num_kept: int,
    grid: tuple[int, int],
  ) -> Float[Array, "b n outputs"]:
    """Returns the predictions in the order of the grid; at least float32.

    Args:
      encoded: Tokens without a patch (class token, registers), which pass
        through the blocks, too, without positions; then the visible patches.
      order: All patches; the `num_kept` first are those in `encoded`.
      num_kept: Number of visible patches.
      grid: Rows and columns of patches.
    """
    options, width = self.options, self.options.size.width
    (num_images, num_patches), xavier = (
      order.shape,
      nn.initializers.xavier_uniform(),
    )
    mask_token = self.param(
      "mask_token", nn.initializers.normal(0.02), (1, 1, width)
    )
    x = Dense(width, kernel_init=xavier, dtype=options.dtype, name="embed")(
      encoded
    ).astype(options.dtype)
    others, visible = jnp.split(x, [x.shape[1] - num_kept], axis=1)
    shape = (num_images, num_patches - num_kept, width)
    # Copied in float32, for the sum that is the token's gradient.
    masked = jnp.broadcast_to(mask_token, shape).astype(x.dtype)
    patches = jnp.concatenate([visible, masked], axis=1)
    patches = chosen(patches, places_in(order))
    patches += jnp.asarray(sincos(grid, width), x.dtype)[None]
    x = jnp.concatenate([others, patches], axis=1)
    x, _ = Encoder(options, name="Transformer")(x, grid, None)
    return nn.Dense(
      self.num_outputs,
      kernel_init=xavier,
      dtype=at_least_float32(options.dtype),
      name="pixels",
    )(x[:, others.shape[1] :])


class MAEModel(nn.Module):
  """A network with a decoder.

  Attributes:
    network: A network without a head, with the `embed` and `encode` of `ViT`.
    decoder: Sizes of the decoder.
    num_outputs: Numbers predicted for each patch.
  """

  network: nn.Module
  decoder: ViTConfig
  num_outputs: int

  def setup(self):
    nn.share_scope(self, self.network)
    self.mae = Decoder(self.decoder, self.num_outputs)

  def __call__(
    self, images: Float[Array, "b h w c"], **options
  ) -> tuple[Array, dict[str, Any]]:
    """Applies the network to whole images; see `ViT.__call__`."""
    result = self.network(images, **options)
    if self.is_initializing():
      one = jnp.zeros((len(images), 1), jnp.int32)
      self.mae(result[1]["encoded"][:, :1], one, 1, (1, 1))
    return result

  def predict_patches(
    self,
    images: Float[Array, "b h w c"],
    order: Int[Array, "b n"],
    num_kept: int,
    records: RECORDS,
  ) -> Float[Array, "b n outputs"]:
    """Predicts all patches of images from some of them.

    Args:
      images: Floats in [-1, 1].
      order: All patches of each image; the `num_kept` first are visible. They
        enter the encoder in this order.
      num_kept: Number of visible patches.
      records: A number for each image; None for no dropout.
    """
    tokens, _ = self.network.embed(images)
    encoded, _ = self.network.encode(tokens, records, order[:, :num_kept])
    return self.mae(encoded, order, num_kept, tokens.shape[1:3])


def initial(params: Any, rng: jax.Array, model: ModelConfig) -> Any:
  """Returns parameters as the authors' code initialises them.

  Query, key and value are one matrix for Xavier's rule, with the bound
  sqrt(6 / (d + 3 d)). The patch embedding is a linear map: its kernel by
  Xavier's rule, its bias uniform up to 1 / sqrt(inputs), as in PyTorch. It
  gets images in [-1, 1] here and standardised colours there: kernel and bias
  are those of the same function. Class tokens are normal with a deviation of
  0.02. Other biases are 0. What the authors' network does not have keeps its
  values.

  Args:
    params: Nested dict, the network's and the decoder's.
    rng: A key.
    model: Options of the network.
  """
  flat = flatten_dict(params, sep="/")
  kernel_key, bias_key, *keys = jax.random.split(
    rng, 2 + len(model.CLASS_TOKENS)
  )
  for path, x in flat.items():
    if re.search(rf"(^|/)({ViTConfig.QKV})$", path):
      flat[path] = x * 0.5**0.5  # from the bound sqrt(6 / (d + d))
    elif path.endswith("/bias"):
      flat[path] = jnp.zeros_like(x)
  for token, key in zip(model.CLASS_TOKENS, keys, strict=True):
    if token in flat:
      flat[token] = 0.02 * jax.random.normal(key, flat[token].shape)
  kernel, bias = f"{model.PATCHES}/kernel", f"{model.PATCHES}/bias"
  shape = flat[kernel].shape
  num_inputs = int(np.prod(shape[:-1]))
  mean, std = (np.float32(x)[None, None, :, None] for x in COLOURS)
  drawn = nn.initializers.xavier_uniform()(kernel_key, (num_inputs, shape[-1]))
  flat[kernel] = drawn.reshape(shape) * 0.5 / std
  if bias in flat:
    drawn = jax.random.uniform(bias_key, flat[bias].shape, minval=-1.0)
    shift = jnp.sum(flat[kernel] * (1 - 2 * mean), axis=(0, 1, 2))
    flat[bias] = drawn * num_inputs**-0.5 + shift
  return unflatten_dict(flat, sep="/")
