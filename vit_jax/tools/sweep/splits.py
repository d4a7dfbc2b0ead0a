"""The splits of a search: their contents, shared records and unions."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.batch import DataError
from vit_jax.data import vtab
from vit_jax.data.source import Source, reading
from vit_jax.data.sources import Sources
from vit_jax.data.splits import Span, parse_draw, parse_split

MAX_RECORDS = 100_000  # larger splits are not read, only counted
_HALF = re.compile(r"([\w.-]+)\[(?::([^:\]]+)|([^:\]]+):)\]")


def digests(sources: Mapping[str, Source]) -> dict[str, dict[str, Any]]:
  """Returns a description of each split, as JSON values.

  The digest of a record is the SHA-256 of its stored image and its label. The
  digest of a split is the SHA-256 of the sorted digests of its records, so that
  their order does not matter.

  Args:
    sources: Name -> split; every record is read once.

  Returns:
    Name -> `dataset`, `split` and `records`. If all records can be read and are
    at most `MAX_RECORDS`, also `sha256`, `classes` (number of records by label)
    and `shared` (name of an earlier split -> number of shared records).
  """
  result, seen = {}, {}
  for name, source in sources.items():
    result[name] = {
      "dataset": source.name,
      "split": source.split,
      "records": source.num_examples,
    }
    if source.num_examples > MAX_RECORDS:
      continue
    try:
      records, counts = _read(source)
    except DataError:
      continue
    whole = hashlib.sha256(b"".join(sorted(records)))
    shared = {k: sum(r in of for r in records) for k, of in seen.items()}
    result[name] |= {
      "sha256": whole.hexdigest(),
      "classes": counts.tolist(),
      "shared": {k: n for k, n in shared.items() if n},
    }
    seen[name] = set(records)
  return result


def _read(source: Source) -> tuple[list[bytes], np.ndarray]:
  """Returns the digests of all records, and the number of records by class."""
  records, counts = [], np.zeros(source.num_classes, np.int64)
  with reading(source):
    for record in source.records().as_numpy_iterator():
      image, label = record["image"], record["label"]
      image = image if isinstance(image, bytes) else image.tobytes()
      records.append(hashlib.sha256(image + label.tobytes()).digest())
      # The label is a class, or a mask of classes.
      counts += label > 0 if label.ndim else np.arange(len(counts)) == label
  return records, counts


def joined(split: str, held_out: str) -> str:
  """Returns the union of both splits; the records of `split` come first.

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
  """Returns the number of records that two splits of a data set share.

  A subset such as train@2000 counts as the split from which it is drawn.

  Args:
    sources: Opens the splits.
    dataset: Name of the data set.
    a: Name of a split.
    b: Name of another split.

  Raises:
    ValueError: The data set or a split is unknown.
  """
  a, b = (parse_draw(split)[0] for split in (a, b))  # drawn from the others
  return sum(
    max(0, min(x.stop, y.stop) - max(x.start, y.start))
    for x in _spans(sources, dataset, a)
    for y in _spans(sources, dataset, b)
    if x.split == y.split
  )


def _spans(sources: Sources, dataset: str, split: str) -> tuple[Span, ...]:
  """Returns the records of a split, as parts of splits that share none."""
  task = vtab.TASKS.get(dataset.removeprefix(vtab.PREFIX))
  if task and dataset.startswith(vtab.PREFIX):
    return task.spans(split)  # train800val200 has the records of val200
  names = {part.split("[")[0].strip() for part in split.split("+")}
  sizes = {n: sources.inspect(dataset, n).num_examples for n in names}
  return parse_split(split, sizes)
