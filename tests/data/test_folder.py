"""Folders of images: splits, copies, groups, and what is said or refused."""

import itertools
import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import copies, sources
from vit_jax.data.splits import SPLIT_FOLDERS
from vit_jax.finetune.data.imports import KINDS, Options


def write(path, number=0):
  path.parent.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(number)
  pixels = rng.integers(0, 256, (12, 10, 3), np.uint8)
  Image.fromarray(pixels).save(path)


def tree(root, *names):
  """Writes files: a*3 is a folder of three images, b/ an empty one."""
  for number, name in enumerate(names):
    path, _, count = name.partition("*")
    if count:
      for i in range(int(count)):
        write(root / path / f"{i}.png", 1000 * number + i)
    elif name.endswith("/"):
      (root / name).mkdir()
    elif name.endswith(".csv"):
      (root / name).touch()
    else:
      write(root / name, 1000 * number)
  return f"folder:{root}"


def names(source):
  return ["/".join(pathlib.Path(p).parts[-2:]) for p in source.paths]


def test_splits_are_made_by_class_and_for_good(tmp_path):
  dataset = tree(tmp_path / "pets", "cat*20", "dog*14", "owl*1")
  train = sources.open_source(dataset, "train")
  val = sources.open_source(dataset, "val")
  assert train.class_names == ("cat", "dog", "owl") and train.num_classes == 3
  assert set(names(train)).isdisjoint(names(val))
  assert train.num_examples + val.num_examples == 35
  # A tenth of each class, rounded; none of a class with one image.
  assert np.bincount(val.labels(), minlength=3).tolist() == [2, 1, 0]
  # A golden choice: no version, machine or run may draw another one.
  assert sorted(names(val)) == ["cat/10.png", "cat/16.png", "dog/10.png"]
  # Elsewhere, and with files added to another class, cats stay as they are.
  other = sources.open_source(tree(tmp_path / "b", "cat*20", "cow*30"), "val")
  is_cat = lambda s: {n for n in names(s) if n.startswith("cat")}
  assert is_cat(other) == is_cat(val)


def test_slices_are_those_of_a_split_and_hold_all_classes(tmp_path):
  dataset = tree(tmp_path, "a*20", "b*20", "c*20")
  train = sources.open_source(dataset, "train")
  head = sources.open_source(dataset, "train[:50%]")
  rest = sources.open_source(dataset, "train[50%:]")
  assert head.paths + rest.paths == train.paths and head.num_examples == 27
  assert set(head.labels()) == set(rest.labels()) == {0, 1, 2}
  both = sources.open_source(dataset, "val+train[-3:]")
  val = sources.open_source(dataset, "val")
  assert both.paths == val.paths + train.paths[-3:]
  labels = [int(r["label"]) for r in train.records()]
  assert labels == train.labels().tolist()
  assert labels == ["abc".index(n[0]) for n in names(train)]


@pytest.mark.parametrize("share, of_big", [("80%", 11), ("90%", 5)])
def test_a_cut_leaves_every_class_on_both_sides(tmp_path, share, of_big):
  few = [f"c{i}*5" for i in range(9)]
  dataset = tree(tmp_path, *few, "big*60", "one*1", "two*2")
  opened = sources.Sources()
  train, val, test = opened.train_val_test(dataset, share)
  by_split = [opened.open(dataset, name) for name in (train, val, test)]
  whole = set(opened.open(dataset, "train").paths)
  assert set(by_split[0].paths) | set(by_split[1].paths) == whole
  rows = [np.bincount(s.labels(), minlength=12).tolist() for s in by_split]
  classes = by_split[0].class_names
  of = dict(zip(classes, zip(*rows, strict=True), strict=True))
  assert all(of[f"c{i}"] == (3, 1, 1) for i in range(9))
  # A tenth of 60 is the test; then a share of 54, rounded.
  assert of["big"] == (54 - of_big, of_big, 6)
  assert of["one"] == (1, 0, 0) and of["two"] == (1, 0, 1)


# Copies, and images of a group.


def test_files_are_the_same_by_all_their_bytes(tmp_path):
  end = bytes(5000)  # more than is compared first
  contents = {
    "a": b"1" + end,
    "b": b"2" + end,
    "c": b"1" + end,
    "d": b"1" + end + b"0",
    "e": b"",
    "f": b"",
    "g": b"1" + end,
    "x": b"2",
    "y": b"2",
  }
  for name, data in contents.items():
    (tmp_path / name).write_bytes(data)
  paths = [str(tmp_path / name) for name in [*contents, "missing"]]
  same = copies.find(paths)
  of = {path[-1]: first[-1] for path, first in same.items()}
  assert of == {"a": "a", "c": "a", "g": "a", "x": "x", "y": "x"}
  assert copies.find([]) == {}


def test_copies_are_on_one_side_of_every_split(tmp_path):
  tree(tmp_path, "a*40", "b*40")
  for path in tmp_path.glob("*/*[13579].png"):
    shutil.copy(path, path.with_name(f"{path.stem} (1).png"))
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
  note = by_split[0].note()
  assert "41 files with the bytes" in note and "are also in" not in note
  assert "(1 of them in another class)" in note
  # Moved folders have the same splits.
  moved = shutil.copytree(tmp_path, tmp_path.with_name("moved"))
  again = opened.train_val_test(f"folder:{moved}", "80%")
  assert again == splits
  for source in by_split:
    other = sources.open_source(f"folder:{moved}", source.split)
    assert names(other) == names(source)


def test_copies_in_given_splits_are_counted(tmp_path):
  dataset = tree(tmp_path, "train/a*4", "train/b*4", "val/a*2", "val/b*2")
  shutil.copy(tmp_path / "train/a/0.png", tmp_path / "val/a/0.png")
  note = sources.open_source(dataset, "train").note()
  assert "1 of 4 images of 'val' are also in 'train', byte for byte" in note
  assert "1 files with the bytes of another" in note
  assert KINDS["folder:"](str(tmp_path), Options()).remarks == (note,)


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
  patients = []
  for split in opened.train_val_test(dataset, "80%"):
    source = opened.inspect(dataset, split)
    patients.append({pathlib.Path(path).name[:3] for path in source.paths})
    assert {*source.labels()} == {0, 1} and "12 groups" in source.note()
  whole = set().union(*patients)
  assert all(patients) and sum(map(len, patients)) == len(whole)
  (together,) = (names for names in patients if "p00" in names)
  assert "p03" in together


# Names of splits and files.


@pytest.mark.parametrize(
  "train, held_out, split",
  [("TRAINING", "valid", "val"), ("Train", "Testing", "test")],
)
def test_splits_by_any_usual_name(tmp_path, train, held_out, split):
  classes = {f"{train}/a*3", f"{train}/b*4"}
  dataset = tree(tmp_path, *classes, f"{held_out}/a*1", f"{held_out}/b*1")
  source = sources.open_source(dataset, "train[:3]+Training[3:]")
  assert source.num_examples == 7 and source.class_names == ("a", "b")
  for name in (split, held_out, *SPLIT_FOLDERS[split]):
    source = sources.open_source(dataset, f"{name}[:100%]")
    assert source.num_examples == 2 and f"/{held_out}/" in source.paths[0]


def test_a_class_may_be_called_train(tmp_path):
  dataset = tree(tmp_path, "bus*5", "train*5", "test*5")
  source = sources.open_source(dataset, "train")
  assert source.class_names == ("bus", "test", "train")
  # A made split under another name.
  assert sources.open_source(dataset, "validation").num_examples == 3


def test_one_level_below_all_classes_is_read(tmp_path):
  """Tiny ImageNet's `images`; its val has no classes."""
  folders = ("train/n1/images*3", "train/n2/images*3", "val/images*3")
  dataset = tree(tmp_path, *folders, "test/n1*1", "test/n2*1")
  source = sources.open_source(dataset, "train")
  assert source.class_names == ("n1", "n2") and source.num_examples == 6
  assert not source.note()
  # The val is not replaced by a part of `train`.
  splits = sources.Sources().train_val_test(dataset, "90%")
  assert splits == ("train", "val", "test")


def test_suffixes_in_any_case_and_deeper_folders_count(tmp_path):
  files = ("1.JPG", "2.jpeg", "x/3.Png", "4.webp", "5.BMP")
  dataset = tree(tmp_path, *(f"a/{name}" for name in files), "b*5")
  sizes = [
    sources.open_source(dataset, split).num_examples
    for split in ("train", "val")
  ]
  assert sizes == [8, 2]


PROGRAMS = (
  *("__MACOSX", "@eaDir", ".thumbnails", "$RECYCLE.BIN", "lost+found"),
  *("FOUND.001", "Network Trash Folder", "~snapshot"),
)


@pytest.mark.parametrize("where", ["", "train/cat/"])
def test_folders_that_programs_make_are_left_out_and_said(where, tmp_path):
  of_splits = [f"{s}/{c}*2" for s in ("train", "val") for c in ("cat", "dog")]
  made = [f"{where}{name}/0.png" for name in PROGRAMS]
  opened = sources.open_source(tree(tmp_path, *of_splits, *made), "train")
  assert opened.class_names == ("cat", "dog") and opened.num_examples == 4
  assert f"{len(PROGRAMS)} files or folders" in opened.note()


# What is said: files, what follows the path, and key words.

SAID = [
  (["cat*2", "nan*2"], "", "a class 'nan'"),
  (["train_im*3", "test_im*3", "train.csv"], "", "train.csv, which is not"),
  (
    ["a/airfield*1", "a/alley*1", "b/bar*1", "c*1"],
    "",
    "a/airfield, a/alley, b/bar.",
  ),
  (
    ["train/a*4", "train/b*4", "val/a*2", "val/b*2"],
    "?group=\\d+",
    "4 of 4 images of 'val'",
  ),
]


@pytest.mark.parametrize("files, query, words", SAID)
def test_what_is_said_of_a_folder(files, query, words, tmp_path):
  dataset = tree(tmp_path, *files)
  assert words in sources.open_source(dataset + query, "train").note()


AB = ["train/a*2", "train/b*2"]
# Files, what follows the path, the split, and what the error names.
REFUSED = [
  ([], "/no", "train", "/no is no folder"),
  (["1.png"], "", "train", "no class folders"),
  (["a*2", "b/"], "", "train", "/b, expected files"),
  (["a*2", "b*2", "c*2"], "", "test", "train .3 records., val .3"),
  (AB, "", "train", "/train alone, .*/val beside"),
  ([*AB, "val/a*2", "val/bb*2"], "", "val", "/val/bb, expected a class"),
  ([*AB, "val/a*2", "Valid/a*2"], "", "val", "/Valid and .*/val"),
  (["images*3", "test.csv", "train.csv"], "", "train", "path=.*train.csv"),
  # Classes one level too deep.
  (["big/a*3", "big/b*3", "small/a*3"], "", "train", "only folders"),
  (["x/Train/a*3", "x/Train/b*3", "x/Val/a*3"], "", "train", "two or more"),
  ([*AB, "val/images*3"], "", "val", "two or more classes"),
  (["a*4", "b*4"], "?group=x", "train", "'x', which is not in '0.png'"),
  (["a*4", "b*4"], "?group=(", "train", "regular expression"),
  (["a*2", "b*2"], "?group=\\d", "train", "2 in a class, expected three"),
]


@pytest.mark.parametrize("files, after, split, words", REFUSED)
def test_folders_that_are_refused(files, after, split, words, tmp_path):
  dataset = tree(tmp_path, *files)
  with pytest.raises(ValueError, match=words):
    sources.open_source(dataset + after, split)
