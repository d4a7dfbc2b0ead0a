"""What an import finds: splits, classes, columns, and errors of a source."""

import doctest
import gzip
import io
import itertools
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
  table,
  write_webdataset,
)
from pyarrow import parquet

from vit_jax.finetune.data.imports import (
  KINDS,
  files,
  hugging_face,
  listing,
  webdataset,
)
from vit_jax.finetune.data.imports.listing import Options


def test_the_examples():
  assert doctest.testmod(hugging_face) == (0, 1)
  assert doctest.testmod(listing) == (0, 1)
  assert doctest.testmod(webdataset) == (0, 2)


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
  assert errors["0.tar/4"] == "has 0 images"
  assert errors["0.tar/5"] == (
    "has 2 images, a.jpg, b.jpg: --image=ENDING chooses"
  )
  assert errors["0.tar/0"] == "has the name of an earlier record"
  assert errors["1.tar"].startswith("is broken after 1 records: it is cut off")
  assert errors["3.tar"].startswith("is broken after 1 records: unexpected end")
  assert "is broken after 0 records" in errors["2.tar"]
  assert result.splits["train"].count == len(entries)


@pytest.mark.parametrize("mode, name", [("xz", "xz"), ("bz2", "bzip2")])
def test_the_compression_of_a_tar_that_cannot_be_read_is_named(
  mode, name, tmp_path
):
  with tarfile.open(tmp_path / "x.tar", f"w:{mode}") as tar:
    add(tar, "1.jpg", encoded(1))
    add(tar, "1.cls", b"1")
  message = (
    rf"got tars without labels in .* {tmp_path}/x\.tar is broken after 0"
    f" records: it is compressed with {name}, expected no compression or gzip;"
  )
  with pytest.raises(ValueError, match=message):
    KINDS["webdataset:"](str(tmp_path), Options())


def test_a_member_s_name_is_no_compression(tmp_path):
  write_tar(tmp_path / "x.tar", ["BZh.jpg", "BZh.cls"])
  (entry,) = (
    KINDS["webdataset:"](str(tmp_path), Options()).splits["train"].entries()
  )
  assert entry.key == "x.tar/BZh" and not entry.error


def write_tar(path, names):
  """Members with images and, where the name ends in .cls, labels 0 and 1."""
  labels = itertools.cycle([b"0", b"1"])
  with tarfile.open(path, "w") as tar:
    for i, name in enumerate(names):
      is_label = name.lower().endswith(".cls")
      add(tar, name, next(labels) if is_label else encoded(i))


# Members of a tar -> the name of each record, and the member that is its image.
DOTS = {
  "in all names": (
    ["a/2.5_x.png", "a/2.5_x.cls", "a/2.5_Y.cls", "a/2.5_Y.jpg", "a/3.1.cls"],
    {"a/2.5_x": 0, "a/2.5_Y": 3},
  ),
  "in one": (["a.png", "a.cls", "a.2.cls", "a.2.png"], {"a": 0, "a.2": 3}),
  "labels last": (
    ["1.a.png", "1.b.png", "1.a.cls", "1.b.cls"],
    {"1.a": 0, "1.b": 1},
  ),
  "a second image": (
    ["1.0.seg.png", "1.0.png", "1.0.cls", "1.1.png", "1.1.cls"],
    {"1.0": 1, "1.1": 3},
  ),
  "a second label": (["1.png", "1.coarse.cls", "1.cls"], {"1": 0}),
}


@pytest.mark.parametrize("names, images", DOTS.values())
def test_names_of_records_with_dots(names, images, tmp_path):
  write_tar(tmp_path / "x.tar", names)
  read = KINDS["webdataset:"](f"{tmp_path}/x.tar", Options())
  entries = [e for e in read.splits["train"].entries() if not e.error]
  assert {e.key: e.image for e in entries} == {
    f"x.tar/{name}": encoded(i) for name, i in images.items()
  }


def test_the_image_of_a_record_is_chosen_and_said(tmp_path):
  def read(image):
    return KINDS["webdataset:"](str(tmp_path), Options(image=image))

  write_tar(tmp_path / "x.tar", ["1.seg.png", "1.jpg", "1.cls"])
  (plain,) = read(None).splits["train"].entries()
  assert plain.image == encoded(1)
  assert read(None).remarks == (
    "the images are the members that end in jpg; for others: --image=seg.png",
  )
  for image in ("seg", ".seg.png"):
    (other,) = read(image).splits["train"].entries()
    assert other.image == encoded(0) and read(image).remarks == ()
  write_tar(tmp_path / "x.tar", ["1.a.png", "1.b.png", "1.cls"])
  for image, got in ((None, "none"), ("c", "'c', which is none")):
    with pytest.raises(ValueError, match=f"--image: got {got} .* a.png, b.png"):
      read(image)


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
  "whole, as pandas writes": (
    ["1.0", b"0.", 2.0, "3", "-1.0", float("nan"), ""],
    None,
    ("0", "1", "2", "3"),
    [1, 0, 2, 3, -1, -1, -1],
  ),
  "whole, given": ([1.0, "0.0"], ("x", "y"), ("x", "y"), [1, 0]),
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
    ([0, 3], ("a", "b"), "got label 3 in x, expected 0 to 1, as there are 2"),
    (["c"], ("a", "b"), r"got the classes \['c'\] in x, expected one of the 2"),
    ([5, 70_000], None, "got only 2 different labels up to 70,000 in x"),
    ([0], ("a", "a"), "got two classes of the name 'a'"),
    (
      ["0.5", b"1"],
      ("0.5", "2"),
      "got real numbers in x, such as 0.5, expected classes. To predict the"
      " numbers: --numbers with csv: or parquet:. If they are names of classes:"
      " --classes=FILE",
    ),
    ([1e20, 1.0], None, "such as 1e"),
    (["1", "nan"], None, "such as nan, .* Leave a label empty where it is mis"),
  ],
)
def test_labels_that_are_no_classes(labels, given, message):
  with pytest.raises(ValueError, match=message):
    listing.Classes(labels, given, "x")


@pytest.mark.parametrize("kind", ["csv:", "parquet:", "webdataset:"])
def test_real_numbers_are_classes_only_if_they_are_whole(kind, tmp_path):
  """pandas writes whole numbers with a point where another one is missing."""

  def read(*labels, classes=None):
    encoded_images = [encoded(i) for i in range(len(labels))]
    path = tmp_path / f"train.{kind[:-1]}"
    if kind == "parquet:":
      records = {"image": encoded_images, "label": labels}
      parquet.write_table(pyarrow.table(records), path)
    elif kind == "csv:":
      write_images(tmp_path, [f"{i}.jpg" for i in range(len(labels))])
      lines = [
        f"{i}.jpg,{'' if v is None else v}" for i, v in enumerate(labels)
      ]
      path.write_text("\n".join(["file,label", *lines]))
    else:
      with tarfile.open(path, "w") as tar:
        for i, label in enumerate(labels):
          add(tar, f"{i}.jpg", encoded_images[i])
          if label is not None:
            add(tar, f"{i}.cls", str(label).encode())
    listed = KINDS[kind](str(path), Options(classes=classes))
    return listed.class_names, [
      e.error or e.label for e in listed.splits["train"].entries()
    ]

  assert read(1.0, None, 0.0) == (("0", "1"), [1, "has no label", 0])
  names = ("0.5", "1.0")
  assert read(1.0, None, 0.5, classes=names) == (names, [1, "has no label", 0])
  column = "" if kind == "webdataset:" else "the column 'label' of "
  with pytest.raises(
    ValueError, match=rf"got real numbers in {column}{kind}.* --numbers[= ]"
  ):
    read(1.0, None, 0.5)


def test_columns_are_found_or_asked_for(tmp_path):
  records = SPLITS["train"]
  numbers = [NAMES.index(name) for _, name in records]
  read = KINDS["parquet:"]
  path = tmp_path / "x.parquet"

  def write(table):
    parquet.write_table(table, path)
    return str(path)

  # Two columns could be labels, none has a usual name.
  unusual = write(table(records, kind=numbers))
  message = (
    r"--label: got several columns \(id, kind\) for the label in parquet"
  )
  with pytest.raises(ValueError, match=message):
    read(unusual, Options())
  result = read(unusual, Options(label="kind"))
  assert result.class_names == ("0", "1", "2")
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
  result = read(write(plain), Options())
  assert result.class_names == NAMES
  first, *errors = result.splits["train"].entries()
  assert first == ("x.parquet:0", records[0][0], numbers[0], "")
  assert [f.error for f in errors] == ["has no image", "has no label"]
  several = pyarrow.table({"image": [records[0][0]], "label": [[0, 2]]})
  old = metadata.replace(b'"label": {', b'"label": [{').replace(b"}}}", b"}]}}")
  several = several.replace_schema_metadata({b"huggingface": old})
  result = read(write(several), Options())
  assert result.is_multilabel and result.class_names == NAMES
  cut = plain.replace_schema_metadata({b"huggingface": metadata[:40]})
  with pytest.raises(ValueError, match=r"x\.parquet: metadata of Hugging Face"):
    read(write(cut), Options())
  path.write_bytes(b"PAR1")
  with pytest.raises(ValueError, match="which is no whole parquet file"):
    read(str(path), Options())


@pytest.mark.parametrize("kind", ["parquet:", "hf:"])
def test_the_numbers_of_the_rows_are_no_label(kind, tmp_path):
  """Where the column of the label has a type that may be none of classes."""

  def read(chosen=None, **columns):
    records = {"id": [0, 1], "image": [encoded(0), encoded(1)], **columns}
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table(records), path)
    if kind == "hf:":
      datasets = pytest.importorskip("datasets")
      path = tmp_path / "saved"
      made = datasets.Dataset.from_dict(records)
      made.cast_column("image", datasets.Image()).save_to_disk(path)
    return KINDS[kind](str(path), Options(label=chosen))

  real = "real numbers in the column '{}' .* --numbers={}"
  unfit = "--label: got column '{}' for the label in .* of: id: "
  message = real if kind == "parquet:" else unfit
  with pytest.raises(ValueError, match=message.format(*["label"] * 2)):
    read(label=[1.5, 0.0])
  with pytest.raises(ValueError, match=message.format(*["labels"] * 2)):
    read(labels=[[1.5], [0.0]])
  with pytest.raises(ValueError, match=unfit.format("label")):
    read(label=[True, False])
  assert read("id", label=[True, False]).class_names == ("0", "1")
  assert read(target=[1, 2], label=[None, None]).class_names == ("0", "1", "2")
  if kind == "parquet:":
    result = read(label=[2.0, None])
    assert result.class_names == ("0", "1", "2")
    assert result.remarks == (
      "the label is the column 'label'; for another: --label=id",
    )
    assert read(Label=[2.0, None], other=["a", "b"]).class_names[-1] == "2"
    with pytest.raises(ValueError, match=r"several columns \(id, price\)"):
      read(price=[1.5, 0.0])


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
  message = "whose classes differ between .*train.* and .*validation"
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
    ([], {}, "names no file; expected a folder with files ending in"),
    (FILES, {"test": None}, "--splits: got test, expected splits that"),
    (["0.tar"], {"train": "x*"}, "got train=x\\*, which fits none of 1"),
    (["0.tar"], {"train": "*", "test": "0*"}, "1 files in both train"),
    ([*FILES, "more.tar"], {}, "1 of 4 files whose names say no split"),
  ],
)
def test_splits_that_files_do_not_have(tmp_path, names, splits, message):
  tmp_path.joinpath("empty").mkdir()
  with pytest.raises(ValueError, match=message):
    split_files(tmp_path, names, splits)


def test_patterns_in_an_error_fit_the_files(tmp_path):
  (tmp_path / "0.csv").touch()
  options = Options(splits={"train": None, "test": None})
  with pytest.raises(ValueError, match=r"patterns: train=0\*\.csv,validation="):
    files.by_split(str(tmp_path), (".csv", ".tsv"), options, "csv:")


def test_numbers_of_one_name_are_refused():
  with pytest.raises(ValueError, match="got two numbers of the name 'age'"):
    listing.Numbers(("age", "age"), 1, "x")


def test_classes_of_one_name_are_refused(tmp_path):
  for name in ("cat", "cat "):
    (tmp_path / name).mkdir()
    (tmp_path / name / "1.jpg").write_bytes(encoded(1))
  with pytest.raises(ValueError, match="got 'cat ' among the names of cl"):
    KINDS["folder:"](str(tmp_path), Options())


def write_images(root, names):
  for i, name in enumerate(names):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(encoded(i))


# Text of a CSV, --image and --label -> the classes, and the label of each line.
CSVS = {
  "header": ("file,label\n0.jpg,cat\n1.jpg,ant\n", {}, ("ant", "cat"), [1, 0]),
  "none": ("0.jpg,1\n1.jpg, 0\n", {}, ("0", "1"), [1, 0]),
  "no endings": ("id;breed\n0;pug\n1;collie\n", {}, ("collie", "pug"), [1, 0]),
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
    "file,tag\n0.jpg,b,\n1.jpg,a, ,\n",
    {},
    ("a", "b"),
    [1, 0],
  ),
  "one line has several": ("0.jpg,b\n1.jpg,a|\n", {}, ("a", "b"), [(1,), (0,)]),
  "names in any case": (
    "\ufeffFile; Label; Other\r\n0.jpg; b;1\r\n\r\n1.jpg; a;2\r\n",
    {},
    ("a", "b"),
    [1, 0],
  ),
  "quotes after a blank": (
    'file, label\n"0.jpg", "b, c"\n1.jpg, "a"\n',
    {},
    ("a", "b, c"),
    [1, 0],
  ),
  "a blank line first": (
    "\n \nfile;tag\n0.jpg;a\n1.jpg;b\n",
    {},
    ("a", "b"),
    [0, 1],
  ),
  "other signs in quotes": (
    '"0.jpg";"a, b, c"\n1.jpg;d\n',
    {},
    ("a, b, c", "d"),
    [0, 1],
  ),
  "a column without a name": (
    ",file,tag\n0,0.jpg,b\n1,1.jpg,a\n",
    {"label": "1"},
    ("0", "1"),
    [0, 1],
  ),
  "columns": (
    "n,a,b,other\n1,x,0.jpg,no.jpg\n1,y,1.jpg,no.jpg\n",
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


def test_files_of_a_csv_have_one_column_of_labels(tmp_path):
  write_images(tmp_path, ["0.jpg", "1.jpg"])

  def read(train, val, **options):
    for i, (split, head) in enumerate({"train": train, "val": val}.items()):
      cells = ",".join([f"{i}.jpg", *"ab"][: len(head.split(","))])
      (tmp_path / f"{split}.csv").write_text(f"{head}\n{cells}\n")
    listed = KINDS["csv:"](str(tmp_path), Options(**options))
    entries = [*listed.splits["validation"].entries()]
    return listed.remarks, listed.class_names[entries[0].label]

  choice = "the label is the column 'label'; for another: --label=class"
  assert read("file,label", "file,label,class") == ((choice,), "a")
  assert read("file,label,class", "file,label,class") == ((choice,), "a")
  assert read("file,label", "file,breed") == ((), "a")
  same = read("file,label,class", "file,class,label", label="class")
  assert same == ((), "a")
  message = "label in .*train.csv; class in .*val.csv; expected the same in all"
  for train, val in (
    ("file,label", "file,class,label_id"),
    ("file,label,class", "file,class"),
  ):
    with pytest.raises(ValueError, match=message):
      read(train, val)


def test_labels_of_a_csv_that_may_be_missing(tmp_path):
  write_images(tmp_path, ["0.jpg", "1.jpg"])
  file = tmp_path / "x.csv"
  read = lambda **k: KINDS["csv:"](f"{file}", Options(**k))
  file.write_text("0.jpg,a\n1.jpg,nan\n")
  with pytest.raises(ValueError, match="the label 'nan' in .* --classes=FILE"):
    read()
  assert not read(classes=("a", "nan")).remarks
  file.write_text("0.jpg,a\n1.jpg,None\n")
  (remark,) = read().remarks
  assert "'None' is a class" in remark


def test_one_hot_columns_of_a_csv_are_refused(tmp_path):
  write_images(tmp_path, ["0.jpg", "1.jpg"])
  (tmp_path / "x.csv").write_text("file,b,c\n0.jpg,1.0,0.0\n1.jpg,0.0,1.0\n")
  with pytest.raises(ValueError, match="b, c.*a 0 or 1 for each class"):
    KINDS["csv:"](f"{tmp_path}/x.csv", Options())
  listed = KINDS["csv:"](f"{tmp_path}/x.csv", Options(label="c"))
  assert listed.class_names == ("0", "1")


def test_lines_of_a_csv_that_cannot_be_used(tmp_path):
  write_images(tmp_path, ["0.jpg", "1.jpg"])
  (tmp_path / "x.csv").write_text("0.jpg,a\n0.jpg,b\n1.jpg,\n2.jpg,a\n0.jpg,a")
  read = KINDS["csv:"](f"{tmp_path}/x.csv", Options())
  first, *rest = read.splits["train"].entries()
  assert (first.key, first.error) == ("0.jpg", "")
  assert [e.error for e in rest] == [
    "is listed before with the label 'a'",
    "has no label",
    f"cannot be read: {tmp_path}/2.jpg: No such file or directory",
    "is listed twice",
  ]


def test_csv_files_in_two_folders_list_the_same_names(tmp_path):
  write_images(tmp_path, ["a/0.jpg", "b/c/0.jpg"])
  for folder in ("a", "b/c"):
    (tmp_path / folder / "x.csv").write_text(f"0.jpg,{folder[0]}")
  read = KINDS["csv:"](str(tmp_path), Options())
  entries = [*read.splits["train"].entries()]
  assert [e.key for e in entries] == ["a/0.jpg", "b/c/0.jpg"]
  assert [e.image for e in entries] == [encoded(0), encoded(1)]


def test_other_names_of_a_file_in_a_csv(tmp_path):
  write_images(tmp_path, ["0.jpg", "sub/1.jpg"])
  lines = ["0.jpg,a", "./0.jpg,b", "sub//1.jpg,b", "sub/../sub/1.jpg,b"]
  (tmp_path / "x.csv").write_text("\n".join([*lines, f"{tmp_path}/0.jpg,a"]))
  read = KINDS["csv:"](f"{tmp_path}/x.csv", Options())
  assert [e.error for e in read.splits["train"].entries()] == [
    "",
    "is listed before with the label 'a'",
    "",
    "is listed twice",
    "is listed twice",
  ]


@pytest.mark.parametrize(
  "text, message",
  [
    ("", "which is empty; expected FILE,LABEL"),
    ("file,label\n", "with a header alone"),
    ("0.jpg,a\n1.jpg\n", "1 lines without all of its 2 columns, such as '1.j"),
    (
      "file,tags\n0.jpg,sea\n1.jpg,sea,sky\n",
      "1 lines of more cells than its 2",
    ),
    ("0.jpg;1\n1.jpg;2;5\n", r"as '1.jpg;2;5'.* '\|' between .* ';' in quotes"),
    (
      "file,a\n0.jpg,50,75\n",
      "a cell for each .* numbers with a decimal point",
    ),
    (
      "0.jpg,a,b\n",
      r"--label: got several columns \(2, 3\) for the label in .*x.csv,"
      r" expected the name of one with classes, of: 2, 3\.$",
    ),
    (
      "a,b,label\n0.jpg,1.jpg,x\n",
      r"--image: got several columns \(a, b\) for the image in .*x.csv,"
      r" expected the name of one with file names of images, of: a, b, label",
    ),
    (",file,a\n0,0.jpg,b\n", r"got several columns \(1, a\) for the label"),
    ("0.jpg\n", "with the columns 1, expected different names"),
    (
      "file|a\n0.jpg|b\n",
      "the columns file.a, .* A comma, a semicolon or a tab",
    ),
    (
      r"below\3.jpg,a",
      r"x/below\\3.jpg; expected .* Write / for \\ in the names",
    ),
    ("3.jpg,a\n", r"x/3.jpg; expected names relative.*below has it: move the"),
    ("file,label\n0.jpg,\n", "without any label"),
    (b"\xff\xfe".decode("latin1"), "expected different names"),
  ],
)
def test_files_that_are_no_csv_of_images(text, message, tmp_path):
  root = tmp_path / "x"
  write_images(root, ["0.jpg", "1.jpg", "below/3.jpg"])
  (root / "x.csv").write_text(text, "utf-8")
  with pytest.raises(ValueError, match=message):
    KINDS["csv:"](str(root), Options())


@pytest.mark.parametrize("kind", ["parquet:", "hf:"])
def test_a_list_of_labels_is_any_number_of_classes(kind, tmp_path):
  datasets = pytest.importorskip("datasets")
  classes = datasets.ClassLabel(names=list(NAMES))
  features = datasets.Features(
    {"image": datasets.Image(), "labels": datasets.Sequence(classes)}
  )
  labels = [[2, 0], [], [1]]
  image = [{"bytes": encoded(i), "path": None} for i in range(3)]
  made = datasets.Dataset.from_dict(
    {"image": image, "labels": labels}, features=features
  )
  path = tmp_path / "train.parquet"
  made.to_parquet(path)
  if kind == "hf:":
    path = tmp_path / "saved"
    made.save_to_disk(path)
  read = KINDS[kind](str(path), Options())
  assert read.is_multilabel and read.class_names == NAMES
  labels = [e.label for e in read.splits["train"].entries()]
  assert labels == [(0, 2), (), (1,)]


@pytest.mark.parametrize("kind", ["parquet:", "hf:", "csv:"])
def test_a_0_or_1_for_each_class_is_no_list_of_classes(kind, tmp_path):
  def read(lists, type_="int64"):
    write_images(tmp_path, [f"{i}.jpg" for i in range(len(lists))])
    image = [encoded(i) for i in range(len(lists))]
    path = tmp_path / "train.parquet"
    labels = pyarrow.array(lists, pyarrow.list_(getattr(pyarrow, type_)()))
    parquet.write_table(pyarrow.table({"image": image, "labels": labels}), path)
    if kind == "hf:":
      datasets = pytest.importorskip("datasets")
      features = datasets.Features(
        {"image": datasets.Image(), "labels": [datasets.Value(type_)]}
      )
      records = {"image": [{"bytes": i} for i in image], "labels": lists}
      path = tmp_path / "saved"
      made = datasets.Dataset.from_dict(records, features=features)
      made.save_to_disk(path)
    if kind == "csv:":
      cells = ["|".join(map(str, v or ())) for v in lists]
      lines = [f"{i}.jpg,{cell}" for i, cell in enumerate(cells)]
      path = tmp_path / "train.csv"
      path.write_text("\n".join(["file,labels", *lines]))
    return KINDS[kind](str(path), Options()).class_names

  # Some have a length of their own, another number, or no number twice.
  for lists in (
    [[0, 1, 1], [1]],
    [[0, 1, 2], [1, 1, 0]],
    [[0, 1], [1, 0]],
  ):
    assert set(read(lists)) == {str(v) for row in lists for v in row}
  message = r"labels' of .*, one 0 or 1 for each class; expected a list of"
  hot = [[0, 1, 0, 1], [], [1, 0, 0, 0]]
  for lists in (hot, [[1, 0], [0, 0]], [[1, 0], None, [1, 1]]):
    with pytest.raises(ValueError, match=f"{message} the classes of the image"):
      read(lists)
  if kind == "hf:":  # does not read them at all
    message = "got no column for the label .* expected .* whole numbers, text"
  with pytest.raises(ValueError, match=message):
    read([[0.0, 1.0, 1.0]], "float32")
