"""From a source to batches, which do not depend on the number of processes.

A training batch is a function of (seed, step). Its rows are the positions step
* batch_size to (step + 1) * batch_size of the run, and `vit_jax.data.order`
computes which record is at a position. Process p of P reads the p-th of P equal
parts of every batch.

With random access, a process fetches only its own records, and a run starts at
any step without delay. From streamed files it reads the lanes of its rows. A
run that starts in the middle of an epoch first reads the records before,
without decoding.

Augmentation draws from (seed, epoch, record, crop), not from the row in a
batch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.batch import Batch, View
from vit_jax.data import decoding, order, preprocessing
from vit_jax.data import ops as ops_lib
from vit_jax.data.data_config import RunConfig
from vit_jax.data.source import FETCHED, PARALLEL, Source
from vit_jax.data.tf_cpu import as_is, tf
from vit_jax.options import unexpected

_PREFETCH = 2  # batches decoded ahead
_MOST_THREADS = 64  # threads of a stream; each reads at another place
_FOREVER = 2**62
DECODED_BYTES = 256 * 2**20  # memory for images that evaluations have decoded
_SHIFT = -1 - order.MAX_LANES  # purpose of a random number, below all lanes


@dataclasses.dataclass(frozen=True)
class TrainingData:
  """A split in the order of config.seed; implements `batch.Data`.

  Args:
    source: The split of config.data.
    config: Its preprocessing, shuffling and batch size are used.
  """

  source: Source
  config: RunConfig

  @property
  def num_examples(self) -> int:
    """Number of records in the split."""
    return self.source.num_examples

  @property
  def num_classes(self) -> int:
    """Number of classes; labels are below it."""
    return self.source.num_classes

  @property
  def class_names(self) -> tuple[str, ...] | None:
    """Names by label; None if the data set has none."""
    return self.source.class_names

  def identity(self) -> str:
    """A text that identifies the records, see `Source`."""
    return self.source.identity()

  def most_unusable(self, step: int) -> int:
    """Returns how many rows up to a step may have broken records.

    A record has one row in an epoch, or `repeats` rows in as many epochs. More
    rows mean more broken records than `decoding.most_unusable` allows.
    """
    data, num = self.config.data, self.num_examples
    passes = -(-step * data.batch_size // (num * data.repeats))
    return passes * data.repeats * decoding.most_unusable(num, num)

  @property
  def ops(self) -> str:
    """The preprocessing, with the model's number of channels."""
    config = self.config
    return preprocessing.for_channels(config.data.ops, config.model.channels)

  @property
  def views(self) -> dict[str, View]:
    """What a batch has of each record, with the model's number of channels."""
    config, channels = self.config, self.config.model.channels
    return {
      name: view._replace(ops=preprocessing.for_channels(view.ops, channels))
      for name, view in config.data.views(config.objective).items()
    }

  @functools.cached_property
  def flip(self) -> int | None:
    """Position of `flip_lr` in the operations, or None.

    None also if a later operation depends on its result.
    """
    names = [op.name for op in preprocessing.parse_ops(self.ops)]
    place = len(names) - 1 - (names[-1] == "grey")
    return place if names[place] == "flip_lr" else None

  @property
  def unflipped_ops(self) -> str:
    """The preprocessing without the operation at `flip`."""
    parts = self.ops.split("|")
    return "|".join(p for i, p in enumerate(parts) if i != self.flip)

  def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the records of a batch, without reading them.

    Only for records that can be read by number.

    Args:
      step: Number of the batch.

    Returns:
      The records, int64 [batch_size]; whether the operation at `flip` mirrors
      them, bool [batch_size].
    """
    data, seed = self.config.data, self.config.seed
    size = data.batch_size
    positions = tf.range(step * size, (step + 1) * size, dtype=tf.int64)
    records, epochs = _records_at(
      positions, self.source, seed, size, data.repeats
    )
    if self.flip is None:
      return records.numpy(), np.zeros(size, bool)
    keys = tf.stack([order.root(seed) + epochs, records], axis=1)
    return records.numpy(), ops_lib.are_flipped(self.flip, keys).numpy()

  def row_numbers(self, step: int, first: int, index: np.ndarray) -> np.ndarray:
    """Returns the `index` of rows of a batch: c * n + i for copy c of record i.

    So each copy has its own random numbers. n is the number of records.

    Args:
      step: Number of the batch.
      first: The first of the rows.
      index: Their records, int64 [rows].
    """
    data = self.config.data
    if data.repeats == 1:
      return index
    start = step * data.batch_size + first
    positions = tf.range(start, start + len(index), dtype=tf.int64)
    _, copies = order.repeated(positions, data.batch_size, data.repeats)
    return index + copies.numpy() * self.num_examples

  def batches(
    self, start_step: int, process_index: int, process_count: int
  ) -> Iterator[Batch]:
    """See `Data`; batch n is a function of (config.seed, n)."""
    data = self.config.data
    batches = train_batches(
      self.source,
      self.views,
      batch_size=data.batch_size,
      seed=self.config.seed,
      start_step=start_step,
      shuffle_buffer=data.shuffle_buffer,
      repeats=data.repeats,
      process_index=process_index,
      process_count=process_count,
    )
    first = process_index * data.batch_size // process_count
    if data.repeats == 1:
      return batches
    return self._numbered(batches, start_step, first)

  def _numbered(
    self, batches: Iterator[Batch], step: int, first: int
  ) -> Iterator[Batch]:
    for batch in batches:
      index = self.row_numbers(step, first, batch["index"])
      yield Batch(**{**batch, "index": index})
      step += 1


def train_batches(
  source: Source,
  views: Mapping[str, View] | str,
  *,
  batch_size: int,
  seed: int,
  start_step: int = 0,
  shuffle_buffer: int = 50_000,
  repeats: int = 1,
  process_index: int = 0,
  process_count: int = 1,
) -> Iterator[Batch]:
  """Returns an endless iterator of this process's parts of the batches.

  Args:
    source: Source of the records.
    views: What a batch has of each record; operations alone stand for one view
      `image`. See `decoding.row_fns`.
    batch_size: Rows of a batch, over all processes.
    seed: Seed of order and augmentation.
    start_step: Number of the first batch.
    shuffle_buffer: For records that are streamed from files: encoded records in
      memory for shuffling, over all processes. The buffer is filled anew in
      every epoch.
    repeats: Copies of each record, see `order.repeated`.
    process_index: Number of this process.
    process_count: Number of processes; must divide the batch size.

  Raises:
    ValueError: Malformed `ops`, or numbers that do not fit each other; or
      copies of records that are streamed.
  """
  _check_processes(batch_size, process_index, process_count)
  row_fns = decoding.row_fns(source, _views(views), order.root(seed))

  def read(step: int, row_fn) -> tf.data.Dataset:
    records = train_records(
      source,
      batch_size=batch_size,
      seed=seed,
      start_step=step,
      shuffle_buffer=shuffle_buffer,
      repeats=repeats,
      process_index=process_index,
      process_count=process_count,
    )
    return _batched(records, row_fn, batch_size // process_count)

  return decoding.iterate(
    source, read, row_fns, start_step, source.num_examples
  )


def _views(views: Mapping[str, View] | str) -> Mapping[str, View]:
  return {"image": View(views)} if isinstance(views, str) else views


def train_records(
  source: Source,
  *,
  batch_size: int,
  seed: int,
  start_step: int = 0,
  shuffle_buffer: int = 50_000,
  repeats: int = 1,
  process_index: int = 0,
  process_count: int = 1,
) -> tf.data.Dataset:
  """Streams the raw records of `train_batches`, row by row; same arguments.

  Returns:
    An endless dataset of {"raw": see `Source`, "epoch": int64 []}.
  """
  _check_processes(batch_size, process_index, process_count)
  rows = batch_size // process_count
  first_row = process_index * rows
  if source.is_by_number:
    return _permuted(
      source, seed, batch_size, start_step, first_row, rows, repeats
    )
  if repeats > 1:
    raise ValueError(unexpected("repeats", repeats, "1 for streamed records"))
  return _streamed(
    source, seed, batch_size, start_step, first_row, rows, shuffle_buffer
  )


def _check_processes(batch_size: int, index: int, count: int) -> None:
  if not 0 <= index < count or batch_size % count:
    got = f"{batch_size} for process {index} of {count}"
    raise ValueError(unexpected("batch_size", got, "a multiple of processes"))


def _permuted(
  source: Source,
  seed: int,
  batch_size: int,
  start_step: int,
  first_row: int,
  rows: int,
  repeats: int,
) -> tf.data.Dataset:
  """Streams {"raw", "epoch"} for the rows of each batch from `first_row` on."""

  def fetch(counts):
    step, row = counts // rows, counts % rows
    positions = step * batch_size + first_row + row
    indices, epochs = _records_at(positions, source, seed, batch_size, repeats)
    return {"raw": source.fetch(indices), "epoch": epochs}

  counts = tf.data.Dataset.range(start_step * rows, _FOREVER)
  return counts.batch(FETCHED).map(as_is(fetch), **PARALLEL).unbatch()


def _records_at(
  positions: tf.Tensor,
  source: Source,
  seed: int,
  batch_size: int,
  repeats: int,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns record and epoch of positions, int64 [n], see `order`.

  Every copy of a record has its own epoch number, which decides its key.
  """
  places, copies = order.repeated(positions, batch_size, repeats)
  indices = order.shuffled(places, source.num_examples, seed)
  return indices, places // source.num_examples * repeats + copies


def _streamed(
  source: Source,
  seed: int,
  batch_size: int,
  start_step: int,
  first_row: int,
  rows: int,
  shuffle_buffer: int,
) -> tf.data.Dataset:
  """Streams the same as `_permuted`, but reads the files from start to end."""
  lanes = order.Lanes.for_batches(source.num_examples, batch_size)
  per_step = batch_size // lanes.num_lanes  # Rows that a lane gives to a batch.
  buffer = max(1, shuffle_buffer // lanes.num_lanes)
  first = first_row // per_step
  last = (first_row + rows - 1) // per_step
  num_read = (last - first + 1) * per_step
  unused = first_row - first * per_step  # Rows of another process.
  streams = (last + 1 - first) * lanes.num_places  # Read at the same time.

  @as_is
  def lane_stream(lane):
    element = start_step * per_step
    epoch = lanes.epoch_at(lane, element)
    done = element - lanes.first_element(lane, epoch)

    def read_epoch(epoch):
      raw = _lane_records(source, lanes, seed, lane, epoch, streams)
      raw = raw.shuffle(
        buffer,
        seed=_draw(seed, epoch, -1 - lane, None),
        reshuffle_each_iteration=False,
      )
      return tf.data.Dataset.zip({"raw": raw, "epoch": _repeated(epoch)})

    epochs = tf.data.Dataset.range(epoch, _FOREVER)
    return epochs.flat_map(as_is(read_epoch)).skip(done)

  elements = tf.data.Dataset.range(first, last + 1).interleave(
    lane_stream,
    cycle_length=last - first + 1,
    block_length=per_step,
    **PARALLEL,
  )
  if num_read == rows:
    return elements

  def is_own(number, _):
    return (number % num_read >= unused) & (number % num_read < unused + rows)

  own = elements.enumerate().filter(as_is(is_own))
  return own.map(as_is(lambda _, element: element))


def _lane_records(
  source: Source, lanes: order.Lanes, seed: int, lane, epoch, streams: int
) -> tf.data.Dataset:
  """Streams a lane's records of an epoch, from all its places in turn."""
  num, places = source.num_examples, lanes.num_places
  begin, end = lanes.bounds(lane, epoch)
  # The bounds of the places move from epoch to epoch.
  starts = tf.constant(source.file_starts(), tf.int64)
  shift = starts[_draw(seed, epoch, _SHIFT, starts.shape[0])]

  @as_is
  def read_place(place):
    start = begin + (end - begin) * place // places
    stop = begin + (end - begin) * (place + 1) // places
    first = (start + shift) % num
    return source.raw(first, first + stop - start, streams)

  # Threads wait for a store where this process has few lanes, as on a pod.
  threads = {"num_parallel_calls": places, "deterministic": True}
  return tf.data.Dataset.range(places).interleave(
    read_place,
    cycle_length=places,
    block_length=1,
    **(threads if streams <= _MOST_THREADS else {}),
  )


def _draw(seed: int, epoch, purpose, below: int | None) -> tf.Tensor:
  """Returns a random int64, below a bound if one is given.

  Args:
    seed: Seed of the run.
    epoch: Epoch of the number.
    purpose: A negative number, so that it is not a key of augmentation.
    below: The bound, excluded; None for no bound.
  """
  return tf.random.stateless_uniform(
    [],
    tf.stack([order.root(seed) + epoch, tf.cast(purpose, tf.int64)]),
    minval=None if below is None else 0,
    maxval=below,
    dtype=tf.int64,
  )


def num_eval_batches(
  source: Source,
  *,
  batch_size: int,
  indices: Sequence[int] | np.ndarray | None = None,
) -> int:
  """Returns how many batches `eval_batches` yields, in every process."""
  num = source.num_examples if indices is None else len(np.unique(indices))
  return -(-num // batch_size)


def eval_reader(
  source: Source,
  ops: str,
  *,
  batch_size: int,
  process_index: int = 0,
  process_count: int = 1,
  indices: Sequence[int] | np.ndarray | None = None,
) -> Callable[[], Iterator[Batch]]:
  """Returns a function that reads all records anew with every call.

  TensorFlow builds its graph once for all calls; building it takes as long as
  reading a small split. Small splits of a folder are decoded once per process:
  all runs in the process, such as trials, get the same read-only arrays.

  Process p reads the p-th of equal consecutive parts, in order. Every process
  yields `num_eval_batches` batches. Missing rows, or whole batches, are
  padding: zeros, with mask False and index -1.

  Args:
    source: Source of the records.
    ops: Preprocessing, see `vit_jax.data.preprocessing`.
    batch_size: Rows of a batch, over all processes.
    process_index: Number of this process.
    process_count: Number of processes; must divide `batch_size`.
    indices: The records to yield, in rising order; None for all.

  Raises:
    ValueError: Malformed `ops`, or numbers that do not fit each other.
  """
  _check_processes(batch_size, process_index, process_count)
  if indices is not None:
    indices = np.unique(indices)
    last = source.num_examples - 1
    if len(indices) and not 0 <= indices[0] <= indices[-1] <= last:
      got = f"{indices[0]} to {indices[-1]}"
      raise ValueError(unexpected("indices", got, f"0 to {last}"))
  num = source.num_examples if indices is None else len(indices)
  share = -(-num // process_count)
  start = min(process_index * share, num)
  stop = min(start + share, num)
  rows = batch_size // process_count

  @functools.cache
  def streamed() -> tf.data.Dataset:  # once, as it may cache its records
    return source.raw_at(indices[start:stop])

  @functools.cache
  def read(step: int, row_fn) -> tf.data.Dataset:
    begin = min(start + step * rows, stop)
    if indices is None or begin == stop:
      raw = source.raw(begin, stop)
    elif source.is_by_number:
      raw = source.raw_at(indices[begin:stop])
    else:
      raw = streamed().skip(begin - start)
    elements = tf.data.Dataset.zip({"raw": raw, "epoch": _repeated(0)})
    return _batched(elements, row_fn, rows)

  row_fns = decoding.row_fns(source, _views(ops), 0)
  num_batches = num_eval_batches(source, batch_size=batch_size, indices=indices)
  empty = _no_rows(source, ops)

  def decoded() -> Iterator[Batch]:
    records = decoding.iterate(source, read, row_fns, 0, stop - start)
    yield from _padded(records, rows, num_batches, empty)
    next(records, None)  # a cache is complete only after the end

  num_bytes = num_batches * rows * math.prod(empty["image"].shape[1:])
  if num_bytes > DECODED_BYTES:
    return decoded

  def batches() -> Iterator[Batch]:
    if not (stamp := source.stamp()):
      yield from decoded()
      return
    wanted = None if indices is None else indices.tobytes()
    key = (stamp, ops, rows, process_index, process_count, wanted)
    stored = _DECODED.get(key, [])
    # A source that has not read its broken records names them now.
    if not stored or not _broken(stored) <= source.undecodable:
      made = []
      for batch in decoded():
        for array in batch.values():
          array.flags.writeable = False
        made.append(batch)
        yield Batch(**batch)
      _DECODED[key] = made
      while sum(map(_num_bytes, _DECODED.values())) > DECODED_BYTES:
        del _DECODED[next(iter(_DECODED))]  # the oldest
      return
    for batch in stored:
      yield Batch(**batch)

  return batches


# Batches of splits that were evaluated.
_DECODED: dict[tuple, list[Batch]] = {}


def _broken(batches: list[Batch]) -> set[int]:
  rows = [b["index"][~b["mask"] & (b["index"] >= 0)] for b in batches]
  return set(np.concatenate(rows).tolist())


def _num_bytes(batches: list[Batch]) -> int:
  return sum(batch["image"].nbytes for batch in batches)


def eval_batches(source: Source, ops: str, **options: Any) -> Iterator[Batch]:
  """Returns an iterator that yields every record once, over all processes.

  Args:
    source: Source of the records.
    ops: Preprocessing.
    **options: Options of `eval_reader`.
  """
  return eval_reader(source, ops, **options)()


def _repeated(value) -> tf.data.Dataset:
  return tf.data.Dataset.from_tensors(tf.cast(value, tf.int64)).repeat()


def _batched(elements: tf.data.Dataset, row_fn, rows: int) -> tf.data.Dataset:
  dataset = elements.map(row_fn, **PARALLEL).batch(rows).prefetch(_PREFETCH)
  options = tf.data.Options()
  # Threads for many images at once use the cores better than for one.
  options.threading.max_intra_op_parallelism = 1
  return dataset.with_options(options)


def _no_rows(source: Source, ops: str) -> Batch:
  label = source.label_spec
  shape = *preprocessing.image_size(ops), preprocessing.channels_of(ops)
  return Batch(
    image=np.zeros([0, *shape], np.uint8),
    label=np.zeros([0, *label.shape], label.dtype.as_numpy_dtype),
    mask=np.zeros([0], bool),
    index=np.zeros([0], np.int64),
  )


def _padded(
  batches: Iterator[Batch], rows: int, num_batches: int, empty: Batch
) -> Iterator[Batch]:
  """Fills up the last batch and adds empty ones, up to `num_batches`."""
  for _ in range(num_batches):
    batch = next(batches, empty)
    missing = rows - len(batch["mask"])
    if missing:
      batch = {
        key: np.concatenate(
          [v, np.full([missing, *v.shape[1:]], -(key == "index"), v.dtype)]
        )
        for key, v in batch.items()
      }
    yield Batch(**batch)
