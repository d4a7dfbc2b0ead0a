"""MLP-Mixer.

Source: arXiv:2105.01601, section 2.
"""

from typing import Any

import einops
import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float
from vit_jax.families.mixer import MixerConfig

from vit_jax.models.layers import head
from vit_jax.models.noise import RECORDS, Dropout


class Mlp(nn.Module):
  """Dense, GELU, dense."""

  mlp_dim: int
  dtype: str

  @nn.compact
  def __call__(self, x: Float[Array, "b m n"]) -> Float[Array, "b m n"]:
    y = nn.Dense(self.mlp_dim, dtype=self.dtype)(x)
    return nn.Dense(x.shape[-1], dtype=self.dtype)(nn.gelu(y))


class Block(nn.Module):
  """x + token mixing, then x + channel mixing."""

  options: MixerConfig

  @nn.compact
  def __call__(self, x: Float[Array, "b n d"], records: RECORDS):
    size, dtype = self.options.size, self.options.dtype
    y = nn.LayerNorm(dtype=dtype)(x).swapaxes(1, 2)
    y = Mlp(size.tokens_mlp_dim, dtype, name="token_mixing")(y).swapaxes(1, 2)
    x = x + Dropout(self.options.tokens_dropout)(y, records)
    y = nn.LayerNorm(dtype=dtype)(x)
    return x + Mlp(size.channels_mlp_dim, dtype, name="channel_mixing")(y)


class Mixer(nn.Module):
  """Images to logits."""

  options: MixerConfig
  num_classes: int

  @nn.compact
  def __call__(
    self,
    images: Float[Array, "b h w c"],
    *,
    is_training: bool = False,
    records: RECORDS = None,
  ) -> tuple[Float[Array, "b classes"], dict[str, Any]]:
    if not is_training:
      records = None
    elif records is None:
      records = jnp.arange(images.shape[0])
    options = self.options
    side = (options.patch, options.patch)
    x = nn.Conv(
      options.size.width,
      side,
      side,
      "VALID",
      dtype=options.dtype,
      name="stem",
    )(images)
    x = einops.rearrange(x, "b h w d -> b (h w) d")
    for i in range(options.size.depth):
      x = Block(options, name=f"block_{i}")(x, records)
    x = nn.LayerNorm()(x).mean(axis=1)
    out = {"pre_logits": x}
    if self.num_classes:
      x = head(self.num_classes, options.head_bias, "float32", "head")(x)
    return x, out | {"logits": x}
