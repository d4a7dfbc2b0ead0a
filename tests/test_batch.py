"""Wrong batches are refused before they reach the step."""

import re

import numpy as np
import pytest

from vit_jax.batch import DataError, checked, normalise

ROWS, SIZE, CLASSES = 4, (8, 6), 3


def _batch(**changes):
  batch = {
    "image": np.zeros((ROWS, *SIZE, 3), np.uint8),
    "label": np.array([0, 1, 2, 0]),
  }
  batch |= changes
  return {k: v for k, v in batch.items() if v is not None}


def _checked(batches, **options):
  options = {"shapes": {"image": (*SIZE, 3)}, **options}
  return checked(iter(batches), rows=ROWS, num_classes=CLASSES, **options)


def test_normalise_maps_the_ends():
  images = normalise(np.array([0, 255, 51], np.uint8))
  assert images.dtype == np.float32
  np.testing.assert_allclose(images, [-1.0, 1.0, -0.6], atol=1e-7)


def test_what_is_absent_is_filled_in():
  batch = next(_checked([_batch()]))
  assert batch["mask"].dtype == bool and batch["mask"].all()
  assert batch["label"].dtype == np.int32
  np.testing.assert_array_equal(batch["index"], [0, 1, 2, 3])
  given = {
    "mask": np.array([True, False, True, True]),
    "index": np.array([9, 8, 7, 6]),
    "label": np.eye(4, 3, dtype=np.float32),
  }
  batch = next(_checked([_batch(**given)]))
  assert all(batch[key] is value for key, value in given.items())


def test_the_place_in_the_stream_is_that_of_the_whole_batch():
  """Step 5 of 2 processes: rows 40 to 47, the second half is process 1's."""
  batches = _checked(
    [_batch(), _batch()], start_step=5, process_index=1, process_count=2
  )
  np.testing.assert_array_equal(next(batches)["index"], [44, 45, 46, 47])
  np.testing.assert_array_equal(next(batches)["index"], [52, 53, 54, 55])
  far = next(_checked([_batch()], start_step=2**29 - 1))["index"]
  assert far.dtype == np.int64 and far.max() == 2**31 - 1
  assert next(_checked([_batch()], start_step=2**29))["index"][0] == 0


FLOATS = np.full((4, 3), -2.0, np.float32)
INFINITE = np.where(np.arange(3) == 1, np.inf, FLOATS)
# What is wrong with a batch, and key words of its errors, one a line.
WRONG = [
  ({"image": np.zeros((4, 3, 8, 6), np.uint8)}, ["image: .*4, 8, 6, 3"]),
  ({"image": None}, ["image: "]),
  ({"label": np.zeros(5, np.int32)}, ["label: .*5,"]),
  ({"label": np.array([0, 1, 2, 3])}, ["label: got 3"]),
  ({"label": np.full((4, 3), np.nan, np.float32)}, ["label: got nan"]),
  ({"label": FLOATS}, ["label: got -2.0"]),
  ({"mask": np.ones(4, np.uint8)}, ["mask: .*uint8"]),
  ({"images": 3}, ["'images'"]),
  ({"image": np.zeros(3), "label": np.zeros(9)}, ["image: ", "label: "]),
]


@pytest.mark.parametrize("changes, words", WRONG)
def test_errors_of_a_batch(changes, words):
  with pytest.raises(DataError) as e:
    next(_checked([_batch(**changes)]))
  _, *errors = str(e.value).split("\n")
  for error, word in zip(errors, words, strict=True):
    assert re.search(word, error), error


def test_later_batches_are_checked_too_and_their_end_is_an_error():
  batches = _checked([_batch(), _batch(label=np.full(4, 7))], start_step=10)
  next(batches)
  with pytest.raises(DataError, match="batch 11 .*\n.*label: got 7"):
    next(batches)
  batches = _checked([_batch()] * 3, start_step=7)
  with pytest.raises(DataError, match="3 batches, at batch 10"):
    list(batches)


def test_numbers_of_a_regression_may_be_negative_but_not_infinite():
  next(_checked([_batch(label=FLOATS)], is_regression=True))
  with pytest.raises(DataError, match="label: .*inf"):
    next(_checked([_batch(label=INFINITE)], is_regression=True))
