"""Bare files whose arrays name a family: its images are assumed, and said."""

import numpy as np
import pytest
from foreign import random_params

import vit_jax
from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.weights import normalisation, safetensors_file
from vit_jax.weights.weights_file import POS_EMBEDDING
from vit_jax.zoo.files import timm

SIZE = dict(variant="B/8", width=32, depth=1, mlp_dim=64, num_heads=2)
MODERN = dict(name="modern", **SIZE)
SCALED = dict(layer_scale=1e-5, gelu="erf")
CROP = "decode(dct='accurate')|resize_small_torch({})"
CROP += "|central_crop_torch(32)"


def bare(path, model, **changes):
  params = random_params(model, 3, (32, 32)) | changes
  safetensors_file.write(path, timm.write(params, model), {})
  return path


@pytest.mark.parametrize(
  "options, name, pixels, ops",
  [
    (dict(distilled=True), "DeiT", "imagenet", CROP.format(36)),
    (SCALED | dict(cls_row=False), "DeiT III", "imagenet", CROP.format(32)),
    (SCALED, "DINOv2", "imagenet", CROP.format(36)),
    (SCALED | dict(registers=2, cls_row=False), "DINOv2", "imagenet",
     CROP.format(36)),
    (SCALED | dict(registers=2, posemb="none", rope="dinov3", ln_eps=1e-5,
                   qkv_bias="no_key"), "DINOv3", "imagenet",
     "decode(dct='accurate')|resize_torch(256, 'bilinear')"),
    (dict(pre_norm=True, patch_bias=False, ln_eps=1e-5), "CLIP", "clip",
     CROP.format(32)),
    (dict(pool="gap", final_norm="pooled"), "MAE", "imagenet", CROP.format(36)),
    (dict(mlp="swiglu", rope="eva02", qkv_bias="no_key"), "EVA-02", "clip",
     CROP.format(32)),
  ],
)  # fmt: skip
def test_the_images_of_a_family(tmp_path, options, name, pixels, ops):
  model = model_config(**MODERN | options)
  path = bare(tmp_path / "x.safetensors", model)
  read = weights.read(path, options={"num_heads": 2})
  assert (read.pixels, read.ops) == (normalisation.NAMED[pixels], ops)
  first, *_ = read.notes
  text = f"nothing states how images were prepared: {name}'s are assumed, mean"
  assert first.startswith(text)
  assert "--config.init_mean" in first and ops in first
  stated = weights.read(path, options={"num_heads": 2}, mean="half")
  assert stated.notes[0].startswith(
    f"nothing states how images were prepared: {name}'s are assumed, {ops}"
  )
  assert (stated.pixels, stated.ops) == (normalisation.HALF, ops)
  vit = vit_jax.load(path, num_heads=2, verbose=False)
  assert vit.ops == ops
  # What the reader states of the model is what it was made with.
  assert vit.config == model_config(
    **MODERN | dict(layer_scale=model.layer_scale, gelu="erf") | options
  )


def test_a_series_whose_grid_only_the_images_state(tmp_path):
  model = model_config(**MODERN | SCALED | dict(cls_row=False))
  path = tmp_path / "x.safetensors"
  params = random_params(model, 3, (16, 48))
  safetensors_file.write(path, timm.write(params, model), {})
  options = {"num_heads": 2, "cls_row": False}
  read = weights.read(path, options=options)
  assert read.pixels == normalisation.NAMED["imagenet"]
  assert read.ops is None and read.image_size is None
  note = "DeiT III's are assumed, mean [0.485, 0.456, 0.406], deviation [0.229,"
  assert note in read.notes[0] and "0.225]; mean= (" in read.notes[0]
  stated = weights.read(path, options=options, mean="half")
  assert "DeiT III" not in str(stated.notes)
  vit = vit_jax.load(path, image_size=(16, 48), verbose=False, **options)
  assert (vit.image_size, vit.report.resized) == ((16, 48), {})
  with pytest.raises(ValueError, match="got 12 patches"):
    vit_jax.load(path, verbose=False, **options)


def test_images_of_tips(tmp_path):
  """One register: images in [0, 1], which DINOv2's four do not have."""
  options = SCALED | dict(registers=1, cls_row=False)
  path = bare(tmp_path / "x.safetensors", model_config(**MODERN | options))
  read = weights.read(path, options={"num_heads": 2})
  assert read.pixels == ((0.0,) * 3, (1.0,) * 3)
  assert "TIPS v2's are assumed" in read.notes[0]


def test_registers_without_a_class_token_name_no_family(tmp_path):
  options = SCALED | dict(registers=2, class_token=False, pool="gap")
  path = bare(tmp_path / "x.safetensors", model_config(**MODERN | options))
  read = weights.read(path, options={"num_heads": 2})
  assert read.pixels is None and normalisation.UNSTATED in read.notes


def test_mae_s_table_begins_with_zeros(tmp_path):
  model = model_config(**SIZE)
  table = random_params(model, 3, (32, 32))[POS_EMBEDDING]
  options = {"num_heads": 2}
  path = bare(tmp_path / "a.safetensors", model)
  assert weights.read(path, options=options).pixels is None
  table[:, 0] = 0
  path = bare(tmp_path / "b.safetensors", model, **{POS_EMBEDDING: table})
  read = weights.read(path, options=options)
  assert read.pixels == normalisation.NAMED["imagenet"]
  assert "MAE's are assumed" in read.notes[0]


def test_arrays_of_pre_training_are_listed(tmp_path):
  model = model_config(**SIZE)
  arrays = timm.write(random_params(model, 3, (32, 32)), model)
  arrays |= {n: np.ones(3, "f") for n in ("mask_token", "decoder_embed.bias")}
  path = tmp_path / "x.safetensors"
  safetensors_file.write(path, arrays, {})
  note, *_ = weights.read(path, options={"num_heads": 2}).notes
  assert note.startswith("left out: 'decoder_embed.bias', 'mask_token', which")
