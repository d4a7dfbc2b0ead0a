"""The Transformer's encoder: positions, blocks, last norm, attention pooling.

Equations 1 to 3 of arXiv:2010.11929. Parameters are float32. Matrix products,
and the tokens between blocks, have type `dtype`. The statistics of the norms
are float32.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from vit_jax.families.vit import ViTConfig
from vit_jax.models.attention import bias_of_offsets
from vit_jax.models.efficient_attention import attention, in_chunks
from vit_jax.models.gelu_dropout import gelu_dropout
from vit_jax.models.layers import Dense, DenseGeneral, chosen
from vit_jax.models.noise import DRAWS, RECORDS, Dropout, draw_all, drop_at
from vit_jax.models.posemb import LearnedOn, learned_positions
from vit_jax.models.precision import at_least_float32
from vit_jax.models.stacking import gather_parts

# Numbers of the tokens that enter the blocks; None: all of them.
PLACES_OF_TOKENS = Int[Array, "b m"] | None

# Where a block draws random numbers, in the order of the keys.
PLACES = ("attention", "skip_attention", "hidden", "mlp", "skip_mlp")

# "dots" saves the products with weights; those of attention, which have batch
# dimensions and grow with the square of the number of tokens, are recomputed.
POLICIES = {
  "none": None,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}

# What a block in a scan saves for the backward pass, as `checkpoint_name` names
# it.
SAVED_NAMES = ("query", "key", "value", "attended", "after_attention", "hidden")
_is_saved_by_name = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)


def remat_policy(options: ViTConfig) -> Callable[..., bool] | None:
  """Returns the policy of `jax.checkpoint` for a block, or None.

  Without `remat`, XLA chooses what it saves of blocks in a loop. In a scan, jax
  would save everything that a block computes, float32 copies and masks
  included. So a scan saves only `SAVED_NAMES`, sums (the norms' statistics) and
  the results of cuDNN's attention.
  """
  if options.scan and options.remat == "none":
    return _is_saved_in_scan
  return POLICIES[options.remat]


def _is_saved_in_scan(primitive, *args, **params) -> bool:
  return (
    primitive is jax.lax.reduce_sum_p
    # Inside jax's own custom gradient, where no name of ours reaches.
    or primitive.name.startswith("dot_product_attention_fwd")
    or _is_saved_by_name(primitive, *args, **params)
  )


class MultiHeadDotProductAttention(nn.Module):
  """softmax(Q K^T / sqrt(d)) V for each head, between linear maps.

  Q is a linear map of `queries`, K and V are linear maps of `tokens`; all have
  biases. `attention.dot_product_attention` is the formula in code.

  Attributes:
    num_heads: Number of heads; must divide the width of a token.
    dtype: Type of the matrix products; parameters and softmax are float32.
    num_positions: For self-attention with learned offsets, the number of all
      tokens, class token included; None for no offsets.
  """

  num_heads: int
  dtype: DTypeLike = "float32"
  num_positions: int | None = None

  @nn.compact
  def __call__(
    self,
    queries: Float[Array, "b q d"],
    tokens: Float[Array, "b k d"],
    places: PLACES_OF_TOKENS = None,
  ) -> Float[Array, "b q d"]:
    width = tokens.shape[-1]
    heads = (self.num_heads, width // self.num_heads)

    def dense(name, features, x, axis=-1):
      return DenseGeneral(
        features,
        axis,
        dtype=self.dtype,
        kernel_init=nn.initializers.xavier_uniform(),
        name=name,
      )(x).astype(self.dtype)

    query = dense("query", heads, queries)
    key, value = (dense(name, heads, tokens) for name in ("key", "value"))
    offsets = bias = None
    if self.num_positions:
      shape = (2 * self.num_positions - 1, *heads)
      offsets = self.param("offsets", nn.initializers.normal(0.02), shape)
      offsets = offsets.astype(self.dtype)
      if places is not None:
        bias, offsets = bias_of_offsets(query, offsets, places), None
    out = attention(query, key, value, offsets, bias)
    return dense("out", width, out, (-2, -1))


class MlpBlock(nn.Module):
  """Dense, GELU ("tanh" or "erf"), dense; dropout after both."""

  options: ViTConfig

  @nn.compact
  def __call__(
    self, x: Float[Array, "b n d"], draws: DRAWS
  ) -> Float[Array, "b n d"]:
    options = self.options

    def dense(features, x):
      return Dense(
        features,
        dtype=options.dtype,
        kernel_init=nn.initializers.xavier_uniform(),
        bias_init=nn.initializers.normal(1e-6),
      )(x).astype(options.dtype)

    width = x.shape[-1]
    x = checkpoint_name(dense(options.size.mlp_dim, x), "hidden")
    x = gelu_dropout(x, draws, options.dropout, options.gelu == "tanh")
    x = dense(width, x)
    return drop_at("mlp", x, draws, options.dropout).astype(x.dtype)


class EncoderBlock(nn.Module):
  """Equations 2 and 3: attention, then MLP, each as x + branch(norm(x)).

  Attributes:
    options: The model's options; with `posemb_at` "blocks", each block has its
      own position table.
    grid: Rows and columns of patches.
  """

  options: ViTConfig
  grid: tuple[int, int]

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "b n d"],
    drop_rate: Float[Array, ""] | None,
    draws: DRAWS,
    positions: Float[Array, "#b n d"] | None,
    places: PLACES_OF_TOKENS = None,
  ) -> tuple[Float[Array, "b n d"], dict[str, Array]]:
    """Returns the tokens and the intermediates by name.

    Args:
      x: Tokens.
      drop_rate: Probability that an example skips a branch; None to skip none.
      draws: Random numbers of this block, by the place in `PLACES`; nothing is
        dropped at a place that is missing.
      positions: Added to the tokens first. With None, the block's own table is
        added, if it has one.
      places: Numbers of the tokens among all of the grid; None for all.
    """
    out, options = {}, self.options
    if options.posemb_at == "blocks":
      positions = learned_positions(options, self.grid)
      if places is not None:
        positions = chosen(positions, places)
    if positions is not None:
      x = (x + positions).astype(x.dtype)

    def norm(name):
      return nn.LayerNorm(options.ln_eps, dtype=options.dtype, name=name)

    heads, num_positions = options.size.num_heads, None
    if options.posemb == "relative":
      num_positions = math.prod(self.grid) + options.num_class_tokens
    attention = MultiHeadDotProductAttention(
      heads,
      options.dtype,
      num_positions,
      name="MultiHeadDotProductAttention_0",
    )
    norm_0, norm_1 = norm("LayerNorm_0"), norm("LayerNorm_1")
    mlp = MlpBlock(options, name="MlpBlock_0")

    def attend(x, draws, places):
      y = norm_0(x)
      y = attention(y, y, places)
      y = drop_at("attention", y, draws, options.dropout).astype(y.dtype)
      # In float32: bfloat16 would round the first blocks' scales to 1.
      y = drop_at("skip_attention", y, draws, drop_rate)
      return y, (x + y).astype(x.dtype)

    out["attention"], x = in_chunks(attend, heads, x, draws, places)
    out["after_attention"] = x = checkpoint_name(x, "after_attention")
    y = mlp(norm_1(x), draws)
    out["mlp"] = y = drop_at("skip_mlp", y, draws, drop_rate)
    out["after_mlp"] = x = (x + y).astype(x.dtype)
    return x, out


class Encoder(nn.Module):
  """Positions, blocks, and the last norm.

  Attributes:
    options: `posemb` chooses the positions, `posemb_at` where they are added.
      Positions without parameters are added before.
  """

  options: ViTConfig

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "b n d"],
    grid: tuple[int, int],
    records: RECORDS,
    places: PLACES_OF_TOKENS = None,
    table: LearnedOn | None = None,
  ) -> tuple[Float[Array, "b m d"], dict[str, Any]]:
    """Returns the encoded tokens and the intermediates.

    Args:
      x: All tokens of the images, n for each.
      grid: Rows and columns of patches.
      records: A number for each image; None for no dropout.
      places: Numbers of the m tokens that enter the blocks, after positions are
        added; None for all.
      table: See `ViT.encode`.
    """
    options, positions = self.options, None
    if options.posemb_at != "blocks":
      positions = learned_positions(options, grid, table)
    if options.posemb_at == "stem" and positions is not None:
      x, positions = (x + positions).astype(x.dtype), None
    if places is not None:
      x = chosen(x, places)
      if positions is not None:
        positions = chosen(positions, places)
    out = {"with_posemb": x}
    x = Dropout(options.dropout)(x, records)
    x, blocks = self._apply(EncoderBlock, x, grid, records, positions, places)
    # From here on float32: the norm's output feeds pooling and head.
    out["encoded"] = x = nn.LayerNorm(
      options.ln_eps, dtype=at_least_float32(options.dtype), name="encoder_norm"
    )(x)
    return x, out | blocks

  def _apply(
    self,
    block: type[nn.Module],
    x: Float[Array, "b n d"],
    grid: tuple[int, int],
    records: RECORDS,
    positions: Any,
    of_images: Any,
  ) -> tuple[Float[Array, "b n d"], dict[str, Any]]:
    """Applies all blocks, in a loop or in a scan.

    Args:
      block: A class with the attributes and arguments of `EncoderBlock`.
      x: Tokens.
      grid: Rows and columns of patches.
      records: A number for each image; None without random numbers.
      positions: Argument of every block.
      of_images: Argument of every block, with a row for each image; or None.

    Returns:
      The tokens, and the intermediates of each encoderblock_{i}.
    """
    options, out, policy = self.options, {}, remat_policy(self.options)
    depth = options.size.depth
    if options.scan and not self.is_initializing():
      block = nn.map_variables(block, "params", gather_parts)
    if policy is not None:
      block = nn.remat(block, policy=policy, prevent_cse=not options.scan)
    rates, draws = self._draw(x.shape[1:], records)
    if options.scan:
      x, stacked = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, 0, nn.broadcast, nn.broadcast),
        length=depth,
      )(
        options, grid, name="encoderblock"
      )(x, rates, draws, positions, of_images)
      for i in range(depth):
        out[f"encoderblock_{i}"] = {k: v[i] for k, v in stacked.items()}
    else:
      for i in range(depth):
        name = f"encoderblock_{i}"
        rate, drawn = jax.tree.map(lambda a, i=i: a[i], (rates, draws))
        x, out[name] = block(options, grid, name=name)(
          x, rate, drawn, positions, of_images
        )
    return x, out

  def _draw(
    self, shape: tuple[int, int], records: RECORDS
  ) -> tuple[Float[Array, " depth"] | None, DRAWS]:
    """Draws the random numbers of all blocks; depth is the first dimension.

    Args:
      shape: Shape of the tokens of an image.
      records: A number for each image; None without random numbers.

    Returns:
      The rates of stochastic depth, or None; the draws for dropout and
      stochastic depth.
    """
    options, rates, shapes = self.options, None, {}
    if records is not None and options.stochastic_depth:
      rates = self._rates()
      shapes = {"skip_attention": (1, 1), "skip_mlp": (1, 1)}
    if records is not None and options.dropout:
      shapes["attention"] = shapes["mlp"] = shape
      shapes["hidden"] = shape[0], options.size.mlp_dim
    if not shapes:
      return None, {}
    keys = jax.random.split(self.make_rng("dropout"), options.size.depth)
    return rates, draw_all(keys, records, PLACES, shapes)

  def _rates(self) -> Float[Array, " depth"]:
    """Returns the rates of stochastic depth of all blocks; 0 in the first."""
    options = self.options
    return jnp.linspace(0, options.stochastic_depth, options.size.depth)


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
