"""Attention weights of a trained model, and statistics of them.

A forward pass does not return its attention weights: fused kernels never write
them, and a scan would stack them. So they are recomputed block by block, from
the block's parameters and its input, which the model returns. This works for
every implementation of attention of our Transformers. Another family declares
where its modules leave the weights, see `ModelConfig.ATTENTION`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from vit_jax.families import ModelConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.models import attention_positions, build
from vit_jax.models.attention import attention_weights
from vit_jax.models.posemb import learned_positions, sincos2d
from vit_jax.models.stacking import unstack_blocks

Sides = tuple[float | int, float | int]
Images = Float[Array, "b h w c"] | Float[np.ndarray, "b h w c"]


def _attention(
  options: ViTConfig,
  params: dict[str, Any],
  queries: Float[Array, "b q d"],
  tokens: Float[Array, "b k d"],
  turn: Callable[[Array], Array] = lambda x: x,
  bias: Float[Array, "heads q k"] | None = None,
) -> Float[Array, "b heads q k"]:
  """Returns the weights of a `MultiHeadDotProductAttention` or `Attention`."""
  size, offsets = options.size, params.get("offsets")
  heads = (size.num_heads, size.width // size.num_heads)

  def project(name, x):
    has_bias = "bias" in params[name]
    dense = nn.DenseGeneral(heads, use_bias=has_bias, dtype=options.dtype)
    return turn(dense.apply({"params": params[name]}, x))

  query, key = project("query", queries), project("key", tokens)
  if offsets is not None:
    offsets = jnp.asarray(offsets, options.dtype)
  return attention_weights(query, key, jnp.float32, offsets, bias)


class _Positions(nn.Module):
  """The position table among some parameters, or None."""

  options: ViTConfig
  grid: tuple[int, int]

  @nn.compact
  def __call__(self) -> Float[Array, "1 n d"] | None:
    return learned_positions(self.options, self.grid)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _block_attention(
  options: ViTConfig,
  grid: tuple[int, int],
  params: dict[str, Any],
  x: Float[Array, "b n d"],
) -> Float[Array, "b heads n n"]:
  """Returns the attention weights of a block whose input is x."""
  if options.posemb_at != "stem":
    table = _Positions(options, grid).apply({"params": params})
    x = x + table.astype(x.dtype)
  norm = nn.LayerNorm(options.ln_eps, dtype=options.dtype)
  x = norm.apply({"params": params["LayerNorm_0"]}, x)
  params = params["MultiHeadDotProductAttention_0"]
  turn, bias = attention_positions(options, grid, params, x.shape[1])
  return _attention(options, params, x, x, turn, bias)


@functools.partial(jax.jit, static_argnums=0)
def _probe_attention(
  options: ViTConfig, params: dict[str, Any], x: Float[Array, "b n d"]
) -> Float[Array, "b heads 1 n"]:
  """Returns the attention weights of a `MAPHead` on the encoded patches x."""
  probe = jnp.broadcast_to(params["probe"], (len(x), 1, x.shape[-1]))
  return _attention(options, params["MultiHeadDotProductAttention_0"], probe, x)


@functools.partial(jax.jit, static_argnums=0)
def _run(
  options: ViTConfig, params: dict[str, Any], images: Images
) -> tuple[list[Float[Array, "b n d"]], Float[Array, "b n d"]]:
  """Returns the input of each block, in order, and the encoded tokens."""
  _, out = build(options, 0).apply({"params": params}, images)
  places = map(options.AFTER_BLOCK.format, range(options.size.depth - 1))
  inputs = [out["with_posemb"], *(_at(out, place) for place in places)]
  return inputs, out["encoded"]


@functools.partial(jax.jit, static_argnums=0)
def _stated(
  config: ModelConfig, params: dict[str, Any], images: Images
) -> list[Float[Array, "b heads n n"]]:
  """Returns the weights that the modules of a family leave for each block.

  Raises:
    ValueError: They leave none where `ATTENTION` says.
  """
  _, variables = build(config, 0).apply(
    {"params": params}, images, mutable=["intermediates"]
  )
  left, layers = variables.get("intermediates", {}), []
  blocks = {config.block_of(k) for k in flatten_dict(params, sep="/")}
  for i in sorted(blocks - {None}):
    place = config.ATTENTION.format(i)
    weights = _at(left, place)
    if weights is None:
      raise ValueError(
        f"attention: got no {place} in the intermediates, expected the weights"
        f" of a block ({type(config).__name__}.ATTENTION, BLOCKS)."
      )
    if isinstance(weights, tuple):  # of `sow`
      (weights,) = weights
    layers.append(weights.astype(jnp.float32))
  if not layers:
    raise ValueError(
      f"attention: got no blocks, expected {type(config).__name__}.BLOCKS."
    )
  return layers


def _at(tree: dict[str, Any], path: str) -> Any:
  """Returns the value at a path in nested dicts, or None."""
  for key in path.split("/"):
    tree = tree.get(key) if isinstance(tree, dict) else None
  return tree


def attention_by_layer(
  config: ModelConfig, params: dict[str, Any], images: Images
) -> Iterator[Float[Array, "b heads n n"]]:
  """Yields the attention weights block by block, from the first block on.

  Only one block's weights are in memory at a time: 16 MB an image for 577
  tokens and 12 heads (B/16 at 384 px).

  Args: See `attention_of`.
  """
  layers, _ = _layers_and_encoded(config, params, images)
  yield from layers


def attention_of(
  config: ModelConfig, params: dict[str, Any], images: Images
) -> Float[Array, "layers b heads n n"]:
  """Returns the attention weights of every block, float32.

  Row q has the weights with which token q averages the values of all tokens; it
  sums to 1. The tokens are class token and registers, if any, then the patches
  row by row. The weights are not cast to `config.dtype`.

  Args:
    config: The model's options. Those of training (dropout, remat, scan) have
      no effect.
    params: Its parameters, blocks stacked or not, with or without a head.
    images: Floats in [-1, 1].

  Raises:
    ValueError: The model has no attention.
  """
  return jnp.stack(list(attention_by_layer(config, params, images)))


def rollout(
  attention: Iterable[Float[Array, "b heads n n"]],
) -> Float[Array, "b n n"]:
  """Returns how much each encoded token depends on each input token.

  It is the product of the layers' matrices (A + I) / 2, the last one leftmost.
  A is the mean over heads, I the residual connection. Each row sums to 1.

  Args:
    attention: Attention weights of each layer, in an array or one by one.

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
  """Returns the rollout with one more layer; `rolled` is None before the first.

  It computes `rollout` without all layers in memory.
  """
  mixed = (layer.mean(axis=1) + jnp.eye(layer.shape[-1])[None]) / 2
  return mixed if rolled is None else mixed @ rolled


def attention_map(
  config: ModelConfig, params: dict[str, Any], images: Images
) -> Float[Array, "b gh gw"]:
  """Returns how much each patch contributes to the head's input, by rollout.

  It is the row of the rollout of what the head reads: the row of the class
  token, or the mean of both class tokens' rows; the mean of the patches' rows
  if the model averages patches; the mean of these two if it does both. With
  attention pooling (MAP), it is the mean of the rows weighted by the probe's
  attention, averaged over its heads. Class tokens and registers are left out of
  the map, which is then scaled to sum to 1.

  Args: See `attention_of`.

  Raises:
    ValueError: The model has no attention, or does not state what its head
      reads.
  """
  _check_pool(config)
  layers, encoded = _layers_and_encoded(config, params, images)
  rolled = rollout(layers)
  return _map(config, params, encoded, rolled, _grid(config, images))


class Survey(NamedTuple):
  """The result of `survey`.

  distances: See `mean_distance`; in pixels.
  maps: See `attention_map`.
  """

  distances: Float[Array, "layers b heads"]
  maps: Float[Array, "b gh gw"]


def survey(
  config: ModelConfig, params: dict[str, Any], images: Images
) -> Survey:
  """Returns mean attention distances and attention maps, in one forward pass.

  Args: See `attention_of`.

  Raises:
    ValueError: The model has no attention, or does not state what its head
      reads.
  """
  _check_pool(config)
  layers, encoded = _layers_and_encoded(config, params, images)
  grid, distances, rolled = _grid(config, images), [], None
  patch = images.shape[1] / grid[0], images.shape[2] / grid[1]
  for layer in layers:
    distances.append(mean_distance(layer, grid, patch))
    rolled = roll(rolled, layer)
  maps = _map(config, params, encoded, rolled, grid)
  return Survey(jnp.stack(distances), maps)


def by_head(
  config: ModelConfig,
  params: dict[str, Any],
  images: Images,
  patch: tuple[int, int],
) -> Float[Array, "layers b heads gh gw"]:
  """Returns the attention of one patch to all patches, for each head.

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
  """Returns how many images to pass together, 1 to 16.

  With more than one image, one block's weights, and the inputs of all blocks,
  have at most 2^26 numbers each (256 MB in float32).

  Args:
    config: The model's options.
    image_size: (height, width), pixels.

  Raises:
    ValueError: The model has no attention.
  """
  num_tokens = _num_tokens(config, image_size)
  if not isinstance(config, ViTConfig):  # the weights of all blocks at once
    return 1
  size = config.size
  floats = num_tokens * max(
    size.num_heads * num_tokens, size.depth * size.width
  )
  return max(1, min(16, 2**26 // floats))


def mean_distance(
  attention: Float[Array, "*layers b heads n n"],
  grid: tuple[int, int],
  step: Sides = (1, 1),
) -> Float[Array, "*layers b heads"]:
  """Returns the attention distance of each head, averaged over the patches.

  The distance of patch q is sum_k A_qk |q - k|, where |q - k| is the Euclidean
  distance between the centres of patches q and k. Class token and registers
  have no position. Their rows are left out, and so are the weights on them; the
  other weights are scaled to sum to 1. (The paper does not say how it treats
  the class token.) A patch without any weight on patches does not count.

  Args:
    attention: Attention weights of all tokens.
    grid: Rows and columns of patches.
    step: Height and width of a patch in pixels; (1, 1) for distances in
      patches.

  Source: arXiv:2010.11929, Figure 7 (right) and appendix D.7.

  Example:
    >>> a = jnp.ones((1, 1, 2, 2)) / 2
    >>> mean_distance(a, (1, 2), (16, 16)).tolist()
    [[8.0]]
  """
  first = attention.shape[-1] - grid[0] * grid[1]
  weights = attention[..., first:, first:]
  total = weights.sum(-1)
  sums = jnp.einsum("...qk,qk->...q", weights, distances(grid, step))
  counts = total != 0
  of_patch = jnp.where(counts, sums / jnp.where(counts, total, 1), 0)
  return of_patch.sum(-1) / counts.sum(-1)


def distances(
  grid: tuple[int, int], step: Sides = (1, 1)
) -> Float[np.ndarray, "n n"]:
  """Returns the Euclidean distances between the centres of all patches.

  Args:
    grid: Rows and columns of patches.
    step: Height and width of a patch.
  """
  centres = np.stack(np.mgrid[: grid[0], : grid[1]], -1).reshape(-1, 2) * step
  offsets = centres[:, None] - centres[None]
  return np.linalg.norm(offsets, axis=-1).astype(np.float32)


def position_table(
  config: ModelConfig, params: dict[str, Any], image_size: tuple[int, int]
) -> Float[np.ndarray, "n d"]:
  """Returns the position embeddings of the patches, row by row.

  If every block has its own table, it is the table of the first block.

  Args:
    config: The model's options.
    params: Its parameters.
    image_size: (height, width), pixels.

  Raises:
    ValueError: No position is added to the patches; the message says why.
  """
  grid = config.grid(image_size)
  if not isinstance(config, ViTConfig):
    return _declared_table(config, params, grid)
  if config.posemb == "sincos2d":
    return sincos2d(*grid, config.size.width)
  params = unstack_blocks(params, config)
  at_blocks = config.posemb_at == "blocks"
  params = _at(params, config.BLOCKS.format(0) if at_blocks else "Transformer")
  table = _Positions(config, grid).apply({"params": params})
  if table is None:
    reasons = {
      "relative": "positions are offsets, learned in every attention",
      "relative_bias": "positions are biases of scores, in every attention",
      "none": "the model has no positions",
    }
    if config.rope:
      raise ValueError("positions rotate queries and keys, in every attention")
    raise ValueError(reasons[config.posemb])
  return np.asarray(table, np.float32)[0, -grid[0] * grid[1] :]


def _declared_table(
  config: ModelConfig, params: dict[str, Any], grid: tuple[int, int]
) -> Float[np.ndarray, "n d"]:
  """Returns the rows of the patches of the first table in `POSITIONS`."""
  for path, table in sorted(flatten_dict(params, sep="/").items()):
    if config.positions(path) == "grid":
      return np.asarray(table, np.float32)[0, -grid[0] * grid[1] :]
  raise ValueError(f"{config.variant} has no positions")


def _layers_and_encoded(
  config: ModelConfig, params: dict[str, Any], images: Images
) -> tuple[Iterator[Float[Array, "b heads n n"]], Float[Array, "b n d"] | None]:
  """Returns each layer's weights, computed on use, and the encoded tokens.

  The tokens are None for a family other than our Transformers.

  Raises:
    ValueError: The model has no attention.
  """
  _num_tokens(config, images.shape[1:3])
  params, config = unstack_blocks(params, config), config.unstacked()
  if not isinstance(config, ViTConfig):
    return iter(_stated(config, params, images)), None
  inputs, encoded = _run(config, params, images)
  encoder, grid = params["Transformer"], _grid(config, images)
  shared = {}
  if config.posemb_at == "shared":
    shared = {"posembed_input": encoder["posembed_input"]}
  layers = (
    _block_attention(
      config, grid, _at(params, config.BLOCKS.format(i)) | shared, x
    )
    for i, x in enumerate(inputs)
  )
  return layers, encoded


def has_attention(config: ModelConfig) -> bool:
  """Whether the attention of patches to each other can be read."""
  return isinstance(config, ViTConfig) or config.ATTENTION is not None


def _num_tokens(config: ModelConfig, image_size: tuple[int, int]) -> int:
  if not has_attention(config):
    raise ValueError(
      f"got {config.variant}, which has no attention between patches, or whose"
      f" family does not declare it ({type(config).__name__}.ATTENTION);"
      " expected a Vision Transformer or a hybrid."
    )
  return config.num_tokens(image_size)


def _check_pool(config: ModelConfig) -> None:
  """Raises if another family does not state what its head reads."""
  known = ("token", "gap", "token_gap")
  is_stated = isinstance(config, ViTConfig) or config.pool in known
  if has_attention(config) and not is_stated:
    raise ValueError(
      f"attention_map: got {type(config).__name__}.pool={config.pool!r}, which"
      f" states what the head reads; expected one of {', '.join(known)}."
    )


def _map(
  config: ModelConfig,
  params: dict[str, Any],
  encoded: Float[Array, "b n d"] | None,
  rolled: Float[Array, "b n n"],
  grid: tuple[int, int],
) -> Float[Array, "b gh gw"]:
  """Returns the row of the rollout that the head reads, on the grid."""
  num_patches = grid[0] * grid[1]
  of_class = rolled[:, : config.num_class_tokens]
  of_patches = rolled[:, -num_patches:]
  if config.pool == "map":
    options, patches = config.unstacked(), encoded[:, -num_patches:]
    probe = _probe_attention(options, params["MAPHead_0"], patches)
    row = jnp.einsum("bq,bqk->bk", probe[:, :, 0].mean(axis=1), of_patches)
  else:
    read = {
      "token": [of_class],
      "gap": [of_patches],
      "token_gap": [of_class, of_patches],
    }[config.pool]
    row = sum(rows.mean(axis=1) for rows in read)
  row = row[:, -num_patches:]
  return (row / row.sum(-1, keepdims=True)).reshape(-1, *grid)


def _grid(config: ModelConfig, images: Images) -> tuple[int, int]:
  return config.grid(images.shape[1:3])
