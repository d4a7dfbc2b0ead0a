"""Records in files that TFDS wrote: with random access, streamed, in memory."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import NamedTuple

import numpy as np

from vit_jax.data.source import (
  FETCHED,
  NO_LABEL,
  PARALLEL,
  Record,
  Source,
  reading,
)
from vit_jax.data.tf_cpu import as_is, tf
from vit_jax.paths import is_remote

_BATCH = 1024  # records parsed at a time if their images are not decoded
_MANY = 8192  # records of a whole split that are fetched with one call
# Bytes read ahead from all open files together, and at most from one: a bucket
# takes 20 to 40 ms to answer, however much is asked of it.
_READ_AHEAD, _MOST_AHEAD = 2**28, 2**24
_PARTS = 16  # parts of a split whose labels are read at the same time
_IN_TURN = 2**30  # bytes in memory of files that are read before their turn
_CACHED = 2**32  # bytes in memory of the records of `raw_at`
# tf.data holds records of up to this many times the files of an interleave.
_OPENED = 3


class Piece(NamedTuple):
  """Consecutive records of a file: `take` of them after `skip`."""

  file: str
  skip: int
  take: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TfdsFiles(Source):
  """Records in files, as serialized examples.

  Attributes:
    pieces: The records, in their order.
    label_key: Feature that is the label.
    parse: (serialized example, names) -> the features "image" and "label"; None
      to use the features `image` and `label_key`.
    is_embedded: Whether every host makes the files itself.
  """

  pieces: tuple[Piece, ...]
  label_key: str = "label"
  parse: Callable[[tf.Tensor, Sequence[str]], Record] | None = None
  is_embedded: bool = False
  knows_labels = False

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    record = self._parse(raw["example"], ("image", "label"))
    label = tf.cast(record["label"], self.label_spec.dtype)
    return {**record, "label": label, "index": raw["index"]}

  def identity(self) -> str:
    """See `Source`: a hash of the files' names, the pieces and the bytes."""
    if self.is_embedded:
      return ""
    pieces = [(os.path.basename(p.file), p.skip, p.take) for p in self.pieces]
    text = str((pieces, self.file_bytes))
    return f"files {hashlib.sha256(text.encode()).hexdigest()[:16]}"

  def labels(self) -> np.ndarray:
    """See `Source`; reads the whole split."""
    return read_labels(self)

  def _parse(self, example: tf.Tensor, names: Sequence[str]) -> Record:
    """Parses one serialized example or a batch.

    Args:
      example: string []; without `parse` also [n].
      names: "image", which stays encoded, or "label", or both. Labels are int32
        [] or [n]; for multi-label data bool [classes] or [n, classes], for
        regression float32 [outputs] or [n, outputs].
    """
    if self.parse:
      return self.parse(example, names)
    # Missing features get defaults, which the pipeline recognises.
    one = tf.io.FixedLenFeature([], tf.int64, NO_LABEL)
    width = [self.num_classes]
    numbers = tf.io.FixedLenFeature(width, tf.float32, width[0] * [np.nan])
    types = {
      "image": tf.io.FixedLenFeature([], tf.string, ""),
      self.label_key: tf.io.VarLenFeature(tf.int64)
      if self.is_multilabel
      else numbers
      if self.is_regression
      else one,
    }
    keys = {"image": "image", "label": self.label_key}
    parsed = tf.io.parse_example(
      example, {keys[name]: types[keys[name]] for name in names}
    )
    parsed = {name: parsed[keys[name]] for name in names}
    if "label" in parsed:
      label = parsed["label"]
      parsed["label"] = (
        _k_hot(label, self.num_classes)
        if self.is_multilabel
        else tf.cast(label, self.label_spec.dtype)
      )
    return parsed

  def columns(self, *names: str) -> dict[str, tf.Tensor]:
    """Reads the whole split: "image" (encoded bytes) or "label" or both."""
    parts = list(self._parsed(0, self.num_examples, names).prefetch(1))
    return {k: tf.concat([p[k] for p in parts], 0) for k in names}

  def _parsed(
    self, start, stop, names: Sequence[str], streams: int = 1
  ) -> tf.data.Dataset:
    """Streams consecutive records, see `raw`, parsed, in batches of _BATCH."""

    @as_is
    def parse(raw: Record) -> Record:
      return {**self._parse(raw["example"], names), "index": raw["index"]}

    raw = self.raw(start, stop, streams)
    if self.parse:  # takes one example
      return raw.map(parse, **PARALLEL).batch(_BATCH)
    return raw.batch(_BATCH).map(parse)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TfdsByNumber(TfdsFiles):
  """Fetches records by index, from files of format array_record."""

  @functools.cached_property
  def _records(self):
    # Here, because TFDS installs the package on Linux only.
    from array_record.python import array_record_data_source

    return array_record_data_source.ArrayRecordDataSource(
      [f"{p.file}[{p.skip}:{p.skip + p.take}]" for p in self.pieces]
    )

  def fetch(self, indices: tf.Tensor) -> Record:
    """See `Source`; also the serialized `example`."""

    def read(indices):
      return np.array(self._read(indices.tolist()), object)

    examples = tf.numpy_function(read, [indices], tf.string)
    examples = tf.ensure_shape(examples, indices.shape)
    return {"index": indices, "example": examples}

  def _read(self, numbers: list[int]) -> Sequence[bytes]:
    # One call for all records starts a thread for each file, which hides the
    # latency of a bucket. From a disk that takes 105 us of a core a record of
    # 64, and 21 us one record after the other; 4 us of `_MANY`.
    is_far = is_remote(self.pieces[0].file)
    if not is_far and len(numbers) <= FETCHED:
      return [self._records[i] for i in numbers]
    if is_far:
      first = min(numbers)
      span = max(numbers) - first + 1
      num_bytes = span * self.file_bytes / self.num_examples  # 0: unknown
      if span == len(numbers) or 0 < num_bytes <= _MOST_AHEAD:
        near = self._consecutive(first, first + span)
        return [near[i - first] for i in numbers]
    return self._records.__getitems__(numbers)

  def _consecutive(self, start: int, stop: int) -> list[bytes]:
    """Reads records of a bucket in their order, with a request for 16 MB.

    `_records` is opened for random access, and makes one for each record.
    """
    spans, begin = [], 0
    for piece in self.pieces:
      low, high = max(start, begin), min(stop, begin + piece.take)
      if low < high:
        offset = piece.skip - begin
        spans.append((piece.file, low + offset, high + offset))
      begin += piece.take

    def read(file, first, end):
      return self._reader(file).read(first, end)

    with futures.ThreadPoolExecutor(_PARTS) as threads:
      parts = threads.map(read, *zip(*spans, strict=True))
      return [record for part in parts for record in part]

  @functools.cached_property
  def _reader(self):
    from array_record.python import array_record_module  # see `_records`

    options = f"readahead_buffer_size:{_MOST_AHEAD}"
    reader = array_record_module.ArrayRecordReader
    return functools.cache(lambda file: reader(file, options=options))

  def note(self) -> str:
    """See `Source`: states what random access to a bucket costs."""
    notes = [super().note()]
    if is_remote(self.pieces[0].file):
      notes.append(
        f"{self.name!r} [{self.split}] is array_record in a bucket: an epoch"
        f" makes {self.num_examples:,} requests, unlike with"
        " vit-jax prepare ... --file_format=tfrecord."
      )
    return " ".join(filter(None, notes))

  def columns(self, *names: str) -> dict[str, tf.Tensor]:
    """See `TfdsFiles`."""
    if self.parse:  # takes one example
      return super().columns(*names)
    indices = tf.data.Dataset.range(self.num_examples).batch(_MANY)
    parse = as_is(lambda raw: self._parse(raw["example"], names))
    parts = list(indices.map(as_is(self.fetch)).map(parse).prefetch(1))
    return {k: tf.concat([p[k] for p in parts], 0) for k in names}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TfdsStream(TfdsFiles):
  """Reads tfrecord files from start to end; for splits too large for memory."""

  is_by_number = False

  def raw(self, start, stop, streams: int = 1) -> tf.data.Dataset:
    """See `Source`; a file is read from its start wherever `start` is."""
    at_once = self._at_once(self.file_bytes) if streams == 1 else 1
    return self._raw(start, stop, streams, at_once)

  def _at_once(self, num_bytes: int) -> int:
    """Returns how many files to read at once, by the bytes wanted from all."""
    if not num_bytes:  # unknown
      return 1
    bytes_per_file = num_bytes / len(self.pieces)
    return min(_PARTS, max(1, int(_IN_TURN / (bytes_per_file * _OPENED))))

  def _raw(
    self,
    start,
    stop,
    streams: int,
    at_once: int,
    wanted: tf.Tensor | None = None,
  ) -> tf.data.Dataset:
    """Streams raw records in order, reading several files ahead.

    Args:
      start: The first record; may be a tensor.
      stop: The end, excluded; may be a tensor.
      streams: Number of such streams that are read at the same time.
      at_once: Number of files that are read at the same time; memory holds
        records of up to `_OPENED` times as many.
      wanted: Whether to stream a record, bool [num_examples]; None for all.
    """
    opened = streams * (at_once * _OPENED if at_once > 1 else 1)
    ahead = max(2**18, min(_MOST_AHEAD, _READ_AHEAD // opened))
    num = self.num_examples
    start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
    begins = self.file_starts()
    begins = np.concatenate([begins, begins + num])  # two rounds
    takes = [piece.take for piece in self.pieces] * 2
    first = tf.searchsorted(begins + takes, [start], side="right")[0]
    last = tf.searchsorted(begins, [stop], side="left")[0]
    files = tf.data.Dataset.range(
      tf.cast(first, tf.int64), tf.cast(last, tf.int64)
    )
    names = tf.constant([piece.file for piece in self.pieces] * 2)
    skips = tf.constant([piece.skip for piece in self.pieces] * 2, tf.int64)
    begins, ends = tf.constant(begins), tf.constant(begins + takes)

    @as_is
    def read(i):
      # The part of this file within start and stop.
      low = tf.maximum(begins[i], start)
      high = tf.minimum(ends[i], stop)
      records = tf.data.TFRecordDataset(names[i], buffer_size=ahead)
      records = records.skip(skips[i] + low - begins[i])
      records = records.concatenate(_is_short(names[i]))
      records = tf.data.Dataset.zip(tf.data.Dataset.range(low, high), records)
      records = records.map(
        as_is(lambda i, e: {"index": i % num, "example": e})
      )
      if wanted is None:
        return records
      return records.filter(as_is(lambda r: tf.gather(wanted, r["index"])))

    if at_once == 1:
      return files.flat_map(read)
    return files.interleave(
      read,
      cycle_length=at_once,
      block_length=max(takes),  # all of a file
      num_parallel_calls=at_once,
      deterministic=True,
    )

  def columns(self, *names: str) -> dict[str, tf.Tensor]:
    """See `TfdsFiles`; labels alone are read in `_PARTS` parts at once.

    Reading the files of a bucket one after the other would take hours.
    """
    if names != ("label",):
      return super().columns(*names)
    groups = np.array_split(self.file_starts(), _PARTS)
    starts = [group[0] for group in groups if len(group)]
    starts, stops = (
      tf.constant(starts),
      tf.constant([*starts[1:], self.num_examples], tf.int64),
    )

    @as_is
    def part(i):
      return self._parsed(starts[i], stops[i], names, _PARTS)

    count = len(starts)
    parts = tf.data.Dataset.range(count).interleave(
      part, cycle_length=count, num_parallel_calls=count, deterministic=False
    )
    parts = list(parts)
    index = tf.concat([p["index"] for p in parts], 0)
    labels = tf.concat([p["label"] for p in parts], 0)
    return {"label": tf.gather(labels, tf.argsort(index))}

  def raw_at(self, indices: np.ndarray) -> tf.data.Dataset:
    """See `Source`; reads all files between the first and the last index.

    Up to 4 GiB of these records stay in memory after the first reading.
    """
    wanted = np.zeros(self.num_examples, bool)
    wanted[indices] = True
    num_bytes = self.file_bytes * len(indices) // self.num_examples
    raw = self._raw(
      *(min(indices), max(indices) + 1),
      streams=1,
      at_once=self._at_once(num_bytes),
      wanted=tf.constant(wanted),
    )
    return raw.cache() if 0 < num_bytes <= _CACHED else raw

  def file_starts(self) -> np.ndarray:
    """See `Source`."""
    takes = np.array([piece.take for piece in self.pieces], np.int64)
    return np.cumsum(takes) - takes


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TfdsMemory(Source):
  """Reads the split once and keeps the encoded records in memory."""

  files: Source

  @functools.cached_property
  def _columns(self) -> dict[str, tf.Tensor]:
    with tf.init_scope():  # The first use may be inside a traced function.
      return columns_of(self.files, "image", "label")

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    index = raw["index"]
    columns = {k: tf.gather(v, index) for k, v in self._columns.items()}
    label = tf.cast(columns["label"], self.label_spec.dtype)
    return {**columns, "label": label, "index": index}

  def labels(self) -> np.ndarray:
    """See `Source`."""
    with reading(self):
      labels = self._columns["label"].numpy()
    return in_range(labels, self.num_classes)

  def identity(self) -> str:
    """See `Source`."""
    return self.files.identity()

  def record_name(self, index: int) -> str:
    """See `Source`."""
    return self.files.record_name(index)


def read_labels(files: Source) -> np.ndarray:
  """Returns `Source.labels` of a split by reading its files."""
  with reading(files):
    labels = columns_of(files, "label")["label"].numpy()
  return in_range(labels, files.num_classes)


def columns_of(files: Source, *names: str) -> dict[str, tf.Tensor]:
  """Reads a whole split with the method `columns` of its source.

  A broken record gets an image of no bytes, and no label.
  """
  try:
    return files.columns(*names)
  except (tf.errors.InvalidArgumentError, UnicodeDecodeError):
    pass  # one of many that are parsed together; now one by one
  spec = files.label_spec
  columns = {
    "image": np.full([files.num_examples], b"", object),
    "label": np.full(
      [files.num_examples, *spec.shape],
      np.nan if files.is_regression else 0 if files.is_multilabel else -1,
      spec.dtype.as_numpy_dtype,
    ),
  }

  @as_is
  def loaded(raw: Record) -> tf.data.Dataset:  # none, if it cannot be parsed
    return tf.data.Dataset.from_tensors(raw).map(files.load).ignore_errors()

  # An error of the store, unlike one of a record, is raised.
  records = files.raw(0, files.num_examples).flat_map(loaded)
  for record in records.as_numpy_iterator():
    for name in names:
      columns[name][record["index"]] = record[name]
  if files.is_multilabel:
    columns["label"] = columns["label"].astype(bool)
  return {name: tf.constant(columns[name]) for name in names}


def in_range(labels: np.ndarray, num_classes: int) -> np.ndarray:
  """Returns labels, with -1 for those that are not a class."""
  if labels.ndim > 1:
    return labels
  return np.where((labels < 0) | (labels >= num_classes), -1, labels)


def _is_short(file: tf.Tensor) -> tf.data.Dataset:
  """Returns a dataset that fails when it is reached, to append to a file's.

  TensorFlow does not notice that a file was cut between two records.
  """

  @as_is
  def fail(file):
    text = " has fewer records than dataset_info.json states; copy it again."
    text = tf.strings.join([file, text])
    with tf.control_dependencies([tf.debugging.Assert(False, [text])]):
      return tf.identity(file)

  return tf.data.Dataset.from_tensors(file).map(fail)


def _k_hot(labels: tf.SparseTensor, num_classes: int) -> tf.Tensor:
  """Returns which classes are among the labels, bool [(n,) classes].

  Args:
    labels: The classes of an image, [m], or of n images, [n, m].
    num_classes: Number of classes.
  """
  labels = tf.sparse.to_dense(labels, default_value=-1)  # of no class
  tf.debugging.assert_less(labels, tf.constant(num_classes, labels.dtype))
  is_label = tf.one_hot(labels, num_classes, True, False, dtype=tf.bool)
  return tf.reduce_any(is_label, axis=-2)
