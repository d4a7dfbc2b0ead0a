"""Class names of published heads, and the column of each class.

By convention the width of a head decides its classes; see `known`.

ImageNet-21k was published with heads of three widths, in three orders. The
statements below were checked against the lists of timm 1.0.31
(timm/data/_info/*_synsets.txt; google-research/big_transfer#7 links Google's
own list for BiT):

- 21,841: the data set itself, the release of fall 2011. Sorted wnids.
- 21,843: the same, and n03931044 and n09859684. A comment in
  google-research/big_transfer#18 names these two; one of its authors believes,
  without being sure, that they have no images. Sorted wnids. timm uses this
  list for every head of that width, also for those of ViT's files.
- 21,842: FocalNet's (microsoft/FocalNet#27). The 1,000 classes of ImageNet-1k
  come first, then the others, each part sorted. Column 850, n04399382, is in
  ImageNet-1k but not in the two lists above: no training image had that label.

wordnet.csv has the sorted wnids of all three lists, whether ImageNet-1k has
each, and its first word in WordNet 3.0 (Princeton University, whose licence
permits its use), as in timm/data/_info/imagenet_synset_to_lemma.txt.
"""

import collections
import csv
import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.batch import Standardisation

_FILE = pathlib.Path(__file__).parent / "wordnet.csv"
# What lists of ImageNet-21k lack; see above.
_NOT_IN_21K = {
  21_841: {"n03931044", "n04399382", "n09859684"},
  21_843: {"n04399382"},
}

SHOWN = 4  # names of each side in an error

# Width of a head -> the order that is assumed; docs/weights.md compares them.
_ORDERS = {
  1000: "ImageNet-1k, sorted wnids",
  21_841: "ImageNet of fall 2011, sorted wnids",
  21_843: "Google's ImageNet-21k, sorted wnids",
}


class _Class(NamedTuple):
  """A class of ImageNet-21k: whether ImageNet-1k has it, and its name."""

  is_1k: bool
  word: str


@functools.cache
def _classes() -> dict[str, _Class]:
  """Returns the classes by wnid, sorted."""
  with _FILE.open(encoding="utf-8", newline="") as file:
    _, *rows = csv.reader(file)
  return {wnid: _Class(is_1k == "1", word) for wnid, is_1k, word in rows}


@functools.cache
def imagenet1k() -> tuple[str, ...]:
  """Returns the wnids of ImageNet-1k in the order of published heads.

  Example:
    >>> imagenet1k()[0]
    'n01440764'
  """
  return tuple(wnid for wnid, row in _classes().items() if row.is_1k)


def readable(name: str) -> str:
  """Returns a wnid with its word in front; any other name as it is.

  Example:
    >>> readable("n01440764"), readable("cat")
    ('tench (n01440764)', 'cat')
  """
  known_class = _classes().get(name)
  return f"{known_class.word} ({name})" if known_class else name


def describe(num_classes: int) -> str | None:
  """Returns a sentence on the classes of a head of a known width, or None.

  The width is only a convention: class names in a checkpoint take precedence.

  Args:
    num_classes: Width of the head; 1000, 21841 and 21843 are known.
  """
  order = _ORDERS.get(num_classes)
  return order and f"{num_classes:,} classes are taken for {order}."


def published_loss(num_classes: int, is_vit: bool) -> str | None:
  """Returns the training loss of a published head of this width, or None.

  The heads of 21,843 classes are those of Google's ViT and AugReg files. They
  were trained with a sigmoid for each class. BiT's loss is not known.

  Source: google-research/vision_transformer#34; big_vision's vit_i21k.py.
  """
  return "sigmoid" if is_vit and num_classes == 21_843 else None


def known(num_classes: int) -> tuple[str, ...] | None:
  """Returns the wnids of a head whose width decides its classes, or None.

  Args:
    num_classes: Width of the head; 1000, 21841 and 21843 are known.
  """
  if num_classes == 1000:
    return imagenet1k()
  if num_classes not in _NOT_IN_21K:
    return None
  lacking = _NOT_IN_21K[num_classes]
  return tuple(wnid for wnid in _classes() if wnid not in lacking)


def wnids_of(names: Sequence[str]) -> tuple[str, ...]:
  """Returns the wnids of a head that names ImageNet-1k's classes in words.

  Args:
    names: Names in the order of the head, as in Hugging Face's config.json. The
      head is ImageNet-1k's if it has 1,000 names and they begin with tench and
      goldfish.

  Returns:
    The wnids in the order of the head; () for other names.
  """
  firsts = [name.split(",")[0] for name in names[:2]]
  if len(names) != 1000 or firsts != ["tench", "goldfish"]:
    return ()
  return imagenet1k()


class Head(NamedTuple):
  """The classes of a head.

  num_classes: Width of the head; 0 without a head.
  class_names: Names in the order of the columns; None if they are unknown.
  loss: Loss of the head's training, one of `losses.HEADS`. It decides what the
    outputs mean.
  standardisation: Mean and deviation of regression targets; None if the outputs
    are the numbers themselves.
  is_assumed: Whether `loss` is assumed, as the weights to score state none.
  """

  num_classes: int
  class_names: tuple[str, ...] | None = None
  loss: str = "softmax"
  standardisation: Standardisation | None = None
  is_assumed: bool = False


class Matching(NamedTuple):
  """The result of `match`.

  columns: Column of the head for each label of the data set, int32 [classes].
  text: One line on how they were matched.
  """

  columns: np.ndarray
  text: str


def match(source, head: Head, by: str = "name") -> Matching:
  """Finds the column of every class of a data set, by name if possible.

  If the data set or the head has no names, label i is column i. TFDS's
  placeholders "0", "1", ... are no names, but names of folders always are.
  Class names that are numbers are columns of the head (see `by_number`). The
  data set may have fewer classes than the head.

  Args:
    source: Split of a data set: `name`, `num_classes`, `class_names`.
    head: The head whose columns are sought.
    by: "name"; or "position", which ignores the head's names.

  Raises:
    ValueError: Both have names, and a class of the data set occurs not at all
      or more than once in the head; or the data set has more classes.
  """
  num, width = source.num_classes, head.num_classes
  is_by_name = by == "name"
  columns = None
  if is_by_name:
    columns = by_name(source.class_names, head.class_names)
  if columns is not None:
    share = f" of the head's {width:,}" if num < width else ""
    is_same = np.array_equal(columns, np.arange(num))
    order = "the same order" if is_same else "another order"
    text = f"{num:,}{share} classes, matched by name; {order}"
    return Matching(columns, text)
  are_names = bool if source.name.startswith("folder:") else _are_names
  are_named = {
    f"data set {source.name!r}": are_names(source.class_names),
    "head": are_names(head.class_names),
  }
  if all(are_named.values()) and is_by_name:
    raise ValueError(_mismatch(source, head))
  if num > width:
    raise ValueError(
      f"got {source.name!r} with {num} classes, expected at most {width}, the"
      " width of the head."
    )
  nameless = " and the ".join(k for k, named in are_named.items() if not named)
  why = f"the {nameless} has no names" if is_by_name else "match=position"
  columns = by_number(source.class_names, width)
  if columns is not None and _are_names(source.class_names):
    first = f"{source.class_names[0]!r} is column {columns[0]}"
    text = f"{num:,} classes, matched by their numbers ({first}): {why}"
    return Matching(columns, text)
  return Matching(
    np.arange(num, dtype=np.int32),
    f"{num:,} classes, matched by position alone: {why}",
  )


def by_name(
  names: Sequence[str] | None, head_names: Sequence[str] | None
) -> np.ndarray | None:
  """Returns the column of each name, int32; None unless each occurs once.

  For an ImageNet-1k head with names in words, names may also be wnids.

  Args:
    names: Names of a data set's classes, by label.
    head_names: Names of a head's classes, by column.

  Example:
    >>> by_name(["dog", "cat"], ["cat", "cow", "dog"])
    array([2, 0], dtype=int32)
  """
  if not names or not head_names:
    return None
  if tuple(names) == tuple(head_names):
    return np.arange(len(names), dtype=np.int32)
  for columns in (head_names, wnids_of(head_names)):
    counts = collections.Counter(columns)
    column = {name: i for i, name in enumerate(columns) if counts[name] == 1}
    if all(name in column for name in names):
      return np.array([column[name] for name in names], np.int32)
  return None


def by_number(names: Sequence[str] | None, width: int) -> np.ndarray | None:
  """Returns the column of each class that is named by a number, int32.

  The number is the column if all numbers are below the width. If none is 0 and
  the largest is the width, they are counted from 1. Otherwise, the rank of the
  number is the column. The order matters because folders are sorted as text,
  with "10" before "2". Numbers may be written as pandas writes them, as "2.0".

  Args:
    names: Names of a data set's classes, by label.
    width: Columns of the head.

  Returns:
    None if a name is not a number, or if two numbers are equal.

  Example:
    >>> by_number(["0", "1", "10", "2"], 11), by_number(["10", "11", "9"], 3)
    (array([ 0,  1, 10,  2], dtype=int32), array([1, 2, 0], dtype=int32))
  """
  whole = [name.removesuffix(".0") for name in names or ()]
  if not whole or not all(name.isdecimal() for name in whole):
    return None
  # An int64 has room for 18 digits.
  numbers = np.array([int(name[:18]) for name in whole])
  if len(set(numbers)) < len(numbers):
    return None  # such as 1 and 01
  if numbers.max() == width and numbers.min() > 0:
    numbers -= 1
  elif numbers.max() >= width:
    numbers = np.argsort(np.argsort(numbers))
  return numbers.astype(np.int32)


def shortened(names: Sequence[str]) -> str:
  """Returns the first names, and how many follow: "cat, cow and 8 more"."""
  more = len(names) - SHOWN
  return ", ".join(names[:SHOWN]) + f" and {more:,} more" * (more > 0)


def _are_names(names: Sequence[str] | None) -> bool:
  """Whether these are names, neither absent nor TFDS's placeholders."""
  return bool(names) and list(names) != [str(i) for i in range(len(names))]


def _mismatch(source, head: Head) -> str:
  counts = collections.Counter(head.class_names)
  missing = [name for name in source.class_names if counts[name] != 1]
  return (
    f"got {source.name!r} with {source.num_classes:,} classes, of which"
    f" {len(missing):,} are not once in the head: {shortened(missing)};"
    f" expected names of the head's {head.num_classes:,} classes:"
    f" {shortened(head.class_names)}, or config.evals.NAME.match=position."
  )
