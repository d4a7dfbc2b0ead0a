"""The inputs of `predict`, and its pixels beside those of the evaluators."""

import io
import pathlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from sklearn import datasets

from vit_jax.data import images, pixels, preprocessing
from vit_jax.data import ops as tensorflow_ops
from vit_jax.data.tf_cpu import tf

PHOTOS = pathlib.Path(datasets.__file__).parent / "images"
NAMES = ("china.jpg", "flower.jpg")


def of_evaluators(image, ops):
  """Returns an evaluator's pixels, from encoded bytes or an array."""
  key = tf.zeros([2], tf.int64)
  return tensorflow_ops.apply(tf.constant(image), ops, key).numpy()


def encoded(image, kind, **options):
  stream = io.BytesIO()
  image.save(stream, kind, **options)
  return stream.getvalue()


@pytest.fixture(scope="module")
def small():
  with Image.open(PHOTOS / "china.jpg") as image:
    return image.resize((64, 48))


@pytest.fixture(scope="module")
def arrays():
  """Photographs; noise; and bands of one level, on which rounding shows."""
  noise = np.random.default_rng(0).integers(0, 256, (97, 131, 3), np.uint8)
  bands = np.tile(
    np.arange(100, dtype=np.uint8)[None, :, None] // 5 * 9, (80, 1, 3)
  )
  photos = {name: np.asarray(Image.open(PHOTOS / name)) for name in NAMES}
  return photos | {"noise": noise, "bands": bands}


# Operations.


@pytest.mark.parametrize(
  "ops",
  [
    "decode|resize(32, 'bilinear')",
    "decode|resize((300, 120), 'bilinear')",
    "decode|resize((300, 120), 'bicubic')",
    "decode|resize(32, 'area')",
    "decode|resize(32, 'nearest')",
    "decode|resize_small(256)|central_crop(224)",
    "decode|resize_small(73, 'nearest')|central_crop((60, 51))|pad(3)",
  ],
)
def test_without_antialiasing_the_pixels_are_the_evaluators(arrays, ops):
  for image in arrays.values():
    result = pixels.apply(image, ops)
    np.testing.assert_array_equal(result, of_evaluators(image, ops))
    assert result.shape[:2] == preprocessing.image_size(ops)


@pytest.mark.parametrize(
  "ops",
  [
    "decode|resize(224, antialias=True)",
    "decode|resize_small(256, 'bicubic', antialias=True)|central_crop(224)",
  ],
)
def test_antialiased_pixels_differ_by_a_level_here_and_there(arrays, ops):
  # Sums of float32 in another order; a value between two levels is then rounded
  # to either. Largest share seen on a photograph: 7e-4.
  for name, image in arrays.items():
    result, expected = pixels.apply(image, ops), of_evaluators(image, ops)
    difference = np.abs(result.astype(int) - expected)
    assert difference.max() <= 1
    if name in NAMES:
      assert (difference > 0).mean() < 1e-3


def test_what_has_no_pixels_without_chance_is_refused():
  image = np.zeros((40, 40, 3), np.uint8)
  with pytest.raises(ValueError, match="decode_inception_crop, flip_lr, "):
    pixels.apply(image, "decode_inception_crop(32)|flip_lr")
  with pytest.raises(ValueError, match="at most"):
    pixels.apply(image, "decode|central_crop(41)")


# Decoding.


@pytest.mark.parametrize("name", NAMES)
def test_photographs_as_jpeg(name):
  # TensorFlow takes the fast inverse transform. Seen: 1.32 and 1.04 levels of
  # 255 in the mean, 18 at most.
  result = images.read(PHOTOS / name).astype(int)
  difference = np.abs(
    result - of_evaluators((PHOTOS / name).read_bytes(), "decode")
  )
  assert difference.mean() < 1.5 and difference.max() <= 20


@pytest.mark.parametrize("most", [1000, 65_535])
def test_a_pgm_of_16_bits_becomes_8(small, tmp_path, most):
  grey = np.asarray(small.convert("L"))
  deep = np.round(grey / 255 * most).astype(">u2")
  path = tmp_path / "x.pgm"
  path.write_bytes(b"P5\n64 48\n%d\n" % most + deep.tobytes())
  off = np.abs(images.read(path).astype(int) - grey[..., None])
  assert off.max() <= (most < 65_535)  # a level of 255 is 4 of 1,000


def test_an_orientation_is_applied_once(small, tmp_path):
  exif = Image.Exif()
  exif[0x0112] = 6  # turn right by a quarter
  path = tmp_path / "x.png"
  small.save(path, exif=exif)
  upright = np.rot90(np.asarray(small), -1)
  with Image.open(path) as image:
    turned = ImageOps.exif_transpose(image)
    for it in (path, image, turned):
      np.testing.assert_array_equal(images.read(it), upright)
  stored = images.read(path, exif=False)
  np.testing.assert_array_equal(stored, np.asarray(small))


def test_colours_grey_and_alpha_become_three_channels(small):
  rgb = np.asarray(small)
  grey = rgb[..., :1]
  with_alpha = np.concatenate([rgb, grey], -1)
  np.testing.assert_array_equal(images.read(with_alpha), rgb)
  for image in (grey, grey[..., 0]):
    np.testing.assert_array_equal(images.read(image), np.repeat(grey, 3, -1))


# Lists and names.


def test_what_is_listed(small, tmp_path, monkeypatch):
  for name in ("b.png", "a.png", "c.jpg", "sub/d.png", "x[1].png"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    small.save(tmp_path / name)
  monkeypatch.chdir(tmp_path)
  names = ["a.png", "b.png", "x[1].png"]
  assert images.listed("*.png") == images.listed(pathlib.Path("*.png")) == names
  assert images.listed(["c.jpg", "*.png"]) == ["c.jpg", *names]
  assert "sub/d.png" in images.listed("**/*.png")
  # A name that happens to look like a glob.
  assert images.listed("x[1].png") == ["x[1].png"]
  one = np.asarray(small)
  for image in (small, one, "a", tmp_path / "none.png", b"a", io.BytesIO(b"a")):
    assert images.listed(image)[0] is image and len(images.listed(image)) == 1
  assert len(images.listed(np.stack([one] * 3))) == 3
  assert len(images.listed(image for image in (one, small))) == 2
  assert images.listed([]) == []
  with pytest.raises(FileNotFoundError, match="tiff"):
    images.listed("*.tiff")


# What is wrong.

# Pillow would start another program to draw it.
POSTSCRIPT = (
  b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"
)


def test_what_is_no_image(small, tmp_path):
  def error(image):
    with pytest.raises((FileNotFoundError, ValueError)) as e:
      images.read(image)
    return str(e.value)

  whole = encoded(small, "PNG")
  for data, words in (
    (b"buy milk", "8 bytes"),
    (b"", "no bytes"),
    (POSTSCRIPT, "no image"),
    (whole[: len(whole) // 2], "cannot be decoded"),
  ):
    (tmp_path / "x.jpg").write_bytes(data)
    for it in (tmp_path / "x.jpg", io.BytesIO(data)):
      assert words in error(it) and "JPEG, PNG, WebP" in error(it)
  for image, word in (
    (tmp_path / "none.jpg", "no file"),
    (tmp_path, f"{tmp_path}/*.jpg"),
    (small.convert("F"), "mode F"),
    ("https://x.y/a.png", "download"),
    (np.zeros((8, 8, 3), "float32"), "got float32 of shape (8, 8, 3)"),
    (np.zeros((0, 8, 3), "uint8"), "got uint8 of shape (0, 8, 3)"),
    (np.zeros((3, 8, 8), "uint8"), "got uint8 of shape (3, 8, 8)"),
  ):
    assert word in error(image)


def test_a_fourth_band_of_a_tiff_is_alpha_if_the_file_says_so():
  """Satellites' is near infrared, whose zeros are not transparent."""
  bands = np.random.default_rng(0).integers(0, 256, (6, 5, 4), np.uint8)
  bands[:3, :, 3] = 0
  file = io.BytesIO()
  Image.fromarray(bands, "RGBA").save(file, "tiff")
  data = file.getvalue()
  assert (images.read(data)[:3] == 255).all()
  tag = (338).to_bytes(2, "little") + b"\3\0"
  assert data.count(tag) == 1
  unsaid = data.replace(tag, (65000).to_bytes(2, "little") + b"\3\0")
  np.testing.assert_array_equal(images.read(unsaid), bands[..., :3])
