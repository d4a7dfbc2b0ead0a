"""Images with labels in tables: "csv:labels.csv", "parquet:/path".

A table is read as `vit-jax prepare` reads it. Options follow the path:

  image=COLUMN       column of the images
  labels=A,B         column of the classes, or columns of 0 and 1
  numbers=A,B        columns of numbers to predict
  group=COLUMN       rows with equal cells are on one side of every split

as in "csv:labels.csv?labels=breed&group=patient". Files named as splits are the
splits; a single one is divided into `train` and `val`, see `data.listed`. Rows
without a label or without an image are left out, and a note says how many. The
images of parquet files stay in memory.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data import listed, splits
from vit_jax.data.folder import FolderSource
from vit_jax.data.listed import Listed
from vit_jax.data.source import Record
from vit_jax.data.splits import SPLIT_FOLDERS
from vit_jax.data.tf_cpu import tf
from vit_jax.finetune.data.imports import csv_files, files, parquet
from vit_jax.finetune.data.imports.listing import (
  Classes,
  Numbers,
  Options,
  class_columns,
  common_names,
  find_classes,
  find_column,
  label_columns,
  of_zeros_and_ones,
)
from vit_jax.paths import printable, with_options

CSV, PARQUET = "csv:", "parquet:"
IN_MEMORY = 4 * 2**30  # bytes of parquet files; larger ones are imported
_SYNONYMS = {name: k for k, names in SPLIT_FOLDERS.items() for name in names}
_NAMES = {"train": "train", "validation": "val", "test": "test"}


class _Row(NamedTuple):
  """A row: the name of its image, its label, its group; or why it has none."""

  name: str
  label: int | tuple[int, ...] | np.ndarray
  group: str | None = None
  error: str = ""


class _Contents(NamedTuple):
  """The contents of a table.

  classes: Its classes, or its numbers.
  items: Split -> its images, in order.
  labels: Name -> its label.
  remarks: Sentences for the user.
  bytes_of: Name -> the image; {} if names are files.
  """

  classes: Classes | Numbers
  items: dict[str, list[listed.Item]]
  labels: dict[str, int | tuple[int, ...] | np.ndarray]
  remarks: list[str]
  bytes_of: dict[str, bytes]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class InMemory(Listed):
  """Encoded images in memory; `paths` are their names."""

  images: tuple[bytes, ...] = dataclasses.field(repr=False)

  @functools.cached_property
  def _labels(self) -> tf.Tensor:
    with tf.init_scope():  # the first use may be inside a traced function
      return tf.constant(self.path_labels)

  @functools.cached_property
  def _identity(self) -> str:
    digest = hashlib.sha256(self.path_labels.tobytes())
    for image in self.images:
      digest.update(hashlib.sha256(image).digest())
    return f"images {digest.hexdigest()[:16]}"

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    image = tf.numpy_function(
      lambda index: self.images[int(index)],
      [raw["index"]],
      tf.string,
      stateful=False,
    )
    label = tf.gather(self._labels, raw["index"])
    image = tf.ensure_shape(image, [])
    return {"image": image, "label": label, "index": raw["index"]}


def open_table(dataset: str, split: str, data_dir: str | None) -> Listed:
  """Opens "csv:PATH" or "parquet:PATH"; a path may be a file, folder or glob.

  Raises:
    ValueError: There are no such files, columns or splits; or the labels cannot
      be used; or parquet files are too large for the memory.
  """
  del data_dir
  name, given = with_options(dataset)
  prefix, _, path = name.partition(":")
  path = os.path.abspath(os.path.expanduser(path))
  scan = _scan(path, f"{prefix}:", tuple(given.items()), dataset, _stamp(path))
  sizes = {k: len(items) for k, items in scan.items.items()}
  items = [
    item
    for span in splits.parse_split(split, sizes, synonyms=_SYNONYMS)
    for item in scan.items[span.split][span.start : span.stop]
  ]
  names = scan.classes.names
  is_regression = isinstance(scan.classes, Numbers)
  if len(names) == 1 and not (is_regression or scan.classes.is_multilabel):
    raise ValueError(
      f"got {dataset!r} with one class, {names[0]!r}, expected two or more."
    )
  fields = {
    "name": dataset,
    "split": split,
    "num_examples": len(items),
    "num_classes": len(names),
    "class_names": tuple(map(printable, names)),
    "is_multilabel": scan.classes.is_multilabel,
    "is_regression": is_regression,
    "remark": " ".join(scan.remarks),
    "paths": tuple(item.path for item in items),
    "path_labels": _array([scan.labels[i.path] for i in items], scan.classes),
    "ranks": np.array([item.rank for item in items]),
  }
  if not scan.bytes_of:
    return FolderSource(**fields)
  return InMemory(images=tuple(scan.bytes_of[i.path] for i in items), **fields)


def _array(labels: list[Any], classes: Classes | Numbers) -> np.ndarray:
  """Returns the labels as `Listed` has them."""
  if isinstance(classes, Numbers):
    return np.stack(labels)
  if not classes.is_multilabel:
    return np.array(labels, np.int32)
  array = np.zeros([len(labels), len(classes.names)], np.float32)
  for row, chosen in zip(array, labels, strict=True):
    row[list(chosen)] = 1
  return array


def _stamp(path: str) -> tuple[int, ...]:
  """Returns the times of change of the files; a scan is valid until then."""
  try:
    return (os.stat(path).st_mtime_ns,)
  except OSError:  # a glob, or a file that the reader names
    return ()


@functools.lru_cache(maxsize=2)
def _scan(
  path: str,
  prefix: str,
  given: tuple[tuple[str, str], ...],
  dataset: str,
  stamp: tuple[int, ...],
) -> _Contents:
  """Reads a table, and the bytes of files that may be copies."""
  del stamp
  of = dict(given)
  numbers = of.get("numbers", "").split(",")
  options = Options(
    image=of.get("image"),
    label=of.get("labels"),
    numbers=tuple(filter(None, map(str.strip, numbers))),
    dashes="",
  )
  if options.numbers and options.label:
    raise ValueError(
      f"labels: got {options.label!r} beside numbers={of['numbers']}, expected"
      " one of the two."
    )
  read = _read_csv if prefix == CSV else _read_parquet
  return read(path, options, of.get("group", ""), dataset)


def _read_csv(
  path: str, options: Options, group: str, dataset: str
) -> _Contents:
  paths = _by_split(path, (".csv", ".tsv"), options, CSV)
  every = [file for of_split in paths.values() for file in of_split]
  table = csv_files.read(every, options, group)
  labels = [row.label for rows in table.rows.values() for row in rows]
  classes = find_classes(
    labels, options, table.columns, class_columns(table.columns), dataset
  )

  def row_of(row: csv_files.Row) -> _Row:
    label = classes.label(row.label)
    if label is None:
      return _Row(row.name, -1, error=classes.missing)
    if row.path is None:
      return _Row(row.name, -1, error="names no file")
    return _Row(os.path.normpath(row.path), label, row.group)

  by_split = {
    split: [row_of(row) for file in files for row in table.rows[file]]
    for split, files in paths.items()
  }
  root = path if os.path.isdir(path) else os.path.dirname(path)
  return _arranged(dataset, by_split, classes, root)


def _read_parquet(
  path: str, options: Options, group: str, dataset: str
) -> _Contents:
  paths = _by_split(path, (".parquet",), options, PARQUET)
  every = [file for of_split in paths.values() for file in of_split]
  size = sum(map(os.path.getsize, every))
  if size > IN_MEMORY:
    raise ValueError(
      f"got {dataset!r} of {size / 2**30:.1f} GiB, expected at most"
      f" {IN_MEMORY / 2**30:.0f} GiB, which stay in memory; import it: vit-jax"
      f" prepare {PARQUET}{path} --name=NAME."
    )
  root = os.path.dirname(os.path.commonpath(every))
  tables = {file: parquet.table(file, root) for file in every}
  first = tables[every[0]]
  image = options.image
  if image is None:
    image = find_column("image", None, ("image",), first.columns, dataset)
  others = [column for column in first.columns if column != group]
  columns = label_columns(options, image, others, dataset)
  names = class_columns(columns)
  if len(columns) == 1 and not options.numbers:
    known = {t.name: t.class_names(columns[0]) for t in tables.values()}
    names = common_names(known, dataset)
  if group:
    find_column("group", group, (), first.columns, dataset)
  cells = {file: [*t.rows(columns)] for file, t in tables.items()}
  values = {
    file: _values(rows, columns, options, dataset)
    for file, rows in cells.items()
  }
  labels = [label for of_file in values.values() for label in of_file]
  classes = find_classes(labels, options, columns, names, dataset)
  bytes_of: dict[str, bytes] = {}

  def rows(file: str):
    table = tables[file]
    groups = [g for (g,) in table.rows([group])] if group else None
    for i, ((picture,), value) in enumerate(
      zip(table.rows([image]), values[file], strict=True)
    ):
      name, label, error = f"{table.name}:{i}", classes.label(value), ""
      try:
        bytes_of[name] = parquet.image_bytes(picture)
      except ValueError as e:
        error = str(e)
      if label is None:
        error = classes.missing
      of = groups[i] if groups else None
      yield _Row(name, label, None if of is None else str(of), error)

  by_split = {
    split: [row for file in files for row in rows(file)]
    for split, files in paths.items()
  }
  first_of: dict[bytes, str] = {}
  digests = {k: hashlib.sha256(v).digest() for k, v in bytes_of.items()}
  same = {k: first_of.setdefault(v, k) for k, v in digests.items()}
  scan = _arranged(dataset, by_split, classes, "", same)
  return scan._replace(bytes_of=bytes_of)


def _by_split(
  path: str, suffixes: tuple[str, ...], options: Options, prefix: str
) -> dict[str, list[str]]:
  """Returns the files of each split; a file alone has no splits."""
  if os.path.isfile(path):
    return {listed.WHOLE: [path]}
  by_split = files.by_split(path, suffixes, options, prefix)
  if [*by_split] == ["train"]:
    return {listed.WHOLE: by_split["train"]}
  return {_NAMES[k]: v for k, v in by_split.items()}


def _values(
  rows: list[tuple], columns: Sequence[str], options: Options, where: str
) -> list[Any]:
  """Returns the label of each row of a parquet file, for `find_classes`."""
  if options.numbers:
    return [r[0] if isinstance(r[0], list) else [*r] for r in rows]
  if len(columns) == 1:
    return [row[0] for row in rows]
  return of_zeros_and_ones(rows, columns, where)


def _arranged(
  dataset: str,
  by_split: dict[str, list[_Row]],
  classes: Classes | Numbers,
  root: str,
  same: listed.Same | None = None,
) -> _Contents:
  """Divides the rows that can be used, and says which cannot.

  Args:
    dataset: Name of the data set, for messages.
    by_split: The rows of each split.
    classes: Their classes, or numbers.
    root: Folder of the images.
    same: See `listed.arranged`.

  Raises:
    ValueError: No row can be used; or see `listed.with_groups`.
  """
  labels, groups, left_out = {}, {}, []
  images: dict[str, listed.Files] = {}
  has_names = not (classes.is_multilabel or isinstance(classes, Numbers))
  for split, rows in by_split.items():
    # All numbers, or sets of classes, are divided together.
    names = classes.names if has_names else ("",)
    images[split] = {name: [] for name in names}
    for row in rows:
      error = row.error or ("is listed before" if row.name in labels else "")
      if error:
        left_out.append((row.name, error))
        continue
      labels[row.name] = row.label
      images[split][names[row.label] if has_names else ""].append(row.name)
      if row.group is not None:
        groups[row.name] = row.group
  total = sum(map(len, by_split.values()))
  if not labels:
    raise ValueError(
      f"got {dataset!r} with {total:,} rows, of which none can be used:"
      f" {' '.join(left_out[0]) if left_out else 'there are none'}."
    )
  remarks = []
  if left_out:
    name, error = left_out[0]
    remarks.append(
      f"{len(left_out):,} of {total:,} rows of {dataset!r} are left out, such"
      f" as {printable(name)}, which {error}."
    )
  if not isinstance(classes, Numbers):
    remarks += listed.missing_remarks(classes.names, dataset)
  relative: Callable[[str, str], str] = lambda _, path: (
    os.path.relpath(path, root) if root else path
  )
  items, more = listed.arranged(dataset, images, relative, groups, same)
  return _Contents(classes, items, labels, [*remarks, *more], {})
