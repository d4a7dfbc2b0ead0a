"""A family of one's own: a small Transformer whose parameters have other names.

It is plain linen, without a scan, and uses nothing of `vit_jax.models`.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.families import ModelConfig
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Plain(ModelConfig):
  """The options, without a declaration of the parts but the head."""

  name: str = "own_family:Plain"
  variant: str = "own"
  width: int = option(32, "width of a token")
  depth: int = option(2, "number of blocks")
  patch: int = option(8, "side of a patch, in pixels")

  HEADS: ClassVar = r"classifier/"
  pool = "token"
  num_class_tokens = 1
  num_class_rows = 1

  def build(self, num_classes: int) -> nn.Module:
    return Transformer(self, num_classes)

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    return image_size[0] // self.patch, image_size[1] // self.patch

  def num_tokens(self, image_size: tuple[int, int]) -> int:
    rows, columns = self.grid(image_size)
    return rows * columns + 1

  def forward_macs(self, image_size: tuple[int, int], num_classes: int) -> int:
    tokens = self.num_tokens(image_size)
    block = tokens * 12 * self.width**2 + 2 * tokens**2 * self.width
    return self.depth * block + self.width * num_classes


@dataclasses.dataclass(frozen=True)
class Own(Plain):
  """The same, which declares its parts."""

  name: str = "own_family:Own"

  BLOCKS: ClassVar = "block_{}"
  STEM: ClassVar = r"patch_embed/.*|cls_token|pos_embedding"
  PATCHES: ClassVar = "patch_embed"
  POSITIONS: ClassVar = {"pos_embedding": "grid"}
  CLASS_TOKENS: ClassVar = ("cls_token",)
  MATRICES: ClassVar = {
    r"attn/(query|key|value)/kernel": (1, 2),
    r"attn/out/kernel": (2, 1),
    r"fc[12]/kernel": (1, 1),
  }
  BEHIND_BLOCKS: ClassVar = ("last_norm", "classifier")
  ATTENTION: ClassVar = "block_{}/attn/attention_weights"


class Block(nn.Module):
  width: int

  @nn.compact
  def __call__(self, x):
    attention = nn.MultiHeadDotProductAttention(4, name="attn")
    x += attention(nn.LayerNorm(name="norm1")(x), sow_weights=True)
    y = nn.LayerNorm(name="norm2")(x)
    y = nn.gelu(nn.Dense(2 * self.width, name="fc1")(y))
    return x + nn.Dense(self.width, name="fc2")(y)


class Transformer(nn.Module):
  options: Plain
  num_classes: int

  @nn.compact
  def __call__(self, images, *, is_training=False, records=None):
    options, (rows, *_) = self.options, images.shape
    side, normal = (options.patch,) * 2, nn.initializers.normal(0.02)
    x = nn.Conv(options.width, side, side, "VALID", name="patch_embed")(images)
    x = x.reshape(rows, -1, options.width)
    cls = self.param("cls_token", normal, (1, 1, options.width))
    cls = jnp.broadcast_to(cls, (rows, 1, options.width))
    x = jnp.concatenate([cls, x], axis=1)
    x += self.param("pos_embedding", normal, (1, *x.shape[1:]))
    out = {}
    for i in range(options.depth):
      x = Block(options.width, name=f"block_{i}")(x)
      out[f"block_{i}"] = x
    out["encoded"] = nn.LayerNorm(name="last_norm")(x)
    out["pre_logits"] = x = out["encoded"][:, 0]
    if self.num_classes:
      x = nn.Dense(self.num_classes, name="classifier")(x)
    return x, out | {"logits": x}
