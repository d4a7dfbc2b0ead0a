"""transformers itself: its processors, sizes, names and our model card."""

import json
import re

import foreign
import numpy as np
import pytest
import test_round_trip
import torch_libraries
import weights_cases_hf
from PIL import Image
from weight_files import hf_folder

import vit_jax
from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.data import pixels
from vit_jax.tools.exporting import model_card
from vit_jax.weights.weights_file import LazyArray
from vit_jax.zoo.files import hf, hf_preprocessing

transformers = torch_libraries.Later("transformers")
SIZE = (24, 32)
NIGHTLY = pytest.mark.nightly
PLAIN = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


def _image(height, width, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (height, width, 3), np.uint8)


# Processors.


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
  (tmp_path / hf_preprocessing.FILE).write_text(json.dumps(about))
  processor = transformers.AutoImageProcessor.from_pretrained(
    tmp_path, local_files_only=True
  )
  values = _image(60, 90)
  got = processor(Image.fromarray(values), return_tensors="np")
  (got,) = got["pixel_values"]
  off = np.abs((got + 1) * 127.5 - pixels.apply(values, ops).transpose(2, 0, 1))
  # torchvision, where it is installed, has weights of 16 bits for bytes.
  assert off.max() < 1.001 and off.mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, about",
  [
    ("ViT", {}),
    ("DeiT", {}),
    ("CLIP", {}),
    ("Bit", {}),
    ("Bit", {"size": 256, "resample": 2}),
    (  # DINOv2's
      "Bit",
      {"size": {"shortest_edge": 256}, "image_mean": [0.485, 0.456, 0.406]},
    ),
    ("Siglip", {}),
    ("Siglip", {"size": {"height": 224, "width": 224}, "resample": 2}),
    ("DINOv3ViT", {}),
    ("DINOv3ViT", {"size": {"height": 224, "width": 224}, "resample": 3}),
    ("Beit", {}),
    ("DeiT", {"size": 230, "do_normalize": False}),
  ],
)
def test_defaults_are_those_of_the_processor(tmp_path, name, about):
  if name == "DINOv3ViT" and not torch_libraries.torchvision_works():
    pytest.skip("its processor needs torchvision")
  about = {"image_processor_type": f"{name}ImageProcessor", **about}
  (tmp_path / hf_preprocessing.FILE).write_text(json.dumps(about))
  processor = transformers.AutoImageProcessor.from_pretrained(
    tmp_path, local_files_only=True
  )
  about = hf_preprocessing.complete(about)
  ops = hf_preprocessing.ops_of(about, (224, 224))
  values = _image(300, 430)
  got = processor(Image.fromarray(values), return_tensors="np")
  mean, std = (
    np.array(about.get(key, [0.5] * 3)) for key in ("image_mean", "image_std")
  )
  if not about.get("do_normalize", True):
    mean, std = 0.0, 1.0
  result = (pixels.apply(values, ops) / 255 - mean) / std
  off = got["pixel_values"][0] - result.transpose(2, 0, 1)
  off = np.abs(off) * np.min(std) * 255
  # torchvision, where it is installed, has weights of 16 bits for bytes.
  assert off.max() < 1.001 and off.mean() < 0.01


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
  about |= {"do_center_crop": True, "crop_size": 32}
  theirs = getattr(transformers, f"{name}ImageProcessorPil")(**about)
  ops = hf_preprocessing.ops_of(about, (32, 32))
  for height, width in rng.integers(20, 200, (200, 2)):
    values = rng.integers(0, 256, (height, width, 3), np.uint8)
    (got,) = theirs(Image.fromarray(values), **PLAIN)["pixel_values"]
    result = pixels.apply(values, ops).transpose(2, 0, 1)
    np.testing.assert_array_equal(result, got, f"{height} x {width}")


# Names and sizes.


@pytest.mark.nightly
def test_names_in_memory_are_read(tmp_path):

  models = [m for ms in weights_cases_hf.MODELS.values() for m in ms]
  for i, (name, options) in enumerate(models):
    model, folder = weights_cases_hf.make(name, options), tmp_path / str(i)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    read = weights.read(folder, mean="half").params
    in_memory, *_ = foreign.translate(
      hf.SERIES, foreign.state(model), config=config
    )
    assert in_memory.keys() == read.keys()
    for key, array in read.items():
      np.testing.assert_array_equal(in_memory[key], array, key)


S, B, L = (384, 12, 6), (768, 12, 12), (1024, 24, 16)
SWIGLU = dict(use_gated_mlp=True, hidden_act="silu", intermediate_size=8192)
# Class, (width, depth, heads), other options of its config, size in our table,
# and transformers' number of parameters.
PUBLISHED = [
  ("Dinov2Model", B, dict(image_size=518), "B/14", 86_580_480),
  (
    "Dinov2Model",
    (1536, 40, 24),
    dict(image_size=518, use_swiglu_ffn=True),
    "g2/14",
    1_136_480_768,
  ),
  (
    "Dinov2WithRegistersModel",
    L,
    dict(image_size=518, patch_size=14),
    "L/14",
    304_372_736,
  ),
  ("DINOv3ViTModel", S, dict(intermediate_size=1536), "S/16", 21_596_544),
  (
    "DINOv3ViTModel",
    (4096, 40, 32),
    SWIGLU | dict(query_bias=False, value_bias=False),
    "7B/16",
    6_716_035_072,
  ),
  (
    "CLIPVisionModelWithProjection",
    L,
    dict(intermediate_size=4096, patch_size=14, projection_dim=768),
    "L/14",
    303_966_208,
  ),
  (
    "SiglipVisionModel",
    (1152, 27, 16),
    dict(intermediate_size=4304, image_size=384, patch_size=14),
    "So400m/14",
    428_225_600,
  ),
  ("ViTMAEModel", L, dict(intermediate_size=4096), "L/16", 303_301_632),
]


@pytest.mark.parametrize(
  "name, size, options, variant, expected",
  [
    pytest.param(*row, marks=pytest.mark.nightly if i % 5 else pytest.mark.slow)
    for i, row in enumerate(PUBLISHED)
  ],
)
def test_published_sizes_are_named(name, size, options, variant, expected):
  """Every array of transformers' is read; its classes exist without memory."""
  import torch

  keys = ("hidden_size", "num_hidden_layers", "num_attention_heads")
  cls = getattr(transformers, name)
  if "DINOv3" in name:
    options = options | {"num_register_tokens": 4}
  config = cls.config_class(**dict(zip(keys, size, strict=True)), **options)
  with torch.device("meta"):
    theirs = cls(config).state_dict()
  arrays = {
    k: LazyArray(tuple(v.shape), np.dtype("f"), lambda: None)
    for k, v in theirs.items()
  }
  assert sum(a.size for a in arrays.values()) == expected
  about = json.loads(config.to_json_string())
  params, read, _ = foreign.translate(hf.SERIES, arrays, config=about)
  model = weights.identify(params, read)
  assert model.variant == variant
  mask = size[0] * ("mask_token" in str(list(arrays)))
  assert sum(a.size for a in params.values()) == expected - mask


# Class -> our model.
CARDS = {
  row[0]: row[1]
  for row in test_round_trip.NIGHTLY + test_round_trip.ROWS
  if row[0][0].isupper()
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

  hf_folder(
    tmp_path,
    (32, 32),
    model=model_config(**CARDS[name]),
    num_classes=3 * ("ForImageClass" in name),
  )
  vit = vit_jax.load(tmp_path, mean="half", verbose=False)
  code = model_card.text(vit, str(tmp_path)).split("```python\n")[1]
  lines = re.findall(r"^(?:model|logits|features) = .*", code, re.MULTILINE)
  images = foreign.image((32, 32))
  pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
  known = {name: getattr(transformers, name)}
  known["inputs"] = {"pixel_values": pixels}
  with torch.no_grad():
    exec("\n".join(lines), known)
  got = known["logits" if "logits" in known else "features"]
  assert foreign.error(vit(images)[0], got) < 1e-4
