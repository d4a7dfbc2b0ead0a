"""Tests of the embedded data sets: `glyphs` and `digits`."""

import hashlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

from vit_jax.data.builders import digits, glyphs, render


def _drawn(num_workers=0, split="train", count=150, **options):
  config = glyphs.GlyphsConfig(**options)
  return np.stack(
    list(glyphs.images(config, split, count, num_workers=num_workers))
  )


def _arrays(builder, split):
  examples = list(builder.as_data_source(split=split))
  images = np.stack([example["image"] for example in examples])
  return images, np.array([example["label"] for example in examples])


def _pairs(images, labels):
  """Returns images with their labels, whatever their order."""
  images = np.asarray(images, np.uint8)
  return sorted((i.tobytes(), x) for i, x in zip(images, labels, strict=True))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("tfds")


@pytest.mark.nightly
def test_glyphs_do_not_depend_on_the_number_of_workers():
  # Three chunks, the last one partial, so that workers get unequal parts.
  np.testing.assert_array_equal(_drawn(0), _drawn(2))


def test_a_glyph_depends_on_seed_split_and_index_only():
  last = render.render(0, "train", 9, 32)
  np.testing.assert_array_equal(_drawn(count=10)[9], last)
  again = 9 + len(render.CHARACTERS)  # the same character, drawn differently
  for other in ((1, "train", 9), (0, "validation", 9), (0, "train", again)):
    assert (render.render(*other, 32) != last).any()


@pytest.mark.slow
def test_glyphs_are_records_like_any_other(data_dir):
  builder = tfds.builder("glyphs/size=16,count=130,seed=3", data_dir=data_dir)
  builder.download_and_prepare()
  info = builder.info
  assert info.full_name == "glyphs/size16_count130_seed3/1.1.0"
  assert info.features["label"].names == list(render.CHARACTERS)
  assert info.features["image"].shape == (16, 16, 1)
  assert not any(map(str.isdigit, render.CHARACTERS))
  # Validation comes on top: 5 %, but at least one image of every class.
  sizes = {name: split.num_examples for name, split in info.splits.items()}
  assert sizes == {"train": 130, "validation": 92}
  assert glyphs.num_validation(20_000) == 1_000
  for split in ("train", "validation"):
    images, labels = _arrays(builder, split)
    assert set(labels) == set(range(92))
    drawn = _drawn(split=split, count=len(images), size=16, seed=3)
    own = [render.label_of(i) for i in range(len(drawn))]
    assert _pairs(images, labels) == _pairs(drawn, own)


@pytest.mark.slow
def test_digits_are_those_of_sklearn(digits_by_format):
  from sklearn import datasets

  bunch, builder = datasets.load_digits(), digits_by_format["array_record"]
  read = []
  for split, size in (("train", 1297), ("test", 500)):
    images, labels = _arrays(builder, split)
    assert images.shape == (size, 8, 8, 1) and images.dtype == np.uint8
    assert (images.min(), images.max()) == (0, 255)
    # Sixteenths survive the scaling to bytes.
    read += _pairs(np.round(images[..., 0] * (16 / 255)), labels)
  assert sorted(read) == _pairs(bunch.images, bunch.target)
  assert builder.info.features["label"].names == list("0123456789")


def test_the_split_of_the_digits_never_changes():
  _, labels = digits.load()
  splits = digits.split_indices(labels)
  np.testing.assert_array_equal(np.bincount(labels[splits["test"]]), [50] * 10)
  assert sorted(splits["train"] + splits["test"]) == list(range(1797))
  checksum = hashlib.sha256(str(splits["test"]).encode()).hexdigest()
  assert checksum[:16] == "683eb7ab9e6a77d8"


def test_builders_never_ask_the_network(data_dir, monkeypatch):
  from tensorflow_datasets.core.utils import gcs_utils

  monkeypatch.setattr(gcs_utils, "exists", lambda path: pytest.fail(path))
  builder = tfds.builder("glyphs/size=8,count=1,seed=9", data_dir=data_dir)
  builder.download_and_prepare()
  assert builder.info.splits["train"].num_examples == 1
