"""From a source to batches: the same for any number of processes.

A training batch is a function of (seed, step). The split is cut into S
virtual shards, S = gcd(batch_size, 256), of consecutive records. Each shard is
an endless stream: epoch after epoch its records, each epoch shuffled by a
seed made of (seed, epoch, shard). The batch at step s is made of the elements
s k to (s + 1) k, k = batch_size / S, of all streams, shard after shard. Of P
processes, process p reads the shards p S / P to (p + 1) S / P: whatever P is,
the parts together are the same batch. A run that starts at step s leaves out
whole epochs for nothing and the rest of one epoch without decoding it.

Augmentation draws from (seed, epoch, record), not from the place in a batch.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vit_jax import opstring
from vit_jax.batch import Batch
from vit_jax.data import decoding
from vit_jax.data.host_tf import as_is, tf
from vit_jax.data.records import Source

MAX_SHARDS = 256
_PREFETCH = 2  # Batches decoded ahead.
_FOREVER = 2**62
_PARALLEL = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}


def num_shards(source: Source, batch_size: int) -> int:
  """Returns into how many virtual shards a split is cut for training."""
  shards = math.gcd(batch_size, MAX_SHARDS)
  while shards > source.num_examples:
    shards //= 2
  return shards


def train_batches(
  source: Source,
  ops: str,
  *,
  batch_size: int,
  seed: int,
  start_step: int = 0,
  shuffle_buffer: int = 50_000,
  process_index: int = 0,
  process_count: int = 1,
) -> Iterator[Batch]:
  """Returns an endless iterator of this process's parts of the batches.

  Args:
    source: what to read.
    ops: preprocessing, see `vit_jax.opstring`.
    batch_size: rows of a batch, over all processes.
    seed: of order and augmentation.
    start_step: number of the first batch.
    shuffle_buffer: encoded records held for shuffling, over all processes.
      It bounds memory where records are streamed from files; numbers of files
      or of records in memory are always shuffled over their whole shard. When
      an epoch of a stream ends, the buffer is filled anew.
    process_index: number of this process.
    process_count: number of processes; must divide the number of shards.

  Raises:
    ValueError: Malformed `ops`, or numbers that do not fit each other.
  """
  shards = num_shards(source, batch_size)
  if not 0 <= process_index < process_count or shards % process_count:
    raise ValueError(
      f"got process {process_index} of {process_count}, expected a number of"
      f" processes that divides the {shards} virtual shards of"
      f" {source.num_examples:,} records in batches of {batch_size} (its"
      f" greatest divisor that is a power of 2, up to {MAX_SHARDS}, and no"
      " more than records); change data.batch_size or use"
      f" {math.gcd(shards, process_count)} processes."
    )
  per_step = batch_size // shards  # Of each shard.
  local = shards // process_count
  rows = batch_size // process_count
  row_fns = decoding.row_fns(source, ops, _root(seed))

  def read(step: int, row_fn) -> tf.data.Dataset:
    stream = _shard_stream(
      source, seed, shards, step * per_step, shuffle_buffer
    )
    elements = tf.data.Dataset.range(
      process_index * local, (process_index + 1) * local
    ).interleave(
      stream,
      cycle_length=local,
      block_length=per_step,
      # Files are read in parallel; numbers are quicker read one by one.
      **({} if source.is_light else _PARALLEL),
    )
    return _batched(elements, row_fn, rows)

  return decoding.iterate(source, read, row_fns, start_step)


def num_eval_batches(
  source: Source,
  *,
  batch_size: int,
  indices: Sequence[int] | np.ndarray | None = None,
) -> int:
  """Returns how many batches `eval_batches` yields, in every process."""
  num = source.num_examples if indices is None else len(np.unique(indices))
  return -(-num // batch_size)


def eval_batches(
  source: Source,
  ops: str,
  *,
  batch_size: int,
  process_index: int = 0,
  process_count: int = 1,
  indices: Sequence[int] | np.ndarray | None = None,
) -> Iterator[Batch]:
  """Returns an iterator that yields every record once, over all processes.

  Process p reads the p-th of equal consecutive parts, in order. Every process
  yields `num_eval_batches` batches; missing rows, or whole batches, are
  padding: zeros, with mask False and index -1.

  Args:
    source: what to read.
    ops: preprocessing, see `vit_jax.opstring`.
    batch_size: rows of a batch, over all processes.
    process_index: number of this process.
    process_count: number of processes; must divide `batch_size`.
    indices: the records to yield, in rising order; None: all.

  Raises:
    ValueError: Malformed `ops`, or numbers that do not fit each other.
  """
  if not 0 <= process_index < process_count or batch_size % process_count:
    raise ValueError(
      f"got process {process_index} of {process_count} and batches of"
      f" {batch_size}, expected a batch_size that is a multiple of the number"
      " of processes."
    )
  if indices is not None:
    indices = np.unique(indices)
    last = source.num_examples - 1
    if len(indices) and not 0 <= indices[0] <= indices[-1] <= last:
      raise ValueError(
        f"got indices from {indices[0]} to {indices[-1]}, expected 0 to {last}."
      )
  num = source.num_examples if indices is None else len(indices)
  share = -(-num // process_count)
  start = min(process_index * share, num)
  stop = min(start + share, num)
  rows = batch_size // process_count

  def read(step: int, row_fn) -> tf.data.Dataset:
    begin = min(start + step * rows, stop)
    if indices is None or begin == stop:
      raw = source.raw(begin, stop)
    else:
      raw = source.raw_at(indices[begin:stop])
    elements = tf.data.Dataset.zip({"raw": raw, "epoch": _repeated(0)})
    return _batched(elements, row_fn, rows)

  row_fns = decoding.row_fns(source, ops, root=0)
  batches = decoding.iterate(source, read, row_fns, first_step=0)
  num_batches = num_eval_batches(source, batch_size=batch_size, indices=indices)
  return _padded(batches, rows, num_batches, opstring.image_size(ops))


def _shard_stream(
  source: Source, seed: int, shards: int, position: int, shuffle_buffer: int
) -> Callable[[tf.Tensor], tf.data.Dataset]:
  """Returns shard -> {"raw", "epoch"}, endless, from `position` of it on."""

  @as_is
  def stream(shard):
    begin = shard * source.num_examples // shards
    end = (shard + 1) * source.num_examples // shards
    size = end - begin
    buffer = size if source.is_light else max(1, shuffle_buffer // shards)

    def read_epoch(epoch):
      shuffle_seed = tf.random.stateless_uniform(
        [],
        # Negative, where the keys of augmentation are not.
        tf.stack([_root(seed) + epoch, -1 - shard]),
        minval=None,
        maxval=None,
        dtype=tf.int64,
      )
      raw = source.raw(begin, end).shuffle(
        buffer, seed=shuffle_seed, reshuffle_each_iteration=False
      )
      return tf.data.Dataset.zip({"raw": raw, "epoch": _repeated(epoch)})

    epochs = tf.data.Dataset.range(position // size, _FOREVER)
    return epochs.flat_map(read_epoch).skip(position % size)

  return stream


def _repeated(value) -> tf.data.Dataset:
  return tf.data.Dataset.from_tensors(tf.cast(value, tf.int64)).repeat()


def _root(seed: int) -> int:
  """Spreads seeds so far apart that adding an epoch never meets another."""
  digest = hashlib.blake2b(str(seed).encode(), digest_size=7).digest()
  return int.from_bytes(digest, "big")


def _batched(elements: tf.data.Dataset, row_fn, rows: int) -> tf.data.Dataset:
  dataset = elements.map(row_fn, **_PARALLEL).batch(rows).prefetch(_PREFETCH)
  options = tf.data.Options()
  # An image is small; many at once use the cores better than many per image.
  options.threading.max_intra_op_parallelism = 1
  return dataset.with_options(options)


def _padded(
  batches: Iterator[Batch], rows: int, num_batches: int, size: tuple[int, int]
) -> Iterator[Batch]:
  """Fills up the last batch and adds empty ones, up to `num_batches`."""
  for _ in range(num_batches):
    batch = next(batches, None)
    if batch is None:
      batch = Batch(
        image=np.zeros([0, *size, 3], np.uint8),
        label=np.zeros([0], np.int32),
        mask=np.zeros([0], bool),
        index=np.zeros([0], np.int64),
      )
    missing = rows - len(batch["mask"])
    if missing:
      batch = {
        key: np.concatenate(
          [v, np.full([missing, *v.shape[1:]], -(key == "index"), v.dtype)]
        )
        for key, v in batch.items()
      }
    yield Batch(**batch)
