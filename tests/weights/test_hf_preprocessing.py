"""Hugging Face's preprocessor_config.json, read and written."""

import json
import re

import pytest
from weight_files import assert_same, hf_folder, our_params

from vit_jax import weights
from vit_jax.config.preprocessing import image_size
from vit_jax.weights import hf_preprocessing

PILLOW = "decode(dct='accurate')|"  # what follows is Pillow's, too
SIZE = (24, 32)


@pytest.mark.parametrize("do_normalize", [True, False])
def test_hugging_face_s_preprocessor(tmp_path, do_normalize):
  folder = hf_folder(tmp_path / "m")
  about = {"image_mean": [0.4] * 3, "image_std": [0.2] * 3}
  about |= {"do_normalize": do_normalize}
  (folder / "preprocessor_config.json").write_text(json.dumps(about))
  (note,) = weights.read(folder).notes
  mean, std = ("0.4", "0.2") if do_normalize else ("0.0", "1.0")
  assert f"with mean [{mean}, " in note and f"deviation [{std}, " in note


SQUARE = {"height": 40, "width": 40}


@pytest.mark.parametrize(
  "about, ops",
  [
    ({"size": 32}, "resize_torch(32, 'bilinear')"),
    ({"size": 32, "resample": 3, "crop_size": 9}, "resize_torch(32)"),
    (
      {"size": [32, 32], "do_center_crop": None},
      "resize_torch(32, 'bilinear')",
    ),
    (
      {"size": {"shortest_edge": 36}, "do_center_crop": True, "resample": 3},
      "resize_small_torch(36)|central_crop_torch(32)",
    ),
    (
      {"size": SQUARE, "do_center_crop": True, "crop_size": 32},
      "resize_torch(40, 'bilinear')|central_crop_torch(32)",
    ),
    (
      {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
      "resize_torch(32, 'bilinear')",
    ),
    ({"size": SQUARE}, None),
    ({"size": {"shortest_edge": 32}}, None),
    ({"size": {"longest_edge": 32}}, None),
    ({"size": 24, "do_center_crop": True}, None),
    ({"do_center_crop": True, "crop_size": 24}, None),
    ({"do_resize": False}, None),
    ({"resample": 1}, None),
  ],
)
def test_hugging_face_s_images(tmp_path, about, ops):
  folder = hf_folder(tmp_path / "m", image=(32, 32))
  (folder / "preprocessor_config.json").write_text(json.dumps(about))
  found = weights.read(folder)
  assert found.ops == (ops and PILLOW + ops)
  assert [n.split(", which")[0] for n in found.notes] == [
    "preprocessor_config.json: got "
    + ", ".join(f"{k}={v!r}" for k, v in about.items())
  ] * (ops is None)
  if ops:
    assert image_size(found.ops) == (32, 32)


CROPPED = "resize_small_torch(36)|central_crop_torch(32)"
SAID = dict(
  do_resize=True,
  size={"shortest_edge": 36},
  resample=3,
  do_center_crop=True,
  crop_size=32,
  do_rescale=True,
  do_normalize=True,
  image_mean=[0.5] * 3,
  image_std=[0.5] * 3,
)


@pytest.mark.parametrize(
  "name, about, ops",
  [
    ("ViTFeatureExtractor", {"size": 32}, "resize_torch(32, 'bilinear')"),
    ("ViTImageProcessorFast", {"size": 32}, "resize_torch(32, 'bilinear')"),
    ("CLIPImageProcessor", {"size": 36, "crop_size": 32}, CROPPED),
    ("BitImageProcessorPil", {"size": 36, "crop_size": 32}, CROPPED),
    (
      "CLIPFeatureExtractor",
      {"size": 36, "crop_size": 32, "do_center_crop": None, "resample": 2},
      "resize_small_torch(36, 'bilinear')|central_crop_torch(32)",
    ),
    (
      "DeiTImageProcessor",
      {"size": 40, "crop_size": 32},
      "resize_torch(40)|central_crop_torch(32)",
    ),
    ("DeiTFeatureExtractor", {}, None),  # 224 pixels
    ("CLIPImageProcessor", {}, None),
    ("ConvNextImageProcessor", {"size": 32}, None),
    ("ConvNextImageProcessor", SAID | {"size": 36}, None),
    ("ConvNextImageProcessor", SAID, CROPPED),
  ],
)
def test_the_type_of_the_processor_tells_the_rest(tmp_path, name, about, ops):
  folder = hf_folder(tmp_path / "m", image=(32, 32))
  key = "feature_extractor_type"
  if "Extractor" not in name:
    key = "image_processor_type"
  about = {key: name, **about}
  (folder / "preprocessor_config.json").write_text(json.dumps(about))
  found = weights.read(folder)
  assert found.ops == (ops and PILLOW + ops)
  told = [n for n in found.notes if "which no operation here does" in n]
  assert len(told) == (ops is None)
  assert (f"{key}={name!r}" in str(told)) == (not ops and "ConvN" in name)
  # CLIP's own mean and deviation, where no others are stated.
  folded = [n for n in found.notes if "with mean [0.48145466, " in n]
  assert len(folded) == (name[:3] in ("CLI", "Bit"))


def test_hugging_face_without_a_preprocessor(tmp_path):
  folder = hf_folder(tmp_path / "m")
  (folder / "preprocessor_config.json").unlink()
  found = weights.read(folder)
  assert found.ops is None and not found.notes


@pytest.mark.parametrize(
  "about, text",
  [
    ({"size": "224"}, "size: got '224', expected whole numbers from 1."),
    ({"size": {"height": -1}}, "size.height: got -1, expected 1 or more"),
    ({"resample": "bicubic"}, "resample: got 'bicubic', expected a value of"),
    ({"do_center_crop": True, "crop_size": 0}, "crop_size: got 0, expected"),
    ({"rescale_factor": 0}, "rescale_factor: got 0, expected 1/255 or"),
  ],
)
def test_a_preprocessor_that_is_wrong(tmp_path, about, text):
  folder = hf_folder(tmp_path / "m")
  (folder / "preprocessor_config.json").write_text(json.dumps(about))
  with pytest.raises(ValueError, match=re.escape(text)):
    weights.read(folder)


@pytest.mark.parametrize(
  "about", [{"do_rescale": False}, {"rescale_factor": 1}]
)
def test_hugging_face_s_pixels_up_to_255(tmp_path, about):
  folder = hf_folder(tmp_path / "m")
  about |= {"image_mean": [127.5] * 3, "image_std": [127.5] * 3}
  (folder / "preprocessor_config.json").write_text(json.dumps(about))
  found = weights.read(folder)  # as it is: -1 to 1
  assert not found.notes
  assert_same(found, our_params((32, 48)))


WIDE = {"height": 24, "width": 32}


@pytest.mark.parametrize(
  "ops, size, resample, read",
  [
    ("decode|resize((24, 32))", WIDE, 2, "resize_torch((24, 32), 'bilinear')"),
    (
      "decode|resize((24, 32), 'bicubic', antialias=True)",
      WIDE,
      3,
      "resize_torch((24, 32))",
    ),
    (
      "decode|resize_small(40)|central_crop((24, 32))",  # by areas
      {"shortest_edge": 40},
      2,
      "resize_small_torch(40, 'bilinear')|central_crop_torch((24, 32))",
    ),
    (
      PILLOW + "resize_small_torch(40)|central_crop_torch((24, 32))",
      {"shortest_edge": 40},
      3,
      "resize_small_torch(40)|central_crop_torch((24, 32))",
    ),
    (  # a crop that an image may be too small for
      "decode|resize_small(28)|central_crop((24, 32))",
      WIDE,
      2,
      "resize_torch((24, 32), 'bilinear')",
    ),
    (
      "decode|resize((20, 28))|pad(2)",
      WIDE,
      2,
      "resize_torch((24, 32), 'bilinear')",
    ),
  ],
)
def test_the_preprocessor(ops, size, resample, read):
  about, found = hf_preprocessing.write(ops, SIZE)
  assert (about["size"], about["resample"]) == (size, resample)
  assert found == hf_preprocessing.ops_of(json.loads(json.dumps(about)), SIZE)
  assert found == PILLOW + read
  assert about["rescale_factor"] * 255 == 1
  cropped = "shortest_edge" in size
  assert about.get("crop_size") == (WIDE if cropped else None)
  assert about.get("do_center_crop", False) == cropped
  kind = {True: "CLIP", False: "ViT"}[cropped]
  assert about["image_processor_type"] == f"{kind}ImageProcessor"
