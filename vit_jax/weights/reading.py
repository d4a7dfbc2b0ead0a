"""Reads weights of any known format, recognised by the content of the file."""

import dataclasses
import json
import os
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax import checkpoint
from vit_jax.config import model_from_dict, upgraded
from vit_jax.weights import bit, download, google, hf, labels, timm
from vit_jax.weights.google import POS_EMBEDDING
from vit_jax.weights.identify import NEEDED
from vit_jax.weights.lazy import LazyArray, lazy
from vit_jax.weights.npz_file import open_npz
from vit_jax.weights.safetensors_file import INDEX, open_safetensors

EXPECTED = (
  "expected a .npz of Google's (ViT, AugReg, BiT, big_vision), a .safetensors"
  " of timm, the folder of a Hugging Face model, or the folder of one of our"
  " runs, of its checkpoints or of one step"
)
# Kinds of files that are refused, by their first bytes.
REFUSED = (
  (
    rb"\x80[\x02-\x05]",
    "is a pickle, which may run any code and is never loaded; save it as"
    " .safetensors where it comes from",
  ),
  (rb"\x89HDF", "is HDF5 (Keras); save the weights as .npz"),
  (rb"version https://git-lfs", "is a pointer of git-lfs; run git lfs pull"),
)
METADATA_KEY = "vit_jax"  # in the header of .safetensors files that we write

# Dimensions of arrays that are read before shapes are compared.
RANKS = {
  "cls": 3,
  POS_EMBEDDING: 3,
  POS_EMBEDDING + "_x": 3,
  POS_EMBEDDING + "_y": 3,
  "conv_root/kernel": 4,
  "head/kernel": 2,
}


@dataclasses.dataclass(frozen=True)
class Weights:
  """Parameters under our names, and what the file states about them.

  Attributes:
    path: The file or folder.
    format: "google", "bit", "timm", "hf" or "checkpoint".
    params: Flat, "a/b/c" -> array, unread; blocks not stacked.
    options: Options of the model (fields of `ModelConfig`) that the file or its
      format states, beyond what names and shapes do.
    grid: The (rows, columns) of patches of the position table, or None where
      they are unknown.
    has_cls_row: Whether row 0 of that table is the class token's.
    image_size: (height, width) in pixels, or None where it is unknown.
    class_names: Names in the order of the logits, or None.
    ops: Preprocessing, as `config.data.ops`, or None where it is unknown.
    loss: Loss of the head's training, as `config.objective.loss`; None:
      unknown.
    notes: Facts that a user should know.
    metadata: Everything else that a checkpoint states.
  """

  path: str
  format: str
  params: dict[str, LazyArray]
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  grid: tuple[int, int] | None = None
  has_cls_row: bool = False
  image_size: tuple[int, int] | None = None
  class_names: tuple[str, ...] | None = None
  ops: str | None = None
  loss: str | None = None
  notes: tuple[str, ...] = ()
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


def read(
  path: str | os.PathLike,
  *,
  grid: tuple[int, int] | None = None,
  options: Mapping[str, Any] | None = None,
) -> Weights:
  """Reads weights of any known format; arrays are read on use.

  Args:
    path: As `EXPECTED` says, on disk or wherever `epath` reads (gs://); or what
      `download.local` fetches: https://..., hf-hub:OWNER/NAME.
    grid: Rows and columns of patches of the position table, for a file that
      does not state them and whose grid is not square.
    options: Fields of `ModelConfig` that the caller knows better, such as
      num_heads of a timm file of an unknown size, or cls_row.

  Raises:
    FileNotFoundError: Nothing is there.
    ValueError: The format is unknown or unsafe, or the file is damaged.
  """
  file, options = download.local(path), dict(options or {})
  if not file.exists():
    raise FileNotFoundError(
      f"got {str(path)!r}, which does not exist; {EXPECTED}, or"
      f" an address: https://..., {download.HUB}OWNER/NAME."
    )
  try:
    found = (
      _read_folder(file, options)
      if file.is_dir()
      else _read_file(file, options)
    )
    _check_arrays(found.params)
  except ValueError as e:
    if download.is_remote(path):
      raise ValueError(
        f"{path}: {e} It was downloaded; delete {file} to fetch it again."
      ) from None
    if str(path) in str(e):
      raise
    raise ValueError(f"{path}: {e}") from None
  if grid is None and found.grid:
    grid = tuple(found.grid)
  merged = found.options | options
  has_cls_row = (
    POS_EMBEDDING in found.params
    and "cls" in found.params
    and merged.get("cls_row", True)
  )
  names, notes, loss = found.class_names, list(found.notes), found.loss
  if "head/kernel" in found.params:
    width = found.params["head/kernel"].shape[-1]
    if names is not None and len(names) != width:
      notes.append(
        f"got {len(names)} names for a head of {width} classes: left out."
      )
      names = None
    loss = found.loss or labels.loss(width, NEEDED[0] in found.params)
    if names is None and found.format != "checkpoint":
      names = labels.known(width)
      if sentence := labels.describe(width):
        notes.append(sentence)
  return dataclasses.replace(
    found,
    path=str(path),
    grid=grid,
    options=merged,
    has_cls_row=has_cls_row,
    class_names=tuple(names) if names else None,
    loss=loss,
    notes=tuple(notes),
  )


def _read_file(file: epath.Path, options: dict[str, Any]) -> Weights:
  with file.open("rb") as stream:
    head = stream.read(64)
    if head[:2] == b"PK" and _has_pickle(stream):
      raise ValueError(
        f"got {str(file)!r}, which is a pickle of PyTorch, may run any code and"
        " is never loaded; save it as .safetensors with safetensors.torch."
      )
  for pattern, what in REFUSED:
    if re.match(pattern, head):
      raise ValueError(f"got {str(file)!r}, which {what}.")
  if head[:2] == b"PK":
    return _from_npz(file, open_npz(file))
  if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**27:
    arrays, texts = open_safetensors(file)
    config = file.parent / "config.json"
    return _from_torch(file, arrays, texts, _json(config), options)
  raise ValueError(
    f"got {str(file)!r}, which is neither .npz nor .safetensors"
    f"{' but empty' if not head else ''}; {EXPECTED}."
  )


def _has_pickle(stream) -> bool:
  """Whether a zip file is PyTorch's; a damaged one is left to `open_npz`."""
  try:
    names = zipfile.ZipFile(stream).namelist()
  except (zipfile.BadZipFile, NotImplementedError):
    return False
  return any(name.endswith("data.pkl") for name in names)


def _read_folder(folder: epath.Path, options: dict[str, Any]) -> Weights:
  for name in ("model.safetensors", INDEX):
    if (folder / name).exists():
      arrays, texts = open_safetensors(folder / name)
      config = _json(folder / "config.json")
      return _from_torch(folder, arrays, texts, config, options)
  if (folder / "pytorch_model.bin").exists():
    raise ValueError(
      f"got {str(folder)!r} with pytorch_model.bin, a pickle, which may run any"
      " code and is never loaded; expected model.safetensors: save it with"
      " save_pretrained(..., safe_serialization=True)."
    )
  nested, metadata = checkpoint.load_tree(str(folder))
  if isinstance(nested.get("params"), dict):  # of a training state
    nested = nested["params"]
  flat = flax.traverse_util.flatten_dict(nested, sep="/")
  if other := [k for k, v in flat.items() if not hasattr(v, "shape")]:
    raise ValueError(
      f"got a checkpoint with {other[0]!r}, which is no array; {EXPECTED}."
    )
  params, _ = google.read({k: lazy(np.asarray(v)) for k, v in flat.items()})
  found = Weights(str(folder), "checkpoint", params, metadata=metadata)
  if not isinstance(metadata, dict) or not _model_of(metadata):
    return dataclasses.replace(found, metadata={})  # of another program
  return _with_metadata(found, metadata)


def _model_of(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
  return metadata.get("model") or metadata.get("config", {}).get("model")


def _with_metadata(found: Weights, metadata: Mapping[str, Any]) -> Weights:
  """Adds what we wrote beside the parameters."""
  names = metadata.get("class_names")
  size = metadata.get("image_size")
  options = dataclasses.asdict(model_from_dict(_model_of(metadata)))
  notes = found.notes
  if (
    POS_EMBEDDING in found.params and options.get("posemb", "learn") != "learn"
  ):
    # timm has no fixed positions: they are written as a learned table.
    notes += (
      f"positions were config.model.posemb={options['posemb']}; in this format"
      " they are a learned table of the same values.",
    )
    options |= {"posemb": "learn", "cls_row": False}
  return dataclasses.replace(
    found,
    options=options,
    grid=tuple(metadata["grid"]) if metadata.get("grid") else None,
    image_size=tuple(size) if size else None,
    class_names=tuple(names) if names else None,
    ops=metadata.get("preprocessing", {}).get("ops"),
    loss=metadata.get("loss") or _loss_of(metadata.get("config", {})),
    notes=notes,
  )


def _loss_of(run: dict[str, Any]) -> str | None:
  """Returns the loss that the config of a run names, if any."""
  return upgraded(run).get("objective", {}).get("loss")


def _from_npz(file: epath.Path, arrays: dict[str, LazyArray]) -> Weights:
  if bit.looks_like(arrays):
    return Weights(str(file), "bit", bit.read(arrays), {"root_pad": "zero"})
  if google.looks_like(arrays):
    params, options = google.read(arrays)
    return Weights(str(file), "google", params, options)
  raise ValueError(_unknown_names(file, arrays))


def _from_torch(
  path: epath.Path,
  arrays: dict[str, LazyArray],
  texts: Mapping[str, str],
  config: dict[str, Any],
  options: dict[str, Any],
) -> Weights:
  """Returns the parameters of a `.safetensors`, with the files beside it."""
  if timm.looks_like(arrays):
    ours = json.loads(texts.get(METADATA_KEY, "{}"))
    params, found = timm.read(
      arrays, options.get("num_heads") or _num_heads(ours)
    )
    weights = Weights(str(path), "timm", params, found)
    if ours:
      return _with_metadata(weights, ours)
    about = {**config, **config.get("pretrained_cfg", {})}
    size = about.get("input_size", [3])[1:]
    names = about.get("label_names")
    weights = dataclasses.replace(
      weights,
      image_size=tuple(size) or None,
      class_names=tuple(names) if names else None,
      ops=_timm_ops(about) if size else None,
    )
    return _fold(weights, about.get("mean"), about.get("std"))
  if hf.looks_like(arrays):
    if not config:
      raise ValueError(
        f"got {str(path)!r} without a config.json beside it, which tells the"
        " heads and the form of GELU; expected the folder of a Hugging Face"
        " model."
      )
    params, found, extras = hf.read(arrays, config)
    size = extras["image_size"]
    weights = Weights(
      str(path),
      "hf",
      params,
      found,
      grid=(size[0] // extras["patch"], size[1] // extras["patch"]),
      image_size=size,
      class_names=extras["class_names"],
      loss=extras["loss"],
      ops=f"decode|resize({_text(size)}, antialias=True)",
    )
    folder = path if path.is_dir() else path.parent
    about = _json(folder / "preprocessor_config.json")
    if about.get("do_normalize", True):
      return _fold(weights, about.get("image_mean"), about.get("image_std"))
    return _fold(weights, [0.0] * 3, [1.0] * 3)
  raise ValueError(_unknown_names(path, arrays))


def _num_heads(metadata: Mapping[str, Any]) -> int | None:
  if not _model_of(metadata):
    return None
  model = model_from_dict(_model_of(metadata))
  return model.size.num_heads if model.name == "vit" else None


def _timm_ops(about: Mapping[str, Any]) -> str:
  """Returns timm's evaluation: resize by 1 / crop_pct, crop the centre."""
  _, height, width = about["input_size"]
  method = about.get("interpolation", "bicubic")
  method = method if method in ("bilinear", "bicubic") else "bicubic"
  crop = about.get("crop_pct") or 0.875
  if height != width or crop == 1:
    return (
      f"decode|resize({_text((height, width))}, {method!r}, antialias=True)"
    )
  return (
    f"decode|resize_small({int(height / crop)}, {method!r}, antialias=True)"
    f"|central_crop({height})"
  )


def _fold(weights: Weights, mean, std) -> Weights:
  """Moves a normalisation other than to [-1, 1] into the patch embedding.

  A model trained on (p - mean) / std of pixels p in [0, 1] gets x = 2 p - 1
  from us, so (x + 1 - 2 mean) / (2 std): the kernel is scaled, the bias moved.
  """
  mean, std = np.asarray(mean or [0.5] * 3), np.asarray(std or [0.5] * 3)
  if np.allclose(mean, 0.5) and np.allclose(std, 0.5):
    return weights
  params = dict(weights.params)
  if "embedding/kernel" not in params or "conv_root/kernel" in params:
    raise ValueError(
      f"got images normalised with mean {mean.tolist()} and deviation"
      f" {std.tolist()}, expected 0.5 and 0.5 for a model that begins with a"
      " standardised convolution."
    )
  kernel, bias = params["embedding/kernel"], params["embedding/bias"]
  scale, shift = 0.5 / std, (0.5 - mean) / std

  def moved(b):
    added = np.einsum("hwio,i->o", np.asarray(kernel, np.float64), shift)
    return (b + added).astype(b.dtype)

  params["embedding/kernel"] = kernel.then(
    kernel.shape, lambda k: (k * scale[:, None]).astype(k.dtype)
  )
  params["embedding/bias"] = bias.then(bias.shape, moved)
  note = (
    f"images were normalised with mean {mean.tolist()} and deviation"
    f" {std.tolist()}; this is now part of the patch embedding, which gets"
    " images in [-1, 1]."
  )
  return dataclasses.replace(
    weights, params=params, notes=(*weights.notes, note)
  )


def _check_arrays(params: Mapping[str, LazyArray]) -> None:
  for name, array in params.items():
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(
        f"{name}: got type {array.dtype}, expected floating point."
      )
    if len(array.shape) != RANKS.get(name, len(array.shape)):
      raise ValueError(
        f"{name}: got shape {tuple(array.shape)}, expected"
        f" {RANKS[name]} dimensions."
      )


def _unknown_names(path, arrays) -> str:
  some = ", ".join(sorted(arrays)[:4]) or "none"
  return (
    f"got {str(path)!r} with {len(arrays)} arrays, such as {some}, of no model"
    f" that we know; {EXPECTED}."
  )


def _text(size: tuple[int, int]) -> str:
  return str(size[0]) if size[0] == size[1] else f"({size[0]}, {size[1]})"


def _json(path: epath.Path) -> dict[str, Any]:
  """Returns the contents of a file beside the weights; {} if there is none."""
  if not path.exists():
    return {}
  try:
    values = json.loads(path.read_text())
  except ValueError as e:
    raise ValueError(
      f"{path.name}: got no JSON ({e}); copy the file again."
    ) from None
  if not isinstance(values, dict):
    raise ValueError(
      f"{path.name}: got a {type(values).__name__}, expected options by name."
    )
  return values
