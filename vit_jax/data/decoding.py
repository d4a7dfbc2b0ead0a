"""From raw records to rows of a batch, also for broken records.

Nearly all records are good, so a fast row function is tried first. If it fails,
reading starts again at the same batch with a slower, careful function. It turns
a broken record into a row with mask False, so that no other row moves.
Random-access sources return to the fast function after `CAREFUL_BATCHES`;
streams do not, because that would read them from their start. Each broken
record is logged once, with the reason; too many are an error.
"""

import atexit
import contextlib
import logging
import math
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vit_jax.batch import Batch, DataError, View
from vit_jax.data import images, pixels, preprocessing
from vit_jax.data import ops as ops_lib
from vit_jax.data.images import MAX_UNDECODABLE
from vit_jax.data.source import (
  NO_LABEL,
  UNAVAILABLE,
  UNAVAILABLE_ERRNOS,
  Record,
  Source,
  message_of,
  readable,
)
from vit_jax.data.tf_cpu import as_bytes, as_is, tf

RowFn = Callable[[Record], Record]

_KEYS = ("label", "mask", "index")
_CROP = 2**40  # between the keys of two crops; more than there are records
# A store that does not answer: TensorFlow's errors, after its clients' own
# retries; and texts of other readers, such as array_record, which have the
# status of a bucket or the system's message for a disk.
_UNAVAILABLE_ERRORS = (
  tf.errors.AbortedError,
  tf.errors.DeadlineExceededError,
  tf.errors.UnavailableError,
)
_UNAVAILABLE = re.compile(
  "|".join(
    [
      "(ABORTED|DEADLINE_EXCEEDED|UNAVAILABLE)",
      "(Aborted|DeadlineExceeded|Unavailable)Error",
      *(re.escape(os.strerror(number)) for number in UNAVAILABLE_ERRNOS),
    ]
  )
)
# The careful function takes 1.1 to 1.5 times as long; a change between the two
# starts a new pipeline, which has no batches ready at first.
CAREFUL_BATCHES = 1000
RETRY_SECONDS = 7200.0  # the watchdog of a training run ends it before
_WAIT_SECONDS = 10.0  # between two attempts, after the first few


def row_fns(
  source: Source, views: Mapping[str, View], root: int
) -> tuple[RowFn, RowFn]:
  """Returns a fast and a careful function {"raw", "epoch"} -> row.

  Rows of the careful function also have `error`, string []: why mask is False.

  A record is decoded once. If there are several crops of it, the whole image is
  decoded, also for `decode_inception_crop`, which then computes
  `decode|inception_crop`: see there how the outermost pixels differ.

  Args:
    source: Source of the raw records.
    views: What a row has of the record, by its key in the row.
    root: Root of all keys. The key of a record is (root + epoch, index), that
      of crop c (root + epoch, index + 2^40 c), where the crops of all views are
      numbered from 0, except views `like` another, which have its numbers.

  Raises:
    ValueError: Malformed operations; or views that decode differently.
  """
  texts = [view.ops for view in views.values()]
  is_one = preprocessing.num_crops(views) == 1
  errors = list(preprocessing.view_errors(views))
  if errors and [*views] != ["image"]:  # `bind` words those of one image
    raise ValueError("\n".join(errors))
  (first,) = ops_lib.bind(preprocessing.whole(texts[0]))
  if is_one:
    first, *_ = ops_lib.bind(texts[0])
  options = preprocessing.decoding(texts[0])
  crops_of = _crops_of(views, is_decoded=is_one)
  shapes = {
    name: preprocessing.view_shapes(
      {name: view}, preprocessing.channels_of(view.ops)
    )[name]
    for name, view in views.items()
  }

  def key_of(element: Record, index) -> tf.Tensor:
    return tf.stack([root + element["epoch"], index])

  def decode(element: Record) -> Record:
    record = source.load(element["raw"])
    key = key_of(element, record["index"])
    image = first(record["image"], key)
    return {**record, "image": image, "mask": tf.constant(True), "key": key}

  def decode_without_error(element: Record) -> Record:
    return {**decode(element), "error": tf.constant("")}

  def rescue(element: Record) -> Record:
    record = source.rescue(element["raw"])
    image, error = tf.numpy_function(
      lambda data, error: _rescued(data, error, options),
      [record["image"], record["error"]],
      [tf.uint8, tf.string],
      stateful=False,
    )
    key = key_of(element, record["index"])
    image = first(tf.ensure_shape(image, [None, None, 3]), key)
    error = tf.ensure_shape(error, [])
    mask = error == b""
    return {**record, "image": image, "mask": mask, "key": key, "error": error}

  def blank(element: Record) -> Record:
    return {
      "image": tf.zeros([1, 1, 3], tf.uint8),
      "label": tf.zeros(source.label_spec.shape, source.label_spec.dtype),
      "index": element["raw"]["index"],
      "mask": tf.constant(False),
      "key": tf.zeros([2], tf.int64),
      "error": tf.constant("cannot be parsed."),
    }

  def crops(record: Record) -> Record:
    made = crops_of(record["image"], record["key"])
    return {k: tf.ensure_shape(x, shapes[k]) for k, x in made.items()}

  def fast(element: Record) -> Record:
    record = decode(element)
    return crops(record) | {k: record[k] for k in _KEYS}

  def careful(element: Record) -> Record:
    record = _first_that_works(element, decode_without_error, rescue, blank)
    error = tf.numpy_function(
      lambda error, shape: as_bytes(error) or _too_large(shape, texts),
      [record["error"], tf.shape(record["image"])],
      tf.string,
      stateful=False,
    )
    error, label = tf.ensure_shape(error, []), record["label"]
    mask = error == b""
    label = tf.where(mask, label, tf.zeros_like(label))
    record |= {"mask": mask, "label": label, "error": error}
    # An exception here is not the record's: a crop that does not fit, say.
    row = tf.cond(
      record["mask"],
      lambda: crops(record),
      lambda: {k: tf.zeros(shape, tf.uint8) for k, shape in shapes.items()},
    )
    return row | {k: record[k] for k in (*_KEYS, "error")}

  return as_is(fast), as_is(careful)


def _crops_of(
  views: Mapping[str, View], *, is_decoded: bool
) -> Callable[[tf.Tensor, tf.Tensor], Record]:
  """Returns a function (image, key of the record) -> all its views.

  Args:
    views: The views.
    is_decoded: Whether the first operation of the only crop is already done.
  """
  ops = {name: ops_lib.bind(view.ops) for name, view in views.items()}
  numbers: dict[str, int] = {}  # of the first crop of each view
  count = 0
  for name, view in views.items():
    if view.like is None:
      numbers[name] = count
      count += view.count or 1

  def crop(name: str, image, key):
    for op in ops[name][is_decoded:]:
      image = op(image, key)
    return image

  def crops(image, key) -> Record:
    made = {}
    for name, view in views.items():
      first = numbers[view.like or name]
      keys = [key + [0, _CROP * (first + i)] for i in range(view.count or 1)]
      images = [crop(name, image, key) for key in keys]
      made[name] = images[0] if view.count is None else tf.stack(images)
    return made

  return crops


def _rescued(data, error, options: dict) -> tuple[np.ndarray, bytes]:
  """Returns the pixels, and b"" or why there are none."""
  error = as_bytes(error)
  if not error and getattr(data, "ndim", 0) == 3:  # no file, but pixels
    return data, b""
  if not error:
    try:
      return images.rescued(as_bytes(data), **options), b""
    except ValueError as e:
      error = str(e).encode()
  return np.zeros([1, 1, 3], np.uint8), error


def _too_large(shape: np.ndarray, texts: Sequence[str]) -> bytes:
  """Returns why an image of this shape cannot be resized, or b""."""
  for ops in texts:
    try:
      pixels.check_sides(*shape.tolist()[:2], ops)
    except ValueError as e:
      return str(e).encode()
  return b""


def _first_that_works(element: Record, *functions: RowFn) -> Record:
  """Returns the result of the first function without an error, in the graph."""
  given = tf.data.Dataset.from_tensors(element)
  results = given.map(functions[0]).ignore_errors()
  for fn in functions[1:]:
    results = results.concatenate(given.map(fn).ignore_errors())
  return results.take(1).get_single_element()


def iterate(
  source: Source,
  read: Callable[[int, RowFn], tf.data.Dataset],
  fns: tuple[RowFn, RowFn],
  first_step: int,
  num_records: int,
) -> Iterator[Batch]:
  """Yields the batches of `read(first_step, row function)` as numpy arrays.

  Args:
    source: Source of the records.
    read: (number of the first batch, row function) -> batches.
    fns: The functions of `row_fns`.
    first_step: Number of the first batch.
    num_records: Number of different records that are read; `most_unusable` of
      them may be broken.

  Raises:
    DataError: Too many records are broken, or preprocessing or reading failed;
      the message says what was being read.
  """
  broken = _BrokenRecords(
    source, most_unusable(num_records, source.num_examples)
  )
  batches = _iterate(source, read, fns, first_step, broken)
  _OPEN.add(batches)
  return batches


# TensorFlow's threads may be running Python to read records. If the process
# ends while they do, it waits for them for ever, since they no longer get the
# interpreter; so iterators are closed before the end.
_OPEN: weakref.WeakSet = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
  for batches in list(_OPEN):
    with contextlib.suppress(ValueError):  # another thread is using it
      batches.close()


def _iterate(source, read, fns, first_step, broken) -> Iterator[Batch]:
  fast, careful = fns
  step, careful_until, iterator = first_step, first_step, None
  retries = _Retries()
  while True:
    is_careful = step < careful_until
    try:
      if iterator is None:
        row_fn = careful if is_careful else fast
        iterator = read(step, row_fn).as_numpy_iterator()
      batch = next(iterator)
    except StopIteration:
      return
    except (tf.errors.OpError, UnicodeDecodeError) as e:
      iterator, message = None, message_of(e)
      error = readable(message, source)
      if isinstance(e, _UNAVAILABLE_ERRORS) or _UNAVAILABLE.search(message):
        retries.wait(error)
      elif is_careful:
        raise DataError(error) from None
      else:
        by_number = source.is_by_number
        careful_until = step + CAREFUL_BATCHES if by_number else math.inf
      continue
    errors = batch.pop("error", np.array([])).tolist()
    if unavailable := [e for e in errors if e.startswith(UNAVAILABLE)]:
      iterator = None
      retries.wait(readable(unavailable[0].decode(), source))
      continue
    retries = _Retries()
    if not batch["mask"].all():
      broken.add(batch["index"], ~batch["mask"], errors)
    batch = _with_labels_in_range(batch, source, broken)
    step += 1
    if step == careful_until:
      iterator = None
    yield Batch(**batch)


class _Retries:
  """Waits between attempts to read from a store that does not answer."""

  def __init__(self):
    self._count, self._start = 0, 0.0

  def wait(self, error: str) -> None:
    """Waits before the next attempt; raises DataError after `RETRY_SECONDS`."""
    if self._count == 0:
      self._start = time.monotonic()
    if time.monotonic() - self._start > RETRY_SECONDS:
      raise DataError(error)
    if self._count % 10 == 0:
      logging.warning("%s; trying again.", error)
    time.sleep(min(_WAIT_SECONDS, 2.0 ** (self._count - 1)))
    self._count += 1


class _BrokenRecords:
  """The broken records so far; some are allowed."""

  def __init__(self, source: Source, limit: int):
    self._source, self._limit = source, limit
    self._met: set[int] = set()

  def add(
    self, index: np.ndarray, is_bad: np.ndarray, reasons: Sequence[bytes]
  ) -> None:
    """Logs the records that were not logged before, and counts them.

    Raises:
      DataError: There are too many.
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
        f" {self._limit} ({MAX_UNDECODABLE:.0%}, or ten); see the log."
      )


def _with_labels_in_range(
  batch: dict, source: Source, broken: _BrokenRecords
) -> dict:
  """Returns a batch in which rows with impossible labels do not count."""
  label = batch["label"]
  if source.is_regression:
    outside = ~np.isfinite(label)
  elif label.ndim > 1:  # checked when the record was parsed
    return batch
  else:
    outside = ((label < -1) | (label >= source.num_classes))[:, None]
  is_bad = batch["mask"] & outside.any(-1)
  if not is_bad.any():
    return batch
  expected = f"expected 0 to {source.num_classes - 1}"
  reasons = [
    b"has no label."
    if source.is_regression or n == NO_LABEL
    else f"has label {n}, {expected}.".encode()
    for n in label
  ]
  broken.add(batch["index"], is_bad, reasons)
  cleared = {k: batch[k].copy() for k in batch if k not in ("mask", "index")}
  for array in cleared.values():
    array[is_bad] = 0
  return {**batch, **cleared, "mask": batch["mask"] & ~is_bad}


def most_unusable(num_records: int, num_examples: int) -> int:
  """Returns how many records may be broken: 1 %, or ten, but not all.

  Args:
    num_records: Number of records that are read, possibly one process's share.
    num_examples: Number of records of the split.
  """
  limit = max(10, int(num_records * MAX_UNDECODABLE))
  return min(limit, num_examples - 1)
