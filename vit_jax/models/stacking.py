"""Blocks as separate parameters, or stacked on a leading axis for a scan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
