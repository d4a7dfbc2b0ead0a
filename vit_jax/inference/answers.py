"""Classes of images as a table, as JSON lines and as CSV."""

import csv
import io
import json
import os
import pathlib
import shutil
import unicodedata
from collections.abc import Callable, Iterable

from vit_jax.inference.classify import Answer

Write = Callable[[Answer, pathlib.Path | None], None]

SHARE = "100.0%"  # the widest share
GAP = "  "
LONGEST_NAME = 40  # columns of an image's name where no terminal bounds them
UNBOUNDED = 10_000


def as_json(out: io.TextIOBase) -> Write:
  """Prints an object a line: image, predictions, and attention if any.

  A prediction has the class's name, its index, a column of the head, and the
  probability. `attention` is the path of the picture.
  """

  def write(answer: Answer, picture: pathlib.Path | None) -> None:
    row = {
      "image": answer.name,
      "predictions": [
        {
          "class": c.name,
          "index": c.index,
          "probability": round(c.probability, 6),
        }
        for c in answer.classes
      ],
    }
    if picture is not None:
      row["attention"] = str(picture)
    out.write(json.dumps(row, ensure_ascii=False) + "\n")

  return write


def as_csv(out: io.TextIOBase, with_pictures: bool) -> Write:
  """Prints a header, and a row for each class of each image, by rank from 1."""
  rows = csv.writer(out, lineterminator="\n")
  header = ["image", "rank", "class", "index", "probability"]
  rows.writerow(header + ["attention"] * with_pictures)

  def write(answer: Answer, picture: pathlib.Path | None) -> None:
    more = [str(picture)] if with_pictures else []
    for rank, c in enumerate(answer.classes, 1):
      values = [answer.name, rank, c.name, c.index, f"{c.probability:.6f}"]
      rows.writerow(values + more)

  return write


def as_table(
  out: io.TextIOBase, images: Iterable[str], classes: Iterable[str] | None
) -> Write:
  """Prints a table, of the terminal's width if there is one.

  A class name that is too long loses its end. A path loses its middle, since
  the file's own name matters most.

  Args:
    out: Where to.
    images: Names of the images, as far as they are known: the longest decides
      how wide their column is.
    classes: Names of the classes; None: numbers.
  """
  is_terminal = out.isatty()
  room = shutil.get_terminal_size().columns if is_terminal else UNBOUNDED
  room -= len(GAP) + len(SHARE) + len(GAP)
  longest_class = max((width(printable(c)) for c in classes or ()), default=5)
  known = max((width(printable(i)) for i in images), default=LONGEST_NAME)
  wide_class = max(len("class"), min(longest_class, room // 2))
  wide_image = max(len("image"), min(known, room - wide_class))
  wide_class = min(longest_class, max(wide_class, room - wide_image))
  wide_class = max(wide_class, len("class"))

  def line(image: str, probability: str, name: str) -> None:
    cells = padded(image, wide_image), f"{probability:>{len(SHARE)}}", name
    out.write(GAP.join(cells).rstrip() + "\n")

  has_head = False

  def write(answer: Answer, picture: pathlib.Path | None) -> None:
    nonlocal has_head
    if not has_head:
      line("image", "prob.", "class")
      has_head = True
    image = cut(printable(answer.name), wide_image, wide_image // 3)
    for c in answer.classes:
      name = cut(printable(c.name), wide_class)
      line(image, f"{100 * c.probability:.1f}%", name)
      image = ""
    if is_terminal:
      out.flush()

  return write


class FileNames:
  """Names of pictures of images, each once.

  Args:
    folder: Where they are.
  """

  def __init__(self, folder: str | os.PathLike):
    self._folder = pathlib.Path(folder)
    self._counts: dict[str, int] = {}

  def of(self, image: str) -> pathlib.Path:
    """Returns <folder>/<name of the image>.png, or ..._2.png for a second."""
    stem = pathlib.PurePath(image).stem.strip("-.") or "image"
    self._counts[stem] = count = self._counts.get(stem, 0) + 1
    name = stem if count == 1 else f"{stem}_{count}"
    if count > 1 and name in self._counts:  # there is such an image, too
      return self.of(name)
    self._counts.setdefault(name, 1)
    return self._folder / f"{name}.png"


def printable(text: str) -> str:
  """Returns the text with control characters escaped, as a terminal's colours.

  Example:
    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
  """
  return "".join(
    c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
  )


def width(text: str) -> int:
  """Returns the columns that a text takes on a terminal.

  Wide characters take two, combining marks none.

  Example:
    >>> width("猫.jpg"), width("e\\u0301")
    (6, 1)
  """
  return sum(map(_columns, text))


def _columns(character: str) -> int:
  if unicodedata.combining(character) or unicodedata.category(character) in (
    "Mn",
    "Me",
    "Cf",
  ):
    return 0
  return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int, begin: int | None = None) -> str:
  """Returns the text, shortened to a number of columns if it is longer.

  Args:
    text: Printable characters.
    columns: From 1.
    begin: Columns that its beginning takes, before … and its end. None: all,
      so that the end is cut off.

  Example:
    >>> cut("great white shark", 8), cut("photos/2024/cat.jpg", 12, 3)
    ('great w…', 'pho…/cat.jpg')
  """
  if width(text) <= columns:
    return text
  begin = columns - 1 if begin is None else min(begin, columns - 1)
  end = _first(text[::-1], columns - 1 - begin)[::-1]
  return f"{_first(text, begin)}…{end}"


def _first(text: str, columns: int) -> str:
  """Returns as much of the text as fits."""
  taken = 0
  for i, character in enumerate(text):
    taken += _columns(character)
    if taken > columns:
      return text[:i]
  return text


def padded(text: str, columns: int) -> str:
  """Returns the text with spaces up to a number of columns."""
  return text + " " * (columns - width(text))
