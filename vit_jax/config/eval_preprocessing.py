"""From an encoded image to a model's pixels, as the libraries evaluate.

A `PixelPath` is a string of operations taken apart, so that one step of it can
be exchanged. Three libraries have scored the published checkpoints:

- timm (`timm`): the shorter side to floor(pixels / crop share), bicubic, by
  Pillow; the centre. With a share of 1 the aspect ratio is kept, too.
- Google's vision_transformer (`google`): the whole image to the model's size,
  bilinear, without antialiasing, aspect ratio not kept.
- big_vision (`big_vision`): the shorter side to 8/7 of the model's size (256
  for 224) by the mean over areas; the centre.

Source: timm 1.0.31, data/transforms_factory.py; vision_transformer,
vit_jax/input_pipeline.py; big_vision, configs/vit_s16_i1k.py.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.config.preprocessing import (
  Op,
  image_size,
  parse_ops,
  turns_upright,
)
from vit_jax.options import shown

# Options of the operation `decode` that steps exchange, at their defaults.
DECODING = {"dct": "fast", "upsampling": "fancy"}


@dataclasses.dataclass(frozen=True)
class PixelPath:
  """How an image becomes the pixels of a model.

  Attributes:
    size: (height, width) of the model's images, pixels.
    short: Pixels of the shorter side before the centre is cropped; None: the
      whole image is resized to `size`.
    dct: Inverse transform of a JPEG: "fast", TensorFlow's default, or
      "accurate", Pillow's.
    upsampling: Of a JPEG's colours: "fancy", interpolated, or "plain".
    resizer: Whose arithmetic, and whose rounding of sides and of the place of
      the crop: "tensorflow" or "pillow", with torchvision.
    filter: "bilinear", "bicubic" or, by TensorFlow, "area" or "nearest".
    antialias: Whether the filter is widened when shrinking. Pillow always does,
      and for "area" and "nearest" it has no meaning.
  """

  size: tuple[int, int]
  short: int | None = None
  dct: str = "fast"
  upsampling: str = "fancy"
  resizer: str = "tensorflow"
  filter: str = "bilinear"
  antialias: bool = False

  @property
  def ops(self) -> str:
    """The operations, as `config.data.ops`."""
    height, width = self.size
    whole = height if height == width else self.size
    is_torch = self.resizer == "pillow"
    name = "resize" if self.short is None else "resize_small"
    options = [repr(whole if self.short is None else self.short)]
    if self.filter != _default_filter(name, is_torch):
      options.append(repr(self.filter))
    if self.antialias and not is_torch:
      options.append("antialias=True")
    ending = "_torch" * is_torch
    parts = [self._decode, f"{name}{ending}({', '.join(options)})"]
    if self.short is not None:
      parts.append(f"central_crop{ending}({whole})")
    return "|".join(parts)

  @property
  def _decode(self) -> str:
    given = {"dct": self.dct, "upsampling": self.upsampling}
    options = [f"{k}={v!r}" for k, v in given.items() if v != DECODING[k]]
    return f"decode({', '.join(options)})" if options else "decode"

  @property
  def share(self) -> float | None:
    """Side of the crop by the shorter side of the image; None: not cropped."""
    return None if self.short is None else min(self.size) / self.short

  def cropped(self, share: float | None) -> "PixelPath":
    """Returns the path with another share of the shorter side; None: all."""
    short = None if share is None else _short(min(self.size), share)
    return dataclasses.replace(self, short=short)

  def at(self, size: tuple[int, int]) -> "PixelPath":
    """Returns the path to images of another size, the share of the crop kept.

    Where an image could be smaller than the crop, the whole is resized.
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
  """Returns timm's evaluation; its crop_pct, interpolation and crop_mode.

  Args:
    size: (height, width), pixels. If it is no square, the whole image is
      resized, whatever `mode` is.
    share: Side of the crop by the shorter side of the image.
    filter: "bicubic" or "bilinear"; others are taken as "bicubic".
    mode: "center", or "squash", by which the whole image is resized.
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


def big_vision(size: tuple[int, int]) -> PixelPath:
  """Returns the evaluation of big_vision's ImageNet recipes."""
  return PixelPath(size, short=min(size) * 8 // 7, filter="area")


def centre_of(path: PixelPath, whole: tuple[int, int]) -> str:
  """Returns operations that resize to `whole`, and crop the path's size.

  Example:
    >>> centre_of(PixelPath((224, 224)), (256, 256))
    'decode|resize(256)|central_crop(224)'
  """
  height, width = path.size
  ending = "_torch" * (path.resizer == "pillow")
  resize = dataclasses.replace(path, size=whole, short=None).ops
  sides = height if height == width else path.size
  return f"{resize}|central_crop{ending}({sides})"


def unlike(
  file: str,
  about: Mapping[str, Any],
  keys: Iterable[str],
  size: tuple[int, int],
) -> str:
  """Returns a note on a preprocessing that no operations are.

  Args:
    file: Name of the file that states it.
    about: Its contents.
    keys: Those that decide on the pixels; those that it lacks are left out.
    size: (height, width) of the model's images, pixels.
  """
  given = ", ".join(
    f"{key}={shown(about[key])}" for key in keys if key in about
  )
  return (
    f"{file}: got {given}, which no operation here does for images of"
    f" {size[0]} x {size[1]} pixels; they are resized otherwise."
  )


def as_stored(ops: str) -> str:
  """Returns the operations without the turn that EXIF asks for.

  The pipelines of the published scores take pixels as they are stored.

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
  """Returns the path of a string of operations, or None if it is no such path.

  Raises:
    ValueError: Malformed `ops`.

  Example:
    >>> taken_apart("decode|resize_small(256)|central_crop(224)").filter
    'area'
    >>> taken_apart("decode|resize(32)|pad(4)")
  """
  size, (decode, *rest) = image_size(ops), parse_ops(ops)
  names = tuple(op.name for op in rest)
  is_torch = any(name.endswith("_torch") for name in names)
  ending = "_torch" * is_torch
  if names == (f"resize{ending}",):
    resize, short = _Resize(*rest, is_torch), None
  elif names == (f"resize_small{ending}", f"central_crop{ending}"):
    resize = _Resize(rest[0], is_torch)
    short = resize.size
  else:
    return None
  if decode.name != "decode":
    return None
  given = dict(zip(DECODING, decode.args, strict=False)) | decode.kwargs
  return PixelPath(
    size,
    short,
    **{key: given.get(key, default) for key, default in DECODING.items()},
    resizer="pillow" if is_torch else "tensorflow",
    filter=resize.filter,
    antialias=resize.antialias,
  )


def whole_and_centre(ops: str, size: tuple[int, int]) -> str | None:
  """Returns operations that crop a resized whole, for another size of images.

  Both sides of both steps are scaled alike, so that the share of the crop is
  kept. None if the operations are no such two.

  Args:
    ops: Operations, as of transformers' processor of DeiT.
    size: (height, width) of the new images, pixels.

  Raises:
    ValueError: Malformed `ops`.

  Example:
    >>> ops = "decode|resize_torch(256)|central_crop_torch(224)"
    >>> whole_and_centre(ops, (448, 448))
    'decode|resize_torch(512)|central_crop_torch(448)'
  """
  ending = "_torch" * ("_torch" in ops)
  names = ["decode", f"resize{ending}", f"central_crop{ending}"]
  if [op.name for op in parse_ops(ops)] != names:
    return None
  old, (decode, resize, _) = image_size(ops), ops.split("|")
  whole = taken_apart(f"{decode}|{resize}")
  first = tuple(
    side * new // was
    for side, new, was in zip(whole.size, size, old, strict=True)
  )
  _, resize = dataclasses.replace(whole, size=first).ops.split("|")
  sides = size[0] if size[0] == size[1] else size
  return f"{decode}|{resize}|{names[-1]}({sides})"


class _Resize:
  """The options of a resizing operation, defaults included."""

  def __init__(self, op: Op, is_torch: bool):
    given = dict(zip(("size", "method", "antialias"), op.args, strict=False))
    given |= op.kwargs
    name = op.name.removesuffix("_torch")
    self.size = given["size"]
    self.filter = given.get("method", _default_filter(name, is_torch))
    self.antialias = is_torch or given.get("antialias", False)


def _default_filter(name: str, is_torch: bool) -> str:
  if is_torch:
    return "bicubic"
  return "bilinear" if name == "resize" else "area"


def _short(side: int, share: float) -> int:
  return int(side / share)
