"""Blocks as separate parameters, or stacked on a leading axis for a scan."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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


def stack_blocks(params: dict[str, Any]) -> dict[str, Any]:
  """Turns the parameters of a loop over blocks into those of a scan.

  Args:
    params: Nested dict with `Transformer/encoderblock_{i}`. Leaves are arrays;
      numpy stays numpy.

  Returns:
    A dict with `Transformer/encoderblock`, whose leaves have a leading axis of
    length depth; `params` itself if the blocks are already stacked.
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
