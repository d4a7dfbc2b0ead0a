"""What an import finds: splits, classes, columns, and errors of a source."""

import os
import tarfile
import tempfile

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importable import NAMES, encoded, images, tar_of
from pyarrow import parquet

from vit_jax.finetune.data.imports import KINDS, files, hugging_face, listing
from vit_jax.finetune.data.imports.listing import Options


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
    members = {}
    for i, value in enumerate(labels):
      members[f"{i}.jpg"] = images[i]
      if value is not None:
        members[f"{i}.cls"] = str(value).encode()
    path.write_bytes(tar_of(members.items()))
  return KINDS[kind], str(path)


def write_images(root, names):
  for i, name in enumerate(names):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(encoded(i))


def entries_of(listed):
  return [*listed.splits["train"].entries()]


def labels_of(listed):
  return [e.error or e.label for e in entries_of(listed)]


# Tars.


def test_tars_with_errors(tmp_path):
  good = images(0, 3)
  members = []
  for i, (image, _) in enumerate(good):
    members += [(f"./._{i}.jpg", b"Mac OS X"), (f"{i}.jpg", image)]
    members += [(f"._{i}.cls", b"Mac OS X"), (f"{i}.cls", b"2\n")]
  members += [("3.jpg", good[0][0]), ("4.cls", b"1")]
  members += [("5.a.jpg", good[0][0]), ("5.b.jpg", good[0][0]), ("5.cls", b"1")]
  members += [("0.jpg", good[0][0]), ("0.cls", b"0")]
  whole = tar_of(members)
  (tmp_path / "0.tar").write_bytes(whole)
  with tarfile.open(tmp_path / "0.tar") as tar:
    header = tar.getmembers()[7].offset
  (tmp_path / "1.tar").write_bytes(whole[: header + 100])  # within a header
  (tmp_path / "2.tar").write_bytes(b"no tar at all")
  (tmp_path / "3.tar").write_bytes(whole[: header + 600])  # within a label
  result = KINDS["webdataset:"](str(tmp_path), Options())
  assert result.class_names == ("0", "1", "2")
  entries = entries_of(result)
  assert [e.image for e in entries[:3]] == [image for image, _ in good]
  assert [e.label for e in entries[:3]] == [2, 2, 2]
  errors = {e.key: e.error for e in entries if e.error}
  for key, word in {
    "0.tar/3": "no label",
    "0.tar/4": "0 images",
    "0.tar/5": "2 images among a.jpg, b.jpg",
    "0.tar/0": "earlier record",
    "1.tar": "after 1 records",
    "3.tar": "after 1 records",
    "2.tar": "after 0 records",
  }.items():
    assert word in errors.pop(key)
  assert not errors and result.splits["train"].count == len(entries)


def test_the_image_of_a_record_is_the_only_one_or_the_chosen_one(tmp_path):
  def read(image=None, **names):
    members = {name.replace("_", "."): data for name, data in names.items()}
    members = {f"BZh.{name}": data for name, data in members.items()}
    members = [*members.items(), ("BZh.cls", b"0")]
    (tmp_path / "x.tar").write_bytes(tar_of(members))
    listed = KINDS["webdataset:"](str(tmp_path), Options(image=image))
    return [entry.error or entry.image for entry in entries_of(listed)]

  # The name begins as a file compressed with bzip2.
  assert read(JPG=encoded(0), json=b"{}") == [encoded(0)]
  several = dict(seg_png=encoded(0), jpg=encoded(1))
  assert read("seg.png", **several) == [encoded(0)]
  assert read(".SEG.png", **several) == [encoded(0)]
  assert read("jpg", **several) == [encoded(1)]
  for image, count in ((None, 2), ("gif", 0)):
    (error,) = read(image, **several)
    assert f"{count} images among seg.png, jpg" in error


def test_names_with_dots_are_one_record_up_to_the_first_dot(tmp_path):
  """As in the format; their labels are not found, and no other is taken."""
  members = []
  for name in ("a", "2.5_x", "2.5_y"):
    members += [(f"{name}.png", encoded(0)), (f"{name}.cls", b"1")]
  (tmp_path / "x.tar").write_bytes(tar_of(members))
  read = KINDS["webdataset:"](str(tmp_path), Options())
  found = [(e.key, e.label) for e in entries_of(read)]
  assert found == [("x.tar/a", 1), ("x.tar/2", -1)]


# Classes.


@pytest.mark.parametrize(
  "labels, given, names, expected",
  [
    ([b"b", "a ", None, ""], None, ("a", "b"), [1, 0, -1, -1]),
    (["07", " 7\n", "cat"], None, ("07", "7", "cat"), [0, 1, 2]),
    ({3}, None, ("0", "1", "2", "3"), [3]),
    (["00", "02", "-01"], None, ("0", "1", "2"), [0, 2, -1]),
    (["01", b"00 "], ("x", "y"), ("x", "y"), [1, 0]),
    (["1.0", 0.5], ("0.5", "1.0", "2"), ("0.5", "1.0", "2"), [1, 0]),
    (["1_000", "2_0"], None, ("1_000", "2_0"), [0, 1]),  # no numbers
  ],
)
def test_classes_of_labels(labels, given, names, expected):
  classes = listing.Classes(labels, given, "x")
  assert classes.names == names
  assert [classes.index(label) for label in labels] == expected


@pytest.mark.parametrize(
  "labels, given, word",
  [
    ([None, -1], None, "without any label"),
    ([0, 3], ("a", "b"), "label 3"),
    (["c"], ("a", "b"), r"\['c'\]"),
    ([5, 70_000], None, "up to 70,000"),
    ([0], ("a", "a"), "two classes named 'a'"),
    (["0.5", b"1"], None, "label 0.5 .* --classes.* --numbers"),
    ([1.0, None], None, "label 1.0"),  # as pandas writes 1
    (["a", "nan"], None, "label nan"),
  ],
)
def test_labels_that_are_no_classes(labels, given, word):
  with pytest.raises(ValueError, match=word):
    listing.Classes(labels, given, "x")


# Columns.

WITH_COLUMNS = ["csv:", "parquet:", "hf:"]


@pytest.mark.parametrize("kind", [*WITH_COLUMNS, "webdataset:"])
def test_real_numbers_are_no_classes_unless_they_are_listed(kind, tmp_path):
  read, path = write(kind, tmp_path, [1.5, None, 0.5])
  with pytest.raises(ValueError, match="1.5 .* --numbers"):
    read(path, Options())
  names = ("0.5", "1.5")
  listed = read(path, Options(classes=names))
  assert listed.class_names == names
  assert labels_of(listed) == [1, "has no label", 0]


@pytest.mark.parametrize("kind", WITH_COLUMNS)
def test_columns_have_the_usual_names_or_are_named(kind, tmp_path):
  read, path = write(kind, tmp_path, [1, 0], label="breed", id=[7, 8])
  for options, word in (
    ({}, "--label: got no value"),
    ({"label": "class"}, "--label: got class"),
    ({"image": "photo", "label": "breed"}, "--image: got photo"),
  ):
    with pytest.raises(ValueError, match=f"{word}.*breed, id"):
      read(path, Options(**options))
  assert labels_of(read(path, Options(label="breed"))) == [1, 0]
  # A column of another kind than images has none.
  unfit = labels_of(read(path, Options(image="id", label="breed")))
  assert all(isinstance(error, str) for error in unfit)


@pytest.mark.parametrize("kind", WITH_COLUMNS)
def test_a_list_of_labels_is_any_number_of_classes(kind, tmp_path):
  read, path = write(kind, tmp_path, [["c", "a"], [], ["b"]])
  listed = read(path, Options())
  assert listed.is_multilabel and listed.class_names == ("a", "b", "c")
  assert labels_of(listed) == [(0, 2), (), (1,)]
  (tmp_path / "zeros").mkdir()
  read, path = write(kind, tmp_path / "zeros", [[0, 1, 0, 1], [], [1, 0, 0, 0]])
  with pytest.raises(ValueError, match="expected different classes"):
    read(path, Options())


# Parquet, and what Hugging Face saves.


def test_images_and_labels_that_are_missing_in_parquet(tmp_path):
  image = encoded(0)
  columns = {"image": [image, None, image, b""], "label": [2, 1, -1, 1]}
  parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
  read = KINDS["parquet:"](str(tmp_path), Options())
  first, *rest = entries_of(read)
  assert first == ("x.parquet:0", image, 2, "")
  words = ["no image", "no label", "no image"]
  assert all(w in e.error for w, e in zip(words, rest, strict=True))


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
  with pytest.raises(ValueError, match=r"x\.parquet: metadata"):
    read(metadata[:40])


def test_hugging_face_reads_files_of_the_data_set_alone(tmp_path):
  write_images(tmp_path, ["saved/a.jpg", "b.jpg"])
  read = lambda name: hugging_face._image(
    {"bytes": None, "path": str(tmp_path / name)}, [f"{tmp_path}/saved"]
  )
  assert read("saved/a.jpg") == encoded(0)
  for name, word in (
    ("b.jpg", "outside"),
    ("saved/../b.jpg", "outside"),
    ("saved/c.jpg", "no image"),
  ):
    with pytest.raises(ValueError, match=word):
      read(name)


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
  with pytest.raises(ValueError, match="train.* than in .*validation"):
    listed(train=["ant", "bee", "cat"], validation=["ant", "cat"])


# Splits by the names of files.

FILES = ["x-train-0.tar", "x-train-1.tar", "x-val.tar", "y/trainer.txt"]


@pytest.mark.parametrize(
  "names, splits, expected",
  [
    (FILES, {}, {"train": FILES[:2], "validation": FILES[2:3]}),
    # The last part of a path counts.
    (
      ["test/train-1.tar", "test/2.tar"],
      {},
      {"train": ["test/train-1.tar"], "test": ["test/2.tar"]},
    ),
    (["0.tar", "1.tar"], {}, {"train": ["0.tar", "1.tar"]}),
    (
      ["00.tar", "sub/1.tar"],
      {"train": "0*", "extra": "sub/1.tar"},
      {"train": ["00.tar"], "extra": ["sub/1.tar"]},
    ),
    (FILES, {"validation": None}, {"validation": ["x-val.tar"]}),
  ],
)
def test_splits_by_the_names_of_files(tmp_path, names, splits, expected):
  for name in names:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
  (tmp_path / "around").mkdir()
  (tmp_path / "around" / "loop").symlink_to("..")
  options = Options(splits=splits)
  found = files.by_split(str(tmp_path), (".tar",), options, "webdataset:")
  assert expected == {
    split: [os.path.relpath(path, tmp_path) for path in paths]
    for split, paths in found.items()
  }


# CSV.

# Labels with delimiters, quotes and blanks inside; some are missing.
LABEL = st.text("ab ,;\t\"'é", max_size=5).map(str.strip)
BLANKS = st.text(" ", max_size=2)


@pytest.fixture(scope="module")
def two_images(tmp_path_factory):
  folder = tmp_path_factory.mktemp("csv")
  write_images(folder, ["0.jpg", "1.jpg"])
  return folder


def read_csv(folder, text, **options):
  """Returns what a CSV of 0.jpg and 1.jpg lists, and its entries."""
  with tempfile.NamedTemporaryFile(dir=folder, suffix=".csv") as file:
    file.write(text.encode())
    file.flush()
    listed = KINDS["csv:"](file.name, Options(**options))
    entries = entries_of(listed)
  assert {e.image for e in entries if not e.error} <= {encoded(0), encoded(1)}
  return listed, entries


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
  labels=st.tuples(LABEL, LABEL).filter(any),
  columns=st.permutations(["file", "label", "other"]),
  delimiter=st.sampled_from(",;\t"),
  end=st.sampled_from(["\n", "\r\n", "\n \n", " \n"]),
  mark=st.sampled_from(["", "\ufeff", "\n"]),
  blanks=st.tuples(BLANKS, BLANKS),
)
def test_labels_of_a_csv(
  two_images, labels, columns, delimiter, end, mark, blanks
):
  """Of any delimiter, ends of lines, order of columns, blanks and quotes."""

  def line(**cells):
    texts = []
    for column in columns:
      text = cells[column]
      if {*text} & {*',;\t"'}:
        text = f'"{text.replace(chr(34), chr(34) * 2)}"'
      texts.append(text.join(blanks))
    return delimiter.join(texts) + end

  text = mark + line(file="file", label="label", other="other")
  for i, label in enumerate(labels):
    text += line(file=f"{i}.jpg", label=label, other="x, y")
  listed, entries = read_csv(two_images, text)
  names = tuple(sorted({*labels} - {""}))
  assert listed.class_names == names and not listed.is_multilabel
  for i, (label, entry) in enumerate(zip(labels, entries, strict=True)):
    if label:
      assert entry[1:] == (encoded(i), names.index(label), "")
    else:
      assert entry.error == "has no label"


@pytest.mark.parametrize(
  "text, columns, names, labels",
  [
    ("file,label\n0.jpg,c|a\n1.jpg,\n", {}, ("a", "c"), [(0, 1), ()]),
    ("file,label\n0.jpg,b,\n1.jpg,a, ,\n", {}, ("a", "b"), [1, 0]),
    # Columns of any names, and one without.
    (
      ",n,a,b,file\n0,1,x,0.jpg,no.jpg\n1,1,y,1.jpg,no.jpg\n",
      {"image": "b", "label": "a"},
      ("x", "y"),
      [0, 1],
    ),
  ],
)
def test_lists_and_columns_of_a_csv(two_images, text, columns, names, labels):
  listed, entries = read_csv(two_images, text, **columns)
  assert listed.class_names == names
  assert listed.is_multilabel == isinstance(labels[0], tuple)
  assert [(e.image, e.label) for e in entries] == [
    (encoded(i), label) for i, label in enumerate(labels)
  ]


def test_lines_of_a_csv_that_cannot_be_used(tmp_path):
  """An image has one label, by whatever path it is named."""
  write_images(tmp_path, ["0.jpg", "1.jpg", "sub/3.jpg"])
  lines = {
    "0.jpg,a": "",
    "./0.jpg,b": "listed before",
    "1.jpg,": "no label",
    "2.jpg,a": f"{tmp_path}/2.jpg: No such file",
    f"{tmp_path}/0.jpg,a": "listed before",
    "sub//3.jpg,b": "",
    "sub/../sub/3.jpg,b": "listed before",
  }
  (tmp_path / "x.csv").write_text("\n".join(["file,label", *lines]))
  read = KINDS["csv:"](f"{tmp_path}/x.csv", Options())
  for entry, word in zip(entries_of(read), lines.values(), strict=True):
    assert word in entry.error and bool(word) == bool(entry.error)


# Sources that are refused: kind, files, --splits, and what the error names.


def of_csv(text, word):
  return "csv:", {"x.csv": text}, {}, word


def of_tars(names, splits, word):
  return "webdataset:", dict.fromkeys(names, b""), splits, word


def compressed(mode):
  members = [("1.jpg", encoded(1)), ("1.cls", b"1")]
  return {"x.tar": tar_of(members, f"w:{mode}")}


REFUSED = [
  of_csv(b"\xff\xfe", "UTF-8"),
  of_csv(b"file,label\n0.jpg,\n", "without any label"),
  of_csv(b"0.jpg,a\n1.jpg,b\n", "--image: .*0.jpg, a"),
  of_csv(b"file|label\n0.jpg|b\n", r"--image: .*file\|label"),
  of_csv(b"file,b,c\n0.jpg,1.0,0.0\n", "--label: .*0 or 1 .*: b, c"),
  of_csv(b"file,image,label\n0,1,a\n", "--image: got file and image"),
  of_csv(b"file,label\n1.jpg\n", "a cell for each of file, label"),
  of_csv(b"file,label\n1.jpg,sea,sky\n", r"'sky'\], .* \| between"),
  of_tars([], {}, ".tar"),
  of_tars(FILES, {"test": None}, "--splits: .*train, validation"),
  of_tars(["0.tar"], {"train": "x*"}, r"train=x\* \(0 files"),
  of_tars(["0.tar"], {"train": "*", "test": "0*"}, "at most one"),
  of_tars([*FILES, "more.tar"], {}, "1 files of no split .*more.tar"),
  ("webdataset:", compressed("xz"), {}, r"x\.tar is broken after 0"),
  ("parquet:", {"x.parquet": b"PAR1"}, {}, "no whole parquet file"),
  ("folder:", {"cat/1.jpg": b"", "cat /1.jpg": b""}, {}, "'cat '"),
]


@pytest.mark.parametrize("kind, contents, splits, word", REFUSED)
def test_sources_that_are_refused(kind, contents, splits, word, tmp_path):
  for name, data in contents.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(data)
  with pytest.raises(ValueError, match=word):
    KINDS[kind](str(tmp_path), Options(splits=splits))
