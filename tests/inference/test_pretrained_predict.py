"""Predictions of a loaded model: what counts as an image, and errors."""

import pathlib

import jax
import numpy as np
import pytest
from PIL import Image
from test_images import PHOTOS, of_evaluators

import vit_jax
from vit_jax.checkpointing import checkpointer
from vit_jax.data import pixels
from vit_jax.inference import pretrained

DATA = pathlib.Path(__file__).parents[1] / "data"
TOKEN = DATA / "vit_linen_names.weights.npz"  # 32 px, 11 classes


@pytest.fixture(scope="module")
def vit():
  return vit_jax.load(TOKEN)


@pytest.fixture(scope="module")
def china(tmp_path_factory):
  """A photo as JPEG and as PNG, and its pixels."""
  source = PHOTOS / "china.jpg"
  folder = tmp_path_factory.mktemp("china")
  jpeg, png = folder / "china.jpg", folder / "china.png"
  jpeg.write_bytes(source.read_bytes())
  with Image.open(jpeg) as image:
    pixels = np.asarray(image)
    image.save(png)
  return jpeg, png, pixels


def test_whatever_holds_an_image_gives_the_same(vit, china):
  _, png, pixels = china
  with Image.open(png) as image:
    result = vit.predict([png, str(png), image, pixels], top=11)
  first, *_ = result
  assert result == [first] * 4
  # One image a call: sums in another order than of four.
  (alone,) = vit.predict(png, top=11)
  data = bytearray(png.read_bytes())
  for x in (
    *(str(png), pixels, pixels[None], f"{png.parent}/*.png"),
    *(data, memoryview(data)),
  ):
    assert vit.predict(x, top=11) == [alone]
  names = [p.name for p in first]
  assert sorted(names, key=int) == [str(i) for i in range(11)]
  probabilities = [p.probability for p in first]
  assert probabilities == sorted(probabilities, reverse=True)
  assert sum(probabilities) == pytest.approx(1, abs=1e-6)

  image = of_evaluators(png.read_bytes(), vit.ops)
  logits, _ = vit(image[None].astype(np.float32) / 127.5 - 1)
  expected = np.asarray(jax.nn.softmax(logits))[0]
  np.testing.assert_allclose(
    probabilities, expected[[int(n) for n in names]], rtol=1e-5
  )
  (five,) = vit.predict([pixels])
  assert [p.name for p in five] == names[:5]


def test_the_order_is_that_of_the_images(vit):
  images = [np.full((9, 7, 3), v, np.uint8) for v in range(0, 255, 12)]
  result = vit.predict(images)
  assert len(result) == 22 > pretrained.BATCH
  assert result[::-1] == vit.predict(images[::-1])
  assert result[:3] != result[3:6]
  assert vit.predict([]) == []


@pytest.mark.slow
def test_a_model_that_was_trained_with_a_sigmoid(vit, tmp_path, china):
  """As `load` is told, or as a run says."""
  sigmoid = vit_jax.load(TOKEN, loss="sigmoid")
  assert (vit.loss, sigmoid.loss) == ("softmax", "sigmoid")
  images = [china[2], np.zeros((8, 8, 3), np.uint8)]
  rows = [pixels.apply(image, vit.ops) for image in images]
  logits, _ = vit(np.stack(rows).astype(np.float32) / 127.5 - 1)
  expected = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
  result = sigmoid.predict(images, top=11)
  for some, row in zip(result, expected, strict=True):
    for p in some:
      assert p.probability == pytest.approx(row[int(p.name)], rel=1e-5)
    assert some[0].probability == max(p.probability for p in some)
  run = vit.metadata()
  del run["loss"]
  objective = {"kind": "classification", "loss": "sigmoid"}
  run["config"] = {"objective": objective, "model": run["model"]}
  checkpointer.write_params(str(tmp_path / "step"), vit.params, run)
  assert vit_jax.load(tmp_path / "step").loss == "sigmoid"
  assert vit_jax.load(tmp_path / "step", loss="softmax").loss == "softmax"


def test_what_cannot_be_predicted(vit, tmp_path, china):
  """All images at once, in whatever batch; ten are named."""
  broken, missing = tmp_path / "broken.jpg", tmp_path / "none.jpg"
  broken.write_bytes(b"no image")
  for method in (vit.predict, vit.features, vit.attention, vit.attention_map):
    with pytest.raises(ValueError, match=f"^{broken}: got 8 bytes that are no"):
      method([china[0], broken])
    with pytest.raises(FileNotFoundError, match=f"^{missing}: got a path"):
      method([china[0], missing])
  images = [china[0], broken, np.zeros((9, 9), "f"), china[0], missing]
  with pytest.raises(ValueError) as e:
    vit.predict(images + [broken] * pretrained.BATCH)
  first, *lines = str(e.value).split("\n")
  assert first.startswith(f"{pretrained.BATCH + 3} of ") and len(lines) == 11
  for line, name in zip(lines, (broken, "image 2", missing), strict=False):
    assert f"{name}: " in line
  with pytest.raises(FileNotFoundError, match="matches no file"):
    vit.predict(f"{tmp_path}/*.gif")
  with pytest.raises(ValueError, match="top: got 0"):
    vit.predict(china[2], top=0)


@pytest.mark.slow
def test_attention_of_floats_and_of_whatever_predict_takes(vit, tmp_path):
  pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
  floats = pixels / np.float32(127.5) - 1
  weights = vit.attention(floats)
  depth, heads = vit.config.size.depth, vit.config.size.num_heads
  tokens = vit.config.num_tokens((32, 32))
  assert weights.shape == (depth, 2, heads, tokens, tokens)
  np.testing.assert_array_equal(vit.attention(pixels), weights)
  maps = vit.attention_map(floats)
  assert maps.shape == (2, *vit.config.grid((32, 32)))
  np.testing.assert_allclose(maps.sum((1, 2)), 1, atol=1e-6)
  files = []
  for i, image in enumerate(pixels):
    files.append(tmp_path / f"{i}.png")
    Image.fromarray(image).save(files[-1])
  np.testing.assert_array_equal(vit.attention_map(files), maps)
  with pytest.raises(ValueError, match=r"images.shape: got \(2, 16, 16, 3\)"):
    vit.attention(floats[:, ::2, ::2])
  for method in (vit.attention, vit.attention_map):
    with pytest.raises(ValueError, match="no images"):
      method(floats[:0])
