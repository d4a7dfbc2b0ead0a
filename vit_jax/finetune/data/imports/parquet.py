"""Parquet files with a column of encoded images and one of labels.

The images are bytes, or a struct with a field `bytes`, as Hugging Face writes
them. Class names in Hugging Face's metadata are used.

pyarrow, which TFDS needs, reads the files. The library `datasets` would take
the class names of the first file for the labels of all.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence

from vit_jax.config import json_file
from vit_jax.finetune.data.imports import files, tables
from vit_jax.finetune.data.imports.listing import Listing, Options

_ROWS = 64  # images in memory at a time


@dataclasses.dataclass(frozen=True)
class _Feature:
  """What is read of a column in Hugging Face's metadata."""

  names: tuple[str, ...] = ()


def scan(path: str, options: Options) -> Listing:
  """Lists parquet files; reads their columns of labels, but no image.

  Raises:
    ValueError: No files, files that cannot be read, or no such columns.
  """
  by_split = files.by_split(path, (".parquet",), options, "parquet:")
  paths = [path for paths in by_split.values() for path in paths]
  root = os.path.commonpath(list(map(os.path.dirname, paths))) or "."
  opened = {k: [table(p, root) for p in v] for k, v in by_split.items()}
  return tables.scan(opened, options, f"parquet:{path}", image_bytes)


def table(path: str, root: str) -> tables.Table:
  """Returns a file, of which only the schema is read."""
  from pyarrow import parquet  # here, because other kinds do not need it

  with _reading(path):
    file = parquet.ParquetFile(path)
    schema = file.schema_arrow

  def rows(columns: Sequence[str]) -> Iterator[tuple]:
    with _reading(path):
      for batch in file.iter_batches(_ROWS, columns=list(columns)):
        for row in batch.to_pylist():
          yield tuple(row[column] for column in columns)

  return tables.Table(
    os.path.relpath(path, root),
    schema.names,
    functools.partial(_names, schema, path),
    rows,
  )


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
  """Names the file in what pyarrow raises on damaged files."""
  import pyarrow

  try:
    yield
  except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as e:
    raise ValueError(
      f"got {path}, which is no whole parquet file ({e}); copy it again."
    ) from None


def image_bytes(value: object) -> bytes:
  """Returns the image in a cell: its bytes, or a struct that has them.

  Raises:
    ValueError: There are none.
  """
  if isinstance(value, dict):
    value = value.get("bytes")
  if not value or not isinstance(value, bytes):
    raise ValueError("has no image")
  return value


def _names(schema, path: str, column: str) -> Sequence[str]:
  """Returns the names of the classes in Hugging Face's metadata."""
  where = f"{path}: metadata of Hugging Face"
  metadata = (schema.metadata or {}).get(b"huggingface", b"{}")
  values = json_file.parse(metadata, where)
  for key in ("info", "features", column):
    values = (values.get(key) if isinstance(values, dict) else None) or {}
  if isinstance(values, dict) and "feature" in values:  # of a list
    values = values["feature"]
  if isinstance(values, list) and len(values) == 1:  # as older versions wrote
    (values,) = values
  return json_file.build(_Feature, values, f"{where}: {column}").names
