"""Blocks as separate parameters, or stacked on a leading axis for a scan."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.families import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
  """A device's part of a parameter of all blocks of a scan.

  Attributes:
    array: The part, with blocks as first dimension; in the body of the scan,
      the part of one block.
    gather: Makes a block's whole parameter from its part.
  """

  array: jax.Array
  gather: Callable[[jax.Array], jax.Array] = dataclasses.field(
    metadata={"static": True}
  )


def gather_parts(params: dict[str, Any]) -> dict[str, Any]:
  """Returns the parameters of a block, after gathering each `Part`."""
  return jax.tree.map(
    lambda x: x.gather(x.array) if isinstance(x, Part) else x,
    params,
    is_leaf=lambda x: isinstance(x, Part),
  )


def stack_blocks(
  params: dict[str, Any], model: ModelConfig | type[ModelConfig]
) -> dict[str, Any]:
  """Stacks the parameters of a loop over blocks, for a scan.

  Args:
    params: Nested dict with the blocks `model.BLOCKS`. Leaves are arrays; numpy
      stays numpy.
    model: The model, or its family.

  Returns:
    A dict with `model.SCANNED`, whose leaves have a leading axis of length
    depth; `params` itself if the blocks are already stacked, or if the family
    has no scan.
  """
  if model.SCANNED is None:
    return params
  *parents, block = model.BLOCKS.split("/")
  *_, scanned = model.SCANNED.split("/")
  encoder = dict(_at(params, parents))
  names = [k for k in encoder if re.fullmatch(block.format(r"\d+"), k)]
  if not names:
    return params
  blocks = [encoder.pop(block.format(i)) for i in range(len(names))]
  encoder[scanned] = jax.tree.map(
    lambda *leaves: (
      np.stack(leaves)
      if isinstance(leaves[0], np.ndarray)
      else jnp.stack(leaves)
    ),
    *blocks,
  )
  return _with(params, parents, encoder)


def unstack_blocks(
  params: dict[str, Any], model: ModelConfig | type[ModelConfig]
) -> dict[str, Any]:
  """Unstacks the parameters of a scan over blocks, for a loop."""
  if model.SCANNED is None:
    return params
  *parents, block = model.BLOCKS.split("/")
  *_, scanned = model.SCANNED.split("/")
  encoder = dict(_at(params, parents))
  if scanned not in encoder:
    return params
  stacked = encoder.pop(scanned)
  if not (leaves := jax.tree.leaves(stacked)):  # all are frozen: None
    return params
  for i in range(leaves[0].shape[0]):
    encoder[block.format(i)] = jax.tree.map(lambda a, i=i: a[i], stacked)
  return _with(params, parents, encoder)


def _at(params: dict[str, Any], parents: list[str]) -> dict[str, Any]:
  """Returns the dict in which the blocks are; {} without it."""
  for name in parents:
    params = params.get(name, {})
  return params


def _with(
  params: dict[str, Any], parents: list[str], encoder: dict[str, Any]
) -> dict[str, Any]:
  """Returns parameters with another dict of blocks."""
  if not parents:
    return encoder
  first, *others = parents
  return params | {first: _with(params[first], others, encoder)}
