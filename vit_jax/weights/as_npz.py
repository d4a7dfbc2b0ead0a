"""A model as a `.npz` of a published format: its arrays, and what they lack."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.families import ModelConfig
from vit_jax.weights import bit, google, labels
from vit_jax.weights.identify import NEEDED, identify


def write(
  params: Mapping[str, np.ndarray], model: ModelConfig
) -> tuple[dict[str, np.ndarray], str]:
  """Returns the arrays by published names, and who reads these names.

  Args:
    params: Our flat names -> arrays; blocks not stacked.
    model: Model of the parameters.

  Raises:
    ValueError: No published format has a place for the model.
  """
  if (at := getattr(model, "posemb_at", "stem")) != "stem":
    raise ValueError(
      f"config.model.posemb_at: got {at!r}, expected 'stem': the codes that"
      " read Google's names add positions once. Write a checkpoint of ours:"
      " --to=orbax."
    )
  if bit.holds(model):
    return bit.write(params), "BiT's own code, big_vision and timm"
  if model.name == "bit_v1":
    return google.write(params, is_big_vision=True), "big_vision"
  if NEEDED[0] not in params:
    raise ValueError(
      f"--to=npz: got {model.variant}, whose parameters have no names in"
      " Google's files; write a checkpoint of ours: --to=orbax."
    )
  is_big_vision = google.is_big_vision(model, params)
  reader = "big_vision" if is_big_vision else "vision_transformer and timm"
  if (
    model.posemb not in ("learn", "sincos2d") or is_big_vision and model.stages
  ):
    reader = "vit_jax alone"
  return google.write(params, is_big_vision=is_big_vision), reader


def untold(
  params: Mapping[str, Any],
  model: ModelConfig,
  *,
  grid: tuple[int, int],
  num_classes: int,
  loss: str,
) -> dict[str, Any]:
  """Returns arguments of `vit_jax.load` that no array of the file tells.

  Args:
    params: Our flat names -> anything with a shape; blocks not stacked.
    model: Model of the parameters.
    grid: Rows and columns of patches.
    num_classes: Width of the head, 0 for none.
    loss: Loss that the head was trained with.
  """
  by_names = identify(params, {})
  keys = "gelu ln_eps gn_eps ws_eps ws_eps_on root_pad posemb".split()
  found = {k: getattr(model, k) for k in keys if hasattr(model, k)}
  found = {k: v for k, v in found.items() if v != getattr(by_names, k)}
  if google.POS_EMBEDDING in params and grid[0] != grid[1]:
    found["grid"] = tuple(grid)
  guess = labels.loss(num_classes, NEEDED[0] in params) or "softmax"
  return found | ({"loss": loss} if num_classes and loss != guess else {})
