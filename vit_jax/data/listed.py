"""Images in a list, with classes and groups, and how they are divided.

To make splits, the images of every class are ordered by a hash of their names,
and the first 10 % (at least one, if there are two) become `val`. The hash
depends only on the name and a constant. So every machine and every run makes
the same splits, and a change in one class moves no image of another.

Images of the same bytes, and images of one group (a patient, a video), stay
together: all are in the split of the first of them.

In a split, the images of a class are spread evenly over the records, in the
order of such a hash; what stays together follows each other. So a slice like
train[:10%] has all classes. `Listed.cut` says where to hold out the last
records, with at least one of each class.
"""

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.data import copies
from vit_jax.data.source import Source
from vit_jax.paths import printable

WHOLE = ""  # a data set without splits
VAL_SHARE = 0.1
MAX_FILES = 100_000  # larger data sets are not searched for copies
_SALT = "vit_jax folder split 0"  # the seed of the split
# What other programs write for a missing label.
MISSING = {"nan", "none", "na", "n/a", "null"}

Files = dict[str, list[str]]  # class -> names of images
# Name -> the first name of those that stay together, if there are others.
Same = dict[str, str]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Listed(Source):
  """Images with names and labels; only record numbers are shuffled.

  Attributes:
    paths: Names of the images; in a folder, the files.
    path_labels: Their labels: int32 [num_examples], or float32 [num_examples,
      num_classes] for multi-label data and regression.
    ranks: float64 [num_examples], falling. An image is held out if this share
      of its class is; see `cut`.
  """

  paths: tuple[str, ...]
  path_labels: np.ndarray
  ranks: np.ndarray

  def labels(self) -> np.ndarray:
    """See `Source`."""
    return self.path_labels > 0 if self.is_multilabel else self.path_labels

  def cut(self, share: str) -> str:
    """Returns where to cut the split, so that all classes are on both sides.

    Each class is rounded by itself: at least one image is on each side, if it
    has two or more that differ. Copies and groups are on one side.

    Args:
      share: The part before the cut, such as "80%".

    Returns:
      A bound of a slice, such as "80.6%".
    """
    held_out = (100 - float(share.removesuffix("%"))) / 100
    first, num = int(np.sum(self.ranks > held_out)), self.num_examples
    for digits in range(12):
      percent = f"{100 * first / num:.{digits}f}"
      if round(float(percent) * num / 100.0) == first:  # as `parse_split`
        break
    return f"{percent}%"

  def record_name(self, index: int) -> str:
    """See `Source`."""
    return printable(self.paths[index])

  def identity(self) -> str:
    """See `Source`: a hash of the paths below the folder and the labels."""
    return self._identity

  @functools.cached_property
  def _identity(self) -> str:  # a second for a million paths
    root = os.path.commonprefix([min(self.paths), max(self.paths)])
    digest = hashlib.sha256(self.path_labels.tobytes())
    for path in self.paths:
      digest.update(os.fsencode(path[len(root) :]) + b"\0")
    return f"files {digest.hexdigest()[:16]}"


class Item(NamedTuple):
  """An image; for `rank`, see `Listed`."""

  path: str
  class_name: str
  rank: float


class Division(NamedTuple):
  """The images of each split in their order, and sentences for the user."""

  items: dict[str, list[Item]]
  remarks: list[str]


def arranged(
  dataset: str,
  by_split: dict[str, Files],
  relative: Callable[[str, str], str],
  groups: Mapping[str, str],
  same: Same | None = None,
) -> Division:
  """Divides `WHOLE` into `train` and `val`, and orders the images of splits.

  Args:
    dataset: Name of the data set, for messages.
    by_split: The images of each split, or of `WHOLE` alone.
    relative: (class, name) -> the name that does not change if the data set is
      moved.
    groups: Name -> its group; {} if there are none.
    same: The copies; None if names are files, which are then compared.

  Raises:
    ValueError: See `with_groups`.
  """
  remarks = []
  if same is None:
    same, remarks = find_copies(dataset, by_split)
  together, of_groups = with_groups(dataset, by_split, groups, same)
  if WHOLE in by_split:
    by_split = divide(by_split[WHOLE], relative, together)
  remarks += [*shared_remarks(by_split, same, "byte for byte"), *of_groups]
  items = {k: ordered(files, together) for k, files in by_split.items()}
  return Division(items, remarks)


def find_copies(
  dataset: str, by_split: dict[str, Files]
) -> tuple[Same, list[str]]:
  """Returns the files of the same bytes, and sentences on them."""
  num = sum(len(p) for files in by_split.values() for p in files.values())
  if num > MAX_FILES:
    return {}, [
      f"{dataset!r} has {num:,} files, too many to look for files of the same"
      " bytes, which may be on both sides of a split."
    ]
  class_of = {
    path: name
    for files in by_split.values()
    for name, paths in files.items()
    for path in paths
  }
  same = copies.find(list(class_of))
  found = [path for path, first in same.items() if path != first]
  if not found:
    return {}, []
  others = sum(class_of[p] != class_of[same[p]] for p in found)
  in_other = f" ({others:,} of them in another class)" * bool(others)
  return same, [
    f"{dataset!r} has {len(found):,} files with the bytes of another"
    f" file{in_other}, such as {printable(found[0])} and"
    f" {printable(same[found[0]])}. Where a folder is split automatically, the"
    " copies of an image stay together."
  ]


def shared_remarks(
  by_split: Mapping[str, Files], key_of: Mapping[str, str], how: str
) -> list[str]:
  """Returns a sentence for each two splits that share images or groups.

  Args:
    by_split: The images of each split.
    key_of: Name -> what may be in several splits.
    how: What is the same, such as "byte for byte".
  """
  remarks = []
  paths = {k: [*itertools.chain(*v.values())] for k, v in by_split.items()}
  for b, a in itertools.combinations(paths, 2):
    keys = {key_of[path] for path in paths[b] if path in key_of}
    if shared := [path for path in paths[a] if key_of.get(path) in keys]:
      remarks.append(
        f"{len(shared):,} of {len(paths[a]):,} images of {a!r} are also in"
        f" {b!r}, {how}, such as {printable(shared[0])}."
      )
  return remarks


def missing_remarks(names: Iterable[str], dataset: str) -> list[str]:
  """Returns a sentence if classes may stand for missing labels."""
  odd = [name for name in names if name.lower() in MISSING]
  return [
    f"{dataset!r} has a class {name!r}, which may stand for a missing label."
    for name in odd
  ]


def with_groups(
  dataset: str,
  by_split: Mapping[str, Files],
  groups: Mapping[str, str],
  same: Same,
) -> tuple[Same, list[str]]:
  """Joins copies and groups to what stays together; sentences on groups.

  Args:
    dataset: Name of the data set, for messages.
    by_split: See `arranged`.
    groups: Name -> its group; {} if there are none.
    same: Result of `find_copies`.

  Raises:
    ValueError: No class has three groups, so they cannot be held out.
  """
  if not groups:
    return same, []
  parents: dict[str, str] = {}

  def first(path):
    while path in parents:
      path = parents[path]
    return path

  firsts: dict[tuple[str, str], str] = {}
  every = [
    path
    for files in by_split.values()
    for paths in files.values()
    for path in paths
  ]
  for path in every:
    # An image without a group, or without copies, has a key of its own.
    group = ("group", groups[path]) if path in groups else ("alone", path)
    for key in (group, ("bytes", same.get(path, path))):
      a, b = first(path), first(firsts.setdefault(key, path))
      if a != b:
        parents[a] = b
  joined = {path: first(path) for path in every}
  got = f"{dataset!r} has {len({*groups.values()}):,} groups of images"
  if WHOLE not in by_split:
    shared = shared_remarks(by_split, groups, "by their group")
    return joined, [f"{got}.", *shared]
  most = max(
    len({joined[path] for path in paths}) for paths in by_split[WHOLE].values()
  )
  if most < 3:
    raise ValueError(
      f"group: got {got}, {most} in a class, expected three or more: for"
      " training, for a choice of options, and for a test."
    )
  return joined, [f"{got}; each is on one side of every split."]


def _units(files: Files, same: Same) -> Same:
  """Returns, for files that are copies, the file with which they are divided.

  None if no class has two different images: nothing could be held out.
  """
  first, units = {}, {}
  for paths in files.values() if same else ():
    for path in paths:
      if path in same and (unit := first.setdefault(same[path], path)) != path:
        units[path] = unit
  counts = [sum(p not in units for p in paths) for paths in files.values()]
  return units if max(counts) > 1 else {}


def divide(
  files: Files, relative: Callable[[str, str], str], same: Same
) -> dict[str, Files]:
  """Makes `train` and `val` from the images of each class; see `arranged`."""
  units, held_out = _units(files, same), set()
  for name, paths in files.items():
    own = [path for path in paths if path not in units]
    hashes = [_hash(relative(name, path)) for path in own]
    num_val = max(1, int(len(own) * VAL_SHARE + 0.5)) if len(own) > 1 else 0
    in_order = sorted(zip(hashes, own, strict=True))
    held_out.update(path for _, path in in_order[:num_val])
  return {
    split: {
      name: [p for p in paths if (units.get(p, p) in held_out) == is_val]
      for name, paths in files.items()
    }
    for split, is_val in (("train", False), ("val", True))
  }


def ordered(files: Files, same: Same) -> list[Item]:
  """Returns all images, those that are held out first at the end."""
  units, keys, records = _units(files, same), {}, []
  for name, paths in files.items():
    hashes = [_hash(f"{name}/{os.path.basename(path)}") for path in paths]
    in_order = sorted(zip(hashes, paths, strict=True))
    own = [(key, path) for key, path in in_order if path not in units]
    for i, (key, path) in enumerate(own):
      keys[path] = (-_rank(i, len(own)), key)
    records += [(key, path, name) for key, path in in_order]
  of_unit = lambda path: keys[units.get(path, path)]
  records.sort(key=lambda record: (of_unit(record[1]), record[0]))
  return [Item(path, name, -of_unit(path)[0]) for _, path, name in records]


def _rank(i: int, num: int) -> float:
  """Returns the share from which on image i of a class of `num` is held out.

  `share * num` images are held out, rounded, but at least the first one and at
  most all but the last one.
  """
  if i == num - 1:
    return 1.0
  return (i + 0.5) / num if i else 0.0


def _hash(path: str) -> bytes:
  # Without the folder of the data set, which may be moved.
  return hashlib.blake2b(os.fsencode(f"{_SALT}/{path}")).digest()[:16]
