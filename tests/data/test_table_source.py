"""CSV and parquet files as data sets, without an import."""

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from vit_jax.data import sources
from vit_jax.finetune.data import table_source


def write(root, head, rows, folder="images", name="labels.csv"):
  """Writes a CSV, and a file of each first cell, which has the row's number."""
  (root / folder).mkdir(parents=True, exist_ok=True)
  for i, row in enumerate(rows):
    file = row[0] if "." in row[0] else f"{row[0]}.png"
    (root / folder / file).write_text(str(i))  # none is decoded
  lines = [head, *(",".join(map(str, row)) for row in rows)]
  (root / name).write_text("\n".join(lines))
  return f"csv:{root / name}"


def opened(dataset, split="train"):
  return sources.open_source(dataset, split)


def rows_of(source):
  """The number of each record's row, and its label."""
  return [
    (int(r["image"].numpy()), r["label"].numpy()) for r in source.records()
  ]


def test_ids_without_endings_in_a_folder_beside_the_csv(tmp_path):
  """As in many competitions; the columns have any names."""
  rows = [(f"id{i:02}", "cat" if i % 2 else "dog") for i in range(20)]
  dataset = write(tmp_path, "id,breed", rows, "train_images")
  train, val = opened(dataset), opened(dataset, "val")
  assert train.class_names == ("cat", "dog") and train.num_examples == 18
  assert sorted(val.labels()) == [0, 1]
  for i, (row, label) in enumerate(rows_of(val)):
    assert label == (row + 1) % 2
    assert val.record_name(i).endswith(f"train_images/id{row:02}.png")


def test_an_id_of_two_images_is_that_of_the_split_of_the_csv(tmp_path):
  rows = [(f"{i}", "ab"[i % 2]) for i in range(8)]
  other = write(tmp_path, "id,label", rows, "test_images", "other.csv")
  dataset = write(tmp_path, "id,label", rows, "train_images", "train.csv")
  source = opened(f"{dataset}?image=id")
  assert all("train_images" in path for path in source.paths)
  with pytest.raises(ValueError, match="may be .* or .*, expected a name with"):
    opened(f"{other}?image=id")


def test_a_column_for_each_class(tmp_path):
  """One 1 in each row is one class; the order is that of the columns."""
  rows = [(f"ISIC_{i}", *np.eye(3)[i % 3]) for i in range(12)]
  dataset = write(tmp_path, "image,NV,MEL,BCC", rows)
  source = opened(f"{dataset}?labels=NV,MEL,BCC", "train+val")
  assert source.class_names == ("NV", "MEL", "BCC")
  assert not source.is_multilabel
  assert all(label == row % 3 for row, label in rows_of(source))
  pairs = opened(f"{dataset}?labels=NV,MEL", "train+val")
  assert pairs.is_multilabel and pairs.num_classes == 2
  for row, label in rows_of(pairs):
    assert label.tolist() == np.eye(3)[row % 3, :2].tolist()


def test_numbers_of_a_csv(tmp_path):
  rows = [(f"{i}.png", i / 2, 100 - i) for i in range(20)]
  dataset = write(tmp_path, "file,age,size", rows, ".")
  source = opened(f"{dataset}?numbers=age,size", "val")
  assert source.is_regression and source.class_names == ("age", "size")
  for row, label in rows_of(source):
    assert label.tolist() == [row / 2, 100 - row]


LABELLED = [("0.png", "a", "-1"), ("1.png", "a", "0")]


@pytest.mark.parametrize(
  "head, query, words",
  [
    ("image,NV,MEL", "", "NV, MEL"),
    ("file,x,b", "?labels=x,b", "'a' in the column x .* 0 or 1"),
    ("file,age,size", "?numbers=size&labels=age", "one of the two"),
    ("file,label,x", "", "one class, 'a'"),
  ],
)
def test_tables_that_are_refused(head, query, words, tmp_path):
  dataset = write(tmp_path, head, LABELLED, ".")
  with pytest.raises(ValueError, match=words):
    opened(dataset + query)


def test_splits_of_a_table_divide_its_rows(tmp_path):
  """Those of a group are on one side, also where rows have several labels."""
  rows = [
    (f"{i}.png", "ab"[i % 2], ["a", "a|b", ""][i % 3], f"p{i // 4}")
    for i in range(60)
  ]
  csv = write(tmp_path, "file,breed,several,patient", rows, ".")
  columns = {"image": [str(i).encode() for i in range(60)]}
  columns |= {"breed": [r[1] for r in rows], "patient": [r[3] for r in rows]}
  parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
  for dataset, of_a_group in (
    (f"{csv}?labels=breed&group=patient", 4),
    (f"parquet:{tmp_path}/t.parquet?labels=breed&group=patient", 4),
    (f"{csv}?labels=several", 1),
  ):
    found = sources.Sources()
    splits = found.train_val_test(dataset, "80%")
    parts = [rows_of(found.open(dataset, split)) for split in splits]
    groups = [{row // of_a_group for row, _ in part} for part in parts]
    assert all(groups) and sum(map(len, groups)) == 60 // of_a_group
    assert sorted(row for part in parts for row, _ in part) == [*range(60)]
    if of_a_group > 1:
      assert all(label == row % 2 for part in parts for row, label in part)


def test_files_named_as_splits_are_the_splits(tmp_path):
  for i, split in enumerate(("train", "val", "test")):
    rows = [(f"{10 * i + j}.png", "ab"[j % 2]) for j in range(4)]
    write(tmp_path, "file,label", rows, ".", f"{split}.csv")
  dataset = f"csv:{tmp_path}"
  parts = sources.Sources().train_val_test(dataset, "90%")
  assert parts == ("train", "val", "test")
  assert [opened(dataset, part).num_examples for part in parts] == [4, 4, 4]


def test_rows_that_cannot_be_used_are_said(tmp_path):
  rows = [(f"{i}.png", "ab"[i % 2]) for i in range(8)]
  rows += [("8.png", ""), ("0.png", "b"), ("9.png", "None")]
  note = opened(write(tmp_path, "file,label", rows, ".")).note()
  assert "2 of 11 rows" in note and "8.png, which has no label" in note
  assert "'None', which may stand for a missing label" in note


def test_large_parquet_files_are_imported(tmp_path, monkeypatch):
  columns = {"image": [b"0"] * 4, "label": [0, 1, 0, 1]}
  parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
  monkeypatch.setattr(table_source, "IN_MEMORY", 1)
  with pytest.raises(ValueError, match="vit-jax prepare parquet:"):
    opened(f"parquet:{tmp_path}/t.parquet")


def test_a_data_set_of_tfds_gets_the_splits_that_it_lacks():
  fake = sources.Sources(fake=True)
  names = ("uc_merced", "digits", "dtd")
  assert [fake.train_val_test(name, "80%") for name in names] == [
    ("train[:72%]", "train[72%:90%]", "train[90%:]"),
    ("train[:80%]", "train[80%:]", "test"),
    ("train", "validation", "test"),
  ]
