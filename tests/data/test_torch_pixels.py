"""Augmentations of views: torchvision's pixels, distributions, and keys.

torchvision_pixels.npz has outputs of torchvision 0.28's transforms.v2 on
pictures of Pillow 13, and statistics of 40,000 boxes of its RandomResizedCrop.
"""

import pathlib

import numpy as np
import pytest
from by_name import keys, run
from PIL import Image

from vit_jax.data import ops, preprocessing, torch_pixels
from vit_jax.data.operations import OPERATIONS
from vit_jax.data.tf_cpu import tf

STORED = np.load(pathlib.Path(__file__).parent / "torchvision_pixels.npz")
IMAGE = STORED["image"]
COLOURS = "jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)"


def most(a, b):
  """The largest difference in levels of 255."""
  return np.abs(np.asarray(a).astype(int) - np.asarray(b)).max()


@pytest.mark.parametrize("image", [IMAGE, Image.fromarray(IMAGE)])
def test_pixels_are_torchvisions(image):
  for i, (*place, height, width) in enumerate(STORED["crop_boxes"].tolist()):
    crop = torch_pixels.resized_crop(image, tuple(place), (height, width))
    assert most(crop, STORED[f"crop_{i}"]) == 0
  for i, (factors, order) in enumerate(
    zip(STORED["factors"].tolist(), STORED["orders"].tolist(), strict=True)
  ):
    changed = torch_pixels.jitter(image, factors, order)
    assert most(changed, STORED[f"jitter_{i}"]) == 0
  for i, name in enumerate(("brightness", "contrast", "saturation", "hue")):
    factors = STORED["factors"][2].tolist()
    changed = torch_pixels.jitter(image, factors, [i])
    assert most(changed, STORED[name]) == 0
  assert most(torch_pixels.grey(image), STORED["grey"]) == 0
  assert most(torch_pixels.solarize(image, 128), STORED["solarize"]) == 0
  for i, (kernel, sigma) in enumerate(STORED["blurs"].tolist()):
    blurred = torch_pixels.gaussian_blur(image, int(kernel), sigma)
    assert most(blurred, STORED[f"blur_{i}"]) <= 1


@pytest.mark.slow
def test_boxes_are_torchvisions_in_distribution():
  draws = np.random.default_rng(0).random((10_000, 40))
  for (height, width, *scale), expected in zip(
    STORED["box_images"].tolist(), STORED["box_statistics"], strict=True
  ):
    height, width = int(height), int(width)
    boxes = [torch_pixels.box(height, width, *scale, d) for d in draws]
    top, left, h, w = np.array(boxes).T
    assert (top >= 0).all() and (top + h <= height).all()
    assert (left >= 0).all() and (left + w <= width).all()
    share = h * w / (height * width)
    columns = top / height, left / width, h / height, w / width, share
    values = np.stack([*columns, np.log(w / h)], 1)
    # Five deviations of a mean of 10,000 numbers whose deviation is 0.25.
    moments = values.mean(0), values.std(0)
    np.testing.assert_allclose(moments, expected[:2], rtol=0, atol=0.0125)
    # A quantile can be a pixel beside.
    quantiles = np.quantile(values, [0.1, 0.5, 0.9], axis=0)
    limit = 0.0125 + 1 / min(height, width)
    np.testing.assert_allclose(quantiles, expected[2:], rtol=0, atol=limit)


def test_factors_and_order_of_the_jitter():
  jitter = OPERATIONS["jitter"](0.4, 1.5, 0.0, 0.1, 0.8)
  draws = np.array([0.79, 0.25, 0.5, 0.9, 0.75, 0.3, 0.1, 0.2, 0.4])
  # Contrast is between 0 and 2.5; the saturation does not change.
  expected = torch_pixels.jitter(IMAGE, [0.8, 1.25, None, 0.05], [1, 0, 3])
  assert most(jitter.pillow(IMAGE, draws), expected) == 0
  assert jitter.pillow(IMAGE, np.append(0.8, draws[1:])) is IMAGE


@pytest.mark.parametrize(
  "name, args",
  [
    ("jitter", (0.4, 0.4, 0.2, 0.1)),
    ("random_grey", ()),
    ("gaussian_blur", ()),
    ("solarize", ()),
    ("random_erase", ()),
  ],
)
def test_the_share_of_images_that_change(name, args):
  def changed(share, num):
    return [
      most(run(name, IMAGE, key, *args, share), IMAGE) > 0 for key in keys(num)
    ]

  assert not any(changed(0, 5)) and all(changed(1.0, 5))
  # Standard deviation 3.5.
  assert 6 < sum(changed(0.4, 50)) < 34


def test_side_by_side_they_are_what_they_are_alone():
  text = f"decode|random_resized_crop((20, 24), 0.3, 1.0)|flip_lr|{COLOURS}"
  text += "|gaussian_blur(0.5)|solarize(0.2)"
  parsed = preprocessing.parse_ops(text)
  assert len(ops.bind(text)) == 2
  results = set()
  for number in range(8):
    seeds = tf.constant([3, number], tf.int64)
    image = tf.constant(IMAGE)
    for position, op in enumerate(parsed):
      key = tf.constant([3, 64 * number + position], tf.int64)
      image = op.operation.tensorflow(image, key)
    together = ops.apply(tf.constant(IMAGE), text, seeds)
    assert together.shape == (20, 24, 3)
    np.testing.assert_array_equal(together, image)
    results.add(together.numpy().tobytes())
  assert len(results) == 8
