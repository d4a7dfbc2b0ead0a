"""The operations of evaluation on one image, in numpy, without TensorFlow.

`vit_jax.data.ops` has all operations, for training and scoring. Those without
randomness are also here, for `predict`. They give the same pixels bit for bit,
except with antialiasing, where 1 pixel in 1,000 differs by 1 level of 255 (see
the test).
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vit_jax.config import preprocessing

FILTERS = {
  "bilinear": Image.Resampling.BILINEAR,
  "bicubic": Image.Resampling.BICUBIC,
}


def apply(
  image: UInt8[np.ndarray, "h w 3"], ops: str
) -> UInt8[np.ndarray, "height width c"]:
  """Returns the image after the operations.

  Args:
    image: An image of any size.
    ops: See `vit_jax.config.preprocessing`. The first operation, decoding, is
      already done.

  Raises:
    ValueError: Malformed or random `ops`, an image that is smaller than a crop,
      or one that resizing would make too large.

  Example:
    >>> apply(np.zeros((9, 7, 3), np.uint8), "decode|resize(4)").shape
    (4, 4, 3)
  """
  parsed = preprocessing.parse_ops(ops)
  if random := [op.name for op in parsed if _is_random(op)]:
    raise ValueError(
      f"got {ops!r} with {', '.join(random)}, which is random; expected"
      f" operations of {', '.join(OPS)}."
    )
  for op in parsed:
    if own := op.own:
      image = own.numpy(image)
    else:
      image = OPS[op.name](image, *op.args, **op.kwargs)
  return image


def is_random(ops: str) -> bool:
  """Whether the operations draw random numbers."""
  return any(_is_random(op) for op in preprocessing.parse_ops(ops))


def _is_random(op: preprocessing.Op) -> bool:
  own = op.own
  return own.is_random if own else op.name not in OPS


def check_sides(height: int, width: int, ops: str) -> None:
  """Raises ValueError for an image that resizing would make too large.

  Args:
    height: Pixels of the image after the first operation, decoding.
    width: As `height`.
    ops: See `vit_jax.config.preprocessing`.
  """
  parsed, shapes = preprocessing.parse_ops(ops), preprocessing.shapes(ops)
  sides = shapes[0] or (height, width)
  for op, shape in zip(parsed[1:], shapes[1:], strict=True):
    if op.name in _SMALL_SIDES:
      size = [*op.args, op.kwargs.get("size")][0]
      sides = _SMALL_SIDES[op.name](sides, size)
    else:
      sides = shape or op.after(sides)


def resize(image, size, method="bilinear", antialias=False):
  """Resizes to `size`, without keeping the aspect ratio."""
  size = preprocessing.pair(size)
  if image.shape[:2] == size:
    return image
  if method == "nearest":
    rows, columns = (
      np.floor((_whole(want) + 0.5) * _scale(have, want)).astype(int)
      for have, want in zip(image.shape, size, strict=False)
    )
    return image[rows[:, None], columns]
  if method == "area":
    heights, widths = map(_scale, image.shape[:2], size)
    resized = _weighted(image, size, _area, (1, 0)) * (1 / (heights * widths))
  elif antialias:
    resized = np.round(_antialiased(image, size, method))
  elif method == "bicubic":
    resized = _weighted(image, size, _bicubic, (0, 1))
  else:
    resized = _bilinear(image, size)
  return resized.clip(0, 255).astype(np.uint8)


def resize_small(image, size, method="area", antialias=False):
  """Resizes the shorter side to `size` pixels, and keeps the aspect ratio."""
  sides = _small_sides(image.shape[:2], size)
  return resize(image, sides, method, antialias)


def central_crop(image, size):
  """Crops the centre; an odd pixel remains at the bottom and right."""
  height, width = preprocessing.SHAPE_FNS["central_crop"](image.shape[:2], size)
  top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
  return image[top : top + height, left : left + width]


def resize_torch(image, size, method="bicubic"):
  """Resizes to `size` as Pillow does, which rounds between the two axes."""
  height, width = preprocessing.pair(size)
  resized = Image.fromarray(image).resize((width, height), FILTERS[method])
  return np.asarray(resized)


def resize_small_torch(image, size, method="bicubic"):
  """Resizes as torchvision's Resize(size): the longer side is rounded down."""
  sides = _small_sides_torch(image.shape[:2], size)
  return resize_torch(image, sides, method)


def central_crop_torch(image, size):
  """Crops as torchvision's CenterCrop: half a pixel is rounded to even."""
  height, width = preprocessing.SHAPE_FNS["central_crop_torch"](
    image.shape[:2], size
  )
  top = round((image.shape[0] - height) / 2)
  left = round((image.shape[1] - width) / 2)
  return image[top : top + height, left : left + width]


def pad(image, pixels, mode="black"):
  """Adds `pixels` pixels on each side, black ones or mirrored ones."""
  sides = (pixels, pixels), (pixels, pixels), (0, 0)
  return np.pad(image, sides, "constant" if mode == "black" else mode)


# Shares of red, green and blue in grey, by 2^16.
LUMA = (19595, 38470, 7471)


def grey(image):
  """Returns one channel, the luma of ITU-R 601, rounded as in Pillow."""
  luma = (image.astype(np.int32) * LUMA).sum(-1, keepdims=True)
  return ((luma + 2**15) // 2**16).astype(np.uint8)


OPS: dict[str, Callable[..., np.ndarray]] = {
  "decode": lambda image, *args, **options: image,
  "resize": resize,
  "resize_small": resize_small,
  "central_crop": central_crop,
  "resize_torch": resize_torch,
  "resize_small_torch": resize_small_torch,
  "central_crop_torch": central_crop_torch,
  "pad": pad,
  "grey": grey,
}


def _small_sides(sides: tuple[int, int], size: int) -> tuple[int, int]:
  ratio = np.float32(size) / np.float32(min(sides))
  height, width = np.round(np.array(sides, np.float32) * ratio)
  return _bounded(f"resize_small({size})", sides, (int(height), int(width)))


def _small_sides_torch(sides: tuple[int, int], size: int) -> tuple[int, int]:
  height, width = (size * side // min(sides) for side in sides)
  return _bounded(f"resize_small_torch({size})", sides, (height, width))


_SMALL_SIDES = {
  "resize_small": _small_sides,
  "resize_small_torch": _small_sides_torch,
}


def _bounded(
  op: str, sides: tuple[int, int], made: tuple[int, int]
) -> tuple[int, int]:
  """Returns the sides after an operation.

  Raises:
    ValueError: They have more than `preprocessing.MAX_PIXELS`.
  """
  most = preprocessing.MAX_PIXELS
  if made[0] * made[1] > most:
    raise ValueError(
      f"got {sides[1]:,} x {sides[0]:,} pixels, of which {op} would make"
      f" {made[1]:,} x {made[0]:,}, expected at most {most:,} in all; crop"
      " the image."
    )
  return made


def _scale(have: int, want: int) -> np.float32:
  return np.float32(have) / np.float32(want)


def _whole(count: int) -> np.ndarray:
  return np.arange(count, dtype=np.float32)


def _centres(have: int, want: int) -> np.ndarray:
  """Returns the centres of the new pixels, in pixels of the old image."""
  return (_whole(want) + 0.5) * _scale(have, want) - 0.5


def _bilinear(image, size):
  """Interpolates in float32, columns first: a + (b - a) x, as TensorFlow."""
  low, high, share = [], [], []
  for have, want in zip(image.shape, size, strict=False):
    at = _centres(have, want)
    low.append(np.floor(at).clip(0).astype(int))
    high.append(np.ceil(at).clip(max=have - 1).astype(int))
    share.append((at - np.floor(at))[:, None, None])
  rows, columns = share[0], share[1][:, 0]

  def row(index):
    lines = image[index].astype(np.float32)
    left, right = lines[:, low[1]], lines[:, high[1]]
    return left + (right - left) * columns

  top, bottom = row(low[0]), row(high[0])
  return top + (bottom - top) * rows


def _antialiased(image, size, method):
  """Resizes with Pillow's filter, widened when the image shrinks, in floats."""
  channels = (
    Image.fromarray(channel.astype(np.float32)).resize(
      size[::-1], FILTERS[method]
    )
    for channel in np.moveaxis(image, -1, 0)
  )
  return np.stack([np.asarray(c) for c in channels], -1)


def _weighted(image, size, weights, axes):
  """Sums some old pixels for each new one, along one axis, then the other.

  It computes in float32 and in TensorFlow's order. The result is not rounded,
  so the last digit decides whether a flat area keeps its level or loses one.
  """
  for axis in axes:
    index, weight = weights(image.shape[axis], size[axis])
    shape = (-1, 1) if axis else (-1, 1, 1)
    image = sum(
      np.take(image, i, axis) * w.reshape(shape)
      for i, w in zip(index.T, weight.T, strict=True)
    )
  return image.astype(np.float32)


def _area(have, want):
  """Returns which old pixels a new one covers, and how much of each."""
  scale = _scale(have, want)
  edges = _whole(want + 1)[:, None] * scale
  begin, end = edges[:-1], edges[1:]
  index = np.floor(begin) + _whole(int(np.ceil(scale)) + 1)
  covered = np.minimum(index + 1, end) - np.maximum(index, begin)
  covered[(index < begin) & (index + 1 > end)] = scale  # inside a single pixel
  return index.clip(max=have - 1).astype(int), covered.clip(0)


def _bicubic(have, want):
  """Keys' kernel with a = -1/2, its argument in steps of 1/1024."""
  at = _centres(have, want)
  share = np.round((at - np.floor(at)) * 1024)[:, None] / 1024
  offset = np.arange(-1, 3)
  index, x = np.floor(at)[:, None] + offset, np.abs(share - offset)
  near = (1.5 * x - 2.5) * x * x + 1
  far = ((-0.5 * x + 2.5) * x - 4) * x + 2
  weight = np.where(x <= 1, near, far).astype(np.float32)
  weight *= (index >= 0) & (index < have)
  one, two, three, four = weight.T
  weight *= (1 / (one + two + three + four))[:, None]
  return index.clip(0, have - 1).astype(int), weight
