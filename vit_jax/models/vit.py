"""The Vision Transformer of arXiv:2010.11929, equations 1 to 4.

The names of the modules give the parameter paths of the published checkpoints
(`Transformer/encoderblock_0/LayerNorm_0/scale`). Parameters are float32. Matrix
products, and the tokens between blocks, have the options' `dtype`. The
statistics of the norms, softmax and head are float32.
"""

from typing import Any

import einops
import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vit_jax.families.vit import ViTConfig
from vit_jax.models.encoder import Encoder, MAPHead
from vit_jax.models.layers import head, product_of_patches
from vit_jax.models.noise import RECORDS
from vit_jax.models.posemb import LearnedOn, sincos2d
from vit_jax.models.precision import at_least_float32, bias_in_float32
from vit_jax.models.resnet import trunk


def places_of(
  keep: Int[Array, "b k"] | None, num_others: int
) -> Int[Array, "b m"] | None:
  """Returns the numbers of all tokens that remain; None for all.

  Args:
    keep: Numbers of the patches that remain.
    num_others: Number of tokens before the patches, which always remain.
  """
  if keep is None:
    return None
  others = jnp.broadcast_to(jnp.arange(num_others), (len(keep), num_others))
  return jnp.concatenate([others, keep + num_others], axis=1)


class ViT(nn.Module):
  """Maps images to logits and a dict of all intermediates.

  `__call__` applies `embed`, `encode`, `pool` and the head, in this order. An
  objective that changes the values between them calls them one by one, in its
  own module.

  Attributes:
    options: Sizes, positions, pooling and the rest; see `ViTConfig`.
    num_classes: Number of logits per image; with 0 there is no head, and its
      input is returned.
  """

  options: ViTConfig
  num_classes: int

  def setup(self):
    options = self.options
    if errors := list(options.errors()):
      raise ValueError("\n".join(errors))
    precise, width = at_least_float32(options.dtype), options.size.width
    self.Transformer = Encoder(options)
    if options.pool == "token":
      self.cls = self.param("cls", nn.initializers.zeros, (1, 1, width))
    elif options.pool == "map":
      self.MAPHead_0 = MAPHead(options)
    if options.pre_logits:
      self.pre_logits = nn.Dense(width, dtype=precise)
    if self.num_classes:
      self.head = head(self.num_classes, options.head_bias, precise)

  def __call__(
    self,
    images: Float[Array, "b h w c"],
    *,
    is_training: bool = False,
    records: RECORDS = None,
  ) -> tuple[Float[Array, "b classes"], dict[str, Any]]:
    """Applies the network.

    Args:
      images: Floats in [-1, 1].
      is_training: Whether dropout and stochastic depth are on; they draw from
        the rng "dropout".
      records: A number for each image. Together with the rng it decides what is
        dropped. With None, it is the row in the batch.

    Returns:
      Logits, float32; the intermediates: those of `embed` and `encode`; pooled
      [b, d]; pre_logits [b, d], the input of the head; logits. Under jit,
      unused intermediates cost nothing.

    Raises:
      ValueError: The options contradict each other, or the patch does not
        divide the images.
    """
    if not is_training:
      records = None
    elif records is None:
      records = jnp.arange(images.shape[0])
    tokens, out = self.embed(images)
    x, encoder_out = self.encode(tokens, records)
    out |= encoder_out
    out["pooled"] = x = self.pool(x)
    if self.options.pre_logits:
      x = nn.tanh(self.pre_logits(x))
    out["pre_logits"] = x
    if self.num_classes:
      x = self.head(x)
    out["logits"] = x
    return x, out

  @nn.compact
  def embed(
    self, images: Float[Array, "b h w c"]
  ) -> tuple[Float[Array, "b gh gw d"], dict[str, Any]]:
    """Divides images into patches, and maps each to a token.

    Args:
      images: Floats in [-1, 1].

    Returns:
      The tokens, without a class token and without positions; the
      intermediates: root, block1, ... of a hybrid's ResNet; stem, the tokens.

    Raises:
      ValueError: The patch does not divide the images.
    """
    options = self.options
    out, x = {}, images
    if options.stages is not None:
      x, out = trunk(
        x,
        "v1",
        options.stages,
        options.norms,
        options.dtype,
        # A ResNet recomputes whole units or nothing.
        nn.remat if options.remat == "full" else lambda unit: unit,
      )
    if x.shape[1] % options.patch or x.shape[2] % options.patch:
      raise ValueError(
        f"ViT: got {'features' if options.stages else 'images'} of"
        f" {x.shape[1]} x {x.shape[2]}, expected multiples of the patch's side"
        f" {options.patch}: change image_size, or a size in config.data.ops."
      )
    out["stem"] = x = nn.Conv(
      options.size.width,
      (options.patch,) * 2,
      (options.patch,) * 2,
      "VALID",
      use_bias=options.patch_bias,
      dtype=options.dtype,
      conv_general_dilated=product_of_patches,
      promote_dtype=bias_in_float32,
      name="embedding",
    )(x).astype(options.dtype)
    return x, out

  def encode(
    self,
    tokens: Float[Array, "b gh gw d"],
    records: RECORDS,
    keep: Int[Array, "b k"] | None = None,
    table: LearnedOn | None = None,
  ) -> tuple[Float[Array, "b n d"], dict[str, Any]]:
    """Applies class token, positions, blocks and the last norm.

    Args:
      tokens: The result of `embed`, a token for each patch.
      records: A number for each image; None for no dropout.
      keep: Numbers of the patches that enter the blocks, counted row by row;
        None for all. They have the positions that they have on the whole grid.
        The class token always enters.
      table: The grid of the learned positions, for images of several sizes.
        None: that of the tokens. Positions of blocks (`posemb_at`) and offsets
        (`posemb` "relative") serve only one size.

    Returns:
      The encoded tokens, in the order of `keep`: n = gh gw, or k with `keep`,
      plus the class token in front, if the model has one; the intermediates:
      with_posemb [b, n, d], the input of the first block; encoderblock_{i},
      each with attention and mlp (the branches before they are added) and
      after_attention and after_mlp (the sums); encoded [b, n, d].
    """
    options = self.options
    num_images, grid_h, grid_w, width = tokens.shape
    x = einops.rearrange(tokens, "b gh gw d -> b (gh gw) d")
    if options.posemb == "sincos2d":
      x = x + jnp.asarray(sincos2d(grid_h, grid_w, width), x.dtype)[None]
    if options.pool == "token":
      cls = jnp.broadcast_to(self.cls, (num_images, 1, width)).astype(x.dtype)
      x = jnp.concatenate([cls, x], axis=1)
    places = places_of(keep, self.options.num_class_tokens)
    return self.Transformer(x, (grid_h, grid_w), records, places, table=table)

  def pool(self, encoded: Float[Array, "b n d"]) -> Float[Array, "b d"]:
    """Returns one vector per image: class token, mean, or attention pooling."""
    if self.options.pool == "token":
      return encoded[:, 0]
    if self.options.pool == "gap":
      return encoded.mean(axis=1)
    return self.MAPHead_0(encoded)
