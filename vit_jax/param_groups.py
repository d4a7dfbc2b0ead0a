"""Parameters by their paths: which are trained, which decay, and how fast.

Source: BEiT and MAE for the decay of the rate by layers.
"""

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from vit_jax.config import OptimConfig
from vit_jax.families import ModelConfig


def path_of(path) -> str:
  """Joins a key path of jax.tree_util to "a/b/c"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def decay_mask(params: PyTree) -> PyTree:
  """Returns True for parameters with weight decay.

  These are the leaves named `kernel` (matrix products and convolutions), and
  the LoRA factors `lora_a` and `lora_b`. Biases, scales and offsets of
  normalisations, class token, position embedding and probe do not decay.

  Source: big_vision, mask `.*/kernel$`. (The code of 2020 is believed to have
    decayed everything.)

  Example:
    >>> decay_mask({"head": {"kernel": 0.0, "bias": 0.0}, "cls": 0.0})
    {'cls': False, 'head': {'bias': False, 'kernel': True}}
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path_of(path[-1:]) in ("kernel", "lora_a", "lora_b"), params
  )


def trained(
  tree: PyTree,
  patterns: Sequence[str],
  is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
  """Returns a tree of parameters in which the frozen ones are None.

  jax has no leaf for None: frozen parameters get no gradient, no update and no
  optimizer state.

  Args:
    tree: Parameters, or a tree of the same form.
    patterns: config.optim.freeze, with * and ? as in file names.
    is_leaf: As in `jax.tree.map`.

  Example:
    >>> params = {"head": {"kernel": 1.0}, "Transformer": {"scale": 2.0}}
    >>> trained(params, ["Transformer/*"])
    {'Transformer': {'scale': None}, 'head': {'kernel': 1.0}}
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, x: None if matches(path_of(path), patterns) else x,
    tree,
    is_leaf=is_leaf,
  )


def matches(name: str, patterns: Sequence[str]) -> bool:
  """Whether a path, such as "head/kernel", matches one of the patterns."""
  return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def num_blocks(params: PyTree, model: ModelConfig) -> int:
  """Returns the number of blocks, in a loop or in a scan; 0 without blocks."""
  blocks: dict[int | str | None, Any] = {}
  # Frozen parameters are None, see `trained`.
  for path, leaf in jax.tree_util.tree_leaves_with_path(
    params, is_leaf=lambda x: x is None
  ):
    block = model.block_of(path_of(path))
    if block != "all" or leaf is not None:
      blocks[block] = leaf
  if "all" in blocks:
    return blocks["all"].shape[0]
  return len(blocks.keys() - {None})


def layers(params: PyTree, model: ModelConfig) -> PyTree:
  """Returns the layer number of each parameter, for config.optim.layer_decay.

  With L blocks: 0 before the first block (`model.STEM`: patch embedding or
  ResNet, class, distillation and register tokens, positions, the norm before
  the blocks), i + 1 for block i, L + 1 after the last block (norms, pooling,
  heads) and for the parameters that an objective adds. Parameters of blocks in
  a scan get a vector.

  Source: BEiT, `get_num_layer_for_vit`; MAE, util/lr_decay.py. (In timm, the
    norm after the last block is in layer L.)

  Example:
    >>> from vit_jax.families import model_config
    >>> block = {"LayerNorm_0": {"scale": 0.0}}
    >>> params = {"cls": 0.0, "Transformer": {"encoderblock_0": block}}
    >>> params["head"] = {"bias": 0.0}
    >>> layers(params, model_config("vit"))["Transformer"]
    {'encoderblock_0': {'LayerNorm_0': {'scale': 1}}}
  """
  depth = num_blocks(params, model)

  def layer(path, _):
    name = path_of(path)
    if (block := model.block_of(name)) is not None:
      return np.arange(1, depth + 1) if block == "all" else block + 1
    return 0 if _is_stem(name, model) else depth + 1

  return jax.tree_util.tree_map_with_path(layer, params)


def rate_factors(
  config: OptimConfig, params: PyTree, model: ModelConfig
) -> PyTree:
  """Returns the factor of each parameter's learning rate.

  It is layer_decay^(L + 1 - layer), see `layers`, times the factors of all
  patterns in lr_scale that match the path.

  Args:
    config: The options.
    params: Parameters, their shapes, or a tree of the same form, with all
      blocks.
    model: The model of the parameters.

  Returns:
    A tree of numbers, or of arrays that broadcast over blocks in a scan.
  """
  last = num_blocks(params, model) + 1

  def factor(path, x, layer):
    decay = 1.0 if config.layer_decay is None else config.layer_decay
    result = decay ** np.asarray(last - layer, np.float64)
    for pattern, scale in config.lr_scales():
      if matches(path_of(path), [pattern]):
        result = result * scale
    shape = result.shape + (1,) * (len(x.shape) - 1)
    return result.reshape(shape) if result.ndim else float(result)

  return jax.tree_util.tree_map_with_path(factor, params, layers(params, model))


def rates(
  config: OptimConfig, params: PyTree, model: ModelConfig
) -> dict[str, tuple[np.ndarray, np.ndarray] | None]:
  """Returns path -> (layers, factors of the rate), or None for a frozen one.

  A parameter of blocks in a scan has one number per block.
  """
  factors = rate_factors(config, params, model)
  leaves, _ = jax.tree_util.tree_flatten_with_path(layers(params, model))
  return {
    name: None
    if matches(name, config.freeze)
    else (np.ravel(layer), np.ravel(factor))
    for (name, layer), factor in zip(
      ((path_of(path), layer) for path, layer in leaves),
      jax.tree.leaves(factors),
      strict=True,
    )
  }


def has_layer(name: str, model: ModelConfig) -> bool:
  """Whether a family declares the layer of a parameter."""
  return (
    model.block_of(name) is not None
    or _is_stem(name, model)
    or model.is_behind_blocks(name)
  )


def _is_stem(name: str, model: ModelConfig) -> bool:
  return model.STEM is not None and bool(re.fullmatch(model.STEM, name))
