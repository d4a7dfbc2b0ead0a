"""CSV files: on each line the name of an image file and its label.

  file,label
  a/1.jpg,cat
  a/2.jpg,cat|indoor

Names are relative to the folder of the CSV. `|` separates several labels of an
image. If any line has that sign, the data set is multi-label, and an image with
an empty label has no class. Columns named by `--numbers` are numbers to
predict.

Python's csv reads the lines. The library `datasets` would take "None" for a
missing label, and names of files relative to the current folder.
"""

import csv
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence

from vit_jax.data.builders.image_builder import Entry, Split
from vit_jax.finetune.data.imports import files
from vit_jax.finetune.data.imports.listing import (
  Classes,
  Listing,
  Numbers,
  Options,
  find_classes,
  find_column,
)

SEPARATOR = "|"  # between the labels of an image
IMAGES = ("file", "image")  # usual names of the column of the images
_DELIMITERS = ",;\t"
_MISSING = {"none", "na", "n/a", "null"}  # as other programs write it

# (name of an image, its label; a list of texts if there may be several).
_Rows = list[tuple[str, str | list[str]]]


def scan(path: str, options: Options) -> Listing:
  """Reads CSV files, but no image.

  Raises:
    ValueError: No files, files that are no CSV, or no such columns.
  """
  where = f"csv:{path}"
  by_split = files.by_split(path, (".csv", ".tsv"), options, "csv:")
  paths = list(itertools.chain(*by_split.values()))
  columns = options.numbers or (options.label or "label",)
  tables: dict[str, _Rows] = {p: _read(p, options) for p in paths}
  labels = [label for rows in tables.values() for _, label in rows]
  if options.numbers or any(SEPARATOR in label for label in labels):
    tables = {
      path: [(name, _parts(label, options)) for name, label in rows]
      for path, rows in tables.items()
    }
    labels = [label for rows in tables.values() for _, label in rows]
  classes = find_classes(labels, options, columns, None, where)
  remarks = []
  if not options.numbers and not options.classes:
    remarks = [
      f"{name!r} is a class; leave its label empty if the label is missing"
      for name in classes.names
      if name.lower() in _MISSING
    ]

  def split_of(paths: list[str]) -> Split:
    chosen = {path: tables[path] for path in paths}
    count = sum(map(len, chosen.values()))
    return Split(count, lambda: _entries(chosen, classes))

  return Listing(
    classes.names,
    {split: split_of(paths) for split, paths in by_split.items()},
    classes.is_multilabel,
    tuple(remarks),
    is_regression=bool(options.numbers),
  )


def _parts(label: str, options: Options) -> list[str]:
  """Returns the labels of an image; an empty number stays, as it is missing."""
  parts = map(str.strip, label.split(SEPARATOR))
  return [part for part in parts if part or options.numbers]


def _entries(
  tables: Mapping[str, _Rows], classes: Classes | Numbers
) -> Iterator[Entry]:
  seen = set()
  folders = [os.path.dirname(file) or "." for file in tables]
  root = os.path.commonpath(folders) or "."
  for folder, rows in zip(folders, tables.values(), strict=True):
    below = os.path.relpath(folder, root)
    for name, value in rows:
      # Files in two folders may list the same names.
      key = name if below == "." else os.path.join(below, name)
      path = os.path.join(folder, os.path.expanduser(name))
      # One name of ./a.png, sub//a.png and others; the file keeps the name that
      # was given, as ".." behind a link is another folder.
      image, label = os.path.abspath(path), classes.label(value)
      if image in seen:
        yield Entry(key, error="is listed before")
      elif label is None:
        yield Entry(key, error=classes.missing)
      else:
        try:
          with open(path, "rb") as stream:
            yield Entry(key, stream.read(), label)
        except (OSError, ValueError) as e:  # ValueError for a zero byte
          reason = getattr(e, "strerror", None) or e
          yield Entry(key, error=f"cannot be read: {path}: {reason}")
      seen.add(image)


def _read(file: str, options: Options) -> list[tuple[str, str]]:
  """Returns (name of an image, text of its label) of each line."""
  columns, lines = _lines(file)
  image = find_column("--image", options.image, IMAGES, columns, file)
  labels = [
    find_column("--numbers", column, (), columns, file)
    for column in options.numbers
  ] or [find_column("--label", options.label, ("label",), columns, file)]
  at, places = columns.index(image), [*map(columns.index, labels)]
  return [(line[at], SEPARATOR.join(line[i] for i in places)) for line in lines]


def _lines(file: str) -> tuple[Sequence[str], list[list[str]]]:
  """Returns the header, and the cells of the lines that are not blank."""
  try:
    with open(file, encoding="utf-8-sig", newline="") as stream:
      first = next(filter(str.strip, stream), "")
      stream.seek(0)
      # Quotes are also quotes after a blank: `1.jpg, "a, b"`.
      reader = csv.reader(
        stream,
        delimiter=max(_DELIMITERS, key=first.count),
        skipinitialspace=True,
      )
      lines = [[*map(str.strip, line)] for line in reader]
      head, *lines = filter(any, lines)
  except (OSError, csv.Error, ValueError) as e:
    raise ValueError(
      f"{file}: got {e}, expected a CSV in UTF-8 with a header."
    ) from None
  for line in lines:
    # An empty last cell, from a delimiter at the end of a line, has no content.
    if len(line) < len(head) or any(line[len(head) :]):
      raise ValueError(
        f"{file}: got the line {line}, expected a cell for each of"
        f" {', '.join(head)}, and {SEPARATOR} between several labels."
      )
  return head, lines
