"""The interface of every source of records; `sources.open_source` makes one."""

import abc
import contextlib
import dataclasses
import errno
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from vit_jax.batch import DataError
from vit_jax.data.tf_cpu import as_is, tf

Record = dict[str, Any]  # A structure of tensors.

PARALLEL = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
FETCHED = 64  # records fetched with one call
NO_LABEL = -(2**31)  # a record without the field; -1: an image without class
# Prefix of a record's error if its store does not answer, so that the record
# itself may be good; and the errors of the system with that meaning.
UNAVAILABLE = b"UNAVAILABLE"
UNAVAILABLE_ERRNOS = {
  errno.ECONNABORTED,
  errno.ECONNREFUSED,
  errno.ECONNRESET,
  errno.EHOSTDOWN,
  errno.EHOSTUNREACH,
  errno.ENETDOWN,
  errno.ENETUNREACH,
  errno.ENOTCONN,
  errno.ESTALE,
  errno.ETIMEDOUT,
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Source(abc.ABC):
  """A split of a data set: records in a fixed order, numbered from 0.

  Reading has two stages. `raw` streams records as they are stored, or only
  their numbers. `load` turns one of them, in parallel with others, into
  {"image", "label", "index"}: the image as encoded bytes or uint8 [h, w, c],
  the label as `label_spec` says, the index int64 []. A source with random
  access may override `fetch`. A streamed source has `is_by_number` False, and
  its own `raw` (which continues at the first record after the last), `raw_at`
  and `file_starts`.

  Attributes:
    name: The name in the config.
    split: The split in the config, slices included.
    num_examples: Number of records in the split.
    num_classes: Number of classes, or of regression targets. Labels are 0 to
      num_classes - 1.
    class_names: Names by label; None if the data set has none.
    file_bytes: Bytes of the encoded records in files of TFDS, which may be kept
      in memory; 0 for all other sources.
    is_multilabel: Whether an image can have any number of classes, also none.
    is_regression: Whether labels are num_classes numbers to predict, named by
      class_names.
    remark: What a user should know before training on it, or "".
  """

  name: str
  split: str
  num_examples: int
  num_classes: int
  class_names: tuple[str, ...] | None = None
  file_bytes: int = 0
  is_multilabel: bool = False
  is_regression: bool = False
  remark: str = ""
  # Broken records so far, which the pipeline adds.
  undecodable: set[int] = dataclasses.field(default_factory=set, repr=False)

  # Whether any record can be read at the cost of one.
  is_by_number = True
  # Whether `labels` does not read the whole split from files.
  knows_labels = True

  @property
  def label_spec(self) -> tf.TensorSpec:
    """A label: int32 [], or float32 [num_classes].

    For multi-label data, the vector has a 1 for each class. For regression it
    has the numbers, with NaN for missing ones.
    """
    if self.is_multilabel or self.is_regression:
      return tf.TensorSpec([self.num_classes], tf.float32)
    return tf.TensorSpec([], tf.int32)

  def fetch(self, indices: tf.Tensor) -> Record:
    """Returns the raw records at the indices, int64 [n], in any order."""
    return {"index": indices}

  def raw(self, start, stop, streams: int = 1) -> tf.data.Dataset:
    """Streams raw records.

    Args:
      start: The first record; may be a tensor.
      stop: The end, excluded; may be a tensor.
      streams: Number of streams that are read at the same time; they share the
        memory for reading ahead.
    """
    return self._fetched(tf.data.Dataset.range(start, stop))

  def raw_at(self, indices: np.ndarray) -> tf.data.Dataset:
    """Streams the raw records at the indices, which must rise."""
    indices = np.asarray(indices, np.int64)
    return self._fetched(tf.data.Dataset.from_tensor_slices(indices))

  def _fetched(self, indices: tf.data.Dataset) -> tf.data.Dataset:
    return indices.batch(FETCHED).map(as_is(self.fetch), **PARALLEL).unbatch()

  def file_starts(self) -> np.ndarray:
    """Returns the first record of every file, int64 [files], rising from 0."""
    return np.zeros(1, np.int64)

  def identity(self) -> str:
    """Returns a text that identifies these records and their order.

    It is the same on all machines that have the same records, at any path. It
    is "" if only the numbers of records and classes can be compared. A run
    stores it, and cannot resume with another.
    """
    return ""

  def stamp(self) -> str:
    """Returns a text that changes if any pixel changes, on this machine.

    "" if that is unknown, or if images are cheap to read;
    `pipeline.eval_reader` then reads them anew.
    """
    return ""

  def note(self) -> str:
    """Returns `remark` and further notes for the user, or ""."""
    return self.remark

  @abc.abstractmethod
  def load(self, raw: Record) -> Record:
    """Turns a raw record into {"image", "label", "index"}."""

  def rescue(self, raw: Record) -> Record:
    """Reads a record for which `load`, or decoding its result, failed.

    Returns:
      As `load`, and `error`, string []: "", or why there is no image. If this
      fails as well, the record counts as broken without a reason.
    """
    return {**self.load(raw), "error": tf.constant("")}

  @abc.abstractmethod
  def labels(self) -> np.ndarray:
    """Returns all labels without decoding an image.

    Returns:
      int32 [num_examples]; for multi-label data bool [num_examples, classes],
      for regression float32 [num_examples, outputs].
    """

  def record_name(self, index: int) -> str:
    """Returns the name of a record in a message."""
    return f"record {index} of {self.name!r}, split {self.split!r}"

  def records(self, start=0, stop=None) -> tf.data.Dataset:
    """Streams {"image", "label", "index"} in order."""
    raw = self.raw(start, self.num_examples if stop is None else stop)
    return raw.map(as_is(self.load), num_parallel_calls=tf.data.AUTOTUNE)


def readable(error: str, source: Source) -> str:
  """Returns the message of a graph's error without node names and stacks."""
  text = re.sub(
    r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*|Traceback \(most recent.*"
    r"|Error in user-defined function passed to .*? with iterator: \S+",
    "",
    error,
    flags=re.S,
  )
  text = " ".join(text.replace("assertion failed:", "").split())
  text = re.sub(r"^\[([^\[\]]*)\]$", r"\1", text)
  return f"while reading {source.name!r} ({source.split!r}): {text}"


def message_of(error: Exception) -> str:
  """Returns the message of an error from TensorFlow.

  A message that contains bytes of a record reaches Python as
  UnicodeDecodeError.
  """
  return getattr(error, "message", None) or str(error)


@contextlib.contextmanager
def reading(source: Source) -> Iterator[None]:
  """Turns TensorFlow's errors into a `DataError` that says what was read."""
  try:
    yield
  except (tf.errors.OpError, UnicodeDecodeError) as e:
    raise DataError(readable(message_of(e), source)) from None
