"""All labels, or all images undecoded, of a split that is read from files.

Its source has a method `columns`, which parses many records together.
"""

import numpy as np

from vit_jax.data.source import Record, Source, reading
from vit_jax.data.tf_cpu import as_is, tf


def labels_of(files: Source) -> np.ndarray:
  """Returns what `Source.labels` does, of a split that it reads from files."""
  with reading(files):
    labels = columns_of(files, "label")["label"].numpy()
  return in_range(labels, files.num_classes)


def columns_of(files: Source, *names: str) -> dict[str, tf.Tensor]:
  """Reads a whole split as its `columns` does, also where records are broken.

  Such a record gets an image of no bytes, and no label.
  """
  try:
    return files.columns(*names)
  except (tf.errors.InvalidArgumentError, UnicodeDecodeError):
    # One of many that are parsed together.
    spec = files.label_spec
  found = {
    "image": np.full([files.num_examples], b"", object),
    "label": np.full(
      [files.num_examples, *spec.shape],
      0 if files.is_multilabel else -1,
      spec.dtype.as_numpy_dtype,
    ),
  }

  @as_is
  def loaded(raw: Record) -> tf.data.Dataset:  # none, if it cannot be parsed
    return tf.data.Dataset.from_tensors(raw).map(files.load).ignore_errors()

  # What is wrong with the store, not with a record, is still an error.
  records = files.raw(0, files.num_examples).flat_map(loaded)
  for record in records.as_numpy_iterator():
    for name in names:
      found[name][record["index"]] = record[name]
  if files.is_multilabel:
    found["label"] = found["label"].astype(bool)
  return {name: tf.constant(found[name]) for name in names}


def in_range(labels: np.ndarray, num_classes: int) -> np.ndarray:
  """Returns labels, -1 in place of those that are no class."""
  if labels.ndim > 1:
    return labels
  return np.where((labels < 0) | (labels >= num_classes), -1, labels)
