"""What is known of a source before its images are read."""

import collections
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.data.splits import SPLIT_FOLDERS

# TFDS's names of the splits -> the words that stand for them.
SPLITS = {
  "train": SPLIT_FOLDERS["train"],
  "validation": SPLIT_FOLDERS["val"],
  "test": SPLIT_FOLDERS["test"],
}
SPLIT_OF = {word: name for name, words in SPLITS.items() for word in words}
LABEL_COLUMNS = ("label", "labels", "class", "target", "fine_label", "category")
_NUMBER = re.compile("-?[0-9]{1,18}")


class Options(NamedTuple):
  """What a user says of a source.

  splits: Splits to import -> a pattern of the files that they are in, or None
    where names tell. Empty: all splits that are found.
  image: Column of the images; None: found by its type.
  label: Column of the labels; None: found by its name and type.
  classes: Names of the classes by label; None: the source tells.
  """

  splits: Mapping[str, str | None] = {}
  image: str | None = None
  label: str | None = None
  classes: tuple[str, ...] | None = None


class Entry(NamedTuple):
  """A record: its unique name, encoded image and class, or what is wrong."""

  key: str
  image: bytes = b""
  label: int = -1
  error: str = ""


class Split(NamedTuple):
  """A split: its number of records, broken ones included, if known."""

  count: int | None
  entries: Callable[[], Iterator[Entry]]


@dataclasses.dataclass(frozen=True)
class Listing:
  """The classes by label, and the splits by name; `note` is for the user."""

  class_names: tuple[str, ...]
  splits: dict[str, Split]
  note: str = ""


class Classes:
  """The numbers of classes, from all labels that a source has.

  Whole numbers are labels as they are, and so are texts if all are numbers,
  "007" as well, unless "7" occurs too and names are not given. Otherwise texts
  are names of classes, numbered in sorted order (by value, then as text, if
  all are numbers) or in that of `given`. `note` says where two texts are one
  number.

  Args:
    labels: The labels that occur; None, blanks and, among numbers, negative
      ones are missing labels.
    given: Names of the classes by label, if the user or the source tells.
    where: The source, for messages.

  Raises:
    ValueError: There are no labels, names that are not given, more numbers than
      names, or numbers that can be no labels; or two classes have one name.
  """

  def __init__(
    self, labels: Collection, given: tuple[str, ...] | None, where: str
  ):
    texts = {text for text in map(_text, labels) if text}
    self._are_numbers = all(_NUMBER.fullmatch(text) for text in texts)
    self._index = dict.fromkeys(texts, -1)
    self.note = ""
    if self._are_numbers:
      texts = sorted((t for t in texts if int(t) >= 0), key=_by_value)
      if not given and (twice := _one_number(texts)):
        self._are_numbers = False
        self.note = (
          f"labels are names of classes, numbered by value, since {twice[0]!r}"
          f" and {twice[1]!r} would be one number"
        )
    else:
      texts = sorted(texts)
    if not texts:
      raise ValueError(f"got {where} without any label, expected one an image.")
    if self._are_numbers:
      present = {*map(int, texts)}
      self.names = given or _numbers(present, where)
      if max(present) >= len(self.names):
        raise ValueError(
          f"got label {max(present)} in {where}, expected 0 to"
          f" {len(self.names) - 1}, as there are {len(self.names)} names of"
          " classes."
        )
    else:
      self.names = given or tuple(texts)
      if missing := sorted({*texts} - {*self.names}):
        raise ValueError(
          f"got the classes {missing[:5]} in {where}, expected one of the"
          f" {len(self.names)} given names, such as {self.names[0]!r}."
        )
    self._index |= {name: i for i, name in enumerate(self.names)}
    check_names(self.names, where)

  def index(self, label) -> int:
    """Returns the class of a label; -1 where it is missing."""
    text = _text(label)
    if not text:
      return -1
    return max(int(text), -1) if self._are_numbers else self._index[text]


def _text(label) -> str:
  """Returns a label as it is written, without blanks; "" means no label."""
  if isinstance(label, bytes):
    label = label.decode("utf-8", "replace")
  return "" if label is None else str(label).strip()


def _by_value(text: str) -> tuple[int, str]:
  return int(text), text


def _one_number(texts: Sequence[str]) -> tuple[str, str] | None:
  """Returns the first two neighbours of the same value, if any."""
  pairs = itertools.pairwise(texts)
  return next((pair for pair in pairs if int(pair[0]) == int(pair[1])), None)


def _numbers(present: set[int], where: str) -> tuple[str, ...]:
  largest = max(present)
  if largest >= 10 * len(present) + 1000:
    raise ValueError(
      f"got only {len(present):,} different labels up to {largest:,} in"
      f" {where}, expected numbers of classes, from 0."
    )
  return tuple(map(str, range(largest + 1)))


def common_names(
  stated: Mapping[str, Sequence[str] | None], where: str
) -> tuple[str, ...] | None:
  """Returns the names of the classes by label that the parts of a source state.

  Args:
    stated: Part -> the names that it states, if any.
    where: The source, for messages.

  Raises:
    ValueError: A label is one class in a part and another one in the next.
  """
  known = {part: tuple(names) for part, names in stated.items() if names}
  most = max(known, key=lambda part: len(known[part]), default=None)
  for part, names in known.items():
    for label, pair in enumerate(zip(known[most], names, strict=False)):
      if pair[0] != pair[1]:
        raise ValueError(
          f"got {where}, whose label {label} is {pair[0]!r} in {most} and"
          f" {pair[1]!r} in {part}, expected the same class in all; Hugging"
          " Face's Dataset.align_labels_with_mapping makes them so."
        )
  return known.get(most)


def read_names(path: str) -> tuple[str, ...]:
  """Returns the lines of a text that are not blank, stripped.

  Raises:
    OSError: The file cannot be read.
    ValueError: It is no text.
  """
  try:
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
  except UnicodeDecodeError as e:
    raise ValueError(
      f"{path}: got bytes that are no text ({e.reason} at {e.start:,}),"
      " expected UTF-8. Is it the right file?"
    ) from None
  return tuple(line.strip() for line in lines if line.strip())


def check_names(names: tuple[str, ...], where: str) -> None:
  """Raises ValueError for names that TFDS would not keep as they are."""
  if len({*names}) < len(names):
    twice, _ = collections.Counter(names).most_common(1)[0]
    raise ValueError(
      f"got two classes of the name {twice!r} in {where}, expected different"
      " ones."
    )
  # TFDS keeps them in a file, one a line, without blanks around them.
  for name in names:
    if name != name.strip() or not name or len(name.splitlines()) > 1:
      raise ValueError(
        f"got a class of the name {name!r} in {where}, expected one line of"
        " text without blanks around it."
      )


def check_unused(options: Options, names: tuple[str, ...], why: str) -> None:
  """Raises ValueError for options, of these names, that would have no effect.

  Args:
    options: Options of the user.
    names: Those that this kind of source does not go by.
    why: The source, and what it goes by instead.
  """
  if given := [f"--{k}" for k in names if getattr(options, k) is not None]:
    raise ValueError(
      f"{', '.join(given)}: got a value, expected none for {why}; leave it out."
    )


def wanted(
  available: Collection[str], options: Options, where: str
) -> list[str]:
  """Returns the splits to import, of those that there are.

  Raises:
    ValueError: A split that is not there, or a pattern.
  """
  if any(options.splits.values()):
    raise ValueError(
      f"--splits: got a pattern, which is for tars and parquet files; expected"
      f" names of splits of {where}: {', '.join(available)}."
    )
  if missing := sorted({*options.splits} - {*available}):
    raise ValueError(
      f"--splits: got {', '.join(missing)}, expected splits of {where}, which"
      f" has {', '.join(available)}."
    )
  return [name for name in available if name in (options.splits or available)]


def pick_column(
  role: str,
  candidates: Mapping[str, str],
  others: Mapping[str, str],
  given: str | None,
  where: str,
) -> str:
  """Returns the column of the images or of the labels.

  Args:
    role: "image" or "label", the name of the flag.
    candidates: Columns that could be it -> their types.
    others: All further columns -> their types.
    given: The column that the user names, if any.
    where: The source, for messages.

  Raises:
    ValueError: The column is not there or of another type; or none could be
      it; or several, of which none has the usual name.
  """
  if given is not None and given in candidates:
    return given
  usual = LABEL_COLUMNS if role == "label" else ("image", "img", "jpg", "png")
  known = [name for name in usual if name in candidates]
  if given is None and (known or len(candidates) == 1):
    return known[0] if known else next(iter(candidates))
  expected = {
    "image": "encoded images (bytes, or a struct with bytes)",
    "label": "whole numbers or text",
  }[role]
  got = "no column" if given is None else f"column {given!r}"
  if given is None and candidates:
    got = f"several columns ({', '.join(candidates)})"
  listed = ", ".join(f"{k}: {v}" for k, v in {**candidates, **others}.items())
  raise ValueError(
    f"--{role}: got {got} for the {role} in {where}, expected the name of one"
    f" with {expected}, of: {listed}."
  )
