"""Folders of images: splits, every error, images that cannot be decoded."""

import logging
import pathlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import pipeline, sources
from vit_jax.data.splits import SPLIT_FOLDERS

OPS = "decode|resize(8)"


def write(path, number=0, fmt=None, mode="RGB", **options):
  path.parent.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(number)
  image = Image.fromarray(rng.integers(0, 256, (12, 10, 3), np.uint8))
  image.convert(mode).save(path, fmt, **options)


def classes(root, **counts):
  for name, count in counts.items():
    for i in range(count):
      write(root / name / f"{i}.png", i)
  return f"folder:{root}"


def names(source):
  return ["/".join(pathlib.Path(p).parts[-2:]) for p in source.paths]


def test_splits_are_made_by_class_and_for_good(tmp_path):
  dataset = classes(tmp_path / "pets", cat=20, dog=14, owl=1)
  train = sources.open_source(dataset, "train")
  val = sources.open_source(dataset, "val")
  assert train.class_names == ("cat", "dog", "owl") and train.num_classes == 3
  assert set(names(train)).isdisjoint(names(val))
  assert train.num_examples + val.num_examples == 35
  # A tenth of each class, rounded; none of a class with one image.
  assert np.bincount(val.labels(), minlength=3).tolist() == [2, 1, 0]
  # A golden choice: no version, machine or run may draw another one.
  assert sorted(names(val)) == GOLDEN_VAL
  # Elsewhere, and with files added to another class, cats stay as they are.
  other = sources.open_source(classes(tmp_path / "b", cat=20, cow=30), "val")
  is_cat = lambda s: {n for n in names(s) if n.startswith("cat")}
  assert is_cat(other) == is_cat(val)


GOLDEN_VAL = ["cat/10.png", "cat/16.png", "dog/10.png"]


def test_slices_are_those_of_a_split_and_hold_all_classes(tmp_path):
  dataset = classes(tmp_path, a=20, b=20, c=20)
  train = sources.open_source(dataset, "train")
  head = sources.open_source(dataset, "train[:50%]")
  rest = sources.open_source(dataset, "train[50%:]")
  assert head.paths + rest.paths == train.paths and head.num_examples == 27
  assert set(head.labels()) == set(rest.labels()) == {0, 1, 2}
  both = sources.open_source(dataset, "val+train[-3:]")
  assert both.paths == (
    sources.open_source(dataset, "val").paths + train.paths[-3:]
  )
  labels = [int(r["label"]) for r in train.records()]
  assert labels == train.labels().tolist()
  assert labels == ["abc".index(n[0]) for n in names(train)]


def test_folders_named_as_splits_are_the_splits(tmp_path):
  classes(tmp_path / "train", a=3, b=4)
  classes(tmp_path / "validation", a=1, b=1)
  dataset = classes(tmp_path / "test", a=1, b=2).removesuffix("/test")
  train = sources.open_source(dataset, "train")
  assert train.num_examples == 7 and train.class_names == ("a", "b")
  assert sources.open_source(dataset, "test").num_examples == 3
  val = sources.open_source(dataset, "val")
  assert val.num_examples == 2 and "/validation/" in val.paths[0]
  with pytest.raises(
    ValueError,
    match=r"got split 'train2', expected one of train \(7 records\), val"
    r" \(2 records\), test \(3 records\)\. Did you mean 'train'\?",
  ):
    sources.open_source(dataset, "train2")


@pytest.mark.parametrize(
  "train, held_out, split",
  [
    ("TRAINING", "valid", "val"),
    ("Train", "Testing", "test"),
  ],
)
def test_splits_by_any_usual_name(tmp_path, train, held_out, split):
  classes(tmp_path / train, a=3, b=4)
  dataset = classes(tmp_path / held_out, a=1, b=1).removesuffix(f"/{held_out}")
  source = sources.open_source(dataset, "train[:3]+Training[3:]")
  assert source.num_examples == 7 and source.class_names == ("a", "b")
  for name in (split, held_out, *SPLIT_FOLDERS[split]):
    source = sources.open_source(dataset, f"{name}[:100%]")
    assert source.num_examples == 2 and f"/{held_out}/" in source.paths[0]


def test_a_class_may_be_called_train(tmp_path):
  dataset = classes(tmp_path, bus=5, train=5, test=5)
  source = sources.open_source(dataset, "train")
  assert source.class_names == ("bus", "test", "train")
  # A made split under another name.
  assert sources.open_source(dataset, "validation").num_examples == 3


def test_suffixes_in_any_case_and_deeper_folders_count(tmp_path):
  for i, name in enumerate(("1.JPG", "2.jpeg", "x/3.Png", "4.webp", "5.BMP")):
    write(tmp_path / "a" / name, i)
  classes(tmp_path, b=5)
  dataset = f"folder:{tmp_path}"
  sizes = [
    sources.open_source(dataset, split).num_examples
    for split in ("train", "val")
  ]
  assert sizes == [8, 2]


PROGRAMS = (
  *("__MACOSX", "@eaDir", ".thumbnails", "$RECYCLE.BIN", "lost+found"),
  *("FOUND.001", "Network Trash Folder", "~snapshot"),
)


@pytest.mark.parametrize("split", ["", "train/", "train/cat/"])
def test_folders_that_programs_make_are_left_out_and_said(split, tmp_path):
  for folder in ("train", "val"):
    classes(tmp_path / folder, cat=2, dog=2)
  for name in PROGRAMS:
    write(tmp_path / split / name / "0.png")
  opened = sources.open_source(f"folder:{tmp_path}", "train")
  assert opened.class_names == ("cat", "dog") and opened.num_examples == 4
  number = f"has {len(PROGRAMS)} files or folders that are not read"
  assert number in opened.note()
  assert "$RECYCLE.BIN" in opened.note()


def test_errors_name_what_is_wrong(tmp_path):
  def error(path, split="train"):
    with pytest.raises(ValueError) as info:
      sources.open_source(f"folder:{path}", split)
    return str(info.value)

  assert f"{tmp_path}/no is no folder; expected" in error(tmp_path / "no")
  assert "no class folders in" in error(tmp_path)
  write(tmp_path / "1.png")
  assert "no class folders, but with loose images in" in error(tmp_path)
  (tmp_path / "0.tar").touch()
  command = f"vit-jax prepare webdataset:{tmp_path} --name=NAME"
  assert command in error(tmp_path)
  (tmp_path / "0.tar").unlink()
  classes(tmp_path, a=2)
  assert "only one class folder, 'a', but with loose images" in error(tmp_path)
  (tmp_path / "b").mkdir()
  text = error(tmp_path)
  assert f"class folder {tmp_path}/b has no images; expected files" in text
  assert ".jpg, .jpeg, .jpe, .jfif, .png, .webp, .bmp, .gif, .tif" in text
  classes(tmp_path, b=2, c=2)
  text = error(tmp_path, "test")
  assert (
    "got split 'test', expected one of train (3 records), val (3 records)."
    in text
  )
  only = tmp_path / "only"
  classes(only / "train", a=2, b=2)
  assert f"but no split to score; expected {only}/val beside" in error(only)
  classes(only / "val", a=2, bb=2)
  assert f"class folder {only}/val/bb, expected a class of" in error(only)
  assert "Did you mean 'b'?" in error(only)
  classes(only / "Valid", a=2, b=2)
  assert (
    f"with the folders {only}/Valid and {only}/val, which mean the same split,"
    " 'val'; expected one of them." in error(only)
  )


@pytest.mark.parametrize(
  "layout, meant",
  [
    (("big/a", "big/b", "small/a"), "big"),  # classes one level too deep
    (("pets/Train/a", "pets/Train/b", "pets/Val/a"), "pets"),
    (("trainset/a", "trainset/b", "valset/a", "valset/b"), "trainset"),
    (("train/x/a", "train/x/b", "train/y/a", "val/x/a"), "train/x"),
  ],
)
def test_a_folder_too_high_is_refused_with_the_one_meant(
  tmp_path, layout, meant
):
  for path in layout:
    for i in range(3):
      write(tmp_path / path / f"{i}.png", i)
  with pytest.raises(ValueError) as info:
    sources.open_source(f"folder:{tmp_path}", "train")
  text = str(info.value)
  assert "have no images of their own, only folders" in text or (
    "with only one class folder" in text
  )
  assert text.endswith(f" Did you mean folder:{tmp_path / meant}?")


def damaged(root, num_good, num_bad):
  """A data set whose class b has files cut in half, or empty."""
  classes(root, a=num_good)
  for i in range(num_bad):
    path = root / "b" / f"bad{i}.jpg"
    write(path, i)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if i % 2 else b"")
  write(root / "b" / "good.png")
  return sources.open_source(f"folder:{root}", "train+val")


@pytest.mark.slow
def test_undecodable_images_are_masked_named_once_and_counted(tmp_path, caplog):
  source = damaged(tmp_path, 20, 3)
  is_bad = np.array(["bad" in path for path in source.paths])
  with caplog.at_level(logging.WARNING):
    batches = pipeline.train_batches(source, OPS, batch_size=8, seed=0)
    seen = [next(batches) for _ in range(9)]  # Three epochs.
  for batch in seen:
    np.testing.assert_array_equal(batch["mask"], ~is_bad[batch["index"]])
    assert not batch["image"][~batch["mask"]].any()
    assert batch["image"][batch["mask"]].any((1, 2, 3)).all()
  messages = [
    r.getMessage() for r in caplog.records if "Cannot use" in r.getMessage()
  ]
  assert len(messages) == 3
  for path, bad in zip(source.paths, is_bad, strict=True):
    assert sum(path in message for message in messages) == bad
  assert "(number 3 of up to 10)" in messages[-1]
  # No row moves: the others are those of an evaluation as well.
  caplog.clear()
  (scored,) = pipeline.eval_batches(source, OPS, batch_size=24)
  assert not [r for r in caplog.records if "Cannot use" in r.getMessage()]
  np.testing.assert_array_equal(scored["mask"], ~is_bad)
  np.testing.assert_array_equal(scored["index"], np.arange(24))
  np.testing.assert_array_equal(
    scored["label"][~is_bad], source.labels()[~is_bad]
  )


def test_too_many_undecodable_images_are_an_error(tmp_path):
  source = damaged(tmp_path, 5, 11)
  with pytest.raises(
    ValueError,
    match=r"got 11 records of 'folder:.*' \('train\+val'\) that cannot be"
    r" used, among them .*bad.*expected at most 10 \(1%, or ten\)",
  ):
    list(pipeline.eval_batches(source, OPS, batch_size=20))


def test_a_relative_path_and_the_home_folder(tmp_path, monkeypatch):
  classes(tmp_path / "x", a=2, b=2)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path))
  for path in ("x", "~/x", f"{tmp_path}/x/"):
    assert sources.open_source(f"folder:{path}", "train").num_examples == 2
