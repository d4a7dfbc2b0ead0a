"""Splits held out of the training data: apart from it, and joined with it."""

import re

from vit_jax.data.sources import Sources
from vit_jax.data.splits import parse_draw, parse_split

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
  names = {part.split("[")[0].strip() for part in f"{a}+{b}".split("+")}
  sizes = {n: sources.look_at(dataset, n).num_examples for n in names}
  return sum(
    max(0, min(x.stop, y.stop) - max(x.start, y.start))
    for x in parse_split(a, sizes)
    for y in parse_split(b, sizes)
    if x.split == y.split
  )
