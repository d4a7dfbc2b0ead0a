"""Data of one's own in TFDS's format: nothing changed, nothing lost unsaid."""

import io
import pathlib
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest
import tensorflow_datasets as tfds
from importable import NAMES, SPLITS, encoded, stored, write_folder
from PIL import Image

from vit_jax.data import download_and_prepare, operation, sources
from vit_jax.data.builders.image_builder import (
  Entry,
  RecordFilter,
  Split,
  checked,
)
from vit_jax.finetune.data.builder import OwnData
from vit_jax.finetune.data.imports.listing import Listing


def imported(source, out):
  """What the import of a source has done, and what it said."""
  lines = []
  done = download_and_prepare.import_source(
    source, "own", str(out), say=lines.append
  )
  return done, " ".join(lines)


def test_images_and_classes_arrive_as_they_are(tmp_path):
  """From a folder; tests/data/test_listing.py has the other kinds."""
  source, out = write_folder(tmp_path / "in"), tmp_path / "out"
  done, said = imported(source, out)
  assert done.splits == {"train": 12, "validation": 5}
  assert (done.num_classes, done.left_out) == (3, 0)
  assert "train: all 12 records read" in said
  for split, records in SPLITS.items():
    assert stored("own", split, out) == dict(records)
  opened = sources.open_source("own", "train@5", str(out))
  assert opened.class_names == NAMES and opened.num_examples == 5
  with pytest.raises(ValueError, match="--name: got own"):
    imported(source, out)


def test_an_image_with_any_number_of_classes(tmp_path):
  lines = ["file,label", "0.jpg,cat|ant", "1.jpg,", "2.jpg,bee|"]
  for i in range(3):
    (tmp_path / f"{i}.jpg").write_bytes(encoded(i))
  (tmp_path / "labels.csv").write_text("\n".join(lines))
  done, said = imported(f"csv:{tmp_path}/labels.csv", tmp_path)
  assert (done.num_classes, done.left_out) == (3, 0)
  assert "1 images have none of the classes" in said
  source = sources.open_source("own", "train", str(tmp_path))
  assert source.is_multilabel and source.class_names == NAMES
  records = source.records().as_numpy_iterator()
  labels = {r["image"]: r["label"].tolist() for r in records}
  expected = [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
  assert labels == {encoded(i): row for i, row in enumerate(expected)}


def written(entries, data_dir):
  """Writes entries as the train split; returns those that were left out."""
  split = Split(len(entries), lambda: iter(entries))
  record_filter = RecordFilter(lambda line: None)
  builder = OwnData(
    name="own",
    listing=Listing(NAMES, {"train": split}),
    description="",
    data_dir=data_dir,
    record_filter=record_filter,
  )
  builder.download_and_prepare()
  return dict(record_filter.left_out)


def test_records_are_written_to_be_read_by_number(tmp_path):
  entries = [Entry(str(i), encoded(i), i % 3) for i in range(9)]
  images = []
  for folder, given in (("a", entries), ("b", entries[::-1])):
    written(given, tmp_path / folder)
    assert list(tmp_path.glob(f"{folder}/own/1.0.0/own-train.array_record*"))
    source = sources.open_source("own", "train", str(tmp_path / folder))
    images.append([r["image"] for r in source.records().as_numpy_iterator()])
  # Their order is that of a hash of their keys.
  assert images[0] == images[1]
  order = [images[0].index(e.image) for e in entries]
  assert sorted(order) == list(range(9)) != order


def test_what_cannot_be_used_is_named_and_left_out(tmp_path):
  whole = encoded(1, size=(200, 100))
  entries = [
    Entry("a", whole, 0),
    Entry("half", whole[: len(whole) // 2], 1),
    Entry("text", b"<html>", 1),
    Entry("empty", b"", 1),
    Entry("none", error="has no label"),
    Entry("png", encoded(3, "png")[:-30], 1),
    Entry("b", encoded(2, "png"), 2),
  ]
  left_out = written(entries, tmp_path)
  words = ["truncated", "6 bytes", "0 bytes", "no label", "truncated"]
  assert list(left_out) == ["half", "text", "empty", "none", "png"]
  assert set(stored("own", "train", tmp_path)) == {whole, encoded(2, "png")}
  for key, word in zip(left_out, words, strict=True):
    assert word in left_out[key], (key, left_out[key])


def test_too_many_errors_leave_no_data_set(tmp_path):
  def entries(good, broken):
    bad = [Entry(f"no {i}", error="has no label") for i in range(broken)]
    return bad + [Entry(str(i), encoded(i), 0) for i in range(good)]

  for good, broken, word in ((30, 11, "11 records"), (0, 3, "no usable")):
    with pytest.raises(ValueError, match=word) as e:
      written(entries(good, broken), tmp_path)
    assert "no 0: has no label" in str(e.value)
    assert not list(tmp_path.glob("own/*"))
  with pytest.raises(ValueError, match="no usable"):
    written([], tmp_path)
  assert len(written(entries(30, 10), tmp_path)) == 10


def test_other_formats_become_png():
  """With their alpha: the ground is chosen when the data set is read."""
  image = Image.open(io.BytesIO(encoded(5, "png"))).convert("RGBA")
  image.putalpha(128)
  file = io.BytesIO()
  image.save(file, "webp", lossless=True, exact=True)
  data, name, error = checked(Entry("k", file.getvalue(), 0))
  assert (name, error) == ("WEBP", "")
  with Image.open(io.BytesIO(data)) as got:
    assert got.format == "PNG"
    np.testing.assert_array_equal(np.asarray(got), np.asarray(image))


def test_the_largest_image_is_an_option(monkeypatch):
  """Also where Pillow's own limit is lower, or refuses the image first."""
  for of_pillow in (10**9, 10):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", of_pillow)
    for form in ("jpeg", "webp"):
      entry = Entry("k", encoded(5, form, size=(40, 30)), 0)
      data, _, error = checked(entry, 1199)
      assert not data
      assert re.search("(40 x 30|1,200) .*1,199.*--max_pixels", error)
      data, _, error = checked(entry, operation.MAX_PIXELS + 1)
      assert data and not error


@pytest.mark.nightly
def test_a_killed_import_leaves_no_data_set(tmp_path):
  """Neither half a data set, nor one that is in the way of the next try."""
  code = (
    "import sys; sys.path.insert(0, 'tests/data')\n"
    "import time, test_imports as t\n"
    "def entries():\n"
    "  for i in range(1000):\n"
    "    time.sleep(0.01); yield t.Entry(str(i), t.encoded(i), 0)\n"
    "listing = t.Listing(t.NAMES, {'train': t.Split(1000, entries)})\n"
    "t.OwnData(name='own', listing=listing, description='',"
    f" data_dir={str(tmp_path)!r}).download_and_prepare()\n"
  )
  root = pathlib.Path(__file__).parents[2]
  process = subprocess.Popen([sys.executable, "-c", code], cwd=root)
  deadline = time.monotonic() + 60
  while not list(tmp_path.glob("own/incomplete*")):
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.1)
  process.send_signal(signal.SIGKILL)
  process.wait()
  with pytest.raises(ValueError, match="got data set 'own'"):
    sources.open_source("own", "train", str(tmp_path))
  imported(write_folder(tmp_path / "in"), tmp_path)
  assert stored("own", "train", tmp_path) == dict(SPLITS["train"])


def test_what_is_refused(tmp_path, monkeypatch):
  for name in ("cifar10", "digits", "My set"):
    with pytest.raises(ValueError, match=f"--name: got '?{name}"):
      download_and_prepare.import_source("folder:x", name, str(tmp_path))
  # What the writers say on a full disk, for want of one here.
  error = RuntimeError("write() failed: No space left on device; writing ...")
  fails = mock.Mock(side_effect=error)
  monkeypatch.setattr(OwnData, "download_and_prepare", fails)
  with pytest.raises(ValueError, match=f"{tmp_path}, whose disk is full"):
    imported(write_folder(tmp_path / "in"), tmp_path)


def test_records_are_not_written_into_a_bucket(monkeypatch):
  builder = mock.Mock(spec=tfds.core.DatasetBuilder)
  builder.is_prepared.return_value = False
  builder.data_dir = "gs://bucket/data/cifar10/3.0.2"
  find = lambda *_: builder
  monkeypatch.setattr(download_and_prepare.tfds_source, "find_builder", find)
  with pytest.raises(ValueError, match="data_dir: got gs://bucket"):
    download_and_prepare.prepare("cifar10", "gs://bucket/data")
