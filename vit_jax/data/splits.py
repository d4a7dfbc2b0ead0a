"""The language of splits: "train", "train[:99%]", "train[100:200]+test".

A slice has the same records as in TFDS. It is parsed here because folders and
fake data have splits, too, and because errors then name the existing splits.

After all slices and sums a subset may follow, which TFDS does not have:
"train@2000" and "train[:99%]+test@10%/seed=1" draw that many of the records,
see `vit_jax.data.subsets`.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

# Split -> names of its folder, in lower case.
SPLIT_FOLDERS = {
  "train": ("train", "training"),
  "val": ("val", "valid", "validation", "dev"),
  "test": ("test", "testing", "eval", "evaluation"),
}

_PART = re.compile(
  r"(?P<name>[\w.-]+)(?:\[(?P<start>[^:\]]*):(?P<stop>[^:\]]*)\])?"
)
_BOUND = re.compile(r"([+-]?\d+(?:\.\d+(?=%))?)(%?)")
_DRAW = re.compile(r"(\d+(?:\.\d+(?=%))?)(%?)(?:/seed=(\d+))?")


class SplitError(ValueError):
  """A split that does not exist, or whose syntax is wrong."""


class NotOnDisk(ValueError):
  """Records are not on disk; the message says how to put them there."""


def _error(split: str, expected: str) -> SplitError:
  return SplitError(f"got split {split!r}, expected {expected}.")


class Span(NamedTuple):
  """Records `start` to `stop` (excluded) of one split."""

  split: str
  start: int
  stop: int


class Draw(NamedTuple):
  """A subset: how many records are drawn, with which seed."""

  number: float
  is_percent: bool
  seed: int
  text: str  # the whole split, for messages

  def count(self, num_examples: int) -> int:
    """Returns the number of records to draw from `num_examples`.

    Percentages are rounded to the nearest record.

    Raises:
      SplitError: The number is 0, or larger than `num_examples`.
    """
    count = int(self.number)
    if self.is_percent:
      count = round(self.number * num_examples / 100.0)
    if not 0 < count <= num_examples:
      raise _error(self.text, f"a subset of 1 to {num_examples:,} records")
    return count


def parse_draw(text: str) -> tuple[str, Draw | None]:
  """Divides a split into its slices and the subset that is drawn from them.

  Raises:
    SplitError: After "@" there is neither a number nor a percentage, or
      something other than a seed follows it.

  Example:
    >>> parse_draw("train[:99%]@10%/seed=1")[0]
    'train[:99%]'
  """
  base, at, draw = text.partition("@")
  if not at:
    return text, None
  match = _DRAW.fullmatch(draw.strip())
  if not match:
    raise _error(text, "one subset at the end, as 'train+test@10%/seed=1'")
  number, percent, seed = match.groups()
  return base, Draw(float(number), bool(percent), int(seed or 0), text)


def num_examples(text: str, sizes: Mapping[str, int]) -> int:
  """Returns the number of records in a split, with slices and subset.

  Raises:
    SplitError: See `parse_split` and `parse_draw`.
  """
  base, draw = parse_draw(text)
  count = num_records(parse_split(base, sizes))
  return draw.count(count) if draw else count


def parse_split(
  text: str, sizes: Mapping[str, int], synonyms: Mapping[str, str] | None = None
) -> tuple[Span, ...]:
  """Parses a split with its slices.

  A bound in percent is rounded to the nearest record; a negative one counts
  from the end.

  Args:
    text: Names with optional slices, joined by "+"; no subset.
    sizes: Number of records of each existing split.
    synonyms: Other names in lower case, accepted in any case, and the splits
      that they stand for.

  Raises:
    SplitError: Wrong syntax, an unknown split (the message has the known ones
      and their sizes), bounds outside of the split, or no records at all.

  Example:
    >>> parse_split("train[:99%]", {"train": 200, "test": 10})
    (Span(split='train', start=0, stop=198),)
  """
  return tuple(
    _parse_part(part, text, sizes, synonyms or {}) for part in text.split("+")
  )


# Sizes to try for a split of unknown size. Small ones, as percents are rounded.
_SIZES = (*range(1, 101), 1_000, 10_000, 1_000_000, 1_000_000_000)


def are_apart(a: str, b: str) -> bool:
  """Whether two slices of one split share no record, whatever its size.

  Example:
    >>> are_apart("train[:90%]", "train[90%:]"), are_apart("train", "train[:9]")
    (True, False)
  """
  slices = [parse_draw(split)[0] for split in (a, b)]
  names = {part.partition("[")[0].strip() for part in slices}
  apart = []
  for size in _SIZES:
    try:
      x, y = (parse_split(part, dict.fromkeys(names, size)) for part in slices)
    except SplitError:  # the slices need more records
      continue
    apart += [u.stop <= v.start or v.stop <= u.start for u in x for v in y]
  return len(names) == 1 and bool(apart) and all(apart)


def num_records(spans: tuple[Span, ...]) -> int:
  """Returns the number of records in all spans."""
  return sum(span.stop - span.start for span in spans)


def _parse_part(
  part: str, text: str, sizes: Mapping[str, int], synonyms: Mapping[str, str]
) -> Span:
  match = _PART.fullmatch(part.strip())
  if not match:
    raise _error(text, "one such as 'train[:99%]' or 'train[100:200]+test'")
  name, start, stop = match.groups()
  if name not in sizes:
    name = synonyms.get(name.lower(), name)
  if name not in sizes:
    known = ", ".join(f"{k} ({v:,} records)" for k, v in sizes.items())
    raise _error(name, f"one of {known}")
  size = sizes[name]
  if not size:
    raise _error(text, f"images in {name!r}, which has none")
  start = _bound(start or "0", size, text)
  stop = _bound(stop or str(size), size, text)
  if not 0 <= start < stop <= size:
    raise _error(text, f"rising bounds of {name!r} from 0 to {size:,}")
  return Span(name, start, stop)


def _bound(text: str, size: int, split: str) -> int:
  match = _BOUND.fullmatch(text.strip())
  if not match:
    raise _error(split, f"bounds such as 100 or 99%, not {text!r}")
  is_percent = bool(match[2])
  number = float(match[1]) if is_percent else int(match[1])
  number = round(number * size / 100.0) if is_percent else number
  return number + size if text.strip().startswith("-") else number
