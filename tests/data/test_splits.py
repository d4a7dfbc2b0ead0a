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
    ("train[", r"got split 'train\[', expected one such as 'train', 'train\["),
    ("train[1.5:]", "got bound '1.5' in split .* expected one such"),
    ("train[:101%]", "got bound '101%' in split .* expected at most 100%"),
    ("test[:8]", "got bound '8' .* expected at most its 7 records"),
    (
      "train[5:2]",
      "the records 5 to 2 of 'train', expected rising bounds",
    ),
    (
      "train[33%:500]",
      r"expected both bounds of 'train\[33%:500\]' in percent",
    ),
    ("test+test[:0]", r"the records 0 to 0 of 'test'"),
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
