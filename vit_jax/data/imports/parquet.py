"""Parquet files with a column of encoded images and one of labels.

The images are bytes, or a struct with a field `bytes`, as Hugging Face writes
them; names of classes in Hugging Face's metadata are used.
"""

import dataclasses
import os
from collections.abc import Iterator

from vit_jax.config import json_file
from vit_jax.data.imports import files
from vit_jax.data.imports.listing import (
  Classes,
  Entry,
  Listing,
  Options,
  Split,
  common_names,
  pick_column,
)

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
  from pyarrow import parquet

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
  image, label = _columns(first, options, where)
  for file, schema in zip(list(opened)[1:], rest, strict=True):
    lacks = [c for c in (image, label) if c not in schema.names]
    if lacks:
      raise ValueError(
        f"got {file} without the column {lacks[0]!r}, expected that of"
        f" {next(iter(opened))}."
      )
  labels = set()
  for path, file in opened.items():
    try:
      for batch in file.iter_batches(_LABELS, columns=[label]):
        labels.update(batch.column(0).unique().to_pylist())
    except broken() as e:
      raise ValueError(
        f"got {path}, whose column {label!r} cannot be read ({e}); copy the"
        " file again."
      ) from None
  class_names = common_names(
    {p: _names(f.schema_arrow, label, p) for p, f in opened.items()}, where
  )
  classes = Classes(labels, options.classes or class_names, where)
  root = os.path.commonpath(list(map(os.path.dirname, opened)))

  def split_of(paths: list[str]) -> Split:
    def entries() -> Iterator[Entry]:
      for path in paths:
        name, row = os.path.relpath(path, root or "."), 0
        batches = opened[path].iter_batches(_ROWS, columns=[image, label])
        try:
          for record in (r for batch in batches for r in batch.to_pylist()):
            yield _entry(f"{name}:{row}", record[image], record[label], classes)
            row += 1
        except broken() as e:
          yield Entry(name, error=f"is broken after {row} records: {e}")

    return Split(sum(opened[p].metadata.num_rows for p in paths), entries)

  return Listing(classes.names, {k: split_of(v) for k, v in by_split.items()})


def _entry(key: str, image, label, classes: Classes) -> Entry:
  if isinstance(image, dict):
    image = image["bytes"]
  index = classes.index(label)
  if index < 0 or not image:
    return Entry(key, error="has no label" if index < 0 else "has no image")
  return Entry(key, image, index)


def _columns(schema, options: Options, where: str) -> tuple[str, str]:
  from pyarrow import types

  images, labels = {}, {}
  for field in schema:
    kind = field.type
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
      kind = kind.field("bytes").type
    if types.is_binary(kind) or types.is_large_binary(kind):
      images[field.name] = str(field.type)
      continue
    if types.is_dictionary(kind):
      kind = kind.value_type
    if types.is_integer(kind):
      labels[field.name] = str(field.type)
    elif types.is_string(kind) or types.is_large_string(kind):
      labels[field.name] = str(field.type)
  kinds = {field.name: str(field.type) for field in schema}
  image = pick_column("image", images, kinds, options.image, where)
  label = pick_column("label", labels, kinds, options.label, where)
  return image, label


def _names(schema, label: str, path: str) -> tuple[str, ...] | None:
  """Returns the names of the classes in Hugging Face's metadata."""
  metadata = (schema.metadata or {}).get(b"huggingface")
  if not metadata:
    return None
  where = f"{path}: metadata of Hugging Face"
  values = json_file.parse(metadata, where)
  for key in ("info", "features", label):
    values = (values.get(key) if isinstance(values, dict) else None) or {}
  return json_file.build(_Feature, values, f"{where}: {label}").names or None
