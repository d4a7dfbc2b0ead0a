"""From raw records to rows of a batch, broken records included.

Nearly all records can be used, so a fast function is tried first. At one that
it fails on, reading starts again at the same batch with a slower, careful
function, which turns such a record into a row with mask False, so that no other
row moves. Where records are read by number, the fast one is back after
`CAREFUL_BATCHES`; a stream would be read again from its start. Every such
record is named once, with the reason, and too many of them are an error.
"""

import atexit
import contextlib
import errno
import logging
import math
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vit_jax.batch import Batch, DataError
from vit_jax.config import preprocessing
from vit_jax.data import encoded, file_bytes, images, pixels
from vit_jax.data import ops as ops_lib
from vit_jax.data.images import MAX_UNDECODABLE
from vit_jax.data.source import NO_LABEL, Record, Source, message_of, readable
from vit_jax.data.tf_cpu import as_is, tf

_KEYS = ("label", "mask", "index")
# A store that does not answer, by TensorFlow, whose clients have tried several
# times; and by what other readers say, such as array_record's, which have the
# status of a bucket or the system's words for a disk.
_AWAY_ERRORS = (
  tf.errors.AbortedError,
  tf.errors.DeadlineExceededError,
  tf.errors.UnavailableError,
)
_AWAY = re.compile(
  "|".join(
    [
      "(ABORTED|DEADLINE_EXCEEDED|UNAVAILABLE)",
      "(Aborted|DeadlineExceeded|Unavailable)Error",
      *(re.escape(os.strerror(number)) for number in file_bytes.AWAY),
    ]
  )
)
_EIO = os.strerror(errno.EIO)  # of a bad disk, or of a store that is slow
# The careful function takes 1.1 to 1.5 times as long; a change between the two
# starts a new pipeline, which is without batches at first.
CAREFUL_BATCHES = 1000
TRY_SECONDS = 10.0  # between two tries, after the first few
FIRST_SECONDS, AWAY_SECONDS = 300.0, 7200.0  # before and after a first batch


def row_fns(source: Source, ops: str, root: int) -> tuple[Callable, Callable]:
  """Returns a fast and a careful function {"raw", "epoch"} -> row.

  Rows of the careful one also have `fault`, string []: why mask is False.

  Args:
    source: Source of the raw records.
    ops: Preprocessing, see `vit_jax.config.preprocessing`.
    root: Root of all keys; the key of a record is (root + epoch, index).

  Raises:
    ValueError: Malformed `ops`.
  """
  first, *rest = ops_lib.bind(ops)
  height, width = preprocessing.image_size(ops)
  exif = preprocessing.turns_upright(ops)

  def key_of(element: Record, index) -> tf.Tensor:
    return tf.stack([root + element["epoch"], index])

  def decode(element: Record) -> Record:
    record = source.load(element["raw"])
    key = key_of(element, record["index"])
    image = first(record["image"], key)
    return {**record, "image": image, "mask": tf.constant(True), "key": key}

  def decode_or_say(element: Record) -> Record:
    return {**decode(element), "fault": tf.constant("")}

  def rescue(element: Record) -> Record:
    record = source.rescue(element["raw"])
    image, error = tf.numpy_function(
      lambda data, error: _rescued(data, error, exif),
      [record["image"], record["fault"]],
      [tf.uint8, tf.string],
      stateful=False,
    )
    key = key_of(element, record["index"])
    image = first(tf.ensure_shape(image, [None, None, 3]), key)
    error = tf.ensure_shape(error, [])
    mask = error == b""
    return {**record, "image": image, "mask": mask, "key": key, "fault": error}

  def blank(element: Record) -> Record:
    return {
      "image": tf.zeros([1, 1, 3], tf.uint8),
      "label": tf.zeros(source.label_spec.shape, source.label_spec.dtype),
      "index": element["raw"]["index"],
      "mask": tf.constant(False),
      "key": tf.zeros([2], tf.int64),
      "fault": tf.constant("cannot be read."),
    }

  def finish(record: Record) -> Record:
    image = record["image"]
    for op in rest:
      image = op(image, record["key"])
    image = tf.ensure_shape(image, [height, width, 3])
    return {"image": image} | {k: record[k] for k in _KEYS}

  def quick(element: Record) -> Record:
    return finish(decode(element))

  def careful(element: Record) -> Record:
    record = _first_that_works(element, decode_or_say, rescue, blank)
    error = tf.numpy_function(
      lambda error, shape: encoded.as_bytes(error) or _too_large(shape, ops),
      [record["fault"], tf.shape(record["image"])],
      tf.string,
      stateful=False,
    )
    error, label = tf.ensure_shape(error, []), record["label"]
    mask = error == b""
    label = tf.where(mask, label, tf.zeros_like(label))
    record |= {"mask": mask, "label": label, "fault": error}
    # An error here is not the image's fault: a crop that does not fit, say.
    row = tf.cond(
      record["mask"],
      lambda: finish(record)["image"],
      lambda: tf.zeros([height, width, 3], tf.uint8),
    )
    return {"image": row} | {k: record[k] for k in (*_KEYS, "fault")}

  return as_is(quick), as_is(careful)


def _rescued(data, error, exif: bool):
  """Returns (pixels, why there are none or b"")."""
  error = encoded.as_bytes(error)
  if not error:
    try:
      return images.rescued(encoded.as_bytes(data), exif=exif), b""
    except ValueError as e:
      error = str(e).encode()
  return np.zeros([1, 1, 3], np.uint8), error


def _too_large(shape: np.ndarray, ops: str) -> bytes:
  """Returns why an image of this shape cannot be resized, or b""."""
  try:
    pixels.check_sides(*shape.tolist()[:2], ops)
  except ValueError as e:
    return str(e).encode()
  return b""


def iterate(
  source: Source,
  read: Callable[[int, Callable], tf.data.Dataset],
  fns: tuple[Callable, Callable],
  first_step: int,
  num_records: int,
) -> Iterator[Batch]:
  """Yields the batches of `read(first_step, row function)` as numpy arrays.

  Args:
    source: Source of the records.
    read: (number of the first batch, row function) -> batches.
    fns: The functions of `row_fns`.
    first_step: Number of the first batch.
    num_records: How many different records are read; of these,
      `most_unusable` may be broken.

  Raises:
    ValueError: Too many records cannot be used, or preprocessing or reading
      failed; the message says what was being read.
  """
  limit = most_unusable(num_records, source.num_examples)
  errors = _Faults(source, limit)
  batches = _iterate(source, read, fns, first_step, errors)
  _OPEN.add(batches)
  return batches


# TensorFlow's threads may be running Python to read records. If the process
# ends while they do, it waits for them for ever, since they no longer get the
# interpreter; so iterators are closed before the end.
_OPEN: weakref.WeakSet = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
  for batches in list(_OPEN):
    with contextlib.suppress(ValueError):  # used by a thread of its own
      batches.close()


def _iterate(source, read, fns, first_step, errors) -> Iterator[Batch]:
  quick, careful = fns
  step, careful_until, iterator, away = first_step, first_step, None, _Away()
  while True:
    is_careful = step < careful_until
    try:
      if iterator is None:
        row_fn = careful if is_careful else quick
        iterator = read(step, row_fn).as_numpy_iterator()
      batch = next(iterator)
    except StopIteration:
      return
    except (tf.errors.OpError, UnicodeDecodeError) as e:
      message = message_of(e)
      iterator, error = None, readable(message, source)
      is_away = isinstance(e, _AWAY_ERRORS) or _AWAY.search(message)
      if is_away and away.waits(error):
        continue
      if _EIO in message and away.waits(error, sum(file_bytes.WAITS_SECONDS)):
        continue
      if is_careful:
        raise DataError(error) from None
      careful_until = (
        step + CAREFUL_BATCHES if source.is_by_number else math.inf
      )
      continue
    reasons = batch.pop("fault", np.array([])).tolist()
    if missing := [r for r in reasons if r.startswith(file_bytes.UNAVAILABLE)]:
      iterator, error = None, readable(missing[0].decode(), source)
      if away.waits(error):
        continue
      raise DataError(error)
    away.is_back()
    if not batch["mask"].all():
      errors.note(batch["index"], ~batch["mask"], reasons)
    batch = _with_labels_in_range(batch, source, errors)
    step += 1
    if step == careful_until:
      iterator = None
    yield Batch(**batch)


class _Away:
  """Waits for a store that does not answer now, which is no fault of a record.

  For a short time where it has not answered yet, as its name may be wrong. A
  training run ends before the long time, by its watchdog, and can be started
  again.
  """

  def __init__(self):
    self._tries, self._since = 0, 0.0
    self._patience = FIRST_SECONDS

  def waits(self, error: str, at_most: float = math.inf) -> bool:
    """Whether the same should be tried again; it has waited then.

    Args:
      fault: What is logged.
      at_most: Seconds since the first try.
    """
    now = time.monotonic()
    if self._tries == 0:
      self._since = now
    if now - self._since > min(self._patience, at_most):
      return False
    if self._tries % 10 == 0:
      logging.warning("%s; is tried again.", error)
    time.sleep(min(TRY_SECONDS, 2.0 ** (self._tries - 1)))
    self._tries += 1
    return True

  def is_back(self) -> None:
    """After a batch."""
    self._tries, self._patience = 0, AWAY_SECONDS


def _with_labels_in_range(
  batch: dict, source: Source, errors: "_Faults"
) -> dict:
  """Returns a batch in which rows of impossible labels do not count."""
  label = batch["label"]
  if label.ndim > 1:  # checked where it was made
    return batch
  is_bad = batch["mask"] & ((label < -1) | (label >= source.num_classes))
  if not is_bad.any():
    return batch
  expected = f"expected 0 to {source.num_classes - 1}"
  reasons = [
    b"has no label."
    if n == NO_LABEL
    else f"has label {n}, {expected}.".encode()
    for n in label
  ]
  errors.note(batch["index"], is_bad, reasons)
  image = batch["image"].copy()
  image[is_bad] = 0
  return {
    **batch,
    "image": image,
    "label": np.where(is_bad, 0, label),
    "mask": batch["mask"] & ~is_bad,
  }


def _first_that_works(element: Record, *functions) -> Record:
  """Applies the first function that raises no error, inside the graph."""
  given = tf.data.Dataset.from_tensors(element)
  results = given.map(functions[0]).ignore_errors()
  for fn in functions[1:]:
    results = results.concatenate(given.map(fn).ignore_errors())
  return results.take(1).get_single_element()


class _Faults:
  """The broken records that were met, of which the first few are allowed."""

  def __init__(self, source: Source, limit: int):
    self._source, self._limit = source, limit
    self._met: set[int] = set()

  def note(
    self, index: np.ndarray, is_bad: np.ndarray, reasons: Sequence[bytes]
  ) -> None:
    """Names the records that were not named before, and counts them.

    Raises:
      DataError: They are too many.
    """
    source = self._source
    for row in np.flatnonzero(is_bad):
      record = int(index[row])
      self._met.add(record)
      if record in source.undecodable:
        continue
      source.undecodable.add(record)
      logging.warning(
        "Cannot use %s: %s It does not count (number %d of up to %d).",
        source.record_name(record),
        reasons[row].decode(errors="replace"),
        len(self._met),
        self._limit,
      )
    if len(self._met) > self._limit:
      first = ", ".join(source.record_name(i) for i in sorted(self._met)[:3])
      raise DataError(
        f"got {len(self._met)} records of {source.name!r} ({source.split!r})"
        f" that cannot be used, among them {first}; expected at most"
        f" {self._limit} ({MAX_UNDECODABLE:.0%}, or ten). What is wrong with"
        " each was said above. Repair or remove them."
      )


def most_unusable(num_records: int, num_examples: int) -> int:
  """Returns how many records may be broken: 1 %, or ten, but not all.

  Args:
    num_records: Number of records that are read, maybe one process's share.
    num_examples: Number of records of the split.
  """
  limit = max(10, int(num_records * MAX_UNDECODABLE))
  return min(limit, num_examples - 1)
