"""Resizing in numpy, with the pixels of TensorFlow and of Pillow."""

import numpy as np
from PIL import Image

from vit_jax.data.operation import Side, pair

FILTERS = {
  "bilinear": Image.Resampling.BILINEAR,
  "bicubic": Image.Resampling.BICUBIC,
}


def resize(image, size: Side, method: str, antialias: bool):
  """Resizes as TensorFlow; an image of that size is not changed."""
  size = pair(size)
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


def resize_torch(image, size: Side, method: str):
  """Resizes as Pillow, which rounds between the two axes."""
  height, width = pair(size)
  resized = Image.fromarray(image).resize((width, height), FILTERS[method])
  return np.asarray(resized)


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
