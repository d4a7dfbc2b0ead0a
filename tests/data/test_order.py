"""The order of records: exact counts, uniform, the same everywhere."""

import numbered
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vit_jax.data import order, pipeline
from vit_jax.data.tf_cpu import tf

EXACT = settings(derandomize=True, deadline=None, max_examples=25)


class Streamed(numbered.Streamed):
  """As if read from seven files."""

  def file_starts(self):
    return np.unique(np.arange(7) * self.num_examples // 7)


def rows(cls, num_examples, steps, process=0, processes=1, **options):
  """A process's records of some batches, int64 [steps, rows]; their epochs."""
  records = pipeline.train_records(
    numbered.numbers(num_examples, cls),
    process_index=process,
    process_count=processes,
    **{"seed": 0, "shuffle_buffer": 64, **options},
  )
  batches = records.batch(options["batch_size"] // processes).take(steps)
  got = list(batches.as_numpy_iterator())
  return (
    np.stack([b["raw"]["index"] for b in got]),
    np.stack([b["epoch"] for b in got]),
  )


@EXACT
@given(st.integers(1, 2000), st.integers(0, 2**32 - 1), st.integers(0, 2**20))
def test_every_epoch_is_a_permutation_of_its_own(num, seed, epoch):
  """For any batch size: a batch is a slice of the positions."""
  positions = tf.range(epoch * num, (epoch + 2) * num, dtype=tf.int64)
  epochs = np.reshape(order.shuffled(positions, num, seed), [2, num])
  assert (np.sort(epochs, 1) == np.arange(num)).all()
  if num > 100:
    other = order.shuffled(positions[:num], num, seed + 1).numpy()
    assert (epochs[0] != other).mean() > 0.9
    assert (epochs[0] != epochs[1]).mean() > 0.9


@EXACT
@given(st.integers(1, 5000), st.integers(1, 1000), st.integers(0, 30))
def test_lanes_hold_every_record_once_an_epoch(num, batch_size, epoch):
  lanes = order.Lanes.for_batches(num, batch_size)
  assert batch_size % lanes.num_lanes == 0
  assert lanes.num_lanes * lanes.num_places <= order.MAX_PLACES
  number = np.arange(lanes.num_lanes)
  begins, ends = lanes.bounds(number, epoch)
  # Consecutive, together all; as many as the epoch has elements.
  np.testing.assert_array_equal(begins[1:], ends[:-1])
  assert begins[0] == 0 and ends[-1] == num and np.ptp(ends - begins) <= 1
  first = lanes.first_element(number, epoch)
  after = lanes.first_element(number, epoch + 1)
  np.testing.assert_array_equal(ends - begins, after - first)
  np.testing.assert_array_equal(
    lanes.epoch_at(number, first)[ends > begins], epoch
  )


@settings(EXACT, max_examples=2)
@given(
  cls=st.sampled_from([numbered.Numbers, Streamed]),
  num=st.integers(1, 300),
  rows_of_each=st.integers(1, 60),
  processes=st.integers(1, 4),
  process=st.integers(0, 3),
)
@example(Streamed, 150, 9, 4, 1)  # lanes are shared by processes
def test_any_processes_from_any_start_get_the_rows_of_one_run(
  cls, num, rows_of_each, processes, process
):
  """And in an epoch, every record is seen once."""
  batch_size, process = rows_of_each * processes, process % processes
  steps = -(-2 * num // batch_size) + 2
  indices, epochs = rows(cls, num, steps, batch_size=batch_size)
  for epoch in range(2):
    assert sorted(indices[epochs == epoch]) == list(range(num))
  # A batch holds the positions of a run in their order, epoch after epoch.
  want = np.arange(steps * batch_size).reshape(steps, -1) // num
  np.testing.assert_array_equal(np.sort(epochs, 1), want)
  options = dict(batch_size=batch_size, start_step=steps - 2)
  resumed, _ = rows(cls, num, 2, process, processes, **options)
  parts = np.split(indices[-2:], processes, axis=1)
  np.testing.assert_array_equal(resumed, parts[process])


@pytest.mark.slow
def test_a_sorted_split_of_imagenets_size_is_mixed():
  """A random batch has 632 of the 1,000 classes, in class order."""
  num, batch_size = 1_281_167, 1000

  class Files(Streamed):
    def file_starts(self):
      return np.arange(1024) * num // 1024

  source = numbered.numbers(num, Files)
  records = pipeline.train_records(source, batch_size=batch_size, seed=0)
  counts = np.stack(
    [
      np.bincount(batch["raw"]["index"] * 1000 // num, minlength=1000)
      for batch in records.batch(batch_size).take(3).as_numpy_iterator()
    ]
  )
  assert (counts > 0).sum(1).min() > 0.97 * 632
  chi_square = ((counts - 1) ** 2).sum(1)
  # 999 degrees of freedom: mean 999, deviation 45. Lower is more even.
  assert chi_square.max() < 999 + 5 * 45


def test_neighbours_in_the_order_are_not_correlated():
  num = 1_281_167
  draws = order.shuffled(tf.range(100_000, dtype=tf.int64), num, seed=0).numpy()
  for lag in (1, 2, 3, 64, 4096):
    r = np.corrcoef(draws[:-lag], draws[lag:])[0, 1]
    assert abs(r) * np.sqrt(len(draws)) < 4


# Repeated augmentation.


def test_copies_meet_in_a_batch_but_are_no_neighbours():
  """Over three epochs every record has every copy once."""
  num, batch_size, repeats = 300, 10, 3
  steps = repeats * num // batch_size
  options = dict(batch_size=batch_size, repeats=repeats)
  index, epoch = rows(numbered.Numbers, num, steps, **options)
  pairs = {*zip(index.ravel().tolist(), epoch.ravel().tolist(), strict=True)}
  assert pairs == {(i, e) for i in range(num) for e in range(repeats)}
  # The order is that of one epoch; a place is in one batch, or in two.
  shuffled = order.shuffled(tf.range(num, dtype=tf.int64), num, 0).numpy()
  place = np.argsort(shuffled)[index]
  assert (np.ptp(place, axis=1) <= batch_size // repeats + 1).all()
  assert max(len({*row}) for row in index.tolist()) <= 5
  assert (index != np.roll(index, 1, axis=1)).all()


def test_copies_of_streamed_records_are_refused():
  with pytest.raises(ValueError, match="repeats"):
    rows(Streamed, 100, 1, batch_size=12, repeats=3)
