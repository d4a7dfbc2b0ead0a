"""CSV files: on each line the name of an image file and its label.

  file,label
  a/1.jpg,cat
  a/2.jpg,cat|indoor

Names are relative to the folder of the CSV. If there is no file of the first
name, all names are looked for below this folder, with or without their folders
and endings. `|` separates several labels of an image. If any line has that
sign, the data set is multi-label, and an image with an empty label has no
class. Several columns of labels have a 0 or 1 for each class. Columns named by
`--numbers` are numbers to predict.

Python's csv reads the lines. The library `datasets` would take "None" for a
missing label, and names of files relative to the current folder.
"""

import csv
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.data.builders.image_builder import Entry, Split
from vit_jax.data.images import SUFFIXES
from vit_jax.data.listed import MISSING
from vit_jax.finetune.data.imports import files
from vit_jax.finetune.data.imports.listing import (
  Classes,
  Listing,
  Numbers,
  Options,
  class_columns,
  find_classes,
  find_column,
  label_columns,
  of_zeros_and_ones,
)
from vit_jax.paths import is_by_program, walk

SEPARATOR = "|"  # between the labels of an image
IMAGES = ("file", "image")  # usual names of the column of the images
_DELIMITERS = ",;\t"


class Row(NamedTuple):
  """A line: name and path of an image, its label, its group.

  path: None if no file has the name.
  label: A text, or a list of texts if there may be several.
  """

  name: str
  path: str | None
  label: str | list[str]
  group: str | None = None


class Table(NamedTuple):
  """The lines of CSV files, and the columns of their labels."""

  rows: dict[str, list[Row]]  # file -> its lines
  columns: tuple[str, ...]


def scan(path: str, options: Options) -> Listing:
  """Reads CSV files, but no image.

  Raises:
    ValueError: No files, files that are no CSV, or no such columns.
  """
  where = f"csv:{path}"
  by_split = files.by_split(path, (".csv", ".tsv"), options, "csv:")
  table = read([*itertools.chain(*by_split.values())], options)
  tables = table.rows
  labels = [row.label for rows in tables.values() for row in rows]
  classes = find_classes(
    labels, options, table.columns, class_columns(table.columns), where
  )
  remarks = []
  if not options.numbers and not options.classes:
    remarks = [
      f"{name!r} is a class; leave its label empty if the label is missing"
      for name in classes.names
      if name.lower() in MISSING
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


def _parts(label: str) -> list[str]:
  """Returns the labels of an image."""
  return [part for part in map(str.strip, label.split(SEPARATOR)) if part]


def _entries(
  tables: Mapping[str, list[Row]], classes: Classes | Numbers
) -> Iterator[Entry]:
  seen = set()
  folders = [os.path.dirname(file) or "." for file in tables]
  root = os.path.commonpath(folders) or "."
  for folder, rows in zip(folders, tables.values(), strict=True):
    below = os.path.relpath(folder, root)
    for name, path, value, _ in rows:
      # Files in two folders may list the same names.
      key = name if below == "." else os.path.join(below, name)
      # One name of ./a.png, sub//a.png and others; the file keeps the name that
      # was given, as ".." behind a link is another folder.
      image, label = os.path.abspath(path or name), classes.label(value)
      if image in seen:
        yield Entry(key, error="is listed before")
      elif label is None:
        yield Entry(key, error=classes.missing)
      elif path is None:
        yield Entry(
          key, error=f"cannot be read: no file of this name: {folder}"
        )
      else:
        try:
          with open(path, "rb") as stream:
            yield Entry(key, stream.read(), label)
        except (OSError, ValueError) as e:  # ValueError for a zero byte
          reason = getattr(e, "strerror", None) or e
          yield Entry(key, error=f"cannot be read: {path}: {reason}")
      seen.add(image)


def read(paths: Sequence[str], options: Options, group: str = "") -> Table:
  """Reads CSV files.

  Args:
    paths: The files.
    options: The user's options.
    group: Column of the groups; "" for none.

  Raises:
    ValueError: A file is no CSV, or has no such columns; or a name may be that
      of several images.
  """
  rows, columns = {}, ()
  for file in paths:
    head, lines = _lines(file)
    find = _Finder(os.path.dirname(file) or ".", os.path.basename(file))
    image = _image_column(options, head, lines, find, file)
    others = [column for column in head if not group or column != group]
    columns = label_columns(options, image, others, file)
    places = [head.index(column) for column in columns]
    of = head.index(image)
    cells = [[line[i] for i in places] for line in lines]
    labels = cells if options.numbers else [cell for (cell, *_) in cells]
    if len(columns) > 1 and not options.numbers:
      labels = of_zeros_and_ones(cells, columns, file)
    elif options.numbers and len(columns) == 1:
      labels = [[*map(str.strip, cell.split(SEPARATOR))] for (cell,) in cells]
    groups = [None] * len(lines)
    if group:
      named = find_column(options.dashes + "group", group, (), head, file)
      groups = [line[head.index(named)] or None for line in lines]
    if lines:
      find.begin(lines[0][of])
    rows[file] = [
      Row(line[of], find.path(line[of]), label, group)
      for line, label, group in zip(lines, labels, groups, strict=True)
    ]
  every = [row.label for of_file in rows.values() for row in of_file]
  are_lists = any(isinstance(label, list) for label in every)
  if are_lists or any(SEPARATOR in label for label in every):
    rows = {
      file: [
        row._replace(label=_parts(row.label))
        if isinstance(row.label, str)
        else row
        for row in of_file
      ]
      for file, of_file in rows.items()
    }
  return Table(rows, columns)


def _image_column(
  options: Options,
  head: Sequence[str],
  lines: list[list[str]],
  find: "_Finder",
  file: str,
) -> str:
  """Returns the column of the images: by name, or by the file that it names."""
  usual = [column for column in head if column in IMAGES]
  if options.image is None and not usual and lines:
    for column, cell in zip(head, lines[0], strict=False):
      if not cell.replace(".", "").isdecimal() and find.finds(cell):
        return column
    for column, cell in zip(head, lines[0], strict=False):
      if column and find.finds(cell):  # numbers may be names of files, too
        return column
  name = f"{options.dashes}image"
  return find_column(name, options.image, IMAGES, head, file)


class _Finder:
  """Finds the images that a CSV names.

  Args:
    folder: Folder of the CSV.
    csv_name: Its name; of two images of one name, that of its split is found.
  """

  def __init__(self, folder: str, csv_name: str):
    self._folder, self._split = folder, files.split_of(csv_name)
    self._searches = False

  def begin(self, name: str) -> None:
    """Decides by the first name whether the names are paths."""
    self._searches = not os.path.isfile(self._direct(name))

  def finds(self, name: str) -> bool:
    """Whether there is an image of a name."""
    return bool(name) and (
      os.path.isfile(self._direct(name)) or bool(self._candidates(name))
    )

  def path(self, name: str) -> str | None:
    """Returns the path of an image; None if no file has the name.

    Raises:
      ValueError: Several files have the name.
    """
    if not self._searches:
      return self._direct(name)
    found = self._candidates(name)
    if len(found) > 1:
      found = [p for p in found if files.split_of(p) == self._split] or found
    if len(found) > 1:
      raise ValueError(
        f"got the image {name!r} in {self._folder}, which may be"
        f" {' or '.join(found[:2])}, expected a name with its folder."
      )
    return os.path.join(self._folder, found[0]) if found else None

  def _direct(self, name: str) -> str:
    return os.path.join(self._folder, os.path.expanduser(name))

  def _candidates(self, name: str) -> list[str]:
    name = name.replace("\\", "/")
    base = name.rpartition("/")[2]
    for key in (name, base, base.rpartition(".")[0]):
      if key and (found := self._index.get(key)):
        return found
    return []

  @functools.cached_property
  def _index(self) -> dict[str, list[str]]:
    """Path, name, or name without ending -> the files, relative."""
    index: dict[str, list[str]] = {}
    for folder, below, names in walk(self._folder):
      below[:] = [name for name in below if not is_by_program(name)]
      for name in names:
        if name.lower().endswith(SUFFIXES) and not name.startswith("."):
          path = os.path.relpath(os.path.join(folder, name), self._folder)
          for key in {path, name, name.rpartition(".")[0]}:
            index.setdefault(key, []).append(path)
    return index


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
