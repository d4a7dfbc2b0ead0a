"""The language of splits means what TFDS's does."""

import pytest

from vit_jax.data import splits

tfds = pytest.importorskip("tensorflow_datasets")

SIZES = {"train": 1297, "test": 7}


@pytest.mark.parametrize(
  "text",
  [
    "train[:99%]",
    "train[-10%:]",
    "train[:-100]",
    "train[100:200]+test",
    "train[33%:66%]+train[5:6]",
    " train + test[1:] ",
  ],
)
def test_splits_mean_what_tfds_means(text):
  infos = {
    name: tfds.core.SplitInfo(
      name=name, shard_lengths=[size], num_bytes=0, filename_template=None
    )
    for name, size in SIZES.items()
  }
  spec = tfds.core.ReadInstruction.from_spec(text.replace(" ", ""))
  expected = [
    (
      part.splitname,
      part.from_ or 0,
      SIZES[part.splitname] if part.to is None else part.to,
    )
    for part in spec.to_absolute(infos)
  ]
  spans = splits.parse_split(text, SIZES)
  assert [tuple(span) for span in spans] == expected
  assert splits.num_records(spans) == sum(b - a for _, a, b in expected)


@pytest.mark.parametrize(
  "text,message",
  [
    ("val", r"got split 'val', expected one of train \(1,297 records\), test"),
    ("train[", r"got split 'train\[', expected one such as 'train\[:99%"),
    ("train[1.5:]", "bounds such as 100 or 99%, not '1.5'"),
    ("train[:101%]", "rising bounds of 'train' from 0 to 1,297"),
    ("train[-101%:]", "rising bounds of 'train' from 0 to 1,297"),
    ("test[:8]", "rising bounds of 'test' from 0 to 7"),
    ("train[5:2]", "rising bounds of 'train' from 0 to 1,297"),
    ("test+test[:0]", "rising bounds of 'test' from 0 to 7"),
  ],
)
def test_wrong_splits_are_explained(text, message):
  with pytest.raises(splits.SplitError, match=message):
    splits.parse_split(text, SIZES)


@pytest.mark.parametrize(
  "a, b, apart",
  [
    ("train[:90%]", "train[90%:]", True),
    ("train[:-200]", "train[-200:]", True),
    ("train[:50%]@10%", "train[60%:70%]+train[90%:]", True),
    ("train[:90%]", "train[:200]", False),
    ("train[:90%]", "train[-20:]", False),  # of 100 records
    ("train", "train[:1]", False),
    ("train", "test", False),  # splits of their own
  ],
)
def test_slices_that_are_apart_whatever_their_split_has(a, b, apart):
  assert splits.are_apart(a, b) == splits.are_apart(b, a) == apart
