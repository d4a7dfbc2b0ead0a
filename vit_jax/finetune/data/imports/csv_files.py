"""CSV files: on each line the name of an image and its label, or labels.

  file,label
  a/1.jpg,cat
  a/2.jpg,cat|indoor

Names are relative to the folder of the CSV. `|` separates several labels of an
image. If any line has that sign, the data set is multi-label, and an image with
an empty label has no class. Columns named by `--numbers` are numbers to
predict.
"""

import csv
import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from vit_jax.data.images import SUFFIXES
from vit_jax.finetune.data.imports import files
from vit_jax.finetune.data.imports.listing import (
  BITS,
  Classes,
  Entry,
  Listing,
  Numbers,
  Options,
  Split,
  check_lists,
  pick_column,
)
from vit_jax.paths import printable

SEPARATOR = "|"  # between the labels of an image
_DELIMITERS = ",;\t"
_MISSING = {"none", "na", "n/a", "null"}  # as other programs write it
_TRIED = 10  # lines of a file whose images must not all be missing


class _Table(NamedTuple):
  """A file: (name of an image, label) a line, and what was chosen of it.

  labels: Columns of the labels; several are joined by `SEPARATOR`.
  remarks: On the columns of the images and of the labels, in this order; "" if
    there was no choice.
  """

  rows: list[tuple[str, str]]
  labels: tuple[str, ...]
  remarks: tuple[str, str]


def scan(path: str, options: Options) -> Listing:
  """Reads CSV files, but no image.

  Raises:
    ValueError: No files, files that are no CSV, no such columns, other ones in
      other files, or none of the first images exists.
  """
  where = f"csv:{path}"
  by_split = files.by_split(path, (".csv", ".tsv"), options, "csv:")
  tables = {
    file: _read(file, options) for paths in by_split.values() for file in paths
  }
  _check_columns(tables)
  labels = [label for table in tables.values() for _, label in table.rows]
  first = next(iter(tables.values()))
  is_multilabel = any(SEPARATOR in label for label in labels)
  present = {*labels}
  if is_multilabel:
    present = {part for label in labels for part in label.split(SEPARATOR)}
  is_regression = bool(options.numbers)
  if is_multilabel and not is_regression:
    lists = (label.split(SEPARATOR) for label in labels if label)
    check_lists(lists, first.labels[0], where)
  if is_regression:
    is_multilabel = False
    count = max(len(label.split(SEPARATOR)) for label in labels)
    classes = Numbers(first.labels, count, where)
  else:
    (column,) = first.labels
    classes = Classes(present, options.classes, where, is_multilabel, column)

  def split_of(paths: list[str]) -> Split:
    count = sum(len(tables[path].rows) for path in paths)
    return Split(
      count, lambda: _entries({p: tables[p] for p in paths}, classes)
    )

  remarks = [r for t in tables.values() for r in t.remarks if r]
  if not is_regression and not options.classes:
    remarks += [
      f"{name!r} is a class; leave its label empty if the label is missing"
      for name in classes.names
      if name.lower() in _MISSING
    ]
  return Listing(
    classes.names,
    {split: split_of(paths) for split, paths in by_split.items()},
    is_multilabel,
    tuple(dict.fromkeys(remarks)),
    is_regression,
  )


def _check_columns(tables: Mapping[str, _Table]) -> None:
  """Raises ValueError if the columns of labels differ between files.

  It does so if more than one column of a file could be that of the labels. The
  only column that can be that of the labels may have any name.
  """
  file_of = {table.labels: file for file, table in tables.items()}
  if len(file_of) > 1 and any(table.remarks[1] for table in tables.values()):
    listed = "; ".join(f"{', '.join(k)} in {v}" for k, v in file_of.items())
    raise ValueError(
      f"got different columns of labels: {listed}; expected the same in all"
      " files. Name it with --label if all have it; otherwise rename it in the"
      " headers."
    )


def _entries(
  tables: Mapping[str, _Table], classes: Classes | Numbers
) -> Iterator[Entry]:
  seen: dict[str, str] = {}
  folders = [os.path.dirname(file) or "." for file in tables]
  root = os.path.commonpath(folders) or "."
  for folder, (file, table) in zip(folders, tables.items(), strict=True):
    below = os.path.relpath(folder, root)
    for name, text in table.rows:
      # Files in two folders may list the same names.
      key = name if below == "." else os.path.join(below, name)
      path = _image_path(file, name)
      # One name of ./a.png, sub//a.png and others; the file keeps the name that
      # was given, as ".." behind a link is another folder.
      image = os.path.abspath(path)
      if image in seen:
        is_same = seen[image] == text
        error = f"is listed before with the label {seen[image]!r}"
        yield Entry(key, error="is listed twice" if is_same else error)
        continue
      seen[image] = text
      is_single = isinstance(classes, Classes) and not classes.is_multilabel
      label = classes.label(text if is_single else text.split(SEPARATOR))
      if label is None:
        error = "has no label"
        if text and isinstance(classes, Numbers):
          error = f"has {text!r}, expected {_numbers(table, classes)}"
        yield Entry(key, error=error)
        continue
      try:
        with open(path, "rb") as stream:
          yield Entry(key, stream.read(), label)
      except (OSError, ValueError) as e:  # ValueError for a zero byte
        reason = getattr(e, "strerror", None) or e
        yield Entry(key, error=f"cannot be read: {path}: {reason}")


def _numbers(table: _Table, numbers: Numbers) -> str:
  """Returns what an image needs in the columns of `--numbers`, for messages."""
  if len(table.labels) > 1:
    return f"a number in each of the columns {', '.join(table.labels)}"
  (column,), count = table.labels, len(numbers.names)
  what = "a number" if count == 1 else f"{count} numbers ({SEPARATOR} between)"
  return f"{what} in the column {column}"


def _read(file: str, options: Options) -> _Table:
  lines, delimiter = _lines(file)
  if not lines:
    raise ValueError(f"got {file}, which is empty; expected FILE,LABEL a line.")
  # A first line that names an image is no header.
  columns = tuple(str(i + 1) for i in range(len(lines[0])))
  if not _image_places(file, lines[0]):
    head = enumerate(lines.pop(0), 1)  # pandas writes no name above its index
    columns = tuple(cell.strip() or str(i) for i, cell in head)
  if len({*columns}) < len(columns) or len(columns) < 2:
    raise ValueError(
      f"got {file} with the columns {', '.join(columns)}, expected different"
      " names, among them one of the images and one of the labels. A comma, a"
      " semicolon or a tab is between them."
    )
  if not lines:
    raise ValueError(f"got {file} with a header alone, expected images.")
  kinds = dict.fromkeys(columns, "")
  named = [columns[i] for i in _image_places(file, lines[0][: len(columns)])]
  images = kinds if options.image or not named else dict.fromkeys(named, "")
  image, about_images = pick_column(
    "image", images, kinds, options.image, file, "file names of images"
  )
  labels = {k: v for k, v in kinds.items() if k != image}
  chosen, about_labels = options.numbers, ""
  if missing := [c for c in chosen if c not in labels]:
    raise ValueError(
      f"--numbers: got {', '.join(missing)}, expected columns of {file}:"
      f" {', '.join(labels)}."
    )
  if not chosen:
    try:
      label, about_labels = pick_column(
        "label", labels, labels, options.label, file, "classes"
      )
    except ValueError as e:
      at = [columns.index(column) for column in labels]
      cells = {
        cell.strip() for line in lines for i, cell in enumerate(line) if i in at
      }
      if cells <= BITS:
        e = ValueError(
          f"{e} They have a 0 or 1 for each class: expected a single column"
          f" with the class, or the classes with {SEPARATOR} between."
        )
      raise e from None
    chosen = (label,)
  at, places = columns.index(image), [columns.index(c) for c in chosen]
  short = [line for line in lines if len(line) <= max(at, *places)]
  if short:
    raise ValueError(
      f"got {file} with {len(short):,} lines without all of its"
      f" {len(columns)} columns, such as {','.join(short[0])!r}; expected"
      f" {image} and {' and '.join(chosen)} in each."
    )
  # An empty last cell, from a delimiter at the end of a line, has no content.
  long = [line for line in lines if any(map(str.strip, line[len(columns) :]))]
  if long:
    raise ValueError(
      f"got {file} with {len(long):,} lines of more cells than its"
      f" {len(columns)} columns ({', '.join(columns)}), such as"
      f" {delimiter.join(long[0])!r}; expected a cell for each column. Write"
      f" {SEPARATOR!r} between several labels, a cell that contains"
      f' {delimiter!r} in quotes ("), and numbers with a decimal point.'
    )
  rows = [
    (line[at].strip(), SEPARATOR.join(line[i].strip() for i in places))
    for line in lines
  ]
  _check_files(file, [name for name, _ in rows[:_TRIED]])
  return _Table(rows, chosen, (about_images, about_labels))


def _lines(file: str) -> tuple[list[list[str]], str]:
  """Returns the cells of the lines that are not blank, and the delimiter."""
  try:
    with open(file, encoding="utf-8-sig", newline="") as stream:
      first = next(filter(str.strip, stream), "")
      stream.seek(0)
      unquoted = re.sub('"[^"]*"', "", first)
      delimiter = max(_DELIMITERS, key=unquoted.count)
      # Quotes are also quotes after a blank: `1.jpg, "a, b"`.
      lines = csv.reader(stream, delimiter=delimiter, skipinitialspace=True)
      return [line for line in lines if any(map(str.strip, line))], delimiter
  except (OSError, csv.Error, UnicodeDecodeError) as e:
    raise ValueError(
      f"got {file}, which cannot be read ({e}); expected a CSV in UTF-8."
    ) from None


def _image_path(file: str, name: str) -> str:
  """Returns the path of an image, whose name may lack its ending."""
  path = os.path.join(os.path.dirname(file), os.path.expanduser(name))
  if not name.lower().endswith(SUFFIXES):
    for suffix in ("", *SUFFIXES, *map(str.upper, SUFFIXES)):
      if os.path.isfile(path + suffix):
        return path + suffix
  return path


def _image_places(file: str, line: list[str]) -> list[int]:
  """Returns which cells name images, by their endings or because one exists."""
  cells = [*enumerate(map(str.strip, line))]
  places = [i for i, cell in cells if cell.lower().endswith(SUFFIXES)]
  # A number may be a class and a file without its ending, so only the first.
  exists = lambda cell: os.path.isfile(_image_path(file, cell))
  return places or [i for i, cell in cells if exists(cell)][:1]


def _check_files(file: str, names: list[str]) -> None:
  """Raises ValueError if none of the images exists, with where they may be."""
  if any(os.path.isfile(_image_path(file, name)) for name in names):
    return
  folder = os.path.dirname(os.path.abspath(file))
  hint = " Write / for \\ in the names." * any("\\" in name for name in names)
  with os.scandir(folder) as entries:
    for below in sorted(e.path for e in entries if e.is_dir()):
      if os.path.isfile(_image_path(os.path.join(below, "x"), names[0])):
        hint = f" {below} has it: move the CSV there."
  raise ValueError(
    f"got {file}, whose first images do not exist, such as"
    f" {printable(_image_path(file, names[0]))}; expected names relative to the"
    f" folder of the CSV.{hint}"
  )
