"""Names with dots: "vit_jax.Transformer.encoder_norm.scale"."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.weights.weights_file import LazyArray

PREFIX = "vit_jax."


def looks_like(names: Iterable[str]) -> bool:
  """Whether a file with these names has this format."""
  names = list(names)
  return bool(names) and all(name.startswith(PREFIX) for name in names)


def read(
  arrays: Mapping[str, LazyArray],
) -> tuple[dict[str, LazyArray], dict[str, Any]]:
  """Returns the arrays by our flat names, unread, and no options."""
  params = {
    name.removeprefix(PREFIX).replace(".", "/"): array
    for name, array in arrays.items()
  }
  return params, {}


def write(vit, params: dict[str, np.ndarray], target) -> list[str]:
  """Writes a .npz; see `convert.Writer`."""
  arrays = {PREFIX + k.replace("/", "."): v for k, v in params.items()}
  with target.open("wb") as stream:
    np.savez(stream, **arrays)
  return ["names with dots"]
