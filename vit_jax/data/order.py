"""The order in which a run reads the records: a function of (seed, epoch).

All positions of a run are numbered: position p = step * batch_size + row
belongs to epoch p // n, where n is the number of records. If the batch size
does not divide n, an epoch starts in the middle of a batch, so that no record
is left out and none is repeated.

Records with random access are permuted (`shuffled`). Streamed records are
divided into lanes, virtual shards of the files, each of which gives an equal
part of every batch (`Lanes`).
"""

import dataclasses
import hashlib

import numpy as np

from vit_jax.data.tf_cpu import tf

MAX_LANES = 256
MAX_PLACES = 1024
# Fewest records of a place, as opening a file takes as long as reading some.
_MIN_RECORDS = 64

# Four rounds, the default, leave neighbours correlated (lag 1 over 80,000
# draws: 14 standard deviations off; with 16 rounds: below 2).
_ROUNDS = 16


def root(seed: int) -> int:
  """Returns a number of 56 bits; adding an epoch never gives another seed's."""
  digest = hashlib.blake2b(str(seed).encode(), digest_size=7).digest()
  return int.from_bytes(digest, "big")


def shuffled(positions: tf.Tensor, num_examples: int, seed: int) -> tf.Tensor:
  """Returns the record at each position of a run, int64 [n].

  The record is pi(position mod num_examples). pi is a permutation of all
  records that depends on the seed and the epoch. It is computed position by
  position, without memory.

  Args:
    positions: int64 [n], 0 or more, of any epochs.
    num_examples: Number of records in the split.
    seed: Seed of the run.

  Source: TensorFlow's RandomIndexShuffle: the block cipher Simon, repeated
    until its result is the number of a record.
  """
  first, second = divmod(root(seed), 2**32)
  epoch = tf.cast(positions // num_examples, tf.uint32)
  key = [
    tf.fill(tf.shape(epoch), tf.constant(k, tf.uint32)) for k in (first, second)
  ]
  return tf.raw_ops.RandomIndexShuffle(
    index=positions % num_examples,
    seed=tf.stack([*key, epoch], axis=-1),
    max_index=tf.constant(num_examples - 1, tf.int64),
    rounds=_ROUNDS,
  )


def repeated(positions: tf.Tensor, batch_size: int, repeats: int):
  """Returns places of records, and numbers of copies, of repeated augmentation.

  A place stands for `repeats` consecutive positions, its copies, which are in
  one batch or two neighbouring ones. In a batch, all first copies come before
  the second ones. So neighbours, which mixup mixes, are different records if
  the batch has three rows or more for each copy. Augmentation, dropout and
  stochastic depth draw anew for each copy.

  Args:
    positions: int64 [n], see this file.
    batch_size: Rows of a batch.
    repeats: Copies of each record.

  Source: arXiv:1902.05509. In facebookresearch/deit, samplers.py, the copies
    are on different devices.

  Example: batches of 6 rows with 3 copies, the first and the second batch.
    >>> place, copy = repeated(tf.range(12), 6, 3)
    >>> place.numpy().tolist()
    [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    >>> copy.numpy().tolist()
    [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
  """
  rows = np.argsort(np.arange(batch_size) % repeats, kind="stable")
  row = positions % batch_size
  positions = positions - row + tf.gather(tf.cast(rows, positions.dtype), row)
  return positions // repeats, positions % repeats


@dataclasses.dataclass(frozen=True)
class Lanes:
  """Streams that are read at the same time and together give the batches.

  Lane l has the positions p with p mod num_lanes = l, so every lane gives
  batch_size / num_lanes rows to every batch. In an epoch a lane has as many
  records as positions; in the files, they come after those of lane l - 1.
  Together the lanes have every record once. Their bounds change from epoch to
  epoch.

  A lane is read at `num_places` places at once. So a batch draws from
  num_lanes * num_places places of the files, also if these are in class order.

  Attributes:
    num_examples: Number of records in the split.
    num_lanes: A divisor of the batch size, at most MAX_LANES.
    num_places: Number of places at which a lane is read.
  """

  num_examples: int
  num_lanes: int
  num_places: int

  @classmethod
  def for_batches(cls, num_examples: int, batch_size: int) -> "Lanes":
    """Returns the lanes for a split and a batch size, over all processes."""
    places = max(1, min(MAX_PLACES, num_examples // _MIN_RECORDS))
    most = min(batch_size, places, MAX_LANES)
    num_lanes = next(n for n in range(most, 0, -1) if batch_size % n == 0)
    return cls(num_examples, num_lanes, places // num_lanes)

  def epoch_at(self, lane, element):
    """Returns the epoch to which an element of a lane belongs."""
    return (lane + self.num_lanes * element) // self.num_examples

  def first_element(self, lane, epoch):
    """Returns the number of a lane's first element in an epoch."""
    ahead = self.num_lanes - 1 - lane
    return (epoch * self.num_examples + ahead) // self.num_lanes

  def bounds(self, lane, epoch):
    """Returns where the records of a lane begin and end in an epoch."""
    return self._before(lane, epoch), self._before(lane + 1, epoch)

  def _before(self, lane, epoch):
    """Returns how many positions of an epoch belong to the lanes below."""
    begin = epoch * self.num_examples
    return self._below(lane, begin + self.num_examples) - self._below(
      lane, begin
    )

  def _below(self, lane, position):
    """Returns how many positions before this one belong to lanes below."""
    rest = position % self.num_lanes
    smaller = (rest + lane - abs(rest - lane)) // 2  # Tensors, too.
    return position // self.num_lanes * lane + smaller
