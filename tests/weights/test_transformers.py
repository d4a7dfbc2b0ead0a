"""transformers' preprocessor_config.json, read, written, and with itself."""

import json

import numpy as np
import pytest
import torch_libraries
from PIL import Image
from weight_files import hf_folder

from vit_jax import weights
from vit_jax.data import pixels
from vit_jax.data.preprocessing import image_size
from vit_jax.weights import normalisation
from vit_jax.zoo.files import hf_preprocessing

transformers = torch_libraries.Later("transformers")
PILLOW = "decode(dct='accurate')|"  # what follows is Pillow's, too
SIZE = (24, 32)
WIDE = {"height": 24, "width": 32}
SQUARE = {"height": 40, "width": 40}
CROPPED = "resize_small_torch(36)|central_crop(32)"
SMALL_36 = {"shortest_edge": 36}
ALL = dict(
  do_resize=True,
  size=SMALL_36,
  resample=3,
  do_center_crop=True,
  crop_size=32,
  do_rescale=True,
  do_normalize=True,
  image_mean=[0.5] * 3,
  image_std=[0.5] * 3,
)


# What a processor's file states.


@pytest.mark.parametrize(
  "changes, mean, std",
  [
    ({}, 0.4, 0.2),
    ({"do_normalize": False}, 0.0, 1.0),
    # Values up to 255, here with the mean in the same unit.
    ({"do_rescale": False}, 0.4 / 255, 0.2 / 255),
    ({"rescale_factor": 1}, 0.4 / 255, 0.2 / 255),
    (  # in [-1, 1], and divided by the deviation twice
      {"image_processor_type": "EfficientNetImageProcessor"}
      | {"rescale_factor": 1 / 127.5, "rescale_offset": True},
      *(0.7, 0.02),
    ),
  ],
)
def test_the_normalisation_of_a_preprocessor(tmp_path, changes, mean, std):
  about = {"image_mean": [0.4] * 3, "image_std": [0.2] * 3} | changes
  result = weights.read(hf_folder(tmp_path, about=about))
  assert result.pixels.mean == pytest.approx((mean,) * 3)
  assert result.pixels.std == pytest.approx((std,) * 3)


def test_the_processor_of_transformers_5_takes_precedence(tmp_path):
  """CLIPProcessor and SiglipProcessor write processor_config.json alone."""
  folder = hf_folder(tmp_path, image=(32, 32))
  about = {"image_processor_type": "CLIPImageProcessor", **ALL}
  about |= {"image_mean": [0.4] * 3, "image_std": [0.2] * 3}
  nested = {"image_processor": about, "processor_class": "CLIPProcessor"}
  file = folder / "processor_config.json"
  file.write_text(json.dumps(nested))
  result = weights.read(folder)
  assert result.ops == PILLOW + CROPPED
  assert result.pixels == ((0.4,) * 3, (0.2,) * 3)

  file.write_text('{"processor_class": "CLIPProcessor"}')  # that of 4.x
  other = weights.read(folder)
  assert other.pixels != result.pixels and other.ops != result.ops


@pytest.mark.parametrize(
  "name, about, ops",
  [
    ("", {"size": 32}, "resize_torch(32, 'bilinear')"),
    ("", {"size": 32, "resample": 3, "crop_size": 9}, "resize_torch(32)"),
    ("", {"size": SMALL_36, "do_center_crop": True, "resample": 3}, CROPPED),
    (
      "",
      {"size": SQUARE, "do_center_crop": True, "crop_size": 32},
      "resize_torch(40, 'bilinear')|central_crop(32)",
    ),
    ("", {"size": {"shortest_edge": 32}}, None),
    ("", {"resample": 1}, None),
    # The type of the processor states the rest.
    (
      "CLIPFeatureExtractor",
      {"size": 36, "crop_size": 32, "do_center_crop": None, "resample": 2},
      "resize_small_torch(36, 'bilinear')|central_crop(32)",
    ),
    (
      "DeiTImageProcessor",
      {"size": 40, "crop_size": 32},
      "resize_torch(40)|central_crop(32)",
    ),
    ("DeiTFeatureExtractor", {}, None),  # 224 pixels
    ("ConvNextImageProcessor", ALL | {"size": 36}, None),
  ],
)
def test_the_operations_of_a_preprocessor(tmp_path, name, about, ops):
  key = "feature_extractor_type"
  if "Extractor" not in name:
    key = "image_processor_type"
  stated = {key: name, **about} if name else about
  result = weights.read(hf_folder(tmp_path, (32, 32), about=stated))
  assert result.ops == (ops and PILLOW + ops)
  notes = [n for n in result.notes if "which no operation here does" in n]
  assert len(notes) == (ops is None)
  if not ops and not name:
    assert all(f"{k}={v!r}" in notes[0] for k, v in about.items())
  # CLIP's own mean and deviation, if no others are stated.
  is_clip = result.pixels == normalisation.NAMED["clip"]
  assert is_clip == name.startswith("CLIP")
  assert not ops or image_size(result.ops) == (32, 32)


@pytest.mark.parametrize(
  "ops, size, resample, read",
  [
    ("decode|resize((24, 32))", WIDE, 2, "resize_torch((24, 32), 'bilinear')"),
    (
      PILLOW + "resize_small_torch(40)|central_crop_torch((24, 32))",
      {"shortest_edge": 40},
      3,
      "resize_small_torch(40)|central_crop((24, 32))",
    ),
    (  # a crop that an image may be too small for
      "decode|resize_small(28)|central_crop((24, 32))",
      WIDE,
      2,
      "resize_torch((24, 32), 'bilinear')",
    ),
  ],
)
def test_the_preprocessor_that_is_written(ops, size, resample, read):
  about, result = hf_preprocessing.write(ops, SIZE)
  assert (about["size"], about["resample"]) == (size, resample)
  assert result == hf_preprocessing.ops_of(json.loads(json.dumps(about)), SIZE)
  assert result == PILLOW + read
  assert about["rescale_factor"] * 255 == 1
  cropped = "shortest_edge" in size
  assert about.get("crop_size") == (WIDE if cropped else None)
  assert about.get("do_center_crop", False) == cropped
  kind = {True: "CLIP", False: "ViT"}[cropped]
  assert about["image_processor_type"] == f"{kind}ImageProcessor"


# transformers itself.


@pytest.mark.slow
@pytest.mark.parametrize(
  "about, size",
  [
    # What we write.
    ("resize_torch((24, 32))", SIZE),
    ("resize_small_torch(36, 'bilinear')|central_crop((24, 32))", SIZE),
    # Types whose defaults we know.
    *(
      ({"image_processor_type": f"{name}ImageProcessor"}, (224, 224))
      for name in "ViT DeiT CLIP Bit Siglip DINOv3ViT Beit".split()
    ),
    (  # DINOv2's
      {"image_processor_type": "BitImageProcessor"}
      | {"size": {"shortest_edge": 256}, "image_mean": [0.485, 0.456, 0.406]},
      (224, 224),
    ),
    (
      {"image_processor_type": "DeiTImageProcessor"}
      | {"size": 230, "do_normalize": False},
      (224, 224),
    ),
  ],
  ids=str,
)
def test_pixels_are_those_of_the_processor(tmp_path, about, size):
  """To a level of 255."""
  if isinstance(about, str):
    ops = PILLOW + about
    about, read = hf_preprocessing.write(ops, size)
    assert read == ops
  if "DINOv3" in about["image_processor_type"]:
    if not torch_libraries.torchvision_works():
      pytest.skip("its processor needs torchvision")
  complete = hf_preprocessing.complete(about)
  mean, std = 0.0, 1.0
  if complete.get("do_normalize", True):
    keys = ("image_mean", "image_std")
    mean, std = (np.array(complete.get(k, [0.5] * 3)) for k in keys)
  (tmp_path / hf_preprocessing.FILE).write_text(json.dumps(about))
  processor = transformers.AutoImageProcessor.from_pretrained(
    tmp_path, local_files_only=True
  )
  rng = np.random.default_rng(0)
  values = rng.integers(0, 256, (300, 430, 3), np.uint8)
  got = processor(Image.fromarray(values), return_tensors="np")
  ops = hf_preprocessing.ops_of(complete, size)
  result = (pixels.apply(values, ops) / 255 - mean) / std
  off = got["pixel_values"][0] - result.transpose(2, 0, 1)
  off = np.abs(off) * np.min(std) * 255
  # torchvision, where it is installed, has weights of 16 bits for bytes.
  assert off.max() < 1.001 and off.mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, about",
  [
    ("CLIP", {"size": SMALL_36, "resample": 3}),
    ("Bit", {"size": {"shortest_edge": 37}, "resample": 2}),
    ("DeiT", {"size": 41, "resample": 3}),
  ],
)
def test_crops_of_200_sizes_are_those_of_the_processor(name, about):
  """Half a pixel of the offset is rounded down; timm's is rounded to even."""
  rng = np.random.default_rng(0)
  about = about | {"do_center_crop": True, "crop_size": 32}
  theirs = getattr(transformers, f"{name}ImageProcessorPil")(**about)
  plain = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
  ops = hf_preprocessing.ops_of(about, (32, 32))
  for height, width in rng.integers(20, 200, (200, 2)):
    values = rng.integers(0, 256, (height, width, 3), np.uint8)
    (got,) = theirs(Image.fromarray(values), **plain)["pixel_values"]
    result = pixels.apply(values, ops).transpose(2, 0, 1)
    np.testing.assert_array_equal(result, got, f"{height} x {width}")
