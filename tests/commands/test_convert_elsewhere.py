"""What is written, read by the other libraries.

Differences are shares of the largest logit: some 20 to 80 layers in float32,
each in another order of sums.
"""

import jax
import numpy as np
import pytest
import torch_libraries
from converting import AS_TIMM, MODELS, SIZE, foreign, make

from vit_jax.tools.exporting import convert


@pytest.fixture(scope="module")
def timm():
  return torch_libraries.load("timm")


def _check_logits(vit, theirs):
  images = foreign.image(vit.image_size)
  with jax.default_matmul_precision("highest"):
    ours, _ = vit(images)
  logits = foreign.torch_logits(theirs, images, "float32")
  error = foreign.error(ours, getattr(logits, "logits", logits))
  print(f"{vit.config.variant}: {error:.1e}")
  assert error < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize(
  "name, fields",
  [
    ("vit_tiny_patch16_224", dict(variant="Ti/16", gelu="erf")),
    ("vit_base_r50_s16_224", dict(variant="R50+B/16", gelu="erf", **AS_TIMM)),
    ("resnetv2_50x1_bit", dict(name="bit", variant="R50x1", **AS_TIMM)),
  ],
)
def test_timm_s_own_loader_of_google_s_files(tmp_path, timm, name, fields):
  vit = make(1000, (224, 224), names=None, **fields)
  path = str(tmp_path / "x.npz")
  convert.convert(vit, path, "npz")
  theirs = timm.create_model(name, num_classes=1000)
  theirs.load_pretrained(path)
  _check_logits(vit, theirs)


@pytest.mark.nightly
def test_timm_takes_the_call_in_the_note(tmp_path, timm):
  vit = make(variant="Ti/16", image_size=(64, 96))
  note, *_ = convert.convert(vit, str(tmp_path / "x.safetensors"), "timm")
  theirs = eval(note, {"timm": timm})
  _check_logits(vit, theirs)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["token", "torch_s", "no_row", "none"])
def test_hugging_face_takes_the_call_in_the_note(tmp_path, monkeypatch, name):
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  transformers = torch_libraries.load("transformers")
  vit, path = make(**MODELS[name]), str(tmp_path / "vit")
  call, *_ = convert.convert(vit, path, "hf")
  theirs = eval(call, {"transformers": transformers})
  _check_logits(vit, theirs)
  assert theirs.config.id2label == dict(enumerate("abcde"))
  pixels = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8)
  for kind in ("AutoImageProcessor", "ViTImageProcessor"):
    processor = getattr(transformers, kind).from_pretrained(path)
    got = processor(pixels, return_tensors="np")["pixel_values"][0]
    expected = (pixels / 127.5 - 1).transpose(2, 0, 1)
    np.testing.assert_allclose(got, expected, atol=1e-6)
