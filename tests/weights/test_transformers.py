"""transformers itself: its processors, sizes, names and our model card."""

import json
import re

import foreign
import numpy as np
import pytest
import torch_libraries
from PIL import Image
from series_parts import CLIP, DINOV2, DISTILLED
from weight_files import hf_folder

import vit_jax
from vit_jax.config import model_config
from vit_jax.data import pixels
from vit_jax.tools.exporting import model_card
from vit_jax.zoo.files import hf_preprocessing

transformers = torch_libraries.Later("transformers")
SIZE = (24, 32)
NIGHTLY = pytest.mark.nightly
PLAIN = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


def _image(height, width, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (height, width, 3), np.uint8)


# Processors.


def assert_same_pixels(folder, about, ops, mean, std):
  """Compares a processor with operations, to a level of 255."""
  (folder / hf_preprocessing.FILE).write_text(json.dumps(about))
  processor = transformers.AutoImageProcessor.from_pretrained(
    folder, local_files_only=True
  )
  values = _image(300, 430)
  got = processor(Image.fromarray(values), return_tensors="np")
  result = (pixels.apply(values, ops) / 255 - mean) / std
  off = got["pixel_values"][0] - result.transpose(2, 0, 1)
  off = np.abs(off) * np.min(std) * 255
  # torchvision, where it is installed, has weights of 16 bits for bytes.
  assert off.max() < 1.001 and off.mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
  "ops",
  [
    "resize_torch((24, 32))",
    "resize_small_torch(36, 'bilinear')|central_crop((24, 32))",
  ],
)
def test_the_preprocessor_is_ours(tmp_path, ops):
  ops = f"decode(dct='accurate')|{ops}"
  about, read = hf_preprocessing.write(ops, SIZE)
  assert read == ops
  assert_same_pixels(tmp_path, about, ops, 0.5, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, about",
  [
    ("ViT", {}),
    ("DeiT", {}),
    ("CLIP", {}),
    ("Bit", {}),
    (  # DINOv2's
      "Bit",
      {"size": {"shortest_edge": 256}, "image_mean": [0.485, 0.456, 0.406]},
    ),
    ("Siglip", {}),
    ("DINOv3ViT", {}),
    ("Beit", {}),
    ("DeiT", {"size": 230, "do_normalize": False}),
  ],
)
def test_defaults_are_those_of_the_processor(tmp_path, name, about):
  if name == "DINOv3ViT" and not torch_libraries.torchvision_works():
    pytest.skip("its processor needs torchvision")
  about = {"image_processor_type": f"{name}ImageProcessor", **about}
  complete = hf_preprocessing.complete(about)
  ops = hf_preprocessing.ops_of(complete, (224, 224))
  mean, std = (
    np.array(complete.get(k, [0.5] * 3)) for k in ("image_mean", "image_std")
  )
  if not complete.get("do_normalize", True):
    mean, std = 0.0, 1.0
  assert_same_pixels(tmp_path, about, ops, mean, std)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, about",
  [
    ("CLIP", {"size": {"shortest_edge": 36}, "resample": 3}),
    ("Bit", {"size": {"shortest_edge": 37}, "resample": 2}),
    ("DeiT", {"size": 41, "resample": 3}),
  ],
)
def test_crops_of_200_sizes_are_those_of_the_processor(name, about):
  """Half a pixel of the offset is rounded down; timm's is rounded to even."""
  rng = np.random.default_rng(0)
  about = about | {"do_center_crop": True, "crop_size": 32}
  theirs = getattr(transformers, f"{name}ImageProcessorPil")(**about)
  ops = hf_preprocessing.ops_of(about, (32, 32))
  for height, width in rng.integers(20, 200, (200, 2)):
    values = rng.integers(0, 256, (height, width, 3), np.uint8)
    (got,) = theirs(Image.fromarray(values), **PLAIN)["pixel_values"]
    result = pixels.apply(values, ops).transpose(2, 0, 1)
    np.testing.assert_array_equal(result, got, f"{height} x {width}")


# Class -> our model, and the expression of its output.
CARDS = {
  "ViTForImageClassification": dict(gelu="erf", ln_eps=1e-12),
  "ViTModel": dict(pre_logits=True),
  "IJepaModel": dict(pool="gap", ln_eps=1e-12),
  "SiglipVisionModel": dict(pool="map"),
  "Dinov2ForImageClassification": DINOV2 | dict(pool="token_gap"),
  "DeiTForImageClassificationWithTeacher": DISTILLED,
  "CLIPVisionModelWithProjection": CLIP | dict(projection=16),
}
SLOW = ("ViTModel", "Dinov2ForImageClassification")


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(k, marks=pytest.mark.slow if k in SLOW else NIGHTLY)
    for k in CARDS
  ],
)
def test_the_card_names_class_and_output(tmp_path, name):
  """Its code for transformers computes what our model computes."""
  import torch

  sizes = dict(variant="B/8", width=48, depth=2, mlp_dim=192, num_heads=4)
  hf_folder(
    tmp_path,
    (32, 32),
    model=model_config(**sizes | CARDS[name]),
    num_classes=3 * ("ForImageClass" in name),
  )
  vit = vit_jax.load(tmp_path, mean="half", verbose=False)
  code = model_card.text(vit, str(tmp_path)).split("```python\n")[1]
  assert name in code
  lines = re.findall(r"^(?:model|logits|features) = .*", code, re.MULTILINE)
  images = foreign.image((32, 32))
  pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
  known = {name: getattr(transformers, name)}
  known["inputs"] = {"pixel_values": pixels}
  with torch.no_grad():
    exec("\n".join(lines), known)
  got = known["logits" if "logits" in known else "features"]
  assert foreign.error(vit(images)[0], got) < 1e-4
