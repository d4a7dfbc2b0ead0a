"""What a scan of a source finds: splits, classes, records."""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.data.builders.image_builder import Label, Split
from vit_jax.data.splits import SPLIT_FOLDERS
from vit_jax.options import unexpected

# TFDS's names of the splits -> usual names of folders and files.
SPLITS = {
  "train": SPLIT_FOLDERS["train"],
  "validation": SPLIT_FOLDERS["val"],
  "test": SPLIT_FOLDERS["test"],
}
SPLIT_OF = {alias: k for k, names in SPLITS.items() for alias in names}
_INTEGER = re.compile("-?[0-9]{1,18}")  # a longer one is a name
_REAL = re.compile(
  r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=e))(e[-+]?[0-9]+)?|nan",
  re.IGNORECASE,
)


class Options(NamedTuple):
  """The user's options for a source.

  splits: Splits to import -> pattern of their files, or None to use the names
    of files. Empty for all splits.
  image: Column of the images, or file extension in tars; None for the usual.
  label: Column of the labels, or columns with a 0 or 1 for each class,
    separated by commas; None for "label", or the only other column.
  classes: Names of the classes by label; None for the names in the source.
  numbers: Columns of numbers to predict, instead of classes.
  dashes: Before the names of options in messages.
  """

  splits: Mapping[str, str | None] = {}
  image: str | None = None
  label: str | None = None
  classes: tuple[str, ...] | None = None
  numbers: tuple[str, ...] = ()
  dashes: str = "--"


@dataclasses.dataclass(frozen=True)
class Listing:
  """The names of the classes by label, and the splits by name.

  class_names: If `is_regression`, the names of the numbers.
  is_multilabel: Whether an image can have any number of classes, also none.
  remarks: Choices that were made for the user, one per line.
  is_regression: Whether an image has numbers to predict.
  """

  class_names: tuple[str, ...]
  splits: dict[str, Split]
  is_multilabel: bool = False
  remarks: tuple[str, ...] = ()
  is_regression: bool = False


class Numbers:
  """Numbers of an image to predict.

  Args:
    columns: Their columns; a single one may have several numbers.
    count: How many numbers a single column has.
    where: The source, for messages.

  Attributes:
    names: Name of each number.
    missing: What an image without all of them has, for messages.

  Raises:
    ValueError: A name has several lines, or two names are equal.
  """

  is_multilabel = False

  def __init__(self, columns: Sequence[str], count: int, where: str):
    self.names = tuple(columns)
    if len(columns) == 1 < count:
      self.names = tuple(f"{columns[0]} {i}" for i in range(count))
    self.missing = f"has no number for each of {', '.join(self.names)}"
    check_names(self.names, where, "numbers")

  def label(self, values: Sequence | None) -> np.ndarray | None:
    """Returns float32 [outputs]; None if one is missing, or is not a number."""
    try:
      label = np.array([*map(float, values or ())], np.float32)
    except (TypeError, ValueError):
      return None
    is_whole = len(label) == len(self.names) and np.isfinite(label).all()
    return label if is_whole else None


class Classes:
  """The numbers of classes, from all labels of a source.

  Integers are labels as they are, and so are texts if all of them are integers.
  Otherwise texts are names of classes, numbered in sorted order or in that of
  `given`.

  Args:
    labels: All labels, one by one if an image has several. None, NaN, blanks
      and negative numbers are missing labels.
    given: Names of the classes by label, from the user or the source; None for
      the labels themselves.
    where: The source, for messages.
    is_multilabel: Whether an image can have any number of classes.

  Attributes:
    names: Names of the classes by label.
    missing: What an image without a label has, for messages.

  Raises:
    ValueError: There are no labels, names that are not given, more numbers than
      names, or numbers that cannot be labels; or two classes have one name.
  """

  missing = "has no label"

  def __init__(
    self,
    labels: Collection,
    given: tuple[str, ...] | None,
    where: str,
    is_multilabel: bool = False,
  ):
    self.is_multilabel = is_multilabel
    texts = {text for text in map(_text, labels) if text}
    self._are_numbers = all(map(_INTEGER.fullmatch, texts))
    if self._are_numbers:
      texts = {text for text in texts if int(text) >= 0}
      self.names = given or _numbers({*map(int, texts)}, where)
    else:
      self.names = given or tuple(sorted(texts))
      _check_texts(texts, given, where)
    if not texts:
      raise ValueError(f"got {where} without any label, expected one an image.")
    last = len(self.names) - 1
    if self._are_numbers and (largest := max(map(int, texts))) > last:
      raise ValueError(f"got label {largest} in {where}, expected 0 to {last}.")
    self._index = {name: i for i, name in enumerate(self.names)}
    check_names(self.names, where)

  def label(self, value) -> Label | None:
    """Returns the class of a value, or the classes of a list; None if missing.

    An image with an empty list has no class. Missing labels in a list are
    skipped.
    """
    if self.is_multilabel:
      if value is None:
        return None
      return tuple(sorted({i for v in value if (i := self.index(v)) >= 0}))
    index = self.index(value)
    return None if index < 0 else index

  def index(self, label) -> int:
    """Returns the class of a single label; -1 if it is missing."""
    text = _text(label)
    if not text:
      return -1
    return max(int(text), -1) if self._are_numbers else self._index[text]


def _text(label) -> str:
  """Returns a label as text without blanks around it; "" if missing."""
  if isinstance(label, bytes):
    label = label.decode("utf-8", "replace")
  is_missing = label is None or label != label  # NaN, of any library
  return "" if is_missing else str(label).strip()


def _numbers(present: set[int], where: str) -> tuple[str, ...]:
  largest = max(present, default=-1)
  if largest >= 10 * len(present) + 1000:
    raise ValueError(
      f"got labels up to {largest:,} in {where}, expected classes from 0."
    )
  return tuple(map(str, range(largest + 1)))


def _check_texts(
  texts: set[str], given: tuple[str, ...] | None, where: str
) -> None:
  """Raises ValueError for texts that are no names of classes."""
  if not given:
    real = sorted(filter(_REAL.fullmatch, texts))
    are_real = all(_REAL.fullmatch(t) or _INTEGER.fullmatch(t) for t in texts)
    if are_real or "nan" in map(str.lower, texts):
      raise ValueError(
        f"got the label {real[-1]} in {where}, expected whole numbers or names"
        " of classes, which --classes of vit-jax prepare lists. For numbers to"
        " predict, name the column: numbers= of the recipe folder, or --numbers"
        " of vit-jax prepare."
      )
  elif unknown := sorted(texts - {*given}):
    raise ValueError(
      f"got the classes {unknown[:5]} in {where}, expected the given names."
    )


def find_classes(
  labels: Iterable,
  options: Options,
  columns: tuple[str, ...],
  given: tuple[str, ...] | None,
  where: str,
) -> Classes | Numbers:
  """Returns the classes, or the numbers to predict, of all labels.

  Args:
    labels: The label of each image; a list for several classes or numbers.
    options: The user's options.
    columns: The columns of the labels.
    given: Names of the classes in the source; None if there are none.
    where: The source, for messages.

  Raises:
    ValueError: The labels cannot be classes, see `Classes`; or an image has the
      same label twice, as in a list with a 0 or 1 for each class.
  """
  if options.numbers:
    count = max((len(v) for v in labels if v is not None), default=1)
    return Numbers(columns, count, where)
  values, is_multilabel = set(), False
  for label in labels:
    if not isinstance(label, list):
      values.add(label)
      continue
    is_multilabel = True
    if len({*label}) < len(label):
      raise ValueError(
        f"got the labels {label} in {where}, expected different classes."
      )
    values.update(label)
  return Classes(values, options.classes or given, where, is_multilabel)


def label_columns(
  options: Options, image: str, columns: Sequence[str], where: str
) -> tuple[str, ...]:
  """Returns the columns of the labels, or of the numbers.

  Args:
    options: The user's options.
    image: The column of the images.
    columns: All columns.
    where: The source, for messages.

  Raises:
    ValueError: There are no such columns.
  """
  dashes = options.dashes
  name = "numbers" if options.numbers else "label" if dashes else "labels"
  given = options.numbers or (options.label or "").split(",")
  if options.label in columns:  # its name may have a comma
    given = (options.label,)
  if any(given):
    return tuple(
      find_column(dashes + name, c.strip(), (), columns, where) for c in given
    )
  others = [column for column in columns if column not in (image, "")]
  usual = (others[0],) if len(others) == 1 else ("label",)
  if "label" not in columns and len(others) > 1:
    raise ValueError(
      f"{dashes}{name}: got no value, expected the column of the classes, or"
      f" columns with a 0 or 1 for each class, of {where}: {', '.join(others)}."
    )
  return (find_column(dashes + name, None, usual, columns, where),)


def class_columns(columns: tuple[str, ...]) -> tuple[str, ...] | None:
  """Returns the classes that several columns name; None for one column.

  Also None if the names are numbers, which stand for themselves.
  """
  are_numbers = all(map(_INTEGER.fullmatch, columns))
  return columns if len(columns) > 1 and not are_numbers else None


def of_zeros_and_ones(
  rows: Sequence[Sequence[str]], columns: Sequence[str], where: str
) -> list[str] | list[list[str]]:
  """Returns the class of each row, or its classes, from a column for each.

  Args:
    rows: For each image, the cells of the columns.
    columns: Their names, which are those of the classes.
    where: The source, for messages.

  Returns:
    A name for each row if each has one 1; otherwise lists of names.

  Raises:
    ValueError: A cell is neither 0 nor 1.
  """
  values = {"0": False, "0.0": False, "false": False}
  values |= {"1": True, "1.0": True, "true": True}
  chosen = []
  for row in rows:
    for cell, column in zip(row, columns, strict=True):
      if str(cell).lower() not in values:
        raise ValueError(
          f"got {str(cell)!r} in the column {column} of {where}, expected 0 or"
          " 1 in each column of several labels."
        )
    marks = [values[str(cell).lower()] for cell in row]
    chosen.append([c for c, mark in zip(columns, marks, strict=True) if mark])
  if all(len(names) == 1 for names in chosen):
    return [name for (name,) in chosen]
  return chosen


def find_column(
  option: str,
  given: str | None,
  usual: Sequence[str],
  columns: Sequence[str],
  where: str,
) -> str:
  """Returns the column that an option names, or the one with a usual name.

  Args:
    option: Name of the option, such as "--label".
    given: Its value; None if it is not set.
    usual: Names of such a column, of which one is expected.
    columns: All columns.
    where: The source, for messages.

  Raises:
    ValueError: There is no such column, or there are several.
  """
  wanted = usual if given is None else (given,)
  found = [column for column in columns if column in wanted]
  if len(found) != 1:
    got = given or " and ".join(found) or "no value"
    expected = f"one of the columns of {where}: {', '.join(columns)}"
    raise ValueError(unexpected(option, got, expected))
  return found[0]


def common_names(
  names: Mapping[str, Sequence[str] | None], where: str
) -> tuple[str, ...] | None:
  """Returns the names of the classes by label; None if there are none.

  Args:
    names: Part of a source -> the names in its metadata, if any.
    where: The source, for messages.

  Raises:
    ValueError: Two parts have different names.
  """
  parts = {tuple(v): part for part, v in names.items() if v}
  if len(parts) > 1:
    one, other, *_ = parts.values()
    raise ValueError(
      f"{where}: got other classes in {one} than in {other}, expected the same."
    )
  return next(iter(parts), None)


def read_names(path: str) -> tuple[str, ...]:
  """Returns the lines of a text that are not blank, stripped.

  Raises:
    OSError: The file cannot be read.
    ValueError: It is not text.
  """
  try:
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
  except UnicodeDecodeError as e:
    raise ValueError(f"{path}: got {e}, expected text in UTF-8.") from None
  return tuple(line.strip() for line in lines if line.strip())


def check_names(
  names: tuple[str, ...], where: str, what: str = "classes"
) -> None:
  """Raises ValueError for names that TFDS would not store unchanged.

  Args:
    names: The names.
    where: The source, for messages.
    what: What they name, for messages.
  """
  if len({*names}) < len(names):
    twice, _ = collections.Counter(names).most_common(1)[0]
    raise ValueError(
      f"got two {what} named {twice!r} in {where}, expected different names."
    )
  # TFDS stores them in a file, one a line, without blanks around them.
  for name in names:
    if name != name.strip() or not name or len(name.splitlines()) > 1:
      raise ValueError(
        f"got {name!r} in the {what} of {where}, expected one line of text."
      )


def check_unused(options: Options, names: tuple[str, ...], where: str) -> None:
  """Raises ValueError for options that would have no effect.

  Args:
    options: The user's options.
    names: Options that are not used.
    where: The source or the option that does not use them.
  """
  for name in names:
    if (value := getattr(options, name)) is not None:
      raise ValueError(unexpected(f"--{name}", value, f"none for {where}"))


def select_splits(
  available: Collection[str], options: Options, where: str
) -> list[str]:
  """Returns the splits to import.

  Raises:
    ValueError: An option names a split that does not exist, or has a pattern.
  """
  wrong = [k for k, v in options.splits.items() if v or k not in available]
  if wrong:
    got = ", ".join(f"{k}={options.splits[k] or ''}".rstrip("=") for k in wrong)
    expected = f"names of splits of {where}: {', '.join(available)}"
    raise ValueError(unexpected("--splits", got, expected))
  return [name for name in available if name in (options.splits or available)]
