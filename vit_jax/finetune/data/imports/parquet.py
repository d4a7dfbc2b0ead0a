"""Parquet files with a column of encoded images and one of labels.

The images are bytes, or a struct with a field `bytes`, as Hugging Face writes
them. Class names in Hugging Face's metadata are used. If labels are lists, the
data set is multi-label. Columns named by `--numbers` are numbers to predict.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator

from vit_jax.config import json_file
from vit_jax.finetune.data.imports import files
from vit_jax.finetune.data.imports.listing import (
  LABEL_COLUMNS,
  Classes,
  Entry,
  Listing,
  Numbers,
  Options,
  Split,
  check_lists,
  common_names,
  numbers_error,
  pick_column,
  usual_columns,
)

_ROW_NUMBERS = {"id", "idx", "index", "__index_level_0__"}  # the last: pandas
_ROWS = 64  # images in memory at a time
_LABELS = 1000  # labels in memory at a time


@dataclasses.dataclass(frozen=True)
class _Feature:
  """What is read of a column in Hugging Face's metadata."""

  names: tuple[str, ...] = ()


def broken() -> tuple[type[Exception], ...]:
  """Returns what pyarrow raises on damaged files."""
  import pyarrow  # here, because other kinds do not need it

  return pyarrow.ArrowException, OSError, ValueError, OverflowError


def scan(path: str, options: Options) -> Listing:
  """Lists parquet files; reads their columns of labels, but no image.

  Raises:
    ValueError: No files, files that cannot be read, or no such columns.
  """
  from pyarrow import parquet, types

  where = f"parquet:{path}"
  by_split = files.by_split(path, (".parquet",), options, "parquet:")
  opened = {}
  for file in [path for paths in by_split.values() for path in paths]:
    try:
      opened[file] = parquet.ParquetFile(file)
    except broken() as e:
      raise ValueError(
        f"got {file}, which is no whole parquet file ({e}); expected one."
      ) from None
  first, *rest = (f.schema_arrow for f in opened.values())
  image, labels, remarks = _columns(first, options, where)
  kinds = [first.field(label).type for label in labels]
  is_regression = bool(options.numbers)
  for file, schema in zip(list(opened)[1:], rest, strict=True):
    lacks = [c for c in (image, *labels) if c not in schema.names]
    if lacks:
      raise ValueError(
        f"got {file} without the column {lacks[0]!r}, expected that of"
        f" {next(iter(opened))}."
      )
  is_multilabel = not is_regression and _element(kinds[0]) is not None
  if is_multilabel:
    check_lists(_lists(opened, labels[0]), labels[0], where)
    if types.is_floating(_element(kinds[0])):
      raise ValueError(numbers_error(str(kinds[0]), labels[0], where))
  if is_regression:
    classes = Numbers(labels, _length(opened, labels[0]), where)
  else:
    classes = _classes(opened, labels[0], is_multilabel, options, where)
  root = os.path.commonpath(list(map(os.path.dirname, opened)))

  def split_of(paths: list[str]) -> Split:
    def entries() -> Iterator[Entry]:
      for path in paths:
        name, row = os.path.relpath(path, root or "."), 0
        batches = opened[path].iter_batches(_ROWS, columns=[image, *labels])
        try:
          for record in (r for batch in batches for r in batch.to_pylist()):
            label = [record[column] for column in labels]
            if not is_regression or isinstance(label[0], list):
              (label,) = label
            yield _entry(f"{name}:{row}", record[image], label, classes)
            row += 1
        except broken() as e:
          yield Entry(name, error=f"is broken after {row} records: {e}")

    return Split(sum(opened[p].metadata.num_rows for p in paths), entries)

  splits = {k: split_of(v) for k, v in by_split.items()}
  return Listing(classes.names, splits, is_multilabel, remarks, is_regression)


def _classes(
  opened: dict, label: str, is_multilabel: bool, options: Options, where: str
) -> Classes:
  """Returns the classes of the column of labels."""
  labels = set()
  for path, file in opened.items():
    with _reading(path, label):
      for batch in file.iter_batches(_LABELS, columns=[label]):
        column = batch.column(0)
        values = column.flatten() if is_multilabel else column
        labels.update(values.unique().to_pylist())
  class_names = common_names(
    {p: _names(f.schema_arrow, label, p) for p, f in opened.items()}, where
  )
  class_names = options.classes or class_names
  return Classes(labels, class_names, where, is_multilabel, label)


def _length(opened: dict, label: str) -> int:
  """Returns the number of numbers in a column, that of its longest list."""
  return max(map(len, _lists(opened, label)), default=1) or 1


def _lists(opened: dict, label: str) -> Iterator[list]:
  """Yields the lists in a column."""
  for path, file in opened.items():
    with _reading(path, label):
      for batch in file.iter_batches(_LABELS, columns=[label]):
        values = batch.column(0).to_pylist()
        yield from (v for v in values if isinstance(v, list))


@contextlib.contextmanager
def _reading(path: str, column: str) -> Iterator[None]:
  """Names the file and the column in errors of the library."""
  try:
    yield
  except broken() as e:
    raise ValueError(
      f"got {path}, whose column {column!r} cannot be read ({e}); copy the"
      " file again."
    ) from None


def _entry(key: str, image, label, classes: Classes | Numbers) -> Entry:
  if isinstance(image, dict):
    image = image["bytes"]
  known = classes.label(label)
  if known is None or not image:
    return Entry(key, error="has no label" if known is None else "has no image")
  return Entry(key, image, known)


def _element(kind):
  """Returns the type of the elements of a list; None for other types."""
  from pyarrow import types

  is_list = (types.is_list, types.is_large_list, types.is_fixed_size_list)
  return kind.value_type if any(is_a(kind) for is_a in is_list) else None


def _columns(
  schema, options: Options, where: str
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
  """Returns the column of the images, those of the labels, and remarks."""
  from pyarrow import types

  images, labels, real = {}, {}, {}
  for field in schema:
    kind = field.type
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
      kind = kind.field("bytes").type
    if types.is_binary(kind) or types.is_large_binary(kind):
      images[field.name] = str(field.type)
      continue
    kind = _element(kind) or kind
    if types.is_dictionary(kind):
      kind = kind.value_type
    if types.is_integer(kind):
      labels[field.name] = str(field.type)
    elif types.is_string(kind) or types.is_large_string(kind):
      labels[field.name] = str(field.type)
    elif types.is_floating(kind):
      real[field.name] = str(field.type)
  kinds = {field.name: str(field.type) for field in schema}
  image, *remarks = pick_column("image", images, kinds, options.image, where)
  if options.numbers:
    is_list = lambda column: _element(schema.field(column).type) is not None
    several = len(options.numbers) > 1  # a list is a column by itself
    wrong = [
      c
      for c in options.numbers
      if c not in {**labels, **real} or (several and is_list(c))
    ]
    if wrong:
      listed = ", ".join(f"{k}: {v}" for k, v in kinds.items())
      raise ValueError(
        f"--numbers: got {', '.join(wrong)}, expected columns of numbers in"
        f" {where}, of: {listed}."
      )
    return image, options.numbers, tuple(filter(None, remarks))
  # A column of real numbers may hold whole numbers, which are classes. It is a
  # candidate if the user or its name says so, or if all other candidates are
  # row numbers.
  wanted = {options.label, *usual_columns(real, LABEL_COLUMNS)}
  if {*map(str.lower, labels)} <= _ROW_NUMBERS:
    wanted = {*real}
  labels |= {k: v for k, v in real.items() if k in wanted}
  try:
    label, remark = pick_column("label", labels, kinds, options.label, where)
  except ValueError as e:
    if options.label is not None or not real:
      raise
    single = [c for c in real if _element(schema.field(c).type) is None]
    numbers = ",".join(single or [*real][:1])  # a list is a column by itself
    raise ValueError(
      f"{e} To predict real numbers: --numbers={numbers}."
    ) from None
  return image, (label,), tuple(filter(None, (*remarks, remark)))


def _names(schema, label: str, path: str) -> tuple[str, ...] | None:
  """Returns the names of the classes in Hugging Face's metadata."""
  metadata = (schema.metadata or {}).get(b"huggingface")
  if not metadata:
    return None
  where = f"{path}: metadata of Hugging Face"
  values = json_file.parse(metadata, where)
  for key in ("info", "features", label):
    values = (values.get(key) if isinstance(values, dict) else None) or {}
  if isinstance(values, dict) and "feature" in values:  # of a list
    values = values["feature"]
  elif (
    isinstance(values, list) and len(values) == 1
  ):  # as older versions wrote it
    (values,) = values
  return json_file.build(_Feature, values, f"{where}: {label}").names or None
