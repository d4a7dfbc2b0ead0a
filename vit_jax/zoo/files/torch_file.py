"""`.pth`, `.pt` and `.bin` files of torch.save, read without running code.

Only this module imports torch, when such a file is read or written.
"""

import json
import os
import re
import tempfile
import types
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.paths import is_remote
from vit_jax.weights.safetensors_file import parts_of
from vit_jax.weights.weights_file import METADATA_KEY, LazyArray, shorten
from vit_jax.zoo.files import key_prefixes


def open_torch(
  path: str | os.PathLike,
) -> tuple[dict[str, LazyArray], dict[str, str], tuple[str, ...]]:
  """Returns lazy arrays by name, and what is beside them.

  In a training checkpoint, the arrays are those under one of `CONTAINERS`. A
  note then says which one, and what else the file has.

  Args:
    path: A file; or the index of several in the same folder.

  Returns:
    Name -> array; name -> text beside the arrays; notes for the user.

  Raises:
    ValueError: torch is not installed; the file would run code, or is damaged;
      or it has no arrays.
  """
  file = epath.Path(path)
  if file.name.endswith(".index.json"):
    arrays: dict[str, LazyArray] = {}
    for part in parts_of(file):
      arrays |= open_torch(part)[0]
    return arrays, {}, ()
  tree = _load(path)
  arrays, notes = _model_of(tree, path)
  texts = tree if isinstance(tree, Mapping) else {}
  texts = {k: v for k, v in texts.items() if isinstance(v, str)}
  return arrays, texts, () if METADATA_KEY in texts else notes


def _imported(path: str | os.PathLike) -> types.ModuleType:
  """Returns torch for the file at this path."""
  try:
    import torch
  except ImportError:
    raise ValueError(
      f"got {str(path)!r}, expected torch, which reads it: pip install torch."
    ) from None
  return torch


def _load(path: str | os.PathLike) -> Any:
  """Returns the contents; tensors of a file on disk are not read."""
  torch = _imported(path)
  local, copy = os.fspath(path), None
  if is_remote(path):
    copy = tempfile.NamedTemporaryFile(suffix=".pth")
    epath.Path(path).copy(local := copy.name, overwrite=True)
  try:
    return torch.load(
      local,
      map_location="cpu",
      weights_only=True,
      # Before version 1.6 torch wrote no zip, which alone can be mapped.
      mmap=zipfile.is_zipfile(local),
    )
  except Exception as e:  # whatever a damaged file makes of zip and tensors
    text = str(e).strip() or type(e).__name__
    reason = text.splitlines()[0][:200]
    if type(e).__name__ == "UnpicklingError":
      match = re.search(r"GLOBAL (\S+)|[Uu]nsupported \w+ (\S+)", text)
      what = next(filter(None, match.groups()), "code") if match else "code"
      reason = f"it would run {what}; save its state_dict, see docs/weights.md"
    raise ValueError(
      f"got {str(path)!r}, expected a whole file of torch.save ({reason})."
    ) from None


def _model_of(
  tree: Any, path: str | os.PathLike
) -> tuple[dict[str, LazyArray], tuple[str, ...]]:
  """Returns the arrays of the model in a checkpoint, and notes."""
  states = dict(_states(tree, ()))
  if not states:
    raise ValueError(f"got {str(path)!r}, expected a state_dict in it.")
  models = [k for k, v in states.items() if key_prefixes.has_model(v)] or [
    *states
  ]
  keys = min(models, key=key_prefixes.rank)
  notes = ()
  if keys:
    beside = [k for k in tree if k != keys[0]]
    if len(keys) > 1:
      beside += [".".join(k) for k in models if k != keys and k[0] == keys[0]]
    text = f"the arrays are those of {'.'.join(keys)!r} in the file"
    if beside:
      text += f", and not of {shorten([str(k) for k in beside])}"
    notes = (f"{text}.",)
  return {k: _lazy(k, v) for k, v in states[keys].items()}, notes


def _states(
  tree: Any, keys: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
  """Yields each dict of tensors in `CONTAINERS`, with the keys to it."""
  if not isinstance(tree, Mapping):
    return
  tensors = {
    k: v for k, v in tree.items() if isinstance(k, str) and _is_tensor(v)
  }
  if tensors:
    yield keys, tensors
  for key in key_prefixes.CONTAINERS:
    yield from _states(tree.get(key), (*keys, key))


def _is_tensor(value: Any) -> bool:
  import torch

  return isinstance(value, torch.Tensor)


def _lazy(name: str, tensor) -> LazyArray:
  """Returns a tensor that is read on use."""
  import torch

  is_float8 = tensor.is_floating_point() and tensor.dtype.itemsize < 2
  is_dense = tensor.layout == torch.strided and not tensor.is_meta
  is_number = not (tensor.is_quantized or tensor.is_complex() or is_float8)
  if not (is_dense and is_number):
    kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
    raise ValueError(f"{name}: got {kind}, expected dense floats.")
  is_bfloat16 = tensor.dtype == torch.bfloat16
  empty = torch.empty(0, dtype=torch.int16 if is_bfloat16 else tensor.dtype)
  dtype = np.dtype(jnp.bfloat16) if is_bfloat16 else empty.numpy().dtype

  def read() -> np.ndarray:
    dense = tensor.detach().contiguous()
    if is_bfloat16:
      return dense.view(torch.int16).numpy().view(jnp.bfloat16)
    return dense.numpy()

  return LazyArray(tuple(tensor.shape), dtype, read)


def write(
  path: str | os.PathLike,
  arrays: Mapping[str, np.ndarray],
  metadata: Mapping[str, Any],
) -> None:
  """Writes {"model": state_dict}, and each of `metadata` as a JSON text.

  Raises:
    ValueError: torch is not installed.
  """
  torch = _imported(path)
  tensors = {k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}
  texts = {k: json.dumps(v, ensure_ascii=False) for k, v in metadata.items()}
  with epath.Path(path).open("wb") as stream:
    torch.save({"model": tensors} | texts, stream)
