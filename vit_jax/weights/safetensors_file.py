"""`.safetensors` files: lazy arrays, and the metadata beside them."""

import dataclasses
import json
import os
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from vit_jax.config import json_file
from vit_jax.paths import file_in, is_remote
from vit_jax.weights.weights_file import LazyArray

INDEX = "model.safetensors.index.json"
TYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": jnp.bfloat16,
  # Counters of BatchNorm and the like; no model here has any.
  "I64": np.int64,
  "I32": np.int32,
  "U8": np.uint8,
  "BOOL": np.bool_,
}


@dataclasses.dataclass(frozen=True)
class _Index:
  """Contents of an index: name of an array -> its file."""

  weight_map: dict[str, str] = dataclasses.field(default_factory=dict)


def open_safetensors(
  path: str | os.PathLike,
) -> tuple[dict[str, LazyArray], dict[str, str]]:
  """Returns lazy arrays by name, and the metadata.

  A file that is not on this machine's disk (gs://) is copied there first. The
  copy exists while one of the arrays is referenced.

  Args:
    path: A file; or an index `*.index.json` of several in the same folder.

  Raises:
    ValueError: The file is damaged, or an array has a type other than `TYPES`.
  """
  file = epath.Path(path)
  if file.name.endswith(".index.json"):
    arrays: dict[str, LazyArray] = {}
    for part in parts_of(file):
      arrays |= open_safetensors(part)[0]
    return arrays, {}
  copy = None
  if is_remote(path):
    copy = tempfile.NamedTemporaryFile(suffix=".safetensors")
    file.copy(copy.name, overwrite=True)
  arrays = {}
  try:
    opened = safetensors.safe_open(copy.name if copy else file, "numpy")
    for name in opened.keys():  # noqa: SIM118, it is no dict
      part = opened.get_slice(name)
      if part.get_dtype() not in TYPES:
        raise ValueError(f"{path}: {name!r}: got type {part.get_dtype()}.")
      arrays[name] = LazyArray(
        tuple(part.get_shape()),
        np.dtype(TYPES[part.get_dtype()]),
        # `copy` exists as long as an array refers to it.
        lambda n=name, _=copy: opened.get_tensor(n),
      )
    return arrays, opened.metadata() or {}
  except safetensors.SafetensorError as e:
    reason = str(e)[:200]  # the library repeats what it cannot parse
    raise ValueError(
      f"got {str(path)!r}, expected a whole .safetensors file ({reason})."
    ) from None


def parts_of(index: epath.Path) -> list[epath.Path]:
  """Returns the files that an index names, all in its own folder."""
  names = sorted({*json_file.read_as(_Index, index).weight_map.values()})
  parts = [file_in(index.parent, name) for name in names]
  missing = [part.name for part in parts if not part.exists()]
  if missing or not parts:
    some = missing[0] if missing else "files in weight_map"
    raise ValueError(f"got {str(index)!r} without {some}.")
  return parts


def write(
  path: str | os.PathLike,
  arrays: dict[str, np.ndarray],
  metadata: dict[str, Any],
) -> None:
  """Writes a file; `metadata` becomes JSON texts in its header."""
  arrays = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
  texts = {k: json.dumps(v, ensure_ascii=False) for k, v in metadata.items()}
  # PyTorch's loaders require the statement that these are its tensors.
  data = safetensors.numpy.save(arrays, {"format": "pt"} | texts)
  epath.Path(path).write_bytes(data)
