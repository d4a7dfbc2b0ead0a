"""Folders of images: splits, every error, images that cannot be decoded."""

import itertools
import logging
import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import listed, pipeline, sources
from vit_jax.data.splits import SPLIT_FOLDERS
from vit_jax.finetune.data.imports import KINDS, Options

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


def test_a_cut_leaves_every_class_on_both_sides(tmp_path):
  counts = {f"c{i:02}": 5 for i in range(30)} | {"big": 60, "one": 1, "two": 2}
  for name, count in counts.items():
    for i in range(count):
      write(tmp_path / name / f"{i}.png", hash_of(name, i))
  dataset = f"folder:{tmp_path}"
  opened = sources.Sources()
  for share, of_big in (("80%", 11), ("90%", 5)):
    train, val, test = opened.train_val_test(dataset, share)
    by_split = [opened.open(dataset, name) for name in (train, val, test)]
    whole = set(opened.open(dataset, "train").paths)
    assert set(by_split[0].paths) | set(by_split[1].paths) == whole
    classes = by_split[0].class_names
    rows = [np.bincount(s.labels(), minlength=33).tolist() for s in by_split]
    of = dict(zip(classes, zip(*rows, strict=True), strict=True))
    assert all(of[f"c{i:02}"] == (3, 1, 1) for i in range(30))
    # A tenth of 60 is the test; then a share of 54, rounded.
    assert of["big"] == (54 - of_big, of_big, 6)
    assert of["one"] == (1, 0, 0) and of["two"] == (1, 0, 1)


def hash_of(name, i):
  return int.from_bytes(name.encode()) * 1000 + i


def test_copies_are_on_one_side_of_every_split(tmp_path):
  for name in "ab":
    for i in range(40):
      path = tmp_path / name / f"{i}.png"
      write(path, hash_of(name, i))
      if i % 2:
        shutil.copy(path, path.with_name(f"{i} (1).png"))
  shutil.copy(tmp_path / "a/0.png", tmp_path / "b/other.png")
  (tmp_path / "a/empty.jpg").touch()  # are broken, and no copies
  (tmp_path / "b/empty.jpg").touch()
  dataset = f"folder:{tmp_path}"
  opened = sources.Sources()
  splits = opened.train_val_test(dataset, "80%")
  by_split = [opened.open(dataset, split) for split in splits]
  contents = [{pathlib.Path(p).read_bytes() for p in s.paths} for s in by_split]
  for a, b in itertools.combinations(contents, 2):
    assert not (a & b) - {b""}
  assert sum(s.num_examples for s in by_split) == 123
  assert "41 files with the bytes" in by_split[0].note()
  assert "(1 of them in another class)" in by_split[0].note()
  assert "are also in" not in by_split[0].note()
  # Moved folders have the same splits.
  moved = shutil.copytree(tmp_path, tmp_path.with_name("moved"))
  again = opened.train_val_test(f"folder:{moved}", "80%")
  assert again == splits
  for source in by_split:
    other = sources.open_source(f"folder:{moved}", source.split)
    assert names(other) == names(source)


def test_copies_in_given_splits_are_counted(tmp_path):
  classes(tmp_path / "train", a=4, b=4)
  classes(tmp_path / "val", a=6)
  dataset = classes(tmp_path / "val", b=1).removesuffix("/val")
  note = sources.open_source(dataset, "train").note()
  assert "5 of 7 images of 'val' are also in 'train', byte for byte" in note
  assert "9 files with the bytes of another" in note
  path = dataset.removeprefix("folder:")
  assert KINDS["folder:"](path, Options()).remarks == (note,)


def test_classes_of_one_image_alone(tmp_path):
  classes(tmp_path / "some", a=9)
  for i in range(9):
    for name in ("some/b", "none/a", "none/b"):
      write(tmp_path / name / f"{i}.png", 99)
  val = sources.open_source(f"folder:{tmp_path}/some", "val")
  assert val.labels().tolist() == [0] and "are also in" not in val.note()
  # Without two different images of any class, copies are divided.
  val = sources.open_source(f"folder:{tmp_path}/none", "val")
  assert val.labels().tolist() == [0, 1]
  assert "2 of 2 images of 'val' are also in 'train'" in val.note()


def test_large_folders_are_not_searched_for_copies(tmp_path, monkeypatch):
  monkeypatch.setattr(listed, "MAX_FILES", 19)
  dataset = classes(tmp_path, a=10, b=10)
  note = sources.open_source(dataset, "train").note()
  assert "20 files, too many to look for files of the same bytes" in note


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
    r" \(2 records\), test \(3 records\)\.",
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


def test_one_level_below_all_classes_is_read(tmp_path):
  """Tiny ImageNet's `images`; its val has no classes."""
  for i in range(3):
    for name in ("n1", "n2"):
      write(tmp_path / "train" / name / "images" / f"{i}.png", hash_of(name, i))
    write(tmp_path / "val" / "images" / f"{i}.png", 10 + i)
  source = sources.open_source(f"folder:{tmp_path}", "train")
  assert source.class_names == ("n1", "n2") and source.num_examples == 6
  assert not source.note()
  with pytest.raises(ValueError, match="of two or more classes"):
    sources.open_source(f"folder:{tmp_path}", "val")
  # It is not replaced by a part of `train`.
  classes(tmp_path / "test", n1=1, n2=1)
  splits = sources.Sources().train_val_test(f"folder:{tmp_path}", "90%")
  assert splits == ("train", "val", "test")


def test_images_of_a_group_are_on_one_side(tmp_path):
  """Patients have images of both classes; some files are copies, too."""
  for name in ("healthy", "ill"):
    for patient in range(12):
      for i in range(4):
        path = tmp_path / name / f"p{patient:02}_{i}.png"
        write(path, 100 * patient + i + 50 * (name == "ill"))
  write(tmp_path / "ill/p03_copy.png", 0)  # of patient 0
  dataset = f"folder:{tmp_path}?group=(p\\d+)_"
  opened = sources.Sources()
  parts = opened.train_val_test(dataset, "80%")
  patients = []
  for split in parts:
    source = opened.inspect(dataset, split)
    patients.append({pathlib.Path(path).name[:3] for path in source.paths})
    assert {*source.labels()} == {0, 1} and "12 groups" in source.note()
  assert all(patients) and sum(map(len, patients)) == len(
    set().union(*patients)
  )
  (together,) = (names for names in patients if "p00" in names)
  assert "p03" in together
  # Without the pattern they are on both sides.
  plain = opened.inspect(f"folder:{tmp_path}", "val").paths
  others = opened.inspect(f"folder:{tmp_path}", "train").paths
  of = lambda paths: {pathlib.Path(path).name[:3] for path in paths}
  assert of(plain) & of(others)
  for pattern, message in (
    ("x", "'x', which is not in 'p00_0.png'"),
    ("(", "a regular expression"),
    ("p0|p1", "2 in a class, expected three"),
  ):
    with pytest.raises(ValueError, match=message):
      sources.open_source(f"folder:{tmp_path}?group={pattern}", "train")


def test_groups_in_given_splits_are_counted(tmp_path):
  classes(tmp_path / "train", a=4, b=4)
  classes(tmp_path / "val", a=2, b=2)
  source = sources.open_source(f"folder:{tmp_path}?group=\\d+", "train")
  assert "4 of 4 images of 'val' are also in 'train', by their" in source.note()


def test_classes_that_stand_for_missing_labels_are_said(tmp_path):
  note = sources.open_source(classes(tmp_path, cat=2, nan=2), "train").note()
  assert "a class 'nan', which may stand for a missing label" in note


def test_a_folder_beside_its_labels_names_them(tmp_path):
  classes(tmp_path, images=3)
  write(tmp_path / "0.png")
  (tmp_path / "labels.csv").touch()
  with pytest.raises(ValueError, match="1 loose .*path=.*labels.csv"):
    sources.open_source(f"folder:{tmp_path}", "train")


def test_tables_beside_class_folders_are_said(tmp_path):
  folder = classes(tmp_path, train_images=3, test_images=3)
  assert "csv" not in sources.open_source(folder, "train").note()
  (tmp_path / "train.csv").touch()
  note = sources.open_source(folder, "train").note()
  assert "train.csv, which is not read" in note


def test_sub_folders_of_classes_are_said(tmp_path):
  for i, name in enumerate(("a/airfield", "a/alley", "b/bar", "c")):
    write(tmp_path / name / "0.png", i)
  source = sources.open_source(f"folder:{tmp_path}", "train")
  assert source.class_names == ("a", "b", "c")
  assert "sub-folders of its class folders" in source.note()
  assert "a/airfield, a/alley, b/bar." in source.note()


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
  for of_split in ("train", "val"):
    classes(tmp_path / of_split, cat=2, dog=2)
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

  assert f"{tmp_path}/no is no folder" in error(tmp_path / "no")
  write(tmp_path / "1.png")
  assert "no class folders in" in error(tmp_path)
  classes(tmp_path, a=2)
  assert "the class folders ['a'] in" in error(tmp_path)
  (tmp_path / "b").mkdir()
  text = error(tmp_path)
  assert f"such as {tmp_path}/b, expected files" in text
  assert ".jpg, .jpeg, .jpe, .jfif, .png, .webp, .bmp, .gif, .tif" in text
  classes(tmp_path, b=2, c=2)
  text = error(tmp_path, "test")
  assert (
    "got split 'test', expected one of train (3 records), val (3 records)."
    in text
  )
  only = tmp_path / "only"
  classes(only / "train", a=2, b=2)
  assert f"with {only}/train alone, expected {only}/val beside" in error(only)
  classes(only / "val", a=2, bb=2)
  text = error(only, "val")
  assert f"{only}/val/bb, expected a class of" in text
  classes(only / "Valid", a=2, b=2)
  text = f"with {only}/Valid and {only}/val, expected one folder"
  assert text in error(only)


@pytest.mark.parametrize(
  "layout",
  [
    ("big/a", "big/b", "small/a"),  # classes one level too deep
    ("pets/Train/a", "pets/Train/b", "pets/Val/a"),
    ("trainset/a", "trainset/b", "valset/a", "valset/b"),
    ("train/x/a", "train/x/b", "train/y/a", "val/x/a"),
  ],
)
def test_a_folder_too_high_is_refused(tmp_path, layout):
  for path in layout:
    for i in range(3):
      write(tmp_path / path / f"{i}.png", i)
  with pytest.raises(ValueError, match="only folders|two or more classes"):
    sources.open_source(f"folder:{tmp_path}", "train")


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
