"""Pixels of torchvision's transforms on Pillow's images, in less time.

A function has as arguments an image and factors; it draws nothing. The image is
a picture of Pillow or an array uint8 [h, w, 3]; so is what it returns. The
pixels are those of torchvision.transforms.v2 on a picture, bit for bit; those
of the blur, which are computed in another order, are at most one level of 255
apart.

Source: the definitions of torchvision's RandomResizedCrop, ColorJitter and
  GaussianBlur; Pillow's conversion to HSV, whose rounding is a part of
  torchvision's hue.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from PIL import Image

Picture = Image.Image | np.ndarray

RATIO = (3 / 4, 4 / 3)  # width / height of a box
_BITS = 0, 8, 16  # where red, green and blue begin in the four bytes of a pixel
_DROPPED = 1e-5  # sum of the weights of a blur that are left out


def as_picture(image: Picture) -> Image.Image:
  """Returns the image as a picture of Pillow."""
  return Image.fromarray(image) if isinstance(image, np.ndarray) else image


def sides(image: Picture) -> tuple[int, int]:
  """Returns (height, width)."""
  if isinstance(image, np.ndarray):
    return image.shape[0], image.shape[1]
  return image.height, image.width


def box(
  height: int,
  width: int,
  scale_min: float,
  scale_max: float,
  draws: Sequence[float] | np.ndarray,
) -> tuple[int, int, int, int]:
  """Returns top, left, height and width of a random box.

  The share of its area is uniform, and so is the logarithm of its width /
  height. If no attempt fits into the image, the box is the largest one in the
  centre whose ratio is within `RATIO`.

  Args:
    height: Pixels of the image.
    width: As `height`.
    scale_min: Smallest area, a share of the image.
    scale_max: Largest area.
    draws: Numbers in [0, 1): area, ratio, y and x of each attempt, float
      [attempts * 4].
  """
  low, high = map(math.log, RATIO)
  for area, ratio, y, x in np.reshape(draws, (-1, 4)).tolist():
    area = height * width * (scale_min + (scale_max - scale_min) * area)
    ratio = math.exp(low + (high - low) * ratio)
    h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
    if 0 < h <= height and 0 < w <= width:
      return int(y * (height - h + 1)), int(x * (width - w + 1)), h, w
  h = min(height, round(width / RATIO[0]))
  w = min(width, round(height * RATIO[1]))
  return (height - h) // 2, (width - w) // 2, h, w


def resized_crop(
  image: Picture, place: tuple[int, int, int, int], size: tuple[int, int]
) -> Image.Image:
  """Returns a box, resized with Pillow's bicubic filter.

  Args:
    image: See this file.
    place: Top, left, height and width of the box.
    size: New height and width.
  """
  top, left, height, width = place
  if isinstance(image, np.ndarray):  # only the box becomes a picture
    crop = as_picture(image[top : top + height, left : left + width])
  else:
    crop = image.crop((left, top, left + width, top + height))
  return crop.resize(size[::-1], Image.Resampling.BICUBIC)


def flip(image: Picture) -> Image.Image:
  """Mirrors left and right."""
  return as_picture(image).transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def jitter(
  image: Picture, factors: Sequence[float | None], order: Sequence[int]
) -> Image.Image:
  """Changes brightness, contrast, saturation and hue.

  Args:
    image: See this file.
    factors: Of brightness, contrast and saturation, 0 or more; and the shift of
      the hue in turns, -1/2 to 1/2. None: no change.
    order: The numbers of the factors in the order of the changes.
  """
  picture = as_picture(image)
  for i in order:
    if factors[i] is not None:
      picture = _CHANGES[i](picture, float(factors[i]))
  return picture


def grey(image: Picture) -> Image.Image:
  """Returns the luma of ITU-R 601 in three channels."""
  return as_picture(image).convert("L").convert("RGB")


def solarize(image: Picture, threshold: int) -> Image.Image:
  """Inverts the levels from the threshold on."""
  levels = np.asarray(image)
  is_bright = (levels >= threshold).view(np.uint8)
  return as_picture(levels ^ (is_bright * np.uint8(255)))


def gaussian_blur(image: Picture, kernel: int, sigma: float) -> Picture:
  """Blurs with a Gaussian; the image is mirrored at its outermost pixels.

  The weights of a kernel are exp(-(x / sigma)^2 / 2), normalised. The outermost
  ones are left out if they are less than 1e-5 of all.

  Args:
    image: See this file, larger than kernel / 2.
    kernel: Pixels of a side of the kernel, an odd number.
    sigma: Standard deviation in pixels.
  """
  weights = np.exp(-0.5 * (np.arange(kernel // 2 + 1) / sigma) ** 2)
  weights /= weights[0] + 2 * weights[1:].sum()
  behind = 2 * np.append(np.cumsum(weights[::-1])[-2::-1], 0)
  reach = int(np.argmax(behind < _DROPPED))
  if not reach:
    return image
  both = [*range(reach, 0, -1), *range(reach + 1)]
  weights = weights[both].astype(np.float32)
  levels = np.asarray(image)
  height, width, channels = levels.shape
  padded = np.empty(
    (height + 2 * reach, width + 2 * reach, channels), np.float32
  )
  rows = padded[reach:-reach]
  rows[:, reach:-reach] = levels
  rows[:, :reach] = rows[:, 2 * reach : reach : -1]
  rows[:, -reach:] = rows[:, -reach - 2 : -2 * reach - 2 : -1]
  padded[:reach] = padded[2 * reach : reach : -1]
  padded[-reach:] = padded[-reach - 2 : -2 * reach - 2 : -1]

  def weighted(x, shape, step):
    """Sums the images that begin at 0, step, 2 * step ... numbers of x."""
    numbers = x.strides[1]
    strides = (step * numbers, *x.strides)
    shifted = as_strided(x, (len(weights), *shape), strides, writeable=False)
    return np.einsum("k,khw->hw", weights, shifted)  # without copies

  flat = padded.reshape(len(padded), -1)
  blurred = weighted(flat, (height, flat.shape[1]), flat.shape[1])
  blurred = weighted(blurred, (height, width * channels), channels)
  blurred += 0.5
  return as_picture(blurred.astype(np.uint8).reshape(levels.shape))


def _brightness(picture, factor):
  return Image.blend(Image.new("RGB", picture.size), picture, factor)


def _contrast(picture, factor):
  mean = int(np.asarray(picture.convert("L")).mean() + 0.5)
  flat = Image.new("RGB", picture.size, (mean, mean, mean))
  return Image.blend(flat, picture, factor)


def _saturation(picture, factor):
  return Image.blend(grey(picture), picture, factor)


def _hue(picture, turns):
  """Shifts the hue by steps of 1/255, with the rounding of Pillow's HSV.

  A pixel is value - value * saturation * (0 to 1, which follows from the hue).
  """
  shift = int(turns * 255) % 256
  hues, saturations, weights = _hsv_tables()
  packed = np.frombuffer(picture.tobytes("raw", "RGBX"), "<u4")
  red, green, blue = ((packed >> b).astype(np.uint8) for b in _BITS)
  most = np.maximum(np.maximum(red, green), blue)
  least = np.minimum(np.minimum(red, green), blue)
  middle = red ^ green ^ blue ^ most ^ least  # the one that is neither
  chroma = most - least

  def place(*digits):
    index = digits[0].astype(np.int32)
    for digit in digits[1:]:
      index <<= 8
      index |= digit
    return index

  index = place(_rank(red, green, blue), chroma, most - middle)
  hue = np.take(hues, index, mode="clip").astype(np.intp)
  saturation = np.take(saturations, place(chroma, most), mode="clip")
  value = most.astype(np.float32)
  spread = saturation * np.float32(1 / 255) * value
  value += 0.5  # the cast below drops the fraction
  packed = np.zeros(packed.shape, "<u4")
  for weight, bits in zip(weights, _BITS, strict=True):
    level = np.take(weight[shift:], hue, mode="clip")
    level *= spread
    packed |= np.subtract(value, level, out=level).astype("<u4") << bits
  return Image.frombytes("RGB", picture.size, packed, "raw", "RGBX")


_CHANGES = (_brightness, _contrast, _saturation, _hue)


def _rank(red, green, blue):
  """Returns a number that says which channel is the largest, which the least.

  Args:
    red: An array uint8.
    green: As `red`.
    blue: As `red`.
  """
  pairs = (green > red, blue > green, blue > red)
  first, second, third = (pair.view(np.uint8) for pair in pairs)
  return first | (second << 1) | (third << 2)


@functools.cache
def _hsv_tables():
  """Returns what Pillow's HSV is for all colours.

  Returns:
    The hue by rank, chroma and (largest - middle channel), uint8 [8 * 2^16];
    the saturation by chroma and largest channel, uint8 [2^16]; for red, green
    and blue the weight of value * saturation by hue, twice, float32 [3, 512].
  """
  levels = np.arange(256, dtype=np.uint8)
  chroma, other = np.meshgrid(levels, levels, indexing="ij")

  def converted(*bands):
    picture = Image.merge("RGB", [as_picture(band) for band in bands])
    return np.asarray(picture.convert("HSV"))

  hues = np.zeros((8, 256, 256), np.uint8)
  ordered = np.full_like(other, 255), 255 - other, 255 - chroma
  for places in itertools.permutations(range(3)):
    bands = [ordered[place] for place in places]
    hue, rank = converted(*bands)[..., 0], _rank(*bands)
    for number in range(8):
      is_here = (rank == number) & (other <= chroma)
      hues[number][is_here] = hue[is_here]
  low = other - np.minimum(chroma, other)
  saturations = converted(other, low, low)[..., 1]

  sixths = np.arange(256, dtype=np.float32) * np.float32(6) / np.float32(255)
  share = sixths - np.floor(sixths)
  none, whole, rest = np.zeros_like(share), np.ones_like(share), 1 - share
  sextants = (
    (none, rest, whole),
    (share, none, whole),
    (whole, none, rest),
    (whole, share, none),
    (rest, whole, none),
    (none, whole, share),
  )
  number = np.floor(sixths).astype(int) % 6
  weights = np.array(sextants)[number, :, np.arange(256)].T
  return hues.ravel(), saturations.ravel(), np.tile(weights, 2)
