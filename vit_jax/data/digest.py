"""What a split holds: a digest of its records, and the number of each class."""

import hashlib
from typing import Any

import numpy as np

from vit_jax.data.host_tf import tf
from vit_jax.data.records import Source

MAX_RECORDS = 100_000  # Of larger splits only the size is stated.


def digest(source: Source) -> dict[str, Any]:
  """Returns what a split holds, as JSON has it.

  The digest is the SHA-256 of the sorted SHA-256 of all records (the bytes of
  the image as they are stored, then the label), so it depends on which records
  there are, and not on their order.

  Args:
    source: The split, of which every record is read once.

  Returns:
    `dataset`, `split`, `records`; and unless there are more than `MAX_RECORDS`,
    or one of them is only read slowly (BMP files), `sha256` and `classes`, the
    number of records by label.
  """
  known = {
    "dataset": source.name,
    "split": source.split,
    "records": source.num_examples,
  }
  if source.num_examples > MAX_RECORDS:
    return known
  digests, counts = [], np.zeros(source.num_classes, np.int64)
  try:
    for record in source.records().as_numpy_iterator():
      image, label = record["image"], record["label"]
      image = image if isinstance(image, bytes) else image.tobytes()
      digests.append(hashlib.sha256(image + label.tobytes()).digest())
      # A class, or for each class whether the image has it.
      counts += label > 0 if label.ndim else np.arange(len(counts)) == label
  except tf.errors.OpError:
    return known
  whole = hashlib.sha256(b"".join(sorted(digests)))
  return {**known, "sha256": whole.hexdigest(), "classes": counts.tolist()}
