"""Arrays of `.safetensors` files, read one by one."""

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
from vit_jax.weights import limits
from vit_jax.weights.beside import beside
from vit_jax.weights.lazy import LazyArray

INDEX = "model.safetensors.index.json"
MAX_PARTS = 1000  # files of an index
TYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": jnp.bfloat16,
}


def open_safetensors(
  path: str | os.PathLike,
) -> tuple[dict[str, LazyArray], dict[str, str]]:
  """Returns the arrays by name, each read on use, and the metadata.

  A file that is not on this machine's disk (gs://) is copied there first, for
  as long as one of the arrays is referenced.

  Args:
    path: A file; or an index `*.index.json` of several in the same folder.

  Raises:
    ValueError: The file is damaged, or an array is not of floating point.
  """
  file = epath.Path(path)
  if file.name.endswith(".index.json"):
    arrays: dict[str, LazyArray] = {}
    for part in _parts(file):
      found = open_safetensors(part)[0]
      limits.check_names([*arrays, *found], path)
      arrays |= found
    return arrays, {}
  _check_header(file)
  copy = None
  if "://" in str(path):
    copy = tempfile.NamedTemporaryFile(suffix=".safetensors")
    file.copy(copy.name, overwrite=True)
  try:
    opened = safetensors.safe_open(copy.name if copy else file, "numpy")
    arrays = {}
    for name in opened.keys():  # noqa: SIM118, it is no dict
      found = opened.get_slice(name)
      if found.get_dtype() not in TYPES:
        raise ValueError(
          f"{path}: got type {found.get_dtype()} in {name!r}, expected one of"
          f" {', '.join(TYPES)}."
        )
      limits.check_shape(found.get_shape(), name, path)
      arrays[name] = LazyArray(
        tuple(found.get_shape()),
        np.dtype(TYPES[found.get_dtype()]),
        # `copy` exists as long as an array that reads from it.
        lambda n=name, _=copy: opened.get_tensor(n),
      )
    return arrays, opened.metadata() or {}
  except safetensors.SafetensorError as e:
    raise _damaged(path, e) from None


def _check_header(file: epath.Path) -> None:
  """Raises ValueError if the library would take too much memory to open it."""
  with file.open("rb") as stream:
    length = int.from_bytes(stream.read(8), "little")
    if length > limits.MAX_NAMES_BYTES:
      raise _damaged(file, f"a header of {length:,} bytes")
    text = stream.read(length)
  try:
    header = json_file.parse(text, "header")
    if not isinstance(header, dict):
      raise ValueError(f"a header that is a {type(header).__name__}")
  except ValueError as e:
    raise _damaged(file, e) from None
  limits.check_names(list(header), file)


def _damaged(path, reason: object) -> ValueError:
  reason = str(reason)[:200]  # the library repeats what it cannot parse
  return ValueError(
    f"got {str(path)!r}, which cannot be read as .safetensors ({reason});"
    " expected a whole file: copy it again, and compare its size."
  )


def _parts(index: epath.Path) -> list[epath.Path]:
  """Returns the files that an index names, all in its own folder."""
  try:
    found = json_file.read(index, {"weight_map": {str: str}})
    names = sorted({*(found.get("weight_map") or {}).values()})
    if not 1 <= len(names) <= MAX_PARTS:
      raise ValueError(
        f"got {len(names):,} names of files in weight_map, expected 1 to"
        f" {MAX_PARTS:,}"
      )
  except ValueError as e:
    raise ValueError(
      f"got {str(index)!r}, which cannot be read as an index of .safetensors"
      f" ({e}); copy it again."
    ) from None
  parts = [beside(index.parent, name) for name in names]
  if missing := [part.name for part in parts if not part.exists()]:
    raise ValueError(
      f"got {str(index)!r} without {', '.join(missing[:6])}"
      f"{f' and {len(missing) - 6} more' * (len(missing) > 6)}, expected all"
      f" {len(parts)} files that it names."
    )
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
