"""Data of one's own in TFDS's format: nothing changed, nothing lost unsaid."""

import doctest
import gzip
import io
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import time
from unittest import mock

import numpy as np
import pyarrow
import pytest
import tensorflow_datasets as tfds
from importable import (
  NAMES,
  SPLITS,
  WRITERS,
  add,
  encoded,
  images,
  table,
  write_folder,
  write_webdataset,
)
from PIL import Image
from pyarrow import parquet

from vit_jax.data import preparing, sources
from vit_jax.data.builders import imported
from vit_jax.data.imports import KINDS, files, hugging_face, listing
from vit_jax.data.imports.listing import Entry, Listing, Options, Split


def stored(name, split, data_dir):
  """{encoded image: name of its class}"""
  source = sources.open_source(name, split, str(data_dir))
  records = source.records().as_numpy_iterator()
  return {r["image"]: source.class_names[r["label"]] for r in records}


def test_splits_that_mean_the_same_keep_their_names():
  assert doctest.testmod(hugging_face) == (0, 1)


def test_compressed_tars_are_read_forward(tmp_path, monkeypatch):
  """To go back, gzip decompresses all that is before once more."""
  source = write_webdataset(tmp_path).removeprefix("webdataset:")
  seek = gzip.GzipFile.seek

  def forward(self, offset, whence=io.SEEK_SET):
    if whence == io.SEEK_SET:  # else to tell the place
      assert offset >= seek(self, 0, io.SEEK_CUR)
    return seek(self, offset, whence)

  monkeypatch.setattr(gzip.GzipFile, "seek", forward)
  found = KINDS["webdataset:"].listed(source, Options())
  entries = [*found.splits["train"].entries()]
  assert {e.image for e in entries} == {image for image, _ in SPLITS["train"]}


@pytest.mark.parametrize("kind", KINDS)
def test_images_and_classes_arrive_as_they_are(kind, tmp_path):
  (tmp_path / "in").mkdir()
  source = WRITERS[kind](tmp_path / "in")
  said = []
  done = preparing.import_source(
    source, "own", str(tmp_path / "out"), say=said.append
  )
  assert done.splits == {"train": 12, "validation": 5}
  assert (done.num_classes, done.left_out) == (3, 0)
  for split, records in SPLITS.items():
    assert stored("own", split, tmp_path / "out") == dict(records)
  opened = sources.open_source("own", "train@5", str(tmp_path / "out"))
  assert opened.class_names == NAMES and opened.num_examples == 5
  assert "train: 12 records found" in said
  assert "train: all 12 records read" in " ".join(said)
  with pytest.raises(ValueError, match="which is in .* already. Remove that"):
    preparing.import_source(source, "own", str(tmp_path / "out"))


def test_records_are_written_to_be_read_by_number(tmp_path):
  entries = [Entry(str(i), encoded(i), i % 3) for i in range(9)]
  found = []
  for folder, given in (("a", entries), ("b", entries[::-1])):
    preparing_write(made(given), tmp_path / folder)
    assert list(tmp_path.glob(f"{folder}/own/1.0.0/own-train.array_record*"))
    source = sources.open_source("own", "train", str(tmp_path / folder))
    found.append([r["image"] for r in source.records().as_numpy_iterator()])
  # Their order is that of a hash of their keys.
  assert found[0] == found[1]
  order = [found[0].index(e.image) for e in entries]
  assert sorted(order) == list(range(9)) != order


def made(entries, count=None, names=NAMES):
  split = Split(count or len(entries), lambda: iter(entries))
  return Listing(tuple(names), {"train": split})


def preparing_write(found, data_dir, intake=None):
  builder = imported.Imported(
    name="own",
    listing=found,
    description="",
    data_dir=data_dir,
    intake=intake or imported.Intake(lambda line: None),
  )
  builder.download_and_prepare()
  return builder


def test_what_cannot_be_used_is_named_and_left_out(tmp_path):
  whole = encoded(1, size=(200, 100))
  entries = [
    Entry("a", whole, 0),
    Entry("half", whole[: len(whole) // 2], 1),
    Entry("text", b"<html>", 1),
    Entry("empty", b"", 1),
    Entry("none", fault="has no label"),
    Entry("png", encoded(3, "png")[:-30], 1),
    Entry("b", encoded(2, "png"), 2),
  ]
  intake = imported.Intake(lambda line: None)
  preparing_write(made(entries), tmp_path, intake)
  found = dict(intake.left_out)
  assert list(found) == ["half", "text", "empty", "none", "png"]
  assert "truncated" in found["half"]
  assert found["text"] == "6 bytes that are no image"
  assert found["none"] == "has no label"
  assert set(stored("own", "train", tmp_path)) == {
    whole,
    encoded(2, "png"),
  }


def test_too_many_faults_leave_no_data_set(tmp_path):
  def entries(broken):
    good = [Entry(str(i), encoded(i), 0) for i in range(30)]
    return [
      Entry(f"no {i}", fault="has no label") for i in range(broken)
    ] + good

  preparing_write(made(entries(10)), tmp_path / "ten")
  with pytest.raises(ValueError, match="got 11 records without a label") as e:
    preparing_write(made(entries(11)), tmp_path / "eleven")
  assert "no 0: has no label" in str(e.value)
  assert not list(tmp_path.glob("eleven/own/*"))


@pytest.mark.parametrize("form", ["webp", "bmp", "gif", "tiff"])
def test_other_formats_become_png(form):
  options = {"lossless": True} if form == "webp" else {}
  image = encoded(5, form, **options)
  kept, name, fault = imported.checked(Entry("k", image, 0))
  assert (name.lower(), fault) == (form, "")
  with Image.open(io.BytesIO(kept)) as got, Image.open(io.BytesIO(image)) as x:
    assert got.format == "PNG"
    np.testing.assert_array_equal(np.asarray(got), np.asarray(x.convert("RGB")))


def test_postscript_is_no_image():
  """Pillow would hand it to Ghostscript."""
  image = encoded(5, "eps")
  fault = f"{len(image):,} bytes that are no image"
  assert imported.checked(Entry("k", image, 0)) == (b"", "", fault)


@pytest.mark.slow
def test_a_killed_import_leaves_no_data_set(tmp_path):
  """Neither half a data set, nor one that is in the way of the next try."""
  code = (
    "import sys; sys.path.insert(0, 'tests/data')\n"
    "import time, test_imports as t\n"
    "def entries():\n"
    "  for i in range(1000):\n"
    "    time.sleep(0.01); yield t.Entry(str(i), t.encoded(i), 0)\n"
    "found = t.Listing(t.NAMES, {'train': t.Split(1000, entries)})\n"
    f"t.preparing_write(found, {str(tmp_path)!r})\n"
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
  (tmp_path / "in").mkdir()
  said = []
  source = write_folder(tmp_path / "in")
  preparing.import_source(source, "own", str(tmp_path), say=said.append)
  assert "is of a preparation that did not end" in " ".join(said)
  assert stored("own", "train", tmp_path) == dict(SPLITS["train"])


def test_tars_with_faults(tmp_path):
  good = images(0, 3)
  with tarfile.open(tmp_path / "0.tar", "w") as tar:
    for i, (image, _) in enumerate(good):
      add(tar, f"./._{i}.jpg", b"Mac OS X")
      add(tar, f"{i}.jpg", image)
      add(tar, f"._{i}.cls", b"Mac OS X")
      add(tar, f"{i}.cls", b"2\n")
    add(tar, "3.jpg", good[0][0])  # without a label
    add(tar, "4.cls", b"1")
    add(tar, "5.a.jpg", good[0][0])
    add(tar, "5.b.jpg", good[0][0])
    add(tar, "5.cls", b"1")
    add(tar, "0.jpg", good[0][0])
    add(tar, "0.cls", b"0")
  whole = (tmp_path / "0.tar").read_bytes()
  with tarfile.open(tmp_path / "0.tar") as tar:
    header = tar.getmembers()[7].offset
  (tmp_path / "1.tar").write_bytes(whole[: header + 100])  # within a header
  (tmp_path / "3.tar").write_bytes(whole[: header + 600])  # within a label
  (tmp_path / "2.tar").write_bytes(b"no tar at all")
  found = KINDS["webdataset:"].listed(str(tmp_path), Options())
  assert found.class_names == ("0", "1", "2")
  entries = list(found.splits["train"].entries())
  assert [e.image for e in entries[:3]] == [image for image, _ in good]
  assert [e.label for e in entries[:3]] == [2, 2, 2]
  faults = {e.key: e.fault for e in entries if e.fault}
  assert faults["0.tar/3"] == "has no label"
  assert faults["0.tar/4"] == "has 0 images"
  assert faults["0.tar/5"] == "has 2 images"
  assert faults["0.tar/0"] == "has the name of an earlier record"
  assert faults["1.tar"].startswith("is broken after 1 records: it is cut off")
  assert faults["3.tar"].startswith("is broken after 1 records: unexpected end")
  assert "is broken after 0 records" in faults["2.tar"]
  assert found.splits["train"].count == len(entries)


def test_labels_of_numbers_and_names(tmp_path):
  (tmp_path / "in").mkdir()
  source = write_webdataset(tmp_path / "in", NAMES.index)
  path = source.removeprefix("webdataset:")
  found = KINDS["webdataset:"].listed(path, Options())
  assert found.class_names == ("0", "1", "2")
  found = KINDS["webdataset:"].listed(path, Options(classes=("x", "y", "z")))
  assert found.class_names == ("x", "y", "z")
  classes = listing.Classes([b"b", "a ", None, ""], None, "x")
  assert classes.names == ("a", "b")
  assert [classes.index(v) for v in (b"b", "a", None, " ")] == [1, 0, -1, -1]
  # Texts that are no numbers, or one number twice, stay as they are.
  for labels in (["007", "7"], ["07", "7", "cat"], ["+1", "-1"]):
    classes = listing.Classes([f" {v}\n" for v in labels], None, "x")
    assert classes.names == tuple(sorted(labels))
    found = [classes.names[classes.index(v)] for v in labels]
    assert found == labels
  # Zeros in front change no number, whether all labels have them or some.
  padded = [f"{i:02}" for i in range(120)]
  for labels in (padded, [*map(str, range(12)), "-01"], ["00", "011", "5"]):
    classes = listing.Classes(labels, None, "x")
    assert classes.names == tuple(map(str, range(max(map(int, labels)) + 1)))
    for text in labels:
      assert classes.index(text) == max(-1, int(text))
    assert not classes.note
  # One number written twice: by value, then as text, which is said.
  classes = listing.Classes([*map(str, range(11)), "05", "-1"], None, "x")
  assert classes.names == (
    *("0", "1", "2", "3", "4", "05", "5", "6", "7", "8", "9", "10"),
  )
  assert [classes.index(v) for v in ("05", "5", "10", "-1")] == [5, 6, 11, -1]
  assert classes.note == (
    "labels are names of classes, numbered by value, since '05' and '5' would"
    " be one number"
  )
  classes = listing.Classes(["01", b"00 ", "-1"], ("a", "b"), "x")
  assert [classes.index(v) for v in ("00", "01", "-1")] == [0, 1, -1]
  classes = listing.Classes({3, -1}, None, "x")
  assert classes.names == ("0", "1", "2", "3") and classes.index(-1) == -1
  for labels, given, message in (
    ([None, -1], None, "got x without any label"),
    ([0, 3], ("a", "b"), "got label 3 in x, expected 0 to 1, as there are 2"),
    (["c"], ("a", "b"), r"got the classes \['c'\] in x, expected one of the 2"),
    ([5, 70_000], None, "got only 2 different labels up to 70,000 in x"),
    ([0], ("a", "a"), "got two classes of the name 'a'"),
    ([0], ("a\nb",), "expected one line of text"),
  ):
    with pytest.raises(ValueError, match=message):
      listing.Classes(labels, given, "x")


def test_an_import_says_that_two_texts_are_one_number(tmp_path):
  (tmp_path / "in").mkdir()
  texts = dict(zip(NAMES, ("5", "05", "11"), strict=True))
  source = write_webdataset(tmp_path / "in", texts.get)
  said = []
  preparing.import_source(source, "own", str(tmp_path), say=said.append)
  at = said.index("3 classes: 05, 5, 11")
  assert said[at + 1].startswith("labels are names of classes, numbered by")
  assert stored("own", "train", tmp_path) == {
    image: texts[name] for image, name in SPLITS["train"]
  }


def test_columns_are_found_or_asked_for(tmp_path):
  records = SPLITS["train"]
  numbers = [NAMES.index(name) for _, name in records]
  read = KINDS["parquet:"].listed
  path = tmp_path / "x.parquet"

  def write(found):
    parquet.write_table(found, path)
    return str(path)

  # Two columns could be labels, none has a usual name.
  unusual = write(table(records, kind=numbers))
  message = (
    r"--label: got several columns \(id, kind\) for the label in parquet"
  )
  with pytest.raises(ValueError, match=message):
    read(unusual, Options())
  found = read(unusual, Options(label="kind"))
  assert found.class_names == ("0", "1", "2")
  with pytest.raises(
    ValueError, match="--label: got column 'image' for the lab"
  ):
    read(unusual, Options(label="image"))
  with pytest.raises(
    ValueError, match="--image: got column 'id' .* of: image: "
  ):
    read(unusual, Options(label="kind", image="id"))
  with pytest.raises(ValueError, match="--image: got no column for the image"):
    read(write(pyarrow.table({"label": [1]})), Options())
  # Names in Hugging Face's metadata, images as plain bytes, missing values.
  metadata = (
    b'{"info": {"features": {"label": {"names": ["ant", "bee", "cat"],'
    b' "_type": "ClassLabel"}}}}'
  )
  plain = pyarrow.table(
    {
      "image": [records[0][0], None, records[2][0]],
      "label": [numbers[0], 1, -1],
    }
  ).replace_schema_metadata({b"huggingface": metadata})
  found = read(write(plain), Options())
  assert found.class_names == NAMES
  first, *faults = found.splits["train"].entries()
  assert first == ("x.parquet:0", records[0][0], numbers[0], "")
  assert [f.fault for f in faults] == ["has no image", "has no label"]
  cut = plain.replace_schema_metadata({b"huggingface": metadata[:40]})
  with pytest.raises(ValueError, match=r"x\.parquet: metadata of Hugging Face"):
    read(write(cut), Options())
  path.write_bytes(b"PAR1")
  with pytest.raises(ValueError, match="which is no whole parquet file"):
    read(str(path), Options())


def split_files(root, names, splits=None, path=None):
  for name in names:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()
  options = Options(splits=splits or {})
  found = files.by_split(str(path or root), (".tar",), options, "webdataset:")
  return {
    split: [os.path.relpath(f, root) for f in paths]
    for split, paths in found.items()
  }


def test_splits_are_told_by_the_names_of_files(tmp_path):
  names = ["x-train-0.tar", "x-train-1.tar", "x-val.tar", "y/trainer.txt"]
  assert split_files(tmp_path / "a", names) == {
    "train": names[:2],
    "validation": names[2:3],
  }
  names = ["test/train-1.tar", "test/2.tar"]
  assert split_files(tmp_path / "b", names) == {
    "train": ["test/train-1.tar"],
    "test": ["test/2.tar"],
  }
  assert split_files(tmp_path / "c", ["0.tar", "1.tar"]) == {
    "train": ["0.tar", "1.tar"]
  }
  given = {"train": "0*", "extra": "sub/1.tar"}
  assert split_files(tmp_path / "d", ["00.tar", "sub/1.tar"], given) == {
    "train": ["00.tar"],
    "extra": ["sub/1.tar"],
  }
  only = {"validation": None}
  assert split_files(tmp_path / "a", [], only) == {"validation": ["x-val.tar"]}
  glob = tmp_path / "a" / "x-train-*.tar"
  assert list(split_files(tmp_path / "a", [], path=glob)) == ["train"]
  for root, splits, path, message in (
    ("e", {}, None, "names no file; expected a folder with files ending in"),
    ("e", {}, "{0..9}.tar", "Braces as in .* are no glob"),
    ("a", {"test": None}, None, "--splits: got test, expected splits that"),
    ("c", {"train": None, "test": None}, None, "but no name of a file in"),
    ("d", {"train": "x*"}, None, "got train=x\\*, which fits none of 2 files"),
    ("d", {"train": "x*", "test": None}, None, "with and without a pattern"),
  ):
    with pytest.raises(ValueError, match=message):
      split_files(tmp_path / root, [], splits, path)
  with pytest.raises(ValueError, match="1 of 4 files whose names say no split"):
    split_files(tmp_path / "a", ["more.tar"])


@pytest.mark.parametrize("name", ["cifar10", "digits", "imagenet21k"])
def test_a_name_that_is_taken_is_refused(name, tmp_path):
  with pytest.raises(ValueError, match=f"got '{name}', which is a data set of"):
    preparing.import_source("folder:x", name, str(tmp_path))
  with pytest.raises(ValueError, match="--name: got 'My set', expected small"):
    preparing.import_source("folder:x", "My set", str(tmp_path))


def test_names_of_any_bytes_are_imported(tmp_path):
  names = [
    b"cat/caf\xe9.jpg",
    b"d\xe9g/1.jpg",
    b"cat/2.jpg",
    b"d\xe9g/b\xe9.jpg",
  ]
  for i, name in enumerate(names):
    path = os.path.join(os.fsencode(tmp_path / "in"), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
      file.write(b"" if i == 3 else encoded(i))
  source, out = f"folder:{tmp_path / 'in'}", str(tmp_path / "out")
  done = preparing.import_source(source, "own", out)
  assert sum(done.splits.values()) == 3
  (line,) = (
    pathlib.Path(done.folder, preparing.LEFT_OUT).read_text().split("\n")[:-1]
  )
  assert line.startswith("d\\xe9g/b\\xe9.jpg: ")
  found = stored("own", "train+validation", out)
  assert set(found.values()) == {"cat", "d\\xe9g"}


def test_classes_of_one_name_are_refused(tmp_path):
  for name in ("cat", "cat "):
    (tmp_path / name).mkdir()
    (tmp_path / name / "1.jpg").write_bytes(encoded(1))
  with pytest.raises(ValueError, match="got a class of the name 'cat '"):
    KINDS["folder:"].listed(str(tmp_path), Options())


@pytest.mark.parametrize("form", ["array_record", "tfrecord"])
def test_a_full_disk_is_named(form, tmp_path, monkeypatch):
  """With what the writers say on a full disk, for want of one here."""
  error = {
    "array_record": 'RuntimeError: Failed to finalize writing of split "train":'
    " write() failed: No space left on device; writing ...",
    "tfrecord": "ResourceExhaustedError: ...-00001; No space left on device",
  }[form]
  fails = mock.Mock(side_effect=RuntimeError(error))
  monkeypatch.setattr(imported.Imported, "download_and_prepare", fails)
  (tmp_path / "in").mkdir()
  source = write_folder(tmp_path / "in")
  with pytest.raises(ValueError, match=f"got {tmp_path}, whose disk is full"):
    preparing.import_source(source, "own", str(tmp_path), file_format=form)


def test_of_two_imports_at_once_the_later_one_says_so(tmp_path):
  (tmp_path / "in").mkdir()
  source = write_folder(tmp_path / "in")

  def say(line):
    if line.startswith("train: all"):  # and is not renamed yet
      preparing.import_source(source, "own", str(tmp_path))

  with pytest.raises(ValueError, match=r"own/1.0.0, which another command has"):
    preparing.import_source(source, "own", str(tmp_path), say=say)
  assert stored("own", "train", tmp_path) == dict(SPLITS["train"])


def test_records_are_not_written_into_a_bucket(monkeypatch):
  builder = mock.Mock(spec=tfds.core.DatasetBuilder)
  builder.is_prepared.return_value = False
  builder.data_dir = "gs://bucket/data/cifar10/3.0.2"
  find = lambda *_: builder
  monkeypatch.setattr(preparing.tfds_source, "find_builder", find)
  with pytest.raises(ValueError, match="data_dir: got 'gs://bucket"):
    preparing.prepare("cifar10", "gs://bucket/data")
