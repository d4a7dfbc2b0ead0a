"""Predictions as a table, JSON lines or CSV, and files of features."""

import csv
import importlib.util
import io
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from etils import epath
from jaxtyping import Float
from tqdm.utils import disp_len, disp_trim

from vit_jax.inference.pretrained import Answer, Prediction, Value
from vit_jax.options import unexpected
from vit_jax.paths import printable
from vit_jax.writers import atomic_files

Write = Callable[[Answer, pathlib.Path | None], None]

SHARE = "100.0%"  # the widest share
VALUE = 11  # columns of the widest number, -1.2346e-05
GAP = "  "
LONGEST_NAME = 40  # columns of an image's name, if the output is no terminal
UNBOUNDED = 10_000
FEATURE_SUFFIXES = (".npz", ".parquet")


def as_json(out: io.TextIOBase) -> Write:
  """Returns a function that prints an object per line.

  The object has `image`, `predictions` and, if there is a picture, its path
  `attention`. A prediction has the name of the class, its index (column of the
  head) and its probability. For a regression it has the name of the number, its
  index and its value.
  """

  def write(answer: Answer, picture: pathlib.Path | None) -> None:
    row = {
      "image": answer.name,
      "predictions": [
        {"number": c.name, "index": c.index, "value": float(_text(c.value))}
        if isinstance(c, Value)
        else {
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


def _text(value: float) -> str:
  """Returns a number with the seven digits that float32 has."""
  return f"{value:.7g}"


def as_csv(
  out: io.TextIOBase, with_pictures: bool, is_regression: bool = False
) -> Write:
  """Returns a function that prints a header, then the rows of each image.

  A row is a class, with its rank from 1; for a regression it is a number.
  """
  rows = csv.writer(out, lineterminator="\n")
  header = ["image", "rank", "class", "index", "probability"]
  if is_regression:
    header = ["image", "number", "index", "value"]
  rows.writerow(header + ["attention"] * with_pictures)

  def write(answer: Answer, picture: pathlib.Path | None) -> None:
    more = [str(picture)] if with_pictures else []
    for rank, c in enumerate(answer.classes, 1):
      values = (
        [answer.name, c.name, c.index, _text(c.value)]
        if isinstance(c, Value)
        else [answer.name, rank, c.name, c.index, f"{c.probability:.6f}"]
      )
      rows.writerow(values + more)

  return write


def as_table(
  out: io.TextIOBase,
  images: Iterable[str],
  classes: Iterable[str] | None,
  is_regression: bool = False,
) -> Write:
  """Returns a function that prints a table, as wide as the terminal.

  If a class name is too long, its end is cut off. If a path is too long, its
  middle is cut out, because the file name matters most.

  Args:
    out: The output stream.
    images: Known names of images; the longest decides the width of the column.
    classes: Names of the classes; None: their numbers.
    is_regression: Whether predictions are values instead of probabilities.
  """
  cells_of, head, widest = _class_cells, ("prob.", "class"), len(SHARE)
  if is_regression:
    cells_of, head, widest = _value_cells, ("value", "number"), VALUE
  is_terminal = out.isatty()
  room = shutil.get_terminal_size().columns if is_terminal else UNBOUNDED
  room -= len(GAP) + widest + len(GAP)
  image_widths = [disp_len(printable(i)) for i in images] or [LONGEST_NAME]
  class_widths = [disp_len(printable(c)) for c in ("class", *(classes or ()))]
  least_class = min(max(class_widths), max(len("class"), room // 2))
  image_width = max(len("image"), min(max(image_widths), room - least_class))
  class_width = max(len("class"), room - image_width)

  def line(image: str, probability: str, name: str) -> None:
    image += " " * (image_width - disp_len(image))
    cells = image, f"{probability:>{widest}}", name
    out.write(GAP.join(cells).rstrip() + "\n")

  has_head = False

  def write(answer: Answer, picture: pathlib.Path | None) -> None:
    nonlocal has_head
    if not has_head:
      line("image", *head)
      has_head = True
    image = cut(printable(answer.name), image_width, image_width // 3)
    for c in answer.classes:
      text, name = cells_of(c)
      line(image, text, cut(printable(name), class_width))
      image = ""
    if is_terminal:
      out.flush()

  return write


def _class_cells(c: Prediction) -> tuple[str, str]:
  return f"{100 * c.probability:.1f}%", c.name


def _value_cells(c: Value) -> tuple[str, str]:
  return f"{c.value:.5g}", c.name


class FileNames:
  """Unique file names for the pictures of images.

  Args:
    folder: Folder of the pictures.
  """

  def __init__(self, folder: str | os.PathLike):
    self._folder = pathlib.Path(folder)
    self._taken: set[str] = set()

  def of(self, image: str) -> pathlib.Path:
    """Returns <folder>/<image name>.png, or ..._2.png for a second image."""
    stem = pathlib.PurePath(image).stem.strip("-.") or "image"
    numbered = (f"{stem}_{i}" for i in itertools.count(2))
    names = itertools.chain([stem], numbered)
    name = next(name for name in names if name not in self._taken)
    self._taken.add(name)
    return self._folder / f"{name}.png"


def cut(text: str, columns: int, begin: int | None = None) -> str:
  """Returns the text, shortened to a number of columns if it is longer.

  Args:
    text: Printable characters.
    columns: Largest number of columns, 1 or more.
    begin: Columns before the … in the middle. None: the … is at the end.

  Example:
    >>> cut("great white shark", 8), cut("photos/2024/cat.jpg", 12, 3)
    ('great w…', 'pho…/cat.jpg')
  """
  if disp_len(text) <= columns:
    return text
  begin = columns - 1 if begin is None else min(begin, columns - 1)
  end = disp_trim(text[::-1], columns - 1 - begin)[::-1]
  return f"{disp_trim(text, begin)}…{end}"


def check_features(path: str) -> None:
  """Checks that the file can be written, before features are computed.

  Raises:
    ValueError: The name has no suffix of `FEATURE_SUFFIXES`.
    FileNotFoundError: The folder does not exist.
    ImportError: The suffix is .parquet, and pyarrow is not installed.
  """
  file = pathlib.Path(path)
  if file.suffix not in FEATURE_SUFFIXES or "://" in path:
    expected = f"a local file ending in {' or '.join(FEATURE_SUFFIXES)}"
    raise ValueError(unexpected("--features", repr(path), expected))
  if not file.parent.is_dir():
    raise FileNotFoundError(f"--features: got {path!r}, but no such folder.")
  if file.suffix == ".parquet" and not importlib.util.find_spec("pyarrow"):
    raise ImportError("--features: .parquet needs `pip install pyarrow`.")


def write_features(
  path: str, images: Sequence[str], features: Float[np.ndarray, "b ..."]
) -> None:
  """Writes names of images and their features; replaces an old file.

  Args:
    path: See `check_features`. An `.npz` has the arrays `image` and `features`.
      A `.parquet` has columns with these names; the features of an image are a
      list, or nested lists for tokens.
    images: Names of the images.
    features: Features of the images, float32 [b, ...].

  Raises:
    WriteError: The file cannot be written.
  """
  data = io.BytesIO()
  if path.endswith(".npz"):
    np.savez(data, image=np.array(images, np.str_), features=features)
  else:
    import pyarrow  # here, because .npz does not need it
    from pyarrow import parquet

    rows = pyarrow.array(features.reshape(-1))
    for size in reversed(features.shape[1:]):
      rows = pyarrow.FixedSizeListArray.from_arrays(rows, size)
    table = pyarrow.table({"image": list(images), "features": rows})
    parquet.write_table(table, data)
  atomic_files.replace(epath.Path(path), data.getvalue())
