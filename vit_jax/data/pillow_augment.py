"""Augmentations of DeiT III's and timm's recipes, computed by Pillow.

Every function has as arguments an image (see `torch_pixels`) and uniform draws
in [0, 1), and returns an image of the same shape; it draws nothing itself. The
operations are those that PyTorch's transforms call, so the pixels are the same
bit for bit. The sequence of random numbers is not the same.

Source: arXiv:2204.07118, section 3.2 (facebookresearch/deit, augment.py);
  torchvision's ColorJitter; timm's RandAugment, data/auto_augment.py.
"""

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vit_jax.data import torch_pixels
from vit_jax.data.torch_pixels import Picture, as_picture

Draws = Sequence[float] | np.ndarray

RADIUS = (0.1, 2.0)  # radius of the blur, pixels
SOLARIZED = 128  # levels from here on are inverted
MOST = 10.0  # the strongest magnitude
FILL = (124, 116, 104)  # ImageNet's mean, where a movement leaves nothing
DEVIATION = 0.5  # deviation of the magnitudes in `randaug_timm`
LAYERS = 2  # layers of RandAugment


def three_augment(image: Picture, draws: Draws) -> Picture:
  """Applies one of three operations: grey, solarize, or a Gaussian blur.

  Args:
    image: See this file.
    draws: Which operation; the radius, between the ends of `RADIUS`.
  """
  which = int(draws[0] * 3)
  if which == 0:
    return torch_pixels.grey(image)
  if which == 1:
    return torch_pixels.solarize(image, SOLARIZED)
  low, high = RADIUS
  radius = low + (high - low) * float(draws[1])
  return as_picture(image).filter(ImageFilter.GaussianBlur(radius))


def color_jitter(image: Picture, draws: Draws, strength: float) -> Picture:
  """Changes brightness, contrast and saturation, in a random order.

  The factor of each is between 1 - strength and 1 + strength.

  Args:
    image: See this file.
    draws: Three for the factors, three whose order is that of the changes.
    strength: 0 to 1.
  """
  factors = [1 - strength + 2 * strength * float(u) for u in draws[:3]]
  return torch_pixels.jitter(image, factors, np.argsort(draws[3:6]).tolist())


def randaug_timm(
  image: Picture,
  draws: Draws,
  normals: Draws,
  magnitude: float,
) -> Image.Image:
  """Applies timm's `rand-m<magnitude>-mstd0.5-inc1`.

  It has two layers. Each applies, with probability 1/2, one operation of
  `DISTORTIONS`, drawn with replacement. The magnitude of the operation is drawn
  from a normal distribution and clipped to 0..10.

  Args:
    image: See this file.
    draws: For each layer: which operation, whether it is applied, its sign.
    normals: For each layer a number of the standard normal distribution.
    magnitude: Mean of the magnitudes; their deviation is `DEVIATION`.
  """
  picture = as_picture(image)
  for layer in range(LAYERS):
    which, applied, sign = draws[3 * layer : 3 * layer + 3]
    if applied >= 0.5:
      continue
    level = magnitude + DEVIATION * float(normals[layer])
    level = min(max(level, 0.0), MOST) / MOST
    distort = DISTORTIONS[int(which * len(DISTORTIONS))]
    picture = distort(picture, level, 1 if sign < 0.5 else -1)
  return picture


# Each takes a picture, a level from 0 to 1, and a sign, 1 or -1.
Distortion = Callable[[Image.Image, float, int], Image.Image]


def _enhanced(enhancer) -> Distortion:
  def distort(picture, level, sign):
    return enhancer(picture).enhance(max(0.1, 1 + sign * 0.9 * level))

  return distort


def _moved(matrix: Callable[..., tuple[float, ...]]) -> Distortion:
  def distort(picture, level, sign):
    return picture.transform(
      picture.size,
      Image.Transform.AFFINE,
      matrix(sign * level, *picture.size),
      Image.Resampling.BICUBIC,
      fillcolor=FILL,
    )

  return distort


def _rotate(picture, level, sign):
  bicubic = Image.Resampling.BICUBIC
  return picture.rotate(sign * 30 * level, bicubic, fillcolor=FILL)


def _posterize(picture, level, sign):
  """Keeps 4 - int(4 level) bits; none at the strongest, as in older Pillows."""
  del sign
  mask = 256 - 2 ** (4 + int(level * 4))
  return picture.point([i & mask for i in range(256)] * 3)


def _solarize(picture, level, sign):
  del sign
  return ImageOps.solarize(picture, 256 - int(level * 256))


def _solarize_add(picture, level, sign):
  del sign
  levels = np.arange(256)
  added = np.minimum(levels + min(128, int(level * 110)), 255)
  return picture.point([*np.where(levels < 128, added, levels).tolist()] * 3)


DISTORTIONS: tuple[Distortion, ...] = (
  lambda picture, level, sign: ImageOps.autocontrast(picture),
  lambda picture, level, sign: ImageOps.equalize(picture),
  lambda picture, level, sign: ImageOps.invert(picture),
  _rotate,
  _posterize,
  _solarize,
  _solarize_add,
  _enhanced(ImageEnhance.Color),
  _enhanced(ImageEnhance.Contrast),
  _enhanced(ImageEnhance.Brightness),
  _enhanced(ImageEnhance.Sharpness),
  _moved(lambda x, width, height: (1, 0.3 * x, 0, 0, 1, 0)),
  _moved(lambda x, width, height: (1, 0, 0, 0.3 * x, 1, 0)),
  _moved(lambda x, width, height: (1, 0, 0.45 * x * width, 0, 1, 0)),
  _moved(lambda x, width, height: (1, 0, 0, 0, 1, 0.45 * x * height)),
)
