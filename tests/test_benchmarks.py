"""The benchmark of the input measures what it claims."""

import importlib.util
import io
import pathlib
import sys

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("sklearn")
PATH = pathlib.Path(__file__).parents[1] / "benchmarks" / "input.py"


@pytest.fixture(scope="module")
def benchmark():
  spec = importlib.util.spec_from_file_location("input_benchmark", PATH)
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # where dataclasses look
  spec.loader.exec_module(module)
  return module


def test_photographs_are_like_imagenets(benchmark):
  jpegs = benchmark.photographs(8)
  assert len(set(jpegs)) == 8
  assert {Image.open(io.BytesIO(j)).size for j in jpegs} == {(500, 375)}
  assert 50e3 < np.mean([len(j) for j in jpegs]) < 70e3


def test_the_peer_makes_images_of_the_same_size(benchmark):
  images = benchmark.source(32)
  for name in benchmark.PEERS:
    batch = next(benchmark.batches(images, name))
    assert batch.shape == (benchmark.BATCH, 224, 224, 3)
    assert batch.dtype == np.float32 and -1 <= batch.min() < batch.max() <= 1


def test_variants_make_the_same_images(benchmark):
  images = benchmark.source(32)
  old_apart, old_fused, apart, fused, *alike, no_flip, rough, distorted = (
    next(benchmark.batches(images, name)) for name in benchmark.VARIANTS
  )
  # The header unseen, of both; and resizing without vector code.
  for batch, same in zip(alike, (apart, fused, fused), strict=True):
    np.testing.assert_array_equal(batch["image"], same["image"])
  for batch in (apart, fused, no_flip, rough, distorted):
    np.testing.assert_array_equal(batch["index"], old_apart["index"])
  # Keys hold the position of an operation, so these two draw differently.
  np.testing.assert_array_equal(apart["image"], old_apart["image"])
  np.testing.assert_array_equal(fused["image"], old_fused["image"])
  difference = np.abs(rough["image"].astype(int) - fused["image"])
  assert 0 < difference.mean() < 3  # along the edges of colours
  is_flipped = (no_flip["image"] != fused["image"]).any((1, 2, 3))
  np.testing.assert_array_equal(
    np.where(
      is_flipped[:, None, None, None],
      fused["image"][:, :, ::-1],
      fused["image"],
    ),
    no_flip["image"],
  )
