"""Hugging Face's preprocessor_config.json, read and written."""

import json
import re

import pytest
from weight_files import assert_same, hf_folder, our_params

from vit_jax import weights
from vit_jax.data.preprocessing import image_size
from vit_jax.weights import normalisation
from vit_jax.weights.weights_file import Pixels
from vit_jax.zoo.files import hf_preprocessing

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


def test_the_processor_of_transformers_5_takes_precedence(tmp_path):
  """CLIPProcessor and SiglipProcessor write processor_config.json alone."""
  folder = hf_folder(tmp_path / "m", image=(32, 32))
  about = {"image_processor_type": "CLIPImageProcessor", **ALL}
  about |= {"image_mean": [0.4] * 3, "image_std": [0.2] * 3}
  nested = {"image_processor": about, "processor_class": "CLIPProcessor"}
  file = folder / "processor_config.json"
  file.write_text(json.dumps(nested))
  result = weights.read(folder)
  assert result.ops == PILLOW + CROPPED
  (note,) = result.notes
  assert "with mean [0.4, 0.4, 0.4] and deviation [0.2, 0.2, 0.2]" in note

  file.write_text('{"processor_class": "CLIPProcessor"}')  # that of 4.x
  other = weights.read(folder)
  assert "with mean [0.4" not in str(other.notes) and other.ops != result.ops


SQUARE = {"height": 40, "width": 40}
CROPPED = "resize_small_torch(36)|central_crop(32)"
WHOLE = "resize_torch(32, 'bilinear')"
ALL = dict(
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
    ("", {"size": 32}, WHOLE),
    ("", {"size": 32, "resample": 3, "crop_size": 9}, "resize_torch(32)"),
    (
      "",
      {"size": {"shortest_edge": 36}, "do_center_crop": True, "resample": 3},
      CROPPED,
    ),
    (
      "",
      {"size": SQUARE, "do_center_crop": True, "crop_size": 32},
      "resize_torch(40, 'bilinear')|central_crop(32)",
    ),
    (
      "",
      {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
      WHOLE,
    ),
    ("", {"size": {"shortest_edge": 32}}, None),
    ("", {"do_resize": False}, None),
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
    ("ConvNextImageProcessor", ALL, CROPPED),
  ],
)
def test_the_operations_of_a_preprocessor(tmp_path, name, about, ops):
  folder = hf_folder(tmp_path / "m", image=(32, 32))
  key = "feature_extractor_type"
  if "Extractor" not in name:
    key = "image_processor_type"
  stated = {key: name, **about} if name else about
  (folder / "preprocessor_config.json").write_text(json.dumps(stated))
  result = weights.read(folder)
  assert result.ops == (ops and PILLOW + ops)
  notes = [n for n in result.notes if "which no operation here does" in n]
  assert len(notes) == (ops is None)
  assert (f"{key}={name!r}" in str(notes)) == (not ops and "ConvN" in name)
  if not ops and not name:
    values = ", ".join(f"{k}={v!r}" for k, v in about.items())
    assert f"preprocessor_config.json: got {values}, which" in notes[0]
  # CLIP's own mean and deviation, if no others are stated.
  folded = [n for n in result.notes if "with mean [0.48145466, " in n]
  assert len(folded) == (name[:3] in ("CLI", "Bit"))
  if ops:
    assert image_size(result.ops) == (32, 32)


def test_a_grey_preprocessor_states_one_number():
  about = {"image_mean": [0.1307], "image_std": 0.3081}
  expected = Pixels((0.1307,), (0.3081,))
  assert hf_preprocessing.pixels(hf_preprocessing.complete(about)) == expected


@pytest.mark.parametrize(
  "about, mean, std",
  [
    ({"rescale_factor": 1 / 127.5, "rescale_offset": True}, 0.75, 0.03125),
    ({"include_top": False}, 0.5, 0.25),
    ({"do_normalize": False, "rescale_offset": True}, 1.0, 0.25),
    ({"do_rescale": False, "rescale_offset": True}, 0.5 / 255, 0.0625 / 255),
  ],
)
def test_the_processor_of_efficientnet(about, mean, std):
  about = {"image_processor_type": "EfficientNetImageProcessor", **about}
  about = hf_preprocessing.complete(ALL | {"image_std": [0.25] * 3} | about)
  got = hf_preprocessing.pixels(about)
  assert got == Pixels(pytest.approx((mean,) * 3), pytest.approx((std,) * 3))


def test_an_unknown_processor_states_no_normalisation(tmp_path):
  folder = hf_folder(tmp_path / "m", image=(32, 32))
  about = {"image_processor_type": "PvtImageProcessor", "size": 32}
  (folder / "preprocessor_config.json").write_text(json.dumps(about))
  first, second = weights.read(folder).notes
  assert "they are resized otherwise" in first
  assert second == normalisation.UNSTATED


def test_hugging_face_without_a_preprocessor(tmp_path):
  folder = hf_folder(tmp_path / "m")
  (folder / "preprocessor_config.json").unlink()
  result = weights.read(folder)
  assert result.ops is None and result.notes == (normalisation.UNSTATED,)


@pytest.mark.parametrize(
  "about, text",
  [
    ({"size": "224"}, "size: got '224', expected whole numbers from 1."),
    ({"resample": "bicubic"}, "resample: got 'bicubic', expected a value of"),
    ({"rescale_factor": 0}, "rescale_factor: got 0, expected 1/255 or"),
    ({"image_processor_type": 5}, "image_processor_type: got 5, expected a"),
  ],
)
def test_a_preprocessor_that_is_wrong(tmp_path, about, text):
  folder = hf_folder(tmp_path / "m")
  (folder / "preprocessor_config.json").write_text(json.dumps(about))
  with pytest.raises(ValueError, match=re.escape(text)):
    weights.read(folder)


@pytest.mark.parametrize(
  "about, text",
  [
    ({"resample": "bicubic"}, "resample: got 'bicubic', expected"),
    ({"size": {"shortest_edge": 0}}, "size: got [0], expected whole numbers"),
    ({"size": [3, 3, 3]}, "size: got (3, 3, 3), expected one side or two"),
    ({"rescale_factor": 0}, "rescale_factor: got 0, expected 1/255 or"),
    ({"do_resize": False}, "got do_resize=False, which no operation here does"),
  ],
)
def test_the_processor_s_file_is_named(tmp_path, about, text):
  folder = hf_folder(tmp_path / "m")
  file = folder / "processor_config.json"
  file.write_text(json.dumps({"image_processor": about}))
  try:
    got = weights.read(folder).notes[0]
  except ValueError as e:
    got = str(e).removeprefix(f"{folder}: ")
  assert got.startswith(f"processor_config.json: {text}")


@pytest.mark.parametrize(
  "about", [{"do_rescale": False}, {"rescale_factor": 1}]
)
def test_hugging_face_s_pixels_up_to_255(tmp_path, about):
  folder = hf_folder(tmp_path / "m")
  about |= {"image_mean": [127.5] * 3, "image_std": [127.5] * 3}
  (folder / "preprocessor_config.json").write_text(json.dumps(about))
  result = weights.read(folder)  # as it is: -1 to 1
  assert not result.notes
  assert_same(result, our_params((32, 48)))


WIDE = {"height": 24, "width": 32}


@pytest.mark.parametrize(
  "ops, size, resample, read",
  [
    ("decode|resize((24, 32))", WIDE, 2, "resize_torch((24, 32), 'bilinear')"),
    (
      "decode|resize_small(40)|central_crop((24, 32))",  # by areas
      {"shortest_edge": 40},
      2,
      "resize_small_torch(40, 'bilinear')|central_crop((24, 32))",
    ),
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
def test_the_preprocessor(ops, size, resample, read):
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
