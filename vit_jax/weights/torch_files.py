"""Weights of PyTorch libraries: `.safetensors`, and the files beside them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.config import json_file, model_from_dict, pixel_path
from vit_jax.options import shown
from vit_jax.weights import hf, timm
from vit_jax.weights.beside import beside
from vit_jax.weights.found import (
  METADATA,
  METADATA_KEY,
  Weights,
  model_of,
  unknown_names,
  with_metadata,
)
from vit_jax.weights.lazy import LazyArray


class Safetensors(NamedTuple):
  """What is in a `.safetensors`, and what is known of it from elsewhere.

  path: The file, or its folder.
  arrays: By name.
  texts: Metadata in the file.
  config: What config.json beside it holds.
  options: What the caller knows better.
  """

  path: epath.Path
  arrays: dict[str, LazyArray]
  texts: Mapping[str, str]
  config: dict[str, Any]
  options: dict[str, Any]


def from_safetensors(found: Safetensors) -> Weights:
  for looks_like, read_all in SAFETENSORS.values():
    if looks_like(found.arrays):
      return read_all(found)
  raise ValueError(unknown_names(found.path, found.arrays))


# What is read of timm's config.json, and what in it or in its
# `pretrained_cfg`.
_TIMM_MODEL = {
  "architecture": str,
  "model_args": {"num_heads": json_file.Whole(1), "act_layer": str},
}
_TIMM = {
  "input_size": (json_file.SIDE,) * 3,
  "label_names": [str],
  "crop_pct": float,
  "interpolation": str,
  "crop_mode": str,
  "mean": (float,) * 3,
  "std": (float,) * 3,
}
# What is read of preprocessor_config.json; and `size` and `crop_size`, which
# have several forms: `_sides`.
_PREPROCESSOR = {
  "do_resize": bool,
  "resample": json_file.Whole(0, 5),
  "do_center_crop": bool,
  "do_rescale": bool,
  "rescale_factor": float,
  "do_normalize": bool,
  "image_mean": (float,) * 3,
  "image_std": (float,) * 3,
}
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def _from_timm(found: Safetensors) -> Weights:
  where = f"{found.path}: {METADATA_KEY} in its header"
  ours = json_file.parse(found.texts.get(METADATA_KEY, "{}"), where)
  json_file.check(ours, METADATA, where)
  ours = ours or {}
  if ours:
    stated = {"num_heads": _num_heads(ours)}
  else:
    shape = _TIMM | _TIMM_MODEL | {"pretrained_cfg": _TIMM}
    json_file.check(found.config, shape, f"{found.path}: config.json")
    stated = timm.stated(found.config)
  if num_heads := found.options.get("num_heads"):
    stated["num_heads"] = num_heads
  params, options = timm.read(found.arrays, **stated)
  weights = Weights(str(found.path), "timm", params, options)
  if ours:
    return with_metadata(weights, ours)
  about = {**found.config, **(found.config.get("pretrained_cfg") or {})}
  size = (about.get("input_size") or [3])[1:]
  names = about.get("label_names")
  weights = dataclasses.replace(
    weights,
    image_size=tuple(size) or None,
    class_names=tuple(names) if names else None,
    ops=_timm_ops(about) if size else None,
  )
  return _fold(weights, about.get("mean"), about.get("std"))


def _from_hf(found: Safetensors) -> Weights:
  path = found.path
  if not found.config:
    raise ValueError(
      f"got {str(path)!r} without a config.json beside it, which tells the"
      " heads and the form of GELU; expected the folder of a Hugging Face"
      " model."
    )
  params, options, extras = hf.read(found.arrays, found.config)
  size = extras["image_size"]
  folder = path if path.is_dir() else path.parent
  about = json_file.read(
    beside(folder, "preprocessor_config.json"), _PREPROCESSOR
  )
  about = {k: v for k, v in about.items() if v is not None}
  ops = _hf_ops(about, size)
  weights = Weights(
    str(path),
    "hf",
    params,
    options,
    grid=(size[0] // extras["patch"], size[1] // extras["patch"]),
    image_size=size,
    class_names=extras["class_names"],
    loss=extras["loss"],
    ops=ops,
    notes=() if ops or not about else (_unlike(about, size),),
  )
  mean, std = about.get("image_mean"), about.get("image_std")
  if not about.get("do_normalize", True):
    mean, std = [0.0] * 3, [1.0] * 3
  return _fold(weights, mean, std, _white(about))


# Names that the arrays may have: whether these are such, and what reads them.
SAFETENSORS = {
  "timm": (timm.looks_like, _from_timm),
  "hf": (hf.looks_like, _from_hf),
}


def _num_heads(metadata: Mapping[str, Any]) -> int | None:
  if not model_of(metadata):
    return None
  model = model_from_dict(model_of(metadata))
  return model.size.num_heads if model.name == "vit" else None


def _timm_ops(about: Mapping[str, Any]) -> str:
  """Returns timm's evaluation of a model, from its config."""
  _, height, width = about["input_size"]
  share = about.get("crop_pct") or 0.875
  if not 0.01 <= share <= 100:
    raise ValueError(
      f"config.json: crop_pct: got {share}, expected the side of the crop by"
      " that of the image, such as 0.875."
    )
  return pixel_path.timm(
    (height, width),
    share,
    about.get("interpolation") or "bicubic",
    about.get("crop_mode") or "center",
  ).ops


def _hf_ops(about: Mapping[str, Any], size: tuple[int, int]) -> str | None:
  """Returns transformers' evaluation of a model.

  Args:
    about: Contents of preprocessor_config.json; {}: there is none.
    size: (height, width) of the model's images, pixels.

  Returns:
    None where nothing is stated, or what none of our operations does.
  """
  filter = _RESAMPLE.get(about.get("resample", 2))
  if not (about and filter and about.get("do_resize", True)):
    return None
  whole = pixel_path.PixelPath(
    size, dct="accurate", resizer="pillow", filter=filter, antialias=True
  )
  first, last = _sides(about, "size", size), size
  if about.get("do_center_crop"):
    last = _sides(about, "crop_size", size)
  elif first != size:
    return None
  # A crop larger than its image is filled up with zeros by transformers alone.
  if first is None or last != size or min(np.subtract(first, size)) < 0:
    return None
  if isinstance(first, int):
    return dataclasses.replace(whole, short=first).ops
  if first == size:
    return whole.ops
  resize = dataclasses.replace(whole, size=first).ops
  return f"{resize}|central_crop_torch({_text(size)})"


def _sides(
  about: Mapping[str, Any], key: str, default: tuple[int, int]
) -> tuple[int, int] | int | None:
  """Returns (height, width), the shorter side, or None for another form."""
  value = about.get(key, list(default))
  keys = ("height", "width", "shortest_edge")
  shapes = {list: json_file.SIZE, dict: dict.fromkeys(keys, json_file.SIDE)}
  shape = shapes.get(type(value), json_file.SIDE)
  json_file.check({key: value}, {key: shape}, "preprocessor_config.json")
  if not isinstance(value, dict):
    return tuple(value) if isinstance(value, list) else (value, value)
  value = {k: v for k, v in value.items() if v is not None}
  if value.keys() == {"height", "width"}:
    return value["height"], value["width"]
  return value.get("shortest_edge") if len(value) == 1 else None


def _unlike(about: Mapping[str, Any], size: tuple[int, int]) -> str:
  """Returns a note on a preprocessing that is not ours."""
  keys = ("do_resize", "size", "resample", "do_center_crop", "crop_size")
  given = ", ".join(f"{k}={shown(about[k])}" for k in keys if k in about)
  return (
    f"preprocessor_config.json: got {given}, which no operation here does for"
    f" images of {size[0]} x {size[1]} pixels; they are resized otherwise."
  )


def _white(about: Mapping[str, Any]) -> float:
  """Returns what transformers makes of the value 255 before it normalises."""
  if not about.get("do_rescale", True):
    return 255.0
  white = 255.0 * about.get("rescale_factor", 1 / 255)
  if not 0.001 <= white <= 255:
    raise ValueError(
      f"preprocessor_config.json: rescale_factor: got {white / 255:g}, expected"
      " 1/255 or another factor up to 1; mend the file beside the weights."
    )
  return white


def _fold(weights: Weights, mean, std, white: float = 1.0) -> Weights:
  """Moves a normalisation other than to [-1, 1] into the patch embedding.

  A model trained on (p - mean) / std of pixels p in [0, white] gets
  x = 2 p / white - 1 from us. With mean and std divided by white, that is
  (x + 1 - 2 mean) / (2 std): the kernel is scaled, the bias moved.
  """
  mean, std = (np.asarray(v or [0.5] * 3) / white for v in (mean, std))
  if np.allclose(mean, 0.5) and np.allclose(std, 0.5):
    return weights
  if not np.all(std > 0):
    raise ValueError(
      f"got images normalised with the deviation {std.tolist()}, expected more"
      " than 0; mend the file beside the weights."
    )
  params = dict(weights.params)
  if "embedding/kernel" not in params or "conv_root/kernel" in params:
    raise ValueError(
      f"got images normalised with mean {mean.tolist()} and deviation"
      f" {std.tolist()}, expected 0.5 and 0.5 for a model that begins with a"
      " standardised convolution."
    )
  if "embedding/bias" not in params:
    raise ValueError(
      "got a patch embedding without its bias, expected both: images were"
      " normalised otherwise than ours, which becomes part of it."
    )
  kernel, bias = params["embedding/kernel"], params["embedding/bias"]
  scale, shift = 0.5 / std, (0.5 - mean) / std

  def scaled():
    return (np.asarray(kernel) * scale[:, None]).astype(np.float32)

  def moved():
    added = np.einsum("hwio,i->o", np.asarray(kernel, np.float64), shift)
    return (np.asarray(bias) + added).astype(np.float32)

  # float32, whatever the file has: half precision would round once more.
  float32 = np.dtype(np.float32)
  params["embedding/kernel"] = LazyArray(kernel.shape, float32, scaled)
  params["embedding/bias"] = LazyArray(bias.shape, float32, moved)
  note = (
    f"images were normalised with mean {mean.tolist()} and deviation"
    f" {std.tolist()}; this is now part of the patch embedding, which gets"
    " images in [-1, 1]."
  )
  return dataclasses.replace(
    weights, params=params, notes=(*weights.notes, note)
  )


def _text(size: tuple[int, int]) -> str:
  return str(size[0]) if size[0] == size[1] else f"({size[0]}, {size[1]})"
