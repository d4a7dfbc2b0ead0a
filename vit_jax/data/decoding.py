"""From raw records to rows of a batch, broken images included.

Nearly all images can be decoded, so a fast function is tried first. At the
first image that it cannot decode, reading starts again at the same batch with a
slower, careful function, which turns such an image into a row with mask False,
so that no other row moves. Every such image is named once, and too many of them
are an error.
"""

import atexit
import contextlib
import logging
import re
import weakref
from collections.abc import Callable, Iterator

from vit_jax.batch import Batch, DataError
from vit_jax.config import preprocessing
from vit_jax.data import ops as ops_lib
from vit_jax.data.host_tf import as_is, tf
from vit_jax.data.images import MAX_UNDECODABLE
from vit_jax.data.records import Record, Source


def row_fns(source: Source, ops: str, root: int) -> tuple[Callable, Callable]:
  """Returns a fast and a careful function {"raw", "epoch"} -> row.

  Args:
    source: Source of the raw records.
    ops: Preprocessing, see `vit_jax.config.preprocessing`.
    root: Root of all keys; the key of a record is (root + epoch, index).

  Raises:
    ValueError: Malformed `ops`.
  """
  first, *rest = ops_lib.bind(ops)
  height, width = preprocessing.image_size(ops)

  def decode(element: Record, load) -> Record:
    record = load(element["raw"])
    key = tf.stack([root + element["epoch"], record["index"]])
    image = first(record["image"], key)
    return {**record, "image": image, "mask": tf.constant(True), "key": key}

  def blank(element: Record) -> Record:
    return {
      "image": tf.zeros([1, 1, 3], tf.uint8),
      "label": tf.zeros(source.label_spec.shape, source.label_spec.dtype),
      "index": element["raw"]["index"],
      "mask": tf.constant(False),
      "key": tf.zeros([2], tf.int64),
    }

  def finish(record: Record) -> Record:
    image = record["image"]
    for op in rest:
      image = op(image, record["key"])
    image = tf.ensure_shape(image, [height, width, 3])
    return {"image": image} | {k: record[k] for k in ("label", "mask", "index")}

  def quick(element: Record) -> Record:
    return finish(decode(element, source.load))

  def careful(element: Record) -> Record:
    record = _first_that_works(
      element,
      lambda e: decode(e, source.load),
      lambda e: decode(e, source.reload),
      blank,
    )
    # An error here is not the image's fault: a crop that does not fit, say.
    row = tf.cond(
      record["mask"],
      lambda: finish(record)["image"],
      lambda: tf.zeros([height, width, 3], tf.uint8),
    )
    return {"image": row} | {k: record[k] for k in ("label", "mask", "index")}

  return as_is(quick), as_is(careful)


def iterate(
  source: Source,
  read: Callable[[int, Callable], tf.data.Dataset],
  fns: tuple[Callable, Callable],
  first_step: int,
) -> Iterator[Batch]:
  """Yields the batches of `read(first_step, row function)` as numpy arrays.

  Raises:
    ValueError: Too many images cannot be decoded, or preprocessing or reading
      failed; the message says what was being read.
  """
  batches = _iterate(source, read, fns, first_step)
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


def _iterate(source, read, fns, first_step) -> Iterator[Batch]:
  quick, careful = fns
  is_careful, step = False, first_step
  iterator = read(step, quick).as_numpy_iterator()
  while True:
    try:
      batch = next(iterator)
    except StopIteration:
      return
    except tf.errors.OpError as e:
      if is_careful:
        raise DataError(_readable(e, source)) from None
      is_careful = True
      iterator = read(step, careful).as_numpy_iterator()
      continue
    if not batch["mask"].all():
      _count_undecodable(batch, source)
    step += 1
    yield Batch(**batch)


def _first_that_works(element: Record, *functions) -> Record:
  """Applies the first function that raises no error, inside the graph."""
  given = tf.data.Dataset.from_tensors(element)
  results = given.map(functions[0]).ignore_errors()
  for fn in functions[1:]:
    results = results.concatenate(given.map(fn).ignore_errors())
  return results.take(1).get_single_element()


def _count_undecodable(batch: Batch, source: Source) -> None:
  limit = max(10, int(source.num_examples * MAX_UNDECODABLE))
  bad = source.undecodable
  for index in batch["index"][~batch["mask"]].tolist():
    if index in bad:
      continue
    bad.add(index)
    logging.warning(
      "Cannot decode %s; it does not count (number %d of up to %d).",
      source.record_name(index),
      len(bad),
      limit,
    )
  if len(bad) > limit:
    first = ", ".join(source.record_name(i) for i in sorted(bad)[:3])
    raise DataError(
      f"got {len(bad)} images of {source.name!r} ({source.split!r}) that cannot"
      f" be decoded, among them {first}; expected at most {limit}. Repair or"
      " remove them."
    )


def _readable(error: Exception, source: Source) -> str:
  """Returns the message of a graph's error without the names of its nodes."""
  text = re.sub(
    r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*", "", error.message, flags=re.S
  )
  text = " ".join(text.replace("assertion failed:", "").split())
  return f"while reading {source.name!r} ({source.split!r}): {text}"
