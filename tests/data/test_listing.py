"""What an import finds: splits, classes, columns, and errors of a source."""

import doctest
import gzip
import io
import os
import tarfile

import pyarrow
import pytest
from importable import (
  NAMES,
  SPLITS,
  add,
  encoded,
  images,
  write_webdataset,
)
from pyarrow import parquet

from vit_jax.finetune.data.imports import (
  KINDS,
  files,
  hugging_face,
  listing,
)
from vit_jax.finetune.data.imports.listing import Options


def test_the_examples():
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
  result = KINDS["webdataset:"](source, Options())
  entries = [*result.splits["train"].entries()]
  assert {e.image for e in entries} == {image for image, _ in SPLITS["train"]}


def test_tars_with_errors(tmp_path):
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
  result = KINDS["webdataset:"](str(tmp_path), Options())
  assert result.class_names == ("0", "1", "2")
  entries = list(result.splits["train"].entries())
  assert [e.image for e in entries[:3]] == [image for image, _ in good]
  assert [e.label for e in entries[:3]] == [2, 2, 2]
  errors = {e.key: e.error for e in entries if e.error}
  assert errors["0.tar/3"] == "has no label"
  assert errors["0.tar/4"].startswith("has 0 images")
  assert errors["0.tar/5"].startswith("has 2 images among a.jpg, b.jpg, cls")
  assert errors["0.tar/0"] == "has the name of an earlier record"
  assert errors["1.tar"].startswith("is broken after 1 records: it is cut off")
  assert errors["3.tar"].startswith("is broken after 1 records: unexpected end")
  assert "is broken after 0 records" in errors["2.tar"]
  assert result.splits["train"].count == len(entries)


@pytest.mark.parametrize("mode", ["xz", "bz2"])
def test_tars_of_other_compressions_are_refused(mode, tmp_path):
  with tarfile.open(tmp_path / "x.tar", f"w:{mode}") as tar:
    add(tar, "1.jpg", encoded(1))
    add(tar, "1.cls", b"1")
  message = rf"got .* {tmp_path}/x\.tar is broken after 0 records"
  with pytest.raises(ValueError, match=message):
    KINDS["webdataset:"](str(tmp_path), Options())


def test_the_image_of_a_record_is_the_only_one_or_the_chosen_one(tmp_path):
  def read(**names):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
      for name, data in names.items():
        add(tar, f"BZh.{name.replace('_', '.')}", data)
      add(tar, "BZh.cls", b"0")
    return lambda image=None: [
      entry.error or entry.image
      for entry in KINDS["webdataset:"](str(tmp_path), Options(image=image))
      .splits["train"]
      .entries()
    ]

  # The name begins as a file compressed with bzip2.
  assert read(JPG=encoded(0), json=b"{}")() == [encoded(0)]
  several = read(seg_png=encoded(0), jpg=encoded(1))
  assert several("seg.png") == several(".SEG.png") == [encoded(0)]
  assert several("jpg") == [encoded(1)]
  for image, count in ((None, 2), ("gif", 0)):
    (error,) = several(image)
    assert error.startswith(f"has {count} images among seg.png, jpg, cls")


def test_names_with_dots_are_one_record_up_to_the_first_dot(tmp_path):
  """As in the format; their labels are not found, and no other is taken."""
  with tarfile.open(tmp_path / "x.tar", "w") as tar:
    for name in ("a", "2.5_x", "2.5_y"):
      add(tar, f"{name}.png", encoded(0))
      add(tar, f"{name}.cls", b"1")
  read = KINDS["webdataset:"](str(tmp_path), Options())
  assert [(e.key, e.label) for e in read.splits["train"].entries()] == [
    ("x.tar/a", 1),
    ("x.tar/2", -1),
  ]


# Labels, given names -> names of the classes, and the class of each label.
LABELS = {
  "names": ([b"b", "a ", None, ""], None, ("a", "b"), [1, 0, -1, -1]),
  "not all are numbers": (
    ["07", " 7\n", "cat"],
    None,
    ("07", "7", "cat"),
    [0, 1, 2],
  ),
  "numbers": ({3}, None, ("0", "1", "2", "3"), [3]),
  "negative": ([1, -1], None, ("0", "1"), [1, -1]),
  "zeros in front": (["00", "02", "-01"], None, ("0", "1", "2"), [0, 2, -1]),
  "given": (["01", b"00 "], ("x", "y"), ("x", "y"), [1, 0]),
  "names with a point": (
    ["1.0", 0.5],
    ("0.5", "1.0", "2.5"),
    ("0.5", "1.0", "2.5"),
    [1, 0],
  ),
  "no numbers": (["1_000", "2_0"], None, ("1_000", "2_0"), [0, 1]),
  "many digits": (["1" * 20, "2"], None, ("1" * 20, "2"), [0, 1]),
}


@pytest.mark.parametrize("labels, given, names, expected", LABELS.values())
def test_classes_of_labels(labels, given, names, expected):
  classes = listing.Classes(labels, given, "x")
  assert classes.names == names
  assert [classes.index(label) for label in labels] == expected


@pytest.mark.parametrize(
  "labels, given, message",
  [
    ([None, -1], None, "got x without any label"),
    ([0, 3], ("a", "b"), "got label 3 in x, expected 0 to 1"),
    (["c"], ("a", "b"), r"got the classes \['c'\] in x"),
    ([5, 70_000], None, "got labels up to 70,000 in x"),
    ([0], ("a", "a"), "got two classes named 'a'"),
    (["0.5", b"1"], ("0.5", "2"), r"got the classes \['1'\] in x"),
    (["0.5", b"1"], None, "got the label 0.5 in x, .* --classes.* --numbers"),
    ([1.0, None], None, "got the label 1.0 in x"),  # as pandas writes 1
    ([1e20, 1.0], None, "got the label 1e"),
    (["1", "nan"], None, "got the label nan in x"),
    (["a", "nan"], None, "got the label nan in x"),
  ],
)
def test_labels_that_are_no_classes(labels, given, message):
  with pytest.raises(ValueError, match=message):
    listing.Classes(labels, given, "x")


def write(kind, root, labels, image="image", label="label", **columns):
  """Writes images with these labels; lists of them in `a|b` in a CSV."""
  images = [encoded(i) for i in range(len(labels))]
  if kind == "parquet:":
    path = root / "train.parquet"
    records = {image: images, label: labels, **columns}
    parquet.write_table(pyarrow.table(records), path)
  elif kind == "hf:":
    datasets = pytest.importorskip("datasets")
    path = root / "saved"
    records = {image: [{"bytes": i} for i in images], label: labels, **columns}
    made = datasets.Dataset.from_dict(records)
    made.cast_column(image, datasets.Image()).save_to_disk(path)
  elif kind == "csv:":
    path = root / "train.csv"
    write_images(root, [f"{i}.jpg" for i in range(len(labels))])
    lines = [["file", label, *columns]]
    for i, value in enumerate(labels):
      if isinstance(value, list):
        value = "|".join(map(str, value))
      others = [str(column[i]) for column in columns.values()]
      lines.append([f"{i}.jpg", "" if value is None else str(value), *others])
    path.write_text("\n".join(map(",".join, lines)))
  else:
    path = root / "train.tar"
    with tarfile.open(path, "w") as tar:
      for i, value in enumerate(labels):
        add(tar, f"{i}.jpg", images[i])
        if value is not None:
          add(tar, f"{i}.cls", str(value).encode())
  return KINDS[kind], str(path)


def labels_of(listed):
  return [e.error or e.label for e in listed.splits["train"].entries()]


WITH_COLUMNS = ["csv:", "parquet:", "hf:"]


@pytest.mark.parametrize("kind", [*WITH_COLUMNS, "webdataset:"])
def test_real_numbers_are_no_classes_unless_they_are_listed(kind, tmp_path):
  read, path = write(kind, tmp_path, [1.5, None, 0.5])
  with pytest.raises(ValueError, match="got the label 1.5 in .* --numbers"):
    read(path, Options())
  names = ("0.5", "1.5")
  listed = read(path, Options(classes=names))
  assert listed.class_names == names
  assert labels_of(listed) == [1, "has no label", 0]


@pytest.mark.parametrize("kind", WITH_COLUMNS)
def test_columns_have_the_usual_names_or_are_named(kind, tmp_path):
  read, path = write(kind, tmp_path, [1, 0], label="breed", id=[7, 8])
  with pytest.raises(ValueError, match="--label: got no value.*breed, id"):
    read(path, Options())
  with pytest.raises(ValueError, match="--label: got class.*breed, id"):
    read(path, Options(label="class"))
  with pytest.raises(ValueError, match="--image: got photo.*breed, id"):
    read(path, Options(image="photo", label="breed"))
  assert labels_of(read(path, Options(label="breed"))) == [1, 0]
  # A column of another kind than images has none.
  unfit = labels_of(read(path, Options(image="id", label="breed")))
  assert all(error.startswith(("has no image", "cannot")) for error in unfit)


@pytest.mark.parametrize("kind", WITH_COLUMNS)
def test_a_list_of_labels_is_any_number_of_classes(kind, tmp_path):
  read, path = write(kind, tmp_path, [["c", "a"], [], ["b"]])
  listed = read(path, Options())
  assert listed.is_multilabel and listed.class_names == ("a", "b", "c")
  assert labels_of(listed) == [(0, 2), (), (1,)]


@pytest.mark.parametrize("kind", WITH_COLUMNS)
def test_a_0_or_1_for_each_class_is_no_list_of_classes(kind, tmp_path):
  read, path = write(kind, tmp_path, [[0, 1, 0, 1], [], [1, 0, 0, 0]])
  with pytest.raises(ValueError, match="expected different classes"):
    read(path, Options())


def test_images_and_labels_that_are_missing_in_parquet(tmp_path):
  image = encoded(0)
  images = [image, None, image, b""]
  columns = {"image": images, "label": [2, 1, -1, 1]}
  parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
  read = KINDS["parquet:"](str(tmp_path), Options())
  first, *rest = read.splits["train"].entries()
  assert first == ("x.parquet:0", image, 2, "")
  assert [e.error for e in rest] == [
    "has no image",
    "has no label",
    "has no image",
  ]
  (tmp_path / "x.parquet").write_bytes(b"PAR1")
  with pytest.raises(ValueError, match="which is no whole parquet file"):
    KINDS["parquet:"](str(tmp_path), Options())


@pytest.mark.parametrize("is_list", [False, "old", "new"])
def test_class_names_in_the_metadata_of_hugging_face(is_list, tmp_path):
  feature = b'{"names": ["ant", "bee", "cat"], "_type": "ClassLabel"}'
  if is_list:
    feature = (
      b"[%s]" % feature if is_list == "old" else b'{"feature":%s}' % feature
    )
  metadata = b'{"info": {"features": {"label": %s}}}' % feature
  values = [[0, 2]] if is_list else [2]
  table = pyarrow.table({"image": [encoded(0)], "label": values})

  def read(metadata):
    written = table.replace_schema_metadata({b"huggingface": metadata})
    parquet.write_table(written, tmp_path / "x.parquet")
    return KINDS["parquet:"](str(tmp_path), Options())

  listed = read(metadata)
  assert listed.class_names == NAMES
  assert labels_of(listed) == ([(0, 2)] if is_list else [2])
  with pytest.raises(ValueError, match=r"x\.parquet: metadata of Hugging Face"):
    read(metadata[:40])


def test_hugging_face_reads_files_of_the_data_set_alone(tmp_path):
  write_images(tmp_path, ["saved/a.jpg", "b.jpg"])
  read = lambda name: hugging_face._image(
    {"bytes": None, "path": str(tmp_path / name)}, [f"{tmp_path}/saved"]
  )
  assert read("saved/a.jpg") == encoded(0)
  for name, error in (
    ("b.jpg", "names a file outside of the data set"),
    ("saved/../b.jpg", "names a file outside of the data set"),
    ("saved/c.jpg", "has no image"),
  ):
    with pytest.raises(ValueError, match=error):
      read(name)


@pytest.mark.parametrize("text", ["string", "large_string"])  # pandas' is large
def test_a_saved_part_of_a_split_has_the_split_s_name(text, tmp_path):
  datasets = pytest.importorskip("datasets")
  features = datasets.Features(
    {"image": datasets.Image(), "label": datasets.Value(text)}
  )
  records = {"image": [{"bytes": encoded(0), "path": None}], "label": ["ant"]}
  datasets.Dataset.from_dict(
    records, features=features, split="train[:50%]"
  ).save_to_disk(tmp_path)
  result = KINDS["hf:"](str(tmp_path), Options())
  assert (result.class_names, list(result.splits)) == (("ant",), ["train"])


@pytest.mark.parametrize("kind", ["hf:", "parquet:"])
def test_a_label_that_is_another_class_in_another_split_is_refused(
  kind, tmp_path
):
  """As where every split was numbered by the classes that it has."""
  datasets = pytest.importorskip("datasets")

  def listed(**names):
    made = datasets.DatasetDict()
    for split, classes in names.items():
      features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=classes)}
      )
      image = {"bytes": encoded(0), "path": None}
      made[split] = datasets.Dataset.from_dict(
        {"image": [image], "label": [1]}, features=features
      )
      made[split].to_parquet(tmp_path / f"{split}.parquet")
    made.save_to_disk(tmp_path)
    return KINDS[kind](str(tmp_path), Options())

  same = ["ant", "bee", "cat"]
  assert listed(train=same, validation=same).class_names == tuple(same)
  message = "other classes in .*train.* than in .*validation"
  with pytest.raises(ValueError, match=message):
    listed(train=["ant", "bee", "cat"], validation=["ant", "cat"])


def split_files(root, names, splits):
  for name in names:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()
  options = Options(splits=splits)
  result = files.by_split(str(root), (".tar",), options, "webdataset:")
  return {
    split: [os.path.relpath(f, root) for f in paths]
    for split, paths in result.items()
  }


FILES = ["x-train-0.tar", "x-train-1.tar", "x-val.tar", "y/trainer.txt"]
# Files, --splits -> the files of each split.
BY_NAME = {
  "names": (FILES, {}, {"train": FILES[:2], "validation": FILES[2:3]}),
  "the last part": (
    ["test/train-1.tar", "test/2.tar"],
    {},
    {"train": ["test/train-1.tar"], "test": ["test/2.tar"]},
  ),
  "no names": (["0.tar", "1.tar"], {}, {"train": ["0.tar", "1.tar"]}),
  "patterns": (
    ["00.tar", "sub/1.tar"],
    {"train": "0*", "extra": "sub/1.tar"},
    {"train": ["00.tar"], "extra": ["sub/1.tar"]},
  ),
  "only one": (FILES, {"validation": None}, {"validation": ["x-val.tar"]}),
}


@pytest.mark.parametrize("names, splits, expected", BY_NAME.values())
def test_splits_by_the_names_of_files(tmp_path, names, splits, expected):
  assert split_files(tmp_path, names, splits) == expected
  (tmp_path / "around").mkdir()
  (tmp_path / "around" / "loop").symlink_to("..")
  assert split_files(tmp_path, [], splits) == expected


@pytest.mark.parametrize(
  "names, splits, message",
  [
    ([], {}, "got no file, expected .tar"),
    (FILES, {"test": None}, r"--splits: got test, .*\(train, validation\)"),
    (["0.tar"], {"train": "x*"}, r"got train=x\* \(0 files\), expected"),
    (["0.tar"], {"train": "0*", "test": None}, r"test=None \(0 files\)"),
    (["0.tar"], {"train": "*", "test": "0*"}, "expected .* in at most one"),
    ([*FILES, "more.tar"], {}, "1 files of no split .*more.tar"),
    (
      ["0.tar"],
      {"train": None, "test": None},
      r"patterns, such as train=0\*\.tar,",
    ),
  ],
)
def test_splits_that_files_do_not_have(tmp_path, names, splits, message):
  tmp_path.joinpath("empty").mkdir()
  with pytest.raises(ValueError, match=message):
    split_files(tmp_path, names, splits)


def test_numbers_of_one_name_are_refused():
  with pytest.raises(ValueError, match="got two numbers named 'age'"):
    listing.Numbers(("age", "age"), 1, "x")


def test_classes_of_one_name_are_refused(tmp_path):
  for name in ("cat", "cat "):
    (tmp_path / name).mkdir()
    (tmp_path / name / "1.jpg").write_bytes(encoded(1))
  with pytest.raises(ValueError, match="got 'cat ' in the classes"):
    KINDS["folder:"](str(tmp_path), Options())


# Text of a CSV, --image and --label -> the classes, and the label of each line.
CSVS = {
  "header": ("file,label\n0.jpg,cat\n1.jpg,ant\n", {}, ("ant", "cat"), [1, 0]),
  "tabs, a mark of UTF-8, quotes": (
    '\ufeffx\tlabel\tfile\n\t"a, b"\t0.jpg\n\tc\t1.jpg\n',
    {},
    ("a, b", "c"),
    [0, 1],
  ),
  "several": (
    "file,label\n0.jpg,cat|ant\n1.jpg,\n",
    {},
    ("ant", "cat"),
    [(0, 1), ()],
  ),
  "empty last cells": (
    "file,label\n0.jpg,b,\n1.jpg,a, ,\n",
    {},
    ("a", "b"),
    [1, 0],
  ),
  "one line has several": (
    "file,label\n0.jpg,b\n1.jpg,a|\n",
    {},
    ("a", "b"),
    [(1,), (0,)],
  ),
  "semicolons, blank lines": (
    "\ufeff\n \nfile; label; Other\r\n0.jpg; b;1\r\n\r\n1.jpg; a;2\r\n",
    {},
    ("a", "b"),
    [1, 0],
  ),
  "quotes after a blank": (
    'image, label\n"0.jpg", "b, c"\n1.jpg, "a"\n',
    {},
    ("a", "b, c"),
    [1, 0],
  ),
  "blanks around cells": (
    "file ,label\n0.jpg, b \n1.jpg ,a \n",
    {},
    ("a", "b"),
    [1, 0],
  ),
  "columns, one without a name": (
    ",n,a,b,file\n0,1,x,0.jpg,no.jpg\n1,1,y,1.jpg,no.jpg\n",
    {"image": "b", "label": "a"},
    ("x", "y"),
    [0, 1],
  ),
}


@pytest.mark.parametrize("text, columns, names, labels", CSVS.values())
def test_labels_of_a_csv(text, columns, names, labels, tmp_path):
  write_images(tmp_path, ["0.jpg", "1.jpg"])
  (tmp_path / "labels.csv").write_text(text, "utf-8")
  read = KINDS["csv:"](f"{tmp_path}/labels.csv", Options(**columns))
  assert read.class_names == names
  assert read.is_multilabel == isinstance(labels[0], tuple)
  entries = [*read.splits["train"].entries()]
  assert [e.label for e in entries] == labels
  assert [e.image for e in entries] == [encoded(0), encoded(1)]


def test_a_class_that_may_be_a_missing_label_is_said(tmp_path):
  read, path = write("csv:", tmp_path, ["a", "None"])
  (remark,) = read(path, Options()).remarks
  assert "'None' is a class" in remark
  assert not read(path, Options(classes=("a", "None"))).remarks


def test_lines_of_a_csv_that_cannot_be_used(tmp_path):
  """An image has one label, by whatever path it is named."""
  write_images(tmp_path, ["0.jpg", "1.jpg", "sub/3.jpg"])
  lines = ["0.jpg,a", "./0.jpg,b", "1.jpg,", "2.jpg,a", f"{tmp_path}/0.jpg,a"]
  lines += ["sub//3.jpg,b", "sub/../sub/3.jpg,b"]
  (tmp_path / "x.csv").write_text("\n".join(["file,label", *lines]))
  read = KINDS["csv:"](f"{tmp_path}/x.csv", Options())
  assert [e.error for e in read.splits["train"].entries()] == [
    "",
    "is listed before",
    "has no label",
    f"cannot be read: {tmp_path}/2.jpg: No such file or directory",
    "is listed before",
    "",
    "is listed before",
  ]


def test_csv_files_in_two_folders_list_the_same_names(tmp_path):
  write_images(tmp_path, ["a/0.jpg", "b/c/0.jpg"])
  for folder in ("a", "b/c"):
    text = f"file,label\n0.jpg,{folder[0]}"
    (tmp_path / folder / "x.csv").write_text(text)
  read = KINDS["csv:"](str(tmp_path), Options())
  entries = [*read.splits["train"].entries()]
  assert [e.key for e in entries] == ["a/0.jpg", "b/c/0.jpg"]
  assert [e.image for e in entries] == [encoded(0), encoded(1)]


@pytest.mark.parametrize(
  "text, message",
  [
    (b"", "expected a CSV in UTF-8 with a header"),
    (b"\xff\xfe", "expected a CSV in UTF-8"),
    (b"file,label\n", "without any label"),
    (b"file,label\n0.jpg,\n", "without any label"),
    (b"0.jpg,a\n1.jpg,b\n", "--image: got no value, .*: 0.jpg, a"),
    (b"file|label\n0.jpg|b\n", r"--image: got no value, .*: file\|label"),
    (b"file,b,c\n0.jpg,1.0,0.0\n1.jpg,0.0,1.0\n", "--label: .*0 or 1 .*: b, c"),
    (b"file,image,label\n0,1,a\n", "--image: got file and image"),
    (b"file,label,label\n0.jpg,a,b\n", "--label: got label and label"),
    (b"file,label\n1.jpg\n", "a cell for each of file, label"),
    (b"file,label\n1.jpg,sea,sky\n", r"'sky'\], .*, and \| between"),
    (b"file;a\n0.jpg;50,7;5\n", r"'50,7', '5'\], expected a cell for each"),
  ],
)
def test_files_that_are_no_csv_of_images(text, message, tmp_path):
  (tmp_path / "x.csv").write_bytes(text)
  with pytest.raises(ValueError, match=message):
    KINDS["csv:"](str(tmp_path), Options())


def write_images(root, names):
  for i, name in enumerate(names):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(encoded(i))
