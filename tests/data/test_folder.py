"""Folders of images: splits, copies, groups, and what is said or refused."""

import itertools
import os
import pathlib
import shutil
import tempfile

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import scored
from PIL import Image

from vit_jax import run_checks
from vit_jax.data import copies, sources
from vit_jax.data.splits import SPLIT_FOLDERS
from vit_jax.experiment import Experiment
from vit_jax.finetune.data.imports import KINDS, Options
from vit_jax.paths import with_absolute_folder


def tree(root, *names):
  """Writes files: a*3 is a folder of three, b/ an empty one.

  Their bytes differ, and are no image: none is opened here.
  """
  for name in names:
    folder, _, count = name.partition("*")
    numbered = [f"{folder}/{i}.png" for i in range(int(count or 0))]
    for file in numbered or [name]:
      (root / file).parent.mkdir(parents=True, exist_ok=True)
      if file.endswith("/"):
        (root / file).mkdir()
      else:
        (root / file).write_text(file)
  return f"folder:{root}"


def names(source):
  return ["/".join(pathlib.Path(p).parts[-2:]) for p in source.paths]


def test_splits_are_made_by_class_and_for_good(tmp_path):
  dataset = tree(tmp_path / "pets", "cat*20", "dog*14", "owl*1")
  train = sources.open_source(dataset, "train")
  val = sources.open_source(dataset, "val")
  assert train.class_names == ("cat", "dog", "owl") and train.num_classes == 3
  # A tenth of each class, rounded; none of a class with one image.
  assert np.bincount(val.labels(), minlength=3).tolist() == [2, 1, 0]
  # A golden choice: no version, machine or run may draw another one.
  assert sorted(names(val)) == ["cat/10.png", "cat/16.png", "dog/10.png"]
  # Elsewhere, and with files added to another class, cats stay as they are.
  other = sources.open_source(tree(tmp_path / "b", "cat*20", "cow*30"), "val")
  is_cat = lambda s: {n for n in names(s) if n.startswith("cat")}
  assert is_cat(other) == is_cat(val)
  # Slices are those of the split.
  head, rest = (
    sources.open_source(dataset, f"train[{part}]") for part in (":50%", "50%:")
  )
  assert head.paths + rest.paths == train.paths
  both = sources.open_source(dataset, "val+train[-3:]")
  assert both.paths == val.paths + train.paths[-3:]
  labels = [int(r["label"]) for r in train.records()]
  assert labels == train.labels().tolist()
  assert labels == ["cdo".index(n[0]) for n in names(train)]


@settings(derandomize=True, deadline=None, max_examples=10)
@given(
  counts=st.lists(st.integers(1, 40), min_size=2, max_size=4),
  copied=st.integers(0, 9),
  of_a_group=st.integers(0, 3),
  share=st.sampled_from(["50%", "80%", "90%"]),
)
def test_splits_divide_all_images(counts, copied, of_a_group, share):
  """Copies, and images of a group, are on one side; other classes on each."""
  counts[0] += 9  # three groups
  bytes_of, group_of = {}, {}
  with tempfile.TemporaryDirectory() as folder:
    for name, count in zip("abcd", counts, strict=False):
      os.mkdir(f"{folder}/{name}")
      for i in range(count):
        group = i // max(1, of_a_group)  # of images of all classes
        path = f"{folder}/{name}/p{group}_{i}.png"
        bytes_of[path] = f"{i % 4}" if i < copied else f"{name}{i}"
        group_of[path] = group if of_a_group else path
        pathlib.Path(path).write_text(bytes_of[path])
    dataset = f"folder:{folder}" + r"?group=(p\d+)_" * (of_a_group > 0)
    opened = sources.Sources()
    splits = opened.train_val_test(dataset, share)
    parts = [opened.open(dataset, split) for split in splits]
  paths = [path for part in parts for path in part.paths]
  assert sorted(paths) == sorted(bytes_of)
  for part, other in itertools.combinations(parts, 2):
    for key_of in (bytes_of, group_of):
      keys = {key_of[path] for path in part.paths}
      assert keys.isdisjoint(key_of[path] for path in other.paths)
  if of_a_group or copied > 1:
    return
  rows = [np.bincount(part.labels(), minlength=len(counts)) for part in parts]
  for count, train, val, test in zip(counts, *rows, strict=True):
    # A tenth, then a share of the rest; of two images, none is for choices.
    assert abs(test - count / 10) <= 1 and (test > 0) == (count > 1)
    held_out = (train + val) * (1 - float(share[:-1]) / 100)
    assert abs(val - held_out) <= 1 and (val > 0) == (count > 2) and train > 0


# Copies, and images of a group.


def test_files_are_the_same_by_all_their_bytes(tmp_path):
  end = bytes(5000)  # more than is compared first
  contents = dict(a=b"1" + end, b=b"2" + end, c=b"1" + end, d=b"1" + end + b"0")
  contents |= dict(e=b"", f=b"", x=b"2", y=b"2")  # empty ones are broken
  for name, data in contents.items():
    (tmp_path / name).write_bytes(data)
  paths = [str(tmp_path / name) for name in [*contents, "missing"]]
  of = {path[-1]: first[-1] for path, first in copies.find(paths).items()}
  assert of == {"a": "a", "c": "a", "x": "x", "y": "x"}
  assert copies.find([]) == {}


def test_copies_and_groups_are_said(tmp_path):
  dataset = tree(tmp_path / "x", "a*8", "b*8")
  for path in tmp_path.glob("x/*/[1357].png"):
    shutil.copy(path, path.with_name(f"{path.stem} (1).png"))
  shutil.copy(tmp_path / "x/a/0.png", tmp_path / "x/b/other.png")
  source = sources.open_source(dataset, "train")
  assert "9 files with the bytes" in source.note()
  assert "(1 of them in another class)" in source.note()
  # Moved folders have the same splits.
  shutil.copytree(tmp_path / "x", tmp_path / "y")
  moved = sources.open_source(f"folder:{tmp_path}/y", "train")
  assert names(moved) == names(source)
  grouped = sources.open_source(dataset + "?group=^.", "train")
  assert "9 groups" in grouped.note()
  # Of splits that are given, copies are counted.
  dataset = tree(tmp_path / "z", "train/a*4", "train/b*4", "val/a*2", "val/b*2")
  shutil.copy(tmp_path / "z/train/a/0.png", tmp_path / "z/val/a/0.png")
  note = sources.open_source(dataset, "train").note()
  assert "1 of 4 images of 'val' are also in 'train', byte for byte" in note
  folder = KINDS["folder:"](f"{tmp_path}/z", Options())
  assert folder.remarks == (note,)


# Names of splits and files.


def test_splits_by_any_usual_name(tmp_path):
  files = ("TRAINING/a*3", "TRAINING/b*4", "valid/a*1", "valid/b*1")
  dataset = tree(tmp_path, *files)
  source = sources.open_source(dataset, "train[:3]+Training[3:]")
  assert source.num_examples == 7 and source.class_names == ("a", "b")
  for name in SPLIT_FOLDERS["val"]:
    source = sources.open_source(dataset, f"{name}[:100%]")
    assert source.num_examples == 2 and "/valid/" in source.paths[0]
  # A class may be called train.
  dataset = tree(tmp_path / "classes", "bus*5", "train*5", "test*5")
  source = sources.open_source(dataset, "train")
  assert source.class_names == ("bus", "test", "train")


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
  # A test split alone stays the test.
  shutil.rmtree(tmp_path / "val")
  splits = sources.Sources().train_val_test(dataset, "80%")
  assert splits == ("train[:67%]", "train[67%:]", "test")


PROGRAMS = (
  *("__MACOSX", "@eaDir", ".thumbnails", "$RECYCLE.BIN", "lost+found"),
  *("FOUND.001", "Network Trash Folder", "~snapshot"),
)


def test_what_is_a_record_of_a_folder(tmp_path):
  files = ("1.JPG", "2.jpeg", "x/3.Png", "album.jpg/5.BMP")
  hidden = ("._1.png", ".hidden.jpg", "notes.txt", ".cache/3.png")
  images = [f"train/cat/{name}" for name in (*files, *hidden)]
  others = ("train/dog*2", "val/cat*2", "val/dog*2")
  made = [f"{w}{name}/0.png" for w in ("", "train/cat/") for name in PROGRAMS]
  dataset = tree(tmp_path, *images, *others, *made)
  (tmp_path / "train/cat/loop").symlink_to(tmp_path / "train/cat")
  opened = sources.open_source(dataset, "train")
  assert opened.class_names == ("cat", "dog") and opened.num_examples == 6
  assert f"{2 * len(PROGRAMS) + 4} files or folders" in opened.note()


def test_a_folder_that_cannot_be_opened(tmp_path, monkeypatch):
  dataset = tree(tmp_path, "a/shut/1.png", "b*3")
  scandir = os.scandir

  def refuses(path):
    if str(path).endswith("shut"):
      raise PermissionError(13, "Permission denied", str(path))
    return scandir(path)

  monkeypatch.setattr(os, "scandir", refuses)
  with pytest.raises(ValueError, match="shut: cannot be opened"):
    sources.open_source(dataset, "train")


# Files, what follows the path, and what is said.
SAID = [
  (["cat*2", "nan*2"], "", "a class 'nan'"),
  (["train_im*3", "test_im*3", "train.csv"], "", "train.csv, which is not"),
  (["a/x*1", "a/y*1", "b/z*1", "c*1"], "", "a/x, a/y, b/z."),
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


# Images without classes.


def test_all_images_below_a_folder_have_no_class(tmp_path):
  dataset = tree(tmp_path, "b.png", "deep/er/a.JPG", "c.png", "notes.txt")
  dataset = dataset.replace("folder:", "images:")
  source = sources.open_source(dataset, "train")
  assert (source.num_examples, source.num_classes) == (3, 0)
  assert "notes.txt" in source.note()
  records = list(source.records().as_numpy_iterator())
  files = [r["image"].decode() for r in records]
  assert files == ["b.png", "c.png", "deep/er/a.JPG"]
  assert {int(r["label"]) for r in records} == {-1}
  assert sources.open_source(dataset, "train[1:]").num_examples == 2
  assert with_absolute_folder("images:/a/../b/") == "images:/b"
  with pytest.raises(ValueError, match="val"):
    sources.open_source(dataset, "val")
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match="without images"):
    sources.open_source(f"images:{tmp_path / 'empty'}", "train")
  Image.new("RGB", (9, 9)).save(tmp_path / "empty" / "1.png")
  source = sources.open_source(f"images:{tmp_path / 'empty'}", "train")
  assert scored(source, "decode|resize(8)")["mask"].all()
  fake = sources.open_source("images:/nowhere", "train[:4]", fake=True)
  assert fake.num_classes == 0 and (fake.labels() == -1).all()


LOGITS = {"kind": "distillation", "loss": "logits", "teacher": "x"}


@pytest.mark.parametrize(
  "objective, num_classes, option",
  [
    ({"kind": "classification"}, None, "config.objective.kind"),
    ({"kind": "mae"}, None, None),
    (LOGITS, None, "config.num_classes"),
    (LOGITS, 5, None),
    (LOGITS | {"loss": "soft"}, 5, "config.objective.kind"),
  ],
)
def test_who_learns_from_images_without_classes(objective, num_classes, option):
  changes = dict(num_classes=num_classes, objective=objective, fake_data=True)
  config = tiny.config(data__dataset="images:/x", **changes)
  errors = run_checks.length_and_head_errors(Experiment(config))
  assert [e.split(":")[0] for e in errors] == [option] * (option is not None)
