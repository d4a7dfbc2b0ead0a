"""From images in any form to arrays: files, globs, bytes, PIL images, arrays.

Pillow decodes them. For lossless files its pixels equal those of TensorFlow's
decoder. For JPEG they differ: Pillow's inverse cosine transform is the accurate
one, TensorFlow's the fast one.

The header is read first. An image of more than `MAX_PIXELS`, or the run's limit
(config.data.max_pixels), is an error before memory is allocated for its pixels.
"""

import functools
import glob
import io
import logging
import os
import re
import threading
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import UInt8
from PIL import Image, features

from vit_jax.data.operation import MAX_PIXELS, colour

EXPECTED = "expected JPEG, PNG, WebP, BMP, GIF, TIFF or PPM"
# No others: Pillow would pass PostScript to another program, whatever the
# file's name.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Files of a folder with other endings are left out.
SUFFIXES = (
  *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif"),
  *(".tif", ".tiff", ".ppm", ".pgm"),
)
if features.check("avif"):  # in Pillow's own wheels since 11.3
  FORMATS += ("AVIF",)
  SUFFIXES += (".avif",)
# What Pillow raises, depending on the format and the damage.
BROKEN = (
  OSError,
  SyntaxError,
  EOFError,
  ValueError,
  Image.DecompressionBombError,
)
# The option that `_too_large` proposes; a command replaces it by its own.
LIMIT_OPTION = "config.data.max_pixels"
MAX_UNDECODABLE = 0.01  # Share of a split; ten images are allowed in any case.
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# A marker of a JPEG: neither a stuffed byte, nor a restart, nor a fill byte.
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
_END, _WITHOUT_LENGTH = 0xD9, (0x01, 0xD8)
_EXTRA_SAMPLES = 338  # tag of TIFF 6.0, page 31: 1 and 2 are alpha
_ORIENTATION = 0x0112  # tag of EXIF
_BYTES = bytes | bytearray | memoryview
ARRAYS = "expected uint8 of [h, w], [h, w, 1], [h, w, 3] or [h, w, 4]"


def listed(images: Any) -> list[Any]:
  """Returns one entry per image; globs are expanded in the order of names.

  Args:
    images: A path, a glob, the bytes of a file, an open file, a PIL image, an
      array [h, w] or [h, w, c]; or any number of these in a list or another
      iterable, or as an array [b, h, w, c].

  Raises:
    FileNotFoundError: A glob matches nothing.
    TypeError: The type is none of these.
  """
  if isinstance(images, str | os.PathLike):
    return _matches(images)
  if _is_one(images):
    return [images]
  entries = []
  for image in images:
    is_path = isinstance(image, str | os.PathLike)
    entries += _matches(image) if is_path else [image]
  return entries


def name(image: Any, index: int) -> str:
  """Returns an image's name for messages: its path, or its position."""
  if isinstance(image, str | os.PathLike):
    return str(image)
  return getattr(image, "filename", "") or f"image {index}"


def read(
  image: Any,
  *,
  exif: bool = True,
  background: str | None = None,
  max_pixels: int = MAX_PIXELS,
) -> UInt8[np.ndarray, "h w 3"]:
  """Returns the pixels of an image as RGB.

  As in training, grey becomes three equal channels, a transparent image is put
  on a background, 16 bits become 8, an animation is represented by its first
  frame, and an image is turned upright by its EXIF orientation.

  Args:
    image: A path, the bytes of a file, a file that is open in binary, a PIL
      image, or an array uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4].
    exif: Whether the orientation is applied. An array has none.
    background: Colour of the background, see `operation.colour`. With None,
      fully transparent pixels become white; the others keep their colours, and
      alpha is dropped. A warning says so once.
    max_pixels: Largest number of pixels of an image that is not decoded yet.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: It is not an image, or has more pixels than `max_pixels`.
  """
  pixels = read_with_alpha(image, exif=exif, max_pixels=max_pixels)
  return on_ground(pixels, background)


def read_with_alpha(
  image: Any, *, exif: bool = True, max_pixels: int = MAX_PIXELS
) -> UInt8[np.ndarray, "h w c"]:
  """Returns the pixels as RGB, or as RGBA if some may be transparent.

  Arguments and errors are those of `read`.
  """
  if isinstance(image, Image.Image):
    return _pixels(image, exif, max_pixels)
  if isinstance(image, _BYTES):
    data = bytes(image)
  elif isinstance(image, str | os.PathLike):
    data = _bytes_of(image)
  elif hasattr(image, "read"):
    data = _rest_of(image)
  else:
    return _as_colours(image)
  with _opened(data, max_pixels) as opened:
    return _pixels(opened, exif, max_pixels)


def on_ground(
  pixels: UInt8[np.ndarray, "h w c"], background: str | None = None
) -> UInt8[np.ndarray, "h w 3"]:
  """Returns RGB of RGB or RGBA, see `read`.

  Example:
    >>> on_ground(np.array([[[0, 0, 0, 128]]], np.uint8), "white").tolist()
    [[[127, 127, 127]]]
  """
  if pixels.shape[-1] == 3:
    return pixels
  colours, alpha = pixels[..., :3], pixels[..., 3:]
  if (alpha == 255).all():
    return colours
  if background is None:
    with _SAYING:  # a cache alone lets two threads in
      _say_ground()
    return np.where(alpha == 0, np.uint8(255), colours)
  over = Image.fromarray(pixels, "RGBA")
  ground = (*colour(background), 255)
  whole = Image.alpha_composite(Image.new("RGBA", over.size, ground), over)
  return np.asarray(whole.convert("RGB"))


_SAYING = threading.Lock()


@functools.cache  # once a process
def _say_ground() -> None:
  logging.warning(
    "Some images are transparent. Fully transparent pixels become white; the"
    " others keep their colours, without alpha; see config.data.background."
  )


def rescued(
  data: bytes, *, max_pixels: int = MAX_PIXELS, **options: Any
) -> UInt8[np.ndarray, "h w 3"]:
  """Returns the pixels of a file that another decoder could not read.

  Args:
    data: Bytes of the file.
    max_pixels: See `read`.
    **options: Further options of `read`.

  Raises:
    ValueError: See `read`; or the file is cut off.
  """
  if data.startswith(_JPEG):
    _check_whole(data)
  return read(data, max_pixels=max_pixels, **options)


def turn(data: bytes, max_pixels: int = MAX_PIXELS) -> int:
  """Returns how to turn an image after another decoder has decoded it.

  Args:
    data: Bytes of the file.
    max_pixels: See `read`.

  Returns:
    Its EXIF orientation, 1 (upright) to 8, see `turned`; 0 if only Pillow, that
    is `read`, decodes it correctly.

  Raises:
    ValueError: It is not an image, is cut off, or has more pixels than
      `max_pixels`.
  """
  with _opened(data, max_pixels) as image:
    if data.startswith(_JPEG):
      _check_whole(data)
      return _orientation(image)
  if data.startswith(_PNG):
    return 0 if b"eXIf" in data or image.has_transparency_data else 1
  # Bits of WebP's header for alpha, EXIF and animation.
  if data[8:12] != b"WEBP":
    return 0
  extended, lossless = data[12:16] == b"VP8X", data[12:16] == b"VP8L"
  is_odd = extended and data[20] & 0x1A or lossless and data[24] & 0x10
  return 0 if is_odd else 1


def turned(
  pixels: UInt8[np.ndarray, "a b c"], orientation: int
) -> UInt8[np.ndarray, "h w c"]:
  """Returns stored pixels upright.

  Args:
    pixels: The stored pixels.
    orientation: 1 to 8, of EXIF 2.32, section 4.6.4: rows and columns are
      exchanged from 5 on; then 3, 4, 7 and 8 mirror top and bottom, and 2, 3, 6
      and 7 left and right.

  Example:
    >>> turned(np.array([[[1], [2]]], np.uint8), 6)[..., 0].tolist()
    [[1], [2]]
    >>> turned(np.array([[[1], [2]]], np.uint8), 8)[..., 0].tolist()
    [[2], [1]]
  """
  if orientation >= 5:
    pixels = pixels.swapaxes(0, 1)
  rows = slice(None, None, -1 if orientation in (3, 4, 7, 8) else 1)
  columns = slice(None, None, -1 if orientation in (2, 3, 6, 7) else 1)
  return np.ascontiguousarray(pixels[rows, columns])


def _is_one(images) -> bool:
  if isinstance(images, str | _BYTES | os.PathLike | Image.Image):
    return True
  if hasattr(images, "read"):  # a file, whose items would be lines
    return True
  return hasattr(images, "__array__") and np.ndim(images) != 4


def _matches(path) -> list[Any]:
  text = str(path)
  if not re.search(r"[*?[]", text) or os.path.exists(path):
    return [path]
  if not (paths := sorted(glob.glob(text, recursive=True))):
    raise FileNotFoundError(f"got {text!r}, which matches no file.")
  return paths


def _bytes_of(image: str | os.PathLike) -> bytes:
  try:
    path = epath.Path(image)
    exists, is_folder = path.exists(), path.is_dir()
    if exists and not is_folder:
      return path.read_bytes()
  except KeyError:  # epath's for an unknown scheme
    raise ValueError(
      "got an address, expected a file or gs://...; download the image first."
    ) from None
  except Exception as e:  # no permission; a bucket raises anything
    first, *_ = str(getattr(e, "strerror", None) or e).splitlines() or [repr(e)]
    raise ValueError(f"cannot be read: {first.rstrip('.')}.") from None
  if is_folder:
    raise ValueError(f"got a folder, expected a file or a glob: {path}/*.jpg.")
  raise FileNotFoundError("got a path with no file, expected an image.")


def _rest_of(file) -> bytes:
  try:
    return file.read()
  except Exception as e:  # closed; other libraries' files raise anything
    raise ValueError(f"cannot be read: {e}.") from None


def _opened(data: bytes, max_pixels: int) -> Image.Image:
  """Returns the image, with nothing decoded."""
  if not data:
    raise ValueError(f"got no bytes; {EXPECTED}.")
  allow(max_pixels)
  try:
    image = Image.open(io.BytesIO(data), formats=FORMATS)
  except Image.UnidentifiedImageError:
    raise ValueError(
      f"got {len(data):,} bytes that are no image; {EXPECTED}."
    ) from None
  except Exception as e:  # a damaged file may raise anything
    raise _cannot_decode(e, max_pixels) from None
  check_size(image, max_pixels)
  return image


def allow(max_pixels: int) -> None:
  """Raises Pillow's own limit, so that it accepts `max_pixels`."""
  if max_pixels > MAX_PIXELS and Image.MAX_IMAGE_PIXELS is not None:
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)


def check_size(image: Image.Image, max_pixels: int = MAX_PIXELS) -> None:
  """Raises ValueError for more than `max_pixels`; decodes nothing."""
  if image.width * image.height > max_pixels:
    raise _too_large(f"{image.width:,} x {image.height:,}", max_pixels)


def size_error_of(
  error: Image.DecompressionBombError, max_pixels: int = MAX_PIXELS
) -> ValueError:
  """Returns the error of `check_size` for Pillow's, which has no sides.

  Pillow raises its own for more than twice `Image.MAX_IMAGE_PIXELS`.
  """
  count = re.search(r"\d+", str(error))  # its first number
  return _too_large(f"{int(count[0]):,}" if count else "too many", max_pixels)


def _too_large(count: str, max_pixels: int) -> ValueError:
  return ValueError(
    f"got {count} pixels, expected at most {max_pixels:,} in all; reduce the"
    f" image, or set {LIMIT_OPTION}."
  )


def _check_whole(data: bytes) -> None:
  """Raises ValueError for a JPEG without its end."""
  at = 0
  while match := _MARKER.search(data, at):
    at, marker = match.end(), match[1][0]
    if marker == _END:
      return
    if marker not in _WITHOUT_LENGTH:
      at += int.from_bytes(data[at : at + 2], "big")
  raise ValueError(f"is cut off after {len(data):,} bytes.")


def _orientation(image: Image.Image) -> int:
  """Returns the orientation of an image, 1 to 8; 1 if it cannot be read."""
  exif = Image.Exif()
  try:
    exif.load(image.info.get("exif", b""))
    number = int(exif.get(_ORIENTATION, 1))
  except Exception:  # damaged EXIF may raise anything
    return 1
  return number if 1 <= number <= 8 else 1


def _pixels(image: Image.Image, exif: bool, max_pixels: int):
  """Returns RGB, or RGBA if the image may be transparent."""
  check_size(image, max_pixels)
  is_grey16 = image.mode.startswith("I;16") or (
    image.mode == "I" and image.format == "PPM"  # .pgm, up to 65,535
  )
  if image.mode in ("I", "F") and not is_grey16:
    raise ValueError(f"got a PIL image of mode {image.mode}, expected 8 bits.")
  try:
    image.load()
    if is_grey16:  # Pillow would clip values above 255
      pixels = _as_colours((np.asarray(image) >> 8).astype(np.uint8))
    else:
      mode = "RGBA" if _has_alpha(image) else "RGB"
      pixels = np.asarray(image.convert(mode))
  except Exception as e:  # a damaged file may raise anything
    raise _cannot_decode(e, max_pixels) from None
  number = _orientation(image) if exif else 1
  return pixels if number == 1 else turned(pixels, number)


def _has_alpha(image: Image.Image) -> bool:
  """Whether an image has transparency.

  The fourth band of a TIFF may be anything, such as near infrared. It is alpha
  only if the file says so; Pillow also takes it for alpha if the file says
  nothing.
  """
  if image.format == "TIFF" and image.mode == "RGBA":
    return image.tag_v2.get(_EXTRA_SAMPLES, (0,))[0] in (1, 2)
  return image.has_transparency_data


def _cannot_decode(error: Exception, max_pixels: int) -> ValueError:
  if isinstance(error, Image.DecompressionBombError):
    return size_error_of(error, max_pixels)
  return ValueError(f"got data that cannot be decoded ({error}); {EXPECTED}.")


def _as_colours(image):
  image = np.asarray(image)
  if image.ndim == 2:
    image = image[..., None]
  good = image.ndim == 3 and image.shape[-1] in (1, 3, 4) and image.size
  if image.dtype != np.uint8 or not good:
    raise ValueError(f"got {image.dtype} of shape {image.shape}, {ARRAYS}.")
  return np.repeat(image, 3, -1) if image.shape[-1] == 1 else image
