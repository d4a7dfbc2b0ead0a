"""Splits held out of the training data: apart from it, and joined with it."""

import re

from vit_jax.data import vtab
from vit_jax.data.sources import Sources
from vit_jax.data.splits import Span, parse_draw, parse_split

_HALF = re.compile(r"([\w.-]+)\[(?::([^:\]]+)|([^:\]]+):)\]")


def joined(split: str, held_out: str) -> str:
  """Returns the split with the records of both, those of `split` first.

  Example:
    >>> joined("train[:98%]", "train[98%:]"), joined("train800", "val200")
    ('train', 'train800+val200')
  """
  first, second = _HALF.fullmatch(split), _HALF.fullmatch(held_out)
  if first and second and first[1] == second[1]:
    if first[2] and first[2] == second[3]:
      return first[1]
  return f"{split}+{held_out}"


def num_shared(sources: Sources, dataset: str, a: str, b: str) -> int:
  """Returns how many records of a data set are in both of two splits.

  Of a subset, train@2000, all records count that it is drawn from.

  Args:
    sources: Opens the splits.
    dataset: Name of the data set.
    a: A split.
    b: Another one.

  Raises:
    ValueError: Unknown data set or split.
  """
  a, b = (parse_draw(split)[0] for split in (a, b))  # drawn from the others
  return sum(
    max(0, min(x.stop, y.stop) - max(x.start, y.start))
    for x in _spans(sources, dataset, a)
    for y in _spans(sources, dataset, b)
    if x.split == y.split
  )


def _spans(sources: Sources, dataset: str, split: str) -> tuple[Span, ...]:
  """Returns the records of a split among splits that share none."""
  task = vtab.TASKS.get(dataset.removeprefix(vtab.PREFIX))
  if task and dataset.startswith(vtab.PREFIX):
    return task.spans(split)  # train800val200 has the records of val200
  names = {part.split("[")[0].strip() for part in split.split("+")}
  sizes = {n: sources.look_at(dataset, n).num_examples for n in names}
  return parse_split(split, sizes)
