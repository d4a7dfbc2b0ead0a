"""Nested subsets of a split: "train@2000", "train[:99%]@10%/seed=1".

Records are ranked by a hash of the seed and their number in the split. A subset
of N is the N records of the lowest ranks. So it is inside every larger subset
of the same split and seed, and another seed draws another subset. The records
of a subset keep their order in the split.
"""

import dataclasses
import functools
import hashlib

import numpy as np

from vit_jax.data.source import PARALLEL, Record, Source
from vit_jax.data.tf_cpu import as_is, tf
from vit_jax.data.tfds_records import read_labels

_BATCH = 1024  # records collected at a time, undecoded
# Constants of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
# number generators, OOPSLA 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def members(num_examples: int, count: int, seed: int) -> np.ndarray:
  """Returns the records of a subset, int64 [count], rising.

  Args:
    num_examples: Number of records in the split.
    count: Number of records in the subset, at most num_examples.
    seed: Seed of the subset; not that of a run.

  It temporarily needs about 32 bytes per record of the split.

  Source: the outputs of SplitMix64 as ranks. They are a bijection of 64-bit
    numbers, so no two records tie. All numbers are integers, so that no version
    of numpy changes the result.
  """
  if count == num_examples:
    return np.arange(num_examples)
  start = hashlib.blake2b(f"subset {seed}".encode(), digest_size=8).digest()
  state = np.arange(1, num_examples + 1, dtype=np.uint64)
  state *= _STEP
  state += np.uint64(int.from_bytes(start, "big"))
  for shift, factor in _MIX:
    state ^= state >> np.uint64(shift)
    state *= np.uint64(factor)
  state ^= state >> np.uint64(31)
  return np.sort(np.argpartition(state, count)[:count]).astype(np.int64)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Subset(Source):
  """Some records of another source, numbered from 0.

  With random access only these records are read. Streamed files are read whole,
  and records outside of the subset are dropped before decoding, at about 0.1 ms
  of a core each (records of 80 kB).

  Attributes:
    base: The source, opened without the subset.
    indices: Records of `base`, int64 [num_examples], rising.
  """

  base: Source
  indices: np.ndarray

  @classmethod
  def of(cls, base: Source, indices: np.ndarray, split: str) -> "Subset":
    """Returns the subset of `base` whose name in a config is `split`."""
    return cls(
      name=base.name,
      split=split,
      num_examples=len(indices),
      num_classes=base.num_classes,
      class_names=base.class_names,
      is_multilabel=base.is_multilabel,
      is_regression=base.is_regression,
      remark=base.remark,
      file_bytes=base.file_bytes * len(indices) // base.num_examples,
      base=base,
      indices=indices,
    )

  @property
  def is_by_number(self) -> bool:
    """See `Source`."""
    return self.base.is_by_number

  @property
  def knows_labels(self) -> bool:
    """See `Source`."""
    return self.base.knows_labels

  @functools.cached_property
  def _tensor(self) -> tf.Tensor:
    with tf.init_scope():  # The first use may be inside a traced function.
      return tf.constant(self.indices)

  @functools.cached_property
  def _is_member(self) -> tf.Tensor:
    is_member = np.zeros(self.base.num_examples, bool)
    is_member[self.indices] = True
    with tf.init_scope():
      return tf.constant(is_member)

  def fetch(self, indices: tf.Tensor) -> Record:
    """See `Source`; also `base`, the raw record of the other source."""
    base = self.base.fetch(tf.gather(self._tensor, indices))
    return {"index": indices, "base": base}

  def raw(self, start, stop, streams: int = 1) -> tf.data.Dataset:
    """See `Source`."""
    if self.is_by_number:
      return super().raw(start, stop)
    start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
    num = self.num_examples

    def in_base(number):
      rounds = number // num * self.base.num_examples
      return rounds + tf.gather(self._tensor, number % num)

    first = in_base(start)
    last = tf.maximum(first, in_base(stop - 1) + 1)
    is_member = self._is_member
    last = tf.where(start < stop, last, first)
    base = self.base.raw(first, last, streams)
    base = base.filter(as_is(lambda raw: tf.gather(is_member, raw["index"])))
    numbers = tf.data.Dataset.range(start, stop)
    return tf.data.Dataset.zip(
      {"index": numbers.map(as_is(lambda i: i % num)), "base": base}
    )

  def raw_at(self, indices: np.ndarray) -> tf.data.Dataset:
    """See `Source`."""
    indices = np.asarray(indices, np.int64)
    numbers = tf.data.Dataset.from_tensor_slices(indices)
    base = self.base.raw_at(self.indices[indices])
    return tf.data.Dataset.zip({"index": numbers, "base": base})

  def file_starts(self) -> np.ndarray:
    """See `Source`."""
    starts = np.searchsorted(self.indices, self.base.file_starts())
    return np.unique(starts[starts < self.num_examples])

  def identity(self) -> str:
    """See `Source`: the identity of the other source, and the numbers."""
    numbers = np.asarray(self.indices, np.int64).tobytes()
    numbers = hashlib.sha256(numbers).hexdigest()[:16]
    return f"{self.base.identity()}, numbers {numbers}"

  def note(self) -> str:
    """See `Source`: states what streaming costs."""
    notes = [self.base.note()]
    if not self.is_by_number:
      notes.append(
        f"{self.name!r} [{self.split}] is streamed: every epoch reads all"
        f" {self.base.num_examples:,} records, unlike from array_record files."
      )
    return " ".join(filter(None, notes))

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    return {**self.base.load(raw["base"]), "index": raw["index"]}

  def rescue(self, raw: Record) -> Record:
    """See `Source`."""
    return {**self.base.rescue(raw["base"]), "index": raw["index"]}

  def labels(self) -> np.ndarray:
    """See `Source`."""
    if self.knows_labels:
      return self.base.labels()[self.indices]
    return read_labels(self)

  def columns(self, *names: str) -> dict[str, tf.Tensor]:
    """Reads the whole subset, undecoded: "image" or "label" or both."""
    records = self.raw(0, self.num_examples).map(as_is(self.load), **PARALLEL)
    batches = records.map(lambda r: {k: r[k] for k in names}).batch(_BATCH)
    parts = list(batches)
    columns = {k: tf.concat([p[k] for p in parts], 0) for k in names}
    if self.is_multilabel and "label" in columns:
      columns["label"] = tf.cast(columns["label"], tf.bool)
    return columns

  def record_name(self, index: int) -> str:
    """See `Source`: the name in the other source."""
    return self.base.record_name(int(self.indices[index]))
