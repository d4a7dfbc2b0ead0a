"""The Vision Transformer with parts of later models; see `ModernConfig`.

It has the interface of `ViT`, and the same names of parameters and
intermediates. The order of an image's tokens is class token, distillation
token, registers, patches. Without any part it computes the same as `ViT`.

Initial values: registers are normal with a standard deviation of 0.02, as in
DINOv3, and so is the distillation token, as in DeiT. LayerScale's factors are
`layer_scale`. The projection is normal with a variance of 1 / width, as in
CLIP. Kernels and class token are initialised as in `ViT`.
"""

from collections.abc import Callable
from typing import Any

import einops
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from vit_jax.models.efficient_attention import attention, in_chunks
from vit_jax.models.encoder import PLACES_OF_TOKENS, Encoder, MAPHead
from vit_jax.models.gelu_dropout import gelu_dropout
from vit_jax.models.layers import Dense, DenseGeneral, chosen, head
from vit_jax.models.noise import DRAWS, RECORDS, Draw, Dropout, drop_at
from vit_jax.models.posemb import LearnedOn, learned_positions, sincos2d
from vit_jax.models.precision import at_least_float32
from vit_jax.models.resample import num_bias_rows
from vit_jax.models.vit import ViT, places_of
from vit_jax.zoo.families.modern import ModernConfig
from vit_jax.zoo.models import relative_bias
from vit_jax.zoo.models.rope import (
  Angles,
  Rotation,
  rotate,
  rotation,
  unscaled,
)

TOKENS = Float[Array, "1 k d"] | Float[np.ndarray, "1 k d"]


class LayerScale(nn.Module):
  """x * scale, with a learned factor for each channel; float32.

  Source: arXiv:2103.17239, equation 4.
  """

  initial: float

  @nn.compact
  def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    init = nn.initializers.constant(self.initial)
    return x * self.param("scale", init, (x.shape[-1],))[None, None]


# What all blocks need for positions: a rotation, or angles that each block
# rescales; rows of `relative_bias`.
POSITIONS = Rotation | Angles | Int[Array, "n n"] | None
OF_IMAGES = Rotation | Angles | Int[Array, "b n n"] | None  # images differ
FACTOR = "rope_rescale"  # of angles: key in the draws of a block
BLOCK_DRAWS = dict[str, Draw | Float[Array, ""]]


class Attention(nn.Module):
  """`MultiHeadDotProductAttention` with the positions of later models.

  Attributes:
    options: `qkv_bias` decides which maps have biases, `rope` how queries and
      keys are rotated, `posemb` whether scores have a bias.
    grid: Rows and columns of patches.
  """

  options: ModernConfig
  grid: tuple[int, int]

  @nn.compact
  def __call__(
    self, x: Float[Array, "b n d"], positions: POSITIONS | OF_IMAGES
  ) -> Float[Array, "b n d"]:
    options, width = self.options, x.shape[-1]
    heads = (options.size.num_heads, width // options.size.num_heads)

    def dense(name, features, x, axis=-1, use_bias=True):
      return DenseGeneral(
        features,
        axis,
        use_bias=use_bias,
        dtype=options.dtype,
        kernel_init=nn.initializers.xavier_uniform(),
        name=name,
      )(x).astype(options.dtype)

    has_bias, key_has = options.qkv_bias != "none", options.qkv_bias == "all"
    query = dense("query", heads, x, use_bias=has_bias)
    key = dense("key", heads, x, use_bias=key_has)
    value = dense("value", heads, x, use_bias=has_bias)
    bias = None
    if isinstance(positions, Rotation):
      query = rotate(query, options.rope, positions)
      key = rotate(key, options.rope, positions)
    elif positions is not None:
      shape = (num_bias_rows(self.grid), heads[0])
      table = self.param("relative_bias", nn.initializers.zeros, shape)
      bias = relative_bias.bias(jnp.asarray(table), positions)
    out = attention(query, key, value, bias=bias)
    return dense("out", width, out, (-2, -1))


def attention_positions(
  options: ModernConfig,
  grid: tuple[int, int],
  params: dict[str, Any],
  num_tokens: int,
) -> tuple[Callable[[Array], Array], Float[Array, "heads n n"] | None]:
  """Returns what positions change; see `vit_jax.models.attention_positions`."""
  turn, bias = rotation(options, grid, num_tokens), None
  if "relative_bias" in params:
    rows = jnp.asarray(relative_bias.rows(grid))
    bias = relative_bias.bias(params["relative_bias"], rows)
  return lambda x: x if turn is None else rotate(x, options.rope, turn), bias


class MlpBlock(nn.Module):
  """Dense, activation, optional norm, dense; dropout after both dense layers.

  The activation is GELU(u), or SiLU(g) u for "swiglu", where u and g are two
  linear maps of the tokens (`Dense_0` and `Gate`). The "quick" GELU is
  u sigmoid(1.702 u).

  Source: arXiv:2002.05202, equation 6, for SwiGLU; arXiv:1606.08415, section 2,
    for quick GELU; arXiv:2303.11331, section 2, for the norm.
  """

  options: ModernConfig

  @nn.compact
  def __call__(
    self, x: Float[Array, "b n d"], draws: DRAWS
  ) -> Float[Array, "b n d"]:
    options = self.options

    def dense(name, features, x):
      return Dense(
        features,
        dtype=options.dtype,
        kernel_init=nn.initializers.xavier_uniform(),
        bias_init=nn.initializers.normal(1e-6),
        name=name,
      )(x).astype(options.dtype)

    width, hidden = x.shape[-1], options.size.mlp_dim
    y = checkpoint_name(dense("Dense_0", hidden, x), "hidden")
    if options.mlp == "swiglu":
      gate = checkpoint_name(dense("Gate", hidden, x), "hidden")
      y = self._drop(nn.silu(gate) * y, draws)
    elif options.gelu == "quick":
      y = self._drop(y * nn.sigmoid(1.702 * y), draws)
    else:
      y = gelu_dropout(y, draws, options.dropout, options.gelu == "tanh")
    if options.mlp_norm:
      y = nn.LayerNorm(options.ln_eps, dtype=options.dtype, name="LayerNorm_0")(
        y
      )
    y = dense("Dense_1", width, y)
    return drop_at("mlp", y, draws, options.dropout).astype(y.dtype)

  def _drop(self, x: Array, draws: DRAWS) -> Array:
    return drop_at("hidden", x, draws, self.options.dropout).astype(x.dtype)


class Block(nn.Module):
  """`EncoderBlock` with later parts: x + scale * branch(norm(x)), twice.

  Attributes:
    options: The model's options.
    grid: Rows and columns of patches.
  """

  options: ModernConfig
  grid: tuple[int, int]

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "b n d"],
    drop_rate: Float[Array, ""] | None,
    draws: BLOCK_DRAWS,
    positions: POSITIONS,
    of_images: OF_IMAGES = None,
  ) -> tuple[Float[Array, "b n d"], dict[str, Array]]:
    """Returns the tokens and the intermediates by name.

    Args:
      x, drop_rate, draws: See `EncoderBlock`; `draws` may have a `FACTOR`.
      positions: Positions that attention adds or rotates by, or None.
      of_images: The same where each image has its own, or None.
    """
    out, options = {}, self.options
    if FACTOR in draws:
      draws, factor = dict(draws), draws[FACTOR]
      del draws[FACTOR]
      positions, of_images = (
        x.rescaled(factor) if isinstance(x, Angles) else x
        for x in (positions, of_images)
      )

    def norm(name):
      return nn.LayerNorm(options.ln_eps, dtype=options.dtype, name=name)

    def scale(name):
      if options.layer_scale is None:
        return lambda y: y
      return LayerScale(options.layer_scale, name=name)

    norm_0, norm_1 = norm("LayerNorm_0"), norm("LayerNorm_1")
    scale_0, scale_1 = scale("LayerScale_0"), scale("LayerScale_1")
    attention = Attention(
      options, self.grid, name="MultiHeadDotProductAttention_0"
    )
    mlp = MlpBlock(options, name="MlpBlock_0")

    def attend(x, draws, of_images):
      y = attention(norm_0(x), positions if of_images is None else of_images)
      y = drop_at("attention", y, draws, options.dropout).astype(y.dtype)
      y = drop_at("skip_attention", scale_0(y), draws, drop_rate)
      return y, (x + y).astype(x.dtype)

    num_heads = options.size.num_heads
    out["attention"], x = in_chunks(attend, num_heads, x, draws, of_images)
    out["after_attention"] = x = checkpoint_name(x, "after_attention")
    y = scale_1(mlp(norm_1(x), draws))
    out["mlp"] = y = drop_at("skip_mlp", y, draws, drop_rate)
    out["after_mlp"] = x = (x + y).astype(x.dtype)
    return x, out


class ModernEncoder(Encoder):
  """`Encoder` with registers, and with norms and positions of later models."""

  options: ModernConfig

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "b n d"],
    grid: tuple[int, int],
    records: RECORDS,
    places: PLACES_OF_TOKENS = None,
    registers: TOKENS | None = None,
    table: LearnedOn | None = None,
  ) -> tuple[Float[Array, "b m d"], dict[str, Array]]:
    """Returns the encoded tokens and the intermediates; see `Encoder`.

    Args:
      x, grid, records: See `Encoder`; x is without registers.
      places: Numbers of the tokens that enter the blocks, registers included.
      registers: k tokens to insert before the patches, or None.
      table: See `ViT.encode`.
    """
    options = self.options
    positions = learned_positions(options, grid, table)
    if positions is not None:
      x = (x + positions).astype(x.dtype)
    if registers is not None:
      x = insert(registers, x, options.num_class_tokens)
    num_tokens = x.shape[1]
    if places is not None:
      x = chosen(x, places)
    if options.pre_norm:
      x = nn.LayerNorm(options.ln_eps, dtype=options.dtype, name="pre_norm")(x)
    out = {"with_posemb": x}
    x = Dropout(options.dropout)(x, records)
    of_blocks, of_images = rotation(options, grid, num_tokens), None
    if self._rescales(records):
      of_blocks = unscaled(options, grid, num_tokens)
    if options.posemb == "relative_bias":
      of_blocks = jnp.asarray(relative_bias.rows(grid))
    if places is not None:
      of_blocks, of_images = None, _chosen_positions(of_blocks, places)
    x, blocks = self._apply(Block, x, grid, records, of_blocks, of_images)
    precise = at_least_float32(options.dtype)
    if options.final_norm == "tokens":
      x = nn.LayerNorm(options.ln_eps, dtype=precise, name="encoder_norm")(x)
    out["encoded"] = x = x.astype(precise)
    return x, out | blocks

  def _rescales(self, records: RECORDS) -> bool:
    return records is not None and self.options.rope_rescale is not None

  def _draw(self, shape, records):
    """See `Encoder._draw`; also draws the factors of the coordinates."""
    rates, draws = super()._draw(shape, records)
    if self._rescales(records):
      limit = np.log(self.options.rope_rescale)
      exponents = jax.random.uniform(
        self.make_rng("dropout"),
        (self.options.size.depth,),
        minval=-limit,
        maxval=limit,
      )
      draws = {**draws, FACTOR: jnp.exp(exponents)}
    return rates, draws

  def _rates(self) -> Float[Array, " depth"]:
    options = self.options
    if options.stochastic_depth_rule == "linear":
      return super()._rates()
    return jnp.full(options.size.depth, options.stochastic_depth)


def _chosen_positions(
  positions: POSITIONS, places: Int[Array, "b m"]
) -> Rotation | Angles | Int[Array, "b m m"] | None:
  """Returns the positions of the tokens of each image."""
  if isinstance(positions, Rotation | Angles):
    return type(positions)(*(chosen(table, places) for table in positions))
  if positions is None:
    return None
  return positions[places[:, :, None], places[:, None, :]]


def insert(
  tokens: TOKENS, x: Float[Array, "b n d"], place: int = 0
) -> Float[Array, "b m d"]:
  """Returns x with the same tokens inserted in every image.

  Args:
    tokens: The tokens to insert.
    x: Tokens of the images.
    place: Number of tokens of x before the inserted ones.
  """
  tokens = jnp.broadcast_to(tokens, (x.shape[0], *tokens.shape[1:]))
  parts = [x[:, :place], tokens.astype(x.dtype), x[:, place:]]
  return jnp.concatenate(parts[place == 0 :], axis=1)


class Modern(ViT):
  """Maps images to logits and a dict of all intermediates; see `ViT`.

  Attributes:
    options: Sizes and parts.
    num_classes: Number of logits per image; with 0 there is no head, and its
      input is returned.
  """

  options: ModernConfig
  num_classes: int

  def setup(self):
    options = self.options
    if errors := list(options.errors()):
      raise ValueError("\n".join(errors))
    precise, width = at_least_float32(options.dtype), options.size.width
    self.Transformer = ModernEncoder(options)
    zeros, normal = nn.initializers.zeros, nn.initializers.normal(0.02)
    if options.class_token:
      self.cls = self.param("cls", zeros, (1, 1, width))
    if options.distilled:
      self.dist = self.param("dist", normal, (1, 1, width))
    if options.registers:
      shape = (1, options.registers, width)
      self.registers = self.param("registers", normal, shape)
    if options.pool == "map":
      self.MAPHead_0 = MAPHead(options)
    if options.final_norm == "pooled":
      self.pooled_norm = nn.LayerNorm(options.ln_eps, dtype=precise)
    if options.projection:
      self.projection = nn.Dense(
        options.projection,
        use_bias=False,
        dtype=precise,
        kernel_init=nn.initializers.normal(width**-0.5),
      )
    if options.pre_logits:
      self.pre_logits = nn.Dense(width, dtype=precise)
    if self.num_classes:
      self.head = head(self.num_classes, options.head_bias, precise)
    if self.num_classes and options.distilled:
      self.head_dist = head(self.num_classes, options.head_bias, precise)

  def __call__(self, images, *, is_training=False, records=None):
    """Applies the network; see `ViT.__call__`.

    With `distilled`, each class token has its own head: the logits are the mean
    of both heads' logits, and pre_logits is the mean of both tokens; the
    intermediates class_logits and distillation_logits are those of each head.
    """
    x, out = super().__call__(images, is_training=is_training, records=records)
    if self.options.distilled:
      second = out["encoded"][:, 1]
      out["pre_logits"] = (out["pre_logits"] + second) / 2
      if self.num_classes:
        second = self.head_dist(second)
        out["class_logits"], out["distillation_logits"] = x, second
      out["logits"] = x = (x + second) / 2
    return x, out

  def encode(self, tokens, records, keep=None, table=None):
    """Applies class tokens, positions, registers, blocks and the last norm.

    See `ViT.encode`; n is the number of all tokens. Class token, distillation
    token and registers always enter the blocks.
    """
    options = self.options
    _, grid_h, grid_w, width = tokens.shape
    x = einops.rearrange(tokens, "b gh gw d -> b (gh gw) d")
    if options.posemb == "sincos2d":
      x = x + jnp.asarray(sincos2d(grid_h, grid_w, width), x.dtype)[None]
    if options.distilled:
      x = insert(self.dist, x)
    if options.class_token:
      x = insert(self.cls, x)
    registers = self.registers if options.registers else None
    places = places_of(keep, options.num_class_tokens + options.registers)
    return self.Transformer(
      x, (grid_h, grid_w), records, places, registers, table
    )

  def pool(self, encoded: Float[Array, "b n d"]) -> Float[Array, "b e"]:
    """Returns one vector per image, after its norm and projection."""
    options = self.options
    patches = encoded[:, options.num_class_tokens + options.registers :]
    x = {
      "token": lambda: encoded[:, 0],
      "gap": lambda: patches.mean(axis=1),
      "map": lambda: self.MAPHead_0(patches),
      "token_gap": lambda: jnp.concatenate(
        [encoded[:, 0], patches.mean(axis=1)], axis=-1
      ),
    }[options.pool]()
    if options.final_norm == "pooled":
      x = self.pooled_norm(x)
    return self.projection(x) if options.projection else x
