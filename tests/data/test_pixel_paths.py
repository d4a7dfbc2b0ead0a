"""Pixel paths beside Pillow's decoder and timm's transforms, to the bit."""

import functools
import hashlib
import io
import math
import pathlib

import numpy as np
import PIL
import pytest
from by_name import noise
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import encoded as as_file
from PIL import Image
from sklearn import datasets

from vit_jax.data import images, ops, pixels
from vit_jax.data.preprocessing import image_size
from vit_jax.data.tf_cpu import tf
from vit_jax.weights import eval_preprocessing
from vit_jax.weights.eval_preprocessing import PixelPath, taken_apart

SIDE = st.integers(8, 60)
PHOTOS = pathlib.Path(datasets.__file__).parent / "images"

# First digits of the SHA-256 of what create_transform(interpolation, crop_pct,
# crop_mode) of timm 1.0.31 makes of an image before normalising, with
# torchvision 0.28.0 and Pillow 13.0.0; behind it, where it is another, with
# Pillow 12.3.0.
TIMM = """
224 0.9 bicubic center china 015d911479ab5b4e
384 1.0 bicubic center flower b93da9bc74783e9c
224 0.875 bilinear center odd ce7f90c16adf1e1c
224 1.0 bicubic squash odd 228803362ace4ac2 38603a986bb85f76
"""


@functools.cache
def encoded(name):
  """Two photographs, and an upright part of one with odd sides."""
  if name != "odd":
    return (PHOTOS / f"{name}.jpg").read_bytes()
  with Image.open(PHOTOS / "china.jpg") as image:
    return as_file(image.crop((0, 0, 333, 251)).rotate(90, expand=True), "PNG")


def evaluated(data, text):
  """Returns an evaluator's pixels of encoded bytes, or of an array."""
  return ops.apply(tf.constant(data), text, tf.zeros([2], tf.int64)).numpy()


@pytest.mark.parametrize("row", TIMM.strip().split("\n"))
def test_timm_s_pixels_to_the_bit(row):
  px, share, filter, mode, name, *digests = row.split()
  digest = digests[-1 if PIL.__version__ < "13" else 0]
  size = int(px), int(px)
  path = eval_preprocessing.timm(size, float(share), filter, mode)
  assert image_size(path.ops) == size
  result = evaluated(encoded(name), path.ops)
  assert hashlib.sha256(result.tobytes()).hexdigest()[:16] == digest
  # `predict`, too.
  image = images.read(Image.open(io.BytesIO(encoded(name))))
  np.testing.assert_array_equal(pixels.apply(image, path.ops), result)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(SIDE, SIDE, st.integers(8, 20), st.sampled_from([0.875, 0.9, 1.0]))
def test_timm_s_pixels_of_any_size_are_pillows(height, width, size, share):
  """A resize to floor(size / share), and torchvision's crop.

  Half of 1, 3, 5, 7 spare pixels is 0, 2, 2, 4 there, and 0, 1, 2, 3 in ours.
  """
  image, short = noise(height, width), math.floor(size / share)
  sides = [int(short * side / min(height, width)) for side in image.shape[:2]]
  resized = Image.fromarray(image).resize(sides[::-1], Image.Resampling.BICUBIC)
  resized = np.asarray(resized)
  path = eval_preprocessing.timm((size, size), share)
  spare = [side - size for side in sides]
  for text, given_image, (top, left) in (
    (path.ops, image, [round(s / 2) for s in spare]),
    (f"decode|central_crop({size})", resized, [s // 2 for s in spare]),
  ):
    expected = resized[top : top + size, left : left + size]
    np.testing.assert_array_equal(pixels.apply(given_image, text), expected)
    np.testing.assert_array_equal(evaluated(given_image, text), expected)


KINDS = {
  "4:2:0": dict(subsampling=2, quality=75),
  "4:2:2": dict(subsampling=1, quality=90),
  "4:4:4": dict(subsampling=0),
  "progressive": dict(subsampling=2, progressive=True),
  "grey": dict(mode="L"),
  "CMYK": dict(mode="CMYK"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pillow_s_decoder_to_the_bit(kind):
  options = {**KINDS[kind]}
  with Image.open(PHOTOS / "china.jpg") as image:
    image = image.crop((0, 0, 333, 251)).convert(options.pop("mode", "RGB"))
    data = as_file(image, "JPEG", **options)
  with Image.open(io.BytesIO(data)) as image:
    expected = np.asarray(image.convert("RGB")).astype(int)

  def difference(decode):
    return np.abs(evaluated(data, decode + "|pad(0)") - expected)

  assert difference("decode(dct='accurate')").max() == 0
  # TensorFlow's default is the fast transform. Seen: 4 levels in 4:2:0, 6 in
  # 4:2:2, 2 in grey; without smooth colours up to 30, where these are coarse.
  assert 0 < difference("decode").max() <= 6
  plain = difference("decode(dct='accurate', upsampling='plain')").max()
  assert plain > 20 if kind in ("4:2:0", "4:2:2", "progressive") else plain == 0


PATHS = (
  PixelPath((224, 160), filter="nearest"),
  PixelPath((224, 224), 248, "accurate", filter="bicubic", antialias=True),
  PixelPath((64, 64), 64, upsampling="plain", filter="bilinear"),
  PixelPath((64, 64), None, "accurate", "plain", "pillow", "bicubic", True),
  eval_preprocessing.timm((224, 224), 0.9),
  eval_preprocessing.timm((32, 64), 0.9, "lanczos"),
)


def test_a_path_is_its_operations():
  for path in PATHS:
    assert image_size(path.ops) == path.size
    assert taken_apart(path.ops) == path


def test_the_share_of_a_crop():
  path = eval_preprocessing.timm((224, 224), 0.9)
  assert path.short == 248 and path.share == pytest.approx(224 / 248)
  assert path.cropped(0.875).short == 256
  assert path.cropped(1.0).ops == (
    "decode(dct='accurate')|resize_small_torch(224)|central_crop_torch(224)"
  )
  assert path.cropped(None).share is None
  assert path.cropped(None).ops == "decode(dct='accurate')|resize_torch(224)"


def test_a_border_is_black_or_mirrored():
  image = noise(4, 5)
  for text, mode in (("pad(2)", "constant"), ("pad(2, 'reflect')", "reflect")):
    expected = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode)
    for fn in (pixels.apply, evaluated):
      np.testing.assert_array_equal(fn(image, f"decode|{text}"), expected)
