"""Evaluation preprocessing: from an encoded image to a model's pixels.

A `PixelPath` has the steps of a string of operations, so that each can be
replaced. Three libraries have scored the published checkpoints:

- timm (`timm`): resizes the shorter side to floor(pixels / crop share) with
  Pillow's bicubic filter, and crops the centre, even with a share of 1.
- Google's vision_transformer (`google`): resizes the whole image to the model's
  size, whatever its aspect ratio, bilinear, without antialiasing.
- big_vision (`big_vision`): resizes the shorter side to 8/7 of the model's size
  (256 for 224) by the mean over areas, and crops the centre.

Source: timm 1.0.31, data/transforms_factory.py; vision_transformer,
  vit_jax/input_pipeline.py; big_vision, configs/vit_s16_i1k.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.data.preprocessing import (
  Op,
  decoding,
  image_size,
  parse_ops,
  turns_upright,
  with_decoding,
)
from vit_jax.options import shown


@dataclasses.dataclass(frozen=True)
class PixelPath:
  """The steps from an image to the pixels of a model.

  Attributes:
    size: (height, width) of the model's images, pixels.
    short: Pixels of the shorter side before the centre crop; None to resize the
      whole image to `size`.
    dct: Inverse transform of a JPEG: "fast", TensorFlow's default, or
      "accurate", Pillow's.
    upsampling: How a JPEG's colours are enlarged: "fancy", interpolated, or
      "plain".
    resizer: Library whose arithmetic is used, also its rounding of sides and
      crops: "tensorflow", or "pillow" with torchvision.
    filter: "bilinear", "bicubic" or, with TensorFlow, "area" or "nearest".
    antialias: Whether the filter is widened when the image shrinks. Pillow
      always widens it; "area" and "nearest" ignore the option.
    floors: With "pillow", whether half a pixel at the left or top of a crop is
      rounded down, as in transformers, instead of to even, as in torchvision
      and timm. TensorFlow always rounds down.
  """

  size: tuple[int, int]
  short: int | None = None
  dct: str = "fast"
  upsampling: str = "fancy"
  resizer: str = "tensorflow"
  filter: str = "bilinear"
  antialias: bool = False
  floors: bool = False

  @property
  def ops(self) -> str:
    """The operations, as `config.data.ops`."""
    decoding = {"dct": self.dct, "upsampling": self.upsampling}
    defaults = Op("decode", (), {}).arguments
    options = [f"{k}={v!r}" for k, v in decoding.items() if v != defaults[k]]
    decode = f"decode({', '.join(options)})" if options else "decode"

    whole, is_torch = _side(self.size), self.resizer == "pillow"
    ending = "_torch" * is_torch
    name = ("resize" if self.short is None else "resize_small") + ending
    target = whole if self.short is None else self.short
    options = [repr(target)]
    if self.filter != Op(name, (target,), {}).arguments["method"]:
      options.append(repr(self.filter))
    if self.antialias and not is_torch:
      options.append("antialias=True")
    parts = [decode, f"{name}({', '.join(options)})"]
    if self.short is not None:
      parts.append(f"{self.crop}({whole})")
    return "|".join(parts)

  @property
  def crop(self) -> str:
    """The name of the centre-crop operation."""
    rounds = self.resizer == "pillow" and not self.floors
    return "central_crop" + "_torch" * rounds

  @property
  def share(self) -> float | None:
    """Side of the crop / shorter side of the image; None without a crop."""
    return None if self.short is None else min(self.size) / self.short

  def cropped(self, share: float | None) -> "PixelPath":
    """Returns the path with another share of the crop; None for no crop."""
    short = None if share is None else _short(min(self.size), share)
    return dataclasses.replace(self, short=short)

  def at(self, size: tuple[int, int]) -> "PixelPath":
    """Returns the path to images of another size, with the same share.

    If an image could be smaller than the crop, the whole image is resized.
    """
    short = self.short and self.short * min(size) // min(self.size)
    if short and short < max(size):
      short = None
    return dataclasses.replace(self, size=size, short=short)


def timm(
  size: tuple[int, int],
  share: float = 0.875,
  filter: str = "bicubic",
  mode: str = "center",
) -> PixelPath:
  """Returns timm's evaluation.

  Args:
    size: (height, width), pixels. If they differ, the whole image is resized,
      whatever `mode` is.
    share: Side of the crop / shorter side of the image; timm's crop_pct.
    filter: "bicubic" or "bilinear", timm's interpolation; others become
      "bicubic".
    mode: timm's crop_mode: "center", or "squash", which resizes the whole
      image.
  """
  is_cropped = mode == "center" and size[0] == size[1]
  return PixelPath(
    size,
    _short(size[0], share) if is_cropped else None,
    dct="accurate",
    resizer="pillow",
    filter=filter if filter in ("bilinear", "bicubic") else "bicubic",
    antialias=True,
  )


def google(size: tuple[int, int]) -> PixelPath:
  """Returns the evaluation of vision_transformer and of AugReg."""
  return PixelPath(size)


def decoded_as(ops: str, other: str) -> str:
  """Returns `other` with the decoding of `ops`."""
  if not turns_upright(ops):
    other = as_stored(other)
  options = decoding(ops)
  del options["exif"]
  return with_decoding(other, **options)


def big_vision(size: tuple[int, int]) -> PixelPath:
  """Returns the evaluation of big_vision's ImageNet recipes."""
  return PixelPath(size, short=min(size) * 8 // 7, filter="area")


def of_protocol(
  name: str, size: tuple[int, int], share: float | None = None
) -> PixelPath:
  """Returns the evaluation with which published scores were measured.

  Args:
    name: "timm", "google" or "big_vision".
    size: (height, width), pixels.
    share: Side of the crop / shorter side of the image; only timm's needs it.
  """
  if name == "timm":
    return timm(size, share)
  if name == "google":
    return google(size)
  return big_vision(size)


def centre_of(path: PixelPath, whole: tuple[int, int]) -> str:
  """Returns operations that resize to `whole` and crop the centre.

  Example:
    >>> centre_of(PixelPath((224, 224)), (256, 256))
    'decode|resize(256)|central_crop(224)'
  """
  resize = dataclasses.replace(path, size=whole, short=None).ops
  return f"{resize}|{path.crop}({_side(path.size)})"


def unlike(
  file: str,
  about: Mapping[str, Any],
  keys: Sequence[str],
  size: tuple[int, int],
) -> str:
  """Returns a note on a preprocessing that our operations cannot express.

  Args:
    file: Name of the file that describes it.
    about: Contents of the file.
    keys: The keys that decide on the pixels.
    size: (height, width) of the model's images, pixels.
  """
  given = [f"{key}={shown(about[key])}" for key in keys if key in about]
  given = ", ".join(given) or f"the defaults of {', '.join(keys)}"
  return (
    f"{file}: got {given}, which no operation here does for images of"
    f" {size[0]} x {size[1]} pixels; they are resized otherwise."
  )


def as_stored(ops: str) -> str:
  """Returns operations that ignore the orientation in EXIF.

  The published scores were computed on pixels as they are stored.

  Example:
    >>> as_stored("decode(dct='accurate')|resize(224)")
    "decode(dct='accurate', exif=False)|resize(224)"
  """
  first, *rest = ops.split("|")
  name, _, options = first.strip().removesuffix(")").partition("(")
  if name != "decode" or not turns_upright(ops):
    return ops
  options = ", ".join(filter(None, (options, "exif=False")))
  return "|".join([f"decode({options})", *rest])


def taken_apart(ops: str) -> PixelPath | None:
  """Returns the path of a string of operations; None if they have another form.

  Raises:
    ValueError: Malformed `ops`.

  Example:
    >>> taken_apart("decode|resize_small(256)|central_crop(224)").filter
    'area'
    >>> taken_apart("decode|resize(32)|pad(4)")
  """
  ops = ops.removesuffix("|grey")  # as the model's channels say
  size, parsed = image_size(ops), parse_ops(ops)
  names = [op.name for op in parsed]
  ending = "_torch" * any(name.endswith("_torch") for name in names)
  floors = bool(ending) and names[-1] == "central_crop"
  crop = "central_crop" + ending * (not floors)
  cropped = ["decode", f"resize_small{ending}", crop]
  if names not in (cropped, ["decode", f"resize{ending}"]):
    return None
  decode, resize = (op.arguments for op in parsed[:2])
  return PixelPath(
    size,
    resize["size"] if names == cropped else None,
    dct=decode["dct"],
    upsampling=decode["upsampling"],
    resizer="pillow" if ending else "tensorflow",
    filter=resize["method"],
    antialias=resize.get("antialias", True),
    floors=floors,
  )


def whole_and_centre(ops: str, size: tuple[int, int]) -> str | None:
  """Scales operations that resize and crop the centre, to another image size.

  Both sizes are scaled by the same factor, so that the share of the crop is the
  same. Returns None for other operations.

  Args:
    ops: Operations, such as those of transformers' processor of DeiT.
    size: (height, width) of the new images, pixels.

  Raises:
    ValueError: Malformed `ops`.

  Example:
    >>> ops = "decode|resize_torch(256)|central_crop_torch(224)"
    >>> whole_and_centre(ops, (448, 448))
    'decode|resize_torch(512)|central_crop_torch(448)'
  """
  ops = ops.removesuffix("|grey")
  names = [op.name for op in parse_ops(ops)]
  ending = "_torch" * ("_torch" in ops)
  crops = ("central_crop", f"central_crop{ending}")
  if names[:-1] != ["decode", f"resize{ending}"] or names[-1] not in crops:
    return None
  old, (decode, resize, _) = image_size(ops), ops.split("|")
  whole = taken_apart(f"{decode}|{resize}")
  first = tuple(
    side * new // was
    for side, new, was in zip(whole.size, size, old, strict=True)
  )
  _, resize = dataclasses.replace(whole, size=first).ops.split("|")
  return f"{decode}|{resize}|{names[-1]}({_side(size)})"


def _side(size: tuple[int, int]) -> int | tuple[int, int]:
  """Returns one number for a square, two for other sizes."""
  return size[0] if size[0] == size[1] else size


def _short(side: int, share: float) -> int:
  return int(side / share)
