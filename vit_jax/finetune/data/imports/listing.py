"""The result of scanning a source: splits, classes, columns, records."""

import collections
import dataclasses
import pathlib
import re
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import NamedTuple

import numpy as np

from vit_jax.data.splits import SPLIT_FOLDERS

# TFDS's names of the splits -> usual names of folders and files.
SPLITS = {
  "train": SPLIT_FOLDERS["train"],
  "validation": SPLIT_FOLDERS["val"],
  "test": SPLIT_FOLDERS["test"],
}
SPLIT_OF = {alias: k for k, names in SPLITS.items() for alias in names}
LABEL_COLUMNS = ("label", "labels", "class", "target", "fine_label", "category")
IMAGE_COLUMNS = ("image", "img", "jpg", "png", "file", "file_name", "filename")
_CONTENT = {
  "image": "encoded images (bytes, or a struct with bytes)",
  "label": "whole numbers, text, or lists of these",
}
_INTEGER = re.compile("-?[0-9]{1,18}")
_WHOLE = re.compile(rf"{_INTEGER.pattern}(\.0*)?")
# Unlike for Python's float, "1_000" is a name. "nan" is a missing number.
_NUMBER = re.compile(
  r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|nan", re.IGNORECASE
)
BITS = {"0", "1", "0.0", "1.0"}


class Options(NamedTuple):
  """The user's options for a source.

  splits: Splits to import -> pattern of their files, or None to use the names
    of files. Empty for all splits.
  image: Column of the images; None to find it by its type.
  label: Column of the labels; None to find it by its name and type.
  classes: Names of the classes by label; None for those of the source.
  numbers: Columns of numbers to predict, instead of classes.
  """

  splits: Mapping[str, str | None] = {}
  image: str | None = None
  label: str | None = None
  classes: tuple[str, ...] | None = None
  numbers: tuple[str, ...] = ()


# A class; the classes of an image that may have any number of them; or numbers
# to predict, float32 [outputs].
Label = int | tuple[int, ...] | np.ndarray


class Entry(NamedTuple):
  """A record: its unique name, encoded image and label, or an error."""

  key: str
  image: bytes = b""
  label: Label = -1
  error: str = ""


class Split(NamedTuple):
  """A split: its number of records, broken ones included, if known."""

  count: int | None
  entries: Callable[[], Iterator[Entry]]


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

  Raises:
    ValueError: A name has several lines, or two names are equal.
  """

  def __init__(self, columns: Sequence[str], count: int, where: str):
    self.names = tuple(columns)
    if len(columns) == 1 < count:
      self.names = tuple(f"{columns[0]} {i}" for i in range(count))
    check_names(self.names, where, "numbers")

  def label(self, values: Sequence | None) -> np.ndarray | None:
    """Returns float32 [outputs]; None if one is missing, or is not a number."""
    if any("_" in value for value in values or () if isinstance(value, str)):
      return None  # Python's 1_000
    try:
      label = np.array([*map(float, values or ())], np.float32)
    except (TypeError, ValueError):
      return None
    is_whole = len(label) == len(self.names) and np.isfinite(label).all()
    return label if is_whole else None


def numbers_error(got: str, column: str, where: str) -> str:
  """Returns the error for labels that are real numbers without --numbers.

  Args:
    got: One of the labels, or their type.
    column: Their column; "" if the kind of source has no --numbers.
    where: The source.
  """
  place = f"the column {column!r} of {where}" if column else where
  option = (
    f"--numbers={column}" if column else "--numbers with csv: or parquet:"
  )
  return (
    f"got real numbers in {place}, such as {got}, expected classes. To predict"
    f" the numbers: {option}."
  )


def check_lists(
  lists: Iterable[Sequence | None], column: str, where: str
) -> None:
  """Raises ValueError for lists with a 0 or 1 for each class.

  They would be read as the classes 0 and 1. Unlike lists of classes, they have
  one length, and some of them have a value twice.

  Args:
    lists: The labels of each image; empty lists and None are skipped.
    column: Their column, for messages.
    where: The source, for messages.
  """
  length, has_twice = None, False
  for values in lists:
    if not values:
      continue
    length = length or len(values)
    bits = [*map(_text, values)]
    if len(values) != length or not {*bits} <= BITS:
      return
    has_twice = has_twice or len({*bits}) < length
  if has_twice:
    raise ValueError(
      f"got lists of {length} values in the column {column!r} of {where}, one"
      " 0 or 1 for each class; expected a list of the classes of the image:"
      " their numbers or names, as [1, 3] for [0, 1, 0, 1]."
    )


def are_real(texts: Collection[str]) -> bool:
  """Whether texts are numbers, and some of them are not written as integers.

  Example:
    >>> are_real(["1", "2.5"]), are_real(["1", "2"]), are_real(["1.5", "a"])
    (True, False, False)
  """
  # An integer of more than 18 digits is a name.
  are_integers = all(text.lstrip("+-").isdecimal() for text in texts)
  return not are_integers and all(map(_NUMBER.fullmatch, texts))


class Classes:
  """The numbers of classes, from all labels of a source.

  Integers are labels as they are, and so are texts if all of them are integers.
  Whole numbers with a point are integers too: pandas writes 1.0 where another
  label is missing. Otherwise texts are names of classes, numbered in sorted
  order or in that of `given`.

  Args:
    labels: All labels, those of a multi-label image one by one. None, NaN,
      blanks and negative numbers are missing labels.
    given: Names of the classes by label, from the user or the source; None for
      the labels themselves.
    where: The source, for messages.
    is_multilabel: Whether an image can have any number of classes. Numbers with
      a point are then no labels: a list of them is a vector.
    column: The column of the labels, for the hint to --numbers; "" if the kind
      of source has no such option.

  Raises:
    ValueError: There are no labels, names that are not given, more numbers than
      names, or numbers that cannot be labels; or two classes have one name.
  """

  def __init__(
    self,
    labels: Collection,
    given: tuple[str, ...] | None,
    where: str,
    is_multilabel: bool = False,
    column: str = "",
  ):
    self.is_multilabel = is_multilabel
    texts = {text for text in map(_text, labels) if text}
    are_given = given is not None and texts <= {*given}
    pattern = _INTEGER if is_multilabel or are_given else _WHOLE
    self._are_numbers = all(map(pattern.fullmatch, texts))
    if not self._are_numbers and not are_given and are_real(texts):
      got = max(texts, key=lambda text: (not _WHOLE.fullmatch(text), text))
      hint = " If they are names of classes: --classes=FILE, with all of them."
      if got.lower() == "nan":
        hint = " Leave a label empty where it is missing."
      raise ValueError(numbers_error(got, column, where) + hint)
    if not are_given and (nan := {t for t in texts if t.lower() == "nan"}):
      raise ValueError(
        f"got the label {nan.pop()!r} in {where}, expected no text where a"
        " label is missing. If it is a class: --classes=FILE, with all names."
      )
    if self._are_numbers:
      texts = {text for text in texts if _integer(text) >= 0}
    if not texts:
      raise ValueError(f"got {where} without any label, expected one an image.")
    if self._are_numbers:
      numbers = {*map(_integer, texts)}
      self.names = given or _numbers(numbers, where)
      if max(numbers) >= len(self.names):
        raise ValueError(
          f"got label {max(numbers)} in {where}, expected 0 to"
          f" {len(self.names) - 1}, as there are {len(self.names)} names of"
          " classes."
        )
    else:
      self.names = given or tuple(sorted(texts))
      if missing := sorted({*texts} - {*self.names}):
        raise ValueError(
          f"got the classes {missing[:5]} in {where}, expected one of the"
          f" {len(self.names)} given names, such as {self.names[0]!r}."
        )
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
    return max(_integer(text), -1) if self._are_numbers else self._index[text]


def _text(label) -> str:
  """Returns a label as text without blanks around it; "" if missing."""
  if isinstance(label, bytes):
    label = label.decode("utf-8", "replace")
  is_missing = label is None or label != label  # NaN, of any library
  return "" if is_missing else str(label).strip()


def _integer(text: str) -> int:
  """Returns the value of a match of `_WHOLE`."""
  return int(text.partition(".")[0])


def _numbers(present: set[int], where: str) -> tuple[str, ...]:
  largest = max(present)
  if largest >= 10 * len(present) + 1000:
    raise ValueError(
      f"got only {len(present):,} different labels up to {largest:,} in"
      f" {where}, expected numbers of classes, from 0."
    )
  return tuple(map(str, range(largest + 1)))


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
      f"got {where}, whose classes differ between {one} and {other}, expected"
      " the same in all: see Hugging Face's Dataset.align_labels_with_mapping."
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
    raise ValueError(
      f"{path}: got bytes that are no text ({e.reason} at {e.start:,}),"
      " expected UTF-8. Is it the right file?"
    ) from None
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
      f"got two {what} of the name {twice!r} in {where}, expected different"
      " ones."
    )
  # TFDS stores them in a file, one a line, without blanks around them.
  for name in names:
    if name != name.strip() or not name or len(name.splitlines()) > 1:
      raise ValueError(
        f"got {name!r} among the names of {what} in {where}, expected one line"
        " of text without blanks around it."
      )


def check_unused(options: Options, names: tuple[str, ...], why: str) -> None:
  """Raises ValueError for options that would have no effect.

  Args:
    options: The user's options.
    names: Options that this kind of source does not use.
    why: The source, and what it uses instead.
  """
  if given := [f"--{k}" for k in names if getattr(options, k) is not None]:
    raise ValueError(
      f"{', '.join(given)}: got a value, expected none for {why}; leave it out."
    )


def select_splits(
  available: Collection[str], options: Options, where: str
) -> list[str]:
  """Returns the splits to import.

  Raises:
    ValueError: An option names a split that does not exist, or has a pattern.
  """
  if any(options.splits.values()):
    raise ValueError(
      "--splits: got a pattern, which is for csv, tars and parquet files;"
      f" expected names of splits of {where}: {', '.join(available)}."
    )
  if missing := sorted({*options.splits} - {*available}):
    raise ValueError(
      f"--splits: got {', '.join(missing)}, expected splits of {where}, which"
      f" has {', '.join(available)}."
    )
  return [name for name in available if name in (options.splits or available)]


def usual_columns(columns: Collection[str], usual: Sequence[str]) -> list[str]:
  """Returns the columns with usual names in any case, the most usual first."""
  rank = lambda column: (usual.index(column.lower()), column.lower() != column)
  return sorted((c for c in columns if c.lower() in usual), key=rank)


def pick_column(
  role: str,
  candidates: Mapping[str, str],
  others: Mapping[str, str],
  given: str | None,
  where: str,
  content: str = "",
) -> tuple[str, str]:
  """Returns the column of the images or of the labels, and a remark on it.

  Args:
    role: "image" or "label", the name of the flag.
    candidates: Columns of a fitting type -> their types; "" without types.
    others: All columns -> their types.
    given: The column that the user names, if any.
    where: The source, for messages.
    content: What such a column has, for messages; "" for the types of parquet.

  Returns:
    Its name; a line about the other ones that fit, "" if there are none or if
    the user named it.

  Raises:
    ValueError: The given column does not exist or has another type; or no
      column fits; or several do, and none has a usual name; or the one with a
      usual name of labels has another type.
  """
  if given is not None and given in candidates:
    return given, ""
  usual = LABEL_COLUMNS if role == "label" else IMAGE_COLUMNS
  known = usual_columns(candidates, usual)
  # Beside a column with a usual name of labels and an unfitting type, no other
  # column is taken for the labels: the error names the first.
  if given is None and role == "label" and candidates and not known:
    given = next(iter(usual_columns(others, usual)), None)
  if given is None and (known or len(candidates) == 1):
    name = known[0] if known else next(iter(candidates))
    rest = [f"--{role}={other}" for other in candidates if other != name]
    text = f"the {role} is the column {name!r}; for another: {', '.join(rest)}"
    return name, text if rest else ""
  content = content or _CONTENT[role]
  got = "no column" if given is None else f"column {given!r}"
  if given is None and candidates:
    got = f"several columns ({', '.join(candidates)})"
  kinds = {**candidates, **others}
  listed = ", ".join(f"{k}: {v}" if v else k for k, v in kinds.items())
  raise ValueError(
    f"--{role}: got {got} for the {role} in {where}, expected the name of one"
    f" with {content}, of: {listed}."
  )
