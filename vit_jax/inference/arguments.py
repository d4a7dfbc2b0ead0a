"""Checks of what `vit_jax.load` is given."""

import dataclasses
from typing import Any

import numpy as np

from vit_jax import weights
from vit_jax.config import ModelConfig, model_from_dict
from vit_jax.data import images
from vit_jax.families import FAMILIES
from vit_jax.options import nearest

OF_LOAD = ("image_size", "patch", "grid", "posemb_filter", "loss", "verbose")


def options(given: dict[str, Any]) -> dict[str, Any]:
  """Returns options of a model with the types of a family that has them all.

  Raises:
    ValueError: There is no such family, or one has another type.
  """
  fields = {
    name: [f.name for f in dataclasses.fields(cls)]
    for name, cls in FAMILIES.items()
  }
  known = dict.fromkeys(k for names in fields.values() for k in names)
  if unknown := sorted(given.keys() - known.keys()):
    near = "".join(nearest(key, [*OF_LOAD, *known]) for key in unknown)
    raise ValueError(
      f"load: got {', '.join(unknown)}, expected {', '.join(OF_LOAD)}, or"
      f" options of the model: {', '.join(known)}.{near}"
    )
  name = next((n for n, f in fields.items() if given.keys() <= {*f}), None)
  if name is None:
    raise ValueError(
      f"load: got {', '.join(sorted(given))}, which no family of models has"
      " together; see vit-jax train --help."
    )
  checked = model_from_dict({"name": name, **given})
  return {key: getattr(checked, key) for key in given}


def pair(name: str, value: Any, expected: str) -> tuple[int, int] | None:
  """Returns two whole numbers from 1, of one the same twice; None for None."""
  if value is None:
    return None
  try:
    sides = np.broadcast_to(value, 2)
    good = sides.dtype.kind in "iuf" and np.all(
      (sides >= 1) & (sides < 2**31) & (np.floor(sides) == sides)
    )
  except ValueError:  # another number of them
    good = False
  if not good:
    raise ValueError(f"{name}: got {value!r}, expected {expected}.")
  return int(sides[0]), int(sides[1])


def check_size(config: ModelConfig, size: tuple[int, int]) -> None:
  """Raises ValueError for more pixels or patches than memory has room for."""
  text = f"image_size: got {size[0]:,} x {size[1]:,} pixels,"
  if size[0] * size[1] > images.MAX_PIXELS:
    raise ValueError(
      f"{text} expected at most {images.MAX_PIXELS:,} in all; take smaller"
      " images."
    )
  if config.num_tokens(size) is None:
    return
  rows, columns = config.grid(size)
  if rows * columns > weights.MAX_TOKENS:
    raise ValueError(
      f"{text} which make {rows:,} x {columns:,} patches, expected at most"
      f" {weights.MAX_TOKENS:,} in all; take smaller images."
    )
