"""The language of splits means what TFDS's does."""

import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.data import sources, splits

tfds = pytest.importorskip("tensorflow_datasets")

# A percent of each is a record or more: TFDS takes -1% of 7 records for 0.
SIZES = {"train": 1297, "test": 500}
NAME = st.sampled_from([*SIZES])
RECORDS = st.just("") | st.integers(-1300, 1300).map(str)
PERCENT = st.just("") | st.integers(-101, 101).map("{}%".format)
# TFDS takes both bounds of a slice in one unit.
BOUNDS = st.tuples(RECORDS, RECORDS) | st.tuples(PERCENT, PERCENT)
SLICE = BOUNDS.filter(any).map(":".join)
PART = NAME | st.builds("{}[{}]".format, NAME, SLICE)


def spans_of_tfds(text):
  """What TFDS reads, or None for an error and for slices of no record."""
  infos = {
    name: tfds.core.SplitInfo(
      name=name, shard_lengths=[size], num_bytes=0, filename_template=None
    )
    for name, size in SIZES.items()
  }
  try:
    parts = tfds.core.ReadInstruction.from_spec(text).to_absolute(infos)
  except ValueError:
    return None
  spans = []
  for part in parts:
    size = SIZES[part.splitname]
    stop = size if part.to is None else part.to
    spans.append((part.splitname, part.from_ or 0, stop))
  return spans if all(start < stop for _, start, stop in spans) else None


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(PART, min_size=1, max_size=3).map("+".join))
def test_splits_mean_what_tfds_means(text):
  expected = spans_of_tfds(text)
  if expected is None:
    with pytest.raises(splits.SplitError, match="rising bounds of '(train|te)"):
      splits.parse_split(text, SIZES)
  else:
    spans = splits.parse_split(f" {text.replace('+', ' + ')} ", SIZES)
    assert [tuple(span) for span in spans] == expected
    assert splits.num_records(spans) == sum(b - a for _, a, b in expected)


WRONG = {
  "val": "train (1,297 records), test",
  "train[": "train[:99%]",
  "test+test[:0]": "'test' from 0 to 500",
  "train@5+test@5": "at the end",
  "train@50/sed=1": "seed=1",
  "train@1298": "1 to 1,297",
}


def test_wrong_splits_are_explained():
  for text, words in WRONG.items():
    with pytest.raises(splits.SplitError, match=re.escape(words)):
      splits.num_examples(text, SIZES)


def test_a_subset_says_how_many_records_it_has():
  for text, count in {
    "train@1297": 1297,
    "train + test@100% ": 1797,
    "train[5:]+test[:10]@0.5%/seed=12": 7,
  }.items():
    assert splits.num_examples(text, SIZES) == count
    source = sources.open_source("digits", text, fake=True)
    assert (source.num_examples, source.split) == (count, text)


SIGN = st.sampled_from(["", "-"])
CUT = st.builds("{}{}".format, SIGN, st.integers(1, 120)) | st.builds(
  "{}{}%".format, SIGN, st.integers(1, 99)
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(CUT, CUT, st.lists(st.integers(1, 300), min_size=9, max_size=9))
def test_slices_that_are_apart_share_no_record_of_any_split(end, begin, sizes):
  a, b = f"train[:{end}]", f"train[{begin}:]"
  apart = splits.are_apart(a, b)
  assert splits.are_apart(b, a) == apart
  if end == begin:
    assert apart
  for size in sizes if apart else ():
    with contextlib.suppress(splits.SplitError):  # one of them has no record
      (first,), (second,) = (
        splits.parse_split(text, {"train": size}) for text in (a, b)
      )
      assert first.stop <= second.start
  assert not splits.are_apart("train", "test")  # splits of their own
