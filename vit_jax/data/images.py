"""From images in any form to arrays: files, globs, bytes, PIL images, arrays.

Pillow decodes. From lossless files its pixels equal those of TensorFlow's
decoder; from JPEG they differ: Pillow's inverse cosine transform is the
accurate one, TensorFlow's the fast one.
"""

import glob
import io
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import UInt8
from PIL import Image

EXPECTED = "expected JPEG, PNG, WebP, BMP or GIF"
# Those, and what else is pixels alone: Pillow would hand PostScript to another
# program, whatever the file's name.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# What Pillow raises, depending on the format and on what is wrong.
BROKEN = (
  OSError,
  SyntaxError,
  EOFError,
  ValueError,
  Image.DecompressionBombError,
)
MAX_UNDECODABLE = 0.01  # Share of a split; ten images are allowed in any case.
ARRAYS = "expected uint8 of [h, w], [h, w, 1], [h, w, 3] or [h, w, 4]"


def listed(images: Any) -> list[Any]:
  """Returns one entry per image: globs are expanded, in order of the names.

  Args:
    images: A path, a glob, the bytes of a file, a PIL image, an array [h, w] or
      [h, w, c]; or any number of these in a list or another iterable, or as an
      array [b, h, w, c].

  Raises:
    FileNotFoundError: A glob matches nothing.
    ValueError: The type or shape is none of these.
  """
  if isinstance(images, str | os.PathLike):
    return _matches(images)
  if _is_one(images):
    return [images]
  if not isinstance(images, Iterable):
    raise ValueError(
      f"got {type(images).__name__}, expected a path, a glob, bytes, a PIL"
      " image, an array, or a list of these."
    )
  found = []
  for image in images:
    found += _matches(image) if isinstance(image, str) else [image]
  return found


def name(image: Any, index: int) -> str:
  """Returns an image's name in an error: its path, or its position."""
  if isinstance(image, str | os.PathLike):
    return str(image)
  return getattr(image, "filename", "") or f"image {index}"


def read(image: Any) -> UInt8[np.ndarray, "h w 3"]:
  """Returns the pixels as RGB.

  As in training, grey becomes three equal channels, an alpha channel is
  dropped, 16 bits become 8, an animation is represented by its first frame, and
  an EXIF orientation is not applied (`PIL.ImageOps.exif_transpose` applies it).

  Args:
    image: A path, the bytes of a file, a PIL image, or an array uint8 [h, w],
      [h, w, 1], [h, w, 3] or [h, w, 4].

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: It is no image, or has more pixels than Pillow decodes
      (178,956,970).
  """
  if isinstance(image, Image.Image):
    return _rgb(image)
  if isinstance(image, bytes):
    return _from_bytes(image)
  if isinstance(image, str | os.PathLike):
    return _decoded(epath.Path(image))
  return _three_channels(image)


def _is_one(images) -> bool:
  if isinstance(images, str | bytes | os.PathLike | Image.Image):
    return True
  return hasattr(images, "__array__") and np.ndim(images) != 4


def _matches(path) -> list[Any]:
  text = str(path)
  if not re.search(r"[*?[]", text) or os.path.exists(path):
    return [path]
  if not (found := sorted(glob.glob(text, recursive=True))):
    raise FileNotFoundError(f"got {text!r}, which matches no file.")
  return found


def _decoded(path: epath.Path):
  if not path.exists():
    raise FileNotFoundError("got a path with no file, expected an image.")
  if path.is_dir():
    raise ValueError(f"got a folder, expected a file or a glob: {path}/*.jpg.")
  try:
    data = path.read_bytes()
  except OSError as e:  # without permission to read it
    raise ValueError(f"cannot be read: {e.strerror or e}.") from None
  return _from_bytes(data)


def _from_bytes(data: bytes):
  if not data:
    raise ValueError(f"got an empty file; {EXPECTED}.")
  try:
    image = Image.open(io.BytesIO(data), formats=FORMATS)
  except Image.UnidentifiedImageError:
    raise ValueError(
      f"got {len(data):,} bytes that are no image; {EXPECTED}."
    ) from None
  except Exception as e:  # a damaged file may raise anything
    raise _cannot_decode(e) from None
  with image:
    return _rgb(image)


def _rgb(image: Image.Image):
  if image.mode in ("I", "F"):
    raise ValueError(f"got a PIL image of mode {image.mode}, expected 8 bits.")
  try:
    if image.mode.startswith("I;16"):  # Pillow would clip values above 255
      return _three_channels((np.asarray(image) >> 8).astype(np.uint8))
    return np.asarray(image.convert("RGB"))
  except Exception as e:  # a damaged file may raise anything
    raise _cannot_decode(e) from None


def _cannot_decode(error: Exception) -> ValueError:
  if isinstance(error, Image.DecompressionBombError):
    return ValueError(
      f"got an image of too many pixels ({error}), expected at most"
      f" {2 * Image.MAX_IMAGE_PIXELS:,}."
    )
  return ValueError(
    f"got an image that cannot be decoded ({error}); {EXPECTED}, whole."
  )


def _three_channels(image):
  image = np.asarray(image)
  if image.ndim == 2:
    image = image[..., None]
  good = image.ndim == 3 and image.shape[-1] in (1, 3, 4) and image.size
  if image.dtype != np.uint8 or not good:
    hint = "; np.uint8(255 * image) if it is in [0, 1]"
    raise ValueError(
      f"got an array of type {image.dtype} and shape {image.shape}, {ARRAYS}"
      f"{hint if image.dtype.kind == 'f' else ''}."
    )
  return np.repeat(image, 3, -1) if image.shape[-1] == 1 else image[..., :3]
