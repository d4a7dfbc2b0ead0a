"""Hugging Face's preprocessor_config.json: read as operations, and written."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.config import eval_preprocessing, json_file

FILE = "preprocessor_config.json"
# What is read of it; and `size` and `crop_size`, which have several forms:
# `_sides`.
READ = {
  "image_processor_type": str,
  "feature_extractor_type": str,
  "do_resize": bool,
  "resample": json_file.Whole(0, 5),
  "do_center_crop": bool,
  "do_rescale": bool,
  "rescale_factor": float,
  "do_normalize": bool,
  "image_mean": (float,) * 3,
  "image_std": (float,) * 3,
}
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_CLIP = {
  "resample": 3,
  "size": {"shortest_edge": 224},
  "do_center_crop": True,
  "crop_size": 224,
  "image_mean": [0.48145466, 0.4578275, 0.40821073],
  "image_std": [0.26862954, 0.26130258, 0.27577711],
}
# Type of the processor -> what it does where its file is silent, unless that is
# to resize images to the model's size, bilinear, and normalise by 0.5.
# Source: transformers 5.24, models/*/image_processing_*.py.
DEFAULTS = {
  "ViT": {},
  "DeiT": {
    "resample": 3,
    "size": {"height": 256, "width": 256},
    "do_center_crop": True,
    "crop_size": 224,
  },
  "CLIP": _CLIP,
  "Bit": _CLIP,
}
# Without defaults that we know, all that decides on the pixels must be there.
_DECISIVE = {
  *("do_resize", "size", "resample", "do_center_crop", "do_rescale"),
  *("do_normalize", "image_mean", "image_std"),
}


def complete(about: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what is stated, and the defaults of the processor that is named.

  Args:
    about: Contents of preprocessor_config.json; {}: there is none.
  """
  about = {k: v for k, v in about.items() if v is not None}
  if not about:
    return {}
  defaults = DEFAULTS.get(_type(about), {})
  size = about.get("size")
  if "shortest_edge" in defaults.get("size", ()) and isinstance(size, int):
    about["size"] = {"shortest_edge": size}
  return {**defaults, **about}


def _type(about: Mapping[str, Any]) -> str:
  """Returns the model whose processor is named; "ViT" where none is."""
  keys = ("image_processor_type", "feature_extractor_type")
  name = next((about[key] for key in keys if about.get(key)), "ViT")
  return re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", name)


def ops_of(about: Mapping[str, Any], size: tuple[int, int]) -> str | None:
  """Returns transformers' evaluation of a model.

  Args:
    about: As `complete` returns it.
    size: (height, width) of the model's images, pixels.

  Returns:
    None where nothing is stated, or what none of our operations does.
  """
  filter = RESAMPLE.get(about.get("resample", 2))
  if not (about and filter and about.get("do_resize", True)):
    return None
  if _type(about) not in DEFAULTS and not (
    about.keys() >= _DECISIVE and isinstance(about["size"], dict)
  ):
    return None
  whole = eval_preprocessing.PixelPath(
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
  return eval_preprocessing.centre_of(whole, first)


def _sides(
  about: Mapping[str, Any], key: str, default: tuple[int, int]
) -> tuple[int, int] | int | None:
  """Returns (height, width), the shorter side, or None for another form."""
  value = about.get(key, list(default))
  keys = ("height", "width", "shortest_edge")
  shapes = {list: json_file.SIZE, dict: dict.fromkeys(keys, json_file.SIDE)}
  shape = shapes.get(type(value), json_file.SIDE)
  json_file.check({key: value}, {key: shape}, FILE)
  if not isinstance(value, dict):
    return tuple(value) if isinstance(value, list) else (value, value)
  value = {k: v for k, v in value.items() if v is not None}
  if value.keys() == {"height", "width"}:
    return value["height"], value["width"]
  return value.get("shortest_edge") if len(value) == 1 else None


def unlike(about: Mapping[str, Any], size: tuple[int, int]) -> str:
  """Returns a note on a preprocessing that is not ours."""
  keys = ("do_resize", "size", "resample", "do_center_crop", "crop_size")
  if _type(about) not in DEFAULTS:
    keys = ("image_processor_type", "feature_extractor_type", *keys)
  return eval_preprocessing.unlike(FILE, about, keys, size)


def white(about: Mapping[str, Any]) -> float:
  """Returns what transformers makes of the value 255 before it normalises.

  Raises:
    ValueError: It is not within 0.001 and 255.
  """
  if not about.get("do_rescale", True):
    return 255.0
  white = 255.0 * about.get("rescale_factor", 1 / 255)
  if not 0.001 <= white <= 255:
    raise ValueError(
      f"{FILE}: rescale_factor: got {white / 255:g}, expected"
      " 1/255 or another factor up to 1; mend the file beside the weights."
    )
  return white


def write(ops: str, size: tuple[int, int]) -> tuple[dict[str, Any], str]:
  """Returns the nearest preprocessing of transformers', to [-1, 1].

  Pillow's filters are all that it has: of a resizing by TensorFlow the filter
  is kept, or bilinear taken in place of one that it lacks. What is neither the
  whole image nor its centre, resized, becomes the whole.

  Args:
    ops: Preprocessing of the model, as `config.data.ops`.
    size: (height, width) of its images, pixels.

  Returns:
    Contents of preprocessor_config.json, and the operations that are read from
    it.
  """
  path = eval_preprocessing.taken_apart(ops) or eval_preprocessing.PixelPath(
    size
  )
  numbers = {name: number for number, name in RESAMPLE.items()}
  about: dict[str, Any] = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": _pixels(size),
    "resample": numbers.get(path.filter, numbers["bilinear"]),
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
  }
  if path.short is not None and path.short >= max(size):
    about |= {
      # Some versions of ViT's own do not crop.
      "image_processor_type": "CLIPImageProcessor",
      "size": {"shortest_edge": path.short},
      "do_center_crop": True,
      "crop_size": _pixels(size),
    }
  read = ops_of(about, size)
  assert read is not None
  return about, read


def _pixels(size: tuple[int, int]) -> dict[str, int]:
  return {"height": size[0], "width": size[1]}
