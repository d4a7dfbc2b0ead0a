"""What splits hold: digests of their records, and the number of each class."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data.source import Source
from vit_jax.data.tf_cpu import tf

MAX_RECORDS = 100_000  # Of larger splits only the size is stated.


def digests(sources: Mapping[str, Source]) -> dict[str, dict[str, Any]]:
  """Returns what each of some splits holds, as JSON has it.

  The digest of a record is the SHA-256 of the bytes of its image, as they are
  stored, and of its label; that of a split is the SHA-256 of the sorted digests
  of its records, so it depends on which records there are, and not on their
  order.

  Args:
    sources: Name -> split, of which every record is read once.

  Returns:
    Name -> `dataset`, `split`, `records`; and unless there are more than
    `MAX_RECORDS`, or one of them is only read slowly (BMP files), `sha256`,
    `classes`, the number of records by label, and `shared`, the number of
    records that are in a split before it, too, by its name.
  """
  found, seen = {}, {}
  for name, source in sources.items():
    found[name] = {
      "dataset": source.name,
      "split": source.split,
      "records": source.num_examples,
    }
    records, counts = _read(source)
    if records is None:
      continue
    whole = hashlib.sha256(b"".join(sorted(records)))
    shared = {k: sum(r in of for r in records) for k, of in seen.items()}
    found[name] |= {
      "sha256": whole.hexdigest(),
      "classes": counts.tolist(),
      "shared": {k: n for k, n in shared.items() if n},
    }
    seen[name] = set(records)
  return found


def _read(source: Source) -> tuple[list[bytes] | None, np.ndarray]:
  """Returns the digests of all records, and the number of each class."""
  records, counts = [], np.zeros(source.num_classes, np.int64)
  if source.num_examples > MAX_RECORDS:
    return None, counts
  try:
    for record in source.records().as_numpy_iterator():
      image, label = record["image"], record["label"]
      image = image if isinstance(image, bytes) else image.tobytes()
      records.append(hashlib.sha256(image + label.tobytes()).digest())
      # A class, or for each class whether the image has it.
      counts += label > 0 if label.ndim else np.arange(len(counts)) == label
  except tf.errors.OpError:
    return None, counts
  return records, counts
