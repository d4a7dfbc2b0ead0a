"""Tests of the embedded data sets: `glyphs` and `digits`."""

import hashlib
import os
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from vit_jax.data import builders
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


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("tfds")


@pytest.fixture(scope="module")
def glyphs_builder(data_dir):
  builder = tfds.builder("glyphs/size=16,count=130,seed=3", data_dir=data_dir)
  builder.download_and_prepare()
  return builder


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


def test_a_stopped_worker_is_reported(tmp_path, monkeypatch):
  broken = tmp_path / "broken.py"
  broken.write_text("raise SystemExit(3)")
  monkeypatch.setattr(render, "__file__", str(broken))
  with pytest.raises(RuntimeError, match=r"image 0 of 150 \(exit code 3\)"):
    _drawn(num_workers=1)


@pytest.mark.slow
def test_a_fresh_import_registers_the_builders_and_leaves_tensorflow_out():
  # TFDS reads TFDS_DATA_DIR when it is imported, hence the fresh process.
  code = (
    "import sys, vit_jax.data.builders, tensorflow_datasets as tfds;"
    "print(tfds.builder('glyphs/seed=7,size=8').data_dir);"
    "print([m for m in ('tensorflow', 'jax', 'flax') if m in sys.modules])"
  )
  output = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    check=True,
    env=os.environ | {"TFDS_DATA_DIR": "/nowhere"},
  ).stdout
  assert output.splitlines() == [
    "/nowhere/glyphs/size8_count20000_seed7/1.1.0",
    "[]",
  ]


def test_no_class_is_a_digit_in_any_form():
  for character in render.CHARACTERS:
    assert unicodedata.digit(character, None) is None, character
    assert unicodedata.numeric(character, None) is None, character
    normal = unicodedata.normalize("NFKC", character)
    assert not any(c.isdigit() for c in normal), character


def test_every_class_has_several_fonts_that_draw_it_differently():
  assert len(set(render.CHARACTERS)) == len(render.CHARACTERS) == 92
  for character in render.CHARACTERS:
    fonts = render.fonts_with(character)
    assert len(fonts) >= 3, character
    shapes = {render.shape(character, font).tobytes() for font in fonts}
    assert len(shapes) >= 3, character


def _stretched(character):
  """The shape in DejaVu Sans, stretched to fill a square."""
  image = Image.fromarray(render.shape(character, "DejaVuSans"))
  image = image.crop(image.getbbox()).resize((40, 40))
  return np.asarray(image, bool)


def test_no_class_looks_like_another_class_or_like_a_digit():
  classes = {c: _stretched(c) for c in render.CHARACTERS}
  others = {c: _stretched(c) for c in "0123456789"}
  for character, ink in classes.items():
    for other, other_ink in (classes | others).items():
      overlap = (ink & other_ink).sum() / (ink | other_ink).sum()
      # The letter O is an ellipse, and so is a zero of any hand.
      if character != other and {character, other} != {"O", "0"}:
        assert overlap < 0.9, (character, other, overlap)


def test_glyphs_fill_the_image_and_are_not_cut_off():
  images = _drawn(count=184, size=32)
  assert images.dtype == np.uint8 and images.shape == (184, 32, 32)
  # Ink is bright and paper black, also at the border.
  assert np.median(images) < 20
  assert (images.max((1, 2)) > 60).all()
  assert (images.max((1, 2)) > 150).mean() > 0.8
  border = np.concatenate([images[:, 0], images[:, -1]], axis=1)
  assert border.mean() < images.mean()
  ink = images > 64
  extent = np.maximum(ink.any(1).sum(1), ink.any(2).sum(1))
  assert np.median(extent) > 20


@pytest.mark.slow
def test_glyphs_are_records_like_any_other(glyphs_builder):
  info = glyphs_builder.info
  assert info.full_name == "glyphs/size16_count130_seed3/1.1.0"
  assert info.features["label"].names == list(render.CHARACTERS)
  assert info.features["image"].shape == (16, 16, 1)
  # Validation comes on top: 5 %, but at least one image of every class.
  sizes = {name: split.num_examples for name, split in info.splits.items()}
  assert sizes == {"train": 130, "validation": 92}
  assert glyphs.num_validation(20_000) == 1_000

  for split in ("train", "validation"):
    images, labels = _arrays(glyphs_builder, split)
    assert images.dtype == np.uint8 and images.min() == 0
    assert set(labels) == set(range(92))
    drawn = _drawn(split=split, count=len(images), size=16, seed=3)
    expected = [
      (image.tobytes(), render.label_of(i)) for i, image in enumerate(drawn)
    ]
    read = [
      (i.tobytes(), label) for i, label in zip(images, labels, strict=True)
    ]
    assert sorted(read) == sorted(expected)


@pytest.mark.slow
def test_glyphs_are_found_again_by_options_by_folder_and_by_class(
  glyphs_builder, data_dir
):
  for builder in (
    tfds.builder("glyphs/seed=3,count=130,size=16", data_dir=data_dir),
    tfds.builder("glyphs/size16_count130_seed3", data_dir=data_dir),
    tfds.builder_from_directory(glyphs_builder.data_dir),
    builders.Glyphs(config="size16_count130_seed3", data_dir=data_dir),
  ):
    assert builder.data_dir == glyphs_builder.data_dir
    assert builder.info.splits["train"].num_examples == 130


@pytest.mark.parametrize(
  "options, word",
  [
    ({"size": 7}, "size: got 7"),
    ({"config": "size8"}, "'size8'"),
    ({"config": "size8_count1_seed0", "seed": 1}, "'seed': 1"),
  ],
)
def test_wrong_options_are_explained(options, word, data_dir):
  with pytest.raises(ValueError, match=word):
    builders.Glyphs(data_dir=data_dir, **options)


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
    levels = np.round(images[..., 0] * (16 / 255)).astype(np.uint8)
    read += [
      (i.tobytes(), label) for i, label in zip(levels, labels, strict=True)
    ]
  expected = [
    (image.astype(np.uint8).tobytes(), label)
    for image, label in zip(bunch.images, bunch.target, strict=True)
  ]
  assert sorted(read) == sorted(expected)
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

  def fail(path):
    raise AssertionError(f"asked for {path}")

  monkeypatch.setattr(gcs_utils, "exists", fail)
  builder = tfds.builder("glyphs/size=8,count=1,seed=9", data_dir=data_dir)
  builder.download_and_prepare()
  assert builder.info.splits["train"].num_examples == 1


def test_a_missing_data_set_is_no_warning(tmp_path, monkeypatch):
  from absl import logging

  warnings = []
  monkeypatch.setattr(logging, "warning", lambda *args: warnings.append(args))
  builder = tfds.builder("digits", data_dir=tmp_path)
  assert not builder.is_prepared()
  assert not warnings
