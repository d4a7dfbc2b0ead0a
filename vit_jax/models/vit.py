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
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from vit_jax.models.attention import MultiHeadDotProductAttention
from vit_jax.models.posemb import sincos2d
from vit_jax.variants import nearest

POOLS = ("token", "gap", "map")
POSEMBS = ("learn", "sincos2d", "none")

# What the forward pass keeps for the backward pass. "dots" keeps the products
# with weights; those of attention, which have batch dimensions and grow with
# the square of the number of tokens, are computed again.
REMAT_POLICIES = {
  "none": None,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}


class MlpBlock(nn.Module):
  """Dense, GELU, dense; dropout after both. GELU is the tanh form."""

  mlp_dim: int
  dropout: float
  dtype: DTypeLike

  @nn.compact
  def __call__(
    self, x: Float[Array, "b n d"], is_training: bool
  ) -> Float[Array, "b n d"]:
    def dense(features):
      return nn.Dense(
        features,
        dtype=self.dtype,
        kernel_init=nn.initializers.xavier_uniform(),
        bias_init=nn.initializers.normal(1e-6),
      )

    width = x.shape[-1]
    x = nn.gelu(dense(self.mlp_dim)(x), approximate=True)
    x = nn.Dropout(self.dropout)(x, deterministic=not is_training)
    x = dense(width)(x)
    return nn.Dropout(self.dropout)(x, deterministic=not is_training)


class EncoderBlock(nn.Module):
  """Equations 2 and 3: attention, then MLP, each x + branch(norm(x))."""

  mlp_dim: int
  num_heads: int
  dropout: float
  dtype: DTypeLike

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "b n d"],
    drop_rate: Float[Array, ""] | None,
    is_training: bool,
  ) -> tuple[Float[Array, "b n d"], dict[str, Array]]:
    """Returns the tokens and the intermediates by name.

    Args:
      x: Tokens.
      drop_rate: Chance that an example skips a branch; None skips none.
      is_training: Whether dropout is on.
    """
    out = {}
    y = nn.LayerNorm(dtype=self.dtype, name="LayerNorm_0")(x)
    y = MultiHeadDotProductAttention(
      self.num_heads, self.dtype, name="MultiHeadDotProductAttention_0"
    )(y, y)
    y = nn.Dropout(self.dropout)(y, deterministic=not is_training)
    out["attention"] = y = self._drop_branch(y, drop_rate)
    out["after_attention"] = x = x + y

    y = nn.LayerNorm(dtype=self.dtype, name="LayerNorm_1")(x)
    y = MlpBlock(self.mlp_dim, self.dropout, self.dtype, name="MlpBlock_0")(
      y, is_training
    )
    out["mlp"] = y = self._drop_branch(y, drop_rate)
    out["after_mlp"] = x = x + y
    return x, out

  def _drop_branch(self, x, rate):
    """Zeroes whole examples, and scales the rest to keep the expectation."""
    if rate is None:
      return x
    keep = jax.random.bernoulli(
      self.make_rng("dropout"), 1 - rate, (x.shape[0], 1, 1)
    )
    return jnp.where(keep, x / (1 - rate).astype(x.dtype), 0)


class PositionEmbedding(nn.Module):
  """A learned table, one row a token; the class token's is row 0."""

  @nn.compact
  def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    table = self.param(
      "pos_embedding", nn.initializers.normal(0.02), (1, *x.shape[1:])
    )
    return x + table.astype(x.dtype)


class Encoder(nn.Module):
  """Positions, blocks, and the norm at the end."""

  depth: int
  mlp_dim: int
  num_heads: int
  has_learned_positions: bool
  dropout: float
  stochastic_depth: float
  dtype: DTypeLike
  scan: bool
  remat: str

  @nn.compact
  def __call__(
    self, x: Float[Array, "b n d"], is_training: bool
  ) -> tuple[Float[Array, "b n d"], dict[str, Any]]:
    out = {}
    if self.has_learned_positions:
      x = PositionEmbedding(name="posembed_input")(x)
    out["with_posemb"] = x
    x = nn.Dropout(self.dropout)(x, deterministic=not is_training)

    block = EncoderBlock
    if self.remat != "none":
      block = nn.remat(
        EncoderBlock,
        policy=REMAT_POLICIES[self.remat],
        prevent_cse=not self.scan,  # a scan's body is safe from it as it is
        static_argnums=(3,),  # is_training; self counts
      )
    fields = dict(
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      dropout=self.dropout,
      dtype=self.dtype,
    )
    rates = None
    if is_training and self.stochastic_depth > 0:
      rates = jnp.linspace(0, self.stochastic_depth, self.depth)
    if self.scan:
      x, stacked = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(0, nn.broadcast),
        length=self.depth,
      )(**fields, name="encoderblock")(x, rates, is_training)
      for i in range(self.depth):
        out[f"encoderblock_{i}"] = {k: v[i] for k, v in stacked.items()}
    else:
      for i in range(self.depth):
        name = f"encoderblock_{i}"
        rate = None if rates is None else rates[i]
        x, out[name] = block(**fields, name=name)(x, rate, is_training)
    # From here on float32: the norm's output feeds pooling and head.
    out["encoded"] = x = nn.LayerNorm(dtype="float32", name="encoder_norm")(x)
    return x, out


class MAPHead(nn.Module):
  """Attention pooling: a learned probe asks the tokens, then an MLP.

  Source: big_vision, models/vit.py; arXiv:2106.04560, section 3.3.
  """

  mlp_dim: int
  num_heads: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b d"]:
    num_images, _, width = x.shape
    probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, width))
    probe = jnp.broadcast_to(probe, (num_images, 1, width))
    x = MultiHeadDotProductAttention(
      self.num_heads, self.dtype, name="MultiHeadDotProductAttention_0"
    )(probe, x)
    y = nn.LayerNorm(dtype=self.dtype, name="LayerNorm_0")(x)
    y = MlpBlock(self.mlp_dim, 0.0, self.dtype, name="MlpBlock_0")(y, False)
    return (x + y)[:, 0].astype("float32")


class ViT(nn.Module):
  """Images to logits, and every intermediate by name.

  Attributes:
    num_classes: Logits an image.
    patch: Side of a patch in pixels; must divide both sides of the images.
    width: Width d of a token.
    depth: Blocks.
    mlp_dim: Hidden width of the blocks' MLPs.
    num_heads: Attention heads; must divide the width.
    pool: What the head sees: "token" (the class token), "gap" (the mean over
      tokens) or "map" (attention pooling); the latter two have no class token.
    posemb: "learn" (a table with a row for the class token, too), "sincos2d"
      (fixed; the class token's row is zero) or "none".
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
  pre_logits: bool = False
  dropout: float = 0.0
  stochastic_depth: float = 0.0
  head_bias: float = 0.0
  dtype: DTypeLike = "float32"
  scan: bool = False
  remat: str = "none"

  @nn.compact
  def __call__(
    self, images: Float[Array, "b h w c"], *, is_training: bool = False
  ) -> tuple[Float[Array, "b classes"], dict[str, Any]]:
    """Applies the network.

    Args:
      images: In [-1, 1].
      is_training: Whether dropout and stochastic depth are on; they draw from
        the rng "dropout".

    Returns:
      Logits, float32, and the intermediates: stem [b, h / patch, w / patch,
      d]; with_posemb [b, n, d]; encoderblock_{i}, each with attention and mlp
      (the branches, as added) and after_attention and after_mlp (the sums);
      encoded [b, n, d]; pooled [b, d]; pre_logits [b, d], what the head sees;
      logits. Under jit, what nobody reads costs nothing.

    Raises:
      ValueError: An option is unknown, or sizes do not divide.
    """
    self._check(images)
    out = {}
    side = (self.patch, self.patch)
    x = nn.Conv(
      self.width, side, side, "VALID", dtype=self.dtype, name="embedding"
    )(images)
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
      has_learned_positions=self.posemb == "learn",
      dropout=self.dropout,
      stochastic_depth=self.stochastic_depth,
      dtype=self.dtype,
      scan=self.scan,
      remat=self.remat,
      name="Transformer",
    )(x, is_training)
    out |= encoder_out

    if self.pool == "token":
      x = x[:, 0]
    elif self.pool == "gap":
      x = x.mean(axis=1)
    else:
      x = MAPHead(self.mlp_dim, self.num_heads, self.dtype, name="MAPHead_0")(x)
    out["pooled"] = x

    if self.pre_logits:
      x = nn.tanh(nn.Dense(self.width, dtype="float32", name="pre_logits")(x))
    out["pre_logits"] = x
    x = nn.Dense(
      self.num_classes,
      dtype="float32",
      kernel_init=nn.initializers.zeros,
      bias_init=nn.initializers.constant(self.head_bias),
      name="head",
    )(x)
    out["logits"] = x
    return x, out

  def _check(self, images) -> None:
    for option, known in (
      ("pool", POOLS),
      ("posemb", POSEMBS),
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
    height, width = images.shape[1:3]
    if height % self.patch or width % self.patch:
      raise ValueError(
        f"ViT: got images of {height} x {width} pixels, expected multiples of"
        f" the patch's side {self.patch}. Resize or crop in config.data.ops,"
        " or take another config.model.variant."
      )


def stack_blocks(params: dict[str, Any]) -> dict[str, Any]:
  """Turns the parameters of a loop over blocks into those of a scan.

  Args:
    params: Nested dict with `Transformer/encoderblock_{i}`. Leaves are arrays;
      numpy stays numpy.

  Returns:
    The same with `Transformer/encoderblock`, a leading axis of length depth on
    its leaves; `params` itself if the blocks are stacked already.
  """
  encoder = dict(params.get("Transformer", {}))
  names = [k for k in encoder if k.startswith("encoderblock_")]
  if not names:
    return params
  blocks = [encoder.pop(f"encoderblock_{i}") for i in range(len(names))]
  encoder["encoderblock"] = jax.tree.map(
    lambda *leaves: (
      np.stack(leaves)
      if isinstance(leaves[0], np.ndarray)
      else jnp.stack(leaves)
    ),
    *blocks,
  )
  return params | {"Transformer": encoder}


def unstack_blocks(params: dict[str, Any]) -> dict[str, Any]:
  """Turns the parameters of a scan over blocks into those of a loop."""
  encoder = dict(params.get("Transformer", {}))
  if "encoderblock" not in encoder:
    return params
  stacked = encoder.pop("encoderblock")
  for i in range(jax.tree.leaves(stacked)[0].shape[0]):
    encoder[f"encoderblock_{i}"] = jax.tree.map(lambda a, i=i: a[i], stacked)
  return params | {"Transformer": encoder}
