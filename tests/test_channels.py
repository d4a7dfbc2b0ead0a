"""Grey images and images of several bands: weights, pixels, a whole run."""

import json

import jax
import numpy as np
import pytest
import tiny
from PIL import Image

import vit_jax
from vit_jax import weights
from vit_jax.config import ConfigError, checks
from vit_jax.data import ops as ops_lib
from vit_jax.data import pixels
from vit_jax.data.preprocessing import for_channels, image_size
from vit_jax.data.tf_cpu import tf
from vit_jax.train import train_and_evaluate

TOKEN = "tests/data/vit_token.weights.npz"


@pytest.mark.parametrize(
  "channels", [pytest.param(1, marks=pytest.mark.slow), 5]
)
def test_equal_channels_have_the_response_of_grey_in_colours(channels):
  colours = vit_jax.load(TOKEN, verbose=False)
  folded = vit_jax.load(TOKEN, verbose=False, channels=channels)
  grey = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 1)).astype("f")
  expected, _ = colours(np.repeat(grey, 3, -1))
  got, _ = folded(np.repeat(grey, channels, -1))
  # Logits reach 4; sums of 192 products in another order, through 3 blocks.
  np.testing.assert_allclose(got, expected, atol=1e-5)
  _, note = folded.report.notes
  assert f"3 channels became {channels} equal ones" in note


def test_a_file_of_one_channel_is_read_as_it_is(tmp_path):
  folded = vit_jax.load(TOKEN, verbose=False, channels=1)
  path = tmp_path / "grey.npz"
  arrays = weights.read(TOKEN).params
  kernel = np.asarray(folded.params["embedding"]["kernel"])
  np.savez(path, **{**arrays, "embedding/kernel": kernel})
  vit = vit_jax.load(path, verbose=False, loss="softmax")
  assert vit.config.channels == 1 and not vit.report.notes
  assert vit.ops.endswith("|grey")
  image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
  assert vit.predict(image) == folded.predict(image)
  # And with three channels again.
  back = vit_jax.load(path, verbose=False, channels=3)
  np.testing.assert_allclose(
    np.asarray(back.params["embedding"]["kernel"]).sum(2),
    kernel[:, :, 0],
    rtol=1e-6,
  )
  with pytest.raises(ValueError, match="config.model.channels"):
    vit_jax.load("tests/data/hybrid_r.weights.npz", channels=1)


@pytest.mark.slow
def test_each_channel_may_have_its_own_normalisation(tmp_path):
  mean, std = (0.5, 0.4, 0.3, 0.2), (0.2, 0.2, 0.2, 0.3)
  rng = np.random.default_rng(0)
  arrays = weights.read(TOKEN).params
  kernel = np.asarray(arrays["embedding/kernel"])[:, :, [0] * len(mean)]
  kernel = kernel * rng.uniform(0.5, 1.5, (len(mean), 1)).astype("f")
  np.savez(tmp_path / "x.npz", **{**arrays, "embedding/kernel": kernel})
  plain = vit_jax.load(tmp_path / "x.npz", verbose=False)
  images = rng.uniform(0, 1, (1, 32, 32, len(mean))).astype("f")
  trained_on = (images - np.float32(mean)) / np.float32(std)
  apply = jax.jit(plain.model.apply)
  expected, _ = apply({"params": plain.params}, trained_on)
  vit = vit_jax.load(tmp_path / "x.npz", verbose=False, mean=mean, std=std)
  # Logits reach 4; 64 products for each channel, with scaled kernels.
  np.testing.assert_allclose(vit(2 * images - 1)[0], expected, atol=2e-5)


def test_grey_is_pillow_s_in_both_pixel_paths():
  values = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
  expected = np.asarray(Image.fromarray(values).convert("L"))[..., None]
  np.testing.assert_array_equal(pixels.apply(values, "decode|grey"), expected)
  got = ops_lib.apply(tf.constant(values), "decode|grey", tf.constant([0, 0]))
  np.testing.assert_array_equal(got, expected)


def test_operations_by_the_model_s_channels():
  assert for_channels("decode|resize(8)", 3) == "decode|resize(8)"
  assert for_channels("decode|resize(8)|grey", 1) == "decode|resize(8)|grey"
  for channels in (3, 4):
    with pytest.raises(ValueError, match=f"channels={channels}"):
      for_channels("decode|resize(8)|grey", channels)
  with pytest.raises(ValueError, match="grey"):
    image_size("decode|grey|resize(8)")


def test_channels_that_do_not_fit():
  score = {"kind": "classification", "ops": "decode|resize(16)"}
  errors = checks.size_errors(
    tiny.config(model__channels=4, evals={"a": score})
  )
  assert any("config.evals.a.ops" in e and "channels=4" in e for e in errors)
  (error,) = checks.size_errors(tiny.config(model__channels=0))
  assert "config.model.channels" in error
  masked = tiny.config(model__channels=1, objective__kind="masked_patch")
  (error,) = checks.size_errors(masked)
  assert "config.model.channels" in error


def _config(channels, **changes):
  """A fine-tuning of `TOKEN`, two steps of eight images."""
  return tiny.config(
    init=TOKEN,
    model__variant="B/8",
    model__width=48,
    model__depth=3,
    model__mlp_dim=96,
    model__channels=channels,
    data__batch_size=8,
    total_steps=2,
    log_steps=1,
    **changes,
  )


@pytest.mark.nightly
def test_a_run_on_grey_images(tmp_path):
  """From weights of three channels, by the built-in pipeline, to predict."""
  folder = tmp_path / "images"
  rng = np.random.default_rng(0)
  for split, count in (("train", 8), ("val", 2)):
    for name in ("a", "b"):
      (folder / split / name).mkdir(parents=True)
      for i in range(count):
        image = rng.integers(0, 256, (20, 20), np.uint8)
        Image.fromarray(image).save(folder / split / name / f"{i}.png")
  score = {"kind": "classification", "ops": "decode|resize(32)", "split": "val"}
  config = _config(
    1,
    data__dataset=f"folder:{folder}",
    data__split="train",
    data__ops="decode|resize(32)|flip_lr",
    evals={"val": score},
  )
  state = train_and_evaluate(config, str(tmp_path / "run"))
  assert state.params["embedding"]["kernel"].shape == (8, 8, 1, 48)
  rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  assert any("val/top1" in json.loads(row) for row in rows)
  vit = vit_jax.load(tmp_path / "run", verbose=False)
  assert vit.image_shape == (32, 32, 1) and vit.ops.endswith("|grey")
  (answer,) = vit.predict(folder / "val" / "a" / "0.png")
  assert {c.name for c in answer} == {"a", "b"}


class Bands:
  """Batches of images with five bands."""

  num_examples, num_classes, class_names = 16, 3, None

  def batches(self, start_step, process_index, process_count):
    rng = np.random.default_rng(start_step)
    while True:
      yield {
        "image": rng.integers(0, 256, (8, 32, 32, 5), np.uint8),
        "label": rng.integers(0, 3, 8, np.int32),
      }


@pytest.mark.nightly
def test_a_run_on_several_bands(tmp_path):
  config = _config(5, data__ops="decode|resize(32)")
  state = train_and_evaluate(config, str(tmp_path / "run"), Bands())
  assert state.params["embedding"]["kernel"].shape == (8, 8, 5, 48)
  vit = vit_jax.load(tmp_path / "run", verbose=False)
  logits, _ = vit(np.zeros((1, 32, 32, 5), np.float32))
  assert logits.shape == (1, 3)
  with pytest.raises(ValueError, match="config.model.channels"):
    vit.predict(np.zeros((32, 32, 3), np.uint8))
  # The built-in pipeline has no such images.
  with pytest.raises((ConfigError, ValueError)):
    train_and_evaluate(config, str(tmp_path / "other"))
