"""The `Source` of records of one's own, see `vit_jax.data.records`."""

import concurrent.futures
import dataclasses
import functools
from typing import Any

import numpy as np

from vit_jax.data import records as records_lib
from vit_jax.data import splits
from vit_jax.data.source import (
  UNAVAILABLE,
  UNAVAILABLE_ERRNOS,
  Record,
  Source,
)
from vit_jax.data.tf_cpu import tf

_THREADS = 16  # that read all labels


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RecordSource(Source):
  """Records of one's own, one part after the other.

  Attributes:
    parts: `Records` and which of them belong to the split.
    has_files: Whether images are bytes of files, not arrays.
  """

  parts: tuple[tuple[Any, splits.Span], ...]
  has_files: bool

  @property
  def knows_labels(self) -> bool:
    """See `Source`."""
    return all(hasattr(records, "labels") for records, _ in self.parts)

  def _read(
    self, index: np.integer | int
  ) -> tuple[bytes | np.ndarray, np.ndarray]:
    image, label = records_lib.image_and_label(
      self._at(int(index)), self.num_classes
    )
    is_same = isinstance(image, bytes) == self.has_files
    if not is_same or label.shape != self.label_spec.shape:
      raise ValueError("has an image or label of another kind than the first.")
    return image, label

  def _at(self, number: int) -> Any:
    """Returns the record of this number in the split."""
    for records, span in self.parts:
      if number < span.stop - span.start:
        return records[span.start + number]
      number -= span.stop - span.start
    raise IndexError(number)

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    image, label = tf.numpy_function(
      self._read, [raw["index"]], [self._dtype, self.label_spec.dtype]
    )
    return self._record(raw, image, label)

  def rescue(self, raw: Record) -> Record:
    """See `Source`."""
    image, label, error = tf.numpy_function(
      self._read_or_error,
      [raw["index"]],
      [self._dtype, self.label_spec.dtype, tf.string],
    )
    error = tf.ensure_shape(error, [])
    return {**self._record(raw, image, label), "error": error}

  @property
  def _dtype(self) -> tf.DType:
    return tf.string if self.has_files else tf.uint8

  def _record(self, raw: Record, image, label) -> Record:
    shape = [] if self.has_files else [None, None, 3]
    return {
      "image": tf.ensure_shape(image, shape),
      "label": tf.ensure_shape(label, self.label_spec.shape),
      "index": raw["index"],
    }

  def _read_or_error(
    self, index: np.integer | int
  ) -> tuple[Any, np.ndarray, bytes]:
    try:
      return *self._read(index), b""
    except Exception as e:  # a class of one's own may raise anything
      error = f"raises {type(e).__name__}: {e}".encode()
      if isinstance(e, ValueError):
        error = str(e).encode()
      if getattr(e, "errno", None) in UNAVAILABLE_ERRNOS:
        error = UNAVAILABLE + b": " + error
    image = b"" if self.has_files else np.zeros([1, 1, 3], np.uint8)
    spec = self.label_spec
    return image, np.zeros(spec.shape, spec.dtype.as_numpy_dtype), error

  def labels(self) -> np.ndarray:
    """See `Source`; a record that cannot be read has label -1, or zeros."""
    return self._labels

  @functools.cached_property
  def _labels(self) -> np.ndarray:
    if self.knows_labels:
      labels = np.concatenate(
        [
          np.asarray(records.labels())[span.start : span.stop]
          for records, span in self.parts
        ]
      )
    else:
      with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        read = pool.map(self._read_or_error, range(self.num_examples))
        labels = np.stack(
          [
            label if not error or label.ndim else np.int32(-1)
            for _, label, error in read
          ]
        )
    return labels.astype(bool if self.is_multilabel else self._label_dtype)

  @property
  def _label_dtype(self) -> type:
    return self.label_spec.dtype.as_numpy_dtype

  def identity(self) -> str:
    """See `Source`: the identities of the parts."""
    texts = [
      f"{records.identity()} [{span.start}:{span.stop}]"
      for records, span in self.parts
      if records.identity()
    ]
    return " + ".join(texts) if len(texts) == len(self.parts) else ""


def open_records(
  dataset: str, split: str, make: records_lib.Splits
) -> RecordSource:
  """Opens a split of records of one's own; reads the first record.

  Args:
    dataset: Name of the data set.
    split: A split with slices and sums, without a subset.
    make: The splits.

  Raises:
    ValueError: The data set or the split does not exist, or the first record is
      not as `records.Records` says.
  """
  parts = tuple(records_lib.spans(dataset, make, split))
  records, span = parts[0]
  try:
    image, label = records_lib.image_and_label(
      records[span.start], records.num_classes
    )
  except Exception as e:  # a class of one's own may raise anything
    raise ValueError(
      f"got data set {dataset!r}, whose record {span.start} of {span.split!r}"
      f" cannot be used: {type(e).__name__}: {e}"
    ) from e
  is_regression = bool(getattr(records, "is_regression", False))
  class_names = getattr(records, "class_names", None)
  return RecordSource(
    name=dataset,
    split=split,
    num_examples=splits.num_records(tuple(span for _, span in parts)),
    num_classes=records.num_classes,
    class_names=None if class_names is None else tuple(class_names),
    is_multilabel=label.ndim > 0 and not is_regression,
    is_regression=is_regression,
    parts=parts,
    has_files=isinstance(image, bytes),
  )
