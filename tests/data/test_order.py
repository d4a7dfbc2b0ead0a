"""The order of records: exact counts, uniform, the same everywhere."""

import collections
import time

import numbered
import numpy as np
import pytest
from tensorflow.python.data.experimental.ops import testing

from vit_jax.data import order, pipeline
from vit_jax.data.tf_cpu import tf

SIZES = [1, 2, 7, 300, 1020, 4097]
BATCHES = [1, 7, 96, 1000]


class Streamed(numbered.Streamed):
  """As if read from seven files."""

  def file_starts(self):
    return np.unique(np.arange(7) * self.num_examples // 7)


class Slow(Streamed):
  """The same, from a store that takes 50 ms to answer."""

  def raw(self, start, stop, streams=1):
    return super().raw(start, stop).apply(testing.sleep(50_000))


def rows(cls, num_examples, steps, processes=1, **options):
  """The records of some batches, int64 [steps, batch], and their epochs."""
  options = {"seed": 0, "shuffle_buffer": 64, **options}
  parts = []
  for process in range(processes):
    records = pipeline.train_records(
      numbered.numbers(num_examples, cls),
      process_index=process,
      process_count=processes,
      **options,
    )
    batches = records.batch(options["batch_size"] // processes).take(steps)
    got = list(batches.as_numpy_iterator())
    parts.append(
      (
        np.stack([b["raw"]["index"] for b in got]),
        np.stack([b["epoch"] for b in got]),
      )
    )
  return tuple(np.concatenate(part, 1) for part in zip(*parts, strict=True))


@pytest.mark.parametrize("num_examples", SIZES)
def test_every_epoch_is_a_permutation(num_examples):
  """30 epochs, for any batch size: a batch is a slice of the positions."""
  positions = tf.range(30 * num_examples, dtype=tf.int64)
  epochs = np.reshape(
    order.shuffled(positions, num_examples, seed=3), [30, num_examples]
  )
  np.testing.assert_array_equal(
    np.sort(epochs, 1), np.tile(np.arange(num_examples), [30, 1])
  )
  if num_examples > 100:
    assert len(np.unique(epochs, axis=0)) == 30
    other = order.shuffled(positions, num_examples, seed=4).numpy()
    assert (epochs[0] != other[:num_examples]).mean() > 0.9


@pytest.mark.parametrize("num_examples", SIZES)
@pytest.mark.parametrize("batch_size", BATCHES)
def test_lanes_hold_every_record_once_an_epoch(num_examples, batch_size):
  lanes = order.Lanes.for_batches(num_examples, batch_size)
  assert batch_size % lanes.num_lanes == 0
  assert lanes.num_lanes * lanes.num_places <= order.MAX_PLACES
  number = np.arange(lanes.num_lanes)
  for epoch in range(30):
    begins, ends = lanes.bounds(number, epoch)
    # Consecutive, together all; as many as the epoch has elements.
    np.testing.assert_array_equal(begins[1:], ends[:-1])
    assert begins[0] == 0 and ends[-1] == num_examples
    first = lanes.first_element(number, epoch)
    np.testing.assert_array_equal(
      ends - begins, lanes.first_element(number, epoch + 1) - first
    )
    has_some = ends > begins
    np.testing.assert_array_equal(
      lanes.epoch_at(number, first)[has_some], epoch
    )
    assert np.ptp(ends - begins) <= 1


@pytest.mark.parametrize("cls", [numbered.Numbers, Streamed])
@pytest.mark.parametrize(
  "num_examples, batch_size",
  [
    (1000, 512),
    (300, 512),
    (127, 12),
    pytest.param(5000, 7, marks=pytest.mark.slow),
  ],
)
def test_records_are_seen_equally_often(cls, num_examples, batch_size):
  """Rows of a batch beyond an epoch's end belong to the next epoch."""
  num_epochs = 30 if num_examples < 1000 else 6
  steps = -(-num_epochs * num_examples // batch_size)
  indices, epochs = rows(cls, num_examples, steps, batch_size=batch_size)
  seen = collections.defaultdict(list)
  for index, epoch in zip(indices.ravel(), epochs.ravel(), strict=True):
    seen[epoch].append(index)
  for epoch in range(num_epochs):
    assert sorted(seen[epoch]) == list(range(num_examples))
  # A batch holds the positions of a run in their order, epoch after epoch.
  for step, row in enumerate(epochs):
    want = np.arange(step * batch_size, (step + 1) * batch_size) // num_examples
    np.testing.assert_array_equal(np.sort(row), want)


@pytest.mark.parametrize("cls", [numbered.Numbers, Streamed])
@pytest.mark.parametrize(
  "numbers, num_starts",
  [((2,), 1), pytest.param((3, 4, 6), 3, marks=pytest.mark.slow)],
)
def test_any_number_of_processes_and_any_start(cls, numbers, num_starts):
  options = dict(num_examples=451, batch_size=180)
  alone, epochs = rows(cls, steps=8, **options)
  assert epochs.max() == 3
  assert order.Lanes.for_batches(451, 180).num_lanes == 6
  for processes in numbers:
    together, _ = rows(cls, steps=3, processes=processes, **options)
    np.testing.assert_array_equal(together, alone[:3])
  for start in np.random.RandomState(0).randint(1, 7, num_starts).tolist():
    resumed, _ = rows(cls, steps=2, processes=3, start_step=start, **options)
    np.testing.assert_array_equal(resumed, alone[start : start + 2])


def test_a_process_of_many_waits_for_many_answers_at_a_time():
  """One of 64 has four lanes, each read at four places; the order stays."""

  def numbers(cls):
    records = pipeline.train_records(
      numbered.numbers(65_536, cls),
      process_index=3,
      process_count=64,
      batch_size=256,
      seed=0,
      shuffle_buffer=1,
    )
    yield from (
      r["raw"]["index"] for r in records.take(260).as_numpy_iterator()
    )

  slow = numbers(Slow)
  got = [next(slow)]
  start = time.monotonic()
  got += slow
  took = time.monotonic() - start
  assert got == [*numbers(Streamed)]
  # 260 answers of 50 ms: 3.3 s if the lanes wait at one place each.
  assert took < 2.3


def test_a_process_reads_only_its_lanes_of_the_files():
  read = collections.Counter()

  class Counted(Streamed):
    def raw(self, start, stop, streams=1):
      def count(index):
        read[int(index)] += 1
        return index

      def counted(raw):
        index = tf.numpy_function(count, [raw["index"]], tf.int64)
        return {"index": tf.ensure_shape(index, [])}

      return super().raw(start, stop, streams).map(counted)

  rows(Counted, 1200, 20, batch_size=12, shuffle_buffer=12)
  everything = sum(read.values())
  read.clear()
  records = pipeline.train_records(
    numbered.numbers(1200, Counted),
    batch_size=12,
    seed=0,
    shuffle_buffer=12,
    process_index=1,
    process_count=4,
  )
  list(records.take(3 * 20))
  assert sum(read.values()) < everything / 3


def _counts_of_classes(
  num_examples, num_classes, batch_size, files, start, steps
):
  """Classes in batches of a split in class order, from many files."""

  class Files(Streamed):
    def file_starts(self):
      return np.arange(files) * num_examples // files

  records = pipeline.train_records(
    numbered.numbers(num_examples, Files),
    batch_size=batch_size,
    seed=0,
    start_step=start,
  )
  got = []
  for batch in records.batch(batch_size).take(steps).as_numpy_iterator():
    classes = batch["raw"]["index"] * num_classes // num_examples
    got.append(np.bincount(classes, minlength=num_classes))
  return np.stack(got)


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 180])
@pytest.mark.parametrize(
  "batch_size, ideal",
  [(1000, 632), pytest.param(4096, 983, marks=pytest.mark.nightly)],
)
def test_a_sorted_split_of_imagenets_size_is_mixed(batch_size, ideal, start):
  """A random batch has `ideal` of the 1,000 classes."""
  counts = _counts_of_classes(
    1_281_167, 1000, batch_size, files=1024, start=start, steps=3
  )
  assert (counts > 0).sum(1).min() > 0.97 * ideal
  expected = batch_size / 1000
  chi_square = ((counts - expected) ** 2 / expected).sum(1)
  # 999 degrees of freedom: mean 999, deviation 45. Lower is more even.
  assert chi_square.max() < 999 + 5 * 45


def test_permuted_batches_have_the_classes_of_random_ones():
  """Chi-square over 64 classes in class order, 200 batches of 512."""
  num, batch, classes = 50_000, 512, 64
  positions = tf.range(200 * batch, dtype=tf.int64)
  drawn = order.shuffled(positions, num, seed=1).numpy() * classes // num
  counts = np.stack(
    [np.bincount(b, minlength=classes) for b in drawn.reshape(200, batch)]
  )
  chi_square = ((counts - batch / classes) ** 2 / (batch / classes)).sum(1)
  # Without replacement: (1 - batch / num) of 63; deviation sqrt(126 / 200).
  mean = 63 * (1 - batch / num)
  assert abs(chi_square.mean() - mean) < 4 * np.sqrt(2 * 63 / 200)


def test_neighbours_in_the_order_are_not_correlated():
  num = 1_281_167
  draws = order.shuffled(tf.range(100_000, dtype=tf.int64), num, seed=0).numpy()
  for lag in (1, 2, 3, 64, 4096):
    r = np.corrcoef(draws[:-lag], draws[lag:])[0, 1]
    assert abs(r) * np.sqrt(len(draws)) < 4


# Repeated augmentation.


@pytest.mark.parametrize("num_examples, batch_size", [(300, 10), (50, 64)])
@pytest.mark.parametrize("repeats", [2, 3])
def test_copies_meet_in_a_batch_but_are_no_neighbours(
  num_examples, batch_size, repeats
):
  """Over `repeats` epochs every record has every copy once."""
  steps = repeats * num_examples // batch_size * 2
  options = dict(batch_size=batch_size, repeats=repeats)
  index, epoch = rows(numbered.Numbers, num_examples, steps, **options)
  whole = np.stack([index.ravel(), epoch.ravel()], 1)
  # In the order of the copies, not of the rows of a batch.
  order_of_rows = np.argsort(np.arange(batch_size) % repeats, kind="stable")
  copies = whole.reshape(steps, batch_size, 2)[:, np.argsort(order_of_rows)]
  copies = copies.reshape(-1, 2)
  once = copies[: repeats * num_examples]
  assert len({*map(tuple, once.tolist())}) == len(once)
  assert {*once[:, 1].tolist()} == {*range(repeats)}
  np.testing.assert_array_equal(
    once[::repeats, 0],
    order.shuffled(tf.range(num_examples, dtype=tf.int64), num_examples, 0),
  )
  if num_examples > batch_size:  # otherwise epochs meet in a batch
    num = [len({*row}) for row in index.tolist()]
    assert max(num) <= -(-batch_size // repeats) + 1
    assert (index != np.roll(index, 1, axis=1)).all()


def test_copies_do_not_depend_on_history_and_processes():
  options = dict(batch_size=12, repeats=3)
  index, epoch = rows(numbered.Numbers, 100, 9, **options)
  parts = rows(numbered.Numbers, 100, 9, processes=4, **options)
  later = rows(numbered.Numbers, 100, 4, start_step=5, **options)
  for whole, part, end in zip((index, epoch), parts, later, strict=True):
    np.testing.assert_array_equal(whole, part)
    np.testing.assert_array_equal(whole[5:], end)


def test_copies_of_streamed_records_are_refused():
  with pytest.raises(ValueError, match="repeats: got 3"):
    rows(Streamed, 100, 1, batch_size=12, repeats=3)
