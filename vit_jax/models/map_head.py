"""Attention pooling of tokens."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.families.vit import ViTConfig
from vit_jax.models.attention import MultiHeadDotProductAttention
from vit_jax.models.encoder import MlpBlock
from vit_jax.models.precision import at_least_float32


class MAPHead(nn.Module):
  """Attention pooling: a learned probe attends to the tokens, then an MLP.

  Source: big_vision, models/vit.py; arXiv:2106.04560, section 3.3.
  """

  options: ViTConfig

  @nn.compact
  def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b d"]:
    options, (num_images, _, width) = self.options, x.shape
    probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, width))
    probe = jnp.broadcast_to(probe, (num_images, 1, width))
    x = MultiHeadDotProductAttention(
      options.size.num_heads,
      options.dtype,
      name="MultiHeadDotProductAttention_0",
    )(probe, x)
    y = nn.LayerNorm(options.ln_eps, dtype=options.dtype, name="LayerNorm_0")(x)
    y = MlpBlock(options, name="MlpBlock_0")(y, {})
    return (x + y)[:, 0].astype(at_least_float32(options.dtype))
