"""Hugging Face's preprocessor_config.json: read as operations, and written.

transformers 5 writes the same object for CLIP and SigLIP as `image_processor`
of processor_config.json, which takes precedence. Functions get the name of the
file that was read for their messages.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from vit_jax.config import json_file
from vit_jax.options import shown
from vit_jax.paths import file_in
from vit_jax.weights import eval_preprocessing
from vit_jax.weights.weights_file import Pixels, height_and_width

FILE = "preprocessor_config.json"
PROCESSOR_FILE, PROCESSOR_KEY = "processor_config.json", "image_processor"
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_CLIP = {
  "resample": 3,
  "size": {"shortest_edge": 224},
  "do_center_crop": True,
  "crop_size": 224,
  "image_mean": [0.48145466, 0.4578275, 0.40821073],
  "image_std": [0.26862954, 0.26130258, 0.27577711],
}
# Type of the processor -> the values of what its file does not state, if they
# are not those of `Preprocessor`.
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
  "Bit": _CLIP,  # DINOv2's
  "Siglip": {"resample": 3},
  "Beit": {"resample": 3},
  "DINOv3ViT": {
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
  },
}
# What decides on the pixels: a processor of another type has to state it all.
_DECISIVE = {
  *("do_resize", "size", "resample", "do_center_crop", "do_rescale"),
  *("do_normalize", "image_mean", "image_std"),
}


@dataclasses.dataclass(frozen=True)
class Preprocessor:
  """Contents of preprocessor_config.json, with the defaults of most types.

  By default, images are resized to the model's size, bilinear, and normalised
  by 0.5. Sizes are pixels in one of several forms, see `_sides`; `resample` is
  a number of Pillow's, as in `RESAMPLE`. EfficientNet's alone subtracts 1 after
  rescaling (`rescale_offset`), and divides once more by the deviation
  (`include_top`).
  """

  image_processor_type: str | None = None
  feature_extractor_type: str | None = None
  do_resize: bool = True
  size: Any = None
  resample: int = 2
  do_center_crop: bool = False
  crop_size: Any = None
  do_rescale: bool = True
  rescale_factor: float = 1 / 255
  rescale_offset: bool = False
  include_top: bool = True
  do_normalize: bool = True
  image_mean: tuple[float, ...] = ()
  image_std: tuple[float, ...] = ()


def read(folder: epath.Path) -> tuple[dict[str, Any], str]:
  """Returns the preprocessing of a folder; {} if no file states it.

  Returns:
    The values; the name of the file that states them.

  Raises:
    ValueError: A file is not a JSON object.
  """
  nested = json_file.read(file_in(folder, PROCESSOR_FILE)).get(PROCESSOR_KEY)
  if isinstance(nested, dict):
    return nested, PROCESSOR_FILE
  return json_file.read(file_in(folder, FILE)), FILE


def typed(about: Mapping[str, Any], file: str = FILE) -> Preprocessor:
  """Returns the contents of a file with their types.

  Raises:
    ValueError: Values have other types.
  """
  return json_file.build(Preprocessor, about, file)


def complete(about: Mapping[str, Any], file: str = FILE) -> dict[str, Any]:
  """Adds the defaults of the processor's type to the file's contents.

  Args:
    about: Contents of the file; {} without such a file.
    file: Its name.

  Raises:
    ValueError: Values have other types.
  """
  about = {k: v for k, v in about.items() if v is not None}
  if not about:
    return {}
  defaults = DEFAULTS.get(_type(typed(about, file)), {})
  size = about.get("size")
  if "shortest_edge" in defaults.get("size", ()) and isinstance(size, int):
    about["size"] = {"shortest_edge": size}
  return {**defaults, **about}


def _type(stated: Preprocessor) -> str:
  """Returns the model whose processor is named; "ViT" if none is."""
  name = stated.image_processor_type or stated.feature_extractor_type
  return re.sub(
    "(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", name or "ViT"
  )


def ops_of(
  about: Mapping[str, Any], size: tuple[int, int], file: str = FILE
) -> str | None:
  """Returns the operations of transformers' evaluation.

  Args:
    about: The result of `complete`.
    size: (height, width) of the model's images, pixels.
    file: Name of the file.

  Returns:
    The operations; None if `about` states nothing, or if our operations cannot
    do the same.

  Raises:
    ValueError: Values have other types, or a size has another number of sides.
  """
  stated = typed(about, file)
  filter = RESAMPLE.get(stated.resample)
  if not (about and filter and stated.do_resize):
    return None
  if _type(stated) not in DEFAULTS and not (
    about.keys() >= _DECISIVE and isinstance(stated.size, dict)
  ):
    return None
  whole = eval_preprocessing.PixelPath(
    size,
    dct="accurate",
    resizer="pillow",
    filter=filter,
    antialias=True,
    floors=True,
  )
  first, last = _sides(stated.size, f"{file}: size", size), size
  if stated.do_center_crop:
    last = _sides(stated.crop_size, f"{file}: crop_size", size)
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


def image_size(
  about: Mapping[str, Any], file: str = FILE
) -> tuple[int, int] | None:
  """Returns the (height, width) that a processor makes, pixels.

  Args:
    about: The result of `complete`.
    file: Name of the file.

  Returns:
    The size; None if it is not stated, or if it depends on the image.

  Raises:
    ValueError: Values have other types, or a size has another number of sides.
  """
  stated = typed(about, file)
  key = "crop_size" if stated.do_center_crop else "size"
  if (value := about.get(key)) is None:
    return None
  sides = _sides(value, f"{file}: {key}", (0, 0))
  return sides if isinstance(sides, tuple) else None


def _sides(
  value: Any, where: str, default: tuple[int, int]
) -> tuple[int, int] | int | None:
  """Returns (height, width), the shorter side, or None for another form.

  Args:
    value: One side, two, or a dict of sides by name; None if not stated.
    where: "FILE: KEY", for messages.
    default: The result if nothing is stated.
  """
  if value is None:
    return default
  names = set()
  if isinstance(value, dict):
    names = {name for name, side in value.items() if side is not None}
    if names not in ({"height", "width"}, {"shortest_edge"}):
      return None
    value = [value[name] for name in sorted(names)]
  sides = tuple(value) if isinstance(value, list) else (value,)
  if not all(isinstance(side, int) and side > 0 for side in sides):
    raise ValueError(
      f"{where}: got {shown(value)}, expected whole numbers from 1."
    )
  return sides[0] if len(names) == 1 else height_and_width(sides, where)


def unlike(
  about: Mapping[str, Any], size: tuple[int, int], file: str = FILE
) -> str:
  """Returns a note on a preprocessing that our operations cannot express."""
  keys = ("do_resize", "size", "resample", "do_center_crop", "crop_size")
  if _type(typed(about, file)) not in DEFAULTS:
    keys = ("image_processor_type", "feature_extractor_type", *keys)
  return eval_preprocessing.unlike(file, about, keys, size)


def pixels(about: Mapping[str, Any], file: str = FILE) -> Pixels | None:
  """Returns transformers' normalisation; None if nothing states it.

  Args:
    about: The result of `complete`.
    file: Name of the file.

  Raises:
    ValueError: Values have other types, or `rescale_factor` is not valid.
  """
  if not about:
    return None
  stated = typed(about, file)
  white, kind = _white(stated, file), _type(stated)
  is_whole = stated.image_mean and stated.image_std
  if kind not in DEFAULTS and stated.do_normalize and not is_whole:
    return None
  deviation = stated.image_std or (0.5,) * 3
  mean, std = stated.image_mean or (0.5,) * 3, deviation
  if not stated.do_normalize:
    mean, std = (0.0,) * 3, (1.0,) * 3
  if kind == "EfficientNet":
    if stated.do_rescale and stated.rescale_offset:
      mean = tuple(m + 1 for m in mean)
    if stated.include_top:
      std = tuple(s * d for s, d in zip(std, deviation, strict=False))
  return Pixels(tuple(m / white for m in mean), tuple(s / white for s in std))


def _white(stated: Preprocessor, file: str) -> float:
  """Returns the value to which transformers rescales 255 before normalising.

  Raises:
    ValueError: It is not between 0.001 and 255.
  """
  if not stated.do_rescale:
    return 255.0
  white, factor = 255.0 * stated.rescale_factor, stated.rescale_factor
  if not 0.001 <= white <= 255:
    raise ValueError(
      f"{file}: rescale_factor: got {factor:g}, expected 1/255 or up to 1."
    )
  return white


def write(ops: str, size: tuple[int, int]) -> tuple[dict[str, Any], str]:
  """Returns transformers' preprocessing nearest to `ops`, to [-1, 1].

  transformers resizes with Pillow. A resizing by TensorFlow is written with the
  same filter, or with bilinear if Pillow lacks the filter. Anything other than
  a resized image and its centre is written as the resized image.

  Args:
    ops: Preprocessing of the model, as `config.data.ops`.
    size: (height, width) of its images, pixels.

  Returns:
    Contents of preprocessor_config.json; the operations that reading it gives.
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
  return about, ops_of(about, size)


def _pixels(size: tuple[int, int]) -> dict[str, int]:
  return {"height": size[0], "width": size[1]}
