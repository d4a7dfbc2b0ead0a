"""The Vision Transformer of arXiv:2010.11929, equations 1 to 4.

The names of the modules make the paths of the parameters, which are those of
the published checkpoints (`Transformer/encoderblock_0/LayerNorm_0/scale`).
Parameters are float32; matrix products, and the stream of tokens between
them, have type `dtype`; the statistics of the norms, softmax and the head are
float32.
"""

from typing import Any

import einops
import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from vit_jax.families.names import Stages
from vit_jax.models.attention import MultiHeadDotProductAttention
from vit_jax.models.encoder import REMAT_POLICIES, Encoder, MlpBlock
from vit_jax.models.head import head
from vit_jax.models.noise import RECORDS
from vit_jax.models.posemb import sincos2d
from vit_jax.models.precision import at_least_float32
from vit_jax.models.resnet import V1_NORMS, Norms, trunk
from vit_jax.options import nearest

POOLS = ("token", "gap", "map")
POSEMBS = ("learn", "learn2d", "relative", "sincos2d", "none")
GELUS = ("tanh", "erf")


class MAPHead(nn.Module):
  """Attention pooling: a learned probe asks the tokens, then an MLP.

  Source: big_vision, models/vit.py; arXiv:2106.04560, section 3.3.
  """

  mlp_dim: int
  num_heads: int
  gelu: str
  ln_eps: float
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b d"]:
    num_images, _, width = x.shape
    probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, width))
    probe = jnp.broadcast_to(probe, (num_images, 1, width))
    x = MultiHeadDotProductAttention(
      self.num_heads, self.dtype, name="MultiHeadDotProductAttention_0"
    )(probe, x)
    y = nn.LayerNorm(self.ln_eps, dtype=self.dtype, name="LayerNorm_0")(x)
    y = MlpBlock(self.mlp_dim, 0.0, self.gelu, self.dtype, name="MlpBlock_0")(
      y, None
    )
    return (x + y)[:, 0].astype(at_least_float32(self.dtype))


class ViT(nn.Module):
  """Images to logits, and every intermediate by name.

  Attributes:
    num_classes: Logits an image; 0: no head, its input is returned.
    patch: Side of a patch; must divide both sides of the images, or of the
      feature map of the ResNet in front.
    width: Width d of a token.
    depth: Blocks.
    mlp_dim: Hidden width of the blocks' MLPs.
    num_heads: Attention heads; must divide the width.
    pool: What the head sees: "token" (the class token), "gap" (the mean over
      tokens) or "map" (attention pooling); the latter two have no class token.
    posemb: "learn" (a table), "learn2d" (one of columns, one of rows),
      "relative" (in every attention, see there), "sincos2d" (fixed) or "none".
      But for "learn" and "relative", the class token has no position.
    cls_row: Whether the table of "learn" has a row for the class token.
    stages: The ResNet in front of a hybrid; None: patches are of pixels.
    norms: Constants of the ResNet's norms.
    gelu: "tanh" or "erf".
    ln_eps: Added to the variance in LayerNorm.
    pre_logits: Whether a tanh layer of the same width precedes the head.
    dropout: Share dropped after positions, attention, GELU and MLP.
    stochastic_depth: Chance that an example skips a branch of the last block;
      block l of 0..L-1 has l / (L - 1) of it.
    head_bias: Initial bias of the head; its kernel starts at zero.
    dtype: Type of the matrix products.
    scan: Whether blocks are stacked under `encoderblock`, with a leading axis
      of length depth, and compiled once.
    remat: What the backward pass recomputes, a name of `REMAT_POLICIES`.
  """

  num_classes: int
  patch: int
  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  pool: str = "token"
  posemb: str = "learn"
  cls_row: bool = True
  stages: Stages | None = None
  norms: Norms = V1_NORMS
  gelu: str = "tanh"
  ln_eps: float = 1e-6
  pre_logits: bool = False
  dropout: float = 0.0
  stochastic_depth: float = 0.0
  head_bias: float = 0.0
  dtype: DTypeLike = "float32"
  scan: bool = False
  remat: str = "none"

  @nn.compact
  def __call__(
    self,
    images: Float[Array, "b h w c"],
    *,
    is_training: bool = False,
    records: RECORDS = None,
  ) -> tuple[Float[Array, "b classes"], dict[str, Any]]:
    """Applies the network.

    Args:
      images: In [-1, 1].
      is_training: Whether dropout and stochastic depth are on; they draw from
        the rng "dropout".
      records: A number for each image, which decides with the rng what is
        dropped; None: its place in the batch.

    Returns:
      Logits, float32, and the intermediates: root, block1, ... of a hybrid's
      ResNet; stem [b, grid_h, grid_w, d]; with_posemb [b, n, d];
      encoderblock_{i}, each with attention and mlp (the branches, as added)
      and after_attention and after_mlp (the sums); encoded [b, n, d]; pooled
      [b, d]; pre_logits [b, d], what the head sees; logits. Under jit, what
      nobody reads costs nothing.

    Raises:
      ValueError: An option is unknown, or sizes do not divide.
    """
    self._check_options()
    if not is_training:
      records = None
    elif records is None:
      records = jnp.arange(images.shape[0])
    out, x = {}, images
    if self.stages is not None:
      x, out = trunk(
        x, "v1", self.stages, self.norms, self.dtype, self._remat_unit()
      )
    self._check_sides(x)
    side = (self.patch, self.patch)
    x = nn.Conv(
      self.width, side, side, "VALID", dtype=self.dtype, name="embedding"
    )(x)
    out["stem"] = x
    num_images, grid_h, grid_w, _ = x.shape
    x = einops.rearrange(x, "b gh gw d -> b (gh gw) d")

    if self.posemb == "sincos2d":
      x = x + jnp.asarray(sincos2d(grid_h, grid_w, self.width), x.dtype)[None]
    if self.pool == "token":
      cls = self.param("cls", nn.initializers.zeros, (1, 1, self.width))
      cls = jnp.broadcast_to(cls, (num_images, 1, self.width)).astype(x.dtype)
      x = jnp.concatenate([cls, x], axis=1)

    x, encoder_out = Encoder(
      depth=self.depth,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      posemb=self.posemb,
      grid=(grid_h, grid_w),
      num_without=int(
        self.pool == "token" and not (self.posemb == "learn" and self.cls_row)
      ),
      dropout=self.dropout,
      stochastic_depth=self.stochastic_depth,
      gelu=self.gelu,
      ln_eps=self.ln_eps,
      dtype=self.dtype,
      scan=self.scan,
      remat=self.remat,
      name="Transformer",
    )(x, records)
    out |= encoder_out

    if self.pool == "token":
      x = x[:, 0]
    elif self.pool == "gap":
      x = x.mean(axis=1)
    else:
      x = MAPHead(
        self.mlp_dim,
        self.num_heads,
        self.gelu,
        self.ln_eps,
        self.dtype,
        name="MAPHead_0",
      )(x)
    out["pooled"] = x

    precise = at_least_float32(self.dtype)
    if self.pre_logits:
      x = nn.tanh(nn.Dense(self.width, dtype=precise, name="pre_logits")(x))
    out["pre_logits"] = x
    if self.num_classes:
      x = head(self.num_classes, self.head_bias, precise)(x)
    out["logits"] = x
    return x, out

  def _remat_unit(self):
    """A ResNet's units are computed again as a whole, or not at all."""
    return nn.remat if self.remat == "full" else lambda unit: unit

  def _check_options(self) -> None:
    for option, known in (
      ("pool", POOLS),
      ("posemb", POSEMBS),
      ("gelu", GELUS),
      ("remat", REMAT_POLICIES),
    ):
      got = getattr(self, option)
      if got not in known:
        raise ValueError(
          f"ViT.{option}: got {got!r}, expected one of {', '.join(known)}."
          + nearest(got, known)
        )
    if self.width % self.num_heads:
      raise ValueError(
        f"ViT.num_heads: got {self.num_heads} heads for a width of"
        f" {self.width}, expected a divisor of the width. Change"
        " config.model.num_heads or config.model.width."
      )

  def _check_sides(self, x) -> None:
    height, width = x.shape[1:3]
    if height % self.patch or width % self.patch:
      raise ValueError(
        f"ViT: got images of {height} x {width}"
        f" {'points' if self.stages else 'pixels'}, expected multiples of"
        f" the patch's side {self.patch}. Resize or crop in config.data.ops,"
        " or take another config.model.variant."
      )
