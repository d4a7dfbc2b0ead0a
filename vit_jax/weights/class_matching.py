"""Which column of a head belongs to which class of a data set."""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from vit_jax.weights import labels

SHOWN = 4  # names listed of each side


class Head(NamedTuple):
  """The classes of a head.

  num_classes: Width of the head; 0: there is none.
  class_names: Names in the order of its columns; None where they are unknown.
  """

  num_classes: int
  class_names: tuple[str, ...] | None = None


class Matching(NamedTuple):
  """What `match` finds.

  columns: Label of the data set -> column of the head.
  text: One line that says how they were matched.
  """

  columns: Int32[np.ndarray, " classes"]
  text: str


def match(source, head: Head) -> Matching:
  """Finds the column of every class of a data set, by name where possible.

  Where one side has no names, or only TFDS's placeholders "0", "1", ..., labels
  are columns. The data set may have fewer classes than the head.

  Args:
    source: Split of a data set: `name`, `num_classes`, `class_names`.
    head: The head whose columns are sought.

  Raises:
    ValueError: Both sides have names, and a class of the data set has no
      column, or no unique one; or the data set has more classes.
  """
  num, width = source.num_classes, head.num_classes
  columns = by_name(source.class_names, head.class_names)
  if columns is not None:
    text = (
      f"{num:,} of the head's {width:,} classes"
      if num < width
      else (f"{num:,} classes")
    )
    is_same = np.array_equal(columns, np.arange(num))
    order = "the same order" if is_same else "another order"
    return Matching(columns, f"{text}, matched by name; {order}")
  are_named = {
    f"data set {source.name!r}": _are_names(source.class_names),
    "head": _are_names(head.class_names),
  }
  if all(are_named.values()):
    raise ValueError(_fault(source, head))
  if num > width:
    raise ValueError(
      f"got {source.name!r} with {num} classes, expected at most the {width} of"
      " the head."
    )
  nameless = " and the ".join(k for k, named in are_named.items() if not named)
  return Matching(
    np.arange(num, dtype=np.int32),
    f"{num:,} classes, matched by position alone: the {nameless} has no names"
    " of classes",
  )


def by_name(
  names: Sequence[str] | None, head_names: Sequence[str] | None
) -> Int32[np.ndarray, " classes"] | None:
  """Returns the column of each name, or None unless each is found once.

  Heads of ImageNet-1k whose names are words are searched by wnid, too.

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
  for known in (head_names, labels.wnids_of(head_names)):
    counts = collections.Counter(known)
    column = {name: i for i, name in enumerate(known) if counts[name] == 1}
    if all(name in column for name in names):
      return np.array([column[name] for name in names], np.int32)
  return None


def some(names: Sequence[str]) -> str:
  """Returns the first names, and how many follow: "cat, cow and 8 more"."""
  more = len(names) - SHOWN
  return ", ".join(names[:SHOWN]) + f" and {more:,} more" * (more > 0)


def _are_names(names: Sequence[str] | None) -> bool:
  """Whether these are names, neither absent nor TFDS's placeholders."""
  return bool(names) and list(names) != [str(i) for i in range(len(names))]


def _fault(source, head: Head) -> str:
  counts = collections.Counter(head.class_names)
  missing = [name for name in source.class_names if counts[name] != 1]
  twice = "" if any(not counts[m] for m in missing) else " once"
  return (
    f"got {source.name!r}, of whose {source.num_classes:,} classes"
    f" {len(missing):,} are not{twice} among those of the head:"
    f" {some(missing)}; expected names of the head's {head.num_classes:,}"
    f" classes: {some(head.class_names)}. Name the classes as the head does,"
    " leave out the others, or fine-tune on this data set (config.init). A"
    " few-shot evaluator needs no head: kind='fewshot', or"
    f" vit-jax evaluate --checkpoint=... --fewshot={source.name}."
  )
