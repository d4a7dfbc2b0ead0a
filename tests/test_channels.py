"""Grey images and images of several bands: weights, pixels, a whole run."""

import jax
import numpy as np
import pytest
import shared_runs
import tiny
from PIL import Image

import vit_jax
from vit_jax import weights
from vit_jax.config import checks
from vit_jax.data import ops as ops_lib
from vit_jax.data import pixels
from vit_jax.data.preprocessing import for_channels
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
  assert any(f"{channels} equal ones" in x for x in folded.report.notes)


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


def test_channels_that_do_not_fit():
  with pytest.raises(ValueError, match="channels=3"):
    for_channels("decode|resize(8)|grey", 3)
  score = {"kind": "classification", "ops": "decode|resize(16)"}
  for changes, option in (
    (dict(model__channels=4, evals={"a": score}), "config.evals.a.ops"),
    (dict(model__channels=0), "config.model.channels"),
    (
      dict(model__channels=1, objective__kind="masked_patch"),
      "config.model.channels",
    ),
  ):
    errors = checks.size_errors(tiny.config(**changes))
    assert any(option in error for error in errors)


class Bands:
  """Batches of images with so many bands."""

  num_examples, num_classes, class_names = 16, 3, None

  def __init__(self, channels):
    self._shape = (8, 32, 32, channels)

  def batches(self, start_step, process_index, process_count):
    rng = np.random.default_rng(start_step)
    while True:
      yield {
        "image": rng.integers(0, 256, self._shape, np.uint8),
        "label": rng.integers(0, 3, 8, np.int32),
      }


@pytest.mark.nightly
@pytest.mark.parametrize("is_folder, channels", [(True, 1), (False, 5)])
def test_a_run_from_weights_of_three_channels(is_folder, channels, tmp_path):
  """By the built-in pipeline, or by a loader; to the answers of `predict`."""
  config = tiny.config(
    init=TOKEN,
    model__variant="B/8",
    model__width=48,
    model__depth=3,
    model__mlp_dim=96,
    model__channels=channels,
    data__dataset=f"folder:{tmp_path}/images",
    data__split="train",
    data__ops="decode|resize(32)",
    data__batch_size=8,
    total_steps=2,
    log_steps=1,
  )
  if is_folder:
    colours = {"blue": "blue", "red": "red"}
    shared_runs.folder(tmp_path / "images", colours)
  data = None if is_folder else Bands(channels)
  workdir = tmp_path / "run"
  state = train_and_evaluate(config, str(workdir), data)
  assert state.params["embedding"]["kernel"].shape == (8, 8, channels, 48)
  vit = vit_jax.load(workdir, verbose=False)
  assert vit.image_shape == (32, 32, channels)
  pixels = np.zeros((32, 32, 3), np.uint8)
  if is_folder:
    (answer,) = vit.predict(pixels)
    assert {c.name for c in answer} == {*colours}
  else:
    with pytest.raises(ValueError, match="config.model.channels"):
      vit.predict(pixels)
    # The built-in pipeline has no such images.
    with pytest.raises(ValueError):
      train_and_evaluate(config, str(tmp_path / "other"))
