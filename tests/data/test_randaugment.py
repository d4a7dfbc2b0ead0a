"""RandAugment: the pixels of the published code, and what is drawn."""

import collections
import hashlib
import pathlib

import numpy as np
import pytest
from by_name import keys

from vit_jax.data import ops, randaugment
from vit_jax.data.randaugment import DISTORTIONS, Draw
from vit_jax.data.tf_cpu import tf

STORED = np.load(pathlib.Path(__file__).parent / "randaugment.npz")
SIGNS = {"1": 0, "-1": 1, "": 0}


def apply(name, image, magnitude=10, is_negative=0, y=0.5, x=0.5):
  draw = Draw(*(tf.constant(v) for v in (is_negative, y, x)))
  out = DISTORTIONS[name](tf.constant(image), magnitude, draw)
  assert out.dtype == tf.uint8 and out.shape == image.shape
  return out.numpy()


def cases(name):
  """Yields each stored output of an operation, and what made it."""
  for key in STORED.files:
    image, *case = key.split("/")
    if case and case[0] == name:
      magnitude, sign, *_ = [*case[1:], "", ""]
      yield STORED[image], int(magnitude or 10), SIGNS[sign], STORED[key]


def difference(name):
  """Returns how many stored numbers an operation does not give."""
  pairs = [
    (apply(name, image, m, s), want) for image, m, s, want in cases(name)
  ]
  assert pairs
  return sum((a != b).sum() for a, b in pairs)


@pytest.mark.parametrize("name", sorted(DISTORTIONS.keys() - {"cutout"}))
def test_equals_the_published_code_to_the_bit(name):
  """Outputs of big_vision's operations with TensorFlow 2.15 and its add-ons."""
  # Its convolution was oneDNN's, which rounds sums in another order.
  assert difference(name) == (373 if name == "sharpness" else 0)


def test_cutout_is_a_square_around_any_pixel():
  image = np.full([100, 90, 3], 7, np.uint8)
  out = apply("cutout", image, 5, y=0.5, x=0.5)  # 20 pixels from (50, 45)
  assert (out[30:70, 25:65] == 128).all() and (out == 128).sum() == 1600 * 3
  out = apply("cutout", image, 5, y=0.0, x=0.999)  # (0, 89), clipped
  assert (out[:20, 69:] == 128).all() and (out == 128).sum() == 20 * 21 * 3
  np.testing.assert_array_equal(apply("cutout", image, 0), image)
  assert (apply("cutout", image, 20) == 128).all()


def test_the_documented_irregularities():
  photo = STORED["photo"]
  for magnitude in (0, 10, 20):
    np.testing.assert_array_equal(apply("solarize", photo, magnitude), ~photo)
  np.testing.assert_array_equal(apply("posterize", photo, 20), photo)
  assert set(np.unique(apply("posterize", photo, 0))) == {0, 128}
  # At 224 px contrast leaves a level of 196 where it is, whatever the rest.
  flat = np.full([224, 224, 3], 196, np.uint8)
  np.testing.assert_array_equal(apply("contrast", flat, 15), flat)
  for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
    np.testing.assert_array_equal(apply(name, photo, 0), photo)


def test_flat_channels_keep_their_level():
  flat = np.full([9, 9, 3], (0, 100, 255), np.uint8)
  for name in ("autocontrast", "equalize"):
    np.testing.assert_array_equal(apply(name, flat), flat)


@pytest.fixture
def names_drawn(monkeypatch):
  """Operations that write their number and draws into the image."""

  def mark(number):
    def fn(image, magnitude, draw):
      del magnitude
      values = [number, draw.is_negative * 255, tf.cast(draw.y * 256, tf.int32)]
      last = tf.cast(tf.stack(values), tf.uint8)[None, None]
      return tf.concat([image[:, 1:], last + tf.zeros_like(image[:, :1])], 1)

    return fn

  marks = {name: mark(i) for i, name in enumerate(DISTORTIONS)}
  monkeypatch.setattr(randaugment, "DISTORTIONS", marks)


@pytest.mark.nightly
def test_every_operation_is_drawn_as_often_in_every_layer(names_drawn):
  """16 operations, with replacement, and a coin for the sign."""
  image = tf.zeros([3, 3, 3], tf.uint8)
  run = tf.function(lambda key: randaugment.randaug(image, key, 2, 10))
  drawn = np.array([run(key)[0, 1:].numpy() for key in keys(1600, seed=5)], int)
  for layer in range(2):
    counts = np.bincount(drawn[:, layer, 0], minlength=16)
    assert len(counts) == 16 and np.abs(counts - 100).max() < 39  # 4 deviations
    signs = collections.Counter(drawn[:, layer, 1])
    assert signs.keys() == {0, 255} and abs(signs[0] - 800) < 80
    assert abs(drawn[:, layer, 2].mean() - 127.5) < 8  # 4 deviations of 1.9
  repeated = (drawn[:, 0, 0] == drawn[:, 1, 0]).sum()
  assert abs(repeated - 100) < 39
  # A golden draw: runs would not resume to the bit if it changed.
  assert drawn[:4, :, 0].tolist() == GOLDEN_DRAWS


GOLDEN_DRAWS = [[0, 8], [9, 9], [1, 14], [14, 10]]


def test_is_a_function_of_the_key():
  text = "decode|resize(192)|randaug(2, 15)"
  photo = tf.constant(STORED["photo"])
  once, again = (
    [ops.apply(photo, text, k).numpy() for k in keys(6, seed=5)] for _ in "ab"
  )
  np.testing.assert_array_equal(once, again)
  assert len({a.tobytes() for a in once}) == 6
  digest = hashlib.sha256(np.stack(once).tobytes()).hexdigest()
  assert digest[:16] == GOLDEN_DIGEST


GOLDEN_DIGEST = "59a3b3cd801034f4"
