"""Broken and odd images: right pixels, or named, counted and limited."""

import dataclasses
import os
import pathlib
import re

import numpy as np
import pytest
from by_name import run
from kinds import broken, encoded, expected, good, oriented, photo
from PIL import Image, features

from vit_jax.batch import DataError
from vit_jax.config import defaults, freeze
from vit_jax.data import (
  decoding,
  images,
  operation,
  operations,
  pipeline,
  pixels,
  sources,
)
from vit_jax.data.pipeline import TrainingData
from vit_jax.data.tf_cpu import tf

OPS = "decode|resize((24, 40))"
KEY = tf.constant([1, 2], tf.int64)


def folder(root, files, others=3):
  """Writes files to a class, plain images to another; name -> record."""
  for name, data in {
    **{f"a/{name}": data for name, data in files.items()},
    **{f"b/{i}.png": encoded(photo(), "PNG") for i in range(others)},
  }.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(data)
  source = sources.open_source(f"folder:{root}", "train+val")
  return source, {pathlib.Path(p).name: i for i, p in enumerate(source.paths)}


def scored(source, text=OPS, **options):
  (batch,) = pipeline.eval_batches(
    source, text, batch_size=source.num_examples, **options
  )
  return batch


def messages(caplog):
  lines = [r.getMessage() for r in caplog.records]
  return [m for m in lines if m.startswith("Cannot use ")]


def test_right_pixels_of_every_kind(tmp_path, caplog):
  files = good()
  source, record = folder(tmp_path, files)
  batch = scored(source)
  assert batch["mask"].all() and not messages(caplog)
  for name, data in files.items():
    whole = expected(data)
    want = pixels.apply(whole, OPS).astype(int)
    error = np.abs(batch["image"][record[name]] - want).max()
    # TensorFlow's decoder of JPEG has the fast transform, Pillow the accurate
    # one: up to 10 levels on these few pixels. All else is exact.
    is_jpeg = data.startswith(b"\xff\xd8")
    assert error <= (10 if is_jpeg else 0), name
    np.testing.assert_array_equal(images.read(data), whole, name)


@pytest.mark.parametrize("number", range(1, 9))
def test_the_fused_crop_of_a_turned_image(number):
  """Crop and turn commute, whatever the order in the file."""
  data = tf.constant(
    oriented("JPEG", number, photo(96, 160), quality=95, subsampling=0)
  )
  whole = run("decode", data, KEY)
  assert whole.shape == ((96, 160, 3) if number < 5 else (160, 96, 3))
  crop = run("inception_crop", whole, KEY, (32, 32), 5, 30)
  fused = run("decode_inception_crop", data, KEY, (32, 32), 5, 30)
  np.testing.assert_array_equal(fused, crop)


def test_broken_files_are_named_with_the_reason(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr("vit_jax.data.decoding.MAX_UNDECODABLE", 1.0)
  reasons = broken()
  files = {name: data for name, (data, _) in reasons.items()}
  source, record = folder(tmp_path, files)
  batch = scored(source)
  bad = sorted(record[name] for name in files)
  assert np.flatnonzero(~batch["mask"]).tolist() == bad
  assert not batch["image"][bad].any()
  assert len(messages(caplog)) == len(files)
  for name, (_, reason) in reasons.items():
    (line,) = (m for m in messages(caplog) if f"/{name}: " in m)
    assert reason in line, line
  # By the fused operation, too, whose crop may lie in the part that is there.
  other = sources.open_source(f"folder:{tmp_path}", "train+val")
  fused = scored(other, "decode_inception_crop(16, 5, 10)")
  np.testing.assert_array_equal(fused["mask"], batch["mask"])


FORMATS = {"PNG": {}, "WEBP": {"lossless": True, "exact": True}, "TIFF": {}}


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
  np.testing.assert_array_equal(
    images.read(np.asarray(whole), background=background), read
  )
  fused = f"decode_inception_crop((24, 40), background={background!r})"
  whole = sources.open_source(f"folder:{tmp_path}", "train+val")
  assert scored(whole, fused)["mask"].all()
  warnings = [r for r in caplog.messages if "Some images are transparent" in r]
  assert len(warnings) == (background is None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["JPEG", *FORMATS])
def test_the_largest_image_is_an_option(name, tmp_path, monkeypatch):
  data = encoded(photo(30, 40), name, **FORMATS.get(name, {}))
  source, record = folder(tmp_path, {"x.png": data})
  few = scored(source, "decode(max_pixels=1199)|resize(8)")
  assert np.flatnonzero(~few["mask"]).tolist() == [record["x.png"]]
  with pytest.raises(ValueError, match="at most 1,199 in all"):
    images.read(data, max_pixels=1199)
  assert scored(source, "decode(max_pixels=1200)|resize(8)")["mask"].all()
  # Beyond the limit of Pillow, which is small here.
  monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
  more = operation.MAX_PIXELS + 1
  assert images.read(data, max_pixels=more).shape == (30, 40, 3)
  assert Image.MAX_IMAGE_PIXELS == more


def test_an_image_that_pillow_refuses(tmp_path, monkeypatch):
  """It has more than twice Pillow's own limit, which is small here."""
  data = encoded(photo(30, 40), "PNG")
  source, _ = folder(tmp_path, {"x.png": data})
  monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 599)
  text = (
    "got 1,200 pixels, expected at most 600 in all; reduce the image, or set"
    " config.data.max_pixels."
  )
  with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
    images.read(data, max_pixels=600)
  assert sources.typical_side(source) == 24  # of the others


@pytest.mark.skipif(not features.check("avif"), reason="Pillow has no AVIF")
def test_avif_is_read_where_pillow_reads_it(tmp_path):
  data = encoded(photo(), "AVIF", quality=100)
  source, record = folder(tmp_path, {"x.avif": data})
  batch = scored(source)
  assert batch["mask"].all() and source.num_examples == 4
  expected = pixels.apply(images.read(data), OPS)
  np.testing.assert_array_equal(batch["image"][record["x.avif"]], expected)
  off = np.abs(expected.astype(int) - np.asarray(photo())).mean()
  assert off < 3  # colours of half the resolution


@pytest.mark.parametrize("op", ["resize_small", "resize_small_torch"])
def test_a_line_is_not_resized(tmp_path, caplog, monkeypatch, op):
  """12,000 x 1 pixels would become 3,072,000 x 256 by resize_small(256)."""
  monkeypatch.setattr(operations, "MAX_PIXELS", 60**2)
  line = encoded(photo(1, 1002), "PNG")
  files = {"line.png": line, "short.png": encoded(photo(4, 5), "PNG")}
  source, record = folder(tmp_path, files, others=1)
  text = f"decode|pad(1)|{op}(size=9)|central_crop(8)"
  batch = scored(source, text)
  assert batch["mask"].sum() == 2 and not batch["mask"][record["line.png"]]
  assert not batch["image"][record["line.png"]].any()
  reason = (
    f"got 1,004 x 3 pixels, of which {op}(9) would make 3,012 x 9, expected at"
    " most 3,600 in all; crop the image."
  )
  assert len(messages(caplog)) == 1 and reason in messages(caplog)[0]
  with pytest.raises(ValueError, match=re.escape(reason)):
    pixels.apply(images.read(line), text)  # for predict and serve


def test_files_that_cannot_be_read(tmp_path, caplog):
  plain = encoded(photo(), "PNG")
  names = ("gone.png", "folder.png", "link.png", "dangling.png")
  source, record = folder(tmp_path, dict.fromkeys(names, plain))
  where = tmp_path / "a"
  for name in names:
    (where / name).unlink()
  (where / "folder.png").mkdir()
  (where / "link.png").symlink_to(tmp_path / "b" / "0.png")
  (where / "dangling.png").symlink_to("nothing.png")
  batch = scored(source)
  for name, reason in {
    "gone.png": "cannot be read: No such file or directory.",
    "folder.png": "cannot be read: Is a directory.",
    "dangling.png": "is a link to nothing.png, which does not exist.",
  }.items():
    assert not batch["mask"][record[name]]
    (line,) = (m for m in messages(caplog) if f"/{name}: " in m)
    assert reason in line
  assert batch["mask"][record["link.png"]] and len(messages(caplog)) == 3
  # Opened anew, the folder is one, and the dangling link is still named.
  again = sources.open_source(f"folder:{tmp_path}", "train+val")
  names = {pathlib.Path(p).name for p in again.paths}
  assert names == {"link.png", "dangling.png", "0.png", "1.png", "2.png"}


def test_what_is_no_record_of_a_folder(tmp_path):
  source, _ = folder(tmp_path, {"1.png": encoded(photo(), "PNG")})
  assert "not read" not in source.note()
  inside = tmp_path / "a" / "album.jpg"
  inside.mkdir()
  (inside / "2.png").write_bytes(encoded(photo(), "PNG"))
  (inside / "loop").symlink_to(tmp_path / "a")
  (tmp_path / "a" / ".cache").mkdir()
  for name in ("._1.png", ".hidden.jpg", "notes.txt", ".cache/3.png"):
    (tmp_path / "a" / name).write_bytes(b"Mac OS X")
  os.utime(tmp_path, (1, 1))  # the folder has changed
  source = sources.open_source(f"folder:{tmp_path}", "train+val")
  names = {os.path.relpath(p, tmp_path) for p in source.paths}
  assert names == {
    "a/1.png",
    "a/album.jpg/2.png",
    "b/0.png",
    "b/1.png",
    "b/2.png",
  }
  assert scored(source)["mask"].all()
  assert "has 4 files or folders that are not read, since" in source.note()
  assert "a/._1.png, a/.cache, a/.hidden.jpg, ..." in source.note()


def test_names_of_any_kind(tmp_path, caplog):
  names = [
    b"a b.png",
    b"line\nbreak.png",
    b"caf\xe9.png",
    "\u65e5\u672c.png".encode(),
    b"'\"$;%s{}.png",
    b"x" * 251 + b".png",
    b"-rf.png",
  ]
  for name in (b"one", b"tw\xff\no"):
    where = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(where)
    for i, file in enumerate(names):
      with open(os.path.join(where, file), "wb") as stream:
        stream.write(b"" if i == 1 else encoded(photo(), "PNG"))
  source = sources.open_source(f"folder:{tmp_path}", "train+val")
  assert source.num_examples == 2 * len(names)
  assert source.class_names == ("one", "tw\\xff\\no")
  batch = scored(source)
  assert batch["mask"].sum() == 2 * len(names) - 2
  assert len(messages(caplog)) == 2
  for line in messages(caplog):
    assert "/line\\nbreak.png: got no bytes" in line
    assert line.isprintable()


def test_a_folder_that_cannot_be_opened(tmp_path, monkeypatch):
  folder(tmp_path, {"1.png": encoded(photo(), "PNG")})
  (tmp_path / "a" / "shut").mkdir()
  scandir = os.scandir

  def refuses(path):
    if str(path).endswith("shut"):
      raise PermissionError(13, "Permission denied")
    return scandir(path)

  monkeypatch.setattr(os, "scandir", refuses)
  os.utime(tmp_path, (1, 1))
  with pytest.raises(ValueError, match="cannot be opened: Perm"):
    sources.open_source(f"folder:{tmp_path}", "train")


def test_not_all_records_may_be_broken(tmp_path):
  limits = [decoding.most_unusable(n, n) for n in (1, 5, 11, 12)]
  assert limits == [0, 4, 10, 10]
  assert decoding.most_unusable(1, 8) == 7  # one process's share of a split
  for name in "ab":
    (tmp_path / name).mkdir()
    (tmp_path / name / "1.jpg").write_text("no image")
  source = sources.open_source(f"folder:{tmp_path}", "train")
  with pytest.raises(DataError, match="got 2 records of .* at most 1"):
    scored(source)


def test_how_many_rows_may_be_broken():
  """No record is twice in an epoch, so rows tell how many records are."""
  config = freeze(defaults())
  config = dataclasses.replace(
    config, data=dataclasses.replace(config.data, batch_size=100)
  )
  for num, allowed in ((2000, 20), (500, 10), (100, 10)):
    source = sources.open_source(
      "digits", f"train[:{min(num, 500)}]", fake=True
    )
    source = dataclasses.replace(source, num_examples=num)
    data = TrainingData(source, config)
    steps = num // 100
    assert [data.most_unusable(s) for s in (1, steps, steps + 1)] == [
      allowed,
      allowed,
      2 * allowed,
    ]
