"""Distortions of DeiT III and timm: closed forms, timm's code, and keys."""

import importlib.util
import pathlib
import random

import numpy as np
import pytest
from by_name import keys, noise, run
from PIL import Image

from vit_jax.data import pillow_augment
from vit_jax.data.operations import IMAGENET_MEAN, IMAGENET_STD

# timm's names, in its order, which a drawn number is an index of.
NAMES = (
  *("AutoContrast", "Equalize", "Invert", "Rotate", "PosterizeIncreasing"),
  *("SolarizeIncreasing", "SolarizeAdd", "ColorIncreasing"),
  *("ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"),
  *("ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
)


def changed(name, *args):
  return np.asarray(getattr(pillow_augment, name)(*args))


# 3-Augment.


def test_one_of_three():
  image = noise(9, 7)
  grey = changed("three_augment", image, [0.3, 0.5])
  luma = image @ np.array([299, 587, 114]) / 1000
  assert (grey == grey[..., :1]).all()
  assert abs(grey[..., 0] - luma).max() <= 0.501  # integers of 2^-16 per weight
  solarized = changed("three_augment", image, [0.5, 0.5])
  assert (solarized == np.where(image < 128, image, 255 - image)).all()


def test_the_radius_of_the_blur():
  """The variance of a blurred point is the square of the radius."""
  point = np.zeros((41, 41, 3), np.uint8)
  point[20, 20] = 255
  point[20, 18:23] = 255  # a row of five, whose variance is 2
  for draw, radius in ((0.0, 0.1), (0.999, 2.0)):
    blurred = changed("three_augment", point, [0.9, draw])
    column = blurred[..., 0].astype(float).sum(1)
    spread = (column * (np.arange(41) - 20) ** 2).sum() / column.sum()
    assert spread == pytest.approx(radius**2, rel=0.06, abs=0.011)  # of levels


def test_factors_and_order_of_the_colours():
  flat = np.full((4, 4, 3), 100, np.uint8)  # contrast, saturation: no effect
  for u, level in ((0.0, 70), (0.5, 100), (0.75, 115)):
    jittered = changed("color_jitter", flat, [u, 0.1, 0.9, 0.1, 0.2, 0.3], 0.3)
    assert (jittered == level).all()
  image = noise(5, 5)

  def result(*order):
    draws = np.array([0.9, 0.1, 0.2, *order], np.float32)
    return changed("color_jitter", image, draws, 0.3).tobytes()

  assert result(0.1, 0.2, 0.3) != result(0.2, 0.1, 0.3)
  again = [run("color_jitter", image, key, 0.3).numpy() for key in keys(2) * 2]
  assert (again[0] == again[2]).all() and (again[0] != again[1]).any()
  assert (run("color_jitter", image, keys(1)[0], 0.0).numpy() == image).all()


# timm's RandAugment.


@pytest.fixture(scope="module")
def timm():
  """timm's data/auto_augment.py, which imports neither torch nor timm."""
  package = importlib.util.find_spec("timm")
  if package is None:
    pytest.skip("timm is not installed")
  path = pathlib.Path(package.origin).parent / "data" / "auto_augment.py"
  spec = importlib.util.spec_from_file_location("auto_augment", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("level", [0.0, 3.3, 9.0, 10.0])
@pytest.mark.parametrize("sign", [0.2, 0.7])
def test_operations_are_timms(timm, level, sign, monkeypatch):
  assert timm._RAND_INCREASING_TRANSFORMS == [*NAMES]
  image = noise(20, 31)
  monkeypatch.setattr(random, "random", lambda: sign)
  hparams = dict(
    interpolation=Image.Resampling.BICUBIC, img_mean=(124, 116, 104)
  )
  for i, name in enumerate(NAMES):
    op = timm.AugmentOp(name, prob=1.0, magnitude=level, hparams=hparams)
    if name.startswith("Posterize") and level == 10.0:
      expected = np.zeros_like(image)  # no bits, which Pillow 13 refuses
    else:
      expected = np.asarray(op(Image.fromarray(image)))
    draws = [(i + 0.5) / 15, 0.2, sign, 0.0, 0.9, 0.0]
    result = changed("randaug_timm", image, draws, [0.0, 0.0], level)
    assert (result == expected).all(), name


@pytest.mark.parametrize(
  "normal, magnitude", [(0.0, 9.0), (1.0, 9.5), (9.0, 10.0), (-19.0, 0.0)]
)
def test_magnitudes_are_drawn_and_held(normal, magnitude):
  levels = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(16, 16, 3)
  draws = [5.5 / 15, 0.2, 0.2, 0.0, 0.9, 0.0]  # solarize, and no second layer
  args = draws, [normal, 0.0], 9.0
  result = changed("randaug_timm", levels, *args)
  inverted = levels >= 256 - int(magnitude / 10 * 256)
  assert (result == np.where(inverted, 255 - levels, levels)).all()


# Random erasing.


def test_a_box_of_the_noise_of_normalised_images():
  shares = []
  for key in keys(30):
    erased = run("random_erase", np.zeros((60, 90, 3), np.uint8), key, 1.0)
    is_erased = (erased.numpy() != 0).any(-1)
    rows, columns = (np.flatnonzero(is_erased.any(axis)) for axis in (1, 0))
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    shares.append(height * width / is_erased.size)
    assert is_erased.sum() > 0.95 * height * width  # a box; few are 0 anyhow
    assert 0.25 < height / width < 4
  # Sides are rounded to pixels: half of one in 8 is 6 %.
  assert 0.015 < min(shares) and max(shares) < 1 / 3 + 0.04
  erased = run("random_erase", np.zeros((200, 200, 3), np.uint8), key, 1.0)
  pixels = erased.numpy()[(erased.numpy() != 0).any(-1)] / 255
  # Cut off at 0, 2.1 deviations below the mean, and at 1, 2.2 above it.
  lower, median, upper = np.quantile(pixels, [0.1587, 0.5, 0.8413], axis=0)
  np.testing.assert_allclose(median, IMAGENET_MEAN, atol=0.015)
  spread = 2 * np.array(IMAGENET_STD)
  np.testing.assert_allclose(upper - lower, spread, atol=0.03)
