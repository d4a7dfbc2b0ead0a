"""Attention weights of a trained model, and what is computed from them.

No forward pass keeps its weights: fused kernels never write them, and a scan
would stack them. So they are computed again, block by block, from what each
block got, which the model returns, and from the block's own parameters. The
model that is looked at is the model that was trained, whatever computes its
attention.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.families import ModelConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build
from vit_jax.models.attention import attention_weights
from vit_jax.models.posemb import learned_positions, sincos2d
from vit_jax.models.stacking import unstack_blocks

Sides = tuple[float | int, float | int]
Images = Float[Array, "b h w c"] | Float[np.ndarray, "b h w c"]


class _Weights(nn.Module):
  """The weights of `MultiHeadDotProductAttention`, from its parameters."""

  options: ViTConfig

  @nn.compact
  def __call__(
    self, queries: Float[Array, "b q d"], tokens: Float[Array, "b k d"]
  ) -> Float[Array, "b heads q k"]:
    options, width = self.options, tokens.shape[-1]
    heads = (options.size.num_heads, width // options.size.num_heads)
    query, key = (
      nn.DenseGeneral(heads, dtype=options.dtype, name=name)(x)
      for name, x in (("query", queries), ("key", tokens))
    )
    offsets = None
    if self.has_variable("params", "offsets"):
      offsets = self.get_variable("params", "offsets").astype(options.dtype)
    return attention_weights(query, key, jnp.float32, offsets)


class _Block(nn.Module):
  """The weights of an `EncoderBlock`, from its parameters."""

  options: ViTConfig
  grid: tuple[int, int]

  @nn.compact
  def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b heads n n"]:
    options = self.options
    if options.posemb_at != "stem":
      x = x + learned_positions(options, self.grid).astype(x.dtype)
    x = nn.LayerNorm(options.ln_eps, dtype=options.dtype, name="LayerNorm_0")(x)
    name = "MultiHeadDotProductAttention_0"
    return _Weights(options, name=name)(x, x)


class _Positions(nn.Module):
  """The table of the module whose parameters these are; None: it has none."""

  options: ViTConfig
  grid: tuple[int, int]

  @nn.compact
  def __call__(self) -> Float[Array, "1 n d"] | None:
    return learned_positions(self.options, self.grid)


class _Probe(nn.Module):
  """The weights of a `MAPHead`, from its parameters."""

  options: ViTConfig

  @nn.compact
  def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b heads 1 n"]:
    probe = self.get_variable("params", "probe")
    probe = jnp.broadcast_to(probe, (len(x), *probe.shape[1:]))
    name = "MultiHeadDotProductAttention_0"
    return _Weights(self.options, name=name)(probe, x)


@functools.partial(jax.jit, static_argnums=0)
def _tokens(config, params, images):
  """Returns the tokens that each block got, in order, and the encoded ones."""
  _, out = build(config, 0).apply({"params": params}, images)
  blocks = [out[f"encoderblock_{i}"] for i in range(config.size.depth)]
  got = [out["with_posemb"], *(block["after_mlp"] for block in blocks[:-1])]
  return got, out["encoded"]


@functools.partial(jax.jit, static_argnums=0)
def _applied(module, params, x):
  return module.apply({"params": params}, x)


def attention_by_layer(
  config: ModelConfig, params: dict[str, Any], images: Images
) -> Iterator[Float[Array, "b heads n n"]]:
  """Yields the weights of one block after the other, the first block first.

  Only one block's weights are in memory at a time: at 577 tokens and 12 heads
  (B/16 on images of 384 px) 16 MB an image.

  Args: See `attention_of`.
  """
  layers, _ = _opened(config, params, images)
  yield from layers


def attention_of(
  config: ModelConfig, params: dict[str, Any], images: Images
) -> Float[Array, "layers b heads n n"]:
  """Returns the attention weights of every block, float32.

  Row q holds the weights with which token q takes the values of all tokens; it
  sums to 1. Tokens are the patches, row by row, behind the class token where
  there is one. Weights are those before they are cast to `config.dtype`.

  Args:
    config: The model's options; those of training (dropout, remat, scan) have
      no effect.
    params: Its parameters, blocks stacked or not; more than it needs, such as
      a head's, is no fault.
    images: Floats in [-1, 1].

  Raises:
    ValueError: The model has no attention.
  """
  return jnp.stack(list(attention_by_layer(config, params, images)))


def rollout(
  attention: Float[Array, "layers b heads n n"],
) -> Float[Array, "b n n"]:
  """Returns how much each encoded token draws from each token at the start.

  The product of the layers' matrices (A + I) / 2, the last one leftmost, with A
  the mean over heads, and I the residual connection. Each row sums to 1.

  Source: arXiv:2005.00928, section 3 (attention rollout); arXiv:2010.11929,
  appendix D.8.

  Example:
    >>> a = jnp.full((2, 1, 3, 2, 2), 0.5)
    >>> rollout(a)[0].tolist()
    [[0.625, 0.375], [0.375, 0.625]]
  """
  return functools.reduce(roll, attention, None)


@jax.jit
def roll(
  rolled: Float[Array, "b n n"] | None, layer: Float[Array, "b heads n n"]
) -> Float[Array, "b n n"]:
  """Returns the rollout of one more layer; `rolled` is None before the first.

  For layers that are never in memory together, see `rollout`.
  """
  mixed = (layer.mean(axis=1) + jnp.eye(layer.shape[-1])[None]) / 2
  return mixed if rolled is None else mixed @ rolled


def attention_map(
  config: ModelConfig, params: dict[str, Any], images: Images
) -> Float[Array, "b gh gw"]:
  """Returns from which patches the model's answer is drawn, by rollout.

  The row of the rollout that the head reads: that of the class token; the mean
  of all rows for a model that averages the tokens; and for a model that pools
  them by attention (MAP) the mean weighted as its probe weights the tokens, in
  the mean over heads. What falls on the class token is left out, and the map
  is scaled to sum to 1.

  Args: See `attention_of`.

  Raises:
    ValueError: The model has no attention.
  """
  layers, encoded = _opened(config, params, images)
  rolled = functools.reduce(roll, layers, None)
  return _map(config, params, encoded, rolled, _grid(config, images))


class Survey(NamedTuple):
  """Of a few images; see `mean_distance` and `attention_map`."""

  distances: Float[Array, "layers b heads"]
  maps: Float[Array, "b gh gw"]


def survey(
  config: ModelConfig, params: dict[str, Any], images: Images
) -> Survey:
  """Returns mean distances, in pixels, and maps, from one forward pass.

  Args: See `attention_of`.

  Raises:
    ValueError: The model has no attention.
  """
  layers, encoded = _opened(config, params, images)
  grid, far, rolled = _grid(config, images), [], None
  (_, height, width, _), (rows, columns) = images.shape, grid
  for layer in layers:
    far.append(mean_distance(layer, grid, (height / rows, width / columns)))
    rolled = roll(rolled, layer)
  maps = _map(config, params, encoded, rolled, grid)
  return Survey(jnp.stack(far), maps)


def by_head(
  config: ModelConfig,
  params: dict[str, Any],
  images: Images,
  patch: tuple[int, int],
) -> Float[Array, "layers b heads gh gw"]:
  """Returns the weights of one patch on all patches, for each head.

  Args:
    config, params, images: See `attention_of`.
    patch: Its row and column, from 0.

  Raises:
    ValueError: The model has no attention.
  """
  grid = _grid(config, images)
  num_patches = grid[0] * grid[1]
  row = patch[0] * grid[1] + patch[1] - num_patches  # from the end
  layers = attention_by_layer(config, params, images)
  rows = jnp.stack([layer[:, :, row, -num_patches:] for layer in layers])
  return rows.reshape(*rows.shape[:-1], *grid)


def batch_size(config: ModelConfig, image_size: tuple[int, int]) -> int:
  """Returns how many images to look at together, 1 to 16.

  So that one block's weights, and the tokens that all blocks got, have at most
  2^26 numbers each (256 MB in float32).

  Args:
    config: The model's options.
    image_size: (height, width), pixels.

  Raises:
    ValueError: The model has no attention.
  """
  num_tokens, size = _num_tokens(config, image_size), config.size
  floats = num_tokens * max(
    size.num_heads * num_tokens, size.depth * size.width
  )
  return max(1, min(16, 2**26 // floats))


def mean_distance(
  attention: Float[Array, "*layers b heads n n"],
  grid: tuple[int, int],
  step: Sides = (1, 1),
) -> Float[Array, "*layers b heads"]:
  """Returns how far a patch looks in the mean over patches, for each head.

  The distance of a patch is sum_k A_qk |q - k|, with the Euclidean distance
  between the centres of patches q and k. The class token has no place: its row
  is left out, and so is the weight on it, the others being scaled to sum to 1.
  (The paper does not say what it does with it.) A patch that has no weight on
  patches at all does not count.

  Args:
    attention: Weights of all tokens.
    grid: Rows and columns of patches.
    step: Height and width of a patch, pixels; (1, 1): distances are in patches.

  Source: arXiv:2010.11929, Figure 7 (right) and appendix D.7.

  Example:
    >>> a = jnp.ones((1, 1, 2, 2)) / 2
    >>> mean_distance(a, (1, 2), (16, 16)).tolist()
    [[8.0]]
  """
  first = attention.shape[-1] - grid[0] * grid[1]
  weights = attention[..., first:, first:]
  total = weights.sum(-1)
  far = jnp.einsum("...qk,qk->...q", weights, distances(grid, step))
  counts = total != 0
  far = jnp.where(counts, far / jnp.where(counts, total, 1), 0)
  return far.sum(-1) / counts.sum(-1)


def distances(
  grid: tuple[int, int], step: Sides = (1, 1)
) -> Float[np.ndarray, "n n"]:
  """Returns the Euclidean distances between the centres of all patches.

  Args:
    grid: Rows and columns of patches.
    step: Height and width of a patch.
  """
  places = np.stack(np.mgrid[: grid[0], : grid[1]], -1).reshape(-1, 2) * step
  apart = places[:, None] - places[None]
  return np.sqrt(np.square(apart).sum(-1)).astype(np.float32)


def position_table(
  config: ModelConfig, params: dict[str, Any], image_size: tuple[int, int]
) -> Float[np.ndarray, "n d"]:
  """Returns what each patch gets for its position, row by row.

  A learned table, halves put together, or fixed sines. Where every block has a
  table of its own, it is that of the first block.

  Args:
    config: The model's options.
    params: Its parameters.
    image_size: (height, width), pixels.

  Raises:
    ValueError: No position is added to the patches; the text says why.
  """
  if "Transformer" not in params:
    raise ValueError(f"{config.variant} has no positions")
  grid = config.grid(image_size)
  if config.posemb == "sincos2d":
    return sincos2d(*grid, config.size.width)
  params = unstack_blocks(params)["Transformer"]
  if config.posemb_at == "blocks":
    params = params["encoderblock_0"]
  module = _Positions(config, grid)
  found = module.apply({"params": params})
  if found is None:
    how = {
      "relative": "positions are offsets, learned in every attention",
      "none": "the model has no positions",
    }
    raise ValueError(how[config.posemb])
  return np.asarray(found, np.float32)[0, -grid[0] * grid[1] :]


def _opened(config, params, images):
  """Returns the weights by layer, yet to be computed, and the encoded tokens.

  Raises:
    ValueError: The model has no attention.
  """
  _num_tokens(config, tuple(images.shape[1:3]))
  config, params = config.unstacked(), unstack_blocks(params)
  got, encoded = _tokens(config, params, images)
  encoder = params["Transformer"]
  shared = {}
  if config.posemb_at == "shared":
    shared = {"posembed_input": encoder["posembed_input"]}
  module = _Block(config, _grid(config, images))
  layers = (
    _applied(module, encoder[f"encoderblock_{i}"] | shared, x)
    for i, x in enumerate(got)
  )
  return layers, encoded


def has_attention(config: ModelConfig, image_size: tuple[int, int]) -> bool:
  """Whether patches attend to each other: in a Transformer, but no Mixer."""
  num_tokens = config.num_tokens(image_size)
  return num_tokens is not None and hasattr(config.size, "num_heads")


def _num_tokens(config, image_size) -> int:
  if not has_attention(config, image_size):
    raise ValueError(
      f"got {config.variant}, which has no attention between patches; expected"
      " a Vision Transformer or a hybrid."
    )
  return config.num_tokens(image_size)


def _map(config, params, encoded, rolled, grid) -> Float[Array, "b gh gw"]:
  """Returns the row of the rollout that the head reads, on the grid."""
  pooling = _pooling(config, params, encoded)
  row = jnp.einsum("bq,bqk->bk", pooling, rolled)[:, -grid[0] * grid[1] :]
  return (row / row.sum(-1, keepdims=True)).reshape(-1, *grid)


def _pooling(config, params, encoded) -> Float[Array, "b n"]:
  """Returns the weight of each token in what the head gets."""
  num_images, num_tokens, _ = encoded.shape
  if config.pool == "token":
    return jnp.zeros((num_images, num_tokens)).at[:, 0].set(1)
  if config.pool == "gap":
    return jnp.full((num_images, num_tokens), 1 / num_tokens)
  weights = _applied(_Probe(config.unstacked()), params["MAPHead_0"], encoded)
  return weights[:, :, 0].mean(axis=1)


def _grid(config, images) -> tuple[int, int]:
  return config.grid(tuple(images.shape[1:3]))
