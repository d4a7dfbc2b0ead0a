"""What an import finds: splits, classes, columns, and errors of a source."""

import lzma
import os
import pathlib
import tarfile
import tempfile

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importable import NAMES, SPLITS, encoded, images, tar_of
from pyarrow import parquet

from vit_jax.finetune.data.imports import KINDS, files, hugging_face, listing
from vit_jax.finetune.data.imports.listing import Options

# Columns of labels, each read on its own.
COLUMNS = {
  "breed": [1, 0, 1],
  "real": [1.5, None, 0.5],
  "many": [["c", "a"], [], ["b"]],
  "zeros": [["0", "1", "0"], [], ["1"]],  # a 0 or 1 for each class
}


@pytest.fixture(params=["csv:", "parquet:", "hf:"])
def table(request, tmp_path):
  """Three images with `COLUMNS`, as a function of the options."""
  kind, path = request.param, str(tmp_path / "train")
  images = [{"bytes": encoded(i)} for i in range(3)]
  columns = {"image": images, **COLUMNS}
  if kind == "parquet:":
    path += ".parquet"
    parquet.write_table(pyarrow.table(columns), path)
  elif kind == "hf:":
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(columns)
    made.cast_column("image", datasets.Image()).save_to_disk(path)
  else:
    path += ".csv"
    names = [f"{i}.jpg" for i in range(3)]
    write_images(tmp_path, names)
    lines = [["image", *COLUMNS]]
    for i, cells in enumerate(zip(*COLUMNS.values(), strict=True)):
      texts = ["|".join(c) if isinstance(c, list) else str(c) for c in cells]
      lines.append([names[i], *(t.replace("None", "") for t in texts)])
    pathlib.Path(path).write_text("\n".join(map(",".join, lines)))
  return lambda **options: KINDS[kind](path, Options(**options))


def write_images(root, names):
  for i, name in enumerate(names):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(encoded(i))


def entries_of(listed):
  return [*listed.splits["train"].entries()]


def labels_of(listed):
  return [e.error or e.label for e in entries_of(listed)]


# Tars.


def test_tars_of_images_and_classes(tmp_path):
  """Two of each split, one of them compressed."""
  for split, records in SPLITS.items():
    for part, (suffix, mode) in enumerate((("tar", "w"), ("tar.gz", "w:gz"))):
      members = []
      for i, (image, name) in enumerate(records[part::2]):
        form = "png" if image.startswith(b"\x89PNG") else "JPG"
        members.append((f"x/{i:04}.cls", name.encode()))
        members += [(f"x/{i:04}.{form}", image), (f"x/{i:04}.json", b"{}")]
      path = tmp_path / f"a-{split}-{part}.{suffix}"
      path.write_bytes(tar_of(members, mode))
  listed = KINDS["webdataset:"](str(tmp_path), Options())
  assert listed.class_names == NAMES
  for name, records in SPLITS.items():
    split = listed.splits[name]
    found = [(e.image, NAMES[e.label]) for e in split.entries()]
    assert dict(found) == dict(records) and len(found) == split.count


def test_tars_with_errors(tmp_path):
  good = images(0, 3)
  members = []
  for i, (image, _) in enumerate(good):
    members += [(f"./._{i}.jpg", b"Mac OS X"), (f"{i}.jpg", image)]
    members += [(f"._{i}.cls", b"Mac OS X"), (f"{i}.cls", b"2\n")]
  members += [("3.jpg", good[0][0]), ("4.cls", b"1")]
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
    # The name begins as a file compressed with bzip2.
    members = {f"BZh.{name}": data for name, data in members.items()}
    members = [*members.items(), ("BZh.cls", b"0")]
    (tmp_path / "x.tar").write_bytes(tar_of(members))
    listed = KINDS["webdataset:"](str(tmp_path), Options(image=image))
    return [entry.error or entry.image for entry in entries_of(listed)]

  several = dict(seg_png=encoded(0), jpg=encoded(1))
  assert read(JPG=encoded(0), json=b"{}") == [encoded(0)]
  assert read(".SEG.png", **several) == [encoded(0)]
  assert read("jpg", **several) == [encoded(1)]
  for image, count in ((None, 2), ("gif", 0)):
    (error,) = read(image, **several)
    assert f"{count} images among seg.png, jpg" in error


# Classes.


# Labels, names of classes that are given, names, and the class of each.
CLASSES = [
  ([b"b", "a ", None, ""], None, ("a", "b"), [1, 0, -1, -1]),
  (["07", " 7\n", "cat"], None, ("07", "7", "cat"), [0, 1, 2]),
  (["00", "02", "-01"], None, ("0", "1", "2"), [0, 2, -1]),
  (["01", b"00 "], ("x", "y"), ("x", "y"), [1, 0]),
  (["1.0", 0.5], ("0.5", "1.0", "2"), ("0.5", "1.0", "2"), [1, 0]),
  (["1_000", "2_0"], None, ("1_000", "2_0"), [0, 1]),  # no numbers
]
NO_CLASSES = [
  ([None, -1], None, "without any label"),
  ([0, 3], ("a", "b"), "label 3"),
  (["c"], ("a", "b"), r"\['c'\]"),
  ([5, 70_000], None, "up to 70,000"),
  ([0], ("a", "a"), "two classes named 'a'"),
  ([1.0, None], None, "label 1.0 .* --classes.* --numbers"),  # as pandas has 1
  (["a", "nan"], None, "label nan"),
]


def test_classes_of_labels():
  for labels, known, names, expected in CLASSES:
    classes = listing.Classes(labels, known, "x")
    assert classes.names == names
    assert [classes.index(label) for label in labels] == expected
  for labels, known, word in NO_CLASSES:
    with pytest.raises(ValueError, match=word):
      listing.Classes(labels, known, "x")


def test_labels_in_columns_of_a_table(table):
  breed = table(label="breed")
  assert labels_of(breed) == [1, 0, 1] and breed.class_names == ("0", "1")
  assert [e.image for e in entries_of(breed)] == [encoded(i) for i in range(3)]
  # Real numbers are classes where these are listed, and one may be missing.
  names = ("0.5", "1.5")
  real = table(label="real", classes=names)
  assert real.class_names == names
  assert labels_of(real) == [1, "has no label", 0]
  # A list has any number of classes.
  many = table(label="many")
  assert many.is_multilabel and many.class_names == ("a", "b", "c")
  assert labels_of(many) == [(0, 2), (), (1,)]
  # A column of another kind than images has none.
  unfit = labels_of(table(image="many", label="breed"))
  assert all(isinstance(error, str) for error in unfit)


@pytest.mark.parametrize(
  "options, words",
  [
    ({}, "--label: got no value.*breed, real"),
    ({"label": "class"}, "--label: got class.*breed, real"),
    ({"image": "photo", "label": "breed"}, "--image: got photo.*breed, real"),
    ({"label": "real"}, "1.5 .* --numbers"),
    ({"label": "zeros"}, "expected different classes"),
  ],
)
def test_columns_that_are_refused(table, options, words):
  with pytest.raises(ValueError, match=words):
    table(**options)


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


def test_class_names_in_the_metadata_of_hugging_face(tmp_path):
  def read(metadata, label):
    table = pyarrow.table({"image": [encoded(0)], "label": [label]})
    written = table.replace_schema_metadata({b"huggingface": metadata})
    parquet.write_table(written, tmp_path / "x.parquet")
    return KINDS["parquet:"](str(tmp_path), Options())

  feature = b'{"names": ["ant", "bee", "cat"], "_type": "ClassLabel"}'
  of_lists = b"[%s]" % feature, b'{"feature":%s}' % feature  # older, newer
  for text, label in ((feature, 2), *((text, [0, 2]) for text in of_lists)):
    metadata = b'{"info": {"features": {"label": %s}}}' % text
    listed = read(metadata, label)
    assert listed.class_names == NAMES
    assert labels_of(listed) == [tuple(label) if text in of_lists else label]
  with pytest.raises(ValueError, match=r"x\.parquet: metadata"):
    read(metadata[:40], [0, 2])


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


def test_a_label_that_is_another_class_in_another_split_is_refused(tmp_path):
  """As where every split was numbered by the classes that it has."""
  datasets = pytest.importorskip("datasets")
  made = datasets.DatasetDict()
  for split, names in (("train", [*NAMES]), ("validation", ["ant", "cat"])):
    features = datasets.Features(
      {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    image = {"bytes": encoded(0), "path": None}
    made[split] = datasets.Dataset.from_dict(
      {"image": [image], "label": [1]}, features=features
    )
    made[split].to_parquet(tmp_path / f"{split}.parquet")
  made.save_to_disk(tmp_path)
  for kind in ("hf:", "parquet:"):
    with pytest.raises(ValueError, match="train.* than in .*validation"):
      KINDS[kind](str(tmp_path), Options())


# Splits by the names of files.

FILES = ["x-train-0.tar", "x-train-1.tar", "x-val.tar", "y/trainer.txt"]


def test_splits_by_the_names_of_files(tmp_path):
  def found(names, splits):
    root = pathlib.Path(tempfile.mkdtemp(dir=tmp_path))
    for name in names:
      (root / name).parent.mkdir(exist_ok=True)
      (root / name).touch()
    (root / "loop").symlink_to(".")
    options = Options(splits=splits)
    paths = files.by_split(str(root), (".tar",), options, "webdataset:")
    return {k: [os.path.relpath(p, root) for p in v] for k, v in paths.items()}

  whole = {"train": FILES[:2], "validation": FILES[2:3]}
  assert found(FILES, {}) == whole
  assert found(FILES, {"validation": None}) == {"validation": FILES[2:3]}
  # The last part of a path counts.
  names = ["test/train-1.tar", "test/2.tar"]
  assert found(names, {}) == {"train": names[:1], "test": names[1:]}
  names = ["00.tar", "sub/1.tar"]
  assert found(names, {}) == {"train": names}
  patterns = {"train": "0*", "extra": "sub/1.tar"}
  assert found(names, patterns) == {"train": names[:1], "extra": names[1:]}


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


def test_lists_and_columns_of_a_csv(two_images):
  text = "file,label\n0.jpg,b,\n1.jpg,a, ,\n"  # with empty columns
  listed, entries = read_csv(two_images, text)
  assert [e.label for e in entries] == [1, 0] and not listed.is_multilabel
  # Columns of any names, and one without.
  text = ",n,a,b,file\n0,1,x,0.jpg,no.jpg\n1,1,y,1.jpg,no.jpg\n"
  listed, entries = read_csv(two_images, text, image="b", label="a")
  assert [e.label for e in entries] == [0, 1]
  assert [e.image for e in entries] == [encoded(0), encoded(1)]


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


# A CSV, and what the error names.
WRONG_CSV = [
  (b"\xff\xfe", "UTF-8"),
  (b"file,label\n0.jpg,\n", "without any label"),
  (b"0.jpg,a\n1.jpg,b\n", "--image: .*0.jpg, a"),
  (b"file|label\n0.jpg|b\n", r"--image: .*file\|label"),
  (b"file,b,c\n0.jpg,1.0,0.0\n", "--label: .*0 or 1 .*: b, c"),
  (b"file,image,label\n0,1,a\n", "--image: got file and image"),
  (b"file,label\n1.jpg\n", "a cell for each of file, label"),
  (b"file,label\n1.jpg,sea,sky\n", r"'sky'\], .* \| between"),
]
# Names of tars, --splits, and what the error names.
WRONG_SPLITS = [
  ([], {}, ".tar"),
  (FILES, {"test": None}, "--splits: .*train, validation"),
  (["0.tar"], {"train": "x*"}, r"train=x\* \(0 files"),
  (["0.tar"], {"train": "*", "test": "0*"}, "at most one"),
  ([*FILES, "more.tar"], {}, "1 files of no split .*more.tar"),
]
# Kind, files, --splits, and what the error names.
REFUSED = [
  *(("csv:", {"x.csv": text}, {}, word) for text, word in WRONG_CSV),
  *(
    ("webdataset:", dict.fromkeys(names, b""), splits, word)
    for names, splits, word in WRONG_SPLITS
  ),
  (
    "webdataset:",
    {"x.tar": lzma.compress(tar_of([("1.cls", b"1")]))},
    {},
    r"x\.tar is broken after 0",
  ),
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
