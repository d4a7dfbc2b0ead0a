"""Broken and odd images: right pixels, or named, counted and limited."""

import dataclasses
import os
import pathlib

import numpy as np
import pytest
from by_name import run
from kinds import (
  broken,
  encoded,
  expected,
  good,
  oriented,
  photo,
  write_classes,
)
from numbered import scored, unusable
from PIL import Image

from vit_jax.batch import DataError
from vit_jax.config import defaults, freeze
from vit_jax.data import (
  decoding,
  images,
  operation,
  operations,
  pixels,
  sources,
)
from vit_jax.data.pipeline import TrainingData
from vit_jax.data.tf_cpu import tf

OPS = "decode|resize((24, 40))"
KEY = tf.constant([1, 2], tf.int64)


def folder(root, files):
  """Returns a source of these files and of plain ones; name -> record."""
  source = sources.open_source(write_classes(root, files), "train+val")
  return source, {pathlib.Path(p).name: i for i, p in enumerate(source.paths)}


def test_right_pixels_of_every_kind(tmp_path, caplog):
  files = good()
  source, record = folder(tmp_path, files)
  batch = scored(source, OPS)
  assert batch["mask"].all() and not unusable(caplog)
  for name, data in files.items():
    whole = expected(data)
    want = pixels.apply(whole, OPS).astype(int)
    error = np.abs(batch["image"][record[name]] - want).max()
    # TensorFlow's decoder of JPEG has the fast transform, Pillow the accurate
    # one: up to 10 levels on these few pixels. All else is exact.
    is_jpeg = data.startswith(b"\xff\xd8")
    assert error <= (10 if is_jpeg else 0), name
    np.testing.assert_array_equal(images.read(data), whole, name)


@pytest.mark.slow
def test_the_fused_crop_of_a_turned_image():
  """Crop and turn commute, whatever the order in the file."""
  image = oriented("JPEG", 6, photo(96, 160), quality=95, subsampling=0)
  whole = run("decode", tf.constant(image), KEY)
  assert whole.shape == (160, 96, 3)
  crop = run("inception_crop", whole, KEY, (32, 32), 5, 30)
  fused = run("decode_inception_crop", tf.constant(image), KEY, (32, 32), 5, 30)
  np.testing.assert_array_equal(fused, crop)


NAMES = (
  b"a b.png",
  b"line\nbreak.png",
  b"caf\xe9.png",
  "\u65e5\u672c.png".encode(),
  b"'\"$;%s{}.png",
  b"x" * 251 + b".png",
  b"-rf.png",
)


@pytest.fixture
def all_broken(tmp_path):
  """A source of all that is broken, and of files with odd names."""
  gone = ("gone.png", "folder.png", "link.png", "dangling.png")
  files = {name: data for name, (data, _) in broken().items()}
  files |= dict.fromkeys(gone, encoded(photo(), "PNG"))
  write_classes(tmp_path, files)
  odd = os.path.join(os.fsencode(tmp_path), b"tw\xff\no")
  os.mkdir(odd)
  for i, name in enumerate(NAMES):
    with open(os.path.join(odd, name), "wb") as file:
      file.write(b"" if i == 1 else encoded(photo(), "PNG"))
  source = sources.open_source(f"folder:{tmp_path}", "train+val")
  for name in gone:
    (tmp_path / "a" / name).unlink()
  (tmp_path / "a/folder.png").mkdir()
  (tmp_path / "a/link.png").symlink_to(tmp_path / "b/0.png")
  (tmp_path / "a/dangling.png").symlink_to("nothing.png")
  return source


def test_broken_files_are_named_with_the_reason(
  all_broken, caplog, monkeypatch
):
  monkeypatch.setattr(decoding, "MAX_UNDECODABLE", 1.0)
  # By an operation whose crop may be in a whole part.
  batch = scored(all_broken, "decode_inception_crop(16, 5, 10)")
  lines, mask = unusable(caplog), batch["mask"]
  reasons = {name: reason for name, (_, reason) in broken().items()} | {
    "gone.png": "No such file",
    "folder.png": "Is a directory",
    "dangling.png": "link to nothing.png",
    "line\\nbreak.png": "no bytes",
  }
  for name, reason in reasons.items():
    (line,) = (line for line in lines if f"/{name}: " in line)
    assert reason in line and line.isprintable()
  assert len(lines) == len(reasons) == (~mask).sum()
  assert not batch["image"][~mask].any()
  (link,) = (i for i, p in enumerate(all_broken.paths) if "/link.png" in p)
  assert mask[link]
  assert all_broken.class_names == ("a", "b", "tw\\xff\\no")
  assert mask[all_broken.labels() == 2].sum() == len(NAMES) - 1


FORMATS = {"PNG": {}, "WEBP": {"lossless": True, "exact": True}, "TIFF": {}}


@pytest.mark.slow
@pytest.mark.parametrize("background", [None, "#0080ff"])
def test_transparent_images_are_put_on_a_ground(background, tmp_path, caplog):
  """In training, evaluation and predict alike."""
  whole, wanted = photo(), np.asarray(photo()).astype(float)
  alpha = np.full([24, 40], 255, np.uint8)
  alpha[:, :10], alpha[:, 10:20] = 0, 100
  whole.putalpha(Image.fromarray(alpha))
  if background:
    share = alpha[..., None] / 255
    wanted = wanted * share + np.array([0, 128, 255]) * (1 - share)
  else:
    wanted[:, :10] = 255
  files = {f"x.{k}": encoded(whole, k, **v) for k, v in FORMATS.items()}
  files = {k.lower(): v for k, v in files.items()}
  source, record = folder(tmp_path, files)
  images._say_ground.cache_clear()
  ops = f"decode(background={background!r})|resize((24, 40))"
  batch = scored(source, ops)
  for name, data in files.items():
    got = batch["image"][record[name]]
    assert np.abs(got - wanted).max() <= 1, name  # Pillow rounds twice
    read = images.read(data, background=background)
    np.testing.assert_array_equal(read, got)
  array = images.read(np.asarray(whole), background=background)
  np.testing.assert_array_equal(array, read)
  crop = dict(background=background, area_min=99)
  data = tf.constant(files["x.png"])
  fused = run("decode_inception_crop", data, KEY, 8, **crop)
  np.testing.assert_array_equal(fused, run("inception_crop", read, KEY, 8, 99))
  warnings = [r for r in caplog.messages if "transparent" in r]
  assert len(warnings) == (background is None)


@pytest.mark.slow
def test_the_largest_image_is_an_option(tmp_path, monkeypatch):
  options = {"JPEG": {}, **FORMATS}
  image = photo(30, 40)
  files = {f"x{k}.png": encoded(image, k, **v) for k, v in options.items()}
  source, record = folder(tmp_path, files)
  few = scored(source, "decode(max_pixels=1199)|resize(8)")
  bad = sorted(record[name] for name in files)
  assert np.flatnonzero(~few["mask"]).tolist() == bad
  assert scored(source, "decode(max_pixels=1200)|resize(8)")["mask"].all()
  # Beyond the limit of Pillow, which is small here.
  monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
  more = operation.MAX_PIXELS + 1
  for data in files.values():
    with pytest.raises(ValueError, match="at most 1,199"):
      images.read(data, max_pixels=1199)
    assert images.read(data, max_pixels=more).shape == (30, 40, 3)
  assert Image.MAX_IMAGE_PIXELS == more


@pytest.mark.slow
def test_a_line_is_not_resized(tmp_path, caplog, monkeypatch):
  """12,000 x 1 pixels would become 3,072,000 x 256 by resize_small(256)."""
  monkeypatch.setattr(operations, "MAX_PIXELS", 60**2)
  line = encoded(photo(1, 1002), "PNG")
  files = {"line.png": line, "short.png": encoded(photo(4, 5), "PNG")}
  source, record = folder(tmp_path, files)
  text = "decode|pad(1)|resize_small(size=9)|central_crop(8)"
  batch = scored(source, text)
  assert np.flatnonzero(~batch["mask"]).tolist() == [record["line.png"]]
  assert not batch["image"][record["line.png"]].any()
  (message,) = unusable(caplog)
  assert "3,012 x 9" in message and "3,600" in message
  with pytest.raises(ValueError, match="3,012 x 9"):  # for predict and serve
    pixels.apply(images.read(line), text)


@pytest.mark.slow
def test_too_many_broken_records_are_an_error(tmp_path):
  for name in "ab":
    (tmp_path / name).mkdir()
    (tmp_path / name / "1.jpg").write_text("no image")
  source = sources.open_source(f"folder:{tmp_path}", "train")
  with pytest.raises(DataError, match=f"2 records .*{tmp_path}.* at most 1"):
    scored(source, OPS)


def test_how_many_rows_may_be_broken():
  """No record is twice in an epoch, so rows tell how many records are."""
  config = defaults()
  config.data.batch_size = 4
  source = sources.open_source("digits", "train", fake=True)
  for num, allowed in ((2000, 20), (500, 10), (100, 10), (8, 7)):
    source = dataclasses.replace(source, num_examples=num)
    data, steps = TrainingData(source, freeze(config)), num // 4
    most = [data.most_unusable(step) for step in (1, steps, steps + 1)]
    assert most == [allowed, allowed, 2 * allowed]
