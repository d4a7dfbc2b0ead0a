"""Batches: a function of (seed, step), whatever the number of processes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import (
  OPS,
  Numbers,
  Streamed,
  assert_same,
  global_batches,
  joined,
  numbers,
)

from vit_jax.data import pipeline


@pytest.fixture(scope="module")
def run():
  """More than two epochs; some batches have records of two."""
  return global_batches(numbers(55), 9)


def share_of_equal_images(batches, others):
  """Among the records that are in both."""
  batch, other = joined(batches), joined(others)
  image_of = dict(zip(other["index"], other["image"], strict=True))
  pairs = zip(batch["index"], batch["image"], strict=True)
  return np.mean([(image_of[i] == x).all() for i, x in pairs if i in image_of])


def test_seed_and_epoch_decide_order_and_augmentation(run):
  assert {k: (v.shape, v.dtype) for k, v in run[0].items()} == {
    "image": ((16, 8, 8, 3), np.uint8),
    "label": ((16,), np.int32),
    "mask": ((16,), np.bool_),
    "index": ((16,), np.int64),
  }
  assert run[0]["mask"].all()
  np.testing.assert_array_equal(run[0]["label"], run[0]["index"] % 7)
  others = global_batches(numbers(55), 3, seed=1)
  index = joined(run[:3])["index"]
  assert (index != joined(others)["index"]).mean() > 0.9
  # One of 50 crops and flips is the same by chance.
  assert share_of_equal_images(run[:3], others) < 0.2
  assert share_of_equal_images(run[:3], run[4:7]) < 0.2  # another epoch


@pytest.mark.parametrize(
  "cls, options",
  [
    (Numbers, {}),
    (Numbers, {"repeats": 2}),
    pytest.param(Streamed, {"shuffle_buffer": 16}, marks=pytest.mark.slow),
  ],
)
def test_a_later_start_with_more_processes_continues_the_same_run(cls, options):
  whole = global_batches(numbers(55, cls), 7, **options)
  rest = global_batches(numbers(55, cls), 2, 2, start_step=5, **options)
  assert_same(rest, whole[5:])


def test_a_number_of_processes_that_divides_no_batch_is_refused():
  with pytest.raises(ValueError, match="0 of 3"):
    pipeline.train_batches(
      numbers(100), OPS, batch_size=64, seed=0, process_count=3
    )
  for index, count in ((2, 2), (0, 3)):
    with pytest.raises(ValueError, match=f"{index} of {count}"):
      pipeline.eval_batches(
        numbers(9), OPS, batch_size=4, process_index=index, process_count=count
      )


@settings(derandomize=True, deadline=None, max_examples=3)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 6))
def test_evaluation_yields_every_record_once(num, processes, rows):
  source, options = numbers(num), dict(batch_size=rows * processes)
  runs = [
    [
      *pipeline.eval_batches(
        source, OPS, process_index=p, process_count=processes, **options
      )
    ]
    for p in range(processes)
  ]
  count = pipeline.num_eval_batches(source, **options)
  assert {len(run) for run in runs} == {count}  # no process waits for others
  whole = joined(sum(runs, []))
  assert whole["image"].shape == (count * rows * processes, 8, 8, 3)
  real = whole["mask"]
  np.testing.assert_array_equal(whole["index"][real], np.arange(num))
  assert (whole["index"][~real] == -1).all()
  assert not whole["image"][~real].any()


def test_evaluation_of_some_records():
  source = numbers(50)
  options = dict(batch_size=4, indices=np.array([40, 3, 3, 17, 49, 0]))
  batches = list(pipeline.eval_batches(source, OPS, **options))
  assert pipeline.num_eval_batches(source, **options) == 2 == len(batches)
  whole = joined(batches)
  assert whole["index"][whole["mask"]].tolist() == [0, 3, 17, 40, 49]
  none = pipeline.eval_batches(source, OPS, batch_size=4, indices=[])
  assert not [*none]
  with pytest.raises(ValueError, match="indices: got 0 to 50"):
    pipeline.eval_batches(source, OPS, batch_size=4, indices=[0, 50])
