"""CSV and parquet files as data sets, without an import."""

import kinds
import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from vit_jax.data import sources
from vit_jax.data.tf_cpu import tf


def encoded(number):
  return kinds.encoded(Image.new("RGB", (8, 8), (number,) * 3), "PNG")


def write(root, head, rows, folder="images", name="labels.csv"):
  """Writes a CSV, and an image for each first cell; returns its name."""
  (root / folder).mkdir(parents=True, exist_ok=True)
  for i, row in enumerate(rows):
    file = row[0] if "." in row[0] else f"{row[0]}.png"
    (root / folder / file.rpartition("/")[2]).write_bytes(encoded(i))
  lines = [head, *(",".join(map(str, row)) for row in rows)]
  (root / name).write_text("\n".join(lines))
  return f"csv:{root / name}"


def first_pixels(source):
  """Record name -> its first pixel."""
  return {
    source.record_name(int(record["index"])): int(
      tf.io.decode_png(record["image"])[0, 0, 0]
    )
    for record in source.records()
  }


def test_ids_without_endings_in_a_folder_beside_the_csv(tmp_path):
  """As in many competitions; the columns have any names."""
  rows = [(f"id{i:02}", "cat" if i % 2 else "dog") for i in range(20)]
  dataset = write(tmp_path, "id,breed", rows, "train_images")
  train, val = (sources.open_source(dataset, s) for s in ("train", "val"))
  assert train.class_names == ("cat", "dog") and train.num_examples == 18
  assert sorted(val.labels()) == [0, 1]
  for name, pixel in first_pixels(val).items():
    assert name.endswith(f"train_images/id{pixel:02}.png")


def test_an_id_of_two_images_is_that_of_the_split_of_the_csv(tmp_path):
  rows = [(f"{i}", "ab"[i % 2]) for i in range(8)]
  write(tmp_path, "id,label", rows, "test_images", "other.csv")
  dataset = write(tmp_path, "id,label", rows, "train_images", "train.csv")
  dataset += "?image=id"
  source = sources.open_source(dataset, "train")
  assert all("train_images" in path for path in source.paths)
  with pytest.raises(ValueError, match="may be .* or .*, expected a name with"):
    sources.open_source(f"csv:{tmp_path}/other.csv?image=id", "train")


def test_a_column_for_each_class(tmp_path):
  """One 1 in each row is one class; the order is that of the columns."""
  rows = [(f"ISIC_{i}", *np.eye(3)[i % 3]) for i in range(12)]
  dataset = write(tmp_path, "image,NV,MEL,BCC", rows)
  source = sources.open_source(f"{dataset}?labels=NV,MEL,BCC", "train")
  assert source.class_names == ("NV", "MEL", "BCC")
  assert not source.is_multilabel and {*source.labels()} == {0, 1, 2}
  pairs = sources.open_source(f"{dataset}?labels=NV,MEL", "train+val")
  assert pairs.is_multilabel and pairs.num_classes == 2
  assert sorted(pairs.labels().sum(1)) == [0] * 4 + [1] * 8
  (record,) = pairs.records(0, 1)
  assert record["label"].numpy().tolist() == pairs.path_labels[0].tolist()


def test_several_labels_without_splits_get_some(tmp_path):
  rows = [(f"{i}.png", ["a", "a|b", ""][i % 3]) for i in range(30)]
  dataset = write(tmp_path, "file,label", rows, ".")
  parts = sources.Sources().train_val_test(dataset, "80%")
  found = [sources.open_source(dataset, part) for part in parts]
  assert all(source.is_multilabel for source in found)
  assert sum(source.num_examples for source in found) == 30
  paths = [path for source in found for path in source.paths]
  assert len({*paths}) == 30


def test_numbers_of_a_csv(tmp_path):
  rows = [(f"{i}.png", i / 2, 100 - i) for i in range(20)]
  dataset = write(tmp_path, "file,age,size", rows, ".")
  source = sources.open_source(f"{dataset}?numbers=age,size", "val")
  assert source.is_regression and source.class_names == ("age", "size")
  for name, pixel in first_pixels(source).items():
    at = source.paths.index(name)
    assert source.labels()[at].tolist() == [pixel / 2, 100 - pixel]


LABELLED = [("0.png", "a", "-1"), ("1.png", "a", "0")]
# The header, what follows the path, and what the error names.
REFUSED = [
  ("image,NV,MEL", "", "NV, MEL"),
  ("file,x,b", "?labels=x,b", "'a' in the column x .* 0 or 1"),
  ("file,age,size", "?numbers=size&labels=age", "one of the two"),
  ("file,label,x", "", "one class, 'a'"),
]


@pytest.mark.parametrize("head, query, words", REFUSED)
def test_tables_that_are_refused(head, query, words, tmp_path):
  dataset = write(tmp_path, head, LABELLED, ".")
  with pytest.raises(ValueError, match=words):
    sources.open_source(dataset + query, "train")


@pytest.mark.parametrize("kind", ["csv:", "parquet:"])
def test_rows_of_a_group_are_on_one_side(kind, tmp_path):
  rows = [(f"{i}.png", "ab"[i % 2], f"p{i // 4}") for i in range(60)]
  dataset = write(tmp_path, "file,breed,patient", rows, ".")
  patient = {f"{i}.png": f"p{i // 4}" for i in range(60)}
  if kind == "parquet:":
    columns = {
      "image": [encoded(i) for i in range(60)],
      "breed": [row[1] for row in rows],
      "patient": [row[2] for row in rows],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    dataset = f"parquet:{tmp_path}/t.parquet"
    patient = {f"t.parquet:{i}": f"p{i // 4}" for i in range(60)}
  dataset += "?group=patient"
  opened = sources.Sources()
  groups = []
  for part in opened.train_val_test(dataset, "80%"):
    source = opened.open(dataset, part)
    names = [path.rpartition("/")[2] for path in source.paths]
    groups.append({patient[name] for name in names})
    assert {*source.labels()} == {0, 1}
    for name, pixel in first_pixels(source).items():
      assert patient[name.rpartition("/")[2]] == f"p{pixel // 4}"
  whole = set().union(*groups)
  assert all(groups) and sum(map(len, groups)) == len(whole) == 15


def test_files_named_as_splits_are_the_splits(tmp_path):
  for i, split in enumerate(("train", "val", "test")):
    rows = [(f"{10 * i + j}.png", "ab"[j % 2]) for j in range(4)]
    write(tmp_path, "file,label", rows, ".", f"{split}.csv")
  dataset = f"csv:{tmp_path}"
  parts = sources.Sources().train_val_test(dataset, "90%")
  assert parts == ("train", "val", "test")
  sizes = [sources.open_source(dataset, part).num_examples for part in parts]
  assert sizes == [4, 4, 4]


def test_rows_that_cannot_be_used_are_said(tmp_path):
  rows = [(f"{i}.png", "ab"[i % 2]) for i in range(8)]
  rows += [("8.png", ""), ("0.png", "b"), ("9.png", "None")]
  dataset = write(tmp_path, "file,label", rows, ".")
  note = sources.open_source(dataset, "train").note()
  assert "2 of 11 rows" in note and "8.png, which has no label" in note
  assert "'None', which may stand for a missing label" in note


def test_large_parquet_files_are_imported(tmp_path, monkeypatch):
  from vit_jax.finetune.data import table_source

  columns = {"image": [encoded(0)] * 4, "label": [0, 1, 0, 1]}
  parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
  monkeypatch.setattr(table_source, "IN_MEMORY", 10)
  with pytest.raises(ValueError, match="vit-jax prepare parquet:"):
    sources.open_source(f"parquet:{tmp_path}/t.parquet", "train")


def test_a_data_set_of_tfds_gets_the_splits_that_it_lacks():
  opened = sources.Sources(fake=True)
  splits = {
    name: opened.train_val_test(name, "80%")
    for name in ("uc_merced", "digits", "dtd")
  }
  assert splits == {
    "uc_merced": ("train[:72%]", "train[72%:90%]", "train[90%:]"),
    "digits": ("train[:80%]", "train[80%:]", "test"),
    "dtd": ("train", "validation", "test"),
  }
