"""The benchmark of the input measures what it claims."""

import importlib.util
import io
import math
import pathlib
import sys

import numpy as np
import plans
import pytest
import study
from PIL import Image

from vit_jax.data.randaugment import DISTORTIONS
from vit_jax.data.tf_cpu import tf
from vit_jax.families.vit import ViTConfig

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


@pytest.mark.parametrize("script", [plans, study])
def test_a_word_that_is_no_option_starts_nothing(script, monkeypatch):
  monkeypatch.setattr(plans, "page", lambda: pytest.fail("written"))
  monkeypatch.setattr(study, "study", lambda *args: pytest.fail("started"))
  for word, code in (("--help", 0), ("--hlep", 2)):
    with pytest.raises(SystemExit) as error:
      script.main([word])
    assert error.value.code == code


def test_plans_of_other_versions_stay(tmp_path, monkeypatch):
  monkeypatch.setattr(plans, "PAGE", tmp_path / "plans.md")
  monkeypatch.setattr(plans, "versions", lambda: "jax 0")
  with pytest.raises(SystemExit, match="has no plan with jax 0; .* as it was"):
    plans.main(["--list"])
  assert not plans.PAGE.exists()


@pytest.mark.slow
def test_the_peer_makes_images_of_the_same_size(benchmark):
  images = benchmark.source(32)
  for name in benchmark.PEERS:
    batch = next(benchmark.batches(images, name))
    assert batch.shape == (benchmark.BATCH, 224, 224, 3)
    assert batch.dtype == np.float32 and -1 <= batch.min() < batch.max() <= 1


STORED = np.load(PATH.parents[1] / "tests" / "data" / "randaugment.npz")


@pytest.mark.parametrize("name", sorted(DISTORTIONS.keys() - {"cutout"}))
def test_the_peers_operations_give_the_stored_pixels(benchmark, name):
  """Else their time would not be that of the published code."""
  differing = 0
  for key in STORED.files:
    image, *parts = key.split("/")
    if parts[:1] != [name]:
      continue
    magnitude, sign, *_ = [*parts[1:], "", ""]
    out = benchmark.input_peer.OPS[name](
      tf.constant(STORED[image]),
      int(magnitude or 10),
      lambda value, sign=sign: tf.constant(value * float(sign), tf.float32),
    )
    differing += (out.numpy() != STORED[key]).sum()
  # The rounding of oneDNN, see tests/data/test_randaugment.py.
  assert differing == (373 if name == "sharpness" else 0)


@pytest.mark.slow
def test_variants_make_the_same_images(benchmark):
  images = benchmark.source(32)
  batches = [next(benchmark.batches(images, v)) for v in benchmark.VARIANTS]
  apart, fused, *alike = batches[:4]
  decoded, no_flip, rough, distorted = batches[4:]
  assert not decoded["image"].any()
  for batch, same in zip(alike, (apart, fused), strict=True):
    np.testing.assert_array_equal(batch["image"], same["image"])
  for batch in (fused, no_flip, rough, distorted):
    np.testing.assert_array_equal(batch["index"], apart["index"])
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


def test_the_products_of_a_step_are_those_of_its_blocks():
  from cpu_products import BLOCKS, HEAD, HEADS, PRODUCTS, B, N

  flops = 0
  for product, *factors, times in PRODUCTS:
    letters = product.split("->")[0].replace(",", "")
    sizes = dict(zip(letters, (n for f in factors for n in f), strict=True))
    flops += 2 * times * math.prod(sizes.values())
  deep, shallow = (
    ViTConfig(variant="S/16", depth=d).train_flops((224, 224), 1000)
    for d in (BLOCKS, BLOCKS - 1)
  )
  # The backward pass computes the scores again.
  assert flops == B * (deep - shallow) + 2 * B * HEADS * N * N * HEAD
