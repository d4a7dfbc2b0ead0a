"""Image operations: closed forms, keys, and the pixels of big_vision."""

import pathlib

import numpy as np
import pytest
from by_name import keys, noise, run
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import encoded as as_file
from PIL import Image

from vit_jax.data import ops, pixels
from vit_jax.data.tf_cpu import tf

KEY = tf.constant([3, 4], tf.int64)


def coordinates(height, width):
  """An image whose pixels are (row, column, 0)."""
  y, x = np.mgrid[:height, :width]
  return np.stack([y, x, 0 * x], -1).astype(np.uint8)


def encoded(image, fmt="PNG", **options):
  return as_file(Image.fromarray(image), fmt, **options)


# Pixels.


@pytest.fixture(scope="module")
def china():
  datasets = pytest.importorskip("sklearn.datasets")
  path = pathlib.Path(datasets.__file__).parent / "images" / "china.jpg"
  return path.read_bytes()


CHINA = {
  "resize_small_256_center_224": "decode|resize_small(256)|central_crop(224)",
  "resize_384": "decode|resize(384)",
  "resize_small_448_center_384": "decode|resize_small(448)|central_crop(384)",
}


@pytest.mark.parametrize("name", CHINA)
def test_china_is_bit_for_bit_as_big_vision_prepares_it(china, name):
  """The pixels are equal: both drop the fraction after a resize."""
  stored = np.load(pathlib.Path(__file__).parent / "preprocess_china_jpg.npz")
  image = ops.apply(tf.constant(china), CHINA[name], KEY)
  image = np.asarray(image, np.float64) / 127.5 - 1
  # Float32 of the stored numbers: 2^-24 relative.
  np.testing.assert_allclose(
    image[::16, ::16], stored[f"{name}_every_16th"], rtol=0, atol=1e-7
  )
  # Means of 50,000 numbers, summed there in float32: 1e-6 per level of 255.
  np.testing.assert_allclose(
    image.mean((0, 1)), stored[f"{name}_mean"], rtol=0, atol=2e-4
  )


SIDE = st.integers(1, 70)
RESIZE = st.builds("resize(({}, {})".format, SIDE, SIDE) | st.builds(
  "resize_small({}".format, SIDE
)
FILTERS = [(name, False) for name in ("bilinear", "bicubic", "area", "nearest")]
FILTERS += [("bilinear", True), ("bicubic", True)]  # wider for small results


@pytest.mark.parametrize("method, is_wide", FILTERS)
@settings(derandomize=True, deadline=None, max_examples=12)
@given(SIDE, SIDE, RESIZE)
def test_numpy_resizes_as_tensorflow(method, is_wide, height, width, resize):
  """So `predict` has the pixels of the evaluators, for images of any size."""
  text = f"decode|{resize}, {method!r}, {is_wide})"
  image = noise(height, width)
  image[: height // 2] = 255 * (image[: height // 2] > 127)  # overshoots
  result = pixels.apply(image, text)
  expected = ops.apply(tf.constant(image), text, KEY).numpy()
  assert result.shape == expected.shape
  # Wide filters sum float32 in another order, and round to either level.
  assert np.abs(result.astype(int) - expected).max() <= is_wide


def test_decode_gives_three_channels_and_turns_an_image_upright():
  grey = noise(4, 5)[..., 0]
  for image in (grey, grey[..., None]):
    np.testing.assert_array_equal(
      run("decode", tf.constant(image), KEY), np.stack([grey] * 3, -1)
    )
  image = noise(8, 16)
  exif = Image.Exif()
  exif[0x112] = 6  # Rotate by 90 degrees to view.
  data = tf.constant(encoded(image, "PNG", exif=exif))
  np.testing.assert_array_equal(run("decode", data, KEY), np.rot90(image, -1))
  stored = run("decode", data, KEY, exif=False)
  np.testing.assert_array_equal(stored, image)


# What is drawn.


def test_random_crop_takes_every_position():
  image, corners = coordinates(6, 5), set()
  for key in keys(60):
    crop = run("random_crop", tf.constant(image), key, (4, 3)).numpy()
    y, x = crop[0, 0, :2]
    np.testing.assert_array_equal(crop, image[y : y + 4, x : x + 3])
    corners.add((y, x))
  assert corners == {(y, x) for y in range(3) for x in range(3)}


def test_flip_mirrors_half_of_the_images():
  image, same, twice_same = tf.constant(noise(3, 4)), 0, 0
  for key in keys(40):
    out = run("flip_lr", image, key)
    # A golden draw: runs would not resume to the bit if it changed.
    is_same = bool(tf.random.stateless_uniform([], key) >= 0.5)
    np.testing.assert_array_equal(out, image if is_same else image[:, ::-1])
    same += is_same
    twice = ops.apply(image, "decode|flip_lr|flip_lr", key)
    twice_same += np.array_equal(twice, image)
  assert 7 < same < 33  # Mean 20, deviation 3.2.
  assert 7 < twice_same < 33  # With one key for both it would be 40.


def test_inception_crop_draws_big_vision_s_boxes():
  """big_vision leaves the aspect ratio and the attempts to TensorFlow."""
  image = coordinates(180, 240)
  for key in keys(20):
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
      image.shape,
      tf.zeros([0, 0, 4]),
      key,
      min_object_covered=0.0,
      area_range=(0.05, 1.0),
      use_image_if_no_bounding_boxes=True,
    )
    crop = run("inception_crop", tf.constant(image), key, 256).numpy()
    first = begin.numpy()[:2]
    assert crop[..., :2].min((0, 1)).tolist() == first.tolist()
    last = first + size.numpy()[:2] - 1
    assert crop[..., :2].max((0, 1)).tolist() == last.tolist()


@pytest.mark.slow
def test_fused_decode_differs_at_the_outermost_pixels_alone(china):
  """Of JPEG; at ImageNet's size they are those that the docstring states.

  Colours are stored for 2x2 pixels and interpolated; at the edge of the crop a
  neighbour is missing. Inside, nothing differs.
  """
  photo = run("decode", tf.constant(china), KEY).numpy()[26:401, 70:570]
  data, means = tf.constant(encoded(photo, "JPEG", quality=91)), []
  whole = run("decode", data, KEY)
  for key in keys(40):
    fused = np.asarray(run("decode_inception_crop", data, key, 224), int)
    plain = np.asarray(run("inception_crop", whole, key, 224), int)
    difference = np.abs(fused - plain)
    # The smallest box has 84 pixels: one of it reaches 4 of 224 at most.
    assert difference[4:-4, 4:-4].max() == 0
    assert difference.max() <= 18
    means.append(difference.mean())
  assert np.mean(means) <= 0.002


def test_crops_are_resized_by_any_filter():
  """The whole image is taken, whose sides have no allowed ratio."""
  image = noise(60, 20)
  options = dict(area_min=99, method="bicubic", antialias=True)
  expected = run("resize", image, KEY, 16, "bicubic", True)
  plain = run("inception_crop", image, KEY, 16, **options)
  np.testing.assert_array_equal(plain, expected)
  data = tf.constant(encoded(image))
  fused = run("decode_inception_crop", data, KEY, 16, **options)
  np.testing.assert_array_equal(fused, expected)
